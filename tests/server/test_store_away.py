"""What a server says while its store is broken or full, and how it goes on."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from dibs.stores import open_local
from tests.cli.terminal import PATIENCE_S
from tests.server.http import Api, Said
from tests.server.running import ServerProcess

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
    token = {"leaseToken": lease["leaseToken"]}
    assert (await api.post(f"/v1/tasks/{lease['id']}/heartbeat", token)).status == 200
    done = await api.post(f"/v1/tasks/{lease['id']}/result", {**token, "status": "COMPLETED", "result": 1})
    assert done.status == 200
    assert await server.stop() == 0
    async with await open_local(tmp_path / "store") as store:
        assert (await store.doctor()).clean
        assert (await store.stats("default")).total.ready == len(created)
