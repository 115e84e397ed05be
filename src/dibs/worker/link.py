"""A connection to a store that lasts: a worker's to that of an app, or anybody's to one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dibs.app import Dibs
from dibs.errors import StoreClosed, StoreUnavailable
from dibs.retry import Backoff
from dibs.stores.protocol import Store

log = logging.getLogger("dibs.worker")

T = TypeVar("T")

Opener = Callable[[bool], Awaitable[Store]]
"""Opens a store; told whether to make one that is not there."""

PAUSES = Backoff(base_s=0.2, cap_s=10.0, jitter="equal")


class StoreLink:
    """Asks a store, and asks again when it does not answer: with growing pauses, saying so, and in the end giving up.
    What it repeats is safe to repeat."""

    def __init__(self, opener: Opener, name: str, give_up_s: float, *, create: bool = True) -> None:
        """`name`: of the store, in what is logged."""
        self._opener = opener
        self._name = name
        self._give_up_s = give_up_s
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._create = create
        """Once. A store that was there and is not any more was removed: an empty one in its place would hide that."""

    async def ask(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """Returns the answer. Raises what the store raised once this question has not been answered for so long,
        whatever became of others: a store that can still be read, but not written, is of no use."""
        failures = 0
        failing_since_s = 0.0
        while True:
            store = None
            try:
                store = await self.store()
                answer = await question(store)
            except (StoreUnavailable, StoreClosed) as error:
                await self.let_go(store)
                failures += 1
                failing_since_s = failing_since_s or time.monotonic()
                await self._pause(error, failures, time.monotonic() - failing_since_s)
            else:
                if failures:
                    log.warning("%s answers again", self._name)
                return answer

    @property
    def is_open(self) -> bool:
        """Whether a store is at hand from before."""
        return self._store is not None

    async def store(self, *, create: bool = False) -> Store:
        """Returns the store, opened if it is not; `create`: made, too, if there is none."""
        if self._store is None:
            async with self._opening:
                if self._store is None:
                    self._store = await self._opener(create or self._create)
                    self._create = False
        return self._store

    async def let_go(self, store: Store | None) -> None:
        """Closes a store that does not answer, so that the next question opens it anew."""
        if store is not None and self._store is store:
            self._store = None
            with contextlib.suppress(StoreUnavailable, StoreClosed):
                await store.close()

    async def _pause(self, error: Exception, failures: int, failing_s: float) -> None:
        if failing_s >= self._give_up_s:
            log.error("%s has not answered for %.0f s: giving up", self._name, failing_s)
            raise error
        pause_s = min(PAUSES.delay_s(failures), self._give_up_s - failing_s)
        log.warning("%s does not answer (%s); trying again in %.1f s", self._name, error, pause_s)
        await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Lets go of the store."""
        if self._store is not None:
            await self._store.close()


class Link(StoreLink):
    """A worker's link to one app's store."""

    def __init__(self, app: Dibs, give_up_s: float, *, create: bool = True) -> None:
        super().__init__(lambda create: app.open(create=create), repr(app), give_up_s, create=create)
        self.app = app
