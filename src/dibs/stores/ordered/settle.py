"""Heartbeat and settle: what the holder of a lease may do. Everything is decided by the token."""

from __future__ import annotations

from collections.abc import Sequence

from dibs.fingerprint import ERROR_LINE_MAX_CHARS, fingerprint
from dibs.stores.ordered.chunks import find_row
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import tenant_keys
from dibs.stores.ordered.records import (
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    KIND_MARKS,
    STATUSES,
    Detail,
    State,
    StoredResult,
    recall_state,
)
from dibs.stores.ordered.work import QueueWork, Work
from dibs.task import (
    RELEASES_FREE,
    Already,
    Cause,
    EventKind,
    Extended,
    Heartbeat,
    Kind,
    Lease,
    LeaseLost,
    Reason,
    Settled,
    Settlement,
)

_COMPLETE, _RETRY, _FAIL = Kind.COMPLETE, Kind.RETRY, Kind.FAIL
_COMPLETE_MARK = KIND_MARKS[_COMPLETE]
_SETTLED = tuple(Settled(status) for status in STATUSES)


def heartbeat(txn: Txn, beats: Sequence[Heartbeat]) -> list[Extended | LeaseLost]:
    """Extends leases from now on. The old expiry entry goes in the same transaction."""
    work = Work.of(txn)
    keys = [tenant_keys(beat.tenant).state + beat.id for beat in beats]
    states = _states(txn, keys)
    moved: set[bytes] = set()
    outcomes: list[Extended | LeaseLost] = []
    for beat, key in zip(beats, keys, strict=True):
        state = states.get(key)
        if state is None or state.token != beat.token:
            outcomes.append(_lost(txn, beat, state))
            continue
        if key in moved:
            work.flush()
        moved.add(key)
        if beat.progress is not None:
            state.progress = beat.progress
        extend_ms = state.lease_ms if beat.extend_s is None else round(beat.extend_s * 1000)
        work.queue(beat.tenant, state.command).extend(beat.id, state, txn.now_ms + extend_ms)
        outcomes.append(Extended(state.lease_end_ms(), state.cancel))
    work.flush()
    return outcomes


def settle(txn: Txn, items: Sequence[Settlement]) -> list[Settled | Already | LeaseLost]:
    """Ends leases. The first settlement of a token counts; its repeat is told so, anything else has lost the lease."""
    work = Work.of(txn)
    keys = [tenant_keys(item.tenant).state + item.id for item in items]
    states = _states(txn, keys)
    outcomes: list[Settled | Already | LeaseLost] = []
    queue: QueueWork | None = None
    for item, key in zip(items, keys, strict=True):
        state = states.get(key)
        # A task that is not in progress has no token, so equal tokens mean that the lease is held.
        if state is not None and state.token == item.token:
            if queue is None or queue.keys.command != state.command or queue.tenant.name != item.tenant:
                queue = work.queue(item.tenant, state.command)
            if item.kind is _COMPLETE:
                _complete(queue, item, state)
            else:
                _settle_otherwise(queue, item, state)
            outcomes.append(_SETTLED[state.status])
        elif state is not None and state.settled == item.token + KIND_MARKS[item.kind]:
            outcomes.append(Already(STATUSES[state.status]))
        else:
            outcomes.append(_lost(txn, item, state))
    work.flush()
    return outcomes


def undo_claim(txn: Txn, leases: Sequence[Lease]) -> None:
    """Puts back what was claimed and never reached anybody: as if it had not been claimed."""
    work = Work.of(txn)
    keys = [tenant_keys(lease.tenant).state + lease.id for lease in leases]
    states = _states(txn, keys)
    for lease, key in zip(leases, keys, strict=True):
        state = states.get(key)
        if state is None or state.token != lease.token:
            continue
        queue = work.queue(lease.tenant, state.command)
        if state.cancel:
            queue.take_back(lease.id, state)
        else:
            state.attempts -= 1
            queue.to_home(lease.id, state)
            queue.event(EventKind.RELEASED, lease.id, lease.attempt, state.worker)
    work.flush()


