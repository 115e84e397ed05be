"""N stores as one. Each task lives in the shard of its slot, and each verb asks the shards that it concerns.

Order holds within a shard. A shard that does not answer takes nothing with it: claims, sweeps, registrations and tasks
without an id of their own go on with the others; items that belong to it are rejected one by one; what needs all
shards (counts, listings, configuration) raises `StoreUnavailable` and names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary
from zlib import crc32

from msgspec.structs import replace

from dibs.checks import Limits
from dibs.errors import InvalidOption, StoreClosed, StoreError, StoreFull, StoreUnavailable
from dibs.stores.batches import is_bound, is_full
from dibs.stores.local import LocalStore
from dibs.stores.marks import MarkCursor
from dibs.stores.meter import Meter
from dibs.stores.ordered.doctor import PROBLEMS_MAX, Problem, Report
from dibs.stores.protocol import ALL_TENANTS, Order
from dibs.stores.sharded import caps, loads
from dibs.stores.sharded.copies import made_whole
from dibs.stores.sharded.cursors import Cursor, listing_of, unpack
from dibs.stores.sharded.shard import Shard
from dibs.stores.sharded.shards import PASSED_OVER, Shards, grouped
from dibs.stores.sharded.turns import FairCall, Turns, merged
from dibs.stores.sharded.waiting import SharedSubscription
from dibs.stores.wakeups import Ended, Subscription, Topic
from dibs.task import (
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
    QueueStats,
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

#: Claims of several processes that meet at a cap so often, one after the other, leave the rest to their next look.
TRIES_AT_CAPS = 5
AGAIN_AT_CAPS_S = 0.02

#: Takes at most so many from one shard, knowing what is in progress in the others.
Take = Callable[[LocalStore, int, Elsewhere], Awaitable[list[Lease]]]


class ShardedStore(LocalStore):
    """A set of shards. `open_shards` opens one."""

    order = Order("per_shard")
    reopens = True

    def __init__(self, shards: Shards, limits: Limits) -> None:
        super().__init__(limits)
        self._shards = shards
        self._closed = False
        self._turn = itertools.count()
        self._ready_at: int | None = None
        """Where a look has just found something."""
        self._giving_back: set[asyncio.Task[None]] = set()
        self._turns = Turns(shards)
        self._at_caps: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Claims of a tenant that has caps wait for each other: all of them would count the same room."""

    # ------------------------------------------------------------------------------------------------- life of a task

    async def _enqueue(
        self, tenant: str, tasks: Sequence[NewTask], ids: Sequence[bytes]
    ) -> Sequence[Enqueued | Duplicate | Rejected]:
        """Tasks with an id, a key or a `limit_key` go where they belong. The others of a batch go together: with the
        first of those, or to one shard after the other; and to the next if that one is down or full."""
        self._check_open()
        ids = [*ids]
        free = [index for index, task in enumerate(tasks) if not task.id and not is_bound(task)]
        groups = grouped(ids, self._shards.of_id, but=free)

        async def put(store: LocalStore, some: Sequence[int]) -> Sequence[Enqueued | Duplicate | Rejected]:
            return await store._enqueue(tenant, [tasks[index] for index in some], [ids[index] for index in some])

        outcomes: list[Enqueued | Duplicate | Rejected] = [Rejected("", "")] * len(tasks)
        down: StoreUnavailable | None = None
        for home in self._shards.from_on(next(iter(groups)) if groups else next(self._turn)):
            if free:
                for index in free:
                    ids[index] = self._shards.placed(ids[index], home.number)
                groups[home.number] = sorted([*groups.get(home.number, ()), *free])
            for number, answer in (await self._shards.outcomes(groups, put)).items():
                if isinstance(answer, StoreUnavailable):
                    down, answer = answer, [Rejected.of(answer)] * len(groups[number])  # noqa: PLW2901 by item
                for index, outcome in zip(groups[number], answer, strict=True):
                    outcomes[index] = outcome
            free = [index for index in free if _elsewhere(outcomes[index])]
            if not free:
                break
            groups = {}
        if down is not None and all(_is(outcome, StoreUnavailable) for outcome in outcomes):
            raise down
        return outcomes

    async def _claim(
        self,
        tenant: str,
        commands: Sequence[str],
        limit: int,
        lease_s: float | None,
        worker: str,
        claim_id: bytes | None,
        elsewhere: Elsewhere = NOTHING,  # noqa: ARG002 shards of shards there are none
    ) -> list[Lease]:
        """Takes from one shard after the other. A claim id that any shard knows is a repeat: it gets what is alive of
        the first claim, from wherever, and nothing new."""
        self._check_open()
        start, self._ready_at = self._ready_at, None
        if claim_id is not None:
            start = crc32(claim_id)
            repeated = await self._claimed(tenant, claim_id)
            if repeated is not None:
                return repeated
        if tenant == ALL_TENANTS and len(self._shards) > 1:
            call = FairCall(commands, lease_s, worker, claim_id)
            return await self._turns.claim(call, limit, start, self._give_back)

        async def take(store: LocalStore, left: int, elsewhere: Elsewhere) -> list[Lease]:
            # A claim that finds nothing would still have to wait its turn to write: looking is cheaper.
            seen = await store._look(tenant, commands, elsewhere)
            if seen.capped and elsewhere is NOTHING and len(self._shards) > 1:
                raise caps.HasCaps
            if seen.ready_in_s != 0:
                return []
            return await store._claim(tenant, commands, left, lease_s, worker, claim_id, elsewhere)

        try:
            return await self._take(take, tenant, commands, limit, start)
        except caps.HasCaps:
            return await self._take_within_caps(take, tenant, commands, limit, start)

    async def _take(
        self,
        take: Take,
        tenant: str,
        commands: Sequence[str],
        limit: int,
        start: int | None,
        in_progress: caps.InProgress | None = None,
    ) -> list[Lease]:
        leases: list[Lease] = []
        down: list[StoreError] = []
        for shard in self._shards.from_on(start):
            elsewhere = NOTHING if in_progress is None else in_progress.elsewhere(shard.number, tenant, commands)
            left = limit - len(leases)
            try:
                taken = await shard.ask(lambda store: take(store, left, elsewhere))  # noqa: B023 asked at once
                leases += taken
                if in_progress is not None:
                    in_progress.took(shard.number, taken)
            except PASSED_OVER as error:
                down.append(error)
            except asyncio.CancelledError:
                self._give_back(leases)
                raise
            except Exception:
                if not leases:
                    raise
                return leases
            if len(leases) >= limit or is_full(leases):
                return leases
        if len(down) == len(self._shards):
            raise down[0]
        return leases

    async def _take_within_caps(
        self, take: Take, tenant: str, commands: Sequence[str], limit: int, start: int | None
    ) -> list[Lease]:
        """Takes what the caps leave over all shards; again if others were taking at the same moment and nothing was
        left of it."""
        leases: list[Lease] = []
        async with self._at_caps.setdefault(tenant, asyncio.Lock()):
            for _ in range(TRIES_AT_CAPS):
                try:
                    await caps.note_due(self._shards, tenant, commands)
                    in_progress = await caps.counted(self._shards, [tenant], commands)
                    leases = await self._take(take, tenant, commands, limit, start, in_progress)
                    over = (await caps.counted(self._shards, [tenant], commands)).over(leases) if leases else []
                except BaseException:
                    self._give_back(leases)
                    raise
                leases = [lease for lease in leases if lease not in over]
                undone = self._give_back(over)
                if leases or undone is None:
                    break
                await asyncio.wait([undone])
                await asyncio.sleep(random.uniform(0, AGAIN_AT_CAPS_S))
        return leases

    async def _claimed(self, tenant: str, claim_id: bytes) -> list[Lease] | None:
        self._check_open()
        answers = await self._shards.some(lambda store: store._claimed(tenant, claim_id))
        known = [answers[shard.number] for shard in self._shards.from_on(crc32(claim_id))]
        if all(leases is None for leases in known):
            return None
        return [lease for leases in known for lease in leases or ()]

    async def _undo_claim(self, leases: Sequence[Lease]) -> None:
        self._check_open()

        async def undo(store: LocalStore, some: Sequence[Lease]) -> Sequence[None]:
            await store._undo_claim(some)
            return [None] * len(some)

        await self._shards.split(leases, lambda lease: self._shards.of_id(lease.id), undo)

    def _give_back(self, leases: Sequence[Lease]) -> asyncio.Task[None] | None:
        """Undoes a claim whose caller has gone, in the background: nobody but `close` waits for it, and should it
        fail, the leases run out by themselves."""

        async def undo() -> None:
            with contextlib.suppress(StoreError):
                await self._undo_claim(leases)

        if not leases:
            return None
        undone = asyncio.get_running_loop().create_task(undo())
        self._giving_back.add(undone)
        undone.add_done_callback(self._giving_back.discard)
        return undone

    async def _ready_in_s(self, tenant: str, commands: Sequence[str]) -> float | None:
        """One after the other, up to the first that has something: a look is cheap, and the claim that follows begins
        there."""
        return (await self._look(tenant, commands, NOTHING)).ready_in_s

    async def _look(
        self,
        tenant: str,
        commands: Sequence[str],
        elsewhere: Elsewhere,  # noqa: ARG002 shards of shards there are none
    ) -> Look:
        self._check_open()
        in_progress: caps.InProgress | None = None

        async def look(store: LocalStore, number: int) -> Look:
            nonlocal in_progress
            seen = await store._look(tenant, commands, NOTHING)
            if not seen.capped or len(self._shards) == 1:
                return seen
            in_progress = in_progress or await caps.counted(self._shards, [tenant], commands)
            return await store._look(tenant, commands, in_progress.elsewhere(number, tenant, commands))

        soonest: float | None = None
        down: list[StoreError] = []
        for shard in self._shards.from_on():
            try:
                seen = await shard.ask(lambda store: look(store, shard.number))  # noqa: B023 asked at once
            except PASSED_OVER as error:
                down.append(error)
                continue
            if seen.ready_in_s == 0:
                self._ready_at = shard.number
                return seen
            if seen.ready_in_s is not None:
                soonest = seen.ready_in_s if soonest is None else min(soonest, seen.ready_in_s)
        if len(down) == len(self._shards):
            raise down[0]
        return Look(soonest, in_progress is not None)

    async def _in_flight(self, tenants: Sequence[str], commands: Sequence[str]) -> Mapping[tuple[str, str], InFlight]:
        self._check_open()
        return (await caps.counted(self._shards, tenants, commands)).in_all()

    async def _any_due(self, tenant: str, commands: Sequence[str]) -> bool:
        self._check_open()
        return any(await self._shards.some(lambda store: store._any_due(tenant, commands)))

    async def _ready_tenants(self, commands: Sequence[str], after: str, limit: int, *, itself: bool) -> ReadyTenants:
        self._check_open()
        pages = await self._shards.some(lambda store: store._ready_tenants(commands, after, limit, itself=itself))
        return merged(pages)[0]

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
        self._check_open()
        asked = commands, lease_s, worker, claim_id, elsewhere
        left, total = dict(turns), TurnsTaken([], [])
        for shard in self._shards.from_on():
            still = [(name, share) for name, share in left.items() if share]
            taken = await shard.ask(lambda store: store._claim_turns(still, *asked, further=further))  # noqa: B023 asked at once
            for lease in taken.leases:
                left[lease.tenant] -= 1
            total = TurnsTaken([*total.leases, *taken.leases], [*total.unseen, *taken.unseen])
        return total

    async def _heartbeat(self, beats: Sequence[Heartbeat]) -> Sequence[Extended | LeaseLost | Rejected]:
        self._check_open()
        return await self._shards.split_or_reject(
            grouped(beats, lambda beat: self._shards.of_id(beat.id)),
            lambda store, some: store._heartbeat([beats[index] for index in some]),
        )

    async def _settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Already | LeaseLost | Rejected]:
        self._check_open()
        return await self._shards.split_or_reject(
            grouped(settlements, lambda item: self._shards.of_id(item.id)),
            lambda store, some: store._settle([settlements[index] for index in some]),
        )

    # ------------------------------------------------------------------------------------------------ looking, acting

    async def _get(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Task | None]:
        self._check_open()
        return await self._shards.split(
            refs, lambda ref: self._shards.of_ref(tenant, ref), lambda store, some: store._get(tenant, some)
        )

    async def _held(self, tenant: str, ids: Sequence[bytes], worker: str) -> Sequence[bytes | None]:
        self._check_open()
        return await self._shards.split(ids, self._shards.of_id, lambda store, some: store._held(tenant, some, worker))

    async def _cancel(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Cancelled]:
        self._check_open()
        return await self._shards.split(
            refs, lambda ref: self._shards.of_ref(tenant, ref), lambda store, some: store._cancel(tenant, some)
        )

    async def _replay(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
        return await self._act(tenant, which, limit, cursor, lambda store, *asked: store._replay(tenant, *asked))

    async def _purge(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
        return await self._act(tenant, which, limit, cursor, lambda store, *asked: store._purge(tenant, *asked))

    async def _act(
        self,
        tenant: str,
        which: Sequence[bytes] | Filter,
        limit: int,
        cursor: str | None,
        act: Callable[[LocalStore, Sequence[bytes] | Filter, int, str | None], Awaitable[Acted]],
    ) -> Acted:
        """Acts on those that are named, or on those that match, shard after shard."""
        self._check_open()
        if not isinstance(which, Filter):

            async def one_by_one(store: LocalStore, some: Sequence[bytes]) -> Sequence[bool]:
                acted = {*(await act(store, some, limit, None)).ids}
                return [task_id in acted for task_id in some]

            ids = list(dict.fromkeys(which))
            done = await self._shards.split(ids, self._shards.of_id, one_by_one)
            return Acted([task_id for task_id, acted in zip(ids, done, strict=True) if acted])
        found: list[bytes] = []
        at: Cursor | None = self._cursor(tenant, which, cursor)
        while at is not None and len(found) < limit:
            here, left = at, limit - len(found)
            acted = await self._shards.all[here.shard].ask(lambda store: act(store, which, left, here.inner))  # noqa: B023 asked at once
            found += acted.ids
            at = self._after(here, acted.cursor)
            if acted.cursor is not None:
                break
        return Acted(found, None if at is None else at.pack())

    async def _retain(self, tenant: str, ids: Sequence[bytes], result_ttl_s: float) -> Sequence[int | None]:
        self._check_open()
        return await self._shards.split(
            ids, self._shards.of_id, lambda store, some: store._retain(tenant, some, result_ttl_s)
        )

    async def _list(self, tenant: str, which: Filter, cursor: str | None, limit: int) -> Page:
        """One shard's tasks after the other's; in order within each."""
        self._check_open()
        tasks: list[Task] = []
        at: Cursor | None = self._cursor(tenant, which, cursor)
        while at is not None and len(tasks) < limit:
            here, left = at, limit - len(tasks)
            page = await self._shards.all[here.shard].ask(lambda store: store._list(tenant, which, here.inner, left))  # noqa: B023 asked at once
            tasks += page.tasks
            at = self._after(here, page.cursor)
            if page.cursor is not None:
                # It stopped because it had examined, or held, enough.
                break
        return Page(tasks, None if at is None else at.pack())

    async def _marks(self, tenant: str, every: int, after: bytes | None, until: bytes | None = None) -> Marks:
        """The marks of all shards: a range has at most `every` tasks of each."""
        self._check_open()
        begun = MarkCursor.unpack(after, len(self._shards))

        async def marks_of(store: LocalStore, shards: Sequence[int]) -> Sequence[Marks]:
            return [await store._marks(tenant, every, begun.of(shard), until) for shard in shards]

        async def of_all() -> list[Marks]:
            return await self._shards.split(range(len(self._shards)), int, marks_of)

        found = await of_all()
        ends = [MarkCursor.unpack(one.cursor, 1).after for one in found if one.cursor is not None]
        if ends and until is None:
            # They go on together: none may be past where another stopped.
            until = min(ends)
            found = await of_all()
        ids = sorted({task_id for one in found for task_id in one.ids})
        if until is None:
            return Marks(ids)
        counts = [count for one in found for count in MarkCursor.unpack(one.cursor, 1).counts]
        return Marks(ids, MarkCursor(until, tuple(counts)).pack())

    def _cursor(self, tenant: str, which: Filter, cursor: str | None) -> Cursor:
        return unpack(cursor, listing_of(self._shards.set_id, tenant, which), len(self._shards))

    def _after(self, here: Cursor, inner: str | None) -> Cursor | None:
        if inner is not None:
            return replace(here, inner=inner)
        return replace(here, shard=here.shard + 1, inner=None) if here.shard + 1 < len(self._shards) else None

    # ---------------------------------------------------------------------------------------------------------- loads

    async def _stage(
        self,
        tenant: str,
        chunk_id: bytes,
        rows: Rows,
        ids: Sequence[bytes] | None = None,  # noqa: ARG002 shards of shards there are none
        parts: Sequence[int] = (),  # noqa: ARG002
        keep_s: float = CHUNK_KEEP_S,
        content: bytes = b"",  # noqa: ARG002
    ) -> Staged | None:
        self._check_open()
        return await loads.stage(self._shards, tenant, chunk_id, rows, keep_s)

    async def _reserve(
        self, tenant: str, chunk_ids: Sequence[bytes], holder: str, hold_s: float
    ) -> Sequence[StagedPart | None]:
        self._check_open()
        return await self._shards.split(
            chunk_ids, self._shards.of_id, lambda store, some: store._reserve(tenant, some, holder, hold_s)
        )

    async def _release(self, tenant: str, holds: Sequence[tuple[bytes, int]]) -> None:
        self._check_open()

        async def release(store: LocalStore, some: Sequence[tuple[bytes, int]]) -> Sequence[None]:
            await store._release(tenant, some)
            return [None] * len(some)

        await self._shards.split(holds, lambda hold: self._shards.of_id(hold[0]), release)

    async def _commit_load(
        self, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], forget_s: float | None
    ) -> Committed:
        self._check_open()
        return await loads.commit_load(self._shards, tenant, name, seq, chunk_ids, forget_s)

    async def _drop(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        self._check_open()
        return await loads.drop(self._shards, tenant, chunk_ids)

    async def _has_rows(self, tenant: str, chunk_id: bytes) -> bool:
        self._check_open()
        return any(await self._shards.each(lambda store: store._has_rows(tenant, chunk_id)))

    async def _staged(self, tenant: str, chunk_ids: Sequence[bytes]) -> Sequence[StagedPart | None]:
        self._check_open()
        return await self._shards.split(chunk_ids, self._shards.of_id, lambda store, some: store._staged(tenant, some))

    async def _commit_chunks(self, tenant: str, chunk_ids: Sequence[bytes], at_ms: int) -> None:
        self._check_open()

        async def commit(store: LocalStore, some: Sequence[bytes]) -> Sequence[None]:
            await store._commit_chunks(tenant, some, at_ms)
            return [None] * len(some)

        await self._shards.split(chunk_ids, self._shards.of_id, commit)

    async def _decide(self, decision: Decision, seen: LoadState) -> Decision | None:
        return await self._home(decision.tenant, decision.name).ask(lambda store: store._decide(decision, seen))

    async def _fence(self, tenant: str, name: str) -> Decision | None:
        return await self._home(tenant, name).ask(lambda store: store._fence(tenant, name))

    async def _load_state(self, tenant: str, name: str) -> LoadState:
        return await self._home(tenant, name).ask(lambda store: store._load_state(tenant, name))

    async def _decisions(self, older_s: float) -> Sequence[Decision]:
        self._check_open()
        return [one for some in await self._shards.each(lambda store: store._decisions(older_s)) for one in some]

    async def _done(self, decision: Decision) -> None:
        await self._home(decision.tenant, decision.name).ask(lambda store: store._done(decision))

    def _home(self, tenant: str, name: str) -> Shard:
        self._check_open()
        return self._shards.all[self._shards.of_name(tenant, name)]

    # --------------------------------------------------------------------------------------------- queues and workers

    async def _stats(self, tenant: str, commands: Sequence[str] | None) -> Stats:
        self._check_open()
        counted = await self._shards.each(lambda store: store._stats(tenant, commands))
        by_command: dict[str, list[QueueStats]] = {}
        for stats in counted:
            for queue in stats.queues:
                by_command.setdefault(queue.command, []).append(queue)
        names = sorted(by_command) if commands is None else commands
        return Stats(_sum([stats.total for stats in counted]), [_sum(by_command[name]) for name in names])

    async def _configure(self, tenant: str, command: str, config: QueueConfig | None) -> QueueConfig:
        """A configuration is given to all shards or, if one is known to be down, to none."""
        self._check_open()
        if config is None:
            return await self._shards.first(lambda store: store._configure(tenant, command, None), start=0)
        await self._shards.each(lambda store: store._ready_in_s(tenant, [command]))
        return (await self._shards.each(lambda store: store._configure(tenant, command, config)))[0]

    async def _register(self, tenant: str, info: WorkerInfo, ttl_s: float) -> None:
        """In the shard that the name belongs to, or in the next while that one is down."""
        self._check_open()
        if ttl_s == 0:
            await self._shards.some(lambda store: store._register(tenant, info, 0))
        else:
            home = self._shards.of_name(tenant, info.name)
            await self._shards.first(lambda store: store._register(tenant, info, ttl_s), start=home)

    async def _workers(self, tenant: str) -> Sequence[WorkerInfo]:
        self._check_open()
        found = [info for some in await self._shards.each(lambda store: store._workers(tenant)) for info in some]
        latest = {info.name: info for info in sorted(found, key=lambda info: info.seen_ms)}
        return [latest[name] for name in sorted(latest)]

    async def _tenants(self, cursor: str | None, limit: int) -> TenantPage:
        self._check_open()
        pages = await self._shards.each(lambda store: store._tenants(cursor, limit))
        names = sorted({name for page in pages for name in page.tenants})
        more = len(names) > limit or any(page.cursor is not None for page in pages)
        return TenantPage(names[:limit], names[limit - 1] if more else None)

    # -------------------------------------------------------------------------------------------------------- journal

    async def journal_bounds(self) -> Sequence[JournalBounds]:
        self._check_open()
        found = await self._shards.each(lambda store: store.journal_bounds())
        return [replace(bounds, shard=number) for number, [bounds] in enumerate(found)]

    async def _runs(self, tenant: str, shard: int, after: bytes | None, until: bytes | None, limit: int) -> RunPage:
        return await self._journal(shard).ask(lambda store: store._runs(tenant, 0, after, until, limit))

    async def readers(self) -> Sequence[Reader]:
        self._check_open()
        found = await self._shards.each(lambda store: store.readers())
        return [replace(reader, shard=number) for number, readers in enumerate(found) for reader in readers]

    async def _advance(self, reader: str, shard: int, position: bytes | None) -> None:
        await self._journal(shard).ask(lambda store: store._advance(reader, 0, position))

    def _journal(self, shard: int) -> Shard:
        self._check_open()
        if type(shard) is not int or not 0 <= shard < len(self._shards):
            raise InvalidOption(f"there is no shard {shard!r} here: this store has 0 to {len(self._shards) - 1}")
        return self._shards.all[shard]

    async def _sweep(self, budget: int) -> Swept:
        """One shard after the other within one budget, each time beginning with another."""
        self._check_open()
        # First: what is decided must not be swept away as a chunk that nobody committed.
        await loads.finish_abandoned(self._shards)
        total = Swept()
        down: list[StoreError] = []
        more = False
        for shard in self._shards.from_on(next(self._turn)):
            if budget <= 0:
                more = True
                break
            try:
                swept = await shard.ask(lambda store, left=budget: store._sweep(left))  # type: ignore[misc]
            except PASSED_OVER as error:
                down.append(error)
                continue
            total += swept
            more = more or swept.more
            budget -= max(swept.promoted, swept.expired, swept.cancelled, swept.pruned)
        if len(down) == len(self._shards):
            raise down[0]
        return replace(total, more=more)

    def subscribe(self, topics: Iterable[Topic], limit: int = 1) -> Subscription:
        self._check_open()
        wanted = tuple(topics)

        def of(shard: Shard) -> Sequence[Topic]:
            return [
                topic
                for topic in wanted
                if not isinstance(topic, Ended) or self._shards.of_id(topic.id) == shard.number
            ]

        return SharedSubscription(self._shards.all, of, wanted, limit)

    # ------------------------------------------------------------------------------------------------- the store itself

    @property
    def store_id(self) -> bytes:
        """Names the set; a copy of it has the same, and each of its journals another."""
        return self._shards.set_id

    @property
    def meter(self) -> Meter | None:
        return self._shards.all[0].meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        for shard in self._shards.all:
            shard.meter = meter

    async def probe(self) -> Sequence[int]:
        """Raises only if no shard answers. One that did not is opened again here, if it is back."""
        self._check_open()
        answers = await self._shards.some(lambda store: store.probe())
        return [number for number, answer in enumerate(answers) if answer is None]

    async def _fact(self, name: str, value: bytes | None = None) -> bytes | None:
        self._check_open()
        return await self._shards.all[0].ask(lambda store: store._fact(name, value))

    async def doctor(self, *, mend: bool = False, slots: bytes | None = None) -> Report:  # noqa: ARG002 it has all
        """Examines one shard after the other; a problem says which it is in, and one that does not answer is one."""
        self._check_open()
        total = Report(problems=[])
        for shard in self._shards.all:
            try:
                own = self._shards.slots_of(shard.number)
                report = await shard.ask(lambda store: store.doctor(mend=mend, slots=own))  # noqa: B023 asked at once
            except StoreUnavailable as error:
                total.add(str(error), shard.url)
                continue
            total.tasks += report.tasks
            total.events += report.events
            total.problems += [
                Problem(f"shard {shard.number}: {problem.what}", problem.where) for problem in report.problems
            ]
        del total.problems[PROBLEMS_MAX:]
        return total

    async def backup(self, directory: str | os.PathLike[str]) -> None:
        """Copies each shard, as of a moment of its own, into a directory of its number. Take none while a load is being
        committed: one shard's copy may be from before, another's from after."""
        self._check_open()
        with made_whole(Path(directory)) as copy:
            for shard in self._shards.all:
                await shard.ask(lambda store, to=copy / str(shard.number): store.backup(to))  # type: ignore[misc]

    async def close(self) -> None:
        if self._closed:
            return
        await asyncio.gather(*self._giving_back, return_exceptions=True)
        self._closed = True
        await asyncio.gather(*(shard.close() for shard in self._shards.all))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this set of shards was closed: open it again")


def _is(outcome: object, error: type[StoreError]) -> bool:
    return isinstance(outcome, Rejected) and outcome.code == error.code


def _elsewhere(outcome: object) -> bool:
    """Whether a task that is bound to no shard should go to another."""
    return _is(outcome, StoreUnavailable) or _is(outcome, StoreFull)


def _sum(parts: Sequence[QueueStats]) -> QueueStats:
    """The counts of one queue, or of a tenant, over all shards."""
    return replace(QueueStats.sum_of(parts[0].command, parts), limits=parts[0].limits)
