"""Deduplication: one key, one task, for as long as the first is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id, slot_of
from dibs.stores.protocol import Store
from dibs.task import ByKey, Duplicate, Enqueued, Kind, NewTask, Rejected, Result, Settled, Status
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    drain,
    fail,
    look,
    nothing_ready,
    pass_time,
    put,
    put_completed,
    put_dead,
    retry,
    settle,
    sweep_all,
    take,
)


async def again(store: Store, key: str = "k", **options: Any) -> Enqueued | Duplicate | Rejected:
    """Enqueues with a key that may be taken."""
    [outcome] = await store.enqueue(TENANT, [NewTask(command=COMMAND, key=key, **options)])
    return outcome


@pytest.mark.anyio
class TestDedup:
    """A second task with the same key is not made; the answer tells of the first."""

    async def test_the_first_is_returned_at_every_stage(self, store: Store) -> None:
        """The answer names the first task and how it stands: waiting, held, waiting again, completed."""
        first = await put(store, key="k", payload=b"1")
        assert await again(store, payload=b"2") == Duplicate(first, Status.PENDING)
        lease = await take(store)
        assert await again(store) == Duplicate(first, Status.IN_PROGRESS)
        await retry(store, lease)
        assert await again(store) == Duplicate(first, Status.PENDING)
        lease = await take(store)
        assert lease.payload == b"1"
        await complete(store, lease, b"42")
        assert await again(store) == Duplicate(first, Status.COMPLETED, Result(Status.COMPLETED, b"42"))
        assert await nothing_ready(store)

    async def test_a_delayed_first_is_a_first(self, store: Store) -> None:
        """A key is taken from the enqueue on, also by a task that is not due yet."""
        first = await put(store, key="k", delay_s=60)
        assert await again(store) == Duplicate(first, Status.PENDING)
        assert await nothing_ready(store)

    async def test_no_result_is_a_cached_result_too(self, store: Store) -> None:
        """A task that returned nothing answers its repeats with that."""
        first = await put_completed(store, key="k", result=None)
        assert await again(store) == Duplicate(first, Status.COMPLETED, Result(Status.COMPLETED))

    async def test_a_dead_first_is_returned(self, store: Store) -> None:
        """Unless told to replay it, a repeat gets the dead letter's error and runs nothing."""
        first = await put_dead(store, key="k")
        expected = Result(Status.FAILED, error=BOOM, reason="FAILED")
        assert await again(store) == Duplicate(first, Status.FAILED, expected)
        assert await nothing_ready(store)

    async def test_32_at_once_make_one(self, store: Store) -> None:
        """Of concurrent enqueues with one key exactly one makes a task; the others are told of it."""
        answers = await asyncio.gather(*(again(store, payload=b"%d" % n) for n in range(32)))
        made = [answer for answer in answers if isinstance(answer, Enqueued)]
        assert len(made) == 1
        assert answers.count(Duplicate(made[0].id, Status.PENDING)) == 31
        assert await drain(store) == [made[0].id]

    async def test_32_in_one_batch_make_one(self, store: Store) -> None:
        """A batch deduplicates within itself."""
        answers = await store.enqueue(TENANT, [NewTask(command=COMMAND, key="k") for _ in range(32)])
        assert isinstance(answers[0], Enqueued)
        assert answers[1:] == [Duplicate(answers[0].id, Status.PENDING)] * 31
        assert (await assert_counts(store)).ready == 1

    async def test_keys_belong_to_tenant_and_command(self, store: Store) -> None:
        """The same key of another command or tenant is another key, however the names run together."""
        queues = [("a", "b"), ("a", "b.c"), ("ab", "b"), ("ab", "c"), ("a", "bc"), ("b", "a")]
        ids = [await put(store, command, tenant=tenant, key="k") for tenant, command in queues]
        assert len(set(ids)) == len(queues)
        for (tenant, command), task_id in zip(queues, ids, strict=True):
            assert (await take(store, command, tenant=tenant)).id == task_id

    @pytest.mark.parametrize(
        ("one", "other"),
        [("a", "a:b"), ("a", "a\x00"), ("a/b", "a:b"), ("x", "X"), ("é", "e\u0301"), ("k" * 512, "k" * 511)],
    )
    async def test_different_keys_are_different(self, store: Store, one: str, other: str) -> None:
        """Keys are compared as they are: no separators, no case, no normal forms."""
        first = await put(store, key=one)
        second = await put(store, key=other)
        assert await again(store, one) == Duplicate(first, Status.PENDING)
        assert await again(store, other) == Duplicate(second, Status.PENDING)
        assert (await look(store, first)).key == one

    async def test_a_task_is_found_by_its_key(self, store: Store) -> None:
        """`get` takes command and key instead of an id; what nobody used is not there."""
        task_id = await put(store, key="k")
        found = await store.get(TENANT, [ByKey(COMMAND, "k"), ByKey(COMMAND, "other"), ByKey("other", "k"), task_id])
        assert found == [await look(store, task_id), None, None, await look(store, task_id)]
        assert await store.get("other", [ByKey(COMMAND, "k")]) == [None]

    async def test_minted_ids_are_in_the_slot_of_their_key(self, store: Store) -> None:
        """A store that mints the id of a keyed task puts it where every repeat will look."""
        task_id = await put(store, key="k")
        assert slot_of(task_id) == slot_of(new_id(TENANT, COMMAND, "k"))

    async def test_a_keyed_id_in_another_slot_is_rejected(self, store: Store) -> None:
        """Written in one shard and looked up in another, a key would not deduplicate: it is not accepted."""
        right = new_id(TENANT, COMMAND, "k")
        wrong = right[:-1] + bytes((right[-1] ^ 1,))
        outcome = await again(store, id=wrong)
        assert isinstance(outcome, Rejected)
        assert outcome.code == "invalid_name"
        assert await again(store, id=right) == Enqueued(right)

    async def test_the_id_is_checked_before_the_key(self, store: Store) -> None:
        """A repeated call is recognised as such, not taken for somebody else's duplicate."""
        task_id = new_id(TENANT, COMMAND, "k")
        assert await again(store, id=task_id) == Enqueued(task_id)
        assert await again(store, id=task_id) == Enqueued(task_id, already=True)

    async def test_a_duplicate_does_not_use_up_its_id(self, store: Store) -> None:
        """The id of a task that was not made is still free, in the same batch and later."""
        holder = await put(store, key="k")
        task_id = new_id(TENANT, COMMAND, "k")
        tasks = [NewTask(command=COMMAND, id=task_id, key="k"), NewTask(command=COMMAND, id=task_id)]
        assert await store.enqueue(TENANT, tasks) == [Duplicate(holder, Status.PENDING), Enqueued(task_id)]

    async def test_the_id_counts_even_if_another_has_the_key(self, store: Store) -> None:
        """An id that exists answers already, whoever holds the key it is repeated with."""
        task_id = new_id(TENANT, COMMAND, "k")
        await put(store, id=task_id)
        holder = await put(store, key="k")
        assert await again(store, id=task_id) == Enqueued(task_id, already=True)
        assert await again(store) == Duplicate(holder, Status.PENDING)


