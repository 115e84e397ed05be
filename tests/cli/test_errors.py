"""How things go wrong: exit codes, messages that help, and nothing made or broken on the way."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from dibs.cli import run
from dibs.cli.errors import EXIT_OF, HINT_OF, Exit, exit_code_of
from dibs.errors import DibsError, all_errors
from tests.cli.conftest import Filled
from tests.cli.terminal import dibs

TREE = [error for error in all_errors() if error.__module__ == "dibs.errors" and error is not DibsError]
UNKNOWN = "01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a"


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_every_error_has_an_exit_code(error: type[DibsError]) -> None:
    """No error of dibs ends as a fault of dibs: each has a place in the table, or its parent has."""
    assert any(kind in EXIT_OF for kind in error.__mro__)
    assert exit_code_of(error("what happened")) not in (Exit.OK, Exit.INTERNAL)


def test_the_table_of_exit_codes() -> None:
    """Codes differ, each says what it means, and hints are about errors that exist."""
    assert len({code.value for code in Exit}) == len(Exit)
    assert all(code.meaning for code in Exit)
    assert {*HINT_OF, *EXIT_OF} <= {*TREE}
    assert exit_code_of(DibsError("?")) == exit_code_of(RuntimeError("?")) == Exit.INTERNAL
    assert exit_code_of(click.Abort()) == Exit.INTERRUPTED


READING = [
    ["ls"], ["show", UNKNOWN], ["wait", UNKNOWN], ["cancel", UNKNOWN], ["dead", "ls"], ["dead", "replay", "--all"],
    ["dead", "purge", "--all", "--yes"], ["top", "--once"], ["queues"], ["pause", "a"], ["resume", "a"],
    ["configure", "a", "--priority", "1"], ["workers"], ["stats"], ["export"], ["sweep"], ["backup", "copy"],
    ["doctor"],
]  # fmt: skip


@pytest.mark.parametrize("args", READING, ids=" ".join)
def test_a_mistyped_directory_is_not_made(
    args: list[str], empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only enqueue makes a store; all others say that there is none, and how to get one."""
    monkeypatch.chdir(empty)
    assert run(["--url", "./mistyped", *args]) == Exit.STORE
    told = capsys.readouterr().err
    assert "there is no store in" in told
    assert "--url" in told
    assert "dibs enqueue" in told
    assert [path.name for path in empty.iterdir()] == ["pyproject.toml"]


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["--url", "rabbit://x:secret@h", "ls"], 3, "names no store"),
        (["--url", "htp://secret@h", "ls"], 3, "http://TOKEN@HOST"),
        (["--url", "http://h#secret", "ls"], 3, "http://TOKEN@HOST"),
        (["--url", "http://secret@h:port", "ls"], 3, "http://TOKEN@HOST"),
        (["--url", "lmdb:", "ls"], 3, "names no directory"),
        (["--url", "memory:", "enqueue", "a"], 2, "gone when this command ends"),
        (["--max-bytes", "1", "enqueue", "a"], 3, "dibs dead purge"),
        ([], 2, "Usage: dibs"),
        (["dead"], 2, "Usage: dibs dead"),
        (["--url", "./notes", "ls"], 3, "not a dibs store"),
        (["--url", "./notes/file", "ls"], 3, "is a file"),
        (["--durability", "relaxed", "ls"], 3, "--durability"),
        (["--durability", "maybe", "ls"], 2, "choose one of sync, relaxed"),
        (["--tenant", "Not A Tenant", "ls"], 2, "tenant"),
        (["--tenant", "*", "ls"], 2, "one tenant"),
        (["lst"], 2, "Did you mean 'ls'?"),
        (["ls", "--sttus", "x"], 2, "--status"),
        (["ls", "--status", "sleeping"], 2, "sleeping"),
        (["ls", "--cursor", "rubbish"], 2, "cursor"),
        (["ls", "--older-than", "soon"], 2, "5m"),
        (["show", "no-uuid"], 2, "is not a task id"),
        (["show"], 2, "--by-key"),
        (["show", UNKNOWN], 4, "There is no task"),
        (["show", "--by-key", "thumbnail", "nobody"], 4, "nobody"),
        (["wait", UNKNOWN], 4, "There is no task"),
        (["cancel", UNKNOWN], 4, ""),
        (["cancel"], 2, "--by-key"),
        (["dead", "replay"], 2, "--all"),
        (["dead", "replay", "--all", "-c", "x"], 2, "one of the three"),
        (["dead", "replay", UNKNOWN], 4, "left alone"),
        (["dead", "purge", "--all"], 2, "--yes"),
        (["dead", "bury"], 2, "bury"),
        (["pause", "no/command"], 2, "is not a command"),
        (["configure", "report"], 2, "--reset"),
        (["configure", "report", "--lease", "1ms"], 2, "lease_s"),
        (["enqueue", "a", "hello"], 2, '\'"hello"\''),
        (["enqueue", "a", "@nowhere"], 2, "nowhere"),
        (["enqueue", "a/b"], 2, "is not a command"),
        (["enqueue", "a", "--run-at", "tomorrow"], 2, "Z"),
        (["enqueue", "a", "--run-at", "2030-01-01T00:00:00"], 2, "time zone"),
        (["enqueue", "a", "--run-at", "2030-01-01T00:00:00Z", "--delay", "5m"], 2, "use one of them"),
        (["enqueue", "a", "--priority", "11"], 2, "11"),
        (["enqueue", "a", "--lines", "--key", "k"], 2, "--key-field"),
        (["enqueue", "a", "--key-field", "k"], 2, "--lines"),
        (["enqueue", "a", "--lines", "[1]"], 2, "@FILE"),
        (["enqueue", "a", "--payload-max-bytes", "4", "[1, 2, 3]"], 2, "limit"),
        (["enqueue", "a", "--codec", "NO"], 2, "codec"),
        (["enqueue", "a", "--id", UNKNOWN, "--key", "k", "--json"], 2, "slot"),
        (["export", "--after", "xyz"], 2, "cursor"),
        (["export", "--after", "00" * 32], 6, "--after"),
        (["export", "--format", "parquet"], 2, "-o"),
        (["export", "-o", "nowhere/x"], 2, "nowhere/x"),
        (["backup", "notes"], 3, "not empty"),
        (["backup", "notes/file"], 3, "notes/file"),
        (["restore", "notes", "new"], 3, "is not a backup"),
        (["restore", "dibs-data", "notes"], 3, "not empty"),
        (["bench", "--dir", "nowhere"], 2, "nowhere"),
        (["top", "--json"], 2, "--once"),
        (["completion", "tcsh"], 2, "tcsh"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes(here: Filled, args: list[str], code: int, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A mistake has its exit code and a message that says what to do, without a traceback or a password."""
    (here.directory / "notes").mkdir()
    (here.directory / "notes" / "file").write_text("mine")
    assert run(args) == code
    output = capfd.readouterr()
    assert told in output.err
    assert "Traceback" not in output.err
    assert "secret" not in output.err
    assert not (here.directory / "new").exists()


def test_errors_as_json(empty: Path) -> None:
    """With --json an error is one object on stderr: its code, its message, what to do."""
    done = dibs("ls", "--json", cwd=empty)
    error = json.loads(done.stderr)
    assert (done.returncode, error["error"], done.stdout) == (3, "store_missing", "")
    assert set(error) == {"error", "message", "hint"}
    done = dibs("--json", "lst", cwd=empty)
    assert (done.returncode, json.loads(done.stderr)["error"]) == (2, "usage")


def test_a_setting_that_is_none(empty: Path) -> None:
    """A misspelt variable is refused with the likely one; the store is not touched."""
    done = dibs("enqueue", "a", cwd=empty, env={"DIBS_URRL": "x"})
    assert done.returncode == 2
    assert "did you mean DIBS_URL?" in done.stderr
    assert not (empty / "dibs-data").exists()


def test_a_directory_that_cannot_be_read(empty: Path) -> None:
    """A data file that is rubbish is refused and kept."""
    (empty / "dibs-data").mkdir()
    (empty / "dibs-data" / "data.mdb").write_bytes(b"rubbish" * 5000)
    done = dibs("ls", cwd=empty)
    assert done.returncode == 3
    assert "not an LMDB file" in done.stderr
    assert (empty / "dibs-data" / "data.mdb").read_bytes() == b"rubbish" * 5000


def test_parquet_without_pyarrow(
    here: Filled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the extra, the message names it, and no file is made."""
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert run(["export", "-o", "events.parquet"]) == Exit.STORE
    assert "dibs[parquet]" in capsys.readouterr().err
    assert not list(here.directory.glob("events*"))


def test_a_fault_of_dibs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody expected has a code of its own, and its traceback is shown."""
    monkeypatch.setattr("dibs.cli._invoked", lambda _: 1 // 0)
    assert run(["ls"]) == Exit.INTERNAL
    assert "ZeroDivisionError" in capsys.readouterr().err
