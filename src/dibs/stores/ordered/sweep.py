"""The sweep: what time alone does. Bounded, and its cost does not depend on how many queues are idle.

Index entries are hints: a leased or delayed entry acts only if the task's state names it, a due entry only if the queue
does, an expiry entry only if its record still holds that time.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.journal import Cursor
from dibs.stores.ordered.keys import (
    DUE,
    EXPIRE_BLOCK,
    EXPIRE_CHUNK,
    EXPIRE_CLAIM,
    EXPIRE_LIMIT,
    EXPIRE_LOAD,
    EXPIRE_RESULT,
    EXPIRE_START,
    EXPIRE_TASK,
    EXPIRE_WORKER,
    EXPIRIES,
    JOURNAL,
    KIND_BLOCK,
    KIND_LIMIT,
    KIND_REVIEW,
    META_JOURNAL_BYTES,
    META_JOURNAL_TRIMMED,
    READERS,
    QueueKeys,
    end_of,
    from8,
    from_count,
    id_of,
    kind_of,
    ms8,
    parse_due_key,
    parse_expiry_key,
    split_ids,
    tenant_keys,
)
from dibs.stores.ordered.limits import expire_use
from dibs.stores.ordered.loads import expire_block, expire_chunk, expire_load, leave_block
from dibs.stores.ordered.records import (
    DELAYED,
    LEASED,
    decode_claim,
    decode_runs,
    decode_state,
    decode_worker,
    encode_claim,
)
from dibs.stores.ordered.work import QueueWork, Work
from dibs.task import EventKind, Swept

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
    """One transaction of sweeping, at most `TRANSACTION_MAX` of each. `more`: call again."""
    tally = Tally()
    more = _sweep_due(txn, budget, tally)
    more = _sweep_expiries(txn, budget, tally) or more
    more = _trim(txn, limits, store_id, tally) or more
    return tally.swept(more)


# -------------------------------------------------------------------------------------------------- due queues


def _sweep_due(txn: Txn, budget: int, tally: Tally) -> bool:
    left = budget
    work = Work.of(txn)
    for key in txn.scan_keys(DUE, DUE + ms8(txn.now_ms + 1), budget):
        at_ms, keys = parse_due_key(key)
        if txn.get(keys.due) != ms8(at_ms):
            txn.delete(key)
            left -= 1
        else:
            left -= settle_due(work.queue(keys.tenant.name, keys.command), left, tally) or 1
        if left <= 0:
            return True
    return False


def settle_due(queue: QueueWork, budget: int, tally: Tally | None = None) -> int:
    """Promotes due delayed tasks and takes back expired leases of one queue, in order of time, and notes when it is
    next due. Returns how many entries it dealt with."""
    work, keys, tally = queue.work, queue.keys, tally or Tally()
    txn, stop = work.txn, ms8(work.now_ms + 1)
    expired = txn.scan_keys(keys.leased, keys.leased + stop, budget)
    for key in expired:
        _settle_entry(queue, key, LEASED, tally)
    done = len(expired)
    for key in txn.scan_keys(keys.delayed, keys.delayed + stop, budget - done):
        if done >= budget:
            break
        kind = kind_of(key)
        if kind == KIND_BLOCK:
            done += _promote_block(queue, key, budget - done, tally) or 1
            continue
        if kind == KIND_LIMIT:
            queue.limiter.timer(key)
        elif kind == KIND_REVIEW:
            queue.limiter.go_on_reviewing(key)
        else:
            _settle_entry(queue, key, DELAYED, tally)
        done += 1
    work.flush()
    queue.set_due(_next_due_ms(txn, keys))
    return done


def _promote_block(queue: QueueWork, key: bytes, budget: int, tally: Tally) -> int:
    """Promotes the due rows of a block; returns how many it looked at."""
    # Who has a key is read: what was done before must be there.
    queue.work.flush()
    left = leave_block(queue, key, budget, until_ms=queue.work.now_ms)
    for row in left.rows:
        queue.limit(row.state, row.body)
        queue.to_ready(row.id, row.state)
        queue.expire_start(row.id, row.state)
        queue.event(EventKind.PROMOTED, row.id, 0)
    tally.promoted += len(left.rows)
    tally.cancelled += left.ended
    return left.seen


def _settle_entry(queue: QueueWork, key: bytes, place: int, tally: Tally) -> None:
    task_id = id_of(key)
    stored = queue.work.txn.get(queue.tenant.state + task_id)
    state = None if stored is None else decode_state(stored)
    if state is None or state.place != place or queue.keys.of_place[place] + state.rank + task_id != key:
        queue.work.deletes.append(key)
    elif place == LEASED:
        queue.take_back(task_id, state)
        tally.expired += 1
    else:
        queue.to_ready(task_id, state)
        queue.event(EventKind.PROMOTED, task_id, state.attempts)
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
    entries = txn.scan(EXPIRIES, EXPIRIES + ms8(txn.now_ms + 1), budget)
    work = Work.of(txn)
    left = budget
    for key, value in entries:
        at_ms, kind, tenant = parse_expiry_key(key)
        if kind in (EXPIRE_TASK, EXPIRE_RESULT, EXPIRE_START):
            # Each name once: all are read before the first is acted on.
            ids = list(dict.fromkeys(split_ids(value)))
            for task_id in ids[left:]:
                work.expire(at_ms, kind, tenant, task_id)
            _expire_tasks(work, kind, at_ms, tenant, ids[:left], tally)
            left -= len(ids)
        elif kind == EXPIRE_BLOCK:
            for name in split_ids(value):
                if left > 0:
                    rows = expire_block(work, at_ms, tenant, name, left)
                    tally.cancelled += rows.ended
                    left -= rows.seen or 1
                    work.flush()
                else:
                    work.expire(at_ms, EXPIRE_BLOCK, tenant, name)
        elif kind in _EXPIRE_IDS:
            for name in split_ids(value):
                _EXPIRE_IDS[kind](work, at_ms, tenant, name)
            left -= 1
        elif kind == EXPIRE_LIMIT:
            expire_use(work, tenant, value, at_ms)
            left -= 1
        else:
            _EXPIRE_NAME[kind](work, at_ms, tenant, value)
            left -= 1
        work.deletes.append(key)
        # One task may be named by two entries: the second must see what the first did.
        work.flush()
        if left <= 0:
            return True
    return False


def _expire_worker(work: Work, at_ms: int, tenant: str, name: bytes) -> None:
    key = tenant_keys(tenant).worker + name
    stored = work.txn.get(key)
    if stored is not None and decode_worker(stored).expires_ms == at_ms:
        work.deletes.append(key)


def _expire_claim(work: Work, at_ms: int, tenant: str, name: bytes) -> None:
    """A claim is remembered while one of its leases lives, and heartbeats make leases live longer."""
    keys = tenant_keys(tenant)
    stored = work.txn.get(keys.claim + name)
    claim = None if stored is None else decode_claim(stored)
    if claim is None or claim.expires_ms != at_ms:
        return
    whose = [tenant_keys(one) for one in claim.tenants] or [keys] * len(claim.leases)
    states = work.txn.get_many([one.state + task_id for one, (task_id, _) in zip(whose, claim.leases, strict=True)])
    held = [
        state.lease_end_ms()
        for (_, token), data in zip(claim.leases, states, strict=True)
        if data is not None and (state := decode_state(data)).token == token
    ]
    expires_ms = max(held, default=0)
    if expires_ms > work.now_ms:
        work.others.append((keys.claim + name, encode_claim(replace(claim, expires_ms=expires_ms))))
        work.expire(expires_ms, EXPIRE_CLAIM, tenant, name)
    else:
        work.deletes.append(keys.claim + name)


_EXPIRE_IDS = {EXPIRE_CLAIM: _expire_claim, EXPIRE_CHUNK: expire_chunk}
_EXPIRE_NAME = {EXPIRE_WORKER: _expire_worker, EXPIRE_LOAD: expire_load}


def _expire_tasks(work: Work, kind: bytes, at_ms: int, tenant: str, ids: list[bytes], tally: Tally) -> None:
    states = work.txn.get_many([tenant_keys(tenant).state + task_id for task_id in ids])
    for task_id, stored in zip(ids, states, strict=True):
        if stored is None:
            continue
        state = decode_state(stored)
        queue = work.queue(tenant, state.command)
        if kind == EXPIRE_TASK and state.kept_until_ms == at_ms:
            queue.remove(task_id, state)
            tally.pruned += 1
        elif kind == EXPIRE_RESULT and state.result_until_ms == at_ms:
            queue.drop_result(task_id, state)
            queue.save(task_id, state)
            tally.pruned += 1
        elif kind == EXPIRE_START and state.expires_ms == at_ms and state.expired_unstarted(at_ms):
            queue.expire_unstarted(task_id, state)
            tally.cancelled += 1


# ----------------------------------------------------------------------------------------------------- journal


def _trim(txn: Txn, limits: JournalLimits, store_id: bytes, tally: Tally) -> bool:
    """Trims what is too old, as far as named readers allow, and what is over the size cap whoever reads."""
    if not _trimmable(txn, limits, 1):
        return False
    entries = _trimmable(txn, limits, TRIM_ENTRIES_MAX)
    key, value = entries[-1]
    last = sum(run.count() for run in decode_runs(value)) - 1
    txn.delete_many([key for key, _ in entries])
    txn.put(META_JOURNAL_TRIMMED, Cursor(store_id, key[1:], last).pack())
    txn.add(META_JOURNAL_BYTES, -sum(len(key) + len(value) for key, value in entries))
    tally.trimmed += len(entries)
    return len(entries) == TRIM_ENTRIES_MAX


def _trimmable(txn: ReadTxn, limits: JournalLimits, limit: int) -> list[tuple[bytes, bytes]]:
    oldest = txn.scan(JOURNAL, end_of(JOURNAL), limit)
    if not oldest:
        return []
    excess = from_count(txn.get(META_JOURNAL_BYTES)) - limits.max_bytes
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
