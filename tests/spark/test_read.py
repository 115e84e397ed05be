"""Views as DataFrames: what a store holds, all of it once, whatever is asked of it."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import lit

from dibs.errors import InvalidOption
from dibs.spark.options import ReadOptions, parse
from dibs.task import Task
from tests.server.running import ServerProcess
from tests.spark.looking import look
from tests.spark.shop import DEAD, PAYLOADS, all_events, all_tasks, ended, event_row, fill, result_row, task_row

pytestmark = pytest.mark.timeout(180)


SWITCH = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of three shards that the tests of this file only read."""
    url = f"shards:{tmp_path_factory.mktemp('shop') / 'store'}?n=3"
    fill(url)
    return url


@pytest.fixture
def handing_over(spark: SparkSession) -> Iterator[None]:
    """Spark hands filters over, which it does not do by itself."""
    spark.conf.set(SWITCH, "true")
    yield
    spark.conf.unset(SWITCH)


def view(spark: SparkSession, url: str, name: str, schema: str | None = None, **options: Any) -> DataFrame:
    """A view of a store."""
    reader = spark.read.format("dibs").options(**{"url": url, "view": name} | options)
    return (reader if schema is None else reader.schema(schema)).load()


def rows(frame: DataFrame) -> Counter[tuple[Any, ...]]:
    """The rows of a DataFrame, in no order."""
    return Counter(tuple(_plain(value) for value in row) for row in frame.collect())


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Row) else bytes(value) if isinstance(value, bytearray) else value


