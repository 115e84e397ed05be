from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dibs import Dibs
from dibs.clock import ManualClock
from dibs.ids import id_from_text, key_digest
from dibs.stores import open_local
from dibs.stores.local import LocalStore
from dibs.stores.protocol import ALL_TENANTS
from dibs.task import ALL_COMMANDS, Enqueued, KeyLimit, Lease, NewTask, QueueConfig, QueueLimits
from dibs.testing.contract.harness import no_fallback  # noqa: F401 a fixture
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    commit,
    complete,
    in_slot,
    nothing_ready,
    put,
    put_many,
    soon,
    stage,
    take,
    waiting,
)
from tests.lmdb.processes import Children
from tests.shards.faults import RELAXED, Faults, open_faulty

pytestmark = pytest.mark.anyio

N = 4


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[LocalStore]:
    """Four shards in memory."""
    async with await open_local(f"shards:memory:?n={N}", clock=clock) as opened:
        yield opened


async def cap(store: LocalStore, in_flight: int, command: str = COMMAND) -> None:
    """Sets the cap of a queue or of the whole tenant."""
    await store.configure(TENANT, command, QueueConfig(limits=QueueLimits(in_flight=in_flight)))


async def put_everywhere(store: LocalStore, count: int, command: str = COMMAND, tenant: str = TENANT) -> None:
    """So many tasks in every shard."""
    tasks = [NewTask(command=command, id=in_slot(n % N)) for n in range(count * N)]
    assert len(await store.enqueue(tenant, tasks)) == len(tasks)


def slot_of_limit(limit_key: str) -> int:
    """Where the tasks of a limit_key belong."""
    return key_digest(TENANT, COMMAND, limit_key)[-1]


# ------------------------------------------------------------------------------------------------------ limits per key


async def test_tasks_of_a_limit_key_meet_in_one_shard(store: LocalStore) -> None:
    """Whoever mints the id: the store or the app, one by one, in a batch or as rows of a load; a key comes first."""
    limited = NewTask(command=COMMAND, limit_key="acme")
    answers = await store.enqueue(TENANT, [limited, NewTask(command=COMMAND), limited])
    answers += await store.enqueue(TENANT, [limited])
    slots = [answer.id[-1] for answer in answers if isinstance(answer, Enqueued)]
    assert [slots[0], *slots[2:]] == [slot_of_limit("acme")] * 3
    [both] = await store.enqueue(TENANT, [NewTask(command=COMMAND, key="k", limit_key="acme")])
    assert isinstance(both, Enqueued)
    assert both.id[-1] == key_digest(TENANT, COMMAND, "k")[-1]

    app = Dibs("memory:")
    with app:
        call = app.task(name=COMMAND)(lambda number: number).options(limit_key="acme")
        handles = [call.enqueue(1), *call.map(range(3)), *call.options(load="named").map(range(3))]
        assert {id_from_text(handle.id)[-1] for handle in handles} == {slot_of_limit("acme")}


async def test_a_limit_holds_over_a_load(store: LocalStore) -> None:
    """Rows of one limit_key obey it together, in whatever chunks they came, and with tasks that were enqueued."""
    limits = QueueLimits(per_key=KeyLimit(in_flight=2))
    await store.configure(TENANT, COMMAND, QueueConfig(limits=limits))
    rows = [NewTask(command=COMMAND, limit_key=f"k{n % 3}") for n in range(30)]
    await commit(store, *[await stage(store, rows, in_slot(slot)) for slot in range(N)])
    await put_many(store, 5, limit_key="k0")
    assert len(await store.claim(TENANT, [COMMAND], limit=100)) == 6
    assert (await store.doctor()).clean
    assert await nothing_ready(store)


# ---------------------------------------------------------------------------------------------------------------- caps


async def test_a_cap_is_over_all_shards(store: LocalStore) -> None:
    """What is in progress in one shard counts in the others, for a queue and for a tenant."""
    await put_everywhere(store, 5)
    await put_everywhere(store, 5, "other")
    await cap(store, 6)
    await cap(store, 9, ALL_COMMANDS)
    assert len(await store.claim(TENANT, [COMMAND], limit=100)) == 6
    assert len(await store.claim(TENANT, ["other"], limit=100)) == 3
    assert await store.claim(ALL_TENANTS, [COMMAND, "other"], limit=100) == []


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("whose", [TENANT, ALL_TENANTS])
@pytest.mark.parametrize("what", [COMMAND, ALL_COMMANDS])
async def test_room_in_one_shard_wakes_who_waits_for_another(store: LocalStore, whose: str, what: str) -> None:
    """A lease that ends in one shard lets a task of another be claimed, by a claimer that waits."""
    await cap(store, 1, what)
    await put(store, id=in_slot(1))
    lease = await take(store)
    waits_for = await put(store, id=in_slot(2))
    async with waiting(store.claim(whose, [COMMAND], wait_s=LONG_S)) as [waits]:
        assert not waits.done()
        await complete(store, lease)
        assert [lease.id for lease in await soon(waits)] == [waits_for]


@pytest.mark.parametrize("whose", [TENANT, ALL_TENANTS])
async def test_a_lease_that_ran_out_elsewhere_makes_room(store: LocalStore, clock: ManualClock, whose: str) -> None:
    """Wherever a claim begins, it does not count what no worker holds any more."""
    await cap(store, 1)
    for _ in range(8):
        await put(store, id=in_slot(1), max_attempts=1)
        [lost] = await store.claim(TENANT, [COMMAND], lease_s=5)
        await put(store, id=in_slot(2))
        clock.advance(6)
        [lease] = await store.claim(whose, [COMMAND])
        assert lease.id != lost.id
        await complete(store, lease)


