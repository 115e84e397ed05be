"""Reading the journal by runs: the same events as one by one, in the same pages."""

from __future__ import annotations

from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.errors import InvalidInput, InvalidOption, JournalError, JournalReset, JournalTrimmed
from dibs.stores.protocol import Store
from dibs.task import Event, Kind, NewTask, RunPage
from dibs.testing.contract.harness import Stores
from dibs.testing.contract.reading import WEEK_S, shard_of, write
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    LOAD_SLOT,
    TENANT,
    in_slot,
    load,
    pass_time,
    put,
    put_many,
    read_shard,
    retry,
    settlement,
    some_rows,
    take,
    take_many,
)


def told(page: RunPage) -> list[Event]:
    """Returns the events of a page one by one."""
    return [event for run in page.runs for event in run.events()]


async def read_runs(
    store: Store, tenant: str = TENANT, *, shard: int = 0, after: bytes | None = None, limit: int = 1_000
) -> list[Event]:
    """Reads one shard's journal to its end, by runs."""
    events: list[Event] = []
    while True:
        page = await store.runs(tenant, shard=shard, after=after, limit=limit)
        assert sum(run.count() for run in page.runs) <= limit
        assert all(run.count() for run in page.runs)
        events += told(page)
        assert page.cursor != after or not page.more, "there is more, but the cursor stands still"
        after = page.cursor
        if not page.more:
            return events


async def some_history(store: Store) -> None:
    """Events of every sort: batches and single ones, of two tenants, of loads with and without keys, with errors, and
    with attempts that differ within one batch."""
    await put_many(store, 5)
    await put(store, "other")
    await retry(store, await take(store))
    await load(store, some_rows(7), [NewTask(command=COMMAND, key=f"k{number}") for number in range(9)])
    await put_many(store, 3, tenant="second")
    leases = await take_many(store, 12, worker="w")
    await store.settle([settlement(lease, Kind.COMPLETE) for lease in leases[:6]])
    await store.settle([settlement(lease, Kind.FAIL, error=BOOM, reason="BAD") for lease in leases[6:9]])
    await put(store, "other", tenant="second")
    await store.cancel(TENANT, [lease.id for lease in leases[9:]])


