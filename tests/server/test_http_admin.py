from __future__ import annotations

from datetime import UTC, datetime, timedelta

import aiohttp
import pytest

from dibs.server.auth import Principal, Scope
from dibs.stores.direct import DirectStore
from dibs.task import NewTask, WorkerInfo
from tests.server.http import Api
from tests.server.serving import served

CONFIG = {
    "paused": True, "priority": 3, "maxAttempts": 7, "leaseSeconds": 60.0, "resultTtlSeconds": 1.0,
    "retentionSeconds": 2.0, "deadRetentionSeconds": 3.0,
    "backoff": {"kind": "fixed", "baseSeconds": 1.0, "factor": 2.0, "capSeconds": 9.0, "jitter": "none"},
    "limits": {"inFlight": 5, "perKey": {"inFlight": 2, "rate": 1.5, "burst": 3.0}}, "weight": None,
}  # fmt: skip


async def fail(api: Api, command: str, reason: str = "BROKEN") -> str:
    """Makes a dead letter and returns its id."""
    await api.create(command)
    task = await api.claim(command)
    failure = {"leaseToken": task["leaseToken"], "status": "FAILED", "error": "no", "reason": reason}
    assert (await api.post(f"/v1/tasks/{task['id']}/result", failure)).status == 200
    task_id: str = task["id"]
    return task_id


async def test_queues_are_counted(api: Api) -> None:
    """Each by itself, and all of them; one that nobody used has zeros."""
    await api.create("a")
    await api.create("a", delaySeconds=60)
    await fail(api, "b")
    said = (await api.get("/v1/admin/queues")).body
    assert [(one["command"], one["ready"], one["delayed"], one["dead"]) for one in said["queues"]] == [
        ("a", 1, 1, 0), ("b", 0, 0, 1)
    ]  # fmt: skip
    assert (said["total"]["ready"], said["total"]["dead"]) == (1, 1)
    one = (await api.get("/v1/admin/queues/a")).body
    assert (one["command"], one["counts"]["delayed"], one["config"]["paused"]) == ("a", 1, False)
    assert one["counts"]["oldestReadyAt"]
    assert (await api.get("/v1/admin/queues/unused")).body["counts"]["ready"] == 0
    assert (await api.get("/v1/admin/queues/*")).body["counts"]["ready"] == 1
    assert (await api.get("/v1/admin/queues/a%20b")).status == 422


async def test_a_configuration_is_kept_whole(api: Api) -> None:
    """What is put is what is read; what is left out goes back to the default."""
    said = await api.put("/v1/admin/queues/job/config", CONFIG)
    assert (said.status, said.body) == (200, CONFIG)
    assert (await api.get("/v1/admin/queues/job")).body["config"] == CONFIG
    await api.put("/v1/admin/queues/job/config", {})
    assert (await api.get("/v1/admin/queues/job")).body["config"]["maxAttempts"] is None


async def test_a_configuration_decides_for_tasks(api: Api) -> None:
    """Where they leave it open."""
    await api.put("/v1/admin/queues/job/config", {"maxAttempts": 2, "priority": 4, "leaseSeconds": 99})
    task = await api.create()
    assert (task["maxAttempts"], task["priority"]) == (2, 4)
    assert (await api.claim())["leaseSeconds"] == 99


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"maxAttempts": 0}, "invalid"),
        ({"weight": 2}, "invalid_option"),
        ({"limits": {}}, "invalid_option"),
        ({"backoff": {"baseSeconds": 10, "capSeconds": 1}}, "invalid_option"),
        ({"limits": {"perKey": {"burst": 2}}}, "invalid_option"),
        ({"colour": "red"}, "invalid"),
    ],
)
async def test_a_configuration_that_makes_no_sense_is_refused(api: Api, config: object, code: str) -> None:
    """422, and nothing is changed."""
    said = await api.put("/v1/admin/queues/job/config", config)
    assert (said.status, said.body["code"]) == (422, code)


async def test_a_paused_queue_gives_nothing(api: Api) -> None:
    """Until it is resumed; the rest of its configuration stays."""
    await api.put("/v1/admin/queues/job/config", {"maxAttempts": 2})
    await api.create()
    assert (await api.put("/v1/admin/queues/job/pause")).body["paused"] is True
    assert (await api.post("/v1/tasks/claim", {"commands": ["job"]})).status == 204
    said = await api.put("/v1/admin/queues/job/resume")
    assert (said.body["paused"], said.body["maxAttempts"]) == (False, 2)
    await api.claim()
    await api.put("/v1/admin/queues/*/pause")
    await api.create()
    assert (await api.post("/v1/tasks/claim", {"commands": ["job"]})).status == 204


async def test_dead_letters_are_listed_and_replayed(api: Api) -> None:
    """By id, or all that match; a repeat is harmless."""
    one, two, other = await fail(api, "a"), await fail(api, "a", "OTHER"), await fail(api, "b")
    listed = (await api.get("/v1/admin/dead?command=a")).body["tasks"]
    assert [task["id"] for task in listed] == [one, two]
    assert (listed[0]["error"]["message"], listed[0]["reason"], listed[0]["attempts"]) == ("no", "BROKEN", 1)
    said = await api.post("/v1/admin/dead/replay", {"ids": [one]})
    assert (said.body["ids"], said.body["count"]) == ([one], 1)
    assert (await api.post("/v1/admin/dead/replay", {"ids": [one]})).body["count"] == 0
    assert (await api.get(f"/v1/tasks/{one}")).body["attempts"] == 0
    assert (await api.post("/v1/admin/dead/replay", {"reason": "OTHER"})).body["ids"] == [two]
    assert (await api.post("/v1/admin/dead/replay", {"all": True})).body["ids"] == [other]


