"""Values of the wrong type are refused before they are written: a record that cannot be read back would poison its
queue for everybody."""

from __future__ import annotations

from typing import Any

import pytest

from dibs.checks import CHUNK_MAX_BYTES, Limits, check_load, check_rows
from dibs.errors import InvalidInput, InvalidName, InvalidOption, PayloadTooLarge
from dibs.stores import open_local
from dibs.stores.batches import rows_of
from dibs.task import (
    BATCH_MAX,
    CHUNKS_MAX,
    ErrorInfo,
    Heartbeat,
    Kind,
    NewTask,
    Progress,
    QueueConfig,
    Rejected,
    Settlement,
    WorkerInfo,
)

SURROGATE = "\udc80"


@pytest.mark.parametrize(
    "options",
    [
        {"payload": "text"},
        {"payload": bytearray(b"x")},
        {"codec": 7},
        {"codec": "JSON"},
        {"id": "0"},
        {"id": b"short"},
        {"priority": 1.0},
        {"priority": True},
        {"delay_s": "1"},
        {"delay_s": float("nan")},
        {"delay_s": True},
        {"run_at_ms": 1.5},
        {"max_attempts": 0},
        {"max_attempts": "5"},
        {"lease_s": float("inf")},
        {"timeout_s": 0},
        {"expires_s": -1},
        {"key": 5},
        {"key": SURROGATE},
        {"key": "k", "on_duplicate": "drop"},
        {"result_ttl_s": -1},
        {"retention_s": "long"},
        {"keep": 1},
        {"keep": None},
        {"traceparent": 5},
        {"traceparent": SURROGATE},
        {"traceparent": "a\nb"},
        {"limit_key": ""},
        {"limit_cost": True},
        {"limit_cost": "1"},
    ],
    ids=repr,
)
async def test_a_task_of_wrong_types_is_rejected(options: dict[str, Any]) -> None:
    """The item is rejected with what to do, its neighbours go in, and all of them can be read and claimed."""
    async with await open_local("memory:") as store:
        bad = NewTask(**{"command": "c", **options})
        before, rejected, after = await store.enqueue("t", [NewTask(command="c"), bad, NewTask(command="c")])
        assert isinstance(rejected, Rejected)
        assert isinstance(rejected.error(), InvalidInput)
        assert ":" in rejected.message
        assert not isinstance(before, Rejected)
        assert not isinstance(after, Rejected)
        assert len(await store.claim("t", ["c"], limit=10)) == 2
        assert (await store.doctor()).clean


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "complete"},
        {"token": b""},
        {"id": "00" * 16},
        {"tenant": "T"},
        {"kind": Kind.COMPLETE, "result": "text"},
        {"kind": Kind.COMPLETE, "result": b"1", "codec": ""},
        {"kind": Kind.COMPLETE, "delay_s": 1},
        {"kind": Kind.COMPLETE, "error": ErrorInfo("E")},
        {"kind": Kind.FAIL, "result": b"1"},
        {"kind": Kind.FAIL, "result_ttl_s": 1},
        {"kind": Kind.FAIL, "error": "boom"},
        {"kind": Kind.FAIL, "error": ErrorInfo("E", message=b"bytes")},  # type: ignore[arg-type]
        {"kind": Kind.FAIL, "error": ErrorInfo("E", message=SURROGATE)},
        {"kind": Kind.FAIL, "error": ErrorInfo("E", traceback="x" * 70_000)},
        {"kind": Kind.FAIL, "reason": "two\nlines"},
        {"kind": Kind.RETRY, "delay_s": -1},
        {"kind": Kind.RELEASE, "reason": "why"},
    ],
    ids=repr,
)
async def test_a_settlement_of_wrong_types_is_rejected(options: dict[str, Any]) -> None:
    """A settlement that is not acceptable changes nothing: the lease is still held and can be settled properly."""
    async with await open_local("memory:") as store:
        await store.enqueue("t", [NewTask(command="c")])
        [lease] = await store.claim("t", ["c"])
        good = {"tenant": "t", "id": lease.id, "token": lease.token, "kind": Kind.COMPLETE}
        [rejected] = await store.settle([Settlement(**{**good, **options})])
        assert isinstance(rejected, Rejected)
        [settled] = await store.settle([Settlement(**good)])  # type: ignore[arg-type]
        assert not isinstance(settled, Rejected)
        assert (await store.doctor()).clean


@pytest.mark.parametrize(
    "progress",
    [
        Progress(float("nan")),
        Progress("1"),  # type: ignore[arg-type]
        Progress(1, "2"),  # type: ignore[arg-type]
        Progress(1, 2, SURROGATE),
    ],
)
async def test_progress_of_wrong_types_is_rejected(progress: Progress) -> None:
    """A heartbeat with progress that cannot be kept is rejected and does not extend the lease."""
    async with await open_local("memory:") as store:
        await store.enqueue("t", [NewTask(command="c")])
        [lease] = await store.claim("t", ["c"])
        [rejected] = await store.heartbeat([Heartbeat(tenant="t", id=lease.id, token=lease.token, progress=progress)])
        assert isinstance(rejected, Rejected)
        [task] = await store.get("t", [lease.id])
        assert task is not None
        assert task.lease_end_ms == lease.lease_end_ms


