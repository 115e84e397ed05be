"""Exactly once, whoever fails: tasks, executors, attempts that race, the driver; processes that are really killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dibs.stores import open_store
from tests.spark import streams
from tests.spark.clusters import ROWS
from tests.spark.conftest import OnCluster
from tests.spark.looking import seen, tasks
from tests.spark.standalone import JAVA, PATIENCE_S, ROOT
from tests.spark.streams import ROWS_PER_BATCH


@pytest.mark.timeout(PATIENCE_S + 30)
def test_executors_fail_in_every_way(on_cluster: OnCluster) -> None:
    """A task that fails after staging, an executor killed in mid-write, two attempts at once: each row is one task. A
    job that fails half-way: no row is."""
    told, directory = on_cluster.told["written"], on_cluster.directory
    attempts = {}
    for name in ("failed-once", "executor-killed", "speculation"):
        assert told[name] == ""
        url = f"lmdb:{directory / name}"
        assert seen(url) == Counter(range(ROWS)), name
        attempts[name] = sorted(path.name for path in (directory / f"{name}.marks").iterdir())
    assert all({"1.0", "1.1"} <= set(names) for names in attempts.values()), attempts
    assert "fails after staging" in told["failed-for-good"]
    assert tasks(f"lmdb:{directory / 'failed-for-good'}") == []


@pytest.mark.timeout(PATIENCE_S + 30)
def test_the_driver_dies_between_our_commit_and_sparks(spark: SparkSession, tmp_path: Path) -> None:
    """A batch is in the queue, and Spark does not know: another driver, started from the same checkpoint, repeats the
    batch, and no row is there twice or missing."""
    url, checkpoint = f"lmdb:{tmp_path / 'store'}", tmp_path / "checkpoint"
    command = [sys.executable, "-m", "tests.spark.streams", url, str(checkpoint)]
    env = os.environ | JAVA | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    script = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    assert script.stdout is not None
    java = int(script.stdout.readline())
    try:
        batch = asyncio.run(stopped_between(url, checkpoint, java))
    finally:
        for victim in (java, script.pid):
            os.kill(victim, signal.SIGKILL)
        script.wait()
        script.stdout.close()
    assert (checkpoint / "offsets" / str(batch)).exists()
    assert not (checkpoint / "commits" / str(batch)).exists()
    assert seen(url) == Counter(range((batch + 1) * ROWS_PER_BATCH))

    streams.write(spark, url, str(checkpoint), batch + 3)
    found = seen(url)
    assert found.total() >= (batch + 3) * ROWS_PER_BATCH
    assert found == Counter(range(found.total()))


async def stopped_between(url: str, checkpoint: Path, java: int) -> int:
    """Stops Java as soon as a batch is in the queue, until that is before Spark has noted it; returns the batch."""
    until_s = time.monotonic() + PATIENCE_S
    async with await open_store(url) as store:
        before = 0
        while time.monotonic() < until_s:
            rows = (await store.stats("default")).total.ready
            if rows == before:
                # While Java starts, it needs the processor more.
                await asyncio.sleep(0.0005 if before else 0.05)
                continue
            os.kill(java, signal.SIGSTOP)
            rows = before = (await store.stats("default")).total.ready
            batch = rows // ROWS_PER_BATCH - 1
            if not (checkpoint / "commits" / str(batch)).exists():
                return batch
            os.kill(java, signal.SIGCONT)
    raise TimeoutError("Spark was never stopped between the two commits")
