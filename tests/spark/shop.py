"""A store with something of everything in it, and what its views must show, said row by row in plain code."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Sequence
from typing import Any

import msgspec

from dibs.codec import encode
from dibs.fingerprint import fingerprint
from dibs.ids import id_to_text, new_id
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import (
    ErrorInfo,
    Event,
    Heartbeat,
    Kind,
    Lease,
    NewTask,
    Progress,
    Rows,
    Settlement,
    Status,
    Task,
)

TENANTS = ("acme", "default", "zeta")
DEAD = 12
PAYLOADS: Sequence[tuple[bytes, str]] = (
    (b'{"n": 1, "name": "plain"}', "json"),
    ('{"n": 2, "name": "été 雪 🎉"}'.encode(), "json"),
    (b'{"n": "two", "name": {"first": "Ada"}}', "json"),
    (b"[1, 2]", "json"),
    (b"null", "json"),
    (b"", "json"),
    (b"{broken", "json"),
    (encode({"n": 7, "name": "packed"}, "msgpack"), "msgpack"),
    (encode({"n": 8, "blob": b"\xff\x00"}, "msgpack"), "msgpack"),
    (b"\xc1", "msgpack"),
    (b"only text", "raw"),
    (b"\xff\xfe\x00", "raw"),
    (b'{"n": 9}', "own.codec"),
)


def fill(url: str, *, loaded: int = 6) -> None:
    """Makes the store: a load of so many chunks that is partly reached, and tasks of every kind for each tenant."""

    async def filled() -> None:
        async with await open_store(url) as store:
            for tenant in TENANTS:
                await _fill_tenant(store, tenant, loaded if tenant == "acme" else 1)

    asyncio.run(filled())


async def _fill_tenant(store: Store, tenant: str, loaded: int) -> None:
    chunk_ids = [new_id() for _ in range(loaded)]
    for number, chunk_id in enumerate(chunk_ids):
        payloads = [b'{"n": %d, "name": "row"}' % (number * 1_000 + row) for row in range(1_000)]
        await store.stage(tenant, chunk_id, Rows(payloads, [NewTask(command="load")]))
    await store.commit_load(tenant, "l", 1, chunk_ids)
    await _settle(
        store,
        await store.claim(tenant, ["load"], limit=700, lease_s=3_600, worker="w1"),
        Kind.COMPLETE,
        b'{"ok": true}',
    )
    mixed = [
        NewTask(command="mixed", payload=data, codec=codec, key=f"k{n}") for n, (data, codec) in enumerate(PAYLOADS)
    ]
    await store.enqueue(tenant, mixed)
    await store.enqueue(tenant, [NewTask(command="later", delay_s=3_600, priority=7, traceparent="00-ab-cd-01")] * 3)
    await store.enqueue(tenant, [NewTask(command="work", limit_key="host", limit_cost=3, timeout_s=2.5, expires_s=9e5)])
    await store.enqueue(tenant, [NewTask(command="work", payload=b"%d" % n, max_attempts=2) for n in range(40)])
    leases = await store.claim(tenant, ["work"], limit=40, lease_s=3_600, worker="wörker 2")
    for number, lease in enumerate(leases[:DEAD]):
        error = ErrorInfo("ValueError", f"bad número {number}\nsecond", "Traceback …")
        await _settle(store, [lease], Kind.FAIL, error=error, reason="BAD" if number % 2 else None)
    for result, codec in ((b"null", "json"), (None, "json"), (b"\xff", "raw"), (encode([1], "msgpack"), "msgpack")):
        await _settle(store, [leases.pop()], Kind.COMPLETE, result, codec)
    await _settle(store, [leases.pop()], Kind.RETRY, error=ErrorInfo("OSError", "again"))
    beat = leases.pop()
    await store.heartbeat([Heartbeat(tenant=tenant, id=beat.id, token=beat.token, progress=Progress(1, 4, "half"))])
    await store.cancel(tenant, [leases.pop().id, (await store.enqueue(tenant, [NewTask(command="gone")]))[0].id])  # type: ignore[union-attr]


async def _settle(
    store: Store, leases: Sequence[Lease], kind: Kind, result: bytes | None = None, codec: str = "json", **more: Any
) -> None:
    for first in range(0, len(leases), 500):
        await store.settle([
            Settlement(tenant=one.tenant, id=one.id, token=one.token, kind=kind, result=result, codec=codec, **more)
            for one in leases[first : first + 500]
        ])  # fmt: skip


# ------------------------------------------------------------------------------------------------------- expectations


def at(ms: int | None) -> dt.datetime | None:
    """A time of the store's as Spark shows it, in UTC."""
    return None if ms is None else dt.datetime(1970, 1, 1) + dt.timedelta(milliseconds=ms)  # noqa: DTZ001 Spark's own


