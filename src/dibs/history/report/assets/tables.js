// Queues, advice, errors, workers, tenants and the slowest tasks.

/** A table of columns [title, class] and rows of cells; long ones end in a button that shows the rest. */
function table(name, columns, rows, most = Infinity) {
    const line = (row) => el("tr", {}, ...row.map((cell, index) => el("td", { class: columns[index][1] }, cell)));
    const body = el("tbody", {}, ...rows.slice(0, most).map(line));
    const head = el("tr", {}, ...columns.map(([title, kind]) => el("th", { class: kind, scope: "col" }, title)));
    const made = el(
        "div",
        {},
        el(
            "div",
            { class: "scroll", tabindex: "0", role: "region", "aria-label": name },
            el("table", {}, el("thead", {}, head), body),
        ),
    );
    if (rows.length > most) {
        const more = el("button", { type: "button", class: "more-button" }, `Show all ${count(rows.length)}`);
        more.addEventListener("click", () => {
            body.append(...rows.slice(most).map(line));
            more.remove();
        });
        made.append(more);
    }
    return made;
}

const none = (text) => el("p", { class: "none" }, text);
const number = (value, bad = false) => el("span", { class: value ? (bad ? "bad" : "") : "zero" }, count(value));
const bar = (part, name) =>
    el(
        "div",
        { class: "bar" },
        el("i", {}, el("b", { css: { width: `${part * 100}%`, background: `var(--${name})` } })),
        el("span", {}, share(part)),
    );

function queueTable(queues) {
    const rows = queues.map((queue) => {
        const wait = percentile([queue.waits], 0.95);
        const name =
            queue.command === null
                ? el("span", {}, `${plural(data.left_out.queues, "other queue")}`)
                : el(
                      "button",
                      { type: "button", class: "link", on: { click: () => choose(queue.tenant, queue.command) } },
                      own(queue.command),
                  );
        return [
            el("div", {}, name, el("div", { class: "sub" }, queue.tenant === null ? "" : own(queue.tenant))),
            spark(line([queue], "series", "arrivals", data.step_s, "sum"), "arrived"),
            number(queue.totals.arrivals),
            number(queue.totals.completions),
            number(queue.totals.failures, true),
            number(queue.totals.retries),
            number(queue.totals.expiries),
            number(queue.end.backlog),
            el("span", { class: wait > TARGET_MS ? "bad" : "" }, duration(wait)),
            duration(percentile([queue.runs], 0.95)),
        ];
    });
    const columns = [
        ["Queue", "wrap"],
        ["Arrivals", ""],
        ["Arrived", "n"],
        ["Completed", "n"],
        ["Failed", "n"],
        ["Retried", "n"],
        ["Lost leases", "n"],
        ["Waiting", "n"],
        ["p95 wait", "n"],
        ["p95 run", "n"],
    ];
    one("queues").replaceChildren(queues.length ? table("Queues", columns, rows, 20) : none("No queue did anything."));
}

function advice(queues) {
    const numbers = new Set(queues.map((queue) => data.queues.indexOf(queue)));
    const found = data.advice.filter((advice) => numbers.has(advice.queue));
    const short = found.filter((advice) => advice.kind === "short").length;
    const words = { short: "short", bursts: "bursts", ample: "ample", enough: "enough" };
    one("advice-said").textContent = found.length
        ? `${short ? plural(short, "queue") : "No queue"} needed more workers than ran, for ${aim()}.`
        : "";
    const item = (advice) =>
        el(
            "li",
            {},
            el("span", { class: `chip ${advice.kind}` }, words[advice.kind]),
            el(
                "p",
                {},
                ...advice.text.split("`").map((text, index) => (index % 2 ? own(text, { class: "mono" }) : text)),
            ),
        );
    const list = found.slice(0, 6).map(item);
    if (found.length > 6) {
        const more = el("li", {}, el("button", { type: "button" }, `Show all ${count(found.length)}`));
        more.firstChild.addEventListener("click", () => more.replaceWith(...found.slice(6).map(item)));
        list.push(more);
    }
    one("advice").replaceChildren(
        ...(list.length ? list : [el("li", { class: "none" }, "No delivery ended, so nothing can be said.")]),
    );
}

function errors() {
    const found = data.faults.filter(
        (fault) =>
            (!state.tenant || fault.tenant === state.tenant) && (!state.queue || fault.commands.includes(state.queue)),
    );
    const top = found.length ? found[0].count : 1;
    const sum = found.reduce((sum, fault) => sum + fault.count, 0);
    const shared = state.queue && found.some((fault) => fault.commands.length > 1);
    one("errors-said").textContent = found.length
        ? `${plural(found.length, "kind")} of fault, ${plural(sum, "delivery").replace("deliverys", "deliveries")}. Errors that differ only in ids, numbers and addresses are one kind.${shared ? " A fault that several queues have counts all of them." : ""}`
        : "";
    const item = (fault) =>
        el(
            "article",
            { class: "fault" },
            el(
                "div",
                { class: "count" },
                count(fault.count),
                el("i", { css: { width: `${(100 * fault.count) / top}%` } }),
            ),
            el(
                "div",
                { class: "what" },
                el("div", { class: "type" }, own(fault.error_type || "no class")),
                el("code", { class: "sample", dir: "auto" }, fault.sample || "no text"),
                el(
                    "div",
                    { class: "meta" },
                    el("span", {}, "in ", own(fault.commands.join(", ")), " of ", own(fault.tenant)),
                    el("span", {}, `${time(fault.first_seen)} to ${time(fault.last_seen)}`),
                    el("span", {}, `${plural(fault.tasks, "task")}, ${count(fault.deaths)} died`),
                    el("span", {}, "first: ", own(fault.sample_id, { class: "mono" })),
                ),
            ),
        );
    const list = el("div", {}, ...found.slice(0, 8).map(item));
    if (found.length > 8) {
        const more = el("button", { type: "button", class: "more-button" }, `Show all ${count(found.length)}`);
        more.addEventListener("click", () => more.replaceWith(...found.slice(8).map(item)));
        list.append(more);
    }
    one("errors").replaceChildren(found.length ? list : none("No delivery ended with an error."));
}

