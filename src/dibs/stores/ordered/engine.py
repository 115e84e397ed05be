"""What the ordered store asks of a key-value engine, and what every engine does the same way.

A call is a function of a transaction. :meth:`Engine.transact` runs it atomically and returns when it is durable; it may
run the function again, so the function has no side effects and mints nothing. Concurrent calls may share one
transaction. A function that raises a `DibsError` has written nothing yet; the others of its group go ahead.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dibs.clock import Clock
from dibs.errors import DibsError, StoreCorrupt
from dibs.stores.meter import Meter
from dibs.stores.ordered.journal import JournalWriter
from dibs.stores.ordered.keys import META_JOURNAL_BYTES, META_VERSION, from8, from_count, ms8
from dibs.stores.ordered.records import ROOM_IN_TENANT, Run, UnreadableRecord
from dibs.stores.wakeups import Ended, Journalled, Ready, Wakeups
from dibs.task import BATCH_MAX, EventKind, Reason

if TYPE_CHECKING:
    from dibs.stores.ordered.work import Work

T = TypeVar("T")

log = logging.getLogger("dibs.stores")

#: Events after which a claim may find something, now or at a new time.
MAKES_READY = frozenset(
    {
        EventKind.ENQUEUED,
        EventKind.PROMOTED,
        EventKind.RETRIED,
        EventKind.RELEASED,
        EventKind.LEASE_EXPIRED,
        EventKind.REPLAYED,
    }
)
#: Events after which somebody who waits for the task is told.
ENDS = frozenset({EventKind.COMPLETED, EventKind.FAILED, EventKind.CANCELLED, EventKind.PURGED})


#: Events that end a lease: where there is a cap, that makes room for another.
FREES = frozenset(
    {
        EventKind.COMPLETED,
        EventKind.FAILED,
        EventKind.CANCELLED,
        EventKind.RETRIED,
        EventKind.RELEASED,
        EventKind.LEASE_EXPIRED,
    }
)


class ReadTxn(Protocol):
    """One consistent view of the store."""

    now_ms: int
    memory: dict[bytes, Any]
    """What this engine's readers keep of records that never change."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the value of each key, in order."""

    def scan(self, start: bytes, stop: bytes, limit: int, *, reverse: bool = False) -> list[tuple[bytes, bytes]]:
        """Returns at most `limit` items with start <= key < stop, in order."""

    def scan_keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        """`scan`, without the values."""


class Txn(ReadTxn, Protocol):
    """A read-write transaction."""

    version: int
    """Grows with every call, in the order in which calls take effect, and survives restarts."""
    work: Work | None
    """What the calls of this transaction collect."""

    def put(self, key: bytes, value: bytes) -> Any: ...

    def delete(self, key: bytes) -> Any: ...

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None: ...

    def delete_many(self, keys: Iterable[bytes]) -> None: ...

    def add(self, key: bytes, delta: int) -> None:
        """Adds to a counter, seen by readers after the commit. A counter at zero has no key."""

    @property
    def journal(self) -> JournalWriter:
        """Events written here are part of the transaction."""

    def full(self) -> str | None:
        """Says why no new tasks are taken, or None."""


class EngineTxn(Txn, Protocol):
    """What an engine's transaction has beside what calls see of it."""

    counts: dict[bytes, int]
    """What `add` collected."""

    @property
    def dirty(self) -> bool:
        """True once anything was written."""


class Engine(abc.ABC):
    """One open database, shared by all the stores of the process that name it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store_id = b""
        self.memory: dict[bytes, Any] = {}
        self.meter: Meter | None = None
        self._lanes: dict[asyncio.AbstractEventLoop, Lane] = {}
        self._users = 0

    @abc.abstractmethod
    def submit(self, lane: Lane, calls: list[Call]) -> None:
        """Runs calls in one or several transactions and then has the lane deliver them. Does not block."""

    @abc.abstractmethod
    def read(self, fn: Callable[[ReadTxn], T]) -> T:
        """Runs `fn` on one consistent view."""

    @abc.abstractmethod
    def describe(self) -> str:
        """The engine's name and place, for messages."""

    @abc.abstractmethod
    def backup(self, directory: Path) -> None:
        """Copies the database as of one moment into a new directory; the copy is another store. Blocks."""

    async def drained(self) -> None:
        """Returns when what was submitted before has been committed and delivered."""
        await self.lane().transact(lambda txn: txn.version)

    @abc.abstractmethod
    def tend(self) -> None:
        """Housekeeping of the engine itself, from time to time; cheap."""

    def lane(self) -> Lane:
        """Returns the running loop's way into the engine."""
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            for closed in [other for other in list(self._lanes) if other.is_closed()]:
                gone = self._lanes.pop(closed, None)
                if gone is not None:  # another thread may have found it too
                    gone.disown()
            lane = self._lanes[loop] = self._new_lane(loop)
        return lane

    def _new_lane(self, loop: asyncio.AbstractEventLoop) -> Lane:
        return Lane(self, loop)

    def measure(self, meter: Meter, calls: int, runs: Sequence[Run]) -> None:
        """Tells the meter of a commit. What goes wrong in it is none of the store's business."""
        try:
            meter.committed(calls, expired_in(runs))
        except Exception:
            self.meter = None
            log.exception("what measures %s failed, and is no longer told", self.describe())

    def acquire(self) -> None:
        """Counts one more use."""
        self._users += 1

    def release(self) -> None:
        """Gives up one use; the last one closes the engine."""
        self._users -= 1
        if self._users == 0:
            for lane in list(self._lanes.values()):
                lane.close_in_its_loop()
            self._lanes.clear()
            self._close()

    @abc.abstractmethod
    def _close(self) -> None: ...


