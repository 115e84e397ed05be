"""Enqueue: new tasks into their queues, repeats and duplicates told apart."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dibs.errors import StoreFull
from dibs.ids import key_digest
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import EXPIRE_START, QueueKeys, expiry_key, queue_keys, tenant_keys
from dibs.stores.ordered.records import Body, State, decode_state, encode_body
from dibs.stores.ordered.views import result_of
from dibs.stores.ordered.work import Work
from dibs.task import (
    MAX_ATTEMPTS_DEFAULT,
    RESULT_TTL_DEFAULT_S,
    Duplicate,
    Enqueued,
    EventKind,
    NewTask,
    Place,
    QueueConfig,
    Rejected,
    Status,
)


class Prepared(Struct, frozen=True, gc=False):
    """A task with everything that can be computed before the transaction."""

    task: NewTask
    queue: QueueKeys
    body: bytes
    digest: bytes


def prepare(tenant: str, task: NewTask) -> Prepared:
    """Encodes the body and digests the key, outside the writer."""
    body = Body(
        task.command,
        task.payload,
        task.codec,
        task.key,
        _ms(task.lease_s),
        _ms(task.timeout_s),
        task.traceparent,
        task.limit_key,
        task.limit_cost,
    )
    digest = b"" if task.key is None else key_digest(tenant, task.command, task.key)
    return Prepared(task, queue_keys(tenant, task.command), encode_body(body), digest)


def enqueue(txn: Txn, tenant: str, batch: Sequence[Prepared]) -> list[Enqueued | Duplicate | Rejected]:
    """Puts a batch in, in its order."""
    work = Work(txn)
    full = txn.full()
    state_prefix = tenant_keys(tenant).state
    known = set(txn.get_many([state_prefix + item.task.id for item in batch]))
    keys: dict[bytes, bytes] = {}
    outcomes: list[Enqueued | Duplicate | Rejected] = []
    for item in batch:
        task_id = item.task.id
        state_key = state_prefix + task_id
        if state_key in known:
            outcomes.append(Enqueued(task_id, True))
            continue
        if item.digest:
            duplicate = _duplicate(work, item, keys)
            if duplicate is not None:
                outcomes.append(duplicate)
                continue
        if full is not None:
            outcomes.append(Rejected(StoreFull.code, full))
            continue
        _put(work, item)
        known.add(state_key)
        if item.digest:
            keys[item.queue.key + item.digest] = task_id
        outcomes.append(Enqueued(task_id))
    work.flush()
    return outcomes


def _put(work: Work, item: Prepared) -> None:
    task, queue = item.task, item.queue
    state = _new_state(work, item)
    work.put(queue.tenant.body + task.id, item.body)
    if task.run_at_ms is not None:
        work.to_delayed(queue, task.id, state, task.run_at_ms)
    elif task.delay_s:
        work.to_delayed(queue, task.id, state, work.now_ms + _ms(task.delay_s))
    else:
        work.to_ready(queue, task.id, state)
    work.tally(queue, "bytes", state.size)
    if item.digest:
        work.put(queue.key + item.digest, task.id)
    if state.expires_ms:
        work.put(expiry_key(state.expires_ms, EXPIRE_START, queue.tenant.name, task.id), b"")
    work.event(EventKind.ENQUEUED, queue, task.id, state)


def _new_state(work: Work, item: Prepared) -> State:
    task, config = item.task, work.config(item.queue)
    result_ttl_ms = _ms(_first(task.result_ttl_s, config.result_ttl_s, RESULT_TTL_DEFAULT_S))
    return State(
        task.command,
        Status.PENDING,
        Place.NONE,
        b"",
        _priority(task, config),
        0,
        task.max_attempts or config.max_attempts or MAX_ATTEMPTS_DEFAULT,
        len(task.payload),
        work.now_ms,
        work.now_ms,
        0 if task.expires_s is None else work.now_ms + _ms(task.expires_s),
        result_ttl_ms,
        max(result_ttl_ms, _ms(_first(task.retention_s, config.retention_s, 0))),
        task.keep,
        item.digest,
    )


def _duplicate(work: Work, item: Prepared, keys: dict[bytes, bytes]) -> Duplicate | None:
    """Returns what holds the key, if that is still kept."""
    queue = item.queue
    key = queue.key + item.digest
    if key in keys:
        return Duplicate(keys[key], Status.PENDING)
    owner = work.txn.get(key)
    stored = None if owner is None else work.txn.get(queue.tenant.state + owner)
    if owner is None or stored is None:
        return None
    state = decode_state(stored)
    if state.gone(work.now_ms):
        return None
    if item.task.on_duplicate == "replay_dead" and state.status is Status.FAILED:
        work.revive(queue, owner, state)
        work.event(EventKind.REPLAYED, queue, owner, state)
        work.flush()
        return Duplicate(owner, Status.PENDING, replayed=True)
    return Duplicate(owner, state.status, result_of(work.txn, queue.tenant, owner, state))


def _priority(task: NewTask, config: QueueConfig) -> int:
    return task.priority if task.priority is not None else config.priority or 0


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1000)
