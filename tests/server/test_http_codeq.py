"""What codeQ's clients do, as they do it: the same calls, fields and answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from dibs.clock import ManualClock
from dibs.ids import id_to_text, new_id
from dibs.server.auth import ALL_SCOPES, Principal, Verifier
from dibs.stores import open_local
from dibs.stores.direct import DirectStore
from tests.server.http import Api
from tests.server.serving import served

Q = "/v1/codeq"


class ByName(Verifier):
    """Takes a token for the name of its bearer."""

    async def verify(self, token: str) -> Principal:
        """Everybody may do everything in one tenant."""
        return Principal("default", token, ALL_SCOPES)

    async def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
async def two(store: DirectStore) -> AsyncIterator[tuple[Api, Api]]:
    """Two workers of one tenant, whose subjects differ."""
    async with (
        served(store, anybody=None, verifiers=[ByName()]) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Api(session, url, "w1"), Api(session, url, "w2")


async def create(api: Api, **options: object) -> dict[str, object]:
    """Creates a task as codeQ's clients do."""
    said = await api.post(f"{Q}/tasks", {"command": "GENERATE_MASTER", "payload": {"jobId": "j-1"}, **options})
    assert said.status == 202, said
    task: dict[str, object] = said.body
    return task


async def claim(api: Api, **options: object) -> dict[str, object]:
    """Claims a task as codeQ's clients do."""
    said = await api.post(f"{Q}/tasks/claim", {"commands": ["GENERATE_MASTER"], **options})
    assert said.status == 200, said
    task: dict[str, object] = said.body
    return task


async def test_a_task_goes_its_way_without_a_token(api: Api) -> None:
    """Create, claim, heartbeat, result, look: what the Python, Node and Go clients send and read."""
    task = await create(api, priority=5, maxAttempts=3, webhook="https://example.org/hook", idempotencyKey="j-1")
    assert json.loads(str(task["payload"])) == {"jobId": "j-1"}
    assert (task["status"], task["priority"], task["maxAttempts"]) == ("PENDING", 5, 3)
    assert {"createdAt", "updatedAt", "tenantId"} <= task.keys()
    claimed = await claim(api, leaseSeconds=300, waitSeconds=0)
    assert (claimed["id"], claimed["status"], claimed["workerId"]) == (task["id"], "IN_PROGRESS", "dev")
    assert claimed["leaseUntil"]
    path = f"{Q}/tasks/{task['id']}"
    assert (await api.post(f"{path}/heartbeat", {"extendSeconds": 300})).body["ok"] is True
    assert (await api.get(f"{path}/result")).status == 404
    record = (await api.post(f"{path}/result", {"status": "COMPLETED", "result": {"ok": True}})).body
    assert (record["taskId"], record["status"], record["result"]) == (task["id"], "COMPLETED", {"ok": True})
    assert record["completedAt"]
    both = (await api.get(f"{path}/result")).body
    assert both["result"] == record
    assert (both["task"]["id"], both["task"]["status"]) == (task["id"], "COMPLETED")


async def test_a_lease_is_by_default_as_long_as_codeqs(api: Api) -> None:
    """Five minutes, also where zero says that nothing is said."""
    clock = ManualClock()
    async with await open_local("memory:", clock=clock) as store, served(store) as url, aiohttp.ClientSession() as http:
        api = Api(http, url)
        for options in ({}, {"leaseSeconds": 0}):
            task = await create(api)
            await claim(api, **options)
            clock.advance(299)
            assert (await api.get(f"{Q}/tasks/{task['id']}")).body["status"] == "IN_PROGRESS"
            assert (await api.post(f"{Q}/tasks/{task['id']}/heartbeat", {})).status == 200
            clock.advance(299)
            assert (await api.post(f"{Q}/tasks/{task['id']}/result", {"status": "COMPLETED"})).status == 200


async def test_a_nack_tells_what_became_of_it(api: Api) -> None:
    """`requeued` with whole seconds, or `dlq`; a delay of zero means the queue's own."""
    await api.put("/v1/admin/queues/GENERATE_MASTER/config", {"backoff": {"kind": "fixed", "baseSeconds": 2.5,
                                                                          "jitter": "none"}})  # fmt: skip
    task = await create(api, maxAttempts=2)
    path = f"{Q}/tasks/{task['id']}"
    await claim(api)
    said = await api.post(f"{path}/nack", {"delaySeconds": 0, "reason": "busy"})
    assert said.body == {"status": "requeued", "delaySeconds": 3}
    assert (await api.get(path)).body["error"] == "busy"
    other = await create(api, maxAttempts=1)
    await claim(api)
    said = await api.post(f"{Q}/tasks/{other['id']}/nack", {"delaySeconds": 30, "reason": "broken"})
    assert said.body == {"status": "dlq", "delaySeconds": 0}
    both = (await api.get(f"{Q}/tasks/{other['id']}/result")).body
    assert (both["result"]["status"], both["result"]["error"]) == ("FAILED", "broken")


