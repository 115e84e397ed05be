"""The process lane: handlers that keep a core busy, each in a child process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from dibs.importing import module_name
from dibs.task import ErrorInfo, Kind
from dibs.worker.child import Order, decode_told, frame
from dibs.worker.jobs import Job
from dibs.worker.lanes import Lane, Report
from dibs.worker.running import Ended

log = logging.getLogger("dibs.worker")

PROCESS_DIED = "ProcessDied"
CHILD = "from dibs.worker.child import main; main()"


class ProcessLane(Lane):
    """A child process for each slot, started when it is first needed and used again."""

    name = "process"

    def __init__(self, slots: int, report: Report) -> None:
        super().__init__(slots, report)
        self._idle: list[Process] = []
        self._running: set[asyncio.Task[None]] = set()

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            running = self._loop.create_task(self._run(job))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _run(self, job: Job) -> None:
        child = None
        try:
            child = await self._child()
            job.handle = child
            if job.why is not None:
                child.kill()
            ended = await self._converse(child, job)
            self._idle.append(child)
        except (OSError, asyncio.IncompleteReadError) as error:
            ended = await _died(child, error)
        self._end(job, ended)

    async def _child(self) -> Process:
        while self._idle:
            child = self._idle.pop()
            if child.returncode is None:
                return child
        return await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stdin=PIPE, stdout=PIPE)

    async def _converse(self, child: Process, job: Job) -> Ended:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(frame(Order(module_name(job.function.handler.__module__), sys.path, job.lease)))
        await child.stdin.drain()
        while True:
            size = int.from_bytes(await child.stdout.readexactly(4), "big")
            told = decode_told(await child.stdout.readexactly(size))
            if told.ended is not None:
                return told.ended
            job.tell(told.progress)

    def stop(self, job: Job) -> bool:
        if job.handle is not None:
            with contextlib.suppress(ProcessLookupError):
                job.handle.kill()
        return True

    async def close(self) -> None:
        for running in list(self._running):
            running.cancel()
        for child in self._idle:
            if child.stdin is not None:
                child.stdin.close()
            await child.wait()


async def _died(child: Process | None, error: Exception) -> Ended:
    """What a task is told whose process ended under it."""
    if child is None:
        return Ended(kind=Kind.RETRY, error=ErrorInfo(PROCESS_DIED, f"no process could be started: {error}"))
    code = await child.wait()
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return Ended(kind=Kind.RETRY, error=ErrorInfo(PROCESS_DIED, f"the process of the handler ended with {how}"))
