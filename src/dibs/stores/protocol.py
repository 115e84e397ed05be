"""The seam: what every store does, at the height of the queue's verbs.

:class:`Store` is both the contract and its wrapper. Its public verbs check every item, split batches into transactions
and wait without polling; a store implements the underscored verb below each and may rely on sound input. The promises
are tested by :mod:`dibs.testing.contract` on every store and through every client.

Every verb that takes a batch answers item by item, in order. An answer that was lost on the way can be asked for again:
ids and claim ids are the caller's, a settlement is recognised by its token, the rest is harmless by nature.
"""

from __future__ import annotations

import abc
import builtins
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, Self

from msgspec import Struct

from dibs import checks
from dibs.checks import Limits
from dibs.errors import InvalidInput, InvalidOption, StoreUnavailable
from dibs.ids import id_to_text
from dibs.stores.batches import batches, ids_of, listed, merged, rows_of, slices
from dibs.stores.wakeups import Subscription, Topic
from dibs.task import (
    ALL_COMMANDS,
    BATCH_MAX,
    MARKS_EVERY_MAX,
    MARKS_EVERY_MIN,
    RUNS_MAX,
    Acted,
    Already,
    Cancelled,
    Committed,
    Duplicate,
    Enqueued,
    EventPage,
    Extended,
    Filter,
    Heartbeat,
    JournalBounds,
    Lease,
    LeaseLost,
    Marks,
    NewTask,
    Page,
    Place,
    QueueConfig,
    Reader,
    Rejected,
    Rows,
    RunPage,
    Settled,
    Settlement,
    Staged,
    Stats,
    Status,
    Swept,
    Task,
    TaskRef,
    TenantPage,
    WorkerInfo,
)

ALL_TENANTS = checks.ALL_TENANTS

SWEEP_BUDGET = 1_000


class Order(Struct, frozen=True):
    """How closely a store keeps priority and first in, first out. `window`: a claim may take any of the first so
    many."""

    kind: Literal["strict", "per_shard", "window"] = "strict"
    window: int = 1