async def test_an_abandon_has_no_body(api: Api) -> None:
    """As the Go client sends it: no body, and no type of one."""
    task = await create(api)
    await claim(api)
    assert (await api.post(f"{Q}/tasks/{task['id']}/abandon")).body == {"status": "requeued"}
    await claim(api)
    assert (await api.post(f"{Q}/tasks/{task['id']}/abandon", {})).body == {"status": "requeued"}


async def test_a_failure_has_its_text(api: Api) -> None:
    """Whatever else is sent with it."""
    task = await create(api)
    await claim(api)
    said = await api.post(f"{Q}/tasks/{task['id']}/result", {"status": "FAILED", "result": {}, "error": "no luck"})
    assert (said.body["status"], said.body["error"]) == ("FAILED", "no luck")
    assert "result" not in said.body


async def test_a_cancelled_task_shows_as_failed(api: Api) -> None:
    """Their clients know no other word; the error says it."""
    task = await create(api)
    assert (await api.delete(f"{Q}/tasks/{task['id']}")).status == 200
    both = (await api.get(f"{Q}/tasks/{task['id']}/result")).body
    assert (both["task"]["status"], both["result"]["status"]) == ("FAILED", "FAILED")
    assert both["result"]["error"] == "CANCELLED"


async def test_batches_have_codeqs_shapes(api: Api) -> None:
    """An error is text."""
    said = await api.post(f"{Q}/tasks/batch", {"tasks": [{"command": "c", "payload": 1}, {"command": "a b"}]})
    assert said.body["results"][0]["task"]["payload"] == "1"
    assert said.body["results"][1]["error"].startswith("command")
    [task] = (await api.post(f"{Q}/tasks/claim/batch", {"commands": ["c"], "count": 10})).body["tasks"]
    results = [
        {"taskId": task["id"], "status": "COMPLETED", "result": {"n": 1}},
        {"taskId": id_to_text(new_id()), "status": "COMPLETED", "result": {}},
        {"taskId": task["id"], "status": "FAILED"},
    ]
    said = await api.post(f"{Q}/tasks/batch/results", {"results": results})
    assert said.body["results"][0]["result"]["result"] == {"n": 1}
    assert said.body["results"][1]["error"] == "there is no such task"
    assert said.body["results"][2]["error"].startswith("error")
    assert [item["taskId"] for item in said.body["results"]] == [item["taskId"] for item in results]


async def test_a_batch_of_repeats_shows_what_stands(api: Api) -> None:
    """The first result, not the second; and not a thousand times a megabyte."""
    await create(api)
    task = await claim(api)
    item = {"taskId": task["id"], "leaseToken": task["leaseToken"], "status": "COMPLETED"}
    await api.post(f"{Q}/tasks/batch/results", {"results": [{**item, "result": "x" * 900_000}]})
    said = await api.post(f"{Q}/tasks/batch/results", {"results": [{**item, "result": "other"}] * 500})
    shown = [one["result"] for one in said.body["results"]]
    assert {one["status"] for one in shown} == {"COMPLETED"}
    assert {len(one["result"]) for one in shown if "result" in one} == {900_000}
    assert 10 <= sum("result" in one for one in shown) <= 30


async def test_queues_have_codeqs_names(api: Api) -> None:
    """A list of counts, and one of them."""
    await create(api)
    counts = {"command": "GENERATE_MASTER", "ready": 1, "delayed": 0, "inProgress": 0, "dlq": 0}
    assert (await api.get(f"{Q}/admin/queues")).body == [counts]
    assert (await api.get(f"{Q}/admin/queues/GENERATE_MASTER")).body == counts
    assert (await api.get(f"{Q}/admin/queues/UNUSED")).body == {**counts, "command": "UNUSED", "ready": 0}


async def test_a_clean_up_deletes_nothing_that_is_still_kept(api: Api) -> None:
    """Called without anything it removes what is over, which the server does by itself."""
    task = await create(api)
    await claim(api)
    await api.post(f"{Q}/tasks/{task['id']}/result", {"status": "COMPLETED", "result": {}})
    for body in (None, {}, {"limit": 10}, {"before": "2026-01-01T00:00:00Z"}):
        said = await api.post(f"{Q}/admin/tasks/cleanup", body)
        assert (said.status, said.body["deleted"]) == (200, 0)
        assert {"before", "limit"} <= said.body.keys()
    null = await api.call("POST", f"{Q}/admin/tasks/cleanup", json=None)
    assert (null.status, null.body["deleted"]) == (200, 0)
    assert (await api.get(f"{Q}/tasks/{task['id']}/result")).status == 200


async def test_artifacts_are_refused(api: Api) -> None:
    """They are not kept here, and to lose them in silence would be worse."""
    task = await create(api)
    await claim(api)
    for artifacts, status in (([{"name": "out", "url": "https://example.org/out"}], 422), ([], 200)):
        said = await api.post(
            f"{Q}/tasks/{task['id']}/result", {"status": "COMPLETED", "result": {}, "artifacts": artifacts}
        )
        assert said.status == status


