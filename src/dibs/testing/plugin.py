"""The pytest plugin, found by pytest itself: the fixture `dibs_kit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dibs.app import Dibs
    from dibs.testing.kit import Kit


@pytest.fixture
def dibs_app() -> Dibs:
    """Override it: return the app that your tests are about."""
    raise pytest.UsageError("dibs_kit needs to know your app: define a fixture dibs_app that returns it")


@pytest.fixture
def dibs_kit(dibs_app: Dibs) -> Iterator[Kit]:
    """Your app on an empty store in memory, with a clock that is moved by hand."""
    from dibs.testing.kit import kit

    with kit(dibs_app) as one:
        yield one
