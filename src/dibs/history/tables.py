"""The tables of a lake: their columns, types, units and meaning, each said once.

Times are UTC, from the store's clock. Within a task they never run backwards: an event that is journalled after another
is taken to have happened no earlier, whatever the clock said. Spark and Arrow get their schemas from here, and the
documentation is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from dibs.spark.schema import COLUMNS as VIEWS

SCHEMA_VERSION = 1
"""Goes up when a table changes: a lake of another version is rebuilt from its events, or refused."""

Layer = Literal["bronze", "silver", "gold"]


class Column(NamedTuple):
    """A column, in Spark's words."""

    name: str
    type: str
    unit: str
    doc: str


class Table(NamedTuple):
    """A table: a directory of the lake, in which each day is a directory of its own."""

    name: str
    layer: Layer
    doc: str
    columns: Sequence[Column]
    key: Sequence[str]
    """What tells its rows apart, and how they are sorted where that matters."""

    def ddl(self) -> str:
        """Returns the schema in Spark's words; the day, by which it is divided, is last."""
        return ", ".join(f"`{column.name}` {column.type}" for column in (*self.columns, DATE))


DATE = Column("date", "DATE", "", "the day in UTC, which is the directory")

_QUEUE = (
    Column("tenant", "STRING", "", "whose work it is"),
    Column("command", "STRING", "", "what kind of work it is; with the tenant, its queue"),
)
_ID = Column("id", "STRING", "", "the task's id")
_ERROR = (
    Column("error_type", "STRING", "", "the class of what the handler raised; null: nothing"),
    Column("error_line", "STRING", "", "the first line of its text"),
    Column("fingerprint", "STRING", "", "the same for errors that differ only in ids, numbers and addresses"),
)

_EVENTS = Table(
    "events", "bronze", "The journal, as it was written: a row for everything that happened to a task.",
    [Column(one.name, one.type, "time" if one.type == "TIMESTAMP" else "", one.doc) for one in VIEWS["events"]],
    ["shard", "cursor"],
)  # fmt: skip

_ATTEMPTS = Table(
    "attempts", "silver", "A row for each delivery of a task to a worker. Those that still run have no day.",
    [
        *_QUEUE,
        _ID,
        Column("enqueued_at", "TIMESTAMP", "time", "when the task was put in; null: before the lake began"),
        Column("delivery", "INT", "count", "1 for the task's first delivery, 2 for its second, whatever ended them"),
        Column("attempt", "INT", "count", "the attempt as the queue counts: a release and a replay take it back"),
        Column("worker", "STRING", "", "who had it"),
        Column("ready_at", "TIMESTAMP", "time", "since when it could be claimed; null: not known"),
        Column("claimed_at", "TIMESTAMP", "time", "when it was claimed"),
        Column("ended_at", "TIMESTAMP", "time", "when the delivery ended; null: it runs"),
        Column("wait_ms", "BIGINT", "ms", "from ready to claimed; null: not known"),
        Column("run_ms", "BIGINT", "ms", "from claimed to ended; null: it runs"),
        Column("outcome", "STRING", "",
               "completed, retried, failed, released, lease_expired or cancelled; null: it runs"),
        Column("reason", "STRING", "", "why, in one word, where the queue or the handler said; else null"),
        *_ERROR,
    ],
    ["tenant", "id", "enqueued_at", "delivery"],
)  # fmt: skip

