"""The moves: every change of place goes through here, so a task is never in two places or in none.

A :class:`Work` collects what a call changes and writes it in one go, records of a kind together and in their order: the
engine then stays on a page instead of searching from the root. Between two flushes a task is moved at most once, and
what was changed is read back only after a flush. Counters and marks of queues, which no call reads, are written once
for all the calls that share the transaction.
"""

from __future__ import annotations

from itertools import repeat

from dibs.ids import DIGEST_BYTES
from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.journal import ENTRY_EVENTS_MAX
from dibs.stores.ordered.keys import (
    BYTES,
    EXPIRE_RESULT,
    EXPIRE_START,
    EXPIRE_TASK,
    QueueKeys,
    TenantKeys,
    delayed_rank,
    due_key,
    expiry_key,
    from8,
    from_count,
    ms8,
    queue_keys,
    ready_ranks,
)
from dibs.stores.ordered.limits import KeyLimiter
from dibs.stores.ordered.records import (
    CANCELLED,
    COMPLETED,
    DEAD,
    DELAYED,
    FAILED,
    IN_PROGRESS,
    LEASED,
    NOWHERE,
    PARKED,
    PENDING,
    PLACES,
    READY,
    RESULT_INLINE_MAX_BYTES,
    ROOM_IN_QUEUE,
    ROOM_IN_TENANT,
    Body,
    Detail,
    State,
    StoredResult,
    decode_config,
    decode_result,
    encode_config,
    encode_new_state,
    encode_result,
    encode_size,
    encode_state,
    remember_leased,
)
from dibs.task import (
    ALL_COMMANDS,
    DEAD_RETENTION_DEFAULT_S,
    UNKEPT_STATE_S,
    Elsewhere,
    EventKind,
    KeyLimit,
    QueueConfig,
    Reason,
)

_UNKEPT_STATE_MS = int(UNKEPT_STATE_S * 1000)
_DEAD_RETENTION_MS = int(DEAD_RETENTION_DEFAULT_S * 1000)
_NO_CONFIG = QueueConfig()
_CLAIMED, _COMPLETED = EventKind.CLAIMED, EventKind.COMPLETED
IS_DELAYED = Detail(Reason.DELAYED)


