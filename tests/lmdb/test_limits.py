"""Limits and fair claims in the ordered store: what they cost, what the doctor sees of them, rows of loads."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores import open_local
from dibs.stores.ordered.claim import ClaimCall, claim, new_randoms, ready_in_ms
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.enqueue import enqueue, prepare
from dibs.stores.ordered.fair import Round, Turn, fair_claim, fair_ready_in_ms
from dibs.stores.ordered.keys import queue_keys, tenant_keys
from dibs.stores.ordered.records import decode_use, encode_use
from dibs.stores.ordered.settle import settle
from dibs.stores.ordered.store import OrderedStore
from dibs.stores.protocol import ALL_TENANTS
from dibs.task import ALL_COMMANDS, KeyLimit, Kind, Lease, NewTask, QueueConfig, QueueLimits, Settlement
from dibs.testing.contract.steps import COMMAND, TENANT, complete, put, put_many, retry, take
from tests.lmdb.processes import Children
from tests.lmdb.test_processes import listening
from tests.lmdb.test_scale import RELAXED, Counting

ONE_AT_A_TIME = QueueConfig(limits=QueueLimits(per_key=KeyLimit(in_flight=1)))
CALL = ClaimCall(TENANT, (COMMAND,), 30_000, "w", None)


@pytest.fixture
async def store(clock: ManualClock) -> Any:
    """A store in memory: the same layout, without files."""
    async with await open_local("memory:", clock=clock) as opened:
        yield opened
        report = await opened.doctor()
        assert report.clean, report.problems


def counted(store: OrderedStore, call: Any) -> Any:
    """Runs a call in a transaction of its own, and returns how much it asked of the engine."""

    def run(txn: Txn) -> int:
        counting: Any = Counting(txn)
        call(counting)
        if counting.work is not None:
            # What comes later in this transaction, and counts no more, must not ask the counting one.
            counting.work.txn = txn
        return int(counting.count)

    return store._engine.lane().transact(run)


async def costs(store: OrderedStore) -> dict[str, int]:
    """What a life of a task of another key asks of the engine, verb by verb."""
    mine = [prepare(TENANT, NewTask(command=COMMAND, limit_key="mine"), new_id()) for _ in range(3)]
    asked: dict[str, int] = {"enqueue": await counted(store, lambda txn: enqueue(txn, TENANT, mine))}
    leases: list[Lease] = []

    def claim_one(txn: Any) -> None:
        leases.extend(lease for lease in claim(txn, CALL, new_randoms(1)) if lease is not None)

    asked["claim"] = await counted(store, claim_one)
    [lease] = leases
    done = [Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=Kind.COMPLETE)]
    asked["settle"] = await counted(store, lambda txn: settle(txn, done))
    asked["look"] = await counted(store, lambda txn: ready_in_ms(txn, TENANT, [COMMAND]))
    for _ in range(2):
        await complete(store, await take(store))
    asked["empty"] = await counted(store, lambda txn: claim(txn, CALL, new_randoms(5)))
    return asked


@pytest.mark.timeout(120)
async def test_parked_tasks_cost_the_others_nothing(directory: Path, clock: ManualClock) -> None:
    """Beside 50,000 parked tasks of one key, a task of another key asks exactly as much of the engine as beside one."""
    async with await open_local(str(directory), clock=clock, settings=RELAXED) as store:
        assert isinstance(store, OrderedStore)
        await store.configure(TENANT, COMMAND, ONE_AT_A_TIME)
        await put_many(store, 2, limit_key="noisy")
        held = await take(store, lease_s=3600)
        await costs(store)
        alone = await costs(store)
        for _ in range(50):
            await put_many(store, 1_000, limit_key="noisy")
        beside = await costs(store)
        assert beside == alone
        await complete(store, held)
        await take(store)


async def test_a_claim_of_all_tenants_looks_at_no_idle_ones(store: OrderedStore) -> None:
    """Beside 2,000 tenants that have nothing ready it asks exactly as much of the engine as without them."""
    call = ClaimCall(ALL_TENANTS, (COMMAND,), 3_600_000, "w", None)

    async def measure() -> list[int]:
        for tenant in ("a", "m", "z"):
            await put_many(store, 2, tenant=tenant)
        around = Round("a", Turn("a"))
        look = await counted(store, lambda txn: fair_ready_in_ms(txn, [COMMAND], around.turn))
        claimed = await counted(store, lambda txn: fair_claim(txn, call, new_randoms(6), around))
        nothing = await counted(store, lambda txn: fair_claim(txn, call, new_randoms(6), around))
        return [look, claimed, nothing]

    await measure()
    alone = await measure()
    for n in range(2_000):
        await put(store, tenant=f"idle-{n}", delay_s=86_400)
    assert await measure() == alone


async def test_the_doctor_counts_again(store: OrderedStore) -> None:
    """What a key uses is wrong, a timer is lost, a parked entry leads nowhere: all of it is seen and repaired, and the
    parked tasks come home."""
    await store.configure(TENANT, COMMAND, ONE_AT_A_TIME)
    await put_many(store, 4, limit_key="k")
    await put_many(store, 2, limit_key="other")
    lease = await take(store)
    await store.configure(TENANT, "slow", QueueConfig(limits=QueueLimits(per_key=KeyLimit(rate=0.1, burst=1))))
    await put_many(store, 3, "slow", limit_key="k")
    await take(store, "slow")
    assert (await store.doctor()).clean

    def spoil(txn: Txn) -> None:
        tenant = tenant_keys(TENANT)
        for key, value in txn.scan(tenant.limit, tenant.limit + b"\xff", 10):
            use = decode_use(value)
            use.parked, use.leased, use.timer_ms = 7, 0, 5
            txn.put(key, encode_use(use))
        txn.put(queue_keys(TENANT, COMMAND).parked + bytes(16) + bytes(14) + new_id(), b"")

    await store._engine.lane().transact(spoil)
    assert len((await store.doctor()).problems) >= 4
    assert (await store.doctor(mend=True)).clean
    await complete(store, lease)
    ended = 0
    while leases := await store.claim(TENANT, [COMMAND], limit=10):
        ended += len(leases)
        for one in leases:
            await complete(store, one)
    assert ended == 5


async def test_a_key_that_uses_nothing_leaves_nothing(store: OrderedStore, clock: ManualClock) -> None:
    """Its record goes with its last task, or once its burst is full again."""

    def records(txn: Any) -> int:
        tenant = tenant_keys(TENANT)
        return len(txn.scan_keys(tenant.limit, tenant.limit + b"\xff", 100))

    for limit in (KeyLimit(in_flight=2), KeyLimit(rate=1, burst=5)):
        await store.configure(TENANT, COMMAND, QueueConfig(limits=QueueLimits(per_key=limit)))
        for n in range(3):
            await put_many(store, 3, limit_key=f"k{n}")
        for lease in await store.claim(TENANT, [COMMAND], limit=9):
            await complete(store, lease)
        while leases := await store.claim(TENANT, [COMMAND], limit=9):
            for lease in leases:
                await complete(store, lease)
        clock.advance(10)
        await store.sweep()
        assert store._engine.read(records) == 0


@pytest.mark.parametrize("seed", range(5))
async def test_rates_hold_whatever_happens(store: OrderedStore, clock: ManualClock, seed: int) -> None:
    """Tasks of several costs are enqueued, retried, released, cancelled and expire while the limits change: no key ever
    starts more than its burst and its rate allow, and everything ends."""
    chance = random.Random(seed)
    rate, burst = 2.0, 6.0
    limits = QueueLimits(per_key=KeyLimit(rate=rate, burst=burst, in_flight=4))
    await store.configure(TENANT, COMMAND, QueueConfig(limits=limits))
    keys = ("a", "b", "c")
    tasks: dict[bytes, tuple[str, int]] = {}
    started: dict[str, deque[tuple[int, int]]] = {key: deque() for key in keys}
    leases: list[Lease] = []
    for _ in range(300):
        what = chance.random()
        if what < 0.3:
            key, cost = chance.choice(keys), chance.choice([1, 1, 2, 5])
            options: dict[str, Any] = {"priority": chance.choice([0, 5]), "delay_s": chance.choice([0.0, 0.0, 1.0])}
            tasks[await put(store, limit_key=key, limit_cost=cost, max_attempts=50, **options)] = (key, cost)
        elif what < 0.6:
            for lease in await store.claim(TENANT, [COMMAND], limit=chance.choice([1, 3, 20]), lease_s=5):
                key, cost = tasks[lease.id]
                started[key].append((clock.now_ms(), cost))
                leases.append(lease)
        elif what < 0.8 and leases:
            lease = leases.pop(chance.randrange(len(leases)))
            kind = chance.choice([Kind.COMPLETE, Kind.RETRY, Kind.RELEASE])
            await store.settle([Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=kind)])
        elif what < 0.83 and tasks:
            await store.cancel(TENANT, [chance.choice(list(tasks))])
        elif what < 0.85:
            await store.sweep()
        else:
            clock.advance(chance.choice([0.1, 0.5, 2.0]))
    for starts in started.values():
        for first in range(len(starts)):
            for last in range(first, len(starts)):
                spent = sum(cost for _, cost in list(starts)[first : last + 1])
                seconds = (starts[last][0] - starts[first][0]) / 1000
                assert spent <= burst + rate * seconds + 1e-6
    assert (await store.doctor()).clean
    for _ in range(500):
        for lease in await store.claim(TENANT, [COMMAND], limit=100):
            await complete(store, lease)
        clock.advance(5)
    total = (await store.stats(TENANT)).total
    assert (total.ready, total.delayed, total.leased) == (0, 0, 0)


async def load(store: OrderedStore, *rows: NewTask) -> None:
    """Stages rows as one chunk and commits it."""
    chunk = new_id()
    await store.stage(TENANT, chunk, list(rows))
    await store.commit_load(TENANT, chunk.hex(), 0, [chunk])


async def test_rows_of_a_load_obey_limits(store: OrderedStore) -> None:
    """A claim takes from a block what the limit of each key lets it, in order; the others are parked."""
    await store.configure(TENANT, COMMAND, ONE_AT_A_TIME)
    keys = ("a", "a", "b", None, "a", "b", None)
    await load(store, *[NewTask(command=COMMAND, payload=b"%d" % n, limit_key=key) for n, key in enumerate(keys)])
    order: list[bytes] = []
    while leases := await store.claim(TENANT, [COMMAND], limit=10):
        order += [lease.payload for lease in leases]
        for lease in leases:
            await complete(store, lease)
    assert order == [b"0", b"2", b"3", b"6", b"1", b"5", b"4"]


async def test_rows_come_before_what_was_enqueued_later(store: OrderedStore) -> None:
    """A key's tasks keep their order between a load and an enqueue after it."""
    await store.configure(TENANT, COMMAND, ONE_AT_A_TIME)
    await load(store, *[NewTask(command=COMMAND, payload=b"%d" % n, limit_key="k") for n in range(3)])
    await put(store, payload=b"later", limit_key="k")
    order = []
    while leases := await store.claim(TENANT, [COMMAND], limit=10):
        order += [lease.payload for lease in leases]
        await complete(store, leases[0])
    assert order == [b"0", b"1", b"2", b"later"]


