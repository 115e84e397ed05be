"""The journal: every transition of every task, in the order in which it took effect.

An entry holds up to 1,000 events as runs. A cursor is (store id, entry position, index within the entry): reading after
it goes on with the next event, and a restored backup, which has another store id, is told apart. Its last four bytes
are the index, big-endian, so that a run is shown with the cursor of its first event alone.

Reading makes nothing for each event: a run is decoded, cut to what is asked for, and its ids are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from dibs.errors import InvalidCursor, JournalReset, JournalTrimmed
from dibs.stores.ordered.keys import JOURNAL, META_JOURNAL_TRIMMED, QueueKeys, end_of
from dibs.stores.ordered.records import Detail, Run, RunRows, decode_runs, encode_runs
from dibs.task import EventKind, EventRun, RunPage

if TYPE_CHECKING:
    from dibs.stores.ordered.engine import ReadTxn

ENTRY_EVENTS_MAX = 1_000
POSITION_BYTES = 12
STORE_ID_BYTES = 16
CURSOR_BYTES = STORE_ID_BYTES + POSITION_BYTES + 4
EXAMINED_MAX = 10_000
"""So many events of other tenants a page passes over."""
ENTRIES_MAX = 2_000
"""So many entries it is read from."""
STEP_MIN, STEP_MAX = 16, 128
SMALL_ENTRY_BYTES = 512
ENDLESS = 1 << 32
JOURNAL_END = end_of(JOURNAL)
_NO_DETAIL = Detail()


class JournalWriter:
    """Collects the events of one transaction. Those that follow each other and agree in what they share become one
    run, also across the calls of a group."""

    __slots__ = ("_at_ms", "last", "queue", "runs")

    def __init__(self, at_ms: int) -> None:
        self.runs: list[Run] = []
        self.last: Run | None = None
        self.queue: QueueKeys | None = None
        """The queue that `last` is about."""
        self._at_ms = at_ms

    def begin(self, queue: QueueKeys, kind: EventKind, worker: str, detail: Detail | None) -> Run:
        """Starts a run."""
        run = Run(kind, queue.tenant.name, queue.command, self._at_ms, worker, [], [], detail)
        self.runs.append(run)
        self.last, self.queue = run, queue
        return run

    def rows(self, queue: QueueKeys, rows: RunRows, detail: Detail | None) -> None:
        """Journals that rows of a load were put in."""
        run = self.begin(queue, EventKind.ENQUEUED, "", detail)
        run.rows = rows
        self.last = None

    def entries(self, version: int) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys and values to store, each with at most 1,000 events."""
        entry: list[Run] = []
        count = n = 0
        for run in self.runs:
            if entry and count + run.count() > ENTRY_EVENTS_MAX:
                yield _entry_key(version, n), encode_runs(entry)
                entry, count, n = [], 0, n + 1
            entry.append(run)
            count += run.count()
        if entry:
            yield _entry_key(version, n), encode_runs(entry)


def _entry_key(version: int, n: int) -> bytes:
    return JOURNAL + version.to_bytes(8, "big") + n.to_bytes(4, "big")


class Cursor(Struct, frozen=True, order=True, gc=False):
    """A place in one shard's journal. Cursors of one store sort as their events do."""

    store_id: bytes
    position: bytes
    index: int

    def pack(self) -> bytes:
        return self.store_id + self.position + self.index.to_bytes(4, "big")

    @classmethod
    def unpack(cls, data: bytes) -> Cursor:
        if type(data) is not bytes or len(data) != CURSOR_BYTES:
            raise InvalidCursor("this is not a journal cursor: use one that events or journal_bounds returned")
        return cls(data[:STORE_ID_BYTES], data[STORE_ID_BYTES:-4], int.from_bytes(data[-4:], "big"))


