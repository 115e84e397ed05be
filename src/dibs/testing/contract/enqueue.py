"""Enqueue: what goes in stays in, once, as it was given."""

from __future__ import annotations

import asyncio

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import Enqueued, NewTask, Place, Status
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    assert_counts,
    drain,
    gone,
    look,
    nothing_ready,
    put,
    put_completed,
    put_dead,
    put_many,
    sweep_all,
    take,
)

EVERY_BYTE = bytes(range(256)) + b"\xff\xfe\x00\x80" + "é".encode("latin-1")


@pytest.mark.anyio
class TestEnqueue:
    """An acknowledged enqueue is one task, ready or delayed."""

    async def test_a_new_task_is_ready_with_the_defaults(self, store: Store, clock: ManualClock) -> None:
        """A task that says nothing but its command waits in its queue with the documented defaults."""
        task = await look(store, await put(store, payload=b"{}"))
        assert (task.command, task.payload, task.codec) == (COMMAND, b"{}", "json")
        assert (task.status, task.place) == (Status.PENDING, Place.READY)
        assert (task.priority, task.attempts, task.max_attempts, task.releases) == (0, 0, 5, 0)
        assert task.enqueued_ms == clock.now_ms()
        assert (task.key, task.worker, task.lease_end_ms, task.expires_ms, task.ended_ms) == (None,) * 5
        assert (task.result, task.reason, task.error, task.progress) == (None,) * 4
        assert not task.cancel_requested

    @pytest.mark.parametrize(
        "payload", [b"", b"\x00", EVERY_BYTE, "日本".encode()], ids=["empty", "nul", "all", "utf8"]
    )
    async def test_payloads_are_untouched(self, store: Store, payload: bytes) -> None:
        """Whatever the bytes are, `get` and `claim` return the same ones."""
        task_id = await put(store, payload=payload, codec="raw")
        assert (await look(store, task_id)).payload == payload
        lease = await take(store)
        assert (lease.payload, lease.codec) == (payload, "raw")

    async def test_a_payload_of_just_the_limit_is_accepted(self, store: Store) -> None:
        """The limit itself is allowed, and what is that large comes back whole."""
        payload = (EVERY_BYTE * 5_000)[: store.limits.payload_max_bytes]
        assert len(payload) == store.limits.payload_max_bytes
        await put(store, payload=payload, codec="raw")
        assert (await take(store)).payload == payload

    async def test_options_travel_to_the_worker(self, store: Store) -> None:
        """A lease carries what its worker needs to know of the task."""
        task_id = await put(
            store,
            priority=4,
            max_attempts=7,
            timeout_s=12.5,
            key="k",
            traceparent="00-ab-cd-01",
            limit_key="l",
            limit_cost=3,
        )
        lease = await take(store)
        assert (lease.id, lease.tenant, lease.command) == (task_id, TENANT, COMMAND)
        assert (lease.priority, lease.max_attempts, lease.timeout_s) == (4, 7, 12.5)
        assert (lease.key, lease.traceparent) == ("k", "00-ab-cd-01")
        task = await look(store, task_id)
        assert (task.priority, task.max_attempts, task.timeout_s) == (4, 7, 12.5)
        assert (task.key, task.traceparent) == ("k", "00-ab-cd-01")
        assert (task.limit_key, task.limit_cost) == ("l", 3)

    async def test_the_store_mints_missing_ids(self, store: Store) -> None:
        """A task without an id gets one of its own."""
        outcomes = await store.enqueue(TENANT, [NewTask(command=COMMAND) for _ in range(20)])
        ids = {outcome.id for outcome in outcomes if isinstance(outcome, Enqueued)}
        assert len(ids) == 20
        assert set(await drain(store)) == ids

    async def test_a_repeated_id_answers_already(self, store: Store) -> None:
        """An enqueue whose answer was lost can be repeated: nothing changes, also not the payload."""
        task_id = await put(store, payload=b"1")
        assert await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id, payload=b"2")]) == [
            Enqueued(task_id, already=True)
        ]
        assert (await take(store)).payload == b"1"
        assert await nothing_ready(store)
        assert (await assert_counts(store)).leased == 1

    async def test_a_repeated_id_in_another_queue_answers_already(self, store: Store) -> None:
        """An id names one task of the tenant, whatever command the repeat says."""
        task_id = await put(store, "first")
        assert await store.enqueue(TENANT, [NewTask(command="second", id=task_id)]) == [Enqueued(task_id, already=True)]
        assert await nothing_ready(store, "second")

    async def test_a_repeated_id_of_an_ended_task_does_not_run_again(self, store: Store) -> None:
        """`already` holds after the end: a late repeat neither runs a finished task nor revives a dead one."""
        for task_id in (await put_completed(store), await put_dead(store)):
            before = await look(store, task_id)
            assert await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id)]) == [
                Enqueued(task_id, already=True)
            ]
            assert await nothing_ready(store)
            assert await look(store, task_id) == before

    async def test_an_id_is_free_when_its_task_is_gone(self, store: Store, clock: ManualClock) -> None:
        """`already` is never said of a task that nobody can see: after its retention, swept or not, the id is new."""
        task_id = await put_completed(store, payload=b"old", result_ttl_s=60)
        clock.advance(61)
        assert await gone(store, task_id)
        assert await put(store, id=task_id, payload=b"new") == task_id
        await sweep_all(store)
        lease = await take(store)
        assert (lease.id, lease.payload, lease.attempt) == (task_id, b"new", 1)
        assert (await assert_counts(store)).bytes == 3

    async def test_an_id_twice_in_one_batch_is_one_task(self, store: Store) -> None:
        """The second of two equal ids in a batch answers already."""
        task_id = new_id()
        twice = [NewTask(command=COMMAND, id=task_id), NewTask(command=COMMAND, id=task_id)]
        assert await store.enqueue(TENANT, twice) == [Enqueued(task_id), Enqueued(task_id, already=True)]
        assert await drain(store) == [task_id]

    async def test_concurrent_repeats_of_an_id_make_one_task(self, store: Store) -> None:
        """However many send the same id at once, one of them enqueues it."""
        task_id = new_id()
        answers = await asyncio.gather(
            *(store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id)]) for _ in range(16))
        )
        assert (
            sorted(outcome.already for [outcome] in answers if isinstance(outcome, Enqueued)) == [False] + [True] * 15
        )
        assert await drain(store) == [task_id]

    async def test_an_empty_batch_is_no_work(self, store: Store) -> None:
        """Nothing in, nothing out."""
        assert await store.enqueue(TENANT, []) == []
        assert (await assert_counts(store)).ready == 0

    async def test_a_batch_may_name_several_queues(self, store: Store) -> None:
        """Each task of a batch goes to its own queue, and the answers keep the batch's order."""
        tasks = [NewTask(command=f"c{n % 3}", id=new_id(), payload=b"%d" % n) for n in range(9)]
        assert await store.enqueue(TENANT, tasks) == [Enqueued(task.id) for task in tasks]
        for n in range(3):
            assert set(await drain(store, f"c{n}")) == {task.id for task in tasks[n::3]}

    async def test_a_batch_over_the_transaction_size_is_split(self, store: Store) -> None:
        """2,500 tasks in one call all arrive, each once, in as many transactions as it takes."""
        ids = await put_many(store, 2_500, payload=b"x")
        assert (await assert_counts(store)).ready == 2_500
        assert sorted(await drain(store, limit=1_000)) == sorted(ids)

    async def test_a_batch_over_the_transaction_bytes_is_split(self, store: Store) -> None:
        """Payloads that are more than a transaction together arrive whole."""
        payloads = {new_id(): bytes((n,)) * 400_000 for n in range(6)}
        tasks = [NewTask(command=COMMAND, id=task_id, payload=data) for task_id, data in payloads.items()]
        assert await store.enqueue(TENANT, tasks) == [Enqueued(task_id) for task_id in payloads]
        leases = await store.claim(TENANT, [COMMAND], limit=10)
        assert {lease.id: lease.payload for lease in leases} == payloads
