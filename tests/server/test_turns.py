"""What one caller sends, or asks for, does not keep others waiting: large work is refused early, or done in turns."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import math
import struct
import threading
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import aiohttp
import msgspec
import pytest

from dibs.ids import new_id
from dibs.server.app import open_service
from dibs.server.auth import ALL_SCOPES, Principal
from dibs.server.config import ServerConfig
from dibs.server.gate import Gate
from dibs.server.http import answers, wire, wire_queues
from dibs.server.http.admin import Admin
from dibs.server.http.bounded import LOOKED_THROUGH_BYTES, item_counter
from dibs.server.http.codeq import CodeqSubmitResult, CodeqTasks
from dibs.server.http.listener import bind
from dibs.server.http.problems import Problem
from dibs.server.http.tasks import Tasks
from dibs.server.http.verbs import UNCOUNTED_BODY_MAX_BYTES
from dibs.server.http.web import Request
from dibs.server.telemetry.metrics import Metrics
from dibs.server.turns import STEP_BYTES, Turns
from dibs.server.verifiers.watched import AT_ONCE_MAX_BYTES, WatchedFile
from dibs.settings import Settings
from dibs.stores.direct import DirectStore
from dibs.stores.ordered.store import STATS_STEP
from dibs.stores.remote.verbs import AskAbout, AskDrop, AskEnqueue, AskStage
from dibs.task import BATCH_MAX, Enqueued, Kind, NewTask, QueueConfig, Rows, Settlement, WorkerInfo
from tests.server.http import Api
from tests.server.running import until

T = TypeVar("T")
DEV = Principal("default", "dev", ALL_SCOPES)
JSON = {"Content-Type": "application/json"}
LARGE = b'"' + b"a" * 900_000 + b'"'
COUNT = 4
"""So many large tasks fit on a page."""


async def turns_of(work: Awaitable[T]) -> tuple[int, T]:
    """How often somebody else has a turn while something is done, and what that returns."""
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    try:
        done = await work
        return turns, done
    finally:
        ticking.cancel()


def asked(data: Any = None) -> Request:
    """A request that has been read, without headers and without a query."""

    async def receive() -> Any:
        raise AssertionError("all of it was read")

    request = Request({"headers": [], "query_string": b""}, receive, "request")
    request.caller = DEV
    request.data = data
    return request


@pytest.fixture
def gate(store: DirectStore) -> Gate:
    """A gate that lets everything in."""
    return Gate(store)


async def enqueued(store: DirectStore, count: int = COUNT, payload: bytes = LARGE, **options: Any) -> list[bytes]:
    """Puts large tasks in; returns their ids."""
    done = await store.enqueue("default", [NewTask(command="job", payload=payload, **options) for _ in range(count)])
    return [one.id for one in done if isinstance(one, Enqueued)]


def raws(items: Sequence[Any]) -> list[msgspec.Raw]:
    """The items of a batch as they are before they are read."""
    return [msgspec.Raw(msgspec.json.encode(item)) for item in items]


# ------------------------------------------------------------------------------------------------ sizes before decoding


@pytest.mark.parametrize("prefix", ["/v1", "/v1/codeq"])
async def test_a_payload_that_is_too_large_is_not_looked_at(api: Api, store: DirectStore, prefix: str) -> None:
    """413, though it is not UTF-8 either: its length is judged first."""
    body = b'{"command": "job", "payload": "\xff' + b" " * store.limits.payload_max_bytes + b'"}'
    said = await api.call("POST", f"{prefix}/tasks", data=io.BytesIO(body), headers=JSON)
    assert (said.status, said.body["code"]) == (413, "payload_too_large")


async def test_a_payload_that_is_too_large_in_a_batch(api: Api, store: DirectStore) -> None:
    """It is refused by itself."""
    large = b'{"command": "job", "payload": "\xff' + b" " * store.limits.payload_max_bytes + b'"}'
    body = b'{"tasks": [' + large + b', {"command": "job"}]}'
    said = await api.call("POST", "/v1/tasks/batch", data=io.BytesIO(body), headers=JSON)
    assert [one.get("statusCode") for one in said.body["results"]] == [413, None]


async def test_a_result_that_is_too_large_is_not_looked_at(api: Api, store: DirectStore) -> None:
    """413, and the lease still holds."""
    await api.create()
    task = await api.claim()
    start = b'{"status": "COMPLETED", "leaseToken": "' + task["leaseToken"].encode() + b'", "result": "\xff'
    body = start + b" " * store.limits.result_max_bytes + b'"}'
    said = await api.call("POST", f"/v1/tasks/{task['id']}/result", data=io.BytesIO(body), headers=JSON)
    assert (said.status, said.body["code"]) == (413, "payload_too_large")
    said = await api.post(f"/v1/tasks/{task['id']}/heartbeat", {"leaseToken": task["leaseToken"]})
    assert said.status == 200


# --------------------------------------------------------------------------------------------------- lists of a body

COUNTED: list[tuple[Any, Any, Any]] = [
    (wire.CreateTasks, msgspec.json, lambda count: {"tasks": [{"command": "job" * 20}] * count}),
    (wire.SubmitResults, msgspec.json, lambda count: {"results": ["a" * 40] * count}),
    (AskEnqueue, msgspec.msgpack, lambda count: AskEnqueue("default", [NewTask(command="job" * 20)] * count)),
    (AskAbout, msgspec.msgpack, lambda count: AskAbout("default", [b"a" * 40] * count)),
    (AskStage, msgspec.msgpack, lambda count: AskStage("default", b"", Rows([b"a" * 40] * count, []))),
]


@pytest.mark.parametrize(("kind", "content", "body_of"), COUNTED)
def test_a_list_with_too_many_items(kind: Any, content: Any, body_of: Any) -> None:
    """It is refused before its items are made, also one that stands further inside; one of the right length is not."""
    count = item_counter(kind, content, 1_000)
    assert count is not None
    body = content.encode(body_of(1_000))
    assert len(body) > LOOKED_THROUGH_BYTES
    count(body)
    with pytest.raises(Problem, match="too many items"):
        count(content.encode(body_of(1_001)))


def test_a_list_that_says_how_long_it_may_be() -> None:
    """It is held to that."""
    artifacts = item_counter(CodeqSubmitResult, msgspec.json, 1_000)
    commands = item_counter(wire.ClaimTask, msgspec.json, 1_000)
    assert artifacts is not None
    assert commands is not None
    with pytest.raises(Problem):
        artifacts(msgspec.json.encode({"artifacts": ["a" * LOOKED_THROUGH_BYTES]}))
    commands(msgspec.json.encode({"commands": ["a" * 1_000] * 100}))
    with pytest.raises(Problem):
        commands(msgspec.json.encode({"commands": ["a" * 1_000] * 101}))


@pytest.mark.parametrize(
    "body", [b'{"tasks": 5', b'{"tasks": 5}', b'{"tasks": null}', b"5", b"\xff", b"{}", b'{"a": []}']
)
def test_what_is_otherwise_wrong_is_left_to_who_decodes(body: bytes) -> None:
    """Counting is not judging."""
    count = item_counter(wire.CreateTasks, msgspec.json, 1_000)
    assert count is not None
    count(b" " * LOOKED_THROUGH_BYTES + body)


def test_bodies_without_lists_are_not_counted() -> None:
    """There is nothing to count."""
    assert item_counter(wire.CreateTask, msgspec.json, 1_000) is None


async def test_too_many_items_over_http(api: Api) -> None:
    """422, and nothing is put in."""
    said = await api.post("/v1/tasks/batch", {"tasks": [{"command": "a" * 100}] * 1_001})
    assert (said.status, said.body["code"]) == (422, "invalid")


async def test_bodies_of_uncounted_lists_are_small(tmp_path: Path) -> None:
    """Where a list may have more than a thousand items its body has a bound of its own, below that of the others."""
    service = await open_service(ServerConfig(stop_within_s=1.0), Settings(url=f"memory:{tmp_path}"))
    bound = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1/store/"
    await service.start(bound)
    large = AskDrop("default", [b"a"] * UNCOUNTED_BODY_MAX_BYTES)
    tasks = AskEnqueue("default", [NewTask(command="job", payload=LARGE, id=new_id()) for _ in range(3)])
    headers = {"Content-Type": "application/msgpack"}
    async with aiohttp.ClientSession() as session:
        for verb, ask, status in (("drop", large, 413), ("enqueue", tasks, 200)):
            body = msgspec.msgpack.encode(ask)
            assert len(body) > UNCOUNTED_BODY_MAX_BYTES
            async with session.post(url + verb, data=io.BytesIO(body), headers=headers) as answer:
                assert answer.status == status
    await service.stop()


# ------------------------------------------------------------------------------------------------ batches, in turns


async def test_turns() -> None:
    """Others have one whenever enough has been handled, and none before."""

    async def handle(sizes: Sequence[int]) -> None:
        turns = Turns()
        for size in sizes:
            await turns.after(size)

    assert (await turns_of(handle([STEP_BYTES - 1])))[0] == 0
    assert (await turns_of(handle([STEP_BYTES - 1, 1, STEP_BYTES])))[0] == 2


@pytest.mark.parametrize("handlers", [Tasks, lambda gate: CodeqTasks(gate, leases_by_subject=True)])
async def test_reading_many(gate: Gate, handlers: Any) -> None:
    """Others have their turn after every large task that is read, also where none is good enough to be put in."""
    items = raws([{"command": "no job", "payload": "a" * 900_000}] * COUNT)
    turns, answer = await turns_of(handlers(gate).create_batch(asked(SimpleNamespace(tasks=items))))
    assert ["error" in one for one in msgspec.json.decode(answer.body)["results"]] == [True] * COUNT
    assert turns == COUNT


async def test_creating_what_there_is(gate: Gate) -> None:
    """Duplicates are answered with the tasks that were first: in turns, too."""
    await enqueued(gate.store, 1, key="k")
    items = raws([{"command": "job", "idempotencyKey": "k"}] * COUNT)
    turns, answer = await turns_of(Tasks(gate).create_batch(asked(SimpleNamespace(tasks=items))))
    assert [one["task"]["duplicate"] for one in msgspec.json.decode(answer.body)["results"]] == [True] * COUNT
    assert turns >= COUNT


async def test_claiming_many(gate: Gate) -> None:
    """Others have their turn after every large task that is shown."""
    few = (await turns_of(Tasks(gate).claim_batch(asked(wire.ClaimTasks(commands=["none"], count=COUNT)))))[0]
    await enqueued(gate.store)
    turns, answer = await turns_of(Tasks(gate).claim_batch(asked(wire.ClaimTasks(commands=["job"], count=COUNT))))
    assert len(msgspec.json.decode(answer.body)["tasks"]) == COUNT
    assert turns >= few + COUNT


async def test_a_claim_that_is_cut_short_gives_back(gate: Gate) -> None:
    """What was taken, and will not be answered, is there again."""
    await enqueued(gate.store)
    claiming = asyncio.ensure_future(Tasks(gate).claim_batch(asked(wire.ClaimTasks(commands=["job"], count=COUNT))))
    while not (await gate.store.stats("default")).total.leased:
        assert not claiming.done()
        await asyncio.sleep(0)
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    assert claiming.cancelled()
    assert (await gate.store.stats("default")).total.ready == COUNT


async def test_telling_many_results(gate: Gate) -> None:
    """Others have their turn after every large result that is read."""

    async def tell(result: str) -> int:
        await enqueued(gate.store, payload=b"1")
        leases = await gate.store.claim("default", ["job"], limit=COUNT)
        items = raws(
            [
                {"taskId": str(_uuid(one.id)), "leaseToken": one.token.hex(), "status": "COMPLETED", "result": result}
                for one in leases
            ]
        )
        turns, answer = await turns_of(Tasks(gate).result_batch(asked(SimpleNamespace(results=items))))
        assert {one["status"] for one in msgspec.json.decode(answer.body)["results"]} == {"COMPLETED"}
        return turns

    few = await tell("a")
    assert await tell("a" * 900_000) >= few + 2 * COUNT


def _uuid(task_id: bytes) -> UUID:
    return UUID(bytes=task_id)


async def test_listing(gate: Gate) -> None:
    """Others have their turn after every large task on a page."""
    await enqueued(gate.store)
    turns, answer = await turns_of(Tasks(gate).list_tasks(asked()))
    assert len(msgspec.json.decode(answer.body)["tasks"]) == COUNT
    assert turns >= COUNT


async def test_listing_what_has_to_be_decoded(gate: Gate) -> None:
    """That is more work, and counts for more."""
    payload = msgspec.msgpack.encode("a" * (answers.DECODED_MAX_BYTES // 2))
    await enqueued(gate.store, payload=payload, codec="msgpack")
    turns, answer = await turns_of(Tasks(gate).list_tasks(asked()))
    assert all(one["payload"][0] == "a" for one in msgspec.json.decode(answer.body)["tasks"])
    assert turns >= COUNT


async def test_listing_dead_letters(gate: Gate) -> None:
    """Others have their turn after every large one."""
    await enqueued(gate.store)
    leases = await gate.store.claim("default", ["job"], limit=COUNT)
    await gate.store.settle(
        [Settlement(tenant="default", id=one.id, token=one.token, kind=Kind.FAIL) for one in leases]
    )
    turns, answer = await turns_of(Admin(gate).dead(asked()))
    assert len(msgspec.json.decode(answer.body)["tasks"]) == COUNT
    assert turns >= COUNT


async def test_getting_many(gate: Gate) -> None:
    """They are read some at a time."""
    ids = await enqueued(gate.store, 18)
    turns, tasks = await turns_of(gate.get(DEV, "default", ids))
    assert [one.id for one in tasks if one is not None] == ids
    assert turns >= 2


async def test_finding_out_who_holds_many(gate: Gate) -> None:
    """To say why a lease is not the caller's its task is read: one after the other."""
    ids = await enqueued(gate.store)
    turns, found = await turns_of(CodeqTasks(gate, leases_by_subject=True).tokens_by_subject(DEV, ids))
    assert [isinstance(one, Problem) for one in found] == [True] * COUNT
    assert turns >= COUNT


