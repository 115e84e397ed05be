"""The journal as a stream: every event once, whoever writes meanwhile, and whenever the query is stopped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dibs import settings
from dibs.spark.journal import EventRange
from dibs.spark.stream import share
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import Kind, NewTask, Settlement
from tests.spark.looking import look
from tests.spark.shop import all_events

pytestmark = pytest.mark.timeout(180)

LOOK_S = 0.05
PACE_S = 0.1
Seen = Counter[tuple[int, bytes]]


class Producer(threading.Thread):
    """Enqueues, claims and completes tasks of two tenants until it is told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._done = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        """The thread's own."""
        asyncio.run(self._produce())

    async def _produce(self) -> None:
        async with await open_store(self._url) as store:
            while not self._done.is_set():
                for tenant in ("acme", "default"):
                    await store.enqueue(tenant, [NewTask(command="fetch") for _ in range(6)])
                    leases = await store.claim(tenant, ["fetch"], limit=4)
                    await store.settle([
                        Settlement(tenant=tenant, id=lease.id, token=lease.token, kind=Kind.COMPLETE)
                        for lease in leases
                    ])  # fmt: skip
                self.rounds += 1
                await asyncio.sleep(PACE_S)

    def stop(self) -> None:
        """Ends it, and waits for that."""
        self._done.set()
        self.join()


@contextmanager
def producing(url: str) -> Iterator[Producer]:
    """A producer that runs."""
    producer = Producer(url)
    producer.start()
    try:
        yield producer
    finally:
        producer.stop()


def events(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    """The stream."""
    return spark.readStream.format("dibs").options(**{"url": url, "view": "events", "tenant": "*"} | options).load()


def start(frame: DataFrame, to: Path, **trigger: Any) -> StreamingQuery:
    """Writes a stream into files, with a checkpoint beside them."""
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(to / "checkpoint"))
    return writer.trigger(**trigger or {"processingTime": "0 seconds"}).start(str(to / "rows"))


def read_now(frame: DataFrame, to: Path) -> StreamingQuery:
    """Reads what is there, and ends."""
    query = start(frame, to, availableNow=True)
    assert query.awaitTermination(100)
    return query


def seen(spark: SparkSession, to: Path) -> Seen:
    """Which events a query has written, and how often."""
    found = spark.read.parquet(str(to / "rows")).select("shard", "cursor").collect()
    return Counter((row.shard, bytes(row.cursor)) for row in found)


def journal(url: str, tenant: str = "*") -> Seen:
    """Which events there are."""
    return Counter((shard, event.cursor) for shard, event in look(url, lambda store: all_events(store, tenant)))


@pytest.mark.parametrize("limit", [None, 300])
def test_every_event_once_while_producers_run(spark: SparkSession, tmp_path: Path, limit: int | None) -> None:
    """However often the query is stopped and started again from its checkpoint, in micro-batches of any size, over
    several shards."""
    url = f"shards:{tmp_path / 'store'}?n=3"
    options = {"rowsPerPartition": 1_000} | ({} if limit is None else {"maxEventsPerTrigger": limit})
    with producing(url) as producer:
        while not producer.rounds:
            time.sleep(LOOK_S)
        first = read_now(events(spark, url, **options), tmp_path)
        query = start(events(spark, url, **options), tmp_path)
        begun = producer.rounds
        while producer.rounds < begun + 5 or not any(one.numInputRows for one in query.recentProgress):
            time.sleep(LOOK_S)
        query.stop()
    last = read_now(events(spark, url, **options), tmp_path)
    assert seen(spark, tmp_path) == journal(url)
    if limit is not None:
        sizes = [one.numInputRows for query in (first, last) for one in query.recentProgress]
        assert 0 < max(sizes) <= limit


