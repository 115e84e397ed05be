"""Workers: a registry of who is alive, which nothing else depends on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import WorkerInfo
from dibs.testing.contract.steps import TENANT, sweep_all


async def names(store: Store, tenant: str = TENANT) -> list[str]:
    """Returns the names of the workers that are alive."""
    return [info.name for info in await store.workers(tenant)]


@pytest.mark.anyio
class TestWorkers:
    """A worker is alive for as long as it said when it registered last."""

    async def test_a_worker_tells_of_itself(self, store: Store, clock: ManualClock) -> None:
        """What it told is returned, with the store's time of when it was seen."""
        info = WorkerInfo(
            name="w", host="h", pid=7, slots=4, busy=2, commands=["a", "b"], started_ms=5, memory_bytes=1 << 40
        )
        await store.register(TENANT, info, 60)
        assert list(await store.workers(TENANT)) == [replace(info, seen_ms=clock.now_ms())]

    async def test_the_latest_word_counts(self, store: Store, clock: ManualClock) -> None:
        """Registering again replaces what was told, and when."""
        await store.register(TENANT, WorkerInfo(name="w", busy=1), 60)
        clock.advance(30)
        await store.register(TENANT, WorkerInfo(name="w", busy=2), 60)
        assert list(await store.workers(TENANT)) == [WorkerInfo(name="w", busy=2, seen_ms=clock.now_ms())]

    async def test_forgotten_after_its_time(self, store: Store, clock: ManualClock) -> None:
        """A worker that fell silent is not listed, whether or not anybody swept."""
        await store.register(TENANT, WorkerInfo(name="short"), 10)
        await store.register(TENANT, WorkerInfo(name="long"), 100)
        clock.advance(9)
        assert await names(store) == ["long", "short"]
        clock.advance(2)
        assert await names(store) == ["long"]
        await sweep_all(store)
        assert await names(store) == ["long"]
        clock.advance(100)
        await sweep_all(store)
        assert await names(store) == []

    async def test_refreshed_it_lives_on(self, store: Store, clock: ManualClock) -> None:
        """Each registration counts from itself; the end of an earlier one means nothing."""
        for _ in range(5):
            await store.register(TENANT, WorkerInfo(name="w"), 10)
            clock.advance(9)
            await sweep_all(store)
            assert await names(store) == ["w"]

    async def test_zero_is_goodbye(self, store: Store) -> None:
        """A worker that stops says so and is gone at once."""
        await store.register(TENANT, WorkerInfo(name="w"), 60)
        await store.register(TENANT, WorkerInfo(name="w"), 0)
        assert await names(store) == []

    async def test_any_printable_name(self, store: Store) -> None:
        """Names are text, not syntax: separators and other scripts are fine, and the list is in order."""
        odd = ["w", "w:1", "w/1", "w.1", "../w", "w w", "名前", "w" * 128]
        for name in odd:
            await store.register(TENANT, WorkerInfo(name=name), 60)
        assert await names(store) == sorted(odd, key=str.encode)

    async def test_tenants_have_their_own(self, store: Store) -> None:
        """The same name of another tenant is another worker."""
        await store.register("a", WorkerInfo(name="w", busy=1), 60)
        await store.register("a.b", WorkerInfo(name="w", busy=2), 60)
        [info] = await store.workers("a")
        assert info.busy == 1
        await store.register("a", WorkerInfo(name="w"), 0)
        assert await names(store, "a.b") == ["w"]
