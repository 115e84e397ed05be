"""What the server says to requests that are wrong, large, deep or strange."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from tests.server.http import Api
from tests.server.serving import BODY_MAX_BYTES

JSON = {"Content-Type": "application/json"}


async def raw(api: Api, *parts: bytes) -> tuple[int, bytes]:
    """Sends bytes to the server; returns the status and everything that comes back until it closes, or has answered."""
    url = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1]), head
    finally:
        writer.close()


async def test_a_large_body_is_refused_before_it_is_sent(api: Api) -> None:
    """413 to the head alone; the connection is closed, since its body will not be read."""
    head = f"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {10**12}\r\n\r\n"
    status, answer = await raw(api, head.encode())
    assert status == 413
    assert b"connection: close" in answer.lower()


async def test_a_body_without_a_length_is_refused_at_the_limit(api: Api) -> None:
    """413 while it is still being sent."""

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(BODY_MAX_BYTES // 65_536 + 8):
            yield b" " * 65_536

    async with api.session.post(f"{api.url}/v1/tasks", data=endless(), headers=JSON) as answer:
        assert answer.status == 413
        assert (await answer.json())["code"] == "body_too_large"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/msgpack", "application/x-www-form-urlencoded", ""])
async def test_a_body_has_to_say_that_it_is_json(api: Api, kind: str | None) -> None:
    """415, also for what a foreign page may have a browser send without asking."""
    headers = {} if kind is None else {"Content-Type": kind}
    async with api.session.post(
        f"{api.url}/v1/tasks", data=b'{"command": "job"}', headers=headers, skip_auto_headers=["Content-Type"]
    ) as answer:
        assert answer.status == 415


async def test_a_character_set_may_be_named(api: Api) -> None:
    """As Java's client does."""
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert (await api.call("POST", "/v1/tasks", data=b'{"command": "job"}', headers=kind)).status == 202


async def test_a_compressed_body_is_not_unpacked(api: Api) -> None:
    """415: a bomb stays small."""
    bomb = gzip.compress(b'{"command": "job", "payload": "' + b"x" * (64 << 20) + b'"}')
    assert len(bomb) < BODY_MAX_BYTES
    said = await api.call("POST", "/v1/tasks", data=bomb, headers={**JSON, "Content-Encoding": "gzip"})
    assert (said.status, said.body["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"command": "job"',
        b'{"command": "job"} x',
        b'{"command": "job", "payload": NaN}',
        b'{"command": "job", "payload": [Infinity]}',
        b'{"command": "job", "payload": "\xff"}',
        b'{"command": "\xff"}',
        b'{"command": "job", "payload": "\\ud800"}',
        b'{"command": "job", "payload": "\\udc00x"}',
        b'{"command": "job", "payload": 01}',
        b'{"command": "job", "payload": {"a": 1,}}',
        b"\xef\xbb\xbf{}",
        b'{"command": "job", "payload": ' + b"[" * 100_000,
        b'{"command": "job", "payload": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"command": "job", "payload": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
        b'{"command": "job", "payload": ' + b"[" * 129 + b"]" * 129 + b"}",
    ],
)
async def test_what_cannot_be_read_is_malformed(api: Api, body: bytes) -> None:
    """400, and nothing is stored."""
    said = await api.call("POST", "/v1/tasks", data=body, headers=JSON)
    assert (said.status, said.body["code"]) == (400, "malformed")
    assert (await api.get("/v1/tasks")).body["tasks"] == []


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000])
async def test_numbers_that_nothing_holds_are_refused(api: Api, number: str) -> None:
    """422 that names the payload: whoever reads it would get something else."""
    body = f'{{"command": "job", "payload": [{number}]}}'.encode()
    said = await api.call("POST", "/v1/tasks", data=body, headers=JSON)
    assert (said.status, said.body["field"]) == (422, "payload")


async def test_what_is_wide_is_not_deep(api: Api) -> None:
    """Depth is counted, not brackets."""
    payload = [[{"a": [number]}] for number in range(2000)]
    assert (await api.create(payload=payload))["payload"] == payload
    deepest = b"[" * 128 + b"]" * 128
    said = await api.call("POST", "/v1/tasks", data=b'{"command": "job", "payload": ' + deepest + b"}", headers=JSON)
    assert said.status == 202


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"text"'])
async def test_a_body_of_another_shape_is_refused(api: Api, body: bytes) -> None:
    """422."""
    assert (await api.call("POST", "/v1/tasks", data=body, headers=JSON)).status == 422


