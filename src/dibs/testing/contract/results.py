"""Results and retention: kept from the end of the task for as long as promised, each by itself."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import Already, Cause, Enqueued, Kind, LeaseLost, NewTask, Place, Result, Status
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    fail,
    gone,
    look,
    nothing_ready,
    pass_time,
    put,
    put_completed,
    put_dead,
    put_many,
    retry,
    settle,
    settlement,
    take,
    take_many,
)

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@pytest.mark.anyio
class TestResults:
    """Every task that ended has a result, for a time."""

    @pytest.mark.parametrize(
        "data", [None, b"", b"\x00\xff\x80", b"x" * (1 << 20)], ids=["none", "empty", "bin", "big"]
    )
    async def test_kept_as_it_is(self, store: Store, data: bytes | None) -> None:
        """Nothing, no bytes, binary or a mebibyte: what was given comes back, and the task is COMPLETED."""
        task_id = await put(store)
        await complete(store, await take(store), data, codec="raw")
        task = await look(store, task_id)
        assert task.status is Status.COMPLETED
        assert task.result is not None
        assert (task.result.status, task.result.data) == (Status.COMPLETED, data)
        if data is not None:
            assert task.result.codec == "raw"

    @pytest.mark.parametrize("data", [None, b"1", b"x" * 10_000], ids=["none", "small", "large"])
    async def test_an_earlier_error_is_not_part_of_it(self, store: Store, data: bytes | None) -> None:
        """A task that failed and then completed has the result of the completion alone."""
        task_id = await put(store)
        await retry(store, await take(store))
        await complete(store, await take(store), data)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, data)
        assert (await assert_counts(store)).bytes == len(data or b"")

    async def test_failed_and_cancelled_tasks_have_one(self, store: Store) -> None:
        """The result of a task that did not complete is how it ended."""
        failed = await put_dead(store, reason="BAD")
        cancelled = await put(store)
        await store.cancel(TENANT, [cancelled])
        assert (await look(store, failed)).result == Result(Status.FAILED, error=BOOM, reason="BAD")
        result = (await look(store, cancelled)).result
        assert result is not None
        assert (result.status, result.reason) == (Status.CANCELLED, "CANCELLED")

    async def test_24_hours_from_the_end(self, store: Store, clock: ManualClock) -> None:
        """A result is kept for a day after the task ended, however long ago it was enqueued; then all is gone."""
        task_id = await put(store, delay_s=30 * HOUR_S)
        await pass_time(store, clock, 30 * HOUR_S)
        lease = await take(store, lease_s=12 * HOUR_S)
        clock.advance(11 * HOUR_S)
        await complete(store, lease, b"1")
        task = await look(store, task_id)
        assert task.kept_until_ms == clock.now_ms() + DAY_S * 1000
        await pass_time(store, clock, DAY_S - 1)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"1")
        assert (await pass_time(store, clock, 2)).pruned >= 1
        assert await gone(store, task_id)

    async def test_a_result_may_go_before_its_task(self, store: Store, clock: ManualClock) -> None:
        """`result_ttl_s` is about the result, `retention_s` about the record."""
        task_id = await put_completed(store, result=b"1", result_ttl_s=60, retention_s=HOUR_S)
        await pass_time(store, clock, 59)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"1")
        await pass_time(store, clock, 2)
        task = await look(store, task_id)
        assert (task.status, task.result) == (Status.COMPLETED, None)
        await pass_time(store, clock, HOUR_S)
        assert await gone(store, task_id)

    async def test_a_task_is_kept_at_least_as_long_as_its_result(self, store: Store, clock: ManualClock) -> None:
        """A retention shorter than the result's does not take the result away."""
        task_id = await put_completed(store, result=b"1", result_ttl_s=HOUR_S, retention_s=60)
        await pass_time(store, clock, HOUR_S - 1)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"1")
        await pass_time(store, clock, 2)
        assert await gone(store, task_id)

    async def test_the_settlement_may_say_for_how_long(self, store: Store, clock: ManualClock) -> None:
        """The worker's `result_ttl_s` overrides the task's, shorter or longer."""
        ids = [await put(store, result_ttl_s=HOUR_S, retention_s=10 * HOUR_S) for _ in range(2)]
        for ttl_s in (60, 3 * HOUR_S):
            await complete(store, await take(store), b"1", result_ttl_s=ttl_s)
        await pass_time(store, clock, 2 * HOUR_S)
        results = [(await look(store, task_id)).result for task_id in ids]
        assert sorted(result is None for result in results) == [False, True]

    async def test_a_longer_result_keeps_its_task(self, store: Store, clock: ManualClock) -> None:
        """If the worker keeps the result for longer than the task would be kept, the task stays with it."""
        task_id = await put(store, result_ttl_s=60, retention_s=60)
        await complete(store, await take(store), b"1", result_ttl_s=HOUR_S)
        await pass_time(store, clock, HOUR_S - 1)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"1")
        await pass_time(store, clock, 2)
        assert await gone(store, task_id)

    async def test_one_short_result_does_not_expire_others(self, store: Store, clock: ManualClock) -> None:
        """Results of one queue end each at its own time."""
        short = await put_completed(store, result=b"s", result_ttl_s=10)
        long = await put_completed(store, result=b"l")
        await pass_time(store, clock, 11)
        assert await gone(store, short)
        assert (await look(store, long)).result == Result(Status.COMPLETED, b"l")

    async def test_dead_letters_are_kept_14_days(self, store: Store, clock: ManualClock) -> None:
        """A dead letter, its reason and its error outlive results by far; then it goes too."""
        task_id = await put_dead(store)
        await pass_time(store, clock, 13.9 * DAY_S)
        task = await look(store, task_id)
        assert (task.place, task.reason, task.error) == (Place.DEAD, "FAILED", BOOM)
        await pass_time(store, clock, 0.2 * DAY_S)
        assert await gone(store, task_id)
        assert (await assert_counts(store)).dead == 0

    async def test_cancelled_tasks_are_kept_a_day(self, store: Store, clock: ManualClock) -> None:
        """A cancelled task can be looked at like any other that ended."""
        task_id = await put(store)
        await store.cancel(TENANT, [task_id])
        await pass_time(store, clock, DAY_S - 1)
        assert (await look(store, task_id)).status is Status.CANCELLED
        await pass_time(store, clock, 2)
        assert await gone(store, task_id)

    async def test_retention_spares_what_has_not_ended(self, store: Store, clock: ManualClock) -> None:
        """However old, a task that waits or runs is not pruned."""
        waiting = await put(store, "idle", result_ttl_s=1, retention_s=1)
        await put(store, result_ttl_s=1, retention_s=1)
        lease = await take(store, lease_s=12 * HOUR_S)
        await pass_time(store, clock, 11 * HOUR_S)
        await complete(store, lease)
        await pass_time(store, clock, 30 * DAY_S)
        assert (await take(store, "idle")).id == waiting


