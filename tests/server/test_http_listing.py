from __future__ import annotations

import pytest

from tests.server.http import Api


async def test_pages_follow_each_other(api: Api) -> None:
    """By the cursor, until there is none; every task is there once."""
    made = {(await api.create(payload=number))["id"] for number in range(7)}
    found, cursor, pages = [], None, 0
    while pages == 0 or cursor is not None:
        more: dict[str, str] = {} if cursor is None else {"cursor": cursor}
        said = await api.call("GET", "/v1/tasks", params={"limit": "3", **more})
        found += [task["id"] for task in said.body["tasks"]]
        cursor = said.body.get("cursor")
        pages += 1
    assert sorted(found) == sorted(made)
    assert pages >= 3


async def test_filters_choose(api: Api) -> None:
    """Each that is given must match."""
    ready = await api.create("a")
    delayed = await api.create("a", delaySeconds=60)
    await api.create("b")
    held = await api.claim("b", worker="w1")
    ended = await api.create("c")
    token = (await api.claim("c"))["leaseToken"]
    failure = {"leaseToken": token, "status": "FAILED", "error": "no", "reason": "BROKEN"}
    await api.post(f"/v1/tasks/{ended['id']}/result", failure)
    far, past = "2999-01-01T00:00:00Z", "2001-01-01T00:00:00Z"
    for query, expected in [
        ({"command": "a"}, [ready, delayed]),
        ({"status": "PENDING", "place": "delayed"}, [delayed]),
        ({"worker": "w1"}, [held]),
        ({"reason": "BROKEN"}, [ended]),
        ({"place": "dead"}, [ended]),
        ({"endedFrom": past, "endedUntil": far}, [ended]),
        ({"enqueuedFrom": far}, []),
        ({"enqueuedUntil": past}, []),
        ({"enqueuedFrom": past, "command": "b"}, [held]),
    ]:
        said = await api.call("GET", "/v1/tasks", params=query)
        assert [task["id"] for task in said.body["tasks"]] == [task["id"] for task in expected], query


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("status=pending", "status"),
        ("place=here", "place"),
        ("command=a%20b", "command"),
        ("enqueuedFrom=yesterday", "enqueuedFrom"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, query: str, field: str) -> None:
    """422, and the parameter in the answer."""
    said = await api.get(f"/v1/tasks?{query}")
    assert (said.status, said.body["field"]) == (422, field)


@pytest.mark.parametrize("query", ["colour=red", "limit=1&limit=2", "cursor=nonsense"])
async def test_what_nobody_knows_is_refused(api: Api, query: str) -> None:
    """An unknown parameter, one given twice, a cursor that no page gave."""
    assert (await api.get(f"/v1/tasks?{query}")).status == 422


async def test_a_page_ends_early_where_payloads_are_large(api: Api) -> None:
    """A thousand tasks of a megabyte are not held and sent at once; the cursor goes on."""
    for _ in range(5):
        tasks = [{"command": "big", "payload": "x" * 900_000} for _ in range(4)]
        assert (await api.post("/v1/tasks/batch", {"tasks": tasks})).status == 200
    found = 0
    query = {"limit": "1000"}
    while True:
        page = (await api.call("GET", "/v1/tasks", params=query)).body
        assert len(page["tasks"]) <= 10
        found += len(page["tasks"])
        if "cursor" not in page:
            break
        query["cursor"] = page["cursor"]
    assert found == 20
