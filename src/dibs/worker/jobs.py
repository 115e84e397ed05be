"""A claimed task while a worker holds it, and the slots that limit how many there are."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dibs.context import CurrentTask
from dibs.function import TaskFunction
from dibs.task import Lease, Progress

if TYPE_CHECKING:
    from dibs.worker.lanes import Lane
    from dibs.worker.link import Link


class Why(StrEnum):
    """Why a handler is to stop before its end."""

    TIMEOUT = "timeout"
    LOST = "lease lost"
    CANCELLED = "cancelled"
    SHUTDOWN = "shutdown"
    BLOCKED = "its loop is blocked"


class Job(CurrentTask):
    """One task in the hands of this worker, from its claim until its handler is gone. The handler sees it as its
    `CurrentTask`: one object, which nothing but the worker and the handler holds, so that it goes when they let go."""

    __slots__ = ("beat_s", "begun", "function", "handle", "lane", "latest", "link", "settled", "timer", "why")

    def __init__(self, lease: Lease, function: TaskFunction[..., Any], link: Link, lane: Lane) -> None:
        super().__init__(lease)
        self.function = function
        self.link = link
        self.lane = lane
        self.beat_s = time.monotonic() + lease.lease_s / 3
        """When the next heartbeat is due."""
        self.latest: Progress | None = None
        """Progress that the store does not know yet."""
        self.why: Why | None = None
        self.begun = False
        """Its handler was called."""
        self.settled = False
        """Its outcome is decided; what the handler still returns is dropped."""
        self.handle: Any = None
        """What the lane needs to stop it."""
        self.timer: asyncio.TimerHandle | None = None
        """Runs out when its timeout does."""

    def tell(self, progress: Progress | None) -> None:
        if progress is not None:
            self.latest = progress
        self.beat_s = min(self.beat_s, time.monotonic() + (0.0 if progress is None else 0.5))


class Slots:
    """How many more tasks a lane can take. Used in the worker's own loop only."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._freed = asyncio.Event()

    def reserve(self, wanted: int) -> int:
        """Takes up to so many slots; returns how many."""
        taken = min(self.free, wanted)
        self.free -= taken
        return taken

    def give_back(self, count: int) -> None:
        """Frees slots."""
        self.free += count
        if count:
            self._freed.set()

    async def wait(self) -> None:
        """Returns when a slot is free."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()
