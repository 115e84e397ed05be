"""A server on a real socket, over a store that the test holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dibs.server.auth import ALL_SCOPES, Authenticator, Principal, Verifier
from dibs.server.gate import Gate
from dibs.server.http.admin import admin_routes
from dibs.server.http.listener import Listener, bind
from dibs.server.http.openapi import doc_routes
from dibs.server.http.routes import HttpOptions, task_routes
from dibs.server.http.web import Request, Route, Web
from dibs.server.limiter import Limiter
from dibs.server.limits import UNLIMITED, LimitsTable, TenantLimits
from dibs.stores.direct import DirectStore

BODY_MAX_BYTES = 4 << 20
DEV = Principal("default", "dev", ALL_SCOPES)


class Failures:
    """Keeps what nobody foresaw."""

    def __init__(self) -> None:
        self.seen: list[Exception] = []

    def begun(self) -> None:
        """Nothing to note."""

    def ended(self, request: Request, route: Route | None, status: int, seconds: float, size_bytes: int) -> None:
        """Nothing to note."""

    def failed(self, request: Request, error: Exception) -> None:
        """Keeps it."""
        self.seen.append(error)


@asynccontextmanager
async def served(
    store: DirectStore,
    *,
    anybody: Principal | None = DEV,
    verifiers: Sequence[Verifier] = (),
    leases_by_subject: bool = True,
    limits: TenantLimits = UNLIMITED,
) -> AsyncIterator[str]:
    """Serves a store; yields the server's URL. What a handler failed with is raised at the end."""
    gate, failures = Gate(store, Limiter(LimitsTable(limits))), Failures()
    routes = [*task_routes(gate, HttpOptions(leases_by_subject=leases_by_subject)), *admin_routes(gate)]
    authenticator = Authenticator(verifiers, anybody)
    listener = Listener(Web([*routes, *doc_routes(routes)], authenticator, failures, body_max_bytes=BODY_MAX_BYTES))
    bound = bind("127.0.0.1", 0)
    await listener.start(bound)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        gate.stop()
        await listener.stop(5)
    if failures.seen:
        raise failures.seen[0]
