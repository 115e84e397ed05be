"""Looking at the store: tasks, listings, counts. Nothing here writes."""

from __future__ import annotations

import base64
import binascii
import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from msgspec import Struct
from msgspec.structs import replace

from dibs.errors import InvalidCursor
from dibs.ids import CHUNK_BYTES, ID_BYTES, key_digest
from dibs.stores.ordered.chunks import Chunk, block_of, committed_chunks, find_row, rows_left
from dibs.stores.ordered.engine import ReadTxn
from dibs.stores.ordered.keys import (
    AFTER_SEPARATOR,
    KIND_BLOCK,
    KIND_TASK,
    SEPARATOR,
    QueueKeys,
    TenantKeys,
    end_of,
    from_count,
    id_of,
    names_block,
    queue_keys,
    tenant_keys,
)
from dibs.stores.ordered.records import (
    IN_PROGRESS,
    PLACES,
    STATUSES,
    Body,
    State,
    StoredResult,
    decode_body,
    decode_config,
    decode_state,
    decode_worker,
)
from dibs.stores.ordered.work import stored_result
from dibs.task import (
    ALL_COMMANDS,
    ByKey,
    Filter,
    Page,
    Place,
    QueueConfig,
    QueueStats,
    Result,
    Stats,
    Status,
    Task,
    TaskRef,
    TenantPage,
    WorkerInfo,
)

EXAMINED_MAX = 5_000
PAGE_MAX_BYTES = 4 << 20
STEP = 200
_TURN_BYTES = 2
_ALL = ALL_COMMANDS.encode()
_NO_RESULT = StoredResult(None, "json", None)
_GONE_BODY = Body("", b"", "raw", None, 0, 0, None, None, 1)


def resolve(txn: ReadTxn, tenant: str, ref: TaskRef) -> bytes | None:
    """Returns the id that `ref` names, if anything has that key."""
    if isinstance(ref, ByKey):
        return txn.get(queue_keys(tenant, ref.command).key + key_digest(tenant, ref.command, ref.key))
    return ref


def live_state(txn: ReadTxn, tenant: TenantKeys, task_id: bytes | None) -> State | None:
    """Returns the state of a task that exists: one whose retention is over does not, swept or not."""
    if task_id is None:
        return None
    stored = txn.get(tenant.state + task_id)
    if stored is None:
        row = find_row(txn, tenant, task_id)
        return None if row is None else row.state()
    state = decode_state(stored)
    return None if state.gone(txn.now_ms) else state


def get(txn: ReadTxn, tenant: str, refs: Sequence[TaskRef]) -> list[Task | None]:
    """Returns tasks as they stand."""
    keys = tenant_keys(tenant)
    tasks: list[Task | None] = []
    for ref in refs:
        task_id = resolve(txn, tenant, ref)
        state = live_state(txn, keys, task_id)
        tasks.append(None if state is None or task_id is None else _task(txn, keys, task_id, state))
    return tasks


def held(txn: ReadTxn, tenant: str, ids: Sequence[bytes], worker: str) -> list[bytes | None]:
    """Returns the tokens of the leases that a worker holds."""
    keys = tenant_keys(tenant)
    states = [live_state(txn, keys, task_id) for task_id in ids]
    return [state.token or None if state is not None and state.worker == worker else None for state in states]


def result_of(txn: ReadTxn, tenant: TenantKeys, task_id: bytes, state: State) -> Result | None:
    """Returns the result slot of an ended task, while it is kept."""
    if not state.ended() or state.result_until_ms <= txn.now_ms:
        return None
    stored = stored_result(txn, tenant, task_id, state) or _NO_RESULT
    return Result(STATUSES[state.status], stored.data, stored.codec, stored.error, state.reason or None)


def _task(txn: ReadTxn, tenant: TenantKeys, task_id: bytes, state: State) -> Task:
    body = _body(txn, tenant, task_id)
    return Task(
        tenant=tenant.name,
        id=task_id,
        command=state.command,
        status=STATUSES[state.status],
        place=PLACES[state.place],
        priority=state.priority,
        attempts=state.attempts,
        max_attempts=state.max_attempts,
        releases=state.releases,
        payload=body.payload,
        codec=body.codec,
        enqueued_ms=state.enqueued_ms,
        due_ms=state.due_ms,
        key=body.key,
        worker=state.worker or None,
        lease_end_ms=state.lease_end_ms() if state.status == IN_PROGRESS else None,
        cancel_requested=state.cancel,
        expires_ms=state.expires_ms or None,
        ended_ms=state.ended_ms or None,
        kept_until_ms=state.kept_until_ms or None,
        result=result_of(txn, tenant, task_id, state),
        reason=state.reason or None,
        error=(stored_result(txn, tenant, task_id, state) or _NO_RESULT).error,
        progress=state.progress,
        timeout_s=body.timeout_ms / 1000 if body.timeout_ms else None,
        traceparent=body.traceparent,
        limit_key=body.limit_key,
        limit_cost=body.limit_cost,
    )


