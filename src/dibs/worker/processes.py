"""The process lane: handlers that keep a core busy, each in a child process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine, Sequence
from typing import Any

from dibs.importing import module_of
from dibs.task import ErrorInfo, Kind
from dibs.worker.child import Order, Told, decode_told, frame
from dibs.worker.jobs import Job
from dibs.worker.lanes import Lane, Report
from dibs.worker.outcomes import Ended, error_info
from dibs.worker.parent import signal_name

log = logging.getLogger("dibs.worker")

PROCESS_DIED = "ProcessDied"
CLOSE_S = 2.0
LAST_WORDS_S = 0.5
CHILD = "from dibs.worker.child import main; main()"


class ProcessLane(Lane):
    """A child process for each slot, started when it is first needed and used again."""

    name = "process"

    def __init__(self, slots: int, report: Report) -> None:
        super().__init__(slots, report)
        self._idle: list[Process] = []
        self._children: set[Process] = set()
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
                _kill(child)
            ended = await self._converse(child, job)
            job.handle = None
            self._idle.append(child)
        except (OSError, asyncio.IncompleteReadError) as error:
            ended = await _died(child, error)
        except Exception as error:  # noqa: BLE001 whatever it is, the task must end and the child is of no more use
            _kill(child)
            ended = Ended(kind=Kind.RETRY, error=error_info(error))
        self._end(job, ended)

    async def _child(self) -> Process:
        while self._idle:
            child = self._idle.pop()
            if child.returncode is None:
                return child
        self._children = {child for child in self._children if child.returncode is None}
        # A session of its own, so that what a handler starts can be killed with it.
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CHILD, str(os.getpid())), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._children.add(child)
        return child

    async def _converse(self, child: Process, job: Job) -> Ended:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(frame(Order(module_of(job.function.handler), sys.path, job.lease)))
        await child.stdin.drain()
        while True:
            told = await _unless_it_dies(child, _receive(child.stdout))
            if told.id != job.lease.id:
                continue  # a thread that an earlier handler left behind
            if told.ended is not None:
                return told.ended
            job.tell(told.progress)

    def stop(self, job: Job) -> None:
        _kill(job.handle)

    async def close(self) -> None:
        for running in list(self._running):
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
            if child not in self._idle:
                _kill(child)
        for child in self._children:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), CLOSE_S)
            _kill(child)


async def _receive(answers: asyncio.StreamReader) -> Told:
    size = int.from_bytes(await answers.readexactly(4), "big")
    return decode_told(await answers.readexactly(size))


async def _unless_it_dies(child: Process, receiving: Coroutine[Any, Any, Told]) -> Told:
    """Returns what is received. A child that died says nothing more, but a process that it had started may keep its end
    of the pipe open."""
    answer = asyncio.ensure_future(receiving)
    death = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await asyncio.wait({answer}, timeout=LAST_WORDS_S)
        if not answer.done():
            raise BrokenPipeError("the process ended without an answer")
        return answer.result()
    finally:
        answer.cancel()
        death.cancel()


def _kill(child: Process | None) -> None:
    """Kills a child, and what it has started."""
    if child is not None and child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


async def _died(child: Process | None, error: Exception) -> Ended:
    """What a task is told whose process ended under it."""
    if child is None:
        return Ended(kind=Kind.RETRY, error=ErrorInfo(PROCESS_DIED, f"no process could be started: {error}"))
    code = await child.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # what it had started
    how = signal_name(-code) if code < 0 else f"exit status {code}"
    return Ended(kind=Kind.RETRY, error=ErrorInfo(PROCESS_DIED, f"the process of the handler ended with {how}"))
