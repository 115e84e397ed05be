"""Files of rows: JSON lines, CSV and Parquet, read a block at a time, so that none has to fit into memory."""

from __future__ import annotations

import csv
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import click

from dibs.errors import CodecError, InvalidInput, MissingDriver
from dibs.task import BATCH_MAX

STDIN = "-"
READ_BYTES = 1 << 20
#: Where no end of a row is in sight, it is no file of lines.
LINE_MAX_BYTES = 64 << 20
ARROW_BATCH = 10 * BATCH_MAX

FORMAT_OF = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_BOM = b"\xef\xbb\xbf"


class Bad(NamedTuple):
    """What stands in the place of a row that cannot become a task: why, and the row as far as it can be told."""

    error: InvalidInput
    row: Any


Row = bytes | dict[str, Any] | Bad
"""JSON text, or the fields of a row by name."""


class Block(NamedTuple):
    """Some rows of a file, in order, each with its number; `size` is how much of the file's `total` was read for
    them."""

    numbers: Sequence[int]
    rows: Sequence[Row]
    size: int


class Reader(Protocol):
    """A file of rows. `unit` is what its numbers count; `total` what the sizes of its blocks add up to, if known."""

    unit: str
    total: int | None

    @property
    def names(self) -> Sequence[str] | None:
        """The fields that all rows have, where the file says so."""

    def blocks(self) -> Iterator[Block]:
        """Yields all rows, at most so many at a time as a chunk of a load holds."""


