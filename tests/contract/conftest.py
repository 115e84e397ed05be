"""The stores that the contract suite runs over."""

from __future__ import annotations

from pathlib import Path

import pytest

from dibs.stores import open_store
from dibs.testing.contract import StoreHarness


@pytest.fixture(params=["memory", "lmdb"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> StoreHarness:
    """Every embedded store, over nothing."""
    if request.param == "memory":
        return StoreHarness(
            open=lambda clock: open_store(f"memory:{tmp_path}", clock=clock),
            open_other=lambda clock: open_store("memory:", clock=clock),
            shares=True,
        )
    return StoreHarness(
        open=lambda clock: open_store(f"lmdb:{tmp_path / 'store'}", clock=clock),
        open_other=lambda clock: open_store(f"lmdb:{tmp_path / 'other'}", clock=clock),
        reopens=True,
        shares=True,
    )