async def test_many_rows_of_one_key(store: OrderedStore) -> None:
    """However many rows of one key stand in front, a claim gets what is behind them, and a cap holds for rows too."""
    await store.configure(TENANT, COMMAND, ONE_AT_A_TIME)
    for _ in range(3):
        await load(store, *[NewTask(command=COMMAND, limit_key="k")] * 1_000)
    plain = await put(store)
    first = await take(store)
    assert (await take(store)).id == plain
    assert await store.claim(TENANT, [COMMAND], limit=10) == []
    assert (await store.stats(TENANT)).total.ready == 2_999
    await complete(store, first)
    await retry(store, await take(store))
    await store.configure(TENANT, COMMAND, QueueConfig(limits=QueueLimits(in_flight=4)))
    for _ in range(50):
        await store.sweep()
    assert len(await store.claim(TENANT, [COMMAND], limit=10)) == 3


async def test_delayed_rows_obey_limits_when_they_are_due(store: OrderedStore, clock: ManualClock) -> None:
    """Promoted from their block they are ready or parked, and a start deadline still ends them."""
    await store.configure(TENANT, COMMAND, ONE_AT_A_TIME)
    rows = [NewTask(command=COMMAND, limit_key="k", delay_s=5, expires_s=60) for _ in range(4)]
    await load(store, *rows)
    clock.advance(6)
    assert len(await store.claim(TENANT, [COMMAND], limit=10, lease_s=3600)) == 1
    clock.advance(60)
    assert (await store.sweep()).cancelled == 3


