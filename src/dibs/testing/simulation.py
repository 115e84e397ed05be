"""The queue's rules as a small model, and a hypothesis machine that holds a store against it.

:class:`Model` is dicts and plain values: each verb says what the answer must be and what every task must look like
afterwards. It knows nothing of keys, indexes or transactions. :class:`StoreMachine` makes up operations, runs each on a
store and on the model, and after every step compares answers, every task as `get` shows it, and the counts. A store
author gives it a way to open the store on a clock::

    def test_model(tmp_path):
        run_state_machine_as_test(lambda: StoreMachine(lambda clock: open_my_store(clock)))

What time alone does (promote, take back, expire, prune) may happen in a claim or wait for the sweep; the model accepts
either, and requires all of it after a sweep. Needs ``hypothesis``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dibs.clock import Clock, ManualClock
from dibs.ids import key_digest
from dibs.stores.protocol import Store
from dibs.task import (
    DEAD_RETENTION_DEFAULT_S,
    LEASE_DEFAULT_S,
    MAX_ATTEMPTS_DEFAULT,
    PLACES,
    RELEASES_FREE,
    RESULT_TTL_DEFAULT_S,
    UNKEPT_STATE_S,
    Already,
    ByKey,
    Cancelled,
    Cause,
    Duplicate,
    Enqueued,
    ErrorInfo,
    Event,
    EventKind,
    Extended,
    Filter,
    Heartbeat,
    Kind,
    Lease,
    LeaseLost,
    NewTask,
    Place,
    Progress,
    QueueConfig,
    QueueStats,
    Reason,
    Result,
    Settled,
    Settlement,
    Status,
    Swept,
    Task,
)

T = TypeVar("T")

TENANTS = ("acme", "default")
COMMANDS = ("mail", "resize", "resize.large")

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


def replayed(
    events: Iterable[Event], pruned: frozenset[tuple[str, bytes]] = frozenset()
) -> dict[tuple[str, bytes], Status]:
    """Returns what the journal alone says of every task, and checks that it tells a legal story. `pruned`: ids that
    retention let go at some time, which is not journalled, so that they may have been enqueued anew."""
    statuses: dict[tuple[str, bytes], Status] = {}
    for event in events:
        who = (event.tenant, event.id)
        before, after = EVENT_MOVES[event.kind]
        known = statuses.get(who)
        if event.kind is EventKind.ENQUEUED and who in pruned:
            known = None
        assert known in before, f"{event.kind} of a task that was {known}"
        if after is None:
            del statuses[who]
        else:
            statuses[who] = after
    return statuses


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

    @property
    def id(self) -> bytes:
        return self.new.id

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
        )


@dataclass
class Model:
    """The queue, said simply. `step` grows with every operation: it is what first in, first out goes by."""

    clock: Clock
    tasks: dict[tuple[str, bytes], Known] = field(default_factory=dict)
    keys: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    paused: set[tuple[str, str]] = field(default_factory=set)
    claims: dict[tuple[str, bytes], list[tuple[bytes, bytes]]] = field(default_factory=dict)
    pruned: set[tuple[str, bytes]] = field(default_factory=set)
    step: int = 0

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def task(self, tenant: str, task_id: bytes | None) -> Known | None:
        """Returns a task that exists."""
        known = self.tasks.get((tenant, task_id)) if task_id is not None else None
        return known if known is not None and known.visible(self.now_ms) else None

    # -------------------------------------------------------------------------------------------------------- enqueue

    def enqueue(self, tenant: str, batch: Sequence[NewTask]) -> list[Enqueued | Duplicate]:
        return [self._enqueue(tenant, new, index) for index, new in enumerate(batch)]

    def _enqueue(self, tenant: str, new: NewTask, index: int) -> Enqueued | Duplicate:
        if (tenant, new.id) in self.tasks:
            return Enqueued(new.id, already=True)
        if new.key is not None:
            owner = self.task(tenant, self.keys.get((tenant, new.command, new.key)))
            if owner is not None and owner.status is Status.FAILED and new.on_duplicate == "replay_dead":
                self._revive(owner, index)
                return Duplicate(owner.id, Status.PENDING, replayed=True)
            if owner is not None:
                return Duplicate(owner.id, owner.status, owner.result(self.now_ms))
            self.keys[(tenant, new.command, new.key)] = new.id
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
        return Enqueued(new.id)

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
        remembered = self.claims.get((tenant, claim_id or b""), [])
        alive = [(task_id, token) for task_id, token in remembered if self.tasks[(tenant, task_id)].token == token]
        if alive:
            assert [(lease.id, lease.token) for lease in leases] == alive, "a repeated claim returns its live leases"
            return
        if remembered and not leases:
            # The store may still know the claim, whose leases are all over, or may have forgotten it.
            self._adopt(tenant, after)
            return
        left = list(leases)
        for command in commands:
            if (tenant, command) in self.paused or len(leases) - len(left) == limit:
                continue
            pool = self._claimable(tenant, command, {lease.id for lease in leases}, after)
            while pool and len(leases) - len(left) < limit:
                assert left, f"{len(pool)} more tasks could have been claimed from {command}"
                lease = left.pop(0)
                task = next((task for task in pool if task.id == lease.id), None)
                assert task is not None, "a task was delivered that is not ready in the first queue that has any"
                assert task.order == min(other.order for other in pool), "not the first in order was delivered"
                pool.remove(task)
                self._grant(task, lease, lease_s, worker)
        assert not left, "more was delivered than is ready"
        if claim_id is not None and leases:
            self.claims[(tenant, claim_id)] = [(lease.id, lease.token) for lease in leases]
        self._adopt(tenant, after, {lease.id for lease in leases})

    def _claimable(
        self, tenant: str, command: str, taken: set[bytes], after: Callable[[Known], Task | None]
    ) -> list[Known]:
        pool = []
        for task in self._of(tenant):
            if task.new.command != command:
                continue
            if task.due(self.now_ms):
                self._to_ready(task)
            elif task.overdue(self.now_ms) and (task.id in taken or self._was_taken_back(task, after(task))):
                self._take_back(task)
            if task.place is Place.READY and not task.late(self.now_ms):
                pool.append(task)
        return pool

    def _grant(self, task: Known, lease: Lease, lease_s: float | None, worker: str) -> None:
        lease_ms = _ms(lease_s or task.new.lease_s or LEASE_DEFAULT_S)
        task.attempts += 1
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

    def cancel(self, tenant: str, refs: Sequence[bytes | ByKey]) -> list[Cancelled]:
        return [self._cancel(self._named(tenant, ref)) for ref in refs]

    def _cancel(self, task: Known | None) -> Cancelled:
        if task is None:
            return Cancelled("unknown")
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
            if task is None or not task.status.ended or task.result_until_ms <= self.now_ms:
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
        ]

    # ---------------------------------------------------------------------------------------------- what time alone does

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
                self._remove(task)
                self.pruned.add((task.tenant, task.id))
            elif task.status.ended and task.result_until_ms <= self.now_ms:
                task.data, task.error, task.codec, task.faded = None, None, "json", True
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
        task.place = Place.DEAD if status is Status.FAILED else Place.NONE
        own_ttl_s = RESULT_TTL_DEFAULT_S if task.new.result_ttl_s is None else task.new.result_ttl_s
        retention_s = max(own_ttl_s, task.new.retention_s or 0.0)
        ttl_s = own_ttl_s if ttl_s is None else ttl_s
        if status is Status.FAILED:
            ttl_s = retention_s = max(DEAD_RETENTION_DEFAULT_S, retention_s)
        task.result_until_ms = self.now_ms + _ms(ttl_s)
        task.kept_until_ms = self.now_ms + _ms(max(retention_s, ttl_s))
        if status is Status.CANCELLED:
            self._free_key(task)

    def _remove(self, task: Known) -> None:
        self._free_key(task)
        del self.tasks[(task.tenant, task.id)]
        # The dead hold no leases: an old claim that names them finds none alive.
        for claim in self.claims.values():
            claim[:] = [(task_id, token) for task_id, token in claim if task_id != task.id]

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
        heads = {task.due_ms for task in ready if task.order == min(other.order for other in ready)}
        expected = QueueStats(
            command=stats.command,
            ready=len(ready),
            delayed=sum(task.place is Place.DELAYED for task in tasks),
            leased=sum(task.place is Place.LEASED for task in tasks),
            dead=sum(task.place is Place.DEAD for task in tasks),
            bytes=sum(task.size for task in tasks),
            paused=(tenant, stats.command) in self.paused,
            oldest_ready_ms=stats.oldest_ready_ms if stats.oldest_ready_ms in heads else next(iter(heads), None),
        )
        assert stats == expected


def _lost(task: Known | None, token: bytes) -> Cause | None:
    if task is None:
        return Cause.UNKNOWN
    if task.status is not Status.IN_PROGRESS:
        return Cause.NOT_IN_PROGRESS
    return None if task.token == token else Cause.OTHER_TOKEN


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


# ------------------------------------------------------------------------------------------------------------- machine

Pick = st.integers(0, 1 << 16)
"""Which of the things there are; taken modulo how many there are."""

seconds = st.sampled_from([1.0, 2.5, 10.0, 60.0])
news = st.fixed_dictionaries(
    {
        "command": st.sampled_from(COMMANDS),
        "payload": st.sampled_from([b"", b"p", b"\x00\xff\x00"]),
    },
    optional={
        "priority": st.sampled_from([0, 1, 9]),
        "delay_s": st.sampled_from([0.5, 5.0, 90_000.0]),
        "max_attempts": st.integers(1, 3),
        "lease_s": seconds,
        "expires_s": st.sampled_from([0.5, 5.0, 100.0]),
        "key": st.sampled_from(["k", "k/2"]),
        "on_duplicate": st.sampled_from(["return", "replay_dead"]),
        "result_ttl_s": st.sampled_from([0.0, 1.0, 30.0]),
        "retention_s": st.sampled_from([0.0, 20.0, 60.0]),
        "keep": st.booleans(),
    },
)
tenants = st.sampled_from(TENANTS)


class StoreMachine(RuleBasedStateMachine):
    """Random operations on a store and on the model, side by side."""

    def __init__(self, opener: Callable[[Clock], Awaitable[Store]], *, reopens: bool = False) -> None:
        """`opener` opens a store without any data on the given clock. `reopens`: what was stored outlives `close`, and
        the opener finds it again."""
        super().__init__()
        self.opener = opener
        self.reopens = reopens
        self.clock = ManualClock()
        self.model = Model(self.clock)
        self.ids: list[tuple[str, NewTask]] = []
        self.leases: list[Lease] = []
        self.settlements: list[Settlement] = []
        self.claim_ids: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._minted = 0
        self.store = self.run(self._open())
        self.run(self._hold_the_journal())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call of the store in the machine's loop."""
        return self._loop.run_until_complete(call)

    async def _open(self) -> Store:
        return await self.opener(self.clock)

    # ------------------------------------------------------------------------------------------------ life of a task

    @rule(tenant=tenants, batch=st.lists(news, min_size=1, max_size=4))
    def enqueue(self, tenant: str, batch: list[dict[str, Any]]) -> None:
        self.step()
        tasks = [NewTask(id=self._mint(tenant, options), **options) for options in batch]
        self.ids += [(tenant, task) for task in tasks]
        self.same(self.run(self.store.enqueue(tenant, tasks)), self.model.enqueue(tenant, tasks))

    @precondition(lambda self: self.ids)
    @rule(picks=st.lists(Pick, min_size=1, max_size=3), tenant=tenants)
    def enqueue_again(self, picks: list[int], tenant: str) -> None:
        """Ids that were used before, here or by the other tenant, twice in one batch perhaps."""
        self.step()
        tasks = [task for whose, task in (self._pick(self.ids, n) for n in picks) if whose == tenant or not task.key]
        if tasks:
            self.same(self.run(self.store.enqueue(tenant, tasks)), self.model.enqueue(tenant, tasks))

    @rule(
        tenant=tenants,
        commands=st.permutations(COMMANDS),
        count=st.integers(1, len(COMMANDS)),
        limit=st.integers(1, 4),
        lease_s=st.none() | seconds,
        worker=st.sampled_from(["", "w1", "w2"]),
        with_id=st.booleans(),
    )
    def claim(
        self,
        tenant: str,
        commands: list[str],
        count: int,
        limit: int,
        lease_s: float | None,
        worker: str,
        with_id: bool,
    ) -> None:
        claim_id = self._number(b"c") if with_id else None
        if claim_id is not None:
            self.claim_ids.append(claim_id)
        self._claim(tenant, commands[:count], limit, lease_s, worker, claim_id)

    @precondition(lambda self: self.claim_ids)
    @rule(pick=Pick, tenant=tenants, limit=st.integers(1, 4))
    def claim_again(self, pick: int, tenant: str, limit: int) -> None:
        self._claim(tenant, list(COMMANDS), limit, None, "w1", self._pick(self.claim_ids, pick))

    def _claim(
        self, tenant: str, commands: list[str], limit: int, lease_s: float | None, worker: str, claim_id: bytes | None
    ) -> None:
        self.step()
        known = {lease.token for lease in self.leases}
        leases = self.run(
            self.store.claim(tenant, commands, limit=limit, lease_s=lease_s, worker=worker, claim_id=claim_id)
        )
        seen = self._seen()
        self.model.claimed(
            tenant, commands, limit, lease_s, worker, claim_id, leases, lambda task: seen[(task.tenant, task.id)]
        )
        self.leases += [lease for lease in leases if lease.token not in known]

    @precondition(lambda self: self.leases)
    @rule(
        picks=st.lists(Pick, min_size=1, max_size=3),
        extend_s=st.none() | seconds,
        progress=st.none() | st.builds(Progress, st.just(0.5), st.none(), st.just("half")),
    )
    def heartbeat(self, picks: list[int], extend_s: float | None, progress: Progress | None) -> None:
        self.step()
        beats = [
            Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token, extend_s=extend_s, progress=progress)
            for lease in (self._recent(n) for n in picks)
        ]
        self.same(self.run(self.store.heartbeat(beats)), self.model.heartbeat(beats))

    @precondition(lambda self: self.leases)
    @rule(
        what=st.lists(
            st.tuples(Pick, st.sampled_from(Kind), st.sampled_from([0.0, 0.0, 3.0, 90_000.0]), st.booleans()),
            min_size=1,
            max_size=3,
        )
    )
    def settle(self, what: list[tuple[int, Kind, float, bool]]) -> None:
        """Leases of now and of long ago."""
        self.step()
        items = [self._settlement(self._recent(n), kind, delay_s, flag) for n, kind, delay_s, flag in what]
        self.settlements += items
        self.same(self.run(self.store.settle(items)), self.model.settle(items))

    @precondition(lambda self: self.settlements)
    @rule(picks=st.lists(Pick, min_size=1, max_size=2))
    def settle_again(self, picks: list[int]) -> None:
        self.step()
        items = [self._pick(self.settlements, -1 - n % 4) for n in picks]
        self.same(self.run(self.store.settle(items)), self.model.settle(items))

    @precondition(lambda self: self.leases)
    @rule(pick=Pick, kind=st.sampled_from(Kind))
    def settle_with_a_made_up_token(self, pick: int, kind: Kind) -> None:
        self.step()
        lease = self._recent(pick)
        forged = Settlement(tenant=lease.tenant, id=lease.id, token=self._number(b"f"), kind=kind)
        self.same(self.run(self.store.settle([forged])), self.model.settle([forged]))

    @precondition(lambda self: self.model.tasks)
    @rule(tenant=tenants, kind=st.sampled_from(Kind), delay_s=st.sampled_from([0.0, 3.0]), flag=st.booleans())
    def work_off(self, tenant: str, kind: Kind, delay_s: float, flag: bool) -> None:
        """What a worker does: claim, then settle."""
        before = len(self.leases)
        self._claim(tenant, list(COMMANDS), 2, None, "w1", None)
        self.step()
        items = [self._settlement(lease, kind, delay_s, flag) for lease in self.leases[before:]]
        self.settlements += items
        self.same(self.run(self.store.settle(items)), self.model.settle(items))

    @precondition(lambda self: self.leases)
    @rule(pick=Pick, times=st.integers(2, 22))
    def release_again_and_again(self, pick: int, times: int) -> None:
        """A task that everybody gives back."""
        lease = self._recent(pick)
        for _ in range(times):
            self.step()
            item = self._settlement(lease, Kind.RELEASE, 0.0, False)
            self.same(self.run(self.store.settle([item])), self.model.settle([item]))
            self._claim(lease.tenant, [lease.command], 1, None, "w2", None)
            lease = self.leases[-1]

    # ------------------------------------------------------------------------------------------------- what people do

    @precondition(lambda self: self.ids)
    @rule(tenant=tenants, picks=st.lists(Pick, min_size=1, max_size=3), by_key=st.booleans())
    def cancel(self, tenant: str, picks: list[int], by_key: bool) -> None:
        self.step()
        refs: list[bytes | ByKey] = [
            ByKey(task.command, task.key) if by_key and task.key else task.id
            for _, task in (self._pick(self.ids, n) for n in picks)
        ]
        self.same(self.run(self.store.cancel(tenant, refs)), self.model.cancel(tenant, refs))

    @precondition(lambda self: self.ids)
    @rule(tenant=tenants, picks=st.lists(Pick, max_size=6), command=st.none() | st.sampled_from(COMMANDS))
    def replay(self, tenant: str, picks: list[int], command: str | None) -> None:
        self.step()
        which = self._some_ids(picks) or Filter(command=command)
        acted = self.run(self.store.replay(tenant, which))
        self.same(len(acted.ids), len(set(acted.ids)))
        self.same(set(acted.ids), self.model.replay(tenant, which))

    @precondition(lambda self: self.ids)
    @rule(tenant=tenants, picks=st.lists(Pick, max_size=3), status=st.sampled_from(Status))
    def purge(self, tenant: str, picks: list[int], status: Status) -> None:
        self.step()
        which = self._some_ids(picks) or Filter(status=status)
        acted = self.run(self.store.purge(tenant, which))
        self.same(len(acted.ids), len(set(acted.ids)))
        self.same(set(acted.ids), self.model.purge(tenant, which))

    @precondition(lambda self: self.ids)
    @rule(tenant=tenants, picks=st.lists(Pick, min_size=1, max_size=3), ttl_s=st.sampled_from([0.0, 5.0, 100.0]))
    def retain(self, tenant: str, picks: list[int], ttl_s: float) -> None:
        self.step()
        ids = [
            task_id
            for task_id in self._some_ids(picks)
            # A result that was pruned, under a clock that was then set back: the rules do not say.
            if not ((task := self.model.task(tenant, task_id)) and task.faded and task.result_until_ms > self.now_ms)
        ]
        if ids:
            self.same(self.run(self.store.retain(tenant, ids, ttl_s)), self.model.retain(tenant, ids, ttl_s))

    @rule(tenant=tenants, command=st.sampled_from(COMMANDS), paused=st.sampled_from([False, False, True]))
    def pause_or_resume(self, tenant: str, command: str, paused: bool) -> None:
        self.step()
        config = QueueConfig(paused=paused)
        self.same(self.run(self.store.configure(tenant, command, config)), config)
        if paused:
            self.model.paused.add((tenant, command))
        else:
            self.model.paused.discard((tenant, command))

    # ------------------------------------------------------------------------------------------------------- time

    @rule(seconds=st.sampled_from([0.001, 0.5, 1.0, 5.0, 29.999, 61.0, 3_600.0, 90_000.0, 20 * 86_400.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([0.001, 0.5, 3.0]))
    def the_clock_is_set_back(self, seconds: float) -> None:
        self.clock.advance(-seconds)

    @rule(budget=st.sampled_from([1, 2, 1_000]))
    def sweep(self, budget: int) -> None:
        """Bounded sweeps, until one finds nothing."""
        self.step()
        promoted = expired = cancelled = 0
        for _ in range(1_000):
            swept = self.run(self.store.sweep(budget))
            promoted, expired, cancelled = (
                promoted + swept.promoted,
                expired + swept.expired,
                cancelled + swept.cancelled,
            )
            if swept == Swept():
                break
        else:
            raise AssertionError("the sweep never ends")
        # What is due and past its start deadline may be promoted first, or not.
        either = sum(task.due(self.now_ms) and task.late(self.now_ms) for task in self.model.tasks.values())
        expected = self.model.sweep()
        self.same((expired, cancelled), (expected.expired, expected.cancelled))
        assert expected.promoted - either <= promoted <= expected.promoted

    @precondition(lambda self: self.reopens)
    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.store = self.run(self._open())

    # ------------------------------------------------------------------------------------------------------ comparing

    @invariant()
    def every_task_is_as_the_model_says(self) -> None:
        seen = self._seen()
        for who, task in self.model.tasks.items():
            shown = task.shown(self.now_ms)
            if seen[who] != shown:
                self.same(*(_comparable(side, task, self.now_ms) for side in (seen[who], shown)))
        for tenant, task in self.ids:
            if (tenant, task.id) not in self.model.tasks:
                self.same(seen[(tenant, task.id)], None)

    @invariant()
    def the_counts_are_exact(self) -> None:
        for tenant in TENANTS:
            stats = self.run(self.store.stats(tenant, COMMANDS))
            for queue in stats.queues:
                self.model.check_stats(tenant, queue)
            for name in ("ready", "delayed", "leased", "dead", "bytes"):
                self.same(getattr(stats.total, name), sum(getattr(queue, name) for queue in stats.queues))

    def teardown(self) -> None:
        try:
            # After a step that failed the model is behind: what it would say then only hides the cause.
            if sys.exc_info()[0] is None:
                self.run(self._check_journal())
                self.run(self.check_at_the_end())
        finally:
            self.run(self.store.close())
            self._loop.close()

    async def check_at_the_end(self) -> None:
        """For checks that only one store has; nothing here."""

    async def _hold_the_journal(self) -> None:
        """A named reader that reads nothing until the end: nothing may be trimmed."""
        for bounds in await self.store.journal_bounds():
            await self.store.advance("model", bounds.shard, bounds.oldest)

    async def _check_journal(self) -> None:
        """What the journal tells leads to the statuses that the tasks have."""
        events: list[Event] = []
        for bounds in await self.store.journal_bounds():
            after: bytes | None = None
            while True:
                page = await self.store.events("*", shard=bounds.shard, after=after)
                events += page.events
                after = page.cursor
                if not page.more:
                    break
        statuses = replayed(events, frozenset(self.model.pruned))
        for who, task in self.model.tasks.items():
            self.same(statuses[who], task.status)
            assert task.place in PLACES[task.status]

    # -------------------------------------------------------------------------------------------------------- helpers

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def step(self) -> None:
        self.model.step += 1

    def same(self, store_says: object, model_says: object) -> None:
        """The one comparison."""
        assert store_says == model_says, f"\nstore: {store_says}\nmodel: {model_says}"

    def _seen(self) -> dict[tuple[str, bytes], Task | None]:
        """Every task that anybody ever named, as the store shows it."""
        names = dict.fromkeys((tenant, task.id) for tenant, task in self.ids) | dict.fromkeys(self.model.tasks)
        seen: dict[tuple[str, bytes], Task | None] = {}
        for tenant in TENANTS:
            ids = [task_id for whose, task_id in names if whose == tenant]
            tasks = self.run(self.store.get(tenant, ids))
            seen |= {(tenant, task_id): task for task_id, task in zip(ids, tasks, strict=True)}
        return seen

    def _settlement(self, lease: Lease, kind: Kind, delay_s: float, flag: bool) -> Settlement:
        who = {"tenant": lease.tenant, "id": lease.id, "token": lease.token, "kind": kind}
        if kind is Kind.COMPLETE:
            return Settlement(**who, result=b"result" if flag else None, result_ttl_s=delay_s or None)
        error = ErrorInfo("Boom", f"attempt {lease.attempt}") if flag else None
        if kind is Kind.RETRY:
            return Settlement(**who, delay_s=delay_s, error=error)
        if kind is Kind.FAIL:
            return Settlement(**who, error=error, reason="BAD_INPUT" if delay_s else None)
        return Settlement(**who)

    def _mint(self, tenant: str, options: dict[str, Any]) -> bytes:
        """Ids that are the same in every run of an example; a keyed one is in the slot of its key."""
        minted = self._number(b"i")
        if "key" not in options:
            return minted
        return minted[:-1] + key_digest(tenant, options["command"], options["key"])[-1:]

    def _number(self, mark: bytes) -> bytes:
        self._minted += 1
        return mark + self._minted.to_bytes(14, "big") + b"\0"

    def _some_ids(self, picks: list[int]) -> list[bytes]:
        return [self._pick(self.ids, n)[1].id for n in picks]

    def _recent(self, n: int) -> Lease:
        """Mostly a lease of the last few, now and then an older one."""
        return self.leases[-1 - n % min(6, len(self.leases))] if n % 5 else self._pick(self.leases, n)

    def _pick(self, things: list[T], n: int) -> T:
        return things[n % len(things)]


def _comparable(task: Task | None, known: Known, now_ms: int) -> dict[str, object] | None:
    """A task without what the rules leave open."""
    if task is None:
        return None
    fields = {name: getattr(task, name) for name in task.__struct_fields__}
    if known.status.ended:
        # When an ended task was last visible interests nobody; one that expired may have been promoted first.
        del fields["due_ms"]
    if known.unkept:
        # Nothing is left that the codec could say how to read.
        del fields["codec"]
    if known.faded and known.result_until_ms > now_ms:
        # A result that was pruned, under a clock that was then set back.
        del fields["result"]
    if known.status.ended and known.result_until_ms <= now_ms:
        # The error goes with the result, at once or with the sweep.
        del fields["error"]
    return fields
