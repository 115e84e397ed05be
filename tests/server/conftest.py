"""A server on a real socket, over a store in memory, in development mode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest

from dibs.server.admin import admin_routes
from dibs.server.app import Quiet
from dibs.server.auth import ALL_SCOPES, Authenticator, Principal, Verifier
from dibs.server.gate import Gate
from dibs.server.http import HttpOptions, task_routes
from dibs.server.listener import Listener, bind
from dibs.server.openapi import doc_routes
from dibs.server.web import Web
from dibs.stores import open_local
from dibs.stores.direct import DirectStore
from tests.server.http import Api

BODY_MAX_BYTES = 4 << 20
DEV = Principal("default", "dev", ALL_SCOPES)


@asynccontextmanager
async def served(
    store: DirectStore,
    *,
    anybody: Principal | None = DEV,
    verifiers: Sequence[Verifier] = (),
    leases_by_subject: bool = True,
) -> AsyncIterator[str]:
    """Serves a store; yields the server's URL."""
    gate = Gate(store)
    options = HttpOptions(leases_by_subject=leases_by_subject)
    routes = [*task_routes(gate, options), *admin_routes(gate)]
    web = Web([*routes, *doc_routes(routes)], Authenticator(verifiers, anybody), Quiet(), body_max_bytes=BODY_MAX_BYTES)
    listener = Listener(web)
    bound = bind("127.0.0.1", 0)
    await listener.start(bound)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        gate.stop()
        await listener.stop(5)


@pytest.fixture
async def store() -> AsyncIterator[DirectStore]:
    """What is behind the server."""
    async with await open_local("memory:") as store:
        yield store


@pytest.fixture
async def api(store: DirectStore) -> AsyncIterator[Api]:
    """Calls a server."""
    async with served(store) as url, aiohttp.ClientSession() as session:
        yield Api(session, url)
