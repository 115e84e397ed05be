"""Start deadlines: a task that was not started in time ends CANCELLED, with reason EXPIRED."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import EventKind, Place, Status
from dibs.testing.contract.steps import (
    TENANT,
    assert_counts,
    complete,
    kinds_of,
    look,
    nothing_ready,
    pass_time,
    put,
    put_many,
    release,
    retry,
    sweep_all,
    take,
)


@pytest.mark.anyio
class TestDeadlines:
    """`expires_s` is about starting; `timeout_s` is the worker's business."""

    async def test_not_started_in_time(self, store: Store, clock: ManualClock) -> None:
        """The sweep ends it CANCELLED with reason EXPIRED, with a result, and counts it."""
        task_id = await put(store, expires_s=60)
        assert (await look(store, task_id)).expires_ms == clock.now_ms() + 60_000
        assert (await pass_time(store, clock, 61)).cancelled == 1
        task = await look(store, task_id)
        assert (task.status, task.place, task.reason) == (Status.CANCELLED, Place.NONE, "EXPIRED")
        assert task.result is not None
        assert (task.result.status, task.result.reason) == (Status.CANCELLED, "EXPIRED")
        assert await kinds_of(store, task_id) == [EventKind.ENQUEUED, EventKind.CANCELLED]
        assert (await assert_counts(store)).ready == 0

    async def test_claimable_until_the_deadline(self, store: Store, clock: ManualClock) -> None:
        """Just before the deadline it can still be started."""
        task_id = await put(store, expires_s=60)
        assert (await pass_time(store, clock, 59)).cancelled == 0
        assert (await take(store)).id == task_id

    async def test_not_claimable_after_the_deadline(self, store: Store, clock: ManualClock) -> None:
        """Too late is too late, also where no sweep came by; what is behind it is claimed instead."""
        late = await put(store, expires_s=60)
        ready = await put(store)
        clock.advance(61)
        assert (await take(store)).id == ready
        assert await nothing_ready(store)
        await sweep_all(store)
        assert (await look(store, late)).reason == "EXPIRED"
        await assert_counts(store)

    async def test_a_delayed_task_expires_too(self, store: Store, clock: ManualClock) -> None:
        """A deadline before the task is due ends it in its delay, and nothing is promoted later."""
        task_id = await put(store, delay_s=120, expires_s=60)
        assert (await pass_time(store, clock, 61)).cancelled == 1
        assert (await look(store, task_id)).status is Status.CANCELLED
        assert (await pass_time(store, clock, 120)).promoted == 0
        assert await nothing_ready(store)

    async def test_started_in_time_is_in_time(self, store: Store, clock: ManualClock) -> None:
        """A deadline that passes while the task runs means nothing."""
        task_id = await put(store, expires_s=60)
        lease = await take(store, lease_s=3600)
        assert (await pass_time(store, clock, 61)).cancelled == 0
        await complete(store, lease)
        assert (await look(store, task_id)).status is Status.COMPLETED

    async def test_started_once_is_started(self, store: Store, clock: ManualClock) -> None:
        """A task that was started in time may be tried again after its deadline."""
        task_id = await put(store, expires_s=60)
        await retry(store, await take(store), delay_s=120)
        assert (await pass_time(store, clock, 121)).cancelled == 0
        assert (await take(store)).id == task_id

    async def test_a_release_keeps_every_deadline(self, store: Store, clock: ManualClock) -> None:
        """What is given back untouched was not started: its deadline holds, and so do those of its whole batch."""
        ids = await put_many(store, 5, expires_s=60)
        for _ in range(2):
            await release(store, await take(store))
        assert (await pass_time(store, clock, 61)).cancelled == 5
        tasks = await store.get(TENANT, ids)
        assert [task.reason for task in tasks if task is not None] == ["EXPIRED"] * 5
        assert (await assert_counts(store)).ready == 0

    async def test_given_back_too_late_is_too_late(self, store: Store, clock: ManualClock) -> None:
        """A task that was given back untouched after its deadline was not started in time."""
        task_id = await put(store, expires_s=60)
        lease = await take(store, lease_s=600)
        assert (await pass_time(store, clock, 61)).cancelled == 0
        await release(store, lease)
        await sweep_all(store)
        task = await look(store, task_id)
        assert (task.status, task.reason) == (Status.CANCELLED, "EXPIRED")
        assert await nothing_ready(store)

    async def test_its_key_is_free_again(self, store: Store, clock: ManualClock) -> None:
        """An expired task is CANCELLED, and that frees the key."""
        first = await put(store, key="k", expires_s=60)
        await pass_time(store, clock, 61)
        assert await put(store, key="k") != first

    async def test_the_run_time_limit_is_handed_on(self, store: Store, clock: ManualClock) -> None:
        """`timeout_s` reaches the worker; the store does not act on it."""
        await put(store, timeout_s=5)
        lease = await take(store, lease_s=600)
        assert lease.timeout_s == 5
        assert (await pass_time(store, clock, 60)).expired == 0
        await complete(store, lease)
