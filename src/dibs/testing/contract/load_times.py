"""Times of rows: delays and start deadlines count from the commit, and pass whether a claim comes by or not."""

from __future__ import annotations

import asyncio

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import EventKind, NewTask, Place, Reason, Status
from dibs.testing.contract.order import assert_order, line_up
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    assert_counts,
    commit,
    complete,
    drain,
    kinds_of,
    load,
    look,
    nothing_ready,
    pass_time,
    read_events,
    release,
    some_rows,
    soon,
    stage,
    sweep_all,
    take,
    take_many,
    waiting,
)


@pytest.mark.anyio
class TestLoadTimes:
    """What time does to rows that nobody has reached."""

    async def test_delays_count_from_the_commit(self, store: Store, clock: ManualClock) -> None:
        """However long ago a chunk was staged, a delay begins when its load is committed."""
        chunk = await stage(store, [*some_rows(2), *some_rows(2, delay_s=60)])
        clock.advance(3600)
        await commit(store, chunk)
        start_ms = clock.now_ms()
        places = {task.place: task.due_ms for task in (await store.list(TENANT)).tasks}
        assert places == {Place.READY: start_ms, Place.DELAYED: start_ms + 60_000}
        assert len(await drain(store, limit=10, lease_s=3600)) == 2
        clock.advance(59)
        assert await nothing_ready(store)
        clock.advance(1)
        assert len(await drain(store, limit=10)) == 2

    async def test_a_time_of_day_is_kept(self, store: Store, clock: ManualClock) -> None:
        """`run_at_ms` is what it says; what is past by the commit can be claimed at once."""
        now_ms = clock.now_ms()
        times = [now_ms + 1_000, now_ms + 100_000, now_ms - 5, now_ms + 50_000]
        chunk = await stage(store, [NewTask(command=COMMAND, run_at_ms=at_ms) for at_ms in times])
        clock.advance(60)
        await commit(store, chunk)
        assert len(await drain(store, lease_s=3600)) == 3
        total = await assert_counts(store)
        assert (total.ready, total.delayed) == (0, 1)
        assert (await pass_time(store, clock, 40)).promoted == 1
        assert len(await drain(store)) == 1

    async def test_each_row_has_its_own_delay(self, store: Store, clock: ManualClock) -> None:
        """Rows of one chunk that fall due at different times come one after the other, promoted at the back."""
        ids = await load(store, [NewTask(command=COMMAND, delay_s=10 * (5 - n)) for n in range(5)])
        for n in range(5):
            ready = await line_up(store)
            clock.advance(10)
            assert (await sweep_all(store)).promoted == 1
            assert_order(store.order, [*ready, ids[4 - n]], await drain(store, lease_s=3600))
        await assert_counts(store)

    @pytest.mark.parametrize("by", ["sweep", "claim"])
    async def test_due_rows_go_to_the_back(self, store: Store, clock: ManualClock, by: str) -> None:
        """Rows that fall due enter behind what is ready then, together, before what comes later."""
        ids = await load(store, some_rows(10, delay_s=30), some_rows(10, delay_s=30))
        ready = await line_up(store, 2)
        clock.advance(30)
        if by == "sweep":
            assert (await sweep_all(store)).promoted == 20
        assert (await assert_counts(store)).delayed == (0 if by == "sweep" else 20)
        first = [lease.id for lease in await take_many(store, 3)]
        newest = await line_up(store)
        claimed = first + await drain(store, limit=7)
        assert claimed[:2] == ready or store.order.kind == "window"
        assert set(claimed[2:22]) == set(ids) or store.order.kind == "window"
        assert sorted(claimed) == sorted([*ready, *ids, *newest])
        assert await kinds_of(store, ids[0]) == [EventKind.ENQUEUED, EventKind.PROMOTED, EventKind.CLAIMED]

    async def test_the_journal_says_which_rows_wait(self, store: Store, clock: ManualClock) -> None:
        """The event that puts a row in says DELAYED where one that says `promoted` is to follow, and nothing where the
        row is ready at once."""
        late_ms = clock.now_ms() + 1_000
        rows = [*some_rows(3), *some_rows(3, delay_s=60), *some_rows(3, run_at_ms=late_ms + 90_000)]
        overdue = await stage(store, some_rows(3, run_at_ms=late_ms))
        chunk = await stage(store, rows)
        clock.advance(2)
        await commit(store, chunk, overdue)
        tasks = {task.id: task for task in (await store.list(TENANT)).tasks}
        told = {event.id: event.reason for event in await read_events(store)}
        assert told == {task.id: Reason.DELAYED if task.place is Place.DELAYED else "" for task in tasks.values()}
        assert sorted(told.values()) == [""] * 6 + [Reason.DELAYED] * 6
        await pass_time(store, clock, 100)
        promoted = [event.id for event in await read_events(store) if event.kind is EventKind.PROMOTED]
        assert sorted(promoted) == sorted(task_id for task_id, reason in told.items() if reason)

    async def test_due_rows_keep_their_priority(self, store: Store, clock: ManualClock) -> None:
        """A delayed row of a high priority overtakes when it is due, and not before."""
        [low, high] = await load(store, [NewTask(command=COMMAND), NewTask(command=COMMAND, priority=9, delay_s=10)])
        plain = await line_up(store)
        clock.advance(10)
        await sweep_all(store)
        assert_order(store.order, [high, low, *plain], await drain(store))

    async def test_many_due_rows_in_bounded_steps(self, store: Store, clock: ManualClock) -> None:
        """Thousands of rows that fall due at once are all promoted, however small the budget of a sweep."""
        ids = await load(store, *([some_rows(1_000, delay_s=10)] * 3))
        clock.advance(10)
        assert (await sweep_all(store, budget=100)).promoted == 3_000
        total = (await store.stats(TENANT)).total
        assert (total.ready, total.delayed) == (3_000, 0)
        assert sorted(await drain(store, limit=1_000)) == sorted(ids)

    @pytest.mark.usefixtures("no_fallback")
    async def test_a_waiting_claim_knows_when_rows_are_due(self, store: Store, clock: ManualClock) -> None:
        """Rows that the sweep promotes wake a claim that waits."""
        await load(store, some_rows(3, delay_s=3600))
        async with waiting(*(store.claim(TENANT, [COMMAND], wait_s=LONG_S) for _ in range(3))) as claims:
            await asyncio.sleep(0.05)
            assert not any(claim.done() for claim in claims)
            await pass_time(store, clock, 3600)
            assert [len(await soon(claim)) for claim in claims] == [1, 1, 1]

    async def test_deadlines_count_from_the_commit(self, store: Store, clock: ManualClock) -> None:
        """However long ago a chunk was staged, the time to start begins when its load is committed."""
        chunk = await stage(store, some_rows(3, expires_s=60))
        await pass_time(store, clock, 3600)
        await commit(store, chunk)
        assert {task.expires_ms for task in (await store.list(TENANT)).tasks} == {clock.now_ms() + 60_000}
        clock.advance(59)
        assert len(await take_many(store, 1)) == 1
        assert (await pass_time(store, clock, 2)).cancelled == 2

    @pytest.mark.parametrize("delay_s", [0, 120])
    async def test_the_sweep_alone_ends_what_was_not_started(
        self, store: Store, clock: ManualClock, delay_s: float
    ) -> None:
        """No claim ever comes: the rows end CANCELLED with reason EXPIRED, with a result, counted and told."""
        ids = await load(store, some_rows(5, expires_s=60, delay_s=delay_s) + some_rows(2, delay_s=delay_s))
        assert (await pass_time(store, clock, 59)).cancelled == 0
        assert (await pass_time(store, clock, 2)).cancelled == 5
        for task_id in ids[:5]:
            task = await look(store, task_id)
            assert (task.status, task.place, task.reason) == (Status.CANCELLED, Place.NONE, "EXPIRED")
            assert task.ended_ms == clock.now_ms()
            assert task.result is not None
            assert task.result.reason == "EXPIRED"
            assert await kinds_of(store, task_id) == [EventKind.ENQUEUED, EventKind.CANCELLED]
        total = await assert_counts(store)
        assert (total.ready + total.delayed, total.bytes) == (2, 7)
        await pass_time(store, clock, 120)
        assert_order(store.order, ids[5:], await drain(store))

    async def test_a_deadline_that_comes_after_the_delay(self, store: Store, clock: ManualClock) -> None:
        """Rows that fell due in time, and are then not started in time, are ended by the sweep alone."""
        ids = await load(store, some_rows(3, delay_s=10, expires_s=60), some_rows(2, delay_s=10))
        assert (await pass_time(store, clock, 10)).promoted == 5
        assert (await pass_time(store, clock, 51)).cancelled == 3
        assert {(await look(store, task_id)).reason for task_id in ids[:3]} == {"EXPIRED"}
        assert (await assert_counts(store)).ready == 2

    async def test_too_late_is_too_late(self, store: Store, clock: ManualClock) -> None:
        """Also where no sweep came by, a claim passes over rows past their deadline to what is behind them."""
        ids = await load(store, some_rows(10, expires_s=60) + some_rows(2))
        plain = await line_up(store)
        clock.advance(61)
        assert_order(store.order, [*ids[10:], *plain], await drain(store))
        await sweep_all(store)
        assert {(await look(store, task_id)).reason for task_id in ids[:10]} == {"EXPIRED"}
        assert (await assert_counts(store)).ready == 0

    async def test_thousands_too_late_hide_nothing(self, store: Store, clock: ManualClock) -> None:
        """However many rows at the head missed their start, a claim finds what is behind them."""
        await load(store, *([some_rows(1_000, expires_s=1)] * 3))
        behind = await line_up(store)
        clock.advance(2)
        assert [(await take(store)).id] == behind
        await sweep_all(store)
        total = await assert_counts(store)
        assert (total.ready, total.leased) == (0, 1)

    async def test_a_sweep_of_thousands_is_bounded(self, store: Store, clock: ManualClock) -> None:
        """Rows past their deadline are ended in sweeps of any budget, each once."""
        await load(store, *([some_rows(1_000, expires_s=1)] * 3))
        clock.advance(2)
        assert (await sweep_all(store, budget=300)).cancelled == 3_000
        assert (await sweep_all(store)).cancelled == 0
        assert (await assert_counts(store)).ready == 0

    async def test_started_in_time_is_in_time(self, store: Store, clock: ManualClock) -> None:
        """Of a block with a deadline, those that were claimed live on, those given back and those left do not."""
        ids = await load(store, some_rows(5, expires_s=60))
        leases = await take_many(store, 3, lease_s=3600)
        await release(store, leases[1])
        assert (await pass_time(store, clock, 61)).cancelled == 3
        await complete(store, leases[0])
        await complete(store, leases[2])
        statuses = [(await look(store, task_id)).status for task_id in ids]
        assert statuses == [
            Status.COMPLETED,
            Status.CANCELLED,
            Status.COMPLETED,
            Status.CANCELLED,
            Status.CANCELLED,
        ]

    @pytest.mark.usefixtures("no_fallback")
    async def test_who_waits_for_a_late_row_is_told(self, store: Store, clock: ManualClock) -> None:
        """A wait for a row that is not started in time learns that it will not run."""
        ids = await load(store, some_rows(3, expires_s=60))
        async with waiting(store.wait(TENANT, [ids[1]], LONG_S)) as [wait]:
            await pass_time(store, clock, 61)
            [task] = await soon(wait)
        assert (task.status, task.reason) == (Status.CANCELLED, "EXPIRED")

    async def test_a_clock_that_is_set_back(self, store: Store, clock: ManualClock) -> None:
        """Rows stay in the order of commits, and claimable, whatever the clock says."""
        first = await load(store, some_rows(3))
        clock.advance(-3600)
        second = await load(store, some_rows(3))
        plain = await line_up(store)
        await sweep_all(store)
        assert_order(store.order, [*first, *second, *plain], await drain(store, limit=2))