async def test_a_result_is_judged_like_a_payload(api: Api) -> None:
    """Too deep, or of numbers that nothing holds: refused, and the lease is still there."""
    await api.create()
    task = await api.claim()
    for result, status in ((b"[" * 200 + b"]" * 200, 400), (b"1e999", 422)):
        token = task["leaseToken"].encode()
        body = b'{"status": "COMPLETED", "leaseToken": "' + token + b'", "result": ' + result + b"}"
        said = await api.call("POST", f"/v1/tasks/{task['id']}/result", data=body, headers=JSON)
        assert said.status == status
    assert (await api.get(f"/v1/tasks/{task['id']}")).body["status"] == "IN_PROGRESS"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/tasks", "GET, HEAD, POST"),
        ("GET", "/v1/tasks/claim", "POST"),
        ("POST", "/v1/tasks/01890a5d-ac96-774b-bcce-b302099a8057", "DELETE, GET, HEAD"),
        ("POST", "/v1/admin/queues", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(api: Api, method: str, path: str, allowed: str) -> None:
    """405 with Allow."""
    said = await api.call(method, path)
    assert (said.status, said.headers["allow"]) == (405, allowed)


async def test_head(api: Api) -> None:
    """What can be got can be asked for without its body; the connection is good for the next call."""
    task = await api.create("job")
    for path, status in ((f"/v1/tasks/{task['id']}", 200), ("/", 200), ("/nowhere", 404), ("/v1/tasks/claim", 405)):
        said = await api.call("HEAD", path)
        assert (said.status, said.body) == (status, b"")
        assert int(said.headers["content-length"]) > 0
    assert (await api.get(f"/v1/tasks/{task['id']}")).body["id"] == task["id"]


async def test_where_nothing_is_asked_for(api: Api) -> None:
    """The page that says what there is."""
    assert (await api.get("/")).body == (await api.get("/docs")).body


@pytest.mark.parametrize("body", [b'{"command": "a', b'{"command": "\\ud800"}', b'{"command": "\\ud800\\u0041"}'])
async def test_half_a_character(api: Api, body: bytes) -> None:
    """A body that ends too early, also within a character, is malformed, and the words fit both."""
    said = await api.call("POST", "/v1/tasks", data=body, headers=JSON)
    assert (said.status, said.body["code"]) == (400, "malformed")
    assert "truncated" not in said.body["error"]


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/tasks/", "/v2/tasks", "/v1/tasks/a/b/c", "/v1//tasks"])
async def test_there_is_nothing_elsewhere(api: Api, path: str) -> None:
    """404, and where to look."""
    said = await api.get(path)
    assert said.status == 404
    if path != "/v1/tasks/":
        assert said.body["code"] == "no_such_route"


async def test_request_ids_come_back(api: Api) -> None:
    """The caller's own if it is a sane one, and with errors too; otherwise a new one."""
    said = await api.get("/v1/tasks/none", headers={"X-Request-Id": "abc-1"})
    assert (said.headers["x-request-id"], said.body["requestId"]) == ("abc-1", "abc-1")
    for strange in ("a b", "x" * 129, 'a"b'):
        said = await api.get("/v1/tasks", headers={"X-Request-Id": strange})
        assert said.headers["x-request-id"] != strange
        assert len(said.headers["x-request-id"]) == 32


@pytest.mark.parametrize("query", ["limit=%FF", "command=%ff%fe"])
async def test_a_query_has_to_be_utf8(api: Api, query: str) -> None:
    """400."""
    status, _ = await raw(api, f"GET /v1/tasks?{query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert status == 400


async def test_the_connection_lives_on_after_a_refusal(api: Api) -> None:
    """What was wrong with one request is no matter for the next."""
    for _ in range(3):
        assert (await api.call("POST", "/v1/tasks", data=b"{", headers=JSON)).status == 400
    await api.create()
