"""Every option of every use: how it is read, and what is said of a bad value, on the driver, before any task starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from dibs.errors import InvalidOption
from dibs.spark.options import ActionOptions, ReadOptions, StreamReadOptions, Where, WriteOptions, parse

USES = (ReadOptions, StreamReadOptions, WriteOptions, ActionOptions)


def read(kind: type[Where], **given: str) -> Any:
    """The options of a use, with those that must be there."""
    needed = {"url": "lmdb:x"} | ({"action": "replay"} if kind is ActionOptions else {})
    return parse(needed | given, kind)


GOOD = {
    ReadOptions: {"tenant": "*", "view": "dead", "payload": "a INT", "rowsPerPartition": "1000"},
    StreamReadOptions: {"view": "events", "startingPosition": "latest", "maxEventsPerTrigger": "5",
                        "failOnDataLoss": "false"},
    WriteOptions: {"tenant": "acme", "command": "fetch", "codec": "msgpack", "priority": "9", "maxAttempts": "3",
                   "delaySeconds": "1.5", "expiresSeconds": "60", "resultTtlSeconds": "0", "load": "l", "appId": "a",
                   "badRows": "/bad"},
    ActionOptions: {"action": "purge", "tenant": "acme"},
}  # fmt: skip
VALUES = {
    ReadOptions: ("*", "dead", "a INT", 1000),
    StreamReadOptions: ("events", "latest", 5, False),
    WriteOptions: ("acme", "fetch", "msgpack", 9, 3, 1.5, 60.0, 0.0, "l", "a", "/bad"),
    ActionOptions: ("purge", "acme"),
}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("jobs", "{here}/jobs"),
        ("lmdb:jobs", "lmdb:{here}/jobs"),
        ("lmdb:/var/jobs", "lmdb:/var/jobs"),
        ("shards:jobs?n=3", "shards:{here}/jobs?n=3"),
        ("shards:[a,b]", "shards:[a,b]"),
        ("http://queue:8080", "http://queue:8080"),
    ],
)
def test_a_directory_is_the_same_for_all_processes(given: str, meant: str) -> None:
    """Executors work in directories of their own, so a path travels whole."""
    assert parse({"url": given}, ReadOptions).url == meant.format(here=Path.cwd())


@pytest.mark.parametrize("kind", USES)
def test_options_are_read_into_their_types(kind: type[Where]) -> None:
    """Spark hands over text, and names in lower case where it likes."""
    given = GOOD[kind]
    for said in (given, {name.lower(): value for name, value in given.items()}):
        options = read(kind, **said)
        fields = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
        assert tuple(getattr(options, fields[name]) for name in given) == VALUES[kind]


@pytest.mark.parametrize("kind", USES)
def test_what_spark_adds_is_no_option(kind: type[Where]) -> None:
    """What Spark itself hands to every source and sink is left alone."""
    assert read(kind, checkpointLocation="/tmp/c", queryName="q") == read(kind)


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "memory:x"}, "option url is 'memory:x': Spark's processes cannot share it; use a directory"),
        ({"url": "shards:memory:x?n=2"}, "option url is 'shards:memory:x?n=2': Spark's processes cannot share it"),
        ({"tenant": "No Such"}, "option tenant: 'No Such' is not a tenant: use 1 to 64 of a-z 0-9 . _ -"),
        ({"tennant": "a"}, "option tennant is not known here: did you mean tenant?"),
        ({"qqq": "a"}, "option qqq is not known here: there are url, tenant, "),
        ({"path": "jobs"}, "name the store by .option('url', …), not by a path"),
    ],
)  # fmt: skip
def test_bad_values_of_all(kind: type[Where], given: dict[str, str], told: str) -> None:
    """What all uses share is told in the same words."""
    with pytest.raises(InvalidOption) as error:
        read(kind, **given)
    assert told in str(error.value)


@pytest.mark.parametrize("kind", USES)
def test_the_url_is_needed(kind: type[Where]) -> None:
    """There is no store by default."""
    with pytest.raises(InvalidOption, match="option url is missing: name the store, as in"):
        parse({"action": "replay"} if kind is ActionOptions else {}, kind)


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (ReadOptions, {"view": "task"}, "option view is 'task': use one of tasks, results, dead, events, queues"),
        (ReadOptions, {"rowsPerPartition": "10"}, "option rowsPerPartition is '10': expected `int` >= 1000"),
        (ReadOptions, {"rowsPerPartition": "2000000"}, "option rowsPerPartition is '2000000': expected `int` <= "),
        (ReadOptions, {"rowsPerPartition": "many"}, "option rowsPerPartition is 'many': expected `int`, got `str`"),
        (ReadOptions, {"payload": "BIGINT"}, "option payload is 'BIGINT': use string, binary, or a schema"),
        (ReadOptions, {"startingPosition": "latest"}, "option startingPosition is not known here"),
        (StreamReadOptions, {"startingPosition": "now"}, "option startingPosition is 'now': use one of earliest"),
        (StreamReadOptions, {"maxEventsPerTrigger": "0"}, "option maxEventsPerTrigger is '0': expected `int` >= 1"),
        (StreamReadOptions, {"failOnDataLoss": "perhaps"}, "option failOnDataLoss is 'perhaps': expected `bool`"),
        (WriteOptions, {"tenant": "*"}, "option tenant: '*' is every tenant"),
        (WriteOptions, {"command": "no/slash"}, "option command: 'no/slash' is not a command"),
        (WriteOptions, {"codec": "pickle"}, "option codec is 'pickle': use one of json, msgpack, raw"),
        (WriteOptions, {"priority": "10"}, "option priority is '10': expected `int` <= 9"),
        (WriteOptions, {"priority": "-1"}, "option priority is '-1': expected `int` >= 0"),
        (WriteOptions, {"priority": "high"}, "option priority is 'high': expected `int"),
        (WriteOptions, {"maxAttempts": "0"}, "option maxAttempts is '0': expected `int` >= 1"),
        (WriteOptions, {"delaySeconds": "-1"}, "option delaySeconds is '-1': expected `float` >= 0"),
        (WriteOptions, {"delaySeconds": "nan"}, "option delaySeconds is 'nan': "),
        (WriteOptions, {"delaySeconds": "1h"}, "option delaySeconds is '1h': expected `float`"),
        (WriteOptions, {"expiresSeconds": "1e12"}, "option expiresSeconds is '1e12': expected `float` <= "),
        (WriteOptions, {"expiresSeconds": "0"}, "option expiresSeconds is '0': expected `float` >= 0.001"),
        (WriteOptions, {"resultTtlSeconds": "-5"}, "option resultTtlSeconds is '-5': expected `float` >= 0"),
        (WriteOptions, {"load": "a\nb"}, "option load: 'a\\nb' is not a load name"),
        (WriteOptions, {"load": ""}, "option load: '' is not a load name"),
        (WriteOptions, {"appId": "x" * 129}, "option appId: the load name"),
        (WriteOptions, {"badRows": ""}, "option badRows is '': expected `str` of length >= 1"),
        (WriteOptions, {"action": "replay"}, "option action is not known here"),
        (WriteOptions, {"view": "dead"}, "option view is not known here"),
        (ActionOptions, {"action": "retry"}, "option action is 'retry': use one of replay, purge, cancel"),
        (ActionOptions, {"tenant": "*"}, "option tenant: '*' is every tenant"),
        (ActionOptions, {"command": "fetch"}, "option command is not known here: there are url, tenant, action"),
    ],
)  # fmt: skip
def test_bad_values(kind: type[Where], given: dict[str, str], told: str) -> None:
    """Each is named, shown, and told what it should be."""
    with pytest.raises(InvalidOption) as error:
        read(kind, **given)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "memory:x"}, "Spark's processes cannot share it"),
        ({"command": "fetch", "appId": "a"}, "option appId names the load of a stream: a batch has .option('load', …)"),
        ({"action": "nothing"}, "option action is 'nothing': use one of replay, purge, cancel"),
        (
            {"command": "fetch", "badRows": "/proc/nowhere"},
            "option badRows is '/proc/nowhere', where nothing can be written",
        ),
        ({"command": "fetch", "badRows": "nofs://x/y"}, "option badRows is 'nofs://x/y', where nothing can be written"),
    ],
)
def test_a_batch_is_refused_by_the_driver(spark: SparkSession, url: str, given: dict[str, str], told: str) -> None:
    """The words reach whoever writes, inside Spark's exception."""
    rows = spark.sql("SELECT 1 AS n, 'x' AS id")
    with pytest.raises(Exception) as error:  # noqa: PT011 Spark's, of several classes
        rows.write.format("dibs").options(**({"url": url} | given)).mode("append").save()
    assert told in str(error.value)


