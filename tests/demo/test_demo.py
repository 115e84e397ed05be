"""`dibs demo`, run as a user would run it, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-W", "error", "-m", "dibs", "demo", "--quick", "--no-history"]
PHASES = ("Enqueue", "Work", "Retry", "Processes", "Crash", "Cancel", "Dead letters", "Call", "Account")
COLUMNS = ("enqueued", "completed", "dead", "cancelled", "waiting", "deliveries")

# A run takes some ten seconds; these are for a machine that does much else.
RUN_S = 150
pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a run: its temporary files, and nothing else, go to `tmp_path`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DIBS_", "FORCE_COLOR"))}
    return kept | {"TMPDIR": str(tmp_path), "COLUMNS": "80"}


def counts_of(table: list[str]) -> dict[str, dict[str, int]]:
    """Reads the table of the summary: its counts by queue and column."""
    rows = [line.replace(",", "").replace("·", "0").split() for line in table]
    return {row[0]: dict(zip(COLUMNS, map(int, row[1:]), strict=True)) for row in rows}


def test_every_task_is_accounted_for(env: dict[str, str], tmp_path: Path) -> None:
    """Every phase is told, the sums of the summary are right, each check holds, no line is too wide for 80 columns,
    nothing is coloured in a pipe, and nothing stays behind."""
    done = subprocess.run(COMMAND, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()

    assert re.findall(r"^(\d)/9 ([^:]+): ", done.stdout, re.MULTILINE) == [
        (str(number), name) for number, name in enumerate(PHASES, 1)
    ]
    assert "kill -9 worker-" in done.stdout
    assert re.search(r"p50 [\d.]+ ms, p99 [\d.]+ ms", done.stdout)

    head = next(index for index, line in enumerate(lines) if line.split() == ["queue", *COLUMNS])
    rows = counts_of(lines[head + 1 : lines.index("", head)])
    for row in rows.values():
        assert row["enqueued"] == row["completed"] + row["dead"] + row["cancelled"] + row["waiting"]
    total = rows.pop("all")
    assert total == {name: sum(row[name] for row in rows.values()) for name in COLUMNS}
    assert (total["dead"], total["cancelled"], total["waiting"]) == (1, 2, 1)
    assert rows["film"]["deliveries"] > rows["film"]["enqueued"], "a killed worker's task is delivered again"

    checks = [line for line in lines if re.match(r"(ok|WRONG) ", line)]
    assert len(checks) >= 12
    assert not [line for line in checks if not line.startswith("ok ")]
    assert f"All {total['enqueued']} tasks are accounted for" in done.stdout

    assert [line for line in lines if len(line) > 80] == []
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def descendants(process_id: int) -> set[psutil.Process]:
    """The processes that a process started, and those that they did."""
    return set(psutil.Process(process_id).children(recursive=True))


@pytest.fixture
def running(env: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that runs, in a session of its own as in a terminal."""
    process = subprocess.Popen(
        COMMAND, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for one in descendants(process.pid):
                one.kill()
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM], ids=lambda which: which.name)
def test_an_interrupt_leaves_nothing_behind(
    which: signal.Signals, running: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Interrupted while its workers run, the demo ends with status 130; its workers and their directory are gone."""
    while len(workers := descendants(running.pid)) < 3:
        assert running.poll() is None
        time.sleep(0.02)
    assert list(tmp_path.iterdir())
    os.killpg(running.pid, which)
    out, _ = running.communicate(timeout=RUN_S)
    assert running.returncode == 130
    assert out.rstrip().endswith("Interrupted: ending the workers.")
    assert not [worker for worker in workers if worker.is_running()]
    assert list(tmp_path.iterdir()) == []
