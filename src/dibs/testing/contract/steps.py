"""The small steps that tests are written in. Each checks what it takes for granted: a test fails where it breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.batches import row_ids
from dibs.stores.protocol import Store
from dibs.task import (
    Already,
    Committed,
    Enqueued,
    ErrorInfo,
    Event,
    EventKind,
    Filter,
    Kind,
    Lease,
    LeaseLost,
    NewTask,
    Place,
    QueueStats,
    Rejected,
    Settled,
    Settlement,
    Staged,
    Status,
    Swept,
    Task,
)

TENANT = "default"
COMMAND = "work"
LOAD_SLOT = 7
"""The slot of chunks that are made here; the tests of order keep their tasks in the same one."""
BOOM = ErrorInfo("Boom", "it broke")
SOON_S = 10.0
"""Far longer than any wake-up takes, far shorter than the waits of the tests."""
LONG_S = 30.0
"""A wait that must not be sat out."""


async def put(store: Store, command: str = COMMAND, *, tenant: str = TENANT, **options: Any) -> bytes:
    """Enqueues one task that must be new, and returns its id."""
    [outcome] = await store.enqueue(tenant, [NewTask(command=command, **options)])
    assert isinstance(outcome, Enqueued), outcome
    assert not outcome.already
    return outcome.id


async def put_many(
    store: Store, count: int, command: str = COMMAND, *, tenant: str = TENANT, **options: Any
) -> list[bytes]:
    """Enqueues so many tasks in one call, and returns their ids in order."""
    ids = [new_id(tenant, command, limit_key=options.get("limit_key")) for _ in range(count)]
    outcomes = await store.enqueue(tenant, [NewTask(command=command, id=task_id, **options) for task_id in ids])
    assert outcomes == [Enqueued(task_id) for task_id in ids]
    return ids


def some_rows(count: int, command: str = COMMAND, **options: Any) -> list[NewTask]:
    """Returns so many rows for a load; each tells its number by its payload."""
    return [NewTask(command=command, payload=b"%d" % number, **options) for number in range(count)]


async def stage(store: Store, rows: Sequence[NewTask], chunk_id: bytes | None = None, *, tenant: str = TENANT) -> bytes:
    """Stages a chunk that must be new, and returns its id. Chunks made here are in one slot, and so are their rows
    without a key: one shard, where order matters."""
    chunk_id = chunk_id or in_slot(LOAD_SLOT)
    assert await store.stage(tenant, chunk_id, rows) == Staged(len(rows))
    return chunk_id


async def commit(store: Store, *chunk_ids: bytes, tenant: str = TENANT) -> int:
    """Commits a load of its own name, and returns how many rows it has."""
    committed = await store.commit_load(tenant, new_id().hex(), 0, chunk_ids)
    assert not committed.already
    return committed.rows


async def load(store: Store, *chunks: Sequence[NewTask], tenant: str = TENANT) -> list[bytes]:
    """Stages the chunks and commits them as one load; returns the ids of all rows, in their order."""
    staged = [await stage(store, rows, tenant=tenant) for rows in chunks]
    ids = [row for chunk, rows in zip(staged, chunks, strict=True) for row in row_ids(tenant, chunk, rows)]
    assert await store.commit_load(tenant, new_id().hex(), 0, staged) == Committed(len(ids))
    return ids


async def take(store: Store, command: str = COMMAND, *, tenant: str = TENANT, **options: Any) -> Lease:
    """Claims one task, which must be there."""
    leases = await store.claim(tenant, [command], **options)
    assert len(leases) == 1, f"expected one lease, got {len(leases)}"
    return leases[0]


async def take_many(
    store: Store, limit: int, command: str = COMMAND, *, tenant: str = TENANT, **options: Any
) -> list[Lease]:
    """Claims exactly so many tasks in one call."""
    leases = await store.claim(tenant, [command], limit=limit, **options)
    assert len(leases) == limit
    return leases


async def drain(
    store: Store, *commands: str, tenant: str = TENANT, limit: int = 1, lease_s: float | None = None
) -> list[bytes]:
    """Claims until nothing is ready, and returns the ids in the order they came."""
    ids: list[bytes] = []
    while leases := await store.claim(tenant, commands or (COMMAND,), limit=limit, lease_s=lease_s):
        assert len(leases) <= limit
        ids += [lease.id for lease in leases]
    return ids


async def nothing_ready(store: Store, command: str = COMMAND, *, tenant: str = TENANT) -> bool:
    """True if a claim finds nothing."""
    return await store.claim(tenant, [command]) == []


def settlement(lease: Lease, kind: Kind, **fields: Any) -> Settlement:
    """Returns the settlement of a lease."""
    return Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=kind, **fields)


async def settle(store: Store, lease: Lease, kind: Kind, **fields: Any) -> Settled | Already | LeaseLost | Rejected:
    """Settles one lease and returns the answer."""
    [outcome] = await store.settle([settlement(lease, kind, **fields)])
    return outcome


async def complete(store: Store, lease: Lease, result: bytes | None = b"null", **fields: Any) -> None:
    """Completes a lease that must be good."""
    assert await settle(store, lease, Kind.COMPLETE, result=result, **fields) == Settled(Status.COMPLETED)


async def retry(store: Store, lease: Lease, delay_s: float = 0.0) -> None:
    """Retries a task that has attempts left."""
    assert await settle(store, lease, Kind.RETRY, delay_s=delay_s, error=BOOM) == Settled(Status.PENDING)


async def release(store: Store, lease: Lease) -> None:
    """Gives back a lease that must be good."""
    assert await settle(store, lease, Kind.RELEASE) == Settled(Status.PENDING)


async def fail(store: Store, lease: Lease, **fields: Any) -> None:
    """Fails a lease that must be good."""
    assert await settle(store, lease, Kind.FAIL, **{"error": BOOM} | fields) == Settled(Status.FAILED)


async def put_completed(
    store: Store, command: str = COMMAND, *, tenant: str = TENANT, result: bytes | None = b"null", **options: Any
) -> bytes:
    """Makes a completed task in a queue that has nothing else ready."""
    task_id = await put(store, command, tenant=tenant, **options)
    lease = await take(store, command, tenant=tenant)
    assert lease.id == task_id
    await complete(store, lease, result)
    return task_id


async def put_dead(
    store: Store, command: str = COMMAND, *, tenant: str = TENANT, reason: str | None = None, **options: Any
) -> bytes:
    """Makes a dead letter in a queue that has nothing else ready."""
    task_id = await put(store, command, tenant=tenant, **options)
    lease = await take(store, command, tenant=tenant)
    assert lease.id == task_id
    await fail(store, lease, reason=reason)
    return task_id


async def look(store: Store, task_id: bytes, *, tenant: str = TENANT) -> Task:
    """Returns a task that must exist."""
    [task] = await store.get(tenant, [task_id])
    assert task is not None, "no such task"
    assert task.id == task_id
    assert task.tenant == tenant
    return task


async def gone(store: Store, task_id: bytes, *, tenant: str = TENANT) -> bool:
    """True if there is no such task."""
    return await store.get(tenant, [task_id]) == [None]


async def sweep_all(store: Store, budget: int = 1_000) -> Swept:
    """Sweeps until nothing is left to do; returns the sums."""
    total = Swept()
    for _ in range(1_000):
        swept = await store.sweep(budget)
        total = Swept(
            promoted=total.promoted + swept.promoted,
            expired=total.expired + swept.expired,
            cancelled=total.cancelled + swept.cancelled,
            pruned=total.pruned + swept.pruned,
            trimmed=total.trimmed + swept.trimmed,
        )
        if not swept.more:
            return total
    raise AssertionError("the sweep says `more` for ever")


async def pass_time(store: Store, clock: ManualClock, seconds: float) -> Swept:
    """Moves the clock, then sweeps until nothing is left to do."""
    clock.advance(seconds)
    return await sweep_all(store)


async def list_all(store: Store, which: Filter | None = None, *, tenant: str = TENANT, limit: int = 100) -> list[Task]:
    """Lists page after page; every task must come once."""
    tasks: list[Task] = []
    cursor: str | None = None
    for _ in range(10_000):
        page = await store.list(tenant, which, cursor=cursor, limit=limit)
        assert len(page.tasks) <= limit
        tasks += page.tasks
        cursor = page.cursor
        if cursor is None:
            break
    else:
        raise AssertionError("the listing never ends")
    assert len({task.id for task in tasks}) == len(tasks), "a task was listed twice"
    return tasks


async def read_events(store: Store, tenant: str = TENANT, *, limit: int = 1_000) -> list[Event]:
    """Reads the whole journal, shard after shard; one task's events are all in one shard."""
    return [
        event
        for bounds in await store.journal_bounds()
        for event in await read_shard(store, tenant, shard=bounds.shard, limit=limit)
    ]


