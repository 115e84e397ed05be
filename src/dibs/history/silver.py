"""Silver: the events of each task, one after the other, become its row of `tasks`, and of `attempts` for each delivery.

All of a task's events are in one journal, and their order there is what happened, whatever the clock said. So a task is
followed from place to place like a small machine, whose memory is its row of `tasks`: a row that was written goes on
with the next events as if they had come with the first, and it does not matter how the journal is cut into batches.

Spark brings the rows and the events of a task together, in order, by one shuffle; everything runs in its own process.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F  # noqa: N812 Spark's own custom

from dibs.history.tables import DATE, TABLES

TASK = ("tenant", "id")
IGNORED = ("cancelling", "purged")
"""They move no task: a task that is to be cancelled goes on, and one that is purged had ended."""
DELAYED = "DELAYED"
"""The reason of an event after which a task is not ready yet. The place tells that: it is no reason in these tables."""

_ERROR = ("error_type", "error_line", "fingerprint")


class Folded(NamedTuple):
    """What events come to. Both tables are made of `followed`: who writes both keeps that one meanwhile, by
    ``followed.persist(StorageLevel.DISK_ONLY)``, or it is made twice."""

    tasks: DataFrame
    """The tasks that have an event here, as they are now: rows of `tasks`."""
    attempts: DataFrame
    """The deliveries that ended here: rows of `attempts`."""
    followed: DataFrame


def fold(events: DataFrame, state: DataFrame) -> Folded:
    """Returns what tasks are after these events. They follow all that the tasks of `state` had before.

    `state` has the rows of `tasks` that the events may go on with: at least those that have not ended, and the dead
    letters that come back; of several of one id the latest is meant. All of those whose id has an event here come back
    in `tasks`, changed or not, and so take the place of what they were; others do not.
    """
    known = _events(events).unionByName(_states(state), allowMissingColumns=True)
    # Brought together first, each task is put together once: without this, Spark would do so before the shuffle, too.
    together = known.repartition(*TASK).groupBy(*TASK).agg(F.collect_list("event"), F.collect_list("state"))
    followed = (
        together.toDF(*TASK, "events", "states")
        .where(F.size("events") > 0)
        .select(F.aggregate(F.sort_array("events"), _beginning(), _moved).alias("life"))
    )
    tasks = followed.select(F.inline(_and(F.col("life.past"), F.col("life.task"))))
    attempts = followed.select(F.inline("life.attempts"))
    return Folded(_dated(tasks), _dated(attempts), followed)


def running(tasks: DataFrame) -> DataFrame:
    """Returns the deliveries that are under way, of tasks as they are: rows of `attempts`, without a day."""
    task = F.struct(*(F.col(column.name) for column in TABLES["tasks"].columns))
    under_way = tasks.where(F.col("place") == "leased").select(_delivery(task).alias("attempt"))
    return _dated(under_way.select("attempt.*"))


def by_task() -> WindowSpec:
    """The rows of one task, whatever its lives, together."""
    return Window.partitionBy(*TASK)


# ----------------------------------------------------------------------------------------------------------- bringing


def _events(events: DataFrame) -> DataFrame:
    """The events as they are looked at, which sort: without empty text, with the place that the task is in afterwards,
    and with what the kind means, which is cheaper to say here than to ask at every step."""
    kind, reason = F.col("kind"), F.col("reason")
    place = (
        F.when(kind.isin(*IGNORED), F.lit(None))
        .when(kind == "claimed", "leased")
        .when(kind == "failed", "dead")
        .when(kind.isin("completed", "cancelled"), "none")
        .when(kind.isin("enqueued", "retried") & (reason != ""), "delayed")
        .otherwise("ready")
    )
    meant = {
        "claims": kind == "claimed",
        "settles": kind.isin("completed", "retried", "released", "lease_expired", "failed", "cancelled"),
        "loses": (kind == "lease_expired") | ((kind == "failed") & (reason == "LEASE_EXPIRED")),
        "ends": kind.isin("completed", "failed", "cancelled"),
    }
    texts = {name: F.nullif(F.col(name), F.lit("")) for name in ("worker", *_ERROR)}
    texts["reason"] = F.when(~reason.isin("", DELAYED), reason)
    named = [column.alias(name) for name, column in ({"place": place} | meant | texts).items()]
    event = F.struct("cursor", "kind", *named, "at", "command", "attempt", "shard", *TASK)
    return events.select(*TASK, event.alias("event"))


def _states(state: DataFrame) -> DataFrame:
    """The rows of `tasks` as they are before the events, which sort."""
    task = F.struct(*(F.col(column.name) for column in TABLES["tasks"].columns))
    return state.select(*TASK, F.struct("position", task.alias("task")).alias("state"))


def _dated(rows: DataFrame) -> DataFrame:
    """With the day on which it ended, in UTC, whatever the session's time zone is."""
    day = F.floor(F.unix_seconds("ended_at") / 86_400).cast("int")
    return rows.withColumn(DATE.name, F.date_from_unix_date(day))


# ---------------------------------------------------------------------------------------------------------- following


def _beginning() -> Column:
    """What is known before the first event: the task, if it is known, those that had its id before it, and no delivery
    that ended."""
    states = F.transform(F.sort_array("states"), lambda state: state["task"])
    return F.struct(
        F.try_element_at(states, F.lit(-1)).alias("task"),
        F.slice(states, F.lit(1), F.greatest(F.size("states") - 1, F.lit(0))).alias("past"),
        F.array().cast(_array("attempts")).alias("attempts"),
    )