async def test_clients_at_once_keep_to_the_cap(clock: ManualClock, request: pytest.FixtureRequest) -> None:
    """Several clients that claim in the same moment, each in any shard, never hold more than the cap between them; and
    none of them waits for ever."""
    url = f"shards:memory:{request.node.name}?n={N}"
    clients = [await open_local(url, clock=clock) for _ in range(4)]
    await put_everywhere(clients[0], 20)
    await cap(clients[0], 3)
    held: set[bytes] = set()
    done = 0

    async def work(client: LocalStore, whose: str) -> None:
        nonlocal done
        while done < 20 * N:
            leases = await client.claim(whose, [COMMAND], limit=2, wait_s=1)
            held.update(lease.id for lease in leases)
            assert len(held) <= 3
            for lease in leases:
                await asyncio.sleep(0)
                held.remove(lease.id)
                done += 1
                await complete(client, lease)

    async with asyncio.timeout(50):
        await asyncio.gather(*(work(one, TENANT if n % 2 else ALL_TENANTS) for n, one in enumerate(clients)))
    for client in clients:
        await client.close()


HOLD = """
from dibs.settings import Settings
def hold():
    # One file for each that may be held: if none is free, there are more.
    for n in range(3):
        try:
            os.close(os.open(f"{ARGS[0]}/{n}", os.O_CREAT | os.O_EXCL))
            return n
        except FileExistsError:
            pass
    raise SystemExit("more are held than the cap allows")
async def main():
    async with await open_local(URL, settings=Settings(durability="relaxed")) as store:
        done = 0
        while True:
            leases = await store.claim("*" if ARGS[1] == "all" else "default", ["work"], limit=2, wait_s=2)
            if not leases and not (await store.stats("default")).total.ready:
                break
            for lease, n in [(lease, hold()) for lease in leases]:
                await asyncio.sleep(0.001)
                os.unlink(f"{ARGS[0]}/{n}")
                await store.settle([Settlement(tenant="default", id=lease.id, token=lease.token, kind=Kind.COMPLETE)])
                done += 1
    tell(done=done)
asyncio.run(main())
"""


async def test_processes_at_once_keep_to_the_cap(tmp_path: Path, children: Children) -> None:
    """Processes that claim in the same moment, each in another shard, are never handed more than the cap."""
    url, room = f"shards:{tmp_path / 'store'}?n={N}", tmp_path / "room"
    room.mkdir()
    async with await open_local(url, settings=RELAXED) as store:
        await put_everywhere(store, 25, "work")
        await cap(store, 3, "work")
        started = [children.start(HOLD, url, room, whose) for whose in ("own", "own", "all")]
        told = [await asyncio.to_thread(child.finish) for child in started]
        assert sum(one["done"] for one in told) == 25 * N
        assert (await store.stats(TENANT)).total.leased == 0


async def test_a_shard_that_is_down_does_not_count(clock: ManualClock) -> None:
    """The others go on to the cap; what was in progress there is not known."""
    faults = Faults()
    async with await open_faulty(f"memory:down?n={N}", faults, clock) as store:
        await put_everywhere(store, 5)
        await cap(store, 4)
        for n in range(2):
            await put(store, priority=9, id=in_slot(n))
        assert len(await store.claim(TENANT, [COMMAND], limit=2)) == 2
        faults.down = {3}
        assert 2 <= len(await store.claim(TENANT, [COMMAND], limit=100)) <= 4


# --------------------------------------------------------------------------------------------------------------- turns


async def shares(store: LocalStore, count: int, limit: int) -> Counter[str]:
    """Claims from all tenants until it has so many, and says whose they are."""
    taken: list[Lease] = []
    while len(taken) < count:
        leases = await store.claim(ALL_TENANTS, [COMMAND], limit=limit)
        assert leases
        taken += leases
    return Counter(lease.tenant for lease in taken)


@pytest.mark.parametrize("limit", [1, 5, 60])
async def test_turns_are_over_all_shards(store: LocalStore, limit: int) -> None:
    """A tenant with tasks in every shard gets no more than one whose tasks are all in one of them."""
    await put_everywhere(store, 100, tenant="noisy")
    for n in range(3):
        await store.enqueue(f"quiet{n}", [NewTask(command=COMMAND, id=in_slot(n)) for _ in range(30)])
    assert await shares(store, 120, limit) == {"noisy": 30, "quiet0": 30, "quiet1": 30, "quiet2": 30}


async def test_weights_are_over_all_shards(store: LocalStore) -> None:
    """A heavy tenant in one shard beside light ones in all."""
    await store.enqueue("heavy", [NewTask(command=COMMAND, id=in_slot(1)) for _ in range(300)])
    for tenant in ("light", "plain"):
        await put_everywhere(store, 100, tenant=tenant)
    await store.configure("heavy", ALL_COMMANDS, QueueConfig(weight=3))
    assert await shares(store, 200, 4) == {"heavy": 120, "light": 40, "plain": 40}


async def test_many_tenants_are_all_served(store: LocalStore) -> None:
    """More tenants than a claim can serve, each in some shard or other: in the end each got the same."""
    tenants = [f"t{n:03}" for n in range(150)]
    for n, tenant in enumerate(tenants):
        await store.enqueue(tenant, [NewTask(command=COMMAND, id=in_slot(n * 7 % 5)) for _ in range(4)])
    assert await shares(store, 450, 10) == dict.fromkeys(tenants, 3)
    assert await shares(store, 150, 1) == dict.fromkeys(tenants, 1)
    assert await store.claim(ALL_TENANTS, [COMMAND]) == []
