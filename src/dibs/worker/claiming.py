"""Takes tasks for a lane. A claimer reserves slots first and claims no more than those."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dibs.checks import ALL_TENANTS
from dibs.clock import SystemClock
from dibs.task import BATCH_MAX, Kind, Lease, Settlement, TenantPage
from dibs.worker.jobs import Job
from dibs.worker.lanes import Lane
from dibs.worker.link import Link

WAIT_S = 20.0
BLOCKED_S = 1.0
BLOCKED_LOOK_S = 0.2


class Claimer:
    """Claims some commands of one tenant, or of all that take turns, for one lane."""

    def __init__(
        self,
        link: Link,
        tenant: str,
        lane: Lane,
        commands: Sequence[str],
        worker: str,
        begin: Callable[[Sequence[Job]], None],
    ) -> None:
        self.link = link
        self.tenant = tenant
        self.lane = lane
        self._commands = list(commands)
        self._worker = worker
        self._begin = begin
        self._ready_in: str | None = None
        """The tenant that had something ready when somebody asked last."""

    async def run(self, *, alone: bool) -> None:
        """Claims for ever. One that has the lane for itself waits with all its free slots; one that shares it with
        others keeps a single slot while it waits."""
        while True:
            await self.lane.slots.wait()
            if self._blocked():
                await asyncio.sleep(BLOCKED_LOOK_S)
            elif alone:
                await self.take(BATCH_MAX, WAIT_S)
            elif not await self.take(BATCH_MAX):
                await self.lane.slots.wait()
                await self.take(1, WAIT_S)

    async def take(self, limit: int, wait_s: float = 0.0) -> int:
        """Claims what there is, up to the free slots and `limit`, and starts it; returns how many."""
        reserved = self.lane.slots.reserve(limit)
        taken = 0
        try:
            if reserved:
                leases = await self._claim(reserved, wait_s)
                if leases and self._blocked():
                    await self._release(leases)
                    return 0
                taken = len(leases)
                self._begin([self._job(lease) for lease in leases])
        finally:
            self.lane.slots.give_back(reserved - taken)
        return taken

    async def ready(self) -> dict[str, int]:
        """Returns how many tasks are ready in its queues, those left out that are paused; of all tenants, the counts of
        one that has any. Empty too under a clock that is moved by hand: nobody moves it while somebody waits."""
        if not isinstance(self.link.app.clock or SystemClock(), SystemClock):
            return {}
        if self._ready_in is not None and (found := await self._ready_of(self._ready_in)):
            return found
        cursor: str | None = None
        while True:
            page = await self._tenants(cursor)
            for tenant in page.tenants:
                if found := await self._ready_of(tenant):
                    self._ready_in = tenant
                    return found
            cursor = page.cursor
            if cursor is None:
                return {}

    async def _tenants(self, cursor: str | None) -> TenantPage:
        if self.tenant != ALL_TENANTS:
            return TenantPage([self.tenant])
        return await self.link.ask(lambda store: store.tenants(cursor=cursor))

    async def _ready_of(self, tenant: str) -> dict[str, int]:
        stats = await self.link.ask(lambda store: store.stats(tenant, self._commands))
        if stats.total.paused:
            return {}
        return {queue.command: queue.ready for queue in stats.queues if queue.ready and not queue.paused}

    async def _claim(self, limit: int, wait_s: float) -> list[Lease]:
        commands = self._next_commands()
        return await self.link.ask(
            lambda store: store.claim(self.tenant, commands, limit=limit, wait_s=wait_s, worker=self._worker)
        )

    def _blocked(self) -> bool:
        """True while nothing that the lane is given would run: then others should have it."""
        return self.lane.blocked_s() > BLOCKED_S

    async def _release(self, leases: Sequence[Lease]) -> None:
        back = [Settlement(tenant=one.tenant, id=one.id, token=one.token, kind=Kind.RELEASE) for one in leases]
        await self.link.ask(lambda store: store.settle(back))

    def _next_commands(self) -> list[str]:
        """Every command has its turn to be asked first, so that a busy queue does not starve the others."""
        if len(self._commands) > 1:
            self._commands.append(self._commands.pop(0))
        return self._commands

    def _job(self, lease: Lease) -> Job:
        return Job(lease, self.link.app.functions[lease.command], self.link, self.lane)
