"""Order: priority first, then first in, first out; as closely as the store declares."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Order, Store
from dibs.task import Enqueued, NewTask
from dibs.testing.contract.harness import StoreHarness
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    complete,
    drain,
    fail,
    in_slot,
    pass_time,
    put,
    put_many,
    release,
    retry,
    sweep_all,
    take,
    take_many,
)

SLOT = 7
"""All tasks of a test whose order matters are in one slot: one shard, so that `per_shard` promises strict order."""


def assert_order(order: Order, expected: list[bytes], got: list[bytes]) -> None:
    """`got` is `expected` as closely as `order` promises, and nothing is missing or extra."""
    assert sorted(got) == sorted(expected)
    if order.kind != "window":
        assert got == expected
        return
    left = list(expected)
    for task_id in got:
        assert task_id in left[: order.window], "a task came from behind the declared window"
        left.remove(task_id)


async def line_up(store: Store, count: int = 1, command: str = COMMAND, **options: Any) -> list[bytes]:
    """Enqueues tasks one after the other, all in one slot."""
    return [await put(store, command, id=in_slot(SLOT), **options) for _ in range(count)]


@pytest.mark.anyio
class TestOrder:
    """What was acknowledged first is claimed first within its priority; higher priorities come before lower ones."""

    async def test_the_store_declares_the_order_it_is_meant_to(self, store: Store, harness: StoreHarness) -> None:
        """A weaker order is a decision of the store's author, not an accident."""
        assert store.order == harness.order
        assert store.order.window >= 1

    @pytest.mark.parametrize("limit", [1, 7])
    async def test_first_in_first_out(self, store: Store, limit: int) -> None:
        """An enqueue acknowledged before another began comes first, however many a claim takes."""
        ids = await line_up(store, 30)
        assert_order(store.order, ids, await drain(store, limit=limit))

    async def test_a_batch_keeps_its_order(self, store: Store) -> None:
        """Tasks of one batch come in the order they were given, and before the next batch."""
        tasks = [NewTask(command=COMMAND, id=in_slot(SLOT)) for _ in range(80)]
        for batch in (tasks[:50], tasks[50:]):
            assert all(isinstance(outcome, Enqueued) for outcome in await store.enqueue(TENANT, batch))
        assert_order(store.order, [task.id for task in tasks], await drain(store))

    async def test_the_order_is_not_that_of_the_ids(self, store: Store) -> None:
        """Ids minted earlier but enqueued later come later."""
        ids = [in_slot(SLOT) for _ in range(10)]
        for task_id in reversed(ids):
            await put(store, id=task_id)
        assert_order(store.order, ids[::-1], await drain(store))

    async def test_higher_priorities_come_first(self, store: Store) -> None:
        """Every priority from 9 to 0 is emptied before the next lower one, whatever the order of arrival."""
        by_priority = {priority: await line_up(store, priority=priority) for priority in (3, 0, 9, 5, 1, 8, 2, 7, 4, 6)}
        expected = [by_priority[priority][0] for priority in range(9, -1, -1)]
        assert_order(store.order, expected, await drain(store))

    async def test_first_in_first_out_within_each_priority(self, store: Store) -> None:
        """Mixed arrivals come out by priority, and in order of arrival within it."""
        arrived = [(priority, (await line_up(store, priority=priority))[0]) for priority in (2, 5, 2, 9, 5, 2, 9, 0)]
        expected = [task_id for _, task_id in sorted(arrived, key=lambda pair: -pair[0])]
        assert_order(store.order, expected, await drain(store, limit=3))

    async def test_a_late_higher_priority_overtakes(self, store: Store) -> None:
        """A claim always takes the best that is ready now."""
        low = await line_up(store, 2)
        first = await take(store)
        high = await line_up(store, priority=1)
        rest = await drain(store)
        assert_order(store.order, [low[0], *high, low[1]], [first.id, *rest])

    async def test_retried_goes_to_the_back(self, store: Store) -> None:
        """A retried task enters behind what is ready in its priority, and stays before lower ones."""
        high = await line_up(store, 3, priority=5)
        low = await line_up(store, 1, priority=4)
        lease = await take(store)
        await retry(store, lease)
        others = [task_id for task_id in high if task_id != lease.id]
        assert_order(store.order, [*others, lease.id, *low], await drain(store))

    async def test_expired_goes_to_the_back(self, store: Store, clock: ManualClock) -> None:
        """A task whose lease ran out enters behind what is ready in its priority."""
        ids = await line_up(store, 3)
        lease = await take(store)
        assert (await pass_time(store, clock, 31)).expired == 1
        others = [task_id for task_id in ids if task_id != lease.id]
        assert_order(store.order, [*others, lease.id], await drain(store))

    async def test_promoted_goes_to_the_back(self, store: Store, clock: ManualClock) -> None:
        """A delayed task enters when it falls due, not where it would have stood, and in the order of promotion."""
        late = await line_up(store, delay_s=20)
        early = await line_up(store, delay_s=10)
        ready = await line_up(store, 2)
        for _ in range(2):
            clock.advance(10)
            assert (await sweep_all(store)).promoted == 1
        newest = await line_up(store)
        assert_order(store.order, [*ready, *early, *late, *newest], await drain(store))

    async def test_replayed_goes_to_the_back(self, store: Store) -> None:
        """A dead letter that is replayed enters behind what is ready."""
        dead = await line_up(store)
        await fail(store, await take(store))
        ready = await line_up(store, 2)
        assert (await store.replay(TENANT, dead)).ids == dead
        assert_order(store.order, [*ready, *dead], await drain(store))

    async def test_released_returns_to_its_exact_place(self, store: Store) -> None:
        """What is given back stands where it stood: before everything behind it, in whatever order it is released."""
        ids = await line_up(store, 6)
        leases = await take_many(store, 4)
        claimed = [lease.id for lease in leases]
        untouched = [task_id for task_id in ids if task_id not in claimed]
        for index in (2, 0, 3):
            await release(store, leases[index])
        newest = await line_up(store)
        expected = [claimed[0], claimed[2], claimed[3], *untouched, *newest]
        assert_order(store.order, expected, await drain(store))

    async def test_released_returns_within_its_priority(self, store: Store) -> None:
        """A released task of a low priority does not overtake a higher one."""
        low = await line_up(store, 2, priority=1)
        lease = await take(store)
        high = await line_up(store, priority=2)
        await release(store, lease)
        assert_order(store.order, [*high, lease.id, *(i for i in low if i != lease.id)], await drain(store))

    async def test_released_after_a_retry_returns_to_its_last_place(self, store: Store) -> None:
        """The place a release restores is the one the last claim took it from, not the first ever."""
        ids = await line_up(store, 3)
        retried = await take(store)
        await retry(store, retried)
        for lease in await take_many(store, 3):
            await release(store, lease)
        others = [task_id for task_id in ids if task_id != retried.id]
        assert_order(store.order, [*others, retried.id], await drain(store))

    async def test_commands_are_tried_in_the_order_given(self, store: Store) -> None:
        """The first command named is emptied before the second, whatever the priorities."""
        first = await line_up(store, 2, "first")
        second = await line_up(store, 2, "second", priority=9)
        leases = await store.claim(TENANT, ["first", "second"], limit=3)
        assert [lease.command for lease in leases] == ["first", "first", "second"]
        for lease in leases:
            await release(store, lease)
        assert_order(store.order, [*second, *first], await drain(store, "second", "first"))

    async def test_work_behind_leased_and_delayed_tasks_is_found(self, store: Store) -> None:
        """However many tasks are leased or delayed in front, a claim finds the ready one behind them."""
        await put_many(store, 1_200, priority=9)
        await take_many(store, 1_000)
        await take_many(store, 200)
        await put_many(store, 400, priority=9, delay_s=60)
        task_id = await put(store, priority=0)
        assert (await take(store)).id == task_id

    async def test_work_behind_finished_tasks_is_found(self, store: Store) -> None:
        """Tasks that came and went at the head of the queue do not hide what comes after."""
        for _ in range(3):
            await put_many(store, 300)
            for lease in await take_many(store, 300):
                await complete(store, lease)
        task_id = await put(store)
        assert (await take(store)).id == task_id

    async def test_concurrent_claims_share_without_overlap(self, store: Store) -> None:
        """Claims at the same time take different tasks, and together all of them."""
        ids = await put_many(store, 60)
        answers = await asyncio.gather(*(store.claim(TENANT, [COMMAND], limit=10, worker=f"w{n}") for n in range(8)))
        claimed = [lease.id for leases in answers for lease in leases]
        assert len(claimed) == len(set(claimed))
        assert sorted(claimed + await drain(store)) == sorted(ids)
