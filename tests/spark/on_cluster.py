"""A program that does on a cluster all that has to be seen on one, since each is many processes of Java.

    python -m tests.spark.on_cluster URL DIRECTORY ROWS

Prints one JSON object: what came of a queue that was filled, read and drained through the server at `URL`, of a drain
whose Python processes are killed, and of writes to stores in `DIRECTORY` that meet with faults. There it is noted, too,
who was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from dibs.spark import drain, session
from dibs.spark.connection import ask
from tests.crash.lifeline import die_with_parent
from tests.spark.clusters import dies, written
from tests.spark.filling import fill
from tests.spark.standalone import cluster


def main(url: str, directory: Path, rows: int) -> dict[str, Any]:
    """Does everything once, and tells what came of it."""
    die_with_parent()
    with cluster(directory) as master:
        spark = session(
            "cluster", master=master, config={"spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1"}
        )
        told = {"served": served(spark, url, directory, rows), "killed": killed(spark, url, directory / "marks")}
        spark.stop()
        return told | {"written": written(master, directory)}


def served(spark: SparkSession, url: str, directory: Path, rows: int) -> dict[str, Any]:
    """Fills, reads and drains a queue; an executor dies meanwhile."""
    where = {"url": url}
    told: dict[str, Any] = {}
    numbers = spark.range(0, rows, 1, 4).selectExpr("id AS n")
    numbers.write.format("dibs").options(**where, command="square", load="once").mode("append").save()
    numbers.write.format("dibs").options(**where, command="square", load="once").mode("append").save()
    read = spark.read.format("dibs").options(**where, view="tasks", payload="n INT", rowsPerPartition="1000").load()
    told["enqueued"] = [*read.selectExpr("count(*)", "count(DISTINCT payload.n)").collect()[0]]
    told["executors"] = spark.range(0, 100, 1, 4).rdd.map(lambda _: os.getppid()).distinct().count()
    died = directory / "died"

    def squares(batch: pa.Table) -> list[dict[str, int]]:
        if not died.exists():
            died.touch()
            dies()
        return [{"squared": n * n} for n in batch["n"].to_pylist()]

    while _left(url):
        drain(spark, url, "square", squares, form="arrow", payload="n BIGINT", parallelism=4, batch=200, lease_s=2.0)
        time.sleep(0.2)
    results = spark.read.format("dibs").options(**where, view="results", payload="squared BIGINT").load()
    told["sum"] = results.selectExpr("sum(result.squared)").collect()[0][0]
    events = spark.read.format("dibs").options(**where, view="events").load()
    told["events"] = {row.kind: row["count"] for row in events.groupBy("kind").count().collect()}
    try:
        spark.read.format("dibs").options(url=f"lmdb:{directory}").load().count()
    except PySparkException as error:
        told["refused"] = str(error)
    return told


def killed(spark: SparkSession, url: str, marks: Path) -> list[list[str]]:
    """Drains a queue while Python processes are killed; returns who took part in each round."""
    marks.mkdir()
    fill(url, range(1_000))

    def dies_twice(batch: pd.DataFrame) -> pd.Series:
        numbers = batch["payload"].astype(int)
        for victim in (150, 620):
            if (numbers == victim).any() and not (marks / str(victim)).exists():
                (marks / str(victim)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return numbers

    rounds = []
    while _left(url):
        done = drain(spark, url, "work", dies_twice, batch=50, lease_s=2.0).collect()
        rounds.append([row["worker"] for row in done])
        time.sleep(0.2)
    return rounds


def _left(url: str) -> int:
    total = ask(url, lambda store: store.stats("default")).total
    return total.ready + total.leased + total.delayed


if __name__ == "__main__":
    _, url, directory, rows = sys.argv
    print(json.dumps(main(url, Path(directory), int(rows))))
