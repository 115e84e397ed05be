// How the charts are drawn: figures, axes, lines, tooltips, their numbers as tables, and the zoom of all of them.

const charts = new Map();

function figures() {
    for (const figure of document.querySelectorAll("[data-chart]")) {
        const chart = CHARTS[figure.dataset.chart];
        const drawing = el("div", { class: "chart", role: "img" });
        const table = el("div", { class: "numbers" });
        const details = el("details", { class: "details" }, el("summary", {}, "Numbers"), table);
        const said = el("p", { class: "said" });
        const legend = el("div", { class: "legend", "aria-hidden": "true" });
        const choice = el(
            "div",
            { role: "group", "aria-label": "Percentile" },
            ...["p50", "p95", "p99"].map(percentileButton),
        );
        figure.append(
            el("figcaption", {}, el("h2", {}, chart.title), legend, chart.several ? choice : null, said),
            drawing,
            details,
        );
        const drawn = {
            chart,
            drawing,
            said,
            legend,
            choice,
            table,
            details,
            echart: echarts.init(drawing, null, { renderer: "canvas" }),
        };
        details.addEventListener("toggle", () => numbers(drawn));
        charts.set(figure.dataset.chart, drawn);
    }
}

function percentileButton(name) {
    const set = () => {
        state.percentile = name;
        drawAll();
    };
    return el("button", { type: "button", "data-percentile": name, on: { click: set } }, name);
}

const key = (of) =>
    el(
        "span",
        {},
        el("i", { class: "key", css: { background: `var(--${of.colour})`, opacity: String(of.strength ?? 1) } }),
        own(of.label),
    );

function draw(drawn, queues) {
    const part = drawn.chart.part ?? "series";
    const stepS = part === "capacity" ? data.capacity_step_s : data.step_s;
    const times = steps(stepS).map((at) => START + at * stepS * 1000);
    drawn.lines = drawn.chart.panes.flatMap((pane, index) =>
        (pane.lines instanceof Function ? pane.lines(queues) : pane.lines).map((of) => {
            const values = line(of.of ?? queues, part, of.name, stepS, of.how);
            return {
                ...of,
                pane: index,
                unit: pane.unit,
                log: pane.log,
                times,
                values: of.zero ? values.map((value) => value ?? 0) : values,
            };
        }),
    );
    drawn.legend.replaceChildren(...drawn.lines.map(key));
    const several = Boolean(drawn.chart.several) && queues.length > 1;
    drawn.choice.hidden = !several;
    drawn.legend.parentNode.classList.toggle("several", several);
    pressed(drawn.choice, (button) => button.dataset.percentile === state.percentile);
    drawn.said.textContent = drawn.chart.said(drawn.lines, queues);
    drawn.drawing.setAttribute(
        "aria-label",
        `${drawn.chart.title}. ${drawn.said.textContent} The numbers are in the table below.`,
    );
    drawn.echart.setOption(option(drawn), { notMerge: true });
    numbers(drawn);
}

function option(drawn) {
    const panes = drawn.chart.panes;
    const heights = panes.map(
        (pane, index) =>
            pane.part ?? 1 - panes.reduce((sum, other, at) => sum + (at === index ? 0 : (other.part ?? 0)), 0),
    );
    const free = drawn.drawing.clientHeight - 10 - 24 - 16 * (panes.length - 1);
    let top = 10;
    const grids = heights.map((height) => {
        const grid = { left: 58, right: 16, top, height: free * height, outerBoundsMode: "none" };
        top += free * height + 16;
        return grid;
    });
    const text = { color: colour("dim"), fontSize: 11, fontFamily: getComputedStyle(document.body).fontFamily };
    return {
        animation: false,
        useUTC: true,
        textStyle: { fontFamily: text.fontFamily },
        grid: grids,
        axisPointer: {
            link: [{ xAxisIndex: "all" }],
            lineStyle: { color: colour("dim"), type: "solid", opacity: 0.5 },
            label: { show: false },
        },
        tooltip: {
            trigger: "axis",
            confine: true,
            backgroundColor: colour("card"),
            borderColor: colour("line"),
            padding: [8, 12],
            transitionDuration: 0,
            formatter: (found) => tip(drawn, found),
        },
        xAxis: panes.map((_, index) => ({
            type: "time",
            gridIndex: index,
            minInterval: 60000,
            min: FROM,
            max: TO,
            axisLabel:
                index === panes.length - 1
                    ? { ...text, hideOverlap: true, showMinLabel: true, formatter: tick }
                    : { show: false },
            axisLine: { lineStyle: { color: colour("line") } },
            axisTick: { show: false },
            splitLine: { show: false },
            splitNumber: drawn.drawing.clientWidth < 500 ? 3 : 6,
        })),
        yAxis: panes.map((pane, index) => {
            const { axisLabel, ...ends } = scale(
                pane,
                drawn.lines.filter((of) => of.pane === index),
            );
            return {
                type: pane.log ? "log" : "value",
                gridIndex: index,
                min: 0,
                axisTick: { show: false },
                ...ends,
                axisLabel: {
                    ...text,
                    formatter:
                        pane.unit === "ms" ? ticked : (value) => (value < 1e4 ? count(value) : compact.format(value)),
                    hideOverlap: true,
                    ...axisLabel,
                },
                splitLine: { lineStyle: { color: colour("line"), opacity: 0.8 } },
                axisLine: { show: false },
            };
        }),
        dataZoom: [
            {
                type: "inside",
                xAxisIndex: panes.map((_, index) => index),
                disabled: true,
                start: state.zoom[0],
                end: state.zoom[1],
                filterMode: "none",
            },
        ],
        series: drawn.lines.map((of, index) =>
            series(of, panes[of.pane], drawn.lines[index - 1]?.pane !== of.pane, of === drawn.lines.at(-1)),
        ),
    };
}