class Work:
    """What a transaction changes in the store. `Work.of(txn)` starts a call."""

    __slots__ = (
        "_expiries",
        "_placed",
        "_queues",
        "_serial",
        "_wholes",
        "bodies",
        "deletes",
        "entries",
        "limiters",
        "now_ms",
        "others",
        "results",
        "states",
        "txn",
    )

    @classmethod
    def of(cls, txn: Txn) -> Work:
        """Returns the transaction's work, ready for another call."""
        work = txn.work
        if work is None:
            work = txn.work = cls(txn)
        work._placed = 0
        return work

    def __init__(self, txn: Txn) -> None:
        self.txn = txn
        self.now_ms = txn.now_ms
        # How many tasks this call has put at the back of a queue: their order among themselves.
        self._placed = 0
        self.deletes: list[bytes] = []
        self.bodies: dict[bytes, bytes] = {}
        self.states: dict[bytes, bytes] = {}
        self.results: dict[bytes, bytes] = {}
        # Entries of places, which are nothing but keys.
        self.entries: list[bytes] = []
        self.others: list[tuple[bytes, bytes]] = []
        self._queues: dict[tuple[str, str], QueueWork] = {}
        self._wholes: dict[str, QueueConfig] = {}
        # Of the queues that have met a limit_key under a limit; mostly there are none.
        self.limiters: list[KeyLimiter] = []
        self._serial = 0
        self._expiries: dict[tuple[int, bytes, str], list[bytes]] = {}

    def queue(self, tenant: str, command: str) -> QueueWork:
        """Returns the moves of one queue."""
        queue = self._queues.get((tenant, command))
        if queue is None:
            queue = self._queues[(tenant, command)] = QueueWork(self, queue_keys(tenant, command))
        return queue

    def back_rank(self, priority: int) -> bytes:
        """Returns the next rank at the back of a priority."""
        return self.back_ranks(priority, 1)[0]

    def back_ranks(self, priority: int, count: int) -> list[bytes]:
        """Returns the next ranks at the back of a priority."""
        start = self.numbers(count)
        return ready_ranks(priority, self.txn.version, range(start, start + count))

    def numbers(self, count: int) -> int:
        """Returns the first of the next numbers that tell apart what this call puts at the back."""
        start, self._placed = self._placed, self._placed + count
        return start

    def expire(self, at_ms: int, kind: bytes, tenant: str, name: bytes) -> None:
        """Notes that something expires then; what a call lets expire together has one entry."""
        names = self._expiries.get((at_ms, kind, tenant))
        if names is None:
            self._expiries[(at_ms, kind, tenant)] = [name]
        else:
            names.append(name)

    def whole(self, tenant: TenantKeys) -> QueueConfig:
        """Returns what all the queues of a tenant have in common."""
        config = self._wholes.get(tenant.name)
        if config is None:
            stored = self.txn.get(tenant.whole)
            config = _NO_CONFIG if stored is None else decode_config(stored)
            self._wholes[tenant.name] = config
        return config

    def set_whole(self, tenant: TenantKeys, config: QueueConfig) -> None:
        """Replaces what all the queues of a tenant have in common."""
        self._wholes[tenant.name] = config
        for (name, _), queue in self._queues.items():
            if name == tenant.name:
                queue.set_configs(queue.config, config)

    def leased(self, tenant: TenantKeys) -> int:
        """Counts what a tenant has in progress, with what this transaction changes."""
        changed = sum(queue.counts[LEASED] for (name, _), queue in self._queues.items() if name == tenant.name)
        return from_count(self.txn.get(tenant.totals[LEASED])) + changed

    def flush(self) -> None:
        """Writes the records collected so far. Every call that changed something ends with it."""
        txn = self.txn
        if self.deletes:
            txn.delete_many(self.deletes)
            self.deletes.clear()
        if self._expiries:
            self._collect_expiries()
        if self.bodies:
            txn.put_many(self.bodies.items())
            self.bodies.clear()
        if self.results:
            txn.put_many(self.results.items())
            self.results.clear()
        if self.states:
            txn.put_many(self.states.items())
            self.states.clear()
        if self.entries:
            txn.put_many(zip(self.entries, repeat(b"")))
            self.entries.clear()
        if self.others:
            txn.put_many(self.others)
            self.others.clear()
        for limiter in self.limiters:
            if limiter.bring_home():
                self.flush()

    def _collect_expiries(self) -> None:
        version = self.txn.version.to_bytes(8, "big")
        for (at_ms, kind, tenant), names in self._expiries.items():
            serial = version + self._serial.to_bytes(4, "big")
            self._serial += 1
            self.others.append((expiry_key(at_ms, kind, tenant, serial), b"".join(names)))
        self._expiries.clear()

    def journal_new(self) -> None:
        """Journals the tasks that this call has put in."""
        for queue in self._queues.values():
            if queue.new:
                queue.events(EventKind.ENQUEUED, queue.new, [0] * len(queue.new))
                queue.new = []
            if queue.new_delayed:
                queue.events(EventKind.ENQUEUED, queue.new_delayed, [0] * len(queue.new_delayed), detail=IS_DELAYED)
                queue.new_delayed = []

    def pending(self) -> bool:
        """True if something was collected and not flushed: a call that raises must not leave that to the next."""
        return bool(
            self.deletes or self.bodies or self.results or self.states or self.entries or self.others or self._expiries
        )

    def mark(self) -> None:
        """Writes which queues may have ready tasks, for a call that goes by it."""
        for queue in self._queues.values():
            queue.mark()

    def finish(self) -> None:
        """Writes what the queues collected, at the end of the transaction."""
        for queue in self._queues.values():
            queue.finish()


