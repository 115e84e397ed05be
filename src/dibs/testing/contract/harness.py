"""What a store author gives the suite, and the fixtures that the suite makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from dibs.clock import Clock, ManualClock
from dibs.stores import waiting
from dibs.stores.protocol import Order, Store

STRICT = Order()


@dataclass(frozen=True, kw_only=True)
class StoreHarness:
    """How the suite gets at a store. A `harness` fixture returns a new one, over no data, for every test."""

    open: Callable[[Clock], Awaitable[Store]]
    """Opens the store on the given clock. Within one test it always names the same data."""
    open_other: Callable[[Clock], Awaitable[Store]] | None = None
    """Opens an unrelated store of the same kind: its cursors must not be taken for the first one's."""
    reopens: bool = False
    """True if what was stored outlives `close`, and `open` finds it again."""
    shares: bool = False
    """True if `open` gives a second client of the same data while the first is still open."""
    order: Order = STRICT
    """What the store is meant to declare: a weaker order must not come by accident."""


class Stores:
    """The stores that one test has open; all are closed when it ends."""

    def __init__(self, harness: StoreHarness, clock: Clock) -> None:
        self.harness = harness
        self._clock = clock
        self._open: list[Store] = []

    async def open(self) -> Store:
        """Opens the test's store, or a further client of it."""
        return self._keep(await self.harness.open(self._clock))

    async def open_other(self) -> Store:
        """Opens an unrelated store, or skips the test."""
        if self.harness.open_other is None:
            pytest.skip("the harness gives no unrelated store")
        return self._keep(await self.harness.open_other(self._clock))

    async def close_all(self) -> None:
        """Closes what is open, the newest first."""
        while self._open:
            await self._open.pop().close()

    def _keep(self, store: Store) -> Store:
        self._open.append(store)
        return store


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Stores are asyncio's."""
    return "asyncio", {}


@pytest.fixture
def clock() -> ManualClock:
    """The store's time: it stands still until the test moves it."""
    return ManualClock()


@pytest.fixture
async def stores(harness: StoreHarness, clock: ManualClock) -> AsyncIterator[Stores]:
    """Opens stores and closes them after the test."""
    opened = Stores(harness, clock)
    yield opened
    await opened.close_all()


@pytest.fixture
async def store(stores: Stores) -> Store:
    """The store under test, without any data."""
    return await stores.open()


@pytest.fixture
def reopen(stores: Stores) -> Callable[[], Awaitable[Store]]:
    """Closes the store and opens it again over the same data; skips where nothing outlives `close`."""
    if not stores.harness.reopens:
        pytest.skip("what this store holds does not outlive it")

    async def close_and_open() -> Store:
        await stores.close_all()
        return await stores.open()

    return close_and_open


@pytest.fixture
async def second(stores: Stores, store: Store) -> Store:
    """Another client of the same data, while the first is open; skips where there can be none."""
    if not stores.harness.shares:
        pytest.skip("this store has one client")
    other = await stores.open()
    assert other is not store
    return other


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away the look behind every wait, so that only a real wake-up can end it early."""
    monkeypatch.setattr(waiting, "FALLBACK_LOOK_S", 600.0)
