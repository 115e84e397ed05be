from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from dibs.stores import open_local
from dibs.stores.direct import DirectStore
from tests.server.http import Api
from tests.server.serving import served


@pytest.fixture
async def store() -> AsyncIterator[DirectStore]:
    """What is behind the server."""
    async with await open_local("memory:") as store:
        yield store


@pytest.fixture
async def api(store: DirectStore) -> AsyncIterator[Api]:
    """Calls a server in development mode."""
    async with served(store) as url, aiohttp.ClientSession() as session:
        yield Api(session, url)
