"""The queue's rules as a small model: dicts and plain values.

Each verb of :class:`Model` says what the answer must be and what every task must look like afterwards. It is written
from the rules and knows nothing of keys, indexes or transactions. What time alone does (promote, take back, expire,
prune) may happen in a claim or wait for the sweep; the model accepts either, and does all of it in a sweep.
:mod:`dibs.testing.simulation` holds a store against it.

A row of a load that has a key is *undecided* from the commit until the store shows that it holds the key or lost it:
the rules leave open when that is, so the model is told (:meth:`Model.decide`) and checks that it may be so. A row wins
only a key that nobody holds, and loses only one that somebody holds, or held within the same operation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from dibs.clock import Clock
from dibs.ids import CHUNK_BYTES
from dibs.stores.batches import row_ids
from dibs.task import (
    ALL_COMMANDS,
    CHUNK_KEEP_S,
    DEAD_RETENTION_DEFAULT_S,
    LEASE_DEFAULT_S,
    MAX_ATTEMPTS_DEFAULT,
    MOVES,
    RELEASES_FREE,
    RESULT_TTL_DEFAULT_S,
    UNKEPT_STATE_S,
    Already,
    ByKey,
    Cancelled,
    Cause,
    Committed,
    Duplicate,
    Enqueued,
    ErrorInfo,
    Event,
    EventKind,
    Extended,
    Filter,
    Heartbeat,
    KeyLimit,
    Kind,
    Lease,
    LeaseLost,
    NewTask,
    Place,
    Progress,
    QueueLimits,
    QueueStats,
    Reason,
    Result,
    Settled,
    Settlement,
    Staged,
    Status,
    Swept,
    Task,
)

#: From which status an event may come, and to which it leads. Purged tasks are gone.
EVENT_MOVES: dict[EventKind, tuple[frozenset[Status | None], Status | None]] = {
    EventKind.ENQUEUED: (frozenset({None}), Status.PENDING),
    EventKind.PROMOTED: (frozenset({Status.PENDING}), Status.PENDING),
    EventKind.CLAIMED: (frozenset({Status.PENDING}), Status.IN_PROGRESS),
    EventKind.COMPLETED: (frozenset({Status.IN_PROGRESS}), Status.COMPLETED),
    EventKind.RETRIED: (frozenset({Status.IN_PROGRESS}), Status.PENDING),
    EventKind.RELEASED: (frozenset({Status.IN_PROGRESS}), Status.PENDING),
    EventKind.LEASE_EXPIRED: (frozenset({Status.IN_PROGRESS}), Status.PENDING),
    EventKind.FAILED: (frozenset({Status.IN_PROGRESS}), Status.FAILED),
    EventKind.CANCELLING: (frozenset({Status.IN_PROGRESS}), Status.IN_PROGRESS),
    EventKind.CANCELLED: (frozenset({Status.PENDING, Status.IN_PROGRESS}), Status.CANCELLED),
    EventKind.REPLAYED: (frozenset({Status.FAILED}), Status.PENDING),
    EventKind.PURGED: (frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED}), None),
}

#: Where a task of each status stands, unless the event says that it waits.
_STANDS = {
    Status.PENDING: Place.READY,
    Status.IN_PROGRESS: Place.LEASED,
    Status.COMPLETED: Place.NONE,
    Status.FAILED: Place.DEAD,
    Status.CANCELLED: Place.NONE,
}
#: Events of tasks that stay where they are: who asks for a cancel changes nothing yet, and who is parked is ready.
_STAYS = {(EventKind.CANCELLING, ""), (EventKind.PROMOTED, Reason.LIMIT)}


def replayed(
    events: Iterable[Event], pruned: frozenset[tuple[str, bytes]] = frozenset()
) -> dict[tuple[str, bytes], tuple[Status, Place]]:
    """Returns what the journal alone says of every task, and checks that it tells a legal story. Retries with a delay
    must have given no reason of their own. `pruned`: ids that retention let go at some time, which is not journalled,
    so that they may have been enqueued anew."""
    known: dict[tuple[str, bytes], tuple[Status, Place]] = {}
    for event in events:
        who = (event.tenant, event.id)
        before, after = EVENT_MOVES[event.kind]
        if event.kind is EventKind.ENQUEUED and who in pruned:
            known.pop(who, None)
        status, place = known.get(who, (None, None))
        assert status in before, f"{event.kind} of a task that was {status}"
        if after is None:
            del known[who]
        else:
            stands = Place.DELAYED if event.reason == Reason.DELAYED else _STANDS[after]
            stays = (event.kind, event.reason) in _STAYS and place is stands
            assert stays or (place, stands) in MOVES, f"{event.kind} of a task that stood in {place}"
            known[who] = (after, stands)
    return known


@dataclass
class Known:
    """A task as the model knows it."""

    tenant: str
    new: NewTask
    enqueued_ms: int
    due_ms: int
    expires_ms: int | None
    status: Status = Status.PENDING
    place: Place = Place.READY
    rank: tuple[int, int] = (0, 0)
    """Where it stands within its priority. Equal ranks: in any order."""
    home: tuple[int, int] = (0, 0)
    attempts: int = 0
    releases: int = 0
    worker: str | None = None
    token: bytes = b""
    lease_ms: int = 0
    lease_end_ms: int = 0
    cancel: bool = False
    settled: tuple[bytes, Kind] | None = None
    progress: Progress | None = None
    error: ErrorInfo | None = None
    data: bytes | None = None
    codec: str = "json"
    reason: str | None = None
    ended_ms: int | None = None
    result_until_ms: int = 0
    kept_until_ms: int | None = None
    unkept: bool = False
    faded: bool = False
    """The result was pruned; the record is still there."""
    counted: bool = False
    """It was claimed under a limit of its limit_key."""
    undecided: bool = False
    """A row with a key that it neither holds nor has lost."""

    @property
    def id(self) -> bytes:
        return self.new.id

    @property
    def name(self) -> tuple[str, str, str]:
        """Of whom it is, and its key."""
        return self.tenant, self.new.command, self.new.key or ""

    @property
    def priority(self) -> int:
        return self.new.priority or 0

    @property
    def max_attempts(self) -> int:
        return self.new.max_attempts or MAX_ATTEMPTS_DEFAULT

    @property
    def order(self) -> tuple[int, tuple[int, int]]:
        return -self.priority, self.rank

    @property
    def size(self) -> int:
        return 0 if self.unkept else len(self.new.payload) + len(self.data or b"")

    def visible(self, now_ms: int) -> bool:
        return self.kept_until_ms is None or self.kept_until_ms > now_ms

    def late(self, now_ms: int) -> bool:
        """True if its start deadline passed before it was started."""
        return (
            self.status is Status.PENDING
            and self.attempts == 0
            and self.expires_ms is not None
            and self.expires_ms <= now_ms
        )

    def due(self, now_ms: int) -> bool:
        return self.place is Place.DELAYED and self.due_ms <= now_ms

    def overdue(self, now_ms: int) -> bool:
        return self.place is Place.LEASED and self.lease_end_ms <= now_ms

    def result(self, now_ms: int) -> Result | None:
        if not self.status.ended or self.unkept or self.result_until_ms <= now_ms:
            return None
        error = None if self.status is Status.COMPLETED else self.error
        return Result(self.status, self.data, self.codec, error, self.reason)

    def shown(self, now_ms: int) -> Task | None:
        """What `get` must show."""
        if not self.visible(now_ms):
            return None
        return Task(
            tenant=self.tenant,
            id=self.id,
            command=self.new.command,
            status=self.status,
            place=self.place,
            priority=self.priority,
            attempts=self.attempts,
            max_attempts=self.max_attempts,
            releases=self.releases,
            payload=b"" if self.unkept else self.new.payload,
            codec="raw" if self.unkept else self.new.codec,
            enqueued_ms=self.enqueued_ms,
            due_ms=self.due_ms,
            key=None if self.unkept else self.new.key,
            worker=self.worker,
            lease_end_ms=self.lease_end_ms if self.status is Status.IN_PROGRESS else None,
            cancel_requested=self.cancel,
            expires_ms=self.expires_ms,
            ended_ms=self.ended_ms,
            kept_until_ms=self.kept_until_ms,
            result=self.result(now_ms),
            reason=self.reason,
            error=None if self.status is Status.COMPLETED else self.error,
            progress=self.progress,
            limit_key=None if self.unkept else self.new.limit_key,
            limit_cost=1 if self.unkept else self.new.limit_cost,
        )


@dataclass
class Claimable:
    """What a queue has for a claim."""

    pool: list[Known]
    """What has to be delivered, as far as limits allow."""
    open_to_it: list[Known]
    """What may be: rows whose key is held by a task that is past its start deadline, and tasks that a row with their
    key has just revived."""


@dataclass
class Model:
    """The queue, said simply. `step` grows with every operation: it is what first in, first out goes by."""

    clock: Clock
    tasks: dict[tuple[str, bytes], Known] = field(default_factory=dict)
    keys: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    paused: set[tuple[str, str]] = field(default_factory=set)
    limits: dict[tuple[str, str], QueueLimits] = field(default_factory=dict)
    """By tenant and command, or `*` for all of the tenant's."""
    claims: dict[tuple[str, bytes], list[tuple[bytes, bytes]]] = field(default_factory=dict)
    pruned: set[tuple[str, bytes]] = field(default_factory=set)
    staged: dict[tuple[str, bytes], tuple[Sequence[NewTask], int]] = field(default_factory=dict)
    """Chunks that wait for a commit: their rows, and until when they are kept."""
    loads: dict[tuple[str, str], int] = field(default_factory=dict)
    contested: set[tuple[str, str, str]] = field(default_factory=set)
    """The keys that somebody held, or tried to, in this operation."""
    step: int = 0
    shard_of: Callable[[bytes], int] = lambda _: 0
    """Where a task is, by its id: order holds within a shard."""

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def begin(self) -> None:
        """Begins an operation."""
        self.step += 1
        self.contested = set(self.keys)

    def task(self, tenant: str, task_id: bytes | None) -> Known | None:
        """Returns a task that exists."""
        known = self.tasks.get((tenant, task_id)) if task_id is not None else None
        return known if known is not None and known.visible(self.now_ms) else None

    # -------------------------------------------------------------------------------------------------------- enqueue

    def enqueue(self, tenant: str, batch: Sequence[NewTask]) -> list[Enqueued | Duplicate]:
        return [self._enqueue(tenant, new, index) for index, new in enumerate(batch)]

    def _enqueue(self, tenant: str, new: NewTask, index: int) -> Enqueued | Duplicate:
        if self.task(tenant, new.id) is not None:
            return Enqueued(new.id, already=True)
        if (tenant, new.id) in self.tasks:
            # Its retention is over, swept or not: it does not exist, and its id can be used again.
            self._prune(self.tasks[(tenant, new.id)])
        if new.key is not None:
            owner = self.task(tenant, self.keys.get((tenant, new.command, new.key)))
            if owner is not None and owner.status is Status.FAILED and new.on_duplicate == "replay_dead":
                self._revive(owner, index)
                return Duplicate(owner.id, Status.PENDING, replayed=True)
            if owner is not None:
                return Duplicate(owner.id, owner.status, owner.result(self.now_ms))
            self._hold(self._put(tenant, new, index))
        else:
            self._put(tenant, new, index)
        return Enqueued(new.id)

    def _put(self, tenant: str, new: NewTask, index: int) -> Known:
        due_ms = self.now_ms + _ms(new.delay_s) if new.run_at_ms is None else new.run_at_ms
        task = Known(
            tenant=tenant,
            new=new,
            enqueued_ms=self.now_ms,
            due_ms=max(self.now_ms, due_ms),
            expires_ms=None if new.expires_s is None else self.now_ms + _ms(new.expires_s),
            place=Place.DELAYED if due_ms > self.now_ms else Place.READY,
            rank=(self.step, index),
        )
        self.tasks[(tenant, new.id)] = task
        return task

    # ---------------------------------------------------------------------------------------------------------- loads

    def stage(self, tenant: str, chunk_id: bytes, rows: Sequence[NewTask]) -> Staged:
        if self._has_tasks(tenant, chunk_id):
            return Staged(len(rows), already=True)
        self.staged[(tenant, chunk_id)] = rows, self.now_ms + _ms(CHUNK_KEEP_S)
        return Staged(len(rows))

    def waits(self, tenant: str, chunk_id: bytes) -> bool:
        """True if a commit may name the chunk."""
        _, until_ms = self.staged.get((tenant, chunk_id), ((), 0))
        return until_ms > self.now_ms and not self._has_tasks(tenant, chunk_id)

    def commit_load(self, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes]) -> Committed | None:
        """None: it is refused."""
        if self.loads.get((tenant, name), -1) >= seq:
            return Committed(0, already=True)
        if not all(self.waits(tenant, chunk_id) for chunk_id in chunk_ids):
            return None
        self.loads[(tenant, name)] = seq
        count = 0
        for chunk_id in chunk_ids:
            rows, _ = self.staged.pop((tenant, chunk_id))
            for row, row_id in zip(rows, row_ids(tenant, chunk_id, rows), strict=True):
                self._put(tenant, replace(row, id=row_id), count).undecided = row.key is not None
                count += 1
        return Committed(count)

    def drop(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        return sum(self.staged.pop((tenant, chunk_id), None) is not None for chunk_id in dict.fromkeys(chunk_ids))

    def _has_tasks(self, tenant: str, chunk_id: bytes) -> bool:
        """True if there are tasks with the ids of the chunk's rows: it was committed, and they are still known."""
        return any(whose == tenant and task_id[:CHUNK_BYTES] == chunk_id[:CHUNK_BYTES] for whose, task_id in self.tasks)

    def undecided(self) -> list[Known]:
        """Returns the rows that neither hold nor have lost their key."""
        return [task for task in self.tasks.values() if task.undecided]

    def decide(
        self, after: Callable[[Known], Task | None], holder: Callable[[tuple[str, str, str]], bytes | None]
    ) -> int:
        """Takes over which keys were decided: `after` shows a task as the store has it now, `holder` who has a key.
        Returns how many rows lost theirs."""
        for row in self.undecided():
            if holder(row.name) == row.id:
                assert self._owner(row) is None, "a row has a key that another task held"
                self._hold(row)
        lost = [row for row in self.undecided() if _lost_its_key(after(row))]
        for row in lost:
            self._lose(row, after)
        return len(lost)

    def _owner(self, row: Known) -> Known | None:
        return self.task(row.tenant, self.keys.get(row.name))

    def _hold(self, task: Known) -> None:
        task.undecided = False
        self.keys[task.name] = task.id
        self.contested.add(task.name)

    def _lose(self, row: Known, after: Callable[[Known], Task | None]) -> Known | None:
        """Ends a row whose key another task has. Returns that task if the row has revived it."""
        assert row.status is Status.PENDING
        assert row.name in self.contested, "a row lost a key that nobody held"
        owner = self._owner(row)
        self._end(row, Status.CANCELLED, Reason.DUPLICATE)
        if owner is None or owner.status is not Status.FAILED or row.new.on_duplicate != "replay_dead":
            return None
        seen = after(owner)
        if seen is None or seen.status is Status.FAILED:
            return None
        self._revive(owner, 0)
        return owner

    # ---------------------------------------------------------------------------------------------------------- claim

    def claimed(
        self,
        tenant: str,
        commands: Sequence[str],
        limit: int,
        lease_s: float | None,
        worker: str,
        claim_id: bytes | None,
        leases: list[Lease],
        after: Callable[[Known], Task | None],
    ) -> None:
        """Checks what a claim returned. `after` shows a task as the store has it now: that tells which of the moves
        that time makes have been made."""
        remembered = self.claims.get((tenant, claim_id or b""))
        alive = [(task, token) for task, token in remembered or () if self.tasks[(tenant, task)].token == token]
        if alive:
            assert [(lease.id, lease.token) for lease in leases] == alive, "a repeated claim returns its live leases"
            return
        if remembered is not None and not leases:
            # The store may still know the claim, whose leases are all over, or may have forgotten it.
            self._adopt(tenant, after)
            return
        left = list(leases)
        # A claim that got enough need not have come to every shard; one that did not has emptied all.
        shards = dict.fromkeys(map(self.shard_of, [*(lease.id for lease in leases), *(t.id for t in self._of(tenant))]))
        taken = {lease.id for lease in leases}
        # All of them first: a lease that ran out makes room in every shard.
        for ready in [
            self._claimable(tenant, command, shard, taken, after)
            for shard, command in itertools.product(shards, commands)
            if (tenant, command) not in self.paused
        ]:
            if len(leases) - len(left) == limit:
                continue
            while len(leases) - len(left) < limit and left and self._deliver(ready, left[0], lease_s, worker):
                left.pop(0)
            allowed = self._allowed(ready.pool) if len(leases) - len(left) < limit else []
            assert not allowed, f"{len(allowed)} more tasks could have been claimed from {allowed[0].new.command}"
        assert not left, "more was delivered than is ready"
        if claim_id is not None and leases:
            self.claims[(tenant, claim_id)] = [(lease.id, lease.token) for lease in leases]
        self._adopt(tenant, after, {lease.id for lease in leases})

    def claimed_fairly(
        self,
        tenants: Sequence[str],
        commands: Sequence[str],
        limit: int,
        leases: list[Lease],
        after: Callable[[Known], Task | None],
    ) -> None:
        """Checks what a claim of all tenants returned: each tenant's own order, and turns."""
        taken = {tenant: {lease.id for lease in leases if lease.tenant == tenant} for tenant in tenants}
        shards = dict.fromkeys(self.shard_of(task_id) for _, task_id in self.tasks)
        queues = {
            (tenant, shard): [
                self._claimable(tenant, command, shard, taken[tenant], after)
                for command in commands
                if (tenant, command) not in self.paused
            ]
            for tenant in tenants
            for shard in shards
        }
        shares = dict.fromkeys(tenants, 0)
        for lease in leases:
            for ready in queues[(lease.tenant, self.shard_of(lease.id))]:
                if self._deliver(ready, lease, None, ""):
                    break
                assert not self._allowed(ready.pool), "a task was delivered that is not in the first queue that has any"
            else:
                raise AssertionError("more was delivered than is ready")
            shares[lease.tenant] += 1
        more = [
            tenant
            for tenant in tenants
            if any(self._allowed(ready.pool) for shard in shards for ready in queues[(tenant, shard)])
        ]
        assert len(leases) == limit or not more, f"{more} could have given more"
        assert all(shares[tenant] + 1 >= max(shares.values()) for tenant in more), f"{shares}, and {more} have more"
        for tenant in tenants:
            self._adopt(tenant, after, taken[tenant])

    def _deliver(self, ready: Claimable, lease: Lease, lease_s: float | None, worker: str) -> bool:
        """Takes note of a delivery from a queue, which must be the first that limits allow; False if it is not from
        there."""
        allowed = self._allowed(ready.pool)
        task = next((task for task in allowed + ready.open_to_it if task.id == lease.id), None)
        if task is None:
            return False
        assert task in ready.open_to_it or task.order == min(other.order for other in allowed), "not the first in order"
        (ready.open_to_it if task in ready.open_to_it else ready.pool).remove(task)
        self._decide_by_delivery(task)
        self._grant(task, lease, lease_s, worker)
        ready.pool = [other for other in ready.pool if not (other.undecided and other.name == task.name)]
        return True

    def _allowed(self, pool: list[Known]) -> list[Known]:
        """Those of a queue's pool that limits let anybody claim now."""
        if not pool:
            return []
        tenant, command = pool[0].tenant, pool[0].new.command
        leased = [task for task in self._of(tenant) if task.place is Place.LEASED]
        here = [task for task in leased if task.new.command == command]
        for name, count in ((ALL_COMMANDS, len(leased)), (command, len(here))):
            limits = self.limits.get((tenant, name))
            if limits is not None and limits.in_flight is not None and count >= limits.in_flight:
                return []
        rule = self._key_limit(tenant, command)
        if rule is None or rule.in_flight is None:
            return pool
        # In the shard where a task is: those that have no deduplication key are all in one.
        used = Counter((task.new.limit_key, self.shard_of(task.id)) for task in here if task.counted)
        return [
            task
            for task in pool
            if task.new.limit_key is None or used[(task.new.limit_key, self.shard_of(task.id))] < rule.in_flight
        ]

    def _key_limit(self, tenant: str, command: str) -> KeyLimit | None:
        limits = self.limits.get((tenant, command))
        return None if limits is None else limits.per_key

    def _claimable(
        self, tenant: str, command: str, shard: int, taken: set[bytes], after: Callable[[Known], Task | None]
    ) -> Claimable:
        """Returns what there is to deliver in a queue of a shard."""
        queue = [t for t in self._of(tenant) if t.new.command == command and self.shard_of(t.id) == shard]
        for task in queue:
            if task.due(self.now_ms):
                self._to_ready(task)
            elif task.overdue(self.now_ms) and (task.id in taken or self._was_taken_back(task, after(task))):
                self._take_back(task)
        open_to_it = []
        for row in queue:
            if row.undecided and row.new.on_duplicate == "replay_dead" and _lost_its_key(after(row)):
                revived = self._lose(row, after) if self._owner(row) is not None else None
                open_to_it += [] if revived is None else [revived]
        pool = []
        for task in queue:
            if task.place is not Place.READY or task.late(self.now_ms) or task in open_to_it:
                continue
            owner = self._owner(task) if task.undecided else None
            if owner is None and not (task.undecided and _lost_its_key(after(task))):
                pool.append(task)
            elif owner is not None and owner.late(self.now_ms):
                open_to_it.append(task)
        return Claimable(pool, open_to_it)

    def _decide_by_delivery(self, task: Known) -> None:
        """A row that was delivered holds its key; a holder that was not started in time has just ended."""
        if not task.undecided:
            return
        owner = self._owner(task)
        if owner is not None:
            assert owner.late(self.now_ms), "a row was delivered whose key another task holds"
            self._end(owner, Status.CANCELLED, Reason.EXPIRED)
        self._hold(task)

    def _grant(self, task: Known, lease: Lease, lease_s: float | None, worker: str) -> None:
        lease_ms = _ms(lease_s or task.new.lease_s or LEASE_DEFAULT_S)
        task.attempts += 1
        task.counted = task.new.limit_key is not None and self._key_limit(task.tenant, task.new.command) is not None
        task.home = task.rank
        task.worker = worker or None
        task.progress = None
        task.status, task.place = Status.IN_PROGRESS, Place.LEASED
        task.token, task.lease_ms, task.lease_end_ms = lease.token, lease_ms, self.now_ms + lease_ms
        assert lease == Lease(
            tenant=task.tenant,
            id=task.id,
            token=lease.token,
            command=task.new.command,
            payload=task.new.payload,
            codec=task.new.codec,
            priority=task.priority,
            attempt=task.attempts,
            max_attempts=task.max_attempts,
            lease_s=lease_ms / 1000,
            lease_end_ms=task.lease_end_ms,
            enqueued_ms=task.enqueued_ms,
            key=task.new.key,
        )

    def _adopt(
        self, tenant: str, after: Callable[[Known], Task | None], but: set[bytes] | frozenset[bytes] = frozenset()
    ) -> None:
        """Takes over what a claim did of the things that time makes due."""
        for task in self._of(tenant):
            if task.id in but or not (
                task.due(self.now_ms)
                or task.overdue(self.now_ms)
                or task.late(self.now_ms)
                or task.rank[0] == self.step
            ):
                continue
            seen = after(task)
            if task.overdue(self.now_ms) and self._was_taken_back(task, seen):
                self._take_back(task)
            elif task.due(self.now_ms) and (seen is None or seen.place is not Place.DELAYED):
                self._to_ready(task)
            elif task.place is Place.READY and seen is not None and seen.place is Place.DELAYED:
                # It came after what filled the claim: it need not have been promoted yet.
                task.place, task.due_ms = Place.DELAYED, seen.due_ms
                assert task.due(self.now_ms)
            if task.late(self.now_ms) and (seen is None or seen.status is Status.CANCELLED):
                self._end(task, Status.CANCELLED, Reason.EXPIRED)

    def _was_taken_back(self, task: Known, seen: Task | None) -> bool:
        return (
            seen is None
            or seen.status is not Status.IN_PROGRESS
            or (seen.attempts, seen.lease_end_ms) != (task.attempts, task.lease_end_ms)
        )

    # ------------------------------------------------------------------------------------------------- holding a lease

    def heartbeat(self, beats: Sequence[Heartbeat]) -> list[Extended | LeaseLost]:
        return [self._heartbeat(beat) for beat in beats]

    def _heartbeat(self, beat: Heartbeat) -> Extended | LeaseLost:
        task = self.task(beat.tenant, beat.id)
        cause = _lost(task, beat.token)
        if task is None or cause is not None:
            return LeaseLost(cause or Cause.UNKNOWN)
        task.progress = beat.progress or task.progress
        task.lease_end_ms = self.now_ms + (task.lease_ms if beat.extend_s is None else _ms(beat.extend_s))
        return Extended(task.lease_end_ms, task.cancel)

    def settle(self, items: Sequence[Settlement]) -> list[Settled | Already | LeaseLost]:
        return [self._settle(item) for item in items]

    def _settle(self, item: Settlement) -> Settled | Already | LeaseLost:
        task = self.task(item.tenant, item.id)
        cause = _lost(task, item.token)
        if task is not None and cause is not None and task.settled == (item.token, item.kind):
            return Already(task.status)
        if task is None or cause is not None:
            return LeaseLost(cause or Cause.UNKNOWN)
        task.settled = (item.token, item.kind)
        task.error = item.error or task.error
        if item.kind is Kind.COMPLETE:
            self._complete(task, item)
        elif task.cancel:
            self._end(task, Status.CANCELLED, Reason.CANCELLED)
        elif item.kind is Kind.FAIL:
            self._end(task, Status.FAILED, item.reason or Reason.FAILED)
        elif item.kind is Kind.RETRY and task.attempts >= task.max_attempts:
            self._end(task, Status.FAILED, Reason.MAX_ATTEMPTS)
        elif item.kind is Kind.RETRY:
            self._retry(task, item.delay_s)
        else:
            self._release(task)
        return Settled(task.status)

    def _complete(self, task: Known, item: Settlement) -> None:
        task.error = None
        if task.new.keep and item.result is not None:
            task.data, task.codec = item.result, item.codec
        self._end(task, Status.COMPLETED, None, item.result_ttl_s)
        if not task.new.keep:
            task.unkept = True
            task.kept_until_ms = task.result_until_ms = self.now_ms + _ms(UNKEPT_STATE_S)
            self._free_key(task)

    def _retry(self, task: Known, delay_s: float) -> None:
        self._to_ready(task)
        if delay_s:
            task.place, task.due_ms = Place.DELAYED, self.now_ms + _ms(delay_s)

    def _release(self, task: Known) -> None:
        task.releases += 1
        if task.releases <= RELEASES_FREE:
            task.attempts -= 1
        elif task.attempts >= task.max_attempts:
            self._end(task, Status.FAILED, Reason.MAX_ATTEMPTS)
            return
        task.status, task.place, task.rank, task.token = Status.PENDING, Place.READY, task.home, b""

    # ------------------------------------------------------------------------------------------------- what people do

    def cancel(
        self, tenant: str, refs: Sequence[bytes | ByKey], after: Callable[[Known], Task | None] | None = None
    ) -> list[Cancelled]:
        """`after` shows a task as the store has it now: a row that is too late, or would lose its key, may end by that
        instead."""
        return [self._cancel(self._named(tenant, ref), after) for ref in refs]

    def _cancel(self, task: Known | None, after: Callable[[Known], Task | None] | None) -> Cancelled:
        if task is None:
            return Cancelled("unknown")
        seen = after(task) if after is not None and not task.status.ended else None
        if task.undecided and _lost_its_key(seen):
            assert task.name in self.contested, "a row lost a key that nobody held"
            self._end(task, Status.CANCELLED, Reason.DUPLICATE)
        elif task.late(self.now_ms) and seen is not None and seen.reason == Reason.EXPIRED:
            self._end(task, Status.CANCELLED, Reason.EXPIRED)
        if task.status.ended:
            return Cancelled("ended", task.status)
        if task.status is Status.IN_PROGRESS:
            task.cancel = True
            return Cancelled("cancelling", Status.IN_PROGRESS)
        self._end(task, Status.CANCELLED, Reason.CANCELLED)
        return Cancelled("cancelled", Status.CANCELLED)

    def replay(self, tenant: str, which: Sequence[bytes] | Filter) -> set[bytes]:
        """Returns which are acted on."""
        dead = [task for task in self._which(tenant, which) if task.status is Status.FAILED]
        for task in dead:
            self._revive(task, 0)
        return {task.id for task in dead}

    def purge(self, tenant: str, which: Sequence[bytes] | Filter) -> set[bytes]:
        """Returns which are acted on."""
        ended = [task for task in self._which(tenant, which) if task.status.ended]
        for task in ended:
            self._remove(task)
        return {task.id for task in ended}

    def retain(self, tenant: str, ids: Sequence[bytes], ttl_s: float) -> list[int | None]:
        kept: list[int | None] = []
        for task in (self.task(tenant, task_id) for task_id in ids):
            if task is None or task.result(self.now_ms) is None:
                kept.append(None)
                continue
            task.result_until_ms = max(task.result_until_ms, self.now_ms + _ms(ttl_s))
            task.kept_until_ms = max(task.kept_until_ms or 0, task.result_until_ms)
            kept.append(task.result_until_ms)
        return kept

    def _named(self, tenant: str, ref: bytes | ByKey) -> Known | None:
        if isinstance(ref, ByKey):
            return self.task(tenant, self.keys.get((tenant, ref.command, ref.key)))
        return self.task(tenant, ref)

    def _which(self, tenant: str, which: Sequence[bytes] | Filter) -> list[Known]:
        if not isinstance(which, Filter):
            named = (self.task(tenant, task_id) for task_id in dict.fromkeys(which))
            return [task for task in named if task is not None]
        return [
            task
            for task in self._of(tenant)
            if task.visible(self.now_ms)
            and which.command in (None, task.new.command)
            and which.status in (None, task.status)
            and which.reason in (None, task.reason)
            and (which.id_from is None or which.id_from <= task.id)
            and (which.id_until is None or task.id < which.id_until)
        ]

    # --------------------------------------------------------------------------------------------- what time alone does

    def sweep(self) -> Swept:
        """Does all that is due, and returns how much it was; what was pruned is not counted."""
        promoted = expired = cancelled = 0
        for task in list(self.tasks.values()):
            if task.overdue(self.now_ms):
                self._take_back(task)
                expired += 1
            elif task.due(self.now_ms):
                self._to_ready(task)
                promoted += 1
            if task.late(self.now_ms):
                self._end(task, Status.CANCELLED, Reason.EXPIRED)
                cancelled += 1
            if not task.visible(self.now_ms):
                self._prune(task)
            elif task.status.ended and task.result_until_ms <= self.now_ms:
                task.data, task.error, task.codec, task.faded = None, None, "json", True
        self.staged = {who: (rows, until_ms) for who, (rows, until_ms) in self.staged.items() if until_ms > self.now_ms}
        return Swept(promoted=promoted, expired=expired, cancelled=cancelled)

    def _take_back(self, task: Known) -> None:
        if task.cancel:
            self._end(task, Status.CANCELLED, Reason.CANCELLED)
        elif task.attempts >= task.max_attempts:
            self._end(task, Status.FAILED, Reason.LEASE_EXPIRED)
        else:
            self._to_ready(task)

    # ---------------------------------------------------------------------------------------------------------- moves

    def _to_ready(self, task: Known, index: int = 0) -> None:
        task.status, task.place, task.token = Status.PENDING, Place.READY, b""
        task.rank, task.due_ms = (self.step, index), self.now_ms

    def _revive(self, task: Known, index: int) -> None:
        task.attempts = task.releases = 0
        task.ended_ms = task.kept_until_ms = task.expires_ms = task.reason = task.progress = task.error = None
        task.cancel = False
        self._to_ready(task, index)

    def _end(self, task: Known, status: Status, reason: str | None, ttl_s: float | None = None) -> None:
        task.status, task.reason, task.token, task.ended_ms = status, reason, b"", self.now_ms
        task.undecided = False
        task.place = Place.DEAD if status is Status.FAILED else Place.NONE
        own_ttl_s = RESULT_TTL_DEFAULT_S if task.new.result_ttl_s is None else task.new.result_ttl_s
        retention_s = max(own_ttl_s, task.new.retention_s or 0.0)
        ttl_s = own_ttl_s if ttl_s is None else ttl_s
        if status is Status.FAILED:
            ttl_s = retention_s = max(DEAD_RETENTION_DEFAULT_S, retention_s)
        task.result_until_ms = self.now_ms + _ms(ttl_s)
        # What is kept for no time at all is still known for a minute, so that repeats are recognised.
        task.kept_until_ms = self.now_ms + _ms(max(retention_s, ttl_s) or UNKEPT_STATE_S)
        if status is Status.CANCELLED:
            self._free_key(task)

    def _remove(self, task: Known) -> None:
        self._free_key(task)
        del self.tasks[(task.tenant, task.id)]
        # The dead hold no leases: an old claim that names them finds none alive.
        for (tenant, _), claim in self.claims.items():
            if tenant == task.tenant:
                claim[:] = [(task_id, token) for task_id, token in claim if task_id != task.id]

    def _prune(self, task: Known) -> None:
        self._remove(task)
        self.pruned.add((task.tenant, task.id))

    def _free_key(self, task: Known) -> None:
        if task.new.key is not None:
            name = (task.tenant, task.new.command, task.new.key)
            if self.keys.get(name) == task.id:
                del self.keys[name]

    # --------------------------------------------------------------------------------------------------------- looking

    def _of(self, tenant: str) -> list[Known]:
        return [task for task in self.tasks.values() if task.tenant == tenant]

    def check_stats(self, tenant: str, stats: QueueStats) -> None:
        """Checks one queue's counts. Records that retention let go still count until they are swept."""
        tasks = [task for task in self._of(tenant) if task.new.command == stats.command]
        ready = [task for task in tasks if task.place is Place.READY]
        heads = self._head_dues(ready)
        if any(task.new.limit_key for task in ready):
            # Which of them is the first depends on what their limits let in.
            heads = {task.due_ms for task in ready}
        expected = QueueStats(
            command=stats.command,
            ready=len(ready),
            delayed=sum(task.place is Place.DELAYED for task in tasks),
            leased=sum(task.place is Place.LEASED for task in tasks),
            dead=sum(task.place is Place.DEAD for task in tasks),
            bytes=sum(task.size for task in tasks),
            paused=(tenant, stats.command) in self.paused,
            limits=self.limits.get((tenant, stats.command)),
            oldest_ready_ms=stats.oldest_ready_ms if stats.oldest_ready_ms in heads else next(iter(heads), None),
        )
        assert stats == expected, f"\nstore: {stats}\nmodel: {expected}"

    def _head_dues(self, ready: list[Known]) -> set[int]:
        """When the oldest of the shards' heads may have become ready; more than one answer if some stand equal."""
        by_shard: dict[int, list[Known]] = {}
        for task in ready:
            by_shard.setdefault(self.shard_of(task.id), []).append(task)
        heads = [
            {task.due_ms for task in tasks if task.order == min(other.order for other in tasks)}
            for tasks in by_shard.values()
        ]
        return {due_ms for dues in heads for due_ms in dues if all(max(others) >= due_ms for others in heads)}


def _lost(task: Known | None, token: bytes) -> Cause | None:
    if task is None:
        return Cause.UNKNOWN
    if task.status is not Status.IN_PROGRESS:
        return Cause.NOT_IN_PROGRESS
    return None if task.token == token else Cause.OTHER_TOKEN


def _lost_its_key(seen: Task | None) -> bool:
    return seen is not None and seen.reason == Reason.DUPLICATE


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
