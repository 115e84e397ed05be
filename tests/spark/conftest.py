"""One cluster for the tests that need one, and a store of its own for each; the session is everybody's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.running import ServerProcess
from tests.spark.standalone import run_program


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
