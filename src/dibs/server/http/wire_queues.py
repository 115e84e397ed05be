"""Queues, dead letters, workers and tenants in JSON: what the administrative routes take and give."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta, Struct, structs

from dibs import task
from dibs.checks import IN_FLIGHT_MAX, RATE_MAX, RATE_MIN
from dibs.retry import Backoff
from dibs.server.http.answers import TaskView
from dibs.server.http.problems import Problem
from dibs.server.http.wire import Attempts, Command, Count, Lease, Name, Priority, Time, Ttl, from_ms, to_ms
from dibs.task import BATCH_MAX, WEIGHT_MAX

Tenant = Annotated[
    str, Meta(pattern="^[a-z0-9][a-z0-9._-]{0,63}$", description="For operators: whose. Default: yours.")
]
InFlight = Annotated[int, Meta(ge=1, le=IN_FLIGHT_MAX)]


class _Asked(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a client sends."""


class _Given(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What goes back. A field that has no value is left out."""


class OfTenant(_Asked, frozen=True, kw_only=True):
    """Whose queues are meant."""

    tenant: Tenant | None = None


class DeadListing(OfTenant, frozen=True, kw_only=True):
    """Which dead letters are listed."""

    command: Command | None = None
    reason: Name | None = None
    ended_from: Time | None = None
    ended_until: Time | None = None
    limit: Count = 100
    cursor: str | None = None


class TenantListing(_Asked, frozen=True, kw_only=True):
    """Where to go on."""

    limit: Count = 100
    cursor: str | None = None


# ------------------------------------------------------------------------------------------------------ configuration


class BackoffBody(_Asked, frozen=True, kw_only=True):
    """How long a failed task waits before it is tried again."""

    kind: Literal["fixed", "linear", "exponential"] = "exponential"
    base_seconds: Annotated[float, Meta(ge=0)] = 5.0
    factor: Annotated[float, Meta(ge=1)] = 2.0
    cap_seconds: Annotated[float, Meta(ge=0)] = 900.0
    jitter: Literal["none", "equal", "full"] = "full"


class KeyLimitBody(_Asked, frozen=True, kw_only=True):
    """What the tasks that share a `limitKey` may use together."""

    in_flight: InFlight | None = None
    rate: Annotated[float, Meta(ge=RATE_MIN, le=RATE_MAX)] | None = None
    burst: Annotated[float, Meta(ge=1, le=RATE_MAX)] | None = None


class LimitsBody(_Asked, frozen=True, kw_only=True):
    """How much of a queue, or of a whole tenant, may be in progress."""

    in_flight: InFlight | None = None
    per_key: KeyLimitBody | None = None


class QueueConfigBody(_Asked, frozen=True, kw_only=True):
    """How a queue behaves; what a task leaves open is taken from here. The whole of it is replaced. That of the queue
    `*` is about the tenant: `paused`, `limits.inFlight`, `weight`."""

    paused: bool = False
    priority: Priority | None = None
    max_attempts: Attempts | None = None
    lease_seconds: Lease | None = None
    result_ttl_seconds: Ttl | None = None
    retention_seconds: Ttl | None = None
    dead_retention_seconds: Ttl | None = None
    backoff: BackoffBody | None = None
    limits: LimitsBody | None = None
    weight: Annotated[int, Meta(ge=1, le=WEIGHT_MAX)] | None = None


def queue_config(asked: QueueConfigBody) -> task.QueueConfig:
    """Returns the configuration that is asked for."""
    backoff, limits = asked.backoff, asked.limits
    return task.QueueConfig(
        paused=asked.paused,
        priority=asked.priority,
        max_attempts=asked.max_attempts,
        lease_s=asked.lease_seconds,
        result_ttl_s=asked.result_ttl_seconds,
        retention_s=asked.retention_seconds,
        dead_retention_s=asked.dead_retention_seconds,
        backoff=None
        if backoff is None
        else Backoff(
            kind=backoff.kind,
            base_s=backoff.base_seconds,
            factor=backoff.factor,
            cap_s=backoff.cap_seconds,
            jitter=backoff.jitter,
        ),
        limits=None
        if limits is None
        else task.QueueLimits(
            in_flight=limits.in_flight,
            per_key=None if limits.per_key is None else task.KeyLimit(**structs.asdict(limits.per_key)),
        ),
        weight=asked.weight,
    )


def config_body(config: task.QueueConfig) -> QueueConfigBody:
    """Returns a configuration as JSON shows it."""
    backoff, limits = config.backoff, config.limits
    return QueueConfigBody(
        paused=config.paused,
        priority=config.priority,
        max_attempts=config.max_attempts,
        lease_seconds=config.lease_s,
        result_ttl_seconds=config.result_ttl_s,
        retention_seconds=config.retention_s,
        dead_retention_seconds=config.dead_retention_s,
        backoff=None
        if backoff is None
        else BackoffBody(
            kind=backoff.kind,
            base_seconds=backoff.base_s,
            factor=backoff.factor,
            cap_seconds=backoff.cap_s,
            jitter=backoff.jitter,
        ),
        limits=None
        if limits is None
        else LimitsBody(
            in_flight=limits.in_flight,
            per_key=None if limits.per_key is None else KeyLimitBody(**structs.asdict(limits.per_key)),
        ),
        weight=config.weight,
    )


# ------------------------------------------------------------------------------------------------------------- queues


class Counts(_Given, frozen=True, kw_only=True):
    """Exact counts: of a tenant, or with a command of one queue."""

    ready: int
    delayed: int
    leased: int
    dead: int
    bytes: int
    command: str | None = None
    paused: bool = False
    oldest_ready_at: Time | None = None


class Queues(_Given, frozen=True, kw_only=True):
    """The queues of a tenant, and their sum."""

    queues: list[Counts]
    total: Counts


class Queue(_Given, frozen=True, kw_only=True):
    """A queue: what is in it, and how it behaves."""

    command: str
    counts: Counts
    config: QueueConfigBody


def counts(stats: task.QueueStats) -> Counts:
    """Returns counts as JSON shows them."""
    return Counts(
        command=stats.command or None,
        ready=stats.ready,
        delayed=stats.delayed,
        leased=stats.leased,
        dead=stats.dead,
        bytes=stats.bytes,
        paused=stats.paused,
        oldest_ready_at=None if stats.oldest_ready_ms is None else from_ms(stats.oldest_ready_ms),
    )


# ------------------------------------------------------------------------------------------------------- dead letters


class Which(_Asked, frozen=True, kw_only=True):
    """Which dead letters are meant: those named, or all that match, a bounded number at a time."""

    ids: Annotated[list[UUID], Meta(min_length=1, max_length=BATCH_MAX)] | None = None
    command: Command | None = None
    reason: Name | None = None
    ended_from: Time | None = None
    ended_until: Time | None = None
    all: bool = False
    """Says that nothing else is meant to choose: every dead letter of the tenant."""
    limit: Count = BATCH_MAX
    cursor: str | None = None


class Acted(_Given, frozen=True, kw_only=True):
    """The tasks that were acted on. With a cursor there may be more: repeat the call with it."""

    ids: list[UUID]
    count: int
    cursor: str | None = None


class DeadLetters(_Given, frozen=True, kw_only=True):
    """Some dead letters, and where to go on."""

    tasks: list[TaskView]
    cursor: str | None = None


def which_dead(asked: Which) -> list[bytes] | task.Filter:
    """Returns which dead letters are meant. To mean all of them has to be said."""
    chosen = (asked.command, asked.reason, asked.ended_from, asked.ended_until)
    if asked.ids is not None:
        if asked.all or any(one is not None for one in chosen):
            raise Problem(422, "invalid", "ids: these choose already: leave everything else out", field="ids")
        return [one.bytes for one in asked.ids]
    if not asked.all and all(one is None for one in chosen):
        raise Problem(422, "invalid", "ids: say which: ids, a command, a reason, a time, or all", field="ids")
    return dead_filter(asked)


def dead_filter(asked: Which | DeadListing) -> task.Filter:
    """Returns what matches."""
    return task.Filter(
        command=asked.command,
        place=task.Place.DEAD,
        reason=asked.reason,
        ended_from_ms=None if asked.ended_from is None else to_ms(asked.ended_from),
        ended_until_ms=None if asked.ended_until is None else to_ms(asked.ended_until),
    )


def acted(done: task.Acted) -> Acted:
    """Returns what was done as JSON shows it."""
    return Acted(ids=[UUID(bytes=one) for one in done.ids], count=len(done.ids), cursor=done.cursor)


# ------------------------------------------------------------------------------------------- clean-up, workers, tenants


class CleanUp(_Asked, frozen=True, kw_only=True):
    """What may go: ended tasks that are kept no longer than `before` (default: now)."""

    before: Time | None = None
    limit: Count = BATCH_MAX
    command: Command | None = None
    cursor: str | None = None


class CleanedUp(_Given, frozen=True, kw_only=True):
    """How many are gone. With a cursor there may be more: repeat the call with it."""

    deleted: int
    before: Time
    limit: int
    cursor: str | None = None


class WorkerView(_Given, frozen=True, kw_only=True):
    """What a worker tells about itself."""

    name: str
    seen_at: Time
    host: str = ""
    pid: int = 0
    slots: int = 0
    busy: int = 0
    commands: list[str] = []
    started_at: Time | None = None
    memory_bytes: int = 0
    tasks: list[UUID] = []


class Workers(_Given, frozen=True, kw_only=True):
    """The workers that are alive, by name."""

    workers: list[WorkerView]


class Tenants(_Given, frozen=True, kw_only=True):
    """Some tenants in order of name, and where to go on."""

    tenants: list[str]
    cursor: str | None = None


def worker_view(info: task.WorkerInfo) -> WorkerView:
    """Returns a worker as JSON shows it."""
    return WorkerView(
        name=info.name,
        seen_at=from_ms(info.seen_ms),
        host=info.host,
        pid=info.pid,
        slots=info.slots,
        busy=info.busy,
        commands=list(info.commands),
        started_at=from_ms(info.started_ms) if info.started_ms else None,
        memory_bytes=info.memory_bytes,
        tasks=[UUID(bytes=one) for one in info.tasks],
    )
