"""What reaches the screen: tables that fit it, plain columns in a pipe, JSON, and progress on stderr.

Whatever a task carries may be hostile to a terminal: every text that is shown goes through :func:`clean`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

GAP = "  "
UNLIMITED = 1_000_000

STYLES = {
    "PENDING": "cyan", "IN_PROGRESS": "yellow", "COMPLETED": "green", "FAILED": "red", "CANCELLED": "magenta",
}  # fmt: skip


class Column(NamedTuple):
    """A column of a table. With `least`, it is shortened down to so many cells before the table is too wide."""

    title: str
    right: bool = False
    least: int = 0


Cell = str | tuple[str, str]
"""A text, or a text and its style."""


# ------------------------------------------------------------------------------------------------------- tables


def echo_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, head: bool = True, empty: str | None = None
) -> None:
    """Prints a table: styled on a terminal and no wider than it, plain in a pipe; says `empty` if it has no rows."""
    if not rows and empty is not None:
        note(empty)
        return
    if is_terminal():
        echo_rich(table(columns, rows, screen_width(), head=head))
        return
    for line in _laid_out(columns, rows, screen_width(), head=head):
        click.echo(GAP.join(text for text, _ in line).rstrip())


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, *, head: bool = True) -> Text:
    """Returns a table as styled text, one line a row, no wider than `width` where its columns allow."""
    from rich.text import Text

    lines = (
        Text(GAP).join(Text(text, style=style) for text, style in line)
        for line in _laid_out(columns, rows, width, head=head)
    )
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def echo_fields(fields: Iterable[tuple[str, Cell]]) -> None:
    """Prints names and values, one pair a line; long values go on under themselves."""
    shown = [(name, _plain(cell), _style(cell)) for name, cell in fields]
    indent = max(len(name) for name, _, _ in shown) + len(GAP)
    for name, text, style in shown:
        for index, line in enumerate(_wrapped(text, screen_width() - indent)):
            echo_styled((name if index == 0 else "").ljust(indent), "bold", end="")
            echo_styled(line, style)


def echo_styled(text: str, style: str = "", *, end: str = "\n") -> None:
    """Prints a text that may be styled, however long its lines are."""
    if style and is_terminal():
        from rich.text import Text

        text = _rendered(Text(text, style=style), UNLIMITED)
    click.echo(text + end, nl=False)


def echo_rich(renderable: RenderableType) -> None:
    """Prints what rich draws, no wider than the screen. Rendered first and written here: a broken pipe is ours to
    handle."""
    text = _rendered(renderable, screen_width())
    click.echo(text if is_terminal() else "\n".join(line.rstrip() for line in text.split("\n")))


def _rendered(renderable: RenderableType, width: int) -> str:
    from rich.console import Console

    page = io.StringIO()
    options = {"highlight": False, "markup": False, "emoji": False}
    console = Console(file=page, force_terminal=is_terminal(), width=width, **options)  # type: ignore[arg-type]
    console.print(renderable, end="", no_wrap=True, overflow="ellipsis")
    return page.getvalue().removesuffix("\n")


def is_terminal() -> bool:
    """Whether somebody looks at stdout (or asked for colours by FORCE_COLOR)."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty()


def screen_width() -> int:
    """How wide a line may be; in a pipe there is no limit but that of COLUMNS."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if not sys.stdout.isatty():
        return UNLIMITED
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def _laid_out(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, *, head: bool
) -> Iterator[list[tuple[str, str]]]:
    from rich.cells import cell_len

    lines = [[(clean(_plain(cell)), _style(cell)) for cell in row] for row in rows]
    widths = [
        max([cell_len(column.title), *(cell_len(line[index][0]) for line in lines)])
        for index, column in enumerate(columns)
    ]
    widths = _fitted(columns, widths, width)
    if head:
        lines.insert(0, [(column.title, "bold") for column in columns])
    for line in lines:
        yield [
            (_sized(text, size, right=column.right), style)
            for (text, style), size, column in zip(line, widths, columns, strict=True)
        ]


def _fitted(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Takes what is too much, cell by cell, from whichever column that may be shortened is the widest."""
    fitted = list(widths)
    excess = sum(fitted) + len(GAP) * (len(fitted) - 1) - width
    for _ in range(excess):
        spare = [index for index, column in enumerate(columns) if column.least and fitted[index] > column.least]
        if not spare:
            break
        fitted[max(spare, key=lambda index: fitted[index])] -= 1
    return fitted


