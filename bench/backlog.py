"""What a claim costs against what else is there: a thousand, a hundred thousand, a million tasks waiting, and a store
that a million tasks have gone through. Cost per task should not depend on it.
"""

from __future__ import annotations

import time

from bench import steps
from bench.figures import Figure, figure
from bench.steps import Options, fresh_store
from dibs.clock import SystemClock
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, UNKEPT_STATE_S

SCENARIO, UNIT = "backlog", "µs/task"
FEW = 1_000


class SkippingClock(SystemClock):
    """The host's clock, and whatever was skipped."""

    skipped_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.skipped_ms


def measure(options: Options) -> list[Figure]:
    """Returns claim costs in batches and singly, held against the fresh store with few tasks."""
    return steps.run(options, _measure(options))


async def _measure(options: Options) -> list[Figure]:
    many = options.pick(1_000_000, 100_000)
    clock = SkippingClock()
    async with fresh_store(options, clock=clock) as store:
        fresh = await _level(options, store, FEW, f"{FEW:,} waiting")
        figures = list(fresh)
        waiting = FEW
        for level in sorted({100_000, many}):
            options.say(f"backlog: filling to {level:,}")
            await fill(store, level - waiting, keep=False)
            waiting = level
            figures += await _level(options, store, waiting, f"{waiting:,} waiting", fresh)
        options.say(f"backlog: {waiting:,} go through")
        await _drain(store, waiting)
        clock.skipped_ms += int(UNKEPT_STATE_S * 1000) + 1
        while (await store.sweep()).more:
            pass
        figures += await _level(options, store, FEW, f"{FEW:,} waiting, {waiting:,} gone", fresh)
    return figures


async def _level(
    options: Options, store: Store, waiting: int, case: str, fresh: tuple[Figure, Figure] | None = None
) -> tuple[Figure, Figure]:
    """Measures with `waiting` tasks in the queue; what is claimed is completed and replaced off the clock."""
    if waiting == FEW:
        await fill(store, FEW, keep=False)
    times: list[Figure] = []
    for batch, count in ((100, options.pick(100, 40)), (1, options.pick(200, 80))):
        options.say(f"backlog: {case}, claims of {batch}")
        samples = [await _claim_us(store, batch) for _ in range(count)]
        against = None if fresh is None else {f"{FEW:,} waiting": fresh[len(times)]}
        name = f"{case}, claims of {batch}"
        times.append(figure(SCENARIO, name, UNIT, samples, better="lower", against=against))
    return times[0], times[1]


async def _claim_us(store: Store, batch: int) -> float:
    start_s = time.perf_counter()
    leases = await steps.claim(store, batch)
    took_s = time.perf_counter() - start_s
    await steps.complete(store, leases)
    await steps.enqueue(store, batch, keep=False)
    return 1e6 * took_s / batch


async def fill(store: Store, count: int, **fields: bool) -> None:
    """Enqueues many, in the largest batches."""
    for start in range(0, count, BATCH_MAX):
        await steps.enqueue(store, min(BATCH_MAX, count - start), **fields)


async def _drain(store: Store, count: int) -> None:
    for start in range(0, count, BATCH_MAX):
        await steps.complete(store, await steps.claim(store, min(BATCH_MAX, count - start)))
