"""Tokens: the current one settles a lease once; anything else changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import (
    Already,
    Cause,
    Kind,
    LeaseLost,
    Result,
    Settled,
    Settlement,
    Status,
)
from dibs.testing.contract.steps import (
    BOOM,
    TENANT,
    assert_counts,
    complete,
    look,
    put,
    put_many,
    retry,
    settle,
    settlement,
    take,
    take_many,
)

KINDS: list[tuple[Kind, dict[str, Any], Status]] = [
    (Kind.COMPLETE, {"result": b"1"}, Status.COMPLETED),
    (Kind.RETRY, {"error": BOOM, "delay_s": 60}, Status.PENDING),
    (Kind.FAIL, {"error": BOOM}, Status.FAILED),
    (Kind.RELEASE, {}, Status.PENDING),
]
each_kind = pytest.mark.parametrize(("kind", "fields", "status"), KINDS, ids=[kind.value for kind, _, _ in KINDS])


@pytest.mark.anyio
class TestTokens:
    """Exactly one settlement per lease is accepted."""

    @each_kind
    async def test_a_made_up_token_changes_nothing(
        self, store: Store, kind: Kind, fields: dict[str, Any], status: Status
    ) -> None:
        """Without the token nobody settles, whatever the kind; the holder still can."""
        task_id = await put(store)
        lease = await take(store)
        before = await look(store, task_id)
        forged = Settlement(tenant=TENANT, id=task_id, token=new_id(), kind=kind, **fields)
        assert await store.settle([forged]) == [LeaseLost(Cause.OTHER_TOKEN)]
        assert await look(store, task_id) == before
        assert await settle(store, lease, kind, **fields) == Settled(status)

    @each_kind
    async def test_a_repeat_answers_already(
        self, store: Store, kind: Kind, fields: dict[str, Any], status: Status
    ) -> None:
        """The same token and kind again is the lost answer asked for again: nothing changes."""
        task_id = await put(store)
        lease = await take(store)
        assert await settle(store, lease, kind, **fields) == Settled(status)
        before = await look(store, task_id)
        for _ in range(2):
            assert await settle(store, lease, kind, **fields) == Already(status)
        assert await look(store, task_id) == before
        await assert_counts(store)

    @each_kind
    async def test_another_kind_is_not_a_repeat(
        self, store: Store, kind: Kind, fields: dict[str, Any], status: Status
    ) -> None:
        """A used token settles nothing in any other way."""
        task_id = await put(store)
        lease = await take(store)
        assert await settle(store, lease, kind, **fields) == Settled(status)
        before = await look(store, task_id)
        for other, other_fields, _ in KINDS:
            if other is not kind:
                assert await settle(store, lease, other, **other_fields) == LeaseLost(Cause.NOT_IN_PROGRESS)
        assert await look(store, task_id) == before

    @pytest.mark.parametrize("kind", [Kind.RETRY, Kind.RELEASE])
    async def test_a_repeat_is_recognised_after_the_next_claim(self, store: Store, kind: Kind) -> None:
        """The last settlement is remembered while somebody else holds the task, who is not disturbed."""
        task_id = await put(store)
        first = await take(store, worker="w")
        await settle(store, first, kind)
        second = await take(store, worker="w")
        before = await look(store, task_id)
        assert isinstance(await settle(store, first, kind), Already)
        assert await settle(store, first, Kind.COMPLETE, result=b"old") == LeaseLost(Cause.OTHER_TOKEN)
        assert await look(store, task_id) == before
        await complete(store, second, b"new")
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"new")

    async def test_an_older_settlement_never_acts_again(self, store: Store) -> None:
        """A settlement from two leases ago, repeated, is recognised or refused; it moves nothing."""
        task_id = await put(store)
        first = await take(store)
        await retry(store, first)
        await retry(store, await take(store))
        third = await take(store)
        before = await look(store, task_id)
        assert isinstance(await settle(store, first, Kind.RETRY, error=BOOM), Already | LeaseLost)
        assert await look(store, task_id) == before
        await complete(store, third)

    async def test_results_are_immutable(self, store: Store) -> None:
        """A stale worker overwrites neither a result nor a state that ended."""
        task_id = await put(store)
        lease = await take(store)
        await complete(store, lease, b"first")
        assert await settle(store, lease, Kind.COMPLETE, result=b"second") == Already(Status.COMPLETED)
        assert await settle(store, lease, Kind.FAIL, error=BOOM) == LeaseLost(Cause.NOT_IN_PROGRESS)
        assert (await look(store, task_id)).result == Result(Status.COMPLETED, b"first")

    async def test_good_after_the_deadline_until_taken_back(self, store: Store, clock: ManualClock) -> None:
        """Work that was done is accepted late, if nobody took the task back."""
        task_id = await put(store)
        lease = await take(store)
        clock.advance(3600)
        await complete(store, lease)
        assert (await look(store, task_id)).status is Status.COMPLETED

    async def test_an_unknown_task_is_lost(self, store: Store) -> None:
        """An id that nobody used cannot be settled."""
        for kind, fields, _ in KINDS:
            made_up = Settlement(tenant=TENANT, id=new_id(), token=new_id(), kind=kind, **fields)
            assert await store.settle([made_up]) == [LeaseLost(Cause.UNKNOWN)]

    async def test_a_waiting_task_is_not_in_progress(self, store: Store) -> None:
        """A task that nobody holds, or ever held, cannot be settled."""
        for task_id in (await put(store), await put(store, delay_s=9)):
            made_up = Settlement(tenant=TENANT, id=task_id, token=new_id(), kind=Kind.COMPLETE)
            assert await store.settle([made_up]) == [LeaseLost(Cause.NOT_IN_PROGRESS)]
            assert (await look(store, task_id)).status is Status.PENDING

    async def test_a_batch_answers_in_order(self, store: Store) -> None:
        """Every kind in one batch, a repeat and a contradiction among them: each gets its own answer."""
        await put_many(store, 4)
        leases = await take_many(store, 4)
        batch = [settlement(lease, kind, **fields) for lease, (kind, fields, _) in zip(leases, KINDS, strict=True)]
        batch += [batch[0], settlement(leases[0], Kind.FAIL)]
        assert await store.settle(batch) == [
            *(Settled(status) for _, _, status in KINDS),
            Already(Status.COMPLETED),
            LeaseLost(Cause.NOT_IN_PROGRESS),
        ]
        total = await assert_counts(store)
        assert (total.ready, total.delayed, total.leased, total.dead) == (1, 1, 0, 1)

    async def test_a_batch_over_the_transaction_size_is_split(self, store: Store) -> None:
        """2,500 settlements in one call are all accepted."""
        await put_many(store, 2_500)
        leases = [lease for limit in (1_000, 1_000, 500) for lease in await take_many(store, limit)]
        answers = await store.settle([settlement(lease, Kind.COMPLETE, result=b"1") for lease in leases])
        assert answers == [Settled(Status.COMPLETED)] * 2_500
        assert (await assert_counts(store)).leased == 0

    async def test_of_concurrent_repeats_one_is_accepted(self, store: Store) -> None:
        """The result that stands is that of the one settlement that was accepted."""
        task_id = await put(store)
        lease = await take(store)
        answers = await asyncio.gather(*(settle(store, lease, Kind.COMPLETE, result=b"%d" % n) for n in range(8)))
        accepted = [n for n, answer in enumerate(answers) if answer == Settled(Status.COMPLETED)]
        assert len(accepted) == 1
        assert answers.count(Already(Status.COMPLETED)) == 7
        result = (await look(store, task_id)).result
        assert result is not None
        assert result.data == b"%d" % accepted[0]

    async def test_of_concurrent_kinds_one_is_accepted(self, store: Store) -> None:
        """Different settlements of one lease at once: one wins, the others change nothing."""
        await put_many(store, 10)
        for lease in await take_many(store, 10):
            answers = await asyncio.gather(*(settle(store, lease, kind, **fields) for kind, fields, _ in KINDS))
            accepted = [answer for answer in answers if isinstance(answer, Settled)]
            assert len(accepted) == 1
            assert (await look(store, lease.id)).status is accepted[0].status
        await assert_counts(store)