def text(data: bytes | None, codec: str) -> str | None:
    """A payload as text."""
    if data is None:
        return None
    try:
        if codec == "msgpack":
            return msgspec.json.encode(msgspec.msgpack.decode(data)).decode()
        return data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def task_row(task: Task) -> dict[str, Any]:
    """A task as a row of any view of tasks."""
    error, result, progress = task.error, task.result, task.progress
    data = None if result is None else result.data
    return {
        "tenant": task.tenant,
        "id": id_to_text(task.id),
        "command": task.command,
        "status": task.status.value,
        "place": task.place.value,
        "priority": task.priority,
        "attempts": task.attempts,
        "max_attempts": task.max_attempts,
        "releases": task.releases,
        "key": task.key,
        "payload": text(task.payload, task.codec),
        "codec": task.codec,
        "enqueued_at": at(task.enqueued_ms),
        "due_at": at(task.due_ms),
        "expires_at": at(task.expires_ms),
        "ended_at": at(task.ended_ms),
        "kept_until": at(task.kept_until_ms),
        "worker": task.worker,
        "lease_end_at": at(task.lease_end_ms),
        "cancel_requested": task.cancel_requested,
        "progress": None if progress is None else (progress.done, progress.total, progress.note),
        "reason": task.reason,
        "error_type": None if error is None else error.type,
        "error_message": None if error is None else error.message,
        "error_traceback": None if error is None else error.traceback,
        "fingerprint": None if error is None else fingerprint(error),
        "timeout_s": task.timeout_s,
        "limit_key": task.limit_key,
        "limit_cost": task.limit_cost,
        "traceparent": task.traceparent,
        "result": None if result is None else text(data, result.codec),
    }


def result_row(task: Task) -> dict[str, Any]:
    """A task as a row of the view `results`."""
    codec = None if task.result is None or task.result.data is None else task.result.codec
    return task_row(task) | {"codec": codec}


def event_row(shard: int, event: Event) -> dict[str, Any]:
    """An event as a row."""
    row = msgspec.structs.asdict(event)
    at_ms = row.pop("at_ms")
    return row | {"shard": shard, "at": at(at_ms), "id": id_to_text(event.id), "kind": event.kind.value}


async def all_tasks(store: Store, tenants: Sequence[str] = TENANTS) -> list[Task]:
    """Returns the tasks of these tenants."""
    found: list[Task] = []
    for tenant in tenants:
        cursor = None
        while True:
            page = await store.list(tenant, cursor=cursor, limit=1_000)
            found += page.tasks
            cursor = page.cursor
            if cursor is None:
                break
    return found


async def all_events(store: Store, tenant: str = "*") -> list[tuple[int, Event]]:
    """Returns the events of every shard."""
    found: list[tuple[int, Event]] = []
    for bounds in await store.journal_bounds():
        after: bytes | None = None
        while True:
            page = await store.events(tenant, shard=bounds.shard, after=after)
            found += [(bounds.shard, event) for event in page.events]
            after = page.cursor
            if not page.more:
                break
    return found


def ended(task: Task) -> bool:
    """Whether the view `results` has it."""
    return task.status in (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
