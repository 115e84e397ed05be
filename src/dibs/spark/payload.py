"""Payloads and results as a column: text, bytes, or fields of a schema.

Who looks (:class:`Fields`) has a schema kept as `from_json` keeps it in its permissive mode: a field that is missing,
or does not fit its type, is null; what is no object, or cannot be read at all, is a null payload. A field of type
STRING shows whatever else it meets as JSON text. Nothing that a producer wrote fails the job.

Who works (:class:`Values`) is told of every row that does not fit, and why.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from dibs import codec as codecs
from dibs.errors import CodecError, InvalidOption

_json = msgspec.json.Encoder()
_WIDTHS: dict[type[DataType], int] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_LEAVES: dict[type[DataType], Any] = {
    StringType: str,
    BooleanType: bool,
    FloatType: float,
    DoubleType: float,
    BinaryType: bytes,
    DateType: datetime.date,
    TimestampType: datetime.datetime,
    DecimalType: Decimal,
    **{
        kind: Annotated[int, Meta(ge=-(1 << bits - 1), le=(1 << bits - 1) - 1)] for kind, bits in _WIDTHS.items()
    },
}  # fmt: skip
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, ValueError, RecursionError)


def texts(data: Sequence[bytes | None], codecs: Sequence[str | None]) -> pa.Array:
    """Returns payloads as text: JSON as it is, msgpack as JSON, and other bytes if they are UTF-8. What is no text is
    null."""
    if "msgpack" in codecs:
        data = [
            _json_of_msgpack(one) if codec == "msgpack" and one is not None else one
            for one, codec in zip(data, codecs, strict=True)
        ]
    try:
        return pa.array(data, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(one) for one in data], pa.string())


def _json_of_msgpack(data: bytes) -> bytes | None:
    try:
        return _json.encode(msgspec.msgpack.decode(data))
    except (*_UNREADABLE, TypeError, OverflowError):
        return None


def _text(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


class Fields:
    """Payloads as the columns of a schema. Not picklable: made where it is used."""

    def __init__(self, schema: StructType, arrow: pa.StructType) -> None:
        self._shape = Shape(schema)
        self._arrow = arrow
        self._decoders: dict[str | None, tuple[Callable[[bytes], Any], Callable[[bytes], Any]]] = {
            "json": (msgspec.json.Decoder(self._shape.type).decode, msgspec.json.Decoder().decode),
            "msgpack": (msgspec.msgpack.Decoder(self._shape.type).decode, msgspec.msgpack.Decoder().decode),
        }

    def column(self, data: Sequence[bytes | None], codecs: Sequence[str | None]) -> pa.Array:
        """Returns payloads of these codecs as structs; those of a codec that is neither json nor msgpack are null."""
        return _array([self._value(*one) for one in zip(data, codecs, strict=True)], self._shape, self._arrow)

    def _value(self, data: bytes | None, codec: str | None) -> Any:
        decoders = self._decoders.get(codec)
        if data is None or decoders is None:
            return None
        exact, any_value = decoders
        try:
            return exact(data)
        except _UNREADABLE:
            pass
        try:
            return self._shape.fit(any_value(data))
        except _UNREADABLE:
            return None


Wrong = dict[int, CodecError]
"""Why rows cannot be read, by their numbers."""

#: One word, maybe with others in brackets; a schema has a name before its first type.
_TYPE = re.compile(r"\s*\w+\s*([<(].*[>)])?\s*", re.DOTALL)
_NOTHING = (None, b"", b"null")


def type_named(name: str, text: str) -> DataType:
    """Returns a type that is written in Spark's words, or the struct that a schema makes. Needs a session. `name`: of
    the option, for the error."""
    ddl = text if _TYPE.fullmatch(text) else f"STRUCT<{text}>"
    try:
        schema: Any = StructType.fromDDL(f"value {ddl}")
    except PySparkException:
        raise InvalidOption(
            f"{name} is {text!r}, which is neither a type nor a schema in Spark's words: write 'string', 'binary' or, "
            "for columns, 'url STRING, width INT'"
        ) from None
    kind: DataType = schema[0].dataType
    Shape(kind, name)
    return kind


class Values:
    """Payloads or results as values of a type, each of them read or refused. Not picklable: made where it is used."""

    def __init__(self, kind: DataType, *, unquoted: bool = False) -> None:
        """`unquoted`: where texts are asked for, a JSON string is its text, not its JSON."""
        self._shape = Shape(kind)
        self._arrow = to_arrow_type(kind, timezone="UTC")
        self._unquoted = unquoted
        self._decoders: dict[str, Callable[[bytes], Any]] = {
            "json": msgspec.json.Decoder(self._shape.type).decode,
            "msgpack": msgspec.msgpack.Decoder(self._shape.type).decode,
        }

    def column(self, data: Sequence[bytes | None], codecs: Sequence[str]) -> tuple[pa.Array, Wrong]:
        """Returns values as a column. Nothing, null and what is wrong, is null."""
        if isinstance(self._shape.kind, BinaryType):
            return pa.array(data, self._arrow), {}
        read = self._text if isinstance(self._shape.kind, StringType) else self._value
        if read == self._text and {*codecs} <= {"json"} and not self._unquoted:
            try:
                return pa.array([None if one in _NOTHING else one for one in data], pa.binary()).cast(self._arrow), {}
            except pa.ArrowInvalid:  # not UTF-8: whose it is shows below
                pass
        wrong: Wrong = {}
        values: list[Any] = [None] * len(data)
        for row, (one, name) in enumerate(zip(data, codecs, strict=True)):
            if one is not None and one not in _NOTHING:
                try:
                    values[row] = read(one, name)
                except CodecError as error:
                    wrong[row] = error
        return _array(values, self._shape, self._arrow), wrong

    def _text(self, data: bytes, name: str) -> str:
        if name == "raw" or (name == "json" and not (self._unquoted and data.lstrip()[:1] == b'"')):
            try:
                return data.decode()
            except UnicodeDecodeError as error:
                raise CodecError(f"these bytes are not text ({error}): ask for them as 'binary'") from None
        value = codecs.decode(data, name)
        return value if self._unquoted and isinstance(value, str) else _json.encode(value).decode()

    def _value(self, data: bytes, name: str) -> Any:
        decode = self._decoders.get(name)
        try:
            if decode is not None:
                return decode(data)
            return msgspec.convert(codecs.decode(data, name), self._shape.type)
        except _UNREADABLE as error:
            raise CodecError(f"this is no {self._shape.kind.simpleString()}: {error}") from None


class Shape:
    """A type of Spark's, the type that msgspec decodes for it, and how a value that is not of it is made to fit."""

    def __init__(self, kind: DataType, path: str = "payload") -> None:
        self.kind = kind
        self.parts: list[Shape] = []
        self.names: list[str] = []
        if isinstance(kind, StructType):
            self.names = kind.fieldNames()
            self.parts = [Shape(field.dataType, f"{path}.{field.name}") for field in kind.fields]
            attributes = [f"f{number}" for number in range(len(self.names))]
            self.type: Any = msgspec.defstruct(
                "Payload",
                [(name, part.type | None, None) for name, part in zip(attributes, self.parts, strict=True)],
                rename=dict(zip(attributes, self.names, strict=True)),
                gc=False,
            )
        elif isinstance(kind, ArrayType):
            self.parts = [Shape(kind.elementType, f"{path}[]")]
            self.type = list.__class_getitem__(self.parts[0].type | None)
        elif isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
            self.parts = [Shape(kind.valueType, f"{path}{{}}")]
            self.type = dict.__class_getitem__((str, self.parts[0].type | None))
        elif type(kind) in _LEAVES:
            self.type = _LEAVES[type(kind)]
        else:
            raise InvalidOption(
                f"{path} cannot be read as {kind.simpleString()}: use STRING there, and parse it in Spark"
            )

    def fit(self, value: Any) -> Any:
        """Returns a decoded value as one of this shape, with None for every part that is not."""
        if value is None:
            return None
        if isinstance(self.kind, StructType):
            if not isinstance(value, dict):
                return None
            return self.type(*(part.fit(value.get(name)) for name, part in zip(self.names, self.parts, strict=True)))
        if isinstance(self.kind, ArrayType):
            return [self.parts[0].fit(one) for one in value] if isinstance(value, list) else None
        if isinstance(self.kind, MapType):
            items = value.items() if isinstance(value, dict) else ()
            return {str(key): self.parts[0].fit(one) for key, one in items} if isinstance(value, dict) else None
        if isinstance(self.kind, StringType) and not isinstance(value, str):
            return _json.encode(value).decode()
        try:
            return msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            return None