def test_a_queue_is_not_overwritten(spark: SparkSession, url: str) -> None:
    """Only appending makes sense."""
    with pytest.raises(Exception, match=r"a queue is not overwritten: use \.mode\('append'\)"):
        spark.range(1).write.format("dibs").options(url=url, command="fetch").mode("overwrite").save()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"load": "l"}, "option load names the load of a batch: a stream has"),
        ({"action": "replay"}, "option action is not known here"),
        ({"command": "no/slash"}, "option command: 'no/slash' is not a command"),
    ],
)
def test_a_stream_is_refused_by_the_driver(
    spark: SparkSession, url: str, tmp_path: Any, given: dict[str, str], told: str
) -> None:
    """The query ends before its first task, with the reason."""
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load().selectExpr("value AS n")
    options = {"url": url, "command": "fetch", "checkpointLocation": str(tmp_path / "c")} | given
    with pytest.raises(Exception) as error:  # noqa: PT011 Spark's, of several classes
        rows.writeStream.format("dibs").options(**options).trigger(availableNow=True).start().awaitTermination()
    assert told in str(error.value)


def test_spark_finds_it_by_itself(spark: SparkSession, url: str) -> None:
    """A session that nobody registered it with knows the format, by the package `pyspark_dibs`."""
    with pytest.raises(Exception, match="StoreMissing: there is no store in"):
        spark.newSession().read.format("dibs").option("url", url).load().count()
