"""Waits: everybody who waits for a task is told how it ended."""

from __future__ import annotations

import asyncio

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.stores.wakeups import Journalled
from dibs.task import Kind, Status
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    SOON_S,
    TENANT,
    complete,
    pass_time,
    put,
    put_completed,
    put_many,
    retry,
    settle,
    soon,
    take,
    waiting,
)


@pytest.mark.anyio
@pytest.mark.usefixtures("no_fallback")
class TestWaitingForTheEnd:
    """`wait` returns once any of its tasks has ended."""

    @pytest.mark.parametrize("end", ["complete", "fail", "cancel", "release", "expire"])
    async def test_told(self, store: Store, clock: ManualClock, end: str) -> None:
        """However a task ends, everybody who waits for it is told, with the result."""
        task_id = await put(store, max_attempts=1)
        leases = await store.claim(TENANT, [COMMAND]) if end != "cancel" else []
        async with waiting(*(store.wait(TENANT, [task_id], LONG_S) for _ in range(5))) as waits:
            assert not any(wait.done() for wait in waits)
            if end in ("cancel", "release"):
                await store.cancel(TENANT, [task_id])
            if end == "expire":
                await pass_time(store, clock, 31)
            for lease in leases if end != "expire" else []:
                await settle(store, lease, Kind(end))
            expected = {"complete": Status.COMPLETED, "fail": Status.FAILED, "expire": Status.FAILED}
            for wait in waits:
                [task] = await soon(wait)
                assert task.status is expected.get(end, Status.CANCELLED)
                assert task.result is not None

    async def test_told_of_what_is_not_kept(self, store: Store) -> None:
        """A task with `keep=False` leaves no result, but who waited for it learns that it completed."""
        task_id = await put(store, keep=False)
        lease = await take(store)
        async with waiting(store.wait(TENANT, [task_id], LONG_S)) as [wait]:
            await complete(store, lease)
            [task] = await soon(wait)
        assert task.status is Status.COMPLETED

    async def test_told_of_a_missed_deadline(self, store: Store, clock: ManualClock) -> None:
        """Who waits for a task that was not started in time learns that it will not run."""
        task_id = await put(store, expires_s=60)
        async with waiting(store.wait(TENANT, [task_id], LONG_S)) as [wait]:
            await pass_time(store, clock, 61)
            [task] = await soon(wait)
        assert (task.status, task.reason) == (Status.CANCELLED, "EXPIRED")

    async def test_what_has_ended_is_not_waited_for(self, store: Store) -> None:
        """A wait for a task that has ended, or that nobody knows, returns at once."""
        done = await put_completed(store)
        [task] = await soon(store.wait(TENANT, [done], LONG_S))
        assert task.status is Status.COMPLETED
        assert await soon(store.wait("other", [done], LONG_S)) == [None]

    async def test_any_of_several(self, store: Store) -> None:
        """The first end is enough; the others are told as they stand."""
        ids = await put_many(store, 3)
        async with waiting(store.wait(TENANT, ids, LONG_S)) as [wait]:
            lease = await take(store)
            await complete(store, lease)
            tasks = await soon(wait)
        assert [task.id for task in tasks] == ids
        assert [task.id for task in tasks if task.status is Status.COMPLETED] == [lease.id]

    async def test_a_wait_that_runs_out(self, store: Store) -> None:
        """It returns the tasks as they stand, none of them ended."""
        task_id = await put(store)
        [task] = await soon(store.wait(TENANT, [task_id], 0.05))
        assert task.status is Status.PENDING

    async def test_the_first_to_give_up_leaves_the_others(self, store: Store) -> None:
        """Of two waiters on one task, one times out and one is cancelled: a third is still told."""
        task_id = await put(store)
        lease = await take(store)
        long = (store.wait(TENANT, [task_id], LONG_S) for _ in range(2))
        async with waiting(store.wait(TENANT, [task_id], 0.01), *long) as [short, cancelled, last]:
            await soon(short)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            await complete(store, lease)
            [task] = await soon(last)
        assert task.status is Status.COMPLETED

    async def test_a_retry_is_not_an_end(self, store: Store) -> None:
        """A task that goes back to its queue keeps its waiters waiting."""
        task_id = await put(store)
        async with waiting(store.wait(TENANT, [task_id], LONG_S)) as [wait]:
            await retry(store, await take(store))
            await asyncio.sleep(0.1)
            assert not wait.done()
            await complete(store, await take(store))
            [task] = await soon(wait)
        assert task.status is Status.COMPLETED

    async def test_it_subscribes_before_it_looks(self, store: Store) -> None:
        """However close the end is to the beginning of the wait, it is not missed."""
        for turns in range(30):
            await put(store)
            lease = await take(store)
            wait = asyncio.ensure_future(store.wait(TENANT, [lease.id], LONG_S))
            for _ in range(turns % 10):
                await asyncio.sleep(0)
            await complete(store, lease)
            [task] = await soon(wait)
            assert task.status is Status.COMPLETED

    async def test_another_client_ends_it(self, store: Store, second: Store) -> None:
        """What one client settles is told to who waits at another."""
        task_id = await put(store)
        async with waiting(store.wait(TENANT, [task_id], LONG_S)) as [wait]:
            await complete(second, await take(second))
            [task] = await soon(wait)
        assert task.status is Status.COMPLETED

    async def test_the_journal_wakes_its_readers(self, store: Store) -> None:
        """Who follows the journal is told that it grew."""
        with store.subscribe([Journalled()]) as reader:
            assert not await reader.wait(0.05)
            await put(store)
            assert await reader.wait(SOON_S)