@pytest.mark.anyio
class TestFreedKeys:
    """A key is free again when its task is cancelled, purged or no longer kept, and not before."""

    async def test_cancelled_frees(self, store: Store) -> None:
        """After a cancel the key makes a new task, and the old payload never runs."""
        old = await put(store, key="k", payload=b"old")
        await store.cancel(TENANT, [old])
        new = await put(store, key="k", payload=b"new")
        assert new != old
        lease = await take(store)
        assert (lease.id, lease.payload) == (new, b"new")
        assert await nothing_ready(store)

    async def test_a_cancelled_delayed_task_frees(self, store: Store, clock: ManualClock) -> None:
        """The same for one that was not due: it does not come back when it would have been."""
        old = await put(store, key="k", delay_s=60)
        await store.cancel(TENANT, [ByKey(COMMAND, "k")])
        new = await put(store, key="k", delay_s=60)
        await pass_time(store, clock, 60)
        assert await drain(store) == [new]
        assert (await look(store, old)).status is Status.CANCELLED

    async def test_cancelling_does_not_free_yet(self, store: Store) -> None:
        """While the worker has not stopped the key is taken; once the task ended CANCELLED it is free."""
        first = await put(store, key="k")
        lease = await take(store)
        await store.cancel(TENANT, [first])
        assert await again(store) == Duplicate(first, Status.IN_PROGRESS)
        assert await settle(store, lease, Kind.RELEASE) == Settled(Status.CANCELLED)
        assert await put(store, key="k") != first

    async def test_purged_frees(self, store: Store) -> None:
        """A purge removes the task and its key."""
        first = await put_dead(store, key="k")
        assert (await store.purge(TENANT, [first])).ids == [first]
        assert await put(store, key="k") != first

    async def test_purging_an_old_task_does_not_free_its_successors_key(self, store: Store) -> None:
        """A key is freed only by the task that it points to."""
        old = await put(store, key="k")
        await store.cancel(TENANT, [old])
        new = await put(store, key="k")
        assert (await store.purge(TENANT, [old])).ids == [old]
        assert await again(store) == Duplicate(new, Status.PENDING)

    async def test_pruning_an_old_task_does_not_free_its_successors_key(self, store: Store, clock: ManualClock) -> None:
        """Retention frees a key no more than a purge if the key moved on."""
        old = await put(store, key="k")
        await store.cancel(TENANT, [old])
        new = await put(store, key="k", delay_s=7 * 86_400)
        await pass_time(store, clock, 3 * 86_400)
        assert await store.get(TENANT, [old]) == [None]
        assert await again(store) == Duplicate(new, Status.PENDING)

    async def test_kept_while_the_task_is_kept(self, store: Store, clock: ManualClock) -> None:
        """A completed task holds its key for its retention, then the key makes a new task."""
        first = await put_completed(store, key="k", result_ttl_s=60, retention_s=3600)
        await pass_time(store, clock, 3500)
        assert await again(store) == Duplicate(first, Status.COMPLETED)
        await pass_time(store, clock, 200)
        assert await put(store, key="k") != first

    async def test_free_before_the_sweep_and_after(self, store: Store, clock: ManualClock) -> None:
        """Time frees the key, not the sweep; one that comes late removes the old task and not the new one's key."""
        old = await put_completed(store, key="k", result_ttl_s=60)
        clock.advance(61)
        new = await put(store, key="k", delay_s=60)
        assert new != old
        await sweep_all(store)
        assert await again(store) == Duplicate(new, Status.PENDING)

    async def test_an_old_id_is_cleared_away_once(self, store: Store, clock: ManualClock) -> None:
        """An id whose task is gone but not swept, named twice while another task has its key: two duplicates, and what
        was left of the old task is counted out once."""
        old = await put_completed(store, key="k", payload=b"old", result_ttl_s=10)
        clock.advance(11)
        new = await put(store, key="k", payload=b"new!")
        again = NewTask(command=COMMAND, id=old, key="k", payload=b"again")
        assert await store.enqueue(TENANT, [again, again]) == [Duplicate(new, Status.PENDING)] * 2
        await sweep_all(store)
        total = await assert_counts(store)
        assert (total.ready, total.bytes) == (1, len(b"new!"))

    async def test_a_dead_letter_holds_its_key_for_14_days(self, store: Store, clock: ManualClock) -> None:
        """As long as it can be replayed, nothing else takes its key."""
        first = await put_dead(store, key="k")
        await pass_time(store, clock, 13.9 * 86_400)
        outcome = await again(store)
        assert isinstance(outcome, Duplicate)
        assert (outcome.id, outcome.status) == (first, Status.FAILED)
        await pass_time(store, clock, 0.2 * 86_400)
        assert await put(store, key="k") != first

    async def test_what_is_not_kept_frees_at_completion(self, store: Store) -> None:
        """With `keep=False` the key goes when the task completes."""
        first = await put(store, key="k", keep=False)
        lease = await take(store)
        assert await again(store) == Duplicate(first, Status.IN_PROGRESS)
        await complete(store, lease)
        assert await put(store, key="k") != first


