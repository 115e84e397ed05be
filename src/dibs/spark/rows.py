"""What becomes of the rows of a DataFrame: a plan is made and checked on the driver; by it, on executors, Arrow batches
become chunks of a load.

Work is done by column, a chunk's rows at a time: a row has no Python object of its own but its payload, unless its
options differ from its neighbours'. What cannot become a task is told row by row, with the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from functools import lru_cache
from itertools import pairwise, starmap
from typing import Any, Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql import types

from dibs import checks
from dibs import codec as codecs
from dibs.checks import Limits
from dibs.errors import CodecError, InvalidInput, InvalidOption
from dibs.spark.options import Codec, WriteOptions
from dibs.stores.batches import batches
from dibs.task import BATCH_MAX, NewTask, Rows

PAYLOAD = "payload"
_TEXT = (types.StringType,)
_WHOLE = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
_NUMBER = (*_WHOLE, types.FloatType, types.DoubleType, types.DecimalType)
_PLAIN = (
    *_TEXT,
    *_NUMBER,
    types.BinaryType,
    types.BooleanType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
    types.DayTimeIntervalType,
    types.NullType,
)
#: What a column of this name says of its row, the types that can say it, and what to cast others to.
OPTION_COLUMNS: Mapping[str, tuple[tuple[type[types.DataType], ...], str]] = {
    "command": (_TEXT, "STRING"),
    "priority": (_WHOLE, "INT"),
    "key": ((*_TEXT, *_WHOLE), "STRING"),
    "limit_key": ((*_TEXT, *_WHOLE), "STRING"),
    "run_at": ((types.TimestampType,), "TIMESTAMP"),
    "delay_s": (_NUMBER, "DOUBLE"),
    "max_attempts": (_WHOLE, "INT"),
}
_NO_TYPE = (pa.ArrowException, ValueError, OverflowError)


class Plan(Struct, frozen=True):
    """How rows of one schema become tasks. Travels to executors."""

    tenant: str
    task: NewTask
    """What all rows have in common; the command is empty where each has its own."""
    picks: tuple[str, ...]
    """The columns that say how a row is enqueued, other than its key."""
    keyed: bool
    payload: Literal["text", "bytes", "value", "fields"]
    """What the payload is made of: JSON text, bytes or a value in the column `payload`, or several columns."""
    fields: tuple[str, ...] = ()
    """The columns that are the payload together."""


def plan(options: WriteOptions, schema: types.StructType) -> Plan:
    """Returns how rows of this schema become tasks, or says which column cannot be used, and why."""
    names = schema.fieldNames()
    for name in names:
        if names.count(name) > 1:
            raise InvalidOption(f"two columns are named {name}: rename or drop one")
    for name, (usable, cast) in OPTION_COLUMNS.items():
        if name in names and not isinstance(schema[name].dataType, (*usable, types.NullType)):
            raise InvalidOption(f"column {name} is {_shown(schema[name])}: cast it to {cast}")
    if "run_at" in names and "delay_s" in names:
        raise InvalidOption("columns run_at and delay_s both say when: drop one of them")
    if options.command is None and "command" not in names:
        raise InvalidOption(
            "which queue the rows belong to is not said: use .option('command', …), or a column named command"
        )
    payload, fields = _payload_of(schema, [name for name in names if name not in OPTION_COLUMNS])
    picks = tuple(name for name in names if name in OPTION_COLUMNS and name != "key")
    task = _task(options, _codec(options.codec, payload))
    return Plan(options.tenant, task, picks, "key" in names, payload, fields)


def _payload_of(
    schema: types.StructType, names: Sequence[str]
) -> tuple[Literal["text", "bytes", "value", "fields"], tuple[str, ...]]:
    if not names:
        raise InvalidOption(
            "no column is left for the payload: name one payload, or have others than "
            f"{', '.join(OPTION_COLUMNS)}, which say how a row is enqueued"
        )
    for name in names:
        if not _is_usable(schema[name].dataType):
            raise InvalidOption(
                f"column {name} is {_shown(schema[name])}, which no payload can hold: cast it, to STRING for one"
            )
    if PAYLOAD not in names:
        return "fields", tuple(names)
    others = [name for name in names if name != PAYLOAD]
    if others:
        raise InvalidOption(
            f"column {others[0]} has no meaning beside payload: drop it, put it into the payload, or name it one of "
            f"{', '.join(OPTION_COLUMNS)}"
        )
    if isinstance(schema[PAYLOAD].dataType, types.StringType):
        return "text", ()
    return ("bytes" if isinstance(schema[PAYLOAD].dataType, types.BinaryType) else "value"), ()


def _is_usable(kind: types.DataType) -> bool:
    if isinstance(kind, types.StructType):
        return all(_is_usable(field.dataType) for field in kind.fields)
    if isinstance(kind, types.ArrayType):
        return _is_usable(kind.elementType)
    if isinstance(kind, types.MapType):
        return isinstance(kind.keyType, _PLAIN) and _is_usable(kind.valueType)
    return isinstance(kind, _PLAIN)


def _shown(field: types.StructField) -> str:
    text = field.dataType.simpleString().upper()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _codec(asked: Codec | None, payload: str) -> Codec:
    if asked == "raw" and payload in ("value", "fields"):
        what = "several columns" if payload == "fields" else "a column of values"
        raise InvalidOption(f"option codec is 'raw', and the payload is {what}: use json or msgpack, or give bytes")
    return asked or ("raw" if payload == "bytes" else "json")


def _task(options: WriteOptions, codec: Codec) -> NewTask:
    task = NewTask(
        command=options.command or "any",
        codec=codec,
        priority=options.priority,
        max_attempts=options.max_attempts,
        delay_s=options.delay_seconds,
        expires_s=options.expires_seconds,
        result_ttl_s=options.result_ttl_seconds,
    )
    checks.check_new_task(options.tenant, task, Limits())
    return replace(task, command=options.command or "")


# ---------------------------------------------------------------------------------------------------- on executors


class Made(NamedTuple):
    """What became of some rows: chunks, and by their places those that cannot become tasks."""

    chunks: Sequence[Rows]
    bad: Mapping[int, InvalidInput]


def parts(given: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the rows, in their order, in parts of at most as many as a chunk holds, and not many less."""
    small: list[pa.RecordBatch] = []
    for batch in given:
        if small and sum(one.num_rows for one in small) + batch.num_rows > BATCH_MAX:
            yield pa.concat_batches(small)
            small = []
        if batch.num_rows < BATCH_MAX:
            small.append(batch)
        else:
            yield from (batch.slice(start, BATCH_MAX) for start in range(0, batch.num_rows, BATCH_MAX))
    if small:
        yield pa.concat_batches(small)