async def read_shard(
    store: Store, tenant: str = TENANT, *, shard: int = 0, after: bytes | None = None, limit: int = 1_000
) -> list[Event]:
    """Reads one shard's journal to its end."""
    events: list[Event] = []
    while True:
        page = await store.events(tenant, shard=shard, after=after, limit=limit)
        assert len(page.events) <= limit
        events += page.events
        assert page.cursor != after or not page.more, "there is more, but the cursor stands still"
        after = page.cursor
        if not page.more:
            return events


async def kinds_of(store: Store, task_id: bytes, *, tenant: str = TENANT) -> list[EventKind]:
    """Returns what the journal says happened to a task."""
    return [event.kind for event in await read_events(store, tenant) if event.id == task_id]


async def assert_counts(store: Store, *, tenant: str = TENANT) -> QueueStats:
    """The counters, of every queue and of the tenant, say what a listing counts. Returns the tenant's."""
    counted: dict[str, Counter[Place]] = {}
    for task in await list_all(store, tenant=tenant, limit=1_000):
        counted.setdefault(task.command, Counter())[task.place] += 1
    stats = await store.stats(tenant)
    by_command = {queue.command: queue for queue in stats.queues}
    for command in counted.keys() | by_command.keys():
        assert _counts(by_command.get(command, QueueStats(command=command))) == _of(counted.get(command, Counter()))
    assert _counts(stats.total) == _of(sum(counted.values(), Counter()))
    assert stats.total.bytes == sum(queue.bytes for queue in stats.queues)
    assert all(queue.bytes >= 0 for queue in stats.queues)
    return stats.total


def _counts(queue: QueueStats) -> tuple[int, int, int, int]:
    return queue.ready, queue.delayed, queue.leased, queue.dead


def _of(counted: Counter[Place]) -> tuple[int, int, int, int]:
    return counted[Place.READY], counted[Place.DELAYED], counted[Place.LEASED], counted[Place.DEAD]


def in_slot(slot: int) -> bytes:
    """Returns a new id in the given slot."""
    return new_id()[:-1] + bytes((slot,))


def with_token(lease: Lease, token: bytes) -> Lease:
    """Returns the lease as somebody with another token would have it."""
    return replace(lease, token=token)


@asynccontextmanager
async def waiting(*calls: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Runs calls in the background long enough for them to wait; what still waits at the end is cancelled."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.sleep(0.1)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def soon(call: Any) -> Any:
    """Returns what the call answers, which must be long before its own wait is over."""
    async with asyncio.timeout(SOON_S):
        return await call
