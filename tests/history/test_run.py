"""A lake of a real store: its tables are what the journal says, however its runs are cut and whatever ends them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dibs.errors import JournalReset, JournalTrimmed, LakeError
from dibs.history import formats, intake, lake
from dibs.history import run as runs
from dibs.history.erlang import Target
from dibs.history.lake import Lake
from dibs.history.tables import SCHEMA_VERSION, TABLES
from dibs.settings import load
from dibs.stores import open_store
from tests.history import oracle, oracle_gold
from tests.history.comparing import assert_same
from tests.history.lakes import Work, digests, files, journal, rows, take_in

TARGET = Target(wait_ms=2_000, share=0.95)
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def once(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A store of two shards with days of work in it, and a lake of it that was made in one run."""
    place = tmp_path_factory.mktemp("once")
    url = f"shards:{place / 'store'}?n=2"
    Work(url, seed=1).go_on(250)
    take_in(url, place / "lake")
    return url, place / "lake"


def test_tables_are_what_the_journal_says(once: tuple[str, Path]) -> None:
    """Events, attempts, tasks and the five tables of gold are what plain Python makes of the same journal."""
    url, path = once
    events = journal(url)
    assert [row.kind for row in events].count("replayed") > 0
    assert len({row.at.date() for row in events}) > 2
    silver = oracle.silver(events)
    expected = {
        "events": [{**row._asdict(), "date": row.at.date()} for row in events],
        "attempts": silver.attempts,
        "tasks": silver.tasks,
        **oracle_gold.gold(silver, [row for row in events if row.kind == "replayed"], oracle_gold.span(events), TARGET),
    }
    for table in TABLES:
        assert_same(table, rows(path, table), expected[table])


def test_runs_between_the_work_make_the_same_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a lake is run while the queue works, in whatever batches, small files joined or not, its tables are
    those of one run at the end; so are those that are rebuilt from its events. A run over a little more leaves the
    files of earlier days alone, in every table."""
    monkeypatch.setattr(formats, "SMALL_FILES_MAX", 2)
    url, path = f"lmdb:{tmp_path / 'store'}", tmp_path / "lake"
    work = Work(url, seed=2)
    work.go_on(60)
    take_in(url, path, batch_events=-(-len(journal(url)) // 3))
    before = {file: file.stat().st_mtime_ns for file in files(path)}
    work.go_on(3)
    assert take_in(url, path).events > 0
    since = min(row.at for row in journal(url)[Lake(path).state.events - 1 :]).date()
    earlier = {file for file in before if file.parent.name < f"date={since}" and file.parents[1].name != "tasks"}
    assert {file.parents[1].name for file in earlier} >= {"events", "queue_minutes", "capacity"}
    kept = {file: file.stat().st_mtime_ns for file in files(path)}
    assert {file: before[file] for file in earlier}.items() <= kept.items()
    assert max(len(Lake(path).files("events", day.name)) for day in (path / "events").iterdir()) <= 3
    take_in(url, tmp_path / "other")
    assert digests(path) == digests(tmp_path / "other")
    take_in(url, path, rebuild=True)
    assert digests(path) == digests(tmp_path / "other")


class Killed(Exception):
    """Stands for the end of the process."""


def test_a_run_that_ends_anywhere_is_repeated_without_a_trace(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a run ends before its commit, in its midst, before the journal and Spark are told of it, or before gold:
    the next one goes on, and in the end the tables are those of one run, even if the stream's offsets are lost."""
    url, path = f"lmdb:{tmp_path / 'store'}", tmp_path / "lake"
    Work(url, seed=6).go_on(60)
    size = -(-len(journal(url)) // 5)
    for owner, name, calls in (
        (lake, "_sync", 3),
        (lake, "_finish", 1),
        (Path, "rename", 2),
        (runs.Journal, "advance", 0),
        (intake.Intake, "refine", 0),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, _killed_after(calls, getattr(owner, name)))
            with pytest.raises(Killed):
                take_in(url, path, batch_events=size)
    shutil.rmtree(path / "_dibs" / "checkpoint")
    take_in(url, path)
    take_in(url, tmp_path / "other")
    assert digests(path) == digests(tmp_path / "other")


def _killed_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function end the process when it was called so often."""
    left = iter(range(calls))

    def call(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return function(*arguments)

    return call


def test_what_was_trimmed_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """A journal that reached its size before the lake took it in: the run stops and says which time is missing; told to
    go on, it does, and remembers the gap. Until then the journal waits for the lake, however old its events are."""
    url, path = f"lmdb:{tmp_path / 'store'}", tmp_path / "lake"
    work = Work(url, seed=4)
    work.go_on(20)
    take_in(url, path)
    work.go_on(20)
    there = len(journal(url))
    _sweep(url, journal_retention_s=1)
    assert there - Lake(path).state.events <= len(journal(url)) < there
    _sweep(url, journal_max_bytes=1)
    last = Lake(path).state.positions["0"].at
    with pytest.raises(JournalTrimmed, match=f"after {last:%Y-%m-%d %H:%M:%S} and before 20"):
        take_in(url, path)
    work.go_on(5)
    ended = take_in(url, path, go_on=True)
    assert [gap.after for gap in ended.gaps] == [last]
    found = Lake(path)
    assert found.state.gaps == ended.gaps
    assert runs.Journal(url, found).gaps() == []


def _sweep(url: str, **settings: Any) -> None:
    async def sweep() -> None:
        async with await open_store(url, settings=load({"url": url, **settings}), create=False) as store:
            await store.sweep()

    asyncio.run(sweep())


def test_a_lake_is_of_one_store(spark: SparkSession, once: tuple[str, Path], tmp_path: Path) -> None:
    """Another store than the lake's is refused, with one shard or as many, and nothing changes."""
    _, path = once
    before = digests(path)
    for url in (f"lmdb:{tmp_path / 'one'}", f"shards:{tmp_path / 'two'}?n=2"):
        Work(url, seed=5).go_on(5)
        with pytest.raises(JournalReset, match="name another --lake"):
            take_in(url, path)
    assert digests(path) == before


def test_refused_before_spark_starts(tmp_path: Path) -> None:
    """A directory with something else in it, a lake that another run writes, one of a newer or an older version, and
    other settings than its own are told apart."""
    url, path = f"lmdb:{tmp_path / 'store'}", tmp_path / "lake"
    Work(url, seed=8).go_on(1)
    with pytest.raises(LakeError, match="not a lake"):
        take_in(url, tmp_path)
    with Lake.writing(path), pytest.raises(LakeError, match="another run"):
        take_in(url, path)
    with pytest.raises(LakeError, match="aims at waits of 2 s"):
        take_in(url, path, target_wait_s=3.0)
    with pytest.raises(LakeError, match="there is no lake"):
        Lake.open(tmp_path / "nowhere")
    state = path / "_dibs" / "lake.json"
    said = state.read_text()
    for version, advice in ((SCHEMA_VERSION + 1, "upgrade dibs"), (0, "--rebuild")):
        state.write_text(said.replace(f'"schema_version": {SCHEMA_VERSION}', f'"schema_version": {version}'))
        with pytest.raises(LakeError, match=advice):
            take_in(url, path)
    (path / "tasks" / "date=2026-01-01").mkdir()
    (path / "tasks" / "date=2026-01-01" / "000001-0.parquet").touch()
    state.unlink()
    with pytest.raises(LakeError, match="bring that back"):
        take_in(url, path)
    shutil.rmtree(path / "tasks" / "date=2026-01-01")
    state.write_text("{}")
    with pytest.raises(LakeError, match="cannot be read"):
        take_in(url, path)
    assert not any(files(path))