def _array(values: list[Any], shape: Shape, arrow: pa.DataType) -> pa.Array:
    """Returns values of a shape as a column: nothing is made for each but where types are nested."""
    if isinstance(shape.kind, StructType):
        attributes = shape.type.__struct_fields__
        columns = [
            _array([None if one is None else getattr(one, name) for one in values], part, arrow.field(number).type)
            for number, (name, part) in enumerate(zip(attributes, shape.parts, strict=True))
        ]
        missing = pa.array([one is None for one in values], pa.bool_())
        return pa.StructArray.from_arrays(columns, fields=list(arrow), mask=missing)
    if isinstance(shape.kind, ArrayType):
        inner = [item for one in values if one is not None for item in one]
        return pa.ListArray.from_arrays(_offsets(values), _array(inner, shape.parts[0], arrow.value_type), type=arrow)
    if isinstance(shape.kind, MapType):
        keys = pa.array([key for one in values if one is not None for key in one], pa.string())
        inner = [item for one in values if one is not None for item in one.values()]
        items = _array(inner, shape.parts[0], arrow.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=arrow)
    try:
        return pa.array(values, arrow)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array([_fitting(one, arrow) for one in values], arrow)


def _offsets(values: list[Any]) -> pa.Array:
    """Where each list begins; None: there is none."""
    offsets: list[int | None] = []
    at = 0
    for one in values:
        offsets.append(None if one is None else at)
        at += 0 if one is None else len(one)
    return pa.array([*offsets, at], pa.int32())


def _fitting(value: Any, arrow: pa.DataType) -> Any:
    try:
        pa.array([value], arrow)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None
    return value
