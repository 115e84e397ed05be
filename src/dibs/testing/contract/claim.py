"""Claim: each task to one worker at a time, counted, and repeatable by its claim id."""

from __future__ import annotations

import asyncio

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import CLAIM_MAX_BYTES, Heartbeat, Kind, NewTask, Place, QueueConfig, Settled, Status
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    complete,
    drain,
    load,
    look,
    nothing_ready,
    pass_time,
    put,
    put_many,
    release,
    retry,
    settle,
    take,
    take_many,
)


@pytest.mark.anyio
class TestClaim:
    """A claim takes ready tasks under leases; nobody else gets them meanwhile."""

    async def test_nothing_ready_is_an_empty_answer(self, store: Store) -> None:
        """A queue that is empty, or was never heard of, gives no leases."""
        assert await store.claim(TENANT, ["never.heard.of"]) == []

    async def test_never_more_than_the_limit(self, store: Store) -> None:
        """A claim takes one task unless told otherwise, and never more than its limit."""
        await put_many(store, 10)
        assert len(await store.claim(TENANT, [COMMAND])) == 1
        assert len(await store.claim(TENANT, [COMMAND], limit=4)) == 4
        assert len(await store.claim(TENANT, [COMMAND], limit=1_000)) == 5

    async def test_large_payloads_come_a_few_at_a_time(self, store: Store) -> None:
        """A claim holds a bounded number of bytes, and one task in any case; the next go on with the rest."""
        large = 1 << 20
        ids = await put_many(store, 2 * CLAIM_MAX_BYTES // large + 3, payload=b"x" * large)
        ids += await load(store, *([NewTask(command=COMMAND, payload=b"y" * large)] for _ in range(12)))
        found: list[bytes] = []
        while leases := await store.claim(TENANT, [COMMAND, "other"], limit=1_000):
            # From several shards, each of which looks to its own part.
            assert sum(len(lease.payload) for lease in leases) < 2 * (CLAIM_MAX_BYTES + large)
            found += [lease.id for lease in leases]
        assert sorted(found) == sorted(ids)

    async def test_a_lease_tells_all(self, store: Store, clock: ManualClock) -> None:
        """The lease says what it is for, until when, and the how manieth delivery it is."""
        enqueued_ms = clock.now_ms()
        task_id = await put(store, payload=b"p", codec="msgpack")
        clock.advance(7)
        lease = await take(store, worker="w1")
        assert (lease.tenant, lease.id, lease.command) == (TENANT, task_id, COMMAND)
        assert (lease.payload, lease.codec, lease.priority) == (b"p", "msgpack", 0)
        assert (lease.attempt, lease.max_attempts) == (1, 5)
        assert (lease.lease_s, lease.lease_end_ms) == (30.0, clock.now_ms() + 30_000)
        assert lease.enqueued_ms == enqueued_ms
        assert (lease.timeout_s, lease.key, lease.traceparent) == (None, None, None)
        assert len(lease.token) == 16

    async def test_a_claimed_task_is_in_progress(self, store: Store, clock: ManualClock) -> None:
        """From the claim on, the task says who holds it and until when; the attempt is counted already."""
        task_id = await put(store)
        await take(store, worker="w1")
        task = await look(store, task_id)
        assert (task.status, task.place) == (Status.IN_PROGRESS, Place.LEASED)
        assert (task.worker, task.lease_end_ms) == ("w1", clock.now_ms() + 30_000)
        assert task.attempts == 1

    async def test_held_tasks_are_not_given_again(self, store: Store) -> None:
        """What one worker holds, no other gets, also not the same worker in another claim."""
        await put(store)
        await take(store, worker="w1")
        assert await store.claim(TENANT, [COMMAND], worker="w2") == []
        assert await store.claim(TENANT, [COMMAND], worker="w1") == []

    async def test_every_claim_has_a_new_token(self, store: Store) -> None:
        """Tokens differ between tasks and between claims of one task, also by the same worker."""
        await put_many(store, 5)
        tokens = set()
        for _ in range(4):
            for lease in await take_many(store, 5, worker="w"):
                tokens.add(lease.token)
                await retry(store, lease)
        assert len(tokens) == 20

    @pytest.mark.parametrize(
        ("given", "expected_s"),
        [
            ((None, None, None), 30),
            ((None, None, 300), 300),
            ((None, None, 1.001), 1.001),
            ((None, 60, 300), 60),
            ((10, 60, 300), 10),
            ((10, None, None), 10),
            ((1, None, None), 1),
            ((43_200, None, None), 43_200),
        ],
    )
    async def test_whose_lease_counts(
        self,
        store: Store,
        clock: ManualClock,
        given: tuple[float | None, float | None, float | None],
        expected_s: float,
    ) -> None:
        """The claim's lease counts, else the task's, else the queue's, else 30 s; 1 s to 12 h are allowed."""
        claim_s, task_s, queue_s = given
        await store.configure(TENANT, COMMAND, QueueConfig(lease_s=queue_s))
        task_id = await put(store, lease_s=task_s)
        lease = await take(store, lease_s=claim_s)
        assert lease.lease_s == expected_s
        assert lease.lease_end_ms == clock.now_ms() + round(expected_s * 1000)
        assert (await look(store, task_id)).lease_end_ms == lease.lease_end_ms

    @pytest.mark.parametrize("max_attempts", [1, 2, None])
    async def test_a_worker_that_never_settles_gets_exactly_max_attempts(
        self, store: Store, clock: ManualClock, max_attempts: int | None
    ) -> None:
        """A task that kills its worker is delivered max_attempts times, then it is a dead letter."""
        task_id = await put(store, max_attempts=max_attempts)
        expected = max_attempts or 5
        for attempt in range(1, expected + 1):
            assert (await take(store)).attempt == attempt
            await pass_time(store, clock, 31)
        assert await nothing_ready(store)
        task = await look(store, task_id)
        assert (task.status, task.place, task.attempts) == (Status.FAILED, Place.DEAD, expected)
        assert task.reason == "LEASE_EXPIRED"

    @pytest.mark.parametrize("max_attempts", [1, 2, None])
    async def test_retries_get_exactly_max_attempts(self, store: Store, max_attempts: int | None) -> None:
        """A task that always fails is delivered max_attempts times; the last retry makes it a dead letter."""
        task_id = await put(store, max_attempts=max_attempts)
        expected = max_attempts or 5
        for attempt in range(1, expected + 1):
            lease = await take(store)
            assert lease.attempt == attempt
            outcome = await settle(store, lease, Kind.RETRY, error=BOOM)
            assert outcome == Settled(Status.FAILED if attempt == expected else Status.PENDING)
        assert await nothing_ready(store)
        task = await look(store, task_id)
        assert (task.place, task.attempts, task.reason) == (Place.DEAD, expected, "MAX_ATTEMPTS")

    async def test_retries_and_expiries_count_alike(self, store: Store, clock: ManualClock) -> None:
        """However an attempt ended, it is one of max_attempts."""
        await put(store, max_attempts=4)
        attempts = []
        for turn in range(4):
            lease = await take(store)
            attempts.append(lease.attempt)
            if turn % 2:
                await pass_time(store, clock, 31)
            else:
                await retry(store, lease, delay_s=1)
                clock.advance(1)
        assert attempts == [1, 2, 3, 4]
        assert await nothing_ready(store)


@pytest.mark.anyio
class TestClaimId:
    """A claim whose answer was lost is repeated with the same claim id."""

    async def test_a_repeat_returns_the_same_leases(self, store: Store) -> None:
        """The repeat takes nothing more and counts no attempt, although more is ready."""
        await put_many(store, 6)
        claim_id = new_id()
        first = await store.claim(TENANT, [COMMAND], limit=3, claim_id=claim_id, worker="w")
        assert len(first) == 3
        again = await store.claim(TENANT, [COMMAND], limit=3, claim_id=claim_id, worker="w")
        assert {lease.id: lease for lease in again} == {lease.id: lease for lease in first}
        assert len(await drain(store)) == 3

    async def test_another_claim_id_takes_other_tasks(self, store: Store) -> None:
        """Only the same claim id is a repeat."""
        await put_many(store, 2)
        first = await take(store, claim_id=new_id())
        second = await take(store, claim_id=new_id())
        assert first.id != second.id

    async def test_a_repeat_leaves_out_what_was_settled(self, store: Store) -> None:
        """Of three leases one was settled: the repeat returns the two that live."""
        await put_many(store, 3)
        claim_id = new_id()
        leases = await take_many(store, 3, claim_id=claim_id)
        await complete(store, leases[1])
        again = await store.claim(TENANT, [COMMAND], limit=3, claim_id=claim_id)
        assert {lease.token for lease in again} == {leases[0].token, leases[2].token}

    async def test_a_repeat_leaves_out_what_was_taken_back(self, store: Store, clock: ManualClock) -> None:
        """A lease that expired, and that somebody else has now, is not returned to the first claimer."""
        await put(store)
        claim_id = new_id()
        await take(store, claim_id=claim_id, worker="w1")
        await pass_time(store, clock, 31)
        other = await take(store, worker="w2")
        assert await store.claim(TENANT, [COMMAND], claim_id=claim_id, worker="w1") == []
        await complete(store, other)

    async def test_a_repeat_never_returns_anothers_lease(self, store: Store) -> None:
        """A task that was given back and claimed by somebody else is not part of the first claim any more."""
        await put(store)
        claim_id = new_id()
        await release(store, await take(store, claim_id=claim_id, worker="w1"))
        other = await take(store, worker="w2")
        assert await store.claim(TENANT, [COMMAND], claim_id=claim_id, worker="w1") == []
        await complete(store, other)

    async def test_a_repeat_never_returns_a_dead_token(self, store: Store, clock: ManualClock) -> None:
        """A task that was given back may be claimed again with the same claim id, but not under its old lease."""
        await put(store)
        claim_id = new_id()
        first = await take(store, claim_id=claim_id)
        await pass_time(store, clock, 31)
        for lease in await store.claim(TENANT, [COMMAND], claim_id=claim_id):
            assert lease.token != first.token
            assert lease.attempt == 2

    async def test_an_extended_lease_is_still_returned(self, store: Store, clock: ManualClock) -> None:
        """A lease lives as long as it is extended, and the repeat tells its present end."""
        await put(store)
        claim_id = new_id()
        lease = await take(store, claim_id=claim_id)
        clock.advance(20)
        await store.heartbeat([Heartbeat(tenant=TENANT, id=lease.id, token=lease.token)])
        await pass_time(store, clock, 20)
        again = await take(store, claim_id=claim_id)
        assert again.token == lease.token
        assert again.lease_end_ms == lease.lease_end_ms + 20_000

    async def test_an_empty_answer_is_not_remembered(self, store: Store) -> None:
        """A claim that found nothing may be repeated until it finds something."""
        claim_id = new_id()
        assert await store.claim(TENANT, [COMMAND], claim_id=claim_id) == []
        task_id = await put(store)
        assert (await take(store, claim_id=claim_id)).id == task_id

    async def test_concurrent_repeats_are_one_claim(self, store: Store) -> None:
        """A repeat that overtakes its first call does not take other tasks."""
        await put_many(store, 8)
        claim_id = new_id()
        answers = await asyncio.gather(
            *(store.claim(TENANT, [COMMAND], limit=2, claim_id=claim_id, worker="w") for _ in range(4))
        )
        assert len({lease.token for leases in answers for lease in leases}) == 2
        assert len(await drain(store)) == 6

    async def test_tenants_do_not_share_claim_ids(self, store: Store) -> None:
        """The same claim id of another tenant is another claim."""
        claim_id = new_id()
        mine = await put(store, tenant="a")
        theirs = await put(store, tenant="b")
        assert (await take(store, tenant="a", claim_id=claim_id)).id == mine
        assert (await take(store, tenant="b", claim_id=claim_id)).id == theirs
        assert (await take(store, tenant="a", claim_id=claim_id)).id == mine
