"""Tasks, runs of events and queues as Arrow batches, column by column.

Events come in runs that share most of what they say: what is shared becomes a dictionary and is repeated, and ids and
cursors are made by arithmetic over whole columns. Of tasks a column is a list, made once; only the columns that the
schema names are made at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType

from dibs.errors import InvalidOption
from dibs.fingerprint import fingerprint
from dibs.ids import ID_BYTES
from dibs.spark import schema as schemas
from dibs.spark.options import ReadOptions
from dibs.spark.payload import Fields, Shape, texts
from dibs.task import ErrorInfo, EventRun, Progress, QueueStats, Task

_UUID_CHARS = 36
#: Where the digits of an id stand in its text, and the digits of every byte.
_DIGITS = [at for at, char in enumerate("xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") if char == "x"]
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint8).reshape(256, 2)
_INDEX_BYTES = 4
_US_PER_MS = 1_000


def check_schema(options: ReadOptions, schema: StructType) -> None:
    """Refuses a schema that names what the view has not, or has otherwise. Some of its columns, in any order, will
    do."""
    known = {column.name: column.type for column in schemas.COLUMNS[options.view]}
    for field in schema.fields:
        if field.name not in known:
            raise InvalidOption(
                f"the view {options.view} has no column {field.name}: it has {', '.join(known)}; leave .schema() out, "
                "or name some of these"
            )
        given = field.dataType.simpleString()
        if known[field.name] != schemas.ANY:
            expected = known[field.name].lower().replace(": ", ":").replace(", ", ",")
        else:
            expected = options.payload.lower() if options.payload.lower() in ("string", "binary") else "struct"
            if expected == "struct" and isinstance(field.dataType, StructType):
                Shape(field.dataType, field.name)
                continue
        if given != expected:
            raise InvalidOption(
                f"column {field.name} of the view {options.view} is of type {expected}, not {given}"
                + ("; the option payload says how it is read" if known[field.name] == schemas.ANY else "")
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the schema that Spark expects batches to have."""
    return to_arrow_schema(schema, timezone="UTC")


# ----------------------------------------------------------------------------------------------------------- events


class Runs(NamedTuple):
    """Runs of one shard's journal, with how many events each is."""

    shard: int
    runs: Sequence[EventRun]
    counts: npt.NDArray[np.int64]
    total: int


def event_batch(shard: int, runs: Sequence[EventRun], schema: pa.Schema) -> pa.RecordBatch:
    """Returns the events of runs, in order."""
    counts = np.fromiter((run.count() for run in runs), np.int64, len(runs))
    page = Runs(shard, runs, counts, int(counts.sum()))
    return pa.RecordBatch.from_arrays([_EVENT_COLUMNS[name](page) for name in schema.names], schema=schema)


def _shards(page: Runs) -> pa.Array:
    return pa.array(np.full(page.total, page.shard, np.int32))


def _cursors(page: Runs) -> pa.Array:
    """The cursors of a run's events are that of its first, whose last bytes count up."""
    firsts = np.frombuffer(b"".join(run.cursor for run in page.runs), np.uint8).reshape(len(page.runs), -1)
    cursors = np.repeat(firsts, page.counts, axis=0)
    begins = np.cumsum(page.counts) - page.counts
    indexes = np.ascontiguousarray(firsts[:, -_INDEX_BYTES:]).view(">u4")[:, 0].astype(np.int64)
    numbers = np.arange(page.total) + np.repeat(indexes - begins, page.counts)
    cursors[:, -_INDEX_BYTES:] = numbers.astype(">u4").view(np.uint8).reshape(-1, _INDEX_BYTES)
    return _fixed(cursors, pa.binary())


def _event_times(page: Runs) -> pa.Array:
    at_ms = np.fromiter((run.at_ms for run in page.runs), np.int64, len(page.runs))
    return pa.array(np.repeat(at_ms * _US_PER_MS, page.counts)).view(pa.timestamp("us", tz="UTC"))


