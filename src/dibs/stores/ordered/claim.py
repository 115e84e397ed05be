"""Claim: the first ready tasks of some queues, each under a lease of its own."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.keys import (
    AFTER_SEPARATOR,
    EXPIRE_CLAIM,
    QueueKeys,
    expiry_key,
    from8,
    id_of,
    queue_keys,
    tenant_keys,
)
from dibs.stores.ordered.records import (
    Body,
    State,
    StoredClaim,
    decode_body,
    decode_claim,
    decode_config,
    decode_state,
    encode_claim,
)
from dibs.stores.ordered.sweep import settle_due
from dibs.stores.ordered.work import Work
from dibs.task import LEASE_DEFAULT_S, EventKind, Lease, Status

PROMOTED_PER_CLAIM = 200
RANDOM_BYTES = 8


class ClaimCall(Struct, frozen=True, gc=False):
    """One claim. `randoms` are the random halves of the tokens, minted before the transaction."""

    tenant: str
    commands: Sequence[str]
    limit: int
    lease_ms: int
    """0: the task's own, else the queue's."""
    worker: str
    claim_id: bytes | None
    randoms: bytes


def claim(txn: Txn, call: ClaimCall) -> list[Lease]:
    """Takes up to `limit` tasks, trying the queues in the order given."""
    if call.claim_id is not None:
        repeated = _repeated(txn, call)
        if repeated is not None:
            return repeated
    work = Work(txn)
    leases: list[Lease] = []
    for command in call.commands:
        queue = queue_keys(call.tenant, command)
        if work.config(queue).paused:
            continue
        due = txn.get(queue.due)
        if due is not None and from8(due) <= txn.now_ms:
            settle_due(work, queue, PROMOTED_PER_CLAIM)
        _take(work, queue, call, leases)
        if len(leases) == call.limit:
            break
    if call.claim_id is not None and leases:
        _remember(work, call, leases)
    work.flush()
    return leases


def ready_in_ms(txn: ReadTxn, tenant: str, commands: Sequence[str]) -> int | None:
    """In how many milliseconds a claim may find something; None: nothing is known to become due."""
    soonest: int | None = None
    for command in commands:
        queue = queue_keys(tenant, command)
        config = txn.get(queue.config)
        if config is not None and decode_config(config).paused:
            continue
        if txn.scan_keys(queue.ready, _end(queue.ready), 1):
            return 0
        due = txn.get(queue.due)
        if due is not None:
            wait_ms = max(0, from8(due) - txn.now_ms)
            soonest = wait_ms if soonest is None else min(soonest, wait_ms)
    return soonest


def _take(work: Work, queue: QueueKeys, call: ClaimCall, leases: list[Lease]) -> None:
    """Leases from the head of one queue until the claim is satisfied or the queue is empty."""
    txn = work.txn
    ids: list[bytes] = []
    attempts: list[int] = []
    while len(leases) < call.limit:
        wanted = call.limit - len(leases)
        taken = [id_of(key) for key in txn.scan_keys(queue.ready, _end(queue.ready), wanted)]
        states = txn.get_many([queue.tenant.state + task_id for task_id in taken])
        bodies = txn.get_many([queue.tenant.body + task_id for task_id in taken])
        for task_id in taken:
            state = decode_state(states[queue.tenant.state + task_id])
            if state.expired_unstarted(txn.now_ms):
                work.expire_unstarted(queue, task_id, state)
                continue
            body = decode_body(bodies[queue.tenant.body + task_id])
            leases.append(_lease(work, queue, call, task_id, state, body, len(leases)))
            ids.append(task_id)
            attempts.append(state.attempts)
        work.flush()
        if len(taken) < wanted:
            # The queue is empty now: the next ready task sets the mark again.
            if taken or txn.get(queue.ready_mark) is not None:
                txn.delete(queue.ready_mark)
            break
    if ids:
        txn.journal.write(EventKind.CLAIMED, call.tenant, queue.command, ids, attempts, call.worker)


def _lease(
    work: Work, queue: QueueKeys, call: ClaimCall, task_id: bytes, state: State, body: Body, index: int
) -> Lease:
    lease_ms = call.lease_ms or body.lease_ms or int((work.config(queue).lease_s or LEASE_DEFAULT_S) * 1000)
    state.attempts += 1
    state.token = work.txn.version.to_bytes(8, "big") + call.randoms[index * RANDOM_BYTES : (index + 1) * RANDOM_BYTES]
    state.worker = call.worker
    state.home = state.rank
    state.lease_ms = lease_ms
    state.progress = None
    work.to_leased(queue, task_id, state, work.now_ms + lease_ms)
    return _lease_of(call.tenant, task_id, state, body)


def _lease_of(tenant: str, task_id: bytes, state: State, body: Body) -> Lease:
    return Lease(
        tenant=tenant,
        id=task_id,
        token=state.token,
        command=state.command,
        payload=body.payload,
        codec=body.codec,
        priority=state.priority,
        attempt=state.attempts,
        max_attempts=state.max_attempts,
        lease_s=state.lease_ms / 1000,
        lease_end_ms=state.lease_end_ms,
        enqueued_ms=state.enqueued_ms,
        timeout_s=body.timeout_ms / 1000 if body.timeout_ms else None,
        key=body.key,
        traceparent=body.traceparent,
    )


def _repeated(txn: Txn, call: ClaimCall) -> list[Lease] | None:
    """Returns the leases of an earlier claim of this id that are still alive; None if there was none."""
    tenant = tenant_keys(call.tenant)
    assert call.claim_id is not None
    stored = txn.get(tenant.claim + call.claim_id)
    if stored is None:
        return None
    leases = []
    for task_id, token in decode_claim(stored).leases:
        state_data = txn.get(tenant.state + task_id)
        body_data = txn.get(tenant.body + task_id)
        if state_data is None or body_data is None:
            continue
        state = decode_state(state_data)
        if state.status is Status.IN_PROGRESS and state.token == token:
            leases.append(_lease_of(call.tenant, task_id, state, decode_body(body_data)))
    return leases


def _remember(work: Work, call: ClaimCall, leases: list[Lease]) -> None:
    """Keeps the claim as long as the longest of its leases was granted for."""
    assert call.claim_id is not None
    expires_ms = max(lease.lease_end_ms for lease in leases)
    claim = StoredClaim(expires_ms, [(lease.id, lease.token) for lease in leases])
    work.put(tenant_keys(call.tenant).claim + call.claim_id, encode_claim(claim))
    work.put(expiry_key(expires_ms, EXPIRE_CLAIM, call.tenant, call.claim_id), b"")


def _end(prefix: bytes) -> bytes:
    return prefix[:-1] + AFTER_SEPARATOR
