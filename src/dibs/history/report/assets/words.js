// Elements, and numbers, durations and times as people read them. Texts of tasks are hostile: they only ever become
// text nodes.

const one = (id) => document.getElementById(id);

/** An element: `class` and other attributes, `on` for listeners, `css` for style; children are nodes or texts. */
function el(tag, given = {}, ...children) {
    const svg = ["svg", "path"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
        if (name === "on")
            for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
        else if (name === "css") Object.assign(node.style, value);
        else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
}

/** A text of somebody else's: its direction stays inside, and its length has a limit. */
const own = (text, given = {}) => el("bdi", given, shortened(text));
const shortened = (text) => (text.length > 160 ? `${text.slice(0, 160)}…` : text);

const colour = (() => {
    const probe = el("span", { hidden: "" });
    document.body.append(probe);
    return (name) => {
        probe.style.color = `var(--${name})`;
        return getComputedStyle(probe).color;
    };
})();

function faint(name, alpha) {
    const [red, green, blue] = colour(name).match(/[\d.]+/g);
    return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const count = (number) => whole.format(number);
const brief = (number) => (number < 1e6 ? count(number) : compact.format(number));
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const share = (part) => (part >= 1 ? "100 %" : `${Math.min(part * 100, 99.9).toFixed(1)} %`);

function duration(ms) {
    if (ms === null || ms === undefined) return "–";
    if (ms < 999.5) return `${Math.round(ms)} ms`;
    if (ms < 9950) return `${(ms / 1000).toFixed(1).replace(/\.0$/, "")} s`;
    const pair = (large, unit, small, smallUnit) => `${large} ${unit}${small ? ` ${small} ${smallUnit}` : ""}`;
    const seconds = Math.round(ms / 1000);
    if (seconds < 60) return `${seconds} s`;
    if (seconds < 3600) return pair(Math.floor(seconds / 60), "min", seconds % 60, "s");
    const minutes = Math.round(seconds / 60);
    if (minutes < 1440) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
    const hours = Math.round(minutes / 60);
    return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

const DAYS = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const two = (number) => String(number).padStart(2, "0");
const clock = (date) => `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}`;
const day = (date) => `${DAYS[date.getUTCDay()]} ${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]}`;
const time = (at) => ((date) => `${day(date)} ${clock(date)}`)(new Date(at));
const step = (seconds) => ({ 60: "minute", 300: "5 min", 3600: "hour", 86400: "day" })[seconds];
