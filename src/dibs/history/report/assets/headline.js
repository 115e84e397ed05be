// The numbers on top.

function spark(values, name) {
    const top = Math.max(...values.map((value) => value ?? 0), 1);
    const width = 120;
    const points = thinned(values.length === 1 ? [values[0], values[0]] : values, 60).map(
        (value, index, all) =>
            `${((index / Math.max(all.length - 1, 1)) * width).toFixed(1)} ${(22 - (20 * (value ?? 0)) / top).toFixed(1)}`,
    );
    const drawn = `M${points.join("L")}`;
    return el(
        "svg",
        { viewBox: `0 0 ${width} 24`, preserveAspectRatio: "none", "aria-hidden": "true" },
        el("path", { d: `${drawn}L${width} 24L0 24Z`, css: { fill: `var(--${name})`, opacity: "0.13" } }),
        el("path", {
            d: drawn,
            "vector-effect": "non-scaling-stroke",
            css: { fill: "none", stroke: `var(--${name})`, strokeWidth: "1.4" },
        }),
    );
}

/** At most so many values: the highest of each stretch. */
function thinned(values, most) {
    const each = Math.ceil(values.length / most);
    return Array.from({ length: Math.ceil(values.length / each) }, (_, index) =>
        Math.max(...values.slice(index * each, (index + 1) * each).map((value) => value ?? 0)),
    );
}

function headline(queues) {
    const series = (name, how) => line(queues, "series", name, data.step_s, how);
    const completed = total(queues, "completions");
    const failed = total(queues, "failures");
    const retried = total(queues, "retries");
    const lost = total(queues, "expiries");
    const ended = completed + failed;
    const waiting = queues.reduce((sum, queue) => sum + queue.end.backlog, 0);
    const oldest = Math.max(0, ...queues.map((queue) => queue.end.oldest_ms ?? 0));
    const wait = percentile(
        queues.map((queue) => queue.waits),
        0.95,
    );
    const run = percentile(
        queues.map((queue) => queue.runs),
        0.95,
    );
    const numbers = new Set(queues.map((queue) => data.queues.indexOf(queue)));
    const short = data.advice.filter((advice) => advice.kind === "short" && numbers.has(advice.queue));
    const hours = short.reduce((sum, advice) => sum + advice.hours, 0);
    const tiles = [
        [
            "arrived",
            "Arrived",
            brief(total(queues, "arrivals")),
            rate(total(queues, "arrivals")),
            series("arrivals", "sum"),
        ],
        [
            "completed",
            "Completed",
            brief(completed),
            ended ? `${share(completed / ended)} of ended` : "",
            series("completions", "sum"),
        ],
        ["failed", "Failed", brief(failed), failed ? "became dead letters" : "none", series("failures", "sum"), failed > 0],
        [
            "retried",
            "Retried",
            brief(retried),
            lost ? `${plural(lost, "lost lease")}` : "no lost leases",
            series("retries", "sum"),
        ],
        [
            "waiting",
            "Waiting",
            brief(waiting),
            waiting ? `oldest ${duration(oldest)}` : "at the end",
            series("backlog", "sum"),
        ],
        ["waiting", "p95 wait", duration(wait), `aim: ${duration(TARGET_MS)}`, series("wait_p95_ms"), wait > TARGET_MS],
        [
            "running",
            "p95 run",
            duration(run),
            run === null
                ? ""
                : `median ${duration(
                      percentile(
                          queues.map((queue) => queue.runs),
                          0.5,
                      ),
                  )}`,
            series("run_p95_ms"),
        ],
        [
            "needed",
            "Short of workers",
            short.length ? plural(short.length, "queue") : "none",
            short.length ? `${plural(hours, "hour")} in all` : "by Erlang C",
            line(queues, "capacity", "needed", data.capacity_step_s, "sum"),
            short.length > 0,
        ],
    ];
    one("headline").replaceChildren(
        ...tiles.map(([name, label, value, more, values, bad]) =>
            el(
                "div",
                { class: bad ? "tile alarm" : "tile" },
                el(
                    "div",
                    { class: "label" },
                    el("span", { class: "dot", css: { background: `var(--${name})` } }),
                    label,
                ),
                el("div", { class: "value" }, value),
                el("div", { class: "more" }, more),
                spark(values, name),
            ),
        ),
    );
}

function rate(number) {
    const minutes = Math.max((END - BEGIN) / 60000, 1);
    const each = number / minutes;
    return each >= 10 ? `${count(each)} a minute` : `${each.toFixed(1)} a minute`;
}
