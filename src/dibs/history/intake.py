"""Taking events in: a batch of the journal becomes a commit to the lake's events, attempts and tasks; gold follows.

Each step reads what the lake holds, writes into its staging directory and commits. What was taken in is told by its
place in the journal, so a batch that comes again, whole or in part, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 Spark's own custom

from dibs.history import gold, silver
from dibs.history.erlang import Target
from dibs.history.formats import tables
from dibs.history.lake import NO_DATE, Change, Lake, LakeState, Position
from dibs.history.tables import GOLD, SCHEMA_VERSION, TABLES

TASK = ("tenant", "id")

Tell = Callable[[str, int], None]
"""Is told what is being done, and how many events that is about."""


class Taken(NamedTuple):
    """What a batch brought."""

    events: int
    positions: dict[int, bytes]
    """How far each shard's journal is in the lake now."""


class Intake:
    """Writes one lake, by one Spark session."""

    def __init__(self, spark: SparkSession, lake: Lake, tell: Tell) -> None:
        self._spark = spark
        self._lake = lake
        self._tell = tell
        self._tables = tables(spark, lake)
        self._cores = spark.sparkContext.defaultParallelism

    def finish(self) -> None:
        """Carries out what a run that was killed has left of its commit."""
        self._tables.finish()

    def warm_up(self) -> None:
        """Computes gold of a day that nothing is known of, so that Java has loaded and compiled what that takes."""
        began = datetime(1970, 1, 1, tzinfo=UTC)
        attempts, tasks, events = (
            self._tables.read(table).where("date = DATE'1970-01-01'") for table in ("attempts", "tasks", "events")
        )
        replays = events.select("tenant", "command", "at")
        span = gold.Span(began, began)
        with gold.compute(attempts, tasks, replays, span, began, began.date(), Target()) as tables:
            for table in ("queue_minutes", "workers", "capacity"):
                tables[table].write.format("noop").mode("overwrite").save()

    # -------------------------------------------------------------------------------------------- events and silver

    def take(self, events: DataFrame) -> Taken:
        """Takes in a batch of the journal, as far as it is not in the lake."""
        self._tell("reading the journal", 0)
        bronze = self._stage("events", self._unknown(events).withColumn("date", F.to_date("at")))
        news = self._staged("events", bronze)
        shards = self._news(news)
        count = sum(row["count"] for row in shards)
        if not count:
            return Taken(0, {})
        self._tell("following the tasks", count)
        tasks = self._tables.read("tasks")
        revived = self._revived(news, tasks) if any(row["replays"] for row in shards) else None
        changes = [Change("events", bronze), *self._silver(news, tasks, revived)]
        state = _known(self._lake.state, shards)
        self._commit(changes, state)
        return Taken(count, {row["shard"]: bytes(row["cursor"]) for row in shards})

    def rebuild(self) -> None:
        """Makes silver and gold anew from the events that the lake holds."""
        self._tell("following the tasks", self._lake.state.events)
        news = self._tables.read("events")
        changes = self._silver(news, None, None)
        state = replace(self._lake.state, schema_version=SCHEMA_VERSION)
        if state.began is not None:
            state = replace(state, gold_from=state.began)
        old = [change._replace(replaced=self._tables.days(change.table)) for change in changes]
        self._commit([*old, *(Change(table, None, self._tables.days(table)) for table in GOLD)], state)
        self.refine()

    def _unknown(self, events: DataFrame) -> DataFrame:
        """The events that are not in the lake: those beyond what it has of their shard."""
        known = F.lit(False)
        for shard, position in self._lake.state.positions.items():
            known = known | F.expr(f"shard = {int(shard)} AND cursor <= X'{position.cursor}'")
        return events.where(~known)

    def _news(self, events: DataFrame) -> list[Row]:
        grouped = events.groupBy("shard").agg(
            F.count("*").alias("count"),
            F.max("cursor").alias("cursor"),
            F.max_by("at", "cursor").alias("at"),
            F.min("at").alias("earliest"),
            F.max("at").alias("latest"),
            F.count_if(F.col("kind") == "replayed").alias("replays"),
        )
        return grouped.collect()

    def _silver(self, events: DataFrame, tasks: DataFrame | None, revived: DataFrame | None) -> list[Change]:
        """Stages what the events make of the tasks that are known, and of the ended ones that they bring back."""
        state, left, days = [self._none("tasks")], [], []
        if tasks is not None and NO_DATE in self._tables.days("tasks"):
            opened = tasks.where("date IS NULL")
            state.append(opened)
            left.append(opened.join(events.select(*TASK).distinct(), [*TASK], "left_anti"))
        if tasks is not None and revived is not None:
            state.append(revived)
            days = [row["date"] for row in revived.select("date").distinct().collect()]
            own = [*TASK, "ended_at"]
            left.append(tasks.where(F.col("date").isin(days)).join(revived.select(*own), own, "left_anti"))
        folded = silver.fold(events, _union(state))
        folded.followed.persist(StorageLevel.DISK_ONLY)
        staged = self._stage("tasks", _union([folded.tasks, *left]))
        under_way = silver.running(self._staged("tasks", staged).where("date IS NULL"))
        attempts = self._stage("attempts", folded.attempts.unionByName(under_way))
        folded.followed.unpersist()
        replaced = [NO_DATE, *(f"date={day.isoformat()}" for day in days)]
        return [Change("tasks", staged, replaced), Change("attempts", attempts, [NO_DATE])]

    def _revived(self, events: DataFrame, tasks: DataFrame) -> DataFrame:
        """The ended tasks that these events bring back: dead letters, of which the latest of an id is meant."""
        first = events.where("kind NOT IN ('cancelling', 'purged')").groupBy(*TASK)
        ids = first.agg(F.min_by("kind", "cursor").alias("first")).where("first = 'replayed'").select(*TASK)
        dead = tasks.where("date IS NOT NULL AND outcome = 'failed'").join(F.broadcast(ids), [*TASK], "left_semi")
        latest = F.row_number().over(silver.by_task().orderBy(F.desc("ended_at")))
        return dead.withColumn("latest", latest).where("latest = 1").drop("latest")

    # --------------------------------------------------------------------------------------------------------- gold

    def refine(self) -> None:
        """Brings the gold tables up to what silver holds: the days that are touched, and those after them."""
        state = self._lake.state
        if state.gold_from is None or state.began is None or state.horizon is None:
            return
        since = state.gold_from.replace(minute=0, second=0, microsecond=0)
        first, last = since.date(), state.horizon.date()
        self._tell("adding up", 0)
        attempts, tasks, events = (self._since(table, first) for table in ("attempts", "tasks", "events"))
        replays = events.where("kind = 'replayed'").select("tenant", "command", "at")
        target = Target(round(state.target_wait_s * 1000), state.target_share)
        span = gold.Span(state.began, state.horizon)

        def stage(table: str, rows: DataFrame) -> Change:
            days = [day for day in self._tables.days(table) if day >= f"date={first.isoformat()}"]
            whole = rows.unionByName(self._before(table, since)).repartition(1)
            return Change(table, self._stage(table, whole), days)

        # Much of this is Spark's planning, which has one thread for each table.
        with (
            gold.compute(attempts, tasks, replays, span, since, last, target) as tables,
            ThreadPoolExecutor(self._cores, "dibs-gold") as pool,
        ):
            changes = list(pool.map(stage, tables, tables.values()))
        self._commit(changes, replace(state, gold_from=None))

    def _before(self, table: str, since: datetime) -> DataFrame:
        """The rows of the day of `since` that are about the time before it, in tables that are told by the time."""
        column = TABLES[table].key[0]
        if column not in ("minute", "hour"):
            return self._none(table)
        earlier = F.col(column) < F.timestamp_millis(F.lit(round(since.timestamp() * 1000)))
        return self._tables.read(table).where((F.col("date") == F.lit(since.date())) & earlier)

    # -------------------------------------------------------------------------------------------- reading and writing

    def _commit(self, changes: Iterable[Change], state: LakeState) -> None:
        self._tables.commit(changes, state, lambda doing: self._tell(doing, 0))

    def _since(self, table: str, first: date) -> DataFrame:
        return self._tables.read(table).where((F.col("date") >= F.lit(first)) | F.col("date").isNull())

    def _staged(self, table: str, staged: Path) -> DataFrame:
        return self._spark.read.schema(TABLES[table].ddl()).parquet(str(staged))

    def _none(self, table: str) -> DataFrame:
        return self._spark.createDataFrame([], TABLES[table].ddl())

    def _stage(self, table: str, rows: DataFrame) -> Path:
        path = self._lake.staging(table)
        columns = [column.name for column in TABLES[table].columns]
        rows.select(*columns, "date").coalesce(self._cores).write.partitionBy("date").parquet(str(path))
        return path


def _known(state: LakeState, shards: Iterable[Row]) -> LakeState:
    """The state of a lake that has taken these events in."""
    rows = list(shards)
    began = min(_utc(row["earliest"]) for row in rows)
    horizon = max(_utc(row["latest"]) for row in rows)
    touched = min(began, state.horizon or began)
    positions = {str(row["shard"]): Position(cursor=row["cursor"].hex(), at=_utc(row["at"])) for row in rows}
    return replace(
        state,
        events=state.events + sum(row["count"] for row in rows),
        positions=state.positions | positions,
        began=min(began, state.began or began),
        horizon=max(horizon, state.horizon or horizon),
        gold_from=min(touched, state.gold_from or touched),
    )


def _utc(time: datetime) -> datetime:
    """Spark hands times over in the zone of this process, without saying so."""
    return time.astimezone(UTC)


def _union(frames: list[DataFrame]) -> DataFrame:
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole
