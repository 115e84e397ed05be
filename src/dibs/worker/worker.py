"""A worker's life: it opens its stores, claims, runs and settles until it is told to stop, and leaves nothing over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from msgspec import Struct

from dibs.app import Dibs
from dibs.checks import ALL_TENANTS, COMMANDS_MAX, check_label, check_number, check_tenant, check_whole
from dibs.errors import InvalidOption
from dibs.function import RunIn
from dibs.ids import id_to_text
from dibs.importing import Here
from dibs.listeners import Happening, TaskEvent
from dibs.task import ErrorInfo, Kind, Reason
from dibs.worker.claiming import Claimer
from dibs.worker.jobs import Job, Why
from dibs.worker.lanes import Lane, LoopLane, ThreadLane
from dibs.worker.link import Link
from dibs.worker.outcomes import Ended
from dibs.worker.processes import ProcessLane
from dibs.worker.settling import Settler
from dibs.worker.tending import Pulse, Registrar, sweep, sweep_once
from dibs.worker.voice import Voice

log = logging.getLogger("dibs.worker")

STOP_PATIENCE_S = 5.0
"""How long a handler that was cancelled may take to clean up before its task is settled without it."""

DRAIN_LOOK_S = 0.2
GIVE_BACK_S = STOP_PATIENCE_S + 2.0
LISTENERS_S = 5.0
"""How long listeners may take to hear what is left when the worker ends."""

LANES: dict[RunIn, type[Lane]] = {"loop": LoopLane, "thread": ThreadLane, "process": ProcessLane}


class WorkerOptions(Struct, frozen=True, kw_only=True):
    """How a worker works."""

    concurrency: int = 100
    """Coroutine functions at once."""
    threads: int = 16
    """Plain functions at once."""
    pool: int = os.cpu_count() or 1
    """Functions in processes of their own at once."""
    commands: tuple[str, ...] = ()
    """Only these; all by default."""
    tenants: tuple[str, ...] = ()
    """Whose tasks; by default each app's own tenant. `*`: those of all tenants, who take turns."""
    name: str = ""
    """By default made of host, process and chance."""
    grace_s: float = 30.0
    """How long running handlers may take to end when the worker is told to stop."""
    give_up_s: float = 60.0
    """How long a store may stay silent before the worker ends with an error."""
    drain: bool = False
    """End when nothing is ready any more that it could run. What a limit holds back is waited for; what is paused or
    delayed stays."""
    create: bool = True
    """Make a store that does not exist yet."""

    def __post_init__(self) -> None:
        check_whole("concurrency", self.concurrency, 1, 10_000)
        check_whole("threads", self.threads, 1, 1_000)
        check_whole("pool", self.pool, 1, 1_000)
        check_number("grace_s", self.grace_s, 0, 86_400)
        check_number("give_up_s", self.give_up_s, 0, 86_400)
        if ALL_TENANTS in self.tenants and len(self.tenants) > 1:
            raise InvalidOption("'*' is every tenant: give it alone, or name the tenants")
        for tenant in self.tenants:
            if tenant != ALL_TENANTS:
                check_tenant(tenant)
        if self.name:
            check_label("worker", self.name)

    def slots(self, run_in: RunIn) -> int:
        """How many slots a lane has."""
        return {"loop": self.concurrency, "thread": self.threads, "process": self.pool}[run_in]


class Summary(Struct):
    """What a worker did, by how its tasks ended."""

    completed: int = 0
    retried: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0

    @property
    def runs(self) -> int:
        return self.completed + self.retried + self.failed + self.cancelled + self.lost


