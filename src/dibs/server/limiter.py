"""Holds tenants to their limits: what a call costs is spent before it is made, and what is reached is refused.

::

    async with limiter.enqueueing(store, tenant, tasks) as entry:      # rates, ceilings, single tasks
        outcomes = merged(await store.enqueue(tenant, entry.tasks), entry.rejected)

    async with limiter.claiming(store, tenant, limit, wait_s) as room:   # rates, in-flight ceiling
        leases = await store.claim(tenant, …, limit=room.limit, wait_s=room.wait_s) if room.limit else []
        room.took(len(leases))

    limiter.spend(tenant, "get", tasks=len(refs))                      # everything else

A call that a rate refuses spends nothing; one that a ceiling refuses counts as a request. Belongs to one event loop.
Several servers on one store count apart: ceilings are about what is in the store, rates hold for each server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from types import TracebackType
from typing import NoReturn, Self

from msgspec import Struct

from dibs.errors import InvalidOption, LimitExceeded, PayloadTooLarge
from dibs.server.limits import COUNT_MAX, RATES, UNLIMITED, LimitsTable, TenantLimits
from dibs.stores.direct import DirectStore
from dibs.stores.protocol import Store
from dibs.task import CHUNK_KEEP_S, NewTask, QueueStats, Rejected, Rows

CEILING_WAIT_S = 5.0
"""What to wait for at a ceiling, while nobody knows how fast the queue empties."""
WAIT_MIN_S, WAIT_MAX_S = 0.05, 60.0
LOOK_AGAIN_S = 1.0
TENANTS_KEPT = 1_024
CHUNKS_KEPT = 100_000

REQUESTS, ENQUEUE, ENQUEUE_BYTES, CLAIM, READ = RATES

#: The bucket that the tasks of a verb are taken from; None: none but that of requests. What is not here is never
#: refused: it ends or keeps a lease.
GROUPS: Mapping[str, str | None] = {
    "enqueue": ENQUEUE,
    "stage": ENQUEUE,
    "replay": ENQUEUE,
    "claim": CLAIM,
    "get": READ,
    "wait": READ,
    "list": READ,
    "marks": READ,
    "stats": READ,
    "workers": READ,
    "tenants": READ,
    "runs": READ,
    "journal_bounds": READ,
    "readers": READ,
    "queue": READ,
    "about": None,
    "metrics": None,
    "subscribe": None,
    "commit_load": None,
    "drop": None,
    "cancel": None,
    "retain": None,
    "register": None,
    "configure": None,
    "purge": None,
    "advance": None,
    "sweep": None,
}
NEVER_REFUSED = frozenset({"settle", "heartbeat", "unclaim"})

#: Told of a limit that was reached: whose, and its name.
OnHit = Callable[[str, str], None]


class Bucket:
    """Fills at a rate up to its burst. May be in debt."""

    __slots__ = ("_at_s", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is in it."""
        return min(self.burst, self._level + max(0.0, now_s - self._at_s) * self.rate)

    def wait_s(self, cost: float, now_s: float) -> float:
        """In how many seconds so much can be spent; more than the burst can when it is full."""
        missing = min(cost, self.burst) - self.level(now_s)
        # What rounding leaves over is not worth a refusal.
        return missing / self.rate if missing > 1e-9 * self.burst else 0.0

    def take(self, cost: float, now_s: float) -> None:
        """Spends, or gives back what is negative, whatever is in it."""
        self._level = min(self.burst, self.level(now_s) - cost)
        self._at_s = now_s


