from __future__ import annotations

import asyncio
from uuid import uuid4

import msgspec
import pytest

from dibs.ids import id_from_text, new_id
from dibs.stores.direct import DirectStore
from dibs.task import Enqueued, NewTask
from tests.server.http import Api

SPACED = b'{"command": "job", "payload": { "a" :1.0,\n "b": [ ] }}'
JSON = {"Content-Type": "application/json"}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_task_is_answered_as_it_stands(api: Api) -> None:
    """202 with its id, its place, and what the queue decided where nothing was said."""
    said = await api.post("/v1/tasks", {"command": "job", "payload": {"a": 1}, "priority": 7})
    assert said.status == 202
    assert said.body["status"] == "PENDING"
    assert (said.body["place"], said.body["priority"], said.body["attempts"]) == ("ready", 7, 0)
    assert (said.body["maxAttempts"], said.body["payload"]) == (5, {"a": 1})
    assert said.body["tenantId"] == "default"
    assert (await api.get(f"/v1/tasks/{said.body['id']}")).body == said.body


async def test_every_option_arrives(api: Api, store: DirectStore) -> None:
    """What a client asks for is what the queue is asked for."""
    task = await api.create(
        payload=None, priority=9, maxAttempts=2, idempotencyKey="k", delaySeconds=60, resultTtlSeconds=5,
        expiresSeconds=90, traceparent=TRACE, leaseSeconds=7, timeoutSeconds=8, retentionSeconds=9, limitKey="who",
        limitCost=3, onDuplicate="replay_dead",
    )  # fmt: skip
    [kept] = await store.get("default", [id_from_text(task["id"])])
    assert kept is not None
    assert (kept.priority, kept.max_attempts, kept.key, kept.place) == (9, 2, "k", "delayed")
    assert (kept.timeout_s, kept.traceparent, kept.limit_key, kept.limit_cost) == (8, TRACE, "who", 3)
    assert kept.expires_ms == kept.enqueued_ms + 90_000
    assert kept.due_ms == kept.enqueued_ms + 60_000


async def test_a_payload_is_kept_byte_by_byte(api: Api, store: DirectStore) -> None:
    """Spaces, the order of keys and the writing of numbers are the producer's, all the way to the worker."""
    said = await api.call("POST", "/v1/tasks", data=SPACED, headers=JSON)
    [kept] = await store.get("default", [id_from_text(said.body["id"])])
    assert kept is not None
    assert (kept.payload, kept.codec) == (b'{ "a" :1.0,\n "b": [ ] }', "json")


@pytest.mark.parametrize("payload", [None, 0, "text", [], {}, [1, {"a": None}], True, 2**60])
async def test_any_json_is_a_payload(api: Api, payload: object) -> None:
    """Not only objects."""
    assert (await api.create(payload=payload))["payload"] == payload
    assert (await api.claim())["payload"] == payload


async def test_a_payload_left_out_is_null(api: Api) -> None:
    """A command may say everything."""
    assert (await api.create())["payload"] is None


async def test_a_duplicate_answers_the_first_task(api: Api) -> None:
    """202 with `duplicate`, and nothing is enqueued."""
    first = await api.create(payload=1, idempotencyKey="k")
    again = await api.create(payload=2, idempotencyKey="k")
    assert again == {**first, "duplicate": True}


async def test_many_duplicates_at_once_make_one_task(api: Api) -> None:
    """Thirty-two at once: one is the first, and the others are told of it."""
    made = await asyncio.gather(*(api.create(idempotencyKey="k") for _ in range(32)))
    assert len({task["id"] for task in made}) == 1
    assert sum("duplicate" not in task for task in made) == 1


async def test_an_id_that_exists_answers_its_task(api: Api) -> None:
    """A create whose answer was lost can be repeated."""
    task_id = str(uuid4())
    first = await api.create(id=task_id, payload=1)
    assert first["id"] == task_id
    assert await api.create(id=task_id, payload=2) == {**first, "already": True}


async def test_a_dead_letter_is_revived_if_asked_for(api: Api) -> None:
    """With onDuplicate replay_dead, the answer says that it was."""
    task = await api.create(idempotencyKey="k")
    token = (await api.claim())["leaseToken"]
    await api.post(f"/v1/tasks/{task['id']}/result", {"status": "FAILED", "error": "no", "leaseToken": token})
    again = await api.create(idempotencyKey="k", onDuplicate="replay_dead")
    assert (again["id"], again["status"], again["replayed"]) == (task["id"], "PENDING", True)


