"""What holds for all tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that have to share a process begin first: it would go on alone when the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