class Limiter:
    """The buckets of all tenants, and what is on its way into the store."""

    def __init__(
        self,
        table: LimitsTable,
        now_s: Callable[[], float] = time.monotonic,
        on_hit: OnHit | None = None,
        wall_s: Callable[[], float] = time.time,
        waiting_max: int = COUNT_MAX,
    ) -> None:
        """`on_hit` counts refusals. `wall_s` is for `run_at_ms`, which is by the epoch. `waiting_max` holds for each
        tenant beside its own."""
        self._waiting_max = waiting_max
        self._waiting: dict[str, int] = {}
        self._table = table
        self._now_s = now_s
        self._wall_s = wall_s
        self._on_hit = on_hit
        self._rated = {tenant: _has_rates(limits) for tenant, limits in table.tenants.items()}
        self._default_rated = _has_rates(table.default)
        self._buckets: dict[str, dict[str, Bucket]] = {}
        self._prune_at = TENANTS_KEPT
        self._under_way: dict[str, _UnderWay] = {}
        self._staged = _StagedChunks(now_s)

    # ---------------------------------------------------------------------------------------------------------- rates

    def spend(self, tenant: str, verb: str, tasks: int = 1, size_bytes: int = 0) -> None:
        """Takes what a call costs, from all buckets it concerns or from none; `LimitExceeded` says how long to wait."""
        if not self._rated.get(tenant, self._default_rated) or verb in NEVER_REFUSED:
            return
        costs = _costs(verb, tasks, size_bytes)
        now_s = self._now_s()
        buckets = self._buckets_of(tenant, now_s)
        wait_s, reached = 0.0, ""
        for name, cost in costs:
            bucket = buckets.get(name)
            if bucket is not None and (needs_s := bucket.wait_s(cost, now_s)) > wait_s:
                wait_s, reached = needs_s, name
        if reached:
            self._refuse(tenant, reached, wait_s, f"{reached} is {buckets[reached].rate:g} for this tenant")
        for name, cost in costs:
            if name in buckets:
                buckets[name].take(cost, now_s)

    def charge(self, tenant: str, verb: str, tasks: int, size_bytes: int = 0) -> None:
        """Takes what a call turned out to cost, beyond what was spent before it; below zero, later calls pay for it."""
        if not self._rated.get(tenant, self._default_rated) or verb in NEVER_REFUSED:
            return
        now_s = self._now_s()
        buckets = self._buckets_of(tenant, now_s)
        for name, cost in _costs(verb, tasks, size_bytes)[1:]:
            if name in buckets:
                buckets[name].take(cost, now_s)

    def _buckets_of(self, tenant: str, now_s: float) -> dict[str, Bucket]:
        found = self._buckets.get(tenant)
        if found is None:
            limits = self._table.of(tenant)
            found = self._buckets[tenant] = {
                rate: Bucket(per_s, limits.burst(rate), now_s)
                for rate in RATES
                if (per_s := getattr(limits, rate)) is not None
            }
            if len(self._buckets) > self._prune_at:
                self._prune(now_s, tenant)
        return found

    def _prune(self, now_s: float, but: str) -> None:
        """Forgets tenants whose buckets are full: a new one would be no different."""
        full = [
            tenant
            for tenant, buckets in self._buckets.items()
            if tenant != but and all(bucket.level(now_s) >= bucket.burst for bucket in buckets.values())
        ]
        for tenant in full:
            del self._buckets[tenant]
        self._prune_at = max(TENANTS_KEPT, 2 * len(self._buckets))

    @contextlib.contextmanager
    def waiting(self, tenant: str) -> Iterator[None]:
        """Counts a call that waits, while it does."""
        own = self._table.of(tenant).waiting_max
        ceiling = self._waiting_max if own is None else min(own, self._waiting_max)
        count = self._waiting.get(tenant, 0)
        if count >= ceiling:
            self._refuse(tenant, "waiting_max", LOOK_AGAIN_S, f"{count} calls wait and waiting_max is {ceiling}")
        self._waiting[tenant] = count + 1
        try:
            yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    # -------------------------------------------------------------------------------------------------------- enqueue

    def enqueueing(self, store: Store, tenant: str, tasks: Sequence[NewTask]) -> Enqueueing:
        """Entered, it holds the room that the tasks need until they are in; use it with ``async with``."""
        return Enqueueing(self, store, tenant, tasks)

    def staging(self, store: Store, tenant: str, chunk_id: bytes, rows: Sequence[NewTask] | Rows) -> Staging:
        """Entered, it spends for a chunk of a load, and holds the room that its rows will need; use it with
        ``async with``, and say `done` when it is staged. A row that is beyond a limit of single tasks refuses the
        chunk, as a bad row does."""
        return Staging(self, store, tenant, chunk_id, rows)

    def committing(self, store: Store, tenant: str, chunk_ids: Sequence[bytes]) -> Committing:
        """Entered, it lets the rows of a load in, whose room is held since they were staged. What was staged before
        this server started is not known here: of that, the tenant's room is only known to be not used up."""
        return Committing(self, store, tenant, chunk_ids)

    def dropped(self, tenant: str, chunk_ids: Sequence[bytes]) -> None:
        """These chunks need no room any more."""
        for chunk_id in chunk_ids:
            self._staged.forget(tenant, chunk_id)

    def _unfit(self, tenant: str, task: NewTask, limits: TenantLimits) -> InvalidOption | PayloadTooLarge | None:
        """What is beyond the limits of single tasks, if anything."""
        if limits.payload_max_bytes is not None and len(task.payload) > limits.payload_max_bytes:
            self._hit(tenant, "payload_max_bytes")
            return PayloadTooLarge(
                f"the payload is {len(task.payload)} bytes and this tenant's limit {limits.payload_max_bytes}: "
                "keep the data elsewhere and send a reference"
            )
        if limits.delay_max_s is not None:
            delay_s = task.delay_s if task.run_at_ms is None else task.run_at_ms / 1000 - self._wall_s()
            if delay_s > limits.delay_max_s:
                self._hit(tenant, "delay_max_s")
                return InvalidOption(
                    f"the task would wait for {delay_s:.0f} s and this tenant's limit is {limits.delay_max_s:g} s: "
                    "enqueue it later"
                )
        return None

    async def _check_ceilings(self, store: Store, tenant: str, tasks: int, size_bytes: int) -> None:
        """Raises unless there is room for so much beside what is there and what is on its way."""
        limits = self._table.of(tenant)
        total, beside = await self._under_way_of(tenant).look(store, tenant)
        staged = self._staged.of(tenant)
        queued = total.ready + total.delayed + beside.tasks + staged.tasks
        held_bytes = total.bytes + beside.size_bytes + staged.size_bytes
        for name, ceiling, held, more in (
            ("queued_tasks_max", limits.queued_tasks_max, queued, tasks),
            ("queued_bytes_max", limits.queued_bytes_max, held_bytes, size_bytes),
        ):
            # At the ceiling also what adds nothing that is known is refused.
            if ceiling is None or (held + more <= ceiling and held < ceiling):
                continue
            if more > ceiling:
                # No wait would help: not a limit that is reached, but a call that cannot be made.
                self._hit(tenant, name)
                kind = PayloadTooLarge if name == "queued_bytes_max" else InvalidOption
                raise kind(f"{more} at once can never fit: {name} is {ceiling} for this tenant, so send fewer")
            over = max(1, held + more - ceiling)
            self._refuse(
                tenant, name, self._emptying_s(tenant, name, held, over), f"{held} are held and {name} is {ceiling}"
            )

    def _emptying_s(self, tenant: str, name: str, held: int, over: int) -> float:
        """A guess at how long it takes until so much has gone, by how fast it went since the last refusal."""
        now_s = self._now_s()
        seen = self._under_way_of(tenant).seen
        before_s, before = seen.get(name, (now_s, held))
        seen[name] = now_s, held
        gone_per_s = (before - held) / (now_s - before_s) if now_s > before_s else 0.0
        return over / gone_per_s if gone_per_s > 0 else CEILING_WAIT_S

    # ---------------------------------------------------------------------------------------------------------- claim

    def claiming(
        self, store: DirectStore, tenant: str, limit: int, wait_s: float = 0.0, claim_id: bytes | None = None
    ) -> Claiming:
        """Entered, it says how many tasks may be taken, and holds that room until they are; use it with
        ``async with``. A claim id that the store knows passes the ceiling: it takes nothing new."""
        return Claiming(self, store, tenant, limit, wait_s, claim_id)

    def _may_take(self, tenant: str, limit: int) -> int:
        """Cuts a claim to what its bucket has; what it really takes is charged when that is known."""
        self.spend(tenant, "claim", 1)
        self.charge(tenant, "claim", -1)
        bucket = self._buckets.get(tenant, {}).get(CLAIM)
        return limit if bucket is None else max(1, min(limit, math.floor(bucket.level(self._now_s()))))

    # ---------------------------------------------------------------------------------------------------------- common

    def _under_way_of(self, tenant: str) -> _UnderWay:
        found = self._under_way.get(tenant)
        if found is None:
            if len(self._under_way) >= TENANTS_KEPT:
                for idle in [name for name, one in self._under_way.items() if one.idle()]:
                    del self._under_way[idle]
            found = self._under_way[tenant] = _UnderWay()
        return found

    def _hit(self, tenant: str, name: str) -> None:
        if self._on_hit is not None:
            self._on_hit(tenant, name)

    def _refuse(self, tenant: str, name: str, wait_s: float, why: str) -> NoReturn:
        self._hit(tenant, name)
        wait_s = min(max(wait_s, WAIT_MIN_S), WAIT_MAX_S)
        raise LimitExceeded.until(wait_s, f"the limit is reached: {why}; repeat the call in {wait_s:.2f} s")


