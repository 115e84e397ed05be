"""Queues: paused and resumed, with defaults for what a task leaves open."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.retry import Backoff
from dibs.stores.protocol import Store
from dibs.task import Extended, Heartbeat, Place, QueueConfig, Result, Status
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    complete,
    gone,
    in_slot,
    look,
    nothing_ready,
    pass_time,
    put,
    put_completed,
    put_dead,
    soon,
    take,
    waiting,
)

PAUSED = QueueConfig(paused=True)


@pytest.mark.anyio
class TestQueues:
    """A queue needs no creation; its configuration is what it says."""

    async def test_a_new_queue_has_no_configuration(self, store: Store) -> None:
        """Asking tells the defaults and sets nothing."""
        assert await store.configure(TENANT, COMMAND) == QueueConfig()

    async def test_a_configuration_is_kept(self, store: Store) -> None:
        """What was set is returned, now and later, every field of it; the default takes it back."""
        config = QueueConfig(
            paused=True,
            priority=3,
            max_attempts=7,
            lease_s=90.5,
            result_ttl_s=60,
            retention_s=120,
            dead_retention_s=180,
            backoff=Backoff(kind="linear", base_s=2, cap_s=20, jitter="none"),
        )
        assert await store.configure(TENANT, COMMAND, config) == config
        assert await store.configure(TENANT, COMMAND) == config
        assert await store.configure(TENANT, "other") == QueueConfig()
        assert await store.configure(TENANT, COMMAND, QueueConfig()) == QueueConfig()
        assert await store.configure(TENANT, COMMAND) == QueueConfig()

    async def test_nothing_is_claimed_while_paused(self, store: Store) -> None:
        """A paused queue gives no leases; resumed it goes on as before."""
        first = await put(store, id=in_slot(7))
        await store.configure(TENANT, COMMAND, PAUSED)
        await put(store, id=in_slot(7))
        assert await nothing_ready(store)
        await store.configure(TENANT, COMMAND, QueueConfig())
        assert (await take(store)).id == first

    async def test_everything_else_goes_on_while_paused(self, store: Store, clock: ManualClock) -> None:
        """Tasks come in, are promoted, extended, completed and cancelled."""
        await put(store)
        lease = await take(store)
        await store.configure(TENANT, COMMAND, PAUSED)
        later = await put(store, delay_s=10)
        cancelled = await put(store)
        await store.cancel(TENANT, [cancelled])
        assert (await pass_time(store, clock, 10)).promoted == 1
        [beat] = await store.heartbeat([Heartbeat(tenant=TENANT, id=lease.id, token=lease.token)])
        assert isinstance(beat, Extended)
        await complete(store, lease)
        assert (await look(store, later)).place is Place.READY
        assert (await look(store, cancelled)).status is Status.CANCELLED
        assert await nothing_ready(store)

    async def test_leases_end_while_paused(self, store: Store, clock: ManualClock) -> None:
        """A pause does not keep dead workers' tasks from coming back."""
        await put(store)
        await take(store)
        await store.configure(TENANT, COMMAND, PAUSED)
        assert (await pass_time(store, clock, 31)).expired == 1

    async def test_other_queues_go_on(self, store: Store) -> None:
        """A claim that names a paused queue and another gets the other's tasks."""
        await store.configure(TENANT, "a", PAUSED)
        await put(store, "a")
        task_id = await put(store, "b")
        assert [lease.id for lease in await store.claim(TENANT, ["a", "b"], limit=5)] == [task_id]

    async def test_a_waiting_claim_gets_what_a_resume_frees(self, store: Store) -> None:
        """Who waits on a paused queue is served soon after it is resumed."""
        await store.configure(TENANT, COMMAND, PAUSED)
        task_id = await put(store)
        async with waiting(store.claim(TENANT, [COMMAND], wait_s=LONG_S)) as [claim]:
            assert not claim.done()
            await store.configure(TENANT, COMMAND, QueueConfig())
            [lease] = await soon(claim)
        assert lease.id == task_id

    async def test_defaults_for_what_a_task_leaves_open(self, store: Store) -> None:
        """Priority and attempts come from the queue unless the task says otherwise."""
        await store.configure(TENANT, COMMAND, QueueConfig(priority=6, max_attempts=2))
        open_task = await look(store, await put(store))
        assert (open_task.priority, open_task.max_attempts) == (6, 2)
        own = await look(store, await put(store, priority=0, max_attempts=9))
        assert (own.priority, own.max_attempts) == (0, 9)
        other = await look(store, await put(store, "other"))
        assert (other.priority, other.max_attempts) == (0, 5)

    async def test_defaults_of_retention(self, store: Store, clock: ManualClock) -> None:
        """Results, records and dead letters are kept as the queue says unless the task says otherwise."""
        await store.configure(TENANT, COMMAND, QueueConfig(result_ttl_s=60, retention_s=600, dead_retention_s=1_200))
        done = await put_completed(store, result=b"1")
        own = await put_completed(store, result=b"1", result_ttl_s=6_000, retention_s=6_000)
        dead = await put_dead(store)
        await pass_time(store, clock, 61)
        assert (await look(store, done)).result is None
        assert (await look(store, own)).result == Result(Status.COMPLETED, b"1")
        await pass_time(store, clock, 540)
        assert await gone(store, done)
        assert not await gone(store, dead)
        await pass_time(store, clock, 600)
        assert await gone(store, dead)
        assert not await gone(store, own)
