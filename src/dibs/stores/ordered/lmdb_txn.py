"""Reading and writing within one LMDB transaction, in as few calls of the driver as the work allows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import lmdb

from dibs.stores.ordered.journal import JournalWriter

if TYPE_CHECKING:
    from dibs.stores.ordered.work import Work

T = TypeVar("T")

SCAN_STEP = 16
WALK_FROM = 16


class LmdbReadTxn:
    """A snapshot."""

    def __init__(self, txn: lmdb.Transaction, now_ms: int, memory: dict[bytes, Any]) -> None:
        self.now_ms = now_ms
        self.memory = memory
        # The driver's types allow for memory views, which it only makes when asked to.
        self._cursor: Any = txn.cursor()
        self.get: Callable[[bytes], bytes | None] = txn.get  # type: ignore[assignment]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) >= WALK_FROM:
            values = self._walk(keys)
            if values is not None:
                return values
        found = self._cursor.getmulti(keys)
        if len(found) == len(keys):
            return [value for _, value in found]
        known = dict(found)
        return [known.get(key) for key in keys]

    def _walk(self, keys: Sequence[bytes]) -> list[bytes | None] | None:
        """Returns the values of keys that follow each other without a gap, as those of a batch mostly do, by stepping
        from one to the next instead of searching each from the root; None if they do not."""
        if not self._cursor.set_key(keys[0]):
            return None
        walk = self._cursor.iternext()
        values: list[bytes | None] = []
        while len(values) < len(keys):
            step = list(islice(walk, max(WALK_FROM, len(values))))
            wanted = keys[len(values) : len(values) + len(step)]
            if not step or [key for key, _ in step[: len(wanted)]] != wanted:
                return None
            values += [value for _, value in step[: len(wanted)]]
        return values

    def scan(self, start: bytes, stop: bytes, limit: int, *, reverse: bool = False) -> list[tuple[bytes, bytes]]:
        if reverse:
            return self._scan_back(start, stop, limit)
        # Keys alone tell how many there are: what lies past the end may be large, and is not read.
        count = len(self.scan_keys(start, stop, limit))
        return list(islice(self._cursor.iternext(), count)) if count and self._cursor.set_range(start) else []

    def scan_keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        found: list[bytes] = []
        if self._cursor.set_range(start):
            _read_on(found, self._cursor.iternext(True, False), limit, stop.__le__)
        if found and found[-1] >= stop:
            del found[bisect_left(found, stop) :]
        return found

    def _scan_back(self, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        if self._cursor.prev() if self._cursor.set_range(stop) else self._cursor.last():
            found = list(islice(self._cursor.iterprev(), limit))
        return [item for item in found if item[0] >= start]


def _read_on(found: list[T], items: Iterator[T], limit: int, past: Callable[[T], bool]) -> None:
    """Reads up to `limit` items in growing steps, and not much further than the first that is past the end: the driver
    is fast at many and slow at one by one."""
    step = SCAN_STEP
    while len(found) < limit:
        some = list(islice(items, min(step, limit - len(found))))
        found += some
        if len(some) < step or past(some[-1]):
            return
        step *= 4


class LmdbTxn(LmdbReadTxn):
    """The write transaction of one group of calls."""

    def __init__(
        self, txn: lmdb.Transaction, now_ms: int, memory: dict[bytes, Any], full: Callable[[], str | None]
    ) -> None:
        super().__init__(txn, now_ms, memory)
        self.version = 0
        self.work: Work | None = None
        self.dirty = False
        self.journal = JournalWriter(self.now_ms)
        self.counts: dict[bytes, int] = {}
        self._txn = txn
        # Asked at most once: all the calls of a group get the same answer.
        self.full = cache(full)

    def put(self, key: bytes, value: bytes) -> None:
        self.dirty = True
        self._txn.put(key, value)

    def delete(self, key: bytes) -> None:
        self.dirty = True
        self._txn.delete(key)

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        self.dirty = True
        self._cursor.putmulti(items)

    def delete_many(self, keys: Iterable[bytes]) -> None:
        self.dirty = True
        at, find, delete = self._cursor.key, self._cursor.set_key, self._cursor.delete
        for key in keys:
            # A delete leaves the cursor on the key that follows: often the next to go.
            if at() == key or find(key):
                delete()

    def add(self, key: bytes, delta: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + delta