def _body(txn: ReadTxn, tenant: TenantKeys, task_id: bytes) -> Body:
    stored = txn.get(tenant.body + task_id)
    if stored is not None:
        return decode_body(stored)
    row = find_row(txn, tenant, task_id)
    return _GONE_BODY if row is None else row.body()


# ---------------------------------------------------------------------------------------------------- listings


class Seen(Struct, frozen=True):
    """A task met by a listing, and after what to go on: its entry, or its block's entry and its turn in that."""

    id: bytes
    state: State
    entry: bytes
    turn: int | None = None

    def cursor(self) -> str:
        """Where a listing goes on that ended here."""
        kind = KIND_TASK if self.turn is None else KIND_BLOCK + self.turn.to_bytes(_TURN_BYTES, "big")
        return base64.urlsafe_b64encode(kind + self.entry).decode()


def list_page(txn: ReadTxn, tenant: str, which: Filter, cursor: str | None, limit: int) -> Page:
    """Returns a page of tasks: in the order of their place where the filter names queue and place, else by id."""
    keys = tenant_keys(tenant)
    tasks: list[Task] = []
    size = 0
    found, cursor = matching(txn, tenant, which, cursor, limit)
    for index, seen in enumerate(found):
        tasks.append(_task(txn, keys, seen.id, seen.state))
        size += seen.state.size
        if size > PAGE_MAX_BYTES and index + 1 < len(found):
            return Page(tasks, seen.cursor())
    return Page(tasks, cursor)


def matching(txn: ReadTxn, tenant: str, which: Filter, cursor: str | None, limit: int) -> tuple[list[Seen], str | None]:
    """Returns at most `limit` tasks that match, and where to go on; examines a bounded number."""
    indexes = _indexes(tenant, which)
    after, turn = (None, None) if cursor is None else _decode_cursor(cursor, indexes)
    keys = tenant_keys(tenant)
    by_id = indexes[0] == keys.state
    met = _by_id(txn, keys, which, after) if by_id else _by_places(txn, keys, indexes, after, turn)
    found: list[Seen] = []
    for examined, seen in enumerate(met, start=1):
        if not seen.state.gone(txn.now_ms) and _matches(which, seen.id, seen.state):
            found.append(seen)
            if len(found) == limit:
                return found, seen.cursor()
        if examined == EXAMINED_MAX:
            return found, seen.cursor()
    return found, None


def _by_id(txn: ReadTxn, tenant: TenantKeys, which: Filter, after: bytes | None) -> Iterator[Seen]:
    """Yields the tasks of the filter's range in the order of their ids: those with a state of their own, and the rows
    of loads that have not got one yet."""
    until = which.id_until
    first = max(which.id_from or b"", b"" if after is None else id_of(after) + b"\0")
    stop = end_of(tenant.state) if until is None else tenant.state + until
    states = (Seen(id_of(key), decode_state(value), key) for key, value in _items(txn, tenant.state + first, stop))
    if which.status not in (None, Status.PENDING) or which.place not in (None, Place.READY, Place.DELAYED):
        return states
    rows = (
        Seen(task_id, row.state(), tenant.state + task_id)
        for chunk in committed_chunks(txn, tenant, first[:CHUNK_BYTES], until)
        for task_id, row in rows_left(chunk)
        if task_id >= first and (until is None or task_id < until)
    )
    return heapq.merge(states, rows, key=lambda seen: seen.id)


def _by_places(
    txn: ReadTxn, tenant: TenantKeys, prefixes: Sequence[bytes], after: bytes | None, turn: int | None
) -> Iterator[Seen]:
    """Yields the tasks of places one after the other, from the one on that an entry is in."""
    for prefix in prefixes:
        if after is None:
            yield from _by_place(txn, tenant, prefix)
        elif after.startswith(prefix):
            yield from _by_place(txn, tenant, prefix, after, turn)
            after = None


