"""The command as a process among others: pipes that break, signals, input that streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dibs.cli import run
from tests.cli.conftest import Filled
from tests.cli.terminal import DIBS, PATIENCE_S, dibs, environment, on_terminal


def started(*args: str, cwd: Path) -> subprocess.Popen[bytes]:
    """A command with pipes to all its ends."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*DIBS, *args], cwd=cwd, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe)


def test_enqueue_from_stdin(empty: Path) -> None:
    """A payload, or lines of them, may come from a pipe; the first enqueue makes the store."""
    made = dibs("enqueue", "a", "-", cwd=empty, stdin='{"x": 1}')
    assert json.loads(dibs("show", made.stdout.strip(), "--json", cwd=empty).stdout)["payload"] == {"x": 1}
    done = dibs("enqueue", "a", "--lines", cwd=empty, stdin="1\r\n\n2\n3")
    assert (done.returncode, len(done.stdout.split()), done.stderr) == (0, 3, "3 tasks enqueued.\n")


def test_lines_are_enqueued_as_they_come(empty: Path) -> None:
    """A line written to a pipe that stays open is enqueued now; Ctrl-C ends it and tells what was done."""
    with started("enqueue", "a", "--lines", cwd=empty) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(2):
            process.stdin.write(b"1\n")
            process.stdin.flush()
            assert dibs("show", process.stdout.readline().decode().strip(), cwd=empty).returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b"2 tasks enqueued.\n"


def test_a_reader_that_goes_away(empty: Path) -> None:
    """`dibs ls | head` ends quietly, with the code that shells give a broken pipe."""
    dibs("enqueue", "a", "--lines", "-q", cwd=empty, stdin="\n".join(map(str, range(3000))))
    for args in (["ls", "--all"], ["ls", "--all", "--json"], ["export"]):
        with started(*args, cwd=empty) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(PATIENCE_S) == 141
            assert process.stderr.read() == b""


def test_interrupted(filled: Filled) -> None:
    """Ctrl-C ends a wait with 130, without a traceback."""
    with on_terminal("wait", filled.ids["leased"], filled.ids["completed"], cwd=filled.directory) as terminal:
        terminal.read_until("COMPLETED")
        terminal.interrupt()
        code, text = terminal.finish()
    assert code == 130
    assert "Traceback" not in text


def test_killed_while_enqueueing(empty: Path) -> None:
    """After kill -9 in the middle of a stream, every id that was printed is a task, and the store is sound."""
    with started("enqueue", "a", "--lines", cwd=empty) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"1\n" * 1500)
        process.stdin.flush()
        printed = [process.stdout.readline().strip().decode() for _ in range(500)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
    found = json.loads(dibs("ls", "--all", "--json", cwd=empty).stdout)["tasks"]
    assert {*printed} <= {task["id"] for task in found}
    assert len(found) == 1000
    assert dibs("doctor", cwd=empty).returncode == 0


@pytest.mark.parametrize("url", ["./q", "shards:./q?n=3"])
def test_two_load_one_file(empty: Path, url: str) -> None:
    """Two commands that load the same file at once, and a third that is killed: one of them loads it, the others say
    that it is loaded, and every row is there once."""
    (empty / "rows.jsonl").write_text("".join(f'{{"id": {n}}}\n' for n in range(5_000)))
    args = ("--url", url, "enqueue", "a", "--from", "rows.jsonl", "--key-field", "id", "--json")
    processes = [started(*args, cwd=empty) for _ in range(3)]
    processes[0].kill()
    processes[0].communicate()
    told = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in processes[1:]]
    assert sorted(one["enqueued"] for one in told) == [0, 5_000]
    assert sorted(one["already"] for one in told) == [False, True]
    [stats] = json.loads(dibs("--url", url, "stats", "--json", cwd=empty).stdout)["tenants"]
    assert stats["ready"] == 5_000


def test_follow(filled: Filled) -> None:
    """Following the journal shows what another process does, as it happens."""
    newest = dibs("export", cwd=filled.directory).stderr.split()[-1]
    with started("export", "--follow", "--after", newest, cwd=filled.directory) as process:
        made = dibs("enqueue", "fresh", cwd=filled.directory).stdout.strip()
        assert process.stdout is not None
        event = json.loads(process.stdout.readline())
        assert (event["kind"], event["id"]) == ("enqueued", made)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert b"1 event; go on with --after" in process.stderr.read()


def test_wait_is_woken(filled: Filled) -> None:
    """A wait ends when another process ends the task."""
    made = dibs("enqueue", "fresh", cwd=filled.directory).stdout.strip()
    with started("wait", made, cwd=filled.directory) as process:
        dibs("cancel", made, cwd=filled.directory)
        assert process.wait(PATIENCE_S) == 1
        assert process.stdout is not None
        assert process.stdout.read().decode().split() == [made, "CANCELLED"]


@pytest.mark.parametrize(
    "args",
    [
        ["show", "\x1b[2J"], ["enqueue", "a", "[" * 100_000], ["enqueue", "a\n"], ["--url", "", "ls"],
        ["ls", "--\x1b[31m"], ["ls", "--limit", "1e9"],
        ["ls", "--limit", "0"], ["wait", "--timeout", "-1", "x"], ["--json"], ["--", "-x"],
        ["enqueue", "a", "--delay", "9" * 30 + "d"], ["enqueue", "a", "--key", "k" * 600],
    ],
    ids=lambda args: ascii(" ".join(args))[:30],
)  # fmt: skip
def test_rubbish(here: Filled, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is thrown at it, it ends with a usage error, no traceback, and nothing that steers the terminal."""
    assert run(args) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert "\x1b" not in told


@pytest.mark.parametrize("args", [["enqueue", "a", "\udcff"], ["enqueue", "a", "--key", "\udcff"]], ids=ascii)
def test_bytes_that_are_no_text(filled: Filled, args: list[str]) -> None:
    """Arguments that are not UTF-8 are refused like any other rubbish."""
    done = dibs(*args, cwd=filled.directory)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
