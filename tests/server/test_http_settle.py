from __future__ import annotations

import aiohttp
import pytest

from dibs.clock import ManualClock
from dibs.ids import id_from_text, id_to_text, new_id
from dibs.stores import open_local
from dibs.stores.direct import DirectStore
from tests.server.http import Api
from tests.server.serving import served

OTHER = "00" * 16
VERBS = ["heartbeat", "result", "nack", "abandon"]


def body(verb: str, token: str | None = None) -> dict[str, object]:
    """What a verb needs at least."""
    needed: dict[str, object] = {"status": "COMPLETED"} if verb == "result" else {}
    return needed if token is None else {**needed, "leaseToken": token}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", ["header", "body", "both"])
async def test_the_token_is_taken_from_either_place(api: Api, verb: str, way: str) -> None:
    """From the header X-Lease-Token, or from the body."""
    await api.create()
    task = await api.claim()
    headers = {"X-Lease-Token": task["leaseToken"]} if way != "body" else {}
    in_body = body(verb, task["leaseToken"] if way != "header" else None)
    said = await api.post(f"/v1/tasks/{task['id']}/{verb}", in_body, headers=headers)
    assert said.status == 200, said


@pytest.mark.parametrize("verb", VERBS)
async def test_tokens_that_do_not_agree_are_refused(api: Api, verb: str) -> None:
    """Rather than one of them chosen."""
    await api.create()
    task = await api.claim()
    said = await api.post(
        f"/v1/tasks/{task['id']}/{verb}", body(verb, OTHER), headers={"X-Lease-Token": task["leaseToken"]}
    )
    assert (said.status, said.body["field"]) == (422, "leaseToken")


@pytest.mark.parametrize("verb", VERBS)
async def test_without_a_token_nothing_is_settled(api: Api, verb: str) -> None:
    """Not even by whoever holds the lease: a name proves nothing."""
    await api.create()
    task = await api.claim()
    said = await api.post(f"/v1/tasks/{task['id']}/{verb}", body(verb))
    assert (said.status, said.body["field"]) == (422, "leaseToken")
    for bad in ("x", "0" * 31, task["leaseToken"].upper() + "0"):
        said = await api.post(f"/v1/tasks/{task['id']}/{verb}", body(verb), headers={"X-Lease-Token": bad})
        assert (said.status, said.body["field"]) == (422, "X-Lease-Token")


@pytest.mark.parametrize("verb", VERBS)
async def test_a_wrong_token_says_why(api: Api, verb: str) -> None:
    """404 for a task that is not there, 409 for one that nobody holds, 403 for another's lease."""
    unknown = await api.post(f"/v1/tasks/{id_to_text(new_id())}/{verb}", body(verb, OTHER))
    assert (unknown.status, unknown.body["code"]) == (404, "task_unknown")
    assert (await api.post(f"/v1/tasks/nonsense/{verb}", body(verb, OTHER))).status == 404
    task = await api.create()
    waiting = await api.post(f"/v1/tasks/{task['id']}/{verb}", body(verb, OTHER))
    assert (waiting.status, waiting.body["cause"]) == (409, "not_in_progress")
    await api.claim()
    others = await api.post(f"/v1/tasks/{task['id']}/{verb}", body(verb, OTHER))
    assert (others.status, others.body["cause"]) == (403, "other_token")


async def test_a_heartbeat_extends_and_tells(api: Api) -> None:
    """Until when, and whether somebody asked to stop; progress is shown."""
    await api.create()
    task = await api.claim(leaseSeconds=10)
    path = f"/v1/tasks/{task['id']}"
    said = await api.post(
        f"{path}/heartbeat",
        {"leaseToken": task["leaseToken"], "extendSeconds": 900, "progress": {"done": 1, "total": 4, "note": "a"}},
    )
    assert said.body["ok"] is True
    assert said.body["leaseUntil"] > task["leaseUntil"]
    assert (await api.get(path)).body["progress"] == {"done": 1, "total": 4, "note": "a"}
    assert (await api.delete(path)).body["how"] == "cancelling"
    said = await api.post(f"{path}/heartbeat", headers={"X-Lease-Token": task["leaseToken"]})
    assert said.body["cancelRequested"] is True


