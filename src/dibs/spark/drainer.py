"""One Spark task of a drain, on its executor: a worker that claims, runs and settles batches until there is no more.

The function runs in the thread that Spark runs Python code in. Beside it, in the thread that has the stores, leases are
renewed, outcomes settled and, while batches are quick, the next one claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import pyarrow as pa
from pyspark.sql.types import DataType, StructType

from dibs.context import Fail
from dibs.errors import AccessError, DibsError, StoreError, StoreUnavailable
from dibs.ids import id_to_text
from dibs.spark import connection
from dibs.spark.columns import id_texts
from dibs.spark.drain import Plan
from dibs.spark.payload import Values, Wrong
from dibs.spark.returned import outcomes
from dibs.task import (
    Already,
    Extended,
    Heartbeat,
    Kind,
    Lease,
    LeaseLost,
    Reason,
    Rejected,
    Settled,
    Status,
    WorkerInfo,
)
from dibs.worker.outcomes import INVALID_ARGUMENTS, Delays, Ended, raised, refused, settlement
from dibs.worker.settling import AGAIN_S
from dibs.worker.tending import (
    BEAT_AGAIN_S,
    BEAT_LOOK_S,
    FORGOTTEN_AFTER_S,
    LEAVE_S,
    REGISTER_EVERY_S,
    TASKS_TOLD_MAX,
    memory_bytes,
    sweep,
)

log = logging.getLogger("dibs.spark")

QUICK_S = 0.5
"""A batch that takes no longer has the next one claimed while it runs. Slower ones would keep tasks waiting that others
could do."""
WATCH_EVERY_S = 1.0
"""Of the two seconds and more between a cancel and the kill that follows."""
WAIT_S = 1.0
"""How long to wait for what is ready and cannot be claimed, because of a limit, before looking again."""
ERRORS_TOLD_MAX = 20

RELEASED = Ended(kind=Kind.RELEASE)
CANCELLED = Ended(kind=Kind.FAIL, reason=Reason.CANCELLED)

_TIMES = pa.timestamp("us", "UTC")
_COUNTED = {
    Status.COMPLETED: "completed",
    Status.FAILED: "failed",
    Status.CANCELLED: "cancelled",
    Status.PENDING: "retried",
}


class Held:
    """A batch in the hands of this task, from its claim until all its rows are settled."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = leases
        self.beat_s = time.monotonic() + self._third_s()
        """When the next heartbeat is due."""
        self.lost: set[int] = set()
        """Rows that somebody else may have by now."""
        self.cancelled: set[int] = set()
        """Rows that are not wanted any more."""
        self.begun = False
        """The function may have seen it."""

    def live(self) -> list[int]:
        """The rows that are still to be run."""
        return [row for row in range(len(self.leases)) if row not in self.lost and row not in self.cancelled]

    def beaten(self) -> None:
        """Leases were renewed."""
        self.beat_s = time.monotonic() + self._third_s()

    def _third_s(self) -> float:
        return min(lease.lease_s for lease in self.leases) / 3


