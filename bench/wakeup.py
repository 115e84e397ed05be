"""Wake-ups across processes: how soon a waiting claim in one process has what another process enqueued.

The child waits in `claim(wait_s=30)`; the parent enqueues one task at a time with random gaps. Both read the machine's
monotonic clock. Before that the child waits for nothing, and tells what waiting costs.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench import steps
from bench.baselines import Floor
from bench.children import child
from bench.figures import Figure, by_percentile, figure
from bench.steps import COMMAND, TENANT, Options, fresh_directory
from dibs.stores import open_store

GAP_S = (0.020, 0.060)
PERCENTILES = (50, 99)


def measure(options: Options) -> list[Figure]:
    """Returns the time from the enqueue's call, and from its answer, to the lease; and the cost of waiting."""
    count, idle_s = options.pick(300, 100) // options.repeat, options.pick(10.0, 3.0)
    floors, called, answered, idle = [], [], [], []
    for number in range(options.repeat):
        options.say(f"wakeup, round {number + 1} of {options.repeat}")
        floors.append(_two_commits(options, count))
        leased, cpu = _round(options, count, idle_s / options.repeat)
        called.append([lease - start for start, _, lease in leased])
        answered.append([lease - answer for _, answer, lease in leased])
        idle.append(cpu)
    floor = by_percentile("wakeup", "LMDB floor, two commits", "ms", floors, of=PERCENTILES)
    against = {"floor": floor}
    return [
        *floor.values(),
        *by_percentile("wakeup", "enqueue called → leased", "ms", called, of=PERCENTILES, against=against).values(),
        *by_percentile("wakeup", "enqueue answered → leased", "ms", answered, of=PERCENTILES, against=against).values(),
        figure("wakeup", "CPU of a process that waits", "% of a core", idle, better="lower"),
    ]


def _two_commits(options: Options, count: int) -> list[float]:
    """What a wake-up cannot do without: a durable enqueue and a durable claim."""
    with fresh_directory(options) as directory:
        floor = Floor(directory)
        times = [floor.cycle(1) for _ in range(count)]
        floor.close()
    return [1000 * (enqueue + claim) for enqueue, claim, _ in times]


def _round(options: Options, count: int, idle_s: float) -> tuple[list[tuple[float, float, float]], float]:
    """Returns when each task was given, acknowledged and leased, in milliseconds, and the idle CPU in percent."""
    with (
        fresh_directory(options) as directory,
        child(_wait_in_child, directory, options.uvloop, count, idle_s) as waiting,
    ):
        cpu: float = waiting.receive()
        given = steps.run(options, _give(directory, count))
        leased: list[float] = waiting.receive()
    return [(*times, lease) for times, lease in zip(given, leased, strict=True)], cpu


async def _give(directory: Path, count: int) -> list[tuple[float, float]]:
    times = []
    async with await open_store(str(directory)) as store:
        for _ in range(count):
            await asyncio.sleep(random.uniform(*GAP_S))
            start_ms = _now_ms()
            await steps.enqueue(store, 1)
            times.append((start_ms, _now_ms()))
    return times


def _wait_in_child(pipe: Connection, directory: Path, uvloop: bool, count: int, idle_s: float) -> None:
    async def main() -> None:
        async with await open_store(str(directory)) as store:
            spent_s = _cpu_s()
            await store.claim(TENANT, [COMMAND], wait_s=idle_s)
            pipe.send(100 * (_cpu_s() - spent_s) / idle_s)
            leased = []
            for _ in range(count):
                leases = await store.claim(TENANT, [COMMAND], wait_s=30.0)
                leased.append(_now_ms())
                await steps.complete(store, leases)
            pipe.send(leased)

    steps.run(Options(uvloop=uvloop), main())


def _now_ms() -> float:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1e6


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
