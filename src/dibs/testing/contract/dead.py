"""Dead letters: listed, replayed once, or purged for good."""

from __future__ import annotations

import asyncio

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import RELEASES_FREE, EventKind, Filter, Kind, Place, Status
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    drain,
    fail,
    gone,
    kinds_of,
    list_all,
    look,
    nothing_ready,
    pass_time,
    put,
    put_completed,
    put_dead,
    put_many,
    release,
    settle,
    take,
    take_many,
)

DEAD = Filter(place=Place.DEAD)


async def put_many_dead(store: Store, count: int, command: str = COMMAND) -> list[bytes]:
    """Makes so many dead letters in a queue that has nothing else ready."""
    ids = await put_many(store, count, command)
    for lease in await take_many(store, count, command):
        await fail(store, lease)
    return ids


@pytest.mark.anyio
class TestDeadLetters:
    """A task that ended FAILED is kept where it can be found."""

    async def test_listed_by_queue(self, store: Store, clock: ManualClock) -> None:
        """A listing tells reason, error, attempts and time of each, for one queue or all."""
        one = await put_dead(store, "one", reason="BAD")
        clock.advance(5)
        two = await put_dead(store, "two")
        await put(store, "one")
        assert {task.id for task in await list_all(store, DEAD)} == {one, two}
        [task] = await list_all(store, Filter(place=Place.DEAD, command="one"))
        assert (task.id, task.reason, task.error, task.attempts) == (one, "BAD", BOOM, 1)
        assert task.ended_ms == clock.now_ms() - 5_000
        assert [task.id for task in await list_all(store, Filter(place=Place.DEAD, reason="BAD"))] == [one]

    async def test_replayed_with_no_attempts_used(self, store: Store) -> None:
        """A replay is a new start: ready, attempts zero, no result, and the whole budget of attempts."""
        task_id = await put(store, max_attempts=2, payload=b"p")
        for _ in range(2):
            await settle(store, await take(store), Kind.RETRY, error=BOOM)
        assert (await look(store, task_id)).place is Place.DEAD
        assert (await store.replay(TENANT, [task_id])).ids == [task_id]
        task = await look(store, task_id)
        assert (task.status, task.place, task.attempts) == (Status.PENDING, Place.READY, 0)
        assert (task.result, task.reason, task.ended_ms, task.kept_until_ms) == (None,) * 4
        for attempt in (1, 2):
            lease = await take(store)
            assert (lease.attempt, lease.payload) == (attempt, b"p")
            await settle(store, lease, Kind.RETRY, error=BOOM)
        assert await nothing_ready(store)
        assert (await look(store, task_id)).reason == "MAX_ATTEMPTS"
        assert [task.id for task in await list_all(store, DEAD)] == [task_id]

    async def test_replayed_with_no_releases_used(self, store: Store) -> None:
        """A replayed task can be given back as often as a new one before that counts."""
        task_id = await put(store, max_attempts=1)
        for _ in range(RELEASES_FREE):
            await release(store, await take(store))
        await fail(store, await take(store))
        await store.replay(TENANT, [task_id])
        for _ in range(RELEASES_FREE):
            await release(store, await take(store))
        assert (await look(store, task_id)).attempts == 0

    async def test_a_repeated_replay_is_harmless(self, store: Store) -> None:
        """Only a dead letter is replayed: not one that waits again, runs again, or has completed since."""
        task_id = await put_dead(store)
        assert (await store.replay(TENANT, [task_id])).ids == [task_id]
        assert (await store.replay(TENANT, [task_id])).ids == []
        lease = await take(store)
        assert (await store.replay(TENANT, [task_id])).ids == []
        await complete(store, lease)
        assert (await store.replay(TENANT, [task_id])).ids == []
        assert await nothing_ready(store)
        assert (await kinds_of(store, task_id)).count(EventKind.REPLAYED) == 1

    async def test_only_the_dead_are_replayed(self, store: Store) -> None:
        """Whatever else is named, cancelled and unknown tasks included, is left alone."""
        done = await put_completed(store)
        held = await put(store)
        await take(store)
        cancelled = await put(store)
        await store.cancel(TENANT, [cancelled])
        later = await put(store, delay_s=60)
        ids = [done, held, cancelled, later]
        before = await store.get(TENANT, ids)
        assert (await store.replay(TENANT, [*ids, new_id()])).ids == []
        assert await store.get(TENANT, ids) == before
        assert await nothing_ready(store)

    async def test_of_concurrent_replays_one_acts(self, store: Store) -> None:
        """However many replay it, the dead letter comes back once."""
        task_id = await put_dead(store)
        acted = await asyncio.gather(*(store.replay(TENANT, [task_id]) for _ in range(8)))
        assert [one.ids for one in acted].count([task_id]) == 1
        assert sum(len(one.ids) for one in acted) == 1
        assert await drain(store) == [task_id]

    async def test_named_twice_is_replayed_once(self, store: Store) -> None:
        """The same id twice in one call is one dead letter."""
        task_id = await put_dead(store)
        assert (await store.replay(TENANT, [task_id, task_id])).ids == [task_id]
        assert await drain(store) == [task_id]
        await assert_counts(store)

    async def test_some_are_replayed(self, store: Store) -> None:
        """A call replays just the ids it names."""
        ids = await put_many_dead(store, 5)
        assert set((await store.replay(TENANT, ids[1:3])).ids) == set(ids[1:3])
        assert sorted(await drain(store)) == sorted(ids[1:3])
        total = await assert_counts(store)
        assert (total.dead, total.leased) == (3, 2)

    async def test_all_that_match_are_replayed(self, store: Store) -> None:
        """A filter replays what matches it, and nothing else."""
        bad = await put_dead(store, "one", reason="BAD")
        await put_dead(store, "one", reason="OTHER")
        await put_dead(store, "two", reason="BAD")
        assert (await store.replay(TENANT, Filter(command="one", reason="BAD"))).ids == [bad]
        assert await drain(store, "one", "two") == [bad]

    async def test_a_large_replay_goes_on_by_cursor(self, store: Store) -> None:
        """With a limit, the same call goes on where it ended until all have been replayed, each once."""
        ids = await put_many_dead(store, 25)
        replayed: list[bytes] = []
        cursor: str | None = None
        for _ in range(30):
            acted = await store.replay(TENANT, DEAD, limit=10, cursor=cursor)
            assert len(acted.ids) <= 10
            replayed += acted.ids
            cursor = acted.cursor
            if cursor is None:
                break
        assert cursor is None
        assert sorted(replayed) == sorted(ids)
        assert sorted(await drain(store)) == sorted(ids)

    async def test_a_replayed_task_keeps_its_place_in_retention(self, store: Store, clock: ManualClock) -> None:
        """The 14 days of its first death do not end its second life."""
        task_id = await put_dead(store, "idle")
        await store.replay(TENANT, [task_id])
        await pass_time(store, clock, 15 * 86_400)
        assert (await take(store, "idle")).id == task_id


