"""The way into the store for everybody outside: each verb, for a caller.

Whatever a call comes in by (JSON, msgpack), it goes through here, and here alone is decided what a caller may do and
see, what it spends of its tenant's limits, and what is measured. Another tenant's task does not exist; nor does one of
a command that the token is not for.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from dibs.checks import check_chunk_id, check_claim_id, check_whole
from dibs.errors import Forbidden, PayloadTooLarge, StoreUnavailable
from dibs.server.auth import Principal
from dibs.server.limiter import Limiter
from dibs.server.limits import LimitsTable
from dibs.server.telemetry.metrics import Metrics
from dibs.server.telemetry.tracing import Tracing
from dibs.server.turns import Turns
from dibs.stores.batches import merged
from dibs.stores.direct import DirectStore
from dibs.stores.protocol import SWEEP_BUDGET
from dibs.stores.remote.verbs import WAITED_MAX
from dibs.stores.wakeups import Journalled, Ready, Topic
from dibs.task import (
    ALL_COMMANDS,
    BATCH_MAX,
    Acted,
    Already,
    Cancelled,
    Cause,
    Committed,
    Duplicate,
    Enqueued,
    Extended,
    Filter,
    Heartbeat,
    JournalBounds,
    Lease,
    LeaseLost,
    Marks,
    NewTask,
    Page,
    QueueConfig,
    QueueStats,
    Reader,
    Rejected,
    Rows,
    RunPage,
    Settled,
    Settlement,
    Staged,
    Stats,
    Swept,
    Task,
    TaskRef,
    TenantPage,
    WorkerInfo,
)

UNCLAIMED_MAX = 10_000
"""So many claims that were given up are remembered: one that arrives after that takes nothing."""
SUBSCRIPTION_LOOK_S = 15.0
"""How often somebody who listens hears that the server is still there."""

LOOKED_AT_FIRST = 8
SMALL_BYTES = 1 << 20
ANSWER_MAX_BYTES = 16 << 20
"""An answer about many tasks holds no more than that, and the last few that were looked at."""
COUNTED_ELSEWHERE = frozenset({"enqueue", "claim"})
"""What they cost is not known before they are looked at."""

T = TypeVar("T")
Outcome = TypeVar("Outcome")


class Gate:
    """Every verb of the store, for a caller `who`. Raises `Forbidden` for what its token does not allow."""

    def __init__(
        self,
        store: DirectStore,
        limiter: Limiter | None = None,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.store = store
        self._limiter = limiter or Limiter(LimitsTable())
        self._metrics = metrics or Metrics()
        self._tracing = tracing or Tracing()
        self._stopping = False
        self._waiting: set[asyncio.Task[object]] = set()
        self._claims: dict[tuple[str, bytes], asyncio.Task[object]] = {}
        self._unclaimed: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    # ------------------------------------------------------------------------------------------------- life of a task

    async def enqueue(
        self, who: Principal, tenant: str, tasks: Sequence[NewTask], *, traceparent: str | None = None
    ) -> builtins.list[Enqueued | Duplicate | Rejected]:
        """Puts tasks in. Those of a command that the token is not for are rejected one by one."""
        self._check(who, "enqueue", tenant)

        async def put(tasks: Sequence[NewTask]) -> builtins.list[Enqueued | Duplicate | Rejected]:
            async with self._limiter.enqueueing(self.store, tenant, tasks) as entry:
                with self._tracing.enqueue(tenant, entry.tasks, traceparent) as traced:
                    return merged(await self.store.enqueue(tenant, traced), entry.rejected)

        outcomes = await _asked(tasks, _unseen(who, tasks), put)
        self._metrics.enqueued(tenant, tasks, outcomes)
        return outcomes

    async def claim(
        self,
        who: Principal,
        tenant: str,
        commands: Sequence[str],
        *,
        limit: int = 1,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        worker: str = "",
        claim_id: bytes | None = None,
        traceparent: str | None = None,
    ) -> builtins.list[Lease]:
        """Takes tasks. A server that stops gives nothing out, and answers those who wait at once."""
        self._check(who, "claim", tenant)
        who.check_commands(commands)
        if claim_id is not None:
            check_claim_id(claim_id)
        if self._stopping:
            raise StoreUnavailable("the server is stopping: ask again, or ask another")
        name = None if claim_id is None else (tenant, claim_id)
        if name in self._unclaimed:
            return []

        began_ns = time.time_ns()

        async def claimed() -> builtins.list[Lease]:
            async with self._limiter.claiming(self.store, tenant, limit, wait_s, claim_id) as room:
                if not room.limit:
                    return []
                leases = await self.store.claim(
                    tenant,
                    commands,
                    limit=room.limit,
                    lease_s=lease_s,
                    wait_s=room.wait_s,
                    worker=worker,
                    claim_id=claim_id,
                )
                room.took(len(leases))
                return leases

        if name is not None:
            self._claims[name] = _current_task()
        try:
            leases = await (self._waiting_claim(who, claimed()) if wait_s else claimed())
        finally:
            if name is not None:
                self._claims.pop(name, None)
        if who.commands is not None:
            # A claim id that somebody else has used answers with what they took.
            leases = [lease for lease in leases if who.sees(lease.command)]
        self._metrics.claimed(leases)
        self._tracing.claimed(leases, began_ns, traceparent)
        return leases

    async def _waiting_claim(
        self, who: Principal, claim: Coroutine[None, None, builtins.list[Lease]]
    ) -> builtins.list[Lease]:
        self._metrics.waiting_claims.inc()
        try:
            return await self._until_stopping(who, claim, _nothing)
        finally:
            self._metrics.waiting_claims.dec()

    async def unclaim(self, who: Principal, tenant: str, claim_id: bytes, *, for_good: bool = False) -> int:
        """Puts back what a claim took whose caller has given it up, also one that is still on its way. `for_good`: if
        the claim has not arrived yet, it will take nothing."""
        self._check(who, "unclaim", tenant)
        check_claim_id(claim_id)
        name = (tenant, claim_id)
        if for_good:
            self._unclaimed[name] = None
            if len(self._unclaimed) > UNCLAIMED_MAX:
                self._unclaimed.popitem(last=False)
        claiming = self._claims.get(name)
        if claiming is not None:
            claiming.cancel()
            await asyncio.wait([claiming])
        if who.commands is not None and not all(
            who.sees(lease.command) for lease in await self.store._claimed(tenant, claim_id) or ()
        ):
            return 0  # somebody else's
        return await self.store.unclaim(tenant, claim_id)

    async def give_back(self, leases: Sequence[Lease]) -> None:
        """Puts back what was claimed for somebody who has gone."""
        if leases:
            await self.store._undo_claim(leases)

    async def heartbeat(
        self, who: Principal, beats: Sequence[Heartbeat]
    ) -> builtins.list[Extended | LeaseLost | Rejected]:
        """Extends leases; of another tenant's task it says what it says of one that nobody knows."""
        who.check_verb("heartbeat")
        return await _asked(beats, _foreign(who, beats), self.store.heartbeat)

    async def settle(
        self, who: Principal, settlements: Sequence[Settlement], *, traceparent: str | None = None
    ) -> builtins.list[Settled | Already | LeaseLost | Rejected]:
        """Ends leases; of another tenant's task it says what it says of one that nobody knows."""
        who.check_verb("settle")
        began_ns = time.time_ns()
        outcomes = await _asked(settlements, _foreign(who, settlements), self.store.settle)
        self._metrics.settled(settlements, outcomes)
        self._tracing.settled(settlements, outcomes, began_ns, traceparent)
        return outcomes

    async def held(self, who: Principal, ids: Sequence[bytes]) -> Sequence[bytes | None]:
        """Returns the tokens of those tasks that the caller itself holds, by its name; None: it does not."""
        who.check_verb("settle")
        return await self.store.held(who.tenant, ids, who.subject)

    # ------------------------------------------------------------------------------------------------ looking, acting

    async def get(self, who: Principal, tenant: str, refs: Sequence[TaskRef]) -> builtins.list[Task | None]:
        """Returns each task as it stands; None: there is none for this caller."""
        self._check(who, "get", tenant, len(refs))
        return [_if_seen(who, task) for task in await self._look(tenant, refs)]

    async def _look(self, tenant: str, refs: Sequence[TaskRef]) -> builtins.list[Task | None]:
        """The tasks, some at a time, as far as they are not too large together."""
        tasks: builtins.list[Task | None] = []
        size, step, turns = 0, LOOKED_AT_FIRST, Turns()
        while len(tasks) < len(refs):
            some = await self.store.get(tenant, refs[len(tasks) : len(tasks) + step])
            tasks += some
            read = sum(_size(task) for task in some if task is not None)
            size += read
            if size > ANSWER_MAX_BYTES and len(refs) > 1:
                raise PayloadTooLarge(f"these tasks hold more than {ANSWER_MAX_BYTES} bytes: ask for fewer at once")
            # Twice as many next time, as long as they are small.
            step = min(2 * step, BATCH_MAX) if size <= SMALL_BYTES else LOOKED_AT_FIRST
            await turns.after(read)
        return tasks

    async def wait(
        self, who: Principal, tenant: str, ids: Sequence[bytes], wait_s: float
    ) -> builtins.list[Task | None]:
        """Returns how the tasks stand once any of them has ended, or the time is over, or the server stops."""
        self._check(who, "wait", tenant, len(ids))
        check_whole("the number of ids to wait for", len(ids), 1, WAITED_MAX)
        ids = [*ids]
        if who.commands is not None and None in await self.get(who, tenant, ids):
            wait_s = 0.0  # what exists, and not for this caller, is not waited for

        async def now() -> builtins.list[Task | None]:
            return await self.store.get(tenant, ids)

        tasks = await self._until_stopping(who, self.store.wait(tenant, ids, wait_s), now)
        return [_if_seen(who, task) for task in tasks]

    async def cancel(self, who: Principal, tenant: str, refs: Sequence[TaskRef]) -> builtins.list[Cancelled]:
        """Cancels tasks."""
        self._check(who, "cancel", tenant)
        if who.commands is None:
            return await self.store.cancel(tenant, refs)
        seen = await self.get(who, tenant, refs)
        there = await self.store.cancel(tenant, [ref for ref, task in zip(refs, seen, strict=True) if task is not None])
        outcomes = iter(there)
        return [Cancelled("unknown") if task is None else next(outcomes) for task in seen]

    async def replay(
        self,
        who: Principal,
        tenant: str,
        which: Sequence[bytes] | Filter,
        *,
        limit: int = BATCH_MAX,
        cursor: str | None = None,
    ) -> Acted:
        """Revives dead letters."""
        self._check(who, "replay", tenant, 0)
        acted = await self.store.replay(tenant, await self._which(who, tenant, which), limit=limit, cursor=cursor)
        self._limiter.charge(tenant, "replay", len(acted.ids))
        return acted

    async def purge(
        self,
        who: Principal,
        tenant: str,
        which: Sequence[bytes] | Filter,
        *,
        limit: int = BATCH_MAX,
        cursor: str | None = None,
    ) -> Acted:
        """Removes ended tasks."""
        self._check(who, "purge", tenant)
        return await self.store.purge(tenant, await self._which(who, tenant, which), limit=limit, cursor=cursor)

    async def retain(
        self, who: Principal, tenant: str, ids: Sequence[bytes], result_ttl_s: float
    ) -> builtins.list[int | None]:
        """Keeps results for longer."""
        self._check(who, "retain", tenant)
        if who.commands is None:
            return await self.store.retain(tenant, ids, result_ttl_s)
        seen = await self.get(who, tenant, ids)
        kept = iter(await self.store.retain(tenant, [task.id for task in seen if task is not None], result_ttl_s))
        return [None if task is None else next(kept) for task in seen]

    async def list(
        self, who: Principal, tenant: str, which: Filter | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> Page:
        """Lists what the caller can see."""
        self._check(who, "list", tenant, 0)
        page = await self.store.list(tenant, which, cursor=cursor, limit=limit)
        self._limiter.charge(tenant, "list", len(page.tasks))
        return page if who.commands is None else Page([one for one in page.tasks if who.sees(one.command)], page.cursor)

    async def marks(self, who: Principal, tenant: str, *, every: int, after: bytes | None = None) -> Marks:
        """Returns ids that divide the tasks of the tenant, whatever their commands: of a task it tells no more than its
        id, as a listing's cursor does."""
        self._check(who, "marks", tenant)
        return await self.store.marks(tenant, every=every, after=after)

    # ---------------------------------------------------------------------------------------------------------- loads

    async def stage(
        self, who: Principal, tenant: str, chunk_id: bytes, rows: Rows, *, traceparent: str | None = None
    ) -> Staged:
        """Stages a chunk."""
        who.check_verb("stage")
        who.check_tenant(tenant)
        who.check_commands([options.command for options in rows.options])
        check_chunk_id(chunk_id)
        async with self._limiter.staging(self.store, tenant, chunk_id, rows) as entry:
            with self._tracing.stage(tenant, rows, traceparent) as traced:
                staged = await self.store.stage(tenant, chunk_id, traced)
            if not staged.already:
                entry.done()
        return staged

    async def commit_load(
        self,
        who: Principal,
        tenant: str,
        name: str,
        seq: int,
        chunk_ids: Sequence[bytes],
        *,
        forget_s: float | None = None,
    ) -> Committed:
        """Commits a load."""
        who.check_verb("commit_load")
        who.check_tenant(tenant)
        async with self._limiter.committing(self.store, tenant, chunk_ids) as entry:
            committed = await self.store.commit_load(tenant, name, seq, chunk_ids, forget_s=forget_s)
            if not committed.already:
                entry.done()
        self._metrics.loaded(tenant, committed.rows)
        return committed

    async def drop(self, who: Principal, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        """Drops staged chunks."""
        self._check(who, "drop", tenant)
        dropped = await self.store.drop(tenant, chunk_ids)
        self._limiter.dropped(tenant, chunk_ids)
        return dropped

    # --------------------------------------------------------------------------------------------- queues and workers

    async def stats(self, who: Principal, tenant: str, commands: Sequence[str] | None = None) -> Stats:
        """Counts what the caller can see."""
        self._check(who, "stats", tenant)
        if who.commands is None:
            return await self.store.stats(tenant, commands)
        known = await self.store.stats(tenant, [one for one in commands or sorted(who.commands) if who.sees(one)])
        return Stats(replace(QueueStats.sum_of("", known.queues), paused=False), known.queues)

    async def configure(
        self, who: Principal, tenant: str, command: str, config: QueueConfig | None = None
    ) -> QueueConfig:
        """Sets, or without one returns, a queue's configuration."""
        self._check(who, "queue" if config is None else "configure", tenant)
        if command != ALL_COMMANDS or config is not None:
            who.check_commands([command])
        return await self.store.configure(tenant, command, config)

    async def register(self, who: Principal, tenant: str, info: WorkerInfo, ttl_s: float) -> None:
        """Registers a worker."""
        self._check(who, "register", tenant)
        await self.store.register(tenant, info, ttl_s)

    async def workers(self, who: Principal, tenant: str) -> Sequence[WorkerInfo]:
        """Returns the workers that are alive."""
        self._check(who, "workers", tenant)
        return await self.store.workers(tenant)

    async def tenants(self, who: Principal, *, cursor: str | None = None, limit: int = 100) -> TenantPage:
        """Returns all tenants."""
        self._check(who, "tenants", who.tenant)
        return await self.store.tenants(cursor=cursor, limit=limit)

    # -------------------------------------------------------------------------------------------------------- journal

    async def journal_bounds(self, who: Principal) -> Sequence[JournalBounds]:
        """Returns what each shard's journal holds now."""
        self._check(who, "journal_bounds", who.tenant)
        return await self.store.journal_bounds()

    async def runs(
        self,
        who: Principal,
        tenant: str,
        *,
        shard: int = 0,
        after: bytes | None = None,
        until: bytes | None = None,
        limit: int = BATCH_MAX,
    ) -> RunPage:
        """Returns events that the caller can see, by runs."""
        self._check(who, "runs", tenant, 0)
        page = await self.store.runs(tenant, shard=shard, after=after, until=until, limit=limit)
        self._limiter.charge(tenant, "runs", sum(run.count() for run in page.runs))
        if who.commands is None:
            return page
        return RunPage([run for run in page.runs if who.sees(run.command)], page.cursor, page.more)

    async def readers(self, who: Principal) -> Sequence[Reader]:
        """Returns the named readers of the journal."""
        self._check(who, "readers", who.tenant)
        return await self.store.readers()

    async def advance(self, who: Principal, reader: str, shard: int, position: bytes | None) -> None:
        """Remembers how far a reader has come."""
        self._check(who, "advance", who.tenant)
        await self.store.advance(reader, shard, position)

    async def sweep(self, who: Principal, budget: int = SWEEP_BUDGET) -> Swept:
        """Sweeps the store."""
        self._check(who, "sweep", who.tenant)
        return await self.store.sweep(budget)

    def subscribe(self, who: Principal, topics: Sequence[Topic], limit: int = 1) -> AsyncGenerator[bool, None]:
        """Yields False at once, when the subscription holds, and from time to time; True, and ends, when something
        happened."""
        self._check(who, "subscribe", who.tenant)
        for topic in topics:
            if isinstance(topic, Journalled):
                who.check_verb("runs")  # it tells that something happened, at any tenant's
            else:
                who.check_tenant(topic.tenant)
            if isinstance(topic, Ready):
                who.check_commands([topic.command])
        return self._listen(who, topics, limit)

    async def _listen(self, who: Principal, topics: Sequence[Topic], limit: int) -> AsyncGenerator[bool, None]:
        with self.store.subscribe(topics, limit) as subscription:
            happened = False
            yield happened
            while not happened and not self._stopping:
                happened = await self._until_stopping(who, subscription.wait(SUBSCRIPTION_LOOK_S), _false)
                yield happened

    # ----------------------------------------------------------------------------------------------------------- stop

    def stop(self) -> None:
        """From now on nothing is given out; whoever waits is answered."""
        self._stopping = True
        for task in self._waiting:
            task.cancel()

    async def _until_stopping(
        self, who: Principal, work: Coroutine[None, None, T], instead: Callable[[], Awaitable[T]]
    ) -> T:
        """Returns what the work returns, or something else if the server stops before. The caller's tenant waits for it
        in one of so many places."""
        if self._stopping:
            work.close()
            return await instead()
        task = _current_task()
        try:
            with self._limiter.waiting(who.tenant):
                self._waiting.add(task)
                return await work
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            task.uncancel()
            return await instead()
        finally:
            work.close()
            self._waiting.discard(task)

    # -------------------------------------------------------------------------------------------------------- helpers

    def _check(self, who: Principal, verb: str, tenant: str, tasks: int = 1) -> None:
        """Whether the caller may do this there, and its tenant has not reached a limit."""
        who.check_verb(verb)
        who.check_tenant(tenant)
        if verb not in COUNTED_ELSEWHERE:
            self._limiter.spend(tenant, verb, tasks)

    async def _which(self, who: Principal, tenant: str, which: Sequence[bytes] | Filter) -> Sequence[bytes] | Filter:
        if who.commands is None:
            return which
        if not isinstance(which, Filter):
            return [task.id for task in await self.get(who, tenant, which) if task is not None]
        if which.command is None:
            raise Forbidden("this token is for some commands only: name one of them in the filter")
        who.check_commands([which.command])
        return which


_UNKNOWN = LeaseLost(Cause.UNKNOWN)


def _unseen(who: Principal, tasks: Sequence[NewTask]) -> dict[int, Rejected]:
    """Those of commands that the token is not for, by their places."""
    if who.commands is None:
        return {}
    return {
        index: Rejected.of(Forbidden(f"this token is not for the command {task.command!r}"))
        for index, task in enumerate(tasks)
        if not who.sees(task.command)
    }


def _foreign(who: Principal, items: Sequence[Heartbeat | Settlement]) -> dict[int, LeaseLost]:
    """Those of other tenants, by their places: nobody knows of such tasks."""
    if who.operates:
        return {}
    return {index: _UNKNOWN for index, item in enumerate(items) if item.tenant != who.tenant}


async def _asked(
    items: Sequence[T], refused: Mapping[int, Any], ask: Callable[[Sequence[T]], Awaitable[list[Outcome]]]
) -> list[Outcome]:
    """Asks for those items that are not refused, and returns the outcomes of all in their order."""
    if not refused:
        return await ask(items)
    outcomes = await ask([item for index, item in enumerate(items) if index not in refused])
    for index, why in refused.items():
        outcomes.insert(index, why)
    return outcomes


def _size(task: Task) -> int:
    return len(task.payload) + len(task.result.data or b"" if task.result is not None else b"")


def _if_seen(who: Principal, task: Task | None) -> Task | None:
    return task if task is not None and who.sees(task.command) else None


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _nothing() -> list[Lease]:
    return []


async def _false() -> bool:
    return False
