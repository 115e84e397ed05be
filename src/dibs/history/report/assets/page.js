"use strict";
// Draws the report from the data in the page. Texts of tasks are hostile: they only ever become text nodes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { tenant: "", queue: "", theme: "", by: "run", zoom: [0, 100], percentile: "p95" };
  const charts = new Map();
  const one = (id) => document.getElementById(id);

  // --------------------------------------------------------------------------------------------- elements

  /** An element: `class` and other attributes, `on` for listeners, `css` for style; children are nodes or texts. */
  function el(tag, given = {}, ...children) {
    const svg = ["svg", "path"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
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

  // ------------------------------------------------------------------------------------------------ words

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

  // ------------------------------------------------------------------------------------------------- data

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

  // --------------------------------------------------------------------------------------------- headline

  function spark(values, name) {
    const top = Math.max(...values.map((value) => value ?? 0), 1);
    const width = 120;
    const points = thinned(values, 60).map(
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
      ["failed", "Failed", brief(failed), failed ? "dead letters" : "none", series("failures", "sum"), failed > 0],
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
          el("div", { class: "label" }, el("span", { class: "dot", css: { background: `var(--${name})` } }), label),
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

  // ----------------------------------------------------------------------------------------------- charts

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
          lines: [{ name: "oldest_ms", label: "age of the oldest", colour: "age", zero: true, area: 0.08, width: 1.2 }],
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
            formatter: pane.unit === "ms" ? ticked : (value) => compact.format(value),
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

  function series(of, pane, first, last) {
    const values = of.log ? of.values.map((value) => (value === null ? null : Math.max(value, 1))) : of.values;
    const points = values.map((value, index) =>
      // A point between two gaps is no line: it is drawn as a dot.
      value !== null && (values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null
        ? { value: [of.times[index], value], symbol: "circle", symbolSize: 4 }
        : [of.times[index], value],
    );
    if (of.step) points.push([TO, values.at(-1)]);
    return {
      type: "line",
      name: of.label,
      xAxisIndex: of.pane,
      yAxisIndex: of.pane,
      symbol: "none",
      step: of.step ? "end" : false,
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

  const DURATIONS_S = [
    0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800,
  ];

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
          el("i", { class: "key", css: { background: `var(--${of.colour})`, opacity: String(of.strength ?? 1) } }),
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
    charts.set("overview", echarts.init(one("overview")));
    charts.get("overview").on("datazoom", (event) => zoomed(event.start, event.end));
  }

  function pressed(group, test) {
    for (const button of group.children) button.setAttribute("aria-pressed", String(test(button)));
  }

  // ----------------------------------------------------------------------------------------------- tables

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
        el("p", {}, ...advice.text.split("`").map((text, index) => (index % 2 ? own(text, { class: "mono" }) : text))),
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
        el("div", { class: "count" }, count(fault.count), el("i", { css: { width: `${(100 * fault.count) / top}%` } })),
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

  // ------------------------------------------------------------------------------------- notices and notes

  function notices() {
    if (!data.gaps.length) return;
    const gap = (of) => `${of.after ? time(of.after) : "the beginning"} to ${time(of.until)} (shard ${of.shard})`;
    one("notices").append(
      el(
        "div",
        { class: "notice", role: "note" },
        el("b", {}, `${plural(data.gaps.length, "gap")}: events were trimmed from the journal before they were read`),
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
      out.workers ? `${plural(out.workers, "less busy worker")} left out; shares are of everybody's busy time.` : null,
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

  // ---------------------------------------------------------------------------------------------- filters

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
})();
