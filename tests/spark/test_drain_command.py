"""`dibs spark drain`: a queue is worked off from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dibs.cli import run
from tests.cli.terminal import DIBS, dibs, environment
from tests.spark.filling import fill, results_of, statuses_of

MODULE = """
import threading

import helping_hand  # found from here, and nowhere else

lock = threading.Lock()  # which does not travel, and need not

def double(batch):
    numbers = batch["payload"].astype(int)
    if (numbers == 13).any():
        raise ValueError("thirteen")
    return numbers * helping_hand_factor

helping_hand_factor = helping_hand.FACTOR
not_a_function = 5
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module in it that is not installed anywhere."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "doubling.py").write_text(MODULE)
    (tmp_path / "helping_hand.py").write_text("FACTOR = 2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("doubling", "helping_hand"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["doubling:double", "doubling.py:double"])
def test_a_queue_is_worked_off(
    spark: SparkSession, here: Path, url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function of a module in the working directory runs on executors; the summary has a line for each Spark task."""
    ids = fill(url, range(10))
    assert run(["--url", url, "spark", "drain", name, "-c", "work", "--batch", "4"]) == 0
    said = capsys.readouterr()
    assert results_of(url, ids) == [2 * n for n in range(10)]
    head, *lines = said.out.splitlines()
    assert head.split()[:4] == ["PARTITION", "CLAIMED", "COMPLETED", "RETRIED"]
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert said.err.startswith("10 tasks completed in ")


def test_tasks_that_fail(spark: SparkSession, here: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Are told with their errors, and by the exit code; `--json` has the same for scripts."""
    ids = fill(url, range(20), max_attempts=1)
    assert run(["--url", url, "spark", "drain", "doubling:double", "-c", "work", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {name: told[name] for name in ("claimed", "completed", "failed", "errors")} == {
        "claimed": 20, "completed": 19, "failed": 1, "errors": {"ValueError": 1},
    }  # fmt: skip
    assert [row["partition"] for row in told["partitions"]] == [0, 1]
    assert statuses_of(url, ids) == {"COMPLETED": 19, "FAILED": 1}


def test_budgets(spark: SparkSession, here: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and time can be limited."""
    ids = fill(url, range(10))
    for limit in (["--max-rows", "3"], ["--max-time", "0s"]):
        assert run(["--url", url, "spark", "drain", "doubling:double", "-c", "work", *limit]) == 0
    assert statuses_of(url, ids) == {"COMPLETED": 3, "PENDING": 7}


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["doubling:double", "-c", "work", "--url", "nowhere"], 3, "there is no store"),
        (["doubling:nothing", "-c", "work"], 2, "doubling:nothing is not a function: there is no such name in"),
        (["doubling:not_a_function", "-c", "work"], 2, "that is a int"),
        (["nothing:double", "-c", "work"], 2, "there is no module nothing"),
        (["doubling:double"], 2, "Missing option '--command'"),
        (["doubling:double", "-c", "work", "--batch", "0"], 2, "--batch"),
        (["doubling:double", "-c", "work", "--payload", "n INTT"], 2, "neither a type nor a schema"),
    ],
)
def test_what_is_wrong_is_told(
    spark: SparkSession,
    here: Path,
    url: str,
    args: list[str],
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the exit codes of all commands."""
    fill(url, [1])
    assert run(["--url", url, "spark", "drain", *args]) == code
    assert text in capsys.readouterr().err


def test_without_java(here: Path, url: str) -> None:
    """It says what to install."""
    fill(url, [1])
    done = dibs(
        "--url", url, "spark", "drain", "doubling:double", "-c", "work", cwd=here, env={"JAVA_HOME": "/nowhere"}
    )
    assert done.returncode == 3
    assert "Spark needs Java 17 or newer: install one" in done.stderr
    assert "There is no /nowhere/bin/java" in done.stderr


def test_without_pyspark(here: Path) -> None:
    """It names the extra."""
    program = (
        "import sys; sys.modules['pyspark'] = None; from dibs.cli import run; "
        "sys.exit(run(['spark', 'drain', 'doubling:double', '-c', 'work']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "pip install 'dibs[spark]'" in done.stderr) == (3, True)


@pytest.mark.timeout(180)
def test_a_program_without_pyspark(here: Path) -> None:
    """Whoever imports it is told what to install."""
    code = "import sys; sys.modules['pyarrow'] = None; import dibs.spark"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=False)
    assert "MissingDriver: Spark needs pyarrow, which is not installed: pip install 'dibs[spark]'" in done.stderr
    code = (
        "import sys; sys.modules['pyarrow'] = None; import pyspark_dibs; print(hasattr(pyspark_dibs, 'DefaultSource'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_nothing_but_the_summary_is_said(here: Path, url: str) -> None:
    """A Spark of its own starts and ends without a line on stderr."""
    fill(url, range(10))
    done = subprocess.run(
        [*DIBS, "--url", url, "spark", "drain", "doubling:double", "-c", "work", "--master", "local[2]"],
        cwd=here, env=environment(), capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("10 tasks completed in ")