def picked(columns: Sequence[str], found: Iterator[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """What a DataFrame of these columns must have."""
    return Counter(tuple(row[name] for name in columns) for row in found)


@pytest.mark.parametrize("tenant", ["*", "acme"])
@pytest.mark.parametrize(
    ("name", "of", "shown"),
    [
        ("tasks", task_row, bool),
        ("results", result_row, ended),
        ("dead", task_row, lambda task: task.place == "dead"),
    ],
    ids=["tasks", "results", "dead"],
)
def test_a_view_of_tasks_shows_what_the_store_says(
    spark: SparkSession,
    shop: str,
    name: str,
    tenant: str,
    of: Callable[[Task], dict[str, Any]],
    shown: Callable[[Task], bool],
) -> None:
    """Every column of every task, of one tenant and of all: loads partly reached, delayed, in progress, dead,
    cancelled, with payloads that are no text, results that are none, and every alphabet."""
    tasks = look(shop, all_tasks) if tenant == "*" else look(shop, lambda store: all_tasks(store, [tenant]))
    frame = view(spark, shop, name, tenant=tenant, rowsPerPartition=1_000)
    expected = picked(frame.columns, (of(task) for task in tasks if shown(task)))
    assert rows(frame) == expected
    assert max(expected.values()) == 1


def test_events_are_the_journals(spark: SparkSession, shop: str) -> None:
    """Every column of every event of every shard, for one tenant and for all, in ranges of any size."""
    for tenant in ("*", "acme"):
        events = look(shop, lambda store, tenant=tenant: all_events(store, tenant))  # type: ignore[misc]
        for size in (1_000, 200_000):
            frame = view(spark, shop, "events", tenant=tenant, rowsPerPartition=size)
            assert rows(frame) == picked(frame.columns, (event_row(*one) for one in events))


def test_queues_are_counted(spark: SparkSession, shop: str) -> None:
    """A row for each queue, with the counts that the store keeps."""
    stats = look(shop, lambda store: store.stats("acme"))
    counted = {
        (queue.command, queue.ready, queue.delayed, queue.leased, queue.dead, queue.bytes) for queue in stats.queues
    }
    frame = view(spark, shop, "queues", tenant="acme")
    found = set(rows(frame.select("command", "ready", "delayed", "leased", "dead", "bytes")))
    assert found == counted
    assert view(spark, shop, "queues", tenant="*").filter("tenant IN ('zeta', 'none')").count() == len(counted)


def test_through_a_server_and_over_shards_each_task_is_read_once(
    spark: SparkSession, shop: str, tmp_path: Path
) -> None:
    """The same rows through `dibs serve` as from the disk, by many small partitions."""
    ids = Counter(row["id"] for row in (task_row(task) for task in look(shop, all_tasks)))
    with ServerProcess(tmp_path, store=shop).start().until_serves() as server:
        frame = view(spark, server.url, "tasks", tenant="*", rowsPerPartition=1_000)
        assert frame.rdd.getNumPartitions() > 4
        assert Counter(row.id for row in frame.select("id").collect()) == ids
        events = view(spark, server.url, "events", tenant="*", rowsPerPartition=1_000)
        assert rows(events) == rows(view(spark, shop, "events", tenant="*"))


# ---------------------------------------------------------------------------------------------------------- filters

TASK_FILTERS = [
    "command = 'load'",
    "command = 'not a name!'",
    "command IN ('work', 'mixed', NULL) AND tenant <> 'acme'",
    "tenant = 'acme' AND status = 'PENDING' AND command = 'load'",
    "status = 'FAILED' AND command IN ('work', 'load') AND ended_at > timestamp'2020-01-01'",
    "status IN ('COMPLETED', 'CANCELLED')",
    "status <=> 'IN_PROGRESS'",
    "status <=> NULL",
    "place = 'ready' AND status = 'PENDING' AND attempts = 1",
    "ended_at IS NULL AND command = 'work'",
    "NOT (command = 'load') AND priority > 3",
    "command LIKE 'wo%' OR status = 'CANCELLED'",
]


@pytest.mark.usefixtures("handing_over")
def test_filters_give_the_rows_that_spark_would_have_kept(spark: SparkSession, shop: str) -> None:
    """Handed over or not, a filter keeps the same rows."""
    whole = view(spark, shop, "tasks", tenant="*").cache()
    some = whole.filter("command = 'work' AND ended_at IS NOT NULL").orderBy("ended_at", "id").collect()
    ids = [some[0].id, some[-1].id]
    times = sorted({row.ended_at for row in some} | {row.enqueued_at for row in some})
    assert len(times) > 3
    filters = [
        *TASK_FILTERS,
        f"id = '{ids[0]}'",
        f"id IN ('{ids[0]}', '{ids[1]}', '{ids[1].upper()}', 'no id') AND status = 'FAILED'",
        *(
            f"{column} {how} timestamp'{time + dt.timedelta(microseconds=us)}'"
            for column, time, us in (
                ("ended_at", times[1], 0),
                ("enqueued_at", times[2], 1),
                ("ended_at", times[3], -1),
            )
            for how in ("=", "<", "<=", ">", ">=")
        ),
    ]
    assert _kept(lambda: view(spark, shop, "tasks", tenant="*", pushFilters=True), filters) == _kept(
        lambda: whole, filters
    )
    whole.unpersist()


@pytest.mark.usefixtures("handing_over")
def test_filters_of_events(spark: SparkSession, shop: str) -> None:
    """The same for events, by tenant, command, kind, shard and time."""
    whole = view(spark, shop, "events", tenant="*").cache()
    time = whole.selectExpr("percentile_approx(at, 0.5)").first()[0]  # type: ignore[index]
    filters = [
        "kind = 'claimed' AND tenant = 'acme'",
        "kind IN ('failed', 'cancelled') AND error_type = 'ValueError'",
        "command = 'load' AND shard = 1",
        "shard IN (0, 7)",
        "kind = 'nonsense'",
        f"at > timestamp'{time}' AND tenant <> 'zeta'",
        f"at <= timestamp'{time}'",
        f"at = timestamp'{time}'",
    ]
    handed = _kept(lambda: view(spark, shop, "events", tenant="*", rowsPerPartition=3_000, pushFilters=True), filters)
    assert handed == _kept(lambda: whole, filters)
    whole.unpersist()


def _kept(load: Callable[[], DataFrame], filters: Sequence[str]) -> Counter[tuple[str, str]]:
    """Which rows each filter keeps, by one query, each of a DataFrame of its own."""
    parts = [load().filter(one).select(lit(one), "id") for one in filters]
    return Counter((row[0], row[1]) for row in reduce(DataFrame.unionAll, parts).collect())


@pytest.mark.usefixtures("handing_over")
def test_what_is_taken_is_not_done_again(spark: SparkSession, shop: str) -> None:
    """Spark itself does what is left."""
    frame = view(spark, shop, "tasks", pushFilters=True).filter("status = 'FAILED' AND priority = 3")
    plan = frame._jdf.queryExecution().executedPlan().toString()
    done = [line for line in plan.splitlines() if "Filter (" in line]
    assert "priority" in "".join(done)
    assert "status" not in "".join(done)


def test_taking_filters_needs_sparks_switch(spark: SparkSession, shop: str) -> None:
    """Where it is off, Spark says how to put it on."""
    with pytest.raises(AnalysisException, match=re.escape(SWITCH)):
        view(spark, shop, "dead", pushFilters=True).collect()


@pytest.mark.xfail(reason="Spark 4.3 keeps one plan for each load(), with the filters handed over last", strict=True)
@pytest.mark.usefixtures("handing_over")
def test_filters_of_one_frame_are_kept_apart(spark: SparkSession, shop: str) -> None:
    """Once Spark keeps them apart, readers can take filters unless they are told otherwise."""
    frame = view(spark, shop, "tasks", tenant="*", pushFilters=True)
    both = frame.filter("status = 'FAILED'").unionAll(frame.filter("status = 'COMPLETED'"))
    assert {row.status for row in both.select("status").collect()} == {"FAILED", "COMPLETED"}


@pytest.mark.usefixtures("handing_over")
def test_a_dataframe_may_be_used_with_several_filters(spark: SparkSession, shop: str) -> None:
    """Although Spark gives all parts of a query, and the queries after it, the rows of the filters it handed over last:
    by themselves, readers take none."""
    frame = view(spark, shop, "dead", tenant="*")
    first, second = frame.filter("tenant = 'acme'"), frame.filter("tenant = 'zeta'")
    assert Counter(row.tenant for row in first.unionAll(second).select("tenant").collect()) == {
        "acme": DEAD,
        "zeta": DEAD,
    }
    assert first.count() == DEAD
    assert frame.count() == 3 * DEAD


def test_options_narrow_a_read(spark: SparkSession, shop: str) -> None:
    """To queues, statuses, kinds and times, without a filter."""
    tasks = [task_row(task) for task in look(shop, all_tasks)]
    events = [event_row(*one) for one in look(shop, all_events)]
    middle = sorted(task["enqueued_at"] for task in tasks)[len(tasks) // 2]
    for options, rest in (
        ({"command": "work, mixed"}, [one for one in tasks if one["command"] in ("work", "mixed")]),
        ({"command": "load", "status": "PENDING"}, [
            one for one in tasks if (one["command"], one["status"]) == ("load", "PENDING")]),
        ({"status": "COMPLETED,CANCELLED"}, [one for one in tasks if one["status"] in ("COMPLETED", "CANCELLED")]),
        ({"since": f"{middle.isoformat()}Z"}, [one for one in tasks if one["enqueued_at"] >= middle]),
        ({"until": middle.isoformat(), "command": "load"}, [
            one for one in tasks if one["enqueued_at"] < middle and one["command"] == "load"]),
        ({"view": "results", "until": "2020-01-01T00:00:00+02:00"}, []),
        ({"view": "dead", "command": "work", "since": "2020-01-01T00:00:00Z"}, [
            one for one in tasks if one["place"] == "dead"]),
        ({"view": "events", "kind": "failed,cancelled", "command": "work"}, [
            one for one in events if one["kind"] in ("failed", "cancelled") and one["command"] == "work"]),
        ({"view": "queues", "command": "work"}, [{"id": None}] * 3),
    ):  # fmt: skip
        frame = view(spark, shop, **{"name": options.get("view", "tasks"), "tenant": "*"} | options)
        found = Counter(row.id for row in frame.collect()) if "id" in frame.columns else Counter({None: frame.count()})
        assert found == Counter(one["id"] for one in rest), options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": "a,b c"}, "option command"),
        ({"status": "READY"}, "option status is 'READY': use PENDING, IN_PROGRESS, COMPLETED, FAILED, CANCELLED"),
        ({"view": "dead", "status": "FAILED"}, "option status is for tasks and results: the view is dead"),
        ({"view": "tasks", "kind": "claimed"}, "option kind is for events: the view is tasks"),
        ({"view": "events", "kind": "nonsense"}, "option kind is 'nonsense': use enqueued"),
        ({"since": "yesterday"}, "option since is 'yesterday'"),
        ({"view": "queues", "until": "2020-01-01T00:00:00Z"}, "the view is queues"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], said: str) -> None:
    """They are told with what to write instead."""
    with pytest.raises(InvalidOption, match=re.escape(said)):
        parse({"url": "lmdb:x"} | options, ReadOptions)


# ----------------------------------------------------------------------------------------------- payloads and schemas


def test_payloads_as_bytes(spark: SparkSession, shop: str) -> None:
    """`binary` is what the producer wrote."""
    frame = view(spark, shop, "tasks", payload="binary").filter("command = 'mixed'").select("payload", "codec")
    assert rows(frame) == Counter(PAYLOADS)


def test_payloads_by_a_schema(spark: SparkSession, shop: str) -> None:
    """What fits is there, what does not is null, and nothing fails: objects in JSON and msgpack, and whatever else."""
    frame = view(spark, shop, "tasks", payload="n INT, name STRING").filter("command = 'mixed'").select("payload")
    assert rows(frame) == Counter([
        ((1, "plain"),),
        ((2, "été 雪 🎉"),),
        ((None, '{"first":"Ada"}'),),
        ((7, "packed"),),
        ((8, None),),
        *[(None,)] * 8,
    ])  # fmt: skip
    results = view(spark, shop, "results", payload="ok BOOLEAN").filter("result.ok")
    assert results.count() == 700


def test_some_columns_in_any_order(spark: SparkSession, shop: str) -> None:
    """A schema that names some columns gives these."""
    frame = view(spark, shop, "tasks", "status STRING, id STRING", tenant="acme")
    expected = (task_row(task) for task in look(shop, lambda store: all_tasks(store, ["acme"])))
    assert frame.columns == ["status", "id"]
    assert rows(frame) == picked(["status", "id"], expected)


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ("id STRING, nonsense INT", {}, "the view tasks has no column nonsense: it has tenant, id"),
        ("id BINARY", {}, "column id of the view tasks is of type string, not binary"),
        ("payload BINARY", {}, "is of type string, not binary; the option payload says how it is read"),
        (None, {"payload": "n INTERVAL DAY"}, "payload.n cannot be read as interval day: use STRING there"),
        (None, {"payload": "n NONSENSE"}, "NONSENSE"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(
    spark: SparkSession, shop: str, schema: str | None, options: dict[str, str], said: str
) -> None:
    """On the driver, before any task starts, with what to write instead."""
    with pytest.raises(Exception) as error:  # noqa: PT011 what class it is depends on where it fails
        view(spark, shop, "tasks", schema, **options).collect()
    assert said in str(error.value)
