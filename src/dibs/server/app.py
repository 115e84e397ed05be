"""The server, put together: the only place where its parts meet.

::

    sockets (listener.py) → web.py → routes: http.py, admin.py, verbs.py → gate.py → a store
                              │                                             │
                              auth.py, problems.py                          limits.py, metrics.py, tracing.py
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from dibs.errors import DibsError
from dibs.server.auth import Authenticator
from dibs.server.gate import Gate
from dibs.server.listener import Listener
from dibs.server.verbs import verb_routes
from dibs.server.web import Request, Route, Web
from dibs.stores.direct import DirectStore

log = logging.getLogger("dibs.server")

SWEEP_EVERY_S = 1.0
STOP_WITHIN_S = 20.0
BODY_MAX_BYTES = 8 << 20


class Service:
    """A store behind a socket."""

    def __init__(self, store: DirectStore, authenticator: Authenticator) -> None:
        self.store = store
        self.gate = Gate(store)
        self.web = Web([*verb_routes(self.gate)], authenticator, Quiet(), body_max_bytes=BODY_MAX_BYTES)
        self._listener = Listener(self.web)
        self._tending: list[asyncio.Task[None]] = []

    async def start(self, bound: socket.socket) -> None:
        """Begins to answer at a socket that is bound, and to sweep."""
        await self._listener.start(bound)
        self._tending = [asyncio.ensure_future(self._sweep())]

    async def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        """Gives nothing out any more, answers whoever waits, lets the others finish, and closes the store."""
        self.gate.stop()
        await self._listener.stop(within_s)
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        await self.store.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            with contextlib.suppress(DibsError):
                while (await self.store.sweep()).more:
                    pass


class Quiet:
    """Watches nothing."""

    def begun(self) -> None: ...

    def ended(self, request: Request, route: Route | None, status: int, seconds: float, size_bytes: int) -> None: ...

    def failed(self, request: Request, error: Exception) -> None:
        log.error("request %s failed", request.id, exc_info=error)