_TASKS = Table(
    "tasks", "silver", "A row for each task, from end to end. Those that have not ended have no day.",
    [
        *_QUEUE,
        _ID,
        Column("enqueued_at", "TIMESTAMP", "time", "when it was put in; null: before the lake began"),
        Column("first_claimed_at", "TIMESTAMP", "time", "when it was first claimed; null: never, as far as is known"),
        Column("ended_at", "TIMESTAMP", "time", "when it ended; null: it has not"),
        Column("outcome", "STRING", "", "completed, failed or cancelled; null: it has not ended"),
        Column("reason", "STRING", "", "why it ended so, in one word; null: it completed, or has not ended"),
        Column("place", "STRING", "", "where it stands: ready, delayed, leased, dead (ended failed) or none (ended)"),
        Column("changed_at", "TIMESTAMP", "time", "since when it stands there"),
        Column("ready_at", "TIMESTAMP", "time",
               "since when it could be claimed, if it is ready, was claimed from there, or was cancelled there"),
        Column("deliveries", "INT", "count", "how often it was claimed"),
        Column("retries", "INT", "count", "deliveries that failed and were tried again"),
        Column("releases", "INT", "count", "deliveries given back untouched"),
        Column("expiries", "INT", "count", "deliveries whose lease ran out"),
        Column("replays", "INT", "count", "how often it was brought back from the dead letters"),
        Column("wait_ms", "BIGINT", "ms", "how long it could be claimed and was not, in all"),
        Column("run_ms", "BIGINT", "ms", "how long its ended deliveries took, in all"),
        Column("attempt", "INT", "count", "the attempt of the last delivery; 0: none"),
        Column("worker", "STRING", "", "who has it or had it last; null: nobody"),
        *_ERROR,
        Column("shard", "INT", "", "the journal its events are in"),
        Column("position", "BINARY", "", "the cursor of its last event that counts here"),
    ],
    ["tenant", "id", "enqueued_at"],
)  # fmt: skip

_QUEUE_MINUTES = Table(
    "queue_minutes", "gold",
    "A row for each minute of a queue in which something happened, or at whose end something waited or ran.",
    [
        Column("minute", "TIMESTAMP", "time", "its beginning"),
        *_QUEUE,
        Column("arrivals", "BIGINT", "tasks", "put in"),
        Column("claims", "BIGINT", "deliveries", "begun"),
        Column("completions", "BIGINT", "deliveries", "that completed their task"),
        Column("failures", "BIGINT", "deliveries", "after which the task was dead"),
        Column("retries", "BIGINT", "deliveries", "that failed, to be tried again"),
        Column("expiries", "BIGINT", "deliveries", "whose lease ran out, also those after which the task was dead"),
        Column("releases", "BIGINT", "deliveries", "given back untouched"),
        Column("cancellations", "BIGINT", "tasks", "that ended cancelled, also those not started in time"),
        Column("replays", "BIGINT", "tasks", "brought back from the dead letters"),
        Column("wait_p50_ms", "DOUBLE", "ms", "the median wait of the deliveries that began; null: none did"),
        Column("wait_p95_ms", "DOUBLE", "ms", "95 of 100 waited no longer"),
        Column("wait_p99_ms", "DOUBLE", "ms", "99 of 100 waited no longer"),
        Column("run_p50_ms", "DOUBLE", "ms",
               "the median run of the deliveries that completed, were retried or failed; null: none did"),
        Column("run_p95_ms", "DOUBLE", "ms", "95 of 100 ran no longer"),
        Column("run_p99_ms", "DOUBLE", "ms", "99 of 100 ran no longer"),
        Column("backlog", "BIGINT", "tasks", "ready at the end of the minute"),
        Column("running", "BIGINT", "deliveries", "under way at the end of the minute"),
        Column("oldest_ms", "BIGINT", "ms",
               "how long the oldest of the ready ones had waited by then, or by the newest event; null: none"),
    ],
    ["minute", "tenant", "command"],
)  # fmt: skip

_ERROR_GROUPS = Table(
    "error_groups", "gold", "A row for each kind of fault of a tenant and day. Sum over days for longer spans.",
    [
        _QUEUE[0],
        Column("fingerprint", "STRING", "", "the fault: the same for errors that differ only in ids, numbers and "
               "addresses"),
        Column("error_type", "STRING", "", "the class of what the handler raised"),
        Column("sample", "STRING", "", "the first line of the first of them"),
        Column("sample_id", "STRING", "", "the task of the first of them"),
        Column("commands", "ARRAY<STRING>", "", "the queues it was seen in, in order"),
        Column("count", "BIGINT", "deliveries", "that ended with it"),
        Column("tasks", "BIGINT", "tasks", "that had it"),
        Column("deaths", "BIGINT", "deliveries", "after which the task was dead"),
        Column("first_seen", "TIMESTAMP", "time", "the first that day"),
        Column("last_seen", "TIMESTAMP", "time", "the last that day"),
    ],
    ["tenant", "fingerprint"],
)  # fmt: skip

