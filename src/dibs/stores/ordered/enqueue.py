"""Enqueue: new tasks into their queues, repeats and duplicates told apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from msgspec import Struct

from dibs.errors import StoreFull
from dibs.ids import CHUNK_BYTES, key_digest
from dibs.stores.ordered.chunks import find_row
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import EXPIRE_START, delayed_rank, end_of, tenant_keys
from dibs.stores.ordered.new import body_of, in_ms, new_state
from dibs.stores.ordered.records import (
    DELAYED,
    FAILED,
    READY,
    STATUSES,
    decode_state,
    encode_body,
)
from dibs.stores.ordered.views import result_of
from dibs.stores.ordered.work import QueueWork, Work
from dibs.task import Duplicate, Enqueued, NewTask, Rejected, Status

LOOK_AT_NEWEST_FROM = 8
_options = attrgetter("options")


class Prepared(Struct, frozen=True, gc=False):
    """A task with everything that can be computed before the transaction."""

    task: NewTask
    id: bytes
    body: bytes
    digest: bytes
    limit: bytes
    """The digest of its limit_key; empty: none."""
    options: tuple[Any, ...] | None
    """What its state depends on, if it is ready at once and has no key: tasks that agree in it are put in together."""


def prepare(tenant: str, task: NewTask, task_id: bytes) -> Prepared:
    """Encodes the body and digests the key, outside the writer."""
    body = encode_body(body_of(task, task.payload, task.key))
    limit = b"" if task.limit_key is None else key_digest(tenant, task.command, task.limit_key)
    if task.key is not None or task.delay_s or task.run_at_ms is not None:
        digest = b"" if task.key is None else key_digest(tenant, task.command, task.key)
        return Prepared(task, task_id, body, digest, limit, None)
    options = (
        task.command,
        task.priority,
        task.max_attempts,
        task.expires_s,
        task.result_ttl_s,
        task.retention_s,
        task.keep,
        bool(limit),
    )
    return Prepared(task, task_id, body, b"", limit, options)


def enqueue(txn: Txn, tenant: str, batch: Sequence[Prepared]) -> list[Enqueued | Duplicate | Rejected]:
    """Puts a batch in, in its order."""
    work = Work.of(txn)
    known = _known(txn, tenant, batch)
    runs = None if any(known) or txn.full() is not None else _runs(batch)
    outcomes: list[Enqueued | Duplicate | Rejected]
    if runs is None:
        outcomes = _put_each(work, tenant, batch, known)
    else:
        for run in runs:
            _put_alike(work.queue(tenant, run[0].task.command), run)
        outcomes = [Enqueued(item.id) for item in batch]
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
            return _known_rows(txn, tenant, batch)
    known = txn.get_many(wanted)
    return [state or row for state, row in zip(known, _known_rows(txn, tenant, batch), strict=True)]


def _known_rows(txn: Txn, tenant: str, batch: Sequence[Prepared]) -> list[bytes | None]:
    """Returns the heads of the chunks that hold, or held, rows with those ids."""
    prefix = tenant_keys(tenant).head
    newest = txn.scan(prefix, end_of(prefix), 1, reverse=True)
    wanted = [prefix + item.id[:CHUNK_BYTES] for item in batch] if newest else []
    if not newest or newest[0][0] < min(wanted):
        return [None] * len(batch)
    return txn.get_many(wanted)


def _cleared(work: Work, tenant: str, task_id: bytes) -> bool:
    """Removes what is left of an earlier task of this id if its retention is over; says whether the id is free."""
    # Read again: an item of this batch that was not put in may have cleared the same id before.
    stored = work.txn.get(tenant_keys(tenant).state + task_id)
    if stored is None:
        return find_row(work.txn, tenant_keys(tenant), task_id) is None
    state = decode_state(stored)
    if not state.gone(work.now_ms):
        return False
    work.queue(tenant, state.command).remove(task_id, state)
    work.flush()
    return True


def _runs(batch: Sequence[Prepared]) -> list[list[Prepared]] | None:
    """Returns the batch as runs of tasks that agree in their options; None if there is a task that has to be looked at
    by itself, or an id that comes twice."""
    runs: list[list[Prepared]] = []
    for options, run in groupby(batch, _options):
        if options is None:
            return None
        runs.append(list(run))
    return runs if len({item.id for item in batch}) == len(batch) else None


def _put_alike(queue: QueueWork, run: list[Prepared]) -> None:
    """Puts in new tasks that are ready at once, have no key and agree in their options."""
    if run[0].limit and queue.key_limit is not None:
        for item in run:
            _put(queue, item)
        return
    task, now_ms = run[0].task, queue.work.now_ms
    state = new_state(queue.config, task, b"", now_ms, READY, b"", now_ms)
    ids = [item.id for item in run]
    queue.put_alike(ids, state, [item.body for item in run], [len(item.task.payload) for item in run])
    if state.expires_ms:
        for task_id in ids:
            queue.work.expire(state.expires_ms, EXPIRE_START, queue.tenant.name, task_id)


def _put_each(
    work: Work, tenant: str, batch: Sequence[Prepared], known: Sequence[bytes | None]
) -> list[Enqueued | Duplicate | Rejected]:
    """Puts in tasks one by one, each with a look at who has its id and its key."""
    full = work.txn.full()
    # What this call has put in so far: ids, and the keys that they hold.
    ids: set[bytes] = set()
    keys: dict[tuple[str, bytes], bytes] = {}
    outcomes: list[Enqueued | Duplicate | Rejected] = []
    for item, stored in zip(batch, known, strict=True):
        task, task_id = item.task, item.id
        if task_id in ids or (stored is not None and not _cleared(work, tenant, task_id)):
            outcomes.append(Enqueued(task_id, True))
            continue
        queue = work.queue(tenant, task.command)
        if item.digest:
            put_now = keys.get((task.command, item.digest))
            duplicate = duplicate_of(queue, item.digest, task.on_duplicate, put_now)
            if duplicate is not None:
                outcomes.append(duplicate)
                continue
        if full is not None:
            outcomes.append(Rejected(StoreFull.code, full))
            continue
        ids.add(task_id)
        if item.digest:
            keys[(task.command, item.digest)] = task_id
        _put(queue, item)
        outcomes.append(Enqueued(task_id))
    return outcomes


def _put(queue: QueueWork, item: Prepared) -> None:
    work, now_ms, task, task_id = queue.work, queue.work.now_ms, item.task, item.id
    due_ms = task.run_at_ms or (now_ms + in_ms(task.delay_s) if task.delay_s else now_ms)
    if due_ms > now_ms:
        state = new_state(queue.config, task, item.digest, now_ms, DELAYED, delayed_rank(due_ms), due_ms)
    else:
        state = new_state(queue.config, task, item.digest, now_ms, READY, b"", now_ms)
        state.rank = work.back_rank(state.priority)
    if item.limit and queue.key_limit is not None:
        state.limit, state.cost = item.limit, task.limit_cost
    queue.put_new(task_id, state, item.body)
    if item.digest:
        work.others.append((queue.keys.key + item.digest, task_id))
    if state.expires_ms:
        work.expire(state.expires_ms, EXPIRE_START, queue.tenant.name, task_id)


def duplicate_of(queue: QueueWork, digest: bytes, on_duplicate: str, put_now: bytes | None) -> Duplicate | None:
    """Returns what holds the key, if that is still kept. `put_now`: a task of this call that has it."""
    work = queue.work
    if put_now is not None:
        return Duplicate(put_now, Status.PENDING)
    owner = work.txn.get(queue.keys.key + digest)
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
    if on_duplicate == "replay_dead" and state.status == FAILED:
        queue.revive(owner, state)
        work.flush()
        return Duplicate(owner, Status.PENDING, replayed=True)
    return Duplicate(owner, STATUSES[state.status], result_of(work.txn, queue.tenant, owner, state))
