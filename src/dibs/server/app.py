"""The server, put together: the only place where its parts meet.

::

    http/listener.py → http/web.py → http/tasks.py, admin.py, codeq.py, verbs.py → gate.py → a store
                           │                                                          │
                           auth.py, verifiers/                                        limiter.py, telemetry/
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable

from dibs.clock import Clock
from dibs.errors import DibsError, StoreClosed, StoreRefused, StoreUnavailable
from dibs.portal import new_event_loop
from dibs.server.auth import ALL_SCOPES, Authenticator, Principal
from dibs.server.config import ServerConfig, is_loopback
from dibs.server.gate import Gate
from dibs.server.http.admin import admin_routes
from dibs.server.http.listener import Listener, bind, connections_max
from dibs.server.http.openapi import doc_routes
from dibs.server.http.problems import Problem
from dibs.server.http.routes import HttpOptions, task_routes
from dibs.server.http.verbs import verb_routes
from dibs.server.http.web import Answer, Handler, Request, Route, Web, json_answer
from dibs.server.limiter import Limiter
from dibs.server.limits import read_limits
from dibs.server.readers.events_file import EventsFile
from dibs.server.readers.follower import JournalFollower
from dibs.server.telemetry import logs
from dibs.server.telemetry.metrics import CONTENT_TYPE, Metrics
from dibs.server.telemetry.tracing import Tracing
from dibs.server.verifiers.keys import verifier_of
from dibs.server.verifiers.tokens import TokenVerifier
from dibs.settings import Settings, mask
from dibs.stores import REMOTE, open_local
from dibs.stores.local import LocalStore

log = logging.getLogger("dibs.server")

SWEEP_EVERY_S = 1.0
READY_WITHIN_S = 2.0
EVENTS_READER = "server-events-file"
"""The name under which the journal's reader that writes a file has its place."""
ANYBODY = Principal("default", "anybody", ALL_SCOPES)
"""Everybody, in development mode."""

#: Opens the store; without `create`, one that is not there is not made.
Opener = Callable[[bool], Awaitable[LocalStore]]