class _Sum(Struct):
    """What some calls may add to the store, or take from it, all together."""

    tasks: int = 0
    size_bytes: int = 0
    claims: int = 0


_NOTHING = _Sum()


class _UnderWay:
    """What one tenant has on its way into the store, or out of it."""

    __slots__ = ("_entered", "_lookers", "_now", "freed", "seen")

    def __init__(self) -> None:
        self.freed = asyncio.Event()
        """Set, and replaced, when a claim is over."""
        self.seen: dict[str, tuple[float, int]] = {}
        """How much was held at the last refusal, and when."""
        self._now = _Sum()
        self._entered = _Sum()
        """All that ever entered."""
        self._lookers = 0

    async def look(self, store: Store, tenant: str) -> tuple[QueueStats, _Sum]:
        """Returns what the store counts, and what may come to that: all that was under way while it counted. Whoever
        enters without waiting after this cannot be missed by the next."""
        self._lookers += 1
        try:
            before, entered = copy(self._now), copy(self._entered)
            total = (await store.stats(tenant, [])).total
        finally:
            self._lookers -= 1
        return total, _Sum(
            before.tasks + self._entered.tasks - entered.tasks,
            before.size_bytes + self._entered.size_bytes - entered.size_bytes,
            before.claims + self._entered.claims - entered.claims,
        )

    def enter(self, tasks: int = 0, size_bytes: int = 0, claims: int = 0) -> None:
        """So much is on its way from now on."""
        for one in (self._now, self._entered):
            one.tasks += tasks
            one.size_bytes += size_bytes
            one.claims += claims

    def leave(self, tasks: int = 0, size_bytes: int = 0, claims: int = 0) -> None:
        """So much has arrived, or never will."""
        self._now.tasks -= tasks
        self._now.size_bytes -= size_bytes
        self._now.claims -= claims
        if claims:
            self.freed.set()
            self.freed = asyncio.Event()

    def idle(self) -> bool:
        """True if forgetting it changes nothing but a guess."""
        return not self._lookers and self._now == _Sum()


