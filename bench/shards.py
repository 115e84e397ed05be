"""Shards: full cycles per second through 1, 2 and 4 LMDB shards, beside the plain store in the same rounds.

In one process, where all shards share one interpreter, and in two processes that work on the same store at once, where
the plain store has one writer for both. 50 tasks per call. A cycle claims as often as it takes to have as many tasks as
it enqueued: with shards another caller may be ahead of it in one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from bench import steps
from bench.children import child
from bench.figures import Figure, figure
from bench.steps import COMMAND, TENANT, Options, fresh_directory
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import Lease

UNIT = "cycles/s"
BATCH = 50
CALLERS = 16
PROCESSES = 2
#: None: the plain store.
COUNTS = (None, 1, 2, 4)


def measure(options: Options) -> list[Figure]:
    """Returns each number of shards beside the plain store, in one process and in two."""
    seconds = options.pick(1.0, 0.3)
    cases = {
        _name(count, processes): partial(_rate, options, count, processes, seconds)
        for processes in (1, PROCESSES)
        for count in COUNTS
    }
    seen = steps.rounds(options, "shards", cases)
    figures: list[Figure] = []
    for processes in (1, PROCESSES):
        plain = figure("shards", _name(None, processes), UNIT, seen[_name(None, processes)])
        figures.append(plain)
        for count in COUNTS[1:]:
            name = _name(count, processes)
            figures.append(figure("shards", name, UNIT, seen[name], against={"plain": plain}))
    return figures


def _name(count: int | None, processes: int) -> str:
    store = "plain store" if count is None else f"{count} shard{'s' if count > 1 else ''}"
    return f"{store}, {processes} process{'es' if processes > 1 else ''}"


def _url(directory: Path, count: int | None) -> str:
    return f"lmdb:{directory}" if count is None else f"shards:{directory}?n={count}"


def _rate(options: Options, count: int | None, processes: int, seconds: float) -> float:
    with fresh_directory(options) as directory, contextlib.ExitStack() as stack:
        url = _url(directory / "store", count)
        if processes == 1:
            return steps.run(options, _saturate(url, CALLERS, seconds))
        children = [
            stack.enter_context(child(_saturate_in_child, url, CALLERS // processes, seconds, options.uvloop))
            for _ in range(processes)
        ]
        for one in children:
            one.receive()
        for one in children:
            one.send("go")
        return float(sum(one.receive() for one in children))


def _saturate_in_child(pipe: Connection, url: str, callers: int, seconds: float, uvloop: bool) -> None:
    def ready() -> None:
        pipe.send("ready")
        pipe.recv()

    pipe.send(steps.run(Options(uvloop=uvloop), _saturate(url, callers, seconds, ready)))


async def _saturate(url: str, callers: int, seconds: float, ready: object = None) -> float:
    async with await open_store(url) as store:
        await _cycle(store)
        if callable(ready):
            ready()
        start_s = time.perf_counter()

        async def caller() -> int:
            done = 0
            while time.perf_counter() < start_s + seconds:
                await _cycle(store)
                done += BATCH
            return done

        done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
        return done / (time.perf_counter() - start_s)


async def _cycle(store: Store) -> None:
    await steps.enqueue(store, BATCH)
    leases: list[Lease] = []
    while len(leases) < BATCH:
        leases += await store.claim(TENANT, [COMMAND], limit=BATCH - len(leases), worker="bench", wait_s=1)
    await steps.complete(store, leases)
