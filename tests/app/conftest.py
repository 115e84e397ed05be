from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dibs import Dibs
from dibs.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """The store's time."""
    return ManualClock()


@pytest.fixture(params=["memory", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind."""
    return "memory:" if request.param == "memory" else str(tmp_path / "store")


@pytest.fixture
def app(url: str, clock: ManualClock) -> Iterator[Dibs]:
    """An app whose time stands still."""
    opened = Dibs(url, clock=clock)
    yield opened
    close_all(opened)


def close_all(opened: Dibs) -> None:
    """Closes the stores of every loop that used the app."""
    opened.run(opened._close_all())
    opened.close()