/** So few steps are drawn as steps: a slope between two minutes would tell of something that was not. */
const FEW = 60;

function series(of, pane, first, last) {
    const values = of.log ? of.values.map((value) => (value === null ? null : Math.max(value, 1))) : of.values;
    const few = values.length <= FEW;
    const stepped = of.step || (few && !of.log);
    const points = values.map((value, index) =>
        // A point between two gaps is no line: it is drawn as a dot.
        value !== null && !stepped && (values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null
            ? { value: [of.times[index], value], symbol: "circle", symbolSize: few ? 7 : 4 }
            : [of.times[index], value],
    );
    if (stepped) points.push([TO, values.at(-1)]);
    return {
        type: "line",
        name: of.label,
        xAxisIndex: of.pane,
        yAxisIndex: of.pane,
        symbol: "none",
        step: stepped ? "end" : false,
        data: points,
        stack: of.stack ? `pane${of.pane}` : undefined,
        lineStyle: {
            width: of.stack ? 0.5 : (of.width ?? 1.4),
            color: colour(of.colour),
            opacity: of.strength ?? 1,
            type: of.dash ?? "solid",
        },
        itemStyle: { color: colour(of.colour), opacity: of.strength ?? 1 },
        areaStyle: of.area || of.stack ? { color: colour(of.colour), opacity: of.stack ? 0.8 : of.area } : undefined,
        emphasis: { disabled: true },
        markArea: first ? gaps() : undefined,
        markLine:
            pane.target && last
                ? {
                      silent: true,
                      symbol: "none",
                      data: [{ yAxis: TARGET_MS }],
                      lineStyle: { color: colour("needed"), type: [5, 4], width: 1.2 },
                      label: {
                          formatter: `aim ${duration(TARGET_MS)}`,
                          position: "insideStartTop",
                          color: colour("needed"),
                          fontSize: 11,
                      },
                  }
                : undefined,
    };
}

/** What the lake does not know is shaded. */
function gaps() {
    if (!data.gaps.length) return undefined;
    const area = (gap) => [
        { xAxis: Math.max(gap.after ? Date.parse(gap.after) : BEGIN, BEGIN) },
        { xAxis: Math.min(Date.parse(gap.until), END) },
    ];
    return { silent: true, itemStyle: { color: faint("retried", 0.12) }, data: data.gaps.map(area) };
}

const DURATIONS_S = [0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];

const TICKS_MS = [1, 10, 100, 1e3, 1e4, 6e4, 6e5, 36e5, 36e6, 864e5, 864e6];
const FINE_MS = [
    ...TICKS_MS,
    2,
    5,
    20,
    50,
    200,
    500,
    2e3,
    5e3,
    2e4,
    12e4,
    3e5,
    12e5,
    18e5,
    72e5,
    18e6,
    72e6,
    1728e5,
    432e6,
];

/** Ends and ticks of an axis: durations have round numbers of their own. */
function scale(pane, lines) {
    const most = Math.max(...lines.map((of) => highest(of.values)?.value ?? 0), 0);
    if (pane.log) {
        const values = [
            ...lines.flatMap((of) => of.values).filter((value) => value !== null),
            ...(pane.target ? [TARGET_MS] : []),
        ];
        const [least, largest] = values.reduce(
            ([low, high], value) => [Math.min(low, value), Math.max(high, value)],
            [Infinity, 10],
        );
        const [min, max] = [Math.max(Math.min(least, largest / 10) * 0.7, 1), largest * 1.3];
        const customValues = max / min > 3000 ? TICKS_MS : FINE_MS;
        return { min, max, axisTick: { show: false, customValues }, axisLabel: { customValues } };
    }
    if (pane.unit !== "ms") return { minInterval: 1, splitNumber: pane.part ? 2 : 4, max: most ? undefined : 4 };
    const interval = DURATIONS_S.find((seconds) => seconds * 3000 >= Math.max(most, 1000)) ?? 604800;
    return { interval: interval * 1000, max: Math.max(Math.ceil(most / (interval * 1000)), 1) * interval * 1000 };
}

function ticked(ms) {
    if (ms === 0) return "0";
    if (ms < 1000) return `${ms} ms`;
    if (ms < 60000) return `${ms / 1000} s`;
    if (ms < 3600000) return `${+(ms / 60000).toFixed(ms < 600000 ? 1 : 0)} min`;
    if (ms < 172800000) return `${+(ms / 3600000).toFixed(1)} h`;
    return `${+(ms / 86400000).toFixed(1)} d`;
}

function tick(at) {
    const date = new Date(at);
    return date.getUTCHours() || date.getUTCMinutes() ? clock(date) : day(date);
}

const shown = (of, value) =>
    value === null || value === undefined ? "–" : of.unit === "ms" ? duration(value) : count(value);

function tip(drawn, found) {
    const index = Math.min(found[0].dataIndex, drawn.lines[0].times.length - 1);
    return el(
        "div",
        { class: "tip" },
        el("b", {}, `${time(drawn.lines[0].times[index])} UTC`),
        ...drawn.lines.map((of) =>
            el(
                "div",
                {},
                el("i", {
                    class: "key",
                    css: { background: `var(--${of.colour})`, opacity: String(of.strength ?? 1) },
                }),
                own(of.label),
                el("span", {}, shown(of, of.values[index])),
            ),
        ),
    );
}

/** The chart as a table of at most 48 rows, made when somebody opens it. */
function numbers(drawn) {
    if (!drawn.details.open) return;
    const times = drawn.lines[0].times;
    const each = Math.ceil(times.length / 48);
    const rows = Array.from({ length: Math.ceil(times.length / each) }, (_, index) => index * each).map((from) => [
        time(times[from]),
        ...drawn.lines.map((of) => {
            const values = of.values.slice(from, from + each).filter((value) => value !== null);
            if (!values.length) return "–";
            const adds = of.how === "sum" && !["backlog", "running", "ran", "needed"].includes(of.name);
            return shown(of, adds ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values));
        }),
    ]);
    drawn.table.replaceChildren(
        table(
            `${drawn.chart.title}: numbers`,
            [["From (UTC)", "tight"], ...drawn.lines.map((of) => [of.label, "n"])],
            rows,
        ),
    );
}