@pytest.mark.parametrize(
    "config",
    [
        QueueConfig(paused=1),  # type: ignore[arg-type]
        QueueConfig(priority="high"),  # type: ignore[arg-type]
        QueueConfig(backoff={"kind": "fixed"}),  # type: ignore[arg-type]
        {"paused": True},
    ],
    ids=repr,
)
async def test_a_configuration_of_wrong_types_is_refused(config: Any) -> None:
    """A configuration that could not be read back is refused; the queue keeps the one it has."""
    async with await open_local("memory:") as store:
        with pytest.raises(InvalidInput):
            await store.configure("t", "c", config)
        assert await store.configure("t", "c") == QueueConfig()


@pytest.mark.parametrize(
    "info",
    [
        WorkerInfo(name=""),
        WorkerInfo(name="w", host=5),  # type: ignore[arg-type]
        WorkerInfo(name="w", host=SURROGATE),
        WorkerInfo(name="w", commands=[1]),  # type: ignore[list-item]
        WorkerInfo(name="w", memory_bytes=1 << 80),
    ],
    ids=repr,
)
async def test_a_worker_of_wrong_types_is_refused(info: WorkerInfo) -> None:
    """A registration that could not be read back is refused, so one worker cannot hide the others."""
    async with await open_local("memory:") as store:
        await store.register("t", WorkerInfo(name="good"), 60)
        with pytest.raises(InvalidInput):
            await store.register("t", info, 60)
        assert [worker.name for worker in await store.workers("t")] == ["good"]


def rows(*sizes: int, **options: Any) -> list[NewTask]:
    """Returns a row of each size."""
    return [NewTask(command="c", payload=b"x" * size, **options) for size in sizes]


@pytest.mark.parametrize(
    "chunk",
    [
        rows(0),
        rows(*[0] * BATCH_MAX),
        rows(CHUNK_MAX_BYTES // 2, CHUNK_MAX_BYTES // 2),
        rows(CHUNK_MAX_BYTES),
        rows(1, 1, key="k"),
    ],
    ids=["one", "most", "as large as allowed", "one that large", "one key twice"],
)
def test_a_good_chunk(chunk: list[NewTask]) -> None:
    """Up to 1,000 rows and 1 MiB; that a key comes twice is not for the check to decide."""
    check_rows("t", rows_of(chunk), Limits())


@pytest.mark.parametrize(
    ("chunk", "error", "told"),
    [
        ([], InvalidOption, "number of rows"),
        (rows(*[0] * (BATCH_MAX + 1)), InvalidOption, "number of rows"),
        (rows(CHUNK_MAX_BYTES // 2, CHUNK_MAX_BYTES // 2 + 1), PayloadTooLarge, "stage fewer rows"),
        (rows(0, CHUNK_MAX_BYTES + 1), PayloadTooLarge, "^row 1: "),
        ([*rows(0, 0), *rows(0, priority=10)], InvalidOption, "^row 2: "),
        (rows(0, id=b"x" * 16), InvalidOption, "^row 0: .*chunk"),
        (rows(0, id=b"short"), InvalidInput, "^row 0: "),
        ([*rows(0), NewTask(command="a b")], InvalidName, "^row 1: "),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_chunk(chunk: Any, error: type[InvalidInput], told: str) -> None:
    """The error is of the kind that the bad row would have by itself, and names the row."""
    with pytest.raises(error, match=told):
        check_rows("t", rows_of(chunk), Limits())


def test_a_row_may_be_as_large_as_the_store_allows() -> None:
    """A limit above a chunk's own lets one row be larger, alone in its chunk."""
    limits = Limits(payload_max_bytes=2 * CHUNK_MAX_BYTES)
    check_rows("t", rows_of(rows(2 * CHUNK_MAX_BYTES)), limits)
    with pytest.raises(PayloadTooLarge):
        check_rows("t", rows_of(rows(2 * CHUNK_MAX_BYTES, 1)), limits)


@pytest.mark.parametrize(
    ("name", "seq", "chunk_ids"),
    [
        ("", 0, []),
        ("n" * 129, 0, []),
        ("a\nb", 0, []),
        (None, 0, []),
        ("n", -1, []),
        ("n", 1 << 62, []),
        ("n", True, []),
        ("n", 0.0, []),
        ("n", 0, [b"short"]),
        ("n", 0, ["x" * 16]),
        ("n", 0, [b"x" * 16, b"x" * 16]),
        ("n", 0, [b"%016d" % number for number in range(CHUNKS_MAX + 1)]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_commit(name: Any, seq: Any, chunk_ids: Any) -> None:
    """A commit needs a name, a number and distinct chunks, not too many."""
    with pytest.raises(InvalidInput):
        check_load(name, seq, chunk_ids)


def test_a_good_commit() -> None:
    """The largest number and as many chunks as are allowed."""
    check_load("n" * 128, (1 << 62) - 1, [b"%016d" % number for number in range(CHUNKS_MAX)])
    check_load("nightly: 2026/11/15", 0, [])
