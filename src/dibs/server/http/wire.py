"""Tasks in JSON, as they come in: what the HTTP API takes, and the way to the queue's own values.

Names are camelCase, durations are seconds, times are RFC 3339, ids are UUIDs and lease tokens hex. What a client sends
that nobody knows is refused, so that a misspelt option is not lost. A payload is any JSON and is kept byte by byte;
it is looked through before it is stored, so that nothing is stored that a worker could not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from dibs import task
from dibs.checks import (
    COMMANDS_MAX,
    ERROR_TEXT_MAX_CHARS,
    LIMIT_COST_MAX,
    TIMEOUT_MAX_S,
    TTL_MAX_S,
    Limits,
    check_payload,
    check_result,
)
from dibs.errors import PayloadTooLarge
from dibs.server.http.json_text import check_json, is_deeper
from dibs.server.http.problems import Problem, problem_of, unreadable
from dibs.task import (
    BATCH_MAX,
    DELAY_HORIZON_S,
    LEASE_MAX_S,
    LEASE_MIN_S,
    MAX_ATTEMPTS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
)

CLAIM_WAIT_MAX_S = 30
RESULT_WAIT_MAX_S = 60
DEPTH_MAX = 128
"""How deeply a payload or result may be nested: far below what any reader's stack can take."""

Command = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$", description="The kind of work.")]
Key = Annotated[str, Meta(min_length=1, max_length=512)]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="What proves that the lease is yours.")]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Time = Annotated[datetime, Meta(tz=True)]
Lease = Annotated[float, Meta(ge=LEASE_MIN_S, le=LEASE_MAX_S)]
Delay = Annotated[float, Meta(ge=0, le=DELAY_HORIZON_S)]
Ttl = Annotated[float, Meta(ge=0, le=TTL_MAX_S)]
Attempts = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS_MAX)]
Priority = Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
Count = Annotated[int, Meta(ge=1, le=BATCH_MAX)]
Text = Annotated[str, Meta(max_length=ERROR_TEXT_MAX_CHARS)]
AnyJson = Annotated[Raw, Meta(description="Any JSON.")]