@pytest.mark.anyio
class TestKeepNothing:
    """`keep=False`: body, key and result go at completion; the state stays 60 s so that repeats are recognised."""

    async def test_repeats_are_recognised_for_a_minute(self, store: Store, clock: ManualClock) -> None:
        """Settling or enqueueing again changes nothing; after the minute nobody knows the task."""
        task_id = await put(store, keep=False, payload=b"p")
        lease = await take(store)
        await complete(store, lease, b"r")
        await pass_time(store, clock, 59)
        assert await settle(store, lease, Kind.COMPLETE, result=b"r") == Already(Status.COMPLETED)
        [repeat] = await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id, keep=False)])
        assert repeat == Enqueued(task_id, already=True)
        assert await nothing_ready(store)
        await pass_time(store, clock, 2)
        assert await gone(store, task_id)
        assert await settle(store, lease, Kind.COMPLETE) == LeaseLost(Cause.UNKNOWN)

    async def test_body_and_result_are_gone_at_once(self, store: Store) -> None:
        """What is left says that it completed, and holds no data."""
        task_id = await put(store, keep=False, payload=b"p" * 1000)
        await complete(store, await take(store), b"r" * 1000)
        task = await look(store, task_id)
        assert (task.status, task.result, task.payload) == (Status.COMPLETED, None, b"")
        assert (await store.stats(TENANT)).total.bytes == 0

    async def test_a_dead_letter_is_kept_all_the_same(self, store: Store) -> None:
        """`keep=False` is about completion: what failed can be replayed."""
        task_id = await put_dead(store, keep=False, payload=b"p")
        assert (await look(store, task_id)).payload == b"p"
        assert (await store.replay(TENANT, [task_id])).ids == [task_id]
        assert (await take(store)).payload == b"p"


