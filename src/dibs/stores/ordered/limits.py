"""Limits per key: what the tasks of one queue that share a `limit_key` may use together.

A task that becomes ready while its key is at its limit is parked beside the queue instead of standing in it, so no
claim ever scans past it: a million of them cost other keys nothing. :class:`~dibs.stores.ordered.records.KeyUse`
counts, for one key, what stands in the queue, is leased and is parked. Whenever something leaves, the first of the
parked go home, in the order that they would have had; where time alone gives room, one timed entry for the key brings
them back.

At each priority the queue holds as many tasks of a key as could be claimed now if nothing of a lower priority were
there: a task of a high priority never waits behind those of a lower one. Claims look again, since limits may have
changed and tasks may be older than their limit; what is over is parked then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

from dibs.ids import DIGEST_BYTES, ID_BYTES, key_digest
from dibs.stores.ordered.keys import (
    EXPIRE_LIMIT,
    KIND_LIMIT,
    KIND_REVIEW,
    QueueKeys,
    end_of,
    expiry_key,
    from8,
    id_of,
    ms8,
    tenant_keys,
)
from dibs.stores.ordered.records import (
    LEASED,
    PARKED,
    READY,
    Body,
    Detail,
    KeyUse,
    State,
    decode_state,
    decode_use,
    encode_use,
)
from dibs.task import PRIORITY_MAX, EventKind, KeyLimit, Reason

if TYPE_CHECKING:
    from dibs.stores.ordered.work import QueueWork, Work

PRIORITIES = PRIORITY_MAX + 1
HOME_PER_STEP = 200
KEYS_PER_STEP = 50
_FIRST_KEY = bytes(DIGEST_BYTES)
_ALMOST = 1e-6
_PROMOTED, _DETAIL = EventKind.PROMOTED, Detail(Reason.LIMIT)


class Ahead(Struct, frozen=True, gc=False):
    """Tasks of a key that stand in the queue before one of them, and what they cost."""

    count: int = 0
    cost: int = 0


class KeyLimiter:
    """The limits per key of one queue, within one transaction. Every move of a task that has a limit is told here."""

    __slots__ = ("_changed", "_queue", "_touched", "_uses", "_went_home")

    def __init__(self, queue: QueueWork) -> None:
        self._queue = queue
        self._uses: dict[bytes, KeyUse] = {}
        self._changed: set[bytes] = set()
        # Keys whose parked tasks may go home; a dict keeps their order.
        self._touched: dict[bytes, None] = {}
        # Of those that were overtaken, what has gone home in this step.
        self._went_home = Ahead()

    @property
    def _rule(self) -> KeyLimit | None:
        return self._queue.key_limit

    # ----------------------------------------------------------------------------------------------------------- moves

    def moved(self, state: State, place: int, rank: bytes) -> tuple[int, bytes]:
        """Counts a move from where the state says to `place`; returns where the task goes: one that would become ready
        may have to be parked."""
        if place == LEASED and state.place == LEASED:
            return place, rank
        kept = state.held and (state.place == PARKED or (state.place == LEASED and rank == state.home))
        self._left(state)
        if place == READY:
            return self._kept(state, rank) if kept else self._admitted(state, rank)
        if place == PARKED:
            return self._parked(state, rank)
        state.held = False
        return place, rank

    def admit(self, state: State, rank: bytes) -> None:
        """Says where a new task that is ready stands."""
        state.place, state.rank = self._admitted(state, rank)

    def take(self, task_id: bytes, state: State, body: Body) -> bool:
        """Decides whether a ready task may be leased now, and counts it. If not, it is parked."""
        rule = self._rule
        if rule is None:
            self._left(state)
            state.held = False
            return True
        if not state.limit:
            assert body.limit_key is not None
            state.limit, state.cost = self.digest(body.limit_key), body.limit_cost
        use = self._use(state.limit)
        tokens = self._tokens(rule, use)
        if (rule.in_flight is not None and use.leased >= rule.in_flight) or (
            rule.rate is not None and tokens + _ALMOST < min(state.cost, burst_of(rule))
        ):
            self._queue.park(task_id, state)
            return False
        self._left(state)
        state.held = True
        use.leased += 1
        if rule.rate is not None:
            use.tokens, use.refilled_ms = tokens - state.cost, self._queue.work.now_ms
        return True

    def digest(self, limit_key: str) -> bytes:
        """Names a limit_key of this queue."""
        return key_digest(self._queue.tenant.name, self._queue.keys.command, limit_key)

    def _left(self, state: State) -> None:
        if state.place == PARKED:
            use = self._use(state.limit)
            use.parked -= 1
            if use.timer_ms:
                self._touched[state.limit] = None
        elif state.held:
            use = self._use(state.limit)
            if state.place == LEASED:
                use.leased -= 1
            else:
                use.ready[state.priority] -= 1
                use.costs[state.priority] -= state.cost
            if use.parked:
                self._touched[state.limit] = None

    def _admitted(self, state: State, rank: bytes) -> tuple[int, bytes]:
        rule = self._rule
        if rule is None:
            state.held = False
            return READY, rank
        use = self._use(state.limit)
        if not use.parked and self._fits(rule, use, state):
            return self._kept(state, rank)
        return self._parked(state, state.limit + rank)

    def _kept(self, state: State, rank: bytes) -> tuple[int, bytes]:
        use = self._use(state.limit)
        use.ready[state.priority] += 1
        use.costs[state.priority] += state.cost
        use.last[state.priority] = max(rank, use.last.get(state.priority, b""))
        state.held = True
        return READY, rank

    def _parked(self, state: State, rank: bytes) -> tuple[int, bytes]:
        self._use(state.limit).parked += 1
        # Nothing may have stood here before that could tell the time at which there is room.
        self._touched[state.limit] = None
        state.held = False
        return PARKED, rank

    # ------------------------------------------------------------------------------------------------------------ room

    def _fits(self, rule: KeyLimit, use: KeyUse, state: State) -> bool:
        """Whether one more task may stand in the queue, beside those that come before it."""
        ahead = self._ahead(use, state)
        if rule.in_flight is not None and use.leased + ahead.count >= rule.in_flight:
            return False
        return rule.rate is None or self._tokens(rule, use) + _ALMOST >= min(state.cost, burst_of(rule)) + ahead.cost

    def _ahead(self, use: KeyUse, state: State) -> Ahead:
        """What stands in the queue before a task. Rows of a load are not counted before a claim reaches them, so tasks
        behind them may have been let in: one that is parked then is ahead of those, and goes home as if they were not
        there. Some may come before it all the same; it is looked at once more when it is claimed."""
        if _is_overtaken(use, state):
            return self._went_home
        return Ahead(sum(use.ready[state.priority :]), sum(use.costs[state.priority :]))

    def _tokens(self, rule: KeyLimit, use: KeyUse) -> float:
        """What may be spent now. A clock that was set back refills from there."""
        burst = burst_of(rule)
        if rule.rate is None or use.refilled_ms == 0:
            return burst
        now_ms = self._queue.work.now_ms
        use.refilled_ms = min(use.refilled_ms, now_ms)
        return min(burst, use.tokens + (now_ms - use.refilled_ms) * rule.rate / 1000)

    def _room_at_ms(self, rule: KeyLimit, use: KeyUse, state: State) -> int:
        """When time alone gives room to a task that does not fit; 0 if it does not."""
        ahead = self._ahead(use, state)
        if rule.rate is None or (rule.in_flight is not None and use.leased + ahead.count >= rule.in_flight):
            return 0
        needed = min(state.cost, burst_of(rule)) + ahead.cost
        if needed > burst_of(rule):
            # Some that stand before it have to be claimed, or cancelled, first.
            return 0
        missing = needed - self._tokens(rule, use)
        return self._queue.work.now_ms + max(1, math.ceil(missing * 1000 / rule.rate))

    def bring_home(self) -> bool:
        """Moves parked tasks whose key has room into the queue; True if something has to be written for it. Called
        between two flushes."""
        touched, self._touched = self._touched, {}
        if touched:
            # One that this call put in and parked may go home at once: the journal tells the one before the other.
            self._queue.work.journal_new()
        for limit in touched:
            self._bring_home(limit)
            # Its own moves touched it again, and it has just been seen to.
            self._touched.pop(limit, None)
        return bool(touched)

    def _bring_home(self, limit: bytes) -> None:
        rule, use, queue = self._rule, self._use(limit), self._queue
        prefix = queue.keys.parked + limit
        timer_ms, start, seen, self._went_home = 0, prefix, 0, Ahead()
        while seen < HOME_PER_STEP and use.parked and (room := self._room(rule, use)):
            home = queue.work.txn.scan_keys(start, prefix + b"\xff", room)
            for entry in home:
                task_id = id_of(entry)
                state = decode_state(queue.work.txn.get(queue.tenant.state + task_id) or b"")
                if rule is not None and not self._fits(rule, use, state):
                    self._set_timer(limit, use, self._room_at_ms(rule, use, state))
                    return
                if _is_overtaken(use, state):
                    self._went_home = Ahead(self._went_home.count + 1, self._went_home.cost + state.cost)
                queue.unpark(task_id, state, held=rule is not None)
                queue.event(_PROMOTED, task_id, state.attempts, detail=_DETAIL)
            if not home:
                break
            # One of a higher priority goes home whatever stands there of lower ones: there may be more of them.
            start, seen = home[-1] + b"\0", seen + len(home)
        else:
            if use.parked and seen:
                # There may be more room: another step, as soon as somebody claims or sweeps.
                timer_ms = queue.work.now_ms
        self._set_timer(limit, use, timer_ms)

    def _room(self, rule: KeyLimit | None, use: KeyUse) -> int:
        """How many parked tasks to look at in this step: one more than can go home, as far as is known."""
        room = HOME_PER_STEP
        if rule is not None and rule.in_flight is not None:
            if use.leased >= rule.in_flight:
                return 0
            room = min(room, 1 + max(0, rule.in_flight - use.leased - sum(use.ready)))
        if rule is not None and rule.rate is not None:
            room = min(room, 1 + max(0, math.floor(self._tokens(rule, use) + _ALMOST)))
        return room

    def _set_timer(self, limit: bytes, use: KeyUse, at_ms: int) -> None:
        if at_ms == use.timer_ms:
            return
        work, keys = self._queue.work, self._queue.keys
        if use.timer_ms:
            work.deletes.append(timer_entry(keys, use.timer_ms, limit))
        if at_ms:
            work.entries.append(timer_entry(keys, at_ms, limit))
            self._queue.due(at_ms)
        use.timer_ms = at_ms

    # ------------------------------------------------------------------------------------------------------------ time

    def timer(self, entry: bytes) -> None:
        """A key's time has come: those that were parked may go home. Acts only if the key names the entry."""
        limit, at_ms = id_of(entry), entry_ms(self._queue.keys, entry)
        self._queue.work.deletes.append(entry)
        use = self._use(limit)
        if use.timer_ms == at_ms:
            use.timer_ms = 0
            self._touched[limit] = None

    def review(self, after: bytes = _FIRST_KEY) -> None:
        """Looks at the parked tasks of some keys because the limits have changed, and notes to go on with the rest."""
        work, keys = self._queue.work, self._queue.keys
        for _ in range(KEYS_PER_STEP):
            found = work.txn.scan_keys(keys.parked + after + b"\xff", end_of(keys.parked), 1)
            if not found:
                return
            after = found[0][len(keys.parked) :][:DIGEST_BYTES]
            self._touched[after] = None
        work.entries.append(keys.delayed + ms8(work.now_ms) + KIND_REVIEW + after)
        self._queue.due(work.now_ms)

    def go_on_reviewing(self, entry: bytes) -> None:
        """The next step of a review."""
        self._queue.work.deletes.append(entry)
        self.review(id_of(entry))

    def expire(self, limit: bytes, at_ms: int) -> None:
        """Lets go of the record of a key that uses nothing, or notes when to look again."""
        use = self._use(limit)
        if use.expires_ms == at_ms:
            use.expires_ms = 0

    # --------------------------------------------------------------------------------------------------------- records

    def _use(self, limit: bytes) -> KeyUse:
        """Returns what a key uses, to be changed."""
        self._changed.add(limit)
        use = self._uses.get(limit)
        if use is None:
            stored = self._queue.work.txn.get(self._queue.tenant.limit + limit)
            use = new_use(self._queue.keys.command) if stored is None else decode_use(stored)
            self._uses[limit] = use
        return use

    def finish(self) -> None:
        """Writes what the keys use. What uses nothing has no record: at once, or when its burst is full again."""
        txn, tenant = self._queue.work.txn, self._queue.tenant
        for limit in sorted(self._changed):
            use = self._uses[limit]
            if not use.idle():
                txn.put(tenant.limit + limit, encode_use(use))
                continue
            full_ms = self._full_ms(use)
            if full_ms <= txn.now_ms:
                txn.delete(tenant.limit + limit)
                continue
            if not use.expires_ms:
                use.expires_ms = full_ms
                txn.put(expiry_key(full_ms, EXPIRE_LIMIT, tenant.name, limit), limit)
            txn.put(tenant.limit + limit, encode_use(use))

    def _full_ms(self, use: KeyUse) -> int:
        rule = self._rule
        if rule is None or rule.rate is None:
            return 0
        missing = burst_of(rule) - self._tokens(rule, use)
        return 0 if missing <= 0 else self._queue.work.now_ms + math.ceil(missing * 1000 / rule.rate)