class _Entry:
    """Room in the store for what is on its way into it."""

    def __init__(self, limiter: Limiter, store: Store, tenant: str) -> None:
        self._limiter = limiter
        self._store = store
        self._tenant = tenant
        self._held: tuple[int, int] | None = None

    async def _hold(self, tasks: int, size_bytes: int) -> None:
        if _has_ceilings(self._limiter._table.of(self._tenant)):
            await self._limiter._check_ceilings(self._store, self._tenant, tasks, size_bytes)
            self._limiter._under_way_of(self._tenant).enter(tasks, size_bytes)
            self._held = tasks, size_bytes

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._held is not None:
            self._limiter._under_way_of(self._tenant).leave(*self._held)


class Enqueueing(_Entry):
    """Tasks on their way in."""

    def __init__(self, limiter: Limiter, store: Store, tenant: str, tasks: Sequence[NewTask]) -> None:
        super().__init__(limiter, store, tenant)
        self.tasks = tasks
        """Those that may go on."""
        self.rejected: dict[int, Rejected] = {}
        """Those that may not, by their place in what was given."""

    async def __aenter__(self) -> Self:
        limiter, tenant = self._limiter, self._tenant
        limits = limiter._table.of(tenant)
        if limits is UNLIMITED:
            return self
        if limits.payload_max_bytes is not None or limits.delay_max_s is not None:
            for index, task in enumerate(self.tasks):
                if (bad := limiter._unfit(tenant, task, limits)) is not None:
                    self.rejected[index] = Rejected.of(bad)
            if self.rejected:
                self.tasks = [task for index, task in enumerate(self.tasks) if index not in self.rejected]
        count, size_bytes = len(self.tasks), sum(len(task.payload) for task in self.tasks)
        limiter.spend(tenant, "enqueue", count, size_bytes)
        try:
            await self._hold(count, size_bytes)
        except BaseException:
            limiter.charge(tenant, "enqueue", -count, -size_bytes)
            raise
        return self


