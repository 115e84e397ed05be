"""One Spark session for all of these tests, and a store of its own for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from pyspark.sql import SparkSession

from dibs.spark import session
from tests.spark.standalone import JAVA


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores of this machine, with `format("dibs")` registered."""
    config = {"spark.sql.shuffle.partitions": "2", "spark.task.maxFailures": "1", "spark.driver.memory": "1g"}
    with mock.patch.dict(os.environ, JAVA):
        running = session("dibs tests", master="local[2]", config=config)
    yield running
    running.stop()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where a store can be made."""
    return f"lmdb:{tmp_path / 'store'}"