async def test_the_past_means_now_and_the_future_waits(api: Api) -> None:
    """runAt is a time with its zone."""
    assert (await api.create(runAt="2001-01-01T00:00:00Z"))["place"] == "ready"
    soon = await api.create(delaySeconds=3600)
    assert (soon["place"], soon["status"]) == ("delayed", "PENDING")
    assert soon["runAt"] > soon["createdAt"]


async def test_the_trace_of_the_request_is_the_tasks(api: Api) -> None:
    """Unless the body names one; one that is malformed is ignored."""
    said = await api.post("/v1/tasks", {"command": "job"}, headers={"traceparent": TRACE})
    assert said.body["traceparent"] == TRACE
    own = TRACE.replace("4", "5")
    said = await api.post("/v1/tasks", {"command": "job", "traceparent": own}, headers={"traceparent": TRACE})
    assert said.body["traceparent"] == own
    said = await api.post("/v1/tasks", {"command": "job"}, headers={"traceparent": "nonsense"})
    assert "traceparent" not in said.body


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"command": ""}, "command"),
        ({"command": "a b"}, "command"),
        ({"priority": 10}, "priority"),
        ({"priority": "5"}, "priority"),
        ({"maxAttempts": 0}, "maxAttempts"),
        ({"delaySeconds": -1}, "delaySeconds"),
        ({"runAt": "tomorrow"}, "runAt"),
        ({"runAt": "2030-01-01T00:00:00"}, "runAt"),
        ({"runAt": "2030-01-01T00:00:00Z", "delaySeconds": 1}, "delaySeconds"),
        ({"id": "7"}, "id"),
        ({"idempotencyKey": ""}, "idempotencyKey"),
        ({"onDuplicate": "panic"}, "onDuplicate"),
        ({"limitCost": 0}, "limitCost"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, options: dict[str, object], field: str) -> None:
    """422, and the field in the answer."""
    said = await api.post("/v1/tasks", {"command": "job", **options})
    assert (said.status, said.body["field"]) == (422, field)
    assert said.body["error"].startswith(field)


async def test_a_misspelt_option_is_refused(api: Api) -> None:
    """It would be lost otherwise."""
    said = await api.post("/v1/tasks", {"command": "job", "maxAttemps": 3})
    assert said.status == 422
    assert "maxAttemps" in said.body["error"]


async def test_what_the_queue_refuses_is_refused(api: Api) -> None:
    """An id that is not in the slot of its key, and a time beyond all horizons."""
    task_id = new_id()[:-1] + b"\0"
    keys = (f"k{number}" for number in range(1000))
    key = next(key for key in keys if new_id("default", "job", key)[-1])
    said = await api.post("/v1/tasks", {"command": "job", "id": task_id.hex(), "idempotencyKey": key})
    assert (said.status, said.body["code"]) == (422, "invalid_name")
    said = await api.post("/v1/tasks", {"command": "job", "runAt": "9999-12-31T23:59:59Z"})
    assert (said.status, said.body["code"]) == (422, "invalid_option")


async def test_a_payload_over_the_limit_is_refused(api: Api) -> None:
    """413, as a body over the limit is."""
    said = await api.post("/v1/tasks", {"command": "job", "payload": "x" * (1 << 20)})
    assert (said.status, said.body["code"]) == (413, "payload_too_large")


async def test_payloads_of_other_codecs_are_shown(api: Api, store: DirectStore) -> None:
    """MessagePack as JSON where that is the same, and otherwise, like raw bytes, in base64."""
    given = [
        (msgspec.msgpack.encode({"a": [1, "x"]}), "msgpack", "payload", {"a": [1, "x"]}),
        (msgspec.msgpack.encode({"a": b"\xff"}), "msgpack", "payloadBase64", "gaFhxAH/"),
        (msgspec.msgpack.encode(float("nan")), "msgpack", "payloadBase64", "y3/4AAAAAAAA"),
        (b"\x00\xff", "raw", "payloadBase64", "AP8="),
        (b"{not json", "json", "payloadBase64", "e25vdCBqc29u"),
        (b'"\xff"', "json", "payloadBase64", "Iv8i"),
        (b"", "json", "payload", None),
        (b"whatever", "mine", "payloadBase64", "d2hhdGV2ZXI="),
    ]
    for payload, codec, name, shown in given:
        [made] = await store.enqueue("default", [NewTask(command="job", payload=payload, codec=codec)])
        assert isinstance(made, Enqueued)
        task = (await api.get(f"/v1/tasks/{made.id.hex()}")).body
        assert (task[name], task["codec"]) == (shown, codec)
    assert len((await api.get("/v1/tasks")).body["tasks"]) == len(given)
