"""The tasks that ended: how long they waited and ran, and which took longest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from dibs.history.report.queues import Queues
from dibs.history.report.source import Source, arrow_schema
from dibs.history.tables import TABLES

SLOWEST_MAX = 20
"""Of each queue, by each measure."""
PER_DOUBLING = 16
"""Durations are counted in classes, each 2^(1/16) as wide as the one before: 4.4 %."""
_CLASSES = 64 * PER_DOUBLING

_COLUMNS = (
    "tenant", "command", "id", "enqueued_at", "ended_at", "outcome", "deliveries", "wait_ms", "run_ms", "worker",
    "error_type",
)  # fmt: skip


class Spread(Struct, frozen=True):
    """How many tasks took how long: classes of duration, and how many are in each."""

    classes: list[int] = []
    counts: list[int] = []
    sum_ms: int = 0


class Task(Struct, frozen=True):
    """One of the slowest."""

    queue: int
    tenant: str
    command: str
    id: str
    enqueued_at: datetime | None
    ended_at: datetime
    outcome: str
    deliveries: int
    wait_ms: int
    run_ms: int
    worker: str | None
    error_type: str | None


class Ended(NamedTuple):
    """What the tasks that ended come to; spreads are by the queue's number."""

    waits: Sequence[Spread]
    runs: Sequence[Spread]
    longest_waits: Sequence[Task]
    longest_runs: Sequence[Task]


def ended(source: Source, queues: Queues, first: date, last: date) -> Ended:
    """Looks at each task that ended in those days once, and keeps a few."""
    waits, runs = _Measure("wait_ms", queues.size), _Measure("run_ms", queues.size)
    for batch in source.batches("tasks", _COLUMNS, first, last):
        numbered = queues.numbered(pa.Table.from_batches([batch]))
        waits.add(numbered)
        runs.add(numbered)
    return Ended(waits.spreads(), runs.spreads(), waits.longest(), runs.longest())


def percentile_ms(spreads: Sequence[Spread], share: float) -> float | None:
    """Returns what that share of the tasks took no longer than, to within 2.2 %; None: there are none."""
    counts = np.zeros(_CLASSES, np.int64)
    for spread in spreads:
        np.add.at(counts, spread.classes, spread.counts)
    total = counts.sum()
    if not total:
        return None
    found = int(np.searchsorted(np.cumsum(counts), share * total))
    return 0.0 if found == 0 else float(2 ** ((found + 0.5) / PER_DOUBLING) - 1)


class _Measure:
    """Counts one duration of all tasks, and keeps those with the longest."""

    def __init__(self, column: str, queues: int) -> None:
        self._column = column
        self._counts = np.zeros((queues, _CLASSES), np.int64)
        self._sums_ms = np.zeros(queues, np.int64)
        types = arrow_schema(TABLES["tasks"], _COLUMNS)
        self._kept: pa.Table = types.append(pa.field("queue", pa.int64())).empty_table()

    def add(self, rows: pa.Table) -> None:
        queues = rows["queue"].to_numpy()
        if not len(queues):
            return
        took_ms = self._durations_ms(rows)
        classes = np.floor(np.log2(took_ms + 1.0) * PER_DOUBLING).astype(np.int64)
        flat = np.bincount(queues * _CLASSES + classes, minlength=self._counts.size)
        self._counts += flat.reshape(self._counts.shape)
        np.add.at(self._sums_ms, queues, took_ms)
        self._kept = self._top(pa.concat_tables([self._kept, self._top(rows)]))

    def spreads(self) -> list[Spread]:
        return [
            Spread(np.nonzero(counts)[0].tolist(), counts[counts > 0].tolist(), int(sum_ms))
            for counts, sum_ms in zip(self._counts, self._sums_ms, strict=True)
        ]

    def longest(self) -> list[Task]:
        rows = self._kept.sort_by([(self._column, "descending"), ("id", "ascending")]).to_pylist()
        return [Task(**{**row, "wait_ms": row["wait_ms"] or 0, "run_ms": row["run_ms"] or 0}) for row in rows]

    def _top(self, rows: pa.Table) -> pa.Table:
        queues = rows["queue"].to_numpy()
        order = np.lexsort((-self._durations_ms(rows), queues))
        queues = queues[order]
        rank = np.arange(len(queues)) - np.searchsorted(queues, queues)
        return rows.take(pa.array(order[rank < SLOWEST_MAX]))

    def _durations_ms(self, rows: pa.Table) -> np.ndarray:
        known: np.ndarray = np.maximum(pc.fill_null(rows[self._column], 0).to_numpy(), 0)
        return known
