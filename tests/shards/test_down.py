from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.errors import StoreClosed, StoreCorrupt, StoreError, StoreUnavailable
from dibs.ids import new_id
from dibs.stores import open_local
from dibs.stores.local import LocalStore
from dibs.stores.protocol import Store
from dibs.stores.sharded import shard
from dibs.stores.sharded.store import ShardedStore
from dibs.task import (
    Enqueued,
    Extended,
    Filter,
    Heartbeat,
    Kind,
    NewTask,
    QueueConfig,
    Rejected,
    Settled,
    WorkerInfo,
)
from dibs.testing.contract.steps import COMMAND, TENANT, drain, in_slot, look, put, settlement, soon
from tests.shards.faults import RELAXED, Faults, in_shard, open_faulty

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("at_once")]

#: What cannot be answered without all shards.
NEEDS_ALL: dict[str, Callable[[Store], Awaitable[Any]]] = {
    "stats": lambda store: store.stats(TENANT),
    "list": lambda store: store.list(TENANT, limit=1_000),
    "purge by filter": lambda store: store.purge(TENANT, Filter()),
    "tenants": lambda store: store.tenants(),
    "workers": lambda store: store.workers(TENANT),
    "configure": lambda store: store.configure(TENANT, COMMAND, QueueConfig(paused=True)),
    "journal_bounds": lambda store: store.journal_bounds(),
    "readers": lambda store: store.readers(),
    "events": lambda store: store.events(TENANT, shard=1),
    "runs": lambda store: store.runs(TENANT, shard=1),
    "marks": lambda store: store.marks(TENANT, every=1_000),
    "get": lambda store: store.get(TENANT, [in_slot(0), in_slot(1)]),
    "get by key": lambda store: store.get(TENANT, [in_slot(1)]),
    "cancel": lambda store: store.cancel(TENANT, [in_slot(1)]),
    "retain": lambda store: store.retain(TENANT, [in_slot(1)], 60),
    "replay": lambda store: store.replay(TENANT, [in_slot(1)]),
    "wait": lambda store: store.wait(TENANT, [in_slot(1)], 5),
    "drop": lambda store: store.drop(TENANT, [in_slot(1)]),
}


@pytest.fixture
def faults() -> Faults:
    """None yet."""
    return Faults()


@pytest.fixture
async def store(clock: ManualClock, faults: Faults) -> AsyncIterator[ShardedStore]:
    """Three shards that fail when they are told to."""
    # Held open apart: a store in memory is gone when nobody has it open.
    async with await open_local("shards:memory:down?n=3", clock=clock, settings=RELAXED):
        opened = await open_faulty("memory:down?n=3", faults, clock)
        yield opened
        faults.down = set()
        await opened.close()


@pytest.mark.parametrize("question", NEEDS_ALL.values(), ids=NEEDS_ALL)
async def test_what_cannot_be_answered_says_so(
    store: ShardedStore, faults: Faults, question: Callable[[Store], Awaitable[Any]]
) -> None:
    """A question that needs the shard that is down raises, and names it; once it is back there is an answer."""
    faults.down = {1}
    with pytest.raises(StoreUnavailable, match="shard 1"):
        await question(store)
    faults.down = set()
    await question(store)


async def test_claims_go_on(store: ShardedStore, faults: Faults) -> None:
    """What the others have is claimed, also by who waits, beats and settles; what is down is there again later."""
    ids = [await put(store, id=in_slot(slot)) for slot in range(3)]
    faults.down = {1}
    leases = await store.claim(TENANT, [COMMAND], limit=10, claim_id=new_id())
    assert sorted(lease.id for lease in leases) == sorted([ids[0], ids[2]])
    beats = [Heartbeat(tenant=TENANT, id=lease.id, token=lease.token) for lease in leases]
    assert all(isinstance(answer, Extended) for answer in await store.heartbeat(beats))
    assert await store.claim(TENANT, [COMMAND], wait_s=0.01) == []
    faults.down = set()
    assert await drain(store) == [ids[1]]


async def test_a_waiting_claim_hears_those_that_are_up_and_those_that_come_back(
    store: ShardedStore, faults: Faults
) -> None:
    """A claim that began to wait while a shard was down gets what the others, and in the end that one, have."""
    faults.down = {1}
    assert await store.claim(TENANT, [COMMAND]) == []
    claim = asyncio.ensure_future(store.claim(TENANT, [COMMAND], wait_s=30))
    await asyncio.sleep(0.02)
    task_id = await put(store, id=in_slot(2))
    [lease] = await soon(claim)
    assert lease.id == task_id
    claim = asyncio.ensure_future(store.claim(TENANT, [COMMAND], wait_s=30))
    await asyncio.sleep(0.02)
    faults.down = set()
    task_id = await put(store, id=in_slot(1))
    [lease] = await soon(claim)
    assert lease.id == task_id