class Source:
    """The file that rows come from."""

    def __init__(self, given: str, form: str | None) -> None:
        self.path = None if given == STDIN else Path(given)
        self.name = "stdin" if self.path is None else given
        self.form = form or _form_of(self.path)
        self._known: os.stat_result | None = None

    def open(self, stack: ExitStack) -> Reader:
        """Opens the file and reads what is at its head."""
        if self.path is None:
            stream = standard_input()
        else:
            try:
                stream = stack.enter_context(self.path.open("rb"))
            except OSError as error:
                raise click.UsageError(f"{self.name} cannot be read: {error.strerror}.") from error
            found = os.fstat(stream.fileno())
            self._known = found if stat.S_ISREG(found.st_mode) else None
        size = None if self._known is None else self._known.st_size
        if self.form == "jsonl":
            return JsonLines(stream, size, self.name)
        if self.form == "csv":
            return Csv(stream, size, self.name)
        if size is None:
            raise click.UsageError("Parquet is read from its end: name a file, not a pipe.")
        return Parquet(stream, self.name)

    def identity(self) -> tuple[str, int, int] | None:
        """Path, size and time of the last change: what makes it the same file. None: it cannot be told of a pipe."""
        if self._known is None or self.path is None:
            return None
        return os.fsencode(self.path.resolve()).hex(), self._known.st_size, self._known.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raises if somebody wrote to the file, or replaced it, since it was opened."""
        before = self.identity()
        if before is None or self.path is None:
            return
        try:
            now = self.path.stat()
        except OSError as error:
            raise InvalidInput(f"{self.name} went away while it was read: nothing was enqueued") from error
        if (now.st_size, now.st_mtime_ns) != before[1:]:
            raise InvalidInput(f"{self.name} was changed while it was read: nothing was enqueued; run it again")


def standard_input() -> BinaryIO:
    """Returns what is piped in; whoever starts a process may have closed it."""
    if sys.stdin is None:
        raise click.UsageError("Stdin is closed: pipe something in, or name a file.")
    return sys.stdin.buffer


def _form_of(path: Path | None) -> str:
    form = None if path is None else FORMAT_OF.get(path.suffix.lower())
    if form is None:
        what = "stdin" if path is None else f"{path.name!r}"
        raise click.UsageError(f"What {what} holds cannot be told by its name: give --format jsonl, csv or parquet.")
    return form


# -------------------------------------------------------------------------------------------------- JSON lines


class JsonLines:
    """A JSON value a line; blank lines are left out. The text is passed on: who needs its value decodes it."""

    unit = "line"
    names = None

    def __init__(self, stream: BinaryIO, total: int | None, name: str) -> None:
        self._stream = stream
        self._name = name
        self.total = total

    def blocks(self) -> Iterator[Block]:
        number, taken = 0, 0
        numbers: list[int] = []
        rows: list[Row] = []
        for lines in self._lines():
            if number == 0:
                lines[0] = lines[0].removeprefix(_BOM)
            texts = [line.strip() for line in lines]
            taken += sum(map(len, lines)) + len(lines)
            if all(texts):
                numbers += range(number + 1, number + 1 + len(texts))
                rows += texts
            else:
                numbers += [number + index for index, text in enumerate(texts, start=1) if text]
                rows += [text for text in texts if text]
            number += len(lines)
            whole = len(rows) - len(rows) % BATCH_MAX
            for start in range(0, whole, BATCH_MAX):
                yield Block(numbers[start : start + BATCH_MAX], rows[start : start + BATCH_MAX], taken)
                taken = 0
            del numbers[:whole], rows[:whole]
        if rows:
            yield Block(numbers, rows, taken)

    def _lines(self) -> Iterator[list[bytes]]:
        """Yields lines without their ends, as many as have come."""
        begun: list[bytes] = []
        count = 0
        # Not `read`, which goes on by itself until it has all, and does not notice Ctrl-C between two parts of it.
        while piece := self._stream.read1(READ_BYTES):  # type: ignore[attr-defined]
            *lines, rest = piece.split(b"\n")
            if lines:
                lines[0] = b"".join([*begun, lines[0]])
                begun = []
                count += len(lines)
                yield lines
            begun.append(rest)
            if sum(map(len, begun)) > LINE_MAX_BYTES:
                where = f"{self._name}, line {count + 1}"
                raise CodecError(f"{where}: it is longer than {LINE_MAX_BYTES:,} bytes: these are no JSON lines")
        yield [b"".join(begun)]


# --------------------------------------------------------------------------------------------------------- CSV


class Csv:
    """The first line names the fields. Values are texts; an empty one is null. Blank lines are left out.

    A stray quote takes the lines up to the next one for its value. So a bad row of several lines is none to set aside:
    there may be good ones in it, and the file is refused.
    """

    unit = "line"

    def __init__(self, stream: BinaryIO, total: int | None, name: str) -> None:
        self._stream = stream
        self._name = name
        self._size = 0
        self._row: list[str] = []
        self._no_text = False
        self.total = total
        # The limit of the csv module is there for who reads into memory of a fixed size.
        csv.field_size_limit(LINE_MAX_BYTES)
        self._reader = csv.reader(self._lines(), strict=True)
        self.names: Sequence[str] = self._read_header()

    def blocks(self) -> Iterator[Block]:
        numbers: list[int] = []
        rows: list[Row] = []
        for number, row in self._rows():
            numbers.append(number)
            rows.append(row)
            if len(rows) == BATCH_MAX:
                yield Block(numbers, rows, self._taken())
                numbers, rows = [], []
        if rows:
            yield Block(numbers, rows, self._taken())

    def _rows(self) -> Iterator[tuple[int, Row]]:
        header, width, reader = self.names, len(self.names), self._reader
        while True:
            number = reader.line_num + 1
            self._row.clear()
            self._no_text = False
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield number, Bad(self._wrong(number, f"not CSV ({error})"), "".join(self._row))
                continue
            if cells is None:
                return
            if len(cells) != width:
                if cells:
                    reason = f"the header has {width} fields, and this row {len(cells)}"
                    yield number, Bad(self._wrong(number, reason), cells)
            elif self._no_text:
                yield number, Bad(CodecError("it is not UTF-8 text"), cells)
            else:
                yield number, dict(zip(header, [cell or None for cell in cells], strict=True))

    def _wrong(self, number: int, reason: str) -> CodecError:
        """Returns what is wrong with a row, or raises it if there is more in that row than its own line."""
        if len(self._row) > 1 or _open_quote("".join(self._row)) is not None:
            raise self._refusal(number, reason)
        return CodecError(reason)

    def _refusal(self, first: int, reason: str) -> CodecError:
        text = "".join(self._row)
        last = max(first, first + len(self._row) - 1)
        where = f"line {first}" if last == first else f"lines {first} to {last}"
        place = _open_quote(text)
        if place is not None:
            line = first + text.count("\n", 0, place)
            reason += f": look at the quote that opens in line {line}"
        return CodecError(
            f"{self._name}, {where}: {reason}\n"
            "Nothing was enqueued. --skip-bad does not go past this, since other rows may be in it: correct the file."
        )

    def _read_header(self) -> list[str]:
        name = self._name
        try:
            header = next(self._reader, [])
        except csv.Error as error:
            raise click.UsageError(f"The first line of {name} is not CSV ({error}).") from error
        if self._no_text:
            raise click.UsageError(f"{name} is not UTF-8 text: convert it first.")
        if not header or not all(header):
            raise click.UsageError(f"The first line of {name} must name every field.")
        if self._reader.line_num > 1:
            raise click.UsageError(f"The first line of {name} has a quote that ends in line {self._reader.line_num:,}: "
                                   "write the names of fields without line breaks.")  # fmt: skip
        _check_names(header, name)
        return header

    def _lines(self) -> Iterator[str]:
        size, row = 0, self._row
        for index, line in enumerate(iter(partial(self._stream.readline, LINE_MAX_BYTES + 1), b"")):
            self._size += len(line)
            size = size + len(line) if row else len(line)
            if size > LINE_MAX_BYTES:
                raise self._refusal(index + 1 - len(row), f"this row is longer than {LINE_MAX_BYTES:,} bytes")
            data = line if index else line.removeprefix(_BOM)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                # The row is refused, not the file.
                text, self._no_text = data.decode(errors="backslashreplace"), True
            row.append(text)
            yield text

    def _taken(self) -> int:
        size, self._size = self._size, 0
        return size


#: A field, where one begins; of one in quotes the group is what closes it.
_FIELD = re.compile(r'"[^"]*(?:""[^"]*)*("?)|[^",\r\n][^,\r\n]*')


def _open_quote(text: str) -> int | None:
    """Returns where the last quote stands that is not closed in its own line."""
    fields = _FIELD.finditer(text)
    return max((one.start() for one in fields if one[1] == "" or (one[1] and "\n" in one[0])), default=None)


def _check_names(names: Sequence[str], file: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"Two fields of {file} are named {name!r}: rename one.")


# ----------------------------------------------------------------------------------------------------- Parquet


class Parquet:
    """A field for each column; a row group is read at a time."""

    unit = "row"

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._arrow, parquet = pyarrow()
        self._name = name
        try:
            self._file = parquet.ParquetFile(stream)
        except (self._arrow.ArrowException, OSError) as error:
            raise click.UsageError(f"{name} is no Parquet file that can be read: {error}") from error
        _check_names(self._file.schema_arrow.names, name)
        self.total: int | None = self._file.metadata.num_rows
        self.names: Sequence[str] = self._file.schema_arrow.names

    def blocks(self) -> Iterator[Block]:
        first = 1
        try:
            for batch in self._file.iter_batches(batch_size=ARROW_BATCH):
                rows = self._rows(batch)
                for start in range(0, len(rows), BATCH_MAX):
                    some = rows[start : start + BATCH_MAX]
                    yield Block(range(first, first + len(some)), some, len(some))
                    first += len(some)
        except (self._arrow.ArrowException, OSError) as error:
            raise CodecError(f"{self._name} cannot be read after row {first - 1:,}: {error}") from error

    def _rows(self, batch: Any) -> Sequence[Row]:
        try:
            rows: list[Row] = batch.to_pylist()
        except (self._arrow.ArrowException, ValueError, OverflowError):
            return [self._row(batch.slice(index, 1)) for index in range(len(batch))]
        return rows

    def _row(self, one: Any) -> Row:
        try:
            [row] = one.to_pylist()
        except (self._arrow.ArrowException, ValueError, OverflowError) as error:
            return Bad(CodecError(f"it has a value that Python has no type for ({error})"), str(one.slice(0, 1)))
        return dict(row)


def pyarrow() -> tuple[Any, Any]:
    """Returns the modules that read and write Parquet."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDriver(
            "Parquet needs pyarrow, which is not installed: pip install 'dibs[parquet]', or use JSON lines"
        ) from error
