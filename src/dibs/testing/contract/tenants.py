"""Tenants: another tenant's task does not exist, and no name leads into another's range."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import ByKey, Filter, Heartbeat, Kind, Place, QueueConfig, Settlement, WorkerInfo
from dibs.testing.contract.steps import (
    COMMAND,
    assert_counts,
    complete,
    drain,
    list_all,
    look,
    nothing_ready,
    pass_time,
    put,
    put_completed,
    put_dead,
    read_events,
    soon,
    take,
)

#: Every verb that takes an id or a key, as (store, tenant, id, token) → answer.
VERBS: dict[str, Callable[[Store, str, bytes, bytes], Awaitable[Any]]] = {
    "get": lambda store, tenant, task_id, _: store.get(tenant, [task_id]),
    "get by key": lambda store, tenant, _, __: store.get(tenant, [ByKey(COMMAND, "k")]),
    "cancel": lambda store, tenant, task_id, _: store.cancel(tenant, [task_id]),
    "cancel by key": lambda store, tenant, _, __: store.cancel(tenant, [ByKey(COMMAND, "k")]),
    "wait": lambda store, tenant, task_id, _: soon(store.wait(tenant, [task_id], 30)),
    "heartbeat": lambda store, tenant, task_id, token: store.heartbeat(
        [Heartbeat(tenant=tenant, id=task_id, token=token)]
    ),
    **{
        f"settle {kind}": lambda store, tenant, task_id, token, kind=kind: store.settle(  # type: ignore[misc]
            [Settlement(tenant=tenant, id=task_id, token=token, kind=kind)]
        )
        for kind in Kind
    },
    "retain": lambda store, tenant, task_id, _: store.retain(tenant, [task_id], 3600),
    "replay": lambda store, tenant, task_id, _: store.replay(tenant, [task_id]),
    "purge": lambda store, tenant, task_id, _: store.purge(tenant, [task_id]),
}
each_verb = pytest.mark.parametrize("verb", VERBS)

TRICKY_TENANTS = ["a", "a.", "a.b", "a-", "a_", "a.b.c", "ab", "0", "a" * 64, "a" * 63]
TRICKY_COMMANDS = ["x", "x.", "x.y", "x-", "x_", "X", "xy", "_", "x" * 128, "x" * 127]


@pytest.mark.anyio
class TestTenants:
    """Every verb is scoped to its tenant: same answer, same shape as for an id nobody used."""

    @each_verb
    async def test_a_held_task_of_another_does_not_exist(self, store: Store, verb: str) -> None:
        """With the id and even the token, another tenant reaches nothing."""
        task_id = await put(store, tenant="mine", key="k")
        lease = await take(store, tenant="mine")
        before = await look(store, task_id, tenant="mine")
        answer = await VERBS[verb](store, "other", task_id, lease.token)
        assert answer == await VERBS[verb](store, "other", new_id(), new_id())
        assert await look(store, task_id, tenant="mine") == before
        await complete(store, lease)

    @each_verb
    async def test_an_ended_task_of_another_does_not_exist(self, store: Store, verb: str) -> None:
        """Nor do results and dead letters."""
        for make in (put_completed, put_dead):
            task_id = await make(store, tenant="mine", key=None)
            before = await look(store, task_id, tenant="mine")
            answer = await VERBS[verb](store, "other", task_id, new_id())
            assert answer == await VERBS[verb](store, "other", new_id(), new_id())
            assert await look(store, task_id, tenant="mine") == before

    async def test_queues_are_the_tenants_own(self, store: Store) -> None:
        """Claims, listings, counts, pauses and workers of one tenant do not concern another."""
        task_id = await put(store, tenant="mine")
        await put_dead(store, "broken", tenant="mine")
        await store.register("mine", WorkerInfo(name="w"), 60)
        await store.configure("mine", COMMAND, QueueConfig(max_attempts=2))
        await store.configure("other", COMMAND, QueueConfig(paused=True))
        assert await nothing_ready(store, tenant="other")
        assert await list_all(store, tenant="other") == []
        total = (await store.stats("other")).total
        assert (total.ready, total.delayed, total.leased, total.dead, total.bytes) == (0,) * 5
        assert list(await store.workers("other")) == []
        assert (await store.configure("other", COMMAND)).max_attempts is None
        assert (await store.replay("other", Filter(place=Place.DEAD))).ids == []
        assert (await store.purge("other", Filter(place=Place.DEAD))).ids == []
        assert (await take(store, tenant="mine")).id == task_id
        assert (await assert_counts(store, tenant="mine")).dead == 1

    async def test_the_same_id_of_two_tenants_is_two_tasks(self, store: Store) -> None:
        """An id that another tenant used is free here."""
        task_id = new_id()
        for tenant in ("mine", "other"):
            assert await put(store, tenant=tenant, id=task_id, payload=tenant.encode()) == task_id
        await complete(store, await take(store, tenant="mine"))
        lease = await take(store, tenant="other")
        assert (lease.id, lease.payload) == (task_id, b"other")

    async def test_events_are_the_tenants_own(self, store: Store) -> None:
        """A tenant reads its own transitions; the operator reads all."""
        mine = await put(store, tenant="mine")
        other = await put(store, tenant="other")
        assert {event.id for event in await read_events(store, "mine")} == {mine}
        assert {event.id for event in await read_events(store, "other")} == {other}
        assert {(event.tenant, event.id) for event in await read_events(store, "*")} == {
            ("mine", mine),
            ("other", other),
        }

    async def test_similar_tenants_never_mix(self, store: Store) -> None:
        """A tenant whose name begins like another's, or ends in a separator, sees just its own."""
        ids = {tenant: await put(store, tenant=tenant, key="k") for tenant in TRICKY_TENANTS}
        for tenant, task_id in ids.items():
            assert [task.id for task in await list_all(store, tenant=tenant)] == [task_id]
            assert (await assert_counts(store, tenant=tenant)).ready == 1
            assert {event.id for event in await read_events(store, tenant)} == {task_id}
        for tenant, task_id in ids.items():
            assert await drain(store, tenant=tenant) == [task_id]

    async def test_similar_commands_never_mix(self, store: Store, clock: ManualClock) -> None:
        """The same for commands, ready, delayed, leased and dead; case counts."""
        for command in TRICKY_COMMANDS:
            await put_dead(store, command)
            await put(store, command, payload=command.encode())
            await put(store, command, payload=command.encode(), delay_s=60)
        by_command = {queue.command: queue for queue in (await store.stats("default")).queues}
        for command in TRICKY_COMMANDS:
            assert (by_command[command].ready, by_command[command].delayed, by_command[command].dead) == (1, 1, 1)
            listed = await list_all(store, Filter(command=command))
            assert [task.command for task in listed] == [command] * 3
            assert (await take(store, command)).payload == command.encode()
            assert await nothing_ready(store, command)
        swept = await pass_time(store, clock, 61)
        assert (swept.promoted, swept.expired) == (len(TRICKY_COMMANDS),) * 2
        for command in TRICKY_COMMANDS:
            assert len(await drain(store, command)) == 2
            assert len((await store.purge("default", Filter(command=command, place=Place.DEAD))).ids) == 1

    async def test_the_longest_names_fit(self, store: Store, clock: ManualClock) -> None:
        """Tenant, command, key and worker of the longest allowed length go through a whole life."""
        tenant, command, worker = "t" * 64, "c" * 128, "w" * 128
        await store.register(tenant, WorkerInfo(name=worker), 60)
        await store.configure(tenant, command, QueueConfig(lease_s=40))
        task_id = await put(store, command, tenant=tenant, key="k" * 512, delay_s=1, limit_key=None)
        clock.advance(1)
        await take(store, command, tenant=tenant, worker=worker)
        await pass_time(store, clock, 41)
        await complete(store, await take(store, command, tenant=tenant, worker=worker, claim_id=new_id()))
        assert (await look(store, task_id, tenant=tenant)).worker == worker
        await pass_time(store, clock, 2 * 86_400)
        assert await put(store, command, tenant=tenant, key="k" * 512) != task_id

    async def test_a_tenant_that_has_nothing_is_not_listed(self, store: Store, clock: ManualClock) -> None:
        """When all of a tenant's tasks are gone, so is the tenant."""
        await put_completed(store, tenant="passing")
        await put(store, tenant="staying")
        assert (await store.tenants()).tenants == ["passing", "staying"]
        await pass_time(store, clock, 2 * 86_400)
        assert (await store.tenants()).tenants == ["staying"]

    async def test_tenants_are_paged_by_name(self, store: Store) -> None:
        """The operator's list of tenants is in order, and paging names each once."""
        for tenant in TRICKY_TENANTS:
            await put(store, tenant=tenant)
        for limit in (1, 3, 100):
            names: list[str] = []
            cursor: str | None = None
            for _ in range(20):
                page = await store.tenants(cursor=cursor, limit=limit)
                assert len(page.tenants) <= limit
                names += page.tenants
                cursor = page.cursor
                if cursor is None:
                    break
            assert names == sorted(TRICKY_TENANTS)
