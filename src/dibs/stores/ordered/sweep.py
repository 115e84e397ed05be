"""The sweep: what time alone does. Bounded, and its cost does not depend on how many queues are idle.

Index entries are hints: a leased or delayed entry acts only if the task's state names it, a due entry only if the queue
does, an expiry entry only if its record still holds that time.
"""

from __future__ import annotations

from msgspec import Struct

from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.journal import Cursor
from dibs.stores.ordered.keys import (
    DUE,
    EXPIRE_CLAIM,
    EXPIRE_RESULT,
    EXPIRE_START,
    EXPIRE_TASK,
    EXPIRE_WORKER,
    EXPIRIES,
    JOURNAL,
    META_JOURNAL_BYTES,
    META_JOURNAL_TRIMMED,
    READERS,
    QueueKeys,
    end_of,
    from8,
    id_of,
    ms8,
    parse_due_key,
    parse_expiry_key,
    queue_keys,
    tenant_keys,
)
from dibs.stores.ordered.records import decode_claim, decode_runs, decode_state, decode_worker
from dibs.stores.ordered.work import Work, set_due
from dibs.task import EventKind, Place, Swept

TRANSACTION_MAX = 500
TRIM_ENTRIES_MAX = 200


class JournalLimits(Struct, frozen=True):
    """How long, and up to which size, the journal is kept."""

    retention_ms: int
    max_bytes: int


class Tally(Struct):
    """What one sweep transaction did."""

    promoted: int = 0
    expired: int = 0
    cancelled: int = 0
    pruned: int = 0
    trimmed: int = 0
    examined: int = 0

    def swept(self, more: bool) -> Swept:
        return Swept(self.promoted, self.expired, self.cancelled, self.pruned, self.trimmed, more)


def anything_due(txn: ReadTxn, limits: JournalLimits) -> bool:
    """A look by a read transaction: an idle store is never locked."""
    now = ms8(txn.now_ms + 1)
    return bool(
        txn.scan_keys(DUE, DUE + now, 1) or txn.scan_keys(EXPIRIES, EXPIRIES + now, 1) or _trimmable(txn, limits, 1)
    )


def sweep(txn: Txn, budget: int, limits: JournalLimits, store_id: bytes) -> Swept:
    """One bounded transaction of sweeping. `more`: call again."""
    tally = Tally()
    left = min(budget, TRANSACTION_MAX)
    more = _sweep_due(txn, left, tally)
    more = _sweep_expiries(txn, left, tally) or more
    more = _trim(txn, limits, store_id, tally) or more
    return tally.swept(more)


# -------------------------------------------------------------------------------------------------- due queues


def _sweep_due(txn: Txn, budget: int, tally: Tally) -> bool:
    left = budget
    for key in txn.scan_keys(DUE, DUE + ms8(txn.now_ms + 1), budget):
        at_ms, queue = parse_due_key(key)
        if txn.get(queue.due) != ms8(at_ms):
            txn.delete(key)
            left -= 1
        else:
            work = Work(txn)
            left -= settle_due(work, queue, left, tally) or 1
            work.flush()
        if left <= 0:
            return True
    return False


def settle_due(work: Work, queue: QueueKeys, budget: int, tally: Tally | None = None) -> int:
    """Promotes due delayed tasks and takes back expired leases of one queue, in order of time, and notes when it is
    next due. Returns how many entries it dealt with."""
    txn, tally = work.txn, tally or Tally()
    stop = ms8(txn.now_ms + 1)
    expired = txn.scan_keys(queue.leased, queue.leased + stop, budget)
    for key in expired:
        _settle_entry(work, queue, key, Place.LEASED, tally)
    promoted = txn.scan_keys(queue.delayed, queue.delayed + stop, budget - len(expired))
    for key in promoted:
        _settle_entry(work, queue, key, Place.DELAYED, tally)
    work.flush()
    set_due(txn, queue, txn.get(queue.due), _next_due_ms(txn, queue))
    return len(expired) + len(promoted)


def _settle_entry(work: Work, queue: QueueKeys, key: bytes, place: Place, tally: Tally) -> None:
    task_id = id_of(key)
    stored = work.txn.get(queue.tenant.state + task_id)
    state = None if stored is None else decode_state(stored)
    if state is None or state.place is not place or queue.of_place[place] + state.rank + task_id != key:
        work.delete(key)
        return
    if place is Place.LEASED:
        work.take_back(queue, task_id, state)
        tally.expired += 1
    else:
        work.to_ready(queue, task_id, state)
        work.event(EventKind.PROMOTED, queue, task_id, state)
        tally.promoted += 1


