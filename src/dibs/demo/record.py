"""The journal, followed as it grows, by whichever process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from dibs.stores.protocol import Store
from dibs.stores.wakeups import Journalled
from dibs.task import Event, EventKind


class Record:
    """What the journal of one tenant has told so far."""

    def __init__(self, store: Store, tenant: str) -> None:
        self.events: list[Event] = []
        self.latest: dict[bytes, Event] = {}
        self.completed: Counter[str] = Counter()
        self.by_worker: Counter[str] = Counter()
        self._store = store
        self._tenant = tenant
        self._cursor: bytes | None = None
        self._grown = asyncio.Condition()
        self._reading = asyncio.Lock()

    async def follow(self) -> None:
        """Reads whenever the journal has grown."""
        with self._store.subscribe([Journalled()]) as subscription:
            while True:
                await self.catch_up()
                await subscription.wait(1.0)
                await asyncio.sleep(0.02)  # what comes in quick succession is read together

    async def catch_up(self) -> None:
        """Reads to the end."""
        async with self._reading:
            more = True
            while more:
                page = await self._store.events(self._tenant, after=self._cursor)
                self._cursor, more = page.cursor, page.more
                self._add(page.events)
        async with self._grown:
            self._grown.notify_all()

    def _add(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            self.latest[event.id] = event
            if event.kind is EventKind.COMPLETED:
                self.completed[event.command] += 1
                self.by_worker[event.worker] += 1

    def of(self, kind: EventKind, command: str | None = None) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event.kind is kind and command in (None, event.command)]

    async def until(self, seen: Callable[[], bool]) -> None:
        """Returns once the journal tells so."""
        async with self._grown:
            await self._grown.wait_for(seen)

    async def until_all(self, kind: EventKind, ids: set[bytes]) -> None:
        """Returns once the latest that is known of each of these tasks is such an event."""
        await self.until(lambda: all(one in self.latest and self.latest[one].kind is kind for one in ids))
