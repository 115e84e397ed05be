"""Fair claims: tenants take turns, by weight, however many tasks each of them has."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dibs.clock import ManualClock
from dibs.errors import InvalidName
from dibs.ids import new_id
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.task import ALL_COMMANDS, Filter, Heartbeat, KeyLimit, QueueConfig, QueueLimits
from dibs.testing.contract.order import line_up
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    complete,
    pass_time,
    put,
    put_many,
    soon,
    take_many,
    waiting,
)


async def shares(store: Store, count: int, limit: int = 1) -> Counter[str]:
    """Claims from all tenants until it has so many, and says whose they are."""
    taken: Counter[str] = Counter()
    while taken.total() < count:
        leases = await store.claim(ALL_TENANTS, [COMMAND], limit=limit)
        assert leases, f"nothing more after {taken}"
        taken.update(lease.tenant for lease in leases)
    return taken


@pytest.mark.anyio
class TestFairClaims:
    """`claim("*")` serves every tenant that has something ready."""

    async def test_tenants_take_turns(self, store: Store) -> None:
        """One that has a thousand tasks gets no more than one that has ten, while both have some."""
        await put_many(store, 1_000, tenant="noisy")
        await put_many(store, 10, tenant="quiet")
        assert await shares(store, 20) == {"noisy": 10, "quiet": 10}
        assert await shares(store, 5) == {"noisy": 5}

    async def test_a_large_claim_is_filled(self, store: Store) -> None:
        """What one tenant does not have the others give, in one call."""
        await put_many(store, 1_000, tenant="noisy")
        await put_many(store, 3, tenant="quiet")
        leases = await store.claim(ALL_TENANTS, [COMMAND], limit=1_000)
        assert Counter(lease.tenant for lease in leases) == {"noisy": 997, "quiet": 3}

    async def test_a_tenant_keeps_its_own_order(self, store: Store) -> None:
        """Priority, then first in, first out; commands in the order given."""
        low = await line_up(store, 2, "b", priority=1)
        high = await line_up(store, 2, "b", priority=5)
        other = await line_up(store, 2, "a")
        leases = await store.claim(ALL_TENANTS, ["a", "b"], limit=10)
        assert [lease.id for lease in leases] == [*other, *high, *low]

    async def test_weights(self, store: Store) -> None:
        """A tenant of weight 3 gets three for each one of the others, with claims of any size."""
        for tenant in ("heavy", "light", "plain"):
            await put_many(store, 400, tenant=tenant)
        await store.configure("heavy", ALL_COMMANDS, QueueConfig(weight=3))
        assert await shares(store, 50, limit=1) == {"heavy": 30, "light": 10, "plain": 10}
        assert await shares(store, 80, limit=4) == {"heavy": 48, "light": 16, "plain": 16}

    async def test_leases_name_their_tenant(self, store: Store) -> None:
        """What was claimed so is settled and extended like any other lease."""
        task_id = await put(store, tenant="acme")
        [lease] = await store.claim(ALL_TENANTS, [COMMAND], worker="w")
        assert (lease.tenant, lease.id) == ("acme", task_id)
        assert await store.heartbeat([Heartbeat(tenant="acme", id=task_id, token=lease.token)])
        await complete(store, lease)
        assert (await store.stats("acme")).total.leased == 0

    async def test_nothing_ready(self, store: Store) -> None:
        """Without tasks, or with none of these commands, there is nothing."""
        assert await store.claim(ALL_TENANTS, [COMMAND]) == []
        await put(store, "other")
        assert await store.claim(ALL_TENANTS, [COMMAND], limit=5) == []

    async def test_a_crowd_with_nothing_to_give_is_passed(self, store: Store) -> None:
        """Paused, capped or busy with other commands: behind all of them the one that has something is found."""
        for n in range(450):
            tenant = f"t{n:03}"
            await put(store, "other" if n % 3 == 0 else COMMAND, tenant=tenant)
            if n % 3 == 1:
                await store.configure(tenant, COMMAND, QueueConfig(paused=True))
            if n % 3 == 2:
                await put(store, tenant=tenant)
                await store.configure(tenant, ALL_COMMANDS, QueueConfig(limits=QueueLimits(in_flight=1)))
                await take_many(store, 1, tenant=tenant)
        for tenant in ("a", "t200x", "z"):
            task_id = await put(store, tenant=tenant)
            assert [lease.id for lease in await store.claim(ALL_TENANTS, [COMMAND], limit=3)] == [task_id]
            assert await store.claim(ALL_TENANTS, [COMMAND], limit=3) == []

    async def test_caps_and_limits_hold(self, store: Store) -> None:
        """Every claim honours them, this one too."""
        for tenant in ("a", "b"):
            await put_many(store, 5, tenant=tenant)
        await put_many(store, 5, tenant="c", limit_key="k")
        await store.configure("a", COMMAND, QueueConfig(limits=QueueLimits(in_flight=2)))
        await store.configure("b", ALL_COMMANDS, QueueConfig(limits=QueueLimits(in_flight=3)))
        await store.configure("c", COMMAND, QueueConfig(limits=QueueLimits(per_key=KeyLimit(in_flight=1))))
        leases = await store.claim(ALL_TENANTS, [COMMAND], limit=100)
        assert Counter(lease.tenant for lease in leases) == {"a": 2, "b": 3, "c": 1}

    async def test_what_is_due_is_found(self, store: Store, clock: ManualClock) -> None:
        """Delayed tasks that are due, and leases that ran out, of tenants that nobody else claims from."""
        late = await put(store, tenant="late", delay_s=5)
        lost = await put(store, tenant="lost")
        assert [lease.id for lease in await store.claim(ALL_TENANTS, [COMMAND], limit=5, lease_s=5)] == [lost]
        clock.advance(6)
        assert {lease.id for lease in await store.claim(ALL_TENANTS, [COMMAND], limit=5)} == {late, lost}

    async def test_tasks_past_their_start_deadline(self, store: Store, clock: ManualClock) -> None:
        """However many a tenant has of them, what is behind them comes."""
        for _ in range(2):
            await put_many(store, 1_000, tenant="late", expires_s=5)
        good = await put(store, tenant="late")
        await put_many(store, 2, tenant="early", expires_s=5)
        clock.advance(6)
        assert [lease.id for lease in await store.claim(ALL_TENANTS, [COMMAND], limit=5)] == [good]

    async def test_a_repeat_returns_the_same_leases(self, store: Store, clock: ManualClock) -> None:
        """A claim id is remembered for all tenants, while one of its leases lives; a tenant's own is another."""
        for tenant in ("a", "b", "c"):
            await put_many(store, 2, tenant=tenant)
        claim_id = new_id()
        leases = await store.claim(ALL_TENANTS, [COMMAND], limit=3, claim_id=claim_id)
        assert len({lease.tenant for lease in leases}) == 3
        assert await store.claim(ALL_TENANTS, [COMMAND], limit=3, claim_id=claim_id) == leases
        await complete(store, leases[0])
        assert await store.claim(ALL_TENANTS, [COMMAND], limit=3, claim_id=claim_id) == leases[1:]
        assert len(await store.claim("a", [COMMAND], claim_id=claim_id)) == 1
        await pass_time(store, clock, 40)
        again = await store.claim(ALL_TENANTS, [COMMAND], limit=9, claim_id=claim_id)
        assert len(again) == 5
        assert sorted((await store.tenants()).tenants) == ["a", "b", "c"]

    async def test_claims_at_once(self, store: Store) -> None:
        """Claims in one moment share what there is, and no task is given twice."""
        for n in range(10):
            await put_many(store, 3, tenant=f"t{n}")
        taken = await asyncio.gather(*(store.claim(ALL_TENANTS, [COMMAND], limit=2) for _ in range(20)))
        leases = [lease for some in taken for lease in some]
        assert len({lease.id for lease in leases}) == len(leases) == 30

    async def test_a_cancelled_claim_gives_back(self, store: Store) -> None:
        """What a claim had taken when its caller went is there for the next."""
        await put(store, tenant="a")
        call = asyncio.ensure_future(store.claim(ALL_TENANTS, [COMMAND]))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert len(await soon(store.claim(ALL_TENANTS, [COMMAND], wait_s=LONG_S))) == 1

    @pytest.mark.usefixtures("no_fallback")
    async def test_any_tenants_task_wakes_who_waits(self, store: Store) -> None:
        """Also a tenant's that nobody had heard of."""
        async with waiting(store.claim(ALL_TENANTS, [COMMAND], wait_s=LONG_S)) as [waits]:
            task_id = await put(store, tenant="new")
            assert [lease.id for lease in await soon(waits)] == [task_id]

    @pytest.mark.usefixtures("no_fallback")
    async def test_one_task_wakes_one_of_them(self, store: Store) -> None:
        """Whoever waits for the tenant, and whoever waits for all, get a task each when there are two."""
        calls = store.claim(TENANT, [COMMAND], wait_s=LONG_S), store.claim(ALL_TENANTS, [COMMAND], wait_s=LONG_S)
        async with waiting(*calls) as waits:
            await put(store)
            done, left = await asyncio.wait(waits, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert (len(done), len(left)) == (1, 1)
            await put(store)
            assert len(await soon(next(iter(left)))) == 1

    @pytest.mark.usefixtures("no_fallback")
    async def test_who_leaves_passes_the_word_on(self, store: Store) -> None:
        """A claimer of all tenants that is cancelled as it is woken leaves the task to a tenant's own."""
        calls = store.claim(ALL_TENANTS, [COMMAND], wait_s=LONG_S), store.claim(ALL_TENANTS, [COMMAND], wait_s=LONG_S)
        async with waiting(*calls) as [first, second]:
            await put(store, tenant="a")
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            if first.cancelled():
                assert len(await soon(second)) == 1

    @pytest.mark.usefixtures("no_fallback")
    async def test_room_wakes_who_waits_for_all(self, store: Store) -> None:
        """A lease that ends in a tenant at its cap is heard."""
        await put_many(store, 2, tenant="a")
        await store.configure("a", ALL_COMMANDS, QueueConfig(limits=QueueLimits(in_flight=1)))
        [lease] = await store.claim(ALL_TENANTS, [COMMAND])
        async with waiting(store.claim(ALL_TENANTS, [COMMAND], wait_s=LONG_S)) as [waits]:
            assert not waits.done()
            await complete(store, lease)
            assert len(await soon(waits)) == 1

    async def test_every_tenant_is_nobody_elsewhere(self, store: Store) -> None:
        """The verbs that are about one tenant refuse it, and say so."""
        with pytest.raises(InvalidName, match="every tenant"):
            await store.stats(ALL_TENANTS)
        with pytest.raises(InvalidName, match="every tenant"):
            await store.list(ALL_TENANTS, Filter())
        with pytest.raises(InvalidName):
            await store.enqueue(ALL_TENANTS, [])
