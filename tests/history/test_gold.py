"""Gold, against plain Python over the same silver, and against itself: by days, and with more known later."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from itertools import takewhile
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession

from dibs.history.erlang import Target
from dibs.history.gold import Span, compute
from dibs.history.tables import GOLD, TABLES
from tests.history import oracle_gold
from tests.history.comparing import assert_same
from tests.history.histories import START, EventRow, frame, history, story, trimmed
from tests.history.oracle import Row, Silver, silver

pytestmark = pytest.mark.timeout(180)
"""Spark's start and that of the tables that all tests share belong to the first test's time."""

TARGET = Target(wait_ms=30_000, share=0.9)
Tables = dict[str, list[Row]]


class Lake(NamedTuple):
    """Events, what they come to, and gold of it by Spark."""

    events: list[EventRow]
    silver: Silver
    span: Span
    tables: Tables

    @property
    def days(self) -> list[date]:
        """All days that are known."""
        count = (self.span.horizon.date() - self.span.began.date()).days + 1
        return [self.span.began.date() + timedelta(days=number) for number in range(count)]


@pytest.fixture(scope="module")
def lake(spark: SparkSession) -> Lake:
    """Many queues, whose histories are drawn; some of the journals begin late."""
    return made(spark, drawn())


def drawn(until: datetime | None = None) -> list[EventRow]:
    """Returns some histories, up to the first event that is no earlier. In one of them everything happens at half and
    full hours."""
    events: list[EventRow] = []
    for seed in range(4):
        whole = history(seed, tasks=60, shards=1 + seed % 3, pace_ms=4_000 * (1 + seed))
        told = list(takewhile(lambda row: until is None or row.at < until, whole))
        kept = {row.cursor for row in trimmed(whole, seed)} if seed == 2 else {row.cursor for row in whole}
        for row in told:
            if row.cursor in kept:
                at = row.at.replace(minute=row.at.minute // 30 * 30, second=0, microsecond=0) if seed == 3 else row.at
                events.append(row._replace(tenant=f"{row.tenant} {seed}", at=at))
    return events


def made(spark: SparkSession, events: list[EventRow]) -> Lake:
    """Computes all days at once."""
    known = oracle_gold.span(events)
    rows = silver(events)
    return Lake(events, rows, known, computed(spark, events, rows, known, known.began.date(), known.horizon.date()))


def computed(spark: SparkSession, events: list[EventRow], rows: Silver, known: Span, first: date, last: date) -> Tables:
    """Computes some days, from what the caller of `compute` has to give for them and nothing else."""
    attempts, tasks = (
        [one for one in table if one["date"] is None or one["date"] >= first] for table in (rows.attempts, rows.tasks)
    )
    replays = [one for one in events if one.kind == "replayed" and first <= one.at.date() <= last]
    with compute(
        frame(spark, "attempts", [tuple(row.values()) for row in attempts]),
        frame(spark, "tasks", [tuple(row.values()) for row in tasks]),
        frame(spark, "events", replays).select("tenant", "command", "at"),
        known, datetime.combine(first, time(), UTC), last, TARGET,
    ) as tables:  # fmt: skip
        for name, table in tables.items():
            assert table.schema.simpleString() == spark.createDataFrame([], TABLES[name].ddl()).schema.simpleString()
        return {name: table.toArrow().to_pylist() for name, table in tables.items()}


def test_every_table_is_that_of_plain_python(lake: Lake) -> None:
    """Each row of each table is what asking every minute and hour of every delivery and task gives, and there is no
    other. Nothing is compared in vain: each column has values that differ."""
    replays = [one for one in lake.events if one.kind == "replayed"]
    expected = oracle_gold.gold(lake.silver, replays, lake.span, TARGET)
    for name in GOLD:
        assert_same(name, lake.tables[name], expected[name])
        for column in {one.name for one in TABLES[name].columns} - {"target_wait_ms", "target_share"}:
            assert len({str(row[column]) for row in expected[name]}) > 1, (name, column)


def test_a_day_alone_is_the_same(spark: SparkSession, lake: Lake) -> None:
    """A day that is computed by itself, from what ended on it or later, has the rows that it has among all days."""
    for day in (lake.days[len(lake.days) // 2], lake.days[-1]):
        alone = computed(spark, lake.events, lake.silver, lake.span, day, day)
        for name in GOLD:
            assert_same(name, alone[name], [row for row in lake.tables[name] if row["date"] == day])


def test_what_comes_later_changes_no_day_before_it(spark: SparkSession, lake: Lake) -> None:
    """Days that were over when the lake was computed first are the same when it knows of more, but for those that
    events came to later, by a clock that was behind."""
    before = made(spark, drawn(START + timedelta(hours=36)))
    known = {(row.shard, row.cursor, row.id) for row in before.events}
    touched = min(row.at for row in lake.events if (row.shard, row.cursor, row.id) not in known).date()
    over = min(touched, before.span.horizon.date())
    assert len([day for day in before.days if day < over]) > 1
    for name in GOLD:
        then, now = ([row for row in tables[name] if row["date"] < over] for tables in (before.tables, lake.tables))
        assert then
        assert_same(name, then, now)


def test_two_tasks_told_by_hand(spark: SparkSession) -> None:
    """What two tasks come to can be reckoned with a pencil: one completes, the other at the second attempt, with the
    first instant of a minute, which is the next one's."""
    error = {"error_type": "ValueError", "error_line": "late", "fingerprint": "f1"}
    events = [
        *story("one", ("enqueued", 0), ("claimed", 70, {"worker": "ann"}), ("completed", 130)),
        *story(
            "two", ("enqueued", 10), ("claimed", 75, {"worker": "bob"}), ("retried", 200, {"reason": "DELAYED"}, error),
            ("promoted", 260), ("claimed", 265, {"worker": "ann"}), ("completed", 300),
        ),
    ]  # fmt: skip
    tables = made(spark, events).tables
    minutes = sorted(tables["queue_minutes"], key=lambda row: row["minute"])
    assert [row["minute"] for row in minutes] == [START + timedelta(minutes=number) for number in range(6)]
    columns = [name for name in minutes[0] if name not in TABLES["queue_minutes"].key and name != "date"]
    assert {name: [row[name] for row in minutes] for name in columns} == {
        "arrivals": [2, 0, 0, 0, 0, 0],
        "claims": [0, 2, 0, 0, 1, 0],
        "completions": [0, 0, 1, 0, 0, 1],
        "failures": [0] * 6,
        "retries": [0, 0, 0, 1, 0, 0],
        "expiries": [0] * 6,
        "releases": [0] * 6,
        "cancellations": [0] * 6,
        "replays": [0] * 6,
        "wait_p50_ms": [None, 67_500, None, None, 5_000, None],
        "wait_p95_ms": [None, 69_750, None, None, 5_000, None],
        "wait_p99_ms": [None, 69_950, None, None, 5_000, None],
        "run_p50_ms": [None, None, 60_000, 125_000, None, 35_000],
        "run_p95_ms": [None, None, 60_000, 125_000, None, 35_000],
        "run_p99_ms": [None, None, 60_000, 125_000, None, 35_000],
        "backlog": [2, 0, 0, 0, 0, 0],
        "running": [0, 2, 1, 0, 1, 0],
        "oldest_ms": [60_000, None, None, None, None, None],
    }
    (capacity,) = tables["capacity"]
    assert capacity | {"offered_load": 0, "utilisation": 0} == {
        "hour": START, "tenant": "acme", "command": "resize", "span_s": 300.0, "arrivals": 3,
        "run_mean_ms": pytest.approx(73_333.33), "offered_load": 0, "busy_ms": 220_000, "workers_ran": 2,
        "utilisation": 0, "wait_p95_ms": pytest.approx(69_500), "target_wait_ms": 30_000, "target_share": 0.9,
        "workers_needed": 3, "date": START.date(),
    }  # fmt: skip
    assert (capacity["offered_load"], capacity["utilisation"]) == (pytest.approx(0.7333, abs=1e-4), 220 / 600)
    shares = {row["worker"]: (row["busy_ms"], row["share"], row["failures"]) for row in tables["workers"]}
    assert shares == {"ann": (95_000, 95 / 220, 0), "bob": (125_000, 125 / 220, 1)}
    (group,), (tenant,) = tables["error_groups"], tables["tenants"]
    assert (group["count"], group["tasks"], group["deaths"], group["sample_id"]) == (1, 1, 0, "two")
    assert (tenant["wait_ms"], tenant["work_share"], tenant["deliveries"]) == (140_000, 1.0, 3)


def test_nothing_comes_to_nothing(spark: SparkSession) -> None:
    """Of a day without a task, every table is empty."""
    day = START.date()
    tables = computed(spark, [], Silver([], []), Span(START, START), day, day)
    assert tables == {name: [] for name in GOLD}
