"""Rows of a DataFrame become tasks, workers outside Spark do them, and the results are columns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dibs.errors import InvalidInput
from dibs.spark import map_rows
from dibs.spark.connection import ask
from dibs.stores.protocol import Store
from dibs.task import Filter, Kind, QueueStats, Settlement, Status
from tests.spark.filling import fill

APP = """
from dibs import Dibs, Fail

app = Dibs()

@app.task(name="measure")
def measure(url, width=None):
    if url == "bad":
        raise Fail("NO_SUCH_PAGE", f"there is no {url}")
    return {"title": url.upper(), "size": len(url) * (width or 1)}

@app.task(name="title")
def title(url, width=None):
    return None if url == "none" else url.title()
"""


@contextmanager
def worker(url: str, directory: Path) -> Iterator[None]:
    """A worker's process, for as long as the block lasts."""
    (directory / "shop.py").write_text(APP)
    environment = os.environ | {"DIBS_URL": url}
    command = [sys.executable, "-m", "dibs", "worker", "shop:app", "--quiet"]
    with subprocess.Popen(command, cwd=directory, env=environment) as process:
        try:
            yield
        finally:
            process.terminate()


def rows_of(df: DataFrame, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of all rows, in order of the first."""
    return sorted((tuple(row[name] for name in names) for row in df.collect()), key=str)


def total(url: str) -> QueueStats:
    """What the tenant's queues hold."""
    return ask(url, lambda store: store.stats("default")).total


def test_results_and_errors(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Every row has its columns as before, and the status, result and error of its task; equal rows share one."""
    pages = spark.createDataFrame([("a", 2), ("bb", None), ("bad", 1), ("a", 2)], "url STRING, width INT")
    done = map_rows(pages, "measure", url=url, name="pages", returns="title STRING, size INT")
    assert total(url).ready == 3
    with worker(url, tmp_path):
        found = rows_of(done, "url", "width", "status", "result", "error_type", "error_message", "attempts")
    assert found == [
        ("a", 2, "COMPLETED", ("A", 2), None, None, 1),
        ("a", 2, "COMPLETED", ("A", 2), None, None, 1),
        ("bad", 1, "FAILED", None, "dibs.context.Fail", "there is no bad", 1),
        ("bb", None, "COMPLETED", ("BB", 2), None, None, 1),
    ]


def test_resumed_by_name(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """What nobody has done in time has no result yet. The same call again enqueues nothing, and waits on."""
    pages = spark.createDataFrame([(f"page {n}",) for n in range(2_500)], "url STRING")
    first = map_rows(pages, "title", url=url, name="again", timeout_s=0)
    assert set(rows_of(first, "status", "result")) <= {("PENDING", None), (None, None)}
    assert total(url).ready == 2_500
    with worker(url, tmp_path):
        again = map_rows(pages, "title", url=url, name="again", timeout_s=50)
        assert again.groupBy("status").count().collect() == [("COMPLETED", 2_500)]
    assert rows_of(again.where("url = 'page 7'"), "result") == [("Page 7",)]
    every = ask(url, lambda store: store.list("default", Filter(status=Status.COMPLETED), limit=1000))
    assert every.cursor is not None
    assert total(url).ready == 0


def test_rows_that_are_told_apart_by_some_columns(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Rows that are equal in the columns `by` share a task; a result of another type is null, and says so."""
    pages = spark.createDataFrame([("x", 1), ("x", 2), ("none", 1)], "url STRING, width INT")
    with worker(url, tmp_path):
        done = map_rows(pages, "title", url=url, name="by", by="url", returns="INT", priority=5)
        found = rows_of(done, "url", "status", "result", "error_type")
    assert found == [
        ("none", "COMPLETED", None, None),
        ("x", "COMPLETED", None, "CodecError"),
        ("x", "COMPLETED", None, "CodecError"),
    ]
    page = ask(url, lambda store: store.list("default"))
    assert [task.priority for task in page.tasks] == [5, 5]


def test_columns_of_any_name(spark: SparkSession, url: str) -> None:
    """Dots and spaces are a part of the name, and no way into a struct."""
    pages = spark.createDataFrame([("x", 1)], "`the url` STRING, `a.b` INT")
    done = map_rows(pages, "title", url=url, name="odd", timeout_s=0)
    assert done.columns[:3] == ["the url", "a.b", "status"]
    assert done.count() == 1
    [task] = ask(url, lambda store: store.list("default")).tasks
    assert task.payload == b'{"the url":"x","a.b":1}'


def test_what_is_gone_is_not_waited_for(spark: SparkSession, url: str) -> None:
    """Of tasks whose records are kept no longer, the status is null."""
    pages = spark.createDataFrame([("a",), ("b",)], "url STRING")
    map_rows(pages, "title", url=url, name="gone")
    fill(url, [1], command="other")

    async def end(store: Store) -> None:
        leases = await store.claim("default", ["title"], limit=2)
        refs = [lease.id for lease in leases]
        await store.settle(
            [Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=Kind.FAIL) for lease in leases]
        )
        await store.purge("default", refs)

    ask(url, end)
    assert rows_of(map_rows(pages, "title", url=url, name="gone"), "url", "status") == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": ""}, "is not a load name"),
        ({"by": "size"}, r"by names \['size'\]: choose from url"),
        ({"by": []}, "by names nothing: choose from url"),
        ({"returns": "STRNG"}, "returns is 'STRNG', which is neither a type nor a schema"),
        ({"timeout_s": -1}, "option timeout_s is -1"),
        ({"command": ""}, "is not a command"),
        ({"url": "memory:"}, "option url"),
        ({"load": "other"}, "option load is not for map_rows"),
        ({"priorty": 3}, "option priorty is not known here: did you mean priority"),
    ],
)
def test_bad_options(spark: SparkSession, url: str, options: dict[str, Any], text: str) -> None:
    """Are told at the call, and nothing is enqueued."""
    given: dict[str, Any] = {"command": "title", "url": url, "name": "n"} | options
    expected = Exception if "priorty" in options else InvalidInput
    with pytest.raises(expected, match=text):
        map_rows(spark.createDataFrame([("a",)], "url STRING"), **given)


def test_columns_that_are_taken(spark: SparkSession, url: str) -> None:
    """A column that has the name of one that is added must be renamed before."""
    with pytest.raises(InvalidInput, match="the column status is one that map_rows adds: rename it before"):
        map_rows(spark.createDataFrame([("a",)], "status STRING"), "title", url=url, name="n")
