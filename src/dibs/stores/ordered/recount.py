"""What the doctor knows of limits per key: what each key uses is counted again from the states."""

from __future__ import annotations

from collections.abc import Iterator

from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.keys import KIND_REVIEW, QueueKeys, TenantKeys, end_of, from8, id_of, kind_of, queue_keys
from dibs.stores.ordered.limits import entry_ms, new_use, timer_entry
from dibs.stores.ordered.records import LEASED, PARKED, READY, KeyUse, State, UnreadableRecord, decode_use, encode_use

STEP = 1_000


class Recount:
    """Counts what each limit_key of a tenant uses."""

    def __init__(self, tenant: TenantKeys) -> None:
        self._tenant = tenant
        self._uses: dict[bytes, KeyUse] = {}

    def add(self, state: State) -> None:
        """Counts one task."""
        if not state.limit or not (state.held or state.place == PARKED):
            return
        use = self._uses.setdefault(state.limit, new_use(state.command))
        if state.place == PARKED:
            use.parked += 1
        elif state.place == LEASED:
            use.leased += 1
        elif state.place == READY:
            use.ready[state.priority] += 1
            use.costs[state.priority] += state.cost

    def problems(self, txn: ReadTxn) -> Iterator[tuple[str, bytes]]:
        """Says where the records differ from the count, and which parked tasks nothing would bring home."""
        stored = dict(_stored(txn, self._tenant))
        for limit in stored.keys() | self._uses.keys():
            key = self._tenant.limit + limit
            counted, use = self._uses.get(limit), stored.get(limit)
            if (use is None and limit in stored) or not _same(use, counted):
                yield "what a limit_key uses differs from a recount", key
            elif use is not None and use.timer_ms:
                queue = queue_keys(self._tenant.name, use.command)
                due = txn.get(queue.due)
                if txn.get(timer_entry(queue, use.timer_ms, limit)) is None or not due or from8(due) > use.timer_ms:
                    yield "a limit_key has room at a time that the due index does not know", key
            elif use is not None and _stranded(txn, self._tenant, use):
                yield "nothing will bring the parked tasks of a limit_key home", key

    def repair(self, txn: Txn) -> Iterator[tuple[QueueKeys, int]]:
        """Writes the records anew; yields the queues that have something due because of it: every key that has parked
        tasks is looked at as soon as anybody claims or sweeps."""
        stored = dict(_stored(txn, self._tenant))
        for limit, use in stored.items():
            if use is not None and use.timer_ms:
                txn.delete(timer_entry(queue_keys(self._tenant.name, use.command), use.timer_ms, limit))
            if limit not in self._uses:
                txn.delete(self._tenant.limit + limit)
        for limit, use in self._uses.items():
            known = stored.get(limit)
            if known is not None:
                use.tokens, use.refilled_ms = known.tokens, known.refilled_ms
            if use.parked:
                use.timer_ms = txn.now_ms
                queue = queue_keys(self._tenant.name, use.command)
                txn.put(timer_entry(queue, use.timer_ms, limit), b"")
                yield queue, use.timer_ms
            txn.put(self._tenant.limit + limit, encode_use(use))


def timer_named(txn: ReadTxn, tenant: TenantKeys, entry: bytes) -> bool:
    """Whether a delayed entry that is about limits is known to the key it is about; one of a review acts anyway."""
    if kind_of(entry) == KIND_REVIEW:
        return True
    stored = txn.get(tenant.limit + id_of(entry))
    try:
        use = None if stored is None else decode_use(stored)
    except UnreadableRecord:
        return True
    return use is not None and entry_ms(queue_keys(tenant.name, use.command), entry) == use.timer_ms


def _same(use: KeyUse | None, counted: KeyUse | None) -> bool:
    """A key that uses nothing may have a record, while its burst fills up, or none."""
    if use is None or counted is None:
        return (use is None or use.idle()) and counted is None
    return (use.leased, use.parked, use.ready, use.costs) == (
        counted.leased,
        counted.parked,
        counted.ready,
        counted.costs,
    )


def _stranded(txn: ReadTxn, tenant: TenantKeys, use: KeyUse) -> bool:
    """Whether tasks are parked and nothing of their key could leave and so make room, nor a change be on its way."""
    if not use.parked or use.leased or any(use.ready):
        return False
    queue = queue_keys(tenant.name, use.command)
    found = txn.scan_keys(queue.delayed, end_of(queue.delayed), STEP)
    return not any(kind_of(entry) == KIND_REVIEW for entry in found)


def _stored(txn: ReadTxn, tenant: TenantKeys) -> Iterator[tuple[bytes, KeyUse | None]]:
    """Yields the stored records; None for one that cannot be read."""
    start = tenant.limit
    while step := txn.scan(start, end_of(tenant.limit), STEP):
        for key, value in step:
            try:
                yield id_of(key), decode_use(value)
            except UnreadableRecord:
                yield id_of(key), None
        start = step[-1][0] + b"\0"
