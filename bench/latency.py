"""One caller, one task, nobody else: how long each durable verb takes, and the whole life."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from bench import steps
from bench.baselines import Cycler, Floor, NaiveQueue, Times
from bench.figures import Figure, by_percentile
from bench.steps import Options, fresh_directory, fresh_store

UNIT = "ms"
BASELINES = ("LMDB floor", "SQLite")
VERBS = ("enqueue", "claim", "complete", "cycle")


def measure(options: Options) -> list[Figure]:
    """Returns percentiles of each verb and of the whole, for the floor, SQLite and the store."""
    count = options.pick(400, 150)
    seen = steps.rounds(
        options,
        "latency",
        {
            "LMDB floor": partial(_baseline, options, Floor, count),
            "SQLite": partial(_baseline, options, NaiveQueue, count),
            "lmdb": partial(_store, options, "lmdb", count),
            "memory": partial(_store, options, "memory", count),
        },
    )
    figures: list[Figure] = []
    for case in seen:
        # Of the baselines and of memory the whole says enough; the store's verbs are held against the floor's.
        for verb in VERBS if case == "lmdb" else VERBS[-1:]:
            against = {} if case == "LMDB floor" else {"floor": _by_p(seen, "LMDB floor", verb)}
            if case not in BASELINES:
                against["SQLite"] = _by_p(seen, "SQLite", verb)
            figures += _by_p(seen, case, verb, against).values()
    return figures


def _by_p(
    seen: dict[str, list[list[Times]]], case: str, verb: str, against: dict[str, dict[int, Figure]] | None = None
) -> dict[int, Figure]:
    number = VERBS.index(verb)
    rounds = [[1000 * (*one, sum(one))[number] for one in times] for times in seen[case]]
    return by_percentile("latency", f"{case}, {verb}", UNIT, rounds, against=against)


def _baseline(options: Options, kind: Callable[..., Cycler], count: int) -> list[Times]:
    with fresh_directory(options) as directory:
        cycler = kind(directory)
        times = [cycler.cycle(1) for _ in range(count)]
        cycler.close()
        return times


def _store(options: Options, kind: str, count: int) -> list[Times]:
    async def main() -> list[Times]:
        times = []
        async with fresh_store(options, kind) as store:
            for _ in range(count):
                at = [time.perf_counter()]
                await steps.enqueue(store, 1)
                at.append(time.perf_counter())
                leases = await steps.claim(store, 1)
                at.append(time.perf_counter())
                await steps.complete(store, leases)
                at.append(time.perf_counter())
                times.append((at[1] - at[0], at[2] - at[1], at[3] - at[2]))
        return times

    return steps.run(options, main())
