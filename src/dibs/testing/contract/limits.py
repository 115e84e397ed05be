"""Limits: so many in progress per queue and tenant, so many and so fast per limit_key, and nobody else held up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.errors import InvalidInput
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import (
    ALL_COMMANDS,
    Cancelled,
    EventKind,
    Extended,
    Filter,
    Heartbeat,
    KeyLimit,
    NewTask,
    Place,
    QueueConfig,
    QueueLimits,
    Reason,
    Status,
)
from dibs.testing.contract.order import line_up
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    assert_counts,
    complete,
    drain,
    fail,
    list_all,
    load,
    look,
    nothing_ready,
    pass_time,
    put,
    put_many,
    read_events,
    release,
    retry,
    some_rows,
    soon,
    sweep_all,
    take,
    take_many,
    waiting,
)


async def cap(store: Store, in_flight: int | None, command: str = COMMAND) -> None:
    """Sets, or takes away, the cap of a queue or of the whole tenant."""
    limits = None if in_flight is None else QueueLimits(in_flight=in_flight)
    await store.configure(TENANT, command, QueueConfig(limits=limits))


async def limit_keys(store: Store, **limit: Any) -> None:
    """Sets the limit per key of the queue."""
    await store.configure(TENANT, COMMAND, QueueConfig(limits=QueueLimits(per_key=KeyLimit(**limit))))


def beside(limit_key: str) -> bytes:
    """An id in the slot of a limit_key: in one shard with its tasks, where order holds."""
    return new_id(TENANT, COMMAND, limit_key=limit_key)


@pytest.mark.anyio
class TestCaps:
    """At most so many tasks of a queue, or of a tenant, are in progress."""

    async def test_a_claim_stops_at_the_cap(self, store: Store) -> None:
        """A claim takes what the cap leaves, and nothing when it is reached; the rest stays ready, in order."""
        ids = await line_up(store, 5)
        await cap(store, 3)
        leases = await store.claim(TENANT, [COMMAND], limit=10)
        assert [lease.id for lease in leases] == ids[:3]
        assert await nothing_ready(store)
        await complete(store, leases[0])
        assert (await take(store)).id == ids[3]
        assert await nothing_ready(store)
        assert (await assert_counts(store)).ready == 1

    @pytest.mark.parametrize("end", [complete, fail, release, retry])
    async def test_however_a_lease_ends_there_is_room(self, store: Store, end: Any) -> None:
        """Completed, failed, released or retried: another task can be claimed."""
        await put_many(store, 3)
        await cap(store, 1)
        for _ in range(2):
            lease = await take(store)
            assert await nothing_ready(store)
            await end(store, lease)
        await take(store)

    async def test_an_expired_lease_makes_room(self, store: Store, clock: ManualClock) -> None:
        """A lease that ran out does not count for the claim that finds it."""
        await put_many(store, 2)
        await cap(store, 1)
        await take(store, lease_s=10)
        clock.advance(11)
        await take(store)

    async def test_an_expired_lease_makes_room_in_every_queue(self, store: Store, clock: ManualClock) -> None:
        """Of a tenant's cap a lease that ran out takes nothing, in whichever of the queues that a claim names."""
        await put_many(store, 1, "a")
        await put_many(store, 1, "b")
        await cap(store, 1, ALL_COMMANDS)
        await take(store, "b", lease_s=10)
        clock.advance(11)
        [lease] = await store.claim(TENANT, ["a", "b"], limit=2)
        assert lease.command == "a" or store.order.kind != "strict"

    async def test_a_tenants_cap_is_over_all_its_queues(self, store: Store) -> None:
        """What is in progress in one queue counts for the others; another tenant's does not."""
        await put_many(store, 3, "a")
        await put_many(store, 3, "b")
        await put_many(store, 3, "a", tenant="other")
        await cap(store, 4, ALL_COMMANDS)
        assert len(await store.claim(TENANT, ["a", "b"], limit=10)) == 4
        assert await store.claim(TENANT, ["b"]) == []
        assert len(await store.claim("other", ["a"], limit=10)) == 3

    async def test_both_caps_hold(self, store: Store) -> None:
        """The smaller of what the queue's and the tenant's leave."""
        await line_up(store, 5, "a")
        await line_up(store, 5, "b")
        await cap(store, 3, "a")
        await cap(store, 4, ALL_COMMANDS)
        assert [lease.command for lease in await store.claim(TENANT, ["a", "b"], limit=10)] == ["a", "a", "a", "b"]

    async def test_claims_at_once_keep_to_the_cap(self, store: Store) -> None:
        """Twenty claims in one moment take what the cap allows, together."""
        await put_many(store, 20)
        await cap(store, 7)
        taken = await asyncio.gather(*(store.claim(TENANT, [COMMAND]) for _ in range(20)))
        assert sum(map(len, taken)) == 7

    async def test_a_cap_that_is_lowered_ends_nothing(self, store: Store) -> None:
        """What is in progress goes on; nothing is claimed until there is room under the new cap. Without a cap
        everything is claimed."""
        await put_many(store, 6)
        await cap(store, 4)
        leases = await take_many(store, 4)
        await cap(store, 2)
        for lease in leases[:2]:
            await complete(store, lease)
            assert await nothing_ready(store)
        await complete(store, leases[2])
        await take(store)
        assert await nothing_ready(store)
        await cap(store, None)
        await take(store)

    @pytest.mark.usefixtures("no_fallback")
    async def test_room_wakes_who_waits(self, store: Store) -> None:
        """A claim that waits at the cap gets the next task as soon as a lease ends."""
        await put_many(store, 2)
        await cap(store, 1)
        lease = await take(store)
        async with waiting(store.claim(TENANT, [COMMAND], wait_s=LONG_S)) as [waits]:
            assert not waits.done()
            await complete(store, lease)
            assert len(await soon(waits)) == 1

    @pytest.mark.usefixtures("no_fallback")
    async def test_room_in_a_tenant_wakes_who_waits_for_another_queue(self, store: Store) -> None:
        """The cap is the tenant's: a lease that ends in one queue lets another give."""
        await put(store, "a")
        await put(store, "b")
        await cap(store, 1, ALL_COMMANDS)
        lease = await take(store, "a")
        async with waiting(store.claim(TENANT, ["b"], wait_s=LONG_S)) as [waits]:
            assert not waits.done()
            await complete(store, lease)
            assert len(await soon(waits)) == 1

    @pytest.mark.usefixtures("no_fallback")
    async def test_a_higher_cap_wakes_who_waits(self, store: Store) -> None:
        """Whoever raises the cap makes room too."""
        await put_many(store, 2)
        await cap(store, 1)
        await take(store)
        async with waiting(store.claim(TENANT, [COMMAND], wait_s=LONG_S)) as [waits]:
            await cap(store, 2)
            assert len(await soon(waits)) == 1

    async def test_a_paused_tenant(self, store: Store) -> None:
        """None of its queues gives anything; others do."""
        await put(store, "a")
        await put(store, "a", tenant="other")
        await store.configure(TENANT, ALL_COMMANDS, QueueConfig(paused=True))
        assert await nothing_ready(store, "a")
        assert (await store.stats(TENANT)).total.paused
        await take(store, "a", tenant="other")
        await store.configure(TENANT, ALL_COMMANDS, QueueConfig())
        await take(store, "a")

    async def test_limits_are_shown(self, store: Store) -> None:
        """Stats tell a queue's limits, and the tenant's with its sum; the tenant's are no queue."""
        await put(store)
        await cap(store, 3)
        await cap(store, 9, ALL_COMMANDS)
        stats = await store.stats(TENANT)
        assert [(queue.command, queue.limits) for queue in stats.queues] == [(COMMAND, QueueLimits(in_flight=3))]
        assert stats.total.limits == QueueLimits(in_flight=9)

    @pytest.mark.parametrize(
        ("command", "config"),
        [
            (COMMAND, QueueConfig(limits=QueueLimits())),
            (COMMAND, QueueConfig(limits=QueueLimits(in_flight=0))),
            (COMMAND, QueueConfig(limits=QueueLimits(per_key=KeyLimit()))),
            (COMMAND, QueueConfig(limits=QueueLimits(per_key=KeyLimit(burst=3)))),
            (COMMAND, QueueConfig(limits=QueueLimits(per_key=KeyLimit(rate=0)))),
            (COMMAND, QueueConfig(limits=QueueLimits(per_key=KeyLimit(rate=5, burst=0.5)))),
            (COMMAND, QueueConfig(limits=QueueLimits(per_key=KeyLimit(in_flight=-1)))),
            (COMMAND, QueueConfig(weight=2)),
            (ALL_COMMANDS, QueueConfig(weight=0)),
            (ALL_COMMANDS, QueueConfig(weight=101)),
            (ALL_COMMANDS, QueueConfig(priority=3)),
            (ALL_COMMANDS, QueueConfig(limits=QueueLimits(per_key=KeyLimit(in_flight=1)))),
        ],
    )
    async def test_what_makes_no_sense_is_refused(self, store: Store, command: str, config: QueueConfig) -> None:
        """A limit that limits nothing, one out of range, and what only a queue or only a tenant has."""
        with pytest.raises(InvalidInput):
            await store.configure(TENANT, command, config)
        assert await store.configure(TENANT, command) == QueueConfig()


