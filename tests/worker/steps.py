"""What most tests of the worker do."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from dibs import Dibs
from dibs.function import TaskFunction
from dibs.task import Event
from dibs.worker import Summary, Worker, WorkerOptions

LIMIT_S = 30.0


async def drained(app: Dibs | list[Dibs], **options: Any) -> Summary:
    """Runs a worker until nothing is left, and returns what it did."""
    return await asyncio.wait_for(Worker(app, WorkerOptions(drain=True, **options)).run(), LIMIT_S)


@asynccontextmanager
async def working(app: Dibs | list[Dibs], **options: Any) -> AsyncIterator[Worker]:
    """A worker that runs meanwhile, and has ended well afterwards."""
    worker = Worker(app, WorkerOptions(**options))
    running = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(running, LIMIT_S)


async def eventually(condition: Callable[[], Any]) -> Any:
    """Returns what `condition` says, once that is true."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        seen = condition()
        if inspect.isawaitable(seen):
            seen = await seen
        if seen:
            return seen
        assert time.monotonic() < deadline_s, "it has not come true"
        await asyncio.sleep(0.01)


def declare(app: Dibs, lane: str, body: Callable[[Any], Any], **options: Any) -> TaskFunction[..., Any]:
    """A task that does `body`, in a loop or in a thread."""

    async def in_loop(value: Any = None) -> Any:
        return body(value)

    def in_thread(value: Any = None) -> Any:
        return body(value)

    made: TaskFunction[..., Any] = app.task(name="work", **options)(in_loop if lane == "loop" else in_thread)
    return made


async def journal(app: Dibs) -> list[Event]:
    """Everything that happened."""
    return [*(await app.ask(lambda store: store.events("*", limit=1000))).events]
