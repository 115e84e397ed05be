"""What becomes of rows: columns, options and payloads, as executors make them."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace
from pyspark.sql.types import StructType, VariantType

from dibs.checks import CHUNK_MAX_BYTES, Limits
from dibs.errors import InvalidOption
from dibs.spark.options import WriteOptions
from dibs.spark.rows import Made, Plan, Tasks, parts, plan
from dibs.spark.sink import Loading, Written
from dibs.task import CHUNKS_MAX, NewTask, Rows

# Spark itself reads what schemas say.
pytestmark = pytest.mark.usefixtures("spark")

UTC = dt.UTC


def schema(ddl: str) -> StructType:
    """A schema in Spark's words."""
    parsed = StructType.fromDDL(ddl)
    assert isinstance(parsed, StructType)
    return parsed


def options(**given: Any) -> WriteOptions:
    """Options of a write to the queue `fetch`."""
    return WriteOptions(**({"url": "lmdb:x", "command": "fetch"} | given))


def made(planned: Plan, limits: Limits | None = None, **columns: Any) -> Made:
    """What becomes of a batch with these columns."""
    return Tasks(planned, limits or Limits()).made_of(pa.record_batch(columns))


def only(result: Made) -> Rows:
    """The one chunk of rows that are all good."""
    assert not result.bad
    [rows] = result.chunks
    return rows


def test_columns_become_the_payload() -> None:
    """Without a column payload, those that say nothing about the task are its payload, and gaps in them are null."""
    planned = plan(options(), schema("url STRING, n INT, priority INT"))
    rows = only(made(planned, url=["a", None], n=[1, 2], priority=[7, None]))
    assert rows.payloads == [b'{"url":"a","n":1}', b'{"url":null,"n":2}']
    assert [rows.options[kind].priority for kind in rows.kinds] == [7, None]


def test_every_type_reads_back_as_json_says_it() -> None:
    """Nested columns become objects and lists; dates, times and decimals text, as everywhere in dibs."""
    when = dt.datetime(2026, 1, 2, 3, 4, 5, 600, UTC)
    column = pa.array(
        [{"m": [("a", [1, None])], "d": dt.date(2026, 1, 2), "t": when, "c": decimal.Decimal("1.50"), "s": {"x": True}},
         None,
         {"m": None, "d": None, "t": None, "c": None, "s": None}],
        pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.int32()))), ("d", pa.date32()),
                   ("t", pa.timestamp("us", "America/New_York")), ("c", pa.decimal128(10, 2)),
                   ("s", pa.struct([("x", pa.bool_())]))]),
    )  # fmt: skip
    ddl = "payload STRUCT<m: MAP<STRING, ARRAY<INT>>, d: DATE, t: TIMESTAMP, c: DECIMAL(10,2), s: STRUCT<x: BOOLEAN>>"
    rows = only(made(plan(options(), schema(ddl)), payload=column))
    assert [json.loads(one) for one in rows.payloads] == [
        {"m": {"a": [1, None]}, "d": "2026-01-02", "t": "2026-01-02T03:04:05.000600Z", "c": "1.50", "s": {"x": True}},
        None,
        {"m": None, "d": None, "t": None, "c": None, "s": None},
    ]


def test_a_slice_of_nested_columns_is_its_own_rows() -> None:
    """Lists and maps of a part of a batch have the values of that part, not of the batch."""
    batch = pa.record_batch(
        {"payload": pa.array([[n, n] if n % 3 else None for n in range(2500)], pa.list_(pa.int64()))}
    )
    tasks = Tasks(plan(options(), schema("payload ARRAY<BIGINT>")), Limits())
    found = [one for part in parts([batch]) for one in only(tasks.made_of(part)).payloads]
    assert [json.loads(one) for one in found] == [[n, n] if n % 3 else None for n in range(2500)]


def test_json_text_is_kept_as_written() -> None:
    """A text payload is JSON, unchanged to the last blank; null is JSON's null."""
    rows = only(made(plan(options(), schema("payload STRING")), payload=[' {"b": 1.0,\t"a":2}', "3", None]))
    assert rows.payloads == [b' {"b": 1.0,\t"a":2}', b"3", b"null"]
    assert rows.options == [NewTask(command="fetch")]
    assert rows.kinds == [] == rows.keys


