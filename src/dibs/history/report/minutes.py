"""Minutes of queues, joined to longer steps where the span is long: a page can be read, and has a size."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from dibs.history.report.queues import Queues
from dibs.history.report.source import Source, arrow_schema
from dibs.history.tables import TABLES

STEPS_S = (60, 300, 3600, 86_400)
POINTS_MAX = 2_304
"""Of one line: eight days of five minutes."""
ROWS_MAX = 30_000
"""Points of all queues together."""

SUMMED = (
    "arrivals", "claims", "completions", "failures", "retries", "expiries", "releases", "cancellations", "replays",
)  # fmt: skip
HIGHEST = (
    "backlog", "running", "oldest_ms",
    "wait_p50_ms", "wait_p95_ms", "wait_p99_ms", "run_p50_ms", "run_p95_ms", "run_p99_ms",
)  # fmt: skip
SHOWN = ("arrivals", "completions", "failures", "retries", "expiries", *HIGHEST)


class Totals(Struct, frozen=True):
    """What happened in a queue in the whole span, as :mod:`dibs.history.tables` has it for a minute."""

    arrivals: int = 0
    claims: int = 0
    completions: int = 0
    failures: int = 0
    retries: int = 0
    expiries: int = 0
    releases: int = 0
    cancellations: int = 0
    replays: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in SUMMED))


class End(Struct, frozen=True):
    """How a queue stood at the end of the span."""

    backlog: int = 0
    running: int = 0
    oldest_ms: int | None = None


class Minutes(NamedTuple):
    """What the minutes of all queues come to; each list is by the queue's number."""

    step_s: int
    totals: Sequence[Totals]
    ends: Sequence[End]
    series: Sequence[dict[str, list[int | None]]]
    """Columns: `at`, the step's number, and :data:`SHOWN`. Steps in which nothing happened are left out."""


def joined(source: Source, queues: Queues, first: date, begin: datetime, end: datetime) -> Minutes:
    """Joins the minutes from `begin` to `end`. Counts are added up; of everything else the highest is taken."""
    step_s = _step_s(end - begin)
    start = datetime.combine(first, datetime.min.time(), begin.tzinfo)
    days = [first + timedelta(days=day) for day in range((end.date() - first).days + 1)]
    table = pa.concat_tables([_day(source, queues, day, start, step_s) for day in days])
    while table.num_rows > ROWS_MAX and step_s != STEPS_S[-1]:
        longer_s = STEPS_S[STEPS_S.index(step_s) + 1]
        steps = pa.array(table["at"].to_numpy() // (longer_s // step_s))
        table = _grouped(table.set_column(table.schema.get_field_index("at"), "at", steps))
        step_s = longer_s
    table = table.sort_by([("queue", "ascending"), ("at", "ascending")])
    totals, series = [], []
    for number in range(queues.size):
        own = table.filter(pc.equal(table["queue"], number))
        totals.append(Totals(*(pc.sum(own[name]).as_py() or 0 for name in SUMMED)))
        series.append({name: _whole(own[name]) for name in ("at", *SHOWN)})
    return Minutes(step_s, totals, _ends(source, queues, end), series)


def _day(source: Source, queues: Queues, day: date, start: datetime, step_s: int) -> pa.Table:
    columns = ["minute", "tenant", "command", *SUMMED, *HIGHEST]
    batches = source.batches("queue_minutes", columns, day, day)
    rows = pa.Table.from_batches(batches, arrow_schema(TABLES["queue_minutes"], columns))
    minutes_us = rows["minute"].cast(pa.int64()).to_numpy()
    steps = (minutes_us // 1_000_000 - int(start.timestamp())) // step_s
    return _grouped(queues.numbered(rows.append_column("at", pa.array(steps, pa.int64()))))


def _grouped(rows: pa.Table) -> pa.Table:
    sums = [(name, "sum") for name in SUMMED]
    highest = [(name, "max") for name in HIGHEST]
    grouped = rows.group_by(["queue", "at"]).aggregate(sums + highest)
    return grouped.rename_columns([name.removesuffix("_sum").removesuffix("_max") for name in grouped.column_names])


def _ends(source: Source, queues: Queues, end: datetime) -> list[End]:
    """The minute in which the span ends has a row for every queue in which something waits or runs."""
    last = (end - timedelta(microseconds=1)).replace(second=0, microsecond=0)
    ends = [End()] * queues.size
    columns = ["minute", "tenant", "command", "backlog", "running", "oldest_ms"]
    for batch in source.batches("queue_minutes", columns, last.date(), last.date()):
        rows = batch.filter(pc.equal(batch["minute"], pa.scalar(last, pa.timestamp("us", "UTC"))))
        for row in queues.numbered(pa.Table.from_batches([rows])).to_pylist():
            before = ends[row["queue"]]
            ends[row["queue"]] = End(
                before.backlog + row["backlog"],
                before.running + row["running"],
                max(before.oldest_ms or 0, row["oldest_ms"] or 0) or None,
            )
    return ends


def _step_s(span: timedelta) -> int:
    return next((step for step in STEPS_S if span.total_seconds() / step <= POINTS_MAX), STEPS_S[-1])


def _whole(column: pa.ChunkedArray) -> list[int | None]:
    if pa.types.is_floating(column.type):
        column = pc.round(column).cast(pa.int64())
    return list(column.to_pylist())