@pytest.mark.anyio
class TestKeysInFlight:
    """At most so many tasks that share a limit_key are in progress; others go past them."""

    async def test_other_keys_go_past(self, store: Store) -> None:
        """One key at its limit holds up nobody: neither other keys nor tasks without one."""
        await limit_keys(store, in_flight=2)
        mine = await put_many(store, 4, limit_key="mine")
        yours = await put(store, id=beside("mine"), limit_key="yours")
        plain = await put(store, id=beside("mine"))
        leases = await store.claim(TENANT, [COMMAND], limit=10)
        assert [lease.id for lease in leases] == [*mine[:2], yours, plain]
        assert await nothing_ready(store)
        assert (await assert_counts(store)).ready == 2

    @pytest.mark.parametrize("end", [complete, fail])
    async def test_an_end_lets_the_next_go(self, store: Store, end: Any) -> None:
        """First in, first out within the key, however the one before ended."""
        await limit_keys(store, in_flight=1)
        ids = await put_many(store, 4, limit_key="k")
        for task_id in ids:
            lease = await take(store)
            assert lease.id == task_id
            assert await nothing_ready(store)
            await end(store, lease)
        assert await nothing_ready(store)

    async def test_a_retry_goes_behind_those_that_wait(self, store: Store) -> None:
        """A retried task is at the back of its key, as it would be without a limit; a released one keeps its place."""
        await limit_keys(store, in_flight=1)
        ids = await put_many(store, 3, limit_key="k")
        await release(store, await take(store))
        lease = await take(store)
        assert lease.id == ids[0]
        await retry(store, lease)
        order = []
        while leases := await store.claim(TENANT, [COMMAND], limit=5):
            [lease] = leases
            order.append(lease.id)
            await complete(store, lease)
        assert order == [ids[1], ids[2], ids[0]]

    async def test_a_retry_with_a_delay_makes_room_meanwhile(self, store: Store, clock: ManualClock) -> None:
        """A delayed task does not count; when it is due it waits for room like any other."""
        await limit_keys(store, in_flight=1)
        first, second = await put_many(store, 2, limit_key="k")
        await retry(store, await take(store), delay_s=5)
        lease = await take(store, lease_s=60)
        assert lease.id == second
        await pass_time(store, clock, 6)
        assert (await look(store, first)).place is Place.READY
        assert await nothing_ready(store)
        await complete(store, lease)
        assert (await take(store)).id == first

    async def test_an_expired_lease_makes_room(self, store: Store, clock: ManualClock) -> None:
        """Taken back by a claim or by the sweep: the next of the key goes on."""
        await limit_keys(store, in_flight=1)
        first, second = await put_many(store, 2, limit_key="k")
        await take(store, lease_s=10)
        clock.advance(11)
        assert (await take(store, lease_s=10)).id == second
        await pass_time(store, clock, 11)
        assert (await take(store)).id == first
        assert await nothing_ready(store)

    async def test_a_high_priority_is_not_held_up_by_a_low_one(self, store: Store) -> None:
        """Within a key, as in the queue, higher priorities come first, whenever they came."""
        await limit_keys(store, in_flight=1)
        low = await put_many(store, 2, limit_key="k", priority=1)
        middle = await put(store, id=beside("k"), priority=5)
        high = await put_many(store, 2, limit_key="k", priority=9)
        order = []
        while leases := await store.claim(TENANT, [COMMAND]):
            order.append(leases[0].id)
            await complete(store, leases[0])
        assert order == [*high, middle, *low]

    async def test_several_high_priorities_go_before_a_low_one(self, store: Store, clock: ManualClock) -> None:
        """Those that came last and matter most are claimed first, all of them, also under a clock that is set back."""
        await limit_keys(store, in_flight=2)
        await put(store, limit_key="k", priority=0)
        tasks = [NewTask(command=COMMAND, limit_key="k", priority=priority) for priority in (0, 0, 9, 1, 0)]
        await store.enqueue(TENANT, tasks)
        clock.advance(-3)
        assert [lease.priority for lease in await store.claim(TENANT, [COMMAND], limit=3)] == [9, 1]

    async def test_rows_of_a_load_are_not_overtaken(self, store: Store) -> None:
        """Rows that had to be parked start before tasks of their key that came after the load and were let in while no
        claim had reached it."""
        await limit_keys(store, in_flight=2)
        await put(store, limit_key="k")
        await take(store)
        first, second = await load(store, some_rows(2, limit_key="k"))
        other = await put(store, id=beside("k"))
        later = await put(store, limit_key="k")
        leases = {lease.id: lease for lease in await take_many(store, 2)}
        assert {*leases} == {first, other}
        await complete(store, leases[first])
        assert [lease.id for lease in await store.claim(TENANT, [COMMAND], limit=5)] == [second]
        await complete(store, leases[other])
        assert (await look(store, later)).place is Place.READY

    async def test_cancelling_makes_room(self, store: Store) -> None:
        """A cancelled task, waiting in the queue, parked or in progress, leaves its place to the next."""
        await limit_keys(store, in_flight=1)
        ids = await put_many(store, 5, limit_key="k")
        assert await store.cancel(TENANT, [ids[0], ids[2]]) == [Cancelled("cancelled", Status.CANCELLED)] * 2
        lease = await take(store)
        assert lease.id == ids[1]
        await store.cancel(TENANT, [ids[1]])
        assert await nothing_ready(store)
        await complete(store, lease)
        assert (await take(store)).id == ids[3]
        assert (await assert_counts(store)).ready == 1

    async def test_a_start_deadline_passes_while_parked(self, store: Store, clock: ManualClock) -> None:
        """A parked task that was not started in time ends as any other would."""
        await limit_keys(store, in_flight=1)
        await put(store, limit_key="k")
        late = await put(store, limit_key="k", expires_s=5)
        after = await put(store, limit_key="k")
        lease = await take(store, lease_s=60)
        await pass_time(store, clock, 6)
        assert (await look(store, late)).reason == Reason.EXPIRED
        await complete(store, lease)
        assert (await take(store)).id == after

    async def test_parked_tasks_are_ready_to_everybody_else(self, store: Store) -> None:
        """They are shown, listed and counted as ready, and the journal tells when they have room."""
        await limit_keys(store, in_flight=1)
        ids = await put_many(store, 6, limit_key="k")
        assert {task.id for task in await list_all(store, Filter(command=COMMAND, place=Place.READY), limit=2)} == {
            *ids
        }
        assert {task.place for task in await list_all(store)} == {Place.READY}
        lease = await take(store)
        assert (await store.stats(TENANT, [COMMAND])).queues[0].oldest_ready_ms is not None
        assert (await look(store, ids[5])).status is Status.PENDING
        await complete(store, lease)
        told = [(event.id, event.reason) for event in await read_events(store) if event.kind is EventKind.PROMOTED]
        assert told == [(ids[1], Reason.LIMIT)]

    async def test_heartbeats_change_nothing(self, store: Store) -> None:
        """A lease that is extended counts once."""
        await limit_keys(store, in_flight=1)
        await put_many(store, 2, limit_key="k")
        lease = await take(store)
        for _ in range(3):
            [extended] = await store.heartbeat([Heartbeat(tenant=TENANT, id=lease.id, token=lease.token)])
            assert isinstance(extended, Extended)
            assert await nothing_ready(store)
        await complete(store, lease)
        await take(store)

    async def test_a_dead_letter_that_is_replayed_waits_for_room(self, store: Store) -> None:
        """A revived task is limited like a new one, and a purged one is gone."""
        await limit_keys(store, in_flight=1)
        dead, held = await put_many(store, 2, limit_key="k")
        await fail(store, await take(store))
        lease = await take(store)
        assert lease.id == held
        assert (await store.replay(TENANT, [dead])).ids == [dead]
        assert await nothing_ready(store)
        await complete(store, lease)
        await fail(store, await take(store))
        assert (await store.purge(TENANT, [dead])).ids == [dead]
        assert (await assert_counts(store)).dead == 0

    async def test_a_claim_that_nobody_got_is_undone(self, store: Store) -> None:
        """A claim whose caller is gone leaves no trace in what its key uses."""
        await limit_keys(store, in_flight=1)
        first, _ = await put_many(store, 2, limit_key="k")
        call = asyncio.ensure_future(store.claim(TENANT, [COMMAND]))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        leases = await soon(store.claim(TENANT, [COMMAND], limit=5, wait_s=LONG_S))
        assert [lease.id for lease in leases] == [first]

    async def test_the_same_word_in_another_queue_is_another_key(self, store: Store) -> None:
        """A limit_key means something within its queue and its tenant only."""
        await limit_keys(store, in_flight=1)
        await store.configure(TENANT, "b", QueueConfig(limits=QueueLimits(per_key=KeyLimit(in_flight=1))))
        await put_many(store, 2, limit_key="k")
        await put_many(store, 2, "b", limit_key="k")
        assert [lease.command for lease in await store.claim(TENANT, [COMMAND, "b"], limit=9)] == [COMMAND, "b"]

    @pytest.mark.usefixtures("no_fallback")
    async def test_room_wakes_who_waits(self, store: Store) -> None:
        """A claim that waits gets the next of the key as soon as there is room."""
        await limit_keys(store, in_flight=1)
        await put_many(store, 2, limit_key="k")
        lease = await take(store)
        async with waiting(store.claim(TENANT, [COMMAND], wait_s=LONG_S)) as [waits]:
            assert not waits.done()
            await complete(store, lease)
            assert len(await soon(waits)) == 1