def test_text_that_is_not_json_is_a_bad_row() -> None:
    """Each such row is told with the reason, and the others become tasks."""
    result = made(plan(options(), schema("payload STRING")), payload=["1", "{no", "2", "1e999", "", "[" * 5000])
    assert [rows.payloads for rows in result.chunks] == [[b"1", b"2"]]
    assert {row: str(error).partition(" (")[0] for row, error in result.bad.items()} == dict.fromkeys(
        (1, 3, 4, 5), "payload is not JSON"
    )


@pytest.mark.parametrize(
    ("ddl", "codec", "given", "payloads", "bad"),
    [
        ("payload STRING", "raw", ["ä", None], ["ä".encode()], {1: "payload is null"}),
        ("payload STRING", "msgpack", ['{"a": 1}', "x", None], [b"\x81\xa1a\x01", b"\xc0"], {1: "payload is not JSON"}),
        ("payload BINARY", None, [b"\x00\xff", None], [b"\x00\xff"], {1: "payload is null"}),
        ("payload BINARY", "json", [b"[1]", b"\xff", None], [b"[1]", b"null"], {1: "payload is not JSON"}),
        ("payload BINARY", "msgpack", [b"\x01", b"\xc1", None], [b"\x01", b"\xc0"], {1: "payload is not MessagePack"}),
        ("payload DOUBLE", None, [1.5, float("nan"), None], [b"1.5", b"null"], {1: "json cannot carry nan"}),
        ("payload ARRAY<DOUBLE>", "msgpack", [[float("inf")]], [msgspec.msgpack.encode([float("inf")])], {}),
    ],
)
def test_codecs(ddl: str, codec: Any, given: list[Any], payloads: list[bytes], bad: dict[int, str]) -> None:
    """Text and bytes are taken as the codec reads them; what it cannot say is a bad row."""
    planned = plan(options(codec=codec), schema(ddl))
    kind = {"STRING": pa.string(), "BINARY": pa.binary(), "DOUBLE": pa.float64()}.get(ddl.split()[1])
    result = made(planned, payload=pa.array(given, kind) if kind else pa.array(given))
    assert [one for rows in result.chunks for one in rows.payloads] == payloads
    assert {
        row: str(error) for row, error in result.bad.items() if str(error).startswith(bad[row])
    }.keys() == bad.keys()


def test_what_json_cannot_say_is_a_bad_row_wherever_it_stands() -> None:
    """Bytes and NaN at any depth; a null in their place is fine."""
    planned = plan(options(), schema("a ARRAY<DOUBLE>, b BINARY"))
    result = made(planned, a=[[1.0], [float("nan")], [2.0], None], b=pa.array([None, None, b"x", None], pa.binary()))
    assert [rows.payloads for rows in result.chunks] == [[b'{"a":[1.0],"b":null}', b'{"a":null,"b":null}']]
    assert str(result.bad[1]).startswith("json cannot carry nan (at $['a'][0])")
    assert str(result.bad[2]).startswith("json cannot carry bytes (at $['b'])")


def test_rows_of_a_part_do_not_meet_those_of_another() -> None:
    """What is wrong in one part of a batch is no matter to the others; names that JSON must escape are escaped."""
    kind = pa.struct([('a"b', pa.map_(pa.int32(), pa.float64())), ("c", pa.list_(pa.struct([("d", pa.binary())])))])
    rows: list[Any] = [{'a"b': [(n, 0.5)], "c": [{"d": None}] * (n % 2)} for n in range(1500)]
    rows[1200] = {'a"b': [(1, float("-inf"))], "c": None}
    tasks = Tasks(
        plan(options(), schema('payload STRUCT<`a"b`: MAP<INT, DOUBLE>, c: ARRAY<STRUCT<d: BINARY>>>')), Limits()
    )
    first, second = (tasks.made_of(part) for part in parts([pa.record_batch({"payload": pa.array(rows, kind)})]))
    assert not first.bad
    assert [*second.bad] == [200]
    assert first.chunks[0].payloads[:2] == [b'{"a\\"b":{"0":0.5},"c":[]}', b'{"a\\"b":{"1":0.5},"c":[{"d":null}]}']
    assert second.chunks[0].payloads[-1] == b'{"a\\"b":{"1499":0.5},"c":[{"d":null}]}'