class Call:
    """A function on its way through a transaction, and the future that will hold its outcome.

    With `items` the function takes them and answers item by item, if need be fewer than there are. Calls that follow
    each other with one function (the same `join`, if there is one) then become one run of it over all their items: 64
    callers with one task each cost little more than one caller with 64.
    """

    __slots__ = ("abandoned", "error", "fn", "future", "items", "join", "result")

    def __init__(
        self,
        fn: Callable[..., Any],
        future: asyncio.Future[Any],
        abandoned: Callable[[Any], None] | None = None,
        items: Sequence[Any] | None = None,
        join: Any = None,
    ) -> None:
        self.fn = fn
        self.future = future
        self.abandoned = abandoned
        self.items = items
        self.join = join
        self.result: Any = None
        self.error: BaseException | None = None


class Lane:
    """One event loop's way into an engine: what it has to commit, and who waits in it.

    Calls made in one iteration of the loop are handed over together at its end. Nobody waits on purpose, and the
    writer does not compete with the loop for the interpreter while the rest of the group is still being made.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.loop = loop
        self.wakeups = Wakeups()
        self._pending: list[Call] = []
        self._in_flight = 0

    def transact(self, fn: Callable[[Txn], T], abandoned: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        """Runs `fn` in a transaction; the future is done when that is durable. `abandoned` gets the result if nobody
        waits for it any more."""
        future: asyncio.Future[T] = self.loop.create_future()
        if not self._pending:
            self.loop.call_soon(self._hand_over)
        self._pending.append(Call(fn, future, abandoned))
        return future

    def transact_items(
        self,
        fn: Callable[[Txn, Sequence[Any]], list[T]],
        items: Sequence[Any],
        join: Any,
        abandoned: Callable[[list[T]], None] | None = None,
    ) -> asyncio.Future[list[T]]:
        """Like `transact`, for a function that answers item by item; `join` is equal for calls that may be run as
        one, and None for one that is run alone."""
        future: asyncio.Future[list[T]] = self.loop.create_future()
        if not self._pending:
            self.loop.call_soon(self._hand_over)
        self._pending.append(Call(fn, future, abandoned, items, join))
        return future

    def _hand_over(self) -> None:
        calls, self._pending = self._pending, []
        self._in_flight += len(calls)
        if calls:
            self.engine.submit(self, calls)

    def deliver(self, calls: list[Call], runs: list[Run]) -> None:
        """Wakes who waits for what happened, and gives each call its outcome. Runs in the loop. Who waits comes first:
        what callers do with their answers may take a while."""
        self._in_flight -= len(calls)
        if runs:
            self.publish(runs)
        for call in calls:
            if call.future.cancelled():
                if call.abandoned is not None and call.error is None:
                    call.abandoned(call.result)
            elif call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.result)

    def publish(self, runs: list[Run]) -> None:
        """Wakes those in this loop for whom something happened."""
        if not self.wakeups:
            return
        for run in runs:
            if run.kind in MAKES_READY:
                self.wakeups.wake(Ready(run.tenant, run.command), run.count())
            elif run.kind in ENDS:
                for task_id in run.ids:
                    self.wakeups.wake_all(Ended(run.tenant, task_id))
            if run.room and run.kind in FREES:
                self._tell_of_room(run)
        self.wakeups.wake_all(Journalled())

    def _tell_of_room(self, run: Run) -> None:
        if run.room == ROOM_IN_TENANT:
            self.wakeups.wake_tenant(run.tenant, run.count())
        else:
            self.wakeups.wake(Ready(run.tenant, run.command), run.count())

    def watch(self) -> None:
        """Called before somebody starts to wait: from now on other processes' commits must be heard too."""

    def busy(self) -> bool:
        """True while something was asked for and not answered."""
        return self._in_flight > 0

    def flush(self) -> None:
        """Hands over what is pending without waiting for the end of the loop's iteration."""
        self._hand_over()

    def close_in_its_loop(self) -> None:
        """Closes the lane from any thread; what belongs to a loop is touched by that loop only."""
        try:
            if asyncio.get_running_loop() is self.loop:
                self.close()
            else:
                self.loop.call_soon_threadsafe(self.close)
        except RuntimeError:
            # No loop runs here, or the lane's own is closed: nobody waits in it.
            self.disown()

    def close(self) -> None:
        """Lets go of the loop; who waits in it looks once more and finds the store closed."""
        self.wakeups.wake_everybody()

    def disown(self) -> None:
        """In a child process: lets go of what belongs to the parent, without telling anybody."""


