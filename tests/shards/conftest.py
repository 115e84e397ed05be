from __future__ import annotations

from collections.abc import Iterator

import pytest

from dibs.clock import ManualClock
from dibs.stores.sharded import shard
from tests.lmdb.processes import Children


@pytest.fixture
def clock() -> ManualClock:
    """The stores' time."""
    return ManualClock()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is down is tried again with every question."""
    monkeypatch.setattr(shard, "AGAIN_AFTER_S", 0.0)


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts other processes; those that still run at the end are killed."""
    started = Children()
    yield started
    started.end()
