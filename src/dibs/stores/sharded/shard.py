"""One shard: a store that is open, or down and tried again at most once a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from dibs.errors import StoreClosed, StoreCorrupt, StoreError, StoreUnavailable
from dibs.settings import mask
from dibs.stores.local import LocalStore
from dibs.stores.meter import Meter
from dibs.stores.sharded.table import Membership, check, membership_of

log = logging.getLogger("dibs.shards")

T = TypeVar("T")

#: Opens a store by its URL; without `create`, one that is not there is not made.
Opener = Callable[[str, bool], Awaitable[LocalStore]]

AGAIN_AFTER_S = 1.0


class Shard:
    """Asks one store of the set. One that does not answer is closed, and opened again when somebody asks later."""

    def __init__(self, url: str, member: Membership, opener: Opener, found: LocalStore | StoreError) -> None:
        """`found`: what opening it for the first time gave."""
        self.number = member.number
        self.url = mask(url)
        self._url = url
        self._member = member
        self._opener = opener
        self._opening = asyncio.Lock()
        self._opened_s = monotonic()
        self._complained_s = 0.0
        self._closed = False
        self._why: StoreError | None = None
        self._meter: Meter | None = None
        self.store: LocalStore | None = None
        """None while it is down."""
        if isinstance(found, StoreError):
            self._went_down(found)
        else:
            self.store = found

    @property
    def meter(self) -> Meter | None:
        """Who is told of the commits of this shard, also after it was opened again."""
        return self._meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._meter = meter
        if self.store is not None:
            self.store.meter = meter

    async def ask(self, question: Callable[[LocalStore], Awaitable[T]]) -> T:
        """Returns the store's answer; `StoreUnavailable` names the shard that has none."""
        store = self.store or await self._open_again()
        try:
            return await question(store)
        except (StoreUnavailable, StoreClosed) as error:
            self._check_open()
            await self._let_go(store, error)
            raise self._unavailable(error) from error
        except StoreCorrupt as error:
            # It can still be asked, and the doctor wants to: but nobody may overlook it.
            if monotonic() >= self._complained_s + AGAIN_AFTER_S:
                self._complained_s = monotonic()
                log.error("shard %d (%s) is damaged: %s", self.number, self.url, error)
            raise

    async def close(self) -> None:
        """Lets go of the store for good."""
        self._closed = True
        store, self.store = self.store, None
        if store is not None:
            await store.close()

    async def _open_again(self) -> LocalStore:
        async with self._opening:
            self._check_open()
            if self.store is not None:
                return self.store
            now_s = monotonic()
            if now_s >= self._opened_s + AGAIN_AFTER_S:
                self._opened_s = now_s
                try:
                    # Never made anew: an empty one in the place of one that was lost would hide the loss.
                    store = await self._opener(self._url, False)
                    await self._recognise(store)
                except StoreError as error:
                    self._check_open()
                    self._why = error
                else:
                    log.warning("shard %d (%s) answers again", self.number, self.url)
                    if self._meter is not None:
                        store.meter = self._meter
                    self.store = store
                    return store
            raise self._unavailable(self._why) from self._why

    async def _recognise(self, store: LocalStore) -> None:
        try:
            check(await membership_of(store), self._member, self.url)
            self._check_open()
        except StoreError:
            await store.close()
            raise

    async def _let_go(self, store: LocalStore, error: StoreError) -> None:
        if self.store is store:
            self.store = None
            self._went_down(error)
        with contextlib.suppress(StoreError):
            await store.close()

    def _went_down(self, error: StoreError) -> None:
        self._why = error
        log.warning("shard %d (%s) does not answer: %s", self.number, self.url, error)

    def _unavailable(self, why: StoreError | None) -> StoreUnavailable:
        return StoreUnavailable(f"shard {self.number} ({self.url}) does not answer: {why}")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this set of shards was closed: open it again")