@pytest.mark.anyio
class TestRates:
    """The tasks of a limit_key start at a rate, after a burst; each counts for its cost."""

    async def test_a_burst_and_then_the_rate(self, store: Store, clock: ManualClock) -> None:
        """Three at once, then two a second, and no more than three after a pause."""
        await limit_keys(store, rate=2, burst=3)
        ids = await put_many(store, 12, limit_key="k")
        taken = [lease.id for lease in await store.claim(TENANT, [COMMAND], limit=20)]
        assert len(taken) == 3
        assert await nothing_ready(store)
        for _ in range(4):
            clock.advance(0.5)
            [lease] = await store.claim(TENANT, [COMMAND], limit=20)
            taken.append(lease.id)
        clock.advance(0.4)
        assert await nothing_ready(store)
        clock.advance(60)
        taken += [lease.id for lease in await store.claim(TENANT, [COMMAND], limit=20, lease_s=3600)]
        assert taken == ids[:10]

    async def test_a_task_counts_for_its_cost(self, store: Store, clock: ManualClock) -> None:
        """Two that cost five use up a burst of ten."""
        await limit_keys(store, rate=1, burst=10)
        ids = await put_many(store, 3, limit_key="k", limit_cost=5)
        assert [lease.id for lease in await store.claim(TENANT, [COMMAND], limit=9)] == ids[:2]
        clock.advance(4.9)
        assert await nothing_ready(store)
        clock.advance(0.2)
        assert (await take(store)).id == ids[2]

    async def test_a_cost_above_the_burst_is_not_stuck(self, store: Store, clock: ManualClock) -> None:
        """It starts when the burst is full, and those behind it pay for the rest."""
        await limit_keys(store, rate=1, burst=2)
        big, small = await put(store, limit_key="k", limit_cost=5), await put(store, limit_key="k")
        assert (await take(store)).id == big
        assert await nothing_ready(store)
        clock.advance(3.9)
        assert await nothing_ready(store)
        clock.advance(0.2)
        assert (await take(store)).id == small

    async def test_what_ends_early_gives_nothing_back(self, store: Store) -> None:
        """The rate is of starts: completing makes no room."""
        await limit_keys(store, rate=1, burst=2)
        await put_many(store, 4, limit_key="k")
        for lease in await take_many(store, 2):
            await complete(store, lease)
        assert await nothing_ready(store)

    async def test_the_sweep_brings_them_back_in_time(self, store: Store, clock: ManualClock) -> None:
        """A queue that nobody claims from still moves: the journal tells it to who waits."""
        await limit_keys(store, rate=1, burst=1)
        ids = await put_many(store, 3, limit_key="k")
        await take(store)
        await pass_time(store, clock, 1.1)
        promoted = [event.id for event in await read_events(store) if event.kind is EventKind.PROMOTED]
        assert promoted == [ids[1]]
        assert await sweep_all(store) is not None

    async def test_rate_and_number_hold_together(self, store: Store, clock: ManualClock) -> None:
        """Whichever is used up first."""
        await limit_keys(store, rate=1, burst=3, in_flight=2)
        await put_many(store, 5, limit_key="k")
        leases = await store.claim(TENANT, [COMMAND], limit=9)
        assert len(leases) == 2
        await complete(store, leases[0])
        [lease] = await store.claim(TENANT, [COMMAND], limit=9)
        await complete(store, lease)
        assert await nothing_ready(store)
        clock.advance(1.1)
        assert len(await store.claim(TENANT, [COMMAND], limit=9)) == 1
        clock.advance(9)
        assert await nothing_ready(store)

    async def test_other_keys_go_past(self, store: Store) -> None:
        """A key without tokens holds up nobody."""
        await limit_keys(store, rate=0.001, burst=1)
        await put_many(store, 3, limit_key="slow")
        other = await put(store, limit_key="other")
        assert other in {lease.id for lease in await store.claim(TENANT, [COMMAND], limit=9)}
        plain = await put(store)
        assert (await take(store)).id == plain

    async def test_a_clock_that_is_set_back(self, store: Store, clock: ManualClock) -> None:
        """It refills from there; nothing waits for the old time to come again."""
        await limit_keys(store, rate=1, burst=1)
        await put_many(store, 1, limit_key="k")
        await take(store, lease_s=3600)
        clock.advance(-100)
        await put(store, limit_key="k")
        clock.advance(1.1)
        await take(store)