class Tasks:
    """Makes chunks of Arrow batches, by a plan."""

    def __init__(self, plan: Plan, limits: Limits) -> None:
        self._plan = plan
        self._limits = limits
        self._options = lru_cache(maxsize=4 * BATCH_MAX)(self._made_options)

    def made_of(self, batch: pa.RecordBatch) -> Made:
        """Returns what becomes of at most 1,000 rows."""
        bad: dict[int, InvalidInput] = {}
        payloads = self._payloads(batch, bad)
        keys = self._keys(batch, bad)
        options, kinds = self._kinds(batch, bad)
        rows = Rows(payloads, options, kinds, keys)
        if bad:
            rows = rows.part([row for row in range(batch.num_rows) if row not in bad])
        return Made([*_bounded(rows)], bad)

    # ------------------------------------------------------------------------------------------------- options, keys

    def _keys(self, batch: pa.RecordBatch, bad: dict[int, InvalidInput]) -> list[str | None]:
        if not self._plan.keyed:
            return []
        keys: list[str | None] = _texts(batch.column("key"))
        for row, key in enumerate(keys):
            if key is not None:
                try:
                    checks.check_key(key)
                except InvalidInput as error:
                    bad.setdefault(row, error)
        return keys

    def _kinds(self, batch: pa.RecordBatch, bad: dict[int, InvalidInput]) -> tuple[list[NewTask], list[int]]:
        """Returns the options that rows have, each kind once, and which of them each has."""
        picks = self._plan.picks
        if not picks:
            return [self._plan.task], []
        numbers: dict[tuple[Any, ...], int] = {}
        said = zip(*(_READ[name](batch.column(name)) for name in picks), strict=True)
        kinds = [numbers.setdefault(one, len(numbers)) for one in said]
        options: list[NewTask] = []
        places: list[int] = []
        errors: dict[int, InvalidInput] = {}
        for kind, one in enumerate(numbers):
            places.append(len(options))
            try:
                options.append(self._options(one))
            except InvalidInput as error:
                errors[kind] = error
        if errors:
            for row, kind in enumerate(kinds):
                if kind in errors:
                    bad.setdefault(row, errors[kind])
            kinds = [places[kind] for kind in kinds]
        return options, kinds if len(options) > 1 else []

    def _made_options(self, said: tuple[Any, ...]) -> NewTask:
        named = {name: value for name, value in zip(self._plan.picks, said, strict=True) if value is not None}
        if "run_at" in named:
            # A millisecond that has begun is not over: nothing runs before its time.
            named["run_at_ms"] = -(-named.pop("run_at") // 1000)
            named["delay_s"] = 0.0
        task = replace(self._plan.task, **named)
        if not task.command:
            raise InvalidOption("command is null, and none is given for all: use .option('command', …)")
        checks.check_new_task(self._plan.tenant, task, self._limits)
        return task

    # ------------------------------------------------------------------------------------------------------ payloads

    def _payloads(self, batch: pa.RecordBatch, bad: dict[int, InvalidInput]) -> list[bytes]:
        kind = self._plan.payload
        if kind == "fields":
            payloads = self._of_values(_fields(self._plan.fields, batch), batch, bad)
        elif kind == "value":
            payloads = self._of_values(batch.column(PAYLOAD), batch, bad)
        else:
            payloads = self._as_written(batch.column(PAYLOAD), bad)
        if max(map(len, payloads)) > self._limits.payload_max_bytes:
            for row, payload in enumerate(payloads):
                self._try(row, bad, checks.check_payload, payload, self._limits)
        return payloads

    def _as_written(self, column: pa.Array, bad: dict[int, InvalidInput]) -> list[bytes]:
        """The bytes as they are, once it is known that they can be decoded."""
        codec, text = self._plan.task.codec, self._plan.payload == "text"
        given: list[bytes] = column.cast(pa.large_binary()).to_pylist()
        if column.null_count:
            gaps = [row for row, one in enumerate(given) if one is None]
            if codec == "raw":
                bad |= {
                    row: CodecError("payload is null, which raw bytes cannot say: use an empty one") for row in gaps
                }
            for row in gaps:
                given[row] = _NOTHING["json" if text and codec == "msgpack" else codec]
        if codec == "raw":
            return given
        if text and codec == "msgpack":
            return [self._try(row, bad, _repacked, one) or b"" for row, one in enumerate(given)]
        try:
            deque(map(_DECODE[codec], given), maxlen=0)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            for row, one in enumerate(given):
                self._try(row, bad, _value, one, codec)
        return given

    def _of_values(self, column: pa.Array, batch: pa.RecordBatch, bad: dict[int, InvalidInput]) -> list[bytes]:
        codec = self._plan.task.codec
        try:
            values = to_python(column, object_type)
        except _NO_TYPE:
            values = [self._try(row, bad, _one, column, row) for row in range(batch.num_rows)]
        if codec == "json" and not bad and _is_faithful(column):
            try:
                return _encode_lines(values).splitlines()
            except (TypeError, ValueError, OverflowError, RecursionError):
                pass  # one of them, which is found below
        return [
            b"" if row in bad else self._try(row, bad, codecs.encode, value, codec) or b""
            for row, value in enumerate(values)
        ]

    @staticmethod
    def _try(row: int, bad: dict[int, InvalidInput], make: Callable[..., Any], *of: Any) -> Any:
        """Returns what is made for a row, or None and notes why it cannot be."""
        try:
            return make(*of)
        except InvalidInput as error:
            bad.setdefault(row, error)
            return None


def _bounded(rows: Rows) -> Iterator[Rows]:
    """Splits rows so that the payloads of each part are no more than a chunk takes."""
    if sum(map(len, rows.payloads)) <= checks.CHUNK_MAX_BYTES:
        return iter((rows,) if rows.payloads else ())
    sizes = [*map(len, rows.payloads)]
    return (rows.part(some) for some in batches(range(len(sizes)), {}, sizes.__getitem__))


_DECODE: Mapping[str, Callable[[bytes], Any]] = {
    "json": msgspec.json.Decoder().decode,
    "msgpack": msgspec.msgpack.Decoder().decode,
}
_NOTHING: Mapping[str, bytes] = {"json": b"null", "msgpack": b"\xc0", "raw": b""}
_encode_lines = msgspec.json.Encoder().encode_lines


def _value(data: bytes, codec: str) -> Any:
    try:
        return codecs.decode(data, codec)
    except CodecError as error:
        name = {"json": "JSON", "msgpack": "MessagePack"}[codec]
        raise CodecError(f"payload is not {name} ({str(error.__cause__ or error).rstrip('.')})") from error


def _repacked(text: bytes) -> bytes:
    return codecs.encode(_value(text, "json"), "msgpack")


# ----------------------------------------------------------------------------------------------- columns as values


Maker = Callable[[tuple[str, ...]], Callable[..., Any]]
"""Tells, for names of fields, what makes one value of theirs."""


def dict_type(names: tuple[str, ...]) -> Callable[..., Any]:
    """Structs as dicts."""
    return lambda *values: dict(zip(names, values, strict=True))


@lru_cache(maxsize=256)
def object_type(names: tuple[str, ...]) -> Callable[..., Any]:
    """Structs as what codecs take for objects, made and encoded in a fraction of the time that dicts need."""
    fields = [(f"field_{number}", Any) for number in range(len(names))]
    rename = {field: name for (field, _), name in zip(fields, names, strict=True)}
    try:
        return msgspec.defstruct("Row", fields, rename=rename, gc=False)
    except ValueError:  # of names that are not unique, or have to be escaped
        return dict_type(names)


def to_python(column: pa.Array, maker: Maker = dict_type) -> list[Any]:
    """Returns the values of a column: structs as `maker` has them, maps as dicts, arrays as lists, times in UTC.
    Nested ones are made by column, too, which Arrow itself does row by row where there are maps."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        # In UTC, whatever the session's time zone is; and three times as fast as Arrow makes those of a zone.
        naive = column.cast(pa.int64()).cast(pa.timestamp(column.type.unit)).to_pylist()
        return [None if one is None else one.replace(tzinfo=UTC) for one in naive]
    if not pa.types.is_nested(column.type):
        return list(column.to_pylist())
    children = [to_python(child, maker) for child in _children(column)]
    made: list[Any]
    if pa.types.is_struct(column.type):
        make = maker(tuple(field.name for field in column.type))
        made = [*starmap(make, zip(*children, strict=True))] if children else [make() for _ in range(len(column))]
    else:
        offsets = column.offsets.to_pylist()
        places = pairwise([offset - offsets[0] for offset in offsets])
        if pa.types.is_map(column.type):
            keys, items = children
            made = [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in places]
        else:
            [values] = children
            made = [values[a:b] for a, b in places]
    if column.null_count:
        return [one if valid else None for one, valid in zip(made, column.is_valid().to_pylist(), strict=True)]
    return made


def _children(column: pa.Array) -> Sequence[pa.Array]:
    """Returns what a struct, list or map has inside: of its own rows alone, where it is a part of a larger one."""
    if pa.types.is_struct(column.type):
        return list(column.flatten())
    first, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
    inside = (column.keys, column.items) if pa.types.is_map(column.type) else (column.values,)
    return [child.slice(first, end - first) for child in inside]


def _one(column: pa.Array, row: int) -> Any:
    try:
        return to_python(column.slice(row, 1), object_type)[0]
    except _NO_TYPE as error:
        raise CodecError(f"it has a value that Python has no type for ({error})") from error


def _fields(names: Sequence[str], batch: pa.RecordBatch) -> pa.Array:
    columns = [batch.column(name) for name in names]
    return pa.StructArray.from_arrays(columns, names=list(names))


def _is_faithful(column: pa.Array) -> bool:
    """Whether JSON has a word for each value, found out by column: it has none for bytes, NaN and infinities."""
    kind = column.type
    if pa.types.is_nested(kind):
        return all(map(_is_faithful, _children(column)))
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(column), min_count=0).as_py() is not False
    return not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)) or column.null_count == len(column)


def _texts(column: pa.Array) -> list[str | None]:
    return list(column.cast(pa.large_string()).to_pylist())


def _numbers_s(column: pa.Array) -> list[float | None]:
    return list(column.cast(pa.float64()).to_pylist())


def _times_us(column: pa.Array) -> list[int | None]:
    if pa.types.is_null(column.type):
        return [None] * len(column)
    return list(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist())


def _whole(column: pa.Array) -> list[int | None]:
    return list(column.to_pylist())


_READ: Mapping[str, Callable[[pa.Array], list[Any]]] = {
    "command": _texts,
    "priority": _whole,
    "limit_key": _texts,
    "run_at": _times_us,
    "delay_s": _numbers_s,
    "max_attempts": _whole,
}
