"""Marks: ids that divide a tenant's tasks into ranges of about the same size, found by counting keys.

Tasks with records of their own are counted by the keys of their states, and no state is read. The rows of a load that
have none yet are counted by the heads of their chunks, and no row is read. A count is as of its moment, and rows that
left their chunk before it was their turn are counted twice: a range holds about as many tasks as were asked for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from dibs.ids import CHUNK_BYTES
from dibs.stores.marks import MarkCursor
from dibs.stores.ordered.engine import ReadTxn
from dibs.stores.ordered.keys import TenantKeys, end_of, id_of, tenant_keys
from dibs.stores.ordered.records import TAIL_BYTES, decode_head
from dibs.task import Marks

KEYS_MAX = 20_000
HEADS_MAX = 2_000
_FIRST_TAIL = bytes(TAIL_BYTES)


def marks(txn: ReadTxn, tenant: str, every: int, after: bytes | None, until: bytes | None = None) -> Marks:
    """Returns marks from a cursor on, as far as a bounded number of keys reaches, or up to an id (inclusive)."""
    keys = tenant_keys(tenant)
    begun = MarkCursor.unpack(after, 1)
    states = _states(txn, keys, begun.after, until)
    chunks = _chunks(txn, keys, begun.after, until)
    ends = [until] if until is not None else []
    if len(states) == KEYS_MAX:
        ends.append(id_of(states[-1]))
    if len(chunks) == HEADS_MAX:
        ends.append(chunks[-1][0])
    end = min(ends, default=None)
    if end is not None:
        del states[bisect_right(states, keys.state + end) :]
        del chunks[bisect_right(chunks, end, key=_chunk_id) :]
    divider = Divider(every, begun.counts[0])
    counted = 0
    for chunk_id, rows in chunks:
        before = bisect_left(states, keys.state + chunk_id, counted)
        divider.count_tasks(states, counted, before)
        divider.count_rows(chunk_id, rows)
        counted = before
    divider.count_tasks(states, counted, len(states))
    return Marks(divider.marks, None if end is None else MarkCursor(end, (divider.count,)).pack())


class Divider:
    """Counts tasks in the order of their ids, and marks the first that is one too many."""

    def __init__(self, every: int, count: int) -> None:
        self.count = count
        self.marks: list[bytes] = []
        self._every = every

    def count_tasks(self, states: Sequence[bytes], first: int, end: int) -> None:
        """Counts tasks, given by the keys of their states."""
        while self.count + end - first > self._every:
            first += max(self._every - self.count, 0)
            self.marks.append(id_of(states[first]))
            self.count = 0
        self.count += end - first

    def count_rows(self, chunk_id: bytes, rows: int) -> None:
        """Counts the rows of a chunk, which stay together."""
        if self.count + rows > self._every and self.count:
            self.marks.append(chunk_id)
            self.count = 0
        self.count += rows


def _states(txn: ReadTxn, keys: TenantKeys, after: bytes, until: bytes | None) -> list[bytes]:
    start = keys.state + after + b"\0" if after else keys.state
    stop = end_of(keys.state) if until is None else keys.state + until + b"\0"
    return txn.scan_keys(start, stop, KEYS_MAX)


def _chunks(txn: ReadTxn, keys: TenantKeys, after: bytes, until: bytes | None) -> list[tuple[bytes, int]]:
    """Returns chunks, each by the least id that a row of it can have, and how many rows have not left them."""
    start = keys.head + after[:CHUNK_BYTES] + b"\0" if after else keys.head
    stop = end_of(keys.head) if until is None else keys.head + until[:CHUNK_BYTES] + b"\0"
    found = []
    for key, value in txn.scan(start, stop, HEADS_MAX):
        head = decode_head(value)
        left = sum(block.count - block.taken for block in head.blocks) if head.version else 0
        found.append((key[len(keys.head) :] + _FIRST_TAIL, left))
    return found


def _chunk_id(chunk: tuple[bytes, int]) -> bytes:
    return chunk[0]
