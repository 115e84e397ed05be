// The data in the page, and what of it is chosen.

const data = JSON.parse(one("data").textContent);
const state = { tenant: "", queue: "", theme: "", by: "run", zoom: [0, 100], percentile: "p95" };

const START = data.first ? Date.parse(`${data.first}T00:00:00Z`) : 0;
const BEGIN = Date.parse(data.begin);
const END = Date.parse(data.end);
const FROM = START + Math.floor((BEGIN - START) / 1000 / data.step_s) * data.step_s * 1000;
const TO = Math.max(END, FROM + data.step_s * 1000);
const TARGET_MS = data.target_wait_s * 1000;

const chosen = () =>
    data.queues.filter(
        (queue) => (!state.tenant || queue.tenant === state.tenant) && (!state.queue || queue.command === state.queue),
    );

const total = (queues, name) => queues.reduce((sum, queue) => sum + queue.totals[name], 0);

/** The steps of the span, as times. */
function steps(stepS) {
    const first = Math.floor((BEGIN - START) / 1000 / stepS);
    const last = Math.floor((END - START) / 1000 / stepS);
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
}

/** A column of several queues at each step: counts are added up, of everything else the highest counts. */
function line(queues, part, name, stepS, how) {
    const all = steps(stepS);
    const values = new Array(all.length).fill(how === "sum" ? 0 : null);
    for (const queue of queues) {
        const column = queue[part][name];
        queue[part].at.forEach((at, row) => {
            const index = at - all[0];
            const value = column[row];
            if (value === null || index < 0 || index >= values.length) return;
            values[index] = how === "sum" ? values[index] + value : Math.max(values[index] ?? 0, value);
        });
    }
    return values;
}

/** What this part of the tasks took no longer than: see `percentile_ms` in ended.py. */
function percentile(spreads, part) {
    const counts = new Map();
    let all = 0;
    for (const spread of spreads) {
        spread.classes.forEach((at, index) => {
            counts.set(at, (counts.get(at) ?? 0) + spread.counts[index]);
            all += spread.counts[index];
        });
    }
    let seen = 0;
    for (const at of [...counts.keys()].sort((left, right) => left - right)) {
        seen += counts.get(at);
        if (seen >= part * all) return at === 0 ? 0 : 2 ** ((at + 0.5) / 16) - 1;
    }
    return null;
}

function highest(values) {
    let found = -1;
    values.forEach((value, index) => {
        if (value !== null && (found < 0 || value > values[found])) found = index;
    });
    return found < 0 ? null : { value: values[found], index: found };
}
