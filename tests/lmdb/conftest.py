from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dibs.clock import ManualClock
from dibs.stores import open_store
from dibs.stores.ordered.store import OrderedStore
from tests.lmdb.processes import Children


@pytest.fixture
def clock() -> ManualClock:
    """The store's time."""
    return ManualClock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the store is, or will be."""
    return tmp_path / "store"


@pytest.fixture
async def store(directory: Path, clock: ManualClock) -> AsyncIterator[OrderedStore]:
    """A new store."""
    opened = await open_store(str(directory), clock=clock)
    assert isinstance(opened, OrderedStore)
    yield opened
    await opened.close()


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts other processes; those that still run at the end are killed."""
    started = Children()
    yield started
    started.end()