class Staging(_Entry):
    """A chunk on its way in."""

    def __init__(
        self, limiter: Limiter, store: Store, tenant: str, chunk_id: bytes, rows: Sequence[NewTask] | Rows
    ) -> None:
        super().__init__(limiter, store, tenant)
        self._chunk_id = chunk_id
        if isinstance(rows, Rows):
            payloads, self._options = rows.payloads, rows.options
        else:
            payloads, self._options = [task.payload for task in rows], [*rows]
        self._largest = max(payloads, key=len, default=b"")
        self._count, self._size_bytes = len(payloads), sum(map(len, payloads))

    async def __aenter__(self) -> Self:
        limiter, tenant = self._limiter, self._tenant
        limits = limiter._table.of(tenant)
        if limits is not UNLIMITED:
            for row in (NewTask(command="", payload=self._largest), *self._options):
                if (bad := limiter._unfit(tenant, row, limits)) is not None:
                    raise bad
        limiter.spend(tenant, "stage", self._count, self._size_bytes)
        # What it held before, staged again, is counted already.
        tasks, size_bytes = limiter._staged.size_of(tenant, self._chunk_id)
        try:
            await self._hold(max(0, self._count - tasks), max(0, self._size_bytes - size_bytes))
        except BaseException:
            limiter.charge(tenant, "stage", -self._count, -self._size_bytes)
            raise
        return self

    def done(self) -> None:
        """The chunk is staged: its room is held until it is committed, dropped or forgotten."""
        if self._held is not None:
            self._limiter._staged.add(self._tenant, self._chunk_id, self._count, self._size_bytes)


class Committing(_Entry):
    """The rows of a load on their way in."""

    def __init__(self, limiter: Limiter, store: Store, tenant: str, chunk_ids: Sequence[bytes]) -> None:
        super().__init__(limiter, store, tenant)
        self._chunk_ids = chunk_ids

    async def __aenter__(self) -> Self:
        self._limiter.spend(self._tenant, "commit_load")
        if not all(self._limiter._staged.knows(self._tenant, chunk_id) for chunk_id in self._chunk_ids):
            await self._hold(0, 0)
        return self

    def done(self) -> None:
        """The rows are in: the store counts them now."""
        self._limiter.dropped(self._tenant, self._chunk_ids)


