"""The stores that the contract suite runs over."""

from __future__ import annotations

from pathlib import Path

import pytest

from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.protocol import Order
from dibs.testing.contract import StoreHarness

#: What a set of shards promises does not depend on fsync, which the plain store is tested with.
RELAXED = Settings(durability="relaxed")


#: One shard, and other numbers of them, are further cases of the same code.
OFTEN = ["memory", "lmdb", "shards:memory-3", "shards:lmdb-2"]
AT_LENGTH = ["shards:memory-1", "shards:memory-2", "shards:memory-4", "shards:lmdb-1", "shards:lmdb-4"]


@pytest.fixture(params=[*OFTEN, *(pytest.param(kind, marks=pytest.mark.soak) for kind in AT_LENGTH)])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> StoreHarness:
    """Every embedded store, over nothing."""
    kind, _, count = request.param.partition("-")
    if kind == "memory":
        return StoreHarness(
            open=lambda clock: open_store(f"memory:{tmp_path}", clock=clock),
            open_other=lambda clock: open_store("memory:", clock=clock),
            shares=True,
        )
    if kind == "shards:memory":
        return StoreHarness(
            open=lambda clock: open_store(f"shards:memory:{tmp_path}?n={count}", clock=clock),
            open_other=lambda clock: open_store(f"shards:memory:?n={count}", clock=clock),
            shares=True,
            order=Order("per_shard"),
        )
    if kind == "shards:lmdb":
        store, other = (f"shards:{tmp_path / name}?n={count}" for name in ("store", "other"))
        return StoreHarness(
            open=lambda clock: open_store(store, clock=clock, settings=RELAXED),
            open_other=lambda clock: open_store(other, clock=clock, settings=RELAXED),
            reopens=True,
            shares=True,
            order=Order("per_shard"),
        )
    return StoreHarness(
        open=lambda clock: open_store(f"lmdb:{tmp_path / 'store'}", clock=clock),
        open_other=lambda clock: open_store(f"lmdb:{tmp_path / 'other'}", clock=clock),
        reopens=True,
        shares=True,
    )
