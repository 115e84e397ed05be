"""Reading the journal: without gap or repeat, for as long as it is kept."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.errors import DibsError, InvalidInput, JournalError, JournalReset, JournalTrimmed
from dibs.stores.protocol import Store
from dibs.task import EventKind, NewTask, Reader
from dibs.testing.contract.harness import Stores
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    in_slot,
    pass_time,
    put,
    read_events,
    read_shard,
)

WEEK_S = 7 * 86_400.0
SLOT = 7
"""Tests that follow one journal keep their tasks in one slot, and so in one shard."""


async def shard_of(store: Store) -> int:
    """Returns the one shard whose journal holds anything."""
    [shard] = [bounds.shard for bounds in await store.journal_bounds() if bounds.newest != bounds.oldest]
    return shard


async def write(store: Store, count: int, *, tenant: str = TENANT) -> list[bytes]:
    """Makes so many events, all in one shard: one for each task."""
    return [await put(store, tenant=tenant, id=in_slot(SLOT)) for _ in range(count)]


@pytest.mark.anyio
class TestReading:
    """Cursors lead through the journal without gap or repeat."""

    @pytest.mark.parametrize("limit", [1, 3, 7, 1_000])
    async def test_pages_of_any_size_are_the_whole(self, store: Store, limit: int) -> None:
        """Whatever the limit, reading on from each cursor gives every event once, in order."""
        ids = await write(store, 20)
        tasks = [NewTask(command=COMMAND, id=in_slot(SLOT)) for _ in range(10)]
        await store.enqueue(TENANT, tasks)
        events = await read_shard(store, shard=await shard_of(store), limit=limit)
        assert [event.id for event in events] == ids + [task.id for task in tasks]
        assert len({event.cursor for event in events}) == 30

    async def test_every_event_is_a_place_to_go_on_from(self, store: Store) -> None:
        """Reading after an event's own cursor begins with the next one, also within a batch."""
        await store.enqueue(TENANT, [NewTask(command=COMMAND, id=in_slot(SLOT)) for _ in range(5)])
        await write(store, 3)
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        for index, event in enumerate(events):
            assert await read_shard(store, shard=shard, after=event.cursor) == events[index + 1 :]

    async def test_the_end_is_a_place_to_go_on_from(self, store: Store) -> None:
        """A reader that has read all gets nothing, and then just what is new."""
        await write(store, 3)
        shard = await shard_of(store)
        page = await store.events(TENANT, shard=shard)
        assert not page.more
        for _ in range(3):
            page = await store.events(TENANT, shard=shard, after=page.cursor)
            assert (page.events, page.more) == ([], False)
        [task_id] = await write(store, 1)
        page = await store.events(TENANT, shard=shard, after=page.cursor)
        assert [event.id for event in page.events] == [task_id]

    async def test_more_says_whether_there_is(self, store: Store) -> None:
        """`more` is true while something is left, and false at the end."""
        await write(store, 4)
        shard = await shard_of(store)
        page = await store.events(TENANT, shard=shard, limit=3)
        assert (len(page.events), page.more) == (3, True)
        page = await store.events(TENANT, shard=shard, after=page.cursor, limit=3)
        assert (len(page.events), page.more) == (1, False)

    async def test_until_is_inclusive(self, store: Store) -> None:
        """A reader may stop at a cursor it was told, and later go on from there."""
        ids = await write(store, 6)
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        page = await store.events(TENANT, shard=shard, after=events[0].cursor, until=events[3].cursor)
        assert [event.id for event in page.events] == ids[1:4]
        assert not page.more
        page = await store.events(TENANT, shard=shard, after=events[3].cursor, until=events[3].cursor)
        assert page.events == []

    async def test_bounds_frame_the_journal(self, store: Store) -> None:
        """Reading after `oldest` and until `newest` is reading everything there is now."""
        assert await read_events(store) == []
        ids = await write(store, 5)
        [bounds] = [bounds for bounds in await store.journal_bounds() if bounds.newest != bounds.oldest]
        await write(store, 2)
        page = await store.events(TENANT, shard=bounds.shard, after=bounds.oldest, until=bounds.newest)
        assert [event.id for event in page.events] == ids

    async def test_other_tenants_are_passed_over(self, store: Store) -> None:
        """A tenant's reader comes to the end although all that follows is another's, and misses nothing later."""
        mine = await write(store, 2, tenant="mine")
        await write(store, 30, tenant="other")
        mine += await write(store, 2, tenant="mine")
        await write(store, 30, tenant="other")
        shard = await shard_of(store)
        for limit in (1, 3, 1_000):
            assert [event.id for event in await read_shard(store, "mine", shard=shard, limit=limit)] == mine
        assert len(await read_shard(store, "*", shard=shard)) == 64

    async def test_a_cursor_of_another_store_is_refused(self, stores: Stores, store: Store) -> None:
        """Positions mean nothing elsewhere: the reader is told to start again, for `after` and `until`."""
        await write(store, 2)
        other = await stores.open_other()
        await write(other, 1)
        [bounds] = [bounds for bounds in await other.journal_bounds() if bounds.newest != bounds.oldest]
        shard = await shard_of(store)
        with pytest.raises(JournalReset):
            await store.events(TENANT, shard=shard, after=bounds.newest)
        with pytest.raises(JournalReset):
            await store.events(TENANT, shard=shard, until=bounds.newest)

    async def test_there_is_nothing_in_a_shard_that_is_not(self, store: Store) -> None:
        """A shard that the bounds do not name holds no events, and certainly not another's."""
        await write(store, 2)
        nowhere = max(bounds.shard for bounds in await store.journal_bounds()) + 1
        try:
            page = await store.events(TENANT, shard=nowhere)
        except DibsError:
            return
        assert page.events == []

    @pytest.mark.parametrize("cursor", [b"", b"nonsense", b"\xff" * 64])
    async def test_a_cursor_of_ones_own_making_is_refused(self, store: Store, cursor: bytes) -> None:
        """Bytes that no journal made are an error, not a silent start from somewhere."""
        await write(store, 2)
        with pytest.raises((InvalidInput, JournalError)):
            await store.events(TENANT, shard=await shard_of(store), after=cursor)


