"""Heartbeat: a lease lives as long as its holder says so, and no longer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import (
    Cause,
    EventKind,
    Extended,
    Heartbeat,
    Kind,
    Lease,
    LeaseLost,
    Place,
    Progress,
    Rejected,
    Settled,
    Status,
)
from dibs.testing.contract.steps import (
    TENANT,
    assert_counts,
    complete,
    kinds_of,
    look,
    pass_time,
    put,
    put_many,
    settle,
    take,
    take_many,
    with_token,
)


def beat_of(lease: Lease, **fields: Any) -> Heartbeat:
    """Returns a heartbeat for the lease."""
    return Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token, **fields)


async def beat(store: Store, lease: Lease, **fields: Any) -> Extended | LeaseLost | Rejected:
    """Sends one heartbeat and returns the answer."""
    [outcome] = await store.heartbeat([beat_of(lease, **fields)])
    return outcome


@pytest.mark.anyio
class TestHeartbeat:
    """A heartbeat with the current token extends the lease from now on."""

    async def test_extends_from_now(self, store: Store, clock: ManualClock) -> None:
        """The new end is `extend_s` from now, not from the old end."""
        task_id = await put(store)
        lease = await take(store)
        clock.advance(10)
        end_ms = clock.now_ms() + 60_000
        assert await beat(store, lease, extend_s=60) == Extended(end_ms)
        assert (await look(store, task_id)).lease_end_ms == end_ms

    @pytest.mark.parametrize("granted_s", [None, 45, 600])
    async def test_extends_by_what_was_granted(self, store: Store, clock: ManualClock, granted_s: float | None) -> None:
        """Without `extend_s` the lease is as long again as the claim granted."""
        await put(store)
        lease = await take(store, lease_s=granted_s)
        clock.advance(15)
        assert await beat(store, lease) == Extended(clock.now_ms() + round((granted_s or 30) * 1000))

    async def test_the_old_end_is_forgotten(self, store: Store, clock: ManualClock) -> None:
        """No sweep takes back a lease at an end that was extended; it does so at the new one."""
        task_id = await put(store)
        lease = await take(store)
        clock.advance(20)
        await beat(store, lease)
        assert (await pass_time(store, clock, 15)).expired == 0
        assert (await look(store, task_id)).place is Place.LEASED
        assert (await pass_time(store, clock, 16)).expired == 1
        assert (await look(store, task_id)).place is Place.READY

    async def test_many_heartbeats_leave_one_lease(self, store: Store, clock: ManualClock) -> None:
        """A task that was kept alive for long expires once, when its holder falls silent."""
        task_id = await put(store)
        lease = await take(store)
        for _ in range(50):
            assert (await pass_time(store, clock, 10)).expired == 0
            await beat(store, lease)
        task = await look(store, task_id)
        assert (task.attempts, task.place) == (1, Place.LEASED)
        assert (await assert_counts(store)).leased == 1
        assert (await pass_time(store, clock, 100)).expired == 1
        assert (await assert_counts(store)).ready == 1

    async def test_good_after_the_deadline_until_taken_back(self, store: Store, clock: ManualClock) -> None:
        """A late heartbeat revives the lease if nobody took the task back."""
        task_id = await put(store)
        lease = await take(store)
        clock.advance(100)
        assert await beat(store, lease) == Extended(clock.now_ms() + 30_000)
        assert (await pass_time(store, clock, 29)).expired == 0
        assert (await look(store, task_id)).place is Place.LEASED

    async def test_lost_after_it_was_taken_back(self, store: Store, clock: ManualClock) -> None:
        """Once taken back the token is dead: while the task waits, and while somebody else has it."""
        await put(store)
        lease = await take(store, worker="w")
        await pass_time(store, clock, 31)
        assert await beat(store, lease) == LeaseLost(Cause.NOT_IN_PROGRESS)
        other = await take(store, worker="w")
        assert await beat(store, lease, extend_s=3600) == LeaseLost(Cause.OTHER_TOKEN)
        assert (await look(store, lease.id)).lease_end_ms == other.lease_end_ms

    async def test_lost_after_it_was_settled(self, store: Store) -> None:
        """A heartbeat never brings back what was settled."""
        task_id = await put(store)
        lease = await take(store)
        await complete(store, lease)
        assert await beat(store, lease) == LeaseLost(Cause.NOT_IN_PROGRESS)
        assert (await look(store, task_id)).status is Status.COMPLETED

    async def test_needs_the_token(self, store: Store) -> None:
        """A made-up token extends nothing."""
        task_id = await put(store)
        lease = await take(store)
        before = await look(store, task_id)
        progress = Progress(1)
        assert await beat(store, with_token(lease, new_id()), extend_s=600, progress=progress) == LeaseLost(
            Cause.OTHER_TOKEN
        )
        assert await look(store, task_id) == before

    async def test_an_unknown_task_is_lost(self, store: Store) -> None:
        """An id that nobody used has no lease."""
        assert await store.heartbeat([Heartbeat(tenant=TENANT, id=new_id(), token=new_id())]) == [
            LeaseLost(Cause.UNKNOWN)
        ]

    async def test_a_waiting_task_is_not_in_progress(self, store: Store) -> None:
        """A task that nobody holds cannot be kept alive."""
        ids = [await put(store), await put(store, delay_s=9)]
        beats = [Heartbeat(tenant=TENANT, id=task_id, token=new_id()) for task_id in ids]
        assert await store.heartbeat(beats) == [LeaseLost(Cause.NOT_IN_PROGRESS)] * 2

    async def test_tells_of_a_cancel(self, store: Store) -> None:
        """The worker learns at its next heartbeat that it should stop, and at every one after."""
        task_id = await put(store)
        lease = await take(store)
        answer = await beat(store, lease)
        assert isinstance(answer, Extended)
        assert not answer.cancel_requested
        await store.cancel(TENANT, [task_id])
        for _ in range(2):
            answer = await beat(store, lease)
            assert isinstance(answer, Extended)
            assert answer.cancel_requested

    async def test_progress_is_seen(self, store: Store) -> None:
        """The latest progress that a worker told is part of the task."""
        task_id = await put(store)
        lease = await take(store)
        for progress in (Progress(1, 4, "one"), Progress(2.5, 4, "nearly three")):
            await beat(store, lease, progress=progress)
            assert (await look(store, task_id)).progress == progress

    async def test_heartbeats_are_not_journalled(self, store: Store) -> None:
        """The journal holds transitions; a heartbeat is none."""
        task_id = await put(store)
        lease = await take(store)
        await beat(store, lease, progress=Progress(1))
        assert await kinds_of(store, task_id) == [EventKind.ENQUEUED, EventKind.CLAIMED]

    async def test_a_batch_answers_in_order(self, store: Store, clock: ManualClock) -> None:
        """Good and lost ones in one batch do not disturb each other."""
        await put_many(store, 3)
        leases = await take_many(store, 3)
        await complete(store, leases[1])
        end_ms = clock.now_ms() + 90_000
        assert await store.heartbeat([beat_of(lease, extend_s=90) for lease in leases]) == [
            Extended(end_ms),
            LeaseLost(Cause.NOT_IN_PROGRESS),
            Extended(end_ms),
        ]

    async def test_twice_in_one_batch(self, store: Store, clock: ManualClock) -> None:
        """The second beat of a lease in one batch counts from the same moment, and one lease is left."""
        await put(store)
        lease = await take(store)
        ends = [clock.now_ms() + 60_000, clock.now_ms() + 90_000]
        beats = [beat_of(lease, extend_s=60), beat_of(lease, extend_s=90)]
        assert await store.heartbeat(beats) == [Extended(end_ms) for end_ms in ends]
        assert (await look(store, lease.id)).lease_end_ms == ends[1]
        assert (await pass_time(store, clock, 61)).expired == 0
        assert (await pass_time(store, clock, 30)).expired == 1
        total = await assert_counts(store)
        assert (total.ready, total.leased) == (1, 0)

    async def test_against_a_settle_at_the_same_time(self, store: Store, clock: ManualClock) -> None:
        """Whichever comes first, the settle stands and no lease is left over."""
        await put_many(store, 20)
        for lease in await take_many(store, 20):
            settled, _ = await asyncio.gather(
                settle(store, lease, Kind.COMPLETE, result=b"1"), beat(store, lease, extend_s=600)
            )
            assert settled == Settled(Status.COMPLETED)
            assert (await look(store, lease.id)).status is Status.COMPLETED
        assert (await pass_time(store, clock, 3600)).expired == 0
        total = await assert_counts(store)
        assert (total.ready, total.leased) == (0, 0)
