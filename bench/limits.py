"""What limits cost: full cycles in a store where none of them ever binds, held against one without a configuration.

Every case has a store of its own, all open at once, and they take turns batch by batch: what the machine does meanwhile
hits all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from bench import steps
from bench.figures import Figure, figure
from bench.steps import COMMAND, PAYLOAD, TENANT, Options, fresh_store
from dibs.stores.protocol import Store
from dibs.task import KeyLimit, NewTask, QueueConfig, QueueLimits

PLAIN = "no configuration"
KEYED = "limit_keys without a limit"
KEYS = 100
MANY = 1_000_000
#: Each case's configuration, and whether its tasks have a limit_key.
CASES: dict[str, tuple[QueueConfig | None, bool]] = {
    PLAIN: (None, False),
    "a configuration without limits": (QueueConfig(lease_s=30), False),
    "a cap on the queue": (QueueConfig(limits=QueueLimits(in_flight=MANY)), False),
    KEYED: (None, True),
    "limit_keys with a cap": (QueueConfig(limits=QueueLimits(per_key=KeyLimit(in_flight=MANY))), True),
    "limit_keys with a rate": (QueueConfig(limits=QueueLimits(per_key=KeyLimit(rate=MANY, burst=MANY))), True),
}
BATCHES = (500, 1)


def measure(options: Options) -> list[Figure]:
    """Returns µs of a cycle for each case, held against tasks alike without limits."""
    figures: list[Figure] = []
    for batch in BATCHES:
        count = options.pick({500: 60, 1: 600}, {500: 12, 1: 100})[batch]
        options.say(f"limits: cycles of {batch}")
        samples = steps.run(options, _samples(options, batch, count))
        base = {case: _figure(case, batch, samples[case]) for case in (PLAIN, KEYED)}
        for case, (_, keyed) in CASES.items():
            against = {"without": base[KEYED if keyed else PLAIN]} if case not in base else None
            figures.append(_figure(case, batch, samples[case], against))
    return figures


def _figure(case: str, batch: int, samples: list[float], against: dict[str, Figure] | None = None) -> Figure:
    name = f"{case}, {batch} per call"
    return figure("limits", name, "µs/cycle", samples, better="lower", against=against, by="median")


async def _samples(options: Options, batch: int, count: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {case: [] for case in CASES}
    async with contextlib.AsyncExitStack() as stack:
        stores = {case: await stack.enter_async_context(fresh_store(options)) for case in CASES}
        for case, (config, _) in CASES.items():
            if config is not None:
                await stores[case].configure(TENANT, COMMAND, config)
        for number in range(count + 2):
            for case, (_, keyed) in CASES.items():
                start_s = time.perf_counter()
                await _cycle(stores[case], _tasks(batch, keyed))
                # The first ones meet an empty store and code that has not run yet.
                if number >= 2:
                    samples[case].append((time.perf_counter() - start_s) / batch * 1e6)
    return samples


def _tasks(batch: int, keyed: bool) -> list[NewTask]:
    if not keyed:
        return [NewTask(command=COMMAND, payload=PAYLOAD) for _ in range(batch)]
    return [NewTask(command=COMMAND, payload=PAYLOAD, limit_key=f"customer-{n % KEYS}") for n in range(batch)]


async def _cycle(store: Store, tasks: Sequence[NewTask]) -> None:
    await store.enqueue(TENANT, tasks)
    await steps.complete(store, await steps.claim(store, len(tasks)))
