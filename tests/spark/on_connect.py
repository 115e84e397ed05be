"""A program that does through Spark Connect what others do with a session of their own.

    python -m tests.spark.on_connect URL CHECKPOINT ROWS

Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from pyspark.sql import SparkSession

from dibs import Dibs
from dibs.spark import drain, map_rows, register


def main(url: str, checkpoint: str, rows: int) -> dict[str, Any]:
    """Does everything once, and tells what came of it."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    register(spark)
    told: dict[str, Any] = {}
    spark.range(rows).selectExpr("id AS n").write.format("dibs").options(url=url, command="c").mode("append").save()
    tasks = spark.read.format("dibs").options(url=url, view="tasks", payload="n INT").load()
    told["enqueued"] = [*tasks.selectExpr("count(*)", "count(DISTINCT payload.n)").collect()[0]]
    events = spark.readStream.format("dibs").options(url=url, view="events").load()
    stream = events.writeStream.format("memory").queryName("seen").option("checkpointLocation", checkpoint)
    stream.trigger(availableNow=True).start().awaitTermination()
    told["events"] = spark.table("seen").count()
    done = drain(spark, url, "c", lambda batch: [1] * len(batch), form="arrow")
    told["completed"] = done.agg({"completed": "sum"}).collect()[0][0]
    told["mapped"] = _mapped(spark, url)
    spark.stop()
    return told


def _mapped(spark: SparkSession, url: str) -> list[str]:
    app = Dibs(url)

    @app.task(name="upper")
    def upper(word: str) -> str:
        return word.upper()

    words = spark.createDataFrame([("a",), ("b",)], "word STRING")
    mapped = map_rows(words, "upper", url=url, name="words")
    worker = threading.Thread(target=app.drain)
    worker.start()
    results = sorted(row.result for row in mapped.collect())
    worker.join()
    app.close()
    return results


if __name__ == "__main__":
    _, url, checkpoint, rows = sys.argv
    print(json.dumps(main(url, checkpoint, int(rows))))
