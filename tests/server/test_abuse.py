from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dibs.ids import new_id
from dibs.server.app import Service, open_service
from dibs.server.config import ServerConfig
from dibs.server.http import listener, web
from dibs.server.http.listener import bind
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.stores.remote.verbs import PATH, SUBSCRIBE, VERBS, AskClaim, AskStats, Verb
from dibs.task import Enqueued, Heartbeat, NewTask, QueueConfig, Settlement, WorkerInfo
from tests.server.running import Raw, connected, request, until

TENANT = "default"
BODY_MAX_BYTES = 1 << 20
STATS = msgspec.msgpack.encode(AskStats(TENANT))
ASK = request(PATH + "stats", STATS)


class Served:
    """A server in this loop, and a well-behaved client of it."""

    def __init__(self, service: Service, port: int, store: Store) -> None:
        self.service = service
        self.port = port
        self.store = store

    async def others_are_served(self) -> None:
        """Whatever goes on, somebody else has a task enqueued, claimed by a new connection, and answered."""
        [outcome] = await self.store.enqueue(TENANT, [NewTask(command="other")])
        assert isinstance(outcome, Enqueued)
        async with await open_store(f"http://127.0.0.1:{self.port}") as another:
            [lease] = await another.claim(TENANT, ["other"])
        assert lease.id == outcome.id


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A server over memory."""
    config = ServerConfig(body_max_bytes=BODY_MAX_BYTES, stop_within_s=1.0)
    service = await open_service(config, Settings(url=f"memory:{tmp_path}"))
    bound = bind("127.0.0.1", 0)
    port: int = bound.getsockname()[1]
    await service.start(bound)
    async with await open_store(f"http://127.0.0.1:{port}") as store:
        yield Served(service, port, store)
    await service.stop()


# ------------------------------------------------------------------------------------------------ slow, silent, many


async def test_a_head_byte_by_byte(served: Served) -> None:
    """A head that trickles in is answered like any other, and nobody else notices."""
    async with connected(served.port) as raw:
        for number, byte in enumerate(ASK):
            await raw.send(bytes([byte]))
            if number == 20:
                await served.others_are_served()
            await asyncio.sleep(0)
        assert (await raw.answer())[0] == 200


async def test_a_body_byte_by_byte(served: Served) -> None:
    """The same for a body."""
    head = request(PATH + "stats", length=str(len(STATS)))
    async with connected(served.port, head) as raw:
        for byte in STATS:
            await raw.send(bytes([byte]))
            await served.others_are_served()
        assert (await raw.answer())[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /v1/store/stats HT",
        b"POST /v1/store/stats HTTP/1.1\r\nHost: loc",
        b"\r\n",
    ],
    ids=["nothing", "half a line", "half a head", "an empty line"],
)
async def test_a_client_that_stops_talking(served: Served, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Whoever begins a request and does not end it is hung up on, wherever it stopped."""
    monkeypatch.setattr(listener, "HEAD_S", 0.1)
    async with connected(served.port, data) as raw:
        assert await raw.hung_up()
    if data:
        async with connected(served.port, ASK) as raw:
            assert (await raw.answer())[0] == 200
            await raw.send(data)
            assert await raw.hung_up()


async def test_the_rest_of_a_body_that_nobody_reads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was refused, and goes on with its body and stops in the middle, is hung up on too."""
    monkeypatch.setattr(listener, "HEAD_S", 0.1)
    async with connected(served.port, request(PATH + "stats", method="PUT", length="10")) as raw:
        assert (await raw.answer())[0] == 405
        await raw.send(b"12345")
        assert await raw.hung_up()


@pytest.mark.parametrize("data", [b"", STATS[:3]], ids=["no body", "half a body"])
async def test_a_body_that_does_not_come(served: Served, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """A body that was announced and does not arrive is a 408, and the end of the connection."""
    monkeypatch.setattr(web, "BODY_READ_S", 0.1)
    async with connected(served.port, request(PATH + "stats", length=str(len(STATS))) + data) as raw:
        assert (await raw.answer())[0] == 408
        assert await raw.hung_up()


async def test_half_open_connections(served: Served) -> None:
    """Hundreds of connections that say nothing, or half of something, are in nobody's way."""
    async with AsyncExitStack() as stack:
        for number in range(300):
            await stack.enter_async_context(connected(served.port, ASK[: number % len(ASK)]))
        await served.others_are_served()
    await served.others_are_served()


