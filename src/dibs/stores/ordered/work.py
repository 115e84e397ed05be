"""The moves of one call: every change of place goes through here, so a task is never in two places or in none.

A :class:`Work` collects what a call changes and writes it in one go. `flush` it before reading what it changed.
"""

from __future__ import annotations

from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import (
    EXPIRE_RESULT,
    EXPIRE_START,
    EXPIRE_TASK,
    QueueKeys,
    delayed_rank,
    due_key,
    expiry_key,
    from8,
    ms8,
    ready_rank,
)
from dibs.stores.ordered.records import (
    Detail,
    State,
    StoredResult,
    decode_config,
    decode_result,
    encode_result,
    encode_state,
)
from dibs.task import DEAD_RETENTION_DEFAULT_S, UNKEPT_STATE_S, EventKind, Place, QueueConfig, Reason, Status

_UNKEPT_STATE_MS = int(UNKEPT_STATE_S * 1000)
_DEAD_RETENTION_MS = int(DEAD_RETENTION_DEFAULT_S * 1000)
_NO_CONFIG = QueueConfig()


class Work:
    """What one call changes in the store."""

    __slots__ = ("_changes", "_configs", "_due", "_n", "_ready", "_tally", "now_ms", "txn")

    def __init__(self, txn: Txn) -> None:
        self.txn = txn
        self.now_ms = txn.now_ms
        self._n = 0
        self._changes: dict[bytes, bytes | None] = {}
        self._tally: dict[tuple[QueueKeys, str], int] = {}
        self._due: dict[QueueKeys, int] = {}
        self._ready: set[QueueKeys] = set()
        self._configs: dict[QueueKeys, QueueConfig] = {}

    # ----------------------------------------------------------------------------------------------------------- moves

    def to_ready(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Moves a task to the back of its priority."""
        state.due_ms = self.now_ms
        self._pend(queue, task_id, state, Place.READY, ready_rank(state.priority, self.txn.version, self._n))
        self._n += 1

    def to_home(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Moves a task back to where it stood when it was claimed."""
        self._pend(queue, task_id, state, Place.READY, state.home)
        if state.expires_ms and state.attempts == 0:
            self.put(expiry_key(state.expires_ms, EXPIRE_START, queue.tenant.name, task_id), b"")

    def to_delayed(self, queue: QueueKeys, task_id: bytes, state: State, visible_ms: int) -> None:
        """Hides a task until `visible_ms`; one that is not in the future is ready at once."""
        if visible_ms <= self.now_ms:
            self.to_ready(queue, task_id, state)
            return
        state.due_ms = visible_ms
        self._pend(queue, task_id, state, Place.DELAYED, delayed_rank(visible_ms))
        self.due(queue, visible_ms)

    def to_leased(self, queue: QueueKeys, task_id: bytes, state: State, lease_end_ms: int) -> None:
        """Moves a task under a lease, or an extended one."""
        self._leave(queue, task_id, state)
        state.status = Status.IN_PROGRESS
        state.lease_end_ms = lease_end_ms
        self._enter(queue, task_id, state, Place.LEASED, ms8(lease_end_ms))
        self.save(queue, task_id, state)
        self.due(queue, lease_end_ms)

    def end(
        self, queue: QueueKeys, task_id: bytes, state: State, status: Status, reason: str = "", ttl_ms: int | None = None
    ) -> None:
        """Ends a task and says how long it is kept from now."""
        self._leave(queue, task_id, state)
        ttl_ms = state.result_ttl_ms if ttl_ms is None else ttl_ms
        state.status = status
        state.reason = reason
        state.token = b""
        state.ended_ms = self.now_ms
        state.kept_until_ms = self.now_ms + max(state.retention_ms, ttl_ms)
        state.result_until_ms = self.now_ms + ttl_ms
        if status is Status.FAILED:
            state.kept_until_ms = state.result_until_ms = self.now_ms + self._dead_retention_ms(queue, state)
            self._enter(queue, task_id, state, Place.DEAD, ms8(self.now_ms), reason.encode())
        elif status is Status.CANCELLED:
            self.free_key(queue, task_id, state)
        elif not state.keep:
            self._forget_body(queue, task_id, state)
        self.expire_later(queue, task_id, state)
        self.save(queue, task_id, state)

    def expire_unstarted(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Ends a task whose start deadline passed before anybody started it."""
        self.end(queue, task_id, state, Status.CANCELLED, Reason.EXPIRED)
        self.event(EventKind.CANCELLED, queue, task_id, state, detail=Detail(Reason.EXPIRED))

    def revive(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Puts a dead letter back at the end of its queue, as if it had never been tried."""
        state.attempts = state.releases = 0
        state.ended_ms = state.kept_until_ms = state.result_until_ms = 0
        state.reason, state.progress, state.cancel, state.expires_ms = "", None, False, 0
        self.drop_result(queue, task_id, state)
        self.to_ready(queue, task_id, state)

    def remove(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Removes every trace of a task; the expiry entries that name it will find nothing."""
        self._leave(queue, task_id, state)
        self.free_key(queue, task_id, state)
        tenant = queue.tenant
        for prefix in (tenant.body, tenant.state, tenant.result):
            self.delete(prefix + task_id)
        self.tally(queue, "bytes", -state.size)

    def _pend(self, queue: QueueKeys, task_id: bytes, state: State, place: Place, rank: bytes) -> None:
        self._leave(queue, task_id, state)
        state.status = Status.PENDING
        state.token = b""
        state.lease_end_ms = 0
        self._enter(queue, task_id, state, place, rank)
        self.save(queue, task_id, state)
        if place is Place.READY:
            self._ready.add(queue)

    def _leave(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        if state.rank:
            self._changes[queue.of_place[state.place] + state.rank + task_id] = None
            self.tally(queue, state.place, -1)
        state.place, state.rank = Place.NONE, b""

    def _enter(
        self, queue: QueueKeys, task_id: bytes, state: State, place: Place, rank: bytes, value: bytes = b""
    ) -> None:
        self._changes[queue.of_place[place] + rank + task_id] = value
        self.tally(queue, place, 1)
        state.place, state.rank = place, rank

    # --------------------------------------------------------------------------------------------------- records beside

    def save(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Writes the state."""
        self._changes[queue.tenant.state + task_id] = encode_state(state)

    def put(self, key: bytes, value: bytes) -> None:
        self._changes[key] = value

    def delete(self, key: bytes) -> None:
        self._changes[key] = None

    def put_result(self, queue: QueueKeys, task_id: bytes, state: State, result: StoredResult) -> None:
        """Writes the result slot; before the end it holds the latest error."""
        self._changes[queue.tenant.result + task_id] = encode_result(result)
        size = len(result.data or b"")
        state.size += size
        self.tally(queue, "bytes", size)

    def drop_result(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Removes the result slot's record."""
        key = queue.tenant.result + task_id
        stored = self.txn.get(key)
        if stored is not None:
            size = len(decode_result(stored).data or b"")
            state.size -= size
            self.tally(queue, "bytes", -size)
            self._changes[key] = None

    def free_key(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Frees the deduplication key, if it still points to this task."""
        if state.digest and self.txn.get(queue.key + state.digest) == task_id:
            self._changes[queue.key + state.digest] = None
        state.digest = b""

    def expire_later(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        """Notes when the task, and its result if that is earlier, may go."""
        tenant = queue.tenant.name
        self._changes[expiry_key(state.kept_until_ms, EXPIRE_TASK, tenant, task_id)] = b""
        if state.result_until_ms < state.kept_until_ms:
            self._changes[expiry_key(state.result_until_ms, EXPIRE_RESULT, tenant, task_id)] = b""

    def due(self, queue: QueueKeys, at_ms: int) -> None:
        """Notes that the queue has something due then."""
        known = self._due.get(queue)
        if known is None or at_ms < known:
            self._due[queue] = at_ms

    def tally(self, queue: QueueKeys, field: str, delta: int) -> None:
        """Counts."""
        where = (queue, field)
        self._tally[where] = self._tally.get(where, 0) + delta

    def event(
        self,
        kind: EventKind,
        queue: QueueKeys,
        task_id: bytes,
        state: State,
        worker: str = "",
        detail: Detail | None = None,
    ) -> None:
        """Journals one transition."""
        details = None if detail is None else [detail]
        self.txn.journal.write(kind, queue.tenant.name, queue.command, [task_id], [state.attempts], worker, details)

    def config(self, queue: QueueKeys) -> QueueConfig:
        """The queue's configuration."""
        config = self._configs.get(queue)
        if config is None:
            stored = self.txn.get(queue.config)
            config = self._configs[queue] = _NO_CONFIG if stored is None else decode_config(stored)
        return config

    def flush(self) -> None:
        """Writes everything collected so far."""
        if self._changes:
            self.txn.delete_many([key for key, value in self._changes.items() if value is None])
            self.txn.put_many([item for item in self._changes.items() if item[1] is not None])  # type: ignore[misc]
            self._changes = {}
        for (queue, field), delta in self._tally.items():
            if delta:
                self.txn.add(queue.counters[field], delta)
                self.txn.add(queue.tenant.totals[field], delta)
        self._tally = {}
        for queue in self._ready:
            if self.txn.get(queue.ready_mark) is None:
                self.txn.put(queue.ready_mark, b"")
        self._ready = set()
        for queue, at_ms in self._due.items():
            self._bring_forward(queue, at_ms)
        self._due = {}

    def _bring_forward(self, queue: QueueKeys, at_ms: int) -> None:
        """The due index names the earliest time that is known; a time that has become too early costs one look."""
        known = self.txn.get(queue.due)
        if known is None or at_ms < from8(known):
            set_due(self.txn, queue, known, at_ms)

    def _dead_retention_ms(self, queue: QueueKeys, state: State) -> int:
        configured_s = self.config(queue).dead_retention_s
        return max(_DEAD_RETENTION_MS, state.retention_ms) if configured_s is None else int(configured_s * 1000)

    def _forget_body(self, queue: QueueKeys, task_id: bytes, state: State) -> None:
        self.free_key(queue, task_id, state)
        self._changes[queue.tenant.body + task_id] = None
        self._changes[queue.tenant.result + task_id] = None
        self.tally(queue, "bytes", -state.size)
        state.size = 0
        state.kept_until_ms = state.result_until_ms = self.now_ms + _UNKEPT_STATE_MS

    def take_back(self, queue: QueueKeys, task_id: bytes, state: State) -> EventKind:
        """Ends a lease that ran out: the lease was the delay, so the task is ready at once, or out of attempts."""
        worker, reason = state.worker, ""
        if state.cancel:
            kind, reason = EventKind.CANCELLED, Reason.CANCELLED
            self.end(queue, task_id, state, Status.CANCELLED, reason)
        elif state.attempts >= state.max_attempts:
            kind, reason = EventKind.FAILED, Reason.LEASE_EXPIRED
            self.end(queue, task_id, state, Status.FAILED, reason)
        else:
            kind = EventKind.LEASE_EXPIRED
            self.to_ready(queue, task_id, state)
        self.event(kind, queue, task_id, state, worker, Detail(reason) if reason else None)
        return kind


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
