"""Writing: rows become tasks exactly once. Executors stage chunks, the driver commits those of the successful attempts.

==========  ======================================================================================================
driver      reads options and columns, makes the store where there is none, names the load
executors   stage their rows: nobody sees them, and each attempt has chunks of its own
driver      one commit names the chunks of the attempts that Spark counts, and makes them visible together; what
            others staged is never named, and forgotten after a day
==========  ======================================================================================================

The name of a load and its seq count once. A batch has a name of its own unless it is given one, and seq 0; a stream has
the id of its query, or the option `appId`, and the number of the micro-batch.

Writers and messages must be picklable: they travel between the driver, its Python processes and the executors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from msgspec import Struct
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from dibs.errors import DibsError, InvalidOption
from dibs.spark.aside import Aside, BadRows
from dibs.spark.connection import ask, itself
from dibs.spark.options import WriteOptions
from dibs.spark.rows import Plan, Tasks, parts, plan
from dibs.stores.loading import UNNAMED_KEEP_S, Load, asking, is_committed, new_name
from dibs.stores.protocol import Store
from dibs.task import CHUNKS_MAX, Committed, Rows

log = logging.getLogger("dibs")

#: Where Spark tells a task which streaming query it is of.
QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one attempt staged: the driver's to commit or to drop."""

    load: str
    partition: int
    chunk_ids: Sequence[bytes]
    rows: int
    bad_rows: int = 0
    bad_file: str | None = None
    """The file, not yet read by anybody, that has its bad rows."""


class Loading(Struct, frozen=True):
    """What both kinds of writers do with rows and messages."""

    url: str
    plan: Plan
    aside: Aside | None

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType) -> Loading:
        """Checks everything that can be known before a row is seen, the store included, which is made if need be."""
        loading = cls(options.url, plan(options, schema), Aside.of(options.bad_rows))
        ask(options.url, itself, create=True)
        return loading

    def stage(self, batches: Iterator[pa.RecordBatch], load: str) -> Written:
        """Stages the rows of a partition. An attempt that fails takes back what it did."""
        partition = _context().partitionId()
        store = ask(self.url, itself)
        staging = Load(asking(store), self.plan.tenant)
        tasks, bad_rows, count = Tasks(self.plan, store.limits), BadRows(self.aside, load, partition), 0
        try:
            for part in parts(batches):
                made = tasks.made_of(part)
                if made.bad:
                    bad_rows.put(part, count, made.bad)
                for chunk in made.chunks:
                    self._stage(staging, chunk)
                count += part.num_rows
            chunk_ids = ask(self.url, lambda _: staging.staged())
            bad_rows.close()
        except BaseException:
            bad_rows.remove()
            with contextlib.suppress(DibsError):
                ask(self.url, lambda _: staging.drop())
            raise
        return Written(load, partition, chunk_ids, staging.rows, bad_rows.count, bad_rows.name)

    def _stage(self, staging: Load, chunk: Rows) -> None:
        ask(self.url, lambda _: staging.stage(chunk))

    def commit(self, load: str, seq: int, written: Sequence[Written], forget_s: float | None = None) -> Committed:
        """Makes what the attempts staged visible, all of it at once, unless this load had come so far before."""
        chunk_ids = [chunk_id for one in written for chunk_id in one.chunk_ids]
        if len(chunk_ids) > CHUNKS_MAX:
            raise InvalidOption(
                f"one write has at most {CHUNKS_MAX:,} chunks, and this one {len(chunk_ids):,}: write it in several "
                "parts, or in fewer and larger partitions (df.coalesce), which have up to 1,000 rows or 1 MiB a chunk"
            )
        tenant = self.plan.tenant
        if self.aside is not None:
            if ask(self.url, lambda store: is_committed(store, tenant, load, seq)):
                # What was set aside then is still to be mended, whatever has come of these rows now.
                return self._done_before(load, seq, written)
            self.aside.publish(load, seq, {one.partition: one.bad_file for one in written if one.bad_file is not None})
        if not chunk_ids:
            return Committed(0)
        done = ask(self.url, lambda store: store.commit_load(tenant, load, seq, chunk_ids, forget_s=forget_s))
        return self._done_before(load, seq, written) if done.already else done

    def _done_before(self, load: str, seq: int, written: Sequence[Written]) -> Committed:
        log.warning("load %s was committed before (seq %d): nothing was enqueued", load, seq)
        self.abort(written)
        return Committed(0, already=True)

    def abort(self, written: Sequence[Written]) -> None:
        """Forgets what the attempts staged."""
        if self.aside is not None:
            self.aside.remove(one.bad_file for one in written if one.bad_file is not None)
        self._drop([chunk_id for one in written for chunk_id in one.chunk_ids])

    def _drop(self, chunk_ids: Sequence[bytes]) -> None:
        """What is not dropped is forgotten after a day, so that a store that cannot is no reason to fail."""
        with contextlib.suppress(DibsError):
            ask(self.url, lambda store: _dropped(store, self.plan.tenant, chunk_ids))


class LoadWriter(DataSourceArrowWriter):
    """A batch write: the rows of a DataFrame become tasks, all at once, or none of them."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        if options.app_id is not None:
            raise InvalidOption("option appId names the load of a stream: a batch has .option('load', …)")
        self._loading = Loading.of(options, schema)
        self._forget_s = UNNAMED_KEEP_S if options.load is None else None
        self.load = options.load or new_name()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """On an executor: stages the rows of a partition."""
        return self._loading.stage(iterator, self.load)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: makes the rows visible."""
        self._loading.commit(self.load, 0, _in_order(messages), self._forget_s)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: forgets what was staged."""
        self._loading.abort(_in_order(messages))


class StreamLoadWriter(DataSourceStreamArrowWriter):
    """A stream write: the rows of a micro-batch become tasks once, however often Spark repeats it."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        if options.load is not None:
            raise InvalidOption("option load names the load of a batch: a stream has .option('appId', …)")
        self._loading = Loading.of(options, schema)
        self._app_id = options.app_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """On an executor: stages the rows of a partition."""
        load = self._app_id or _context().getLocalProperty(QUERY_ID)
        if not load:
            raise InvalidOption("Spark does not tell the id of this streaming query: name it by .option('appId', …)")
        return self._loading.stage(iterator, load)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """On the driver: makes the rows visible, unless this batch was committed before."""
        written = _in_order(messages)
        if written:
            self._loading.commit(written[0].load, batchId, written)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """On the driver: forgets what was staged."""
        self._loading.abort(_in_order(messages))


async def _dropped(store: Store, tenant: str, chunk_ids: Sequence[bytes]) -> None:
    for start in range(0, len(chunk_ids), CHUNKS_MAX):
        await store.drop(tenant, chunk_ids[start : start + CHUNKS_MAX])


def _in_order(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """Returns what the successful attempts told, by partition: so the tasks are in the order of the rows."""
    return sorted((one for one in messages if isinstance(one, Written)), key=lambda one: one.partition)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "rows are written by Spark's tasks"
    return context
