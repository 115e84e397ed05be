"""Expiry: a lease that ran out gives its task back once, or buries it, and no zombie gets in between."""

from __future__ import annotations

import asyncio

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import Cause, EventKind, Kind, LeaseLost, Place, Settled, Status, WorkerInfo
from dibs.testing.contract.steps import (
    TENANT,
    assert_counts,
    complete,
    drain,
    kinds_of,
    look,
    nothing_ready,
    pass_time,
    put,
    put_dead,
    put_many,
    release,
    retry,
    settle,
    sweep_all,
    take,
    take_many,
)


@pytest.mark.anyio
class TestExpiry:
    """The sweep takes back what its holder let run out."""

    async def test_back_to_ready_at_once(self, store: Store, clock: ManualClock) -> None:
        """The lease was the delay: the task is ready, its attempt stays counted."""
        task_id = await put(store)
        await take(store, worker="w")
        assert (await pass_time(store, clock, 31)).expired == 1
        task = await look(store, task_id)
        assert (task.status, task.place, task.attempts) == (Status.PENDING, Place.READY, 1)
        assert task.lease_end_ms is None
        assert (await take(store)).attempt == 2

    async def test_not_before_the_end(self, store: Store, clock: ManualClock) -> None:
        """A lease that is alive is left alone, however often one sweeps."""
        await put(store)
        lease = await take(store)
        for _ in range(3):
            assert (await pass_time(store, clock, 9)).expired == 0
        await complete(store, lease)

    async def test_each_lease_by_itself(self, store: Store, clock: ManualClock) -> None:
        """Short leases end while longer ones of the same queue go on."""
        await put_many(store, 3)
        leases = {lease_s: await take(store, lease_s=lease_s) for lease_s in (60, 10, 30)}
        assert (await pass_time(store, clock, 11)).expired == 1
        assert await drain(store, lease_s=3600) == [leases[10].id]
        assert (await pass_time(store, clock, 20)).expired == 1
        assert await drain(store, lease_s=3600) == [leases[30].id]
        await complete(store, leases[60])

    async def test_at_max_attempts_it_is_dead(self, store: Store, clock: ManualClock) -> None:
        """The last attempt that runs out makes a dead letter with reason LEASE_EXPIRED and a result that says so."""
        task_id = await put(store, max_attempts=1)
        await take(store)
        await pass_time(store, clock, 31)
        task = await look(store, task_id)
        assert (task.status, task.place, task.reason) == (Status.FAILED, Place.DEAD, "LEASE_EXPIRED")
        assert task.ended_ms == clock.now_ms()
        assert task.result is not None
        assert (task.result.status, task.result.reason) == (Status.FAILED, "LEASE_EXPIRED")
        assert await nothing_ready(store)

    async def test_of_many_at_once_each_comes_back_once(self, store: Store, clock: ManualClock) -> None:
        """Sweeps at the same time share the work."""
        ids = await put_many(store, 120)
        await take_many(store, 120)
        clock.advance(31)
        swept = await asyncio.gather(*(store.sweep() for _ in range(4)))
        assert sum(one.expired for one in swept) == 120
        assert (await assert_counts(store)).ready == 120
        assert sorted(await drain(store, limit=50)) == sorted(ids)

    async def test_recovery_needs_no_worker(self, store: Store, clock: ManualClock) -> None:
        """Leases are taken back whether or not their worker ever registered, or still is."""
        await put_many(store, 2)
        await store.register(TENANT, WorkerInfo(name="known"), 3600)
        await take(store, worker="known")
        await take(store, worker="stranger")
        assert (await pass_time(store, clock, 31)).expired == 2

    async def test_a_zombie_of_the_same_name_settles_nothing(self, store: Store, clock: ManualClock) -> None:
        """Ownership is the token: a worker that lost its lease cannot settle what its namesake claimed since."""
        task_id = await put(store)
        zombie = await take(store, worker="w")
        await pass_time(store, clock, 31)
        assert await settle(store, zombie, Kind.COMPLETE) == LeaseLost(Cause.NOT_IN_PROGRESS)
        current = await take(store, worker="w")
        before = await look(store, task_id)
        for kind in Kind:
            assert await settle(store, zombie, kind) == LeaseLost(Cause.OTHER_TOKEN)
        assert await look(store, task_id) == before
        await complete(store, current)

    async def test_what_ended_stays_ended(self, store: Store, clock: ManualClock) -> None:
        """No lease of a finished, dead or cancelled task is ever found to be over."""
        await put_dead(store)
        await put_many(store, 2)
        done, cancelled = await take_many(store, 2)
        await complete(store, done)
        await store.cancel(TENANT, [cancelled.id])
        assert await settle(store, cancelled, Kind.RELEASE) == Settled(Status.CANCELLED)
        assert (await pass_time(store, clock, 3600)).expired == 0
        assert await nothing_ready(store)

    async def test_an_earlier_lease_does_not_end_a_later_one(self, store: Store, clock: ManualClock) -> None:
        """The end of a lease that was given back means nothing to the next holder."""
        await put(store)
        await release(store, await take(store, lease_s=10))
        await retry(store, await take(store, lease_s=20))
        lease = await take(store, lease_s=600)
        assert (await pass_time(store, clock, 100)).expired == 0
        await complete(store, lease)

    async def test_a_retry_ends_the_lease(self, store: Store, clock: ManualClock) -> None:
        """A task that waits for its retry is not taken back to ready by the end of its old lease."""
        task_id = await put(store)
        await retry(store, await take(store), delay_s=3600)
        assert (await pass_time(store, clock, 60)).expired == 0
        assert (await look(store, task_id)).place is Place.DELAYED

    async def test_against_a_settle_at_the_same_time(self, store: Store, clock: ManualClock) -> None:
        """A late settle and the sweep: one of them wins, and the task is in one place."""
        await put_many(store, 10)
        for lease in await take_many(store, 10):
            clock.advance(31)
            answer, _ = await asyncio.gather(settle(store, lease, Kind.COMPLETE), store.sweep())
            task = await look(store, lease.id)
            if answer == Settled(Status.COMPLETED):
                assert (task.status, task.place) == (Status.COMPLETED, Place.NONE)
            else:
                assert answer == LeaseLost(Cause.NOT_IN_PROGRESS)
                assert (task.status, task.place) == (Status.PENDING, Place.READY)
        await assert_counts(store)

    async def test_swept_twice_is_swept_once(self, store: Store, clock: ManualClock) -> None:
        """A second sweep finds nothing that the first one did."""
        task_id = await put(store)
        await take(store)
        await pass_time(store, clock, 31)
        assert (await sweep_all(store)).expired == 0
        assert await kinds_of(store, task_id) == [EventKind.ENQUEUED, EventKind.CLAIMED, EventKind.LEASE_EXPIRED]

    async def test_every_queue_of_every_tenant_is_looked_after(self, store: Store, clock: ManualClock) -> None:
        """Expired leases are found wherever they are."""
        queues = [(f"t{n % 4}", f"c{n}") for n in range(12)]
        for tenant, command in queues:
            await put(store, command, tenant=tenant)
            await take(store, command, tenant=tenant)
        assert (await pass_time(store, clock, 31)).expired == len(queues)
        for tenant, command in queues:
            await take(store, command, tenant=tenant)

    async def test_one_queue_has_many_things_due(self, store: Store, clock: ManualClock) -> None:
        """A near end is found behind a far one, and the far one after it: leases and delays of one queue alike."""
        await put_many(store, 2)
        far = await put(store, delay_s=2_000)
        await take(store, lease_s=1_000)
        near = await put(store, delay_s=100)
        await take(store, lease_s=500)
        assert (await pass_time(store, clock, 101)).promoted == 1
        assert await drain(store, lease_s=40_000) == [near]
        assert (await pass_time(store, clock, 400)).expired == 1
        assert (await pass_time(store, clock, 500)).expired == 1
        assert (await pass_time(store, clock, 1_000)).promoted == 1
        assert far in await drain(store)
        assert (await assert_counts(store)).leased == 4