async def test_an_answer_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks for much and reads nothing is cut off, and what waits for it is let go."""
    monkeypatch.setattr(listener, "UNREAD_S", 0.5)
    service = await open_service(ServerConfig(), Settings(url=f"memory:{tmp_path}"))
    bound = bind("127.0.0.1", 0)
    port: int = bound.getsockname()[1]
    await service.start(bound)
    async with await open_store(f"http://127.0.0.1:{port}") as store:
        served = Served(service, port, store)
        tasks = [NewTask(command="big", id=new_id(), payload=bytes(1 << 20)) for _ in range(4)]
        await store.enqueue(TENANT, tasks)
        asked = msgspec.msgpack.encode({"tenant": TENANT, "refs": [task.id for task in tasks] * 2})
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", port))
        name = small.getsockname()

        def is_connected() -> bool:
            return any(getattr(one, "client", None) == name for one in service._listener._state.connections)

        await asyncio.get_running_loop().sock_sendall(small, request(PATH + "get", asked) * 3)
        await until(is_connected)
        await served.others_are_served()
        await until(lambda: not is_connected())
        small.close()
    await service.stop()


async def test_more_connections_than_there_is_room_for(served: Served) -> None:
    """Beyond the limit connections are refused at once; when others leave there is room again."""
    served.service._listener.connections_max = 20
    async with AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(connected(served.port)) for _ in range(30)]
        assert await raws[-1].hung_up()
    await until(lambda: served.service._listener.connections <= 10)
    await served.others_are_served()


@pytest.mark.timeout(120)
async def test_a_thousand_waiting_claims(served: Served) -> None:
    """A thousand claims wait at once; one task wakes one of them, and a stop answers all the others with nothing."""
    asked = msgspec.msgpack.encode(AskClaim(TENANT, ["rare"], wait_s=50.0))
    async with AsyncExitStack() as stack:
        raws = [
            await stack.enter_async_context(connected(served.port, request(PATH + "claim", asked)))
            for _ in range(1_000)
        ]
        await served.others_are_served()
        answers = [asyncio.ensure_future(raw.answer()) for raw in raws]
        [outcome] = await served.store.enqueue(TENANT, [NewTask(command="rare")])
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        [(status, _, body)] = [one.result() for one in done]
        assert (status, msgspec.msgpack.decode(body)[0]["id"]) == (200, outcome.id)  # type: ignore[union-attr]
        await served.others_are_served()
        assert not any(one.done() for one in waiting)
        await served.service.stop()
        rest = await asyncio.gather(*waiting)
    assert {(status, body) for status, _, body in rest} == {(200, msgspec.msgpack.encode([]))}


# ------------------------------------------------------------------------------------------------------ broken HTTP


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"\x00\xff\x16\x03\x01" * 40 + b"\r\n\r\n", {400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", {400}),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
        (b"GET  /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", {200, 400}),
        (b"GET /healthz\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
        (b"GET healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405}),
        (b"GET http:///healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405}),
        (b"GET /healthz HTTP/1.1\r\nHost : localhost\r\n\r\n", {400}),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", {400}),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n", {400}),
        (b"GET /healthz HTTP/1.1\nHost: localhost\n\n", {200, 400}),
        (request(PATH + "stats", STATS, length="-1"), {400}),
        (request(PATH + "stats", STATS, length="+5"), {400}),
        (request(PATH + "stats", STATS, length="0x10"), {400}),
        (request(PATH + "stats", STATS, length="five"), {400}),
        (request(PATH + "stats", STATS, length="1_0"), {400}),
        (request(PATH + "stats", STATS, length="5, 5"), {400}),
        (request(PATH + "stats", STATS, length="1" * 40), {400}),
        (request(PATH + "stats", STATS, length="99999999999999"), {413}),
        (request(PATH + "stats", STATS, headers=[f"Content-Length: {len(STATS) + 1}"]), {400}),
        (request(PATH + "stats", STATS, headers=["Transfer-Encoding: chunked"]), {400}),
        (request(PATH + "stats", STATS, headers=["Transfer-Encoding: xchunked"]), {400}),
    ],
)
async def test_what_is_not_http(served: Served, data: bytes, statuses: set[int]) -> None:
    """What is no sound HTTP is refused, most of it with a 400 that ends the connection, and never a 500."""
    async with connected(served.port, data) as raw:
        status, headers, body = await raw.answer()
        assert status in statuses
        if status == 400:
            assert msgspec.json.decode(body)["code"] == "malformed"
        if status == 400 and "x-request-id" not in headers:
            assert await raw.hung_up()
    await served.others_are_served()


async def test_where_it_comes_from_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Of what is no request, and of every request that is refused: once each, with the client's address."""
    async with connected(served.port, b"no HTTP\r\n\r\n") as raw:
        assert (await raw.answer())[0] == 400
    assert [record.getMessage() for record in caplog.records] == [
        "what came from 127.0.0.1 cannot be read as a request"
    ]
    caplog.set_level("INFO")
    async with connected(served.port, request("/nowhere", b"")) as raw:
        assert (await raw.answer())[0] == 404
    assert caplog.records[-1].fields["client"] == "127.0.0.1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["a long value", "many lines", "a long path", "a line without end", "a long name"])
