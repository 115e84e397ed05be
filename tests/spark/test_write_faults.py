"""Exactly once, whoever fails: tasks, executors, attempts that race, the driver; processes that are really killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from dibs.stores import open_store
from tests.spark.clusters import ROWS
from tests.spark.looking import seen, tasks
from tests.spark.standalone import JAVA, ROOT
from tests.spark.streams import ROWS_PER_BATCH

PATIENCE_S = 120.0


def start(script: str, *args: object, **options: int) -> subprocess.Popen[str]:
    """Starts a script that has a Spark of its own."""
    command = [sys.executable, "-m", f"tests.spark.{script}", *map(str, args)]
    env = os.environ | JAVA | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.timeout(240)
def test_executors_fail_in_every_way(tmp_path: Path) -> None:
    """A task that fails after staging, an executor killed in mid-write, two attempts at once: each row is one task. A
    job that fails half-way: no row is."""
    with start("clusters", tmp_path) as script:
        out, _ = script.communicate(timeout=PATIENCE_S + 100)
    told = {one["write"]: one["error"] for one in map(json.loads, out.splitlines())}
    attempts = {}
    for name in ("failed-once", "executor-killed", "speculation"):
        assert told[name.replace("-", " ")] == ""
        url = f"lmdb:{tmp_path / name}"
        assert seen(url) == Counter(range(ROWS)), name
        attempts[name] = sorted(path.name for path in (tmp_path / f"{name}.marks").iterdir())
    assert all({"1.0", "1.1"} <= set(names) for names in attempts.values()), attempts
    assert "fails after staging" in told["failed for good"]
    assert tasks(f"lmdb:{tmp_path / 'failed-for-good'}") == []


@pytest.mark.timeout(240)
def test_the_driver_dies_between_our_commit_and_sparks(tmp_path: Path) -> None:
    """A batch is in the queue, and Spark does not know: restarted from its checkpoint it repeats the batch, and no row
    is there twice or missing."""
    url, checkpoint = f"lmdb:{tmp_path / 'store'}", tmp_path / "checkpoint"
    script = start("streams", url, checkpoint, 1000)
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

    with start("streams", url, checkpoint, batch + 3) as script:
        script.communicate(timeout=PATIENCE_S)
    assert script.returncode == 0
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
                await asyncio.sleep(0.0005)
                continue
            os.kill(java, signal.SIGSTOP)
            rows = before = (await store.stats("default")).total.ready
            batch = rows // ROWS_PER_BATCH - 1
            if not (checkpoint / "commits" / str(batch)).exists():
                return batch
            os.kill(java, signal.SIGCONT)
    raise TimeoutError("Spark was never stopped between the two commits")
