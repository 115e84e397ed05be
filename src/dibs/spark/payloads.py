"""Payloads and results as Arrow arrays: as text, as bytes, or as values of a type that is asked for.

A value that does not fit its type is told by its row; the others are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypedDict

import msgspec
import pyarrow as pa

from dibs import codec
from dibs.errors import CodecError, InvalidOption

Data = Sequence[bytes | None]
_TYPE = re.compile(r"\s*\w+\s*([<(].*[>)])?\s*", re.DOTALL)
"""One word, maybe with others in brackets; a schema has a name before its first type."""
_NOTHING = (None, b"", b"null")
Wrong = dict[int, CodecError]
"""What cannot be read, by its row."""


def arrow_type(name: str, text: str) -> pa.DataType:
    """Returns the Arrow type of a Spark type (`string`, `ARRAY<INT>`) or of a schema (`url STRING, width INT`), which
    becomes a struct. Needs a session. `name`: of the option, for the error."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import StructType

    try:
        schema: Any = StructType.fromDDL(f"value {type_of(text)}")
        arrow: pa.DataType = to_arrow_type(schema[0].dataType, timezone="UTC")
    except (PySparkException, TypeError):
        raise InvalidOption(
            f"{name} is {text!r}, which is neither a type nor a schema in Spark's words: write 'string', 'binary' or, "
            "for columns, 'url STRING, width INT'"
        ) from None
    return arrow


def type_of(text: str) -> str:
    """Returns a type as it is, and a schema as the struct that it makes."""
    return text if _TYPE.fullmatch(text) else f"STRUCT<{text}>"


def array_of(data: Data, codecs: Sequence[str], kind: pa.DataType, *, unquoted: bool = False) -> tuple[pa.Array, Wrong]:
    """Returns values as an array of that type; nothing, JSON's null, and what cannot be read, is null. `unquoted`: a
    JSON string is its text where texts are asked for, not its JSON."""
    if pa.types.is_binary(kind):
        return pa.array(data, kind), {}
    if pa.types.is_string(kind):
        return _texts(data, codecs, kind, unquoted)
    return _values(data, codecs, kind)


def _texts(data: Data, codecs: Sequence[str], kind: pa.DataType, unquoted: bool) -> tuple[pa.Array, Wrong]:
    if set(codecs) <= {"json"} and not unquoted:
        try:
            return pa.array([None if one in _NOTHING else one for one in data], pa.binary()).cast(kind), {}
        except pa.ArrowInvalid:  # not UTF-8: whose it is shows below
            pass
    wrong: Wrong = {}
    texts: list[str | None] = [None] * len(data)
    for row, (one, name) in enumerate(zip(data, codecs, strict=True)):
        try:
            texts[row] = None if one is None or one in _NOTHING else _text(one, name, unquoted)
        except CodecError as error:
            wrong[row] = error
    return pa.array(texts, kind), wrong


def _text(data: bytes, name: str, unquoted: bool) -> str:
    if name == "raw" or (name == "json" and not (unquoted and data.lstrip()[:1] == b'"')):
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CodecError(f"these bytes are not text ({error}): ask for them as 'binary'") from None
    value = codec.decode(data, name)
    return value if unquoted and isinstance(value, str) else msgspec.json.encode(value).decode()


def _values(data: Data, codecs: Sequence[str], kind: pa.DataType) -> tuple[pa.Array, Wrong]:
    wrong: Wrong = {}
    values: list[Any] = [None] * len(data)
    for row, (one, name) in enumerate(zip(data, codecs, strict=True)):
        if one:
            try:
                values[row] = _value(one, name, kind)
            except CodecError as error:
                wrong[row] = error
    try:
        return pa.array(values, kind), wrong
    except (pa.ArrowException, OverflowError, ValueError, TypeError):  # a number too large for its column, say
        return _fitting(values, kind, wrong)


def _value(data: bytes, name: str, kind: pa.DataType) -> Any:
    try:
        if name == "json":
            return _decoder(kind).decode(data)
        return msgspec.convert(codec.decode(data, name), _shape(kind), strict=False)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CodecError(f"this is not a value of {kind}: {error}") from None


def _fitting(values: list[Any], kind: pa.DataType, wrong: Wrong) -> tuple[pa.Array, Wrong]:
    """Sorts out, one by one, what Arrow does not take."""
    for row, value in enumerate(values):
        try:
            pa.scalar(value, kind)
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            values[row] = None
            wrong[row] = CodecError(f"this is not a value of {kind}: {error}")
    return pa.array(values, kind), wrong


@lru_cache(maxsize=64)
def _decoder(kind: pa.DataType) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_shape(kind), strict=False)


def _shape(kind: pa.DataType) -> Any:
    """The Python type that a value is read as; every part of it may be null, or left out."""
    types = pa.types
    if types.is_struct(kind):
        fields = {field.name: _shape(field.type) for field in kind}
        return TypedDict("Fields", fields, total=False) | None  # type: ignore[operator]
    if types.is_list(kind) or types.is_large_list(kind):
        return list[_shape(kind.value_type)] | None  # type: ignore[misc]
    if types.is_map(kind):
        return dict[str, _shape(kind.item_type)] | None  # type: ignore[misc]
    for matches, shape in (
        (types.is_boolean, bool),
        (types.is_integer, int),
        (types.is_floating, float),
        (types.is_decimal, Decimal),
        (types.is_timestamp, datetime),
        (types.is_date, date),
        (types.is_binary, bytes),
        (types.is_string, str),
    ):
        if matches(kind):
            return shape | None
    return Any
