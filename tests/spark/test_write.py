"""DataFrames written to a queue: batches, streams, bad rows and actions, in one Spark session."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from dibs.ids import id_to_text
from dibs.spark import register
from dibs.spark.connection import ask, itself
from dibs.task import BATCH_MAX, Kind, NewTask, Place, Settlement, Status
from tests.server.running import ServerProcess
from tests.spark.looking import look, seen, staged_chunks, tasks, values


def write(rows: DataFrame, url: str, **options: Any) -> None:
    """Writes rows as a batch, to the queue `fetch` unless that is said."""
    said = {"url": url} | ({} if "action" in options else {"command": "fetch"}) | options
    rows.write.format("dibs").options(**said).mode("append").save()


def refused(rows: DataFrame, url: str, **options: Any) -> str:
    """What Spark tells of a write that fails."""
    with pytest.raises(Exception) as error:  # noqa: PT011 what class it is depends on where it fails
        write(rows, url, **options)
    return str(error.value)


def test_rows_become_tasks(spark: SparkSession, url: str) -> None:
    """Each row once, in the order of partitions, over several chunks and partitions, with the options' options."""
    write(spark.range(5003, numPartitions=3).selectExpr("id AS n"), url, priority=4, maxAttempts=2, tenant="acme")
    found = tasks(url, "acme")
    assert Counter(value["n"] for value in values(url, "acme")) == Counter(range(5003))
    assert {(task.command, task.priority, task.max_attempts, task.place) for task in found} == {
        ("fetch", 4, 2, Place.READY)
    }

    async def first(store: Any) -> list[bytes]:
        return [lease.payload for lease in await store.claim("acme", ["fetch"], limit=BATCH_MAX)]

    assert look(url, first) == [b'{"n":%d}' % n for n in range(BATCH_MAX)]
    assert staged_chunks(url, "acme") == 0


def test_columns_say_how_a_row_is_enqueued(spark: SparkSession, url: str) -> None:
    """Spark's own types arrive as what they mean, times in the zone of the session included."""
    write(
        spark.sql("""
            SELECT * FROM VALUES
              ('{"n": 1}', 'a', 1, 'k1', TIMESTAMP '2040-01-01 00:00:00.5', 7, 'host1'),
              ('{"n": 2}', 'b', NULL, NULL, NULL, NULL, NULL)
              AS (payload, command, priority, key, run_at, max_attempts, limit_key)"""),
        url,
        priority=2,
    )
    one, two = sorted(tasks(url), key=lambda task: task.command)
    due_ms = int(dt.datetime(2040, 1, 1, tzinfo=dt.UTC).timestamp() * 1000) + 500
    assert (one.payload, one.priority, one.key, one.place, one.due_ms, one.max_attempts, one.limit_key) == (
        b'{"n": 1}', 1, "k1", Place.DELAYED, due_ms, 7, "host1"
    )  # fmt: skip
    assert (two.payload, two.priority, two.key, two.place, two.limit_key) == (b'{"n": 2}', 2, None, Place.READY, None)


def test_payloads_of_every_form(spark: SparkSession, url: str) -> None:
    """Text, bytes, structs, maps and arrays, each by its codec."""
    frame = spark.range(1)
    write(frame.select(f.lit(b"\x00\xff").alias("payload")), url)
    write(frame.select(f.struct(f.lit(1).alias("a"), f.current_date().isNotNull().alias("b")).alias("payload")), url)
    write(frame.select(f.create_map(f.lit("k"), f.array(f.lit(1.5))).alias("payload")), url, codec="msgpack")
    write(frame.select(f.array(f.lit("x")).alias("payload")), url)
    assert Counter((task.codec, task.payload) for task in tasks(url)) == Counter(
        [("raw", b"\x00\xff"), ("json", b'{"a":1,"b":true}'), ("msgpack", b"\x81\xa1k\x91\xcb?\xf8" + bytes(6)),
         ("json", b'["x"]')]
    )  # fmt: skip


def test_a_named_load_counts_once(spark: SparkSession, url: str) -> None:
    """The same write again enqueues nothing and leaves nothing; under another name it is another load."""
    rows = spark.range(1500, numPartitions=2).selectExpr("id AS n")
    for name in ("monday", "monday", "tuesday"):
        write(rows, url, load=name)
    assert seen(url) == Counter([*range(1500)] * 2)
    assert staged_chunks(url) == 0


