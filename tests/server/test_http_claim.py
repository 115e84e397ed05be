from __future__ import annotations

import asyncio
from uuid import uuid4

import aiohttp
import pytest

from dibs.server.auth import Principal, Scope
from dibs.stores.direct import DirectStore
from tests.server.http import Api
from tests.server.serving import served


async def test_nothing_to_do_is_204(api: Api) -> None:
    """Without a body."""
    for path in ("/v1/tasks/claim", "/v1/tasks/claim/batch"):
        said = await api.post(path, {"commands": ["job"], **({"count": 3} if "batch" in path else {})})
        assert (said.status, said.body) == (204, b"")


async def test_a_claim_brings_the_token(api: Api) -> None:
    """And what a worker has to know: the payload, the attempt, until when it holds."""
    task = await api.create(payload={"a": 1}, idempotencyKey="k", timeoutSeconds=5)
    claimed = await api.claim(leaseSeconds=60, worker="w1")
    assert claimed["id"] == task["id"]
    assert (claimed["status"], claimed["place"], claimed["attempts"]) == ("IN_PROGRESS", "leased", 1)
    assert (claimed["leaseSeconds"], claimed["workerId"], claimed["idempotencyKey"]) == (60, "w1", "k")
    assert len(bytes.fromhex(claimed["leaseToken"])) == 16
    seen = (await api.get(f"/v1/tasks/{task['id']}")).body
    assert (seen["workerId"], seen["leaseUntil"]) == ("w1", claimed["leaseUntil"])
    assert "leaseToken" not in seen


async def test_a_claim_without_a_lease_takes_the_tasks(api: Api) -> None:
    """Its own, then the queue's, then 30 seconds."""
    await api.create(leaseSeconds=77)
    await api.create()
    assert [(await api.claim())["leaseSeconds"] for _ in range(2)] == [77, 30]


async def test_commands_are_tried_in_order(api: Api) -> None:
    """As they are named."""
    await api.create("b")
    await api.create("a")
    said = await api.post("/v1/tasks/claim/batch", {"commands": ["a", "b"], "count": 10})
    assert [task["command"] for task in said.body["tasks"]] == ["a", "b"]


async def test_a_repeated_claim_returns_the_same_lease(api: Api) -> None:
    """By its claimId, so that an answer that was lost can be asked for again."""
    await api.create()
    await api.create()
    claim_id = str(uuid4())
    first = await api.claim(claimId=claim_id)
    again = await api.claim(claimId=claim_id)
    assert (first["id"], first["leaseToken"]) == (again["id"], again["leaseToken"])


async def test_a_waiting_claim_is_woken(api: Api) -> None:
    """By the enqueue, long before its time is over."""
    waiting = asyncio.ensure_future(api.claim(waitSeconds=30))
    await asyncio.sleep(0.05)
    task = await api.create()
    assert (await waiting)["id"] == task["id"]


async def test_a_client_that_goes_away_takes_nothing_with_it(api: Api, store: DirectStore) -> None:
    """Its waiting claim is given up, and the next task is for somebody else."""
    waiting = asyncio.ensure_future(api.claim(waitSeconds=30))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.1)
    task = await api.create()
    assert (await api.claim())["id"] == task["id"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "commands"),
        ({"commands": []}, "commands"),
        ({"commands": ["a b"]}, "commands[0]"),
        ({"commands": ["a"] * 101}, "commands"),
        ({"commands": ["job"], "waitSeconds": 31}, "waitSeconds"),
        ({"commands": ["job"], "leaseSeconds": 0.5}, "leaseSeconds"),
        ({"commands": ["job"], "claimId": "7"}, "claimId"),
        ({"commands": ["job"], "worker": ""}, "worker"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, options: dict[str, object], field: str) -> None:
    """422, and the field in the answer."""
    said = await api.post("/v1/tasks/claim", options)
    assert (said.status, said.body["field"]) == (422, field)


async def test_a_command_named_twice_is_refused(api: Api) -> None:
    """As the queue refuses it."""
    said = await api.post("/v1/tasks/claim", {"commands": ["a", "a"]})
    assert (said.status, said.body["code"]) == (422, "invalid_option")


@pytest.mark.parametrize("count", [0, 1001, None, "3"])
async def test_a_batch_takes_1_to_1000(api: Api, count: object) -> None:
    """Anything else is refused."""
    said = await api.post("/v1/tasks/claim/batch", {"commands": ["job"], "count": count})
    assert (said.status, said.body["field"]) == (422, "count")


async def test_a_limited_token_claims_what_it_is_for(store: DirectStore) -> None:
    """Without commands all of its own; another's is forbidden."""
    limited = Principal("default", "w", frozenset({Scope.CLAIM, Scope.ENQUEUE}), frozenset({"mine"}))
    async with served(store, anybody=limited) as url, aiohttp.ClientSession() as session:
        api = Api(session, url)
        assert (await api.post("/v1/tasks", {"command": "other"})).status == 403
        await api.create("mine")
        assert (await api.post("/v1/tasks/claim", {})).body["command"] == "mine"
        assert (await api.post("/v1/tasks/claim", {"commands": ["other"]})).status == 403
        said = await api.post("/v1/tasks/batch", {"tasks": [{"command": "other"}, {"command": "mine"}]})
        assert [item.get("statusCode") for item in said.body["results"]] == [403, None]