async def test_dead_letters_are_purged_and_nothing_else(api: Api) -> None:
    """An id of a task that is not dead is left alone."""
    dead, alive = await fail(api, "a"), (await api.create("a"))["id"]
    done = await api.create("c")
    token = (await api.claim("c"))["leaseToken"]
    await api.post(f"/v1/tasks/{done['id']}/result", {"leaseToken": token, "status": "COMPLETED"})
    said = await api.post("/v1/admin/dead/purge", {"ids": [dead, alive, done["id"]]})
    assert said.body["ids"] == [dead]
    assert (await api.get(f"/v1/tasks/{dead}")).status == 404
    assert (await api.get(f"/v1/tasks/{done['id']}/result")).status == 200
    await fail(api, "a")
    assert (await api.post("/v1/admin/dead/purge", {"command": "a"})).body["count"] == 1


@pytest.mark.parametrize("verb", ["replay", "purge"])
async def test_to_mean_all_dead_letters_has_to_be_said(api: Api, verb: str) -> None:
    """An empty object is more likely a mistake."""
    for body in ({}, {"limit": 5}, {"ids": ["01890a5d-ac96-774b-bcce-b302099a8057"], "command": "a"}):
        said = await api.post(f"/v1/admin/dead/{verb}", body)
        assert (said.status, said.body["field"]) == (422, "ids")


async def test_a_bounded_replay_goes_on_where_it_stopped(api: Api) -> None:
    """By its cursor."""
    made = [await fail(api, "a") for _ in range(5)]
    replayed: list[str] = []
    more: dict[str, object] = {}
    while True:
        said = (await api.post("/v1/admin/dead/replay", {"command": "a", "limit": 2, **more})).body
        replayed += said["ids"]
        if "cursor" not in said:
            break
        more = {"cursor": said["cursor"]}
    assert replayed == made


async def test_a_clean_up_removes_what_is_kept_no_longer(api: Api) -> None:
    """By a given time; by default, only what is over now."""
    task = await api.create(retentionSeconds=3600, resultTtlSeconds=3600)
    other = await api.create("other")
    token = (await api.claim())["leaseToken"]
    await api.post(f"/v1/tasks/{task['id']}/result", {"leaseToken": token, "status": "COMPLETED"})
    assert (await api.post("/v1/admin/tasks/cleanup")).body["deleted"] == 0
    later = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
    said = await api.post("/v1/admin/tasks/cleanup", {"before": later, "limit": 10})
    assert (said.body["deleted"], said.body["limit"]) == (1, 10)
    assert (await api.get(f"/v1/tasks/{task['id']}")).status == 404
    assert (await api.get(f"/v1/tasks/{other['id']}")).status == 200


async def test_workers_are_listed(api: Api, store: DirectStore) -> None:
    """Those that told of themselves."""
    await store.register("default", WorkerInfo(name="w1", host="h", slots=4, commands=["a"]), 60)
    [worker] = (await api.get("/v1/admin/workers")).body["workers"]
    assert (worker["name"], worker["slots"], worker["commands"]) == ("w1", 4, ["a"])


async def test_an_operator_looks_after_every_tenant(api: Api, store: DirectStore) -> None:
    """By naming one; tenants are listed in pages."""
    for tenant in ("t1", "t2", "t3"):
        await store.enqueue(tenant, [NewTask(command="job")])
    first = (await api.get("/v1/admin/tenants?limit=2")).body
    rest = (await api.get(f"/v1/admin/tenants?cursor={first['cursor']}")).body
    assert first["tenants"] + rest["tenants"] == ["t1", "t2", "t3"]
    assert (await api.get("/v1/admin/queues?tenant=t2")).body["total"]["ready"] == 1
    assert (await api.get("/v1/admin/queues")).body["total"]["ready"] == 0
    assert (await api.put("/v1/admin/queues/job/pause?tenant=t2")).status == 200
    assert await store.claim("t2", ["job"]) == []
    assert (await api.get("/v1/admin/queues?tenant=T%202")).status == 422


async def test_an_admin_has_one_tenant(store: DirectStore) -> None:
    """To name another is forbidden, and so is the list of them; other scopes have no business here."""
    await store.enqueue("t2", [NewTask(command="job")])
    admin = Principal("t1", "root", frozenset({Scope.ADMIN}))
    async with served(store, anybody=admin) as url, aiohttp.ClientSession() as session:
        api = Api(session, url)
        assert (await api.get("/v1/admin/queues?tenant=t1")).status == 200
        for path in ("queues", "queues/job", "workers", "dead"):
            assert (await api.get(f"/v1/admin/{path}?tenant=t2")).status == 403
        assert (await api.get("/v1/admin/tenants")).status == 403
        assert (await api.post("/v1/tasks/claim", {"commands": ["job"]})).status == 403
    worker = Principal("t1", "w", frozenset({Scope.CLAIM, Scope.ENQUEUE}))
    async with served(store, anybody=worker) as url, aiohttp.ClientSession() as session:
        api = Api(session, url)
        for path in ("queues", "queues/job", "workers", "dead", "tenants"):
            assert (await api.get(f"/v1/admin/{path}")).status == 403