@pytest.mark.anyio
class TestRuns:
    """`runs` tells what `events` tells."""

    @pytest.mark.parametrize("limit", [1, 2, 7, 50, 10_000])
    async def test_the_same_events_in_pages_of_any_size(self, store: Store, limit: int) -> None:
        """Runs taken apart are the events, of one tenant or of all, whatever the limit."""
        await some_history(store)
        seen = 0
        for bounds in await store.journal_bounds():
            for tenant in (TENANT, "second", "*"):
                events = await read_shard(store, tenant, shard=bounds.shard)
                assert await read_runs(store, tenant, shard=bounds.shard, limit=limit) == events
                seen += len(events)
        assert seen > 80

    async def test_pages_are_those_of_events(self, store: Store) -> None:
        """A page has the events, the cursor and the `more` that `events` answers to the same question."""
        await some_history(store)
        for bounds in await store.journal_bounds():
            for tenant in (TENANT, "second", "*"):
                after: bytes | None = None
                while True:
                    page = await store.runs(tenant, shard=bounds.shard, after=after, limit=3)
                    same = await store.events(tenant, shard=bounds.shard, after=after, limit=3)
                    assert (told(page), page.cursor, page.more) == (same.events, same.cursor, same.more)
                    after = page.cursor
                    if not page.more:
                        break

    async def test_every_event_is_a_place_to_go_on_from(self, store: Store) -> None:
        """Reading after or until an event that is in the middle of a run begins or ends just there."""
        await load(store, some_rows(6), some_rows(4))
        await take_many(store, 5)
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        for index, event in enumerate(events):
            assert told(await store.runs(TENANT, shard=shard, after=event.cursor)) == events[index + 1 :]
            page = await store.runs(TENANT, shard=shard, until=event.cursor)
            assert (told(page), page.more) == (events[: index + 1], False)
            page = await store.runs(TENANT, shard=shard, after=events[1].cursor, until=event.cursor)
            assert (told(page), page.more) == (events[2 : index + 1], False)

    async def test_a_run_tells_the_cursors_of_its_events(self, store: Store) -> None:
        """Each of them is good for going on, also where the run was cut."""
        await load(store, some_rows(10))
        shard = await shard_of(store)
        events = await read_shard(store, shard=shard)
        page = await store.runs(TENANT, shard=shard, after=events[2].cursor, limit=5)
        cursors = [run.cursor_at(index) for run in page.runs for index in range(run.count())]
        assert cursors == [event.cursor for event in events[3:8]]

    async def test_a_run_that_does_not_fit_is_cut(self, store: Store) -> None:
        """A page is as long as was asked for, and the next goes on within the run."""
        ids = await load(store, *([some_rows(1_000)] * 5))
        shard = await shard_of(store)
        page = await store.runs(TENANT, shard=shard, limit=4_100)
        assert (sum(run.count() for run in page.runs), page.more) == (4_100, True)
        rest = await store.runs(TENANT, shard=shard, after=page.cursor, limit=10_000)
        assert (sum(run.count() for run in rest.runs), rest.more) == (900, False)
        assert b"".join(run.ids for run in [*page.runs, *rest.runs]) == b"".join(ids)

    async def test_attempts_are_told_for_each_or_for_all(self, store: Store) -> None:
        """Tasks that are claimed together tell each its own attempt."""
        ids = [in_slot(LOAD_SLOT) for _ in range(4)]
        await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id) for task_id in ids])
        first = await take_many(store, 2)
        for lease in first:
            await retry(store, lease)
        await take_many(store, 4)
        page = await store.runs(TENANT, shard=await shard_of(store))
        assert all(len(run.attempts) in (1, run.count()) for run in page.runs)
        claimed = [(event.id, event.attempt) for event in told(page) if event.kind == "claimed"]
        assert claimed[2:] == [(ids[2], 1), (ids[3], 1), (ids[0], 2), (ids[1], 2)]

    async def test_other_tenants_are_passed_over(self, store: Store) -> None:
        """However many events of others lie between, a reader comes to its own and to the end."""
        mine = await load(store, some_rows(5), tenant="mine")
        await load(store, *([some_rows(1_000)] * 12), tenant="other")
        mine += await load(store, some_rows(5), tenant="mine")
        shard = await shard_of(store)
        for limit in (1, 7, 10_000):
            assert [event.id for event in await read_runs(store, "mine", shard=shard, limit=limit)] == mine

    async def test_what_is_gone_or_of_another_store_is_told(
        self, stores: Stores, store: Store, clock: ManualClock
    ) -> None:
        """Cursors are refused as `events` refuses them."""
        await write(store, 3)
        shard = await shard_of(store)
        first = (await read_shard(store, shard=shard))[0].cursor
        other = await stores.open_other()
        await write(other, 1)
        foreign = (await other.journal_bounds())[await shard_of(other)].newest
        for after, until in ((foreign, None), (None, foreign)):
            with pytest.raises(JournalReset):
                await store.runs(TENANT, shard=shard, after=after, until=until)
        with pytest.raises((InvalidInput, JournalError)):
            await store.runs(TENANT, shard=shard, after=b"nonsense")
        await pass_time(store, clock, WEEK_S + 60)
        with pytest.raises(JournalTrimmed):
            await store.runs(TENANT, shard=shard, after=first)

    @pytest.mark.parametrize("limit", [0, -1, 10_001, 1.5, "9"], ids=repr)
    async def test_a_bad_limit(self, store: Store, limit: Any) -> None:
        """A page holds 1 to 10,000 events."""
        with pytest.raises(InvalidOption):
            await store.runs(TENANT, limit=limit)
