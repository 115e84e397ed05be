"""HTTP, as far as a remote store needs it: one question after the other over connections that are kept.

Measured against a general client: what a question costs is most of what a small call through a server takes.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from dibs.errors import StoreRefused
from dibs.stores.remote.address import Address

CONNECT_S = 5.0
KEPT_S = 30.0
"""A connection that nobody has used for so long is not used again: the server may be about to close it."""
TOGETHER_BYTES = 64 * 1024
ANSWER_MAX_BYTES = 256 << 20
"""More than any server of ours answers."""


class CutOff(ConnectionError):
    """There was a connection, and no answer."""


class NotHttp(ValueError):
    """There was an answer, and it is none that can be read."""


class Connection(asyncio.Protocol):
    """One connection to a server: asks, and hears the answer whole or bit by bit."""

    transport: asyncio.Transport

    def __init__(self, beside: set[Connection]) -> None:
        """`beside`: all that are open, of which it is one until it is lost."""
        self.lost = asyncio.Event()
        self.reusable = True
        self._beside = beside
        self.used_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._news: asyncio.Queue[bytes | None] | None = None
        self._status = 0
        self._sized = False
        self._body = bytearray()

    def ask(
        self, head: bytes, body: bytes, news: asyncio.Queue[bytes | None] | None = None
    ) -> asyncio.Future[tuple[int, bytes]]:
        """Sends a request; returns its status and body when they are there. `news` gets the parts of a good answer as
        they come, and None at its end."""
        self._answer = asyncio.get_running_loop().create_future()
        self._news = news
        self._status, self._sized = 0, False
        self._body = bytearray()
        if self.transport.is_closing():
            self._fail(CutOff("the connection was closed"))
        elif len(body) <= TOGETHER_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._beside.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.transport.abort()  # what nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(NotHttp(f"what it answers is not HTTP ({error})"))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._beside.discard(self)
        self.reusable = False
        if self._status and not self._sized and exc is None:
            self.on_message_complete()  # an answer that ends with its connection
        else:
            self._fail(CutOff("the server closed the connection" if exc is None else str(exc) or type(exc).__name__))

    def on_header(self, name: bytes, _: bytes) -> None:
        self._sized = self._sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self.reusable = self._parser.should_keep_alive()
        if self._news is not None and self._status != 200:
            self._news.put_nowait(None)

    def on_body(self, body: bytes) -> None:
        if self._news is not None:
            self._news.put_nowait(body)
            return
        self._body += body
        if len(self._body) > ANSWER_MAX_BYTES:
            self._fail(NotHttp("it answers without end"))
            self.transport.abort()

    def on_message_complete(self) -> None:
        answer, self._answer = self._answer, None
        if self._news is not None:
            self._news.put_nowait(None)
        if answer is not None and not answer.done():
            answer.set_result((self._status, bytes(self._body)))

    def _fail(self, why: Exception) -> None:
        answer, self._answer = self._answer, None
        self.reusable = False
        if self._news is not None:
            self._news.put_nowait(None)
        elif answer is not None and not answer.done():
            answer.set_exception(why)


class Exchange:
    """The connections to one server. Belongs to the event loop that first uses it."""

    def __init__(self, address: Address) -> None:
        parts = urlsplit(address.base)
        self._host = parts.hostname or ""
        self._tls = _context(address) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls is not None else 80)
        self._begin = f"POST {parts.path}".encode()
        self._host_line = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/msgpack\r\n".encode()
        self._bearer = b""
        self._kept: list[Connection] = []
        self._open: set[Connection] = set()

    def bring(self, token: str | None) -> None:
        """From now on this token is sent."""
        self._bearer = b"" if token is None else f"Authorization: Bearer {token}\r\n".encode()

    async def post(self, path: str, body: bytes, within_s: float) -> tuple[int, bytes]:
        """Returns the status and the body of the answer. Raises `CutOff` if none comes, `TimeoutError` if it does not
        come in time, `NotHttp` if it cannot be read, and an `OSError` if there is no connection to be had."""
        connection = await self._connection()
        try:
            async with asyncio.timeout(within_s):
                answer = await connection.ask(self._head(path, body), body)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.reusable:
            connection.used_s = time.monotonic()
            self._kept.append(connection)
        else:
            connection.transport.close()
        return answer

    async def listen(self, path: str, body: bytes, silent_s: float) -> AsyncGenerator[bytes, None]:
        """Yields the parts of a good answer until it ends; of another, nothing. Raises `TimeoutError` when the server
        says nothing for so long."""
        connection = await self._connection()
        news: asyncio.Queue[bytes | None] = asyncio.Queue()
        try:
            connection.ask(self._head(path, body), body, news)
            while True:
                async with asyncio.timeout(silent_s):
                    part = await news.get()
                if part is None:
                    return
                yield part
        finally:
            connection.transport.abort()

    async def close(self) -> None:
        """Closes all connections, and returns when they are."""
        self._kept.clear()
        closing = [*self._open]
        for connection in closing:
            connection.transport.abort()
        for connection in closing:
            await connection.lost.wait()

    async def _connection(self) -> Connection:
        while self._kept:
            kept = self._kept.pop()
            if kept.reusable and not kept.transport.is_closing() and time.monotonic() < kept.used_s + KEPT_S:
                return kept
            kept.transport.close()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._open), self._host, self._port, ssl=self._tls
            )
        return connection

    def _head(self, path: str, body: bytes) -> bytes:
        size = f"Content-Length: {len(body)}\r\n\r\n".encode()
        return b"%b%b%b%b%b" % (self._begin, path.encode(), self._host_line, self._bearer, size)


def _context(address: Address) -> Any:
    try:
        return ssl.create_default_context(cafile=address.ca_file)
    except OSError as error:
        raise StoreRefused(f"{address.ca_file} is no file of certificates: {error}") from error