@pytest.mark.anyio
class TestReplayDead:
    """`on_duplicate="replay_dead"` revives a dead first task."""

    async def test_revives_a_dead_one(self, store: Store) -> None:
        """The first task is ready again with its own payload and no attempts used; its key stays taken."""
        first = await put_dead(store, key="k", payload=b"1")
        assert await again(store, payload=b"2", on_duplicate="replay_dead") == Duplicate(
            first, Status.PENDING, replayed=True
        )
        lease = await take(store)
        assert (lease.id, lease.payload, lease.attempt) == (first, b"1", 1)
        assert await again(store, on_duplicate="replay_dead") == Duplicate(first, Status.IN_PROGRESS)
        await complete(store, lease)
        assert await nothing_ready(store)

    async def test_leaves_others_alone(self, store: Store) -> None:
        """A first task that waits or completed is returned, never run again."""
        first = await put(store, key="k")
        assert await again(store, on_duplicate="replay_dead") == Duplicate(first, Status.PENDING)
        await complete(store, await take(store), b"1")
        assert await again(store, on_duplicate="replay_dead") == Duplicate(
            first, Status.COMPLETED, Result(Status.COMPLETED, b"1")
        )
        assert await nothing_ready(store)

    async def test_a_free_key_is_an_enqueue(self, store: Store) -> None:
        """Without a first task it makes no difference."""
        outcome = await again(store, on_duplicate="replay_dead")
        assert isinstance(outcome, Enqueued)
        await fail(store, await take(store))

    async def test_twice_in_one_batch_revives_once(self, store: Store) -> None:
        """The second of two revivals in a batch finds the task alive."""
        first = await put_dead(store, key="k")
        twice = [NewTask(command=COMMAND, key="k", on_duplicate="replay_dead") for _ in range(2)]
        assert await store.enqueue(TENANT, twice) == [
            Duplicate(first, Status.PENDING, replayed=True),
            Duplicate(first, Status.PENDING),
        ]
        assert await drain(store) == [first]
        await assert_counts(store)

    async def test_of_concurrent_revivals_one_revives(self, store: Store) -> None:
        """The dead letter is replayed once, and delivered once."""
        first = await put_dead(store, key="k")
        answers = await asyncio.gather(*(again(store, on_duplicate="replay_dead") for _ in range(8)))
        assert all(isinstance(answer, Duplicate) and answer.id == first for answer in answers)
        assert [isinstance(answer, Duplicate) and answer.replayed for answer in answers].count(True) == 1
        assert await drain(store) == [first]
        assert (await assert_counts(store)).dead == 0
