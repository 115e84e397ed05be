"""The memory engine: the same layout on a sorted map. Nothing survives the process; everything else holds."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sortedcontainers import SortedDict

from dibs.clock import Clock
from dibs.errors import StoreRefused
from dibs.stores.ordered.engine import Call, Engine, Group, Lane, ReadTxn, flush_txn, post, readable
from dibs.stores.ordered.journal import JournalWriter

if TYPE_CHECKING:
    from dibs.stores.ordered.work import Work

T = TypeVar("T")

_shared: dict[str, MemoryEngine] = {}
_shared_lock = threading.Lock()


class MemoryEngine(Engine):
    """A sorted map under a lock. Stores that name the same `memory:NAME` in one process share it."""

    def __init__(self, clock: Clock, name: str = "") -> None:
        super().__init__(clock)
        self.store_id = uuid.uuid4().bytes
        self._name = name
        self._data: SortedDict[bytes, bytes] = SortedDict()
        self._lock = threading.RLock()

    @classmethod
    def open(cls, name: str, clock: Clock) -> MemoryEngine:
        """Returns the named engine of this process, or a new one that nobody else can name."""
        with _shared_lock:
            engine = _shared.get(name) or cls(clock, name)
            if name:
                _shared[name] = engine
            engine.acquire()
            return engine

    def release(self) -> None:
        with _shared_lock:
            super().release()

    def submit(self, lane: Lane, calls: list[Call]) -> None:
        with self._lock:
            for call in calls:
                txn = MemoryTxn(self._data, self.clock.now_ms(), self.memory)
                try:
                    with readable(self.describe()):
                        Group([call], 0.0).run(txn)
                        flush_txn(txn)
                except Exception as error:  # noqa: BLE001 whatever a call raises is its caller's to see
                    txn.roll_back()
                    call.error = error
                if (meter := self.meter) is not None and txn.dirty:
                    self.measure(meter, 1, txn.journal.runs)
                lane.deliver([call], txn.journal.runs)
                for other in self._lanes.values():
                    if other is not lane and other.wakeups:
                        post(other, [], txn.journal.runs)

    def read(self, fn: Callable[[ReadTxn], T]) -> T:
        with self._lock, readable(self.describe()):
            return fn(MemoryTxn(self._data, self.clock.now_ms(), self.memory))

    def describe(self) -> str:
        return f"memory:{self._name}"

    def backup(self, directory: Path) -> None:
        raise StoreRefused(f"a memory store has no files to copy to {directory}: use an lmdb store for what must last")

    def tend(self) -> None:
        pass

    def _close(self) -> None:
        _shared.pop(self._name, None)
        self._data.clear()


class MemoryTxn:
    """A transaction that remembers what it overwrote."""

    def __init__(self, data: SortedDict[bytes, bytes], now_ms: int, memory: dict[bytes, Any]) -> None:
        self.memory = memory
        self.now_ms = now_ms
        self.version = 0
        self.work: Work | None = None
        self.journal = JournalWriter(now_ms)
        self.counts: dict[bytes, int] = {}
        self._data = data
        self._undo: list[tuple[bytes, bytes | None]] = []
        self.get = data.get

    @property
    def dirty(self) -> bool:
        return bool(self._undo)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def scan(self, start: bytes, stop: bytes, limit: int, *, reverse: bool = False) -> list[tuple[bytes, bytes]]:
        found = self._data.irange(start, stop, (True, False), reverse=reverse)
        return [(key, self._data[key]) for key in islice(found, limit)]

    def scan_keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        return list(islice(self._data.irange(start, stop, (True, False)), limit))

    def put(self, key: bytes, value: bytes) -> None:
        self._undo.append((key, self._data.get(key)))
        self._data[key] = value

    def delete(self, key: bytes) -> None:
        before = self._data.pop(key, None)
        if before is not None:
            self._undo.append((key, before))

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            self.put(key, value)

    def delete_many(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.delete(key)

    def add(self, key: bytes, delta: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + delta

    def full(self) -> str | None:
        return None

    def roll_back(self) -> None:
        """Puts back what was there, the latest change first."""
        for key, before in reversed(self._undo):
            if before is None:
                self._data.pop(key, None)
            else:
                self._data[key] = before
        self._undo.clear()
        self.journal.runs.clear()
