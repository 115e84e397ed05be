"""A server as a process of its own, and clients that speak to it byte by byte."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cli.terminal import DIBS, PATIENCE_S, environment

_LOOK_S = 0.01


def free_port() -> int:
    """Returns a port that nobody listens at now. Not one of those that the system gives to clients: while the server is
    away, one of them could get it."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as bound, suppress(OSError):
            bound.bind(("127.0.0.1", port))
            return port


async def until(true: Callable[[], bool]) -> None:
    """Waits for something to become true."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - nobody tells when
            await asyncio.sleep(_LOOK_S)


class ServerProcess:
    """`dibs serve` over a store in a directory; its port stays the same from one start to the next."""

    def __init__(self, directory: Path, *args: str, store: str = "", port: int | None = None) -> None:
        """`args` are further arguments of `dibs serve`."""
        self.directory = directory
        self.port = free_port() if port is None else port
        self.store = store or str(directory / "store")
        self._args = args
        self._starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What a client opens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        """What it has written since it was last started."""
        return self._log.read_text()

    @property
    def _log(self) -> Path:
        return self.directory / f"server-{self._starts}.err"

    def start(self) -> Self:
        """Starts it; does not wait until it answers."""
        self._starts += 1
        command = [*DIBS, "--url", self.store, "serve", "--port", str(self.port), *self._args]
        with self._log.open("wb") as errors:
            self.process = subprocess.Popen(command, cwd=self.directory, env=environment(), stderr=errors)
        return self

    def serves(self) -> bool:
        """True once it listens."""
        assert self.process is not None
        assert self.process.poll() is None, f"the server ended by itself: {self.said}"
        return "dibs serves" in self.said

    def until_serves(self) -> Self:
        """Waits until it listens."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.serves():
            assert time.monotonic() < deadline_s, self.said
            time.sleep(_LOOK_S)
        return self

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)

    async def ended(self) -> int:
        """Returns its exit code when it has one."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    async def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.send(signal.SIGTERM)
        return await self.ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()


@contextmanager
def worker_process(directory: Path, url: str, app: str) -> Iterator[subprocess.Popen[bytes]]:
    """`dibs worker` of an app in a directory; what it says is in `worker.err` there."""
    with (directory / "worker.err").open("wb") as errors:
        process = subprocess.Popen(
            [*DIBS, "worker", app], cwd=directory, env=environment(DIBS_URL=url), stderr=errors, stdout=errors
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


class Raw:
    """A connection that sends what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Sends bytes; a server that has hung up is no error."""
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Returns the status, the headers and the body of the next answer; 0 if the server hung up before."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, {}, b""
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
            return int(first.split()[1]), headers, body

    async def hung_up(self) -> bool:
        """Returns when the server has closed the connection; what it says before that is passed over."""
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
        return True

    def close(self) -> None:
        """Closes it at once."""
        self.writer.transport.abort()


@asynccontextmanager
async def connected(port: int, data: bytes = b"") -> AsyncIterator[Raw]:
    """A connection that has sent these bytes."""
    raw = Raw(*await asyncio.open_connection("127.0.0.1", port))
    try:
        await raw.send(data)
        yield raw
    finally:
        raw.close()


def request(
    path: str, body: bytes = b"", *, method: str = "POST", headers: Sequence[str] = (), length: str | None = None
) -> bytes:
    """A request with a msgpack body. `length`: what Content-Length says, instead of the truth."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/msgpack",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n" + body