async def test_cleaning_up_where_nothing_is_over(gate: Gate) -> None:
    """Others have their turn after every page."""
    await enqueued(gate.store, 2, payload=b"1")
    leases = await gate.store.claim("default", ["job"], limit=2)
    await gate.store.settle(
        [Settlement(tenant="default", id=one.id, token=one.token, kind=Kind.FAIL) for one in leases]
    )
    soon = datetime.now(UTC) + timedelta(minutes=1)
    turns, _ = await turns_of(Admin(gate).clean_up(asked(wire_queues.CleanUp(before=soon, limit=1))))
    assert turns >= 2


# --------------------------------------------------------------------------------------------- what is not JSON, shown


def test_what_is_not_json_is_decoded_up_to_a_size() -> None:
    """Beyond that it is shown as base64, whatever it is."""
    fits = msgspec.msgpack.encode("a" * (answers.DECODED_MAX_BYTES - 5))
    while len(fits) < answers.DECODED_MAX_BYTES:
        fits = msgspec.msgpack.encode("a" * (len(msgspec.msgpack.decode(fits)) + 1))
    over = msgspec.msgpack.encode("a" * (len(msgspec.msgpack.decode(fits)) + 1))
    assert answers.shown("payload", fits, "msgpack") == {
        "payload": msgspec.Raw(msgspec.json.encode(msgspec.msgpack.decode(fits)))
    }
    assert answers.shown("payload", over, "msgpack") == {"payload_base64": base64.b64encode(over).decode()}