def test_a_time_that_python_cannot_hold_is_a_bad_row() -> None:
    """A timestamp past the year 9999 spoils its own row only."""
    at = pa.array([0, 1 << 62], pa.int64()).cast(pa.timestamp("us", "UTC"))
    result = made(plan(options(), schema("at TIMESTAMP")), at=at)
    assert [rows.payloads for rows in result.chunks] == [[b'{"at":"1970-01-01T00:00:00Z"}']]
    assert "Python has no type for" in str(result.bad[1])


def test_a_load_of_too_many_chunks() -> None:
    """The commit is refused with what to do, before the store is asked."""
    loading = Loading("lmdb:x", plan(options(), schema("n INT")), None)
    with pytest.raises(InvalidOption, match=r"at most 100,000 chunks, and this one 100,001: write it in several parts"):
        loading.commit("many", 0, [Written("many", 0, [bytes(16)] * (CHUNKS_MAX + 1), 1)])


def test_options_of_rows() -> None:
    """Each row has what its columns say; a null leaves what the option says; equal ones are said once."""
    planned = plan(
        options(priority=3, max_attempts=9, delay_seconds=60),
        schema("payload STRING, command STRING, priority LONG, limit_key INT, delay_s DECIMAL(5,1), max_attempts INT, "
               "key LONG"),
    )  # fmt: skip
    rows = only(
        made(
            planned,
            payload=["1", "2", "3"],
            command=["a", None, "a"],
            priority=[1, None, 1],
            limit_key=[5, None, 5],
            delay_s=pa.array([decimal.Decimal("1.5"), None, decimal.Decimal("1.5")]),
            max_attempts=[2, None, 2],
            key=[7, None, 8],
        )
    )
    usual = NewTask(command="fetch", priority=3, max_attempts=9, delay_s=60.0)
    own = replace(usual, command="a", priority=1, limit_key="5", delay_s=1.5, max_attempts=2)
    assert rows == Rows([b"1", b"2", b"3"], [own, usual], [0, 1, 0], ["7", None, "8"])


def test_run_at_is_never_early() -> None:
    """A part of a millisecond counts as a whole one; run_at takes the place of the option's delay."""
    at = [dt.datetime(2030, 1, 1, 0, 0, 0, 1, UTC), None]
    column = pa.array(at, pa.timestamp("us", "UTC"))
    rows = only(
        made(plan(options(delay_seconds=5), schema("payload INT, run_at TIMESTAMP")), payload=[1, 2], run_at=column)
    )
    assert [(one.run_at_ms, one.delay_s) for one in rows.options] == [(1893456000001, 0.0), (None, 5.0)]


def test_bad_options_of_rows() -> None:
    """What a row says out of range is its own fault, and told in its own words."""
    planned = plan(
        options(command=None), schema("payload INT, command STRING, priority INT, delay_s DOUBLE, key STRING")
    )
    result = made(
        planned,
        payload=[1, 2, 3, 4, 5, 6],
        command=["a", "no/no", None, "a", "a", "a"],
        priority=[1, 1, 1, 10, 1, 1],
        delay_s=[0.0, 0.0, 0.0, 0.0, float("nan"), 0.0],
        key=["k", "k", "k", "k", "k", ""],
    )
    assert [rows.payloads for rows in result.chunks] == [[b"1"]]
    for row, told in {
        1: "not a command",
        2: "command is null",
        3: "priority is 10",
        4: "delay_s is nan",
        5: "not a key",
    }.items():
        assert told in str(result.bad[row])


