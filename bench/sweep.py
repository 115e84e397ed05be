"""What one sweep costs that finds nothing to do, with many queues or none. Workers sweep every second, so it should
not depend on how many queues there are. Each queue holds one task that is due in a day.
"""

from __future__ import annotations

import time

from bench import steps
from bench.baselines import Floor
from bench.figures import Figure, figure
from bench.steps import PAYLOAD, TENANT, Options, fresh_directory, fresh_store
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, NewTask, Swept

UNIT = "µs"
QUEUES = (0, 1_000, 100_000)
DAY_S = 86_400.0


def measure(options: Options) -> list[Figure]:
    """Returns the cost of an idle sweep by the number of queues."""
    count = options.pick(500, 200)
    figures = [figure("sweep", "LMDB floor, a look", UNIT, _floor_us(options, count), better="lower")]
    against = {"floor": figures[0]}
    for queues, samples in steps.run(options, _sweeps_us(options, count)).items():
        name = f"{queues:,} idle queues"
        figures.append(figure("sweep", name, UNIT, samples, better="lower", against=against, by="median"))
        against.setdefault("no queues", figures[-1])
    return figures


def _floor_us(options: Options, count: int) -> list[float]:
    samples = []
    with fresh_directory(options) as directory:
        floor = Floor(directory)
        floor.cycle(BATCH_MAX)
        for _ in range(count):
            start_s = time.perf_counter()
            floor.look()
            samples.append(1e6 * (time.perf_counter() - start_s))
        floor.close()
    return samples


async def _sweeps_us(options: Options, count: int) -> dict[int, list[float]]:
    seen: dict[int, list[float]] = {}
    async with fresh_store(options) as store:
        # A journal with an ordinary entry: what a sweep looks at also where there is no queue.
        await steps.cycle(store, BATCH_MAX)
        for before, queues in zip((0, *QUEUES), QUEUES, strict=False):
            options.say(f"sweep: {queues:,} queues")
            await _add_queues(store, before, queues)
            seen[queues] = [await _sweep_us(store) for _ in range(count)]
    return seen


async def _add_queues(store: Store, start: int, stop: int) -> None:
    for first in range(start, stop, BATCH_MAX):
        names = [f"queue.{number}" for number in range(first, min(first + BATCH_MAX, stop))]
        await store.enqueue(TENANT, [NewTask(command=name, payload=PAYLOAD, delay_s=DAY_S) for name in names])


async def _sweep_us(store: Store) -> float:
    start_s = time.perf_counter()
    swept = await store.sweep()
    took_s = time.perf_counter() - start_s
    assert swept == Swept(), swept
    return 1e6 * took_s
