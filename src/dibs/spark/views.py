"""Reading a view as a batch: planned on the driver, read by executors, as Arrow batches.

======== ========================================================== ==================================================
view     what one Spark task reads                                  what a moving store does to it
======== ========================================================== ==================================================
tasks    a range of ids; of one status, the tasks of that status    each task at most once, as it stood when it was
results  in some queues, where they are few enough to remember      read; what began to match, or was enqueued, after
dead     which were read                                            the plan was made may be there or not
events   a range of a shard's journal                               what was there when the plan was made, once
queues   all of them                                                each tenant's counts as of its moment
======== ========================================================== ==================================================

Spark plans a DataFrame that was loaded once: whoever looks again at what has come since, loads it again. Where it hands
filters over, it also keeps them: a query that has others, or none, and even another part of the same query, is given
the rows of the filters that were handed over last. So none is taken unless the option `pushFilters` says that this
cannot happen; the options `command`, `status`, `kind`, `since` and `until` narrow a read without it.

Readers travel to executors: they hold options, the schema and what is wanted, and are picklable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from msgspec import Struct
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from dibs.checks import ALL_TENANTS
from dibs.errors import JournalTrimmed
from dibs.spark import journal
from dibs.spark.columns import TaskColumns, arrow_schema, batches, check_schema, event_batch, queue_batch
from dibs.spark.connection import ask
from dibs.spark.journal import EventRange
from dibs.spark.options import ReadOptions
from dibs.spark.wanted import Wanted, asked
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Page, Place, QueueStats, Stats, Status, Task

BATCH_ROWS = 10_000
BATCH_BYTES = 8 << 20
REMEMBERED_MAX = 200_000
"""A place of a queue is listed as such up to so many tasks: their ids are remembered while it is read, because a task
may leave it and come back."""
SMALL_TENANTS = 16
"""So many tenants of unknown size, each smaller than a partition, share one."""

#: The places where tasks of a status stand, in the order in which they move from one to the next.
_PLACES = {
    Status.PENDING: (Place.DELAYED, Place.READY),
    Status.IN_PROGRESS: (Place.LEASED,),
    Status.FAILED: (Place.DEAD,),
}


class Scan(Struct, frozen=True):
    """Tasks of one tenant: those in some places of a queue, those with some ids, or those in a range of ids."""

    tenant: str
    weight: int
    """About how many they are."""
    command: str = ""
    places: tuple[Place, ...] = ()
    ids: tuple[bytes, ...] = ()
    id_from: bytes | None = None
    id_until: bytes | None = None


class ViewReader(DataSourceReader):
    """Reads a view, with the filters that Spark hands over kept exactly, as far as they are taken."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(options, schema)
        self._options = options
        self._schema = schema
        self._wanted = asked(options)

    @property
    def pushFilters(self) -> Callable[[list[Filter]], Iterable[Filter]]:  # noqa: N802 Spark's name
        """Takes the filters that it keeps, if that is asked for; returns the others."""
        return self._take if self._options.push_filters else _Refusing()

    def _take(self, filters: list[Filter]) -> Iterator[Filter]:
        for one in filters:
            narrowed = self._wanted.with_filter(self._options.view, one)
            if narrowed is None:
                yield one
            else:
                self._wanted = narrowed

    def partitions(self) -> Sequence[InputPartition]:
        if self._wanted.nothing():
            return []
        options, wanted = self._options, self._wanted
        if options.view == "events":
            ranges = ask(options.url, lambda store: plan_events(store, options, wanted))
            return [InputPartition([one]) for one in ranges]
        if options.view == "queues":
            return [InputPartition([])]
        scans = ask(options.url, lambda store: plan_tasks(store, options, wanted))
        return [InputPartition(some) for some in _packed(scans, options.rows_per_partition)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's own, where there is none of ours
            return
        if self._options.view == "events":
            yield from self._read_events(partition.value)
        elif self._options.view == "queues":
            yield from self._read_queues()
        else:
            yield from self._read_tasks(partition.value)

    def _read_events(self, ranges: Sequence[EventRange]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(self._schema)
        for one in ranges:
            try:
                for runs in journal.pages(self._options.url, self._options.tenant, one, self._wanted):
                    yield event_batch(one.shard, runs, schema)
            except JournalTrimmed as error:
                raise JournalTrimmed("the journal was trimmed while it was read: read it again") from error

    def _read_tasks(self, scans: Sequence[Scan]) -> Iterator[pa.RecordBatch]:
        columns = TaskColumns(self._options.view, self._schema)
        pages = (tasks for scan in scans for tasks in self._tasks(scan))
        for tasks in batches(pages, BATCH_ROWS, BATCH_BYTES):
            yield columns.batch(tasks)

    def _tasks(self, scan: Scan) -> Iterator[list[Task]]:
        url, wanted = self._options.url, self._wanted
        if scan.ids:
            found = ask(url, lambda store: store.get(scan.tenant, scan.ids))
            yield [task for task in wanted.tasks_by_id(found) if wanted.allows("id", task.id)]
            return
        if not scan.places:
            for page in _pages(url, scan.tenant, wanted.which(id_from=scan.id_from, id_until=scan.id_until)):
                yield wanted.tasks(page)
            return
        seen: set[bytes] = set()
        for place in scan.places:
            for page in _pages(url, scan.tenant, wanted.which(queue=(scan.command, place))):
                tasks = [task for task in wanted.tasks(page) if task.id not in seen]
                seen.update(task.id for task in tasks)
                yield tasks

    def _read_queues(self) -> Iterator[pa.RecordBatch]:
        schema, wanted = arrow_schema(self._schema), self._wanted
        for tenant in ask(self._options.url, lambda store: tenants(store, self._options.tenant, wanted)):

            async def stats(store: Store, name: str = tenant) -> Stats:
                return await store.stats(name)

            queues = [
                queue for queue in ask(self._options.url, stats).queues if wanted.allows("command", queue.command)
            ]
            if queues:
                yield queue_batch(tenant, queues, schema)


class _Refusing:
    """A `pushFilters` that takes none, and that Spark takes for its own: it would refuse to read from a source that
    brings one where its switch is off, as it is unless somebody puts it on."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return filters


def _pages(url: str, tenant: str, which: Any) -> Iterator[list[Task]]:
    cursor: str | None = None
    while True:

        async def next_page(store: Store, after: str | None = cursor) -> Page:
            return await store.list(tenant, which, cursor=after, limit=BATCH_MAX)

        page = ask(url, next_page)
        yield page.tasks
        cursor = page.cursor
        if cursor is None:
            return


# --------------------------------------------------------------------------------------------- planning, on the driver


async def tenants(store: Store, tenant: str, wanted: Wanted) -> list[str]:
    """Returns whose rows are read."""
    if tenant != ALL_TENANTS:
        return [tenant] if wanted.allows("tenant", tenant) else []
    names: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.tenants(cursor=cursor, limit=BATCH_MAX)
        names += [name for name in page.tenants if wanted.allows("tenant", name)]
        cursor = page.cursor
        if cursor is None:
            return names


async def plan_events(store: Store, options: ReadOptions, wanted: Wanted) -> list[EventRange]:
    """Returns ranges that hold the events that are there now and wanted."""
    if options.tenant != ALL_TENANTS and not wanted.allows("tenant", options.tenant):
        return []
    ranges: list[EventRange] = []
    for bounds in await store.journal_bounds():
        if wanted.allows("shard", bounds.shard):
            whole = EventRange(bounds.shard, bounds.oldest, bounds.newest)
            ranges += await journal.cut(store, options.tenant, whole, options.rows_per_partition, wanted)
    return ranges


async def plan_tasks(store: Store, options: ReadOptions, wanted: Wanted) -> list[Scan]:
    """Returns scans that find all tasks that are wanted, none of them in two scans."""
    scans: list[Scan] = []
    for tenant in await tenants(store, options.tenant, wanted):
        found = _by_ids(tenant, wanted) or await _by_places(store, tenant, wanted)
        scans += await _by_ranges(store, tenant, options) if found is None else found
    return scans


def _by_ids(tenant: str, wanted: Wanted) -> list[Scan] | None:
    ids = sorted(wanted.words.get("id", ()))
    if not ids:
        return None
    return [
        Scan(tenant, min(BATCH_MAX, len(ids) - first), ids=tuple(ids[first : first + BATCH_MAX]))
        for first in range(0, len(ids), BATCH_MAX)
    ]


async def _by_places(store: Store, tenant: str, wanted: Wanted) -> list[Scan] | None:
    """Returns one scan for each queue with tasks of the one status that is wanted; None: there are too many."""
    places = _PLACES.get(wanted.only("status"), ())
    if not places or "place" in wanted.words:
        return None
    scans: list[Scan] = []
    commands = sorted(wanted.words.get("command", ()))
    for queue in (await store.stats(tenant, commands if 0 < len(commands) <= BATCH_MAX else None)).queues:
        count = sum(_count(queue, place) for place in places)
        if count and wanted.allows("command", queue.command):
            scans.append(Scan(tenant, count, command=queue.command, places=places))
    return scans if all(scan.weight <= REMEMBERED_MAX for scan in scans) else None


def _count(queue: QueueStats, place: Place) -> int:
    count: int = getattr(queue, place.value)
    return count


async def _by_ranges(store: Store, tenant: str, options: ReadOptions) -> list[Scan]:
    marks: list[bytes] = []
    after: bytes | None = None
    while True:
        found = await store.marks(tenant, every=options.rows_per_partition, after=after)
        marks += found.ids
        after = found.cursor
        if after is None:
            break
    if not marks:
        return [Scan(tenant, max(1, options.rows_per_partition // SMALL_TENANTS))]
    bounds = [None, *marks, None]
    return [
        Scan(tenant, options.rows_per_partition, id_from=first, id_until=until) for first, until in pairwise(bounds)
    ]


def _packed(scans: Sequence[Scan], weight_max: int) -> list[list[Scan]]:
    """Puts scans together, in order, as long as they are not too many tasks for one Spark task."""
    packs: list[list[Scan]] = []
    weight = weight_max
    for scan in scans:
        if weight + scan.weight > weight_max:
            packs.append([])
            weight = 0
        packs[-1].append(scan)
        weight += scan.weight
    return packs
