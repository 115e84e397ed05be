"""How the tests are shared out between processes, which loop runs them, and the Spark session that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK = ("tests/spark/", "tests/history/test_")
"""The tests of each share one Java process, and so one of ours."""

LONG = (*SPARK, "tests/worker/", "tests/model/", "tests/remote/test_model.py", "tests/crash/", "tests/docs/")
"""A process that began with one of these at the end would go on alone when the others are done."""


class ByTopic(LoadScopeScheduling):  # type: ignore[misc]
    """A process has a class or module at a time, or all that shares a Java process."""

    def _split_scope(self, nodeid: str) -> str:
        return next((topic for topic in SPARK if nodeid.startswith(topic)), str(super()._split_scope(nodeid)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByTopic:
    """Topics are taken in the order in which they were collected."""
    config.option.loadscopereorder = False
    return ByTopic(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long topics begin, and the many short ones fill up what is left."""
    ranks = {start: rank for rank, start in enumerate(LONG)}
    items.sort(key=lambda item: next((ranks[start] for start in LONG if item.nodeid.startswith(start)), len(LONG)))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores of this machine, with `format("dibs")` registered."""
    from dibs.spark import session
    from tests.spark.standalone import JAVA

    config = {"spark.sql.shuffle.partitions": "2", "spark.task.maxFailures": "1", "spark.driver.memory": "1g"}
    with mock.patch.dict(os.environ, JAVA):
        running = session("dibs tests", master="local[2]", config=config)
    yield running
    running.stop()


@pytest.fixture
def anyio_backend() -> str:
    """Stores are asyncio's."""
    return "asyncio"
