"""The JSON that ``--json`` writes: one function for each value, and the only place that names its fields.

Fields are named as in :mod:`dibs.task`, with two differences. A time is ISO 8601 text in UTC with milliseconds, and its
name ends in ``_at`` where the value's ends in ``_ms``. Payloads and results are decoded; bytes, and what cannot be
decoded here, are ``{"$base64": "…"}``. A field that has no value is null, never left out.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec

from dibs import codec
from dibs.errors import CodecError
from dibs.ids import id_to_text
from dibs.shapes import Json, time_text
from dibs.task import QueueConfig, QueueStats, Result, Task, WorkerInfo


def task_shape(task: Task) -> Json:
    """A task as it stands."""
    return {
        "id": id_to_text(task.id),
        "tenant": task.tenant,
        "command": task.command,
        "status": task.status.value,
        "place": task.place.value,
        "priority": task.priority,
        "attempts": task.attempts,
        "max_attempts": task.max_attempts,
        "releases": task.releases,
        "key": task.key,
        "codec": task.codec,
        "payload": value_shape(task.payload, task.codec),
        "enqueued_at": time_text(task.enqueued_ms),
        "due_at": time_text(task.due_ms),
        "expires_at": time_text(task.expires_ms),
        "ended_at": time_text(task.ended_ms),
        "kept_until_at": time_text(task.kept_until_ms),
        "worker": task.worker,
        "lease_end_at": time_text(task.lease_end_ms),
        "cancel_requested": task.cancel_requested,
        "progress": msgspec.to_builtins(task.progress),
        "timeout_s": task.timeout_s,
        "reason": task.reason,
        "error": msgspec.to_builtins(task.error),
        "result": None if task.result is None else result_shape(task.result),
        "traceparent": task.traceparent,
        "limit_key": task.limit_key,
        "limit_cost": task.limit_cost,
    }


def result_shape(result: Result) -> Json:
    """The result slot: a value, or the error the task ended with."""
    return {
        "status": result.status.value,
        "codec": result.codec,
        "value": None if result.data is None else value_shape(result.data, result.codec),
        "reason": result.reason,
        "error": msgspec.to_builtins(result.error),
    }


def queue_shape(queue: QueueStats, config: QueueConfig) -> Json:
    """A queue's counts and its configuration."""
    return {**counts_shape(queue), "paused": config.paused, "config": config_shape(config)}


def counts_shape(queue: QueueStats) -> Json:
    """The exact counts of a queue; of a whole tenant, without a command."""
    return {
        "command": queue.command or None,
        "ready": queue.ready,
        "delayed": queue.delayed,
        "leased": queue.leased,
        "dead": queue.dead,
        "bytes": queue.bytes,
        "oldest_ready_at": time_text(queue.oldest_ready_ms),
    }


def config_shape(config: QueueConfig) -> Json:
    """A queue's configuration; null is the library's default."""
    shape: Json = msgspec.to_builtins(config)
    return shape


def worker_shape(worker: WorkerInfo) -> Json:
    """What a worker tells about itself."""
    return {
        "name": worker.name,
        "host": worker.host,
        "pid": worker.pid,
        "slots": worker.slots,
        "busy": worker.busy,
        "commands": list(worker.commands),
        "started_at": time_text(worker.started_ms or None),
        "seen_at": time_text(worker.seen_ms),
        "memory_bytes": worker.memory_bytes,
        "tasks": [id_to_text(task_id) for task_id in worker.tasks],
    }


def value_shape(data: bytes, codec_name: str) -> Any:
    """Returns the value of a payload or result; bytes, and what cannot be read here, in base64."""
    if not data:
        return None
    try:
        return _jsonable(codec.decode(data, codec_name))
    except (CodecError, RecursionError):
        return _base64(data)


def _jsonable(value: Any) -> Any:
    """JSON has no bytes, no NaN and no keys but text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return _base64(bytes(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return msgspec.to_builtins(value)


def _base64(data: bytes) -> Json:
    return {"$base64": base64.b64encode(data).decode()}