class Worker:
    """Runs the tasks of one or several apps, in the loop that calls `run`."""

    def __init__(self, apps: Dibs | Sequence[Dibs], options: WorkerOptions | None = None) -> None:
        self.apps = [apps] if isinstance(apps, Dibs) else list(apps)
        self.options = options or WorkerOptions()
        self.name = self.options.name or f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(2)}"
        self._counts: Counter[Happening] = Counter()
        self._jobs: dict[int, Job] = {}
        self._lanes: dict[RunIn, Lane] = {}
        self._settlers: dict[int, Settler] = {}
        self._claimers: list[Claimer] = []
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._quiet = asyncio.Event()
        self._voice: Voice | None = None
        self._told_held_back = False
        Here.refuse("starts a worker")
        _check_functions(self.apps, self.options.commands)

    # --------------------------------------------------------------------------------------------------------- its life

    async def run(self) -> Summary:
        """Works until `stop` is called, or until nothing is left if it drains. Raises what keeps it from working."""
        links = [Link(app, self.options.give_up_s, create=self.options.create) for app in self.apps]
        registrars: list[Registrar] = []
        background: list[asyncio.Task[None]] = []
        claiming: list[asyncio.Task[None]] = []
        try:
            for link in links:
                if not await self._answers(link):
                    return self.summary
                registrars.append(self._attend(link, background))
            claiming += self._start_claiming()
            await self._until_stopped(background, claiming)
            await _cancelled(claiming)
            await self._drain_jobs(background)
        except (Exception, asyncio.CancelledError):
            await _cancelled(claiming)
            await self._give_back()
            raise
        finally:
            await _cancelled([*claiming, *background])
            await self._leave(links, registrars)
        return self.summary

    @property
    def summary(self) -> Summary:
        """What it has done so far."""
        counts = self._counts
        return Summary(
            completed=counts[Happening.COMPLETED],
            retried=counts[Happening.RETRIED],
            failed=counts[Happening.FAILED],
            cancelled=counts[Happening.CANCELLED],
            lost=counts[Happening.LEASE_LOST],
        )

    @property
    def running(self) -> int:
        """How many handlers run. After its end: those that would not stop, whose tasks were given back."""
        return len(self._jobs)

    def stop(self) -> None:
        """Has the worker claim no more, and end when its handlers have, or their grace time. Called again: now."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def _answers(self, link: Link) -> bool:
        """Returns when the store answers for the first time; False if the worker is to stop before."""
        first = asyncio.ensure_future(link.ask(sweep_once))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({first, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return first.done() and first.result() is not None
        finally:
            first.cancel()
            stopping.cancel()

    def _attend(self, link: Link, background: list[asyncio.Task[None]]) -> Registrar:
        """Starts what one app needs beside the claims."""
        tenants = self.options.tenants or (link.app.tenant,)
        self._settlers[id(link)] = settler = Settler(link, self._tell, self._quiet.set)
        commands = _chosen(link.app, self.options.commands)
        lanes = {run_in: self._lane(run_in) for run_in in {link.app.functions[name].policy.run_in for name in commands}}
        for run_in, lane in lanes.items():
            mine = [name for name in commands if link.app.functions[name].policy.run_in == run_in]
            self._claimers += [
                Claimer(link, tenant, lane, mine[start : start + COMMANDS_MAX], self.name, self._begin)
                for tenant in tenants
                for start in range(0, len(mine), COMMANDS_MAX)
            ]
        # A worker of all tenants is known to its app's own.
        of_all = ALL_TENANTS in tenants
        known_to = (link.app.tenant,) if of_all else tenants
        registrar = Registrar(link, known_to, self.name, list(lanes.values()), self._jobs.values(), of_all=of_all)
        pulse = Pulse(link, self._jobs.values(), self._stop_job)
        background += _started(settler.run(), pulse.run(), sweep(link), registrar.run())
        return registrar

    def _lane(self, run_in: RunIn) -> Lane:
        if run_in not in self._lanes:
            self._lanes[run_in] = LANES[run_in](self.options.slots(run_in), self._report)
        return self._lanes[run_in]

    def _start_claiming(self) -> list[asyncio.Task[None]]:
        sharers = Counter(claimer.lane for claimer in self._claimers)
        for lane, sharing in sharers.items():
            if sharing > lane.slots.count:
                raise InvalidOption(
                    f"{sharing} claims share {lane.slots.count} slots for handlers in a {lane.name}. There is one for "
                    f"each app, tenant and {COMMANDS_MAX} commands, and each needs a slot: give the worker more"
                )
        if self.options.drain:
            return _started(self._drain_queues())
        return _started(*(claimer.run(alone=sharers[claimer.lane] == 1) for claimer in self._claimers))

    async def _until_stopped(self, background: list[asyncio.Task[None]], claiming: list[asyncio.Task[None]]) -> None:
        """Returns when the worker is to stop; raises if a part of it failed."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            done, _ = await asyncio.wait({stopping, *background, *claiming}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in done - {stopping}:
            task.result()

    async def _drain_queues(self) -> None:
        """Claims until nothing is ready any more and nothing runs that could enqueue more."""
        while True:
            self._quiet.clear()
            # Looked at before the claims: what ends later may have enqueued something that they missed. Handlers that
            # were left to themselves do not count, unless it is for them that nothing could be claimed.
            idle = all(job.settled for job in self._jobs.values()) and not self._unsettled()
            idle = idle and all(claimer.lane.slots.free for claimer in self._claimers)
            taken = 0
            for claimer in self._claimers:
                taken += await claimer.take(1_000)
            if not taken and idle and not await self._held_back():
                return
            if not taken:
                # A running handler may have enqueued something, and may wait for it; a limit may let something go.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._quiet.wait(), DRAIN_LOOK_S)

    async def _held_back(self) -> bool:
        """True while something is ready that no claim gets: its limit is used up, by others perhaps who died."""
        for claimer in self._claimers:
            ready = await claimer.ready()
            if ready:
                if not self._told_held_back:
                    self._told_held_back = True
                    queues = ", ".join(f"{count} of {command}" for command, count in sorted(ready.items()))
                    log.info("draining: waiting for what is still ready, and perhaps held back by a limit: %s", queues)
                return True
        return False

    async def _drain_jobs(self, background: list[asyncio.Task[None]]) -> None:
        """Lets running handlers end, then stops and releases what is left; returns when the store knows everything."""
        if self._jobs:
            log.info("stopping: waiting up to %g s for %d running tasks", self.options.grace_s, len(self._jobs))
        hurry = asyncio.ensure_future(self._hurry.wait())
        over = asyncio.ensure_future(self._until_quiet(jobs_too=True))
        try:
            await asyncio.wait(
                {over, hurry, *background}, timeout=self.options.grace_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hurry.cancel()
            over.cancel()
        for job in list(self._jobs.values()):
            self._stop_job(job, Why.SHUTDOWN)
        settled = asyncio.ensure_future(self._until_quiet(jobs_too=False))
        try:
            await asyncio.wait({settled, *background}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        for task in background:
            if task.done():
                task.result()

    async def _give_back(self) -> None:
        """A part of the worker failed: what still runs is given back, if that can be done soon."""
        for job in list(self._jobs.values()):
            self._stop_job(job, Why.SHUTDOWN)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until_quiet(jobs_too=False), GIVE_BACK_S)

    async def _until_quiet(self, *, jobs_too: bool) -> None:
        while True:
            self._quiet.clear()
            unsettled = [job for job in self._jobs.values() if jobs_too or not job.settled]
            if not unsettled and not self._unsettled():
                return
            await self._quiet.wait()

    def _unsettled(self) -> bool:
        """True while the store has not heard of every outcome."""
        return any(settler.pending for settler in self._settlers.values())

    async def _leave(self, links: Sequence[Link], registrars: Sequence[Registrar]) -> None:
        for lane in self._lanes.values():
            await lane.close()
        if self._voice is not None:
            await asyncio.to_thread(self._voice.end, LISTENERS_S)
        for registrar in registrars:
            await registrar.leave()
        for link in links:
            await link.close()

    # -------------------------------------------------------------------------------------------------------- its tasks

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Starts jobs that were just claimed."""
        loop = asyncio.get_running_loop()
        by_lane: dict[Lane, list[Job]] = {}
        for job in jobs:
            self._jobs[id(job)] = job
            by_lane.setdefault(job.lane, []).append(job)
            if job.lease.timeout_s is not None:
                job.timer = loop.call_later(job.lease.timeout_s, self._time_over, job)
            self._tell(job, Happening.CLAIMED)
        for lane, some in by_lane.items():
            lane.start(some)

    def _report(self, ended: Iterable[tuple[Job, Ended]]) -> None:
        """Hears from a lane that handlers have ended."""
        for job, how in ended:
            del self._jobs[id(job)]
            if job.timer is not None:
                job.timer.cancel()
            if not job.settled:
                self._settle(job, how if job.why is None else _stopped(job, how))
            # After its outcome is on its way, so that the next claim comes behind it.
            job.lane.slots.give_back(1)
        self._quiet.set()

    def _settle(self, job: Job, ended: Ended | None) -> None:
        if ended is None:
            job.settled = True
            self._tell(job, Happening.LEASE_LOST)
        else:
            self._settlers[id(job.link)].put(job, ended)

    def _time_over(self, job: Job) -> None:
        if id(job) in self._jobs and not job.settled:
            log.warning(
                "task %s of %s: over its timeout of %g s",
                id_to_text(job.lease.id),
                job.lease.command,
                job.lease.timeout_s,
            )
            self._stop_job(job, Why.TIMEOUT)

    def _stop_job(self, job: Job, why: Why) -> None:
        """Has a handler stop; its task is settled when it has, or soon in any case. A thread cannot be stopped: after a
        cancel it may still complete its task, any other reason settles the task without it."""
        stops = job.lane.stops
        if job.settled or (job.why is not None and stops):
            return
        if job.why is None or why is Why.LOST:
            job.why = why
        job.stop(why)
        if stops:
            job.lane.stop(job)
            asyncio.get_running_loop().call_later(STOP_PATIENCE_S, self._abandon, job)
        elif why is not Why.CANCELLED:
            self._abandon(job)

    def _abandon(self, job: Job) -> None:
        """Settles a job whose handler does not stop. Its slot stays taken until it returns."""
        if id(job) in self._jobs and not job.settled:
            log.warning("task %s of %s: left to itself (%s)", id_to_text(job.lease.id), job.lease.command, job.why)
            self._settle(job, _stopped(job, None))
            self._quiet.set()

    # -------------------------------------------------------------------------------------------------------- its voice

    def _tell(self, job: Job, happening: Happening, error: ErrorInfo | None = None) -> None:
        """Counts, and tells who listens, in a thread of theirs."""
        if happening is not Happening.CLAIMED:
            self._counts[happening] += 1
            self._quiet.set()
        if log.isEnabledFor(logging.DEBUG):
            lease = job.lease
            log.debug("%s %s %s, attempt %d", happening, lease.command, id_to_text(lease.id), lease.attempt)
        listeners = job.link.app.listeners
        if listeners.wants(happening):
            lease = job.lease
            event = TaskEvent(happening, lease.tenant, lease.id, lease.command, lease.attempt, error)
            self._voice = self._voice or Voice()
            self._voice.say(listeners, event)


def _stopped(job: Job, ended: Ended | None) -> Ended | None:
    """How a job ends that was told to stop; `ended`: what its handler made of it. None: nothing is to be settled."""
    if job.why is Why.LOST:
        return None
    if job.why is Why.TIMEOUT:
        text = f"over its timeout of {job.lease.timeout_s:g} s"
        return Ended(kind=Kind.RETRY, error=ErrorInfo("TimeoutError", text))
    if ended is not None and ended.kind is Kind.COMPLETE:
        return ended
    if job.why is Why.CANCELLED:
        return Ended(kind=Kind.FAIL, reason=Reason.CANCELLED)
    return Ended(kind=Kind.RELEASE)


def _check_functions(apps: Sequence[Dibs], commands: Sequence[str]) -> None:
    known = {command for app in apps for command in app.functions}
    if not known:
        raise InvalidOption("there is nothing to work on: no function is declared with @app.task")
    unknown = set(commands) - known
    if unknown:
        raise InvalidOption(f"no task is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")


def _chosen(app: Dibs, commands: Sequence[str]) -> list[str]:
    return [command for command in app.functions if not commands or command in commands]


def _started(*calls: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    return [asyncio.ensure_future(call) for call in calls]


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits until they are gone; what they raise has been told, or is of no interest any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
