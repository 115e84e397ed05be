"""What one caller can make a server hold, or do at once, is bounded."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from dibs.errors import InvalidInput, LimitExceeded, PayloadTooLarge
from dibs.ids import new_id
from dibs.server.app import ANYBODY, Service, open_service
from dibs.server.config import ServerConfig
from dibs.server.gate import ANSWER_MAX_BYTES
from dibs.server.http import listener
from dibs.server.http.listener import bind
from dibs.server.http.verbs import LISTS
from dibs.settings import Settings
from dibs.stores import open_store
from dibs.stores.remote.verbs import PATH, VERBS, WAITED_MAX
from dibs.task import Kind, NewTask, Rows, Settlement, Status
from tests.server.running import until

TENANT = ANYBODY.tenant
LARGE = bytes(1 << 20)


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    """A server with little room for waiting calls and a ceiling on what is queued."""
    config = ServerConfig(limits={"waiting_max": 3, "queued_bytes_max": 1 << 30})
    service = await open_service(config, Settings(url="memory:"))
    bound = bind("127.0.0.1", 0)
    await service.start(bound)
    yield service, f"http://127.0.0.1:{bound.getsockname()[1]}"
    await service.stop()


async def ask(url: str, verb: str, asked: Any) -> tuple[int, bytes]:
    """Asks a verb as no client of ours would."""
    headers = {"Content-Type": "application/msgpack"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + PATH + verb, data=msgspec.msgpack.encode(asked), headers=headers) as answer,
    ):
        return answer.status, await answer.read()


MANY = [
    (verb.name, field)
    for verb in VERBS
    for field in verb.asks.__struct_fields__
    if field in LISTS and (verb.name, field) != ("list", "which")
]


@pytest.mark.parametrize(("verb", "field"), MANY)
async def test_no_verb_takes_a_list_without_end(service: tuple[Service, str], verb: str, field: str) -> None:
    """What may be many is at most a thousand, in every verb: more is refused before anything is done."""
    samples: dict[str, list[Any]] = {
        "tasks": [{"command": "c"}],
        "commands": ["c"],
        "beats": [{"tenant": TENANT, "id": new_id(), "token": new_id()}],
        "settlements": [{"tenant": TENANT, "id": new_id(), "token": new_id(), "kind": "release"}],
        "topics": [{"type": "OnJournalled"}],
    }
    items = samples.get(field, [new_id()])
    asked = {"tenant": TENANT, "wait_s": 0, "result_ttl_s": 1, field: items * 1_001}
    status, answer = await ask(service[1], verb, asked)
    assert (status, msgspec.json.decode(answer)["code"]) == (422, "invalid_option")


async def test_ids_that_are_none_are_not_remembered(service: tuple[Service, str]) -> None:
    """What is refused leaves nothing behind, however large it is."""
    gate = service[0].gate
    endless = os.urandom(100_000)
    assert (await ask(service[1], "unclaim", {"tenant": TENANT, "claim_id": endless, "for_good": True}))[0] == 422
    claim = {"tenant": TENANT, "commands": ["c"], "claim_id": endless}
    assert (await ask(service[1], "claim", claim))[0] == 422
    chunk = {"tenant": TENANT, "chunk_id": endless, "rows": Rows([b"1"], [NewTask(command="c")])}
    assert (await ask(service[1], "stage", chunk))[0] == 422
    assert not gate._unclaimed
    assert not gate._claims
    assert not gate._limiter._staged.knows(TENANT, endless)


async def test_large_tasks_come_a_few_at_a_time(service: tuple[Service, str]) -> None:
    """A server refuses to answer with more than so many bytes at once; a remote store then asks for fewer."""
    async with await open_store(service[1]) as store:
        ids = [new_id() for _ in range(ANSWER_MAX_BYTES // len(LARGE) + 4)]
        await store.enqueue(TENANT, [NewTask(command="c", id=one, payload=LARGE) for one in ids])
        status, answer = await ask(service[1], "get", {"tenant": TENANT, "refs": ids})
        assert (status, msgspec.json.decode(answer)["code"]) == (413, PayloadTooLarge.code)
        assert (await ask(service[1], "get", {"tenant": TENANT, "refs": ids[:1] * 900}))[0] == 413
        assert [task.id for task in await store.get(TENANT, ids) if task is not None] == ids


async def test_waiting_for_many_tasks(service: tuple[Service, str]) -> None:
    """A call waits for so many at most; a remote store that waits for more is told of the first end all the same."""
    async with await open_store(service[1]) as store:
        ids = [new_id() for _ in range(WAITED_MAX + 50)]
        await store.enqueue(TENANT, [NewTask(command="c", id=one) for one in ids])
        with pytest.raises(InvalidInput):
            await service[0].gate.wait(ANYBODY, TENANT, ids, 0.0)
        waiting = asyncio.ensure_future(store.wait(TENANT, ids, 30))
        [lease] = await store.claim(TENANT, ["c"])
        await store.settle([Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=Kind.COMPLETE)])
        ended = [task.id for task in await waiting if task is not None and task.status is Status.COMPLETED]
        assert ended == [lease.id]


async def test_a_tenant_has_so_many_places_to_wait_in(service: tuple[Service, str]) -> None:
    """Claims, waits and subscriptions share them; whoever comes on top is told when to come again, and others go on."""
    url = f"{service[1]}?give_up_s=0"
    async with await open_store(url) as store:
        await store.enqueue(TENANT, [NewTask(command="done", id=(task_id := new_id()))])
        waits = [
            asyncio.ensure_future(store.claim(TENANT, ["c"], wait_s=30)),
            asyncio.ensure_future(store.claim(TENANT, ["d"], wait_s=30)),
            asyncio.ensure_future(store.wait(TENANT, [task_id], 30)),
        ]
        await until(lambda: service[0].gate._limiter._waiting.get(TENANT) == 3)
        with pytest.raises(LimitExceeded, match="waiting_max"):
            await store.claim(TENANT, ["e"], wait_s=30)
        assert await store.claim(TENANT, ["e"]) == []
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await until(lambda: not service[0].gate._limiter._waiting)


async def test_unread_answers_are_bounded(service: tuple[Service, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that ask for much and read nothing are cut off when all of them together leave too much, the oldest
    first; a client that reads is not."""
    monkeypatch.setattr(listener, "UNREAD_MAX_BYTES", 20 << 20)
    served, url = service
    async with await open_store(url) as store:
        await store.enqueue(TENANT, [NewTask(command="c", id=(task_id := new_id()), payload=LARGE)])
        body = msgspec.msgpack.encode({"tenant": TENANT, "refs": [task_id] * 10})
        head = f"POST {PATH}get HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
        asked = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        silent = []
        for _ in range(4):
            one = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(one, asked)
            silent.append(one)
        await until(lambda: b'dibs_connections_cut_total{why="unread"}' in served.metrics.render())
        held = sum(one.transport.get_write_buffer_size() for one in served._listener.unread)
        assert held <= 20 << 20
        assert len(await store.get(TENANT, [task_id] * 10)) == 10
        for one in silent:
            one.close()
