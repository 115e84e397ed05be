"""What a server says while its store is broken or full, and how it goes on."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from dibs.stores import open_local, open_store
from dibs.task import NewTask, Rejected
from tests.cli.terminal import PATIENCE_S
from tests.server.http import Api, Said
from tests.server.running import ServerProcess, until

LARGE = {"command": "job", "payload": "x" * 50_000}
SMALL = {"command": "job"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server over a store with little room."""
    with ServerProcess(tmp_path, "--max-bytes", "4MiB", "--disk-reserve-bytes", "0") as server:
        yield server.start().until_serves()


@pytest.fixture
async def api(server: ServerProcess) -> AsyncIterator[Api]:
    """Calls it."""
    async with aiohttp.ClientSession() as session:
        yield Api(session, server.url)


async def until_answered(api: Api, method: str, path: str, body: object, status: int) -> Said:
    """Repeats a call until it is answered like that."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            said = await api.call(method, path, **({} if body is None else {"json": body}))
            if said.status == status:
                return said
            await asyncio.sleep(0.02)


async def until_said(server: ServerProcess, text: str) -> None:
    """Waits until the server has logged something."""
    await until(lambda: text in server.said)


async def until_measured(api: Api, line: str) -> None:
    """Waits until the metrics have this line."""
    async with asyncio.timeout(PATIENCE_S):
        while line.encode() not in (await api.get("/metrics")).body:  # noqa: ASYNC110 - nobody tells when
            await asyncio.sleep(0.02)


async def test_a_write_that_fails(server: ServerProcess, api: Api, tmp_path: Path) -> None:
    """While nothing can be written calls say 503 and when to come again, and so does readyz; healthz goes on. When the
    disk is back the server opens the store again by itself, and what was acknowledged is there."""
    first = await api.create("job")
    assert server.process is not None
    size = (tmp_path / "store" / "data.mdb").stat().st_size
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size + 8192, resource.RLIM_INFINITY))
    said = await until_answered(api, "POST", "/v1/tasks", LARGE, 503)
    assert (said.body["code"], said.headers["retry-after"]) == ("store_unavailable", "1")
    await until_answered(api, "GET", "/readyz", None, 503)
    assert (await api.get("/healthz")).status == 200
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await until_answered(api, "GET", "/readyz", None, 200)
    await until_answered(api, "POST", "/v1/tasks", SMALL, 202)
    assert (await api.get(f"/v1/tasks/{first['id']}")).status == 200
    assert "the store was opened again" in server.said


async def test_a_store_that_is_moved_away(server: ServerProcess, api: Api, tmp_path: Path) -> None:
    """Calls say 503, never 500, and readyz too, until it is back: no empty store is made in its place."""
    first = await api.create("job")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert (await api.post("/v1/tasks", SMALL)).status == 503
    await until_answered(api, "GET", "/readyz", None, 503)
    await until_said(server, "cannot be opened again: there is no store")
    assert not (tmp_path / "store").exists()
    assert (await api.get(f"/v1/tasks/{first['id']}")).status == 503
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    await until_answered(api, "GET", "/readyz", None, 200)
    assert (await api.get(f"/v1/tasks/{first['id']}")).status == 200


async def test_another_store_in_its_place(server: ServerProcess, api: Api, tmp_path: Path) -> None:
    """It is recognised and left alone: what was acknowledged is not in it. The first one is taken when it is back."""
    first = await api.create("job")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    async with await open_local(tmp_path / "store"):
        pass
    await until_said(server, "there is another store in the place")
    assert (await api.get("/readyz")).status == 503
    assert (await api.post("/v1/tasks", SMALL)).status == 503
    async with await open_local(tmp_path / "store") as other:
        assert not (await other.stats("default")).queues
    (tmp_path / "store").rename(tmp_path / "other")
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    await until_answered(api, "GET", "/readyz", None, 200)
    assert (await api.get(f"/v1/tasks/{first['id']}")).status == 200


async def test_a_file_in_its_place(server: ServerProcess, api: Api, tmp_path: Path) -> None:
    """What is no directory is no store either; the server goes on looking."""
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").write_text("no store")
    await until_said(server, "cannot be opened again")
    (tmp_path / "store").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    await until_answered(api, "GET", "/readyz", None, 200)


async def test_clients_learn_nothing_of_the_servers_files(server: ServerProcess, api: Api, tmp_path: Path) -> None:
    """What is wrong with the store is for the log, under the id of the request."""
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for path, body in (("/v1/tasks", SMALL), ("/v1/tasks/batch", {"tasks": [SMALL]})):
        said = await api.call("POST", path, json=body, headers={"x-request-id": f"mine{path}"})
        assert (said.status, said.body["code"]) in {(503, "store_unavailable"), (503, "store_closed")}
        assert str(tmp_path) not in str(said.body)
        await until_said(server, f"request id=mine{path} client=127.0.0.1")
    assert str(tmp_path / "store") in server.said


async def test_one_shard_is_down(tmp_path: Path) -> None:
    """The server stays ready, says in its metrics that a shard is down, and opens that one again, not all of them."""
    with ServerProcess(tmp_path, store=f"shards:{tmp_path / 'set'}?n=2") as server:
        server.start().until_serves()
        async with aiohttp.ClientSession() as session:
            api = Api(session, server.url)
            (tmp_path / "set" / "1").rename(tmp_path / "elsewhere")
            await until_measured(api, "dibs_shards_down 1.0")
            for _ in range(20):
                assert (await api.get("/readyz")).status == 200
                assert (await api.post("/v1/tasks", SMALL)).status == 202
            (tmp_path / "elsewhere").rename(tmp_path / "set" / "1")
            await until_measured(api, "dibs_shards_down 0.0")
            assert "shard 1" in server.said
            assert "the store was opened again" not in server.said


async def test_all_shards_are_down(tmp_path: Path) -> None:
    """Then the server is not ready, until one is back."""
    with ServerProcess(tmp_path, store=f"shards:{tmp_path / 'set'}?n=2") as server:
        server.start().until_serves()
        async with aiohttp.ClientSession() as session:
            api = Api(session, server.url)
            (tmp_path / "set").rename(tmp_path / "elsewhere")
            said = await until_answered(api, "POST", "/v1/tasks", SMALL, 503)
            assert str(tmp_path) not in str(said.body)
            await until_answered(api, "GET", "/readyz", None, 503)
            assert not (tmp_path / "set").exists()
            (tmp_path / "elsewhere").rename(tmp_path / "set")
            await until_answered(api, "GET", "/readyz", None, 200)


async def test_a_full_store_takes_results_and_no_tasks(server: ServerProcess, api: Api, tmp_path: Path) -> None:
    """Enqueues are refused with 507; heartbeats and results are taken, and nothing that was acknowledged is lost."""
    await api.create("job")
    lease = (await api.post("/v1/tasks/claim", {"commands": ["job"]})).body
    created = []
    async with asyncio.timeout(PATIENCE_S):
        while (said := await api.post("/v1/tasks", LARGE)).status == 202:
            created.append(said.body["id"])
    assert (said.status, said.body["code"]) == (507, "store_full")
    [item] = (await api.post("/v1/tasks/batch", {"tasks": [LARGE]})).body["results"]
    assert item["code"] == "store_full"
    assert str(tmp_path) not in f"{said.body}{item}"
    async with await open_store(server.url) as remote:
        [refused] = await remote.enqueue("default", [NewTask(command="job", payload=b"x" * 50_000)])
    assert isinstance(refused, Rejected)
    assert refused.code == "store_full"
    assert str(tmp_path) not in refused.message
    token = {"leaseToken": lease["leaseToken"]}
    assert (await api.post(f"/v1/tasks/{lease['id']}/heartbeat", token)).status == 200
    done = await api.post(f"/v1/tasks/{lease['id']}/result", {**token, "status": "COMPLETED", "result": 1})
    assert done.status == 200
    assert await server.stop() == 0
    async with await open_local(tmp_path / "store") as store:
        assert (await store.doctor()).clean
        assert (await store.stats("default")).total.ready == len(created)
