"""Tasks in JSON, as they go out: what the HTTP API gives, made of the queue's own values."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from dibs import codec, task
from dibs.errors import CodecError
from dibs.server.http.json_text import check_json
from dibs.server.http.problems import Problem
from dibs.server.http.wire import AnyJson, Time, from_ms
from dibs.server.turns import Turns
from dibs.task import MAX_ATTEMPTS_DEFAULT, Place, Status

DECODED_MAX_BYTES = 64 << 10
"""Payloads and results that are not JSON are shown in JSON up to this size."""
DECODING = 8
"""By how much decoding and encoding takes longer than looking through."""

View = TypeVar("View")


class _Given(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What goes back. A field that has no value is left out."""


class ErrorView(_Given, frozen=True, kw_only=True):
    """What went wrong in a handler."""

    type: str
    message: str = ""
    traceback: str = ""


class ProgressView(_Given, frozen=True, kw_only=True):
    """How far a running task says it is."""

    done: float
    total: float | None = None
    note: str = ""


class TaskView(_Given, frozen=True, kw_only=True):
    """A task as it stands."""

    id: UUID
    tenant_id: str
    command: str
    status: Status
    place: Place
    attempts: int
    max_attempts: int
    created_at: Time
    priority: int
    payload: AnyJson | UnsetType = UNSET
    payload_base64: str | None = None
    """Instead of `payload`, where that is not JSON, or larger than what is decoded for it."""
    codec: str
    """How the payload is encoded."""
    idempotency_key: str | None = None
    run_at: Time | None = None
    """When a delayed task becomes ready."""
    worker_id: str | None = None
    lease_token: str | None = None
    lease_seconds: float | None = None
    lease_until: Time | None = None
    cancel_requested: bool = False
    releases: int = 0
    expires_at: Time | None = None
    ended_at: Time | None = None
    kept_until: Time | None = None
    timeout_seconds: float | None = None
    progress: ProgressView | None = None
    reason: str | None = None
    error: ErrorView | None = None
    traceparent: str | None = None
    limit_key: str | None = None
    limit_cost: int = 1
    duplicate: bool = False
    """Its key was taken: this is the first task of that key."""
    replayed: bool = False
    """It was dead, and has just been revived."""
    already: bool = False
    """Its id was enqueued before: nothing was changed."""


class TaskViews(_Given, frozen=True, kw_only=True):
    """Some tasks."""

    tasks: list[TaskView]


class TaskPage(_Given, frozen=True, kw_only=True):
    """Some of the tasks that match, and where to go on. Without a cursor that was all."""

    tasks: list[TaskView]
    cursor: str | None = None


class ItemView(_Given, frozen=True, kw_only=True):
    """One of several. Where it was not accepted, `error` says why, and `statusCode` what it would have been answered
    with by itself."""

    error: str | None = None
    code: str | None = None
    status_code: int | None = None
    field: str | None = None
    cause: str | None = None
    retry_after_seconds: float | None = None


class CreatedItem(ItemView, frozen=True, kw_only=True):
    """One of several tasks: as it stands, or why there is none."""

    task: TaskView | None = None


class CreatedItems(_Given, frozen=True, kw_only=True):
    """One answer for each, in order."""

    results: list[CreatedItem]


class RenewedItem(ItemView, frozen=True, kw_only=True):
    """One of several leases: until when it holds, or why it does not."""

    task_id: UUID | None = None
    lease_until: Time | None = None
    cancel_requested: bool = False


class RenewedItems(_Given, frozen=True, kw_only=True):
    """One answer for each, in order."""

    results: list[RenewedItem]


class SettledItem(ItemView, frozen=True, kw_only=True):
    """One of several results: how its task stands, or why it was not accepted."""

    task_id: UUID | None = None
    status: Status | None = None
    already: bool = False


class SettledItems(_Given, frozen=True, kw_only=True):
    """One answer for each, in order."""

    results: list[SettledItem]


