"""The command line on a set of shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import Shell, shell  # noqa: F401 a fixture


@pytest.fixture
def here(empty: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose store is a set of shards."""
    monkeypatch.chdir(empty)
    monkeypatch.setenv("DIBS_URL", "shards:./queue?n=3")
    return empty


def shell_error(shell: Shell, *args: str) -> str:  # noqa: F811
    """What a wrong call is told."""
    shell(*args, code=2)
    return shell.err


def test_from_enqueue_to_doctor(here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Tasks go in, are listed and shown with their history, exported in two goes, copied, restored and examined."""
    ids = [shell("enqueue", "work", json.dumps({"n": n})).strip() for n in range(8)]
    monkeypatch.setenv("DIBS_URL", "shards:./queue")
    assert {row["id"] for row in shell.json("ls")["tasks"]} == set(ids)
    assert shell.json("stats")["tenants"][0]["ready"] == 8
    [event] = shell.json("show", ids[3], "--events")["events"]
    assert event["kind"] == "enqueued"
    first = shell.lines("export", "--limit", "5")
    cursor = shell.err.split("--after ")[1].strip()
    rest = shell.lines("export", "--after", cursor)
    assert sorted(event["id"] for event in [*first, *rest]) == sorted(ids)
    assert "3 journals" in shell_error(shell, "export", "--after", cursor.split(",")[0] or "00")
    shell("backup", "copy")
    shell("restore", "copy", "restored")
    monkeypatch.setenv("DIBS_URL", "shards:./restored")
    assert shell.json("doctor")["clean"]
    assert shell.json("stats")["tenants"][0]["ready"] == 8


def test_one_shard_alone_is_refused(here: Path, shell: Shell) -> None:  # noqa: F811
    """Neither enqueue nor doctor open a shard by itself; what they say names the set."""
    shell("enqueue", "work")
    for command in (["enqueue", "work"], ["doctor"]):
        shell("--url", "./queue/0", *command, code=3)
        assert "open the set, shards:./queue" in shell.err
    assert shell.json("stats")["tenants"][0]["ready"] == 1
