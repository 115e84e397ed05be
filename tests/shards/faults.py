"""Shards that fail when a test says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dibs.checks import Limits
from dibs.clock import Clock, SystemClock
from dibs.errors import StoreCorrupt, StoreUnavailable
from dibs.ids import key_digest
from dibs.settings import Settings
from dibs.stores import open_single
from dibs.stores.local import LocalStore
from dibs.stores.ordered.store import OrderedStore
from dibs.stores.sharded.opening import open_shards
from dibs.stores.sharded.store import ShardedStore
from dibs.stores.sharded.urls import parse

RELAXED = Settings(durability="relaxed")


class Crash(BaseException):
    """The end of the process, as far as the store can tell."""


class Faults:
    """What the shards of a set are to do: not to answer, or to raise before or after a verb."""

    def __init__(self) -> None:
        self.down: set[int] = set()
        self.damaged: set[int] = set()
        self.told: list[tuple[str, int]] = []
        """Every write of a load, in the order in which it ended, and the shard it was made in."""
        self.crash_at: int | None = None
        """How many writes of loads succeed before the process dies."""
        self.kill = False
        """Really."""
        self.between: tuple[int, Callable[[], Awaitable[None]]] | None = None
        """What happens, once, before a write of a load that has so many before it."""

    def check(self, number: int) -> None:
        """Raises if the shard is not to answer."""
        if number in self.down:
            raise StoreUnavailable("the test says so")
        if number in self.damaged:
            raise StoreCorrupt("the test says so")

    async def intervene(self) -> None:
        """Lets happen what is to happen before this write."""
        if self.between is not None:
            left, act = self.between
            self.between = (left - 1, act) if left else None
            if not left:
                await act()

    def count(self) -> None:
        """Dies if this is the write to die at."""
        if self.crash_at is not None:
            if self.crash_at == 0:
                if self.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Crash
            self.crash_at -= 1


def faulty(store: OrderedStore, number: int, faults: Faults) -> LocalStore:
    """Returns the store with faults: the verbs are its own, on the same engine."""

    class Faulty(OrderedStore):
        """An ordered store that asks first."""

        closing = False

        def _lane(self) -> Any:
            if not self.closing:
                faults.check(number)
            return super()._lane()

        async def close(self) -> None:
            self.closing = True
            await super().close()

        def _read(self, fn: Callable[..., Any]) -> Any:
            faults.check(number)
            return super()._read(fn)

        async def _stage(self, *args: Any, **kwargs: Any) -> Any:
            return await self._write("stage", super()._stage(*args, **kwargs))

        async def _reserve(self, *args: Any) -> Any:
            return await self._write("reserve", super()._reserve(*args))

        async def _decide(self, *args: Any) -> Any:
            return await self._write("decide", super()._decide(*args))

        async def _commit_chunks(self, *args: Any) -> Any:
            return await self._write("commit", super()._commit_chunks(*args))

        async def _done(self, *args: Any) -> Any:
            return await self._write("done", super()._done(*args))

        async def _write(self, what: str, call: Any) -> Any:
            await faults.intervene()
            try:
                faults.count()
            except Crash:
                call.close()
                raise
            answer = await call
            faults.told.append((what, number))
            return answer

    return Faulty(store._engine, store.limits, store._journal_limits)


async def open_faulty(url: str, faults: Faults, clock: Clock | None = None, *, create: bool = True) -> ShardedStore:
    """Opens ``shards:`` what `url` says, with faults."""
    named = parse(url)

    async def opener(one: str, create: bool) -> LocalStore:
        number = int(one.rpartition("/")[2])
        faults.check(number)
        return faulty(open_single(one, clock or SystemClock(), RELAXED, create=create), number, faults)

    return await open_shards(named, opener, Limits(), create=create)


def in_shard(number: int, count: int, tenant: str = "default", command: str = "work", what: str = "k") -> str:
    """Returns a key that belongs to the given one of so many shards."""
    return next(
        key for key in (f"{what}{n}" for n in range(10_000)) if key_digest(tenant, command, key)[-1] % count == number
    )


def directories(directory: Path) -> list[Path]:
    """The shards of a set, in order."""
    return sorted((path for path in directory.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