@pytest.mark.anyio
class TestChangedLimits:
    """Limits may change at any time, with tasks ready, parked and in progress."""

    async def test_a_limit_that_is_added(self, store: Store) -> None:
        """Tasks that are older than the limit obey it, in their order."""
        ids = await put_many(store, 5, limit_key="k")
        plain = await put(store, id=beside("k"))
        await limit_keys(store, in_flight=2)
        leases = await store.claim(TENANT, [COMMAND], limit=9)
        assert [lease.id for lease in leases] == [*ids[:2], plain]
        await complete(store, leases[0])
        assert [lease.id for lease in await store.claim(TENANT, [COMMAND], limit=9)] == [ids[2]]

    async def test_a_limit_that_is_added_over_many(self, store: Store) -> None:
        """However many of one key stand in front, a claim gets what is behind them."""
        first, *_ = await put_many(store, 1_000, limit_key="k")
        for _ in range(2):
            await put_many(store, 1_000, limit_key="k")
        plain = await put(store, id=beside("k"))
        await limit_keys(store, in_flight=1)
        assert (await take(store)).id == first
        assert (await take(store)).id == plain

    async def test_a_lease_that_is_older_than_its_limit(self, store: Store) -> None:
        """What was claimed without a limit does not count; its end makes nothing wrong."""
        await put_many(store, 3, limit_key="k")
        old = await take(store)
        await limit_keys(store, in_flight=1)
        new = await take(store)
        assert await nothing_ready(store)
        await complete(store, old)
        assert await nothing_ready(store)
        await complete(store, new)
        await take(store)

    async def test_a_limit_that_is_removed(self, store: Store) -> None:
        """Those that were parked are ready again, all of them and in order; and a new limit starts from what is."""
        await limit_keys(store, in_flight=1)
        ids = await put_many(store, 500, limit_key="k")
        ids += [await put(store, id=beside("k"), limit_key=f"k{n}") for n in range(3)]
        lease = await take(store)
        await store.configure(TENANT, COMMAND, QueueConfig())
        await sweep_until_quiet(store)
        assert await drain(store, limit=100) == ids[1:]
        await complete(store, lease)
        await limit_keys(store, in_flight=1)
        await put_many(store, 2, limit_key="k")
        await take(store)
        assert await nothing_ready(store)

    async def test_a_limit_that_is_raised(self, store: Store) -> None:
        """Parked tasks of every key go home as far as the new limit lets them."""
        await limit_keys(store, in_flight=1)
        for n in range(60):
            await put_many(store, 4, limit_key=f"k{n}")
        assert len(await store.claim(TENANT, [COMMAND], limit=1_000)) == 60
        await limit_keys(store, in_flight=3)
        await sweep_until_quiet(store)
        assert len(await store.claim(TENANT, [COMMAND], limit=1_000)) == 120

    async def test_a_limit_that_is_lowered(self, store: Store) -> None:
        """Nothing more is claimed until there is room under the new limit."""
        await limit_keys(store, in_flight=4)
        ids = await put_many(store, 8, limit_key="k")
        leases = await take_many(store, 3)
        await limit_keys(store, in_flight=1)
        for lease in leases:
            assert await nothing_ready(store)
            await complete(store, lease)
        assert [lease.id for lease in await store.claim(TENANT, [COMMAND], limit=9)] == [ids[3]]

    async def test_a_slower_rate(self, store: Store, clock: ManualClock) -> None:
        """The new rate holds from now on, also for those that are parked."""
        await limit_keys(store, rate=1, burst=1)
        await put_many(store, 4, limit_key="k")
        await take(store, lease_s=3600)
        await limit_keys(store, rate=0.1, burst=1)
        clock.advance(5)
        assert await nothing_ready(store)
        clock.advance(5.1)
        await take(store, lease_s=3600)
        await limit_keys(store, rate=10, burst=1)
        clock.advance(0.2)
        await take(store)

    async def test_a_rate_becomes_a_number(self, store: Store) -> None:
        """Another kind of limit takes over what the first has parked."""
        await limit_keys(store, rate=0.01, burst=1)
        await put_many(store, 4, limit_key="k")
        await take(store)
        await limit_keys(store, in_flight=3)
        await sweep_until_quiet(store)
        assert len(await store.claim(TENANT, [COMMAND], limit=9)) == 2


async def sweep_until_quiet(store: Store) -> None:
    """A change of limits is worked in by bounded steps, which claims and sweeps make."""
    for _ in range(100):
        await store.sweep()
