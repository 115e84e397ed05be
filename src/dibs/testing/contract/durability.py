"""Reopening: what was acknowledged is there after the store was closed and opened again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from dibs.clock import ManualClock
from dibs.errors import StoreClosed
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import (
    Already,
    Duplicate,
    Enqueued,
    Heartbeat,
    Kind,
    NewTask,
    Place,
    QueueConfig,
    Reader,
    Result,
    Settled,
    Settlement,
    Status,
    WorkerInfo,
)
from dibs.testing.contract.order import assert_order
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    assert_counts,
    complete,
    drain,
    in_slot,
    look,
    pass_time,
    put,
    put_completed,
    put_dead,
    put_many,
    read_events,
    read_shard,
    release,
    retry,
    settle,
    soon,
    take,
    take_many,
    waiting,
)

Reopen = Callable[[], Awaitable[Store]]


@pytest.mark.anyio
class TestClose:
    """A closed store says so."""

    async def test_later_calls_raise(self, store: Store) -> None:
        """After `close` every verb raises StoreClosed."""
        await put(store)
        await store.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.enqueue(TENANT, [NewTask(command=COMMAND)]),
            lambda: store.claim(TENANT, [COMMAND]),
            lambda: store.heartbeat([Heartbeat(tenant=TENANT, id=new_id(), token=new_id())]),
            lambda: store.settle([Settlement(tenant=TENANT, id=new_id(), token=new_id(), kind=Kind.COMPLETE)]),
            lambda: store.get(TENANT, [new_id()]),
            lambda: store.cancel(TENANT, [new_id()]),
            lambda: store.wait(TENANT, [new_id()], 1),
            lambda: store.replay(TENANT, [new_id()]),
            lambda: store.purge(TENANT, [new_id()]),
            lambda: store.retain(TENANT, [new_id()], 60),
            lambda: store.list(TENANT),
            lambda: store.marks(TENANT, every=1_000),
            lambda: store.stage(TENANT, new_id(), [NewTask(command=COMMAND)]),
            lambda: store.commit_load(TENANT, "load", 0, [new_id()]),
            lambda: store.drop(TENANT, [new_id()]),
            lambda: store.stats(TENANT),
            lambda: store.configure(TENANT, COMMAND),
            lambda: store.register(TENANT, WorkerInfo(name="w"), 60),
            lambda: store.workers(TENANT),
            store.tenants,
            store.journal_bounds,
            lambda: store.events(TENANT),
            lambda: store.runs(TENANT),
            store.readers,
            lambda: store.advance("r", 0, None),
            store.sweep,
        ]
        for call in calls:
            with pytest.raises(StoreClosed):
                await call()

    async def test_closing_twice_is_harmless(self, store: Store) -> None:
        """A second close finds nothing to do, and the store stays closed."""
        await store.close()
        await store.close()
        with pytest.raises(StoreClosed):
            await put(store)

    async def test_closing_twice_leaves_other_clients(self, store: Store, second: Store) -> None:
        """A client that closes again does not close the data under another."""
        task_id = await put(store)
        await store.close()
        await store.close()
        assert (await take(second)).id == task_id

    async def test_waiting_calls_are_told(self, store: Store) -> None:
        """Who still waits when the store closes is told at once that it closed."""
        task_id = await put(store, "held")
        await take(store, "held")
        calls = (store.claim(TENANT, [COMMAND], wait_s=LONG_S), store.wait(TENANT, [task_id], LONG_S))
        async with waiting(*calls) as waits:
            await store.close()
            for wait in waits:
                with pytest.raises(StoreClosed):
                    await soon(wait)


@pytest.mark.anyio
class TestReopen:
    """Everything outlives the process that wrote it, where the store promises so."""

    async def test_every_state_is_kept(self, store: Store, reopen: Reopen) -> None:
        """Tasks in every place are found as they were left, and so are the counts."""
        ids = [
            await put_completed(store, result=b"\x00\xff"),
            await put_dead(store, reason="BAD"),
            await put(store, delay_s=60, payload=bytes(range(256))),
            await put(store),
        ]
        await take(store, worker="w")
        ids.append(await put(store, key="k"))
        before = await store.get(TENANT, ids)
        stats = await store.stats(TENANT)
        store = await reopen()
        assert await store.get(TENANT, ids) == before
        assert await store.stats(TENANT) == stats
        await assert_counts(store)

    async def test_the_order_goes_on(self, store: Store, reopen: Reopen) -> None:
        """What was enqueued before comes before what is enqueued after, over several lives of the store."""
        ids = []
        for _ in range(4):
            ids += [await put(store, id=in_slot(7)) for _ in range(3)]
            store = await reopen()
        assert_order(store.order, ids, await drain(store))

    async def test_leases_hold(self, store: Store, clock: ManualClock, reopen: Reopen) -> None:
        """Tokens stay good, claims stay repeatable, and what runs out is taken back."""
        await put_many(store, 3)
        claim_id = new_id()
        leases = await take_many(store, 3, claim_id=claim_id)
        store = await reopen()
        again = await store.claim(TENANT, [COMMAND], limit=3, claim_id=claim_id)
        assert {lease.token for lease in again} == {lease.token for lease in leases}
        await complete(store, leases[0])
        await release(store, leases[1])
        store = await reopen()
        assert await settle(store, leases[0], Kind.COMPLETE) == Already(Status.COMPLETED)
        assert (await pass_time(store, clock, 31)).expired == 1
        assert sorted(await drain(store)) == sorted([leases[1].id, leases[2].id])

    async def test_what_is_due_meanwhile_moves(self, store: Store, clock: ManualClock, reopen: Reopen) -> None:
        """Delays and retries that fall due while the store is closed are promoted afterwards."""
        later = await put(store, delay_s=60)
        await put(store)
        retried = await take(store)
        await retry(store, retried, delay_s=90)
        store = await reopen()
        assert (await pass_time(store, clock, 100)).promoted == 2
        assert set(await drain(store)) == {later, retried.id}

    async def test_keys_and_results_are_kept(self, store: Store, reopen: Reopen) -> None:
        """Repeats are recognised after a restart, by id and by key."""
        task_id = await put_completed(store, key="k", result=b"1")
        store = await reopen()
        tasks = [NewTask(command=COMMAND, key="k"), NewTask(command=COMMAND, id=task_id)]
        assert await store.enqueue(TENANT, tasks) == [
            Duplicate(task_id, Status.COMPLETED, Result(Status.COMPLETED, b"1")),
            Enqueued(task_id, already=True),
        ]

    async def test_the_journal_goes_on(self, store: Store, reopen: Reopen) -> None:
        """Cursors and named readers survive; events before and after are one sequence."""
        ids = [await put(store, id=in_slot(7)) for _ in range(3)]
        [shard] = [bounds.shard for bounds in await store.journal_bounds() if bounds.newest != bounds.oldest]
        events = await read_events(store)
        await store.advance("lake", shard, events[1].cursor)
        store = await reopen()
        ids.append(await put(store, id=in_slot(7)))
        assert list(await store.readers()) == [Reader("lake", shard, events[1].cursor)]
        assert [event.id for event in await read_shard(store, shard=shard, after=events[1].cursor)] == ids[2:]

    async def test_configuration_is_kept(self, store: Store, reopen: Reopen) -> None:
        """Queues, workers and tenants are still known."""
        config = QueueConfig(paused=True, lease_s=90)
        await store.configure(TENANT, COMMAND, config)
        await store.register(TENANT, WorkerInfo(name="w"), 3600)
        await put(store)
        store = await reopen()
        assert await store.configure(TENANT, COMMAND) == config
        assert [info.name for info in await store.workers(TENANT)] == ["w"]
        assert (await store.tenants()).tenants == [TENANT]
        assert await store.claim(TENANT, [COMMAND]) == []

    async def test_thousands_of_waiting_tasks(self, store: Store, reopen: Reopen) -> None:
        """A store opens with any number of pending tasks, and gives out all of them."""
        ids = await put_many(store, 10_000)
        store = await reopen()
        assert (await store.stats(TENANT)).total.ready == 10_000
        assert sorted(await drain(store, limit=1_000)) == sorted(ids)

    async def test_two_clients_share_one_queue(self, store: Store, second: Store) -> None:
        """What one client does the other sees at once; a task goes to one of them."""
        task_id = await put(store)
        assert (await look(second, task_id)).place is Place.READY
        lease = await take(second)
        assert await store.claim(TENANT, [COMMAND]) == []
        assert await settle(store, lease, Kind.COMPLETE) == Settled(Status.COMPLETED)
        assert (await look(second, task_id)).status is Status.COMPLETED