function workers(queues) {
    const numbers = new Set(queues.map((queue) => data.queues.indexOf(queue)));
    const busy = queues.reduce((sum, queue) => sum + queue.busy_ms, 0);
    const by = new Map();
    for (const worker of data.workers.filter((worker) => numbers.has(worker.queue))) {
        const sum = by.get(worker.worker) ?? {
            name: worker.worker,
            busy_ms: 0,
            deliveries: 0,
            failures: 0,
            lost: 0,
            queues: new Set(),
        };
        for (const name of ["busy_ms", "deliveries", "failures", "lost"]) sum[name] += worker[name];
        sum.queues.add(data.queues[worker.queue].command ?? "others");
        by.set(worker.worker, sum);
    }
    const found = [...by.values()].sort((left, right) => right.busy_ms - left.busy_ms);
    one("workers-said").textContent = found.length ? `Share of ${duration(busy)} of busy time.` : "";
    const rows = found.map((worker) => [
        el("div", {}, own(worker.name), el("div", { class: "sub" }, own([...worker.queues].join(", ")))),
        bar(busy ? worker.busy_ms / busy : 0, "running"),
        number(worker.deliveries),
        number(worker.failures),
        number(worker.lost, true),
    ]);
    const columns = [
        ["Worker", "wrap"],
        ["Share", ""],
        ["Deliveries", "n"],
        ["Errors", "n"],
        ["Lost leases", "n"],
    ];
    one("workers").replaceChildren(found.length ? table("Workers", columns, rows, 6) : none("No worker was busy."));
}

/** With a queue chosen, its tenants' parts are made of the queues; the lake sums up tenants over all queues. */
function tenants(queues) {
    let found = data.tenants.filter((tenant) => !state.tenant || tenant.tenant === state.tenant);
    if (state.queue) {
        const busy = queues.reduce((sum, queue) => sum + queue.busy_ms, 0);
        const wait = queues.reduce((sum, queue) => sum + queue.waits.sum_ms, 0);
        found = queues.map((queue) => {
            const tasks = queue.waits.counts.reduce((sum, value) => sum + value, 0);
            return {
                ...queue.totals,
                tenant: queue.tenant,
                work_share: busy ? queue.busy_ms / busy : 0,
                wait_share: wait ? queue.waits.sum_ms / wait : 0,
                wait_mean_ms: tasks ? queue.waits.sum_ms / tasks : null,
            };
        });
    }
    one("tenants-said").textContent = !found.length
        ? ""
        : state.queue
          ? "Of this queue: shares of busy time, and of the waits of the tasks that ended."
          : "Shares of all tenants' busy time, and of their waits.";
    const rows = found.map((tenant) => [
        own(tenant.tenant),
        bar(tenant.work_share, "running"),
        bar(tenant.wait_share, "waiting"),
        number(tenant.arrivals),
        number(tenant.failures, true),
        duration(tenant.wait_mean_ms),
    ]);
    const columns = [
        ["Tenant", "wrap"],
        ["Work", ""],
        ["Waiting", ""],
        ["Arrived", "n"],
        ["Failed", "n"],
        ["Mean wait", "n"],
    ];
    one("tenants").replaceChildren(found.length ? table("Tenants", columns, rows, 10) : none("Nobody had any work."));
}

function slowest() {
    const all = state.by === "run" ? data.longest_runs : data.longest_waits;
    const found = all
        .filter(
            (task) => (!state.tenant || task.tenant === state.tenant) && (!state.queue || task.command === state.queue),
        )
        .slice(0, 20);
    const rows = found.map((task) => [
        el("div", {}, own(task.command), el("div", { class: "sub" }, own(task.tenant))),
        duration(task.run_ms),
        duration(task.wait_ms),
        count(task.deliveries),
        el(
            "span",
            { class: task.outcome === "failed" ? "bad" : "" },
            own(task.outcome),
            task.error_type ? el("div", { class: "sub" }, own(task.error_type)) : null,
        ),
        time(task.ended_at),
        own(task.id, { class: "mono" }),
        own(task.worker ?? "–"),
    ]);
    const columns = [
        ["Queue", "wrap"],
        ["Ran", "n"],
        ["Waited", "n"],
        ["Deliveries", "n"],
        ["Outcome", ""],
        ["Ended (UTC)", "tight"],
        ["Task", "tight"],
        ["Last worker", "wrap"],
    ];
    one("slowest").replaceChildren(found.length ? table("Slowest tasks", columns, rows, 10) : none("No task ended."));
    pressed(one("slowest-by"), (button) => button.dataset.by === state.by);
}
