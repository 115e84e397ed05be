"""What a worker does beside its tasks: renew leases, sweep the store, say that it is alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Collection, Sequence

from dibs.errors import StoreError, StoreUnavailable
from dibs.ids import id_to_text
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Extended, Heartbeat, LeaseLost, Rejected, Swept, WorkerInfo
from dibs.worker.jobs import Job, Why
from dibs.worker.lanes import Lane, LoopLane
from dibs.worker.link import Link, StoreLink

log = logging.getLogger("dibs.worker")

BEAT_LOOK_S = 0.2
BEAT_AGAIN_S = 1.0
SWEEP_EVERY_S = 1.0
REGISTER_EVERY_S = 5.0
FORGOTTEN_AFTER_S = 20.0
TASKS_TOLD_MAX = 100
LEAVE_S = 2.0

Stop = Callable[[Job, Why], None]


class Pulse:
    """Sends the heartbeats of one app's jobs, from the worker's own loop, at a third of each lease.

    A loop of handlers that is blocked for longer than a lease gets no more renewals for it: whoever holds it up may do
    so for ever, and another worker should have the task.
    """

    def __init__(self, link: Link, jobs: Collection[Job], stop: Stop) -> None:
        self._link = link
        self._jobs = jobs
        self._stop = stop
        self._complained_s = 0.0

    async def run(self) -> None:
        """Beats for ever."""
        while True:
            await asyncio.sleep(BEAT_LOOK_S)
            now_s = time.monotonic()
            due = [job for job in self._jobs if job.link is self._link and job.beat_s <= now_s and not job.settled]
            due = [job for job in due if self._responsive(job, now_s)]
            for start in range(0, len(due), BATCH_MAX):
                await self._beat(due[start : start + BATCH_MAX])

    def _responsive(self, job: Job, now_s: float) -> bool:
        blocked_s = job.lane.blocked_s()
        if blocked_s > job.lease.lease_s / 3 and not job.begun:
            self._stop(job, Why.BLOCKED)  # others should have it, and it has not cost an attempt
        if blocked_s <= job.lease.lease_s:
            return True
        if now_s >= self._complained_s + job.lease.lease_s and isinstance(job.lane, LoopLane):
            self._complained_s = now_s
            log.error(
                "a handler has blocked the event loop for %.1f s: leases are not renewed. It is here:\n%s",
                blocked_s,
                job.lane.stack(),
            )
        return False

    async def _beat(self, jobs: Sequence[Job]) -> None:
        beats = []
        for job in jobs:
            job.beat_s = time.monotonic() + job.lease.lease_s / 3
            progress, job.latest = job.latest, None
            lease = job.lease
            beats.append(Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token, progress=progress))
        answers = await self._link.ask(lambda store: store.heartbeat(beats))
        for job, answer in zip(jobs, answers, strict=True):
            self._hear(job, answer)

    def _hear(self, job: Job, answer: Extended | LeaseLost | Rejected) -> None:
        if isinstance(answer, LeaseLost):
            log.warning(
                "task %s: the lease was lost (%s), its handler is stopped", id_to_text(job.lease.id), answer.cause
            )
            self._stop(job, Why.LOST)
        elif isinstance(answer, Rejected) and answer.code == StoreUnavailable.code:
            log.warning("task %s: its lease was not renewed: %s", id_to_text(job.lease.id), answer.message)
            job.beat_s = time.monotonic() + BEAT_AGAIN_S
        elif isinstance(answer, Rejected):
            log.warning("task %s: its progress was not taken: %s", id_to_text(job.lease.id), answer.message)
            job.beat_s = time.monotonic()
        elif answer.cancel_requested:
            self._stop(job, Why.CANCELLED)


async def sweep(link: StoreLink) -> None:
    """Sweeps the store for ever, so that a queue nobody claims from still moves; unless somebody else sees to it."""
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        while (await link.ask(sweep_once)).more:
            pass


async def sweep_once(store: Store) -> Swept:
    """Sweeps, if that is the worker's to do."""
    return Swept() if store.sweeps_itself else await store.sweep()


class Registrar:
    """Tells the store that this worker is alive, and what it is doing."""

    def __init__(
        self,
        link: Link,
        tenants: Sequence[str],
        name: str,
        lanes: Sequence[Lane],
        jobs: Collection[Job],
        *,
        of_all: bool = False,
    ) -> None:
        """`of_all`: it runs tasks of all tenants, and says how many; which they are is told to nobody else."""
        self._link = link
        self._tenants = tenants
        self._name = name
        self._lanes = lanes
        self._jobs = jobs
        self._of_all = of_all
        self._started_ms = time.time_ns() // 1_000_000

    async def run(self) -> None:
        """Registers for ever."""
        while True:
            await self.tell(FORGOTTEN_AFTER_S)
            await asyncio.sleep(REGISTER_EVERY_S)

    async def tell(self, ttl_s: float) -> None:
        """Registers for so long; 0 says that the worker is gone."""
        for tenant in self._tenants:
            info = self._info(tenant)
            await self._link.ask(lambda store, tenant=tenant, info=info: store.register(tenant, info, ttl_s))  # type: ignore[misc]

    async def leave(self) -> None:
        """Says that the worker is gone; a store that does not answer forgets it by itself."""
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self.tell(0)

    def _info(self, tenant: str) -> WorkerInfo:
        jobs = [job for job in self._jobs if job.link is self._link]
        mine = [job for job in jobs if job.lease.tenant == tenant]
        return WorkerInfo(
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=sum(lane.slots.count for lane in self._lanes),
            busy=len(jobs if self._of_all else mine),
            commands=sorted(self._link.app.functions)[:100],
            started_ms=self._started_ms,
            memory_bytes=memory_bytes(),
            tasks=[job.lease.id for job in mine[:TASKS_TOLD_MAX]],
        )


def memory_bytes() -> int:
    """The memory this process has in use; where the system does not tell, the most it ever had."""
    try:
        with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 read every few seconds, without a detour
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
