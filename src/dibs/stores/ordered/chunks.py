"""Chunks of loads: rows that have no records of their own yet.

A chunk is two records: its rows, which are never rewritten, and a head that says which blocks they form, whether a
commit named them, and how many of each block have left. From its commit until it leaves its block, a row *is* the task
that :meth:`Chunk.state` and :meth:`Chunk.body` make of it, everywhere: the records that it then gets are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct

from dibs.ids import CHUNK_BYTES, slot_of
from dibs.stores.ordered.engine import ReadTxn
from dibs.stores.ordered.keys import (
    KIND_BLOCK,
    TenantKeys,
    block_name,
    delayed_rank,
    end_of,
    id_of,
    parse_block_name,
    queue_keys,
    ready_ranks,
)
from dibs.stores.ordered.new import body_of, new_state
from dibs.stores.ordered.records import (
    DELAYED,
    FROM_COMMIT,
    NO_WAIT,
    READY,
    TAIL_BYTES,
    Block,
    Body,
    Head,
    RunRows,
    State,
    StoredRows,
    decode_head,
    decode_rows,
)
from dibs.task import NewTask, QueueConfig

#: So many chunks are kept in memory once they were read: claims come back to the same one until it is empty.
KEPT_CHUNKS = 32
STEP = 64
_NO_CONFIG = QueueConfig()


class ChunkRows:
    """The rows of a chunk as they were read, and what is found out about them on the way."""

    def __init__(self, stored: StoredRows) -> None:
        self.stored = stored

    @cached_property
    def by_tail(self) -> dict[bytes, int]:
        """Which row has an id that ends so."""
        tails = self.stored.tails
        return {tails[row * TAIL_BYTES : (row + 1) * TAIL_BYTES]: row for row in range(len(self.stored.payloads))}

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """Each row's block, and its turn in it."""
        return {
            row: (number, turn) for number, block in enumerate(self.stored.blocks) for turn, row in enumerate(block)
        }


class Chunk:
    """A committed chunk: what its rows are while they have no records of their own."""

    def __init__(self, tenant: TenantKeys, head: Head, rows: ChunkRows) -> None:
        self.tenant = tenant
        self.head = head
        self.rows = rows
        self._templates: dict[tuple[int, int], State] = {}

    @property
    def name(self) -> bytes:
        """The first bytes of its id, which its rows share."""
        return self.head.chunk_id[:CHUNK_BYTES]

    def turns(self, number: int, start: int, stop: int) -> list[int]:
        """Returns the rows of a block whose turn is from `start` up to `stop`."""
        blocks = self.rows.stored.blocks
        return blocks[number][start:stop] if blocks else list(range(start, min(stop, self.head.blocks[number].count)))

    def left(self, number: int) -> list[int]:
        """Returns the rows of a block that have not left, in their order."""
        head, block = self.head, self.head.blocks[number]
        rows = self.turns(number, block.taken, block.count)
        return [row for row in rows if not head.is_out(row)] if head.out else rows

    def id(self, row: int) -> bytes:
        """Returns a row's id."""
        return RunRows(self.head.chunk_id, 0, self.rows.stored.tails).id(row)

    def options(self, row: int) -> NewTask:
        """Returns what a row says beyond payload and key."""
        return self.rows.stored.options[self._kind(row)]

    def key(self, row: int) -> str | None:
        """Returns a row's deduplication key."""
        keys = self.rows.stored.keys
        return keys[row] if keys else None

    def body(self, row: int) -> Body:
        """Returns a row's body."""
        return body_of(self.options(row), self.rows.stored.payloads[row], self.key(row))

    def state(self, number: int, row: int) -> State:
        """Returns the state that a row of a block is in: pending where the block stands. It holds no key yet."""
        head, block = self.head, self.head.blocks[number]
        state = copy.copy(self._template(number, self._kind(row)))
        state.size = len(self.rows.stored.payloads[row])
        if block.wait == NO_WAIT:
            state.rank = ready_ranks(state.priority, head.version, (head.base + row,))[0]
        else:
            state.due_ms = due_ms(head, block, self.rows.stored.dues[row])
            state.rank = delayed_rank(state.due_ms)
        return state

    def _kind(self, row: int) -> int:
        kinds = self.rows.stored.kinds
        return kinds[row] if kinds else 0

    def _template(self, number: int, kind: int) -> State:
        """What the rows of a block with the same options have in common."""
        template = self._templates.get((number, kind))
        if template is None:
            block, at_ms = self.head.blocks[number], self.head.at_ms
            place = READY if block.wait == NO_WAIT else DELAYED
            template = new_state(
                block.config or _NO_CONFIG, self.rows.stored.options[kind], b"", at_ms, place, b"", at_ms
            )
            self._templates[(number, kind)] = template
        return template


