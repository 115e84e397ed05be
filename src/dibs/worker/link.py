"""A worker's connection to one app's store."""

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

PAUSES = Backoff(base_s=0.2, cap_s=10.0, jitter="equal")


class Link:
    """Asks the store, and asks again when it does not answer: with growing pauses, saying so, and in the end giving
    up. What it repeats is safe to repeat."""

    def __init__(self, app: Dibs, give_up_s: float) -> None:
        self.app = app
        self._give_up_s = give_up_s
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._good_s = time.monotonic()
        self._failures = 0

    async def ask(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """Returns the answer. Raises what the store raised once nothing has been answered for so long."""
        while True:
            store = None
            try:
                store = await self._open()
                answer = await question(store)
            except (StoreUnavailable, StoreClosed) as error:
                await self._broken(store, error)
            else:
                self._well()
                return answer

    async def _open(self) -> Store:
        if self._store is None:
            async with self._opening:
                if self._store is None:
                    self._store = await self.app.open()
        return self._store

    async def _broken(self, store: Store | None, error: Exception) -> None:
        if store is not None and self._store is store:
            self._store = None
            with contextlib.suppress(StoreUnavailable, StoreClosed):
                await store.close()
        silent_s = time.monotonic() - self._good_s
        if silent_s > self._give_up_s:
            log.error("%r has not answered for %.0f s: giving up", self.app, silent_s)
            raise error
        self._failures += 1
        pause_s = PAUSES.delay_s(self._failures)
        log.warning("%r does not answer (%s); trying again in %.1f s", self.app, error, pause_s)
        await asyncio.sleep(pause_s)

    def _well(self) -> None:
        self._good_s = time.monotonic()
        if self._failures:
            self._failures = 0
            log.warning("%r answers again", self.app)

    async def close(self) -> None:
        """Lets go of the store."""
        if self._store is not None:
            await self._store.close()