class Store(abc.ABC):
    """A durable queue of tasks. Open one with :func:`dibs.stores.open_store`; close it, or use it with ``async with``.

    A store belongs to the event loop that first uses it.
    """

    order: Order = Order()
    sweeps_itself = False
    """True if somebody behind it sees to the sweep, so that whoever uses it need not."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    # ------------------------------------------------------------------------------------------------- life of a task

    async def enqueue(self, tenant: str, tasks: Sequence[NewTask]) -> builtins.list[Enqueued | Duplicate | Rejected]:
        """Puts tasks into their queues. When it returns they survive a crash.

        An id that exists answers ``Enqueued(already=True)``, a key that is taken :class:`Duplicate`; an item that is
        not acceptable is :class:`Rejected` without touching the others. The id is checked before the key.
        """
        checks.check_tenant(tenant)
        rejected: dict[int, Rejected] = {}
        tasks = listed(tasks)
        for index, task in enumerate(tasks):
            try:
                checks.check_new_task(tenant, task, self.limits)
            except InvalidInput as error:
                rejected[index] = Rejected.of(error)
        outcomes: builtins.list[Enqueued | Duplicate | Rejected] = []
        for batch in batches(tasks, rejected, lambda task: len(task.payload)):
            outcomes += await self._enqueue(tenant, batch, ids_of(tenant, batch))
        return merged(outcomes, rejected)

    async def claim(
        self,
        tenant: str,
        commands: Sequence[str],
        *,
        limit: int = 1,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        worker: str = "",
        claim_id: bytes | None = None,
    ) -> builtins.list[Lease]:
        """Takes at most `limit` ready tasks, each under a lease of its own; nobody else holds one of them until it
        expires.

        Commands are tried in the order given. Without `lease_s` the task's own lease counts, then the queue's. Waits up
        to `wait_s` for the first task. A repeated `claim_id` returns the leases of the first call that are still alive.
        If the call is cancelled, what it had taken is released. What a queue's or tenant's limits do not allow is not
        taken.

        `*` claims from every tenant in turn, each by its weight; how many tasks one has does not matter to the others.
        The operator's.
        """
        if tenant != ALL_TENANTS:
            checks.check_tenant(tenant)
        checks.check_commands(commands)
        checks.check_limit(limit)
        if lease_s is not None:
            checks.check_lease_s(lease_s)
        if wait_s:
            checks.check_number("wait_s", wait_s, 0, checks.WAIT_MAX_S)
        if worker != "" or type(worker) is not str:
            checks.check_label("worker", worker)
        if claim_id is not None:
            checks.check_claim_id(claim_id)
        return await self._claim_within(tenant, commands, limit, lease_s, wait_s, worker, claim_id)

    async def unclaim(self, tenant: str, claim_id: bytes) -> int:
        """Puts back what a claim took whose answer nobody got, as if it had not been claimed; what was settled or taken
        back meanwhile is left alone. Returns how many. A claim that is still on its way is not stopped."""
        if tenant != ALL_TENANTS:
            checks.check_tenant(tenant)
        checks.check_claim_id(claim_id)
        return await self._unclaim(tenant, claim_id)

    async def heartbeat(self, beats: Sequence[Heartbeat]) -> builtins.list[Extended | LeaseLost | Rejected]:
        """Extends leases from now on, and tells whether a cancel was asked for."""
        rejected: dict[int, Rejected] = {}
        beats = listed(beats)
        for index, beat in enumerate(beats):
            try:
                checks.check_heartbeat(beat)
            except InvalidInput as error:
                rejected[index] = Rejected.of(error)
        outcomes: builtins.list[Extended | LeaseLost | Rejected] = []
        for batch in batches(beats, rejected, lambda _: 0):
            outcomes += await self._heartbeat(batch)
        return merged(outcomes, rejected)

    async def settle(
        self, settlements: Sequence[Settlement]
    ) -> builtins.list[Settled | Already | LeaseLost | Rejected]:
        """Ends leases. At most one settlement per token is accepted; a wrong token changes nothing."""
        rejected: dict[int, Rejected] = {}
        settlements = listed(settlements)
        for index, item in enumerate(settlements):
            try:
                checks.check_settlement(item, self.limits)
            except InvalidInput as error:
                rejected[index] = Rejected.of(error)
        outcomes: builtins.list[Settled | Already | LeaseLost | Rejected] = []
        for batch in batches(settlements, rejected, lambda item: len(item.result or b"")):
            outcomes += await self._settle(batch)
        return merged(outcomes, rejected)

    # ------------------------------------------------------------------------------------------------ looking, acting

    async def get(self, tenant: str, refs: Sequence[TaskRef]) -> builtins.list[Task | None]:
        """Returns each task as it stands. None: this tenant has no such task."""
        checks.check_tenant(tenant)
        for ref in refs:
            checks.check_ref(ref)
        return [task for batch in slices(refs) for task in await self._get(tenant, batch)]

    async def cancel(self, tenant: str, refs: Sequence[TaskRef]) -> builtins.list[Cancelled]:
        """Ends what has not started at once; asks the worker of what is in progress to stop."""
        checks.check_tenant(tenant)
        for ref in refs:
            checks.check_ref(ref)
        return [outcome for batch in slices(refs) for outcome in await self._cancel(tenant, batch)]

    async def wait(self, tenant: str, ids: Sequence[bytes], wait_s: float) -> builtins.list[Task | None]:
        """Returns how the tasks stand once any of them has ended (or does not exist), or after `wait_s`."""
        checks.check_tenant(tenant)
        checks.check_number("wait_s", wait_s, 0, checks.WAIT_MAX_S)
        checks.check_whole("the number of ids", len(ids), 1, BATCH_MAX)
        for task_id in ids:
            checks.check_id(task_id)

        return [*await self._wait(tenant, ids, wait_s)]

    async def replay(
        self, tenant: str, which: Sequence[bytes] | Filter, *, limit: int = BATCH_MAX, cursor: str | None = None
    ) -> Acted:
        """Puts dead letters back at the end of their queues with no attempts used; what is not dead is left alone."""
        self._check_which(tenant, which, limit)
        if isinstance(which, Filter) and (
            which.place not in (None, Place.DEAD) or which.status not in (None, Status.FAILED)
        ):
            raise InvalidOption("replay is about dead letters: leave place and status out of the filter")
        return await self._replay(tenant, which, limit, cursor)

    async def purge(
        self, tenant: str, which: Sequence[bytes] | Filter, *, limit: int = BATCH_MAX, cursor: str | None = None
    ) -> Acted:
        """Removes ended tasks (dead letters above all) for good and frees their keys; others are left alone."""
        self._check_which(tenant, which, limit)
        return await self._purge(tenant, which, limit, cursor)

    async def retain(self, tenant: str, ids: Sequence[bytes], result_ttl_s: float) -> builtins.list[int | None]:
        """Keeps the results of ended tasks for at least `result_ttl_s` from now; returns until when, in ms. None: no
        such task, not ended, or its result is gone."""
        checks.check_tenant(tenant)
        checks.check_number("result_ttl_s", result_ttl_s, 0, checks.TTL_MAX_S)
        for task_id in ids:
            checks.check_id(task_id)
        return [kept for batch in slices(ids) for kept in await self._retain(tenant, batch, result_ttl_s)]

    async def list(
        self, tenant: str, which: Filter | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> Page:
        """Returns tasks that match, a page at a time. Examines a bounded number of records, so a page may be short."""
        checks.check_tenant(tenant)
        checks.check_limit(limit)
        if which is not None:
            checks.check_filter(which)
        return await self._list(tenant, which or Filter(), cursor, limit)

    async def marks(self, tenant: str, *, every: int, after: bytes | None = None) -> Marks:
        """Returns ids that divide the tasks of a tenant into ranges of about `every` tasks each (1,000 to 1,000,000),
        in order. For those who list a tenant in parallel, by `id_from` and `id_until`: whatever the ids are, up to the
        first, from each to the next and from the last on are all tasks there are.

        Go on `after` the cursor of the call before. Examines a bounded number of keys, so one call may find none.
        """
        checks.check_tenant(tenant)
        checks.check_whole("every", every, MARKS_EVERY_MIN, MARKS_EVERY_MAX)
        return await self._marks(tenant, every, after)

    # ---------------------------------------------------------------------------------------------------------- loads

    async def stage(self, tenant: str, chunk_id: bytes, rows: Sequence[NewTask] | Rows) -> Staged:
        """Stores a chunk of a load: 1 to 1,000 rows that nobody sees until a commit names the chunk. Without one it is
        forgotten after 24 hours.

        `chunk_id` is minted by the caller with `new_id`; staging it again replaces what it held. A row has no id of its
        own: `row_ids` tells the one it gets from its chunk. One bad row refuses the chunk.
        """
        checks.check_tenant(tenant)
        checks.check_chunk_id(chunk_id)
        if not isinstance(rows, Rows):
            rows = rows_of(checks.check_tasks("a chunk", listed(rows)))
        checks.check_rows(tenant, rows, self.limits)
        staged = await self._stage(tenant, chunk_id, rows)
        if staged is None:
            raise StoreUnavailable(
                f"chunk {id_to_text(chunk_id)} is being committed, by a load over several shards: stage it again there"
            )
        return staged

    async def commit_load(
        self, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], *, forget_s: float | None = None
    ) -> Committed:
        """Puts the rows of the named chunks into their queues, all at once, in the order given, as if enqueued now.

        A load's name remembers the highest `seq` that was committed: a commit at or below it answers `already` and
        changes nothing, so a commit whose answer was lost can be repeated. A chunk that is not staged refuses the whole
        (`UnknownChunk`). What was staged and is not named stays unseen. `forget_s`: the name may be forgotten after so
        long; otherwise it is kept.
        """
        checks.check_tenant(tenant)
        chunk_ids = listed(chunk_ids)
        checks.check_load(name, seq, chunk_ids)
        if forget_s is not None:
            checks.check_number("forget_s", forget_s, 1, checks.TTL_MAX_S)
        return await self._commit_load(tenant, name, seq, chunk_ids, forget_s)

    async def drop(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        """Forgets staged chunks now; those that are committed, or unknown, are left alone. Returns how many."""
        checks.check_tenant(tenant)
        chunk_ids = listed(chunk_ids)
        checks.check_chunk_ids(chunk_ids)
        return sum([await self._drop(tenant, some) for some in slices(chunk_ids)])

    # --------------------------------------------------------------------------------------------- queues and workers

    async def stats(self, tenant: str, commands: Sequence[str] | None = None) -> Stats:
        """Returns exact counts of the tenant and of its queues (all of them, or those named). Where queues are many,
        they are counted some hundreds at a time, each as of its moment."""
        checks.check_tenant(tenant)
        if commands:
            checks.check_whole("the number of commands", len(commands), 0, BATCH_MAX)
        for command in commands or ():
            checks.check_command(command)
        return await self._stats(tenant, commands)

    async def configure(self, tenant: str, command: str, config: QueueConfig | None = None) -> QueueConfig:
        """Sets a queue's configuration and returns it; without one, returns what holds now. The command `*` is all the
        queues of the tenant together."""
        checks.check_tenant(tenant)
        if config is not None:
            checks.check_queue_config(command, config)
        elif command != ALL_COMMANDS:
            checks.check_command(command)
        return await self._configure(tenant, command, config)

    async def register(self, tenant: str, info: WorkerInfo, ttl_s: float) -> None:
        """Tells that a worker is alive; forgotten after `ttl_s`, which 0 makes now."""
        checks.check_tenant(tenant)
        checks.check_worker(info)
        checks.check_number("ttl_s", ttl_s, 0, 86_400)
        await self._register(tenant, info, ttl_s)

    async def workers(self, tenant: str) -> Sequence[WorkerInfo]:
        """Returns the workers that are alive, by name."""
        checks.check_tenant(tenant)
        return await self._workers(tenant)

    async def tenants(self, *, cursor: str | None = None, limit: int = 100) -> TenantPage:
        """Returns the tenants that have anything here. The operator's."""
        checks.check_limit(limit)
        if cursor is not None:
            checks.check_tenant(cursor)
        return await self._tenants(cursor, limit)

    # -------------------------------------------------------------------------------------------------------- journal

    async def events(
        self,
        tenant: str,
        *,
        shard: int = 0,
        after: bytes | None = None,
        until: bytes | None = None,
        limit: int = BATCH_MAX,
    ) -> EventPage:
        """Returns events in order, after one cursor and up to another (inclusive). `*` reads every tenant's.

        Raises `JournalReset` for a cursor of another store and `JournalTrimmed` if something after it is gone.
        """
        if tenant != ALL_TENANTS:
            checks.check_tenant(tenant)
        checks.check_limit(limit)
        page = await self._runs(tenant, shard, after, until, limit)
        return EventPage([event for run in page.runs for event in run.events()], page.cursor, page.more)

    async def runs(
        self,
        tenant: str,
        *,
        shard: int = 0,
        after: bytes | None = None,
        until: bytes | None = None,
        limit: int = BATCH_MAX,
    ) -> RunPage:
        """`events` by runs, for those who read many: at most `limit` events (up to 10,000), of which those that follow
        each other and agree in all but task and attempt are one value. A run that does not fit is cut."""
        if tenant != ALL_TENANTS:
            checks.check_tenant(tenant)
        checks.check_whole("limit", limit, 1, RUNS_MAX)
        return await self._runs(tenant, shard, after, until, limit)

    async def advance(self, reader: str, shard: int, position: bytes | None) -> None:
        """Remembers how far a named reader has come, so that trimming waits for it; None forgets the reader."""
        checks.check_label("reader", reader)
        await self._advance(reader, shard, position)

    async def sweep(self, budget: int = SWEEP_BUDGET) -> Swept:
        """Promotes what is due, takes back expired leases, prunes what retention lets go: at most `budget` of each."""
        checks.check_whole("budget", budget, 1, 100_000)
        return await self._sweep(budget)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------------- what a store implements

    @abc.abstractmethod
    async def _enqueue(
        self, tenant: str, tasks: Sequence[NewTask], ids: Sequence[bytes]
    ) -> Sequence[Enqueued | Duplicate | Rejected]:
        """`ids` are the tasks' own, or minted for those that came without."""

    @abc.abstractmethod
    async def _claim_within(
        self,
        tenant: str,
        commands: Sequence[str],
        limit: int,
        lease_s: float | None,
        wait_s: float,
        worker: str,
        claim_id: bytes | None,
    ) -> builtins.list[Lease]: ...

    @abc.abstractmethod
    async def _unclaim(self, tenant: str, claim_id: bytes) -> int: ...

    @abc.abstractmethod
    async def _heartbeat(self, beats: Sequence[Heartbeat]) -> Sequence[Extended | LeaseLost | Rejected]: ...

    @abc.abstractmethod
    async def _settle(
        self, settlements: Sequence[Settlement]
    ) -> Sequence[Settled | Already | LeaseLost | Rejected]: ...

    @abc.abstractmethod
    async def _get(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Task | None]: ...

    @abc.abstractmethod
    async def _cancel(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Cancelled]: ...

    @abc.abstractmethod
    async def _wait(self, tenant: str, ids: Sequence[bytes], wait_s: float) -> Sequence[Task | None]: ...

    @abc.abstractmethod
    async def _replay(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted: ...

    @abc.abstractmethod
    async def _purge(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted: ...

    @abc.abstractmethod
    async def _retain(self, tenant: str, ids: Sequence[bytes], result_ttl_s: float) -> Sequence[int | None]: ...

    @abc.abstractmethod
    async def _list(self, tenant: str, which: Filter, cursor: str | None, limit: int) -> Page: ...

    @abc.abstractmethod
    async def _marks(self, tenant: str, every: int, after: bytes | None) -> Marks:
        """`after` is not checked: what no call returned is an `InvalidCursor`."""

    @abc.abstractmethod
    async def _stage(self, tenant: str, chunk_id: bytes, rows: Rows) -> Staged | None:
        """None: a load holds the chunk, with other rows."""

    @abc.abstractmethod
    async def _commit_load(
        self, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], forget_s: float | None
    ) -> Committed: ...

    @abc.abstractmethod
    async def _drop(self, tenant: str, chunk_ids: Sequence[bytes]) -> int: ...

    @abc.abstractmethod
    async def _stats(self, tenant: str, commands: Sequence[str] | None) -> Stats: ...

    @abc.abstractmethod
    async def _configure(self, tenant: str, command: str, config: QueueConfig | None) -> QueueConfig: ...

    @abc.abstractmethod
    async def _register(self, tenant: str, info: WorkerInfo, ttl_s: float) -> None: ...

    @abc.abstractmethod
    async def _workers(self, tenant: str) -> Sequence[WorkerInfo]: ...

    @abc.abstractmethod
    async def _tenants(self, cursor: str | None, limit: int) -> TenantPage: ...

    @abc.abstractmethod
    async def journal_bounds(self) -> Sequence[JournalBounds]:
        """Returns what each shard's journal holds now."""

    @abc.abstractmethod
    async def _runs(self, tenant: str, shard: int, after: bytes | None, until: bytes | None, limit: int) -> RunPage:
        """The last four bytes of a cursor are an index, big-endian, that goes up by one within a run."""

    @abc.abstractmethod
    async def readers(self) -> Sequence[Reader]:
        """Returns the named readers of the journal."""

    @abc.abstractmethod
    async def _advance(self, reader: str, shard: int, position: bytes | None) -> None: ...

    @abc.abstractmethod
    async def _sweep(self, budget: int) -> Swept: ...

    @abc.abstractmethod
    def subscribe(self, topics: Iterable[Topic], limit: int = 1) -> Subscription:
        """Returns a subscription: enter it, look, then wait on it. `limit`: how many ready tasks it can use."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Lets go of the store. What was asked before is done first; who still waits, and who calls later, gets
        `StoreClosed`."""

    # -------------------------------------------------------------------------------------------------------- helpers

    def _check_which(self, tenant: str, which: Sequence[bytes] | Filter, limit: int) -> None:
        checks.check_tenant(tenant)
        checks.check_limit(limit)
        if isinstance(which, Filter):
            checks.check_filter(which)
            return
        if len(which) > BATCH_MAX:
            raise InvalidOption(f"{len(which)} ids at once: give at most {BATCH_MAX}, or a Filter")
        for task_id in which:
            checks.check_id(task_id)