def burst_of(rule: KeyLimit) -> float:
    """How much may start at once."""
    return max(1.0, rule.rate or 1.0) if rule.burst is None else rule.burst


def new_use(command: str) -> KeyUse:
    """What a key uses that nobody has used."""
    return KeyUse(command, 0, [0] * PRIORITIES, [0] * PRIORITIES, 0, 0.0, 0)


def timer_entry(queue: QueueKeys, at_ms: int, limit: bytes) -> bytes:
    """The entry among the delayed ones that tells when a key has room."""
    return queue.delayed + ms8(at_ms) + KIND_LIMIT + limit


def entry_ms(queue: QueueKeys, entry: bytes) -> int:
    """When a delayed entry is due."""
    return from8(entry[len(queue.delayed) : -ID_BYTES - 1])


def expire_use(work: Work, tenant: str, limit: bytes, at_ms: int) -> None:
    """Looks at a key's record when its burst is full again."""
    stored = work.txn.get(tenant_keys(tenant).limit + limit)
    if stored is not None:
        work.queue(tenant, decode_use(stored).command).limiter.expire(limit, at_ms)


def _is_overtaken(use: KeyUse, state: State) -> bool:
    """Whether a task is parked before one of its key and priority that was let into the queue."""
    return state.place == PARKED and state.rank[DIGEST_BYTES:] < use.last.get(state.priority, b"")
