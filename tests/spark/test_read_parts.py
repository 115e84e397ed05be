"""The parts of the readers, without a Spark session: which filters are taken, how reads are planned, how values fit."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dibs.codec import encode
from dibs.ids import id_to_text, new_ids
from dibs.spark.columns import event_batch, id_texts
from dibs.spark.options import ReadOptions, parse
from dibs.spark.payload import Fields
from dibs.spark.views import BATCH_ROWS, ViewReader
from dibs.spark.wanted import Wanted
from dibs.task import BATCH_MAX, EventKind, EventRun, Place, Status, Task
from tests.spark.looking import look
from tests.spark.shop import DEAD, all_tasks, ended, fill

pytestmark = pytest.mark.timeout(180)

ID = StructType([StructField("id", StringType())])
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that the tests of this file only read."""
    url = f"lmdb:{tmp_path_factory.mktemp('shop') / 'store'}"
    fill(url)
    return url


def reader(url: str, view: str, *filters: Filter, **options: str) -> tuple[ViewReader, list[Filter]]:
    """A reader that was handed filters, and those that it left to Spark."""
    made = ViewReader(parse({"url": url, "view": view, "pushFilters": "true"} | options, ReadOptions), ID)
    left = list(made.pushFilters(list(filters)))
    return pickle.loads(pickle.dumps(made)), left


def read(made: ViewReader) -> list[str]:
    """The ids that a reader reads, by all of its partitions."""
    return [text for part in made.partitions() for batch in made.read(part) for text in batch.column(0).to_pylist()]


# ---------------------------------------------------------------------------------------------------------- filters


@settings(deadline=None)
@given(st.integers(-3, 3_000_003), st.integers(0, 3_000), st.sampled_from(["<", "<=", ">", ">=", "=", "<=>"]))
def test_bounds_of_time_are_exact(bound_us: int, at_ms: int, how: str) -> None:
    """A bound in microseconds keeps the same milliseconds as Spark's own comparison, also between two of them."""
    value = EPOCH + dt.timedelta(microseconds=bound_us)
    kind: Any = {
        "<": LessThan, "<=": LessThanOrEqual, ">": GreaterThan, ">=": GreaterThanOrEqual,
        "=": EqualTo, "<=>": EqualNullSafe,
    }[how]  # fmt: skip
    wanted = Wanted().with_filter("events", kind(("at",), value))
    assert wanted is not None
    at_us = at_ms * 1_000
    spark = {"<": at_us < bound_us, "<=": at_us <= bound_us, ">": at_us > bound_us, ">=": at_us >= bound_us}
    assert wanted.times["at"].has(at_ms) == spark.get(how, at_us == bound_us)
    assert not (wanted.nothing() and wanted.times["at"].has(at_ms))


@pytest.mark.parametrize(
    "one",
    [
        Not(EqualTo(("command",), "fetch")),
        StringStartsWith(("command",), "fe"),
        EqualTo(("priority",), 1),
        EqualTo(("progress", "done"), 1.0),
        EqualTo(("command",), None),
        EqualNullSafe(("status",), None),
        IsNotNull(("ended_at",)),
        GreaterThan(("command",), "a"),
        GreaterThan(("enqueued_at",), "2020-01-01"),
        GreaterThan(("enqueued_at",), dt.datetime(2020, 1, 1)),  # noqa: DTZ001 that is the case
        GreaterThan(("due_at",), EPOCH),
    ],
    ids=str,
)
def test_what_cannot_be_kept_exactly_is_sparks(one: Filter) -> None:
    """It is not taken."""
    assert Wanted().with_filter("tasks", one) is None


