"""The journal of loads: one event for every row, as if it had been enqueued by itself."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.errors import JournalTrimmed
from dibs.stores.protocol import Store
from dibs.task import Event, EventKind, NewTask, Place, Reason
from dibs.testing.contract.reading import WEEK_S, shard_of
from dibs.testing.contract.steps import (
    COMMAND,
    LOAD_SLOT,
    TENANT,
    commit,
    complete,
    drain,
    in_slot,
    kinds_of,
    load,
    pass_time,
    put,
    read_events,
    read_shard,
    some_rows,
    stage,
    take,
    take_many,
)


def named(events: list[Event]) -> list[bytes]:
    """Returns whose events they are."""
    return [event.id for event in events]


@pytest.mark.anyio
class TestLoadEvents:
    """A reader of the journal does not see that tasks came in as a load."""

    async def test_one_event_for_every_row(self, store: Store, clock: ManualClock) -> None:
        """Each says when its load was committed, of which queue it is, and nothing of a worker."""
        rows = [*some_rows(3), *some_rows(2, "other", priority=5), *some_rows(2, delay_s=5), *some_rows(2, key="k")]
        chunks = [await stage(store, rows), await stage(store, rows)]
        clock.advance(100)
        start_ms = clock.now_ms()
        await commit(store, *chunks)
        tasks = {task.id: task for task in (await store.list(TENANT)).tasks}
        assert len(tasks) == 18
        events = await read_events(store)
        assert sorted(named(events)) == sorted(tasks)
        for event in events:
            assert event.command == tasks[event.id].command
            assert (event.kind, event.tenant, event.at_ms) == (EventKind.ENQUEUED, TENANT, start_ms)
            assert (event.attempt, event.worker, event.error_type) == (0, "", "")
            assert event.reason == (Reason.DELAYED if tasks[event.id].place is Place.DELAYED else "")
        assert len({event.cursor for event in events}) == 18

    async def test_the_events_of_a_life(self, store: Store, clock: ManualClock) -> None:
        """A row is told of as any task is, with nothing said of how it left its chunk."""
        ids = await load(store, some_rows(4))
        await put(store, "other")
        await complete(store, await take(store, worker="w"))
        await store.cancel(TENANT, [ids[2]])
        await take(store)
        await pass_time(store, clock, 31)
        assert await kinds_of(store, ids[0]) == [EventKind.ENQUEUED, EventKind.CLAIMED, EventKind.COMPLETED]
        assert await kinds_of(store, ids[1]) == [EventKind.ENQUEUED, EventKind.CLAIMED, EventKind.LEASE_EXPIRED]
        assert await kinds_of(store, ids[2]) == [EventKind.ENQUEUED, EventKind.CANCELLED]
        assert await kinds_of(store, ids[3]) == [EventKind.ENQUEUED]
        told = [event for event in await read_events(store) if event.id == ids[0]]
        assert [(event.attempt, event.worker) for event in told] == [(0, ""), (1, "w"), (1, "w")]

    async def test_they_stand_where_the_commit_was(self, store: Store) -> None:
        """Behind what came before the commit, before what came after, chunk by chunk and row by row."""
        first = [await put(store, id=task_id) for task_id in _plain(3)]
        chunks = [await stage(store, some_rows(5)) for _ in range(2)]
        second = [await put(store, id=task_id) for task_id in _plain(2)]
        await commit(store, *chunks)
        third = [await put(store, id=task_id) for task_id in _plain(2)]
        events = await read_shard(store, shard=await shard_of(store))
        rows = named(events)[5:15]
        assert named(events) == [*first, *second, *rows, *third]
        assert rows == sorted(rows)
        assert {row[:13] for row in rows[:5]} == {chunks[0][:13]}

    @pytest.mark.parametrize("limit", [1, 7, 50, 1_000])
    async def test_pages_of_any_size_are_the_whole(self, store: Store, limit: int) -> None:
        """Pages cross the borders of chunks and loads without gap or repeat."""
        ids = [await put(store, id=_plain(1)[0])]
        ids += await load(store, some_rows(13), some_rows(1), some_rows(20))
        ids += [await put(store, id=_plain(1)[0])]
        ids += await load(store, some_rows(8))
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard, limit=limit)
        assert named(events) == ids
        assert events == await read_shard(store, shard=shard)

    async def test_a_large_load_in_pages(self, store: Store) -> None:
        """Thousands of rows are read in pages that are as long as was asked for."""
        ids = await load(store, *([some_rows(1_000)] * 5))
        shard = await shard_of(store)
        page = await store.events(TENANT, shard=shard, limit=700)
        assert (len(page.events), page.more) == (700, True)
        for limit in (300, 700, 1_000):
            assert named(await read_shard(store, shard=shard, limit=limit)) == ids

    async def test_every_event_is_a_place_to_go_on_from(self, store: Store) -> None:
        """Reading after a row's event begins with the next row, in the middle of a chunk too; `until` includes it."""
        await load(store, some_rows(6), some_rows(4))
        await take_many(store, 3)
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        for index, event in enumerate(events):
            assert await read_shard(store, shard=shard, after=event.cursor, limit=3) == events[index + 1 :]
            page = await store.events(TENANT, shard=shard, until=event.cursor)
            assert (page.events, page.more) == (events[: index + 1], False)

    async def test_they_outlive_their_rows(self, store: Store, clock: ManualClock) -> None:
        """When all rows of a load are completed and purged, the journal still tells that they came in."""
        ids = await load(store, some_rows(5), some_rows(3, key="k"))
        before = await read_events(store)
        while leases := await store.claim(TENANT, [COMMAND], limit=3):
            for lease in leases:
                await complete(store, lease)
        await store.purge(TENANT, ids)
        assert [event for event in await read_events(store) if event.kind is EventKind.ENQUEUED] == before
        await pass_time(store, clock, 2 * 86_400)
        assert (await store.list(TENANT)).tasks == []
        assert [event for event in await read_events(store) if event.kind is EventKind.ENQUEUED] == before

    async def test_tenants_read_their_own(self, store: Store) -> None:
        """A load of another tenant is passed over, page by page."""
        mine = await load(store, some_rows(5), tenant="mine")
        await load(store, some_rows(50), tenant="other")
        mine += await load(store, some_rows(5), tenant="mine")
        shard = await shard_of(store)
        for limit in (1, 7, 1_000):
            assert named(await read_shard(store, "mine", shard=shard, limit=limit)) == mine
        assert len(await read_shard(store, "*", shard=shard, limit=7)) == 60

    async def test_staging_and_refusals_are_not_told(self, store: Store) -> None:
        """Chunks that are staged, dropped or expired, and commits that were done before, make no events."""
        chunk = await stage(store, some_rows(3))
        await store.commit_load(TENANT, "load", 0, [chunk])
        before = await read_events(store)
        await store.commit_load(TENANT, "load", 0, [chunk])
        await store.commit_load(TENANT, "load", 1, [])
        await store.drop(TENANT, [await stage(store, some_rows(3)), chunk])
        await stage(store, some_rows(3))
        assert await read_events(store) == before

    async def test_old_loads_are_trimmed(self, store: Store, clock: ManualClock) -> None:
        """After its week a load's events are gone, its rows are not; a cursor in the middle of it is told."""
        ids = await load(store, some_rows(5), some_rows(5))
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        assert (await pass_time(store, clock, WEEK_S + 60)).trimmed >= 1
        [task_id] = _plain(1)
        await put(store, id=task_id)
        with pytest.raises(JournalTrimmed):
            await store.events(TENANT, shard=shard, after=events[3].cursor)
        assert task_id in named(await read_shard(store, shard=shard, after=events[-1].cursor))
        assert sorted(await drain(store, limit=4)) == sorted([*ids, task_id])

    async def test_a_named_reader_in_the_middle_of_a_load_holds_it(self, store: Store, clock: ManualClock) -> None:
        """Trimming waits for a reader that has read half of a load, and not when it has come past it."""
        await load(store, some_rows(5), some_rows(5))
        await put(store, id=_plain(1)[0])
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        await store.advance("lake", shard, events[3].cursor)
        await pass_time(store, clock, 2 * WEEK_S)
        assert (await read_shard(store, shard=shard, after=events[3].cursor))[:7] == events[4:]
        await store.advance("lake", shard, events[-1].cursor)
        assert (await pass_time(store, clock, 1)).trimmed >= 1
        with pytest.raises(JournalTrimmed):
            await store.events(TENANT, shard=shard, after=events[3].cursor)

    async def test_bounds_and_readers_of_one_commit(self, store: Store) -> None:
        """A load is one piece to `journal_bounds`: after `oldest` and until `newest` is all of it."""
        ids = await load(store, some_rows(12))
        [bounds] = [one for one in await store.journal_bounds() if one.newest != one.oldest]
        await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id) for task_id in _plain(2)])
        page = await store.events(TENANT, shard=bounds.shard, after=bounds.oldest, until=bounds.newest)
        assert named(page.events) == ids


def _plain(count: int) -> list[bytes]:
    """Ids of plain tasks, in the slot of the chunks that the steps make: one journal tells of both."""
    return [in_slot(LOAD_SLOT) for _ in range(count)]
