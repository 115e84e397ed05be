"""Wake-ups: who waits is told at once, one task wakes one claimer, and a cancelled wait loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.stores.wakeups import Ready
from dibs.task import Lease
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    assert_counts,
    complete,
    fail,
    pass_time,
    put,
    put_many,
    release,
    retry,
    soon,
    take,
    waiting,
)


def waiting_claim(store: Store, *commands: str, limit: int = 1) -> Awaitable[list[Lease]]:
    """A claim that waits far longer than a wake-up takes."""
    return store.claim(TENANT, commands or (COMMAND,), limit=limit, wait_s=LONG_S)


async def by_enqueue(store: Store, _: ManualClock) -> Callable[[], Awaitable[object]]:
    """A new task."""
    return lambda: put(store)


async def by_release(store: Store, _: ManualClock) -> Callable[[], Awaitable[object]]:
    """A task that its holder gives back."""
    await put(store)
    lease = await take(store)
    return lambda: release(store, lease)


async def by_retry(store: Store, _: ManualClock) -> Callable[[], Awaitable[object]]:
    """A task that is retried at once."""
    await put(store)
    lease = await take(store)
    return lambda: retry(store, lease)


async def by_promotion(store: Store, clock: ManualClock) -> Callable[[], Awaitable[object]]:
    """A delayed task that the sweep promotes."""
    await put(store, delay_s=3600)
    return lambda: pass_time(store, clock, 3600)


async def by_expiry(store: Store, clock: ManualClock) -> Callable[[], Awaitable[object]]:
    """A task whose lease the sweep takes back."""
    await put(store)
    await take(store, lease_s=3600)
    return lambda: pass_time(store, clock, 3601)


async def by_replay(store: Store, _: ManualClock) -> Callable[[], Awaitable[object]]:
    """A dead letter that is replayed."""
    task_id = await put(store)
    await fail(store, await take(store))
    return lambda: store.replay(TENANT, [task_id])


WAYS = [by_enqueue, by_release, by_retry, by_promotion, by_expiry, by_replay]


@pytest.mark.anyio
@pytest.mark.usefixtures("no_fallback")
class TestWaitingClaims:
    """A claim with `wait_s` returns as soon as there is something, without polling the data."""

    @pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
    async def test_woken(
        self,
        store: Store,
        clock: ManualClock,
        way: Callable[[Store, ManualClock], Awaitable[Callable[[], Awaitable[object]]]],
    ) -> None:
        """Whatever makes a task ready wakes a claim that waits for it."""
        act = await way(store, clock)
        async with waiting(waiting_claim(store)) as [claim]:
            assert not claim.done()
            await act()
            assert len(await soon(claim)) == 1

    async def test_nothing_came(self, store: Store) -> None:
        """A wait that runs out is an empty answer."""
        assert await soon(store.claim(TENANT, [COMMAND], wait_s=0.05)) == []

    async def test_what_is_ready_is_not_waited_for(self, store: Store) -> None:
        """A claim returns what there is, also if it is less than its limit."""
        await put_many(store, 2)
        assert len(await soon(waiting_claim(store, limit=5))) == 2

    async def test_any_of_its_commands(self, store: Store) -> None:
        """A claim that names several queues is woken by each of them."""
        for command in ("a", "b", "c"):
            async with waiting(waiting_claim(store, "a", "b", "c")) as [claim]:
                await put(store, command)
                [lease] = await soon(claim)
            assert lease.command == command

    async def test_other_queues_do_not_serve_it(self, store: Store) -> None:
        """Tasks of another command or tenant are not for this claim."""
        async with waiting(waiting_claim(store)) as [claim]:
            await put(store, "other")
            await put(store, tenant="other")
            await asyncio.sleep(0.1)
            assert not claim.done()
            await put(store)
            assert len(await soon(claim)) == 1

    async def test_one_task_wakes_one_waiter(self, store: Store) -> None:
        """As many waiters are woken as there are tasks, not all of them."""
        with ExitStack() as stack:
            waiters = [stack.enter_context(store.subscribe([Ready(TENANT, COMMAND)])) for _ in range(6)]
            await put(store)
            await asyncio.sleep(0.1)
            assert sum(waiter.woken for waiter in waiters) == 1
            await put_many(store, 3)
            await asyncio.sleep(0.1)
            assert sum(waiter.woken for waiter in waiters) == 4

    async def test_each_of_many_waiters_gets_one(self, store: Store) -> None:
        """Waiting claims share what comes: nobody gets two while another gets none, and nobody is stranded."""
        async with waiting(*(waiting_claim(store) for _ in range(5))) as claims:
            first = await put(store)
            await asyncio.sleep(0.2)
            assert [claim.done() for claim in claims].count(True) == 1
            ids = [first, *await put_many(store, 4)]
            leases = [lease for claim in claims for lease in await soon(claim)]
        assert sorted(lease.id for lease in leases) == sorted(ids)

    async def test_who_loses_the_race_waits_on(self, store: Store) -> None:
        """A waiter whose task was taken before it looked is woken by the next one."""
        async with waiting(waiting_claim(store)) as [claim]:
            for _ in range(10):
                await put(store)
                if not await store.claim(TENANT, [COMMAND]):
                    break
            if not claim.done():
                await put(store)
            assert len(await soon(claim)) == 1

    async def test_a_cancelled_wait_passes_its_wake_up_on(self, store: Store) -> None:
        """A waiter that goes away when it was just woken leaves the task to the next."""
        for _ in range(10):
            async with waiting(waiting_claim(store), waiting_claim(store)) as [first, second]:
                task_id = await put(store)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                if first.cancelled():
                    [lease] = await soon(second)
                else:
                    [lease] = first.result()
                assert lease.id == task_id
                await complete(store, lease)

    @pytest.mark.parametrize("turns", range(8))
    async def test_a_cancelled_wait_loses_nothing(self, store: Store, turns: int) -> None:
        """Whenever a waiting claim is cancelled, the task it may have taken is free again, its attempt returned."""
        for pause_s in (0, 0, 0.001, 0.003):
            claim = asyncio.ensure_future(waiting_claim(store))
            await asyncio.sleep(0)
            task_id = await put(store)
            for _ in range(turns):
                await asyncio.sleep(pause_s)
            claim.cancel()
            await asyncio.gather(claim, return_exceptions=True)
            [lease] = await soon(waiting_claim(store)) if claim.cancelled() else claim.result()
            assert (lease.id, lease.attempt) == (task_id, 1)
            await complete(store, lease)
        assert (await assert_counts(store)).leased == 0

    async def test_claims_cancelled_again_and_again_use_up_nothing(self, store: Store) -> None:
        """A task that never reached anybody was never delivered: neither attempts nor releases are counted."""
        task_id = await put(store, max_attempts=1)
        for turns in [1, 2, 3] * 10:
            claim = asyncio.ensure_future(store.claim(TENANT, [COMMAND]))
            for _ in range(turns):
                await asyncio.sleep(0)
            claim.cancel()
            await asyncio.gather(claim, return_exceptions=True)
            # It finds nothing if the one before it is just being undone.
            for lease in [] if claim.cancelled() else claim.result():
                await release(store, lease)
        [lease] = await soon(waiting_claim(store))
        assert (lease.id, lease.attempt) == (task_id, 1)

    async def test_another_client_wakes_it(self, store: Store, second: Store) -> None:
        """What one client enqueues wakes a claim that waits at another."""
        async with waiting(waiting_claim(store)) as [claim]:
            task_id = await put(second)
            [lease] = await soon(claim)
        assert lease.id == task_id


@pytest.mark.anyio
class TestFallback:
    """A lost wake-up delays; it never strands."""

    async def test_every_wait_has_a_look_behind_it(self, store: Store, clock: ManualClock) -> None:
        """A task that falls due unannounced, with no sweep, is still found by the claim that waits for it."""
        task_id = await put(store, delay_s=3600)
        async with waiting(waiting_claim(store)) as [claim]:
            clock.advance(3600)
            [lease] = await soon(claim)
        assert lease.id == task_id