def test_filters_are_narrowed_together() -> None:
    """Each that is taken leaves what all of them allow; what no row can have is nothing."""
    wanted = Wanted()
    for one in (
        In(("command",), ("a", "b", None, "not a name!")),
        IsNotNull(("command",)),
        EqualTo(("command",), "b"),
        GreaterThanOrEqual(("enqueued_at",), EPOCH),
        LessThan(("enqueued_at",), EPOCH + dt.timedelta(seconds=1)),
    ):
        wanted = wanted.with_filter("tasks", one) or pytest.fail(str(one))
    which = wanted.which()
    assert (which.command, which.enqueued_from_ms, which.enqueued_until_ms) == ("b", 0, 1_000)
    assert not wanted.nothing()
    for last in (EqualTo(("command",), "a"), EqualTo(("status",), "?"), LessThan(("enqueued_at",), EPOCH)):
        narrowed = wanted.with_filter("tasks", last)
        assert narrowed is not None
        assert narrowed.nothing()


# --------------------------------------------------------------------------------------------------------- planning


def test_ranges_of_ids_hold_each_task_once(shop: str) -> None:
    """Small partitions together are all tasks; batches are bounded, whatever partitions are."""
    made, _ = reader(shop, "tasks", tenant="*", rowsPerPartition="1000")
    parts = made.partitions()
    assert len(parts) >= 6
    ids = [id_to_text(task.id) for task in look(shop, all_tasks)]
    assert sorted(read(made)) == sorted(ids)
    whole, _ = reader(shop, "tasks", tenant="*")
    sizes = [batch.num_rows for part in whole.partitions() for batch in whole.read(part)]
    assert max(sizes) < BATCH_ROWS + BATCH_MAX


def test_a_status_is_read_from_its_place(shop: str) -> None:
    """Dead letters are found without looking at other tasks: one scan for each queue that has some."""
    for view, filters in (("dead", ()), ("results", (EqualTo(("status",), "FAILED"),))):
        made, left = reader(shop, view, *filters, tenant="acme")
        assert not left
        [part] = made.partitions()
        assert [(scan.command, scan.places, scan.weight) for scan in part.value] == [("work", (Place.DEAD,), DEAD)]
        assert len(read(made)) == DEAD


