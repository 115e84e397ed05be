"""Looking at the store: tasks, listings, counts. Nothing here writes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from msgspec.structs import replace

from dibs.errors import InvalidCursor
from dibs.ids import key_digest
from dibs.stores.ordered.engine import ReadTxn
from dibs.stores.ordered.keys import (
    AFTER_SEPARATOR,
    SEPARATOR,
    QueueKeys,
    TenantKeys,
    end_of,
    from_count,
    id_of,
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
_NO_RESULT = StoredResult(None, "json", None)
_GONE_BODY = Body("", b"", "raw", None, 0, 0, None, None, 1)


def resolve(txn: ReadTxn, tenant: str, ref: TaskRef) -> bytes | None:
    """Returns the id that `ref` names, if anything has that key."""
    if isinstance(ref, ByKey):
        return txn.get(queue_keys(tenant, ref.command).key + key_digest(tenant, ref.command, ref.key))
    return ref


def live_state(txn: ReadTxn, tenant: TenantKeys, task_id: bytes | None) -> State | None:
    """Returns the state of a task that exists: one whose retention is over does not, swept or not."""
    stored = None if task_id is None else txn.get(tenant.state + task_id)
    if stored is None:
        return None
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


def result_of(txn: ReadTxn, tenant: TenantKeys, task_id: bytes, state: State) -> Result | None:
    """Returns the result slot of an ended task, while it is kept."""
    if not state.ended() or state.result_until_ms <= txn.now_ms:
        return None
    stored = stored_result(txn, tenant, task_id, state) or _NO_RESULT
    return Result(STATUSES[state.status], stored.data, stored.codec, stored.error, state.reason or None)


def _task(txn: ReadTxn, tenant: TenantKeys, task_id: bytes, state: State) -> Task:
    stored_body = txn.get(tenant.body + task_id)
    body = _GONE_BODY if stored_body is None else decode_body(stored_body)
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
    )


# ---------------------------------------------------------------------------------------------------- listings


def list_page(txn: ReadTxn, tenant: str, which: Filter, cursor: str | None, limit: int) -> Page:
    """Returns a page of tasks: in the order of their place where the filter names queue and place, else by id."""
    keys = tenant_keys(tenant)
    tasks: list[Task] = []
    size = 0
    ids, cursor = matching_ids(txn, tenant, which, cursor, limit)
    for index, (task_id, state) in enumerate(ids):
        tasks.append(_task(txn, keys, task_id, state))
        size += state.size
        if size > PAGE_MAX_BYTES and index + 1 < len(ids):
            return Page(tasks, _encode_cursor(_entry_key(tenant, which, task_id, state)))
    return Page(tasks, cursor)


def matching_ids(
    txn: ReadTxn, tenant: str, which: Filter, cursor: str | None, limit: int
) -> tuple[list[tuple[bytes, State]], str | None]:
    """Returns at most `limit` tasks that match, and where to go on; examines a bounded number."""
    keys = tenant_keys(tenant)
    prefix, then = _indexes(tenant, which)
    start = prefix
    if cursor is not None:
        start = _decode_cursor(cursor, prefix, then)
        if then and start.startswith(then):
            prefix, then = then, b""
    found: list[tuple[bytes, State]] = []
    examined = 0
    while examined < EXAMINED_MAX:
        step = txn.scan_keys(start, end_of(prefix), STEP)
        for key in step:
            task_id = id_of(key)
            state = live_state(txn, keys, task_id)
            if state is not None and _matches(which, state):
                found.append((task_id, state))
                if len(found) == limit:
                    return found, _encode_cursor(key)
        if len(step) < STEP:
            return found, _encode_cursor(then) if then and txn.scan_keys(then, end_of(then), 1) else None
        examined += len(step)
        start = step[-1] + b"\0"
    return found, _encode_cursor(start[:-1])


def _indexes(tenant: str, which: Filter) -> tuple[bytes, bytes]:
    """The narrowest index that holds everything the filter can match, and one that follows it, if any: the parked
    tasks of a queue are listed after those that stand in it."""
    place = _place(which)
    if which.command is not None and place is not None and place is not Place.NONE:
        queue = queue_keys(tenant, which.command)
        return queue.of_place[PLACES.index(place)], queue.parked if place is Place.READY else b""
    return tenant_keys(tenant).state, b""


def _place(which: Filter) -> Place | None:
    if which.place is not None:
        return which.place
    return {Status.IN_PROGRESS: Place.LEASED, Status.FAILED: Place.DEAD}.get(which.status) if which.status else None


def _entry_key(tenant: str, which: Filter, task_id: bytes, state: State) -> bytes:
    prefix, _ = _indexes(tenant, which)
    if prefix == tenant_keys(tenant).state:
        return prefix + task_id
    return queue_keys(tenant, state.command).of_place[state.place] + state.rank + task_id


def _matches(which: Filter, state: State) -> bool:
    return (
        (which.command is None or state.command == which.command)
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


def _encode_cursor(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).decode()


def _decode_cursor(cursor: str, *prefixes: bytes) -> bytes:
    """Returns where to go on; a cursor of another listing, or tenant, is refused."""
    try:
        key = base64.urlsafe_b64decode(cursor.encode("ascii"))
    except (binascii.Error, ValueError, AttributeError) as error:
        raise InvalidCursor("this is not a cursor of a listing: start again without one") from error
    if not key.startswith(tuple(prefix for prefix in prefixes if prefix)):
        raise InvalidCursor("this cursor is of another listing: start again without one")
    return key + b"\0"


# ------------------------------------------------------------------------------------------- queues and workers


def stats(txn: ReadTxn, tenant: str, commands: Sequence[str] | None) -> Stats:
    """Returns the counters, which are exact."""
    keys = tenant_keys(tenant)
    counts: dict[str, dict[str, int]] = {}
    for key, value in _counters(txn, keys, commands):
        command, _, field = key[len(keys.counters) :].partition(SEPARATOR)
        counts.setdefault(command.decode(), {})[field.decode()] = from_count(value)
    whole = _config(txn, queue_keys(tenant, ALL_COMMANDS))
    total = replace(_counted("", counts.pop("", {})), paused=whole.paused, limits=whole.limits)
    names = sorted({*counts, *_configured(txn, keys)}) if commands is None else commands
    return Stats(total, [_queue_stats(txn, queue_keys(tenant, name), counts.get(name, {})) for name in names])


def _configured(txn: ReadTxn, keys: TenantKeys) -> list[str]:
    """Returns the queues that somebody paused or gave defaults, with tasks or without."""
    names = (key[len(keys.configs) :].decode() for key, _ in _scan_all(txn, keys.configs))
    return [name for name in names if name != ALL_COMMANDS]


def _counters(txn: ReadTxn, keys: TenantKeys, commands: Sequence[str] | None) -> list[tuple[bytes, bytes]]:
    if commands is None:
        return _scan_all(txn, keys.counters)
    wanted = list(keys.totals)
    for command in commands:
        wanted += queue_keys(keys.name, command).counters
    return [(key, value) for key, value in zip(wanted, txn.get_many(wanted), strict=True) if value is not None]


def _queue_stats(txn: ReadTxn, queue: QueueKeys, counts: dict[str, int]) -> QueueStats:
    # Where all that is ready is parked, the first of those has waited as long as any of its key.
    head = txn.scan_keys(queue.ready, end_of(queue.ready), 1) or txn.scan_keys(queue.parked, end_of(queue.parked), 1)
    state = live_state(txn, queue.tenant, id_of(head[0])) if head else None
    config = _config(txn, queue)
    return replace(
        _counted(queue.command, counts),
        paused=config.paused,
        oldest_ready_ms=None if state is None else state.due_ms,
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


def workers(txn: ReadTxn, tenant: str) -> list[WorkerInfo]:
    """Returns the workers whose registration has not run out."""
    stored = [decode_worker(value) for _, value in _scan_all(txn, tenant_keys(tenant).worker)]
    return [worker.info for worker in stored if worker.expires_ms > txn.now_ms]


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


def _scan_all(txn: ReadTxn, prefix: bytes) -> list[tuple[bytes, bytes]]:
    items: list[tuple[bytes, bytes]] = []
    start = prefix
    while step := txn.scan(start, end_of(prefix), STEP):
        items += step
        start = step[-1][0] + b"\0"
    return items