class JournalReader:
    """Reads the journal within one read transaction."""

    def __init__(self, txn: ReadTxn, store_id: bytes) -> None:
        self._txn = txn
        self._store_id = store_id

    def start(self) -> Cursor:
        """The cursor just before the oldest event that is kept."""
        trimmed = self._txn.get(META_JOURNAL_TRIMMED)
        if trimmed is None:
            return Cursor(self._store_id, bytes(POSITION_BYTES), 0)
        # A backup keeps the mark of the store it was taken of: only the position counts.
        mark = Cursor.unpack(trimmed)
        return Cursor(self._store_id, mark.position, mark.index)

    def newest(self) -> Cursor:
        """The cursor of the newest event, or `start` if there is none."""
        last = self._txn.scan(JOURNAL, JOURNAL_END, 1, reverse=True)
        if not last:
            return self.start()
        key, value = last[0]
        return Cursor(self._store_id, key[1:], _count(decode_runs(value)) - 1)

    def page(self, tenant: str | None, after: bytes | None, until: bytes | None, limit: int) -> RunPage:
        """Returns at most `limit` events after a cursor, of one tenant or of all; examines a bounded number."""
        begin = self._begin(after)
        stop = self._cursor(until) if until is not None else None
        runs: list[EventRun] = []
        at, left, passed = begin, limit, 0
        for piece in self._pieces(begin, stop):
            if not left or passed >= EXAMINED_MAX or piece.entry >= ENTRIES_MAX:
                return RunPage(runs, at.pack(), True)
            count = piece.end - piece.first
            if tenant is None or piece.run.tenant == tenant:
                count = min(count, left)
                runs.append(_event_run(self._store_id, piece, piece.first + count))
                left -= count
            else:
                passed += count
            at = Cursor(self._store_id, piece.position, piece.offset + piece.first + count - 1)
            if piece.first + count < piece.end:
                return RunPage(runs, at.pack(), True)
        return RunPage(runs, at.pack(), False)

    def runs_after(self, position: bytes, limit: int) -> tuple[bytes, list[Run]]:
        """Returns the runs of entries after `position`, and the position of the last one read."""
        items = self._txn.scan(JOURNAL + position + b"\0", JOURNAL_END, limit)
        runs = [run for _, value in items for run in decode_runs(value)]
        return (items[-1][0][1:] if items else position), runs

    def _begin(self, after: bytes | None) -> Cursor:
        start = self.start()
        if after is None:
            return start
        cursor = self._cursor(after)
        if cursor < start:
            raise JournalTrimmed(
                "events after this cursor were trimmed: go on from journal_bounds() if you accept that"
            )
        return cursor

    def _cursor(self, data: bytes) -> Cursor:
        cursor = Cursor.unpack(data)
        if cursor.store_id != self._store_id:
            raise JournalReset("this cursor is of another store, or of the one this was restored from: start anew")
        return cursor

    def _pieces(self, begin: Cursor, stop: Cursor | None) -> Iterator[Piece]:
        """Yields the runs that follow one cursor, up to another: the first and the last as far as they do."""
        for entry, (key, value) in enumerate(_entries(self._txn, begin.position)):
            position, offset = key[1:], 0
            skip = begin.index + 1 if position == begin.position else 0
            if stop is not None and position > stop.position:
                return
            end = stop.index + 1 if stop is not None and position == stop.position else ENDLESS
            for run in decode_runs(value):
                count = run.count()
                first, last = max(skip - offset, 0), min(end - offset, count)
                if first < last:
                    yield Piece(entry, position, offset, run, first, last)
                offset += count


def _entries(txn: ReadTxn, position: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries from a position on, read in steps that grow while entries are small."""
    key, step = JOURNAL + position, STEP_MIN
    while items := txn.scan(key, JOURNAL_END, step):
        yield from items
        key = items[-1][0] + b"\0"
        step = STEP_MAX if sum(len(value) for _, value in items) < len(items) * SMALL_ENTRY_BYTES else STEP_MIN


class Piece(Struct, frozen=True, gc=False):
    """The events of a run from `first` up to `end`. `entry`: how many entries were read before its own; `offset`: the
    index of the run's first event in that."""

    entry: int
    position: bytes
    offset: int
    run: Run
    first: int
    end: int


def _event_run(store_id: bytes, piece: Piece, end: int) -> EventRun:
    """Returns a piece, up to one of its events, as the seam shows it."""
    run, first = piece.run, piece.first
    detail = run.detail or _NO_DETAIL
    return EventRun(
        cursor=Cursor(store_id, piece.position, piece.offset + first).pack(),
        at_ms=run.at_ms,
        kind=run.kind,
        tenant=run.tenant,
        command=run.command,
        ids=run.ids_of(first, end),
        attempts=run.attempts_of(first, end),
        worker=run.worker,
        reason=detail.reason,
        error_type=detail.error_type,
        error_line=detail.error_line,
        fingerprint=detail.fingerprint,
    )


def _count(runs: Sequence[Run]) -> int:
    return sum(run.count() for run in runs)
