"""The same code on a cluster: a master and two workers from the pip package, executors that reach the queue by a server;
and through Spark Connect."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.docs.pages import ROOT
from tests.server.running import ServerProcess

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(240)]

HOME = Path(pyspark.__file__).parent
ROWS = 3_000


@contextmanager
def spark_class(name: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon of Spark, ended with the block."""
    environment = {**os.environ, "SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable}
    command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--webui-port", "0", *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=stderr
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A master and two workers of one core each: the master's URL."""
    with ExitStack() as stack:
        log = tmp_path / "master.log"
        stack.enter_context(spark_class("master.Master", "--port", "0", log=log))
        master = _said(log, r"spark://127\.0\.0\.1:\d+")
        for number in range(2):
            log = tmp_path / f"worker-{number}.log"
            directory = str(tmp_path / f"worker-{number}")
            stack.enter_context(
                spark_class("worker.Worker", "-c", "1", "-m", "1g", "-d", directory, master, log=log)
            )
            _said(log, "registered with master")
        yield master


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server over an empty store."""
    with ServerProcess(tmp_path) as running:
        running.start().until_serves()
        yield running.url


def test_a_cluster_fills_reads_and_drains_through_a_server(cluster: str, server: str, tmp_path: Path) -> None:
    """Rows become tasks once, both executors work them off, and a store on the driver's disk is refused."""
    told = _run("tests.spark.on_cluster", cluster, server, str(tmp_path / "own"), str(ROWS))
    refused = told.pop("refused")
    assert told == {
        "enqueued": {"count(1)": ROWS, "count(DISTINCT payload.n)": ROWS},
        "completed": ROWS,
        "executors": 2,
        "sum": sum(n * n for n in range(ROWS)),
        "events": {"enqueued": ROWS, "claimed": ROWS, "completed": ROWS},
    }
    assert "do not share" in refused
    assert "dibs serve" in refused


def _said(log: Path, pattern: str) -> str:
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        found = re.search(pattern, log.read_text())
        if found is not None:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _run(program: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told
