"""Files of rows: JSON lines, CSV and Parquet, read a block at a time, so that none has to fit into memory."""

from __future__ import annotations

import csv
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import click

from dibs.errors import CodecError, InvalidInput, MissingDriver
from dibs.task import BATCH_MAX

STDIN = "-"
READ_BYTES = 1 << 20
#: Where no end of a line is in sight, it is no file of lines.
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
            stream: BinaryIO = sys.stdin.buffer
        else:
            try:
                stream = stack.enter_context(self.path.open("rb"))
            except OSError as error:
                raise click.UsageError(f"{self.name} cannot be read: {error.strerror}.") from error
            found = os.fstat(stream.fileno())
            self._known = found if stat.S_ISREG(found.st_mode) else None
        size = None if self._known is None else self._known.st_size
        if self.form == "jsonl":
            return JsonLines(stream, size)
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

    def __init__(self, stream: BinaryIO, total: int | None) -> None:
        self._stream = stream
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
        # Not `read`, which goes on by itself until it has all, and does not notice Ctrl-C between two parts of it.
        while piece := self._stream.read1(READ_BYTES):  # type: ignore[attr-defined]
            *lines, rest = piece.split(b"\n")
            if lines:
                lines[0] = b"".join([*begun, lines[0]])
                begun = []
                yield lines
            begun.append(rest)
            if sum(map(len, begun)) > LINE_MAX_BYTES:
                raise CodecError(f"a line is longer than {LINE_MAX_BYTES:,} bytes: these are no JSON lines")
        yield [b"".join(begun)]


# --------------------------------------------------------------------------------------------------------- CSV


class Csv:
    """The first line names the fields. Values are texts; an empty one is null. Blank lines are left out."""

    unit = "line"

    def __init__(self, stream: BinaryIO, total: int | None, name: str) -> None:
        self._stream = stream
        self._size = 0
        self._line = ""
        self._no_text = False
        self.total = total
        # The limit of the csv module is there for who reads into memory of a fixed size.
        csv.field_size_limit(LINE_MAX_BYTES)
        self._reader = csv.reader(self._lines(), strict=True)
        self._header = self._read_header(name)

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
        header, width, reader = self._header, len(self._header), self._reader
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield number, Bad(CodecError(f"not CSV ({error})"), self._line)
                continue
            if cells is None:
                return
            if self._no_text:
                self._no_text = False
                yield number, Bad(CodecError("it is not UTF-8 text"), cells)
            elif len(cells) == width:
                yield number, dict(zip(header, [cell or None for cell in cells], strict=True))
            elif cells:
                reason = f"the header has {width} fields, and this row {len(cells)}"
                yield number, Bad(CodecError(reason), cells)

    def _read_header(self, name: str) -> list[str]:
        try:
            header = next(self._reader, [])
        except csv.Error as error:
            raise click.UsageError(f"The first line of {name} is not CSV ({error}).") from error
        if self._no_text:
            raise click.UsageError(f"{name} is not UTF-8 text: convert it first.")
        if not header or not all(header):
            raise click.UsageError(f"The first line of {name} must name every field.")
        _check_names(header, name)
        return header

    def _lines(self) -> Iterator[str]:
        for index, line in enumerate(self._stream):
            self._size += len(line)
            data = line if index else line.removeprefix(_BOM)
            try:
                self._line = data.decode()
            except UnicodeDecodeError:
                # The row is refused, not the file.
                self._line, self._no_text = data.decode(errors="backslashreplace"), True
            yield self._line

    def _taken(self) -> int:
        size, self._size = self._size, 0
        return size


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