async def test_waits_are_cut_and_zeros_mean_nothing(api: Api) -> None:
    """A wait of a minute is one of 29 seconds; runAt wins over delaySeconds."""
    task = await create(api, maxAttempts=0, idempotencyKey="", runAt="2001-01-01T00:00:00Z", delaySeconds=60)
    assert task["maxAttempts"] == 5
    assert (await claim(api, waitSeconds=60))["id"] == task["id"]


async def test_what_is_out_of_range_is_the_nearest_that_is_not(api: Api) -> None:
    """As codeQ has it: priorities, attempts, leases and limits are cut, less than nothing was not said."""
    for priority, taken in ((100, 9), (-1, 0), (4, 4)):
        assert (await create(api, priority=priority, maxAttempts=-1)).get("priority", 0) == taken
    assert (await create(api, maxAttempts=20_000))["maxAttempts"] == 10_000
    for lease in (-5, 10**6):
        assert (await claim(api, leaseSeconds=lease, waitSeconds=-1))["leaseUntil"]
    task = await claim(api)
    assert (await api.post(f"{Q}/tasks/{task['id']}/heartbeat", {"extendSeconds": 10**6})).status == 200
    assert (await api.post(f"{Q}/tasks/{task['id']}/nack", {"delaySeconds": -1})).status == 200
    for limit in (0, 5_000):
        assert (await api.post(f"{Q}/admin/tasks/cleanup", {"limit": limit})).body["limit"] == 1_000


async def test_a_task_that_was_given_back_shows_nobody(api: Api) -> None:
    """It is pending, and has no worker."""
    task = await create(api)
    await claim(api)
    await api.post(f"{Q}/tasks/{task['id']}/nack", {"delaySeconds": 60, "reason": "busy"})
    seen = (await api.get(f"{Q}/tasks/{task['id']}")).body
    assert seen["status"] == "PENDING"
    assert "workerId" not in seen


async def test_an_id_that_cannot_be_read_comes_back_as_it_was_sent(api: Api) -> None:
    """A batch of results says which of them it did not take."""
    said = await api.post(f"{Q}/tasks/batch/results", {"results": [{"taskId": "nope", "status": "COMPLETED"}, {}]})
    assert [item.get("taskId") for item in said.body["results"]] == ["nope", None]
    assert all(item["error"] for item in said.body["results"])


# -------------------------------------------------------------------------------------------------- whose lease it is


@pytest.mark.parametrize("verb", ["heartbeat", "result", "nack", "abandon"])
async def test_anothers_lease_is_not_ones_own(two: tuple[Api, Api], verb: str) -> None:
    """403 for another subject, 409 for a task that nobody holds, 404 for none at all."""
    one, other = two
    task = await create(one)
    body = {"status": "COMPLETED"} if verb == "result" else {}
    path = f"{Q}/tasks/{task['id']}/{verb}"
    assert (await one.post(path, body)).status == 409
    await claim(one)
    assert (await other.post(path, body)).status == 403
    assert (await other.post(f"{Q}/tasks/{id_to_text(new_id())}/{verb}", body)).status == 404
    assert (await one.post(path, body)).status == 200
    # Settled, it is nobody's; renewed, it is still held.
    assert (await one.post(path, body)).status == (200 if verb == "heartbeat" else 409)


async def test_a_name_in_the_body_proves_nothing(two: tuple[Api, Api]) -> None:
    """Neither a worker's nor a workerId: the subject is that of the bearer's token."""
    one, other = two
    task = await create(one)
    assert (await claim(one, worker="w2", workerId="w2"))["workerId"] == "w1"
    said = await other.post(f"{Q}/tasks/{task['id']}/result", {"status": "COMPLETED", "workerId": "w1"})
    assert said.status == 403


async def test_a_token_works_as_well(two: tuple[Api, Api]) -> None:
    """And proves more than a name."""
    one, other = two
    task = await create(one)
    claimed = await claim(one)
    said = await other.post(
        f"{Q}/tasks/{task['id']}/result", {"status": "COMPLETED", "leaseToken": claimed["leaseToken"]}
    )
    assert said.status == 200


async def test_names_are_no_proof_unless_the_server_says_so(store: DirectStore) -> None:
    """Off by default."""
    async with served(store, leases_by_subject=False) as url, aiohttp.ClientSession() as session:
        api = Api(session, url)
        task = await create(api)
        await claim(api)
        said = await api.post(f"{Q}/tasks/{task['id']}/result", {"status": "COMPLETED"})
        assert (said.status, said.body["field"]) == (422, "leaseToken")


async def test_without_keeping_a_result_is_still_answered(api: Api) -> None:
    """Of a task that is gone with its completion."""
    task = await create(api, keep=False)
    await claim(api)
    said = await api.post(f"{Q}/tasks/{task['id']}/result", {"status": "COMPLETED", "result": {"n": 1}})
    assert (said.status, said.body["status"], said.body["result"]) == (200, "COMPLETED", {"n": 1})
