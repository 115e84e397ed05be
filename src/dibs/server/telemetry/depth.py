"""How full the queues are, and how far readers of the journal have come: looked at now and then, within bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from dibs.errors import JournalError, StoreError
from dibs.server.telemetry.families import OTHER, Counts, Labels, Values
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.task import Place, QueueStats, Stats

REFRESH_S = 5.0
"""Asked more often, the last look counts."""
DISCOVER_S = 300.0
"""How often queues that nobody has used through this server are looked for."""
TENANTS_MAX = 1_000
"""So many tenants are looked at, by name."""
READERS_MAX = 50
BREATH = 20
"""So many tenants are looked at before others have their turn in the loop."""
QUEUES_BREATH = 500
"""So many queues of a tenant are added up before others have their turn."""
PLACES = (Place.READY, Place.DELAYED, Place.LEASED, Place.DEAD)


class Depth:
    """The latest look at a store."""

    def __init__(self, queues: Labels, now_s: Callable[[], float] = time.monotonic) -> None:
        """`queues`: the (tenant, command) pairs that have a name; all else is summed as `other`."""
        self.tasks = Counts(
            "dibs_queue_tasks", "Tasks of a queue by place.", ("tenant", "command", "place"), gauge=True
        )
        self.bytes = Counts(
            "dibs_queue_bytes", "Payloads and results that a queue holds.", ("tenant", "command"), gauge=True
        )
        self.oldest = Counts(
            "dibs_queue_oldest_ready_seconds",
            "For how long the task at the head of a queue has been ready.",
            ("tenant", "command"),
            gauge=True,
        )
        self.tenants = Counts(
            "dibs_tenants", "Tenants that were looked at; those beyond the bound are not.", gauge=True
        )
        self.lag = Counts(
            "dibs_journal_reader_lag_seconds",
            "Age of the oldest event that a named reader has not read; 0 if there is none.",
            ("reader", "shard"),
            gauge=True,
        )
        self.up = Counts("dibs_store_up", "1 if the store answered the last look.", gauge=True)
        self._queues = queues
        self._now_s = now_s
        self._looked_s = self._discovered_s = float("-inf")
        self._looking = asyncio.Lock()

    def families(self) -> Iterable[Counts]:
        """All that is shown of it."""
        return self.tasks, self.bytes, self.oldest, self.tenants, self.lag, self.up

    async def refresh(self, store: Store) -> None:
        """Looks again, unless that was a moment ago. A store that does not answer leaves the old figures."""
        async with self._looking:
            if self._now_s() < self._looked_s + REFRESH_S:
                return
            try:
                await self._look(store)
                await self._read_lags(store)
                self.up.set_all({(): 1})
            except StoreError:
                self.up.set_all({(): 0})
            self._looked_s = self._now_s()

    async def _look(self, store: Store) -> None:
        discover = self._now_s() >= self._discovered_s + DISCOVER_S
        named: dict[str, list[str]] = {}
        for tenant, command in self._queues.known():
            named.setdefault(tenant, []).append(command)
        tasks: dict[Values, float] = {}
        held: dict[Values, float] = {}
        oldest: dict[Values, float] = {}
        now_ms, seen = time.time() * 1000, 0
        async for tenant in _tenants(store):
            # By name it costs nothing that queues without one are many.
            stats = await store.stats(tenant, None if discover else named.get(tenant, []))
            for index, (values, queue) in enumerate(self._split(tenant, stats), start=1):
                if index % QUEUES_BREATH == 0:
                    await asyncio.sleep(0)
                for place in PLACES:
                    _add(tasks, (*values, place.value), getattr(queue, place.value))
                _add(held, values, queue.bytes)
                if queue.oldest_ready_ms is not None:
                    oldest[values] = max(oldest.get(values, 0), (now_ms - queue.oldest_ready_ms) / 1000)
            seen += 1
            if seen % BREATH == 0:
                await asyncio.sleep(0)
        self.tasks.set_all(tasks)
        self.bytes.set_all(held)
        self.oldest.set_all(oldest)
        self.tenants.set_all({(): seen})
        if discover:
            self._discovered_s = self._now_s()

    def _split(self, tenant: str, stats: Stats) -> Iterable[tuple[Values, QueueStats]]:
        """Yields each queue under its labels, and what the total has beyond them."""
        rest = {field: getattr(stats.total, field) for field in (*(place.value for place in PLACES), "bytes")}
        for queue in stats.queues:
            yield self._queues.of(tenant, queue.command), queue
            for field in rest:
                rest[field] -= getattr(queue, field)
        if any(count > 0 for count in rest.values()):
            yield (OTHER, OTHER), QueueStats(command="", **{field: max(0, count) for field, count in rest.items()})

    async def _read_lags(self, store: Store) -> None:
        lags: dict[Values, float] = {}
        for reader in sorted(await store.readers(), key=lambda reader: reader.name)[:READERS_MAX]:
            try:
                page = await store.events(ALL_TENANTS, shard=reader.shard, after=reader.position, limit=1)
            except JournalError:
                continue  # It will be told when it reads.
            behind_s = max(0.0, time.time() - page.events[0].at_ms / 1000) if page.events else 0.0
            lags[reader.name, str(reader.shard)] = behind_s
        self.lag.set_all(lags)


async def _tenants(store: Store) -> AsyncIterator[str]:
    cursor: str | None = None
    left = TENANTS_MAX
    while left > 0:
        page = await store.tenants(cursor=cursor, limit=min(left, 1_000))
        for tenant in page.tenants:
            yield tenant
        left -= len(page.tenants)
        cursor = page.cursor
        if cursor is None:
            return


def _add(to: dict[Values, float], values: Values, count: float) -> None:
    to[values] = to.get(values, 0) + count
