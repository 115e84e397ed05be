"""A stream of numbers, written batch after batch. ``python -m tests.spark.streams URL CHECKPOINT`` writes until it is
killed; prints the process id of Java first."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from dibs.spark import session
from tests.crash.lifeline import die_with_parent

ROWS_PER_BATCH = 500


def main(url: str, checkpoint: str) -> None:
    """Does not end by itself."""
    die_with_parent()
    spark = session("streams", master="local[2]", config={"spark.driver.memory": "512m"})
    print(spark.sparkContext._gateway.proc.pid, flush=True)  # type: ignore[union-attr]
    write(spark, url, checkpoint, sys.maxsize)


def write(spark: SparkSession, url: str, checkpoint: str, batches: int) -> None:
    """Ends once the checkpoint knows of that many batches."""
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS_PER_BATCH).load()
    query = (
        numbers.selectExpr("value AS n")
        .writeStream.format("dibs")
        .options(url=url, command="fetch", checkpointLocation=checkpoint)
        .start()
    )
    while query.isActive and not (Path(checkpoint) / "commits" / str(batches - 1)).exists():
        time.sleep(0.05)
    query.stop()
    error = query.exception()
    if error is not None:
        raise error


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
