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
import signal
import socket
from collections.abc import Awaitable, Callable

from dibs.clock import Clock
from dibs.errors import DibsError, StoreRefused, StoreUnavailable
from dibs.ids import new_id
from dibs.server.auth import ALL_SCOPES, Authenticator, Principal
from dibs.server.config import ServerConfig, is_loopback
from dibs.server.gate import Gate
from dibs.server.listener import Listener, bind
from dibs.server.problems import Problem
from dibs.server.verbs import verb_routes
from dibs.server.web import Answer, Request, Route, Web, json_answer
from dibs.settings import Settings, mask
from dibs.stores import REMOTE, open_local
from dibs.stores.direct import DirectStore

log = logging.getLogger("dibs.server")

SWEEP_EVERY_S = 1.0
READY_WITHIN_S = 2.0
ANYBODY = Principal("default", "anybody", ALL_SCOPES)
"""Everybody, in development mode."""

Opener = Callable[[], Awaitable[DirectStore]]


def run(config: ServerConfig, settings: Settings, say: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `say` gets what a person should know."""
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        runner.run(_serve(config, settings, say))


async def _serve(config: ServerConfig, settings: Settings, say: Callable[[str], None]) -> None:
    service = await open_service(config, settings)
    bound = bind(config.host, config.port)
    await service.start(bound)
    scheme = "http" if config.tls_cert is None else "https"
    host, port, *_ = bound.getsockname()
    say(f"dibs serves {mask(settings.url)} at {scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    if config.development:
        say("Development mode: no keys are configured, so no token is asked for, and everybody on this machine is the")
        say("tenant 'default' with every scope.")
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await stopping.wait()
    say("stopping")
    await service.stop()


async def open_service(config: ServerConfig, settings: Settings, clock: Clock | None = None) -> Service:
    """Opens the store and puts a server together that is not started yet."""
    if settings.url.startswith(REMOTE):
        raise StoreRefused(f"{mask(settings.url)} is a server's store already: its clients can use it directly")

    async def opener() -> DirectStore:
        return await open_local(settings.url, settings=settings, clock=clock)

    return Service(config, await opener(), opener)


class Service:
    """A store behind a socket."""

    def __init__(self, config: ServerConfig, store: DirectStore, opener: Opener) -> None:
        """`opener` opens the store again, should it break."""
        self.config = config
        self._opener = opener
        self.gate = Gate(store)
        authenticator = Authenticator([], ANYBODY if config.development else None)
        self.web = Web(
            [*self._own_routes(), *verb_routes(self.gate)], authenticator, Quiet(), body_max_bytes=config.body_max_bytes
        )
        if config.development:
            self.web.host_allowed = _is_own_name
        self._listener = Listener(self.web, certificate=config.tls_cert, key=config.tls_key)
        self._tending: list[asyncio.Task[None]] = []

    async def start(self, bound: socket.socket) -> None:
        """Begins to answer at a socket that is bound, and to sweep."""
        await self._listener.start(bound)
        self._tending = [asyncio.ensure_future(self._tend())]

    async def stop(self) -> None:
        """Gives nothing out any more, answers whoever waits, lets the others finish, and closes the store."""
        self.gate.stop()
        await self._listener.stop(self.config.stop_within_s)
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        await self.gate.store.close()

    async def _tend(self) -> None:
        """Sweeps, and opens the store again when it has broken."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                while (await self.gate.store.sweep()).more:
                    pass
            except StoreUnavailable as error:
                log.error("the store does not answer: %s", error)
                await self._open_again()
            except DibsError as error:
                log.error("the sweep failed: %s", error)

    async def _open_again(self) -> None:
        """Whoever asks meanwhile is told to come again."""
        with contextlib.suppress(DibsError):
            await self.gate.store.close()
        try:
            self.gate.store = await self._opener()
        except DibsError as error:
            log.error("the store cannot be opened again: %s", error)
        else:
            log.warning("the store was opened again")

    def _own_routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/healthz",
                handle=self._alive,
                summary="Says that the server is alive.",
                tag="server",
            ),
            Route(
                method="GET",
                path="/readyz",
                handle=self._ready,
                summary="Says whether the store answers.",
                tag="server",
            ),
        ]

    async def _alive(self, _: Request) -> Answer:
        return json_answer({"status": "alive"})

    async def _ready(self, _: Request) -> Answer:
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                # Goes the way of a write, and changes nothing.
                await self.gate.store.drop(ANYBODY.tenant, [new_id()])
        except (DibsError, TimeoutError) as error:
            log.error("not ready: %s", error)
            raise Problem(503, "not_ready", "the store does not answer") from None
        return json_answer({"status": "ready"})


def _is_own_name(host: str) -> bool:
    """Whether a request says that it is for this machine: one that a foreign page had a browser send says otherwise."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return not host or is_loopback(name)


class Quiet:
    """Watches nothing."""

    def begun(self) -> None: ...

    def ended(self, request: Request, route: Route | None, status: int, seconds: float, size_bytes: int) -> None: ...

    def failed(self, request: Request, error: Exception) -> None:
        log.error("request %s failed", request.id, exc_info=error)
