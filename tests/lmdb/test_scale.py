"""Cost does not grow with what merely exists."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.ordered import engine
from dibs.stores.ordered.claim import FEW, ready_in_ms
from dibs.stores.ordered.engine import ReadTxn
from dibs.stores.ordered.keys import end_of, tenant_keys
from dibs.stores.ordered.lmdb_txn import LmdbReadTxn
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
    """With 20,000 queues that have nothing due, a sweep with nothing to do, and one with ten tasks to promote, ask
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
        for start in range(0, 20_000, 1_000):
            tasks = [
                NewTask(command=f"idle-{n}", id=new_id(), delay_s=86_400.0 if n % 2 else 0.0)
                for n in range(start, start + 1_000)
            ]
            assert await store.enqueue(TENANT, tasks) == [Enqueued(task.id) for task in tasks]
        beside = await measure()
        print(f"alone {alone}, beside 20,000 idle queues {beside}")
        assert beside == alone


async def test_the_events_of_a_batch_are_few_runs(directory: Path, clock: ManualClock) -> None:
    """However ready and delayed tasks take turns in a batch, the journal tells of each sort once."""
    async with await open_store(str(directory), clock=clock, settings=RELAXED) as store:
        await put_many(store, 1_000)
        mixed = [NewTask(command="work", id=new_id(), delay_s=5.0 * (number % 2)) for number in range(1_000)]
        await store.enqueue(TENANT, mixed)
        page = await store.runs(TENANT, limit=10_000)
        assert [(run.count(), run.reason) for run in page.runs] == [(1_000, ""), (500, ""), (500, "DELAYED")]
        assert page.runs[2].ids == b"".join(task.id for task in mixed[1::2])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each call, from now on, asks of the engine."""
    counts: list[int] = []
    run = engine._run_joined

    def counting(txn: Any, calls: Any) -> None:
        wrapped = Counting(txn)
        run(wrapped, calls)
        counts.append(wrapped.count)

    monkeypatch.setattr(engine, "_run_joined", counting)
    return counts


async def cost(counted: list[int], call: Awaitable[object]) -> int:
    """What one call asked of the engine."""
    counted.clear()
    await call
    [count] = counted
    return count


def many_rows(count: int) -> list[NewTask]:
    """Rows of two commands and two priorities, some delayed, some with a key and a deadline."""
    return [
        NewTask(
            command="ab"[n % 2],
            priority=n % 4 // 2,
            delay_s=60.0 * (n % 8 == 7),
            key=f"k{n}" if n % 3 == 0 else None,
            expires_s=3600.0,
        )
        for n in range(count)
    ]


async def test_a_commit_costs_the_same_however_many_rows(
    directory: Path, clock: ManualClock, counted: list[int]
) -> None:
    """What staging and committing ask of the engine depends on chunks and their blocks, not on rows."""
    async with await open_store(str(directory), clock=clock, settings=RELAXED) as store:
        costs = []
        for count in (16, 100, 1_000):
            chunks = [new_id() for _ in range(5)]
            staged = [await cost(counted, store.stage(TENANT, chunk, many_rows(count))) for chunk in chunks]
            committed = await cost(counted, store.commit_load(TENANT, f"load {count}", 0, chunks))
            costs.append((*staged, committed))
        print(f"stage five chunks, commit them: {costs}")
        assert len(set(costs)) == 1
        assert (await store.stats(TENANT)).total.ready + (await store.stats(TENANT)).total.delayed == 5 * 1_116


async def test_a_claim_from_a_load_costs_what_it_takes(directory: Path, clock: ManualClock, counted: list[int]) -> None:
    """A claim of one, or of a hundred, asks as much of the engine with 200,000 rows waiting as with few, at the
    beginning of a chunk as in its middle."""
    async with await open_store(str(directory), clock=clock, settings=RELAXED) as store:
        limits = (1, 100, 1, 100, 7)

        async def measure() -> list[int]:
            return [await cost(counted, store.claim(TENANT, ["work"], limit=limit)) for limit in limits]

        row = [NewTask(command="work", payload=b"x")]
        chunk = new_id()
        await store.stage(TENANT, chunk, row * 1_000)
        await store.commit_load(TENANT, "small", 0, [chunk])
        few = await measure()
        chunks = [new_id() for _ in range(200)]
        for one in chunks:
            await store.stage(TENANT, one, row * 1_000)
        await store.commit_load(TENANT, "large", 0, chunks)
        many = await measure()
        print(f"claims of {limits} from one chunk {few}, from 200 chunks {many}")
        for limit, cost_of_few, cost_of_many in zip(limits, few, many, strict=True):
            assert cost_of_few <= 20 + 4 * limit
            # A claim of few looks at as many entries at once: here each is a block, and the first two are enough.
            assert cost_of_many <= cost_of_few + (limit if limit <= FEW else 1)


async def test_rows_that_left_leave_nothing_of_their_chunk(directory: Path, clock: ManualClock) -> None:
    """Once all rows are out, dropped or expired, no record of the chunk is left."""
    async with await open_store(str(directory), clock=clock, settings=RELAXED) as store:
        assert isinstance(store, OrderedStore)
        read = store._engine.read

        def records() -> int:
            keys = tenant_keys(TENANT)

            def count(txn: ReadTxn) -> int:
                return sum(len(txn.scan_keys(prefix, end_of(prefix), 1_000)) for prefix in (keys.chunk, keys.head))

            return read(count)

        chunks = [new_id() for _ in range(4)]
        for chunk in chunks:
            await store.stage(TENANT, chunk, many_rows(40))
        assert records() == 8
        await store.drop(TENANT, chunks[:1])
        assert records() == 6
        await store.commit_load(TENANT, "load", 0, chunks[1:3])
        while await store.claim(TENANT, ["a", "b"], limit=7):
            pass
        assert records() == 6
        clock.advance(60)
        while await store.claim(TENANT, ["a", "b"], limit=7):
            pass
        assert records() == 2
        clock.advance(86_400)
        while (await store.sweep()).more:
            pass
        assert records() == 0


def test_nothing_past_the_end_of_a_scan_is_read(tmp_path: Path) -> None:
    """What lies behind the records that are asked for may be large: the rows of a load come after the journal, which
    every wake-up reads."""
    with lmdb.open(str(tmp_path), map_size=1 << 28) as environment:
        with environment.begin(write=True) as txn:
            txn.put(b"Ja", b"small")
            for number in range(20):
                txn.put(b"K%02d" % number, bytes(1 << 20))
        with environment.begin() as txn:
            reading = LmdbReadTxn(txn, 0, {})
            tracemalloc.start()
            found = reading.scan(b"J", b"K", 64)
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert found == [(b"Ja", b"small")]
    assert peak_bytes < 1 << 20
