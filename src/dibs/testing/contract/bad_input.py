"""Bad input: a typed error that says what to do; nothing is lost and nothing half-written."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dibs.errors import DibsError, InvalidInput, InvalidName, InvalidOption, PayloadTooLarge
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import (
    ByKey,
    Enqueued,
    ErrorInfo,
    Extended,
    Heartbeat,
    Kind,
    NewTask,
    Progress,
    QueueConfig,
    Rejected,
    Settled,
    Settlement,
    Status,
    WorkerInfo,
)
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    assert_counts,
    look,
    put,
    put_many,
    read_events,
    settlement,
    take,
    take_many,
)

MIB = 1 << 20

BAD_TASKS: list[tuple[dict[str, Any], type[InvalidInput]]] = [
    ({"payload": b"x" * (MIB + 1)}, PayloadTooLarge),
    ({"payload": "text"}, InvalidOption),
    *(({"command": name}, InvalidName) for name in ("", " a", "a b", "a/b", "a:b", "é", ".a", "-a", "a\n", "a" * 129)),
    ({"command": 7}, InvalidName),
    *(({"priority": priority}, InvalidOption) for priority in (-1, 10, 1.5, True, "5")),
    *(({"delay_s": delay_s}, InvalidOption) for delay_s in (-1, -0.001, math.nan, math.inf, 367 * 86_400, "9")),
    ({"run_at_ms": -1}, InvalidOption),
    ({"run_at_ms": 1.5}, InvalidOption),
    ({"run_at_ms": 5, "delay_s": 5}, InvalidOption),
    *(({"max_attempts": attempts}, InvalidOption) for attempts in (0, -1, 10_001, 2.0)),
    *(({"lease_s": lease_s}, InvalidOption) for lease_s in (0, 0.999, 43_201, math.nan, -30)),
    *(({name: -1}, InvalidOption) for name in ("timeout_s", "expires_s", "result_ttl_s", "retention_s")),
    *(({name: math.nan}, InvalidOption) for name in ("timeout_s", "expires_s", "result_ttl_s", "retention_s")),
    ({"expires_s": 0}, InvalidOption),
    *(({"key": key}, InvalidName) for key in ("", "k" * 513, "é" * 257, "\ud800", 7)),
    ({"key": "k", "on_duplicate": "overwrite"}, InvalidOption),
    *(({"id": task_id}, InvalidName) for task_id in (b"short", b"x" * 17, "0" * 16)),
    ({"codec": "no such codec"}, InvalidInput),
    ({"traceparent": "a\nb"}, InvalidOption),
    ({"limit_key": "k", "limit_cost": 0}, InvalidOption),
]

BAD_SETTLEMENTS: list[tuple[dict[str, Any], type[InvalidInput]]] = [
    ({"kind": Kind.COMPLETE, "result": b"x" * (MIB + 1)}, PayloadTooLarge),
    ({"kind": Kind.COMPLETE, "result": {"not": "encoded"}}, InvalidOption),
    ({"kind": Kind.COMPLETE, "result": b"1", "codec": "no such codec"}, InvalidInput),
    ({"kind": Kind.COMPLETE, "delay_s": 5}, InvalidOption),
    ({"kind": Kind.COMPLETE, "error": ErrorInfo("E")}, InvalidOption),
    ({"kind": Kind.COMPLETE, "result_ttl_s": -1}, InvalidOption),
    ({"kind": Kind.RETRY, "result": b"1"}, InvalidOption),
    ({"kind": Kind.RETRY, "delay_s": -1}, InvalidOption),
    ({"kind": Kind.RETRY, "delay_s": math.nan}, InvalidOption),
    ({"kind": Kind.RETRY, "delay_s": 367 * 86_400}, InvalidOption),
    ({"kind": Kind.FAIL, "error": ErrorInfo("E", "x" * MIB)}, PayloadTooLarge),
    ({"kind": Kind.FAIL, "reason": "two\nlines"}, InvalidName),
    ({"kind": Kind.RELEASE, "error": ErrorInfo("E")}, InvalidOption),
    ({"kind": "explode"}, InvalidOption),
    ({"kind": Kind.COMPLETE, "token": b"short"}, InvalidName),
    ({"kind": Kind.COMPLETE, "tenant": "Not A Tenant"}, InvalidName),
]

BAD_BEATS: list[dict[str, Any]] = [
    {"extend_s": 0.5},
    {"extend_s": 43_201},
    {"extend_s": math.nan},
    {"progress": Progress(math.nan)},
    {"progress": Progress(1, -1)},
    {"progress": Progress(1, 2, "n" * 201)},
    {"token": b"short"},
    {"id": b"short"},
]

BAD_TENANTS = [
    "",
    "A",
    "a b",
    "a/b",
    "a:b",
    "é",
    ".a",
    "-a",
    "_a",
    "a\n",
    "../a",
    "a" * 65,
    "*",
    "a*",
    "a\x00",
    7,
    None,
]

BAD_CLAIMS: list[dict[str, Any]] = [
    *({"limit": limit} for limit in (0, -1, 1_001, 1.5, True)),
    *({"lease_s": lease_s} for lease_s in (0, 0.5, 43_201, math.nan)),
    *({"wait_s": wait_s} for wait_s in (-1, math.nan, math.inf)),
]

Call = Callable[[Store], Awaitable[Any]]

#: Calls that are wrong as a whole: they raise.
BAD_CALLS: dict[str, tuple[Call, type[DibsError]]] = {
    "claim nothing": (lambda store: store.claim(TENANT, []), InvalidOption),
    "claim twice the same": (lambda store: store.claim(TENANT, ["a", "a"]), InvalidOption),
    "claim a string": (lambda store: store.claim(TENANT, "work"), InvalidOption),
    "claim 101 commands": (lambda store: store.claim(TENANT, [f"c{n}" for n in range(101)]), InvalidOption),
    "claim a bad command": (lambda store: store.claim(TENANT, ["a/b"]), InvalidName),
    "claim with a long worker": (lambda store: store.claim(TENANT, [COMMAND], worker="w" * 129), InvalidName),
    "claim with a bad worker": (lambda store: store.claim(TENANT, [COMMAND], worker="a\nb"), InvalidName),
    "claim with a bad claim id": (lambda store: store.claim(TENANT, [COMMAND], claim_id=b"short"), InvalidName),
    "get a bad id": (lambda store: store.get(TENANT, [b"short"]), InvalidName),
    "get an empty key": (lambda store: store.get(TENANT, [ByKey(COMMAND, "")]), InvalidName),
    "cancel a bad id": (lambda store: store.cancel(TENANT, [b"x" * 17]), InvalidName),
    "wait for nothing": (lambda store: store.wait(TENANT, [], 1), InvalidOption),
    "wait for too many": (lambda store: store.wait(TENANT, [new_id()] * 1_001, 1), InvalidOption),
    "wait for less than no time": (lambda store: store.wait(TENANT, [new_id()], -1), InvalidOption),
    "retain for less than no time": (lambda store: store.retain(TENANT, [new_id()], -1), InvalidOption),
    "replay too many": (lambda store: store.replay(TENANT, [new_id()] * 1_001), InvalidOption),
    "purge a bad id": (lambda store: store.purge(TENANT, [b""]), InvalidName),
    "list nothing": (lambda store: store.list(TENANT, limit=0), InvalidOption),
    "list too many": (lambda store: store.list(TENANT, limit=1_001), InvalidOption),
    "configure a bad command": (lambda store: store.configure(TENANT, "a/b"), InvalidName),
    "configure a priority": (lambda store: store.configure(TENANT, COMMAND, QueueConfig(priority=10)), InvalidOption),
    "configure a lease": (lambda store: store.configure(TENANT, COMMAND, QueueConfig(lease_s=0.1)), InvalidOption),
    "register nobody": (lambda store: store.register(TENANT, WorkerInfo(name=""), 60), InvalidName),
    "register for ever": (lambda store: store.register(TENANT, WorkerInfo(name="w"), math.inf), InvalidOption),
    "read no events": (lambda store: store.events(TENANT, limit=0), InvalidOption),
    "advance nobody": (lambda store: store.advance("", 0, None), InvalidName),
    "advance a long name": (lambda store: store.advance("r" * 129, 0, None), InvalidName),
    "sweep nothing": (lambda store: store.sweep(0), InvalidOption),
    "stats of a bad command": (lambda store: store.stats(TENANT, ["a/b"]), InvalidName),
}


def assert_says_what_to_do(rejected: object, error: type[InvalidInput]) -> None:
    """A rejection is the error it would have raised, with a message for the caller."""
    assert isinstance(rejected, Rejected)
    raised = rejected.error()
    assert isinstance(raised, error)
    assert len(str(raised)) > 20
    assert len(str(raised)) < 500


@pytest.mark.anyio
class TestBadInput:
    """One bad item does not spoil its batch; a bad call changes nothing."""

    @pytest.mark.parametrize(("options", "error"), BAD_TASKS, ids=lambda value: repr(value)[:50])
    async def test_a_bad_task(self, store: Store, options: dict[str, Any], error: type[InvalidInput]) -> None:
        """It is rejected by itself, and leaves nothing behind; its neighbours are enqueued."""
        bad = NewTask(**{"command": COMMAND} | options)
        good = [NewTask(command=COMMAND, id=new_id()) for _ in range(2)]
        answers = await store.enqueue(TENANT, [good[0], bad, good[1]])
        assert (answers[0], answers[2]) == (Enqueued(good[0].id), Enqueued(good[1].id))
        assert_says_what_to_do(answers[1], error)
        total = await assert_counts(store)
        assert (total.ready, total.delayed, total.bytes) == (2, 0, 0)
        assert sorted(event.id for event in await read_events(store)) == sorted(task.id for task in good)

    async def test_something_that_is_no_task(self, store: Store) -> None:
        """A value of another type is rejected like any bad item."""
        junk: Any = {"command": COMMAND}
        [answer] = await store.enqueue(TENANT, [junk])
        assert_says_what_to_do(answer, InvalidOption)

    async def test_bad_ones_among_many(self, store: Store) -> None:
        """Every item of a split batch is answered in its place."""
        tasks = [NewTask(command=COMMAND, id=new_id(), priority=99 if n % 7 == 0 else 1) for n in range(1_500)]
        answers = await store.enqueue(TENANT, tasks)
        for n, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if n % 7 == 0:
                assert isinstance(answer, Rejected)
            else:
                assert answer == Enqueued(task.id)

    @pytest.mark.parametrize(("fields", "error"), BAD_SETTLEMENTS, ids=lambda value: repr(value)[:50])
    async def test_a_bad_settlement(self, store: Store, fields: dict[str, Any], error: type[InvalidInput]) -> None:
        """It is rejected and the lease lives on, to be settled properly; its neighbours are settled."""
        await put_many(store, 2)
        one, other = await take_many(store, 2)
        before = await look(store, one.id)
        bad = Settlement(**{"tenant": TENANT, "id": one.id, "token": one.token} | fields)
        answers = await store.settle([bad, settlement(other, Kind.COMPLETE)])
        assert_says_what_to_do(answers[0], error)
        assert answers[1] == Settled(Status.COMPLETED)
        assert await look(store, one.id) == before
        assert await store.settle([settlement(one, Kind.COMPLETE)]) == [Settled(Status.COMPLETED)]

    @pytest.mark.parametrize("fields", BAD_BEATS, ids=lambda value: repr(value)[:50])
    async def test_a_bad_heartbeat(self, store: Store, fields: dict[str, Any]) -> None:
        """It is rejected and the lease stays as it was; its neighbours are extended."""
        await put_many(store, 2)
        one, other = await take_many(store, 2)
        before = await look(store, one.id)
        bad = Heartbeat(**{"tenant": TENANT, "id": one.id, "token": one.token} | fields)
        good = Heartbeat(tenant=TENANT, id=other.id, token=other.token, extend_s=60)
        answers = await store.heartbeat([bad, good])
        assert_says_what_to_do(answers[0], InvalidInput)
        assert isinstance(answers[1], Extended)
        assert await look(store, one.id) == before

    @pytest.mark.parametrize("options", BAD_CLAIMS, ids=repr)
    async def test_a_bad_claim(self, store: Store, options: dict[str, Any]) -> None:
        """It raises at once and takes nothing."""
        task_id = await put(store)
        with pytest.raises(InvalidOption):
            await store.claim(TENANT, [COMMAND], **options)
        lease = await take(store)
        assert (lease.id, lease.attempt) == (task_id, 1)

    @pytest.mark.parametrize("name", BAD_CALLS)
    async def test_a_bad_call(self, store: Store, name: str) -> None:
        """It raises the typed error at once, and neither takes nor changes anything."""
        task_id = await put(store)
        before = await look(store, task_id)
        call, error = BAD_CALLS[name]
        with pytest.raises(error):
            await call(store)
        assert await look(store, task_id) == before
        assert (await take(store)).id == task_id

    @pytest.mark.parametrize("tenant", BAD_TENANTS, ids=repr)
    async def test_a_bad_tenant(self, store: Store, tenant: Any) -> None:
        """No verb takes a name that is not a tenant's; the operator's `*` is none."""
        calls: list[Call] = [
            lambda store: store.enqueue(tenant, [NewTask(command=COMMAND)]),
            lambda store: store.get(tenant, [new_id()]),
            lambda store: store.cancel(tenant, [new_id()]),
            lambda store: store.wait(tenant, [new_id()], 0),
            lambda store: store.replay(tenant, [new_id()]),
            lambda store: store.purge(tenant, [new_id()]),
            lambda store: store.retain(tenant, [new_id()], 60),
            lambda store: store.list(tenant),
            lambda store: store.marks(tenant, every=1_000),
            lambda store: store.stage(tenant, new_id(), [NewTask(command=COMMAND)]),
            lambda store: store.commit_load(tenant, "load", 0, []),
            lambda store: store.drop(tenant, []),
            lambda store: store.stats(tenant),
            lambda store: store.configure(tenant, COMMAND, QueueConfig()),
            lambda store: store.register(tenant, WorkerInfo(name="w"), 60),
            lambda store: store.workers(tenant),
        ]
        if tenant != "*":
            calls += [
                lambda store: store.claim(tenant, [COMMAND]),
                lambda store: store.events(tenant),
                lambda store: store.runs(tenant),
            ]
        for call in calls:
            with pytest.raises(InvalidName):
                await call(store)
        assert (await store.tenants()).tenants == []