def _by_place(
    txn: ReadTxn, tenant: TenantKeys, prefix: bytes, after: bytes | None = None, turn: int | None = None
) -> Iterator[Seen]:
    """Yields the tasks of a place in its order, after an entry, or after a turn of the block that had it; the rows of
    a block stand together, where the block stands."""
    start = prefix if after is None else after if turn is not None else after + b"\0"
    for key in _keys(txn, prefix, start):
        name = id_of(key)
        if names_block(tenant, key):
            found = block_of(txn, tenant, key)
            # The block may have moved since: it is known by its name.
            first = turn + 1 if turn is not None and after is not None and id_of(after) == name else 0
            yield from () if found is None else _of_block(*found, key, first)
        else:
            state = live_state(txn, tenant, name)
            if state is not None:
                yield Seen(name, state, key)


def _of_block(chunk: Chunk, number: int, key: bytes, first: int) -> Iterator[Seen]:
    """Yields the rows of a block from a turn on."""
    block = chunk.head.blocks[number]
    start = max(first, block.taken)
    for turn, row in enumerate(chunk.turns(number, start, block.count), start=start):
        if not chunk.head.is_out(row):
            yield Seen(chunk.id(row), chunk.state(number, row), key, turn)


def _indexes(tenant: str, which: Filter) -> Sequence[bytes]:
    """The narrowest indexes that hold everything the filter can match: the parked tasks of a queue are listed after
    those that stand in it."""
    place = _place(which)
    if which.command is not None and place is not None and place is not Place.NONE:
        queue = queue_keys(tenant, which.command)
        return (queue.ready, queue.parked) if place is Place.READY else (queue.of_place[PLACES.index(place)],)
    return (tenant_keys(tenant).state,)


def _place(which: Filter) -> Place | None:
    if which.place is not None:
        return which.place
    return {Status.IN_PROGRESS: Place.LEASED, Status.FAILED: Place.DEAD}.get(which.status) if which.status else None


def _matches(which: Filter, task_id: bytes, state: State) -> bool:
    return (
        (which.id_from is None or which.id_from <= task_id)
        and (which.id_until is None or task_id < which.id_until)
        and (which.command is None or state.command == which.command)
        and (which.status is None or STATUSES[state.status] is which.status)
        and (which.place is None or PLACES[state.place] is which.place)
        and (which.reason is None or state.reason == which.reason)
        and (which.worker is None or state.worker == which.worker)
        and _within(state.enqueued_ms, which.enqueued_from_ms, which.enqueued_until_ms)
        and _within(state.ended_ms, which.ended_from_ms, which.ended_until_ms)
    )


def _within(at_ms: int, from_ms: int | None, until_ms: int | None) -> bool:
    """Whether something that happened (0: has not) did so within the bounds, if there are any."""
    if from_ms is None and until_ms is None:
        return True
    return at_ms > 0 and (from_ms is None or from_ms <= at_ms) and (until_ms is None or at_ms < until_ms)


def _decode_cursor(cursor: str, prefixes: Sequence[bytes]) -> tuple[bytes, int | None]:
    """Returns after which entry, and which turn of a block, to go on; a cursor of another listing, or tenant, is
    refused."""
    try:
        data = base64.urlsafe_b64decode(cursor.encode("ascii"))
    except (binascii.Error, ValueError, AttributeError) as error:
        raise InvalidCursor("this is not a cursor of a listing: start again without one") from error
    turn_end = 1 + _TURN_BYTES if data[:1] == KIND_BLOCK else 1
    entry = data[turn_end:]
    known = [prefix for prefix in prefixes if entry.startswith(prefix) and len(entry) >= len(prefix) + ID_BYTES]
    if data[:1] not in (KIND_TASK, KIND_BLOCK) or not known:
        raise InvalidCursor("this cursor is of another listing: start again without one")
    return entry, int.from_bytes(data[1:turn_end], "big") if turn_end > 1 else None


# ------------------------------------------------------------------------------------------- queues and workers


