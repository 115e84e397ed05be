"""The chart: small multiples, one question each, with the baselines of the same run in grey."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from msgspec import Struct

from bench.figures import Figure, Results, readable

STORE, MEMORY, STEADY, BASE = "#1f5fa8", "#8ab6e0", "#2f8f6b", "#b5b5b5"
COLUMNS = 2


def draw(results: Results, path: Path) -> None:
    """Draws what the results hold into a PNG; bars show medians, ticks the best."""
    mpl.use("Agg")
    panels = [(panel, found) for panel in PANELS if (found := panel.of(results))]
    if not panels:
        return
    rows = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    heights = [max(len(found) for _, found in row) + 3.5 for row in rows]
    canvas = Canvas(figsize=(15, 0.27 * sum(heights) + 1.0), layout="constrained")
    grid = canvas.add_gridspec(len(rows), COLUMNS, height_ratios=heights)
    for number, (panel, found) in enumerate(panels):
        _fill(canvas.add_subplot(grid[number // COLUMNS, number % COLUMNS]), panel, found)
    machine = results.machine
    canvas.suptitle(
        f"dibs {results.versions.get('dibs', '')} · {results.date[:10]} · {machine.cpu}, {machine.cores} cores · "
        f"{machine.file_system}\nbars: median of the rounds, tick: best; grey: baselines of the same run; in brackets "
        "the ratio to the first of them",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=110)


def _fill(axes: Axes, panel: Panel, figures: list[Figure]) -> None:
    positions = range(len(figures))
    axes.barh(positions, [one.median for one in figures], color=[_colour(one) for one in figures], height=0.72)
    axes.plot([one.best for one in figures], positions, "|", color="black", markersize=9)
    axes.set_yticks(positions, [one.case.replace(panel.drop, "") for one in figures], fontsize=9)
    axes.invert_yaxis()
    axes.set_title(f"{panel.title}\n", fontsize=11, loc="left", fontweight="bold")
    axes.text(0, 1.01, panel.subtitle, transform=axes.transAxes, fontsize=9, color="#555555", va="bottom")
    widest = max(max(one.median, one.best) for one in figures)
    axes.set_xlim(0, widest * 1.45)
    for position, one in zip(positions, figures, strict=True):
        end = max(one.median, one.best) + widest * 0.015
        axes.text(end, position, _label(one), va="center", fontsize=8.5)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def _label(one: Figure) -> str:
    """The value, and the first ratio: that to the floor, where there is one."""
    ratio = next((f"  ({readable(ratio)} x {base})" for base, ratio in one.ratios.items()), "")
    return readable(one.median) + ratio


def _colour(one: Figure) -> str:
    if one.case.startswith(("LMDB floor", "SQLite", "drain, store alone")):
        return BASE
    if "pruned" in one.case:
        return STEADY
    return MEMORY if one.case.startswith("memory") else STORE


# -------------------------------------------------------------------------------------------------------------- panels


class Panel(Struct, frozen=True):
    """One question: the figures of a scenario whose case contains, or ends with, one of the parts."""

    title: str
    unit: str
    scenario: str
    parts: tuple[str, ...] = ("",)
    drop: str = ""
    """What every label would repeat."""
    more_is_better: bool = False

    @property
    def subtitle(self) -> str:
        return f"{self.unit}, {'more' if self.more_is_better else 'less'} is better"

    def of(self, results: Results) -> list[Figure]:
        return [one for one in results.of(self.scenario) if any(part in f"{one.case}$" for part in self.parts)]


PANELS = [
    Panel("Full cycles, 500 tasks per call", "cycles/s", "cycle", (" 500 per",), ", 500 per call", more_is_better=True),
    Panel("Full cycles, 50 tasks per call", "cycles/s", "cycle", (" 50 per",), ", 50 per call", more_is_better=True),
    Panel("Full cycles, 1 task per call", "cycles/s", "cycle", (" 1 per", " 64 per"), more_is_better=True),
    Panel("One durable cycle, one caller", "ms", "latency", ("cycle p",), ", cycle"),
    Panel("Its verbs", "ms", "latency", ("enqueue p", "claim p", "complete p"), "lmdb, "),
    Panel("Wake-up of another process", "ms", "wakeup", (" p50$", " p99$")),
    Panel("A claim against the backlog: 100 at once", "µs per task", "backlog", ("of 100$",), ", claims of 100"),
    Panel("A claim against the backlog: one by one", "µs per task", "backlog", ("of 1$",), ", claims of 1"),
    Panel("Single enqueues beside a busy process", "ms", "contend", (" p50$", " p99$")),
    Panel("A sweep that finds nothing", "µs", "sweep"),
    Panel("Tasks end to end", "tasks/s", "tasks", ("map", "drain"), more_is_better=True),
    Panel("A call and its answer", "ms", "tasks", ("call", "LMDB floor")),
    Panel("Rows of a load", "rows/s", "loads", ("plain enqueues", "load, ", "map", "--from"), more_is_better=True),
    Panel("Claimed from a load", "tasks/s", "loads", ("claim and complete",), more_is_better=True),
    Panel("Others while a load is put in and claimed", "ms", "loads", (", p99$", ", max$")),
    Panel("Disk and memory", "MB per million tasks", "footprint"),
]
