"""Two processes on one store: what single enqueues cost while another process saturates it with batches of 500."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench import steps
from bench.children import child
from bench.figures import Figure, by_percentile
from bench.steps import Options, fresh_directory
from dibs.stores import open_store

BATCH = 500
PERCENTILES = (50, 99)


def measure(options: Options) -> list[Figure]:
    """Returns the second process's enqueue latency alone and beside the first."""
    count = options.pick(300, 100)
    alone, beside = [], []
    for number in range(options.repeat):
        options.say(f"contend, round {number + 1} of {options.repeat}")
        with fresh_directory(options) as directory:
            alone.append(steps.run(options, _enqueue_singly(directory, count)))
            with child(_saturate_in_child, directory, options.uvloop) as saturating:
                saturating.receive()
                beside.append(steps.run(options, _enqueue_singly(directory, count)))
                saturating.send("enough")
    base = by_percentile("contend", "enqueue alone", "ms", alone, of=PERCENTILES)
    name, against = f"enqueue beside batches of {BATCH}", {"alone": base}
    return [
        *base.values(),
        *by_percentile("contend", name, "ms", beside, of=PERCENTILES, against=against).values(),
    ]


async def _enqueue_singly(directory: Path, count: int) -> list[float]:
    times = []
    async with await open_store(str(directory)) as store:
        for _ in range(count):
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
            while not pipe.poll():
                await steps.cycle(store, BATCH)

    steps.run(Options(uvloop=uvloop), main())
