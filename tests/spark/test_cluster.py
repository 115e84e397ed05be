"""The same code on a cluster, where executors reach the queue by a server; and through Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.server.running import ServerProcess
from tests.spark.standalone import JAVA, cluster

pytestmark = pytest.mark.timeout(240)

ROWS = 3_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server over an empty store."""
    with ServerProcess(tmp_path) as running:
        running.start().until_serves()
        yield running.url


def test_a_cluster_fills_reads_and_drains_through_a_server(server: str, tmp_path: Path) -> None:
    """Rows become tasks once, executors work them off, one of which is killed meanwhile, and each is done once; a store
    on the driver's disk is refused."""
    with cluster(tmp_path) as master:
        told = run("tests.spark.on_cluster", master, server, str(tmp_path), str(ROWS))
    refused, events = told.pop("refused"), told.pop("events")
    assert told == {"enqueued": [ROWS, ROWS], "executors": 2, "sum": sum(n * n for n in range(ROWS))}
    assert events["enqueued"] == events["completed"] == ROWS
    assert events["lease_expired"] == events["claimed"] - ROWS > 0
    assert (tmp_path / "killed").exists()
    assert "do not share" in refused
    assert "dibs serve" in refused


def test_spark_connect_does_the_same(tmp_path: Path) -> None:
    """Through Connect the source runs on the server's side: writing, reading, streaming, draining."""
    told = run("tests.spark.on_connect", f"lmdb:{tmp_path / 'store'}", str(tmp_path / "checkpoint"), str(ROWS))
    assert told == {"enqueued": [ROWS, ROWS], "events": ROWS, "completed": ROWS, "mapped": ["A", "B"]}


def run(program: str, *arguments: str) -> dict[str, Any]:
    """Runs a program with a Spark of its own, and returns the JSON that it prints last."""
    command = [sys.executable, "-m", program, *arguments]
    env = os.environ | JAVA | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
