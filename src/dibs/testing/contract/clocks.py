"""Clocks: the store's clock decides, and a clock that jumps breaks nothing."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import Extended, Heartbeat, Place, Status
from dibs.testing.contract.order import assert_order
from dibs.testing.contract.steps import (
    TENANT,
    assert_counts,
    complete,
    drain,
    in_slot,
    look,
    nothing_ready,
    pass_time,
    put,
    put_many,
    read_events,
    retry,
    sweep_all,
    take,
    take_many,
)

HOUR_S = 3600.0


@pytest.mark.anyio
class TestClocks:
    """Time is what the store's clock says, also when it says something odd."""

    async def test_only_the_stores_clock_moves_anything(self, store: Store, clock: ManualClock) -> None:
        """While the clock stands still nothing becomes due, expires or is pruned; every time told is its own."""
        await put(store, delay_s=0.001)
        task_id = await put(store)
        await complete(store, await take(store, lease_s=1), result_ttl_s=0.001)
        swept = await sweep_all(store)
        assert (swept.promoted, swept.expired, swept.pruned) == (0, 0, 0)
        task = await look(store, task_id)
        assert (task.enqueued_ms, task.ended_ms) == (clock.now_ms(), clock.now_ms())
        assert {event.at_ms for event in await read_events(store)} == {clock.now_ms()}

    async def test_set_back_keeps_ready_work_claimable(self, store: Store, clock: ManualClock) -> None:
        """What was ready stays ready, and the order is that of the enqueues, not of the clock."""
        ids = [await put(store, id=in_slot(7))]
        clock.advance(-HOUR_S)
        ids.append(await put(store, id=in_slot(7)))
        clock.advance(-HOUR_S)
        ids.append(await put(store, id=in_slot(7)))
        assert_order(store.order, ids, await drain(store))

    async def test_set_back_does_not_end_leases(self, store: Store, clock: ManualClock) -> None:
        """A lease taken before the jump is alive, can be extended and settled."""
        await put_many(store, 2)
        one, other = await take_many(store, 2)
        clock.advance(-HOUR_S)
        assert (await sweep_all(store)).expired == 0
        [beat] = await store.heartbeat([Heartbeat(tenant=TENANT, id=one.id, token=one.token)])
        assert isinstance(beat, Extended)
        await complete(store, one)
        await complete(store, other)

    async def test_leases_end_after_the_clock_was_set_back(self, store: Store, clock: ManualClock) -> None:
        """A lease taken after the jump ends by the new time; the one before it when its time comes again."""
        old = await put(store)
        await take(store)
        clock.advance(-HOUR_S)
        new = await put(store)
        await take(store)
        assert (await pass_time(store, clock, 31)).expired == 1
        assert (await look(store, new)).place is Place.READY
        assert (await look(store, old)).place is Place.LEASED
        assert (await pass_time(store, clock, HOUR_S)).expired == 1
        assert (await look(store, old)).place is Place.READY

    async def test_set_back_delays_but_forgets_nothing(self, store: Store, clock: ManualClock) -> None:
        """A delayed task comes when its time does, and a retry after the jump counts from the new time."""
        await put(store)
        lease = await take(store)
        late = await put(store, delay_s=60)
        clock.advance(-HOUR_S)
        await retry(store, lease, delay_s=10)
        assert await nothing_ready(store)
        clock.advance(10)
        await complete(store, await take(store))
        assert await nothing_ready(store)
        assert (await pass_time(store, clock, HOUR_S + 60)).promoted == 1
        assert (await take(store)).id == late

    async def test_the_journal_goes_on_in_order(self, store: Store, clock: ManualClock) -> None:
        """Events after the jump come after those before it, whatever their times say."""
        ids = [await put(store, id=in_slot(7))]
        before = await read_events(store)
        clock.advance(-HOUR_S)
        ids.append(await put(store, id=in_slot(7)))
        shard = next(bounds.shard for bounds in await store.journal_bounds() if bounds.newest != bounds.oldest)
        page = await store.events(TENANT, shard=shard, after=before[-1].cursor)
        assert [event.id for event in page.events] == ids[1:]

    async def test_a_year_ahead_moves_all_that_is_due(self, store: Store, clock: ManualClock) -> None:
        """After a jump forward everything has its turn: delays, leases, results; nothing is lost."""
        delayed = await put_many(store, 30, delay_s=60)
        held = await put_many(store, 30)
        await take_many(store, 30)
        done = await put(store, "other")
        await complete(store, await take(store, "other"))
        swept = await pass_time(store, clock, 365 * 86_400)
        assert (swept.promoted, swept.expired) == (30, 30)
        assert await store.get(TENANT, [done]) == [None]
        assert sorted(await drain(store)) == sorted(delayed + held)

    async def test_forth_and_back_again(self, store: Store, clock: ManualClock) -> None:
        """A clock that was wrong for a while leaves a queue that works."""
        task_id = await put(store)
        clock.advance(10 * 86_400)
        await take(store)
        clock.advance(-10 * 86_400)
        assert (await pass_time(store, clock, 60)).expired == 0
        assert (await pass_time(store, clock, 10 * 86_400)).expired == 1
        await complete(store, await take(store))
        assert (await look(store, task_id)).status is Status.COMPLETED
        await assert_counts(store)
