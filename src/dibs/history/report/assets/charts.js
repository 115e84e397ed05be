// What the charts show: their lines, and the sentence above each.

const QUEUES_MAX = 6;

/** Percentiles of one queue, or one of them for each of the busiest: those of different queues cannot be added up. */
function percentiles(name, kind) {
    return (queues) =>
        queues.length === 1
            ? [
                  ["p50", 0.65, 1.2],
                  ["p95", 1, 1.8],
                  ["p99", 0.85, 1.2],
              ].map(([label, strength, width]) => ({
                  name: `${kind}_${label}_ms`,
                  label,
                  colour: name,
                  strength,
                  width,
                  dash: label === "p99" ? [3, 3] : null,
              }))
            : queues.slice(0, QUEUES_MAX).map((queue, index) => ({
                  name: `${kind}_${state.percentile}_ms`,
                  label: label(queue, queues),
                  colour: `q${index}`,
                  of: [queue],
                  width: 1.3,
              }));
}

/** A queue's name, with its tenant's where another has the same. */
function label(queue, queues) {
    if (queue.command === null) return "others";
    const twins = queues.filter((other) => other.command === queue.command);
    return twins.length > 1 ? `${queue.command} (${queue.tenant})` : queue.command;
}

const which = (queues) => {
    if (queues.length === 1) return "";
    return queues.length > QUEUES_MAX ? `The ${QUEUES_MAX} busiest of ${count(queues.length)} queues. ` : "";
};

const CHARTS = {
    flow: {
        title: "Throughput",
        panes: [
            {
                lines: [
                    { name: "arrivals", label: "arrived", colour: "arrived", how: "sum" },
                    { name: "completions", label: "completed", colour: "completed", how: "sum", area: 0.1 },
                ],
            },
            {
                part: 0.3,
                lines: [
                    { name: "retries", label: "retried", colour: "retried", how: "sum", stack: true },
                    { name: "failures", label: "failed", colour: "failed", how: "sum", stack: true },
                    { name: "expiries", label: "lost leases", colour: "lost", how: "sum" },
                ],
            },
        ],
        said(lines) {
            const most = highest(lines[0].values);
            return most.value
                ? `Per ${step(data.step_s)}. Most arrived ${time(lines[0].times[most.index])}: ${count(most.value)}.`
                : `Per ${step(data.step_s)}. Nothing arrived.`;
        },
    },
    backlog: {
        title: "Backlog",
        panes: [
            {
                lines: [
                    { name: "backlog", label: "waiting", colour: "waiting", how: "sum", area: 0.16 },
                    { name: "running", label: "running", colour: "running", how: "sum" },
                ],
            },
            {
                part: 0.34,
                unit: "ms",
                lines: [
                    {
                        name: "oldest_ms",
                        label: "age of the oldest",
                        colour: "age",
                        zero: true,
                        area: 0.08,
                        width: 1.2,
                    },
                ],
            },
        ],
        said(lines) {
            const most = highest(lines[0].values);
            if (!most.value) return "Nothing waited at the end of any minute.";
            const oldest = highest(lines[2].values);
            return `Most waited ${time(lines[0].times[most.index])}: ${count(most.value)}. The oldest had waited ${duration(oldest.value)}.`;
        },
    },
    wait: {
        title: "Wait before a delivery",
        several: true,
        panes: [{ unit: "ms", log: true, target: true, lines: percentiles("waiting", "wait") }],
        said(lines, queues) {
            const known = queues.length === 1 ? [lines[1]] : lines;
            const points = known.flatMap((of) => of.values.filter((value) => value !== null));
            const over = points.filter((value) => value > TARGET_MS).length;
            if (!points.length) return "No delivery began.";
            const name = queues.length === 1 ? "p95" : state.percentile;
            return `${which(queues)}${name} was ${over ? `over ${duration(TARGET_MS)} at ${share(over / points.length)} of the points` : `never over ${duration(TARGET_MS)}`}.`;
        },
    },
    run: {
        title: "Run of a delivery",
        several: true,
        panes: [{ unit: "ms", log: true, lines: percentiles("running", "run") }],
        said(lines, queues) {
            const known = queues.length === 1 ? [lines[1]] : lines;
            const tops = known.map((of) => ({ of, most: highest(of.values) })).filter((top) => top.most);
            if (!tops.length) return "No delivery ended.";
            const { of, most } = tops.reduce((left, right) => (right.most.value > left.most.value ? right : left));
            const name = queues.length === 1 ? "p95" : `${state.percentile} of ${of.label}`;
            return `${which(queues)}Highest ${name}: ${duration(most.value)}, ${time(of.times[most.index])}.`;
        },
    },
    capacity: {
        title: "Workers needed and running",
        part: "capacity",
        panes: [
            {
                lines: [
                    { name: "ran", label: "ran (most at once)", colour: "ran", how: "sum", step: true, area: 0.14 },
                    { name: "needed", label: "needed", colour: "needed", how: "sum", step: true, width: 1.8 },
                ],
            },
        ],
        said: () => `By the ${step(data.capacity_step_s)}, added up over the queues; for ${aim()}.`,
    },
};

const aim = () => `a p${+(data.target_share * 100).toFixed(2)} wait under ${duration(TARGET_MS)}`;
