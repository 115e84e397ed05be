"""Processes of a drain are killed: what they held comes back, and in the end every task is done once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dibs.spark.connection import ask
from dibs.stores.protocol import Store
from dibs.task import EventKind
from tests.spark.filling import fill, tasks_of

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

from dibs.spark import drain, session
from dibs.spark.connection import ask

url, marks = sys.argv[1], Path(sys.argv[2])

def dies_twice(batch):
    numbers = batch["payload"].astype(int)
    for victim in (150, 620):
        if (numbers == victim).any() and not (marks / str(victim)).exists():
            (marks / str(victim)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return numbers

def left():
    return ask(url, lambda store: store.stats("default")).total

# Four tries of a Spark task, as on a cluster.
spark = session("killed", master="local[2,4]", config={"spark.driver.memory": "512m"})
rounds = []
while left().ready + left().leased + left().delayed:
    done = drain(spark, url, "work", dies_twice, batch=50, lease_s=2.0).collect()
    rounds.append([row["worker"] for row in done])
    time.sleep(0.5)
print(json.dumps(rounds))
"""


@pytest.mark.timeout(180)
def test_killed_python_workers(url: str, tmp_path: Path) -> None:
    """Two Python processes are killed with -9 in mid-batch: Spark starts their tasks again, which go on with others;
    the rows they held are taken back when their leases end, and every row is completed once."""
    ids = fill(url, range(1000))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "marks").mkdir()
    done = subprocess.run(
        [sys.executable, str(program), url, str(tmp_path / "marks")],
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout.splitlines()[-1])
    assert any(worker.endswith(".1") for worker in rounds[0]), "a second try of a Spark task"
    assert {mark.name for mark in (tmp_path / "marks").iterdir()} == {"150", "620"}

    async def ends(store: Store) -> Counter[tuple[bytes, EventKind]]:
        seen: Counter[tuple[bytes, EventKind]] = Counter()
        after = None
        while True:
            page = await store.events("default", after=after)
            seen.update((event.id, event.kind) for event in page.events)
            if not page.more:
                return seen
            after = page.cursor

    events = ask(url, ends)
    assert all(events[one, EventKind.COMPLETED] == 1 for one in ids)
    expired = {one for one in ids if events[one, EventKind.LEASE_EXPIRED]}
    assert len(expired) >= 2
    assert {task.id for task in tasks_of(url, ids) if task.attempts == 2} == expired