async def test_items_are_rejected_one_by_one(store: ShardedStore, faults: Faults) -> None:
    """Items of a shard that is down are rejected, the others done; if there are only such, the call raises."""
    ids = [in_slot(slot) for slot in range(3)]
    await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id) for task_id in ids])
    leases = sorted(await store.claim(TENANT, [COMMAND], limit=3), key=lambda lease: lease.id[-1])
    faults.down = {1}
    tasks = [NewTask(command=COMMAND, id=in_slot(slot)) for slot in range(3)]
    beats = [Heartbeat(tenant=TENANT, id=lease.id, token=lease.token) for lease in leases]
    items = [settlement(lease, Kind.COMPLETE) for lease in leases]
    for answers, good in (
        (await store.enqueue(TENANT, tasks), Enqueued),
        (await store.heartbeat(beats), Extended),
        (await store.settle(items), Settled),
    ):
        assert isinstance(answers[0], good)
        assert isinstance(answers[2], good)
        assert isinstance(answers[1], Rejected)
        assert isinstance(answers[1].error(), StoreUnavailable)
        assert "shard 1" in answers[1].message
    with pytest.raises(StoreUnavailable, match="shard 1"):
        await store.enqueue(TENANT, [tasks[1]])
    with pytest.raises(StoreUnavailable, match="shard 1"):
        await store.settle([items[1]])
    with pytest.raises(StoreUnavailable, match="shard 1"):
        await store.heartbeat([beats[1]])
    faults.down = set()
    assert isinstance((await store.settle([items[1]]))[0], Settled)


async def test_tasks_without_a_place_go_elsewhere(store: ShardedStore, faults: Faults) -> None:
    """Tasks with neither id nor key are enqueued whatever is down, as long as something is up."""
    faults.down = {0, 2}
    for _ in range(6):
        answers = await store.enqueue(TENANT, [NewTask(command=COMMAND)] * 3)
        assert {answer.id[-1] % 3 for answer in answers if isinstance(answer, Enqueued)} == {1}
    bound, free = await store.enqueue(
        TENANT, [NewTask(command=COMMAND, key=in_shard(0, 3)), NewTask(command=COMMAND, payload=b"free")]
    )
    assert isinstance(bound, Rejected)
    assert isinstance(free, Enqueued)
    assert (await look(store, free.id)).payload == b"free"
    faults.down = {0, 1, 2}
    with pytest.raises(StoreUnavailable):
        await store.enqueue(TENANT, [NewTask(command=COMMAND)])
    faults.down = set()
    assert (await store.stats(TENANT)).total.ready == 19


async def test_the_sweep_and_the_workers_go_on(store: ShardedStore, faults: Faults, clock: ManualClock) -> None:
    """A sweep does what can be done, workers register elsewhere, and a queue's configuration can be read."""
    for slot in range(3):
        await put(store, id=in_slot(slot), delay_s=5)
    clock.advance(10)
    faults.down = {1}
    assert (await store.sweep()).promoted == 2
    for name in ("a", "b", "c", "d"):
        await store.register(TENANT, WorkerInfo(name=name), 60)
    assert await store.configure(TENANT, COMMAND) == QueueConfig()
    faults.down = set()
    assert (await store.sweep()).promoted == 1
    assert [worker.name for worker in await store.workers(TENANT)] == ["a", "b", "c", "d"]


async def test_a_damaged_shard_stops_only_what_needs_it(store: ShardedStore, faults: Faults) -> None:
    """Records of one shard that cannot be read are told to who asks for them; claims and sweeps go on without."""
    ids = [await put(store, id=in_slot(slot)) for slot in range(3)]
    faults.damaged = {1}
    with pytest.raises(StoreCorrupt):
        await look(store, ids[1])
    assert sorted(await drain(store)) == sorted([ids[0], ids[2]])
    await store.sweep()
    await store.register(TENANT, WorkerInfo(name="w"), 60)
    faults.damaged = {0, 1, 2}
    with pytest.raises(StoreCorrupt):
        await store.claim(TENANT, [COMMAND])
    faults.damaged = set()
    assert await drain(store) == [ids[1]]


async def test_none_is_paused_by_half(store: ShardedStore, faults: Faults) -> None:
    """A configuration that cannot reach a shard that is known to be down is given to none."""
    faults.down = {2}
    with pytest.raises(StoreUnavailable, match="shard 2"):
        await store.configure(TENANT, COMMAND, QueueConfig(paused=True))
    assert await store.configure(TENANT, COMMAND) == QueueConfig()


async def test_if_all_are_down_so_is_the_store(store: ShardedStore, faults: Faults) -> None:
    """Nothing answers: claims, sweeps and registrations raise as those of any store do."""
    faults.down = {0, 1, 2}
    for question in (
        lambda: store.claim(TENANT, [COMMAND]),
        lambda: store.claim(TENANT, [COMMAND], wait_s=5),
        store.sweep,
        lambda: store.register(TENANT, WorkerInfo(name="w"), 60),
    ):
        with pytest.raises(StoreUnavailable):
            await question()


