"""What can stand between a client and a server, or in a server's place."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal

Moment = Literal["before", "after", "within"]
MOMENTS: tuple[Moment, ...] = ("before", "after", "within")

_VERB = re.compile(rb"POST /v1/store/([a-z_]+) ")


class Proxy:
    """Passes bytes on, and cuts connections: before a question arrives at the server, after the server did what it was
    asked, or within its answer."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = 0
        self.asked: list[str] = []
        """The verbs that came by, in their order."""
        self.cuts = 0
        self._troubles: dict[str, list[Moment]] = {}

    @property
    def url(self) -> str:
        """What a client opens."""
        return f"http://127.0.0.1:{self.port}"

    def trouble(self, verb: str, *moments: Moment) -> None:
        """Cuts the next calls of a verb, one after the other, at these moments."""
        self._troubles[verb] = [*moments]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        moment: list[Moment] = []
        pumps = [
            asyncio.ensure_future(self._questions(reader, up_writer, moment)),
            asyncio.ensure_future(self._answers(up_reader, writer, moment)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, up_writer):
                one.transport.abort()

    async def _questions(self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, moment: list[Moment]) -> None:
        while data := await reader.read(1 << 16):
            if (found := _VERB.match(data)) is not None:
                verb = found[1].decode()
                self.asked.append(verb)
                moment[:] = [self._troubles[verb].pop(0)] if self._troubles.get(verb) else []
                if moment == ["before"]:
                    self.cuts += 1
                    return
            up.write(data)

    async def _answers(self, up: asyncio.StreamReader, writer: asyncio.StreamWriter, moment: list[Moment]) -> None:
        while data := await up.read(1 << 16):
            if moment:
                self.cuts += 1
                if moment == ["within"]:
                    writer.write(data[:-1])
                    with suppress(ConnectionError):
                        await writer.drain()
                return
            writer.write(data)


@asynccontextmanager
async def proxied(target: int) -> AsyncIterator[Proxy]:
    """A proxy to a server's port."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()


class Impostor:
    """Answers every request with the same bytes; keeps the heads that it got."""

    def __init__(self, answer: Callable[[int], bytes]) -> None:
        """`answer` gets the number of the request, from 0."""
        self._answer = answer
        self.port = 0
        self.heads: list[str] = []

    @property
    def url(self) -> str:
        """What a client opens."""
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                self.heads.append(head)
                answer = self._answer(len(self.heads) - 1)
                if not answer:
                    break
                writer.write(answer)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def impostor(answer: bytes | Callable[[int], bytes]) -> AsyncIterator[Impostor]:
    """Something that listens and is no dibs server. An empty answer closes the connection."""
    one = Impostor(answer if callable(answer) else lambda _: answer)
    server = await asyncio.start_server(one.handle, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()


def answer(status: int, body: bytes = b"", *headers: str, content_type: str = "application/json") -> bytes:
    """An HTTP answer."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body
