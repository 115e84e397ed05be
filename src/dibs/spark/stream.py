"""Reading the journal as a stream: every event once, in micro-batches, from a checkpoint on.

An offset is a cursor for each shard, ``{"shards": {"0": "9fdc…"}}``: that of the last event that was read. What lies
between two offsets never changes, so a micro-batch that is run again has the same rows, and the next begins right after
it. The set of shards is fixed when a store is made.

The stream is no named reader of the journal: Spark does not tell a source which query reads it, and a query that is
given up would hold back trimming for ever. The journal's retention is what a stopped query can be away for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from dibs.errors import JournalError, JournalReset, JournalTrimmed
from dibs.spark import journal
from dibs.spark.columns import arrow_schema, check_schema, event_batch
from dibs.spark.connection import ask
from dibs.spark.journal import EventRange
from dibs.spark.options import StreamReadOptions
from dibs.spark.wanted import asked
from dibs.stores.protocol import Store
from dibs.task import RUNS_MAX, JournalBounds

log = logging.getLogger("dibs")

Cursors = dict[int, bytes]


class EventStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads events as they come. It travels to executors: must be picklable."""

    def __init__(self, options: StreamReadOptions, schema: StructType) -> None:
        check_schema(options, schema)
        self._options = options
        self._schema = schema
        self._wanted = asked(options)
        self._target: Cursors | None = None
        self._turn = 0

    # ----------------------------------------------------------------------------------------------- on the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        earliest = self._options.starting_position == "earliest"
        return _offset({bounds.shard: bounds.oldest if earliest else bounds.newest for bounds in self._bounds()})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 Spark's name
        limit = self._options.max_events_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 Spark's name
        self._target = {bounds.shard: bounds.newest for bounds in self._bounds()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 Spark's name
        begin = self._begin(_cursors(start))
        ends = self._target or {bounds.shard: bounds.newest for bounds in self._bounds()}
        ranges = [EventRange(shard, after, ends[shard]) for shard, after in begin.items() if after < ends[shard]]
        if isinstance(limit, ReadMaxRows):
            self._turn += 1
            ranges = _rotated(ranges, self._turn)
            tenant, count = self._options.tenant, limit.max_rows
            reached = ask(self._options.url, lambda store: share(store, tenant, ranges, count))
        else:
            reached = {one.shard: one.until for one in ranges}
        return _offset(begin | reached)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        return _offset({bounds.shard: bounds.newest for bounds in self._bounds()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, ends = self._begin(_cursors(start)), _cursors(end)
        store_ends = {bounds.shard: bounds.newest for bounds in self._bounds()}
        # An end beyond the newest event is one of a store that is not there any more.
        ranges = [
            EventRange(shard, after, ends[shard])
            for shard, after in begin.items()
            if after < ends.get(shard, b"") <= store_ends[shard]
        ]
        options, wanted = self._options, self._wanted

        async def cut(store: Store) -> list[EventRange]:
            return [
                part
                for one in ranges
                for part in await journal.cut(store, options.tenant, one, options.rows_per_partition, wanted)
            ]

        return [InputPartition(one) for one in ask(options.url, cut)]

    def _bounds(self) -> Sequence[JournalBounds]:
        return ask(self._options.url, lambda store: store.journal_bounds())

    def _begin(self, start: Cursors) -> Cursors:
        """Returns where to go on: from `start`, or, where that is lost and may be, from the oldest event."""
        bounds = self._bounds()
        if {one.shard for one in bounds} != set(start):
            self._lose(JournalReset("the checkpoint is of a store with other shards"))
            return {one.shard: one.oldest for one in bounds}
        return {one.shard: self._kept(one, start[one.shard]) for one in bounds}

    def _kept(self, bounds: JournalBounds, cursor: bytes) -> bytes:
        async def look(store: Store) -> None:
            await store.runs(self._options.tenant, shard=bounds.shard, after=cursor, limit=1)

        try:
            ask(self._options.url, look)
        except JournalError as error:
            self._lose(error)
            return bounds.oldest
        return cursor

    def _lose(self, error: JournalError) -> None:
        """Stops the query, or says that it goes on without what is lost."""
        what = (
            "events were trimmed from the journal before this query read them"
            if isinstance(error, JournalTrimmed)
            else "the checkpoint is of another store than the one at url, or of the one this was restored from"
        )
        if self._options.fail_on_data_loss:
            raise type(error)(
                f"{what}: to go on from the oldest event that is kept, set .option('failOnDataLoss', 'false')"
            ) from error
        log.warning("%s: going on from the oldest event that is kept", what)

    # ------------------------------------------------------------------------------------------------ on executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        one: EventRange = partition.value
        schema, options = arrow_schema(self._schema), self._options
        while True:
            try:
                for runs in journal.pages(options.url, options.tenant, one, self._wanted):
                    yield event_batch(one.shard, runs, schema)
                return
            except JournalTrimmed as error:
                self._lose(error)
            # Trimmed since the plan was made: what is left of the range follows what was trimmed.
            oldest = next(bounds.oldest for bounds in self._bounds() if bounds.shard == one.shard)
            if oldest >= one.until:
                return
            one = EventRange(one.shard, oldest, one.until)


async def share(store: Store, tenant: str, ranges: Sequence[EventRange], count: int) -> Cursors:
    """Returns how far each range can be read for at most `count` events of all together: each has the same share, and
    what one has no use for is the others'."""
    reached = {one.shard: one.after for one in ranges}
    left = list(ranges)
    while left and count:
        part = max(1, count // len(left))
        more: list[EventRange] = []
        for one in left:
            if not count:
                break
            limit = min(part, count, RUNS_MAX)
            page = await store.runs(tenant, shard=one.shard, after=reached[one.shard], until=one.until, limit=limit)
            count -= sum(run.count() for run in page.runs)
            reached[one.shard] = (page.cursor or one.until) if page.more else one.until
            if page.more:
                more.append(one)
        left = more
    return reached


def _rotated(ranges: list[EventRange], turn: int) -> list[EventRange]:
    """Each shard is first in its turn: a limit lower than their number must not always be the same shard's."""
    first = turn % len(ranges) if ranges else 0
    return ranges[first:] + ranges[:first]


def _offset(cursors: Mapping[int, bytes]) -> dict[str, Any]:
    return {"shards": {str(shard): cursors[shard].hex() for shard in sorted(cursors)}}


def _cursors(offset: Mapping[str, Any]) -> Cursors:
    return {int(shard): bytes.fromhex(cursor) for shard, cursor in offset["shards"].items()}