@pytest.mark.anyio
class TestRetain:
    """`retain` keeps results that somebody still needs."""

    async def test_extends(self, store: Store, clock: ManualClock) -> None:
        """The result is there for as long as asked from now, and so is its task."""
        task_id = await put_completed(store, result=b"1", result_ttl_s=60)
        clock.advance(30)
        assert await store.retain(TENANT, [task_id], HOUR_S) == [clock.now_ms() + HOUR_S * 1000]
        await pass_time(store, clock, HOUR_S - 1)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"1")
        await pass_time(store, clock, 2)
        assert await gone(store, task_id)

    async def test_the_old_end_of_the_result_is_forgotten(self, store: Store, clock: ManualClock) -> None:
        """A result that would have gone before its task stays for as long as it was retained."""
        task_id = await put_completed(store, result=b"1", result_ttl_s=60, retention_s=10 * HOUR_S)
        await store.retain(TENANT, [task_id], HOUR_S)
        await pass_time(store, clock, HOUR_S - 1)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"1")
        await pass_time(store, clock, 2)
        assert (await look(store, task_id)).result is None

    async def test_never_shortens(self, store: Store, clock: ManualClock) -> None:
        """`at least`: a shorter time than what was promised changes nothing."""
        ended_ms = clock.now_ms()
        task_id = await put_completed(store, result=b"1", result_ttl_s=HOUR_S)
        assert await store.retain(TENANT, [task_id], 60) == [ended_ms + HOUR_S * 1000]
        await pass_time(store, clock, HOUR_S - 1)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"1")

    async def test_others_go_when_they_should(self, store: Store, clock: ManualClock) -> None:
        """Keeping one of several that ended together, for longer or not, does not keep the others."""
        ids = await put_many(store, 6, payload=b"p", result_ttl_s=60)
        leases = await take_many(store, 6)
        await store.settle([settlement(lease, Kind.COMPLETE, result=b"r") for lease in leases])
        await store.retain(TENANT, [leases[0].id, leases[1].id], 60)
        await store.retain(TENANT, [leases[2].id], HOUR_S)
        await pass_time(store, clock, 61)
        left = [task.id for task in await store.get(TENANT, ids) if task is not None]
        assert left == [leases[2].id]
        assert (await assert_counts(store)).bytes == 2
        await pass_time(store, clock, HOUR_S)
        assert (await assert_counts(store)).bytes == 0

    @pytest.mark.parametrize("retention_s", [60, 10 * HOUR_S], ids=["task and result", "result alone"])
    async def test_an_id_named_twice_goes_once(self, store: Store, clock: ManualClock, retention_s: float) -> None:
        """Named several times in one call, a result is kept as if named once; when it goes, it is counted once."""
        payload, result = b"p", b"result"
        await put(store, payload=b"other", delay_s=30 * DAY_S)
        task_id = await put_completed(store, payload=payload, result=result, result_ttl_s=60, retention_s=retention_s)
        until_ms = clock.now_ms() + round(HOUR_S * 1000)
        assert await store.retain(TENANT, [task_id] * 3, HOUR_S) == [until_ms] * 3
        await pass_time(store, clock, HOUR_S + 1)
        left = payload if retention_s > HOUR_S else b""
        assert (await assert_counts(store)).bytes == len(b"other") + len(left)
        await pass_time(store, clock, 10 * HOUR_S)
        assert (await assert_counts(store)).bytes == len(b"other")

    async def test_only_what_has_a_result(self, store: Store, clock: ManualClock) -> None:
        """None for what is unknown, not ended, or whose result is gone."""
        waiting = await put(store, delay_s=60)
        faded = await put_completed(store, result_ttl_s=10, retention_s=HOUR_S)
        fresh = await put_completed(store)
        await pass_time(store, clock, 11)
        until_ms = clock.now_ms() + 2 * DAY_S * 1000
        assert await store.retain(TENANT, [waiting, faded, fresh, new_id()], 2 * DAY_S) == [None, None, until_ms, None]

    async def test_failed_results_too(self, store: Store, clock: ManualClock) -> None:
        """The error of a dead letter is a result that can be kept."""
        await put(store)
        lease = await take(store)
        await fail(store, lease)
        assert await store.retain(TENANT, [lease.id], 20 * DAY_S) == [clock.now_ms() + 20 * DAY_S * 1000]
        await pass_time(store, clock, 19 * DAY_S)
        assert (await look(store, lease.id)).result == Result(Status.FAILED, error=BOOM, reason="FAILED")
