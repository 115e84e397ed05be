"""Stats: counters that are exact after every kind of move."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import Filter, Heartbeat, Kind, NewTask, Place, QueueConfig
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    fail,
    in_slot,
    pass_time,
    put,
    put_many,
    release,
    retry,
    settle,
    take,
    take_many,
)


async def counts(store: Store) -> tuple[int, int, int, int]:
    """Returns ready, delayed, leased, dead, checked against a listing."""
    total = await assert_counts(store)
    return total.ready, total.delayed, total.leased, total.dead


@pytest.mark.anyio
class TestStats:
    """Counts are kept, not estimated: every move is counted in the transaction that makes it."""

    async def test_an_empty_store_counts_nothing(self, store: Store) -> None:
        """A tenant that nobody used has zeros."""
        assert await counts(store) == (0, 0, 0, 0)
        assert (await store.stats(TENANT)).total.oldest_ready_ms is None

    async def test_settles_of_every_kind(self, store: Store) -> None:
        """Claims and every way to settle move one count each."""
        await put_many(store, 6)
        assert await counts(store) == (6, 0, 0, 0)
        leases = await take_many(store, 5)
        assert await counts(store) == (1, 0, 5, 0)
        await release(store, leases[0])
        assert await counts(store) == (2, 0, 4, 0)
        await retry(store, leases[1])
        assert await counts(store) == (3, 0, 3, 0)
        await retry(store, leases[2], delay_s=60)
        assert await counts(store) == (3, 1, 2, 0)
        await fail(store, leases[3])
        assert await counts(store) == (3, 1, 1, 1)
        await complete(store, leases[4])
        assert await counts(store) == (3, 1, 0, 1)

    async def test_what_time_does(self, store: Store, clock: ManualClock) -> None:
        """Promotion, expiry, burial by expiry, start deadlines and pruning are counted."""
        await put(store, delay_s=10)
        await put(store, "once", id=in_slot(7), max_attempts=1)
        await put(store, "once", id=in_slot(7), expires_s=20)
        await put(store, "many")
        await take(store, "once")
        lease = await take(store, "many")
        assert await counts(store) == (1, 1, 2, 0)
        await pass_time(store, clock, 10)
        assert await counts(store) == (2, 0, 2, 0)
        await store.heartbeat([Heartbeat(tenant=TENANT, id=lease.id, token=lease.token)])
        await pass_time(store, clock, 11)
        assert await counts(store) == (1, 0, 2, 0)
        await pass_time(store, clock, 11)
        assert await counts(store) == (1, 0, 1, 1)
        await pass_time(store, clock, 11)
        assert await counts(store) == (2, 0, 0, 1)
        await pass_time(store, clock, 15 * 86_400)
        assert await counts(store) == (2, 0, 0, 0)

    async def test_cancels(self, store: Store, clock: ManualClock) -> None:
        """Cancels of ready, delayed and held tasks, and how the held ones end."""
        ready = await put(store)
        later = await put(store, delay_s=60)
        await store.cancel(TENANT, [ready, later])
        assert await counts(store) == (0, 0, 0, 0)
        await put_many(store, 5)
        leases = await take_many(store, 5)
        await store.cancel(TENANT, [lease.id for lease in leases])
        assert await counts(store) == (0, 0, 5, 0)
        for left, kind in zip((4, 3, 2, 1), Kind, strict=True):
            await settle(store, leases[left - 1], kind)
            assert await counts(store) == (0, 0, left, 0)
        await pass_time(store, clock, 31)
        assert await counts(store) == (0, 0, 0, 0)

    async def test_dead_letters(self, store: Store) -> None:
        """Replays and purges are counted, also those that do nothing."""
        ids = await put_many(store, 4)
        for lease in await take_many(store, 4):
            await fail(store, lease)
        assert await counts(store) == (0, 0, 0, 4)
        for _ in range(2):
            await store.replay(TENANT, ids[:1])
            assert await counts(store) == (1, 0, 0, 3)
        for _ in range(2):
            await store.purge(TENANT, ids[:2])
            assert await counts(store) == (1, 0, 0, 2)
        await store.purge(TENANT, Filter(place=Place.DEAD))
        assert await counts(store) == (1, 0, 0, 0)

    async def test_what_changes_nothing_is_not_counted(self, store: Store) -> None:
        """Repeats, duplicates, rejected items and lost leases leave every count."""
        task_id = await put(store, key="k", payload=b"x")
        lease = await take(store)
        await retry(store, lease)
        before = await store.stats(TENANT)
        await store.enqueue(
            TENANT,
            [
                NewTask(command=COMMAND, id=task_id, payload=b"longer"),
                NewTask(command=COMMAND, key="k", payload=b"longer"),
                NewTask(command=COMMAND, priority=99),
            ],
        )
        await settle(store, lease, Kind.RETRY, error=BOOM)
        await settle(store, lease, Kind.FAIL, error=BOOM)
        assert await store.stats(TENANT) == before

    async def test_by_queue_and_in_total(self, store: Store) -> None:
        """Each queue is counted by itself; the total is the tenant's; queues can be asked for by name."""
        await put_many(store, 2, "a")
        await put_many(store, 3, "b", delay_s=60)
        await put(store, "a", tenant="other")
        stats = await store.stats(TENANT)
        by_command = {queue.command: queue for queue in stats.queues}
        assert set(by_command) == {"a", "b"}
        assert (by_command["a"].ready, by_command["b"].delayed) == (2, 3)
        assert (stats.total.command, stats.total.ready, stats.total.delayed) == ("", 2, 3)
        assert (await store.stats(TENANT, ["b"])).queues == [by_command["b"]]

    async def test_bytes_are_what_is_held(self, store: Store, clock: ManualClock) -> None:
        """Payloads count from the enqueue, results from the completion, both until they are gone."""
        await put(store, payload=b"p" * 1_000, result_ttl_s=60, retention_s=3600)
        assert (await assert_counts(store)).bytes == 1_000
        await complete(store, await take(store), b"r" * 500)
        assert (await assert_counts(store)).bytes == 1_500
        await pass_time(store, clock, 61)
        assert (await assert_counts(store)).bytes == 1_000
        await pass_time(store, clock, 3600)
        assert (await assert_counts(store)).bytes == 0

    async def test_the_age_of_the_head(self, store: Store, clock: ManualClock) -> None:
        """`oldest_ready_ms` tells since when the head of the queue has waited; None when nothing does."""
        first_ms = clock.now_ms()
        await put(store, id=in_slot(7))
        clock.advance(5)
        await put(store, id=in_slot(7))
        [queue] = (await store.stats(TENANT)).queues
        assert queue.oldest_ready_ms == first_ms
        await take(store)
        [queue] = (await store.stats(TENANT)).queues
        assert queue.oldest_ready_ms == first_ms + 5_000
        await take(store)
        [queue] = (await store.stats(TENANT)).queues
        assert queue.oldest_ready_ms is None

    async def test_the_age_of_what_became_ready_later(self, store: Store, clock: ManualClock) -> None:
        """A task that was delayed or retried has waited since it became ready, not since it was enqueued."""
        await put(store, delay_s=60)
        await pass_time(store, clock, 60)
        assert (await store.stats(TENANT)).queues[0].oldest_ready_ms == clock.now_ms()
        lease = await take(store)
        clock.advance(5)
        await retry(store, lease)
        assert (await store.stats(TENANT)).queues[0].oldest_ready_ms == clock.now_ms()

    async def test_pauses_are_shown(self, store: Store) -> None:
        """A paused queue says so in its counts."""
        await put(store)
        await store.configure(TENANT, COMMAND, QueueConfig(paused=True))
        [queue] = (await store.stats(TENANT)).queues
        assert (queue.paused, queue.ready) == (True, 1)

    async def test_a_queue_that_was_only_configured_is_listed(self, store: Store) -> None:
        """A queue that is paused before its first task is there, with zeros, until it is as any other."""
        await store.configure(TENANT, "later", QueueConfig(paused=True))
        [queue] = (await store.stats(TENANT)).queues
        assert (queue.command, queue.paused, queue.ready) == ("later", True, 0)
        await store.configure(TENANT, "later", QueueConfig())
        assert (await store.stats(TENANT)).queues == []
