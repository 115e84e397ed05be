"""A store of its own for each test; the session is everybody's."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where a store can be made."""
    return f"lmdb:{tmp_path / 'store'}"
