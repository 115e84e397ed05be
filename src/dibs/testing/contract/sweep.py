"""Sweep: bounded work that leaves nothing due behind."""

from __future__ import annotations

import asyncio

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import NewTask, Place, Status, Swept
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    drain,
    look,
    nothing_ready,
    pass_time,
    put,
    put_many,
    sweep_all,
    take_many,
)


@pytest.mark.anyio
class TestSweep:
    """At most `budget` of each kind of work in one call, and `more` while there is some."""

    async def test_nothing_to_do(self, store: Store) -> None:
        """An idle store, and one whose tasks are not due, sweeps nothing."""
        assert await store.sweep() == Swept()
        await put_many(store, 5, delay_s=60)
        await put_many(store, 5)
        await take_many(store, 5)
        assert await store.sweep() == Swept()

    @pytest.mark.parametrize("work", ["promoted", "expired", "cancelled", "pruned"])
    async def test_bounded_by_its_budget(self, store: Store, clock: ManualClock, work: str) -> None:
        """One call does at most its budget and says `more`; together the calls do all, each once."""
        if work == "promoted":
            await put_many(store, 25, delay_s=60)
        elif work == "cancelled":
            await put_many(store, 25, expires_s=60)
        else:
            await put_many(store, 25)
            leases = await take_many(store, 25)
            for lease in leases if work == "pruned" else ():
                await complete(store, lease)
        clock.advance(2 * 86_400)
        first = await store.sweep(10)
        assert 1 <= getattr(first, work) <= 10
        assert first.more
        rest = await sweep_all(store, 10)
        assert getattr(first, work) + getattr(rest, work) >= 25
        if work != "pruned":
            assert getattr(first, work) + getattr(rest, work) == 25
        again = await store.sweep(10)
        assert getattr(again, work) == 0
        await assert_counts(store)

    async def test_a_large_backlog(self, store: Store, clock: ManualClock) -> None:
        """More than one transaction's worth is promoted in a few calls, and every task is there."""
        ids = await put_many(store, 1_500, delay_s=60)
        clock.advance(60)
        first = await store.sweep()
        assert first.more
        assert first.promoted + (await sweep_all(store)).promoted == 1_500
        assert sorted(await drain(store, limit=1_000)) == sorted(ids)

    async def test_every_queue_gets_its_turn(self, store: Store, clock: ManualClock) -> None:
        """A small budget reaches every queue of every tenant in the end."""
        queues = [(f"t{n % 5}", f"c{n}") for n in range(20)]
        for tenant, command in queues:
            await put_many(store, 3, command, tenant=tenant, delay_s=60)
        clock.advance(60)
        assert (await sweep_all(store, 7)).promoted == 60
        for tenant, command in queues:
            assert len(await drain(store, command, tenant=tenant)) == 3

    async def test_concurrent_sweeps_do_each_thing_once(self, store: Store, clock: ManualClock) -> None:
        """Sweepers at the same time neither lose nor double anything."""
        await put_many(store, 60, delay_s=10)
        await put_many(store, 60, "held", max_attempts=1)
        await take_many(store, 60, "held", lease_s=10)
        clock.advance(11)
        swept = await asyncio.gather(*(sweep_all(store, 20) for _ in range(4)))
        assert sum(one.promoted for one in swept) == 60
        assert sum(one.expired for one in swept) == 60
        total = await assert_counts(store)
        assert (total.ready, total.leased, total.dead) == (60, 0, 60)

    async def test_finished_tasks_are_not_moved(self, store: Store, clock: ManualClock) -> None:
        """A task that was delayed, then ran and completed, is not promoted or taken back again."""
        task_id = await put(store, delay_s=10)
        clock.advance(10)
        [lease] = await take_many(store, 1)
        await complete(store, lease)
        swept = await pass_time(store, clock, 3600)
        assert (swept.promoted, swept.expired, swept.cancelled) == (0, 0, 0)
        task = await look(store, task_id)
        assert (task.status, task.place) == (Status.COMPLETED, Place.NONE)
        assert await nothing_ready(store)

    async def test_a_nearer_due_time_is_not_missed(self, store: Store, clock: ManualClock) -> None:
        """A task due sooner than all before it is promoted in time; cancelling the nearest does not hide the next."""
        far = await put(store, delay_s=1_000)
        near = await put(store, delay_s=10)
        middle = await put(store, delay_s=100)
        await store.cancel(TENANT, [near])
        assert (await pass_time(store, clock, 11)).promoted == 0
        assert (await pass_time(store, clock, 90)).promoted == 1
        assert (await look(store, middle)).place is Place.READY
        assert (await pass_time(store, clock, 900)).promoted == 1
        assert (await look(store, far)).place is Place.READY

    async def test_the_nearest_of_one_call_counts(self, store: Store, clock: ManualClock) -> None:
        """Delays of one batch and leases of one claim are each found in time, in whatever order they were given."""
        delays = [NewTask(command=COMMAND, delay_s=delay_s) for delay_s in (100, 10, 50)]
        leases = [NewTask(command="held", lease_s=lease_s) for lease_s in (100, 10, 50)]
        await store.enqueue(TENANT, delays + leases)
        await take_many(store, 3, "held")
        for seconds in (11, 40, 50):
            swept = await pass_time(store, clock, seconds)
            assert (swept.promoted, swept.expired) == (1, 1)

    async def test_at_rest_in_the_end(self, store: Store, clock: ManualClock) -> None:
        """When all has ended and its time is over, nothing is left: no record, no count, no byte."""
        await put_many(store, 10, payload=b"x", key=None)
        for lease in await take_many(store, 10):
            await complete(store, lease, b"y")
        await pass_time(store, clock, 30 * 86_400)
        assert (await store.list(TENANT)).tasks == []
        total = await assert_counts(store)
        assert (total.ready, total.bytes) == (0, 0)
        assert await store.sweep() == Swept()