async def test_fair_claims_from_loads(store: OrderedStore) -> None:
    """A tenant whose tasks stand in blocks has its turns as any other."""
    await load(store, *[NewTask(command=COMMAND)] * 500)
    await put_many(store, 20, tenant="quiet")
    leases = [lease for _ in range(20) for lease in await store.claim(ALL_TENANTS, [COMMAND], limit=2)]
    assert Counter(lease.tenant for lease in leases) == {TENANT: 20, "quiet": 20}


WAIT_FOR_ROOM = """
waiting.FALLBACK_LOOK_S = 60
async def main():
    store = await open_local(URL)
    leases = await store.claim(ARGS[0], ["b"], wait_s=30)
    tell(payloads=[lease.payload.decode() for lease in leases])
    await store.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("whose", [TENANT, ALL_TENANTS])
@pytest.mark.parametrize(
    ("configured", "config", "ends"),
    [
        (ALL_COMMANDS, QueueConfig(limits=QueueLimits(in_flight=1)), "a"),
        ("b", QueueConfig(limits=QueueLimits(in_flight=1)), "b"),
        ("b", ONE_AT_A_TIME, "b"),
    ],
    ids=["the tenant's cap", "the queue's cap", "the key's limit"],
)
async def test_room_is_heard_by_another_process(
    directory: Path, children: Children, whose: str, configured: str, config: QueueConfig, ends: str
) -> None:
    """A lease that ends here wakes the claim that waits there for room, and never looks by itself."""
    async with await open_local(str(directory)) as store:
        await store.configure(TENANT, configured, config)
        await put(store, ends, limit_key="k")
        await put(store, "b", payload=b"next", limit_key="k")
        lease = await take(store, ends)
        child = children.start(WAIT_FOR_ROOM, directory, whose)
        await listening(directory)
        await complete(store, lease)
        assert await asyncio.to_thread(child.finish) == {"payloads": ["next"]}
