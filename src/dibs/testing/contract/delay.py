"""Delay: invisible until due, by the store's clock, and then never forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import Enqueued, ErrorInfo, EventKind, Kind, NewTask, Place, Reason, Status
from dibs.testing.contract.order import assert_order
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    drain,
    gone,
    in_slot,
    kinds_of,
    look,
    nothing_ready,
    pass_time,
    put,
    put_many,
    read_events,
    retry,
    settle,
    sweep_all,
    take,
)


@pytest.mark.anyio
class TestDelay:
    """A delayed task is in its queue, but no claim sees it before it is due."""

    async def test_a_delayed_task_says_so(self, store: Store, clock: ManualClock) -> None:
        """It is PENDING, stands in `delayed`, and tells when it will be ready."""
        task = await look(store, await put(store, delay_s=60))
        assert (task.status, task.place) == (Status.PENDING, Place.DELAYED)
        assert task.due_ms == clock.now_ms() + 60_000
        assert (await assert_counts(store)).delayed == 1

    async def test_invisible_whatever_the_priority(self, store: Store) -> None:
        """The highest priority does not make a delayed task visible."""
        await put(store, priority=9, delay_s=60)
        ready = await put(store, priority=0)
        assert await drain(store) == [ready]

    async def test_visible_to_the_millisecond(self, store: Store, clock: ManualClock) -> None:
        """Not one millisecond before it is due, and then at once, without a sweep."""
        task_id = await put(store, delay_s=0.25)
        clock.advance(0.249)
        assert await nothing_ready(store)
        clock.advance(0.001)
        assert (await take(store)).id == task_id

    async def test_run_at_names_the_moment(self, store: Store, clock: ManualClock) -> None:
        """`run_at_ms` is the same as a delay until then."""
        task_id = await put(store, run_at_ms=clock.now_ms() + 5_000)
        assert (await look(store, task_id)).due_ms == clock.now_ms() + 5_000
        clock.advance(4.999)
        assert await nothing_ready(store)
        clock.advance(0.001)
        assert (await take(store)).id == task_id

    @pytest.mark.parametrize("ago_ms", [0, 1, 3_600_000, None], ids=["now", "just past", "an hour ago", "the epoch"])
    async def test_the_past_means_now(self, store: Store, clock: ManualClock, ago_ms: int | None) -> None:
        """A `run_at_ms` that is over makes the task ready at once."""
        task_id = await put(store, run_at_ms=0 if ago_ms is None else clock.now_ms() - ago_ms)
        assert (await look(store, task_id)).place is Place.READY
        assert (await take(store)).id == task_id

    async def test_zero_means_now(self, store: Store) -> None:
        """A delay of zero is no delay."""
        task_id = await put(store, delay_s=0)
        assert (await take(store)).id == task_id

    async def test_each_falls_due_by_itself(self, store: Store, clock: ManualClock) -> None:
        """A later one waits on after an earlier one was promoted, in whatever order they came."""
        due = {delay_s: await put(store, delay_s=delay_s) for delay_s in (30, 10, 20)}
        for delay_s in (10, 20, 30):
            clock.advance(10)
            assert await drain(store, limit=5) == [due[delay_s]]

    async def test_claims_promote_at_most_200_and_leave_the_rest_to_the_next(
        self, store: Store, clock: ManualClock
    ) -> None:
        """One claim promotes up to 200 due tasks; further claims bring out all of them, without any sweep."""
        ids = await put_many(store, 450, delay_s=5)
        clock.advance(5)
        first = await take(store)
        total = await assert_counts(store)
        assert 1 <= total.ready + total.leased <= 200
        assert total.ready + total.leased + total.delayed == 450
        assert sorted([first.id, *await drain(store, limit=1_000)]) == sorted(ids)

    async def test_a_claim_promotes_though_others_are_ready(self, store: Store, clock: ManualClock) -> None:
        """A queue that always has work ready does not starve its delayed tasks."""
        urgent = await put(store, priority=9, delay_s=5, id=in_slot(7))
        others = [await put(store, id=in_slot(7)) for _ in range(5)]
        clock.advance(5)
        assert_order(store.order, [urgent, *others], await drain(store))

    async def test_a_queue_that_nobody_polls_still_moves(self, store: Store, clock: ManualClock) -> None:
        """The sweep promotes what is due, so counts are right although no claim ever came."""
        task_id = await put(store, delay_s=60)
        assert (await pass_time(store, clock, 59)).promoted == 0
        assert (await pass_time(store, clock, 1)).promoted == 1
        assert (await look(store, task_id)).place is Place.READY
        total = await assert_counts(store)
        assert (total.ready, total.delayed) == (1, 0)

    async def test_promoted_once(self, store: Store, clock: ManualClock) -> None:
        """Claim and sweep both promote, but a task comes out of the delay once."""
        task_id = await put(store, delay_s=1)
        clock.advance(1)
        await complete(store, await take(store))
        assert (await sweep_all(store)).promoted == 0
        assert await kinds_of(store, task_id) == [
            EventKind.ENQUEUED,
            EventKind.PROMOTED,
            EventKind.CLAIMED,
            EventKind.COMPLETED,
        ]
        assert await nothing_ready(store)

    async def test_a_retry_delay_is_a_delay(self, store: Store, clock: ManualClock) -> None:
        """A task that is retried later is invisible until then, to the millisecond."""
        task_id = await put(store, priority=9)
        await retry(store, await take(store), delay_s=12.5)
        task = await look(store, task_id)
        assert (task.place, task.due_ms) == (Place.DELAYED, clock.now_ms() + 12_500)
        clock.advance(12.499)
        assert await nothing_ready(store)
        clock.advance(0.001)
        assert (await take(store)).id == task_id

    async def test_retention_does_not_run_before_the_end(self, store: Store, clock: ManualClock) -> None:
        """A task scheduled 48 h ahead outlives the 24 h for which results are kept, and so does its key."""
        task_id = await put(store, delay_s=48 * 3600, key="k", result_ttl_s=3600)
        for _ in range(47):
            await pass_time(store, clock, 3600)
        assert (await look(store, task_id)).place is Place.DELAYED
        await pass_time(store, clock, 3600)
        await complete(store, await take(store))
        await pass_time(store, clock, 3500)
        assert not await gone(store, task_id)

    async def test_the_horizon_is_allowed(self, store: Store, clock: ManualClock) -> None:
        """A delay of a whole year and a day is kept."""
        task_id = await put(store, delay_s=366 * 86_400)
        await pass_time(store, clock, 366 * 86_400 - 1)
        assert await nothing_ready(store)
        clock.advance(1)
        assert (await take(store)).id == task_id

    async def test_ready_and_delayed_in_one_batch(self, store: Store, clock: ManualClock) -> None:
        """Every task of a batch has a delay of its own."""
        tasks = [NewTask(command=COMMAND, id=new_id(), delay_s=delay_s) for delay_s in (0, 10, 0, 20)]
        assert await store.enqueue(TENANT, tasks) == [Enqueued(task.id) for task in tasks]
        assert set(await drain(store)) == {tasks[0].id, tasks[2].id}
        clock.advance(20)
        assert set(await drain(store)) == {tasks[1].id, tasks[3].id}

    async def test_the_journal_says_who_waits(self, store: Store, clock: ManualClock) -> None:
        """The event of an enqueue says DELAYED if the task is not ready yet, alone or in a batch, and nothing if it is;
        `promoted` says when it became ready."""
        now_ms = clock.now_ms()
        batch = [
            NewTask(command=COMMAND, id=new_id()),
            NewTask(command=COMMAND, id=new_id(), delay_s=10),
            NewTask(command=COMMAND, id=new_id(), run_at_ms=now_ms - 5),
            NewTask(command=COMMAND, id=new_id(), run_at_ms=now_ms + 5_000),
            NewTask(command=COMMAND, id=new_id(TENANT, COMMAND, "k"), key="k", delay_s=1),
        ]
        await store.enqueue(TENANT, batch)
        ready = [batch[0].id, batch[2].id, await put(store, delay_s=0), *await put_many(store, 20)]
        later = [batch[1].id, batch[3].id, batch[4].id, await put(store, delay_s=7)]
        later += await put_many(store, 20, delay_s=8)
        told = {event.id: event.reason for event in await read_events(store)}
        assert told == dict.fromkeys(ready, "") | dict.fromkeys(later, Reason.DELAYED)
        await pass_time(store, clock, 10)
        promoted = [event for event in await read_events(store) if event.kind is EventKind.PROMOTED]
        assert sorted(event.id for event in promoted) == sorted(later)
        assert {event.reason for event in promoted} == {""}

    @pytest.mark.parametrize("error", [None, BOOM], ids=["no error", "an error"])
    async def test_the_journal_says_which_retry_waits(self, store: Store, error: ErrorInfo | None) -> None:
        """A retry with a delay says DELAYED, one without a delay nothing; a word of the settlement's own stays."""
        said: list[dict[str, Any]] = [{"delay_s": 5}, {}, {"delay_s": 5, "reason": "BUSY"}, {"reason": "BUSY"}]
        ids = []
        for how in said:
            ids.append(await put(store))
            await settle(store, await take(store), Kind.RETRY, error=error, **how)
            await store.cancel(TENANT, [ids[-1]])
        told = {event.id: event for event in await read_events(store) if event.kind is EventKind.RETRIED}
        assert [told[task_id].reason for task_id in ids] == [Reason.DELAYED, "", "BUSY", "BUSY"]
        assert {event.error_type for event in told.values()} == {error.type if error else ""}