def _next_due_ms(txn: ReadTxn, queue: QueueKeys) -> int | None:
    heads = [
        from8(key[len(prefix) : len(prefix) + 8])
        for prefix in (queue.leased, queue.delayed)
        for key in txn.scan_keys(prefix, end_of(prefix), 1)
    ]
    return min(heads, default=None)


# ---------------------------------------------------------------------------------------------------- expiries


def _sweep_expiries(txn: Txn, budget: int, tally: Tally) -> bool:
    keys = txn.scan_keys(EXPIRIES, EXPIRIES + ms8(txn.now_ms + 1), budget)
    if not keys:
        return False
    work = Work(txn)
    for key in keys:
        at_ms, kind, tenant, name = parse_expiry_key(key)
        if kind == EXPIRE_TASK or kind == EXPIRE_RESULT or kind == EXPIRE_START:
            _expire_task(work, kind, at_ms, tenant, name, tally)
        elif kind == EXPIRE_CLAIM:
            stored = txn.get(tenant_keys(tenant).claim + name)
            if stored is not None and decode_claim(stored).expires_ms == at_ms:
                work.delete(tenant_keys(tenant).claim + name)
        elif kind == EXPIRE_WORKER:
            stored = txn.get(tenant_keys(tenant).worker + name)
            if stored is not None and decode_worker(stored).expires_ms == at_ms:
                work.delete(tenant_keys(tenant).worker + name)
        work.delete(key)
    work.flush()
    return len(keys) == budget


def _expire_task(work: Work, kind: bytes, at_ms: int, tenant: str, task_id: bytes, tally: Tally) -> None:
    stored = work.txn.get(tenant_keys(tenant).state + task_id)
    if stored is None:
        return
    state = decode_state(stored)
    queue = queue_keys(tenant, state.command)
    if kind == EXPIRE_TASK and state.kept_until_ms == at_ms:
        work.remove(queue, task_id, state)
        tally.pruned += 1
    elif kind == EXPIRE_RESULT and state.result_until_ms == at_ms:
        work.drop_result(queue, task_id, state)
        work.save(queue, task_id, state)
        tally.pruned += 1
    elif kind == EXPIRE_START and state.expires_ms == at_ms and state.expired_unstarted(at_ms):
        work.expire_unstarted(queue, task_id, state)
        tally.cancelled += 1


# ----------------------------------------------------------------------------------------------------- journal


def _trim(txn: Txn, limits: JournalLimits, store_id: bytes, tally: Tally) -> bool:
    """Trims what is too old, as far as named readers allow, and what is over the size cap whoever reads."""
    entries = _trimmable(txn, limits, TRIM_ENTRIES_MAX)
    if not entries:
        return False
    key, value = entries[-1]
    last = sum(len(run.ids) for run in decode_runs(value)) - 1
    txn.delete_many([key for key, _ in entries])
    txn.put(META_JOURNAL_TRIMMED, Cursor(store_id, key[1:], last).pack())
    txn.add(META_JOURNAL_BYTES, -sum(len(key) + len(value) for key, value in entries))
    tally.trimmed += len(entries)
    return len(entries) == TRIM_ENTRIES_MAX


def _trimmable(txn: ReadTxn, limits: JournalLimits, limit: int) -> list[tuple[bytes, bytes]]:
    oldest = txn.scan(JOURNAL, end_of(JOURNAL), limit)
    if not oldest:
        return []
    excess = int.from_bytes(txn.get(META_JOURNAL_BYTES) or b"", "big", signed=True) - limits.max_bytes
    held = _held_position(txn)
    kept_from_ms = txn.now_ms - limits.retention_ms
    out: list[tuple[bytes, bytes]] = []
    for key, value in oldest:
        too_old = decode_runs(value)[-1].at_ms < kept_from_ms and (held is None or key[1:] < held)
        if not too_old and excess <= 0:
            break
        out.append((key, value))
        excess -= len(key) + len(value)
    return out


def _held_position(txn: ReadTxn) -> bytes | None:
    """The entry that the slowest named reader is in: it and what follows is kept."""
    readers = txn.scan(READERS, end_of(READERS), 1_000)
    return min((Cursor.unpack(value).position for _, value in readers), default=None)
