"""What lies outside a range of ids is not read, and marks are found without reading a task or a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dibs.errors import StoreCorrupt
from dibs.ids import new_id
from dibs.stores import open_local
from dibs.stores.batches import row_ids
from dibs.stores.ordered.keys import tenant_keys
from dibs.stores.protocol import Store
from dibs.task import Filter
from dibs.testing.contract.ranges import marks_of
from dibs.testing.contract.steps import TENANT, commit, load, put, put_many, some_rows, stage

KEYS = tenant_keys(TENANT)


def damage(store: Any, prefix: bytes) -> None:
    """Makes all records below a prefix unreadable."""
    data = store._engine._data
    for key in [*data.irange(prefix, prefix + b"\xff" * 17)]:
        data[key] = b"damaged"


async def some(store: Store, ids: Sequence[bytes]) -> list[bytes]:
    """Loads a chunk of the first of these ids, and makes tasks of the others; returns the ids of all tasks."""
    rows = some_rows(3)
    await commit(store, await stage(store, rows, ids[0]))
    return row_ids(TENANT, ids[0], rows) + [await put(store, id=task_id) for task_id in ids[1:]]


async def test_nothing_outside_a_range_is_read() -> None:
    """A listing of a range does not meet what is unreadable before and behind it, be it a task or a chunk."""
    async with await open_local("memory:") as store:
        ids = sorted(new_id() for _ in range(12))
        before, within, behind = [await some(store, ids[first : first + 4]) for first in (0, 4, 8)]
        for task_id in before + behind:
            damage(store, KEYS.state + task_id)
            damage(store, KEYS.chunk + task_id[:13])
        end = behind[0][:13] + bytes(3)  # no row of that chunk comes before
        for first in (within[0], within[0][:13] + bytes(3)):
            page = await store.list(TENANT, Filter(id_from=first, id_until=end))
            assert sorted(task.id for task in page.tasks) == sorted(within)
            assert page.cursor is None
        for which in (Filter(id_until=end), Filter(id_from=within[0])):
            with pytest.raises(StoreCorrupt):
                await store.list(TENANT, which)


async def test_marks_read_neither_tasks_nor_rows() -> None:
    """They are the same when every state and every chunk's rows are unreadable."""
    async with await open_local("memory:") as store:
        for _ in range(3):
            await put_many(store, 1_000)
            await load(store, some_rows(600), some_rows(600))
        found = await marks_of(store, 1_000)
        assert found
        damage(store, KEYS.state)
        damage(store, KEYS.chunk)
        assert await marks_of(store, 1_000) == found