def _moved(life: Column, event: Column) -> Column:
    """What is known after one more event."""
    task, past, attempts = life["task"], life["past"], life["attempts"]
    begins = event["kind"] == "enqueued"
    settled = event["settles"] & (task["place"] == "leased")
    # A limit's room makes tasks `promoted` that were ready all the time.
    still = event["place"].isNull() | ((event["kind"] == "promoted") & (task["place"] == "ready"))
    after = F.struct(
        F.when(begins, _enqueued(event)).otherwise(_went_on(task, event)).alias("task"),
        F.when(begins, _and(past, task)).otherwise(past).alias("past"),
        F.when(settled, _and(attempts, _delivery(task, event))).otherwise(attempts).alias("attempts"),
    )
    return F.when(still, life).otherwise(after)


def _enqueued(event: Column) -> Column:
    """A task whose life begins."""
    return _row(
        "tasks",
        tenant=event["tenant"],
        command=event["command"],
        id=event["id"],
        enqueued_at=event["at"],
        place=event["place"],
        changed_at=event["at"],
        ready_at=F.when(event["place"] == "ready", event["at"]),
        **dict.fromkeys(("deliveries", "retries", "releases", "expiries", "replays", "attempt"), F.lit(0)),
        **dict.fromkeys(("wait_ms", "run_ms"), F.lit(0)),
        shard=event["shard"],
        position=event["cursor"],
    )


def _went_on(task: Column, event: Column) -> Column:
    """A task after an event that is not its first; of one whose beginning is not known there is only the event."""
    kind, place, before, claimed, ended = event["kind"], event["place"], task["place"], event["claims"], event["ends"]
    now = _now(task, event)
    since_ms = F.unix_millis(now) - F.unix_millis(task["changed_at"])
    settled = event["settles"] & (before == "leased")
    waited = (before == "ready") & (claimed | (kind == "cancelled"))
    wrong = event["error_type"].isNotNull()

    def counted(name: str, also: Column) -> Column:
        return F.coalesce(task[name], F.lit(0)) + F.when(also, 1).otherwise(0)

    def added(name: str, also: Column) -> Column:
        return F.coalesce(task[name], F.lit(0)) + F.when(also, since_ms).otherwise(0)

    return _row(
        "tasks",
        tenant=event["tenant"],
        command=event["command"],
        id=event["id"],
        enqueued_at=task["enqueued_at"],
        first_claimed_at=F.coalesce(task["first_claimed_at"], F.when(claimed, now)),
        ended_at=F.when(ended, now),
        outcome=F.when(ended, kind),
        reason=F.when(ended & (kind != "completed"), event["reason"]),
        place=place,
        changed_at=now,
        ready_at=F.when((place == "ready") | (claimed & (before == "delayed")), now).when(waited, task["ready_at"]),
        deliveries=counted("deliveries", claimed),
        retries=counted("retries", settled & (kind == "retried")),
        releases=counted("releases", settled & (kind == "released")),
        expiries=counted("expiries", settled & event["loses"]),
        replays=counted("replays", kind == "replayed"),
        wait_ms=added("wait_ms", waited),
        run_ms=added("run_ms", settled),
        attempt=F.when(claimed, event["attempt"]).otherwise(F.coalesce(task["attempt"], F.lit(0))),
        worker=F.when(claimed, event["worker"]).otherwise(task["worker"]),
        **{name: F.when(wrong, event[name]).otherwise(task[name]) for name in _ERROR},
        shard=event["shard"],
        position=event["cursor"],
    )


def _delivery(task: Column, end: Column | None = None) -> Column:
    """The delivery of a task that is leased, and how it ended, if it has."""
    same = ("tenant", "command", "id", "enqueued_at", "attempt", "worker", "ready_at")
    known = {name: task[name] for name in same}
    claimed_at = task["changed_at"]
    known |= {"delivery": task["deliveries"], "claimed_at": claimed_at}
    known["wait_ms"] = F.unix_millis(claimed_at) - F.unix_millis(task["ready_at"])
    if end is not None:
        now = _now(task, end)
        known |= {name: end[name] for name in ("reason", *_ERROR)}
        known |= {"ended_at": now, "run_ms": F.unix_millis(now) - F.unix_millis(claimed_at), "outcome": end["kind"]}
    return _row("attempts", **known)


def _now(task: Column, event: Column) -> Column:
    """When it happened: no earlier than what was journalled before it."""
    return F.greatest(event["at"], task["changed_at"])


# ------------------------------------------------------------------------------------------------------------- shapes


def _row(table: str, **values: Column) -> Column:
    """A row of a table; what is not given is null."""
    columns = TABLES[table].columns
    return F.struct(*(values.get(one.name, F.lit(None)).cast(one.type).alias(one.name) for one in columns))


def _array(table: str) -> str:
    """The type of rows of a table together, in Spark's words."""
    fields = ", ".join(f"`{column.name}`: {column.type}" for column in TABLES[table].columns)
    return f"ARRAY<STRUCT<{fields}>>"


def _and(rows: Column, row: Column) -> Column:
    """Some rows, and one more if there is one."""
    return F.when(row.isNull(), rows).otherwise(F.concat(rows, F.array(row)))