def _event_ids(page: Runs) -> pa.Array:
    return id_texts(b"".join(run.ids for run in page.runs))


def _event_attempts(page: Runs) -> pa.Array:
    if all(len(run.attempts) == 1 for run in page.runs):
        attempts = np.fromiter((run.attempts[0] for run in page.runs), np.int32, len(page.runs))
        return pa.array(np.repeat(attempts, page.counts))
    each = (
        run.attempts if len(run.attempts) == count else run.attempts * count
        for run, count in zip(page.runs, page.counts.tolist(), strict=True)
    )
    return pa.array(np.fromiter(chain.from_iterable(each), np.int32, page.total))


def _shared(field: str) -> Callable[[Runs], pa.Array]:
    """A column of text that the events of a run have in common."""

    def column(page: Runs) -> pa.Array:
        words: dict[str, int] = {}
        codes = [words.setdefault(getattr(run, field), len(words)) for run in page.runs]
        indexes = np.repeat(np.array(codes, np.int32), page.counts)
        return pa.DictionaryArray.from_arrays(indexes, pa.array(list(words), pa.string())).dictionary_decode()

    return column


_EVENT_COLUMNS: dict[str, Callable[[Runs], pa.Array]] = {
    "shard": _shards,
    "cursor": _cursors,
    "at": _event_times,
    "id": _event_ids,
    "attempt": _event_attempts,
    **{
        name: _shared(name)
        for name in (
            "kind", "tenant", "command", "worker", "reason", "error_type", "error_line", "fingerprint",
        )
    },
}  # fmt: skip


def id_texts(ids: bytes) -> pa.Array:
    """Returns ids, 16 bytes each, as text."""
    digits = _HEX[np.frombuffer(ids, np.uint8)].reshape(-1, 2 * ID_BYTES)
    text = np.full((len(digits), _UUID_CHARS), ord("-"), np.uint8)
    text[:, _DIGITS] = digits
    return _fixed(text, pa.string())


def _fixed(values: npt.NDArray[np.uint8], kind: pa.DataType) -> pa.Array:
    """Returns rows of bytes, all of one length, as text or binary."""
    count, width = values.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(offsets), pa.py_buffer(values)])


# ------------------------------------------------------------------------------------------------------------ tasks


