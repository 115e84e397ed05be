"""Ranges of ids: a tenant's tasks divided among those who list them, each task in exactly one range."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from dibs.errors import InvalidInput
from dibs.stores.protocol import Store
from dibs.task import Filter, NewTask, Place, Status
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    complete,
    fail,
    list_all,
    load,
    put,
    put_dead,
    put_many,
    some_rows,
    stage,
    take_many,
)

LOWEST, HIGHEST = bytes(16), b"\xff" * 16


async def some_tasks(store: Store) -> list[bytes]:
    """Tasks in every place, and rows of loads: untouched, half taken, cancelled, with keys, and some only staged.
    Returns all ids in order."""
    ids = await put_many(store, 6)
    ids.append(await put_dead(store, "dead"))
    ids.append(await put(store, delay_s=60))
    leases = await take_many(store, 4)
    await complete(store, leases[0])
    await fail(store, leases[1])
    rows = await load(store, some_rows(9), some_rows(5, "later", delay_s=9), some_rows(6, "other"))
    keyed = await load(store, [NewTask(command="keyed", key=f"k{number}") for number in range(8)])
    await take_many(store, 5)
    await store.cancel(TENANT, [rows[8], keyed[3]])
    await stage(store, some_rows(3))
    ids += rows + keyed + await put_many(store, 3, "other")
    return sorted(ids)


async def marks_of(store: Store, every: int, *, tenant: str = TENANT) -> list[bytes]:
    """Returns all marks, which must come in order."""
    ids: list[bytes] = []
    after: bytes | None = None
    for _ in range(1_000):
        found = await store.marks(tenant, every=every, after=after)
        ids += found.ids
        after = found.cursor
        if after is None:
            assert ids == sorted(set(ids))
            return ids
    raise AssertionError("the marks never end")


@pytest.mark.anyio
class TestRanges:
    """A filter may name a range of ids: from one, inclusive, up to another, exclusive."""

    @pytest.mark.parametrize("limit", [1, 4, 1_000])
    async def test_every_task_is_in_exactly_one_range(self, store: Store, limit: int) -> None:
        """Ranges that meet hold all tasks once, wherever they meet: before a task, behind it, or within a load."""
        ids = await some_tasks(store)
        # Also just behind an id, and where a chunk may begin.
        bounds = sorted({*ids[::5], *(one[:-1] + b"\xff" for one in ids[2::7]), *(one[:13] + bytes(3) for one in ids)})
        found = []
        for low, high in pairwise([None, *bounds, None]):
            listed = [task.id for task in await list_all(store, Filter(id_from=low, id_until=high), limit=limit)]
            assert sorted(listed) == [one for one in ids if (low or b"") <= one < (high or b"\xff" * 17)]
            found += listed
        assert sorted(found) == ids

    @pytest.mark.parametrize(
        "fields",
        [
            {"command": COMMAND},
            {"command": COMMAND, "place": Place.READY},
            {"command": "later", "place": Place.DELAYED},
            {"command": COMMAND, "place": Place.LEASED},
            {"command": "keyed", "place": Place.READY},
            {"status": Status.CANCELLED},
            {"status": Status.PENDING},
        ],
        ids=repr,
    )
    async def test_the_rest_of_the_filter_must_match_too(self, store: Store, fields: dict[str, Any]) -> None:
        """A range narrows any listing, those in the order of a place too."""
        ids = await some_tasks(store)
        want = sorted(task.id for task in await list_all(store, Filter(**fields)))
        assert want
        found = []
        for low, high in pairwise([None, *ids[3::6], None]):
            which = Filter(**fields, id_from=low, id_until=high)
            found += [task.id for task in await list_all(store, which, limit=2)]
        assert sorted(found) == want

    async def test_ranges_that_hold_nothing(self, store: Store) -> None:
        """An empty or reversed range is empty; the widest is everything."""
        ids = await some_tasks(store)
        for low, high in ((ids[3], ids[3]), (ids[9], ids[2]), (HIGHEST, None), (None, LOWEST), (HIGHEST, LOWEST)):
            assert await list_all(store, Filter(id_from=low, id_until=high)) == []
        assert [task.id for task in await list_all(store, Filter(id_from=ids[3], id_until=ids[4]))] == [ids[3]]
        assert len(await list_all(store, Filter(id_from=LOWEST, id_until=HIGHEST))) == len(ids)

    async def test_replay_and_purge_keep_to_the_range(self, store: Store) -> None:
        """What is dead or ended outside the range is left alone."""
        ids = sorted([await put_dead(store) for _ in range(6)])
        assert (await store.replay(TENANT, Filter(id_from=ids[1], id_until=ids[2]))).ids == [ids[1]]
        assert (await store.replay(TENANT, Filter(command=COMMAND, id_from=ids[5]))).ids == [ids[5]]
        assert (await store.purge(TENANT, Filter(id_until=ids[1]))).ids == [ids[0]]
        assert (await store.purge(TENANT, Filter(command=COMMAND, place=Place.DEAD, id_until=ids[3]))).ids == [ids[2]]
        left = {task.id: task.place for task in await list_all(store)}
        assert left == {ids[1]: Place.READY, ids[3]: Place.DEAD, ids[4]: Place.DEAD, ids[5]: Place.READY}

    @pytest.mark.parametrize("bad", [b"", b"x" * 15, b"x" * 17, "x" * 16, 7], ids=repr)
    async def test_a_bound_is_an_id(self, store: Store, bad: Any) -> None:
        """What is not 16 bytes is refused."""
        for which in (Filter(id_from=bad), Filter(id_until=bad)):
            for call in (store.list, store.replay, store.purge):
                with pytest.raises(InvalidInput):
                    await call(TENANT, which)


@pytest.mark.anyio
class TestMarks:
    """`marks` divides a tenant's tasks into ranges of about the same size."""

    async def test_ranges_of_about_that_size(self, store: Store) -> None:
        """Tasks and rows of loads, of which some were reached, are divided: each is in one range, and none is large."""
        every, shards = 1_000, len(await store.journal_bounds())
        ids = await put_many(store, 700)
        ids += await load(store, some_rows(1_000), some_rows(400), some_rows(900))
        await take_many(store, 950)
        ids += await put_many(store, 900, "other") + await put_many(store, 900, "other")
        ids += await load(store, some_rows(1_000, "late", delay_s=60), some_rows(1_000, "late", delay_s=60))
        found = await marks_of(store, every)
        sizes = []
        for low, high in pairwise([None, *found, None]):
            listed = await list_all(store, Filter(id_from=low, id_until=high), limit=1_000)
            sizes.append(len(listed))
        assert sum(sizes) == len(ids)
        assert max(sizes) <= 2 * every * shards
        assert len(sizes) <= 2 * len(ids) // every + shards

    async def test_a_tenant_that_has_little(self, store: Store) -> None:
        """What fits into one range has no marks, and other tenants' tasks do not count."""
        assert await marks_of(store, 1_000) == []
        await put_many(store, 1_000, tenant="much")
        await put_many(store, 800, tenant="much")
        await load(store, some_rows(1_000), tenant="much")
        await put_many(store, 10)
        await load(store, some_rows(10))
        assert await marks_of(store, 1_000) == []
        assert await marks_of(store, 1_000_000, tenant="much") == []

    async def test_from_an_id_on(self, store: Store) -> None:
        """An id by itself is a place to begin: all marks come behind it."""
        ids = sorted(await put_many(store, 900) + await put_many(store, 900) + await put_many(store, 900))
        shards = len(await store.journal_bounds())
        found = (await store.marks(TENANT, every=1_000, after=ids[1_500])).ids
        assert all(mark > ids[1_500] for mark in found)
        assert len(found) == (1 if shards == 1 else 0)

    @pytest.mark.parametrize("every", [0, 999, 1_000_001, 1_000.0, None], ids=repr)
    async def test_a_bad_size(self, store: Store, every: Any) -> None:
        """Ranges are of 1,000 to 1,000,000 tasks."""
        with pytest.raises(InvalidInput):
            await store.marks(TENANT, every=every)

    @pytest.mark.parametrize("after", [b"", b"nonsense", b"\xff" * 17], ids=repr)
    async def test_a_cursor_of_ones_own_making_is_refused(self, store: Store, after: bytes) -> None:
        """Bytes that are neither an id nor a cursor are an error."""
        with pytest.raises(InvalidInput):
            await store.marks(TENANT, every=1_000, after=after)
