"""Cancel: at once where nobody works on it; otherwise the worker is told, and only a completion still wins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import (
    Already,
    ByKey,
    Cancelled,
    Cause,
    EventKind,
    Kind,
    LeaseLost,
    Place,
    Result,
    Settled,
    Status,
)
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    drain,
    kinds_of,
    look,
    nothing_ready,
    pass_time,
    put,
    put_completed,
    put_dead,
    put_many,
    settle,
    take,
    take_many,
)

AT_ONCE = Cancelled("cancelled", Status.CANCELLED)
CANCELLING = Cancelled("cancelling", Status.IN_PROGRESS)


@pytest.mark.anyio
class TestCancel:
    """What cancel answers and does, by the state it meets."""

    @pytest.mark.parametrize("delay_s", [0, 60], ids=["ready", "delayed"])
    async def test_waiting_is_gone_at_once(self, store: Store, clock: ManualClock, delay_s: float) -> None:
        """A task that nobody holds ends CANCELLED, with a result, and is never claimed or promoted."""
        task_id = await put(store, delay_s=delay_s)
        assert await store.cancel(TENANT, [task_id]) == [AT_ONCE]
        task = await look(store, task_id)
        assert (task.status, task.place, task.reason) == (Status.CANCELLED, Place.NONE, "CANCELLED")
        assert task.ended_ms == clock.now_ms()
        assert task.result is not None
        assert task.result.status is Status.CANCELLED
        total = await assert_counts(store)
        assert (total.ready, total.delayed) == (0, 0)
        assert (await pass_time(store, clock, 61)).promoted == 0
        assert await nothing_ready(store)

    async def test_in_progress_is_flagged(self, store: Store) -> None:
        """The task goes on until its worker learns of it; asking twice is the same as asking once."""
        task_id = await put(store)
        await take(store)
        for _ in range(2):
            assert await store.cancel(TENANT, [task_id]) == [CANCELLING]
        task = await look(store, task_id)
        assert (task.status, task.place, task.cancel_requested) == (Status.IN_PROGRESS, Place.LEASED, True)
        assert await kinds_of(store, task_id) == [EventKind.ENQUEUED, EventKind.CLAIMED, EventKind.CANCELLING]

    async def test_complete_still_wins(self, store: Store) -> None:
        """Work that was done is not thrown away."""
        task_id = await put(store)
        lease = await take(store)
        await store.cancel(TENANT, [task_id])
        await complete(store, lease, b"1")
        task = await look(store, task_id)
        assert (task.status, task.result) == (Status.COMPLETED, Result(Status.COMPLETED, b"1"))

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            (Kind.RETRY, {"error": BOOM}),
            (Kind.RETRY, {"delay_s": 60}),
            (Kind.FAIL, {"error": BOOM}),
            (Kind.RELEASE, {}),
        ],
        ids=["retry", "retry later", "fail", "release"],
    )
    async def test_any_other_end_is_cancelled(
        self, store: Store, clock: ManualClock, kind: Kind, fields: dict[str, Any]
    ) -> None:
        """Never a retry and never a dead letter: the task ends CANCELLED."""
        task_id = await put(store)
        lease = await take(store)
        await store.cancel(TENANT, [task_id])
        assert await settle(store, lease, kind, **fields) == Settled(Status.CANCELLED)
        assert await settle(store, lease, kind, **fields) == Already(Status.CANCELLED)
        task = await look(store, task_id)
        assert (task.status, task.place, task.reason) == (Status.CANCELLED, Place.NONE, "CANCELLED")
        assert task.result is not None
        assert task.result.status is Status.CANCELLED
        assert (await assert_counts(store)).dead == 0
        await pass_time(store, clock, 61)
        assert await nothing_ready(store)

    @pytest.mark.parametrize("max_attempts", [1, 5])
    async def test_expiry_is_cancelled_too(self, store: Store, clock: ManualClock, max_attempts: int) -> None:
        """A worker that dies before it could stop leaves a cancelled task, on any attempt."""
        task_id = await put(store, max_attempts=max_attempts)
        lease = await take(store)
        await store.cancel(TENANT, [task_id])
        await pass_time(store, clock, 31)
        task = await look(store, task_id)
        assert (task.status, task.place) == (Status.CANCELLED, Place.NONE)
        assert await nothing_ready(store)
        assert (await assert_counts(store)).dead == 0
        assert await settle(store, lease, Kind.COMPLETE) == LeaseLost(Cause.NOT_IN_PROGRESS)

    async def test_too_late(self, store: Store) -> None:
        """What has ended stays as it ended, and the answer says how."""
        done = await put_completed(store, result=b"1")
        dead = await put_dead(store)
        cancelled = await put(store)
        await store.cancel(TENANT, [cancelled])
        before = await store.get(TENANT, [done, dead, cancelled])
        assert await store.cancel(TENANT, [done, dead, cancelled]) == [
            Cancelled("ended", Status.COMPLETED),
            Cancelled("ended", Status.FAILED),
            Cancelled("ended", Status.CANCELLED),
        ]
        assert await store.get(TENANT, [done, dead, cancelled]) == before
        assert (await store.replay(TENANT, [dead])).ids == [dead]

    async def test_unknown(self, store: Store) -> None:
        """There is nothing to cancel under an id or key that nobody used."""
        assert await store.cancel(TENANT, [new_id(), ByKey(COMMAND, "k")]) == [Cancelled("unknown")] * 2

    async def test_by_key(self, store: Store) -> None:
        """Command and key name the task as well as its id."""
        task_id = await put(store, key="k")
        assert await store.cancel(TENANT, [ByKey(COMMAND, "k")]) == [AT_ONCE]
        assert (await look(store, task_id)).status is Status.CANCELLED

    async def test_a_batch_answers_in_order(self, store: Store) -> None:
        """One call may meet every state; the same task twice is found ended the second time."""
        held = await put(store)
        await take(store)
        waiting = await put(store)
        later = await put(store, delay_s=9)
        assert await store.cancel(TENANT, [waiting, new_id(), held, later, waiting]) == [
            AT_ONCE,
            Cancelled("unknown"),
            CANCELLING,
            AT_ONCE,
            Cancelled("ended", Status.CANCELLED),
        ]

    async def test_2500_at_once(self, store: Store) -> None:
        """A cancel of more than one transaction is split."""
        ids = await put_many(store, 2_500)
        assert await store.cancel(TENANT, ids) == [AT_ONCE] * 2_500
        assert await nothing_ready(store)
        assert (await assert_counts(store)).ready == 0

    async def test_against_a_claim_at_the_same_time(self, store: Store) -> None:
        """Either the task was gone, or its worker will be told; never both and never neither."""
        for task_id in [await put(store) for _ in range(10)]:
            [cancelled], leases = await asyncio.gather(
                store.cancel(TENANT, [task_id]), store.claim(TENANT, [COMMAND], limit=100)
            )
            held = task_id in {lease.id for lease in leases}
            assert cancelled == (CANCELLING if held else AT_ONCE)
            for lease in leases:
                await settle(store, lease, Kind.RELEASE)
        total = await assert_counts(store)
        assert (total.ready, total.leased) == (0, 0)

    async def test_the_flag_ends_with_the_task(self, store: Store) -> None:
        """A task that is put in again after a cancel is not born cancelled."""
        first = await put(store, key="k")
        lease = await take(store)
        await store.cancel(TENANT, [first])
        await settle(store, lease, Kind.RELEASE)
        second = await put(store, key="k")
        await complete(store, await take(store))
        task = await look(store, second)
        assert (task.status, task.cancel_requested) == (Status.COMPLETED, False)

    async def test_others_are_not_disturbed(self, store: Store) -> None:
        """Cancelling from the middle of a queue leaves the rest in it."""
        ids = await put_many(store, 9)
        await store.cancel(TENANT, ids[2:7:2])
        left = [task_id for task_id in ids if task_id not in ids[2:7:2]]
        assert sorted(await drain(store)) == sorted(left)

    async def test_of_several_holders_one_is_told(self, store: Store) -> None:
        """A cancel concerns one task, not all that its worker holds."""
        await put_many(store, 2)
        one, other = await take_many(store, 2, worker="w")
        await store.cancel(TENANT, [one.id])
        assert (await look(store, one.id)).cancel_requested
        assert not (await look(store, other.id)).cancel_requested
