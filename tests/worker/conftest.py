from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.conftest import app, clock, url
from tests.worker.commands import Shop

__all__ = ["app", "clock", "shop", "url"]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A directory with an app in it, and the processes that a test starts there."""
    made = Shop(tmp_path)
    yield made
    made.end()