@pytest.mark.parametrize(
    "data",
    [
        msgspec.msgpack.encode([b"bytes"]),
        msgspec.msgpack.encode({"a": [math.nan]}),
        msgspec.msgpack.encode(math.inf),
        b"\xca" + struct.pack(">f", math.nan),
    ],
)
def test_what_json_would_change_is_not_shown_as_json(data: bytes) -> None:
    """Bytes and numbers that are none go in base64, by whichever of their marks they are found."""
    assert answers.shown("result", data, "msgpack") == {"result_base64": base64.b64encode(data).decode()}


def test_marks_in_something_else() -> None:
    """A text with the byte that marks bytes, or a finite number, is shown as it is."""
    data = msgspec.msgpack.encode(["\u0104", 1.5])
    assert answers.shown("result", data, "msgpack") == {"result": msgspec.Raw('["\u0104",1.5]'.encode())}


@pytest.mark.parametrize("payload", [b'"\xff"', b"[1e999]", b"[", b"[" * 5_000 + b"]" * 5_000])
async def test_bad_json_that_is_stored_is_not_passed_on(api: Api, store: DirectStore, payload: bytes) -> None:
    """It may have come in by other ways, small or large; the answer around it can be read."""
    for data in (payload, b" " * 100_000 + payload):
        [task_id] = await enqueued(store, 1, payload=data)
        said = await api.get(f"/v1/tasks/{_uuid(task_id)}")
        assert base64.b64decode(said.body["payloadBase64"]) == data


