"""Servers that the contract suite runs over, each with a store behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dibs.clock import Clock
from dibs.server import app
from dibs.server.app import Service, open_service
from dibs.server.config import ServerConfig
from dibs.server.http.listener import bind
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.protocol import Order, Store
from dibs.testing.contract import StoreHarness


class Servers:
    """The servers of one test, in its event loop: one for each store that it names. What is stored outlives a server;
    its clients go on with the next."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Service, str]] = {}

    async def url_of(self, store_url: str, clock: Clock) -> str:
        """Returns the URL of the server of a store; starts it if it does not run."""
        if store_url not in self._running:
            # What a server adds does not depend on fsync, which the store behind it is tested with.
            settings = Settings(url=store_url, durability="relaxed")
            service = await open_service(ServerConfig(), settings, clock)
            bound = bind("127.0.0.1", 0)
            await service.start(bound)
            self._running[store_url] = (service, f"http://127.0.0.1:{bound.getsockname()[1]}")
        return self._running[store_url][1]

    async def stop(self) -> None:
        """Stops all of them."""
        for service, _ in self._running.values():
            await service.stop()
        self._running.clear()

    def opener(self, store_url: str) -> Callable[[Clock], Awaitable[Store]]:
        """Returns what opens a client of the server of a store."""

        async def opened(clock: Clock) -> Store:
            return await open_store(await self.url_of(store_url, clock))

        return opened


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test sweeps: it goes by what its own sweeps do, and by what stands still between two of its looks."""
    monkeypatch.setattr(app, "SWEEP_EVERY_S", 3600.0)


@pytest.fixture
async def servers(no_sweep: None) -> AsyncIterator[Servers]:
    """Servers that stop with the test."""
    running = Servers()
    yield running
    await running.stop()


@pytest.fixture(params=["memory", pytest.param("lmdb", marks=pytest.mark.soak), "shards"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> StoreHarness:
    """A server over every kind of store. One on disk is another to the server only in what it outlives."""
    urls = {
        "memory": (f"memory:{tmp_path}", "memory:other"),
        "lmdb": (f"lmdb:{tmp_path / 'store'}", f"lmdb:{tmp_path / 'other'}"),
        "shards": (f"shards:memory:{tmp_path}?n=3", "shards:memory:other?n=3"),
    }
    store, other = urls[request.param]
    return StoreHarness(
        open=servers.opener(store),
        open_other=servers.opener(other),
        reopens=True,
        shares=True,
        order=Order("per_shard") if request.param == "shards" else Order(),
    )
