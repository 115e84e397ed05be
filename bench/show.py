"""Progress while a run goes on, and the table at its end: with rich where there is a terminal for it, else plain."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from bench.figures import Figure, Results, readable


class Progress:
    """One line that says what is being done; one line that stays for each scenario."""

    def __init__(self) -> None:
        self._status: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            try:
                from rich.console import Console
            except ImportError:
                return self
            self._status = Console(stderr=True).status("")
            self._status.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def done(self, scenario: str, figures: list[Figure], took_s: float) -> None:
        print(f"{scenario}: {len(figures)} figures in {took_s:.1f} s", file=sys.stderr, flush=True)


def print_table(results: Results) -> None:
    """Prints every figure: best, median, and what it is beside its baselines."""
    print()
    for line in plain_table(results.figures):
        print(line)
    machine = results.machine
    print(f"\n{results.date} · {machine.cpu}, {machine.cores} cores · {machine.kernel} · {machine.file_system}")
    print(f"revision {results.revision} · {noise(results)} · took {results.took_s} s")


def plain_table(figures: Iterable[Figure]) -> list[str]:
    """Returns the lines of the table, a scenario's figures under its name."""
    rows = [cells(figure) for figure in figures]
    head = ("", "best", "median", "unit", "ratio")
    widths = [max(len(row[n]) for row in [head, *(row[1:] for row in rows)]) for n in range(5)]
    lines, scenario = [], ""
    for row in rows:
        if row[0] != scenario:
            scenario = row[0]
            lines += ["", _line((scenario, *head[1:]), widths)]
        lines.append(_line(("  " + row[1], *row[2:]), widths))
    return lines


def noise(results: Results) -> str:
    """Says how busy others kept the machine."""
    before, after = results.fsync_ms
    return f"load before {results.load_before}, one fsync {before} ms before and {after} ms after"


def cells(figure: Figure) -> tuple[str, str, str, str, str, str]:
    """Returns scenario, case, best, median, unit and ratios as texts."""
    ratios = [f"{readable(ratio)} x {base}" for base, ratio in figure.ratios.items()]
    said = "; ".join([*ratios, *([figure.note] if figure.note else [])])
    return figure.scenario, figure.case, readable(figure.best), readable(figure.median), figure.unit, said


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    case, best, median, unit, ratio = row
    return f"{case:<{widths[0] + 2}}  {best:>{widths[1]}}  {median:>{widths[2]}}  {unit:<{widths[3]}}  {ratio}".rstrip()
