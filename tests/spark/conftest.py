"""One Spark session for all of these tests, and a store of its own for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dibs.spark import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores of this machine, with `format("dibs")` registered."""
    running = session(
        "dibs tests",
        master="local[2]",
        config={"spark.sql.shuffle.partitions": "2", "spark.task.maxFailures": "1", "spark.driver.memory": "1g"},
    )
    yield running
    running.stop()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where a store can be made."""
    return f"lmdb:{tmp_path / 'store'}"
