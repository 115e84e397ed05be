from __future__ import annotations

import aiohttp
import pytest

from dibs.server.limits import TenantLimits
from dibs.stores.direct import DirectStore
from tests.server.http import Api
from tests.server.serving import served

LITTLE = TenantLimits(read_per_s=0.001, read_burst=1.0)


@pytest.mark.parametrize("prefix", ["/v1", "/v1/codeq"])
async def test_what_was_done_is_not_refused_afterwards(store: DirectStore, prefix: str) -> None:
    """A create or settle whose answer shows the task is not a look at it: no limit on those can make it fail."""
    async with served(store, limits=LITTLE) as url, aiohttp.ClientSession() as session:
        api = Api(session, url)
        for _ in range(5):
            said = await api.post(f"{prefix}/tasks", {"command": "job", "idempotencyKey": "k", "payload": 1})
            assert said.status == 202
        task = (await api.post(f"{prefix}/tasks/claim", {"commands": ["job"]})).body
        headers = {"X-Lease-Token": task["leaseToken"]}
        path = f"{prefix}/tasks/{task['id']}"
        looks = [(await api.get(path)).status for _ in range(2)]
        assert looks == [200, 429]
        assert (await api.post(f"{path}/nack", headers=headers)).status == 200
        await api.post(f"{prefix}/tasks", {"command": "other"})
        task = (await api.post(f"{prefix}/tasks/claim", {"commands": ["other"]})).body
        headers = {"X-Lease-Token": task["leaseToken"]}
        done = await api.post(f"{prefix}/tasks/{task['id']}/result", {"status": "COMPLETED"}, headers=headers)
        assert (done.status, done.body["status"]) == (200, "COMPLETED")


async def test_a_limit_says_how_long_to_wait(store: DirectStore) -> None:
    """429, with the seconds in the header and in the body; a batch costs what is in it."""
    limits = TenantLimits(enqueue_per_s=0.1, enqueue_burst=10.0)
    async with served(store, limits=limits) as url, aiohttp.ClientSession() as session:
        api = Api(session, url)
        said = await api.post("/v1/tasks/batch", {"tasks": [{"command": "job"}] * 10})
        assert all("task" in item for item in said.body["results"])
        said = await api.post("/v1/tasks", {"command": "job"})
        assert (said.status, said.body["code"]) == (429, "limit_exceeded")
        assert 0 < said.body["retryAfterSeconds"] <= 10
        assert 1 <= int(said.headers["retry-after"]) <= 10


async def test_a_ceiling_refuses_what_is_over_it(store: DirectStore) -> None:
    """Item by item in a batch, as if each had come alone."""
    async with served(store, limits=TenantLimits(payload_max_bytes=10)) as url, aiohttp.ClientSession() as session:
        api = Api(session, url)
        tasks = [{"command": "job", "payload": "x" * 50}, {"command": "job", "payload": "x"}]
        said = await api.post("/v1/tasks/batch", {"tasks": tasks})
        assert [item.get("statusCode") for item in said.body["results"]] == [413, None]
        assert (await api.post("/v1/tasks", tasks[0])).status == 413
