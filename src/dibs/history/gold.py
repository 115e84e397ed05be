"""From deliveries and tasks to what people look at: minutes of queues, faults, workers, capacity, tenants.

::

    attempts, tasks, replays ──▶ minutes of a queue ──▶ queue_minutes
                            │          └──────────┐
                            │                     ├──▶ capacity, tenants
                            │          ┌──────────┘
                            ├──▶ hours of a worker ──▶ workers
                            └──▶ error_groups

A pure function of silver: a day is the same whether it is computed alone or with others, and whatever is known of later
days. Times are whole milliseconds since 1970 in here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as fn

from dibs.history.erlang import Target, workers_needed
from dibs.history.sweep import BEGIN, END, levels, surge
from dibs.history.tables import TABLES
from dibs.task import Reason

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_QUEUE = ("tenant", "command")
_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
_MS = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RAN = "outcome IN ('completed', 'retried', 'failed')"
_LOST = f"(outcome = 'lease_expired' OR outcome = 'failed' AND reason <=> '{Reason.LEASE_EXPIRED}')"


class Span(NamedTuple):
    """What the lake knows: the earliest and the latest time of any of its events."""

    began: datetime
    horizon: datetime


@contextmanager
def compute(
    attempts: DataFrame, tasks: DataFrame, replays: DataFrame, span: Span, since: datetime, last: date, target: Target
) -> Iterator[dict[str, DataFrame]]:
    """Gives, for each table of gold, its rows from the hour of `since` to the day `last`; they can be read until it
    ends. Tables of whole days begin with the day of `since`.

    `attempts` and `tasks` hold at least the rows of these days and later ones, and those without a day; `replays` has
    the tenant, the command and the time (`at`) of each replay in these days. No time in them is outside of `span`.
    """
    since_ms = (since - _EPOCH) // _MS
    known = _Known(
        first_ms=since_ms // _DAY_MS * _DAY_MS,
        since_ms=since_ms // _HOUR_MS * _HOUR_MS,
        end_ms=_day_ms(last) + _DAY_MS,
        began_ms=(span.began - _EPOCH) // _MS,
        horizon_ms=(span.horizon - _EPOCH) // _MS,
    )
    deliveries = _deliveries(attempts)
    minutes = _minutes(deliveries, tasks, replays, known).persist(StorageLevel.MEMORY_AND_DISK)
    hours = _hours(_pieces(deliveries, known)).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield {
            "queue_minutes": _shaped("queue_minutes", _queue_minutes(minutes, known)),
            "error_groups": _shaped("error_groups", _error_groups(attempts, known)),
            "workers": _shaped("workers", _workers(hours)),
            "capacity": _shaped("capacity", _capacity(minutes, hours, known, target)),
            "tenants": _shaped("tenants", _tenants(deliveries, tasks, hours, known)),
        }
    finally:
        minutes.unpersist()
        hours.unpersist()


class _Known(NamedTuple):
    """From when to when is computed, the end not included, and what is known."""

    first_ms: int
    """A midnight."""
    since_ms: int
    """The beginning of an hour of that day: what is told by minutes and hours begins with it."""
    end_ms: int
    """A midnight."""
    began_ms: int
    horizon_ms: int

    def minute(self, time_ms: str) -> str:
        """Returns, in SQL, the minute of a time: one before all others or after them if it is outside of them."""
        before, after = self.since_ms // _MINUTE_MS - 1, self.end_ms // _MINUTE_MS
        return f"greatest({before}, least({after}, {time_ms} div {_MINUTE_MS})) AS minute"

    def within(self, time_ms: str) -> str:
        """Returns, in SQL, whether a time is in the hours that are computed."""
        return f"{time_ms} >= {self.since_ms} AND {time_ms} < {self.end_ms}"

    def within_days(self, time_ms: str) -> str:
        """Returns, in SQL, whether a time is in the days that are computed."""
        return f"{time_ms} >= {self.first_ms} AND {time_ms} < {self.end_ms}"


# --- what is shared ---------------------------------------------------------------------------------------------------


def _deliveries(attempts: DataFrame) -> DataFrame:
    return attempts.selectExpr(
        *_QUEUE,
        "worker",
        "unix_millis(ready_at) AS ready_ms",
        "unix_millis(claimed_at) AS claimed_ms",
        "unix_millis(ended_at) AS ended_ms",
        "wait_ms",
        "run_ms",
        "outcome",
        "reason",
    )


def _minutes(deliveries: DataFrame, tasks: DataFrame, replays: DataFrame, known: _Known) -> DataFrame:
    """Returns a row for each minute of a queue in which something happened, with how much; see `sweep.levels`."""
    # What was over before leaves no trace in these minutes.
    deliveries = deliveries.where(f"ended_ms IS NULL OR ended_ms >= {known.since_ms}")
    tasks = tasks.where(f"ended_at IS NULL OR ended_at >= timestamp_millis({known.since_ms})")
    # What ends with the first instant of a minute was there before, and is not at once with what begins.
    at_once = f"ended_ms % {_MINUTE_MS} = 0"
    facts = [
        _counted(deliveries.where("ready_ms IS NOT NULL"), known.minute("ready_ms"), readied="count(*)"),
        _counted(
            deliveries,
            known.minute("claimed_ms"),
            began="count(*)",
            left="count(ready_ms)",
            left_ms="min(ready_ms)",
            waits="count(wait_ms)",
            wait_ms="sum(wait_ms)",
            waited_ms=f"collect_list(wait_ms) FILTER (WHERE {known.within('claimed_ms')})",
            begins=f"collect_list({BEGIN.format('claimed_ms')}) FILTER (WHERE {known.within('claimed_ms')})",
        ),
        _counted(
            deliveries.where("ended_ms IS NOT NULL"),
            known.minute("ended_ms"),
            ended="count(*)",
            ended_at_once=f"count_if({at_once})",
            completions="count_if(outcome = 'completed')",
            failures="count_if(outcome = 'failed')",
            retries="count_if(outcome = 'retried')",
            expiries=f"count_if({_LOST})",
            releases="count_if(outcome = 'released')",
            ran_ms=f"collect_list(run_ms) FILTER (WHERE {known.within('ended_ms')} AND {_RAN})",
            ends=f"collect_list({END.format('ended_ms')}) FILTER (WHERE {known.within('ended_ms')} AND NOT {at_once})",
        ),
        _counted(
            _happened(tasks, replays, known),
            known.minute("time_ms"),
            arrivals="count_if(what = 'arrived')",
            cancellations="count_if(what = 'cancelled')",
            replays="count_if(what = 'replayed')",
            readied="count_if(what = 'readied')",
            left="count_if(what = 'left')",
            left_ms="min(ready_ms) FILTER (WHERE what = 'left')",
        ),
    ]
    united = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), facts)
    lists = ("waited_ms", "ran_ms", "begins", "ends")
    counts = [name for name in united.columns if name not in (*_QUEUE, "minute", "left_ms", *lists)]
    changes = united.groupBy(*_QUEUE, "minute").agg(
        fn.min("left_ms").alias("left_ms"),
        *(fn.coalesce(fn.sum(name), fn.lit(0)).alias(name) for name in counts),
        # Each is in one row at most.
        *(fn.coalesce(fn.first(name, ignorenulls=True), fn.expr("array()")).alias(name) for name in lists),
    )
    summed = changes.select(
        *_QUEUE,
        "minute",
        "left_ms",
        *counts,
        "waited_ms",
        fn.expr(_percentiles("waited_ms")).alias("wait_percentiles"),
        fn.expr(_percentiles("ran_ms")).alias("run_percentiles"),
        fn.expr(surge("concat(begins, ends)")).alias("surge"),
    )
    return levels(summed, _QUEUE, "minute", min(known.horizon_ms, known.end_ms - 1) // _MINUTE_MS).where(
        known.within(f"minute * {_MINUTE_MS}")
    )


def _happened(tasks: DataFrame, replays: DataFrame, known: _Known) -> DataFrame:
    """Returns what happened to tasks apart from deliveries: a time, what, and since when it was ready.

    Tasks that are ready leave after all that is known.
    """
    waited = "ready_at IS NOT NULL AND (place = 'ready' OR outcome = 'cancelled')"
    moments = {
        "arrived": "enqueued_at",
        "cancelled": "IF(outcome = 'cancelled', ended_at, NULL)",
        "readied": f"IF({waited}, ready_at, NULL)",
        "left": f"IF({waited}, coalesce(ended_at, timestamp_millis({known.end_ms})), NULL)",
    }
    structs = (
        f"named_struct('what', '{what}', 'time_ms', unix_millis({at}), 'ready_ms', unix_millis(ready_at))"
        for what, at in moments.items()
    )
    moved = tasks.selectExpr(*_QUEUE, f"inline(array({', '.join(structs)}))").where("time_ms IS NOT NULL")
    brought_back = replays.selectExpr(
        *_QUEUE, "'replayed' AS what", "unix_millis(at) AS time_ms", "CAST(NULL AS BIGINT) AS ready_ms"
    )
    return moved.unionByName(brought_back)


def _counted(rows: DataFrame, minute: str, **aggregates: str) -> DataFrame:
    return _aggregated(rows.selectExpr("*", minute), [*_QUEUE, "minute"], **aggregates)


def _percentiles(values: str) -> str:
    """Returns, in SQL, the percentiles of an array, on the line between two values of it; null: it is empty."""
    place = "p * (size(sorted) - 1)"
    below, above = f"sorted[INT(floor({place}))]", f"sorted[INT(ceil({place}))]"
    between = f"{below} + ({place} - floor({place})) * ({above} - {below})"
    points = "array(0.5D, 0.95D, 0.99D)"
    of_sorted = f"IF(size(sorted) = 0, NULL, transform({points}, p -> {between}))"
    return f"transform(array(sort_array({values})), sorted -> {of_sorted})[0]"


def _pieces(deliveries: DataFrame, known: _Known) -> DataFrame:
    """Returns the deliveries cut at hours: a piece, from `from_ms` to `to_ms`, for each hour of these days that it was
    under way in. The piece in which it ended has its outcome."""
    first, last = known.first_ms // _HOUR_MS, known.end_ms // _HOUR_MS - 1
    reach = f"coalesce(ended_ms, {known.horizon_ms})"
    from_hour, to_hour = f"greatest({first}, claimed_ms div {_HOUR_MS})", f"least({last}, {reach} div {_HOUR_MS})"
    cut = deliveries.where(f"{from_hour} <= {to_hour}").selectExpr(
        "*", f"explode(sequence({from_hour}, {to_hour})) AS hour"
    )
    return cut.selectExpr(
        *_QUEUE,
        "worker",
        "hour",
        f"greatest(claimed_ms, hour * {_HOUR_MS}) AS from_ms",
        f"least({reach}, (hour + 1) * {_HOUR_MS}) AS to_ms",
        f"IF(ended_ms div {_HOUR_MS} = hour, outcome, NULL) AS outcome",
        "reason",
        "run_ms",
    )


def _hours(pieces: DataFrame) -> DataFrame:
    """Returns a row for each hour of a worker at a queue."""
    return _aggregated(
        pieces,
        [*_QUEUE, "worker", "hour"],
        busy_ms="sum(to_ms - from_ms)",
        from_ms="min(from_ms)",
        to_ms="max(to_ms)",
        deliveries="count(outcome)",
        run_ms="coalesce(sum(run_ms) FILTER (WHERE outcome IS NOT NULL), 0)",
        completions="count_if(outcome = 'completed')",
        retries="count_if(outcome = 'retried')",
        deaths="count_if(outcome = 'failed')",
        lost=f"count_if({_LOST})",
        lost_deaths=f"count_if(outcome = 'failed' AND {_LOST})",
        releases="count_if(outcome = 'released')",
        cancellations="count_if(outcome = 'cancelled')",
    )


# --- the tables -------------------------------------------------------------------------------------------------------


def _queue_minutes(minutes: DataFrame, known: _Known) -> DataFrame:
    counts = ("arrivals", "completions", "failures", "retries", "expiries", "releases", "cancellations", "replays")
    return minutes.select(
        *_QUEUE,
        _time(f"minute * {_MINUTE_MS}").alias("minute"),
        fn.expr("coalesce(began, 0)").alias("claims"),
        *(fn.expr(f"coalesce({name}, 0)").alias(name) for name in counts),
        *(
            fn.expr(f"{kind}_percentiles[{place}]").alias(f"{kind}_p{hundredth}_ms")
            for kind in ("wait", "run")
            for place, hundredth in enumerate((50, 95, 99))
        ),
        "backlog",
        "running",
        fn.expr(f"least((minute + 1) * {_MINUTE_MS}, {known.horizon_ms}) - oldest_ms").alias("oldest_ms"),
        _day(f"minute * {_MINUTE_MS}"),
    )


def _error_groups(attempts: DataFrame, known: _Known) -> DataFrame:
    faults = attempts.where(f"fingerprint IS NOT NULL AND {known.within_days('unix_millis(ended_at)')}")
    tasks = _aggregated(
        faults.drop("date").select("*", _day("unix_millis(ended_at)")),
        ["tenant", "fingerprint", "date", "command", "id", "enqueued_at"],
        earliest="min(struct(ended_at, id, delivery, error_type, error_line))",
        count="count(*)",
        deaths="count_if(outcome = 'failed')",
        last_seen="max(ended_at)",
    )
    groups = _aggregated(
        tasks,
        ["tenant", "fingerprint", "date"],
        earliest="min(earliest)",
        commands="array_sort(collect_set(command))",
        count="sum(count)",
        tasks="count(*)",
        deaths="sum(deaths)",
        last_seen="max(last_seen)",
    )
    return groups.selectExpr(
        "*",
        "earliest.error_type",
        "earliest.error_line AS sample",
        "earliest.id AS sample_id",
        "earliest.ended_at AS first_seen",
    )


def _workers(hours: DataFrame) -> DataFrame:
    days = _aggregated(
        hours.select("*", _day(f"hour * {_HOUR_MS}")),
        [*_QUEUE, "worker", "date"],
        deliveries="sum(deliveries)",
        completions="sum(completions)",
        failures="sum(retries + deaths - lost_deaths)",
        lost="sum(lost)",
        releases="sum(releases)",
        cancellations="sum(cancellations)",
        busy_ms="sum(busy_ms)",
        first_seen="timestamp_millis(min(from_ms))",
        last_seen="timestamp_millis(max(to_ms))",
    )
    return days.withColumn("share", _share("busy_ms", *_QUEUE, "date"))


def _capacity(minutes: DataFrame, hours: DataFrame, known: _Known, target: Target) -> DataFrame:
    key = [*_QUEUE, "hour"]
    swept = _aggregated(
        minutes.withColumn("hour", fn.expr(f"minute div {_HOUR_MS // _MINUTE_MS}")),
        key,
        arrivals="coalesce(sum(readied), 0)",
        most="max(carried - coalesce(ended_at_once, 0) + coalesce(surge, 0))",
        waited_ms="flatten(collect_list(waited_ms))",
    )
    ran = _aggregated(hours, key, busy_ms="sum(busy_ms)", ended="sum(deliveries)", run_ms="sum(run_ms)")
    began = f"greatest(hour * {_HOUR_MS}, {known.began_ms})"
    horizon = f"least((hour + 1) * {_HOUR_MS}, {known.horizon_ms})"
    found = (
        swept.join(ran, key, "left")
        .where("arrivals > 0 OR busy_ms IS NOT NULL")
        .selectExpr(
            *key,
            f"greatest(1.0D, ({horizon} - {began}) / 1000) AS span_s",
            "arrivals",
            "run_ms / nullif(ended, 0) AS run_mean_ms",
            "coalesce(busy_ms, 0) AS busy_ms",
            # A delivery that took no time had a worker, too.
            "IF(busy_ms IS NULL, 0, greatest(most, 1)) AS workers_ran",
            f"{_percentiles('waited_ms')}[1] AS wait_p95_ms",
        )
    )
    rated = found.selectExpr(
        "*",
        "arrivals / span_s * run_mean_ms / 1000 AS offered_load",
        "busy_ms / nullif(workers_ran * span_s * 1000, 0) AS utilisation",
        f"{target.wait_ms} AS target_wait_ms",
        f"{target.share}D AS target_share",
    )
    advised = rated.coalesce(1).mapInArrow(_advise, _ddl(rated) + ", workers_needed BIGINT")
    return advised.select(
        "*",
        _day(f"hour * {_HOUR_MS}"),
    ).withColumn("hour", _time(f"hour * {_HOUR_MS}"))


def _tenants(deliveries: DataFrame, tasks: DataFrame, hours: DataFrame, known: _Known) -> DataFrame:
    key = ["tenant", "date"]
    put_in = _aggregated(
        tasks.where(known.within_days("unix_millis(enqueued_at)")).select("tenant", _day("unix_millis(enqueued_at)")),
        key,
        arrivals="count(*)",
    )
    begun = _aggregated(
        deliveries.where(known.within_days("claimed_ms")).select("tenant", "wait_ms", _day("claimed_ms")),
        key,
        waits="count(wait_ms)",
        wait_ms="coalesce(sum(wait_ms), 0)",
    )
    ran = _aggregated(
        hours.select("*", _day(f"hour * {_HOUR_MS}")),
        key,
        deliveries="sum(deliveries)",
        completions="sum(completions)",
        failures="sum(deaths)",
        busy_ms="sum(busy_ms)",
    )
    all_three = put_in.join(begun, key, "full").join(ran, key, "full").na.fill(0)
    return all_three.select(
        "*",
        fn.expr("wait_ms / nullif(waits, 0)").alias("wait_mean_ms"),
        _share("busy_ms", "date").alias("work_share"),
        _share("wait_ms", "date").alias("wait_share"),
    )


def _advise(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Adds to each hour how many workers it needed. Runs on an executor."""
    for batch in batches:
        needed = [
            None
            if row["run_mean_ms"] is None
            else workers_needed(
                row["offered_load"], row["run_mean_ms"] / 1000, row["target_wait_ms"] / 1000, row["target_share"]
            )
            for row in batch.select(["run_mean_ms", "offered_load", "target_wait_ms", "target_share"]).to_pylist()
        ]
        yield batch.append_column("workers_needed", pa.array(needed, pa.int64()))


# --- in few words -----------------------------------------------------------------------------------------------------


def _aggregated(rows: DataFrame, keys: list[str], **aggregates: str) -> DataFrame:
    return rows.groupBy(*keys).agg(*(fn.expr(sql).alias(name) for name, sql in aggregates.items()))


def _share(value: str, *of: str) -> Column:
    return fn.col(value) / fn.nullif(fn.sum(value).over(Window.partitionBy(*of)), fn.lit(0))


def _time(time_ms: str) -> Column:
    return fn.expr(f"timestamp_millis({time_ms})")


def _day(time_ms: str) -> Column:
    return fn.expr(f"date_from_unix_date(CAST({time_ms} div {_DAY_MS} AS INT)) AS date")


def _ddl(rows: DataFrame) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in rows.dtypes)


def _shaped(table: str, rows: DataFrame) -> DataFrame:
    """Returns the columns of a table, in their order and of their types, and the day."""
    columns = [fn.col(column.name).cast(column.type).alias(column.name) for column in TABLES[table].columns]
    return rows.select(*columns, "date")


def _day_ms(day: date) -> int:
    return (day - _EPOCH.date()).days * _DAY_MS
