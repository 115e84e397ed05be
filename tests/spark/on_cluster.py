"""A program for `spark-submit` or Python: a queue filled, read and drained through a server, by any master.

    python -m tests.spark.on_cluster MASTER URL DIRECTORY ROWS

Prints one JSON object. `DIRECTORY` is on this machine: where it is noted that an executor was killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException

from dibs.spark import drain, session
from dibs.spark.connection import ask
from tests.spark.clusters import dies


def main(master: str, url: str, directory: str, rows: int) -> dict[str, Any]:
    """Does everything once, and tells what came of it."""
    spark = session(
        "cluster", master=master, config={"spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1"}
    )
    where = {"url": url}
    told: dict[str, Any] = {}
    numbers = spark.range(0, rows, 1, 4).selectExpr("id AS n")
    numbers.write.format("dibs").options(**where, command="square", load="once").mode("append").save()
    numbers.write.format("dibs").options(**where, command="square", load="once").mode("append").save()
    read = spark.read.format("dibs").options(**where, view="tasks", payload="n INT", rowsPerPartition="1000").load()
    told["enqueued"] = [*read.selectExpr("count(*)", "count(DISTINCT payload.n)").collect()[0]]
    told["executors"] = spark.range(0, 100, 1, 4).rdd.map(lambda _: os.getppid()).distinct().count()
    killed = Path(directory, "killed")

    def squares(batch: pa.Table) -> list[dict[str, int]]:
        if not killed.exists():
            killed.touch()
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
    spark.stop()
    return told


def _left(url: str) -> int:
    total = ask(url, lambda store: store.stats("default")).total
    return total.ready + total.leased + total.delayed


if __name__ == "__main__":
    _, master, url, directory, rows = sys.argv
    print(json.dumps(main(master, url, directory, int(rows))))
