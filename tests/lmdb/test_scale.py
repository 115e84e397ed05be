"""Cost does not grow with what merely exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.ordered.claim import ready_in_ms
from dibs.stores.ordered.store import OrderedStore
from dibs.stores.ordered.sweep import TRIM_ENTRIES_MAX, anything_due, sweep
from dibs.task import Enqueued, NewTask
from dibs.testing.contract.steps import TENANT, put, put_many

RELAXED = Settings(durability="relaxed")


@pytest.mark.timeout(120)
async def test_many_pending_tasks_across_a_restart(directory: Path, clock: ManualClock) -> None:
    """150,000 tasks wait, the store is closed and opened: all are there, first in, first out."""
    ids: list[bytes] = []
    async with await open_store(str(directory), clock=clock, settings=RELAXED) as store:
        for _ in range(150):
            ids += await put_many(store, 1_000)
    async with await open_store(str(directory), clock=clock, settings=RELAXED) as store:
        assert (await store.stats(TENANT)).total.ready == len(ids)
        leases = [lease.id for _ in range(150) for lease in await store.claim(TENANT, ["work"], limit=1_000)]
        assert leases == ids
        assert await store.claim(TENANT, ["work"]) == []


class Counting:
    """A transaction that counts what is asked of it and what it gives."""

    def __init__(self, txn: Any) -> None:
        self.__dict__.update(txn=txn, count=0)

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self.txn, name)
        if name not in ("get", "get_many", "scan", "scan_keys", "put", "delete", "put_many", "delete_many"):
            return asked

        def counted(*args: Any, **options: Any) -> Any:
            items = [list(arg) if name.endswith("_many") else arg for arg in args]
            answer = asked(*items, **options)
            many = answer if name.startswith("scan") else items[0] if name.endswith("_many") else ()
            self.__dict__["count"] += 1 + len(many)
            return answer

        return counted

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.txn, name, value)


async def operations(store: OrderedStore) -> dict[str, int]:
    """What looking, claiming-readiness and a sweep ask of the engine."""
    counted: dict[str, int] = {}

    def look(name: str, call: Any) -> Any:
        def run(txn: Any) -> Any:
            counting = Counting(txn)
            answer = call(counting)
            counted[name] = counting.count
            return answer

        return run

    limits, store_id = store._journal_limits, store.store_id
    store._engine.read(look("look", lambda txn: anything_due(txn, limits)))
    store._engine.read(look("ready", lambda txn: ready_in_ms(txn, TENANT, ["work"])))
    await store._engine.lane().transact(look("sweep", lambda txn: sweep(txn, 1_000, limits, store_id)))
    return counted


@pytest.mark.timeout(120)
async def test_the_sweep_does_not_visit_idle_queues(directory: Path, clock: ManualClock) -> None:
    """With 100,000 queues that have nothing due, a sweep with nothing to do, and one with ten tasks to promote, ask
    exactly as much of the engine as without them."""
    async with await open_store(str(directory), clock=clock, settings=RELAXED) as store:
        assert isinstance(store, OrderedStore)

        async def measure() -> list[dict[str, int]]:
            await put_many(store, 10, delay_s=5)
            idle = await operations(store)
            clock.advance(10)
            busy = await operations(store)
            assert await store.claim(TENANT, ["work"], limit=10)
            clock.advance(60)
            await store.sweep()
            return [idle, busy]

        # A sweep looks at the journal's oldest entries, up to a limit: let there be that many from the beginning.
        for _ in range(TRIM_ENTRIES_MAX):
            await put(store, "other")
        await measure()
        alone = await measure()
        for start in range(0, 100_000, 1_000):
            tasks = [
                NewTask(command=f"idle-{n}", id=new_id(), delay_s=86_400.0 if n % 2 else 0.0)
                for n in range(start, start + 1_000)
            ]
            assert await store.enqueue(TENANT, tasks) == [Enqueued(task.id) for task in tasks]
        beside = await measure()
        print(f"alone {alone}, beside 100,000 idle queues {beside}")
        assert beside == alone