def _sized(text: str, size: int, *, right: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > size:
        return set_cell_size(text, size - 1) + "…" if size else ""
    padding = " " * (size - cell_len(text))
    return padding + text if right else text + padding


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells: between words where a cell is a character, else wherever the line is full."""
    import textwrap

    from rich.cells import cell_len, chop_cells

    lines = []
    for line in map(clean, text.split("\n")):
        if cell_len(line) <= width:
            lines.append(line)
        elif line.isascii():
            lines += textwrap.wrap(line, max(width, 20), drop_whitespace=False)
        else:
            lines += chop_cells(line, max(width, 20))
    return lines


def _plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _style(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell[1]


# ------------------------------------------------------------------------------------------------------ JSON


def echo_json(value: Any) -> None:
    """Prints one JSON document."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def echo_json_line(value: Any) -> None:
    """Prints one line of a stream."""
    click.echo(msgspec.json.encode(value))


class JsonList:
    """One document ``{"NAME": […], …}`` whose list may be of any length: its items are written as they come."""

    def __init__(self, name: str) -> None:
        self._separator = "\n"
        click.echo(f'{{"{name}": [', nl=False)

    def add(self, item: Any) -> None:
        """Writes one item."""
        click.echo(self._separator + msgspec.json.encode(item).decode(), nl=False)
        self._separator = ",\n"

    def end(self, **others: Any) -> None:
        """Closes the list, then writes the document's other fields."""
        rest = msgspec.json.encode(others).decode()[1:]
        click.echo(f"\n], {rest}" if others else "\n]}")


# --------------------------------------------------------------------------------------------- text for people


def clean(text: str) -> str:
    """Returns `text` in one line and without anything that could steer a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return " " if char == "\t" else char.encode("unicode_escape").decode()


def count_text(number: float) -> str:
    """``12,304``."""
    return f"{number:,.0f}"


def size_text(size_bytes: int) -> str:
    """``1.5 MiB``: three digits or so."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration_text(seconds: float) -> str:
    """``250ms``, ``12s``, ``5m``, ``3h``, ``2d``: the largest unit that is not zero."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def exact_duration_text(seconds: float) -> str:
    """The duration as one would write it: with the largest unit that is exact."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"


def exact_size_text(size_bytes: int) -> str:
    """The size as one would write it: with the largest unit that is exact."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes and size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)


def age_text(at_ms: int | None, now_ms: int | None = None) -> str:
    """How long ago that was, or a dash."""
    if at_ms is None:
        return "-"
    return duration_text(max(0, (now_ms or time.time_ns() // 1_000_000) - at_ms) // 1000)


def plural(number: int, noun: str) -> str:
    """``1 task``, ``2,000 tasks``."""
    return f"{count_text(number)} {noun}{'' if number == 1 else 's'}"


# --------------------------------------------------------------------------------------------------- progress


def note(text: str) -> None:
    """Tells a person something that is not the output: on stderr."""
    click.echo(text, err=True)


@contextlib.contextmanager
def progress(what: str, total: int | None = None, *, counted: bool = True) -> Iterator[Callable[[int], None]]:
    """Shows on stderr, if that is a terminal, how far a long operation is, or only for how long it has been going on
    if nothing can be `counted`; yields the function that adds to it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bars = [BarColumn(), MofNCompleteColumn()] if total else [TextColumn("{task.completed:,}")] if counted else []
    shown = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *bars,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with shown:
        line = shown.add_task(what, total=total)
        yield lambda step: shown.advance(line, step)


@contextlib.contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on stderr, if that is a terminal, what is being done and for how long; yields the function that says
    something else."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        line = shown.add_task(what, total=None)
        yield lambda text: shown.update(line, description=text)


@contextlib.contextmanager
def rows_progress(what: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Shows on stderr, if that is a terminal, how far a file is read, how many rows that were, and how many a second;
    yields the function that adds a part of the `total`, and rows."""
    if not sys.stderr.isatty():
        yield lambda _size, _rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    shown = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *([BarColumn(), TaskProgressColumn()] if total else []),
        TextColumn("{task.fields[rows]:,} rows, {task.fields[rate]:,.0f} rows/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    begin_s, count = time.monotonic(), 0
    with shown:
        line = shown.add_task(what, total=total, rows=0, rate=0.0)

        def advance(size: int, rows: int) -> None:
            nonlocal count
            count += rows
            shown.update(line, advance=size, rows=count, rate=count / max(0.001, time.monotonic() - begin_s))

        yield advance