# ---------------------------------------------------------------------------------------------------- queues, workers


@pytest.mark.parametrize("count", [STATS_STEP - 1, STATS_STEP, 2 * STATS_STEP, 2 * STATS_STEP + 7])
async def test_stats_of_many_queues(gate: Gate, count: int) -> None:
    """All of them, once each and in order; others have their turn between some and the next."""
    names = sorted(f"c{number}" for number in range(count))
    for start in range(0, count, 1_000):
        tasks = [NewTask(command=name) for name in names[start : start + 1_000]]
        await gate.store.enqueue("default", tasks)
    await gate.store.configure("default", "only-configured", QueueConfig(paused=True))
    await gate.store.configure("default", "*", QueueConfig(paused=True))
    turns, stats = await turns_of(gate.stats(DEV, "default"))
    assert [queue.command for queue in stats.queues] == [*names, "only-configured"]
    assert [queue.ready for queue in stats.queues] == [1] * count + [0]
    assert stats.queues[-1].paused
    assert stats.total.ready == count
    assert turns == (count + 1) // STATS_STEP
    turns, some = await turns_of(gate.stats(DEV, "default", names[:BATCH_MAX]))
    assert [queue.command for queue in some.queues] == names[:BATCH_MAX]
    assert turns == min(count, BATCH_MAX) // STATS_STEP


