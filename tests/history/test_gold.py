"""Gold, against plain Python over the same silver, and against itself: by days, and with more known later."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession

from dibs.history.erlang import Target
from dibs.history.gold import Span, compute
from dibs.history.tables import GOLD, TABLES
from tests.history import oracle_gold
from tests.history.histories import EventRow, frame, history, trimmed
from tests.history.oracle import Row, Silver, silver

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


def drawn(share: float = 1.0) -> list[EventRow]:
    """Returns the first part of some histories."""
    events = []
    for seed in range(6):
        whole = history(seed, tasks=60, shards=1 + seed % 3, pace_ms=4_000 * (1 + seed))
        known = trimmed(whole, seed) if seed % 3 == 2 else whole
        kept = {(row.shard, row.cursor) for row in whole[: int(len(whole) * share)]}
        events += [row._replace(tenant=f"{row.tenant} {seed}") for row in known if (row.shard, row.cursor) in kept]
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
        known, first, last, TARGET,
    ) as tables:  # fmt: skip
        for name, table in tables.items():
            assert table.schema.simpleString() == spark.createDataFrame([], TABLES[name].ddl()).schema.simpleString()
        return {name: table.toArrow().to_pylist() for name, table in tables.items()}


def by_key(name: str, rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """Returns the rows of a table by what tells them apart, of which no two have the same."""
    found = {tuple(row[column] for column in (*TABLES[name].key, "date")): row for row in rows}
    assert len(found) == len(rows)
    return found


def assert_same(name: str, rows: Sequence[Row], expected: Sequence[Row]) -> None:
    """Both are the same table, in any order; fractions agree to what a computer's sums allow."""
    found, wanted = by_key(name, rows), by_key(name, expected)
    assert found.keys() == wanted.keys()
    for key, row in found.items():
        assert row == {
            column: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            for column, value in wanted[key].items()
        }, key


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
    for day in (lake.days[0], lake.days[len(lake.days) // 2], lake.days[-1]):
        alone = computed(spark, lake.events, lake.silver, lake.span, day, day)
        for name in GOLD:
            assert_same(name, alone[name], [row for row in lake.tables[name] if row["date"] == day])


def test_what_comes_later_changes_no_day_before_it(spark: SparkSession, lake: Lake) -> None:
    """Days that were over when the lake was computed first are the same when it knows of more, but for those that
    events came to later, by a clock that was behind."""
    before = made(spark, drawn(0.7))
    known = {(row.shard, row.cursor, row.id) for row in before.events}
    touched = min(row.at for row in lake.events if (row.shard, row.cursor, row.id) not in known).date()
    over = min(touched, before.span.horizon.date())
    assert before.days[0] < over < lake.days[-1]
    for name in GOLD:
        then, now = ([row for row in tables[name] if row["date"] < over] for tables in (before.tables, lake.tables))
        assert then
        assert_same(name, then, now)