def test_a_write_without_a_name_is_one_of_its_own(spark: SparkSession, url: str) -> None:
    """Twice written is twice enqueued."""
    rows = spark.range(2).selectExpr("id AS n")
    write(rows, url)
    write(rows, url)
    assert seen(url) == Counter([0, 1] * 2)


def test_nothing_to_write(spark: SparkSession, url: str) -> None:
    """A DataFrame without rows, or without partitions, makes the store and no task."""
    write(spark.range(0).selectExpr("id AS n"), url)
    write(spark.createDataFrame([], "n INT"), url)
    assert tasks(url) == []


def test_shards(spark: SparkSession, tmp_path: Path) -> None:
    """A set of shards is made and written to like one store."""
    rows = spark.range(3000, numPartitions=2).selectExpr("id AS n", "concat('k', id) AS key")
    write(rows, f"shards:{tmp_path / 'set'}?n=2")
    assert seen(f"shards:{tmp_path / 'set'}") == Counter(range(3000))


def test_a_thread_of_its_own(spark: SparkSession, url: str) -> None:
    """Once it is registered in the thread that writes, the format is known there."""
    failed: list[Exception] = []

    def work() -> None:
        try:
            register(spark)
            write(spark.range(10), url)
        except Exception as error:  # noqa: BLE001 told by the thread that waits
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    assert len(tasks(url)) == 10