def stats(txn: ReadTxn, tenant: str, commands: Sequence[str]) -> Stats:
    """Returns the counters, which are exact, of the tenant and of these queues."""
    keys = tenant_keys(tenant)
    counts: dict[str, dict[str, int]] = {}
    for key, value in _counters(txn, keys, commands):
        command, _, field = key[len(keys.counters) :].partition(SEPARATOR)
        counts.setdefault(command.decode(), {})[field.decode()] = from_count(value)
    whole = _config(txn, queue_keys(tenant, ALL_COMMANDS))
    total = replace(_counted("", counts.pop("", {})), paused=whole.paused, limits=whole.limits)
    return Stats(total, [_queue_stats(txn, queue_keys(tenant, name), counts.get(name, {})) for name in commands])


def queue_names(txn: ReadTxn, tenant: str, after: str, limit: int) -> list[str]:
    """Returns at most `limit` queues in order of name, those that come after one: what has tasks, or had them, or was
    configured."""
    keys = tenant_keys(tenant)
    start = keys.counters + after.encode() + AFTER_SEPARATOR
    counted = (key[len(keys.counters) :].partition(SEPARATOR)[0] for key in _keys(txn, keys.counters, start))
    configured = (key[len(keys.configs) :] for key in _keys(txn, keys.configs, keys.configs + after.encode() + b"\0"))
    merged = (name for name, _ in groupby(heapq.merge(counted, configured)))
    return [name.decode() for name in islice((name for name in merged if name != _ALL), limit)]


def _counters(txn: ReadTxn, keys: TenantKeys, commands: Sequence[str]) -> list[tuple[bytes, bytes]]:
    wanted = list(keys.totals)
    for command in commands:
        wanted += queue_keys(keys.name, command).counters
    return [(key, value) for key, value in zip(wanted, txn.get_many(wanted), strict=True) if value is not None]


def _queue_stats(txn: ReadTxn, queue: QueueKeys, counts: dict[str, int]) -> QueueStats:
    # Where all that is ready is parked, the first of those has waited as long as any of its key.
    head = next(_by_places(txn, queue.tenant, (queue.ready, queue.parked), None, None), None)
    config = _config(txn, queue)
    return replace(
        _counted(queue.command, counts),
        paused=config.paused,
        oldest_ready_ms=None if head is None else head.state.due_ms,
        limits=config.limits,
    )


def _config(txn: ReadTxn, queue: QueueKeys) -> QueueConfig:
    stored = txn.get(queue.config)
    return QueueConfig() if stored is None else decode_config(stored)


def _counted(command: str, counts: dict[str, int]) -> QueueStats:
    return QueueStats(
        command=command,
        ready=counts.get("ready", 0),
        delayed=counts.get("delayed", 0),
        leased=counts.get("leased", 0),
        dead=counts.get("dead", 0),
        bytes=counts.get("bytes", 0),
    )


def workers(txn: ReadTxn, tenant: str, after: bytes | None) -> tuple[list[WorkerInfo], bytes | None]:
    """Returns workers whose registration has not run out, from some of the entries after one, and the last entry that
    was looked at; None: there are no more."""
    prefix = tenant_keys(tenant).worker
    found = txn.scan(prefix if after is None else after + b"\0", end_of(prefix), STEP)
    stored = [decode_worker(value) for _, value in found]
    alive = [worker.info for worker in stored if worker.expires_ms > txn.now_ms]
    return alive, found[-1][0] if len(found) == STEP else None


def tenants(txn: ReadTxn, cursor: str | None, limit: int) -> TenantPage:
    """Returns tenants by skipping from one to the next; the records between are not read."""
    names: list[str] = []
    # Before the digits there is only what claims of all tenants are remembered by.
    start = b"0" if cursor is None else tenant_keys(cursor).last
    while True:
        # Digits sort before the upper-case letters of what belongs to all, lower case after them.
        found = txn.scan_keys(start, b"A", 1) or txn.scan_keys(max(start, b"a"), b"\xff", 1)
        if not found:
            return TenantPage(names)
        if len(names) == limit:
            return TenantPage(names, names[-1])
        name, _, _ = found[0].partition(SEPARATOR)
        names.append(name.decode())
        start = name + AFTER_SEPARATOR


def _items(txn: ReadTxn, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields all records from one key up to another."""
    while step := txn.scan(start, stop, STEP):
        yield from step
        start = step[-1][0] + b"\0"


def _keys(txn: ReadTxn, prefix: bytes, start: bytes) -> Iterator[bytes]:
    """Yields all keys below a prefix, from one on."""
    while step := txn.scan_keys(start, end_of(prefix), STEP):
        yield from step
        start = step[-1] + b"\0"
