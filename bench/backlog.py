"""What a claim costs against what else is there: a thousand, a hundred thousand, a million tasks waiting, and a store
that a million tasks have gone through. Cost per task should not depend on it.

A fresh store with a thousand tasks is measured in turn with each level, claim by claim: the ratio is to what it did in
the same moments.
"""

from __future__ import annotations

import time

from msgspec import Struct

from bench import steps
from bench.figures import Figure, figure
from bench.steps import Options, fresh_store
from dibs.clock import SystemClock
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, UNKEPT_STATE_S

FEW = 1_000
FRESH = f"{FEW:,} waiting"
BATCHES = (100, 1)


class SkippingClock(SystemClock):
    """The host's clock, and whatever was skipped."""

    skipped_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.skipped_ms


class Level(Struct):
    """Samples at one level, and of the fresh store in the same moments, by tasks per claim."""

    case: str
    samples: dict[int, list[float]]
    fresh: dict[int, list[float]]


def measure(options: Options) -> list[Figure]:
    """Returns claim costs in batches and singly, held against a fresh store with few tasks."""
    levels = steps.run(options, _levels(options))
    figures = []
    for batch in BATCHES:
        base = [sample for level in levels for sample in level.fresh[batch]]
        figures.append(_figure(FRESH, batch, base))
        for level in levels:
            beside = _figure(FRESH, batch, level.fresh[batch])
            figures.append(_figure(level.case, batch, level.samples[batch], {FRESH: beside}))
    return figures


def _figure(case: str, batch: int, samples: list[float], against: dict[str, Figure] | None = None) -> Figure:
    name = f"{case}, claims of {batch}"
    return figure("backlog", name, "µs/task", samples, better="lower", against=against, by="median")


async def _levels(options: Options) -> list[Level]:
    many = options.pick(1_000_000, 100_000)
    levels, waiting = [], 0
    clock = SkippingClock()
    async with fresh_store(options) as fresh, fresh_store(options, clock=clock) as store:
        await fill(fresh, FEW, keep=False)
        for level in sorted({100_000, many}):
            options.say(f"backlog: filling to {level:,}")
            await fill(store, level - waiting, keep=False)
            waiting = level
            levels.append(await _level(options, f"{waiting:,} waiting", store, fresh))
        options.say(f"backlog: {waiting:,} go through")
        await _drain(store, waiting)
        clock.skipped_ms += int(UNKEPT_STATE_S * 1000) + 1
        while (await store.sweep()).more:
            pass
        await fill(store, FEW, keep=False)
        levels.append(await _level(options, f"{FEW:,} waiting, {waiting:,} gone", store, fresh))
    return levels


async def _level(options: Options, case: str, store: Store, fresh: Store) -> Level:
    """Claims from both stores in turn, so that a noisy moment hits both."""
    level = Level(case, {batch: [] for batch in BATCHES}, {batch: [] for batch in BATCHES})
    for batch in BATCHES:
        options.say(f"backlog: {case}, claims of {batch}")
        for _ in range(options.pick(100, 40)):
            level.fresh[batch].append(await _claim_us(fresh, batch))
            level.samples[batch].append(await _claim_us(store, batch))
    return level


async def _claim_us(store: Store, batch: int) -> float:
    """What is claimed is completed, and replaced, off the clock."""
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
