"""Two processes on one store: what single enqueues cost while another process saturates it with batches of 500."""

from __future__ import annotations

import asyncio
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench import steps
from bench.children import child
from bench.figures import Figure, by_percentile, figure
from bench.steps import Options, fresh_directory
from dibs.stores import open_store

BATCH = 500
GAP_S = (0.002, 0.008)
PERCENTILES = (50, 99)


def measure(options: Options) -> list[Figure]:
    """Returns the second process's enqueue latency alone and beside the first, and how the first fared."""
    count = options.pick(300, 100)
    alone, beside, rates = [], [], []
    for number in range(options.repeat):
        options.say(f"contend, round {number + 1} of {options.repeat}")
        with fresh_directory(options) as directory:
            alone.append(steps.run(options, _enqueue_singly(directory, count)))
            with child(_saturate_in_child, directory, options.uvloop) as saturating:
                saturating.receive()
                beside.append(steps.run(options, _enqueue_singly(directory, count)))
                saturating.send("enough")
                rates.append(saturating.receive())
    base = by_percentile("contend", "enqueue alone", "ms", alone, of=PERCENTILES)
    name, against = f"enqueue beside batches of {BATCH}", {"alone": base}
    return [
        *base.values(),
        *by_percentile("contend", name, "ms", beside, of=PERCENTILES, against=against).values(),
        figure("contend", f"the process with batches of {BATCH}, meanwhile", "cycles/s", rates),
    ]


async def _enqueue_singly(directory: Path, count: int) -> list[float]:
    """Pauses at random between calls: back to back, most of them would fit into the other's pauses."""
    times = []
    async with await open_store(str(directory)) as store:
        for _ in range(count):
            await asyncio.sleep(random.uniform(*GAP_S))
            start_s = time.perf_counter()
            await steps.enqueue(store, 1)
            times.append(1000 * (time.perf_counter() - start_s))
    return times


def _saturate_in_child(pipe: Connection, directory: Path, uvloop: bool) -> None:
    """Goes through cycles as fast as it can, from its first message to its parent until the parent's to it."""

    async def main() -> None:
        async with await open_store(str(directory)) as store:
            await steps.cycle(store, BATCH)
            pipe.send("at it")
            done, start_s = 0, time.perf_counter()
            while not pipe.poll():
                await steps.cycle(store, BATCH)
                done += BATCH
            pipe.send(done / (time.perf_counter() - start_s))

    steps.run(Options(uvloop=uvloop), main())