@pytest.mark.anyio
class TestPurge:
    """A purge removes what has ended, for good."""

    async def test_one(self, store: Store) -> None:
        """The task is gone: no record, no count, no bytes, no replay."""
        task_id = await put_dead(store, payload=b"p" * 100)
        assert (await store.purge(TENANT, [task_id])).ids == [task_id]
        assert await gone(store, task_id)
        assert (await store.replay(TENANT, [task_id])).ids == []
        assert (await store.purge(TENANT, [task_id])).ids == []
        total = await assert_counts(store)
        assert (total.dead, total.bytes) == (0, 0)
        assert (await kinds_of(store, task_id))[-1] is EventKind.PURGED

    async def test_named_twice_is_purged_once(self, store: Store) -> None:
        """The same id twice in one call is counted once."""
        task_id = await put_dead(store, payload=b"p")
        assert (await store.purge(TENANT, [task_id, task_id])).ids == [task_id]
        total = await assert_counts(store)
        assert (total.dead, total.bytes) == (0, 0)

    async def test_a_purged_id_is_nobodys(self, store: Store) -> None:
        """After a purge the id may be enqueued as if it were new."""
        task_id = await put_dead(store)
        await store.purge(TENANT, [task_id])
        assert await put(store, id=task_id) == task_id
        assert await drain(store) == [task_id]

    async def test_some(self, store: Store) -> None:
        """A call purges just the ids it names."""
        ids = await put_many_dead(store, 5)
        assert set((await store.purge(TENANT, ids[:2])).ids) == set(ids[:2])
        assert {task.id for task in await list_all(store, DEAD)} == set(ids[2:])

    async def test_all_that_match(self, store: Store) -> None:
        """A filter purges what matches it: other queues and reasons stay."""
        bad = await put_dead(store, "one", reason="BAD")
        others = [await put_dead(store, "one", reason="OTHER"), await put_dead(store, "two", reason="BAD")]
        assert (await store.purge(TENANT, Filter(command="one", reason="BAD"))).ids == [bad]
        assert {task.id for task in await list_all(store, DEAD)} == set(others)

    async def test_only_what_has_ended(self, store: Store) -> None:
        """A task that waits or runs is left alone, by id and by filter."""
        held = await put(store)
        lease = await take(store)
        ids = [held, await put(store), await put(store, delay_s=60)]
        assert (await store.purge(TENANT, [*ids, new_id()])).ids == []
        assert (await store.purge(TENANT, Filter(command=COMMAND))).ids == []
        assert all(task is not None for task in await store.get(TENANT, ids))
        await complete(store, lease)

    async def test_completed_and_cancelled_tasks_too(self, store: Store) -> None:
        """Whatever ended can be purged by its id."""
        cancelled = await put(store)
        await store.cancel(TENANT, [cancelled])
        ids = [await put_completed(store), cancelled]
        assert set((await store.purge(TENANT, ids)).ids) == set(ids)
        assert await store.get(TENANT, ids) == [None, None]

    async def test_a_large_purge_goes_on_by_cursor(self, store: Store) -> None:
        """With a limit, the same call goes on where it ended until all are gone."""
        ids = await put_many_dead(store, 25)
        kept = await put(store)
        purged: list[bytes] = []
        cursor: str | None = None
        for _ in range(30):
            acted = await store.purge(TENANT, DEAD, limit=10, cursor=cursor)
            assert len(acted.ids) <= 10
            purged += acted.ids
            cursor = acted.cursor
            if cursor is None:
                break
        assert cursor is None
        assert sorted(purged) == sorted(ids)
        assert [task.id for task in await list_all(store)] == [kept]