@pytest.mark.anyio
class TestTrimming:
    """The journal is kept for a week, and longer for readers that have a name."""

    async def test_old_events_go(self, store: Store, clock: ManualClock) -> None:
        """After its week an event is gone: who had not read it is told, who starts now gets what is left."""
        await write(store, 3)
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        clock.advance(WEEK_S - 60)
        later = await write(store, 2)
        assert (await pass_time(store, clock, 120)).trimmed >= 1
        with pytest.raises(JournalTrimmed):
            await store.events(TENANT, shard=shard, after=events[0].cursor)
        left = await read_shard(store, shard=shard)
        assert [event.id for event in left if event.kind is EventKind.ENQUEUED] == later

    async def test_who_has_read_all_misses_nothing(self, store: Store, clock: ManualClock) -> None:
        """A cursor stays good after its event was trimmed, if nothing behind it is gone."""
        await write(store, 3)
        shard = await shard_of(store)
        last = (await read_shard(store, shard=shard))[-1].cursor
        await pass_time(store, clock, WEEK_S + 60)
        [task_id] = await write(store, 1)
        events = await read_shard(store, shard=shard, after=last)
        assert task_id in {event.id for event in events}

    async def test_a_young_journal_is_kept(self, store: Store, clock: ManualClock) -> None:
        """Within the week nothing is trimmed."""
        await write(store, 3)
        assert (await pass_time(store, clock, WEEK_S - 60)).trimmed == 0
        assert len(await read_events(store)) == 3

    async def test_named_readers_hold_it(self, store: Store, clock: ManualClock) -> None:
        """Trimming waits for a reader that has a name, and no longer than for its position."""
        await write(store, 4)
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        await store.advance("lake", shard, events[0].cursor)
        assert list(await store.readers()) == [Reader("lake", shard, events[0].cursor)]
        await pass_time(store, clock, 2 * WEEK_S)
        assert (await read_shard(store, shard=shard, after=events[0].cursor))[:3] == events[1:]
        await store.advance("lake", shard, events[-1].cursor)
        assert (await pass_time(store, clock, 1)).trimmed >= 1
        with pytest.raises(JournalTrimmed):
            await store.events(TENANT, shard=shard, after=events[0].cursor)

    @pytest.mark.parametrize("position", [b"", b"nonsense", b"\xff" * 64])
    async def test_a_position_of_ones_own_making_is_refused(
        self, store: Store, clock: ManualClock, position: bytes
    ) -> None:
        """A reader cannot stand where no journal is, and cannot stop the trimming by it."""
        await write(store, 2)
        with pytest.raises((InvalidInput, JournalError)):
            await store.advance("lake", await shard_of(store), position)
        assert list(await store.readers()) == []
        assert (await pass_time(store, clock, 2 * WEEK_S)).trimmed >= 1

    async def test_a_forgotten_reader_holds_nothing(self, store: Store, clock: ManualClock) -> None:
        """None ends a reader's hold."""
        await write(store, 2)
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        await store.advance("lake", shard, events[0].cursor)
        await store.advance("other", shard, events[1].cursor)
        await store.advance("lake", shard, None)
        assert [reader.name for reader in await store.readers()] == ["other"]
        assert (await pass_time(store, clock, 2 * WEEK_S)).trimmed >= 1