def run(config: ServerConfig, settings: Settings, say: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `say` gets what a person should know."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config, settings, say))


async def _serve(config: ServerConfig, settings: Settings, say: Callable[[str], None]) -> None:
    logs.setup(config.log_format)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    # It would end the process. Files of tokens and keys are read again without it.
    loop.add_signal_handler(signal.SIGHUP, log.info, "SIGHUP is ignored: restart the server to change its settings")
    service = await open_service(config, settings)
    bound = bind(config.host, config.port)
    await service.start(bound)
    scheme = "http" if config.tls_cert is None else "https"
    host, port, *_ = bound.getsockname()
    say(f"dibs serves {mask(settings.url)} at {scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    if config.development:
        say("Development mode: no keys are configured, so no token is asked for, and everybody on this machine is the")
        say("tenant 'default' with every scope.")
    await stopping.wait()
    say("stopping")
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.hurry)
    await service.stop()


async def open_service(config: ServerConfig, settings: Settings, clock: Clock | None = None) -> Service:
    """Opens the store and puts a server together that is not started yet."""
    if settings.url.startswith(REMOTE):
        raise StoreRefused(f"{mask(settings.url)} is a server's store already: its clients can use it directly")

    async def opener(create: bool) -> LocalStore:
        return await open_local(settings.url, settings=settings, clock=clock, create=create)

    return Service(config, await opener(True), opener)


class Service:
    """A store behind a socket."""

    def __init__(self, config: ServerConfig, store: LocalStore, opener: Opener) -> None:
        """`opener` opens the store again, should it break."""
        self.config = config
        self._opener = opener
        self._store = store
        self.metrics = Metrics()
        limiter = Limiter(read_limits(config.limits), on_hit=self.metrics.limit_hit, waiting_max=connections_max() // 2)
        self.gate = Gate(store, limiter, self.metrics, Tracing())
        store.meter = self.metrics
        self._verifiers = [verifier_of(keys) for keys in config.keys]
        self._authenticator = Authenticator(self._verifiers, ANYBODY if config.development else None)
        routes = [
            *self._own_routes(),
            *task_routes(self.gate, HttpOptions(leases_by_subject=config.leases_by_subject)),
            *admin_routes(self.gate),
            *verb_routes(self.gate),
        ]
        self.web = Web(
            [*routes, *doc_routes(routes)],
            self._authenticator,
            Watching(self.metrics, log_all=config.access_log == "all"),
            body_max_bytes=config.body_max_bytes,
        )
        if config.development:
            self.web.accepts = _is_from_here
        self._listener = Listener(
            self.web, certificate=config.tls_cert, key=config.tls_key, on_cut=self.metrics.connection_cut
        )
        self._events_file = None if config.events_to is None else EventsFile(config.events_to)
        self._tending: list[asyncio.Task[None]] = []

    async def start(self, bound: socket.socket) -> None:
        """Begins to answer at a socket that is bound, to sweep, and to read the journal for whoever wants it."""
        if self._events_file is not None:
            self._events_file.open()
        await self._listener.start(bound)
        self._tending = [asyncio.ensure_future(self._tend()), *self._follow()]

    async def stop(self) -> None:
        """Gives nothing out any more, answers whoever waits, lets the others finish, and closes the store."""
        self.gate.stop()
        await self._listener.stop(self.config.stop_within_s)
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        if self._events_file is not None:
            self._events_file.close()
        await self._authenticator.close()
        await self._store.close()

    def hurry(self) -> None:
        """Makes a stop that is under way wait for nobody."""
        self._listener.hurry()

    def _follow(self) -> list[asyncio.Task[None]]:
        """The readers of the journal that this server runs."""
        if self._events_file is None:
            return []
        follower = JournalFollower(self.gate.store, EVENTS_READER, self._events_file.append)
        return [asyncio.ensure_future(follower.run())]

    async def _tend(self) -> None:
        """Sees what is revoked, sweeps, and opens the store again when it has broken."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                for verifier in self._verifiers:
                    if isinstance(verifier, TokenVerifier):
                        verifier.look()
                self.metrics.shards_down.set_all({(): len(await self._store.probe())})
                while (await self._store.sweep()).more:
                    pass
            except (StoreUnavailable, StoreClosed) as error:
                log.error("the store does not answer: %s", error)
                if not self._store.reopens:
                    await self._open_again()
            except DibsError as error:
                log.error("the sweep failed: %s", error)
            except Exception:
                # Nobody would sweep any more, nor look after the store.
                log.exception("the sweep failed")

    async def _open_again(self) -> None:
        """Whoever asks meanwhile is told to come again. Nothing is ever made anew, and another store is not taken: in
        the place of one that was lost it would hide the loss."""
        with contextlib.suppress(DibsError):
            await self._store.close()
        try:
            store = await self._opener(False)
        except DibsError as error:
            log.error("the store cannot be opened again: %s", error)
            return
        if store.store_id != self._store.store_id:
            log.critical("there is another store in the place of the one that was served: it is left alone")
            await store.close()
            return
        log.warning("the store was opened again")
        store.meter = self.metrics
        self._store = self.gate.store = store
        for task in self._tending[1:]:
            task.cancel()
        self._tending[1:] = self._follow()

    def _own_routes(self) -> list[Route]:
        def own(path: str, handle: Handler, summary: str, verb: str | None = None) -> Route:
            return Route(method="GET", path=path, handle=handle, summary=summary, verb=verb, tag="server")

        # Metrics name tenants and queues: nothing for everybody.
        for_metrics = None if self.config.metrics_open else "metrics"
        return [
            own("/healthz", self._alive, "Says that the server is alive."),
            own("/readyz", self._ready, "Says whether the store answers."),
            own("/metrics", self._measured, "Returns what Prometheus collects.", for_metrics),
        ]

    async def _alive(self, _: Request) -> Answer:
        return json_answer({"status": "alive"})

    async def _ready(self, _: Request) -> Answer:
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                await self._store.probe()
        except (DibsError, TimeoutError) as error:
            log.error("not ready: %s", error)
            raise Problem(503, "not_ready", "the store does not answer") from None
        return json_answer({"status": "ready"})

    async def _measured(self, _: Request) -> Answer:
        await self.metrics.refresh(self.gate.store)
        return Answer(200, self.metrics.render(), CONTENT_TYPE)


def _is_from_here(request: Request) -> bool:
    """Whether a request is for this machine by its own name, and not sent by a browser for a page from elsewhere, which
    could otherwise use a server that asks for no token."""
    host, origin = request.header(b"host"), request.header(b"origin")
    return (not host or _is_own_name(host)) and (origin is None or _is_own_name(origin.partition("://")[2]))


def _is_own_name(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return is_loopback(name)


class Watching:
    """Hears of every request: counts it and writes its line."""

    def __init__(self, metrics: Metrics, *, log_all: bool) -> None:
        self._metrics = metrics
        self._log_all = log_all

    def begun(self) -> None:
        self._metrics.requests_in_progress.inc()

    def ended(self, request: Request, route: Route | None, status: int, seconds: float, size_bytes: int) -> None:
        self._metrics.requests_in_progress.dec()
        path = "unknown" if route is None else route.path
        self._metrics.answered(path, status, seconds)
        if status < 400 and not self._log_all:
            return
        who = request.caller
        logs.access(
            request_id=request.id,
            client=request.client,
            method=request.method,
            route=path,
            status=status,
            duration_s=seconds,
            size_bytes=size_bytes,
            tenant="" if who is None else who.tenant,
            subject="" if who is None else who.subject,
            error=request.inside,
        )

    def failed(self, request: Request, error: Exception) -> None:
        log.error("request %s failed", request.id, exc_info=error)