function overview(queues) {
    const values = line(queues, "series", "arrivals", data.step_s, "sum");
    const times = steps(data.step_s).map((at) => START + at * data.step_s * 1000);
    const drawn = charts.get("overview");
    drawn.setOption(
        {
            animation: false,
            useUTC: true,
            grid: { left: 4, right: 4, top: 2, bottom: 2 },
            xAxis: { type: "time", show: false, min: FROM, max: TO },
            yAxis: { show: false },
            dataZoom: [
                {
                    type: "slider",
                    left: 8,
                    right: 8,
                    top: 4,
                    bottom: 4,
                    height: 36,
                    start: state.zoom[0],
                    end: state.zoom[1],
                    filterMode: "none",
                    brushSelect: false,
                    showDetail: true,
                    labelFormatter: (at) => time(at),
                    textStyle: { color: colour("dim"), fontSize: 11 },
                    borderColor: colour("line"),
                    backgroundColor: "transparent",
                    fillerColor: faint("arrived", 0.08),
                    dataBackground: {
                        lineStyle: { color: colour("ran"), opacity: 0.6 },
                        areaStyle: { color: colour("ran"), opacity: 0.15 },
                    },
                    selectedDataBackground: {
                        lineStyle: { color: colour("arrived") },
                        areaStyle: { color: colour("arrived"), opacity: 0.2 },
                    },
                    handleStyle: { color: colour("card"), borderColor: colour("dim") },
                    moveHandleSize: 0,
                },
            ],
            series: [
                {
                    type: "line",
                    symbol: "none",
                    lineStyle: { opacity: 0 },
                    data: values.map((value, index) => [times[index], value]),
                    silent: true,
                },
            ],
        },
        { notMerge: true },
    );
}

function zoomed(start, end) {
    state.zoom = [start, end];
    for (const [name, drawn] of charts)
        if (name !== "overview") drawn.echart.dispatchAction({ type: "dataZoom", start, end });
    pressed(one("zoom"), (button) => Math.abs(end - 100) < 0.01 && Math.abs(start - +button.dataset.start) < 0.01);
}

function zooms() {
    const hours = (END - BEGIN) / 3600000;
    const choices = [
        ["All", hours],
        ["7 d", 168],
        ["24 h", 24],
        ["6 h", 6],
        ["1 h", 1],
    ].filter(([label, size]) => label === "All" || size < hours);
    const button = ([label, size]) => {
        const start = label === "All" ? 0 : 100 * (1 - size / hours);
        const set = () => charts.get("overview").dispatchAction({ type: "dataZoom", start, end: 100 });
        const name = label === "All" ? "the whole span" : `the last ${label}`;
        return el(
            "button",
            {
                type: "button",
                "data-start": start,
                "aria-label": name,
                "aria-pressed": String(label === "All"),
                on: { click: set },
            },
            label,
        );
    };
    one("zoom").append(...choices.map(button));
    one("zoom").hidden = choices.length === 1;
    charts.set("overview", echarts.init(one("overview")));
    charts.get("overview").on("datazoom", (event) => zoomed(event.start, event.end));
}

function pressed(group, test) {
    for (const button of group.children) button.setAttribute("aria-pressed", String(test(button)));
}