class Group:
    """Calls that share a transaction: the first of those given, until their time is over."""

    __slots__ = ("_calls", "_max_s", "done")

    def __init__(self, calls: Sequence[Call], max_s: float) -> None:
        self._calls = calls
        self._max_s = max_s
        self.done = 0
        """How many calls have run, the one that raised included."""

    def run(self, txn: Txn) -> None:
        """Runs each call, or those that can be run as one, with a version of its own, and keeps the outcome. An error
        that is not a `DibsError` may come after a write: it is raised, and the caller must abort."""
        deadline_s = time.monotonic() + self._max_s
        version = from8(txn.get(META_VERSION) or b"")
        while self.done < len(self._calls):
            version += 1
            txn.version = version
            calls = self._next()
            self.done += len(calls)
            try:
                _run_joined(txn, calls)
            except DibsError as error:
                if txn.work is not None and txn.work.pending():
                    raise
                for call in calls:
                    call.error = error
            if time.monotonic() > deadline_s:
                return

    def _next(self) -> Sequence[Call]:
        """The next call, with those behind it that can be run as one with it."""
        first = self._calls[self.done]
        if first.items is None or first.join is None:
            return (first,)
        size, end = len(first.items), self.done + 1
        while end < len(self._calls) and self._calls[end].join == first.join:
            size += len(self._calls[end].items or ())
            if size > BATCH_MAX:
                break
            end += 1
        return self._calls[self.done : end]


def _run_joined(txn: Txn, calls: Sequence[Call]) -> None:
    first = calls[0]
    for call in calls:
        call.error = None
    if first.items is None:
        first.result = first.fn(txn)
    elif len(calls) == 1:
        first.result = first.fn(txn, first.items)
    else:
        outcomes = first.fn(txn, [item for call in calls for item in call.items or ()])
        start = 0
        for call in calls:
            end = start + len(call.items or ())
            call.result = outcomes[start:end]
            start = end


def flush_txn(txn: EngineTxn) -> None:
    """Writes what a transaction collected on the side: journal, counters, and the version counter, which is kept in
    the database itself because a compacting copy resets the engine's own."""
    if txn.work is not None:
        txn.work.finish()
    size = 0
    for key, value in txn.journal.entries(txn.version):
        txn.put(key, value)
        size += len(key) + len(value)
    if size:
        txn.add(META_JOURNAL_BYTES, size)
    for key, delta in txn.counts.items():
        known = txn.get(key)
        count = from_count(known) + delta
        if count:
            txn.put(key, count.to_bytes(8, "big", signed=True))
        elif known is not None:
            txn.delete(key)
    if txn.dirty:
        txn.put(META_VERSION, ms8(txn.version))


def expired_in(runs: Iterable[Run]) -> dict[tuple[str, str], int]:
    """Counts the leases that were taken back because they had run out, by tenant and command."""
    expired: dict[tuple[str, str], int] = {}
    for run in runs:
        if run.kind == EventKind.LEASE_EXPIRED or (
            run.kind == EventKind.FAILED and run.detail is not None and run.detail.reason == Reason.LEASE_EXPIRED
        ):
            queue = run.tenant, run.command
            expired[queue] = expired.get(queue, 0) + run.count()
    return expired


@contextlib.contextmanager
def readable(where: str) -> Iterator[None]:
    """Turns a record that cannot be read into the error that says what to do."""
    try:
        yield
    except UnreadableRecord as error:
        raise StoreCorrupt(f"a record of {where} cannot be read ({error}): stop writing and run doctor") from error


def post(lane: Lane, calls: list[Call], runs: list[Run]) -> None:
    """Delivers from another thread; a loop that was closed meanwhile has nobody left to tell."""
    with contextlib.suppress(RuntimeError):
        lane.loop.call_soon_threadsafe(lane.deliver, calls, runs)
