"""Who waits for what within one event loop, and whom to wake.

A claim waits on :class:`Ready` topics: so many claimers are woken as there are tasks, first come, first served, and a
claimer of all tenants after those of the tenant. A
:class:`Ended` or :class:`Journalled` topic wakes everybody who waits on it. Nothing here is a promise that the task is
still there: a woken waiter looks again, and every wait has a fallback look behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from msgspec import Struct

from dibs.checks import ALL_TENANTS


class Ready(Struct, frozen=True, gc=False):
    """Something became ready in this queue. A claim of all tenants waits for `Ready("*", command)`."""

    tenant: str
    command: str


class Ended(Struct, frozen=True, gc=False):
    """This task ended."""

    tenant: str
    id: bytes


class Journalled(Struct, frozen=True, gc=False):
    """The journal grew."""


Topic = Ready | Ended | Journalled


class Wakeups:
    """The waiting room of one event loop. Not thread-safe: other threads go through `call_soon_threadsafe`."""

    def __init__(self) -> None:
        # A dict keeps insertion order: it is a queue from which a waiter can leave in O(1).
        self._waiting: dict[Topic, dict[Subscription, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def subscribe(self, topics: Iterable[Topic], limit: int = 1) -> Subscription:
        """Returns a subscription that takes effect when it is entered. `limit`: how many ready tasks it can use."""
        return Subscription(self, tuple(topics), limit)

    def wake(self, topic: Ready, count: int) -> None:
        """Wakes waiting claimers, the longest waiting first, until they can use `count` tasks: those of the tenant
        before those of all tenants."""
        for whose in (topic, Ready(ALL_TENANTS, topic.command)):
            for subscription in self._waiting.get(whose, ()):
                if count <= 0:
                    return
                if not subscription.woken:
                    subscription.set(topic)
                    count -= subscription.limit

    def wake_tenant(self, tenant: str, count: int) -> None:
        """Wakes claimers of every queue of a tenant, `count` of each: nobody knows in which of them tasks wait."""
        for topic in [topic for topic in self._waiting if isinstance(topic, Ready)]:
            if topic.tenant in (tenant, ALL_TENANTS):
                self.wake(Ready(tenant, topic.command), count)

    def wake_all(self, topic: Topic) -> None:
        """Wakes everybody who waits on `topic`."""
        for subscription in self._waiting.get(topic, ()):
            subscription.set()

    def wake_everybody(self) -> None:
        """Wakes all who wait, for whatever."""
        for waiting in self._waiting.values():
            for subscription in waiting:
                subscription.set()

    def _enter(self, subscription: Subscription) -> None:
        for topic in subscription.topics:
            self._waiting.setdefault(topic, {})[subscription] = None

    def _leave(self, subscription: Subscription) -> None:
        for topic in subscription.topics:
            waiting = self._waiting[topic]
            del waiting[subscription]
            if not waiting:
                del self._waiting[topic]


class Subscription:
    """One waiter: enter it, look, then `wait`, look again."""

    def __init__(self, room: Wakeups, topics: tuple[Topic, ...], limit: int) -> None:
        self.topics = topics
        self.limit = limit
        self._room = room
        self._event = asyncio.Event()
        self._by: Ready | None = None

    @property
    def woken(self) -> bool:
        """True from a wake-up until the next `wait` takes it."""
        return self._event.is_set()

    def set(self, by: Ready | None = None) -> None:
        """Wakes this waiter, now or at its next `wait`."""
        self._by = by
        self._event.set()

    def share(self, other: Subscription) -> None:
        """Makes this a further place of another waiter: whoever wakes one has woken both. Before it is entered."""
        self._event = other._event

    async def wait(self, timeout_s: float) -> bool:
        """Returns True when woken, False when `timeout_s` have passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def __enter__(self) -> Self:
        self._room._enter(self)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._room._leave(self)
        if self.woken:
            self._pass_on()

    def _pass_on(self) -> None:
        """A waiter that leaves without having used its wake-up gives it to the next one."""
        for topic in dict.fromkeys((*self.topics, self._by)):
            if isinstance(topic, Ready):
                self._room.wake(topic, self.limit)
