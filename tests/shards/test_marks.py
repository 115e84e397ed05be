"""Marks are the same whether one call finds them all or each goes on where another had examined enough."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest

from dibs.clock import ManualClock
from dibs.stores import open_local
from dibs.stores.ordered import marks
from dibs.testing.contract.ranges import marks_of
from dibs.testing.contract.steps import TENANT, list_all, load, put_many, some_rows, take_many
from tests.shards.faults import RELAXED

pytestmark = pytest.mark.anyio

EVERY = 1_000


@pytest.mark.parametrize("url", ["memory:", "shards:memory:?n=3"])
@pytest.mark.parametrize(("keys_max", "heads_max"), [(300, 2_000), (20_000, 3), (70, 1)])
async def test_marks_by_small_steps(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, url: str, keys_max: int, heads_max: int
) -> None:
    """What a call has counted since the last mark is carried on by its cursor, for each shard."""
    async with await open_local(url, clock=clock, settings=RELAXED) as store:
        for _ in range(3):
            await put_many(store, 1_000)
            await load(store, some_rows(800, "load"), some_rows(300, "load"))
        await take_many(store, 500, "load")
        for _ in range(2):
            await put_many(store, 1_000)
        whole = await marks_of(store, EVERY)
        monkeypatch.setattr(marks, "KEYS_MAX", keys_max)
        monkeypatch.setattr(marks, "HEADS_MAX", heads_max)
        assert (await store.marks(TENANT, every=EVERY)).cursor is not None
        assert await marks_of(store, EVERY) == whole
        ids = sorted(task.id for task in await list_all(store, limit=1_000))
        assert len(ids) == 8_300
        ends = [0, *(bisect_left(ids, mark) for mark in whole), len(ids)]
        most = 2 * EVERY * len(await store.journal_bounds())
        assert max(end - begin for begin, end in pairwise(ends)) <= most
