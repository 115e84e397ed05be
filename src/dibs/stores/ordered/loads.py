"""Loads: chunks are staged, then one small transaction makes the named ones visible, however many rows they have.

A committed chunk stands in its queues as blocks, and its rows get records of their own when they leave them: in the
order of their block when a claim reaches it, when they fall due or when a start deadline passes; alone when somebody
changes one. Who has a deduplication key is decided then, too.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeGuard

from msgspec import Struct
from msgspec.structs import replace

from dibs.errors import InvalidName, StoreFull, UnknownChunk
from dibs.ids import CHUNK_BYTES, ID_BYTES, id_to_text, key_digest
from dibs.stores.batches import row_ids
from dibs.stores.ordered.chunks import (
    Chunk,
    block_entry,
    block_of,
    due_ms,
    find_row,
    read_head,
)
from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.enqueue import duplicate_of
from dibs.stores.ordered.keys import (
    EXPIRE_BLOCK,
    EXPIRE_CHUNK,
    EXPIRE_LOAD,
    TenantKeys,
    block_name,
    parse_block_name,
    ready_ranks,
    tenant_keys,
)
from dibs.stores.ordered.new import in_ms
from dibs.stores.ordered.records import (
    CANCELLED,
    FROM_COMMIT,
    FROM_EPOCH,
    NO_WAIT,
    TAIL_BYTES,
    Block,
    Body,
    Detail,
    Head,
    RunRows,
    State,
    StoredLoad,
    StoredRows,
    decode_head,
    decode_load,
    encode_body,
    encode_head,
    encode_load,
    encode_rows,
)
from dibs.stores.ordered.work import IS_DELAYED, QueueWork, Work
from dibs.task import Committed, EventKind, NewTask, Reason, Rows, Staged, StagedPart

#: So long a decision may wait for the shard that a part of its chunks is in; looked at so often.
HELD_KEEP_MS = 90 * 86_400_000
HELD_STEP_MS = 86_400_000
FENCE_KEEP_MS = 86_400_000
_NO_LOAD = StoredLoad(-1, 0)
_NONCE_BYTES = 8
_AFTER_ROWS = b"\xff" * (ID_BYTES - CHUNK_BYTES + 1)


class PreparedChunk(Struct, frozen=True):
    """A chunk with everything that can be computed before the transaction."""

    head: Head
    rows: bytes


class Leaving(Struct, frozen=True, gc=False):
    """A row on its way out of its block, to wherever the caller moves it; its body is written."""

    id: bytes
    state: State
    body: Body


class Left(Struct, frozen=True):
    """What came of the next rows of a block."""

    rows: list[Leaving]
    """Those that live on, for the caller to move."""
    ended: int = 0
    """So many have ended instead: too late, or their key is taken."""
    seen: int = 0
    """So many there were, those included that had left before their turn."""


# ------------------------------------------------------------------------------------------------- stage, commit, drop


def prepare_chunk(tenant: str, chunk_id: bytes, rows: Rows, ids: Sequence[bytes] | None, now_ms: int) -> PreparedChunk:
    """Sorts rows into blocks and encodes them, outside the writer. `ids`: if the rows are a part of their chunk."""
    options, payloads = rows.options, rows.payloads
    waits = [_wait(one, now_ms) for one in options]
    alike = len(options) == 1 and waits[0][0] == NO_WAIT
    if ids is None and (rows.bound() or not alike):
        ids = row_ids(tenant, chunk_id, rows)
    tails = b"".join([one[CHUNK_BYTES:] for one in ids]) if ids is not None else b""
    members: list[list[int]] = []
    dues: list[int] = []
    if not payloads:
        blocks = []
    elif alike:
        blocks = [_block(options, waits[0], 0, len(payloads), sum(map(len, payloads)), tails)]
    else:
        blocks, members, dues = _blocks(payloads, options, waits, rows.kinds or [0] * len(payloads), tails)
    head = Head(chunk_id, os.urandom(_NONCE_BYTES), 0, blocks, [])
    stored = StoredRows(payloads, options, rows.kinds, rows.keys, dues, members, tails)
    return PreparedChunk(head, encode_rows(stored))


def stage(txn: Txn, tenant: str, chunk: PreparedChunk, keep_ms: int) -> Staged | None:
    """Stores a chunk for a commit to find; again, in the place of what it held. None: a load that may have decided to
    commit it holds it, with other rows, and nothing changed."""
    keys, head = tenant_keys(tenant), chunk.head
    name = head.chunk_id[:CHUNK_BYTES]
    known = read_head(txn, keys, name)
    if known is not None and known.chunk_id != head.chunk_id:
        raise InvalidName(f"another chunk's id begins like {id_to_text(head.chunk_id)}: mint chunk ids with new_id()")
    count = sum(block.count for block in head.blocks)
    if (known is not None and known.version) or (known is None and _has_tasks(txn, keys, name)):
        return Staged(count, already=True)
    if known is not None and known.holder:
        return Staged(count) if head.content and known.content == head.content else None
    full = txn.full()
    if full is not None:
        raise StoreFull(full)
    work = Work.of(txn)
    head = replace(head, expires_ms=txn.now_ms + keep_ms)
    work.others += ((keys.chunk + name, chunk.rows), (keys.head + name, encode_head(head)))
    work.expire(head.expires_ms, EXPIRE_CHUNK, tenant, head.chunk_id)
    work.flush()
    return Staged(count)


def has_rows(txn: ReadTxn, tenant: str, chunk_id: bytes) -> bool:
    """Whether rows of a chunk are here that were committed: it is not to be staged again."""
    keys, name = tenant_keys(tenant), chunk_id[:CHUNK_BYTES]
    known = read_head(txn, keys, name)
    return bool(known is not None and known.version) or _has_tasks(txn, keys, name)


def staged(txn: ReadTxn, tenant: str, chunk_ids: Sequence[bytes]) -> list[StagedPart | None]:
    """Tells what is there of each chunk that waits for a commit; one that a load holds has not expired."""
    keys = tenant_keys(tenant)
    return [
        _part(head, txn.now_ms)
        if _uncommitted(head, txn, keys) and (head.holder or head.expires_ms > txn.now_ms)
        else None
        for head in _heads(txn, keys, chunk_ids)
    ]


def _part(head: Head, now_ms: int) -> StagedPart:
    return StagedPart(
        sum(block.count for block in head.blocks),
        head.parts,
        head.content,
        head.holder,
        head.hold,
        bool(head.holder) and head.held_until_ms <= now_ms,
    )


def reserve(txn: Txn, tenant: str, chunk_ids: Sequence[bytes], holder: str, hold_ms: int) -> list[StagedPart | None]:
    """`staged`; and if all of the chunks wait for a commit, and no other load holds one, they are kept for this one."""
    parts = staged(txn, tenant, chunk_ids)
    if not all(part is not None and part.holder in ("", holder) for part in parts):
        return parts
    keys = tenant_keys(tenant)
    heads = [head for head in _heads(txn, keys, chunk_ids) if head is not None]
    for head in heads:
        head.holder, head.held_until_ms, head.hold = holder, txn.now_ms + hold_ms, txn.version
        txn.put(keys.head + head.chunk_id[:CHUNK_BYTES], encode_head(head))
    return [_part(head, txn.now_ms) for head in heads]


def release(txn: Txn, tenant: str, holds: Sequence[tuple[bytes, int]]) -> None:
    """Gives back chunks whose holder will not commit them as it has reserved them; a later reservation stands."""
    keys = tenant_keys(tenant)
    for (_, hold), head in zip(holds, _heads(txn, keys, [chunk_id for chunk_id, _ in holds]), strict=True):
        if head is not None and not head.version and head.hold == hold:
            _unhold(head)
            txn.put(keys.head + head.chunk_id[:CHUNK_BYTES], encode_head(head))


def _unhold(head: Head) -> None:
    head.holder, head.held_until_ms, head.hold = "", 0, 0


def commit_load(
    txn: Txn, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], forget_ms: int | None
) -> Committed:
    """Puts the blocks of chunks into their places, in the order given: a few small records for each."""
    keys = tenant_keys(tenant)
    if known_load(txn, keys, name).seq >= seq:
        return Committed(0, already=True)
    heads = _staged_heads(txn, keys, chunk_ids)
    work = Work.of(txn)
    rows = _commit(work, keys, heads, txn.now_ms)
    note_load(work, tenant, name, seq, forget_ms)
    work.flush()
    return Committed(rows)


def commit_chunks(txn: Txn, tenant: str, chunk_ids: Sequence[bytes], at_ms: int) -> None:
    """Commits what is there of chunks whose load is noted elsewhere, in time or not, as of the given time. What is
    committed, or gone, is left alone: doing it again changes nothing."""
    keys = tenant_keys(tenant)
    heads = [head for head in _heads(txn, keys, chunk_ids) if _uncommitted(head, txn, keys)]
    work = Work.of(txn)
    _commit(work, keys, heads, at_ms)
    work.flush()


def note_load(work: Work, tenant: str, name: str, seq: int, forget_ms: int | None) -> None:
    """Notes how far the commits of a name have come."""
    forget_at_ms = 0 if forget_ms is None else work.now_ms + forget_ms
    work.others.append((tenant_keys(tenant).load + name.encode(), encode_load(StoredLoad(seq, forget_at_ms))))
    if forget_at_ms:
        work.expire(forget_at_ms, EXPIRE_LOAD, tenant, name.encode())


def _commit(work: Work, keys: TenantKeys, heads: Sequence[Head], at_ms: int) -> int:
    txn, rows = work.txn, 0
    for head in heads:
        head.version, head.at_ms = txn.version, at_ms
        _unhold(head)
        count = sum(block.count for block in head.blocks)
        head.base = work.numbers(count)
        rows += count
        for number, block in enumerate(head.blocks):
            _put_block(work, keys, head, number, block)
        if count:
            work.others.append((keys.head + head.chunk_id[:CHUNK_BYTES], encode_head(head)))
        else:
            _forget(work, keys, head)
    return rows


def drop(txn: Txn, tenant: str, chunk_ids: Sequence[bytes]) -> int:
    """Forgets chunks that no commit has named, and none is about to."""
    work, keys = Work.of(txn), tenant_keys(tenant)
    dropped = 0
    for head in _heads(txn, keys, list(dict.fromkeys(chunk_ids))):
        if head is not None and not head.version and not head.holder:
            _forget(work, keys, head)
            dropped += 1
    work.flush()
    return dropped


def known_load(txn: ReadTxn, tenant: TenantKeys, name: str) -> StoredLoad:
    """How far the commits of a name have come."""
    stored = txn.get(tenant.load + name.encode())
    load = _NO_LOAD if stored is None else decode_load(stored)
    return _NO_LOAD if 0 < load.forget_ms <= txn.now_ms else load


def raise_fence(work: Work, tenant: str, name: str) -> None:
    """Lets a commit that looked at its load before this know that it is to look again. A load that nobody knew is
    forgotten after a day."""
    keys, load = tenant_keys(tenant), known_load(work.txn, tenant_keys(tenant), name)
    if load.seq < 0 and load.forget_ms == 0:
        load = replace(load, forget_ms=work.now_ms + FENCE_KEEP_MS)
        work.expire(load.forget_ms, EXPIRE_LOAD, tenant, name.encode())
    work.others.append((keys.load + name.encode(), encode_load(replace(load, fence=work.txn.version))))


def _wait(options: NewTask, now_ms: int) -> tuple[int, int]:
    """Returns what a row waits from, and how long or until when."""
    if options.run_at_ms is not None and options.run_at_ms > now_ms:
        return FROM_EPOCH, options.run_at_ms
    delay_ms = in_ms(options.delay_s)
    return (FROM_COMMIT, delay_ms) if delay_ms else (NO_WAIT, 0)


def _blocks(
    payloads: Sequence[bytes],
    options: Sequence[NewTask],
    waits: Sequence[tuple[int, int]],
    kinds: Sequence[int],
    tails: bytes,
) -> tuple[list[Block], list[list[int]], list[int]]:
    """Sorts rows into blocks. Returns them, the rows of each in the order in which they leave, and when each row is
    due."""
    members: dict[tuple[str, int | None, int], list[int]] = {}
    dues = [waits[kind][1] for kind in kinds]
    for row, kind in enumerate(kinds):
        members.setdefault((options[kind].command, options[kind].priority, waits[kind][0]), []).append(row)
    blocks = []
    for some in members.values():
        some.sort(key=dues.__getitem__)
        said = [options[kind] for kind in dict.fromkeys(kinds[row] for row in some)]
        size = sum(len(payloads[row]) for row in some)
        own_tails = b"".join([tails[row * TAIL_BYTES : (row + 1) * TAIL_BYTES] for row in some])
        block = _block(said, waits[kinds[some[0]]], some[0], len(some), size, own_tails)
        if block.wait == FROM_EPOCH and some == sorted(some):
            block.last_due = dues[some[-1]]
        blocks.append(block)
    return blocks, list(members.values()), dues


def _block(said: Sequence[NewTask], wait: tuple[int, int], first: int, count: int, size: int, tails: bytes) -> Block:
    expires_ms = min((in_ms(one.expires_s) for one in said if one.expires_s is not None), default=0)
    return Block(said[0].command, said[0].priority, *wait, first, count, size, expires_ms, tails)


def _heads(txn: ReadTxn, tenant: TenantKeys, chunk_ids: Sequence[bytes]) -> list[Head | None]:
    """Returns the heads of chunks; None: there is no such chunk."""
    stored = txn.get_many([tenant.head + chunk_id[:CHUNK_BYTES] for chunk_id in chunk_ids])
    heads = [None if data is None else decode_head(data) for data in stored]
    return [
        head if head is not None and head.chunk_id == chunk_id else None
        for head, chunk_id in zip(heads, chunk_ids, strict=True)
    ]


def _staged_heads(txn: ReadTxn, tenant: TenantKeys, chunk_ids: Sequence[bytes]) -> list[Head]:
    """Returns the heads of chunks that wait for a commit; without one of them there is none."""
    staged: list[Head] = []
    for chunk_id, head in zip(chunk_ids, _heads(txn, tenant, chunk_ids), strict=True):
        if not _uncommitted(head, txn, tenant) or head.expires_ms <= txn.now_ms:
            raise UnknownChunk(
                f"chunk {id_to_text(chunk_id)} is not staged: it never was, was dropped, has expired or is committed; "
                "nothing of this load was committed"
            )
        staged.append(head)
    return staged


def _uncommitted(head: Head | None, txn: ReadTxn, tenant: TenantKeys) -> TypeGuard[Head]:
    """Whether a chunk is there and was never committed."""
    return head is not None and not head.version and not _has_tasks(txn, tenant, head.chunk_id[:CHUNK_BYTES])


def _has_tasks(txn: ReadTxn, tenant: TenantKeys, name: bytes) -> bool:
    """Whether there are tasks with the ids of a chunk's rows: it was committed before, and all of it has left; or
    somebody else gave them such ids."""
    prefix = tenant.state + name
    return bool(txn.scan_keys(prefix, prefix + _AFTER_ROWS, 1))


def _put_block(work: Work, tenant: TenantKeys, head: Head, number: int, block: Block) -> None:
    queue = work.queue(tenant.name, block.command)
    block.config = queue.own_config()
    if block.priority is None:
        block.priority = queue.config.priority or 0
    if block.wait == FROM_EPOCH and 0 < block.last_due <= head.at_ms:
        block.wait, block.due = NO_WAIT, 0
    at_ms = 0 if block.wait == NO_WAIT else due_ms(head, block, block.due)
    queue.put_block(block_entry(tenant, head, number), block.count, block.size, at_ms)
    rows = RunRows(head.chunk_id, block.count, block.tails)
    work.txn.journal.rows(queue.keys, rows, IS_DELAYED if at_ms else None)
    if block.expires_ms:
        name = block_name(head.chunk_id[:CHUNK_BYTES], number)
        work.expire(head.at_ms + block.expires_ms, EXPIRE_BLOCK, tenant.name, name)


def _forget(work: Work, tenant: TenantKeys, head: Head) -> None:
    name = head.chunk_id[:CHUNK_BYTES]
    work.deletes += (tenant.chunk + name, tenant.head + name)


# ------------------------------------------------------------------------------------------------------ leaving a block


def leave_block(
    queue: QueueWork, entry: bytes, limit: int, *, until_ms: int | None = None, before: bytes | None = None
) -> Left:
    """Takes the next rows out of the block that an entry is about: at most `limit`; of a delayed one those that are due
    by `until_ms`; of a ready one those whose turn comes before that of another entry. What a flush would write has to
    be written."""
    work, tenant = queue.work, queue.tenant
    found = block_of(work.txn, tenant, entry)
    work.deletes.append(entry)
    if found is None:
        return Left([])
    chunk, number = found
    head, block = chunk.head, chunk.head.blocks[number]
    rows = chunk.turns(number, block.taken, block.taken + limit)
    # Rows of another block of this chunk may stand between these: some name the priority that the queue gives.
    if before is not None and not _ready_entry(queue, head, block, rows[-1]) < before:
        rows = rows[: bisect_left(rows, before, key=lambda row: _ready_entry(queue, head, block, row))]
    if until_ms is not None:
        dues = chunk.rows.stored.dues
        rows = [row for row in rows if due_ms(head, block, dues[row]) <= until_ms]
    block.taken += len(rows)
    if block.taken < block.count:
        [block.next] = chunk.turns(number, block.taken, block.taken + 1)
        block.due = chunk.rows.stored.dues[block.next] if block.wait != NO_WAIT else 0
        work.entries.append(block_entry(tenant, head, number))
    if head.done():
        _forget(work, tenant, head)
    else:
        work.txn.put(tenant.head + chunk.name, encode_head(head))
    still_in = [row for row in rows if not head.is_out(row)] if head.out else rows
    leaving = _leave(queue, chunk, number, still_in)
    return Left(leaving, len(still_in) - len(leaving), len(rows))


def _ready_entry(queue: QueueWork, head: Head, block: Block, row: int) -> bytes:
    """Where a row would stand by itself among the ready tasks."""
    return queue.keys.ready + ready_ranks(block.priority or 0, head.version, (head.base + row,))[0]


def leave_alone(work: Work, tenant: str, task_id: bytes) -> None:
    """Gives a row records of its own before its turn, because somebody wants to change it. Nothing if there is no such
    row in a block."""
    found = find_row(work.txn, tenant_keys(tenant), task_id)
    if found is None:
        return
    chunk, head = found.chunk, found.chunk.head
    queue = work.queue(tenant, head.blocks[found.block].command)
    head.put_out(found.row)
    work.txn.put(queue.tenant.head + chunk.name, encode_head(head))
    for row in _leave(queue, chunk, found.block, [found.row], revives=False):
        queue.place(row.id, row.state)
    work.flush()


def expire_block(work: Work, at_ms: int, tenant: str, name: bytes, limit: int) -> Left:
    """Gives rows of a block, one of which has a start deadline that passed, records of their own: what has a deadline
    is then dealt with as any task is."""
    keys = tenant_keys(tenant)
    chunk_name, number = parse_block_name(name)
    head = read_head(work.txn, keys, chunk_name)
    if head is None or not head.version or head.blocks[number].taken == head.blocks[number].count:
        return Left([])
    queue = work.queue(tenant, head.blocks[number].command)
    left = leave_block(queue, block_entry(keys, head, number), limit)
    for row in left.rows:
        queue.place(row.id, row.state)
    if head.blocks[number].taken + left.seen < head.blocks[number].count:
        work.expire(at_ms, EXPIRE_BLOCK, tenant, name)
    return left


def expire_chunk(work: Work, at_ms: int, tenant: str, chunk_id: bytes) -> None:
    """Forgets a chunk that no commit has named in time; one that a load holds is kept for when that load's decision,
    if there is one, can be done here."""
    keys = tenant_keys(tenant)
    [head] = _heads(work.txn, keys, [chunk_id])
    if head is None or head.version or head.expires_ms != at_ms:
        return
    if head.holder and head.held_until_ms + HELD_KEEP_MS > work.now_ms:
        head.expires_ms = work.now_ms + HELD_STEP_MS
        work.txn.put(keys.head + chunk_id[:CHUNK_BYTES], encode_head(head))
        work.expire(head.expires_ms, EXPIRE_CHUNK, tenant, chunk_id)
    else:
        _forget(work, keys, head)


def expire_load(work: Work, at_ms: int, tenant: str, name: bytes) -> None:
    """Forgets the name of a load that was not to be kept for ever."""
    key = tenant_keys(tenant).load + name
    stored = work.txn.get(key)
    if stored is not None and decode_load(stored).forget_ms == at_ms:
        work.deletes.append(key)


def _leave(queue: QueueWork, chunk: Chunk, number: int, rows: Sequence[int], *, revives: bool = True) -> list[Leaving]:
    """Writes the bodies of rows, and ends those that are too late or find their key taken. `revives`: a dead letter
    that has the key of a row is revived, if the row asks for it."""
    work, now_ms = queue.work, queue.work.now_ms
    bodies, prefix = work.bodies, queue.tenant.body
    keyed = bool(chunk.rows.stored.keys)
    put_now: dict[bytes, bytes] = {}
    leaving: list[Leaving] = []
    for row in rows:
        task_id, state, body = chunk.id(row), chunk.state(number, row), chunk.body(row)
        bodies[prefix + task_id] = encode_body(body)
        if state.expires_ms and state.expired_unstarted(now_ms):
            queue.expire_unstarted(task_id, state)
        elif keyed and not _takes_key(
            queue, task_id, state, body.key, chunk.options(row).on_duplicate if revives else "return", put_now
        ):
            queue.end(task_id, state, CANCELLED, Reason.DUPLICATE)
            queue.event(EventKind.CANCELLED, task_id, 0, detail=Detail(Reason.DUPLICATE))
        else:
            leaving.append(Leaving(task_id, state, body))
    return leaving


def _takes_key(
    queue: QueueWork, task_id: bytes, state: State, key: str | None, on_duplicate: str, put_now: dict[bytes, bytes]
) -> bool:
    """Gives a row its deduplication key, unless another task has it. `put_now`: what rows before it took."""
    if key is None:
        return True
    digest = key_digest(queue.tenant.name, queue.keys.command, key)
    if duplicate_of(queue, digest, on_duplicate, put_now.get(digest)) is not None:
        return False
    put_now[digest] = task_id
    state.digest = digest
    queue.work.others.append((queue.keys.key + digest, task_id))
    return True