class TaskColumns:
    """Tasks as batches of one schema. Not picklable: made where it is used."""

    def __init__(self, view: str, schema: StructType) -> None:
        self._schema = arrow_schema(schema)
        self._columns: list[Callable[[Sequence[Task]], pa.Array]] = []
        for field, arrow in zip(schema.fields, self._schema, strict=True):
            if field.name in ("payload", "result"):
                self._columns.append(_data(field.name == "result", field.dataType, arrow.type))
            elif field.name == "codec" and view == "results":
                self._columns.append(_result_codecs)
            else:
                self._columns.append(_TASK_COLUMNS[field.name])

    def batch(self, tasks: Sequence[Task]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([column(tasks) for column in self._columns], schema=self._schema)


def _data(of_result: bool, kind: Any, arrow: pa.DataType) -> Callable[[Sequence[Task]], pa.Array]:
    find = _result_data if of_result else _payload_data
    if isinstance(kind, BinaryType):
        return lambda tasks: pa.array(find(tasks)[0], pa.binary())
    if isinstance(kind, StringType):
        return lambda tasks: texts(*find(tasks))
    fields = Fields(kind, arrow)
    return lambda tasks: fields.column(*find(tasks))


def _payload_data(tasks: Sequence[Task]) -> tuple[list[bytes | None], list[str | None]]:
    return [task.payload for task in tasks], [task.codec for task in tasks]


def _result_data(tasks: Sequence[Task]) -> tuple[list[bytes | None], list[str | None]]:
    results = [task.result for task in tasks]
    data = [None if result is None else result.data for result in results]
    return data, [None if result is None else result.codec for result in results]


def _result_codecs(tasks: Sequence[Task]) -> pa.Array:
    results = [task.result for task in tasks]
    return pa.array(
        [None if result is None or result.data is None else result.codec for result in results], pa.string()
    )


def _of(field: str, kind: pa.DataType) -> Callable[[Sequence[Any]], pa.Array]:
    find = attrgetter(field)
    return lambda values: pa.array(list(map(find, values)), kind)


def _time_of(field: str) -> Callable[[Sequence[Any]], pa.Array]:
    column = _of(field, pa.timestamp("ms", tz="UTC"))
    return lambda values: column(values).cast(pa.timestamp("us", tz="UTC"))


def _error_of(field: str) -> Callable[[Sequence[Task]], pa.Array]:
    return lambda tasks: pa.array(
        [None if task.error is None else getattr(task.error, field) for task in tasks], pa.string()
    )


def _fingerprints(tasks: Sequence[Task]) -> pa.Array:
    return pa.array([None if task.error is None else _fingerprint(task.error) for task in tasks], pa.string())


def _fingerprint(error: ErrorInfo) -> str:
    return _fingerprint_of(error.type, error.message)


@lru_cache(maxsize=1024)
def _fingerprint_of(kind: str, message: str) -> str:
    return fingerprint(ErrorInfo(kind, message))


def _progress(tasks: Sequence[Task]) -> pa.Array:
    told: list[Progress | None] = [task.progress for task in tasks]
    columns = [
        pa.array([None if one is None else one.done for one in told], pa.float64()),
        pa.array([None if one is None else one.total for one in told], pa.float64()),
        pa.array([None if one is None else one.note for one in told], pa.string()),
    ]
    missing = pa.array([one is None for one in told], pa.bool_())
    return pa.StructArray.from_arrays(columns, names=["done", "total", "note"], mask=missing)


_TASK_COLUMNS: dict[str, Callable[[Sequence[Task]], pa.Array]] = {
    "id": lambda tasks: id_texts(b"".join([task.id for task in tasks])),
    "error_type": _error_of("type"),
    "error_message": _error_of("message"),
    "error_traceback": _error_of("traceback"),
    "fingerprint": _fingerprints,
    "progress": _progress,
    "cancel_requested": _of("cancel_requested", pa.bool_()),
    "timeout_s": _of("timeout_s", pa.float64()),
    **{
        name: _of(name, pa.string())
        for name in (
            "tenant", "command", "status", "place", "codec", "worker", "reason", "key", "limit_key", "traceparent",
        )
    },
    **{name: _of(name, pa.int32()) for name in ("priority", "attempts", "max_attempts", "releases", "limit_cost")},
    **{
        name: _time_of(name.replace("_at", "_ms") if name != "kept_until" else "kept_until_ms")
        for name in ("enqueued_at", "due_at", "expires_at", "ended_at", "lease_end_at", "kept_until")
    },
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- queues


def queue_batch(tenant: str, queues: Sequence[QueueStats], schema: pa.Schema) -> pa.RecordBatch:
    """Returns the queues of one tenant."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array([tenant] * len(queues), pa.string()) if name == "tenant" else _QUEUE_COLUMNS[name](queues)
            for name in schema.names
        ],
        schema=schema,
    )


_QUEUE_COLUMNS: dict[str, Callable[[Sequence[QueueStats]], pa.Array]] = {
    "command": _of("command", pa.string()),
    "paused": _of("paused", pa.bool_()),
    "oldest_ready_at": _time_of("oldest_ready_ms"),
    **{name: _of(name, pa.int64()) for name in ("ready", "delayed", "leased", "dead", "bytes")},
}


def batches(rows: Iterator[list[Task]], rows_max: int, bytes_max: int) -> Iterator[list[Task]]:
    """Joins pages of tasks into batches that are worth their overhead, and no larger than one page more than said."""
    held: list[Task] = []
    size = 0
    for page in rows:
        held += page
        size += sum(len(task.payload) for task in page)
        if len(held) >= rows_max or size >= bytes_max:
            yield held
            held, size = [], 0
    if held:
        yield held
