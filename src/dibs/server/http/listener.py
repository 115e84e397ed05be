"""Sockets: uvicorn's HTTP protocol, with limits on a request's head in time and size, and a prompt stop."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from dibs.errors import SettingsError
from dibs.server.http.web import WHOLE

log = logging.getLogger("dibs.server")

HEAD_S = 30.0
"""How long a client may take to send the head of a request, and to begin with one after it has connected."""
HEAD_MAX_BYTES = 64 * 1024
KEEP_ALIVE_S = 75
UNREAD_MAX_BYTES = 128 << 20
"""How much of all answers together may wait to be read; who has had theirs for the longest is cut off."""
UNREAD_S = 30.0
"""How long a client may leave an answer unread before its connection is cut."""
FILES_RESERVED = 256
"""Of the files that the system lets a process have open, so many are not for connections."""
BACKLOG = 2048
SAY_EVERY_S = 10.0
"""How often the log says that connections are cut off."""


def _refusal(status: str, code: str, message: str) -> bytes:
    """An answer to what is no request yet, and the last one of its connection."""
    body = msgspec.json.encode({"error": message, "code": code})
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return head.encode() + b"\r\n\r\n" + body


_TOO_LARGE = _refusal(
    "431 Request Header Fields Too Large", "head_too_large", f"the head of a request is at most {HEAD_MAX_BYTES} bytes"
)
_MALFORMED = _refusal("400 Bad Request", "malformed", "this cannot be read as a request of HTTP/1.1")


class Connection(HttpToolsProtocol):
    """One client's connection. One that takes too long to say what it wants, or says too much, is closed."""

    _in_head = True
    _unused_bytes = 0
    """What arrived since a request's head was complete, or a part of its body came: the head of the next, or what
    stands behind a body."""
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    """The request that is being answered; others may stand behind it."""

    def __init__(self, listener: Listener, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._listener.connections_max:
            self._listener.cut("connections_max")
            transport.abort()
        else:
            self._arm()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._listener.leaves_unread(self)

    def resume_writing(self) -> None:
        self._listener.unread.pop(self, None)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._unused_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unused_bytes > HEAD_MAX_BYTES:
            self._refuse(_TOO_LARGE)
        elif self._head_timer is None and (self._unused_bytes or self._is_unwatched()):
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._listener.unread.pop(self, None)
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            # uvicorn tells the last request only, and it is the first that may be waiting.
            self._running.disconnected = True
            self._running.message_event.set()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 ours says the same
        log.warning("what came from %s cannot be read as a request", self.client[0] if self.client else "somebody")
        self._refuse(_MALFORMED)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing is missing here: a request that asks for an upgrade is answered as it is."""

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.scope["method"] != "HEAD":
            cycle.transport = cast("asyncio.Transport", Cork(cycle))
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # What stands behind a chunked body is nobody's.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._used()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._used()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._used()
        super().on_message_complete()
        # Mostly so before the application has begun, which then need not see to it that a body arrives in time.
        self.scope["state"][WHOLE] = True

    def _is_unwatched(self) -> bool:
        """Whether nothing is being done and no timer runs: what was left of a body that nobody read ended it."""
        return self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None

    def _used(self) -> None:
        self._unused_bytes = 0
        self._disarm()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def _says_more(record: logging.LogRecord) -> bool:
    """Of what is no request uvicorn says only that: ours says where it came from."""
    return record.msg != "Invalid HTTP request received."


class Cork:
    """What a request writes to: the head of its answer waits for the first part of the body, so that both are one
    packet and one system call."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None:
            if self._cycle.response_started:
                self._head = data
                return
        elif self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Listener:
    """Accepts connections and hands their requests to an application."""

    def __init__(
        self,
        app: Any,
        *,
        certificate: str | None = None,
        key: str | None = None,
        on_cut: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_cut` hears why a connection was refused or cut off."""
        self._config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        try:
            self._config.load()
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"the certificate or its key cannot be used: {error}") from error
        logging.getLogger("uvicorn.error").addFilter(_says_more)
        self._state = ServerState()
        self.connections_max = connections_max()
        self._server: asyncio.Server | None = None
        self.unread: dict[Connection, None] = {}
        """Those whose clients leave their answers unread, the longest first."""
        self._on_cut = on_cut
        self._said_s = 0.0

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._state.connections)

    async def start(self, bound: socket.socket) -> None:
        """Accepts connections at a socket that is bound."""
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=bound,
            backlog=BACKLOG,
            ssl=self._config.ssl,
            ssl_handshake_timeout=None if self._config.ssl is None else HEAD_S,
        )

    def _connection(self) -> Connection:
        return Connection(self, self._config, self._state)

    def leaves_unread(self, slow: Connection) -> None:
        """A client has more to read than the system holds. If all such have too much together, those are cut off that
        have had theirs for the longest."""
        self.unread.setdefault(slow)
        held = sum(one.transport.get_write_buffer_size() for one in self.unread)
        for one in [*self.unread]:
            if held <= UNREAD_MAX_BYTES:
                return
            held -= one.transport.get_write_buffer_size()
            del self.unread[one]
            self.cut("unread")
            one.transport.abort()

    def cut(self, why: str) -> None:
        """A connection is refused, or cut off: counted always, and told now and then."""
        self._on_cut(why)
        now_s = time.monotonic()
        if now_s >= self._said_s + SAY_EVERY_S:
            self._said_s = now_s
            log.warning("connections are cut off (%s): %d of %d are open", why, self.connections, self.connections_max)

    async def stop(self, within_s: float) -> None:
        """Accepts nobody any more, lets those who ask have their answers, and closes all connections."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            _, late = await asyncio.wait(self._state.tasks, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.close()

    def hurry(self) -> None:
        """Lets nobody finish any more."""
        for task in self._state.tasks:
            task.cancel()


def connections_max() -> int:
    """Returns how many connections there may be: as many as this process may have files open, once it has asked for as
    many as it can get, and some kept back."""
    allowed, possible = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, possible))
    files = possible if possible != resource.RLIM_INFINITY else 1 << 20
    return max(files - FILES_RESERVED, FILES_RESERVED)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the address; port 0 is any that is free."""
    try:
        [family, kind, protocol, _, address], *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{host!r} is not an address to listen at: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A client whose machine is gone says nothing: after a minute the system asks.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise SettingsError(f"cannot listen at {host}:{port}: {error.strerror}. Choose another with --port") from error
    return bound