def test_chunks_are_bounded() -> None:
    """A chunk has at most 1,000 rows and 1 MiB, however rows come, and a row over the limit is a bad one."""
    tasks = Tasks(plan(options(codec="raw"), schema("payload BINARY")), Limits(payload_max_bytes=400_000))
    small = [pa.record_batch({"payload": pa.array([b"x"] * 300)}) for _ in range(7)]
    assert [part.num_rows for part in parts([*small, pa.record_batch({"payload": pa.array([b"x"] * 2500)})])] == [
        900, 900, 300, 1000, 1000, 500,
    ]  # fmt: skip
    large = pa.record_batch({"payload": pa.array([b"x" * 300_000] * 5 + [b"x" * 400_001])})
    result = tasks.made_of(large)
    assert [len(rows.payloads) for rows in result.chunks] == [3, 2]
    assert all(sum(map(len, rows.payloads)) <= CHUNK_MAX_BYTES for rows in result.chunks)
    assert "400001 bytes" in str(result.bad[5])


def test_rows_that_are_all_bad_make_no_chunk() -> None:
    """Nothing is staged for them."""
    result = made(plan(options(), schema("payload STRING, priority INT")), payload=["{", "1"], priority=[1, 99])
    assert result.chunks == []
    assert len(result.bad) == 2


@pytest.mark.parametrize(
    ("ddl", "given", "told"),
    [
        ("payload STRING", {"command": None}, "use .option('command', …), or a column named command"),
        ("payload STRING, url STRING", {}, "column url has no meaning beside payload: drop it"),
        ("payload STRING, run_at TIMESTAMP, delay_s INT", {}, "run_at and delay_s both say when"),
        ("payload STRING, run_at STRING", {}, "column run_at is STRING: cast it to TIMESTAMP"),
        ("payload STRING, run_at TIMESTAMP_NTZ", {}, "column run_at is TIMESTAMP_NTZ: cast it to TIMESTAMP"),
        ("payload STRING, priority DOUBLE", {}, "column priority is DOUBLE: cast it to INT"),
        ("payload STRING, max_attempts STRING", {}, "column max_attempts is STRING: cast it to INT"),
        ("payload STRING, command INT", {}, "column command is INT: cast it to STRING"),
        ("payload STRING, key DOUBLE", {}, "column key is DOUBLE: cast it to STRING"),
        ("payload STRING, limit_key ARRAY<INT>", {}, "column limit_key is ARRAY<INT>: cast it to STRING"),
        ("payload STRING, delay_s INTERVAL DAY TO SECOND", {}, "column delay_s is INTERVAL DAY TO SECOND"),
        ("priority INT", {}, "no column is left for the payload"),
        ("x INT, x INT", {}, "two columns are named x"),
        ("payload STRUCT<a: INT>", {"codec": "raw"}, "option codec is 'raw', and the payload is a column of values"),
        ("a INT", {"codec": "raw"}, "option codec is 'raw', and the payload is several columns"),
        ("a INT", {"expires_seconds": 0.0}, "expires_s is 0.0"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_used(ddl: str, given: dict[str, Any], told: str) -> None:
    """Each is told before any row is seen, with what to do."""
    with pytest.raises(InvalidOption) as error:
        plan(options(**given), schema(ddl))
    assert told in str(error.value)


def test_a_type_that_no_payload_can_hold() -> None:
    """It is named with its column, at any depth."""
    nested = StructType().add("v", StructType().add("x", VariantType()))
    with pytest.raises(InvalidOption, match="column v is STRUCT<X:VARIANT>, which no payload can hold"):
        plan(options(), nested)
    with pytest.raises(InvalidOption, match="column m is MAP<STRUCT<A:INT>,INT>, which no payload can hold"):
        plan(options(command="c"), schema("m MAP<STRUCT<a: INT>, INT>"))


def test_option_columns_may_hold_nothing_at_all() -> None:
    """A column of type VOID says nothing."""
    nothing = pa.nulls(1)
    rows = only(
        made(plan(options(), schema("payload INT, run_at VOID, key VOID, priority VOID, command VOID")), payload=[1],
             run_at=nothing, key=nothing, priority=nothing, command=nothing)
    )  # fmt: skip
    assert rows.options == [NewTask(command="fetch")]
