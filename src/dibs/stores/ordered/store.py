"""The queue over an ordered transactional key-value engine: one implementation, several engines.

Each verb is one function of a transaction, in the module named for it; here they meet the event loop. From a public
call to bytes: :class:`~dibs.stores.protocol.Store` checks, this hands the function to the engine, the function moves
tasks with :class:`~dibs.stores.ordered.work.Work`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dibs.checks import IN_FLIGHT_MAX, Limits
from dibs.errors import InvalidOption, JournalReset, StoreClosed, StoreUnavailable
from dibs.stores.local import LocalStore
from dibs.stores.meter import Meter
from dibs.stores.ordered import admin, decisions, fair, loads, views
from dibs.stores.ordered.claim import ClaimCall, any_due, claim, claimed, in_flight, look, new_randoms, ready_in_ms
from dibs.stores.ordered.doctor import Report, examine, repair
from dibs.stores.ordered.engine import Engine, Lane, ReadTxn
from dibs.stores.ordered.enqueue import enqueue, prepare
from dibs.stores.ordered.fair import Given, Round, Turn, fair_claim, fair_ready_in_ms
from dibs.stores.ordered.journal import Cursor, JournalReader
from dibs.stores.ordered.keys import READERS, end_of, fact_key, parse_reader_key
from dibs.stores.ordered.marks import marks
from dibs.stores.ordered.settle import heartbeat, settle, undo_claim
from dibs.stores.ordered.sweep import TRANSACTION_MAX, JournalLimits, anything_due, sweep
from dibs.stores.protocol import ALL_TENANTS
from dibs.stores.wakeups import Ready, Subscription, Topic
from dibs.task import (
    ALL_COMMANDS,
    CHUNK_KEEP_S,
    NOTHING,
    Acted,
    Already,
    Cancelled,
    Committed,
    Decision,
    Duplicate,
    Elsewhere,
    Enqueued,
    Extended,
    Filter,
    Heartbeat,
    InFlight,
    JournalBounds,
    Lease,
    LeaseLost,
    LoadState,
    Look,
    Marks,
    NewTask,
    Page,
    QueueConfig,
    Reader,
    ReadyTenants,
    Rejected,
    Rows,
    RunPage,
    Settled,
    Settlement,
    Staged,
    StagedPart,
    Stats,
    Swept,
    Task,
    TaskRef,
    TenantPage,
    TurnsTaken,
    WorkerInfo,
)

STATS_STEP = 500
"""So many queues are counted at once."""

T = TypeVar("T")

READERS_MAX = 1_000


class OrderedStore(LocalStore):
    """A store on one :class:`~dibs.stores.ordered.engine.Engine`. It has one journal: shard 0."""

    def __init__(self, engine: Engine, limits: Limits, journal_limits: JournalLimits) -> None:
        super().__init__(limits)
        self._engine = engine
        self._journal_limits = journal_limits
        self._closed = False
        self._giving_back: set[asyncio.Future[None]] = set()
        self._turn = Turn.anywhere()
        self._meter: Meter | None = None

    # ------------------------------------------------------------------------------------------------- life of a task

    async def _enqueue(
        self, tenant: str, tasks: Sequence[NewTask], ids: Sequence[bytes]
    ) -> Sequence[Enqueued | Duplicate | Rejected]:
        batch = [prepare(tenant, task, task_id) for task, task_id in zip(tasks, ids, strict=True)]
        return await self._lane().transact_items(lambda txn, items: enqueue(txn, tenant, items), batch, tenant)

    async def _claim(
        self,
        tenant: str,
        commands: Sequence[str],
        limit: int,
        lease_s: float | None,
        worker: str,
        claim_id: bytes | None,
        elsewhere: Elsewhere = NOTHING,
    ) -> list[Lease]:
        lease_ms = 0 if lease_s is None else round(lease_s * 1000)
        call = ClaimCall(tenant, tuple(commands), lease_ms, worker, claim_id, elsewhere)
        if tenant == ALL_TENANTS:
            return await self._claim_fairly(call, limit)
        # Claims that differ in nothing may share a run; one that may be a repeat has to be looked at by itself.
        taken = self._lane().transact_items(
            lambda txn, randoms: claim(txn, call, randoms),
            new_randoms(limit),
            call if claim_id is None else None,
            self._give_back,
        )
        try:
            outcomes = await taken
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                self._give_back(taken.result())
            raise
        leases = [lease for lease in outcomes if lease is not None]
        if leases or not outcomes:
            return leases
        return await self._claim(tenant, commands, limit, lease_s, worker, claim_id, elsewhere)

    async def _claim_fairly(self, call: ClaimCall, limit: int) -> list[Lease]:
        """Goes around the tenants, in as many transactions as it takes to find something or to have seen them all."""
        around = Round(self._turn.tenant, self._turn)
        while True:
            taken = self._lane().transact_items(
                lambda txn, randoms, around=around: fair_claim(txn, call, randoms, around),  # type: ignore[misc]
                new_randoms(limit),
                call if call.claim_id is None else None,
                self._give_back_given,
            )
            try:
                given = await taken
            except asyncio.CancelledError:
                if taken.done() and not taken.cancelled() and taken.exception() is None:
                    self._give_back_given(taken.result())
                raise
            if not given:
                return []
            around = given[-1].around
            self._turn = around.turn
            leases = [one.lease for one in given if one.lease is not None]
            if leases:
                return leases

    def _give_back_given(self, given: list[Given]) -> None:
        self._give_back([one.lease for one in given])

    async def _claimed(self, tenant: str, claim_id: bytes) -> list[Lease] | None:
        return self._read(lambda txn: claimed(txn, tenant, claim_id))

    async def _undo_claim(self, leases: Sequence[Lease]) -> None:
        await self._lane().transact(lambda txn: undo_claim(txn, leases))

    def _give_back(self, taken: list[Lease | None]) -> None:
        """Undoes a claim whose caller had gone before its answer came."""
        leases = [lease for lease in taken if lease is not None]
        if leases:
            undone = self._engine.lane().transact(lambda txn: undo_claim(txn, leases))
            self._giving_back.add(undone)
            # Nobody but `close` waits for it: should it fail, the leases run out by themselves.
            undone.add_done_callback(lambda future: future.cancelled() or future.exception())
            undone.add_done_callback(self._giving_back.discard)

    async def _held(self, tenant: str, ids: Sequence[bytes], worker: str) -> Sequence[bytes | None]:
        return self._read(lambda txn: views.held(txn, tenant, ids, worker))

    async def _ready_in_s(self, tenant: str, commands: Sequence[str]) -> float | None:
        if tenant == ALL_TENANTS:
            in_ms = self._read(lambda txn: fair_ready_in_ms(txn, commands, self._turn))
        else:
            in_ms = self._read(lambda txn: ready_in_ms(txn, tenant, commands))
        return None if in_ms is None else in_ms / 1000

    async def _look(self, tenant: str, commands: Sequence[str], elsewhere: Elsewhere) -> Look:
        if tenant == ALL_TENANTS:
            return Look(await self._ready_in_s(tenant, commands), capped=False)
        in_ms, capped = self._read(lambda txn: look(txn, tenant, commands, elsewhere))
        return Look(None if in_ms is None else in_ms / 1000, capped)

    async def _in_flight(self, tenants: Sequence[str], commands: Sequence[str]) -> Mapping[tuple[str, str], InFlight]:
        return self._read(lambda txn: in_flight(txn, tenants, commands))

    async def _any_due(self, tenant: str, commands: Sequence[str]) -> bool:
        if tenant == ALL_TENANTS:
            return self._read(lambda txn: fair.any_due(txn, commands))
        return self._read(lambda txn: any_due(txn, tenant, commands))

    async def _ready_tenants(self, commands: Sequence[str], after: str, limit: int, *, itself: bool) -> ReadyTenants:
        return self._read(lambda txn: fair.ready_tenants(txn, commands, after, limit, itself=itself))

    async def _claim_turns(
        self,
        turns: Sequence[tuple[str, int]],
        commands: Sequence[str],
        lease_s: float | None,
        worker: str,
        claim_id: bytes | None,
        elsewhere: Elsewhere,
        *,
        further: bool,
    ) -> TurnsTaken:
        lease_ms = 0 if lease_s is None else round(lease_s * 1000)
        call = ClaimCall(ALL_TENANTS, tuple(commands), lease_ms, worker, claim_id, elsewhere)
        randoms = new_randoms(sum(share for _, share in turns))
        taken = self._lane().transact(
            lambda txn: fair.claim_turns(txn, call, turns, randoms, further=further),
            lambda taken: self._give_back([*taken.leases]),
        )
        try:
            return await taken
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                self._give_back([*taken.result().leases])
            raise

    async def _heartbeat(self, beats: Sequence[Heartbeat]) -> Sequence[Extended | LeaseLost | Rejected]:
        return await self._lane().transact_items(heartbeat, beats, heartbeat)

    async def _settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Already | LeaseLost | Rejected]:
        return await self._lane().transact_items(settle, settlements, settle)

    # ------------------------------------------------------------------------------------------------ looking, acting

    async def _get(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Task | None]:
        return self._read(lambda txn: views.get(txn, tenant, refs))

    async def _cancel(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Cancelled]:
        return await self._lane().transact(lambda txn: admin.cancel(txn, tenant, refs))

    async def _replay(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
        return await self._lane().transact(lambda txn: admin.replay(txn, tenant, which, limit, cursor))

    async def _purge(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
        return await self._lane().transact(lambda txn: admin.purge(txn, tenant, which, limit, cursor))

    async def _retain(self, tenant: str, ids: Sequence[bytes], result_ttl_s: float) -> Sequence[int | None]:
        ttl_ms = round(result_ttl_s * 1000)
        return await self._lane().transact(lambda txn: admin.retain(txn, tenant, ids, ttl_ms))

    async def _list(self, tenant: str, which: Filter, cursor: str | None, limit: int) -> Page:
        return self._read(lambda txn: views.list_page(txn, tenant, which, cursor, limit))

    async def _marks(self, tenant: str, every: int, after: bytes | None, until: bytes | None = None) -> Marks:
        return self._read(lambda txn: marks(txn, tenant, every, after, until))

    # ---------------------------------------------------------------------------------------------------------- loads

    async def _stage(
        self,
        tenant: str,
        chunk_id: bytes,
        rows: Rows,
        ids: Sequence[bytes] | None = None,
        parts: Sequence[int] = (),
        keep_s: float = CHUNK_KEEP_S,
        content: bytes = b"",
    ) -> Staged | None:
        chunk = loads.prepare_chunk(tenant, chunk_id, rows, ids, self._engine.clock.now_ms())
        chunk.head.parts, chunk.head.content = [*parts], content
        keep_ms = round(keep_s * 1000)
        return await self._lane().transact(lambda txn: loads.stage(txn, tenant, chunk, keep_ms))

    async def _has_rows(self, tenant: str, chunk_id: bytes) -> bool:
        return self._read(lambda txn: loads.has_rows(txn, tenant, chunk_id))

    async def _staged(self, tenant: str, chunk_ids: Sequence[bytes]) -> Sequence[StagedPart | None]:
        return self._read(lambda txn: loads.staged(txn, tenant, chunk_ids))

    async def _reserve(
        self, tenant: str, chunk_ids: Sequence[bytes], holder: str, hold_s: float
    ) -> Sequence[StagedPart | None]:
        hold_ms = round(hold_s * 1000)
        return await self._lane().transact(lambda txn: loads.reserve(txn, tenant, chunk_ids, holder, hold_ms))

    async def _release(self, tenant: str, holds: Sequence[tuple[bytes, int]]) -> None:
        await self._lane().transact(lambda txn: loads.release(txn, tenant, holds))

    async def _commit_load(
        self, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], forget_s: float | None
    ) -> Committed:
        forget_ms = None if forget_s is None else round(forget_s * 1000)
        return await self._lane().transact(lambda txn: loads.commit_load(txn, tenant, name, seq, chunk_ids, forget_ms))

    async def _commit_chunks(self, tenant: str, chunk_ids: Sequence[bytes], at_ms: int) -> None:
        await self._lane().transact(lambda txn: loads.commit_chunks(txn, tenant, chunk_ids, at_ms))

    async def _decide(self, decision: Decision, seen: LoadState) -> Decision | None:
        return await self._lane().transact(lambda txn: decisions.decide(txn, decision, seen))

    async def _fence(self, tenant: str, name: str) -> Decision | None:
        return await self._lane().transact(lambda txn: decisions.fence(txn, tenant, name))

    async def _load_state(self, tenant: str, name: str) -> LoadState:
        return self._read(lambda txn: decisions.load_state(txn, tenant, name))

    async def _decisions(self, older_s: float) -> Sequence[Decision]:
        older_ms = round(older_s * 1000)
        return self._read(lambda txn: decisions.pending(txn, older_ms))

    async def _done(self, decision: Decision) -> None:
        await self._lane().transact(lambda txn: decisions.done(txn, decision))

    async def _drop(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        return await self._lane().transact(lambda txn: loads.drop(txn, tenant, chunk_ids))

    # --------------------------------------------------------------------------------------------- queues and workers

    async def _stats(self, tenant: str, commands: Sequence[str] | None) -> Stats:
        left = None if commands is None else [*commands]
        after = ""

        def step(txn: ReadTxn) -> Stats:
            some = views.queue_names(txn, tenant, after, STATS_STEP) if left is None else left[:STATS_STEP]
            return views.stats(txn, tenant, some)

        # So many queues are counted as of one moment; those beyond that as of a later one, after others had their turn.
        found = step_found = self._read(step)
        while len(step_found.queues) == STATS_STEP:
            await asyncio.sleep(0)
            after = step_found.queues[-1].command
            if left is not None:
                del left[:STATS_STEP]
            step_found = self._read(step)
            found.queues.extend(step_found.queues)
        return found

    async def _configure(self, tenant: str, command: str, config: QueueConfig | None) -> QueueConfig:
        lane = self._lane()
        held = await lane.transact(lambda txn: admin.configure(txn, tenant, command, config))
        if config is not None and not held.paused:
            if command == ALL_COMMANDS:
                lane.wakeups.wake_tenant(tenant, IN_FLIGHT_MAX)
            else:
                lane.wakeups.wake(Ready(tenant, command), IN_FLIGHT_MAX)
        return held

    async def _register(self, tenant: str, info: WorkerInfo, ttl_s: float) -> None:
        ttl_ms = round(ttl_s * 1000)
        await self._lane().transact(lambda txn: admin.register(txn, tenant, info, ttl_ms))

    async def _workers(self, tenant: str) -> Sequence[WorkerInfo]:
        after: bytes | None = None

        def step(txn: ReadTxn) -> tuple[list[WorkerInfo], bytes | None]:
            return views.workers(txn, tenant, after)

        alive, after = self._read(step)
        while after is not None:
            await asyncio.sleep(0)
            some, after = self._read(step)
            alive += some
        return alive

    async def _tenants(self, cursor: str | None, limit: int) -> TenantPage:
        return self._read(lambda txn: views.tenants(txn, cursor, limit))

    # -------------------------------------------------------------------------------------------------------- journal

    async def journal_bounds(self) -> Sequence[JournalBounds]:
        def bounds(txn: ReadTxn) -> JournalBounds:
            reader = JournalReader(txn, self._engine.store_id)
            return JournalBounds(0, reader.start().pack(), reader.newest().pack())

        return [self._read(bounds)]

    async def _runs(self, tenant: str, shard: int, after: bytes | None, until: bytes | None, limit: int) -> RunPage:
        _check_shard(shard)
        whose = None if tenant == ALL_TENANTS else tenant
        return self._read(lambda txn: JournalReader(txn, self._engine.store_id).page(whose, after, until, limit))

    async def readers(self) -> Sequence[Reader]:
        stored = self._read(lambda txn: txn.scan(READERS, end_of(READERS), READERS_MAX))
        return [Reader(*parse_reader_key(key), position) for key, position in stored]

    async def _advance(self, reader: str, shard: int, position: bytes | None) -> None:
        _check_shard(shard)
        if position is not None and Cursor.unpack(position).store_id != self._engine.store_id:
            raise JournalReset("this cursor is of another store: advance by one that this store's events returned")
        await self._lane().transact(lambda txn: admin.advance(txn, reader, shard, position))

    async def _sweep(self, budget: int) -> Swept:
        self._check_open()
        limits, store_id = self._journal_limits, self._engine.store_id
        self._engine.tend()
        total = Swept()
        while budget > 0 and self._read(lambda txn: anything_due(txn, limits)):
            size = min(budget, TRANSACTION_MAX)
            total += await self._lane().transact(lambda txn, size=size: sweep(txn, size, limits, store_id))  # type: ignore[misc]
            if not total.more:
                break
            budget -= size
        return total

    def subscribe(self, topics: Iterable[Topic], limit: int = 1) -> Subscription:
        lane = self._lane()
        lane.watch()
        return lane.wakeups.subscribe(topics, limit)

    # ------------------------------------------------------------------------------------------------- the store itself

    @property
    def store_id(self) -> bytes:
        """Names this store; a restored backup has another."""
        return self._engine.store_id

    @property
    def meter(self) -> Meter | None:
        return self._engine.meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._engine.meter = self._meter = meter

    async def probe(self) -> Sequence[int]:
        self._check_open()
        self._engine.tend()
        await self._lane().transact(lambda txn: txn.version)
        return ()

    async def _fact(self, name: str, value: bytes | None = None) -> bytes | None:
        known = self._read(lambda txn: txn.get(fact_key(name)))
        if known is not None or value is None:
            return known
        return await self._lane().transact(lambda txn: admin.fact(txn, name, value))

    async def doctor(self, *, mend: bool = False, slots: bytes | None = None) -> Report:
        """Checks every invariant of the store on one consistent view; with `mend`, repairs what it can and looks again.

        Reads everything: minutes for many millions of tasks. Nothing else stops meanwhile.
        """
        self._check_open()
        report = await asyncio.to_thread(self._engine.read, lambda txn: examine(txn, slots))
        if not mend or report.clean:
            return report
        await self._lane().transact(repair)
        return await asyncio.to_thread(self._engine.read, lambda txn: examine(txn, slots))

    async def backup(self, directory: str | os.PathLike[str]) -> None:
        """Copies the store, as of one moment, into a new directory, while everything goes on."""
        self._check_open()
        await asyncio.to_thread(self._engine.backup, Path(directory))

    async def close(self) -> None:
        if self._closed:
            return
        lane = self._lane()
        lane.flush()
        self._closed = True
        lane.wakeups.wake_everybody()
        try:
            if lane.busy():
                await self._engine.drained()
            await asyncio.gather(*self._giving_back, return_exceptions=True)
        except StoreUnavailable:
            pass  # Whoever asked for something has been told; closing is how to recover.
        finally:
            if self._meter is not None and self._engine.meter is self._meter:
                self._engine.meter = None
            self._engine.release()

    def _lane(self) -> Lane:
        self._check_open()
        return self._engine.lane()

    def _read(self, fn: Callable[[ReadTxn], T]) -> T:
        self._check_open()
        return self._engine.read(fn)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self._engine.describe()} was closed: open it again")


def _check_shard(shard: int) -> None:
    if shard != 0:
        raise InvalidOption(f"there is no shard {shard} here: this store has one, number 0")
