"""Full cycles per second: enqueue, claim and complete with a result, journal and fsync on, in a fresh store.

By tasks per call and by callers: 64 callers with one task per call are 64 asyncio tasks, each of which enqueues one,
claims one and completes one, over and over. Then the same with retention at work: results live 0.2 s and a sweep prunes
beside the callers.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from msgspec import Struct

from bench import steps
from bench.baselines import Floor, NaiveQueue, rate
from bench.figures import Figure, figure
from bench.steps import Options, fresh_directory, fresh_store
from dibs.stores.protocol import Store

UNIT = "cycles/s"
#: The store, and tasks per call with callers.
CASES = [
    *(("lmdb", case) for case in [(1, 1), (1, 64), (50, 1), (50, 4), (50, 64), (500, 1), (500, 4), (500, 64)]),
    *(("memory", case) for case in [(1, 1), (1, 64), (50, 1), (500, 1), (500, 4)]),
]
STEADY_CASES = [(1, 64), (500, 1)]
#: Tasks per transaction of the floor. 64 single callers meet in one transaction, so 64 is their floor.
FLOOR_BATCHES = [1, 50, 64, 500]
NAIVE_BATCHES = [1, 50, 500]
RESULT_TTL_S = 0.2
SWEEP_EVERY_S = 0.1


def measure(options: Options) -> list[Figure]:
    """Returns the baselines, then lmdb, memory and the steady state, each held against them."""
    seconds = options.pick(0.6, 0.25)
    floors = {f"LMDB floor, {batch} per call": partial(_floor, options, batch, seconds) for batch in FLOOR_BATCHES}
    naives = {f"SQLite, {batch} per call": partial(_naive, options, batch, seconds) for batch in NAIVE_BATCHES}
    stores = {_name(kind, *case): partial(_fresh, options, kind, *case, seconds) for kind, case in CASES}
    seen = steps.rounds(options, "cycle", floors | naives | stores)
    base = {name: figure("cycle", name, UNIT, seen[name]) for name in floors | naives}
    figures = list(base.values())
    for name, (_, case) in zip(stores, CASES, strict=True):
        figures.append(figure("cycle", name, UNIT, seen[name], against=_baselines(base, *case)))
    return figures + _steady_figures(options, base)


def _name(kind: str, batch: int, callers: int) -> str:
    return f"{kind}, {batch} per call, {callers} caller{'s' if callers > 1 else ''}"


def _baselines(base: dict[str, Figure], batch: int, callers: int) -> dict[str, Figure]:
    floor = 64 if (batch, callers) == (1, 64) else batch
    return {"floor": base[f"LMDB floor, {floor} per call"], "SQLite": base[f"SQLite, {batch} per call"]}


def _floor(options: Options, batch: int, seconds: float) -> float:
    with fresh_directory(options) as directory:
        return rate(Floor(directory), batch, seconds)


def _naive(options: Options, batch: int, seconds: float) -> float:
    with fresh_directory(options) as directory:
        return rate(NaiveQueue(directory), batch, seconds)


# --------------------------------------------------------------------------------------------------------- fresh store


def _fresh(options: Options, kind: str, batch: int, callers: int, seconds: float) -> float:
    async def main() -> float:
        async with fresh_store(options, kind) as store:
            await steps.cycle(store, batch)
            return await saturate(store, batch, callers, seconds)

    return steps.run(options, main())


async def saturate(store: Store, batch: int, callers: int, seconds: float) -> float:
    """Returns cycles per second with so many callers, from the first call to the last answer."""
    start_s = time.perf_counter()
    stop_s = start_s + seconds

    async def caller() -> int:
        done = 0
        while time.perf_counter() < stop_s:
            await steps.cycle(store, batch)
            done += batch
        return done

    done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return done / (time.perf_counter() - start_s)


# -------------------------------------------------------------------------------------------------------- steady state


class Steady(Struct):
    """What a stretch of the steady state did."""

    completed: int = 0
    pruned: int = 0
    took_s: float = 0.0


def _steady_figures(options: Options, base: dict[str, Figure]) -> list[Figure]:
    seconds = options.pick(2.0, 1.0)
    cases = {_name("lmdb, pruned beside", *case): partial(_steady, options, *case, seconds) for case in STEADY_CASES}
    seen = steps.rounds(options, "cycle", cases)
    figures = []
    for (name, stretches), (batch, callers) in zip(seen.items(), STEADY_CASES, strict=True):
        rates = [one.completed / one.took_s for one in stretches]
        share = sum(one.pruned for one in stretches) / sum(one.completed for one in stretches)
        note = f"pruned {share:.0%} of completed"
        figures.append(figure("cycle", name, UNIT, rates, against=_baselines(base, batch, callers), note=note))
    return figures


def _steady(options: Options, batch: int, callers: int, seconds: float) -> Steady:
    async def main() -> Steady:
        async with fresh_store(options) as store:
            return await _prune_beside(store, batch, callers, seconds)

    return steps.run(options, main())


async def _prune_beside(store: Store, batch: int, callers: int, seconds: float) -> Steady:
    """Counts only after the first results have come of age: from then on pruning should keep pace."""
    from_s = time.perf_counter() + 3 * RESULT_TTL_S
    stop_s = from_s + seconds
    steady = Steady()

    async def caller() -> None:
        while (now_s := time.perf_counter()) < stop_s:
            await steps.cycle(store, batch, result_ttl_s=RESULT_TTL_S)
            steady.completed += batch if now_s >= from_s else 0

    async def sweeper() -> None:
        while time.perf_counter() < stop_s:
            swept = await store.sweep()
            steady.pruned += swept.pruned if time.perf_counter() >= from_s else 0
            if not swept.more:
                await asyncio.sleep(SWEEP_EVERY_S)

    await asyncio.gather(sweeper(), *(caller() for _ in range(callers)))
    steady.took_s = time.perf_counter() - from_s
    return steady