def test_one_tenants_events(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """A tenant's stream has its own events, and passes over the others."""
    with producing(url) as producer:
        while producer.rounds < 5:
            time.sleep(LOOK_S)
    read_now(events(spark, url, tenant="acme", maxEventsPerTrigger=100), tmp_path)
    assert seen(spark, tmp_path) == journal(url, "acme")
    read_now(events(spark, url, kind="claimed,completed"), tmp_path / "kinds")
    some = look(url, all_events)
    assert seen(spark, tmp_path / "kinds") == Counter(
        (shard, event.cursor) for shard, event in some if event.kind in ("claimed", "completed")
    )


def enqueue(url: str, count: int = 3) -> None:
    """Makes some events."""
    look(url, lambda store: store.enqueue("default", [NewTask(command="fetch") for _ in range(count)]))


def test_from_now_on(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """`latest` begins with what comes after the query's first start."""
    enqueue(url)
    old = journal(url)
    frame = events(spark, url, startingPosition="latest")
    read_now(frame, tmp_path)
    enqueue(url)
    read_now(frame, tmp_path)
    assert seen(spark, tmp_path) == journal(url) - old


def test_what_is_there_is_what_was_there_at_the_start(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """`availableNow` ends, although each of its micro-batches makes new events."""
    enqueue(url, 5)
    before = journal(url)

    def more(frame: DataFrame, _: int) -> None:
        enqueue(url)
        frame.write.mode("append").parquet(str(tmp_path / "rows"))

    writer = events(spark, url, maxEventsPerTrigger=2).writeStream.foreachBatch(more)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(100)
    assert seen(spark, tmp_path) == before


# ------------------------------------------------------------------------------------------------------ what is lost


def trim(url: str) -> None:
    """Lets the journal go, but for its newest entry."""

    async def swept() -> None:
        small = settings.load({"url": url, "journal_max_bytes": 1})
        async with await open_store(url, settings=small) as store:
            await store.sweep()
            await store.enqueue("default", [NewTask(command="after")])

    asyncio.run(swept())


def replace(url: str) -> None:
    """Puts a new store where one was."""
    path = Path(url.removeprefix("lmdb:"))
    path.rename(path.with_name("old"))
    enqueue(url, 2)


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (trim, "JournalTrimmed: events were trimmed from the journal before this query read them"),
        (replace, "JournalReset: the checkpoint is of another store than the one at url"),
    ],
    ids=["trimmed", "replaced"],
)
def test_lost_events_are_told(spark: SparkSession, tmp_path: Path, lose: Any, said: str) -> None:
    """The query stops and says which option lets it go on; with that, it has everything that is kept, once."""
    url = f"lmdb:{tmp_path / 'store'}"
    enqueue(url)
    read_now(events(spark, url), tmp_path)
    before = seen(spark, tmp_path)
    enqueue(url)
    lose(url)
    query = start(events(spark, url), tmp_path, availableNow=True)
    with pytest.raises(StreamingQueryException) as error:
        query.awaitTermination(100)
    assert said in str(error.value)
    assert "set .option('failOnDataLoss', 'false')" in str(error.value)
    read_now(events(spark, url, failOnDataLoss=False), tmp_path)
    kept = journal(url)
    assert kept
    assert seen(spark, tmp_path) == before + kept


def test_only_events_are_a_stream(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """A query of another view ends, and says so."""
    query = start(events(spark, url, view="tasks"), tmp_path)
    with pytest.raises(StreamingQueryException) as error:
        query.awaitTermination(100)
    assert "tasks cannot be read as a stream: use .option('view', 'events')" in str(error.value)


# ------------------------------------------------------------------------------------------------------------ shares


async def test_shards_share_a_limit(tmp_path: Path) -> None:
    """Each gets the same, what one has no use for is the others', and no more than the limit in all."""
    async with await open_store(f"shards:{tmp_path / 'store'}?n=3") as store:
        await store.enqueue("default", [NewTask(command="fetch", key=str(n)) for n in range(300)])
        ranges = [EventRange(one.shard, one.oldest, one.newest) for one in await store.journal_bounds()]
        sizes = [await _size(store, one) for one in ranges]
        assert sum(sizes) == 300
        for limit in (1, 2, 3, 30, 250, 300, 1_000):
            reached = await share(store, "*", ranges, limit)
            shares = [await _size(store, EventRange(one.shard, one.after, reached[one.shard])) for one in ranges]
            assert sum(shares) == min(limit, 300)
            assert all(got == size or got >= limit // 3 for got, size in zip(shares, sizes, strict=True))


async def _size(store: Store, one: EventRange) -> int:
    if one.after == one.until:
        return 0
    page = await store.runs("*", shard=one.shard, after=one.after, until=one.until)
    return sum(run.count() for run in page.runs)
