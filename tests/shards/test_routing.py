from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from dibs.clock import ManualClock
from dibs.errors import InvalidCursor, InvalidOption
from dibs.ids import new_id
from dibs.stores import open_local
from dibs.stores.local import LocalStore
from dibs.task import Enqueued, Filter, Lease, NewTask, QueueConfig, WorkerInfo
from dibs.testing.contract.harness import no_fallback  # noqa: F401 a fixture
from dibs.testing.contract.steps import COMMAND, TENANT, drain, in_slot, list_all, put, put_dead, put_many, soon
from tests.shards.faults import Faults, open_faulty

pytestmark = pytest.mark.anyio

N = 4


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[LocalStore]:
    """Four shards in memory."""
    async with await open_local(f"shards:memory:?n={N}", clock=clock) as opened:
        yield opened


def shard_of(task_id: bytes) -> int:
    """Where a task is."""
    return task_id[-1] % N


async def test_a_batch_without_ids_stays_together(store: LocalStore) -> None:
    """Tasks that could be anywhere cost one shard's commit, in the order of the batch; the next batch has another's."""
    seen = []
    for _ in range(N):
        answers = await store.enqueue(TENANT, [NewTask(command=COMMAND, payload=b"%d" % n) for n in range(50)])
        ids = [answer.id for answer in answers if isinstance(answer, Enqueued)]
        [shard] = {shard_of(task_id) for task_id in ids}
        seen.append(shard)
        tasks = await store.get(TENANT, ids)
        assert [task.payload for task in tasks if task] == [b"%d" % n for n in range(50)]
        page = await store.events(TENANT, shard=shard)
        assert [event.id for event in page.events] == ids
    assert sorted(seen) == list(range(N))


async def test_what_has_a_place_goes_there(store: LocalStore) -> None:
    """Ids and keys decide the shard; what is free in the same batch goes with the first of them."""
    mine = in_slot(2)
    free, bound, keyed = await store.enqueue(
        TENANT, [NewTask(command=COMMAND), NewTask(command=COMMAND, id=mine), NewTask(command=COMMAND, key="k")]
    )
    assert bound == Enqueued(mine)
    assert isinstance(free, Enqueued)
    assert isinstance(keyed, Enqueued)
    assert shard_of(free.id) == shard_of(mine)
    assert shard_of(keyed.id) == shard_of(new_id(TENANT, COMMAND, "k"))


async def test_a_claim_takes_from_all(store: LocalStore) -> None:
    """However the tasks are spread, one claim can have them all; each shard's come in their order."""
    ids = await put_many(store, 40)
    leases = await store.claim(TENANT, [COMMAND], limit=100)
    assert sorted(lease.id for lease in leases) == sorted(ids)
    for shard in range(N):
        assert [lease.id for lease in leases if shard_of(lease.id) == shard] == [
            task_id for task_id in ids if shard_of(task_id) == shard
        ]


async def test_claims_begin_everywhere(store: LocalStore) -> None:
    """Claimers spread over the shards, by their claim id or without."""
    for slot in range(N):
        for _ in range(30):
            await put(store, id=in_slot(slot))
    without = Counter([shard_of((await store.claim(TENANT, [COMMAND]))[0].id) for _ in range(40)])
    by_id = Counter([shard_of((await store.claim(TENANT, [COMMAND], claim_id=new_id()))[0].id) for _ in range(40)])
    assert len(without) > 1
    assert len(by_id) > 1


async def test_a_repeated_claim_has_its_leases_from_everywhere(store: LocalStore) -> None:
    """A claim id gets the same leases again, in order, from all shards, and never new ones."""
    for slot in range(N):
        await put(store, id=in_slot(slot))
    claim_id = new_id()
    first = await store.claim(TENANT, [COMMAND], limit=N, claim_id=claim_id)
    assert {shard_of(lease.id) for lease in first} == set(range(N))
    await put_many(store, 20)
    assert await store.claim(TENANT, [COMMAND], limit=50, claim_id=claim_id) == first
    assert len(await drain(store, limit=50)) == 20


async def test_a_repeat_never_takes_more_than_the_first_did(store: LocalStore) -> None:
    """A claim that found less than it asked for has what it found, also when there is more by now."""
    await put(store, id=in_slot(0))
    claim_id = new_id()
    first = await store.claim(TENANT, [COMMAND], limit=10, claim_id=claim_id)
    await put_many(store, 20)
    assert await store.claim(TENANT, [COMMAND], limit=10, claim_id=claim_id) == first


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancelled_claim_gives_back_what_all_shards_gave(store: LocalStore, turns: int) -> None:
    """Wherever it was when it was cancelled, everything is free again, and no attempt was used."""
    for slot in range(N):
        await put(store, id=in_slot(slot), max_attempts=1)
    claim = asyncio.ensure_future(store.claim(TENANT, [COMMAND], limit=N))
    for _ in range(turns):
        await asyncio.sleep(0)
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)
    leases: list[Lease] = [] if claim.cancelled() else claim.result()
    while len(leases) < N:
        leases += await soon(store.claim(TENANT, [COMMAND], limit=N, wait_s=20))
    assert [lease.attempt for lease in leases] == [1] * N


@pytest.mark.usefixtures("no_fallback")
async def test_a_waiting_claim_hears_every_shard(store: LocalStore) -> None:
    """Without the look behind every wait, an enqueue into any shard wakes the claim."""
    for slot in range(N):
        claim = asyncio.ensure_future(store.claim(TENANT, [COMMAND], wait_s=30))
        await asyncio.sleep(0.02)
        task_id = await put(store, id=in_slot(slot))
        [lease] = await soon(claim)
        assert lease.id == task_id