class Renewed(_Given, frozen=True, kw_only=True):
    """The lease holds until then. `cancelRequested`: stop, and settle."""

    task_id: UUID
    ok: bool
    lease_until: Time
    cancel_requested: bool = False


class Settled(_Given, frozen=True, kw_only=True):
    """Accepted, and how the task stands now. `already`: the same was said before, and that stands."""

    task_id: UUID
    status: Status
    already: bool = False
    delay_seconds: float | None = None


class Outcome(_Given, frozen=True, kw_only=True):
    """How a task ended."""

    task_id: UUID
    status: Status
    command: str
    attempts: int
    ended_at: Time | None = None
    result: AnyJson | UnsetType = UNSET
    result_base64: str | None = None
    """Instead of `result`, where that is not JSON, or larger than what is decoded for it."""
    codec: str
    error: ErrorView | None = None
    reason: str | None = None


class CancelledView(_Given, frozen=True, kw_only=True):
    """What a cancel did: at once, or its worker will be told."""

    task_id: UUID
    how: Literal["cancelled", "cancelling"]
    status: Status


def task_view(one: task.Task, **marks: Any) -> TaskView:
    """Returns a task as JSON shows it."""
    return TaskView(
        id=UUID(bytes=one.id),
        tenant_id=one.tenant,
        command=one.command,
        status=one.status,
        place=one.place,
        attempts=one.attempts,
        max_attempts=one.max_attempts,
        created_at=from_ms(one.enqueued_ms),
        priority=one.priority,
        codec=one.codec,
        idempotency_key=one.key,
        run_at=from_ms(one.due_ms) if one.place is Place.DELAYED else None,
        worker_id=one.worker or None,
        lease_until=_from_ms(one.lease_end_ms) if one.place is Place.LEASED else None,
        cancel_requested=one.cancel_requested,
        releases=one.releases,
        expires_at=_from_ms(one.expires_ms),
        ended_at=_from_ms(one.ended_ms),
        kept_until=_from_ms(one.kept_until_ms),
        timeout_seconds=one.timeout_s,
        progress=None if one.progress is None else ProgressView(**msgspec.structs.asdict(one.progress)),
        reason=one.reason,
        error=error_view(one.error),
        traceparent=one.traceparent,
        limit_key=one.limit_key,
        limit_cost=one.limit_cost,
        **shown("payload", one.payload, one.codec),
        **marks,
    )


def lease_view(lease: task.Lease, worker: str) -> TaskView:
    """Returns a task that was just claimed, with the token that settles it."""
    return TaskView(
        id=UUID(bytes=lease.id),
        tenant_id=lease.tenant,
        command=lease.command,
        status=Status.IN_PROGRESS,
        place=Place.LEASED,
        attempts=lease.attempt,
        max_attempts=lease.max_attempts,
        created_at=from_ms(lease.enqueued_ms),
        priority=lease.priority,
        codec=lease.codec,
        idempotency_key=lease.key,
        worker_id=worker,
        lease_token=lease.token.hex(),
        lease_seconds=lease.lease_s,
        lease_until=from_ms(lease.lease_end_ms),
        timeout_seconds=lease.timeout_s,
        traceparent=lease.traceparent,
        **shown("payload", lease.payload, lease.codec),
    )


def unread_view(tenant: str, task_id: bytes, new: task.NewTask, status: Status, **marks: Any) -> TaskView:
    """Returns what is known of a task without reading it: it may be gone already, if it is not to be kept. What an
    earlier one holds is not known."""
    place = _PLACE_OF[status]
    is_new = not any(marks.values())
    return TaskView(
        id=UUID(bytes=task_id),
        tenant_id=tenant,
        command=new.command,
        status=status,
        place=Place.DELAYED if place is Place.READY and new.delay_s else place,
        attempts=0,
        max_attempts=new.max_attempts or MAX_ATTEMPTS_DEFAULT,
        created_at=datetime.now(UTC),
        priority=new.priority or 0,
        codec=new.codec,
        idempotency_key=new.key,
        **(shown("payload", new.payload, new.codec) if is_new else {}),
        **marks,
    )