async def test_it_is_tried_again_at_most_once_a_second(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However often one asks, a shard that is down is opened again once a second; it does not slow the others down."""
    now_s = 1000.0
    monkeypatch.setattr(shard, "AGAIN_AFTER_S", 1.0)
    monkeypatch.setattr("dibs.stores.sharded.shard.monotonic", lambda: now_s)
    faults = Faults()
    async with await open_faulty(f"{tmp_path}?n=2", faults, clock) as store:
        faults.down = {1}
        tried: list[int] = []
        check = faults.check

        def count(number: int) -> None:
            tried.append(number)
            check(number)

        monkeypatch.setattr(faults, "check", count)
        for _ in range(50):
            await store.sweep()
        before = tried.count(1)
        now_s += 1.01
        for _ in range(50):
            await store.sweep()
        assert tried.count(1) == before + 1


async def test_closed_means_closed(store: ShardedStore, faults: Faults) -> None:
    """A closed set says so, whatever is down."""
    faults.down = {1}
    with pytest.raises(StoreUnavailable):
        await store.stats(TENANT)
    await store.close()
    with pytest.raises(StoreClosed):
        await store.stats(TENANT)
    with pytest.raises(StoreClosed):
        await store.claim(TENANT, [COMMAND])


# ------------------------------------------------------------------------------------------- what disks do to LMDB


async def open_lmdb(directory: Path, clock: ManualClock) -> LocalStore:
    """Three LMDB shards."""
    return await open_local(f"shards:{directory}?n=3", clock=clock, settings=RELAXED)


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_directory_that_is_removed_or_replaced(tmp_path: Path, clock: ManualClock, replaced: bool) -> None:
    """The sweep notices that a shard's files are gone; from then on it is down, and an empty store in its place is not
    taken for it. Put back, it is there again."""
    lost = tmp_path / "set" / "1"
    async with await open_lmdb(tmp_path / "set", clock) as store:
        ids = [await put(store, id=in_slot(slot)) for slot in range(3)]
        shutil.copytree(lost, tmp_path / "copy")
        shutil.rmtree(lost)
        if replaced:
            # As another process would, which has not opened the set.
            await asyncio.to_thread(lambda: asyncio.run(_make_empty(lost, clock)))
        await store.sweep()
        with pytest.raises(StoreUnavailable, match="shard 1"):
            await look(store, ids[1])
        assert (await look(store, ids[0])).id == ids[0]
        assert sorted(await drain(store)) == sorted([ids[0], ids[2]])
        shutil.rmtree(lost, ignore_errors=True)
        shutil.copytree(tmp_path / "copy", lost)
        assert (await look(store, ids[1])).id == ids[1]
        assert await drain(store) == [ids[1]]


async def _make_empty(directory: Path, clock: ManualClock) -> None:
    async with await open_local(str(directory), clock=clock, settings=RELAXED):
        pass


@pytest.mark.parametrize("broken", [0, 2])
async def test_a_file_that_is_garbage(tmp_path: Path, clock: ManualClock, broken: int) -> None:
    """A shard whose file cannot be read when the set is opened stays closed; the rest works, with and without the
    number in the URL; restored, it is opened."""
    data = tmp_path / "set" / str(broken) / "data.mdb"
    async with await open_lmdb(tmp_path / "set", clock) as store:
        ids = [await put(store, id=in_slot(slot)) for slot in range(3)]
    good = data.read_bytes()
    data.write_bytes(b"garbage" * 4096)
    for url in (f"shards:{tmp_path / 'set'}?n=3", f"shards:{tmp_path / 'set'}"):
        async with await open_local(url, clock=clock, settings=RELAXED, create=False) as store:
            for slot, task_id in enumerate(ids):
                if slot == broken:
                    with pytest.raises(StoreUnavailable, match=f"shard {broken}"):
                        await look(store, task_id)
                else:
                    assert (await look(store, task_id)).id == task_id
            assert not (await store.doctor()).clean
    async with await open_lmdb(tmp_path / "set", clock) as store:
        data.write_bytes(good)
        assert (await look(store, ids[broken])).id == ids[broken]
        assert (await store.doctor()).clean


async def test_nothing_that_can_be_opened(tmp_path: Path, clock: ManualClock) -> None:
    """If no shard can be opened at all, opening says why, and changes nothing."""
    async with await open_lmdb(tmp_path / "set", clock):
        pass
    for number in range(3):
        (tmp_path / "set" / str(number) / "data.mdb").write_bytes(b"garbage" * 4096)
    with pytest.raises(StoreError):
        await open_lmdb(tmp_path / "set", clock)
