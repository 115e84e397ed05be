from __future__ import annotations

import asyncio

import pytest

from dibs.ids import id_to_text, new_id
from tests.server.http import Api


async def test_a_result_that_is_not_there_yet_says_how_the_task_stands(api: Api) -> None:
    """404, with the status in the body."""
    task = await api.create()
    said = await api.get(f"/v1/tasks/{task['id']}/result")
    assert (said.status, said.body["code"], said.body["status"]) == (404, "task_unfinished", "PENDING")
    await api.claim()
    said = await api.get(f"/v1/tasks/{task['id']}/result?waitSeconds=0.01")
    assert (said.status, said.body["status"]) == (404, "IN_PROGRESS")


async def test_a_wait_ends_with_the_task(api: Api) -> None:
    """200 as soon as it has ended; any number may wait."""
    task = await api.create()
    path = f"/v1/tasks/{task['id']}/result"
    waiting = [asyncio.ensure_future(api.get(f"{path}?waitSeconds=60")) for _ in range(3)]
    await asyncio.sleep(0.05)
    token = (await api.claim())["leaseToken"]
    await api.post(path, {"leaseToken": token, "status": "COMPLETED", "result": {"ok": True}})
    for said in await asyncio.gather(*waiting):
        assert (said.status, said.body["result"]) == (200, {"ok": True})
        assert said.body["endedAt"]


async def test_a_cancelled_task_has_a_result_too(api: Api) -> None:
    """Whoever waits is told."""
    task = await api.create()
    waiting = asyncio.ensure_future(api.get(f"/v1/tasks/{task['id']}/result?waitSeconds=60"))
    await asyncio.sleep(0.05)
    assert (await api.delete(f"/v1/tasks/{task['id']}")).body == {
        "taskId": task["id"], "how": "cancelled", "status": "CANCELLED"
    }  # fmt: skip
    said = await waiting
    assert (said.status, said.body["status"], said.body["reason"]) == (200, "CANCELLED", "CANCELLED")


async def test_an_unknown_task_is_the_same_everywhere(api: Api) -> None:
    """One answer, whatever is asked, and no waiting for it."""
    for name in (id_to_text(new_id()), "nonsense", "0" * 36):
        for said in (
            await api.get(f"/v1/tasks/{name}"),
            await api.get(f"/v1/tasks/{name}/result"),
            await api.get(f"/v1/tasks/{name}/result?waitSeconds=60"),
            await api.delete(f"/v1/tasks/{name}"),
        ):
            assert (said.status, said.body["code"], said.body["error"]) == (
                404,
                "task_unknown",
                "there is no such task",
            )


async def test_a_cancel_may_be_too_late(api: Api) -> None:
    """409 with the status; one that is cancelled already is as good as done."""
    task = await api.create()
    token = (await api.claim())["leaseToken"]
    await api.post(f"/v1/tasks/{task['id']}/result", {"leaseToken": token, "status": "COMPLETED"})
    said = await api.delete(f"/v1/tasks/{task['id']}")
    assert (said.status, said.body["code"], said.body["status"]) == (409, "task_ended", "COMPLETED")
    other = await api.create()
    for _ in range(2):
        said = await api.delete(f"/v1/tasks/{other['id']}")
        assert (said.status, said.body["how"]) == (200, "cancelled")


async def test_a_result_that_is_no_longer_kept_says_so(api: Api) -> None:
    """404, and the task's status."""
    task = await api.create(resultTtlSeconds=0, retentionSeconds=3600)
    token = (await api.claim())["leaseToken"]
    await api.post(f"/v1/tasks/{task['id']}/result", {"leaseToken": token, "status": "COMPLETED", "result": 1})
    said = await api.get(f"/v1/tasks/{task['id']}/result")
    assert (said.status, said.body["code"]) == (404, "task_unknown")
    assert said.body["status"] == "COMPLETED"


@pytest.mark.parametrize("wait", ["61", "-1", "x", "nan", ""])
async def test_a_wait_has_its_limits(api: Api, wait: str) -> None:
    """0 to 60 seconds."""
    task = await api.create()
    said = await api.get(f"/v1/tasks/{task['id']}/result?waitSeconds={wait}")
    assert (said.status, said.body["field"]) == (422, "waitSeconds")
