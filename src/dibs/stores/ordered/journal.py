"""The journal: every transition of every task, in the order in which it took effect.

An entry holds up to 1,000 events as runs. A cursor is (store id, entry position, index within the entry): reading after
it goes on with the next event, and a restored backup, which has another store id, is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from dibs.errors import InvalidCursor, JournalReset, JournalTrimmed
from dibs.stores.ordered.keys import JOURNAL, META_JOURNAL_TRIMMED, QueueKeys, end_of
from dibs.stores.ordered.records import Detail, Run, RunRows, decode_runs, encode_runs
from dibs.task import Event, EventKind, EventPage

if TYPE_CHECKING:
    from dibs.stores.ordered.engine import ReadTxn

ENTRY_EVENTS_MAX = 1_000
POSITION_BYTES = 12
STORE_ID_BYTES = 16
CURSOR_BYTES = STORE_ID_BYTES + POSITION_BYTES + 4
EXAMINED_MAX = 5_000
JOURNAL_END = end_of(JOURNAL)


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

    def rows(self, queue: QueueKeys, rows: RunRows) -> None:
        """Journals that rows of a load were put in."""
        self.runs.append(Run(EventKind.ENQUEUED, queue.tenant.name, queue.command, self._at_ms, "", [], [], None, rows))
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

    def page(self, tenant: str | None, after: bytes | None, until: bytes | None, limit: int) -> EventPage:
        """Returns events after a cursor, of one tenant or of all."""
        begin = self._begin(after)
        stop = self._cursor(until) if until is not None else None
        events: list[Event] = []
        at = begin
        for examined, (cursor, run, index) in enumerate(self._walk(begin)):
            if stop is not None and cursor > stop:
                return EventPage(events, at.pack(), False)
            if len(events) == limit or examined == EXAMINED_MAX:
                return EventPage(events, at.pack(), True)
            at = cursor
            if tenant is None or run.tenant == tenant:
                events.append(_event(cursor, run, index))
        return EventPage(events, at.pack(), False)

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

    def _walk(self, begin: Cursor) -> Iterator[tuple[Cursor, Run, int]]:
        key, skip = JOURNAL + begin.position, begin.index + 1
        while items := self._txn.scan(key, JOURNAL_END, 16):
            for key, value in items:
                index_in_entry = 0
                for run in decode_runs(value):
                    for index in range(run.count()):
                        if key[1:] != begin.position or index_in_entry >= skip:
                            yield Cursor(self._store_id, key[1:], index_in_entry), run, index
                        index_in_entry += 1
            key += b"\0"


def _event(cursor: Cursor, run: Run, index: int) -> Event:
    detail = run.detail or Detail()
    return Event(
        cursor=cursor.pack(),
        at_ms=run.at_ms,
        kind=run.kind,
        tenant=run.tenant,
        id=run.id(index),
        command=run.command,
        attempt=run.attempt(index),
        worker=run.worker,
        reason=detail.reason,
        error_type=detail.error_type,
        error_line=detail.error_line,
        fingerprint=detail.fingerprint,
    )


def _count(runs: Sequence[Run]) -> int:
    return sum(run.count() for run in runs)