def _states(txn: Txn, keys: list[bytes]) -> dict[bytes, State]:
    """Reads each state once, so that two items about one task see each other."""
    states: dict[bytes, State] = {}
    for key, data in zip(keys, txn.get_many(keys), strict=True):
        if data is not None and key not in states:
            state = recall_state(data)
            if not state.kept_until_ms or not state.gone(txn.now_ms):
                states[key] = state
    return states


def _lost(txn: Txn, item: Heartbeat | Settlement, state: State | None) -> LeaseLost:
    """Says why a token does not hold the task."""
    if state is None:
        known = find_row(txn, tenant_keys(item.tenant), item.id)
        return LeaseLost(Cause.UNKNOWN if known is None else Cause.NOT_IN_PROGRESS)
    return LeaseLost(Cause.OTHER_TOKEN if state.status == IN_PROGRESS else Cause.NOT_IN_PROGRESS)


def _settle_otherwise(queue: QueueWork, item: Settlement, state: State) -> None:
    kind = item.kind
    state.settled = item.token + KIND_MARKS[kind]
    if state.cancel:
        _cancelled(queue, item, state)
    elif kind is _RETRY:
        _retry(queue, item, state)
    elif kind is _FAIL:
        _fail(queue, item, state, item.reason or Reason.FAILED)
    else:
        _release(queue, item, state)


def _complete(queue: QueueWork, item: Settlement, state: State) -> None:
    state.settled = item.token + _COMPLETE_MARK
    if item.result is not None and state.keep:
        queue.put_result(item.id, state, StoredResult(item.result, item.codec, None))
    elif state.result is not None or state.result_apart:
        queue.drop_result(item.id, state)
    queue.complete(
        item.id, state, state.result_ttl_ms if item.result_ttl_s is None else round(item.result_ttl_s * 1000)
    )


def _cancelled(queue: QueueWork, item: Settlement, state: State) -> None:
    _keep_error(queue, item, state)
    queue.end(item.id, state, CANCELLED, Reason.CANCELLED)
    queue.event(EventKind.CANCELLED, item.id, state.attempts, state.worker, _detail(item, Reason.CANCELLED))


def _retry(queue: QueueWork, item: Settlement, state: State) -> None:
    if state.attempts >= state.max_attempts:
        _fail(queue, item, state, Reason.MAX_ATTEMPTS)
        return
    _keep_error(queue, item, state)
    delay_ms, reason = round(item.delay_s * 1000), item.reason or ""
    if delay_ms:
        queue.to_delayed(item.id, state, queue.work.now_ms + delay_ms)
        reason = reason or Reason.DELAYED
    else:
        queue.to_ready(item.id, state)
    queue.event(EventKind.RETRIED, item.id, state.attempts, state.worker, _detail(item, reason))


def _fail(queue: QueueWork, item: Settlement, state: State, reason: str) -> None:
    _keep_error(queue, item, state)
    queue.end(item.id, state, FAILED, reason)
    queue.event(EventKind.FAILED, item.id, state.attempts, state.worker, _detail(item, reason))


def _release(queue: QueueWork, item: Settlement, state: State) -> None:
    """Back where it stood, and the attempt returned; a task that is released for ever runs out of attempts."""
    attempt = state.attempts
    state.releases += 1
    if state.releases <= RELEASES_FREE:
        state.attempts -= 1
    elif state.attempts >= state.max_attempts:
        _fail(queue, item, state, Reason.MAX_ATTEMPTS)
        return
    queue.to_home(item.id, state)
    queue.event(EventKind.RELEASED, item.id, attempt, state.worker)


def _keep_error(queue: QueueWork, item: Settlement, state: State) -> None:
    if item.error is not None:
        queue.put_result(item.id, state, StoredResult(None, "json", item.error))


def _detail(item: Settlement, reason: str) -> Detail | None:
    if item.error is None:
        return Detail(reason) if reason else None
    line = item.error.message.strip().split("\n", 1)[0][:ERROR_LINE_MAX_CHARS]
    return Detail(reason, item.error.type, line, fingerprint(item.error))