def test_too_many_for_their_place_are_read_by_id(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place with more tasks than can be remembered is not listed as such; the rows are the same."""
    filters = EqualTo(("status",), "PENDING"), In(("command",), ("load", "work"))
    by_place = read(reader(shop, "tasks", *filters, tenant="*")[0])
    monkeypatch.setattr("dibs.spark.views.REMEMBERED_MAX", 10)
    made, _ = reader(shop, "tasks", *filters, tenant="*", rowsPerPartition="1000")
    assert all(not scan.places for part in made.partitions() for scan in part.value)
    assert sorted(read(made)) == sorted(by_place)
    assert len(by_place) > 5_000


def test_ids_are_looked_up(shop: str) -> None:
    """Tasks that are named by id are got, whosever they are, and no others."""
    ids = [id_to_text(task.id) for task in look(shop, lambda store: all_tasks(store, ["zeta"]))[:3]]
    made, left = reader(shop, "tasks", In(("id",), (*ids, "x")), IsNotNull(("id",)), tenant="*")
    assert not left
    assert all(scan.ids for part in made.partitions() for scan in part.value)
    assert sorted(read(made)) == sorted(ids)


#: Filters, each with what it means.
MEANINGS: list[tuple[Filter, Callable[[Task], bool]]] = [
    *((EqualTo(("status",), one.value), lambda task, one=one: task.status is one) for one in Status),
    *((EqualTo(("place",), one.value), lambda task, one=one: task.place is one) for one in Place),
    *((EqualTo(("command",), one), lambda task, one=one: task.command == one) for one in ("load", "work", "later")),
    (In(("command",), ("mixed", "work", "gone")), lambda task: task.command in ("mixed", "work", "gone")),
    (In(("status",), ("FAILED", "CANCELLED")), lambda task: task.status in ("FAILED", "CANCELLED")),
    (In(("tenant",), ("acme", "zeta")), lambda task: task.tenant != "default"),
    (EqualTo(("tenant",), "default"), lambda task: task.tenant == "default"),
    (EqualTo(("command",), "not a name!"), lambda _: False),
    (GreaterThan(("ended_at",), EPOCH), lambda task: task.ended_ms is not None),
    (LessThan(("enqueued_at",), EPOCH), lambda _: False),
    (GreaterThanOrEqual(("enqueued_at",), EPOCH), lambda _: True),
]


@pytest.fixture(scope="module")
def everything(shop: str) -> list[Task]:
    """All tasks of the store."""
    return look(shop, all_tasks)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(range(len(MEANINGS))), max_size=3),
    st.sampled_from(["tasks", "results", "dead"]),
    st.sampled_from(["*", "acme"]),
)
def test_whatever_is_asked_each_task_that_matches_is_read_once(
    shop: str, everything: list[Task], chosen: list[int], view: str, tenant: str
) -> None:
    """However a read is planned: by ids, places or ranges."""
    made, left = reader(shop, view, *(MEANINGS[number][0] for number in chosen), tenant=tenant, rowsPerPartition="1000")
    if view == "tasks":
        assert not left
    meant: list[Callable[[Task], bool]] = [
        *(MEANINGS[number][1] for number in chosen if MEANINGS[number][0] not in left),
        lambda task: tenant in ("*", task.tenant),
        lambda task: view == "tasks" or (task.status is Status.FAILED if view == "dead" else ended(task)),
    ]
    expected = [id_to_text(task.id) for task in everything if all(true(task) for true in meant)]
    assert sorted(read(made)) == sorted(expected)


def test_nothing_wanted_is_nothing_planned(shop: str) -> None:
    """A filter that no row can match reads nothing."""
    for view, one in (
        ("tasks", EqualTo(("tenant",), "other")),
        ("events", EqualTo(("tenant",), "other")),
        ("events", EqualTo(("kind",), "nonsense")),
        ("dead", EqualTo(("command",), "no such")),
        ("tasks", In(("status",), ())),
    ):
        made, left = reader(shop, view, one)
        assert (list(made.partitions()), left) == ([], [])


def test_events_are_cut_into_ranges_with_something_in_them(shop: str) -> None:
    """A range has about as many wanted events as were asked for; what has none is in no range."""
    whole, _ = reader(shop, "events", tenant="*", rowsPerPartition="1000")
    few, _ = reader(shop, "events", EqualTo(("kind",), "failed"), tenant="*", rowsPerPartition="1000")
    sizes = [sum(batch.num_rows for batch in whole.read(part)) for part in whole.partitions()]
    assert len(sizes) > 8
    assert max(sizes) <= 2_000
    assert len(few.partitions()) == 1
    assert len(read(few)) == 3 * DEAD


# ----------------------------------------------------------------------------------------------------------- columns


def test_ids_as_text() -> None:
    """The same text as everywhere."""
    ids = new_ids(1_000)
    assert id_texts(b"".join(ids)).to_pylist() == [id_to_text(one) for one in ids]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2**32 - 10), st.booleans()), min_size=1, max_size=5))
def test_runs_become_their_events(shapes: list[tuple[int, int, bool]]) -> None:
    """A batch of runs has the events that the runs stand for, in order."""
    runs = [
        EventRun(
            cursor=bytes([number]) * 28 + index.to_bytes(4, "big"), at_ms=number, kind=list(EventKind)[number],
            tenant="t", command=f"c{number % 2}", ids=b"".join(new_ids(count)),
            attempts=list(range(count)) if each else [7], worker="wörker" * number,
        )
        for number, (count, index, each) in enumerate(shapes)
    ]  # fmt: skip
    names = [("cursor", pa.binary()), ("id", pa.string()), ("attempt", pa.int32()), ("kind", pa.string()),
             ("command", pa.string()), ("worker", pa.string()), ("shard", pa.int32())]  # fmt: skip
    batch = event_batch(4, runs, pa.schema(names))
    batch.validate(full=True)
    events = [event for run in runs for event in run.events()]
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (one.cursor, id_to_text(one.id), one.attempt, one.kind, one.command, one.worker, 4) for one in events
    ]


# ---------------------------------------------------------------------------------------------------------- payloads

PARSED = StructType([
    StructField("text", StringType()), StructField("small", ShortType()), StructField("n", IntegerType()),
    StructField("big", LongType()), StructField("x", DoubleType()), StructField("day", DateType()),
    StructField("time", TimestampType()), StructField("price", DecimalType(6, 2)), StructField("blob", BinaryType()),
    StructField("list", ArrayType(IntegerType())), StructField("map", MapType(StringType(), LongType())),
    StructField("in-side", StructType([StructField("a", ArrayType(StructType([StructField("b", StringType())])))])),
])  # fmt: skip


def parsed(data: bytes | None, codec: str = "json") -> Any:
    """One payload by the schema above, without what is null."""
    arrow = to_arrow_type(PARSED, timezone="UTC")
    column = Fields(PARSED, arrow).column([None, data], [None, codec])
    column.validate(full=True)
    assert column.type == arrow
    value = column.to_pylist()[1]
    return None if value is None else {name: one for name, one in value.items() if one is not None}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"text": "é", "small": -5, "n": 1, "big": 2**62}, {"text": "é", "small": -5, "n": 1, "big": 2**62}),
        ({"x": 1}, {"x": 1.0}),
        ({"text": {"a": [1]}, "n": "1", "small": 40_000, "big": 2**63, "x": "y"}, {"text": '{"a":[1]}'}),
        ({"text": 1.5, "n": True, "x": False}, {"text": "1.5"}),
        ({"day": "2026-02-03", "time": "2026-02-03T04:05:06.5+01:00"}, {
            "day": dt.date(2026, 2, 3), "time": dt.datetime(2026, 2, 3, 3, 5, 6, 500_000, tzinfo=dt.UTC),
        }),
        ({"day": "soon", "time": 7, "n": 2}, {"n": 2}),
        ({"price": "12.34", "blob": "/wA="}, {"price": Decimal("12.34"), "blob": b"\xff\x00"}),
        ({"price": "123456.789", "blob": "***", "n": 3}, {"n": 3}),
        ({"list": [1, None, 3], "map": {"a": 1, "b": None}}, {"list": [1, None, 3], "map": [("a", 1), ("b", None)]}),
        ({"list": [1, "x"], "map": {"a": "x"}}, {"list": [1, None], "map": [("a", None)]}),
        ({"list": {}, "map": [], "in-side": 3, "n": 4}, {"n": 4}),
        ({"in-side": {"a": [{"b": "c"}, None, {"d": 1}]}}, {"in-side": {"a": [{"b": "c"}, None, {"b": None}]}}),
        ({"in-side": {"a": [{"b": 1}, 2]}, "more": 1}, {"in-side": {"a": [{"b": "1"}, None]}}),
        ({}, {}),
        ([], None),
        ("text", None),
        (None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_values_by_a_schema(value: Any, expected: Any, codec: str) -> None:
    """What fits is there; a part that does not is null, and nothing else is lost with it."""
    assert parsed(encode(value, codec), codec) == expected


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"n": 1} x', b'{"text": "\xff"}'])
@pytest.mark.parametrize("codec", ["json", "msgpack", "raw", "own"])
def test_what_cannot_be_read_is_null(data: bytes, codec: str) -> None:
    """It fails nobody's job."""
    assert parsed(data, codec) is None


def test_statuses_and_places_are_words() -> None:
    """Enumerations stay what they are on the way to the store."""
    wanted = Wanted().with_filter("tasks", EqualTo(("status",), "PENDING"))
    assert wanted is not None
    assert wanted.only("status") is Status.PENDING


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Reading makes no store."""
    made, _ = reader(f"lmdb:{tmp_path / 'none'}", "tasks")
    with pytest.raises(Exception, match="none"):
        made.partitions()
    assert not (tmp_path / "none").exists()
