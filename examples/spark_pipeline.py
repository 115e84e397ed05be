"""A table of pages goes through the queue and comes back with results; what failed is grouped, mended and replayed.

    python examples/spark_pipeline.py [NUMBER_OF_PAGES]

Spark makes the tasks and reads what became of them. The work itself is done by an ordinary app: here in this process by
`drain`, in production by `dibs worker` on any machine.
"""

from __future__ import annotations

import sys
import tempfile
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dibs import Dibs
from dibs.spark import session

DIRECTORY = tempfile.mkdtemp(prefix="dibs-pages-")
URL = f"lmdb:{DIRECTORY}"

app = Dibs(URL)
servers = {"a.example": "nginx", "b.example": "caddy"}


@app.task(name="inspect")
def inspect(url: str, depth: int) -> dict[str, object]:
    """What a crawler would do, without a network: knows the servers of two hosts."""
    host = urlsplit(url).hostname or ""
    if depth > 8:
        raise RecursionError(f"{url} is {depth} links away")
    return {"server": servers[host], "length": len(url)}


def view(spark: SparkSession, name: str, **options: str) -> DataFrame:
    """A view of the queue as a table."""
    return spark.read.format("dibs").options(url=URL, view=name, **options).load()


def main(count: int) -> None:
    """Loads, works, joins, groups, mends and replays."""
    spark = session("pages")
    host = sf.element_at(sf.array(*map(sf.lit, "abc")), (sf.col("id") % 3 + 1).cast("int"))
    pages = spark.range(count).select(
        sf.format_string("https://%s.example/%d", host, "id").alias("url"),
        (sf.col("id") % 10).cast("int").alias("depth"),
    )

    print(f"1. {pages.count():,} rows become tasks, all of them or none")
    tasks = pages.select(sf.struct("url", "depth").alias("payload"), sf.col("url").alias("key"))
    once = {"command": "inspect", "load": "pages-of-today", "maxAttempts": "1"}
    tasks.write.format("dibs").options(url=URL, **once).mode("append").save()

    print("2. workers do them")
    app.drain()

    print("3. results come back to their rows")
    results = view(spark, "results", payload="server STRING, length INT")
    joined = pages.join(results.select("key", "status", "result.server", "error_type"), sf.col("url") == sf.col("key"))
    joined.groupBy("status", "server", "error_type").count().orderBy("status", "server", "error_type").show()

    print("4. what failed, by its error")
    dead = view(spark, "dead")
    dead.groupBy("error_type", "fingerprint").agg(
        sf.count("*").alias("tasks"), sf.min("error_message").alias("such as")
    ).orderBy(sf.desc("tasks")).show(truncate=60)

    print("5. the host that was missing is added, and its dead letters are replayed")
    servers["c.example"] = "apache"
    lost = dead.where("error_type = 'KeyError'").select("id")
    lost.write.format("dibs").options(url=URL, action="replay").mode("append").save()
    app.drain()
    view(spark, "tasks").groupBy("status").count().orderBy("status").show()
    app.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)
