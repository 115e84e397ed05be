"""``dibs export``: the journal as JSON lines or Parquet, from a cursor on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import click
import msgspec

from dibs.cli.context import Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import note, plural, progress
from dibs.cli.rows import pyarrow
from dibs.shapes import event_shape
from dibs.stores.protocol import Store
from dibs.stores.wakeups import Journalled
from dibs.task import BATCH_MAX, Event

FOLLOW_LOOK_S = 1.0
#: Events in a Parquet row group: enough for columns to compress, few enough to hold in memory.
ROW_GROUP = 50_000


class Sink(Protocol):
    """Where events go, in whatever form."""

    def write(self, events: Sequence[Event]) -> None: ...


@click.command(
    cls=Command,
    examples="""
    dibs export > events.jsonl
    dibs export --tenant '*' -o events.parquet
    dibs export --follow | jq -c 'select(.kind == "failed")'
    """,
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Into this file instead of stdout.")
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet"]),
              help="Default: parquet for a file that is called so, else jsonl.")  # fmt: skip
@click.option("--after", metavar="CURSOR", help="Go on after this cursor, as an earlier export said.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most so many.")
@click.option("-f", "--follow", is_flag=True, help="Stay until Ctrl-C, and write events as they happen.")
@pass_session
def export(
    session: Session, /, output: Path | None, form: str | None, after: str | None, limit: int | None, follow: bool
) -> int:
    """Write the journal as JSON lines or Parquet.

    Every transition of every task of the tenant, or of all with --tenant '*', in order, oldest first. A file appears
    when it is complete. stderr says which cursor to go on --after; what retention has trimmed is gone.
    """
    form = form or ("parquet" if output is not None and output.suffix == ".parquet" else "jsonl")
    if form == "parquet" and (output is None or follow):
        raise click.UsageError("Parquet needs a file (-o events.parquet) and an end (no --follow).")
    begin = _cursors(after)
    last: list[bytes | None] = []
    count = 0

    async def copy(store: Store, sink: Sink) -> None:
        nonlocal count
        async for events, cursors in _pages(store, session.tenant_or_all, begin, limit, follow):
            sink.write(events)
            count += len(events)
            advance(len(events))
            last[:] = cursors

    try:
        with _sink(output, form) as sink, progress("export") as advance:
            session.run(lambda store: copy(store, sink))
    except KeyboardInterrupt:
        if not follow:
            raise
    going_on = f"; go on with --after {','.join((cursor or b'').hex() for cursor in last)}" if any(last) else ""
    note(f"{plural(count, 'event')}{going_on}")
    return Exit.OK


def _cursors(text: str | None) -> list[bytes] | None:
    """One for each shard; an empty one means from its beginning."""
    try:
        return None if text is None else [bytes.fromhex(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--after {text!r} is not a cursor: use the `cursor` of an event.") from None


async def _pages(
    store: Store, tenant: str, after: list[bytes] | None, limit: int | None, follow: bool
) -> AsyncIterator[tuple[list[Event], list[bytes | None]]]:
    """Yields events and the cursors after them, one for each shard: up to what was newest at the start, or for ever."""
    shards = await store.journal_bounds()
    if after is not None and len(after) != len(shards):
        raise click.UsageError(
            f"--after names {plural(len(after), 'cursor')}, and this store has {plural(len(shards), 'journal')}: "
            "use what an earlier export said to go on with."
        )
    cursors: list[bytes | None] = [*([None] * len(shards) if after is None else [one or None for one in after])]
    with store.subscribe([Journalled()]) as news:
        while True:
            more = False
            for index, bounds in enumerate(shards):
                size = BATCH_MAX if limit is None else min(BATCH_MAX, limit)
                if size == 0:
                    return
                until = None if follow else bounds.newest
                page = await store.events(tenant, shard=bounds.shard, after=cursors[index], until=until, limit=size)
                cursors[index] = page.cursor
                limit = None if limit is None else limit - len(page.events)
                more = more or page.more
                if page.cursor is not None:
                    yield page.events, cursors
            if not more:
                if not follow:
                    return
                await news.wait(FOLLOW_LOOK_S)


# ------------------------------------------------------------------------------------------------------- sinks


class JsonLines:
    """An event a line."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._encoder = msgspec.json.Encoder()

    def write(self, events: Sequence[Event]) -> None:
        self._stream.write(b"".join(self._encoder.encode(event_shape(event)) + b"\n" for event in events))
        self._stream.flush()


class Parquet:
    """A table with a column per field of an event, `at` as a timestamp in UTC."""

    def __init__(self, stream: BinaryIO) -> None:
        self._arrow, parquet = pyarrow()
        texts = [(name, self._arrow.string()) for name in ("kind", "tenant", "id", "command")]
        more = ("worker", "reason", "error_type", "error_line", "fingerprint")
        self._schema = self._arrow.schema([
            ("cursor", self._arrow.string()), ("at", self._arrow.timestamp("ms", tz="UTC")), *texts,
            ("attempt", self._arrow.int32()), *((name, self._arrow.string()) for name in more),
        ])  # fmt: skip
        self._writer = parquet.ParquetWriter(stream, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, events: Sequence[Event]) -> None:
        self._rows += [event_shape(event) | {"at": event.at_ms} for event in events]
        if len(self._rows) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        """Writes what is left, and the footer without which it is no Parquet file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


@contextlib.contextmanager
def _sink(output: Path | None, form: str) -> Iterator[Sink]:
    if form == "parquet":
        pyarrow()
    with contextlib.ExitStack() as stack:
        stream = sys.stdout.buffer if output is None else stack.enter_context(_whole(output))
        if form == "parquet":
            yield stack.enter_context(contextlib.closing(Parquet(stream)))
        else:
            yield JsonLines(stream)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when everything is in it; if that fails, what was there before stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