class Row(Struct, frozen=True):
    """A row that has not left its block."""

    chunk: Chunk
    block: int
    row: int

    def state(self) -> State:
        """Returns the state it is in."""
        return self.chunk.state(self.block, self.row)

    def body(self) -> Body:
        """Returns its body."""
        return self.chunk.body(self.row)


def due_ms(head: Head, block: Block, due: int) -> int:
    """Returns when something of a delayed block is due."""
    return head.at_ms + due if block.wait == FROM_COMMIT else due


def block_rank(head: Head, block: Block) -> bytes:
    """Where a block of a committed chunk stands in its place: where its next row does."""
    if block.wait == NO_WAIT:
        return ready_ranks(block.priority or 0, head.version, (head.base + block.next,), KIND_BLOCK)[0]
    return delayed_rank(due_ms(head, block, block.due), KIND_BLOCK)


def block_entry(tenant: TenantKeys, head: Head, number: int) -> bytes:
    """The key by which a block that is not empty stands in its place."""
    block = head.blocks[number]
    queue = queue_keys(tenant.name, block.command)
    prefix = queue.ready if block.wait == NO_WAIT else queue.delayed
    return prefix + block_rank(head, block) + block_name(head.chunk_id[:CHUNK_BYTES], number)


def read_head(txn: ReadTxn, tenant: TenantKeys, chunk: bytes) -> Head | None:
    """Returns the head of a chunk, committed or not."""
    stored = txn.get(tenant.head + chunk)
    return None if stored is None else decode_head(stored)


def read_chunk(txn: ReadTxn, tenant: TenantKeys, head: Head) -> Chunk:
    """Returns a chunk whose head was read."""
    key = tenant.chunk + head.chunk_id[:CHUNK_BYTES]
    kept = key + head.nonce
    rows = txn.memory.get(kept)
    if rows is None:
        # Rows that are missing cannot be read either: no bytes decode to nothing.
        rows = ChunkRows(decode_rows(txn.get(key) or b""))
        if len(txn.memory) >= KEPT_CHUNKS:
            txn.memory.clear()
        txn.memory[kept] = rows
    return Chunk(tenant, head, rows)


def block_of(txn: ReadTxn, tenant: TenantKeys, entry: bytes) -> tuple[Chunk, int] | None:
    """Returns the block that an entry names, if its chunk names the entry."""
    name, number = parse_block_name(id_of(entry))
    head = read_head(txn, tenant, name)
    if head is None or not stands(tenant, head, number, entry):
        return None
    return read_chunk(txn, tenant, head), number


def stands(tenant: TenantKeys, head: Head, number: int, entry: bytes) -> bool:
    """Whether a block stands where an entry says."""
    if not head.version or number >= len(head.blocks):
        return False
    return head.blocks[number].taken < head.blocks[number].count and block_entry(tenant, head, number) == entry


def find_row(txn: ReadTxn, tenant: TenantKeys, task_id: bytes) -> Row | None:
    """Returns the row that an id names: committed, and not out of its block."""
    head = read_head(txn, tenant, task_id[:CHUNK_BYTES])
    if head is None or not head.version:
        return None
    chunk = read_chunk(txn, tenant, head)
    row = _row_of(chunk, task_id[CHUNK_BYTES:])
    if row is None or head.is_out(row):
        return None
    number, turn = chunk.rows.where[row] if chunk.rows.stored.blocks else (0, row)
    return Row(chunk, number, row) if turn >= head.blocks[number].taken else None


def _row_of(chunk: Chunk, tail: bytes) -> int | None:
    if chunk.rows.stored.tails:
        return chunk.rows.by_tail.get(tail)
    row = int.from_bytes(tail[:-1], "big")
    return row if row < len(chunk.rows.stored.payloads) and tail[-1] == slot_of(chunk.head.chunk_id) else None


def committed_chunks(
    txn: ReadTxn, tenant: TenantKeys, start: bytes = b"", until: bytes | None = None
) -> Iterator[Chunk]:
    """Yields the chunks with rows that have not left, in the order of their names: from one on, up to the last that can
    have ids before `until`."""
    key, stop = tenant.head + start, end_of(tenant.head)
    if until is not None:
        stop = tenant.head + until.removesuffix(bytes(TAIL_BYTES))
    while step := txn.scan(key, stop, STEP):
        for _, value in step:
            head = decode_head(value)
            if head.version:
                yield read_chunk(txn, tenant, head)
        key = step[-1][0] + b"\0"


def rows_left(chunk: Chunk) -> list[tuple[bytes, Row]]:
    """Returns the rows of a chunk that have not left, with their ids, in the order of those."""
    found = [
        (chunk.id(row), Row(chunk, number, row))
        for number in range(len(chunk.head.blocks))
        for row in chunk.left(number)
    ]
    return sorted(found, key=lambda one: one[0])