class _StagedChunks:
    """The chunks that wait for their commit, of tenants with ceilings; the oldest are forgotten when the store forgets
    them, or there are too many."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._chunks: OrderedDict[tuple[str, bytes], tuple[int, int, float]] = OrderedDict()
        self._sums: dict[str, _Sum] = {}

    def of(self, tenant: str) -> _Sum:
        """What a tenant has staged."""
        old_s = self._now_s() - CHUNK_KEEP_S
        while self._chunks and (len(self._chunks) > CHUNKS_KEPT or next(iter(self._chunks.values()))[2] <= old_s):
            self.forget(*next(iter(self._chunks)))
        return self._sums.get(tenant, _NOTHING)

    def knows(self, tenant: str, chunk_id: bytes) -> bool:
        """Whether a chunk is among them."""
        return (tenant, chunk_id) in self._chunks

    def size_of(self, tenant: str, chunk_id: bytes) -> tuple[int, int]:
        """How many rows and bytes a chunk has; none if it is not among them."""
        return self._chunks.get((tenant, chunk_id), (0, 0, 0.0))[:2]

    def add(self, tenant: str, chunk_id: bytes, tasks: int, size_bytes: int) -> None:
        """A chunk was staged, instead of what it held before."""
        self.forget(tenant, chunk_id)
        self._chunks[tenant, chunk_id] = tasks, size_bytes, self._now_s()
        held = self._sums.setdefault(tenant, _Sum())
        held.tasks += tasks
        held.size_bytes += size_bytes

    def forget(self, tenant: str, chunk_id: bytes) -> None:
        """A chunk does not wait any more."""
        known = self._chunks.pop((tenant, chunk_id), None)
        if known is not None:
            held = self._sums[tenant]
            held.tasks -= known[0]
            held.size_bytes -= known[1]
            if not held.tasks:
                del self._sums[tenant]


class Claiming:
    """A claim on its way: what it may take, and for how long it may still wait."""

    def __init__(
        self, limiter: Limiter, store: DirectStore, tenant: str, limit: int, wait_s: float, claim_id: bytes | None
    ) -> None:
        self.limit = limit
        """0: there was no room while it could wait, since other claims, which wait too, may take all there is."""
        self.wait_s = wait_s
        self._limiter = limiter
        self._store = store
        self._tenant = tenant
        self._claim_id = claim_id
        self._held = 0

    def took(self, tasks: int) -> None:
        """So many were taken: they are paid for, below zero if need be."""
        if tasks:
            self._limiter.charge(self._tenant, "claim", tasks)

    async def __aenter__(self) -> Self:
        limits = self._limiter._table.of(self._tenant)
        if limits is UNLIMITED:
            return self
        self.limit = self._limiter._may_take(self._tenant, self.limit)
        if limits.in_flight_max is not None and not await self._repeated():
            await self._hold(limits.in_flight_max)
        return self

    async def _repeated(self) -> bool:
        """Whether the claim was made before, and its answer is asked for again."""
        return self._claim_id is not None and await self._store._claimed(self._tenant, self._claim_id) is not None

    async def _hold(self, ceiling: int) -> None:
        limiter, loop = self._limiter, asyncio.get_running_loop()
        deadline_s = loop.time() + self.wait_s
        while True:
            total, beside = await limiter._under_way_of(self._tenant).look(self._store, self._tenant)
            under_way = limiter._under_way_of(self._tenant)
            if total.leased >= ceiling:
                limiter._refuse(
                    self._tenant,
                    "in_flight_max",
                    LOOK_AGAIN_S,
                    f"{total.leased} are leased and in_flight_max is {ceiling}",
                )
            room = ceiling - total.leased - beside.claims
            left_s = max(0.0, deadline_s - loop.time())
            if room > 0 or left_s == 0:
                break
            # Others who wait for tasks may take all there is room for: this one waits for one of them to end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
                    await under_way.freed.wait()
        self.limit, self.wait_s = max(0, min(self.limit, room)), left_s
        self._held = self.limit
        under_way.enter(claims=self._held)

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._held:
            self._limiter._under_way_of(self._tenant).leave(claims=self._held)


def _costs(verb: str, tasks: int, size_bytes: int) -> Sequence[tuple[str, int]]:
    """What a call costs: itself first, then its tasks."""
    group = GROUPS[verb]
    if group is None:
        return ((REQUESTS, 1),)
    if group == ENQUEUE:
        return (REQUESTS, 1), (ENQUEUE, tasks), (ENQUEUE_BYTES, size_bytes)
    return (REQUESTS, 1), (group, tasks)


def _has_rates(limits: TenantLimits) -> bool:
    return any(getattr(limits, rate) is not None for rate in RATES)


def _has_ceilings(limits: TenantLimits) -> bool:
    return limits.queued_tasks_max is not None or limits.queued_bytes_max is not None
