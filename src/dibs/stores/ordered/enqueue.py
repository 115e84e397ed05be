"""Enqueue: new tasks into their queues, repeats and duplicates told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dibs.errors import StoreFull
from dibs.ids import key_digest
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import EXPIRE_START, delayed_rank, end_of, tenant_keys
from dibs.stores.ordered.records import (
    DELAYED,
    FAILED,
    PENDING,
    READY,
    STATUSES,
    State,
    decode_state,
    encode_body,
    encode_state,
)
from dibs.stores.ordered.views import result_of
from dibs.stores.ordered.work import QueueWork, Work
from dibs.task import (
    MAX_ATTEMPTS_DEFAULT,
    RESULT_TTL_DEFAULT_S,
    Duplicate,
    Enqueued,
    NewTask,
    QueueConfig,
    Rejected,
    Status,
)

#: By options: what comes before and after the rank in an encoded state.
Moulds = dict[tuple[Any, ...], tuple[bytes, bytes]]

LOOK_AT_NEWEST_FROM = 8
_RESULT_TTL_MS = int(RESULT_TTL_DEFAULT_S * 1000)


class Prepared(Struct, frozen=True, gc=False):
    """A task with everything that can be computed before the transaction."""

    task: NewTask
    id: bytes
    body: bytes
    digest: bytes


def prepare(tenant: str, task: NewTask, task_id: bytes) -> Prepared:
    """Encodes the body (a `Body`, without making one) and digests the key, outside the writer."""
    body = encode_body(
        (
            task.command,
            task.payload,
            task.codec,
            task.key,
            0 if task.lease_s is None else _ms(task.lease_s),
            0 if task.timeout_s is None else _ms(task.timeout_s),
            task.traceparent,
            task.limit_key,
            task.limit_cost,
        )
    )
    digest = b"" if task.key is None else key_digest(tenant, task.command, task.key)
    return Prepared(task, task_id, body, digest)


def enqueue(txn: Txn, tenant: str, batch: Sequence[Prepared]) -> list[Enqueued | Duplicate | Rejected]:
    """Puts a batch in, in its order."""
    work = Work.of(txn)
    full = txn.full()
    # What this call has put in so far: ids, and the keys that they hold.
    ids: set[bytes] = set()
    keys: dict[tuple[str, bytes], bytes] = {}
    moulds: Moulds = {}
    outcomes: list[Enqueued | Duplicate | Rejected] = []
    queue: QueueWork | None = None
    for item, known in zip(batch, _known(txn, tenant, batch), strict=True):
        task, task_id = item.task, item.id
        if task_id in ids or (known is not None and not _cleared(work, tenant, task_id)):
            outcomes.append(Enqueued(task_id, True))
            continue
        if queue is None or queue.keys.command != task.command:
            queue = work.queue(tenant, task.command)
        if item.digest:
            duplicate = _duplicate(queue, item, keys.get((task.command, item.digest)))
            if duplicate is not None:
                outcomes.append(duplicate)
                continue
        if full is not None:
            outcomes.append(Rejected(StoreFull.code, full))
            continue
        ids.add(task_id)
        if item.digest:
            keys[(task.command, item.digest)] = task_id
        _put(queue, task, item, moulds)
        outcomes.append(Enqueued(task_id))
    work.flush()
    work.journal_new()
    return outcomes


def _known(txn: Txn, tenant: str, batch: Sequence[Prepared]) -> list[bytes | None]:
    """Returns the states of those ids that exist. Ids grow with time: one look at the newest tells that all of a fresh
    batch are new."""
    prefix = tenant_keys(tenant).state
    wanted = [prefix + item.id for item in batch]
    if len(wanted) >= LOOK_AT_NEWEST_FROM:
        newest = txn.scan(prefix, end_of(prefix), 1, reverse=True)
        if not newest or newest[0][0] < min(wanted):
            return [None] * len(wanted)
    return txn.get_many(wanted)


def _cleared(work: Work, tenant: str, task_id: bytes) -> bool:
    """Removes what is left of an earlier task of this id if its retention is over; says whether the id is free."""
    # Read again: an item of this batch that was not put in may have cleared the same id before.
    stored = work.txn.get(tenant_keys(tenant).state + task_id)
    if stored is None:
        return True
    state = decode_state(stored)
    if not state.gone(work.now_ms):
        return False
    work.queue(tenant, state.command).remove(task_id, state)
    work.flush()
    return True


def _put(queue: QueueWork, task: NewTask, item: Prepared, moulds: Moulds) -> None:
    work, now_ms, task_id = queue.work, queue.work.now_ms, item.id
    due_ms = task.run_at_ms or (now_ms + _ms(task.delay_s) if task.delay_s else now_ms)
    if due_ms > now_ms:
        place, rank = DELAYED, delayed_rank(due_ms)
        state = encode_state(_new_state(queue.config, task, item.digest, now_ms, place, rank, due_ms))
    else:
        place, rank = READY, work.back_rank((queue.config.priority or 0) if task.priority is None else task.priority)
        state = _ready_state(queue, task, item, rank, moulds)
    queue.put_new(task_id, place, rank, state, item.body, len(task.payload))
    if item.digest:
        work.others.append((queue.keys.key + item.digest, task_id))
    if task.expires_s is not None:
        work.expire(now_ms + _ms(task.expires_s), EXPIRE_START, queue.tenant.name, task_id)


def _ready_state(queue: QueueWork, task: NewTask, item: Prepared, rank: bytes, moulds: Moulds) -> bytes:
    """Returns the encoded state of a task that is ready. Within a call, the states of tasks with the same options
    differ only by their rank: they are cast from one mould instead of being encoded one by one."""
    options = (
        task.command,
        task.priority,
        task.max_attempts,
        task.expires_s,
        task.result_ttl_s,
        task.retention_s,
        task.keep,
        len(task.payload),
        item.digest,
    )
    mould = moulds.get(options)
    if mould is not None:
        return mould[0] + rank + mould[1]
    now_ms = queue.work.now_ms
    encoded = encode_state(_new_state(queue.config, task, item.digest, now_ms, READY, rank, now_ms))
    head, tail = encoded.split(rank, 1)
    moulds[options] = (head, tail)
    return encoded


def _new_state(
    config: QueueConfig, task: NewTask, digest: bytes, now_ms: int, place: int, rank: bytes, due_ms: int
) -> State:
    ttl_s = config.result_ttl_s if task.result_ttl_s is None else task.result_ttl_s
    ttl_ms = _RESULT_TTL_MS if ttl_s is None else _ms(ttl_s)
    retention_s = config.retention_s if task.retention_s is None else task.retention_s
    return State(
        command=task.command,
        status=PENDING,
        place=place,
        rank=rank,
        priority=(config.priority or 0) if task.priority is None else task.priority,
        attempts=0,
        max_attempts=task.max_attempts or config.max_attempts or MAX_ATTEMPTS_DEFAULT,
        size=len(task.payload),
        enqueued_ms=now_ms,
        due_ms=due_ms,
        expires_ms=0 if task.expires_s is None else now_ms + _ms(task.expires_s),
        result_ttl_ms=ttl_ms,
        retention_ms=ttl_ms if retention_s is None else max(ttl_ms, _ms(retention_s)),
        keep=task.keep,
        digest=digest,
    )


def _duplicate(queue: QueueWork, item: Prepared, put_now: bytes | None) -> Duplicate | None:
    """Returns what holds the key, if that is still kept."""
    work = queue.work
    if put_now is not None:
        return Duplicate(put_now, Status.PENDING)
    owner = work.txn.get(queue.keys.key + item.digest)
    stored = None if owner is None else work.txn.get(queue.tenant.state + owner)
    if owner is None or stored is None:
        return None
    state = decode_state(stored)
    if state.gone(work.now_ms):
        # Its successor has the key from now on, also if the clock is set back and both are there.
        queue.free_key(owner, state)
        queue.save(owner, state)
        work.flush()
        return None
    if item.task.on_duplicate == "replay_dead" and state.status == FAILED:
        queue.revive(owner, state)
        work.flush()
        return Duplicate(owner, Status.PENDING, replayed=True)
    return Duplicate(owner, STATUSES[state.status], result_of(work.txn, queue.tenant, owner, state))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
