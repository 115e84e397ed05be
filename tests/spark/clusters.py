"""Writes on a cluster of two workers to the stores DIRECTORY/<name>, while tasks fail, executors are killed and
attempts race each other.

Executors are on this machine, and may use a store on its disk: what :func:`dibs.spark.register` would refuse for a
cluster is allowed where it does not know of one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from dibs.spark import session
from dibs.spark.source import DibsSource
from tests.spark.looking import staged_chunks

ROWS, PARTITIONS = 6000, 2
PATIENCE_S = 60.0
#: Where the partition is, in rows, when something happens to it.
HALF_WAY = 2000

Happens = Callable[[], None]


def fails() -> None:
    """The task fails, as by a bug in a function before the write."""
    raise RuntimeError("fails after staging")


def dies() -> None:
    """The executor that runs the task is gone at once: its Java process, the parent of the one that forked us."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(PATIENCE_S)


def dawdles() -> None:
    """The task takes so long that Spark tries another."""
    time.sleep(PATIENCE_S)


def written(master: str, directory: Path) -> dict[str, str]:
    """Returns how each of the writes ended."""
    spark = session(
        "faults",
        master=master,
        config={
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.task.maxFailures": "2",
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.multiplier": "1.1",
            "spark.speculation.minTaskRuntime": "1s",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
        },
    )
    spark.dataSource.register(DibsSource)
    told = {
        "failed-once": write(spark, directory, "failed-once", fails, once=True),
        "executor-killed": write(spark, directory, "executor-killed", dies, once=True),
        "speculation": write(spark, directory, "speculation", dawdles, once=True),
        "failed-for-good": write(spark, directory, "failed-for-good", fails, once=False),
    }
    spark.stop()
    return told


def write(spark: SparkSession, directory: Path, name: str, happens: Happens, *, once: bool) -> str:
    """Writes rows, of which partition 1 meets with something once a part of it is staged; returns the error."""
    url, marks = f"lmdb:{directory / name}", directory / f"{name}.marks"
    marks.mkdir()

    def eventful(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        (marks / f"{context.partitionId()}.{context.attemptNumber()}").touch()
        happened = marks / "happened"
        if context.partitionId() == 0:
            # Spark looks for slow tasks once others are done: not before it is time.
            await_that(happened.exists)
        rows = 0
        for batch in batches:
            yield batch
            rows += batch.num_rows
            if rows == HALF_WAY and context.partitionId() == 1 and not (once and context.attemptNumber()):
                await_that(lambda: staged_chunks(url) > 0)
                happened.touch()
                happens()

    rows = spark.range(ROWS, numPartitions=PARTITIONS).selectExpr("id AS n", "repeat('x', 200) AS text")
    try:
        (
            rows.mapInArrow(eventful, rows.schema)
            .write.format("dibs")
            .options(url=url, command="fetch")
            .mode("append")
            .save()
        )
    except Exception as error:  # noqa: BLE001 whatever it is, it is told
        return str(error)
    return ""


def await_that(it_is_so: Callable[[], bool]) -> None:
    """Waits until something is so."""
    until_s = time.monotonic() + PATIENCE_S
    while not it_is_so():
        if time.monotonic() > until_s:
            raise TimeoutError("it does not come to that")
        time.sleep(0.05)
