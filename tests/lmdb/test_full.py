"""A store that is full takes no new tasks; everything that makes room, or ends work, still goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dibs.clock import ManualClock
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.ordered.store import OrderedStore
from dibs.task import (
    Cancelled,
    Duplicate,
    Enqueued,
    Extended,
    Filter,
    Heartbeat,
    Kind,
    Lease,
    NewTask,
    Rejected,
    Settled,
    Status,
)
from dibs.testing.contract.steps import BOOM, COMMAND, TENANT, assert_counts, put, settlement

MAX_BYTES = 4 << 20
PAYLOAD = b"p" * 6_000


@pytest.fixture
async def small(directory: Path, clock: ManualClock) -> AsyncIterator[OrderedStore]:
    """A store with room for a few hundred tasks."""
    settings = Settings(max_bytes=MAX_BYTES, disk_reserve_bytes=0)
    opened = await open_store(str(directory), clock=clock, settings=settings)
    assert isinstance(opened, OrderedStore)
    yield opened
    await opened.close()


async def fill(store: OrderedStore) -> list[bytes]:
    """Enqueues until one is refused, and returns the ids of the others."""
    ids: list[bytes] = []
    for _ in range(2 * MAX_BYTES // len(PAYLOAD)):
        [outcome] = await store.enqueue(TENANT, [NewTask(command=COMMAND, payload=PAYLOAD)])
        if isinstance(outcome, Rejected):
            assert outcome.code == "store_full"
            return ids
        assert isinstance(outcome, Enqueued)
        ids.append(outcome.id)
    raise AssertionError("the store never got full")


async def claim_all(store: OrderedStore) -> list[Lease]:
    """Claims everything that is ready."""
    return await store.claim(TENANT, [COMMAND], limit=1_000)


async def test_new_tasks_are_refused_and_old_ones_known(small: OrderedStore) -> None:
    """A repeat of an id or of a key is answered as ever: it needs no room."""
    keyed = await put(small, "other", key="k")
    ids = await fill(small)
    assert len(ids) > 100
    outcomes = await small.enqueue(
        TENANT,
        [
            NewTask(command=COMMAND, id=ids[0]),
            NewTask(command="other", key="k"),
            NewTask(command="other", key="new"),
        ],
    )
    assert outcomes[:2] == [Enqueued(ids[0], already=True), Duplicate(keyed, Status.PENDING)]
    assert isinstance(outcomes[2], Rejected)
    assert (await small.stats(TENANT)).total.ready == len(ids) + 1


async def test_everything_can_be_completed_with_results(small: OrderedStore) -> None:
    """Settles and heartbeats are never refused, also when the results take more room than the tasks did."""
    ids = await fill(small)
    leases = await claim_all(small)
    assert [lease.id for lease in leases] == ids
    beats = [Heartbeat(tenant=TENANT, id=lease.id, token=lease.token) for lease in leases]
    assert all(isinstance(outcome, Extended) for outcome in await small.heartbeat(beats))
    for lease in leases:
        outcome = await small.settle([settlement(lease, Kind.COMPLETE, result=b"r" * 20_000)])
        assert outcome == [Settled(Status.COMPLETED)]
    total = await assert_counts(small)
    assert total.bytes == len(ids) * (len(PAYLOAD) + 20_000) > MAX_BYTES
    assert isinstance((await small.enqueue(TENANT, [NewTask(command=COMMAND)]))[0], Rejected)
    assert (await small.doctor()).clean


async def test_every_other_end_goes_too(small: OrderedStore, clock: ManualClock) -> None:
    """Retries, failures, releases, cancels, replays and the sweep of expired leases work on a full store."""
    ids = await fill(small)
    leases = await claim_all(small)
    kinds = [Kind.RETRY, Kind.FAIL, Kind.RELEASE]
    items = [
        settlement(lease, kinds[n % 3], **({} if n % 3 == 2 else {"error": BOOM}))
        for n, lease in enumerate(leases[:-10])
    ]
    outcomes = await small.settle(items)
    assert all(isinstance(outcome, Settled) for outcome in outcomes)
    assert await small.cancel(TENANT, [ids[0]]) == [Cancelled("cancelled", Status.CANCELLED)]
    assert (await small.replay(TENANT, Filter(command=COMMAND))).ids
    clock.advance(60)
    assert (await small.sweep()).expired == 10
    await assert_counts(small)
    assert (await small.doctor()).clean


async def test_a_purge_makes_room(small: OrderedStore) -> None:
    """What was purged can be filled again, as often as one likes."""
    for _ in range(3):
        ids = await fill(small)
        leases = await claim_all(small)
        await small.settle([settlement(lease, Kind.COMPLETE) for lease in leases])
        assert set((await small.purge(TENANT, Filter(status=Status.COMPLETED))).ids) == set(ids)
    assert isinstance((await small.enqueue(TENANT, [NewTask(command=COMMAND)]))[0], Enqueued)
    assert (await small.doctor()).clean


async def test_a_larger_limit_makes_room(small: OrderedStore, directory: Path, clock: ManualClock) -> None:
    """The limit is the opener's: reopened with a larger one, the store takes tasks again."""
    await fill(small)
    await small.close()
    async with await open_store(str(directory), clock=clock, settings=Settings(max_bytes=2 * MAX_BYTES)) as larger:
        assert isinstance((await larger.enqueue(TENANT, [NewTask(command=COMMAND)]))[0], Enqueued)


async def test_the_reserve_of_the_disk(directory: Path, clock: ManualClock) -> None:
    """A disk with less free space than the reserve takes no new tasks."""
    settings = Settings(disk_reserve_bytes=1 << 60)
    async with await open_store(str(directory), clock=clock, settings=settings) as store:
        [outcome] = await store.enqueue(TENANT, [NewTask(command=COMMAND)])
        assert isinstance(outcome, Rejected)
        assert outcome.code == "store_full"