class Drainer:
    """Works off a share of a queue."""

    def __init__(self, plan: Plan, partition: int, kind: DataType, fn: Callable[[Any], Any]) -> None:
        self.plan = plan
        self.worker = _worker_name(plan, partition)
        self._partition = partition
        self._fn = fn
        self._batches = Batches(plan, kind)
        self._link = connection.link(plan.url)
        self._delays = Delays(self._link)
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._held: list[Held] = []
        self._left = plan.share(partition)
        """How many rows may still be claimed; None: any number."""
        self._took_s: float | None = None
        """How long the last batch took; None: there was none."""
        self._began_s = time.monotonic()
        self._began_ms = time.time_ns() // 1_000_000
        self._ahead: Future[Held | None] | None = None
        self._settling: Future[None] | None = None

    def run(self) -> pa.RecordBatch:
        """Works until there is no more, and returns what it did. What it holds if it is stopped by an error is given
        back at once."""
        tending = connection.submit(self._tend())
        try:
            while (held := self._next()) is not None:
                if tending.done():
                    tending.result()
                self._work(held)
            self._settled()
        finally:
            tending.cancel()
            self._leave()
        return self._summary()

    def _work(self, held: Held) -> None:
        self._counts["batches"] += 1
        if self._took_s is not None and self._took_s <= QUICK_S:
            self._claim_ahead()
        began_s = time.monotonic()
        ended = dict(self._run(held))
        self._took_s = time.monotonic() - began_s
        self._settled()  # at most one batch is on its way, so that memory and leases are bounded
        self._settling = connection.submit(self._settle(held, ended))

    # --------------------------------------------------------------------------------------------------------- claiming

    def _next(self) -> Held | None:
        """Returns the next batch; None: that was all, or the budget is used up."""
        ahead, self._ahead = self._ahead, None
        held = None if ahead is None else ahead.result()
        while held is None and not self._used_up():
            held = connection.submit(self._claim(WAIT_S if self._blocked else 0.0)).result()
            if held is None and not self._blocked:
                return None
        if held is not None:
            held.begun = not self._time_over()
            if self._left_alone or not held.begun:
                return None  # it is given back with what else is held
        return held

    def _claim_ahead(self) -> None:
        if not self._used_up():
            self._ahead = connection.submit(self._claim())

    def _used_up(self) -> bool:
        return self._left == 0 or self._left_alone or self._time_over()

    def _time_over(self) -> bool:
        return self.plan.ends_s is not None and time.time() >= self.plan.ends_s

    _left_alone = False
    """The driver does not wait for this drain any more."""
    _blocked = False
    """Something is ready, and was not to be had: because of a limit, or since others were quicker."""

    async def _claim(self, wait_s: float = 0.0) -> Held | None:
        plan = self.plan
        limit = await self._limit()
        leases = await self._link.ask(
            lambda store: store.claim(
                plan.tenant, [plan.command], limit=limit, lease_s=plan.lease_s, wait_s=wait_s, worker=self.worker
            )
        )
        if not leases:
            self._blocked = await self._ready() > 0
            return None
        self._counts["claimed"] += len(leases)
        if self._left is not None:
            self._left -= len(leases)
        held = Held(leases)
        self._held.append(held)
        return held

    async def _limit(self) -> int:
        """At most so many: of what is ready, a first or a slow batch takes no more than a share, so that the other
        Spark tasks have theirs."""
        limit = self.plan.batch if self._left is None else min(self.plan.batch, self._left)
        if self._took_s is not None and self._took_s <= QUICK_S:
            return limit
        share = math.ceil(await self._ready() / (self.plan.parallelism or 1))
        least = 1 if self._took_s is None else math.ceil(self.plan.batch / 8)
        return min(limit, max(share, least))

    async def _ready(self) -> int:
        stats = await self._link.ask(lambda store: store.stats(self.plan.tenant, [self.plan.command]))
        return sum(queue.ready for queue in stats.queues if not (queue.paused or stats.total.paused))

    # ---------------------------------------------------------------------------------------------------------- running

    def _run(self, held: Held) -> Iterator[tuple[int, Ended]]:
        """Yields how each row ended that is still this task's."""
        table, wrong = self._batches.table(held.leases)
        for row, error in wrong.items():
            yield row, raised(Fail(INVALID_ARGUMENTS, str(error)))
        parts = [[row for row in held.live() if row not in wrong]]
        while parts:
            gone = held.lost | held.cancelled
            part = [row for row in parts.pop() if row not in gone]
            if not part:
                continue
            ids, given = self._batches.given(table, part)
            try:
                ended = outcomes(self._fn(given), ids, self._batches.id_column, self.plan.codec)
            except BaseException as error:  # noqa: BLE001 whatever it is, it is about these rows
                if len(part) == 1:
                    yield part[0], raised(error)
                else:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
            else:
                yield from zip(part, ended, strict=True)

    # --------------------------------------------------------------------------------------------------------- settling

    def _settled(self) -> None:
        """Waits until the store has the outcomes of the batch before."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.result()

    async def _settle(self, held: Held, ended: dict[int, Ended]) -> None:
        """Settles what the function made of a batch, or all of it that has no outcome as cancelled."""
        for row in held.cancelled:
            if row not in ended or ended[row].kind is not Kind.COMPLETE:
                ended[row] = CANCELLED
        for row in held.lost:
            ended.pop(row, None)
        self._counts["lost"] += len(held.lost)
        while ended:
            ended = await self._settle_once(held.leases, ended)
        self._held.remove(held)

    async def _settle_once(self, leases: Sequence[Lease], ended: dict[int, Ended]) -> dict[int, Ended]:
        """Returns what is to be settled again."""
        settlements = [
            settlement(leases[row], one, await self._delays.of(leases[row], one) if one.kind is Kind.RETRY else 0.0)
            for row, one in ended.items()
        ]
        answers = await self._link.ask(lambda store: store.settle(settlements))
        again: dict[int, Ended] = {}
        for (row, one), answer in zip(ended.items(), answers, strict=True):
            if isinstance(answer, Settled | Already):
                self._count(one, answer.status)
            elif isinstance(answer, LeaseLost):
                self._counts["lost"] += 1
            elif answer.code == StoreUnavailable.code:
                again[row] = one
            else:
                again[row] = refused(one, answer)
        if any(isinstance(one, Rejected) and one.code == StoreUnavailable.code for one in answers):
            await asyncio.sleep(AGAIN_S)
        return again

    def _count(self, ended: Ended, status: Status) -> None:
        self._counts["released" if ended.kind is Kind.RELEASE else _COUNTED.get(status, "retried")] += 1
        if ended.error is not None:
            self._errors[ended.error.type] += 1

    # ---------------------------------------------------------------------------------------------------------- tending

    async def _tend(self) -> None:
        await asyncio.gather(self._pulse(), sweep(self._link), self._register(), self._watch())

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(BEAT_LOOK_S)
            for held in [one for one in self._held if one.beat_s <= time.monotonic()]:
                await self._beat(held)

    async def _beat(self, held: Held) -> None:
        rows = [row for row in range(len(held.leases)) if row not in held.lost]
        leases = [held.leases[row] for row in rows]
        beats = [Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token) for lease in leases]
        answers = await self._link.ask(lambda store: store.heartbeat(beats))
        held.beaten()
        if held not in self._held:
            return  # settled meanwhile: what looks lost has ended
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(answer, LeaseLost):
                log.warning("task %s: the lease was lost (%s)", id_to_text(held.leases[row].id), answer.cause)
                held.lost.add(row)
            elif isinstance(answer, Extended) and answer.cancel_requested:
                held.cancelled.add(row)
            elif isinstance(answer, Rejected):
                held.beat_s = min(held.beat_s, time.monotonic() + BEAT_AGAIN_S)

    async def _watch(self) -> None:
        """Sees whether the driver still waits. If not, what has not begun is given back at once: Spark will kill this
        process soon. What has begun may end before that."""
        while self.plan.driver and not self._left_alone:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                known = await self._link.ask(lambda store: store.workers(self.plan.tenant))
            except AccessError:  # a token to claim with does not show workers
                return
            self._left_alone = self.plan.driver not in {worker.name for worker in known}
        for held in [one for one in self._held if not one.begun and self._left_alone]:
            await self._settle(held, dict.fromkeys(held.live(), RELEASED))

    async def _register(self) -> None:
        while True:
            await self._tell(FORGOTTEN_AFTER_S)
            await asyncio.sleep(REGISTER_EVERY_S)

    async def _tell(self, ttl_s: float) -> None:
        ids = [lease.id for held in self._held for lease in held.leases]
        info = WorkerInfo(
            name=self.worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=self.plan.batch,
            busy=len(ids),
            commands=[self.plan.command],
            started_ms=self._began_ms,
            memory_bytes=memory_bytes(),
            tasks=ids[:TASKS_TOLD_MAX],
        )
        await self._link.ask(lambda store: store.register(self.plan.tenant, info, ttl_s))

    # ---------------------------------------------------------------------------------------------------------- leaving

    def _leave(self) -> None:
        """Gives back what is held and not settled, and is gone. Leases end by themselves if the store does not
        answer."""
        with contextlib.suppress(DibsError, TimeoutError, CancelledError):
            for future in (self._settling, self._ahead):
                if future is not None:
                    _ended(future)
            connection.submit(self._give_back()).result(LEAVE_S + 1.0)

    async def _give_back(self) -> None:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                for held in list(self._held):
                    await self._settle(held, dict.fromkeys(held.live(), RELEASED))
                await self._tell(0)

    def _summary(self) -> pa.RecordBatch:
        told = ("claimed", "completed", "retried", "failed", "cancelled", "lost", "released", "batches")
        return pa.RecordBatch.from_arrays(
            [
                pa.array([self._partition], pa.int32()),
                pa.array([self.worker]),
                *(pa.array([self._counts[name]], pa.int64()) for name in told),
                pa.array([time.monotonic() - self._began_s]),
                pa.array([self._errors.most_common(ERRORS_TOLD_MAX)], pa.map_(pa.string(), pa.int64())),
            ],
            ["partition", "worker", *told, "seconds", "errors"],
        )


def _ended(future: Future[Any]) -> None:
    """Waits until a call is over, or has been cancelled; what it took before that is in `held`."""
    with contextlib.suppress(DibsError, TimeoutError, CancelledError):
        future.result(LEAVE_S)
    future.cancel()


def _worker_name(plan: Plan, partition: int) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    attempt = 0 if context is None else context.attemptNumber()
    return f"spark:{plan.app}:{partition}{f'.{attempt}' if attempt else ''}"[-128:]


class Batches:
    """Makes what a function gets of the leases it is to work on."""

    def __init__(self, plan: Plan, kind: DataType) -> None:
        self._pandas = plan.form == "pandas"
        self._values = Values(kind)
        self._fields = kind.fieldNames() if isinstance(kind, StructType) else []
        own = ("id", "key", "attempt", "enqueued_at")
        self._names = [_free(name, self._fields) for name in own]
        self.id_column = self._names[0]

    def table(self, leases: Sequence[Lease]) -> tuple[pa.Table, Wrong]:
        """Returns all rows as columns, and why some cannot be read."""
        payloads, wrong = self._values.column([one.payload for one in leases], [one.codec for one in leases])
        columns: dict[str, pa.Array] = dict(
            zip(
                self._names,
                (
                    id_texts(b"".join([one.id for one in leases])),
                    pa.array([one.key for one in leases], pa.string()),
                    pa.array([one.attempt for one in leases], pa.int32()),
                    pa.array([one.enqueued_ms * 1000 for one in leases], pa.int64()).cast(_TIMES),
                ),
                strict=True,
            )
        )
        if self._fields:
            columns |= dict(zip(self._fields, payloads.flatten(), strict=True))
        else:
            columns["payload"] = payloads
        return pa.table(columns), wrong

    def given(self, table: pa.Table, rows: Sequence[int]) -> tuple[list[str], Any]:
        """Returns the ids of some rows, and what the function gets of them."""
        if len(rows) != table.num_rows:
            table = table.take(rows)
        ids: list[str] = table.column(self.id_column).to_pylist()
        # Whole numbers stay whole, also in a batch in which one is missing: as floats, large ones would be others.
        return ids, table.to_pandas(integer_object_nulls=True) if self._pandas else table


def _free(name: str, taken: Sequence[str]) -> str:
    """A name for a column of the task's own that no field of the payload has."""
    return _free(f"task_{name}", taken) if name in taken else name
