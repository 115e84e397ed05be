"""The columns of every view: their names, types and meaning, each said once.

Times are timestamps, from the store's clock; ids are the text that the command line and HTTP show. Spark and Arrow get
their schemas from here, and the documentation is tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dibs.spark.options import ReadOptions, View

#: Stands for the type that the option `payload` asks for.
ANY = "ANY"


class Column(NamedTuple):
    """A column of a view, in Spark's words."""

    name: str
    type: str
    doc: str


_WHOSE = (
    Column("tenant", "STRING", "whose task it is"),
    Column("id", "STRING", "the task's id"),
    Column("command", "STRING", "what kind of work it is; with the tenant, its queue"),
)
_KEY = Column("key", "STRING", "its deduplication key; null: none")
_ATTEMPTS = (
    Column("attempts", "INT", "deliveries so far"),
    Column("max_attempts", "INT", "deliveries before it becomes a dead letter"),
)
_PAYLOAD = (
    Column("payload", ANY, "what the handler gets; its form is the option `payload`"),
    Column("codec", "STRING", "how the payload is written: json, msgpack, raw or a registered name"),
)
_ERROR = (
    Column("reason", "STRING", "why it ended other than by completing, in one word"),
    Column("error_type", "STRING", "the class of what the handler raised last"),
    Column("error_message", "STRING", "its text"),
)
_TRACEBACK = Column("error_traceback", "STRING", "where it was raised")
_ENQUEUED = Column("enqueued_at", "TIMESTAMP", "when it was put in")
_ENDED = Column("ended_at", "TIMESTAMP", "when it ended; null: it has not")
_KEPT = Column("kept_until", "TIMESTAMP", "when its record may go; null: it has not ended")

COLUMNS: Mapping[View, Sequence[Column]] = {
    "tasks": (
        *_WHOSE,
        Column("status", "STRING", "PENDING, IN_PROGRESS, COMPLETED, FAILED or CANCELLED"),
        Column("place", "STRING", "ready, delayed, leased, dead or none"),
        Column("priority", "INT", "0 to 9, higher first"),
        *_ATTEMPTS,
        Column("releases", "INT", "how often it was given back untouched"),
        _KEY,
        *_PAYLOAD,
        _ENQUEUED,
        Column("due_at", "TIMESTAMP", "when it becomes, or last became, ready"),
        Column("expires_at", "TIMESTAMP", "not started by then, it ends cancelled; null: no deadline"),
        _ENDED,
        _KEPT,
        Column("worker", "STRING", "who holds it, or held it last"),
        Column("lease_end_at", "TIMESTAMP", "until when it is held; null: it is not"),
        Column("cancel_requested", "BOOLEAN", "its worker is being told to stop"),
        Column("progress", "STRUCT<done: DOUBLE, total: DOUBLE, note: STRING>", "how far it says it is"),
        *_ERROR,
        Column("timeout_s", "DOUBLE", "how long one run may take, in seconds"),
        Column("limit_key", "STRING", "whose limits it counts against"),
        Column("limit_cost", "INT", "for how much it counts there"),
        Column("traceparent", "STRING", "the producer's trace context"),
    ),
    "results": (
        *_WHOSE,
        _KEY,
        Column("status", "STRING", "COMPLETED, FAILED or CANCELLED"),
        Column("attempts", "INT", "deliveries it took"),
        Column("result", ANY, "what the handler returned; its form is the option `payload`; null: no result"),
        Column("codec", "STRING", "how the result is written; null: no result"),
        *_ERROR,
        _TRACEBACK,
        Column("worker", "STRING", "who had it last"),
        _ENQUEUED,
        _ENDED,
        _KEPT,
    ),
    "dead": (
        *_WHOSE,
        _KEY,
        Column("priority", "INT", "0 to 9, higher first"),
        *_ATTEMPTS,
        *_PAYLOAD,
        *_ERROR,
        _TRACEBACK,
        Column("fingerprint", "STRING", "the same for errors that differ only in ids, numbers and addresses"),
        Column("worker", "STRING", "who had it last"),
        _ENQUEUED,
        Column("ended_at", "TIMESTAMP", "when it died"),
        _KEPT,
    ),
    "events": (
        Column("shard", "INT", "which journal it is of; 0 where there is one"),
        Column("cursor", "BINARY", "its place in that journal: events of a shard sort by it, and no two share one"),
        Column("at", "TIMESTAMP", "when it happened"),
        Column("kind", "STRING", "enqueued, promoted, claimed, completed, retried, released, lease_expired, failed, "
               "cancelling, cancelled, replayed or purged"),
        *_WHOSE,
        Column("attempt", "INT", "the delivery it belongs to; 0: none yet"),
        Column("worker", "STRING", "who held the task; empty: nobody"),
        Column("reason", "STRING", "why, in one word: how it ended, `DELAYED` (enqueued, retried: it becomes ready "
               "later), `LIMIT` (promoted: there is room again); else empty"),
        Column("error_type", "STRING", "the class of what the handler raised; else empty"),
        Column("error_line", "STRING", "the first line of its text; else empty"),
        Column("fingerprint", "STRING", "the same for errors that differ only in ids, numbers and addresses"),
    ),
    "queues": (
        Column("tenant", "STRING", "whose queue it is"),
        Column("command", "STRING", "what kind of work it holds"),
        Column("ready", "BIGINT", "tasks that can be claimed now"),
        Column("delayed", "BIGINT", "tasks that wait for their time"),
        Column("leased", "BIGINT", "tasks in progress"),
        Column("dead", "BIGINT", "dead letters"),
        Column("bytes", "BIGINT", "payloads and results held"),
        Column("paused", "BOOLEAN", "nothing is claimed from it"),
        Column("oldest_ready_at", "TIMESTAMP", "since when the first of the ready tasks waits; null: none is ready"),
    ),
}  # fmt: skip


def ddl(options: ReadOptions) -> str:
    """Returns the schema of a view in Spark's words."""
    payload = {"string": "STRING", "binary": "BINARY"}.get(options.payload.lower(), f"STRUCT<{options.payload}>")
    return ", ".join(
        f"`{column.name}` {payload if column.type == ANY else column.type}" for column in COLUMNS[options.view]
    )
