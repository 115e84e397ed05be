"""Listings: what matches, each once, a bounded page at a time."""

from __future__ import annotations

from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.errors import InvalidCursor
from dibs.stores.protocol import Store
from dibs.task import Filter, Kind, Place, Status
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    drain,
    fail,
    list_all,
    look,
    put,
    put_completed,
    put_dead,
    put_many,
    settle,
    take,
    take_many,
)


async def one_of_each(store: Store) -> dict[str, bytes]:
    """Makes one task in every state, in two queues; ready comes last so that it stays so."""
    ids = {
        "completed": await put_completed(store, "a"),
        "failed": await put_dead(store, "a"),
        "bad": await put_dead(store, "b", reason="BAD"),
        "delayed": await put(store, "a", delay_s=60),
        "cancelled": await put(store, "b"),
        "ready": b"",
        "held": await put(store, "a"),
    }
    await store.cancel(TENANT, [ids["cancelled"]])
    await take(store, "a", worker="w1")
    ids["held b"] = await put(store, "b")
    await take(store, "b", worker="w2")
    ids["ready"] = await put(store, "a")
    return ids


@pytest.mark.anyio
class TestListing:
    """`list` returns tasks of one tenant that match a filter."""

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, "completed failed bad delayed cancelled ready held held_b"),
            ({"command": "a"}, "completed failed delayed ready held"),
            ({"command": "none"}, ""),
            ({"status": Status.PENDING}, "delayed ready"),
            ({"status": Status.IN_PROGRESS}, "held held_b"),
            ({"status": Status.COMPLETED}, "completed"),
            ({"status": Status.FAILED}, "failed bad"),
            ({"status": Status.CANCELLED}, "cancelled"),
            ({"place": Place.READY}, "ready"),
            ({"place": Place.DELAYED}, "delayed"),
            ({"place": Place.LEASED}, "held held_b"),
            ({"place": Place.DEAD}, "failed bad"),
            ({"place": Place.NONE}, "completed cancelled"),
            ({"reason": "BAD"}, "bad"),
            ({"reason": "CANCELLED"}, "cancelled"),
            ({"worker": "w2"}, "held_b"),
            ({"command": "b", "status": Status.FAILED}, "bad"),
            ({"command": "a", "place": Place.LEASED, "worker": "w1"}, "held"),
            ({"command": "a", "place": Place.LEASED, "worker": "w2"}, ""),
            ({"status": Status.PENDING, "place": Place.DEAD}, ""),
        ],
    )
    async def test_every_field_that_is_given_must_match(
        self, store: Store, fields: dict[str, Any], expected: str
    ) -> None:
        """A filter lists just what matches all of it, whole or in pages."""
        ids = await one_of_each(store)
        want = {ids[name.replace("_", " ")] for name in expected.split()}
        for limit in (1, 3, 100):
            assert {task.id for task in await list_all(store, Filter(**fields), limit=limit)} == want

    async def test_by_time(self, store: Store, clock: ManualClock) -> None:
        """Enqueued and ended times bound a listing from either side."""
        start_ms = clock.now_ms()
        ids = []
        for _ in range(3):
            ids.append(await put(store))
            clock.advance(100)
        leases = [await take(store) for _ in range(3)]
        ended = []
        for lease in leases:
            await settle(store, lease, Kind.COMPLETE)
            ended.append(lease.id)
            clock.advance(100)
        between = (start_ms + 50_000, start_ms + 150_000)
        listed = await list_all(store, Filter(enqueued_from_ms=between[0], enqueued_until_ms=between[1]))
        assert [task.id for task in listed] == [ids[1]]
        assert {task.id for task in await list_all(store, Filter(enqueued_from_ms=between[0]))} == set(ids[1:])
        assert {task.id for task in await list_all(store, Filter(enqueued_until_ms=between[1]))} == set(ids[:2])
        between = (start_ms + 350_000, start_ms + 450_000)
        listed = await list_all(store, Filter(ended_from_ms=between[0], ended_until_ms=between[1]))
        assert [task.id for task in listed] == [ended[1]]
        assert {task.id for task in await list_all(store, Filter(ended_until_ms=between[1]))} == set(ended[:2])

    async def test_what_has_not_ended_has_no_end(self, store: Store, clock: ManualClock) -> None:
        """A filter on the end leaves out what has none."""
        await put(store, delay_s=5)
        done = await put_completed(store)
        later_ms = clock.now_ms() + 1_000
        assert [task.id for task in await list_all(store, Filter(ended_until_ms=later_ms))] == [done]
        assert [task.id for task in await list_all(store, Filter(ended_from_ms=0))] == [done]

    @pytest.mark.parametrize("limit", [1, 7, 50, 1_000])
    async def test_paging_returns_each_once(self, store: Store, limit: int) -> None:
        """Pages of any size together are the whole, without gap or repeat."""
        ids = await put_many(store, 40, "a") + await put_many(store, 13, "b", priority=9)
        assert sorted(task.id for task in await list_all(store, limit=limit)) == sorted(ids)
        in_a = await list_all(store, Filter(command="a", place=Place.READY), limit=limit)
        assert sorted(task.id for task in in_a) == sorted(ids[:40])

    async def test_whatever_the_time_was(self, store: Store, clock: ManualClock) -> None:
        """A task is listed at whatever millisecond it was put in, claimed or buried."""
        for _ in range(256):
            await put_many(store, 2)
            await put(store, delay_s=3600)
            await fail(store, (await take_many(store, 2, lease_s=3600))[0])
            clock.advance(0.001)
        for place in (Place.DELAYED, Place.LEASED, Place.DEAD):
            assert len(await list_all(store, Filter(command=COMMAND, place=place), limit=1_000)) == 256
        assert len((await store.replay(TENANT, Filter(command=COMMAND))).ids) == 256

    async def test_new_tasks_do_not_disturb_paging(self, store: Store) -> None:
        """What was there when the listing began, and stayed, is listed once although others come in."""
        ids = await put_many(store, 20)
        seen: list[bytes] = []
        cursor: str | None = None
        for _ in range(200):
            page = await store.list(TENANT, cursor=cursor, limit=6)
            seen += [task.id for task in page.tasks]
            cursor = page.cursor
            if cursor is None:
                break
            if len(seen) < 30:
                await put(store)
        assert cursor is None
        assert len(seen) == len(set(seen))
        assert set(ids) <= set(seen)

    async def test_a_page_holds_tasks_as_get_returns_them(self, store: Store) -> None:
        """A listed task is the same as the one looked at by id, in every state."""
        ids = await one_of_each(store)
        listed = {task.id: task for task in await list_all(store)}
        for task_id in ids.values():
            assert listed[task_id] == await look(store, task_id)

    async def test_rare_matches_among_many_are_found(self, store: Store) -> None:
        """A page examines a bounded number of records and may be short; its cursor leads on to the match."""
        await put_many(store, 3_000)
        await drain(store, limit=1_000)
        rare = await put_dead(store, reason="RARE")
        await put_many(store, 3_000)
        assert [task.id for task in await list_all(store, Filter(reason="RARE"))] == [rare]

    @pytest.mark.parametrize("cursor", ["", "nonsense", "é", "0" * 400])
    async def test_a_cursor_of_ones_own_making_is_refused(self, store: Store, cursor: str) -> None:
        """A cursor that no listing made is an error that says so, not an empty page."""
        await put(store)
        with pytest.raises(InvalidCursor):
            await store.list(TENANT, cursor=cursor)
