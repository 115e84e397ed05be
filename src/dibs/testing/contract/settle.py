"""Settle: what completing, retrying, failing and releasing make of a task."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import (
    Already,
    ErrorInfo,
    Kind,
    Place,
    Result,
    Settled,
    Status,
)
from dibs.testing.contract.steps import (
    BOOM,
    TENANT,
    complete,
    fail,
    look,
    nothing_ready,
    put,
    release,
    retry,
    settle,
    take,
)


@pytest.mark.anyio
class TestSettle:
    """What each kind of settlement makes of a task."""

    async def test_complete(self, store: Store, clock: ManualClock) -> None:
        """The task is COMPLETED and its result is written with it."""
        task_id = await put(store)
        lease = await take(store, worker="w")
        clock.advance(3)
        await complete(store, lease, b"\x00\xff", codec="raw")
        task = await look(store, task_id)
        assert (task.status, task.place, task.ended_ms) == (Status.COMPLETED, Place.NONE, clock.now_ms())
        assert task.result == Result(Status.COMPLETED, b"\x00\xff", "raw")
        assert (task.attempts, task.worker, task.lease_end_ms) == (1, "w", None)
        assert await nothing_ready(store)

    async def test_fail(self, store: Store, clock: ManualClock) -> None:
        """The task is a dead letter at once, whatever attempts it has left, with its error."""
        task_id = await put(store)
        clock.advance(3)
        error = ErrorInfo("ValueError", "no such file", "Traceback ...\n")
        await fail(store, await take(store), error=error)
        task = await look(store, task_id)
        assert (task.status, task.place, task.ended_ms) == (Status.FAILED, Place.DEAD, clock.now_ms())
        assert (task.reason, task.error, task.attempts) == ("FAILED", error, 1)
        assert task.result == Result(Status.FAILED, error=error, reason="FAILED")

    async def test_fail_for_a_reason(self, store: Store) -> None:
        """The worker's word for why is kept."""
        task_id = await put(store)
        await fail(store, await take(store), reason="BAD_IMAGE")
        assert (await look(store, task_id)).reason == "BAD_IMAGE"

    async def test_retry_after_a_delay(self, store: Store, clock: ManualClock) -> None:
        """The task waits for the given delay, with its error, and without a result."""
        task_id = await put(store)
        await retry(store, await take(store), delay_s=90)
        task = await look(store, task_id)
        assert (task.status, task.place, task.due_ms) == (Status.PENDING, Place.DELAYED, clock.now_ms() + 90_000)
        assert (task.error, task.attempts) == (BOOM, 1)
        assert (task.result, task.ended_ms, task.lease_end_ms) == (None, None, None)

    async def test_retry_at_once(self, store: Store) -> None:
        """Without a delay the task is ready again, and the next delivery is counted."""
        task_id = await put(store)
        await retry(store, await take(store))
        assert (await look(store, task_id)).place is Place.READY
        assert (await take(store)).attempt == 2

    async def test_the_latest_error_is_kept(self, store: Store) -> None:
        """A task that is tried again tells what went wrong last."""
        task_id = await put(store)
        for error in (ErrorInfo("A", "first"), ErrorInfo("B", "second")):
            await settle(store, await take(store), Kind.RETRY, error=error)
            assert (await look(store, task_id)).error == error

    async def test_an_explicit_delay_is_not_capped(self, store: Store, clock: ManualClock) -> None:
        """A delay that is given is limited only by the horizon, not by a backoff policy."""
        task_id = await put(store)
        await retry(store, await take(store), delay_s=365 * 86_400)
        assert (await look(store, task_id)).due_ms == clock.now_ms() + 365 * 86_400_000

    async def test_retry_at_max_attempts_fails(self, store: Store) -> None:
        """The last attempt cannot be retried: the task is a dead letter with reason MAX_ATTEMPTS."""
        task_id = await put(store, max_attempts=1)
        lease = await take(store)
        assert await settle(store, lease, Kind.RETRY, delay_s=5, error=BOOM) == Settled(Status.FAILED)
        task = await look(store, task_id)
        assert (task.place, task.reason) == (Place.DEAD, "MAX_ATTEMPTS")
        assert task.result == Result(Status.FAILED, error=BOOM, reason="MAX_ATTEMPTS")
        assert await settle(store, lease, Kind.RETRY, delay_s=5, error=BOOM) == Already(Status.FAILED)

    async def test_release_returns_the_attempt(self, store: Store) -> None:
        """What is given back untouched was not an attempt."""
        task_id = await put(store)
        await release(store, await take(store))
        task = await look(store, task_id)
        assert (task.status, task.place) == (Status.PENDING, Place.READY)
        assert (task.attempts, task.releases, task.lease_end_ms) == (0, 1, None)
        assert (await take(store)).attempt == 1

    async def test_release_returns_only_its_own_attempt(self, store: Store) -> None:
        """Attempts that failed before are still counted after a release."""
        await put(store)
        await retry(store, await take(store))
        await release(store, await take(store))
        assert (await take(store)).attempt == 2

    async def test_the_twentieth_release_counts(self, store: Store) -> None:
        """Nineteen releases are free; from the twentieth on the attempt is not returned."""
        task_id = await put(store)
        for turn in range(1, 23):
            await release(store, await take(store))
            task = await look(store, task_id)
            assert (task.releases, task.attempts) == (turn, max(0, turn - 19))

    async def test_releases_end_too(self, store: Store) -> None:
        """A task that everybody gives back uses up its attempts at last, and is a dead letter."""
        task_id = await put(store, max_attempts=2)
        deliveries = 0
        while leases := await store.claim(TENANT, ["work"]):
            deliveries += 1
            assert deliveries <= 21, "released for ever"
            await settle(store, leases[0], Kind.RELEASE)
        assert deliveries == 21
        assert (await look(store, task_id)).status is Status.FAILED
