"""The same code on a cluster, where executors reach the queue by a server; and through Spark Connect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.conftest import OnCluster
from tests.spark.standalone import PATIENCE_S, run_program

pytestmark = pytest.mark.timeout(PATIENCE_S + 30)


def test_a_cluster_fills_reads_and_drains_through_a_server(on_cluster: OnCluster) -> None:
    """Rows become tasks once, executors work them off, one of which is killed meanwhile, and each is done once; a store
    on the driver's disk is refused."""
    told, rows = dict(on_cluster.told["served"]), on_cluster.rows
    refused, events = told.pop("refused"), told.pop("events")
    assert told == {"enqueued": [rows, rows], "executors": 2, "sum": sum(n * n for n in range(rows))}
    assert events["enqueued"] == events["completed"] == rows
    assert events["lease_expired"] == events["claimed"] - rows > 0
    assert (on_cluster.directory / "died").exists()
    assert "do not share" in refused
    assert "dibs serve" in refused


def test_spark_connect_does_the_same(tmp_path: Path) -> None:
    """Through Connect the source runs on the server's side: writing, reading, streaming, draining."""
    url, rows = f"lmdb:{tmp_path / 'store'}", 3_000
    told = run_program("tests.spark.on_connect", url, str(tmp_path / "checkpoint"), str(rows))
    assert told == {"enqueued": [rows, rows], "events": rows, "completed": rows, "mapped": ["A", "B"]}