class QueueWork:
    """The moves of one queue's tasks."""

    __slots__ = (
        "_body_prefix",
        "_due_ms",
        "_journal",
        "_limiter",
        "_prefixes",
        "_ready",
        "_room",
        "_state_prefix",
        "config",
        "counts",
        "key_limit",
        "keys",
        "new",
        "new_delayed",
        "tenant",
        "whole",
        "work",
    )

    def __init__(self, work: Work, keys: QueueKeys) -> None:
        self.work = work
        self.keys = keys
        self.tenant = keys.tenant
        self._journal = work.txn.journal
        self._prefixes = keys.of_place
        self._body_prefix = keys.tenant.body
        self._state_prefix = keys.tenant.state
        self.counts = [0] * len(PLACES)
        """By place, except that bytes are counted where nobody stands."""
        self._limiter: KeyLimiter | None = None
        stored = work.txn.get(keys.config)
        whole = work.whole(keys.tenant)
        self.config = self.whole = whole
        self.key_limit: KeyLimit | None = None
        """What tasks that share a limit_key may use together."""
        self._room = 0
        if stored is not None or whole is not _NO_CONFIG:
            self.set_configs(_NO_CONFIG if stored is None else decode_config(stored), whole)
        self._due_ms: int | None = None
        self._ready: bool | None = None
        self.new: list[bytes] = []
        """The tasks put in by this call, not journalled yet; those that become ready later are apart."""
        self.new_delayed: list[bytes] = []

    def set_configs(self, config: QueueConfig, whole: QueueConfig) -> None:
        """Takes over the configurations of the queue and of its tenant. Both tell whether the end of a lease makes room
        for others, and for whom."""
        self.config, self.whole = config, whole
        limits = config.limits
        self.key_limit = None if limits is None else limits.per_key
        self._room = ROOM_IN_TENANT if whole.limits else ROOM_IN_QUEUE if limits and limits.in_flight else 0

    @property
    def limiter(self) -> KeyLimiter:
        """The limits per key, which most queues never ask for."""
        if self._limiter is None:
            self._limiter = KeyLimiter(self)
            self.work.limiters.append(self._limiter)
        return self._limiter

    def paused(self) -> bool:
        """True if nothing is to be claimed here."""
        return self.config.paused or self.whole.paused

    def room(self, wanted: int, elsewhere: Elsewhere) -> int:
        """How many of `wanted` tasks the caps of the queue and of its tenant allow to be leased now."""
        if not self._room:
            return wanted
        limits, whole = self.config.limits, self.whole.limits
        if limits is not None and limits.in_flight is not None:
            leased = from_count(self.work.txn.get(self.keys.counters[LEASED])) + self.counts[LEASED]
            wanted = min(wanted, limits.in_flight - leased - elsewhere.get((self.tenant.name, self.keys.command), 0))
        if whole is not None and whole.in_flight is not None:
            leased = self.work.leased(self.tenant) + elsewhere.get((self.tenant.name, ALL_COMMANDS), 0)
            wanted = min(wanted, whole.in_flight - leased)
        return max(0, wanted)

    # ----------------------------------------------------------------------------------------------------------- moves

    def put_new(self, task_id: bytes, state: State, body: bytes) -> None:
        """Puts a new task in, where its state says."""
        if state.limit and state.place == READY:
            self.limiter.admit(state, state.rank)
        work, place = self.work, state.place
        work.bodies[self._body_prefix + task_id] = body
        work.states[self._state_prefix + task_id] = encode_new_state(state)
        work.entries.append(self._prefixes[place] + state.rank + task_id)
        self.counts[place] += 1
        self.counts[BYTES] += state.size
        if place == DELAYED:
            self.new_delayed.append(task_id)
            self._due(state.due_ms)
            return
        self.new.append(task_id)
        if place == READY:
            self._ready = True

    def put_alike(self, ids: list[bytes], state: State, bodies: list[bytes], sizes: list[int]) -> None:
        """Puts new tasks in at the back of a priority. They share `state` up to rank and size, so theirs are cast from
        one mould instead of being encoded one by one."""
        work = self.work
        ranks = work.back_ranks(state.priority, len(ids))
        state.rank, state.size = ranks[0], sizes[0]
        head, tail = encode_new_state(state).split(ranks[0] + encode_size(sizes[0]), 1)
        tails = {size: encode_size(size) + tail for size in set(sizes)}
        body_prefix, state_prefix, ready_prefix = self._body_prefix, self._state_prefix, self.keys.ready
        states = [head + rank + tails[size] for rank, size in zip(ranks, sizes, strict=True)]
        work.bodies.update(zip([body_prefix + task_id for task_id in ids], bodies, strict=True))
        work.states.update(zip([state_prefix + task_id for task_id in ids], states, strict=True))
        work.entries += [ready_prefix + rank + task_id for rank, task_id in zip(ranks, ids, strict=True)]
        self.counts[READY] += len(ids)
        self.counts[BYTES] += sum(sizes)
        self._ready = True
        self.new += ids

    def put_block(self, entry: bytes, count: int, size: int, due_ms: int) -> None:
        """Puts in a block of so many rows, which is ready at once if it is due at 0."""
        self.work.entries.append(entry)
        self.counts[DELAYED if due_ms else READY] += count
        self.counts[BYTES] += size
        if due_ms:
            self._due(due_ms)
        else:
            self._ready = True

    def place(self, task_id: bytes, state: State) -> None:
        """Gives a task that stood in a block, and was counted there, an entry and a state of its own."""
        self.work.states[self._state_prefix + task_id] = encode_new_state(state)
        self.work.entries.append(self._prefixes[state.place] + state.rank + task_id)
        self.expire_start(task_id, state)

    def expire_start(self, task_id: bytes, state: State) -> None:
        """Notes the start deadline of a task that stood in a block, if it has one."""
        if state.expires_ms:
            self.work.expire(state.expires_ms, EXPIRE_START, self.tenant.name, task_id)

    def to_ready(self, task_id: bytes, state: State) -> None:
        """Moves a task to the back of its priority."""
        state.due_ms = self.work.now_ms
        self._pend(state)
        self._move(task_id, state, READY, self.work.back_rank(state.priority))

    def to_home(self, task_id: bytes, state: State) -> None:
        """Moves a task back to where it stood when it was claimed."""
        self._pend(state)
        self._move(task_id, state, READY, state.home)
        if state.expires_ms and state.attempts == 0:
            self.work.expire(state.expires_ms, EXPIRE_START, self.tenant.name, task_id)

    def to_delayed(self, task_id: bytes, state: State, visible_ms: int) -> None:
        """Hides a task until `visible_ms`, which is in the future."""
        state.due_ms = visible_ms
        self._pend(state)
        self._due(visible_ms)
        self._move(task_id, state, DELAYED, delayed_rank(visible_ms))

    def limit(self, state: State, body: Body) -> None:
        """Has a task that stood in a block obey the limit of its limit_key from now on."""
        if self.key_limit is not None and body.limit_key is not None:
            state.limit, state.cost = self.limiter.digest(body.limit_key), body.limit_cost

    def park(self, task_id: bytes, state: State) -> None:
        """Takes a ready task out of the queue because its limit_key is at its limit."""
        self._move(task_id, state, PARKED, state.limit + state.rank)

    def unpark(self, task_id: bytes, state: State, *, held: bool) -> None:
        """Puts a parked task where it belongs in the queue. `held`: it counts against its limit_key."""
        state.held = held
        self._move(task_id, state, READY, state.rank[DIGEST_BYTES:])

    def _pend(self, state: State) -> None:
        state.status = PENDING
        state.token = b""

    def lease(self, entries: list[bytes], ids: list[bytes], states: list[State], worker: str) -> None:
        """Moves ready tasks, whose entries are given, under leases; they remember where they stood."""
        work, now_ms, state_prefix = self.work, self.work.now_ms, self._state_prefix
        lease_ms, rank, leased = -1, b"", b""
        for task_id, state in zip(ids, states, strict=True):
            if state.lease_ms != lease_ms:
                # The leases of one call mostly end together.
                lease_ms = state.lease_ms
                rank = ms8(now_ms + lease_ms)
                leased = self.keys.leased + rank
                self._due(now_ms + lease_ms)
            state.home, state.rank = state.rank, rank
            state.status, state.place = IN_PROGRESS, LEASED
            if state.progress is not None:
                state.progress = None
            work.entries.append(leased + task_id)
            work.states[state_prefix + task_id] = data = encode_state(state)
            remember_leased(data, state)
        work.deletes += entries
        self.counts[READY] -= len(ids)
        self.counts[LEASED] += len(ids)
        self.events(_CLAIMED, ids, [state.attempts for state in states], worker)

    def extend(self, task_id: bytes, state: State, lease_end_ms: int) -> None:
        """Moves the end of a lease."""
        self._due(lease_end_ms)
        self._move(task_id, state, LEASED, ms8(lease_end_ms))

    def complete(self, task_id: bytes, state: State, ttl_ms: int) -> None:
        """Ends a leased task well; its result is kept for `ttl_ms` from now."""
        work = self.work
        now_ms, retention_ms = work.now_ms, state.retention_ms
        work.deletes.append(self.keys.leased + state.rank + task_id)
        self.counts[LEASED] -= 1
        if state.limit:
            self.limiter.moved(state, NOWHERE, b"")
        state.status, state.place = COMPLETED, NOWHERE
        state.rank = state.token = b""
        state.ended_ms = now_ms
        state.result_until_ms = now_ms + ttl_ms
        state.kept_until_ms = kept_until_ms = now_ms + (ttl_ms if ttl_ms > retention_ms else retention_ms)
        if not state.keep:
            self._forget_body(task_id, state)
            kept_until_ms = state.kept_until_ms
        elif kept_until_ms == now_ms:
            # Kept for no time at all, a repeat could not be recognised.
            state.kept_until_ms = kept_until_ms = now_ms + _UNKEPT_STATE_MS
        work.expire(kept_until_ms, EXPIRE_TASK, self.tenant.name, task_id)
        if state.result_until_ms < kept_until_ms:
            self._expire_result(task_id, state)
        work.states[self._state_prefix + task_id] = encode_state(state)
        self.event(_COMPLETED, task_id, state.attempts, state.worker)

    def end(self, task_id: bytes, state: State, status: int, reason: str) -> None:
        """Ends a task as failed or cancelled, and says how long it is kept from now."""
        now_ms = self.work.now_ms
        state.status, state.reason, state.token = status, reason, b""
        state.ended_ms = now_ms
        if status == FAILED:
            state.kept_until_ms = state.result_until_ms = now_ms + self._dead_retention_ms(state)
        else:
            self.free_key(task_id, state)
            state.result_until_ms = now_ms + state.result_ttl_ms
            state.kept_until_ms = now_ms + max(state.result_ttl_ms, state.retention_ms)
        if state.kept_until_ms == now_ms:
            state.kept_until_ms += _UNKEPT_STATE_MS
        self.expire_later(task_id, state)
        if status == FAILED:
            self._move(task_id, state, DEAD, ms8(now_ms), reason.encode())
        else:
            self._move(task_id, state, NOWHERE, b"")

    def expire_unstarted(self, task_id: bytes, state: State) -> None:
        """Ends a task whose start deadline passed before anybody started it."""
        self.end(task_id, state, CANCELLED, Reason.EXPIRED)
        self.event(EventKind.CANCELLED, task_id, state.attempts, detail=Detail(Reason.EXPIRED))

    def take_back(self, task_id: bytes, state: State) -> None:
        """Ends a lease that ran out: the lease was the delay, so the task is ready at once, or out of attempts."""
        if state.cancel:
            self.end(task_id, state, CANCELLED, Reason.CANCELLED)
            self.event(EventKind.CANCELLED, task_id, state.attempts, state.worker, Detail(Reason.CANCELLED))
        elif state.attempts >= state.max_attempts:
            self.end(task_id, state, FAILED, Reason.LEASE_EXPIRED)
            self.event(EventKind.FAILED, task_id, state.attempts, state.worker, Detail(Reason.LEASE_EXPIRED))
        else:
            self.to_ready(task_id, state)
            self.event(EventKind.LEASE_EXPIRED, task_id, state.attempts, state.worker)

    def revive(self, task_id: bytes, state: State) -> None:
        """Puts a dead letter back at the end of its queue, as if it had never been tried."""
        state.attempts = state.releases = 0
        state.ended_ms = state.kept_until_ms = state.result_until_ms = 0
        state.reason, state.progress, state.cancel, state.expires_ms = "", None, False, 0
        self.drop_result(task_id, state)
        self.to_ready(task_id, state)
        self.event(EventKind.REPLAYED, task_id, state.attempts)

    def remove(self, task_id: bytes, state: State) -> None:
        """Removes every trace of a task; the expiry entries that name it will find nothing."""
        self.free_key(task_id, state)
        deletes, tenant = self.work.deletes, self.tenant
        if state.rank:
            deletes.append(self._prefixes[state.place] + state.rank + task_id)
            self.counts[state.place] -= 1
        deletes += (tenant.body + task_id, tenant.state + task_id)
        if state.result_apart:
            deletes.append(tenant.result + task_id)
        self.counts[BYTES] -= state.size

    def _move(self, task_id: bytes, state: State, place: int, rank: bytes, value: bytes = b"") -> None:
        """Takes a task's entry from where it stands to where it goes, and writes its state."""
        work, counts, before = self.work, self.counts, state.place
        if state.limit:
            place, rank = self.limiter.moved(state, place, rank)
        if state.rank:
            work.deletes.append(self._prefixes[before] + state.rank + task_id)
            counts[before] -= 1
        if rank:
            if place == READY:
                self._ready = True
            counts[place] += 1
            entry = self._prefixes[place] + rank + task_id
            if value:
                work.others.append((entry, value))
            else:
                work.entries.append(entry)
        state.place = place
        state.rank = rank
        work.states[self._state_prefix + task_id] = encode_state(state)

    # --------------------------------------------------------------------------------------------------- records beside

    def save(self, task_id: bytes, state: State) -> None:
        """Writes the state of a task that stays where it is."""
        self.work.states[self._state_prefix + task_id] = encode_state(state)

    def put_result(self, task_id: bytes, state: State, result: StoredResult) -> None:
        """Fills the result slot; before the end it holds the latest error. The move that follows writes the state."""
        if state.result_apart:
            self.drop_result(task_id, state)
        size = len(result.data or b"")
        if size <= RESULT_INLINE_MAX_BYTES and result.error is None:
            state.result = result
        else:
            state.result, state.result_apart = None, True
            self.work.results[self.tenant.result + task_id] = encode_result(result)
        state.size += size
        self.counts[BYTES] += size

    def drop_result(self, task_id: bytes, state: State) -> None:
        """Empties the result slot."""
        result = stored_result(self.work.txn, self.tenant, task_id, state)
        if result is None:
            return
        if state.result_apart:
            self.work.deletes.append(self.tenant.result + task_id)
        state.result, state.result_apart = None, False
        size = len(result.data or b"")
        state.size -= size
        self.counts[BYTES] -= size

    def free_key(self, task_id: bytes, state: State) -> None:
        """Frees the deduplication key, if it still points to this task."""
        if state.digest:
            key = self.keys.key + state.digest
            if self.work.txn.get(key) == task_id:
                self.work.deletes.append(key)
            state.digest = b""

    def expire_later(self, task_id: bytes, state: State) -> None:
        """Notes when the task, and its result if that is earlier, may go."""
        self.work.expire(state.kept_until_ms, EXPIRE_TASK, self.tenant.name, task_id)
        self._expire_result(task_id, state)

    def _expire_result(self, task_id: bytes, state: State) -> None:
        if 0 < state.result_until_ms < state.kept_until_ms:
            self.work.expire(state.result_until_ms, EXPIRE_RESULT, self.tenant.name, task_id)

    def event(
        self, kind: EventKind, task_id: bytes, attempt: int, worker: str = "", detail: Detail | None = None
    ) -> None:
        """Journals one transition."""
        journal = self._journal
        run = journal.last
        if (
            run is None
            or journal.queue is not self.keys
            or run.kind is not kind
            or run.worker != worker
            or run.detail != detail
            or len(run.ids) == ENTRY_EVENTS_MAX
        ):
            run = journal.begin(self.keys, kind, worker, detail)
            run.room = self._room
        run.ids.append(task_id)
        run.attempts.append(attempt)

    def events(
        self, kind: EventKind, ids: list[bytes], attempts: list[int], worker: str = "", detail: Detail | None = None
    ) -> None:
        """Journals the same transition of several tasks."""
        for start in range(0, len(ids), ENTRY_EVENTS_MAX):
            run = self._journal.last
            end = start + ENTRY_EVENTS_MAX
            some = ids[start:end]
            if (
                run is None
                or self._journal.queue is not self.keys
                or run.kind is not kind
                or run.worker != worker
                or run.detail != detail
                or len(run.ids) + len(some) > ENTRY_EVENTS_MAX
            ):
                run = self._journal.begin(self.keys, kind, worker, detail)
                run.room = self._room
            run.ids += some
            run.attempts += attempts[start:end]

    def own_config(self) -> QueueConfig | None:
        """Returns the configuration, if there is one."""
        return None if self.config == _NO_CONFIG else self.config

    def set_config(self, config: QueueConfig) -> None:
        """Replaces the configuration; the defaults take no room. Parked tasks meet the new limits."""
        changed = self.key_limit != (config.limits and config.limits.per_key)
        self.set_configs(config, self.whole)
        if changed:
            self.limiter.review()
        if config == _NO_CONFIG:
            self.work.txn.delete(self.keys.config)
        else:
            self.work.txn.put(self.keys.config, encode_config(config))

    def emptied(self) -> None:
        """Notes that nothing is ready here; the next ready task sets the mark again."""
        self._ready = False

    def mark(self) -> None:
        """Writes whether there may be ready tasks here."""
        txn, mark = self.work.txn, self.keys.ready_mark
        if self._ready is not None and self._ready is (txn.get(mark) is None):
            if self._ready:
                txn.put(mark, b"")
            else:
                txn.delete(mark)

    def set_due(self, at_ms: int | None) -> None:
        """Says when the queue next has something due; None: never."""
        self._due_ms = None
        set_due(self.work.txn, self.keys, self.work.txn.get(self.keys.due), at_ms)

    def finish(self) -> None:
        """Writes the queue's counters and marks."""
        txn, keys = self.work.txn, self.keys
        if self._limiter is not None:
            self._limiter.finish()
        # Who is parked is ready, as far as anybody is told.
        self.counts[READY] += self.counts[PARKED]
        for counter, total, delta in zip(keys.counters, keys.tenant.totals, self.counts, strict=False):
            if delta:
                txn.add(counter, delta)
                txn.add(total, delta)
        if self._ready is not None:
            self.mark()
        if self._due_ms is not None:
            # The due index names the earliest time that is known; one that has become too early costs one look.
            known = txn.get(keys.due)
            if known is None or self._due_ms < from8(known):
                set_due(txn, keys, known, self._due_ms)

    def due(self, at_ms: int) -> None:
        """Notes that something becomes due here."""
        self._due(at_ms)

    def _due(self, at_ms: int) -> None:
        if self._due_ms is None or at_ms < self._due_ms:
            self._due_ms = at_ms

    def _dead_retention_ms(self, state: State) -> int:
        configured_s = self.config.dead_retention_s
        return max(_DEAD_RETENTION_MS, state.retention_ms) if configured_s is None else round(configured_s * 1000)

    def _forget_body(self, task_id: bytes, state: State) -> None:
        self.free_key(task_id, state)
        self.drop_result(task_id, state)
        self.work.deletes.append(self.tenant.body + task_id)
        self.counts[BYTES] -= state.size
        state.size = 0
        state.result_until_ms = 0
        state.kept_until_ms = self.work.now_ms + _UNKEPT_STATE_MS


def stored_result(txn: ReadTxn, tenant: TenantKeys, task_id: bytes, state: State) -> StoredResult | None:
    """Returns what the result slot holds, wherever it is kept."""
    if not state.result_apart:
        return state.result
    stored = txn.get(tenant.result + task_id)
    return None if stored is None else decode_result(stored)


def set_due(txn: Txn, queue: QueueKeys, known: bytes | None, at_ms: int | None) -> None:
    """Replaces the queue's entry in the due index; None removes it."""
    if known is not None:
        txn.delete(due_key(known, queue))
    if at_ms is None:
        if known is not None:
            txn.delete(queue.due)
        return
    due = ms8(at_ms)
    txn.put(queue.due, due)
    txn.put(due_key(due, queue), b"")
