"""What the demo shows: lines that stay, and on a terminal a live table under them."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Sequence

from msgspec.structs import astuple
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dibs.cli.output import Cell, Column, table
from dibs.demo.account import Account
from dibs.demo.crew import Crew
from dibs.demo.record import Record
from dibs.task import Stats

WIDTH_MAX = 80


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process here; the workers must be ended first.
        raise BrokenPipeError


class Screen:
    """Tells the story. In a pipe: plain lines, without colours. `aside`: on standard error."""

    def __init__(self, *, aside: bool = False) -> None:
        stream = sys.stderr if aside else sys.stdout
        self.is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._console = _Console(
            stderr=aside, highlight=False, markup=False, emoji=False, no_color=None if self.is_live else True
        )
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._began_s

    def phase(self, number: int, count: int, name: str, why: str) -> None:
        """Says in one line what is about to be seen, and why it matters."""
        self._console.print()
        self._wrapped(f"{number}/{count} ", f"{name}: {why}", style="bold")

    def say(self, text: str) -> None:
        """A line that stays, with its time."""
        self._wrapped(f"{self.elapsed_s:6.1f} s  ", text)

    def line(self, text: str = "", style: str = "") -> None:
        """A line as it is: what is to be copied is not wrapped."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _wrapped(self, head: str, text: str, style: str = "") -> None:
        width = min(self._console.width, WIDTH_MAX)
        filled = textwrap.fill(text, max(width, 30), initial_indent=head, subsequent_indent=" " * len(head))
        self.line(filled, style)

    def warn(self, text: str) -> None:
        """Something is wrong."""
        self.line(text, "bold red")

    # ---------------------------------------------------------------------------------------------------- the live part

    def start(self) -> None:
        """Shows the live part from now on, on a terminal."""
        if self.is_live:
            self._live.start()

    def stop(self) -> None:
        """Takes the live part away."""
        self._live.stop()

    def draw(self, stats: Stats, record: Record, crew: Crew) -> None:
        """Brings the live part up to date."""
        rows = [
            (queue.command, queue.ready, queue.delayed, queue.leased, queue.dead, record.completed[queue.command])
            for queue in stats.queues
        ]
        shown = self._table(("ready", "delayed", "leased", "dead", "done"), rows)
        told = (f"{name} {record.by_worker[name]}{' (killed)' if name in crew.killed else ''}" for name in crew.names)
        workers = Text("done by " + ", ".join(told) if crew.names else "no worker yet")
        self._live.update(Group(Text(), shown, workers), refresh=True)

    # ------------------------------------------------------------------------------------------------------ the summary

    def summary(self, account: Account) -> None:
        """Shows where every task went, and whether the books are right."""
        rows = [astuple(row) for row in (*account.rows, account.total)]
        titles = ("enqueued", "completed", "dead", "cancelled", "waiting", "deliveries")
        self.line()
        self._console.print(self._table(titles, rows), soft_wrap=True)
        self.line()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in account.deliveries.items())
        self._wrapped("Deliveries: ", f"{account.total.deliveries:,} = {reasons}.")
        self.line()
        for check in account.checks:
            if check.holds:
                self._wrapped("ok    ", check.text)
            else:
                self._wrapped("WRONG ", check.text, "bold red")

    def _table(self, titles: Sequence[str], rows: Sequence[Sequence[str | int]]) -> Text:
        columns = [Column("queue", least=5), *(Column(title, right=True, least=4) for title in titles)]
        cells: list[list[Cell]] = [[_cell(value) for value in row] for row in rows]
        return table(columns, cells, min(self._console.width, WIDTH_MAX))


def _cell(value: str | int) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if value else "·"
