"""A lake's directory: a commit happens whole or not at all, whatever step of it is the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dibs.errors import LakeError
from dibs.history import lake
from dibs.history.lake import NO_DATE, Change, Lake

OLD = {(f"tasks/{NO_DATE}", "open"), ("tasks/date=2026-01-01", "ended")}
ADDED = {("tasks/date=2026-01-02", "ended later"), ("events/date=2026-01-02", "events")}
NEW = {(f"tasks/{NO_DATE}", "still open"), ("tasks/date=2026-01-01", "ended"), *ADDED}


class Killed(BaseException):
    """Stands for the end of the process."""


def staged(one: Lake, table: str, **days: str) -> Path:
    """Writes files as Spark would."""
    directory = one.staging(table)
    for day, text in days.items():
        name = NO_DATE if day == "none" else f"date={day.replace('_', '-').removeprefix('on-')}"
        (directory / name).mkdir(parents=True)
        (directory / name / "part-0.parquet").write_text(text)
    return directory


def first_commit(path: Path) -> None:
    """Makes a lake with two files."""
    with Lake.writing(path) as one:
        one.commit([Change("tasks", staged(one, "tasks", none="open", on_2026_01_01="ended"))], one.state)


def second_commit(path: Path) -> None:
    """Replaces one of them, and adds two."""
    with Lake.writing(path) as one:
        tasks = staged(one, "tasks", none="still open", on_2026_01_02="ended later")
        events = staged(one, "events", on_2026_01_02="events")
        one.commit([Change("tasks", tasks, [NO_DATE]), Change("events", events)], replace(one.state, events=7))


def content(path: Path) -> list[tuple[str, str]]:
    """What readers see: the directory of each file, and what is in it."""
    files = path.glob("[a-z]*/date=*/*.parquet")
    return sorted((str(file.parent.relative_to(path)), file.read_text()) for file in files)


def test_a_commit_is_whole_whatever_step_is_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before any of its steps, a commit has happened or has not, for the next run and for a reader."""
    seen = set()
    for steps in range(100):
        path = tmp_path / str(steps)
        first_commit(path)
        with monkeypatch.context() as patched:
            count = _count(patched, steps)
            try:
                second_commit(path)
            except Killed:
                pass
            else:
                assert count() == steps
                break
        found = Lake.open(path)
        happened = found.state.events == 7
        seen.add(happened)
        assert content(path) == sorted(NEW if happened else OLD)
        second_commit(path)
        assert content(path) == sorted([*NEW, *(ADDED if happened else [])])
        with Lake.writing(path):
            assert not list((path / "_dibs").glob("staging/*"))
    else:
        pytest.fail("a commit has no end")
    assert seen == {True, False}


def _count(patched: pytest.MonkeyPatch, most: int) -> Callable[[], int]:
    """Ends the process before a step of the file system beyond so many. Returns how many there were."""
    made = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if made[0] == most:
                raise Killed
            made[0] += 1
            return function(*arguments, **named)

        return call

    for name in ("rename", "replace", "unlink", "rmdir"):
        patched.setattr(Path, name, counted(getattr(Path, name)))
    patched.setattr(lake, "_sync", counted(lake._sync))
    return lambda: made[0]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second writer is refused while the first is there, and not after it; readers are never."""
    with Lake.writing(tmp_path / "lake"):
        with pytest.raises(LakeError, match="another run"), Lake.writing(tmp_path / "lake"):
            pass
        Lake.open(tmp_path / "lake")
    with Lake.writing(tmp_path / "lake"):
        pass
