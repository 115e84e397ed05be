"""A Spark cluster of its own on this machine: a master and workers, each a process, on addresses that differ, so that
Spark takes them for different hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark

from tests.crash.lifeline import die_with_parent

#: For programs that start several: a Java that does not optimise much, nor collect in parallel, is up sooner.
JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"}

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0
_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


def run_program(name: str, *arguments: str) -> dict[str, Any]:
    """Runs a program with a Spark of its own, and returns the JSON that it prints last."""
    command = [sys.executable, "-m", name, *arguments]
    env = os.environ | JAVA | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@contextmanager
def cluster(directory: Path, workers: int = 2) -> Iterator[str]:
    """Starts a cluster whose workers have a core each, and gives its address; what it writes is in the directory."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    daemons = [["master.Master", "--host", "127.0.0.1", "--port", str(port)]]
    for number in range(1, workers + 1):
        daemons.append(["worker.Worker", "--host", f"127.0.0.{number}", "--cores", "1", "--memory", "1g",
                        "--work-dir", str(directory / f"worker-{number}"), url])  # fmt: skip
    started = []
    try:
        for daemon in daemons:
            started.append(_started(daemon, directory))
        yield url
    finally:
        for process in started:
            process.kill()
            process.wait()


def _started(daemon: list[str], directory: Path) -> subprocess.Popen[bytes]:
    name, *options = daemon
    command = [str(_SPARK_CLASS), f"org.apache.spark.deploy.{name}", "--webui-port", "0", *options]
    small = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_NO_DAEMONIZE": "1"}
    with (directory / "daemons.log").open("ab") as log:
        return subprocess.Popen(
            command,
            env=os.environ | JAVA | small | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,  # noqa: PLW1509 no other thread runs yet
        )
