"""How long quiet tenants wait beside a noisy one, where a worker serves all tenants.

A hundred tenants enqueue a task each now and then. One worker claims with tenant `*`, as `dibs worker` does: as many as
it has free slots, handlers that wait a few milliseconds, outcomes settled together. Then the same beside a tenant with
a million tasks ready: the slots are never free for long, and what counts is that a quiet tenant's turn comes soon.
"""

from __future__ import annotations

import asyncio
import random
import time

from bench import steps
from bench.figures import Figure, figure
from bench.steps import COMMAND, PAYLOAD, Options, fresh_store
from dibs.ids import new_id
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.task import BATCH_MAX, Lease, NewTask

QUIET = [f"quiet-{n:03}" for n in range(100)]
NOISY = "noisy"
SLOTS = 100
HANDLER_S = 0.01
"""In the mean."""
EVERY_S = 0.01
"""How often one of the quiet tenants enqueues, in the mean."""


def measure(options: Options) -> list[Figure]:
    """Returns the waits of quiet tenants, alone and beside the noise, as p50 and p99."""
    noise, seconds = options.pick((1_000_000, 10.0), (100_000, 3.0))
    waits: dict[str, list[list[float]]] = {"alone": [], "beside": []}
    for number in range(options.repeat):
        options.say(f"fairness, round {number + 1} of {options.repeat}: alone")
        waits["alone"].append(steps.run(options, _waits(options, 0, seconds)))
        options.say(f"fairness, round {number + 1} of {options.repeat}: beside {noise:,} tasks")
        waits["beside"].append(steps.run(options, _waits(options, noise, seconds)))
    figures: list[Figure] = []
    for percent in (50, 99):
        alone = _figure(f"quiet tenants alone p{percent}", waits["alone"], percent)
        beside = f"beside a tenant with {noise:,} tasks p{percent}"
        figures += [alone, _figure(beside, waits["beside"], percent, {"alone": alone})]
    return figures


def _figure(case: str, rounds: list[list[float]], percent: int, against: dict[str, Figure] | None = None) -> Figure:
    samples = [sorted(waits)[len(waits) * percent // 100] for waits in rounds]
    return figure("fairness", case, "ms", samples, better="lower", against=against)


async def _waits(options: Options, noise: int, seconds: float) -> list[float]:
    """How long each task of a quiet tenant waited, from the call of its enqueue to its lease, in milliseconds."""
    async with fresh_store(options) as store:
        await _make_noise(store, noise)
        enqueued: dict[bytes, float] = {}
        waits: list[float] = []
        claimed = asyncio.Event()
        working = asyncio.create_task(_work(store, enqueued, waits, claimed))
        await _enqueue_now_and_then(store, seconds, enqueued)
        while len(waits) < len(enqueued):
            claimed.clear()
            await claimed.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return waits


async def _make_noise(store: Store, count: int) -> None:
    rows = [NewTask(command=COMMAND, payload=PAYLOAD)] * BATCH_MAX
    chunks = [new_id() for _ in range(count // BATCH_MAX)]
    for chunk in chunks:
        await store.stage(NOISY, chunk, rows)
    await store.commit_load(NOISY, "noise", 0, chunks)


async def _enqueue_now_and_then(store: Store, seconds: float, enqueued: dict[bytes, float]) -> None:
    chance = random.Random(0)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        await asyncio.sleep(chance.expovariate(1 / EVERY_S))
        task = NewTask(command=COMMAND, payload=PAYLOAD, id=new_id())
        enqueued[task.id] = time.perf_counter()
        await store.enqueue(chance.choice(QUIET), [task])


async def _work(store: Store, enqueued: dict[bytes, float], waits: list[float], claimed: asyncio.Event) -> None:
    slots, ended = asyncio.Semaphore(SLOTS), asyncio.Queue[Lease]()
    async with asyncio.TaskGroup() as group:
        group.create_task(_settle(store, slots, ended))
        while True:
            await slots.acquire()
            free = 1
            while not slots.locked() and free < SLOTS:
                await slots.acquire()
                free += 1
            leases = await store.claim(ALL_TENANTS, [COMMAND], limit=free, wait_s=10)
            now_s = time.perf_counter()
            waits += [(now_s - enqueued[lease.id]) * 1000 for lease in leases if lease.tenant != NOISY]
            claimed.set()
            for lease in leases:
                asyncio.get_running_loop().call_later(random.expovariate(1 / HANDLER_S), ended.put_nowait, lease)
            for _ in range(free - len(leases)):
                slots.release()


async def _settle(store: Store, slots: asyncio.Semaphore, ended: asyncio.Queue[Lease]) -> None:
    while True:
        leases = [await ended.get()]
        while not ended.empty():
            leases.append(ended.get_nowait())
        await steps.complete(store, leases)
        for _ in leases:
            slots.release()
