from __future__ import annotations

import pytest

from dibs.ids import id_to_text, new_id
from tests.server.http import Api


async def test_a_batch_is_answered_in_order(api: Api) -> None:
    """One task each, in the order in which they were sent and in which they will be claimed."""
    said = await api.post("/v1/tasks/batch", {"tasks": [{"command": "job", "payload": n} for n in range(1000)]})
    assert said.status == 200
    assert [item["task"]["payload"] for item in said.body["results"]] == list(range(1000))
    claimed = await api.post("/v1/tasks/claim/batch", {"commands": ["job"], "count": 1000})
    assert [task["payload"] for task in claimed.body["tasks"]] == list(range(1000))
    assert len({task["leaseToken"] for task in claimed.body["tasks"]}) == 1000


async def test_a_bad_task_does_not_spoil_the_rest(api: Api) -> None:
    """Each is judged by itself, whatever is wrong: its type, a field, its depth, or what the queue thinks of it."""
    deep: list[object] = []
    for _ in range(200):
        deep = [deep]
    tasks = [
        {"command": "job", "payload": 1},
        "no task",
        {"command": "job", "priority": 11},
        {"command": "job", "payload": deep},
        {"command": "job", "payload": "x" * (1 << 20)},
        {"command": "job", "colour": "red"},
        {"command": "job", "payload": 2, "idempotencyKey": "k"},
        {"command": "job", "payload": 3, "idempotencyKey": "k"},
    ]
    said = await api.post("/v1/tasks/batch", {"tasks": tasks})
    results = said.body["results"]
    assert said.status == 200
    assert [item.get("statusCode") for item in results] == [None, 422, 422, 400, 413, 422, None, None]
    assert results[2]["field"] == "priority"
    assert results[7]["task"] == {**results[6]["task"], "duplicate": True}
    assert (await api.get("/v1/admin/queues/job")).body["counts"]["ready"] == 2


@pytest.mark.parametrize("tasks", [[], [{"command": "job"}] * 1001, None, {}])
async def test_a_batch_is_1_to_1000(api: Api, tasks: object) -> None:
    """Anything else is refused as a whole."""
    said = await api.post("/v1/tasks/batch", {"tasks": tasks})
    assert (said.status, said.body["field"]) == (422, "tasks")


async def test_results_of_a_batch_are_judged_one_by_one(api: Api) -> None:
    """Accepted, wrong token, unknown, no token, malformed: each has its own answer, in order."""
    for _ in range(4):
        await api.create()
    [one, two, three, four] = (await api.post("/v1/tasks/claim/batch", {"commands": ["job"], "count": 4})).body["tasks"]
    said = await api.post("/v1/tasks/batch/results", {"results": [
        {"taskId": one["id"], "leaseToken": one["leaseToken"], "status": "COMPLETED", "result": 1},
        {"taskId": two["id"], "leaseToken": one["leaseToken"], "status": "COMPLETED"},
        {"taskId": id_to_text(new_id()), "leaseToken": one["leaseToken"], "status": "COMPLETED"},
        {"taskId": three["id"], "status": "COMPLETED"},
        {"taskId": three["id"], "leaseToken": three["leaseToken"], "status": "DONE"},
        {"taskId": four["id"], "leaseToken": four["leaseToken"], "status": "FAILED", "error": "no"},
        {"taskId": one["id"], "leaseToken": one["leaseToken"], "status": "COMPLETED", "result": 2},
        {"taskId": three["id"], "leaseToken": three["leaseToken"], "status": "FAILED"},
    ]})  # fmt: skip
    results = said.body["results"]
    assert [item.get("statusCode") for item in results] == [None, 403, 404, 422, 422, None, None, 422]
    assert [item.get("status") for item in results] == [
        "COMPLETED", None, None, None, None, "FAILED", "COMPLETED", None
    ]  # fmt: skip
    assert results[6]["already"] is True
    assert results[1]["cause"] == "other_token"
    assert (await api.get(f"/v1/tasks/{one['id']}/result")).body["result"] == 1


async def test_heartbeats_of_a_batch_are_judged_one_by_one(api: Api) -> None:
    """Each lease is renewed, or it is said why not."""
    await api.create()
    await api.create()
    [one, two] = (await api.post("/v1/tasks/claim/batch", {"commands": ["job"], "count": 2})).body["tasks"]
    await api.delete(f"/v1/tasks/{two['id']}")
    said = await api.post("/v1/tasks/batch/heartbeat", {"heartbeats": [
        {"taskId": one["id"], "leaseToken": one["leaseToken"], "extendSeconds": 600},
        {"taskId": two["id"], "leaseToken": two["leaseToken"], "progress": {"done": 1}},
        {"taskId": one["id"], "leaseToken": two["leaseToken"]},
        {"taskId": one["id"]},
        {"leaseToken": one["leaseToken"]},
        {"taskId": one["id"], "leaseToken": one["leaseToken"], "progress": {"done": -1}},
    ]})  # fmt: skip
    results = said.body["results"]
    assert [item.get("statusCode") for item in results] == [None, None, 403, 422, 422, 422]
    assert results[0]["leaseUntil"] > one["leaseUntil"]
    assert "cancelRequested" not in results[0]
    assert results[1]["cancelRequested"] is True


async def test_a_batch_of_duplicates_does_not_become_a_flood(api: Api) -> None:
    """A small request for a thousand large tasks is answered with some of their payloads only; each is still named."""
    tasks = [{"command": "job", "idempotencyKey": f"k{n}", "payload": "x" * 900_000} for n in range(4)]
    for start in range(0, 40, 4):
        more = [{**task, "idempotencyKey": f"k{start + n}"} for n, task in enumerate(tasks)]
        assert (await api.post("/v1/tasks/batch", {"tasks": more})).status == 200
    again = [{"command": "job", "idempotencyKey": f"k{n}"} for n in range(40)]
    said = await api.post("/v1/tasks/batch", {"tasks": again})
    shown = [item["task"] for item in said.body["results"]]
    assert all(task["duplicate"] and task["status"] == "PENDING" for task in shown)
    assert len({task["id"] for task in shown}) == 40
    assert 10 <= sum("payload" in task for task in shown) <= 30
    said = await api.post("/v1/tasks/batch", {"tasks": [{"command": "job", "idempotencyKey": "k1"}] * 1000})
    shown = [item["task"] for item in said.body["results"]]
    assert {task["id"] for task in shown} == {shown[0]["id"]}
    assert 10 <= sum("payload" in task for task in shown) <= 30
