"""Heartbeat and settle: what the holder of a lease may do. Everything is decided by the token."""

from __future__ import annotations

from collections.abc import Sequence

from dibs.fingerprint import ERROR_LINE_MAX_CHARS, fingerprint
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import QueueKeys, queue_keys, tenant_keys
from dibs.stores.ordered.records import Detail, State, StoredResult, decode_state
from dibs.stores.ordered.work import Work
from dibs.task import (
    RELEASES_FREE,
    Already,
    Cause,
    EventKind,
    Extended,
    Heartbeat,
    Kind,
    LeaseLost,
    Reason,
    Settled,
    Settlement,
    Status,
)


def heartbeat(txn: Txn, beats: Sequence[Heartbeat]) -> list[Extended | LeaseLost]:
    """Extends leases from now on. The old expiry entry goes in the same transaction."""
    work = Work(txn)
    states = _states(txn, beats)
    outcomes: list[Extended | LeaseLost] = []
    for beat in beats:
        state = states.get((beat.tenant, beat.id))
        lost = _lost(state, beat.token)
        if state is None or lost is not None:
            outcomes.append(LeaseLost(lost or Cause.UNKNOWN))
            continue
        if beat.progress is not None:
            state.progress = beat.progress
        extend_ms = state.lease_ms if beat.extend_s is None else round(beat.extend_s * 1000)
        work.to_leased(queue_keys(beat.tenant, state.command), beat.id, state, txn.now_ms + extend_ms)
        outcomes.append(Extended(state.lease_end_ms, state.cancel))
    work.flush()
    return outcomes


def settle(txn: Txn, items: Sequence[Settlement]) -> list[Settled | Already | LeaseLost]:
    """Ends leases. The first settlement of a token counts; its repeat is told so, anything else has lost the lease."""
    work = Work(txn)
    states = _states(txn, items)
    outcomes: list[Settled | Already | LeaseLost] = []
    for item in items:
        state = states.get((item.tenant, item.id))
        lost = _lost(state, item.token)
        if state is not None and lost is None:
            _settle_one(work, queue_keys(item.tenant, state.command), item, state)
            outcomes.append(Settled(state.status))
        elif state is not None and (item.token, item.kind) == (state.settled_token, state.settled_kind):
            outcomes.append(Already(state.status))
        else:
            outcomes.append(LeaseLost(lost or Cause.UNKNOWN))
    work.flush()
    return outcomes


def _states(txn: Txn, items: Sequence[Heartbeat] | Sequence[Settlement]) -> dict[tuple[str, bytes], State]:
    """Reads the states once, so that two items about one task see each other."""
    wanted = {tenant_keys(item.tenant).state + item.id: (item.tenant, item.id) for item in items}
    return {
        wanted[key]: state
        for key, data in txn.get_many(wanted).items()
        if not (state := decode_state(data)).gone(txn.now_ms)
    }


def _lost(state: State | None, token: bytes) -> Cause | None:
    """Says why the token does not hold the task, or None if it does."""
    if state is None:
        return Cause.UNKNOWN
    if state.status is not Status.IN_PROGRESS:
        return Cause.NOT_IN_PROGRESS
    return None if state.token == token else Cause.OTHER_TOKEN


def _settle_one(work: Work, queue: QueueKeys, item: Settlement, state: State) -> None:
    state.settled_token, state.settled_kind = item.token, item.kind
    if item.kind is Kind.COMPLETE:
        _complete(work, queue, item, state)
    elif state.cancel:
        _cancelled(work, queue, item, state)
    elif item.kind is Kind.RETRY:
        _retry(work, queue, item, state)
    elif item.kind is Kind.FAIL:
        _fail(work, queue, item, state, item.reason or Reason.FAILED)
    else:
        _release(work, queue, item, state)


def _complete(work: Work, queue: QueueKeys, item: Settlement, state: State) -> None:
    if item.result is not None and state.keep:
        work.put_result(queue, item.id, state, StoredResult(item.result, item.codec, None))
    elif state.attempts > 1:
        work.drop_result(queue, item.id, state)
    work.end(queue, item.id, state, Status.COMPLETED, ttl_ms=_ttl_ms(item))
    work.event(EventKind.COMPLETED, queue, item.id, state, state.worker)


def _cancelled(work: Work, queue: QueueKeys, item: Settlement, state: State) -> None:
    _keep_error(work, queue, item, state)
    work.end(queue, item.id, state, Status.CANCELLED, Reason.CANCELLED, _ttl_ms(item))
    work.event(EventKind.CANCELLED, queue, item.id, state, state.worker, _detail(item, Reason.CANCELLED))


def _retry(work: Work, queue: QueueKeys, item: Settlement, state: State) -> None:
    if state.attempts >= state.max_attempts:
        _fail(work, queue, item, state, Reason.MAX_ATTEMPTS)
        return
    _keep_error(work, queue, item, state)
    work.to_delayed(queue, item.id, state, work.now_ms + round(item.delay_s * 1000))
    work.event(EventKind.RETRIED, queue, item.id, state, state.worker, _detail(item, item.reason or ""))


def _fail(work: Work, queue: QueueKeys, item: Settlement, state: State, reason: str) -> None:
    _keep_error(work, queue, item, state)
    work.end(queue, item.id, state, Status.FAILED, reason)
    work.event(EventKind.FAILED, queue, item.id, state, state.worker, _detail(item, reason))


def _release(work: Work, queue: QueueKeys, item: Settlement, state: State) -> None:
    """Back where it stood, and the attempt returned; a task that is released for ever runs out of attempts."""
    attempt = state.attempts
    state.releases += 1
    if state.releases <= RELEASES_FREE:
        state.attempts -= 1
    elif state.attempts >= state.max_attempts:
        _fail(work, queue, item, state, Reason.MAX_ATTEMPTS)
        return
    work.to_home(queue, item.id, state)
    work.txn.journal.write(
        EventKind.RELEASED, queue.tenant.name, queue.command, [item.id], [attempt], state.worker
    )


def _keep_error(work: Work, queue: QueueKeys, item: Settlement, state: State) -> None:
    if item.error is not None:
        work.put_result(queue, item.id, state, StoredResult(None, "json", item.error))


def _detail(item: Settlement, reason: str) -> Detail | None:
    if item.error is None:
        return Detail(reason) if reason else None
    line = item.error.message.strip().split("\n", 1)[0][:ERROR_LINE_MAX_CHARS]
    return Detail(reason, item.error.type, line, fingerprint(item.error))


def _ttl_ms(item: Settlement) -> int | None:
    return None if item.result_ttl_s is None else round(item.result_ttl_s * 1000)