_PLACE_OF = {
    Status.PENDING: Place.READY,
    Status.IN_PROGRESS: Place.LEASED,
    Status.COMPLETED: Place.NONE,
    Status.FAILED: Place.DEAD,
    Status.CANCELLED: Place.NONE,
}


def outcome(one: task.Task, result: task.Result) -> Outcome:
    """Returns how a task ended."""
    value: Mapping[str, Any] = {}
    if result.status is Status.COMPLETED:
        value = shown("result", result.data or b"", result.codec)
    return Outcome(
        task_id=UUID(bytes=one.id),
        status=result.status,
        command=one.command,
        attempts=one.attempts,
        ended_at=_from_ms(one.ended_ms),
        codec=result.codec,
        error=error_view(result.error or one.error) if result.status is not Status.COMPLETED else None,
        reason=result.reason or one.reason,
        **value,
    )


def error_view(error: task.ErrorInfo | None) -> ErrorView | None:
    """Returns what went wrong, as JSON shows it."""
    return None if error is None else ErrorView(type=error.type, message=error.message, traceback=error.traceback)


def item_error(problem: Problem) -> dict[str, Any]:
    """Returns the fields of an item of a batch that was not accepted."""
    more = problem.more
    return {
        "error": str(problem),
        "code": problem.code,
        "status_code": problem.status,
        "field": more.get("field"),
        "cause": more.get("cause"),
        "retry_after_seconds": more.get("retryAfterSeconds"),
    }


async def each(tasks: Iterable[task.Task], view: Callable[[task.Task], View]) -> list[View]:
    """Returns many tasks as JSON shows them."""
    views, turns = [], Turns()
    for one in tasks:
        views.append(view(one))
        await turns.after(effort(one))
    return views


def effort(one: task.Task | task.Lease | task.NewTask) -> int:
    """How much is done to show a task, in bytes that are only looked through."""
    return effort_of(one.payload, one.codec)


def effort_of(data: bytes, codec_name: str) -> int:
    """How much is done to show a payload or a result."""
    return len(data) if codec_name == "json" or len(data) > DECODED_MAX_BYTES else len(data) * DECODING


def shown(name: str, data: bytes, codec_name: str) -> Mapping[str, Any]:
    """Returns a payload or result under its name; what JSON cannot show, or only with much effort, goes in base64 under
    another."""
    try:
        return {name: _as_json(data, codec_name)}
    except (CodecError, msgspec.MsgspecError, RecursionError, UnicodeError, TypeError, ValueError):
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _as_json(data: bytes, codec_name: str) -> Raw:
    if not data:
        return _NULL
    if codec_name == "json":
        # It may have come in by other ways than this, where nobody reads it.
        check_json(data)
        return Raw(data)
    if codec_name == "raw":
        raise CodecError("bytes have no JSON")
    if len(data) > DECODED_MAX_BYTES:
        raise CodecError(f"over {DECODED_MAX_BYTES} bytes are not decoded for this")
    value = codec.decode(data, codec_name)
    if codec_name != "msgpack" or _MARKS.search(data) is not None:
        _refuse_unfaithful(value)
    return Raw(msgspec.json.encode(value))


def _refuse_unfaithful(value: Any) -> None:
    """Raises where JSON would silently show something else: bytes, numbers that are none."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise CodecError("bytes have no JSON")
    if isinstance(value, float) and not math.isfinite(value):
        raise CodecError("NaN and infinities have no JSON")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_unfaithful(key)
            _refuse_unfaithful(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_unfaithful(item)


_NULL = Raw(b"null")
_MARKS = re.compile(rb"[\xc4-\xc6\xca\xcb]")
"""MessagePack begins bytes, and numbers that may be none, with one of these; they may also be a part of something else,
so they are a reason to look closer."""


def _from_ms(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else from_ms(at_ms)