def test_a_process_keeps_its_store(spark: SparkSession, url: str) -> None:
    """What a Python process of Spark has opened, once it has forked, serves all jobs that it works for."""
    write(spark.range(1), url)

    def opened(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            stores = [id(ask(url, itself)) for _ in range(2)]
            yield pa.record_batch({"pid": [os.getpid()], "same": [len(set(stores)) == 1], "store": stores[:1]})

    seen_by: dict[int, set[int]] = {}
    for _ in range(2):
        for row in spark.range(0, 2, 1, 2).mapInArrow(opened, "pid LONG, same BOOLEAN, store LONG").collect():
            assert row.same
            seen_by.setdefault(row.pid, set()).add(row.store)
    assert os.getpid() not in seen_by
    assert [len(stores) for stores in seen_by.values()] == [1] * len(seen_by)


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_directory_that_was_taken_away(spark: SparkSession, url: str, how: str) -> None:
    """Spark's Python processes are used again, and do not go on with files that are not there any more."""
    directory = Path(url.removeprefix("lmdb:"))
    write(spark.range(1000), url)
    assert read(spark, url) == 1000
    directory.rename(directory.with_name("elsewhere")) if how == "moved" else shutil.rmtree(directory)
    if how == "replaced":
        look(url, lambda store: store.stats("default"))
    write(spark.range(10), url)
    assert read(spark, url) == 10
    assert len(tasks(url)) == 10


def read(spark: SparkSession, url: str) -> int:
    """How many tasks Spark sees."""
    return spark.read.format("dibs").options(url=url, view="tasks").load().count()


def test_a_server(spark: SparkSession, tmp_path: Path) -> None:
    """Executors reach a server's store by its URL, with the same promises and the server's own limits."""
    rows = spark.range(2500, numPartitions=1).selectExpr(
        "if(id = 5, repeat('x', 2000000), concat('{\"n\": ', id, '}')) AS payload", "concat('k', id) AS key"
    )
    with ServerProcess(tmp_path) as server:
        server.start().until_serves()
        for _ in range(2):
            write(rows.where("key != 'k5'"), server.url, load="once")
        assert "PayloadTooLarge: row 5 of partition 0" in refused(rows, server.url, codec="raw")
    assert seen(f"lmdb:{tmp_path / 'store'}") == Counter(set(range(2500)) - {5})
    assert staged_chunks(f"lmdb:{tmp_path / 'store'}") == 0


def test_a_bad_row_fails_the_job_and_names_itself(spark: SparkSession, url: str) -> None:
    """Number, reason, picture and the way out are told, and nothing is enqueued."""
    rows = spark.range(4000, numPartitions=2).selectExpr("if(id = 3210, '{no', concat('', id)) AS payload")
    told = refused(rows, url)
    assert "row 1210 of partition 1 cannot become a task: payload is not JSON (" in told
    assert 'The row: {"payload":"{no"}' in told
    assert "Nothing was enqueued. .option('badRows', DIRECTORY) sets such rows aside" in told
    assert tasks(url) == []
    refused(rows.coalesce(1), f"{url}-one")
    assert staged_chunks(f"{url}-one") == 0


def test_bad_rows_are_set_aside(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """They are a DataFrame afterwards, with where they were, why, and what they said; the others are tasks."""
    rows = spark.range(3000, numPartitions=2).selectExpr(
        "if(id % 1000 = 7, concat('no ', id), concat('{\"n\": ', id, '}')) AS payload", "if(id = 1, 99, 1) AS priority"
    )
    place = tmp_path / "bad rows"
    write(rows, url, badRows=str(place), load="a:b/c")
    assert seen(url) == Counter(set(range(3000)) - {1, 7, 1007, 2007})
    bad = spark.read.json(str(place))
    assert bad.columns == ["error", "partition", "row", "values"]
    found = {(one.partition, one.row): (one.error.partition(" (")[0], one["values"]) for one in bad.collect()}
    assert found == {
        (0, 1): ("priority is 99: use a whole number from 0 to 9", '{"payload":"{\\"n\\": 1}","priority":99}'),
        (0, 7): ("payload is not JSON", '{"payload":"no 7","priority":1}'),
        (0, 1007): ("payload is not JSON", '{"payload":"no 1007","priority":1}'),
        (1, 507): ("payload is not JSON", '{"payload":"no 2007","priority":1}'),
    }
    # The same load again enqueues nothing, mended or not: so what is set aside stays, and nothing else comes to it.
    for repeat in (rows, rows.selectExpr("'{}' AS payload")):
        write(repeat, url, badRows=place.as_uri(), load="a:b/c")
    assert {(one.partition, one.row) for one in spark.read.json(str(place)).collect()} == set(found)
    assert sorted(path.name for path in place.iterdir()) == [f"bad+a%3Ab%2Fc+0+0000{n}.json" for n in (0, 1)]
    assert seen(url).total() == 2996


def test_a_job_that_fails_sets_nothing_aside(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Neither tasks nor files are left of it."""
    rows = spark.range(2000, numPartitions=2).selectExpr(
        "if(id = 3, 'no', if(id = 1999, raise_error('half-way'), '1')) AS payload"
    )
    assert "half-way" in refused(rows, url, badRows=str(tmp_path / "bad"))
    assert tasks(url) == []
    assert [path for path in (tmp_path / "bad").iterdir() if not path.name.startswith("_")] == []


def test_bad_values_are_shown_whatever_they_are(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Bytes, NaN and times that nobody can hold are text in what is set aside."""
    rows = spark.sql("""
        SELECT X'00FF' AS b, CAST('nan' AS DOUBLE) AS x, TIMESTAMP_MICROS(9000000000000000000) AS t,
               map('k', X'41') AS m""")
    write(rows, url, badRows=str(tmp_path / "bad"))
    [bad] = spark.read.json(str(tmp_path / "bad")).collect()
    assert '"b":"\\u0000\\\\xff","x":"nan"' in bad["values"]
    assert '"m":{"k":"A"}' in bad["values"]


# -------------------------------------------------------------------------------------------------------- streams


def stream(rows: DataFrame, url: str, checkpoint: Path, **options: Any) -> str:
    """Writes what is there as a stream, and returns the query's id."""
    query = (
        rows.writeStream.format("dibs")
        .options(url=url, command="fetch", checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert query.exception() is None
    return str(query.id)


def source(spark: SparkSession, directory: Path) -> DataFrame:
    """A stream of the JSON files of a directory, one in each micro-batch."""
    return spark.readStream.schema("n INT").option("maxFilesPerTrigger", 1).json(str(directory))


def put(directory: Path, name: str, numbers: range) -> None:
    """Adds a file to a source."""
    directory.mkdir(exist_ok=True)
    lines = "".join(f'{{"n": {n}}}\n' for n in numbers)
    (directory / f".{name}").write_text(lines)
    (directory / f".{name}").rename(directory / name)


def test_a_stream_writes_each_batch_once(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Over restarts; and a batch that Spark repeats, not knowing that it was committed, changes nothing."""
    files, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    put(files, "a.json", range(1200))
    put(files, "b.json", range(1200, 1300))
    query_id = stream(source(spark, files), url, checkpoint)
    assert seen(url) == Counter(range(1300))

    async def already(store: Any) -> bool:
        return bool((await store.commit_load("default", query_id, 1, [])).already)

    assert look(url, already)  # the load has the query's id, and has come to batch 1
    for path in (checkpoint / "commits").glob("*1*"):
        path.unlink()
    put(files, "c.json", range(1300, 1400))
    assert stream(source(spark, files), url, checkpoint) == query_id
    assert seen(url) == Counter(range(1400))
    assert staged_chunks(url) == 0


def test_an_app_id_outlives_its_checkpoint(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Under the same name the batches that were committed are left out, whatever Spark knows; bad rows are not repeated
    either."""
    files, bad = tmp_path / "in", tmp_path / "bad"
    put(files, "a.json", range(10))
    (files / "b.json").write_text('{"n": 10}\n{"n": 5000000000}\n')
    for checkpoint in ("first", "second"):
        rows = source(spark, files).selectExpr("n", "if(n IS NULL, 10, 1) AS priority")
        stream(rows, url, tmp_path / checkpoint, appId="my app", badRows=str(bad))
    assert seen(url) == Counter(range(11))
    assert [one["values"] for one in spark.read.json(str(bad)).collect()] == ['{"n":null,"priority":10}']


def test_a_stream_that_fails_tells_the_row(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """The query ends with the same words as a batch; nothing of its batch is enqueued."""
    put(tmp_path / "in", "a.json", range(5))
    rows = source(spark, tmp_path / "in").selectExpr("n", "if(n = 3, 10, 1) AS priority")
    with pytest.raises(Exception, match="row 3 of partition 0 cannot become a task: priority is 10"):
        stream(rows, url, tmp_path / "checkpoint")
    assert tasks(url) == []


# -------------------------------------------------------------------------------------------------------- actions


@pytest.fixture
def ended(url: str) -> dict[str, list[str]]:
    """Ids of tasks: 1,100 dead ones, completed ones and ready ones."""

    async def made(store: Any) -> dict[str, list[str]]:
        ids: dict[str, list[str]] = {}
        for what, kind, count in (("dead", Kind.FAIL, 1100), ("done", Kind.COMPLETE, 3), ("ready", None, 3)):
            put = await store.enqueue("default", [NewTask(command="fetch", payload=b"1") for _ in range(count)])
            ids[what] = [id_to_text(one.id) for one in put]
            left = count
            while kind is not None and left:
                leases = await store.claim("default", ["fetch"], limit=BATCH_MAX)
                left -= len(leases)
                await store.settle(
                    [Settlement(tenant="default", id=one.id, token=one.token, kind=kind) for one in leases]
                )
        return ids

    return look(url, made)


def test_actions(spark: SparkSession, url: str, ended: dict[str, list[str]]) -> None:
    """Each acts on those it is for and leaves others alone, also where it is repeated or an id is unknown; other
    columns are not looked at."""
    everybody = [[one] for ids in ended.values() for one in ids] + [[str(uuid.uuid4())]]
    rows = spark.createDataFrame(everybody, "id STRING").withColumn("error_type", f.lit("x"))
    for _ in range(2):
        write(rows, url, action="replay")
    assert Counter(task.status for task in tasks(url)) == {Status.PENDING: 1103, Status.COMPLETED: 3}
    write(rows.selectExpr("unhex(replace(id, '-', '')) AS id"), url, action="cancel")
    assert Counter(task.status for task in tasks(url)) == {Status.CANCELLED: 1103, Status.COMPLETED: 3}
    write(rows, url, action="purge")
    assert tasks(url) == []


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("SELECT 'x' AS task", "replay needs a column named id, as views have it, and finds task"),
        ("SELECT 1 AS id", "column id is INT: use the text of ids"),
        ("SELECT 'x' AS id", "row 0 of partition 0: 'x' is not a task id"),
        ("SELECT X'00' AS id", "is not a task id: use its text, or its 16 bytes"),
        ("SELECT CAST(NULL AS STRING) AS id", "row 0 of partition 0: None is not a task id"),
        ("SELECT uuid() AS id, 'other' AS tenant", "row 0 of partition 0 is of tenant 'other', and the write is about"),
    ],
)
def test_ids_that_are_none(spark: SparkSession, url: str, ended: dict[str, list[str]], query: str, told: str) -> None:
    """A bad id, or another tenant's, is named with its row."""
    assert told in refused(spark.sql(query), url, action="replay")


def test_an_action_needs_a_store(spark: SparkSession, url: str) -> None:
    """Where there is none, none is made for it."""
    assert "StoreMissing" in refused(spark.sql("SELECT uuid() AS id"), url, action="cancel")
