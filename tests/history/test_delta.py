"""Delta lakes: what is refused without Delta, always; what they hold, wherever Delta fits the PySpark that is here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dibs.errors import LakeError, MissingDriver
from dibs.history.delta import check_installed
from dibs.history.lake import Change, Lake, Write, is_lake
from tests.history.lakes import take_in
from tests.spark.standalone import PATIENCE_S, run_program

WITHOUT = find_spec("delta") is None


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What :mod:`tests.history.on_delta` tells."""
    try:
        check_installed()
    except MissingDriver as error:
        pytest.skip(str(error))
    told = run_program("tests.history.on_delta", str(tmp_path_factory.mktemp("delta")))
    if "missing" in told:
        pytest.skip(told["missing"])
    return told


@pytest.mark.timeout(PATIENCE_S)
class TestTables:
    """Work that goes on, taken in as Delta and as Parquet."""

    def test_are_the_same_as_parquet(self, done: dict[str, Any]) -> None:
        """Every table has the same rows in both formats, and the lake remembers which one it has."""
        assert done["kept"] == "delta"
        assert done["first"] == []

    @pytest.mark.parametrize(("tables", "changed"), [("1", {"events"}), ("3", {"events", "tasks", "attempts"})])
    def test_a_run_that_ends_between_tables_is_finished_by_the_next(
        self, done: dict[str, Any], tables: str, changed: set[str]
    ) -> None:
        """Its commit is written down; whoever reads meanwhile sees each table before it or after it. The next run does
        what is missing, and nothing twice."""
        told = done["killed"][tables]
        assert told["ended"] == "killed"
        assert told["left"]
        assert set(told["changed"]) == changed
        assert done["after"] == []

    def test_small_files_are_joined(self, done: dict[str, Any]) -> None:
        """A day to which every run adds keeps few files, and loses no rows by that."""
        assert done["joined"]["times"] > 0
        assert done["joined"]["files"] <= 3
        assert done["after"] == []

    def test_a_run_without_news_writes_nothing(self, done: dict[str, Any]) -> None:
        """No table has a transaction more."""
        assert done["idle"]

    def test_are_rebuilt_from_events(self, done: dict[str, Any]) -> None:
        """What is made anew is what was there."""
        assert done["rebuilt"] == []

    def test_are_asked_and_reported_like_parquet(self, done: dict[str, Any]) -> None:
        """A question has the same answer, and the report says the same."""
        assert done["counted"][0] == done["counted"][1] > 0
        assert done["tasks"] > 0
        assert done["reports"]


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A lake that holds something keeps its format, whatever is asked for; one that holds nothing yet takes it."""
    path = tmp_path / "lake"
    with Lake.writing(path, format="delta") as made:
        assert made.state.format == "delta"
    with Lake.writing(path, format="parquet") as made:
        assert made.state.format == "parquet"
        made.commit([], made.state)
    url = f"lmdb:{tmp_path / 'store'}"
    with pytest.raises(LakeError, match="kept as parquet: leave --format out"):
        take_in(url, path, format="delta")
    assert Lake.open(path).state.format == "parquet"


def test_a_commit_that_takes_spark_waits_for_it(tmp_path: Path) -> None:
    """What a killed run has written down is left to a run that can carry it out: readers go on without it, and what it
    staged stays. Then it is carried out once, and the state is the one to which it leads."""
    path, written = tmp_path / "lake", []

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    def write(one: Write, state: object) -> None:
        written.append(one.table)

    with Lake.writing(path, format="delta") as made:
        made.commit([], made.state, write)
        staged = made.staging("tasks")
        staged.mkdir()
        with pytest.raises(KeyboardInterrupt):
            made.commit([Change("tasks", staged)], made.state, killed)
    assert Lake.open(path).state.commits == 1
    with Lake.writing(path) as made:
        assert made.state.commits == 2
        assert staged.is_dir()
        made.finish(write)
    assert written == ["tasks"]
    assert Lake.open(path).state.commits == 2


@pytest.mark.skipif(not WITHOUT, reason="delta-spark is installed")
def test_says_what_to_install(tmp_path: Path) -> None:
    """Without Delta nothing is made, and the advice names the package and the PySpark that it must fit."""
    url, path = f"lmdb:{tmp_path / 'store'}", tmp_path / "lake"
    with pytest.raises(MissingDriver, match=r"pip install delta-spark, in the version .* Here: PySpark \d"):
        take_in(url, path, format="delta")
    assert not is_lake(path)


def test_parquet_imports_no_delta() -> None:
    """The path without Delta does not look for it."""
    program = "import sys, dibs.history.run, dibs.history.parquet; assert 'dibs.history.delta' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
