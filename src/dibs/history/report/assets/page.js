// The page: notices, notes, filters and colours; here it starts.

function notices() {
    if (!data.gaps.length) return;
    const gap = (of) => `${of.after ? time(of.after) : "the beginning"} to ${time(of.until)} (shard ${of.shard})`;
    one("notices").append(
        el(
            "div",
            { class: "notice", role: "note" },
            el(
                "b",
                {},
                `${plural(data.gaps.length, "gap")}: events were trimmed from the journal before they were read`,
            ),
            `Counts are too low, and waits and runs that reach into a gap are missing: ${data.gaps.slice(0, 5).map(gap).join("; ")}${data.gaps.length > 5 ? `; and ${data.gaps.length - 5} more` : ""}. The charts shade them.`,
        ),
    );
}

function notes() {
    const out = data.left_out;
    const cut = [
        out.queues
            ? `The ${count(out.queues)} least busy queues are shown as one, and only while no filter is set.`
            : null,
        out.faults ? `${plural(out.faults, "rarer kind")} of fault left out.` : null,
        out.workers
            ? `${plural(out.workers, "less busy worker")} left out; shares are of everybody's busy time.`
            : null,
        out.tenants ? `${plural(out.tenants, "less busy tenant")} left out.` : null,
    ];
    const said = [
        "All times are UTC, from the store's clock. The last step of a chart may not be over.",
        data.step_s === 60
            ? "Charts have a point for each minute. Several queues together: counts, backlog and running are added up; of ages the highest is shown. Percentiles of different queues are not mixed: each has its line."
            : `Charts have a point for each ${step(data.step_s)}, made of minutes: counts are added up, and of backlog, running, ages and percentiles the highest minute is shown. Several queues together: counts, backlog and running are added up; of ages the highest is shown. Percentiles of different queues are not mixed: each has its line.`,
        data.step_s === 60
            ? null
            : "The highest of the minutes' p95 is a bound: of all deliveries of that step, at least 95 of 100 took no longer.",
        "p95 wait and p95 run on top and in the list of queues are counted from every task that ended in the span: all its waits or runs together, to within 2.2 %.",
        `Workers needed are by Erlang C, hour by hour, for ${aim()}; a worker here does one delivery at a time. What ran is the most that were busy at once: idle workers leave no trace.`,
        "A queue is short if its hourly p95 wait was over the aim and fewer ran than were needed.",
        "Tasks of an error group are counted by day: one that failed on two days counts twice. The slowest are the first 20 of each queue.",
        ...cut,
    ];
    one("notes").append(...said.filter(Boolean).map((text) => el("li", {}, text)));
}

function choose(tenant, queue) {
    state.tenant = tenant;
    state.queue = queue;
    filters();
    update();
    one("headline").focus({ preventScroll: true });
    scrollTo({ top: 0 });
}

function filters() {
    const named = data.queues.filter((queue) => queue.tenant !== null);
    const unique = (names) => [...new Set(names)].sort((left, right) => left.localeCompare(right));
    const commands = unique(
        named.filter((queue) => !state.tenant || queue.tenant === state.tenant).map((queue) => queue.command),
    );
    if (!commands.includes(state.queue)) state.queue = "";
    fill(one("tenant"), unique(named.map((queue) => queue.tenant)), state.tenant);
    fill(one("queue"), commands, state.queue);
    one("theme").value = state.theme;
}

function fill(select, names, value) {
    select.replaceChildren(
        el("option", { value: "" }, "all"),
        ...names.map((name) => el("option", { value: name }, shortened(name))),
    );
    select.value = value;
    select.classList.toggle("on", Boolean(value));
}

/** The choices are in the address, so that a link or a reload keeps them. */
function remember() {
    const kept = new URLSearchParams();
    for (const name of ["tenant", "queue", "theme"]) if (state[name]) kept.set(name, state[name]);
    history.replaceState(null, "", `#${kept}`);
}

function recall() {
    const kept = new URLSearchParams(location.hash.slice(1));
    const tenant = kept.get("tenant") ?? "";
    state.tenant = data.queues.some((queue) => queue.tenant === tenant) ? tenant : "";
    state.queue = kept.get("queue") ?? "";
    state.theme = ["light", "dark"].includes(kept.get("theme")) ? kept.get("theme") : "";
}

function themed() {
    if (state.theme) document.documentElement.dataset.theme = state.theme;
    else delete document.documentElement.dataset.theme;
}

function update() {
    const queues = chosen();
    remember();
    headline(queues);
    drawAll(queues);
    advice(queues);
    queueTable(queues);
    errors();
    workers(queues);
    tenants(queues);
    slowest();
}

function drawAll(queues = chosen()) {
    overview(queues);
    for (const [name, drawn] of charts) if (name !== "overview") draw(drawn, queues);
}

function listen() {
    one("tenant").addEventListener("change", (event) => {
        state.tenant = event.target.value;
        filters();
        update();
    });
    one("queue").addEventListener("change", (event) => {
        state.queue = event.target.value;
        filters();
        update();
    });
    one("slowest-by").append(
        ...[
            ["run", "run"],
            ["wait", "wait"],
        ].map(([by, label]) =>
            el(
                "button",
                {
                    type: "button",
                    "data-by": by,
                    on: {
                        click: () => {
                            state.by = by;
                            slowest();
                        },
                    },
                },
                label,
            ),
        ),
    );
    addEventListener("resize", () => {
        for (const [name, drawn] of charts) (name === "overview" ? drawn : drawn.echart).resize();
        drawAll();
    });
}

function colours() {
    const redraw = () => {
        themed();
        remember();
        if (data.begin) drawAll();
    };
    one("theme").addEventListener("change", (event) => {
        state.theme = event.target.value;
        redraw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

function nothing() {
    one("body").hidden = true;
    one("headline").hidden = true;
    one("tenant").parentNode.hidden = true;
    one("queue").parentNode.hidden = true;
    document.querySelector("footer").hidden = true;
    one("span").textContent = "nothing is known yet";
    one("notices").append(
        el(
            "div",
            { class: "card welcome" },
            el("h2", {}, "Nothing here yet"),
            el(
                "p",
                { class: "said" },
                "The lake knows of no events in these days. Run ",
                el("code", {}, "dibs history run"),
                ", or ask for other days.",
            ),
        ),
    );
}

function start() {
    one("lake").textContent = data.lake;
    recall();
    themed();
    filters();
    colours();
    notices();
    if (!data.begin) {
        nothing();
        return;
    }
    one("span").textContent = `${time(data.begin)} to ${time(data.end)} UTC`;
    figures();
    zooms();
    listen();
    notes();
    update();
}

start();
