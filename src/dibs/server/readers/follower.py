"""Named readers of the journal that a server runs: every tenant's events, in the order of their shard, at least once.

A reader's position is kept in the store, so that it goes on where it stopped, and trimming waits for it within the
journal's size. It moves on after the events were handled: what was being handled when the server died comes again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from dibs.errors import DibsError, JournalError, StoreClosed
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.stores.wakeups import Journalled
from dibs.task import BATCH_MAX, Event

log = logging.getLogger("dibs.readers")

#: Does something with events; if it raises, they come again.
Handle = Callable[[Sequence[Event]], Awaitable[None]]

LOOK_S = 1.0
"""Behind wake-ups that get lost."""
LINGER_S = 0.05
"""Between a wake-up and a look: what happens within it is handled together."""
PAGES_MAX = 8
"""So many pages of events are handled at once, if there are as many."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 30.0


class JournalFollower:
    """Has events handled, for ever. `run` it in a task, and cancel that to stop it."""

    def __init__(self, store: Store, name: str, handle: Handle, *, linger_s: float = LINGER_S) -> None:
        self._store = store
        self._name = name
        self._handle = handle
        self._linger_s = linger_s
        self._shards: list[_Shard] = []

    async def run(self) -> None:
        """Follows every shard until it is cancelled, or the store is closed. A shard that does not answer, or whose
        events cannot be handled, is tried again later; the others go on."""
        try:
            await self._find_shards()
            await self._follow()
        except StoreClosed:
            log.info("the reader %s stops: the store is closed", self._name)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        with self._store.subscribe([Journalled()]) as news:
            while True:
                more = False
                for shard in self._shards:
                    if loop.time() >= shard.again_s:
                        more = await self._step(shard) or more
                if not more:
                    waits_s = [max(0.0, shard.again_s - loop.time()) for shard in self._shards if shard.failures]
                    if await news.wait(min([LOOK_S, *waits_s])):
                        await asyncio.sleep(self._linger_s)

    async def _find_shards(self) -> None:
        """Asks where it stands in each shard, until there is an answer. A new reader begins with what is kept."""
        failures = 0
        while True:
            try:
                known = {
                    reader.shard: reader.position for reader in await self._store.readers() if reader.name == self._name
                }
                bounds = await self._store.journal_bounds()
                for one in bounds:
                    if one.shard not in known:
                        # From now on trimming waits for it.
                        await self._store.advance(self._name, one.shard, one.oldest)
                self._shards = [_Shard(one.shard, known.get(one.shard, one.oldest)) for one in bounds]
                return
            except StoreClosed:
                raise
            except DibsError as error:
                failures += 1
                log.warning("the reader %s cannot begin: %s", self._name, error)
                await asyncio.sleep(_backoff_s(failures))

    async def _step(self, shard: _Shard) -> bool:
        """Handles what is next in a shard. Returns whether there is more."""
        try:
            more = await self._read(shard)
        except StoreClosed:
            raise
        except JournalError as error:
            log.error(
                "the reader %s has lost events of shard %d and goes on with the oldest that are kept: %s",
                self._name, shard.number, error,
            )  # fmt: skip
            shard.position = None
            return True
        except Exception as error:
            shard.failures += 1
            wait_s = _backoff_s(shard.failures)
            shard.again_s = asyncio.get_running_loop().time() + wait_s
            log.warning(
                "the reader %s tries shard %d again in %.1f s: %s: %s",
                self._name, shard.number, wait_s, type(error).__name__, error,
                exc_info=None if isinstance(error, DibsError | OSError) else error,
            )  # fmt: skip
            return False
        shard.failures = 0
        return more

    async def _read(self, shard: _Shard) -> bool:
        events: list[Event] = []
        at, more = shard.position, True
        for _ in range(PAGES_MAX):
            page = await self._store.events(ALL_TENANTS, shard=shard.number, after=at, limit=BATCH_MAX)
            events += page.events
            at, more = page.cursor, page.more
            if not more:
                break
            await asyncio.sleep(0)  # a page takes a moment to read: others have their turn
        if events:
            await self._handle(events)
        if at != shard.position:
            await self._store.advance(self._name, shard.number, at)
            shard.position = at
        return more


class _Shard:
    """How far a reader is in one shard."""

    __slots__ = ("again_s", "failures", "number", "position")

    def __init__(self, number: int, position: bytes | None) -> None:
        self.number = number
        self.position = position
        """None: before the oldest that is kept."""
        self.failures = 0
        self.again_s = 0.0
        """Not before."""


def _backoff_s(failures: int) -> float:
    longest_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(failures - 1, 16))
    return random.uniform(longest_s / 2, longest_s)