_WORKERS = Table(
    "workers", "gold", "A row for each worker, queue and day.",
    [
        *_QUEUE,
        Column("worker", "STRING", "", "its name"),
        Column("deliveries", "BIGINT", "deliveries", "that ended that day"),
        Column("completions", "BIGINT", "deliveries", "that completed their task"),
        Column("failures", "BIGINT", "deliveries", "that were retried or failed, lost leases apart"),
        Column("lost", "BIGINT", "deliveries", "whose lease ran out"),
        Column("releases", "BIGINT", "deliveries", "given back untouched"),
        Column("cancellations", "BIGINT", "deliveries", "cancelled under way"),
        Column("busy_ms", "BIGINT", "ms", "its deliveries' time within the day, added up"),
        Column("share", "DOUBLE", "0 to 1", "of the busy time of the queue that day; null: nothing was busy"),
        Column("first_seen", "TIMESTAMP", "time", "its first delivery that day, or the day's beginning"),
        Column("last_seen", "TIMESTAMP", "time", "the end of its last, or of the day, or of what the lake knows"),
    ],
    ["tenant", "command", "worker"],
)  # fmt: skip

_CAPACITY = Table(
    "capacity", "gold",
    "A row for each hour of a queue in which something became ready or ran: how many workers it needed. A worker here "
    "does one delivery at a time: a process with ten slots is ten.",
    [
        Column("hour", "TIMESTAMP", "time", "its beginning"),
        *_QUEUE,
        Column("span_s", "DOUBLE", "s", "how much of the hour the lake knows"),
        Column("arrivals", "BIGINT", "deliveries", "asked for: how often a task became ready"),
        Column("run_mean_ms", "DOUBLE", "ms", "the mean run of the deliveries that ended; null: none did"),
        Column("offered_load", "DOUBLE", "workers",
               "arrivals times mean run: how many would be busy all the time (Erlang); null: nothing ended"),
        Column("busy_ms", "BIGINT", "ms", "the deliveries' time within the hour, added up"),
        Column("workers_ran", "BIGINT", "workers", "the most that were busy at once; 0: nobody ran"),
        Column("utilisation", "DOUBLE", "0 to 1", "the busy time, of what those could have given; null: nobody ran"),
        Column("wait_p95_ms", "DOUBLE", "ms", "95 of 100 deliveries that began waited no longer; null: none did"),
        Column("target_wait_ms", "BIGINT", "ms", "the wait that is aimed at"),
        Column("target_share", "DOUBLE", "0 to 1", "for so many of the deliveries"),
        Column("workers_needed", "BIGINT", "workers", "for that, by Erlang C; null: nothing ended"),
    ],
    ["hour", "tenant", "command"],
)  # fmt: skip

_TENANTS = Table(
    "tenants", "gold", "A row for each tenant and day: who had what part of the work, and of the waiting.",
    [
        _QUEUE[0],
        Column("arrivals", "BIGINT", "tasks", "put in"),
        Column("deliveries", "BIGINT", "deliveries", "that ended"),
        Column("completions", "BIGINT", "deliveries", "that completed their task"),
        Column("failures", "BIGINT", "deliveries", "after which the task was dead"),
        Column("busy_ms", "BIGINT", "ms", "its deliveries' time within the day, added up"),
        Column("work_share", "DOUBLE", "0 to 1", "of all tenants' busy time; null: nothing was busy"),
        Column("wait_ms", "BIGINT", "ms", "the waits of the deliveries that began, added up"),
        Column("wait_mean_ms", "DOUBLE", "ms", "their mean; null: none began"),
        Column("wait_share", "DOUBLE", "0 to 1", "of all tenants' waits; null: nothing waited"),
    ],
    ["tenant"],
)  # fmt: skip

TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (_EVENTS, _ATTEMPTS, _TASKS, _QUEUE_MINUTES, _ERROR_GROUPS, _WORKERS, _CAPACITY, _TENANTS)
}
SILVER = [table.name for table in TABLES.values() if table.layer == "silver"]
GOLD = [table.name for table in TABLES.values() if table.layer == "gold"]
