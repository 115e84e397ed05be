"""Another tenant's task does not exist: not to be seen, held, settled, cancelled, replayed or listed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from dibs.ids import id_to_text, new_id
from dibs.server.auth import Principal, Scope, Verifier
from dibs.stores.direct import DirectStore
from tests.server.http import Api, Said
from tests.server.serving import served

SCOPES = frozenset({Scope.ENQUEUE, Scope.CLAIM, Scope.ADMIN})


class ByTenant(Verifier):
    """Takes a token for the name of a tenant; everybody has the same subject."""

    async def verify(self, token: str) -> Principal:
        """Whoever says it is believed."""
        return Principal(token, "w", SCOPES)

    async def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
async def two(store: DirectStore) -> AsyncIterator[tuple[Api, Api]]:
    """Two tenants of one server."""
    async with (
        served(store, anybody=None, verifiers=[ByTenant()]) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Api(session, url, "t1"), Api(session, url, "t2")


def essence(said: Said) -> object:
    """An answer without what is different in every one."""
    return said.status, {name: value for name, value in said.body.items() if name != "requestId"}


@pytest.mark.parametrize("prefix", ["/v1", "/v1/codeq"])
@pytest.mark.parametrize("state", ["ready", "held", "dead"])
async def test_it_answers_as_an_id_that_nobody_used(two: tuple[Api, Api], prefix: str, state: str) -> None:
    """Word by word, whatever is asked, and with the very token of the lease."""
    own, other = two
    task = await own.create()
    token = "00" * 16
    if state != "ready":
        token = (await own.claim())["leaseToken"]
    if state == "dead":
        failure = {"leaseToken": token, "status": "FAILED", "error": "no"}
        await own.post(f"/v1/tasks/{task['id']}/result", failure)
    before = (await own.get(f"/v1/tasks/{task['id']}")).body

    async def ask(name: str) -> list[object]:
        path = f"{prefix}/tasks/{name}"
        lease = {"leaseToken": token}
        item = {"taskId": name, **lease}
        said = [
            await other.get(path),
            await other.get(f"{path}/result"),
            await other.get(f"{path}/result?waitSeconds=1"),
            await other.delete(path),
            await other.post(f"{path}/heartbeat", lease),
            await other.post(f"{path}/result", {**lease, "status": "COMPLETED"}),
            await other.post(f"{path}/nack", lease),
            await other.post(f"{path}/nack", {**lease, "delaySeconds": 1}),
            await other.post(f"{path}/abandon", lease),
            await other.post(f"{path}/abandon"),
            await other.post(f"{prefix}/admin/dead/replay", {"ids": [name]}),
            await other.post(f"{prefix}/admin/dead/purge", {"ids": [name]}),
            await other.post(f"{prefix}/tasks/batch/heartbeat", {"heartbeats": [item]}),
            await other.post(f"{prefix}/tasks/batch/results", {"results": [{**item, "status": "COMPLETED"}]}),
        ]
        return [str(essence(one)).replace(name, "ID") for one in said]

    assert await ask(task["id"]) == await ask(id_to_text(new_id()))
    assert (await own.get(f"/v1/tasks/{task['id']}")).body == before


async def test_keys_and_ids_are_ones_own(two: tuple[Api, Api]) -> None:
    """A key that another tenant uses is free, and so is an id."""
    own, other = two
    task = await own.create(idempotencyKey="k", payload="secret")
    assert "duplicate" not in await other.create(idempotencyKey="k")
    assert "already" not in await other.create(id=task["id"], payload="mine")
    assert (await own.get(f"/v1/tasks/{task['id']}")).body["payload"] == "secret"


async def test_nothing_of_another_tenant_is_given_out_or_listed(two: tuple[Api, Api]) -> None:
    """Neither by claims, nor by listings and counts."""
    own, other = two
    await own.create()
    assert (await other.post("/v1/tasks/claim", {"commands": ["job"]})).status == 204
    assert (await other.get("/v1/tasks")).body["tasks"] == []
    assert (await other.get("/v1/admin/queues")).body["queues"] == []
    assert (await other.get("/v1/admin/queues?tenant=t1")).status == 403