@pytest.mark.parametrize("result", [None, 0, "", [], {"a": [1, 2]}])
async def test_any_json_is_a_result(api: Api, result: object) -> None:
    """Null too: it does not count as failed."""
    await api.create()
    task = await api.claim()
    said = await api.post(
        f"/v1/tasks/{task['id']}/result",
        {"leaseToken": task["leaseToken"], "status": "COMPLETED", "result": result},
    )
    assert said.body == {"taskId": task["id"], "status": "COMPLETED"}
    seen = (await api.get(f"/v1/tasks/{task['id']}/result")).body
    assert (seen["status"], seen["result"]) == ("COMPLETED", result)


async def test_the_first_result_stands(api: Api) -> None:
    """The same again, whatever it brings, answers 200 and that it was so already."""
    await api.create()
    task = await api.claim()
    path, token = f"/v1/tasks/{task['id']}/result", task["leaseToken"]
    await api.post(path, {"leaseToken": token, "status": "COMPLETED", "result": 1})
    again = await api.post(path, {"leaseToken": token, "status": "COMPLETED", "result": 2})
    assert (again.status, again.body["already"], again.body["status"]) == (200, True, "COMPLETED")
    other = await api.post(path, {"leaseToken": token, "status": "FAILED", "error": "no"})
    assert (other.status, other.body["cause"]) == (409, "not_in_progress")
    assert (await api.get(path)).body["result"] == 1


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("no luck", {"type": "Error", "message": "no luck"}),
        ({"type": "KeyError", "message": "'a'"}, {"type": "KeyError", "message": "'a'"}),
        ({"type": "E", "traceback": "line 1"}, {"type": "E", "traceback": "line 1"}),
    ],
)
async def test_a_failure_is_a_dead_letter(api: Api, error: object, shown: object) -> None:
    """For good, with its error and reason, and its result says so."""
    await api.create()
    task = await api.claim()
    said = await api.post(
        f"/v1/tasks/{task['id']}/result",
        {"leaseToken": task["leaseToken"], "status": "FAILED", "error": error, "reason": "BAD_INPUT"},
    )
    assert said.body["status"] == "FAILED"
    seen = (await api.get(f"/v1/tasks/{task['id']}/result")).body
    assert (seen["status"], seen["error"], seen["reason"]) == ("FAILED", shown, "BAD_INPUT")
    assert (await api.get(f"/v1/tasks/{task['id']}")).body["place"] == "dead"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({}, "status"),
        ({"status": "PENDING"}, "status"),
        ({"status": "FAILED"}, "error"),
        ({"status": "FAILED", "error": "x", "result": 1}, "result"),
        ({"status": "COMPLETED", "error": "x"}, "error"),
        ({"status": "COMPLETED", "reason": "x"}, "reason"),
        ({"status": "FAILED", "error": {"message": "x"}}, "error"),
        ({"status": "COMPLETED", "resultTtlSeconds": -1}, "resultTtlSeconds"),
    ],
)
async def test_a_result_that_makes_no_sense_is_refused(api: Api, asked: dict[str, object], field: str) -> None:
    """422, and the task is still held."""
    await api.create()
    task = await api.claim()
    said = await api.post(f"/v1/tasks/{task['id']}/result", {"leaseToken": task["leaseToken"], **asked})
    assert said.status == 422
    assert field in (said.body["field"] or said.body["error"])
    assert (await api.get(f"/v1/tasks/{task['id']}")).body["status"] == "IN_PROGRESS"