@pytest.mark.usefixtures("no_fallback")
async def test_so_many_are_woken_as_there_are_tasks(store: LocalStore) -> None:
    """Claims that wait at all shards share what comes, each one task, without a look behind the wait."""
    claims = [asyncio.ensure_future(store.claim(TENANT, [COMMAND], wait_s=30)) for _ in range(8)]
    await asyncio.sleep(0.02)
    ids = [await put(store, id=in_slot(n)) for n in range(8)]
    found = [lease.id for leases in await soon(asyncio.gather(*claims)) for lease in leases]
    assert sorted(found) == sorted(ids)


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_a_listing_goes_through_all(store: LocalStore, limit: int) -> None:
    """Pages of any size give every task once, in the order of the place within each shard."""
    ids = await put_many(store, 30)
    found = [task.id for task in await list_all(store, Filter(command=COMMAND), limit=limit)]
    assert sorted(found) == sorted(ids)


async def test_a_foreign_cursor_is_refused(store: LocalStore, clock: ManualClock) -> None:
    """A cursor means something in its own listing only: not in that of another tenant, filter, store or kind."""
    await put_many(store, 30)
    await put_many(store, 30, tenant="other")
    page = await store.list(TENANT, Filter(command=COMMAND), limit=20)
    assert page.cursor is not None
    for tenant, which in (("other", Filter(command=COMMAND)), (TENANT, Filter(command="else")), (TENANT, Filter())):
        with pytest.raises(InvalidCursor):
            await store.list(tenant, which, cursor=page.cursor)
    async with await open_local("memory:", clock=clock) as plain:
        await put_many(plain, 30)
        other = (await plain.list(TENANT, limit=5)).cursor
    async with await open_local(f"shards:memory:?n={N}", clock=clock) as second:
        with pytest.raises(InvalidCursor):
            await second.list(TENANT, Filter(command=COMMAND), cursor=page.cursor)
    for cursor in (other, "", "nonsense", "é"):
        with pytest.raises(InvalidCursor):
            await store.list(TENANT, Filter(command=COMMAND), cursor=cursor)


async def test_replay_and_purge_go_through_all(store: LocalStore) -> None:
    """By filter, a few at a time, every dead letter of every shard is acted on once."""
    ids = [await put_dead(store, id=in_slot(slot)) for slot in range(N * 3)]
    acted: list[bytes] = []
    cursor = None
    while True:
        step = await store.replay(TENANT, Filter(command=COMMAND), limit=5, cursor=cursor)
        assert len(step.ids) <= 5
        acted += step.ids
        cursor = step.cursor
        if cursor is None:
            break
    assert sorted(acted) == sorted(ids)
    for task_id in await drain(store, limit=5):
        await store.cancel(TENANT, [task_id])
    named = [*ids, ids[0], new_id()]
    assert (await store.purge(TENANT, named)).ids == []


async def test_a_configuration_is_everywhere(store: LocalStore) -> None:
    """A paused queue gives nothing from any shard; resumed, it does."""
    await put_many(store, 20)
    await store.configure(TENANT, COMMAND, QueueConfig(paused=True))
    assert await store.claim(TENANT, [COMMAND], limit=20) == []
    [queue] = (await store.stats(TENANT)).queues
    assert (queue.paused, queue.ready) == (True, 20)
    await store.configure(TENANT, COMMAND, QueueConfig())
    assert len(await store.claim(TENANT, [COMMAND], limit=20)) == 20


async def test_tenants_come_in_order(store: LocalStore) -> None:
    """Pages of tenants are one order over all shards."""
    names = [f"t{n:02}" for n in range(17)]
    for n, name in enumerate(reversed(names)):
        await put(store, tenant=name, id=in_slot(n))
    found: list[str] = []
    cursor = None
    while True:
        page = await store.tenants(cursor=cursor, limit=5)
        found += page.tenants
        cursor = page.cursor
        if cursor is None:
            break
    assert found == names


async def test_each_shard_has_a_journal(store: LocalStore) -> None:
    """Readers stand in one shard's journal, and there are no others."""
    bounds = await store.journal_bounds()
    assert [one.shard for one in bounds] == list(range(N))
    await store.advance("lake", 2, bounds[2].newest)
    assert [(reader.name, reader.shard) for reader in await store.readers()] == [("lake", 2)]
    for shard in (-1, N, "0"):
        with pytest.raises(InvalidOption):
            await store.events(TENANT, shard=shard)  # type: ignore[arg-type]


async def test_a_worker_that_moved_is_told_once(clock: ManualClock, at_once: None) -> None:
    """Registered in another shard while its own was down, and again in its own: it is one worker, the latest."""
    faults = Faults()
    url = "memory:workers?n=2"
    # Held open apart: a store in memory is gone when nobody has it open.
    async with await open_local(f"shards:{url}", clock=clock), await open_faulty(url, faults, clock) as store:
        for busy in range(4):
            faults.down = {busy % 2}
            await store.register(TENANT, WorkerInfo(name="w", busy=busy), 60)
            clock.advance(1)
        faults.down = set()
        [worker] = await store.workers(TENANT)
        assert worker.busy == 3
        await store.register(TENANT, WorkerInfo(name="w"), 0)
        assert await store.workers(TENANT) == []


@pytest.mark.parametrize("budget", [1, 2, 1_000])
async def test_a_sweep_keeps_to_its_budget(store: LocalStore, clock: ManualClock, budget: int) -> None:
    """Over all shards together, at most so many; and again and again it comes to an end."""
    for slot in range(12):
        await put(store, id=in_slot(slot), delay_s=5)
    clock.advance(10)
    promoted = 0
    for _ in range(100):
        swept = await store.sweep(budget)
        assert swept.promoted <= budget
        promoted += swept.promoted
        if not swept.more:
            break
    assert promoted == 12