async def test_showing_many_queues(gate: Gate) -> None:
    """The page of all queues, and the metrics, are made in turns."""
    count = 2 * STATS_STEP
    await gate.store.enqueue("default", [NewTask(command=f"c{number}") for number in range(count)])
    read = (await turns_of(gate.stats(DEV, "default")))[0]
    turns, answer = await turns_of(Admin(gate).queues(asked()))
    assert len(msgspec.json.decode(answer.body)["queues"]) == count
    assert turns >= read + count * 256 // STEP_BYTES
    metrics = Metrics()
    turns, _ = await turns_of(metrics.refresh(gate.store))
    assert turns >= read + 2
    assert b'dibs_queue_tasks{command="other",place="ready",tenant="other"} 800.0' in metrics.render()


async def test_listing_many_workers(gate: Gate) -> None:
    """All of them, in order; in turns."""
    names = [f"w{number:04}" for number in range(450)]
    for name in names:
        await gate.store.register("default", WorkerInfo(name=name), 60)
    turns, answer = await turns_of(Admin(gate).workers(asked()))
    assert [one["name"] for one in msgspec.json.decode(answer.body)["workers"]] == names
    assert turns >= 2


# ---------------------------------------------------------------------------------------------------- a large file


class TestLargeFile:
    """A file that takes long to read is read by a thread."""

    def test_what_it_said_holds_until_it_is_read(self, tmp_path: Path) -> None:
        """Whoever asks is answered at once, by what was read before."""
        path, now_s = tmp_path / "file", 0.0
        path.write_bytes(b"old")
        reading, go_on, threads = threading.Event(), threading.Event(), set()

        def read(data: bytes) -> bytes:
            threads.add(threading.current_thread())
            if data[:3] == b"new":
                reading.set()
                assert go_on.wait(30)
            return data[:3]

        file = WatchedFile(path, read, max_bytes=1 << 20, now_s=lambda: now_s)
        path.write_bytes(b"new" + b" " * AT_ONCE_MAX_BYTES)
        now_s = 2.0
        assert file.value == b"old"
        assert reading.wait(30)
        now_s = 4.0
        assert file.value == b"old"
        go_on.set()
        (reader,) = threads - {threading.current_thread()}
        reader.join(30)
        assert file.value == b"new"

    async def test_it_is_wrong(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """What it said before still holds, an error is logged, and when it is mended it is read again."""
        path, now_s = tmp_path / "file", 0.0
        path.write_bytes(b"1")
        file = WatchedFile(path, int, max_bytes=1 << 20, now_s=lambda: now_s)
        path.write_bytes(b"x" * (AT_ONCE_MAX_BYTES + 1))
        now_s = 2.0
        with caplog.at_level(logging.ERROR):
            await until(lambda: file.value == 1 and "still holds" in caplog.text)
        path.write_bytes(b" " * AT_ONCE_MAX_BYTES + b"22")
        now_s = 4.0
        await until(lambda: file.value == 22)

    def test_a_small_one_is_read_at_once(self, tmp_path: Path) -> None:
        """No token that was revoked is good for even one more call."""
        path, now_s = tmp_path / "file", 0.0
        path.write_bytes(b"1")
        file = WatchedFile(path, int, max_bytes=1 << 20, now_s=lambda: now_s)
        path.write_bytes(b"22")
        now_s = 2.0
        assert file.value == 22