async def test_a_nack_waits_as_it_says(api: Api) -> None:
    """With the delay that is given, which may be none; the reason is the task's error."""
    await api.create()
    task = await api.claim()
    path = f"/v1/tasks/{task['id']}"
    said = await api.post(f"{path}/nack", {"leaseToken": task["leaseToken"], "delaySeconds": 600, "reason": "busy"})
    assert said.body == {"taskId": task["id"], "status": "PENDING", "delaySeconds": 600}
    seen = (await api.get(path)).body
    assert (seen["place"], seen["error"]["message"]) == ("delayed", "busy")
    await api.create("now")
    task = await api.claim("now")
    await api.post(f"/v1/tasks/{task['id']}/nack", {"leaseToken": task["leaseToken"], "delaySeconds": 0})
    assert (await api.claim("now"))["attempts"] == 2


async def test_a_nack_waits_as_the_queue_says(api: Api) -> None:
    """By the queue's backoff, if nothing is said."""
    backoff = {"kind": "linear", "baseSeconds": 100, "jitter": "none"}
    await api.put("/v1/admin/queues/job/config", {"backoff": backoff})
    await api.create()
    task = await api.claim()
    said = await api.post(f"/v1/tasks/{task['id']}/nack", headers={"X-Lease-Token": task["leaseToken"]})
    assert said.body["delaySeconds"] == 100


async def test_the_last_nack_makes_a_dead_letter(api: Api) -> None:
    """After exactly maxAttempts deliveries."""
    made = await api.create(maxAttempts=2)
    for answer in ({"status": "PENDING", "delaySeconds": 0}, {"status": "FAILED"}):
        task = await api.claim()
        said = await api.post(f"/v1/tasks/{made['id']}/nack", {"leaseToken": task["leaseToken"], "delaySeconds": 0})
        assert said.body == {"taskId": made["id"], **answer}
    assert (await api.get(f"/v1/tasks/{made['id']}/result")).body["reason"] == "MAX_ATTEMPTS"


async def test_an_abandoned_task_keeps_its_place_and_its_attempts(api: Api) -> None:
    """A deploy burns nothing."""
    first = await api.create()
    await api.create()
    task = await api.claim()
    said = await api.post(f"/v1/tasks/{task['id']}/abandon", headers={"X-Lease-Token": task["leaseToken"]})
    assert said.body == {"taskId": first["id"], "status": "PENDING"}
    again = await api.claim()
    assert (again["id"], again["attempts"]) == (first["id"], 1)


async def test_a_zombie_settles_nothing() -> None:
    """A worker of the same name, whose lease ran out, has the wrong token for the next one."""
    clock = ManualClock()
    async with await open_local("memory:", clock=clock) as store, served(store) as url, aiohttp.ClientSession() as http:
        api = Api(http, url)
        await api.create()
        old = await api.claim(leaseSeconds=5, worker="w")
        clock.advance(6)
        new = await api.claim(worker="w")
        assert new["id"] == old["id"]
        said = await api.post(
            f"/v1/tasks/{old['id']}/result", {"leaseToken": old["leaseToken"], "status": "COMPLETED", "result": "old"}
        )
        assert (said.status, said.body["cause"]) == (403, "other_token")
        await api.post(
            f"/v1/tasks/{new['id']}/result", {"leaseToken": new["leaseToken"], "status": "COMPLETED", "result": "new"}
        )
        assert (await api.get(f"/v1/tasks/{old['id']}/result")).body["result"] == "new"


async def test_a_task_that_is_not_kept_answers_all_the_same(api: Api, store: DirectStore) -> None:
    """Its body is gone when it completes; a repeat is still recognised."""
    await api.create(keep=False)
    task = await api.claim()
    asked = {"leaseToken": task["leaseToken"], "status": "COMPLETED"}
    assert (await api.post(f"/v1/tasks/{task['id']}/result", asked)).status == 200
    again = await api.post(f"/v1/tasks/{task['id']}/result", asked)
    assert (again.status, again.body["already"]) == (200, True)
    [kept] = await store.get("default", [id_from_text(task["id"])])
    assert kept is None or kept.result is None