async def test_a_head_that_is_too_large(served: Served, where: str) -> None:
    """A head over its limit is a 431 or a 400, however it grows, and nobody reads on."""
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    more = {
        "a long value": start + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        "many lines": start + b"X: y\r\n" * 40_000,
        "a long path": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        "a line without end": start + b"X: " + b"y" * 1_000_000,
        "a long name": start + b"x" * 200_000,
    }[where]
    async with connected(served.port) as raw:
        for at in range(0, len(more), 10_000):
            await raw.send(more[at : at + 10_000])
            await asyncio.sleep(0)
        assert (await raw.answer())[0] in (431, 400, 0)
        assert await raw.hung_up()
    await served.others_are_served()


@pytest.mark.parametrize("line", [b"X: y\r\n", b"X: " + b"y" * 1000], ids=["lines", "a line without end"])
async def test_what_stands_behind_a_body(served: Served, line: bytes) -> None:
    """Trailers are passed over, and are no way around the limit of a head."""
    head = request(PATH + "stats", headers=["Transfer-Encoding: chunked"]).replace(b"Content-Length: 0\r\n", b"")
    body = b"%x\r\n%s\r\n0\r\n" % (len(STATS), STATS)
    async with connected(served.port, head + body + b"Authorization: late\r\n\r\n") as raw:
        assert (await raw.answer())[0] == 200
        await raw.send(head + body)
        for _ in range(20_000):
            if raw.writer.is_closing():
                break
            await raw.send(line * 10)
            await asyncio.sleep(0)
        assert await raw.hung_up()
    await served.others_are_served()


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b"%x\r\n%s\r\n0\r\n\r\n" % (len(STATS), STATS), {200}),
        (b"".join(b"1\r\n%c\r\n" % byte for byte in STATS) + b"0\r\n\r\n", {200}),
        (b"%x;name=value\r\n%s\r\n0\r\n\r\n" % (len(STATS), STATS), {200}),
        (b"zz\r\n", {400, 0}),
        (b"-1\r\n", {400, 0}),
        (b"fffffffffffffffffff\r\n", {400, 0}),
        (b"3\r\n12345\r\n0\r\n\r\n", {400, 0}),
        (b"10000\r\n" + bytes(0x10000) + b"\r\n", None),
    ],
    ids=["one", "single bytes", "extension", "no number", "negative", "huge", "a lie", "endless"],
)
async def test_chunks(served: Served, body: bytes, statuses: set[int] | None) -> None:
    """A body in chunks is taken if it is sound, and not beyond the limit of any body."""
    head = request(PATH + "stats", headers=["Transfer-Encoding: chunked"]).replace(b"Content-Length: 0\r\n", b"")
    async with connected(served.port, head + body) as raw:
        if statuses is None:
            for _ in range(2 * BODY_MAX_BYTES // 0x10000):
                await raw.send(body)
            assert (await raw.answer())[0] == 413
            assert await raw.hung_up()
        else:
            assert (await raw.answer())[0] in statuses
    await served.others_are_served()


async def test_a_body_that_is_too_large(served: Served) -> None:
    """A body whose announced length is over the limit is refused before a byte of it is sent."""
    async with connected(served.port, request(PATH + "stats", length=str(BODY_MAX_BYTES + 1))) as raw:
        assert (await raw.answer())[0] == 413
        assert await raw.hung_up()


async def test_bodies_that_are_too_large_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all bodies on their way take is bounded; who comes on top is asked to come again, and later there is
    room."""
    monkeypatch.setattr(web, "BUFFERED_MAX_BYTES", 2 * BODY_MAX_BYTES)
    head = request(PATH + "stats", length=str(BODY_MAX_BYTES))
    async with AsyncExitStack() as stack:
        raws = []
        for _ in range(8):
            raw = await stack.enter_async_context(connected(served.port, head + bytes(BODY_MAX_BYTES // 2)))
            await raw.send(bytes(BODY_MAX_BYTES // 4))
            raws.append(raw)
        first = asyncio.ensure_future(raws[-1].answer())
        answers = [first, *(asyncio.ensure_future(raw.answer()) for raw in raws[:-1])]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert {one.result()[0] for one in done} == {503}
        await served.others_are_served()
        for one in answers:
            one.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    await until(lambda: not served.service.web._buffered_bytes)


async def test_more_than_was_announced(served: Served) -> None:
    """What follows a body is the next request, or nonsense, which ends the connection."""
    async with connected(served.port, ASK + b"rubbish\r\n\r\n") as raw:
        assert [(await raw.answer())[0] for _ in range(2)] in ([200, 400], [400, 0])
        assert await raw.hung_up()


async def test_less_than_was_announced(served: Served) -> None:
    """A client that goes away in the middle of its body leaves nothing behind."""
    async with connected(served.port, request(PATH + "stats", STATS, length="1000")) as raw:
        await served.others_are_served()
        before = served.service._listener.connections
        raw.close()
    await until(lambda: served.service._listener.connections < before)
    await until(lambda: not served.service.web._buffered_bytes)
    await served.others_are_served()


async def test_two_lengths_of_one_body(served: Served) -> None:
    """A request with a length and chunks, where two readers could disagree, is refused, and nothing after it is
    read as a request of its own."""
    smuggled = b"0\r\n\r\n" + request(PATH + "stats", STATS)
    for header in ("Transfer-Encoding: chunked", "Transfer-Encoding: identity, chunked", "Transfer-Encoding:\tchunked"):
        async with connected(served.port, request(PATH + "stats", smuggled, headers=[header])) as raw:
            assert (await raw.answer())[0] == 400
            assert (await raw.answer())[0] == 0


async def test_pipelined(served: Served) -> None:
    """Requests that are sent without waiting are answered in their order."""
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: r%d\r\n\r\n"
    async with connected(served.port, b"".join(get % number for number in range(500))) as raw:
        assert [(await raw.answer())[1]["x-request-id"] for _ in range(500)] == [f"r{n}" for n in range(500)]


async def test_a_claim_and_more_behind_it(served: Served) -> None:
    """What is sent behind a claim that waits is answered after it; a client that goes away takes its claim along."""
    asked = msgspec.msgpack.encode(AskClaim(TENANT, ["late"], wait_s=30.0))
    async with connected(served.port, request(PATH + "claim", asked) + ASK) as raw:
        await served.others_are_served()
        await served.store.enqueue(TENANT, [NewTask(command="late")])
        assert [(await raw.answer())[0] for _ in range(2)] == [200, 200]
    for behind in (b"", ASK, ASK * 3):
        async with connected(served.port, request(PATH + "claim", asked) + behind):
            await served.others_are_served()
            await until(lambda: bool(served.service.gate._waiting))
        await until(lambda: not served.service.gate._waiting)
    [outcome] = await served.store.enqueue(TENANT, [NewTask(command="late")])
    [lease] = await served.store.claim(TENANT, ["late"])
    assert lease.id == outcome.id  # type: ignore[union-attr]


async def test_expect_continue(served: Served) -> None:
    """A client that asks first is told to go on, or gets its refusal before it sends anything."""
    head = request(PATH + "stats", length=str(len(STATS)), headers=["Expect: 100-continue"])
    async with connected(served.port, head) as raw:
        assert (await raw.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await raw.send(STATS)
        assert (await raw.answer())[0] == 200
    head = request(PATH + "stats", length=str(BODY_MAX_BYTES + 1), headers=["Expect: 100-continue"])
    async with connected(served.port, head) as raw:
        assert (await raw.answer())[0] == 413


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "TLS/1.0"])
async def test_upgrades(served: Served, protocol: str) -> None:
    """Nobody is upgraded to anything: the request is answered as it is, or refused."""
    headers = [f"Upgrade: {protocol}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__",
               "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"]  # fmt: skip
    async with connected(served.port, request("/healthz", method="GET", headers=headers)) as raw:
        assert (await raw.answer())[0] in (200, 400)
    await served.others_are_served()


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /v1/store/stats", 405),
        ("DELETE /healthz", 405),
        ("HEAD /v1/store/claim", 405),
        ("OPTIONS /v1/store/claim", 405),
        ("BREW /healthz", 400),
        ("POST /v1/store/nothing", 404),
        ("POST /v1/store/", 404),
        ("POST /v1/store//stats", 404),
        ("POST /v1/store/stats/", 404),
        ("POST /v1/store/../store/stats", 404),
        ("POST /v1/store/%2e%2e/store/stats", 404),
        ("POST /v1/store/stats%00", 404),
        ("POST /v1/store/%ff%fe", 404),
        ("POST /v1/store/%", 404),
        ("GET /%0d%0aX-Injected:%20yes", 404),
    ],
)
async def test_paths_and_methods(served: Served, line: str, status: int) -> None:
    """What is not there is a 404, and what is there for another method a 405 that names it."""
    method, path = line.split(" ", 1)
    async with connected(served.port, request(path, STATS, method=method)) as raw:
        got, headers, _ = await raw.answer() if method != "HEAD" else await _head_only(raw)
        assert got == status
        assert "x-injected" not in headers
        assert ("allow" in headers) == (status == 405)


async def _head_only(raw: Raw) -> tuple[int, dict[str, str], bytes]:
    head = (await raw.reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    return int(first.split()[1]), {line.partition(":")[0]: line.partition(":")[2] for line in lines}, b""


async def test_names_that_are_not_this_machines(served: Served) -> None:
    """Without keys, a request for another host, such as a browser sends for a foreign page, is refused."""
    for host in ("evil.example.org", "127.0.0.1.evil.example.org", "169.254.1.1:8080", "[2001:db8::1]"):
        async with connected(served.port, ASK.replace(b"localhost", host.encode())) as raw:
            assert (await raw.answer())[0] == 421
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "[::1]"):
        async with connected(served.port, ASK.replace(b"localhost", host.encode())) as raw:
            assert (await raw.answer())[0] == 200


async def test_pages_from_elsewhere(served: Served) -> None:
    """Without keys, what a browser sends for a page from elsewhere is refused, also if it needs no body."""
    for origin in ("https://evil.example.org", "null", "file://", "http://127.0.0.1.evil.example.org:8080"):
        data = request("/v1/admin/tasks/cleanup", b"", headers=[f"Origin: {origin}"])
        async with connected(served.port, data) as raw:
            assert (await raw.answer())[0] == 421
    for origin in ("http://localhost:8080", "http://127.0.0.1:1", "https://[::1]:8080"):
        async with connected(served.port, request(PATH + "stats", STATS, headers=[f"Origin: {origin}"])) as raw:
            assert (await raw.answer())[0] == 200


async def test_compressed_bodies(served: Served) -> None:
    """A compressed body is refused unread, however small it says it is."""
    bomb = gzip.compress(bytes(10_000_000))
    for encoding in ("gzip", "deflate", "br", "zstd", "identity, gzip"):
        data = request(PATH + "stats", bomb, headers=[f"Content-Encoding: {encoding}"])
        async with connected(served.port, data) as raw:
            assert (await raw.answer())[0] == 415
    async with connected(served.port, request(PATH + "stats", bomb)) as raw:
        assert (await raw.answer())[0] in (400, 422)


# ------------------------------------------------------------------------------------------------- rubbish as bodies


def _deep(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


RUBBISH: dict[str, bytes] = {
    "nothing": b"",
    "nil": b"\xc0",
    "no msgpack": b"\xc1",
    "text": b"{}",
    "cut": b"\x81\xa6ten",
    "two values": msgspec.msgpack.encode({}) * 2,
    "deep": _deep(100_000),
    "deep in a field": b"\x81\xa6tenant" + _deep(50_000),
    "a long array that is not there": b"\xdd\xff\xff\xff\xff",
    "a long map that is not there": b"\xdf\xff\xff\xff\xff",
    "long bytes that are not there": b"\xc6\xff\xff\xff\xff",
    "a foreign extension": b"\xd4\x05\x00",
    "bad text": b"\x81\xa6tenant\xa2\xff\xfe",
    "a key that is no text": b"\x81\x01\x02",
}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
async def test_rubbish(served: Served, verb: Verb[Any]) -> None:
    """Bytes that are no question are a 400 or a 422 at every verb; the connection goes on."""
    async with connected(served.port) as raw:
        for name, body in RUBBISH.items():
            if name == "bad text" and "tenant" not in verb.asks.__struct_fields__:
                continue  # what a verb does not know is passed over
            await raw.send(request(PATH + verb.name, body))
            status, _, answer = await raw.answer()
            assert status in (400, 422), (name, answer)
            assert msgspec.json.decode(answer)["code"] in ("malformed", "invalid")


#: What a field may wrongly hold: other types, and values at and beyond the edges of its own.
WRONG: tuple[object, ...] = (
    None, True, -1, 0, 2**63 - 1, 2**64 - 1, -(2**63), float("nan"), float("inf"), -0.5, 1e308, "", "*", "default",
    "x" * 100_000, "\x00", "\ud7ff\n\r", "../..", b"", b"x", bytes(16), b"\xff" * 16, bytes(100_000), [], [[]], [None],
    [b""], [bytes(16)] * 1_001, ["x"] * 1_001, {}, {"": {}}, [{"type": "OnReady"}], {"place": "nowhere"},
    [{"command": "a", "type": "NewTask"}], [{"command": "a", "delay_s": float("nan")}],
    [{"command": "a", "run_at_ms": 2**63 - 1}], {"payloads": [], "options": []},
    {"payloads": [b""], "options": [{"command": "a"}], "kinds": [9]},
    {"payloads": [b""], "options": [{"command": "a"}], "kinds": [-1]},
    {"payloads": [b""] * 2, "options": [{"command": "a"}], "keys": ["k"]},
    {"name": "w", "tasks": [b"x"]}, {"name": "w", "pid": -(2**63)}, {"limits": {"in_flight": -1}}, {"backoff": {}},
)  # fmt: skip


def _sound(verb: Verb[Any]) -> dict[str, Any]:
    """A question that is all right, as it travels."""
    values: dict[str, Any] = {
        "tenant": TENANT, "tasks": [{"command": "a"}], "commands": ["a"], "claim_id": new_id(), "refs": [new_id()],
        "ids": [new_id()], "wait_s": 0.0, "which": [new_id()], "result_ttl_s": 1.0, "chunk_id": new_id(),
        "rows": {"payloads": [b""], "options": [{"command": "a"}]}, "name": "load", "seq": 1, "chunk_ids": [],
        "command": "a", "config": {}, "info": {"name": "w"}, "ttl_s": 1.0, "reader": "r", "shard": 0, "position": None,
        "every": 1_000,
        "topics": [{"type": "OnReady", "tenant": TENANT, "command": "a"}],
        "beats": [{"tenant": TENANT, "id": new_id(), "token": new_id()}],
        "settlements": [{"tenant": TENANT, "id": new_id(), "token": new_id(), "kind": "complete"}],
    }  # fmt: skip
    needed = {field.name for field in msgspec.structs.fields(verb.asks)}
    asked = {name: value for name, value in values.items() if name in needed}
    if verb.name == "list":
        asked["which"] = {}
    return asked


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb is not SUBSCRIBE], ids=lambda verb: verb.name)
async def test_wrong_values(served: Served, verb: Verb[Any]) -> None:
    """Whatever stands in whatever field, at every verb, is taken or refused; never does the server fail."""
    sound = _sound(verb)
    async with connected(served.port) as raw:
        await raw.send(request(PATH + verb.name, msgspec.msgpack.encode(sound)))
        status, _, answer = await raw.answer()
        assert status == 200, answer
        for field in msgspec.structs.fields(verb.asks):
            for value in WRONG:
                if field.name == "wait_s" and isinstance(value, float | int) and value > 0:
                    continue  # it would wait
                await raw.send(request(PATH + verb.name, msgspec.msgpack.encode({**sound, field.name: value})))
                status, _, answer = await raw.answer()
                assert 200 <= status < 500, (field.name, value, answer)


KINDS: dict[str, type[msgspec.Struct]] = {
    "tasks": NewTask,
    "beats": Heartbeat,
    "settlements": Settlement,
    "info": WorkerInfo,
    "config": QueueConfig,
}


@pytest.mark.parametrize(
    ("verb", "field"),
    [
        ("enqueue", "tasks"),
        ("heartbeat", "beats"),
        ("settle", "settlements"),
        ("register", "info"),
        ("configure", "config"),
    ],
)
async def test_wrong_values_within(served: Served, verb: str, field: str) -> None:
    """The same for the fields of what is in a batch, and in the other structs."""
    sound = _sound(next(one for one in VERBS if one.name == verb))
    item = sound[field][0] if isinstance(sound[field], list) else sound[field]
    names = [one.name for one in msgspec.structs.fields(KINDS[field])]
    async with connected(served.port) as raw:
        for name in names:
            for value in WRONG:
                spoilt = {**item, name: value}
                asked = {**sound, field: [spoilt] if isinstance(sound[field], list) else spoilt}
                await raw.send(request(PATH + verb, msgspec.msgpack.encode(asked)))
                status, _, answer = await raw.answer()
                assert 200 <= status < 500, (name, value, answer)


async def test_wrong_topics(served: Served) -> None:
    """A subscription to nonsense is refused; one to something holds until its client goes, and leaves nothing."""
    for value in WRONG:
        async with connected(
            served.port, request(PATH + "subscribe", msgspec.msgpack.encode({"topics": value}))
        ) as raw:
            head = await raw.reader.readuntil(b"\r\n\r\n")
            assert int(head.split()[1]) < 500, value
    sound = msgspec.msgpack.encode(_sound(SUBSCRIBE))
    async with connected(served.port, request(PATH + "subscribe", sound)) as raw:
        assert b"200" in await raw.reader.readuntil(b"\r\n\r\n")
        assert await raw.reader.readexactly(len(b"1\r\n\0\r\n")) == b"1\r\n\0\r\n"
        await served.others_are_served()
    await until(lambda: not served.service.gate._waiting)
