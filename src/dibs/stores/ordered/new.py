"""The records of a new task: what the producer said, completed by what its queue says."""

from __future__ import annotations

from dibs.stores.ordered.records import PENDING, Body, State
from dibs.task import MAX_ATTEMPTS_DEFAULT, RESULT_TTL_DEFAULT_S, NewTask, QueueConfig

_RESULT_TTL_MS = int(RESULT_TTL_DEFAULT_S * 1000)


def body_of(task: NewTask, payload: bytes, key: str | None) -> Body:
    """Returns the body of a task with the options of `task`."""
    return Body(
        task.command,
        payload,
        task.codec,
        key,
        0 if task.lease_s is None else in_ms(task.lease_s),
        0 if task.timeout_s is None else in_ms(task.timeout_s),
        task.traceparent,
        task.limit_key,
        task.limit_cost,
    )


def new_state(
    config: QueueConfig, task: NewTask, digest: bytes, now_ms: int, place: int, rank: bytes, due_ms: int
) -> State:
    """Returns the state of a task that nobody has claimed yet; what it leaves open is taken from its queue."""
    ttl_s = config.result_ttl_s if task.result_ttl_s is None else task.result_ttl_s
    ttl_ms = _RESULT_TTL_MS if ttl_s is None else in_ms(ttl_s)
    retention_s = config.retention_s if task.retention_s is None else task.retention_s
    return State(
        command=task.command,
        status=PENDING,
        place=place,
        rank=rank,
        priority=(config.priority or 0) if task.priority is None else task.priority,
        attempts=0,
        max_attempts=task.max_attempts or config.max_attempts or MAX_ATTEMPTS_DEFAULT,
        size=len(task.payload),
        enqueued_ms=now_ms,
        due_ms=due_ms,
        expires_ms=0 if task.expires_s is None else now_ms + in_ms(task.expires_s),
        result_ttl_ms=ttl_ms,
        retention_ms=ttl_ms if retention_s is None else max(ttl_ms, in_ms(retention_s)),
        keep=task.keep,
        digest=digest,
    )


def in_ms(seconds: float) -> int:
    """Returns a duration in whole milliseconds."""
    return round(seconds * 1000)
