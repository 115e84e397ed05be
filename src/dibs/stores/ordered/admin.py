"""What people do to tasks and queues: cancel, replay, purge, retain, configure, register; facts about the store."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import EXPIRE_WORKER, fact_key, reader_key, tenant_keys
from dibs.stores.ordered.loads import leave_alone
from dibs.stores.ordered.records import CANCELLED, DEAD, PENDING, STATUSES, Detail, State, StoredWorker, encode_worker
from dibs.stores.ordered.views import live_state, matching, resolve
from dibs.stores.ordered.work import Work
from dibs.task import (
    ALL_COMMANDS,
    Acted,
    Cancelled,
    EventKind,
    Filter,
    Place,
    QueueConfig,
    Reason,
    Status,
    TaskRef,
    WorkerInfo,
)


def cancel(txn: Txn, tenant: str, refs: Sequence[TaskRef]) -> list[Cancelled]:
    """Ends what has not started; flags what is in progress."""
    work = Work.of(txn)
    outcomes = []
    for ref in refs:
        task_id = resolve(txn, tenant, ref)
        if task_id is not None:
            leave_alone(work, tenant, task_id)
        state = live_state(txn, tenant_keys(tenant), task_id)
        if state is None or task_id is None:
            outcomes.append(Cancelled("unknown"))
        else:
            outcomes.append(_cancel_one(work, tenant, task_id, state))
        # Two references may name one task: the second must see what the first did.
        work.flush()
    return outcomes


def _cancel_one(work: Work, tenant: str, task_id: bytes, state: State) -> Cancelled:
    queue = work.queue(tenant, state.command)
    if state.ended():
        return Cancelled("ended", STATUSES[state.status])
    if state.status == PENDING:
        queue.end(task_id, state, CANCELLED, Reason.CANCELLED)
        queue.event(EventKind.CANCELLED, task_id, state.attempts, detail=Detail(Reason.CANCELLED))
        return Cancelled("cancelled", Status.CANCELLED)
    if not state.cancel:
        state.cancel = True
        queue.save(task_id, state)
        queue.event(EventKind.CANCELLING, task_id, state.attempts, state.worker)
    return Cancelled("cancelling", Status.IN_PROGRESS)


def replay(txn: Txn, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
    """Revives dead letters. A task that is not dead any more is left alone, so a repeat is harmless."""
    work = Work.of(txn)
    found, cursor = _dead_or_ended(txn, tenant, which, limit, cursor, only_dead=True)
    for task_id, state in found:
        work.queue(tenant, state.command).revive(task_id, state)
    work.flush()
    return Acted([task_id for task_id, _ in found], cursor)


def purge(txn: Txn, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
    """Removes ended tasks for good."""
    work = Work.of(txn)
    found, cursor = _dead_or_ended(txn, tenant, which, limit, cursor, only_dead=False)
    for task_id, state in found:
        queue = work.queue(tenant, state.command)
        queue.remove(task_id, state)
        queue.event(EventKind.PURGED, task_id, state.attempts)
    work.flush()
    return Acted([task_id for task_id, _ in found], cursor)


def _dead_or_ended(
    txn: Txn, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None, *, only_dead: bool
) -> tuple[list[tuple[bytes, State]], str | None]:
    if isinstance(which, Filter):
        if only_dead:
            which = replace(which, place=Place.DEAD)
        seen, cursor = matching(txn, tenant, which, cursor, limit)
        found = [(one.id, one.state) for one in seen]
    else:
        states = {task_id: live_state(txn, tenant_keys(tenant), task_id) for task_id in which}
        found, cursor = [(task_id, state) for task_id, state in states.items() if state is not None], None
    if only_dead:
        return [(task_id, state) for task_id, state in found if state.place == DEAD], cursor
    return [(task_id, state) for task_id, state in found if state.ended()], cursor


def retain(txn: Txn, tenant: str, ids: Sequence[bytes], ttl_ms: int) -> list[int | None]:
    """Keeps results longer; never shorter than before."""
    work = Work.of(txn)
    kept: dict[bytes, int | None] = {}
    for task_id in dict.fromkeys(ids):
        state = live_state(txn, tenant_keys(tenant), task_id)
        if state is None or not state.ended() or state.result_until_ms <= txn.now_ms:
            kept[task_id] = None
            continue
        if txn.now_ms + ttl_ms > state.result_until_ms:
            queue = work.queue(tenant, state.command)
            state.result_until_ms = txn.now_ms + ttl_ms
            state.kept_until_ms = max(state.kept_until_ms, state.result_until_ms)
            queue.expire_later(task_id, state)
            queue.save(task_id, state)
        kept[task_id] = state.result_until_ms
    work.flush()
    return [kept[task_id] for task_id in ids]


def configure(txn: Txn, tenant: str, command: str, config: QueueConfig | None) -> QueueConfig:
    """Sets or reads a queue's configuration, or that of a whole tenant."""
    work = Work.of(txn)
    queue = work.queue(tenant, command)
    if config is not None:
        queue.set_config(config)
        if command == ALL_COMMANDS:
            work.set_whole(queue.tenant, config)
        work.flush()
    return queue.config


def register(txn: Txn, tenant: str, info: WorkerInfo, ttl_ms: int) -> None:
    """Keeps a worker's registration until its time is over; 0 removes it."""
    name = info.name.encode()
    key = tenant_keys(tenant).worker + name
    if ttl_ms == 0:
        txn.delete(key)
        return
    work = Work.of(txn)
    expires_ms = txn.now_ms + ttl_ms
    work.others.append((key, encode_worker(StoredWorker(expires_ms, replace(info, seen_ms=txn.now_ms)))))
    work.expire(expires_ms, EXPIRE_WORKER, tenant, name)
    work.flush()


def advance(txn: Txn, reader: str, shard: int, position: bytes | None) -> None:
    """Moves a named reader, or forgets it."""
    if position is None:
        txn.delete(reader_key(reader, shard))
    else:
        txn.put(reader_key(reader, shard), position)


def fact(txn: Txn, name: str, value: bytes) -> bytes:
    """Keeps the first value that is given under a name, and returns it."""
    known = txn.get(fact_key(name))
    if known is None:
        txn.put(fact_key(name), value)
    return value if known is None else known
