"""One Spark session for all of these tests, one cluster for those that need one, and a store of its own for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from pyspark.sql import SparkSession

from dibs.spark import session
from tests.server.running import ServerProcess
from tests.spark.standalone import JAVA, run_program


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores of this machine, with `format("dibs")` registered."""
    config = {"spark.sql.shuffle.partitions": "2", "spark.task.maxFailures": "1", "spark.driver.memory": "1g"}
    with mock.patch.dict(os.environ, JAVA):
        running = session("dibs tests", master="local[2]", config=config)
    yield running
    running.stop()


class OnCluster(NamedTuple):
    """What :mod:`tests.spark.on_cluster` told, and where there is more to see of it."""

    told: dict[str, Any]
    rows: int
    url: str
    directory: Path


@pytest.fixture(scope="session")
def on_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnCluster]:
    """All that is done on a cluster, once; the server that it was done through still runs."""
    directory, rows = tmp_path_factory.mktemp("cluster"), 3_000
    with ServerProcess(directory) as server:
        server.start().until_serves()
        told = run_program("tests.spark.on_cluster", server.url, str(directory), str(rows))
        yield OnCluster(told, rows, server.url, directory)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where a store can be made."""
    return f"lmdb:{tmp_path / 'store'}"
