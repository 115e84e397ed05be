"""Where handlers run. A lane has slots, starts jobs, and stops one when it is told to.

What a lane reports, it reports in the worker's own loop: many outcomes at a time, so that a flood of small tasks does
not become a flood of wake-ups.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from dibs.portal import LoopThread
from dibs.task import Kind
from dibs.worker.jobs import Job, Slots
from dibs.worker.outcomes import Ended
from dibs.worker.running import run_async, run_sync

Report = Callable[[Sequence[tuple[Job, Ended]]], None]


class Lane(abc.ABC):
    """A place for handlers of one kind."""

    name: str
    stops = True
    """Whether a handler can be stopped from outside; otherwise it ends when it likes."""

    def __init__(self, slots: int, report: Report) -> None:
        self.slots = Slots(slots)
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._ended: list[tuple[Job, Ended]] = []
        self._lock = threading.Lock()

    @abc.abstractmethod
    def start(self, jobs: Sequence[Job]) -> None:
        """Starts jobs whose slots are reserved."""

    def stop(self, job: Job) -> None:
        """Has a handler stop, in a lane that can."""
        raise NotImplementedError

    def blocked_s(self) -> float:
        """For how long the handlers have not let each other run."""
        return 0.0

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends what the lane started; handlers that cannot be stopped are left behind."""

    def _end(self, job: Job, ended: Ended) -> None:
        """Reports one outcome, from any thread; those that come meanwhile go with it."""
        with self._lock:
            self._ended.append((job, ended))
            first = len(self._ended) == 1
        if first:
            with contextlib.suppress(RuntimeError):  # the worker's loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        self._report(ended)


class LoopLane(Lane):
    """Coroutine functions, in an event loop of their own: one that blocks it does not stop the worker's heartbeats."""

    name = "loop"

    def __init__(self, slots: int, report: Report) -> None:
        super().__init__(slots, report)
        self._thread = LoopThread("dibs-handlers")
        self._pinged_s: float | None = None

    def start(self, jobs: Sequence[Job]) -> None:
        self._thread.loop.call_soon_threadsafe(self._start, jobs)

    def _start(self, jobs: Sequence[Job]) -> None:
        create_task = self._thread.loop.create_task
        for job in jobs:
            job.handle = create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        if job.why is not None:
            self._end(job, Ended(kind=Kind.RETRY))
            return
        job.begun = True
        self._end(job, await run_async(job.function, job))

    def stop(self, job: Job) -> None:
        self._thread.loop.call_soon_threadsafe(self._cancel, job)

    def _cancel(self, job: Job) -> None:
        # In the handlers' loop, and so after the job was started there. A coroutine that is cancelled before its first
        # step does not run at all and could not report: one that has not begun sees by itself that it need not.
        if job.begun:
            job.handle.cancel()

    def blocked_s(self) -> float:
        """Answers, and asks again: the loop answers when it gets to it."""
        now_s = time.monotonic()
        if self._pinged_s is not None:
            return now_s - self._pinged_s
        self._pinged_s = now_s
        self._thread.loop.call_soon_threadsafe(self._pong)
        return 0.0

    def _pong(self) -> None:
        self._pinged_s = None

    def stack(self) -> str:
        """Where the loop's thread is now, to show what blocks it."""
        frame = sys._current_frames().get(self._thread.ident)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-3:])

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.stop, 1.0)


class ThreadLane(Lane):
    """Plain functions, each in a thread."""

    name = "thread"
    stops = False

    def __init__(self, slots: int, report: Report) -> None:
        super().__init__(slots, report)
        # Not an executor: the interpreter waits for those, however long a handler takes that was given up.
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = itertools.count(1)

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._queue.put(job)
            if not self._idle.acquire(blocking=False):
                threading.Thread(target=self._serve, name=f"dibs-thread-{next(self._threads)}", daemon=True).start()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            self._end(job, run_sync(job.function, job))
            del job
            self._idle.release()
        self._queue.put(None)

    async def close(self) -> None:
        self._queue.put(None)
