"""`dibs history` as a user runs it: in this process for what it says, in processes of its own for what is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dibs.cli import run
from dibs.history.lake import Lake
from dibs.history.tables import TABLES
from dibs.stores import open_store
from dibs.task import NewTask
from tests.docs import history_tables
from tests.docs.pages import Block, spark_programs
from tests.history.lakes import Work, digests, rows, take_in
from tests.spark.standalone import JAVA

pytestmark = pytest.mark.timeout(180)
PATIENCE_S = 120.0
TASKS = 400


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A store, and a lake of it."""
    place = tmp_path_factory.mktemp("made")
    url = f"lmdb:{place / 'store'}"
    Work(url, seed=11).go_on(120)
    take_in(url, place / "lake")
    return url, place / "lake"


def test_run_says_what_it_did(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run tells how many events it took in and up to when; as JSON, one document. The store is --store or --url."""
    url, lake = f"lmdb:{tmp_path / 'store'}", str(tmp_path / "lake")
    Work(url, seed=12).go_on(30)
    assert run(["history", "run", "--store", url, "--lake", lake]) == 0
    assert re.search(r"^\d+ events taken in, up to 20.* UTC, in [\d.]+ s", capfd.readouterr().err, re.MULTILINE)
    monkeypatch.setenv("DIBS_URL", url)
    assert run(["history", "run", "--lake", lake, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["events"], said["gaps"]) == (0, [])
    assert run(["history", "run", "--lake", lake, "--target-wait", "9s"]) == 3
    assert "aims at waits of 2 s" in capfd.readouterr().err


def test_query_answers_in_a_table_and_as_json(
    spark: SparkSession, made: tuple[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Every table is there by its name; rows have the types of JSON; what is wrong with a statement is told."""
    _, lake = made
    count = f"SELECT {', '.join(f'(SELECT count(*) FROM {name}) AS {name}' for name in TABLES)}"
    assert run(["history", "query", count, "--lake", str(lake), "--json"]) == 0
    [counts] = json.loads(capfd.readouterr().out)["rows"]
    assert counts == {name: len(rows(lake, name)) for name in TABLES}
    first = "SELECT id, outcome, ended_at, position FROM tasks WHERE outcome = 'completed' ORDER BY ended_at"
    assert run(["history", "query", first, "--lake", str(lake), "--json", "-n", "1"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["more"] is True
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]+Z", said["rows"][0]["ended_at"])
    assert run(["history", "query", first, "--lake", str(lake), "-n", "2"]) == 0
    shown = capfd.readouterr()
    assert shown.out.splitlines()[0].split() == ["ID", "OUTCOME", "ENDED_AT", "POSITION"]
    assert len(shown.out.splitlines()) == 3
    assert "there are more" in shown.err
    assert run(["history", "query", "SELECT nothing FROM tasks", "--lake", str(lake)]) == 1
    assert "DESCRIBE tasks" in capfd.readouterr().err
    before = digests(lake)
    for writing in (
        "INSERT INTO tasks SELECT * FROM tasks",
        "FROM tasks INSERT INTO tasks SELECT *",
        "DROP TABLE tasks",
    ):
        assert run(["history", "query", writing, "--lake", str(lake)]) == 2
        assert "can only be asked" in capfd.readouterr().err
    assert digests(lake) == before
    assert run(["history", "query", "SELECT 'insert -- x' AS a /* drop */", "--lake", str(lake)]) == 0
    assert run(["history", "query", "SELECT 1", "--lake", str(lake), "--memory", "10x"]) == 2
    assert run(["history", "query", "SELECT 1", "--lake", str(lake / "nowhere")]) == 3
    assert "there is no lake" in capfd.readouterr().err


def test_report_writes_a_page_and_tells_the_short_version(
    made: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The page is where it was asked for; the terminal gets its headline."""
    _, lake = made
    page = tmp_path / "page.html"
    assert run(["history", "report", "--lake", str(lake), "-o", str(page), "--days", "3660"]) == 0
    told = capfd.readouterr().out
    tasks = len([row for row in rows(lake, "tasks") if row["enqueued_at"]])
    assert f"{tasks} tasks arrived" in told
    assert told.endswith(f"The report: {page}\n")
    assert "<html" in page.read_text()
    assert run(["history", "report", "--lake", str(lake), "--days", "1", "--since", "2026-01-01"]) == 2
    assert run(["history", "report", "--lake", str(lake), "-o", str(tmp_path / "page.html" / "x")]) == 2


def test_forget_lets_the_journal_go(
    spark: SparkSession, made: tuple[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """The lake's reader is gone from the store; asked again, there was none. The next run is a reader again."""
    url, lake = made

    def readers() -> list[str]:
        async def read() -> list[str]:
            async with await open_store(url, create=False) as store:
                return [reader.name for reader in await store.readers()]

        return asyncio.run(read())

    assert readers() == [Lake(lake).state.reader]
    assert run(["history", "forget", "--store", url, "--lake", str(lake)]) == 0
    assert readers() == []
    assert run(["history", "forget", "--store", url, "--lake", str(lake)]) == 0
    assert "did not wait" in capfd.readouterr().err
    take_in(url, lake)
    assert readers() == [Lake(lake).state.reader]


@pytest.mark.parametrize("block", spark_programs("history"), ids=str)
def test_a_block_is_a_program_that_runs(
    block: Block, spark: SparkSession, made: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs of the pages read a lake as they say: with pandas, Polars, DuckDB, Spark."""
    monkeypatch.chdir(tmp_path)
    code = block.code.replace("lake/", f"{made[1]}/")
    assert code != block.code
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")


def test_the_tables_are_those_of_the_code() -> None:
    """Every column has its row. If not: python -m tests.docs.history_tables."""
    assert history_tables.PAGE.read_text() == history_tables.page()
    assert sorted(history_tables.parts()) == sorted(TABLES)


def start(*arguments: str, url: str) -> subprocess.Popen[str]:
    """Starts dibs as the head of a group of processes, so that all of them can be killed at once."""
    return subprocess.Popen(
        [sys.executable, "-m", "dibs", *arguments],
        env={**os.environ, **JAVA, "DIBS_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits for something that a process does."""
    patience_s = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"it ended: {process.communicate()[0]}")
        assert time.monotonic() < patience_s
        time.sleep(0.05)


def test_a_lake_follows_live_workers_and_survives_its_own_death(spark: SparkSession, tmp_path: Path) -> None:
    """Killed with -9, Java and all, in the midst of its work while a worker is busy, and started again: it catches up,
    ends when it is told to, and has what a lake has that was made in one run afterwards."""
    url, lake = f"lmdb:{tmp_path / 'store'}", tmp_path / "lake"
    enqueue(url, range(TASKS))
    worker = start("worker", "tests.history.live:app", url=url)
    follow = ["history", "run", "--lake", str(lake), "--follow", "--every", "1s", "--master", "local[2]"]
    first = start(*follow, url=url)
    try:
        until(lambda: any((lake / "_dibs" / "staging").glob("*/date=*/*.parquet")), first)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate(timeout=PATIENCE_S)
        enqueue(url, range(TASKS, 2 * TASKS))
        second = start(*follow, url=url)
        try:
            until(lambda: worked_off(lake) == 2 * TASKS, second)
            second.terminate()
            said, _ = second.communicate(timeout=PATIENCE_S)
        finally:
            second.kill()
        assert second.returncode == 0, said
        assert "events taken in, up to" in said
    finally:
        worker.terminate()
        worker.communicate(timeout=PATIENCE_S)
    for path in (lake, tmp_path / "other"):
        take_in(url, path)
    assert digests(lake) == digests(tmp_path / "other")
    assert {row["outcome"] for row in rows(lake, "tasks")} == {"completed", "failed"}


def enqueue(url: str, numbers: range) -> None:
    """Puts tasks in."""

    async def put() -> None:
        async with await open_store(url) as store:
            await store.enqueue("default", [
                NewTask(command="live.work", payload=b'{"number": %d}' % number) for number in numbers
            ])  # fmt: skip

    asyncio.run(put())


def worked_off(lake: Path) -> int:
    """How many tasks a lake knows the end of; 0 while it is being changed."""
    try:
        Lake.open(lake)
        return sum(row["outcome"] is not None for row in rows(lake, "tasks"))
    except Exception:  # noqa: BLE001 a file may go while it is read; the next look sees what took its place
        return 0


def test_the_demo_ends_with_its_history(tmp_path: Path) -> None:
    """The demo tells the short version and leaves the page, which is all that it leaves."""
    command = [sys.executable, "-m", "dibs", "demo", "--quick", "--history"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DIBS_", "FORCE_COLOR"))}
    done = subprocess.run(
        command, env={**kept, **JAVA, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [page] = re.findall(r"^The report: (.+\.html)$", done.stdout, re.MULTILINE)
    assert "tasks arrived" in done.stdout
    assert list(tmp_path.glob("dibs-demo-*")) == [Path(page)]