class _Asked(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a client sends."""


# ------------------------------------------------------------------------------------------------------------- create


class CreateTask(_Asked, frozen=True, kw_only=True):
    """A task to be enqueued. What is left out, the queue decides."""

    command: Command
    payload: AnyJson | UnsetType = UNSET
    priority: Priority | None = None
    max_attempts: Attempts | None = None
    idempotency_key: Key | None = None
    run_at: Time | None = None
    delay_seconds: Delay | None = None
    result_ttl_seconds: Ttl | None = None
    expires_seconds: Annotated[float, Meta(ge=0.001, le=DELAY_HORIZON_S)] | None = None
    id: UUID | None = None
    traceparent: Annotated[str, Meta(max_length=200)] | None = None
    lease_seconds: Lease | None = None
    timeout_seconds: Annotated[float, Meta(ge=0.001, le=TIMEOUT_MAX_S)] | None = None
    retention_seconds: Ttl | None = None
    keep: bool = True
    on_duplicate: Literal["return", "replay_dead"] = "return"
    limit_key: Key | None = None
    limit_cost: Annotated[int, Meta(ge=1, le=LIMIT_COST_MAX)] = 1


class CreateTasks(_Asked, frozen=True, kw_only=True):
    """Several tasks; each is judged by itself."""

    tasks: Annotated[
        list[Raw],
        Meta(min_length=1, max_length=BATCH_MAX),
    ]


def new_task(asked: CreateTask, limits: Limits) -> task.NewTask:
    """Returns the task that is asked for. A payload that the store would not take is refused unread."""
    if asked.run_at is not None and asked.delay_seconds is not None:
        raise Problem(422, "invalid", "delaySeconds: runAt is given too: use one of them", field="delaySeconds")
    return task.NewTask(
        command=asked.command,
        payload=json_bytes(asked.payload, "payload", limits),
        id=b"" if asked.id is None else asked.id.bytes,
        priority=asked.priority,
        delay_s=asked.delay_seconds or 0.0,
        run_at_ms=None if asked.run_at is None else max(0, to_ms(asked.run_at)),
        max_attempts=asked.max_attempts,
        lease_s=asked.lease_seconds,
        timeout_s=asked.timeout_seconds,
        expires_s=asked.expires_seconds,
        key=asked.idempotency_key,
        on_duplicate=asked.on_duplicate,
        result_ttl_s=asked.result_ttl_seconds,
        retention_s=asked.retention_seconds,
        keep=asked.keep,
        traceparent=asked.traceparent,
        limit_key=asked.limit_key,
        limit_cost=asked.limit_cost,
    )


# -------------------------------------------------------------------------------------------------------------- claim


class ClaimTask(_Asked, frozen=True, kw_only=True):
    """Which task to take, and for how long. Without `commands`: those that the token is limited to."""

    commands: Annotated[list[Command], Meta(min_length=1, max_length=COMMANDS_MAX)] | None = None
    lease_seconds: Lease | None = None
    wait_seconds: Annotated[float, Meta(ge=0, le=CLAIM_WAIT_MAX_S)] = 0
    claim_id: UUID | None = None
    worker: Name | None = None


class ClaimTasks(ClaimTask, frozen=True, kw_only=True):
    """Which tasks to take, and how many."""

    count: Count


class Progress(_Asked, frozen=True, kw_only=True):
    """How far a running task says it is."""

    done: float
    total: float | None = None
    note: Annotated[str, Meta(max_length=200)] = ""


class RenewLease(_Asked, frozen=True, kw_only=True):
    """Extends a lease from now on; by as much as it was granted for, unless it says so."""

    lease_token: Token | None = None
    extend_seconds: Lease | None = None
    progress: Progress | None = None


class RenewLeaseOf(RenewLease, frozen=True, kw_only=True):
    """Extends one of several leases."""

    task_id: UUID


class RenewLeases(_Asked, frozen=True, kw_only=True):
    """Several leases; each is judged by itself."""

    heartbeats: Annotated[
        list[Raw],
        Meta(min_length=1, max_length=BATCH_MAX),
    ]


# ------------------------------------------------------------------------------------------------------------- settle


class ErrorBody(_Asked, frozen=True, kw_only=True):
    """What went wrong in a handler."""

    type: Annotated[str, Meta(min_length=1, max_length=200)]
    message: Text = ""
    traceback: Text = ""


class SubmitResult(_Asked, frozen=True, kw_only=True):
    """How a task ended: COMPLETED with a result (null is one), or FAILED with an error, for good."""

    status: Literal["COMPLETED", "FAILED"]
    lease_token: Token | None = None
    result: AnyJson | UnsetType = UNSET
    error: Text | ErrorBody | None = None
    reason: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    result_ttl_seconds: Ttl | None = None


class SubmitResultOf(SubmitResult, frozen=True, kw_only=True):
    """How one of several tasks ended."""

    task_id: UUID


class SubmitResults(_Asked, frozen=True, kw_only=True):
    """Several results; each is judged by itself."""

    results: Annotated[
        list[Raw],
        Meta(min_length=1, max_length=BATCH_MAX),
    ]


class Nack(_Asked, frozen=True, kw_only=True):
    """Gives a task back because it could not be done now. Without a delay, the queue's backoff decides."""

    lease_token: Token | None = None
    delay_seconds: Delay | None = None
    reason: Text = ""


class Abandon(_Asked, frozen=True, kw_only=True):
    """Gives a task back untouched."""

    lease_token: Token | None = None


def settlement(tenant: str, task_id: bytes, token: bytes, asked: SubmitResult, limits: Limits) -> task.Settlement:
    """Returns how a lease is to end. A result that the store would not take is refused unread."""
    if asked.status == "COMPLETED":
        if asked.error is not None or asked.reason is not None:
            name = "reason" if asked.error is None else "error"
            raise Problem(422, "invalid", f"{name}: this goes with FAILED: leave it out", field=name)
        return task.Settlement(
            tenant=tenant,
            id=task_id,
            token=token,
            kind=task.Kind.COMPLETE,
            result=json_bytes(asked.result, "result", limits),
            result_ttl_s=asked.result_ttl_seconds,
        )
    if asked.error is None:
        raise Problem(422, "invalid", "error: FAILED needs one: say what went wrong", field="error")
    if asked.result is not UNSET:
        raise Problem(422, "invalid", "result: this goes with COMPLETED: leave it out", field="result")
    return task.Settlement(
        tenant=tenant,
        id=task_id,
        token=token,
        kind=task.Kind.FAIL,
        error=error_info(asked.error),
        reason=asked.reason,
    )


def error_info(error: str | ErrorBody) -> task.ErrorInfo:
    """Returns what went wrong, as the queue keeps it."""
    if isinstance(error, str):
        return task.ErrorInfo("Error", error)
    return task.ErrorInfo(error.type, error.message, error.traceback)


#: Batches whose items are read one by one, so that a bad one does not spoil the rest: in which field, and of what.
BATCHES: Mapping[type[Struct], tuple[str, type[Struct]]] = {
    CreateTasks: ("tasks", CreateTask),
    RenewLeases: ("heartbeats", RenewLeaseOf),
    SubmitResults: ("results", SubmitResultOf),
}


# ------------------------------------------------------------------------------------------------------------- values


def json_bytes(value: Raw | UnsetType, field: Literal["payload", "result"], limits: Limits) -> bytes:
    """Returns JSON as it came, once it is certain that it may be stored and that everybody can read it. What was left
    out is null."""
    if isinstance(value, UnsetType):
        return b"null"
    data = bytes(value)
    try:
        # Its length is known before anything else.
        check_payload(data, limits) if field == "payload" else check_result(data, "json", limits)
        check_json(data, skipped=True)
    except PayloadTooLarge as error:
        raise problem_of(error) from None
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at `")[0]
        raise Problem(422, "invalid", f"{field}: {message}", field=field) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise unreadable(error) from None
    if is_deeper(data, DEPTH_MAX):
        raise Problem(400, "malformed", f"{field} is nested over {DEPTH_MAX} levels deep: flatten it", field=field)
    return data


def to_ms(time: datetime) -> int:
    """Returns milliseconds since the epoch."""
    return round(time.timestamp() * 1000)


def from_ms(at_ms: int) -> datetime:
    """Returns the time of so many milliseconds since the epoch."""
    return datetime.fromtimestamp(at_ms / 1000, UTC)
