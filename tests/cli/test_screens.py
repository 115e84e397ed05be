"""What people see: on a terminal of 80 columns, with and without colours, and in a pipe."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from tests.cli.conftest import LONG, Filled
from tests.cli.terminal import dibs, on_terminal, shown

SCREENS = [
    ["ls"], ["dead", "ls"], ["queues"], ["workers"], ["stats"], ["stats", "--tenant", "*"], ["config"], ["doctor"],
    ["top", "--once", "--interval", "0s"], ["sweep"],
]  # fmt: skip


def tidy(text: str, columns: int = 80) -> None:
    """No line is wider than the screen; what tasks carry cannot steer the terminal."""
    for line in text.splitlines():
        assert cell_len(line) <= columns, line
        assert all(char.isprintable() or char == "\r" for char in line), line


@pytest.mark.parametrize("args", SCREENS, ids=" ".join)
def test_screens_fit(filled: Filled, args: list[str]) -> None:
    """At 80 columns no line is wider, however long names and texts are."""
    tidy(shown(*args, cwd=filled.directory))


@pytest.mark.parametrize("name", ["failed", "ready", "binary", "delayed", "leased"])
def test_a_task_fits(filled: Filled, name: str) -> None:
    """A task's own screen fits too, with its texts whole: they are wrapped, not cut."""
    text = shown("show", filled.ids[name], "--events", cwd=filled.directory)
    tidy(text.partition("id ")[2])
    assert filled.ids[name] in text


@pytest.mark.parametrize("columns", [40, 60])
def test_narrow_screens(filled: Filled, columns: int) -> None:
    """A row stays a line on a narrow terminal too: what does not fit is cut at the end."""
    text = shown("ls", cwd=filled.directory, columns=columns)
    tidy(text, columns)
    assert len(text.splitlines()) == 1 + len(filled.ids)


def test_ids_are_whole(filled: Filled) -> None:
    """Commands are shortened; an id never is, since it must be given whole."""
    text = shown("ls", cwd=filled.directory)
    assert all(task_id in text for task_id in filled.ids.values())
    assert LONG not in text
    assert re.search(r"send-[a-z-]*…", text)


def test_a_pipe_is_plain_and_whole(filled: Filled) -> None:
    """In a pipe nothing is shortened, coloured or padded at the end; COLUMNS limits it when it is set."""
    text = dibs("ls", cwd=filled.directory).stdout
    assert LONG in text
    assert "\x1b" not in text
    assert not re.search(r" \n", text)
    assert {line.split()[0] for line in text.splitlines()[1:]} == {*filled.ids.values()}
    tidy(dibs("ls", cwd=filled.directory, env={"COLUMNS": "80"}).stdout)


def test_colours(filled: Filled) -> None:
    """A terminal gets colours; NO_COLOR takes them away."""
    with on_terminal("ls", cwd=filled.directory) as terminal:
        terminal.finish()
    assert "\x1b[31m" in terminal.raw
    with on_terminal("ls", cwd=filled.directory, env={"NO_COLOR": "1"}) as terminal:
        terminal.finish()
    assert not re.search(r"\x1b\[3\dm", terminal.raw)


def test_top_live(filled: Filled) -> None:
    """It draws frames that fit, follows what happens, and gives the screen back when q is pressed."""
    with on_terminal("top", "--interval", "200ms", cwd=filled.directory, lines=20) as terminal:
        terminal.read_until("thumbnail")
        dibs("enqueue", "brand-new", cwd=filled.directory)
        terminal.read_until("brand-new")
        terminal.press("q")
        code, text = terminal.finish()
    assert code == 0
    tidy("\n".join(frame for frame in text.split("dibs top")[1:]))
    assert "\x1b[?1049h" in terminal.raw
    assert terminal.raw.rstrip().endswith("\x1b[?1049l")


def test_top_small(filled: Filled) -> None:
    """More queues than lines: the fullest are shown, the others counted."""
    for name in ("a", "b", "c", "d"):
        dibs("enqueue", name, cwd=filled.directory)
    with on_terminal("top", cwd=filled.directory, lines=13) as terminal:
        text = terminal.read_until("more queues")
        terminal.interrupt()
        assert terminal.finish()[0] == 0
    assert "report" in text


def test_progress_is_for_people(filled: Filled) -> None:
    """A long operation shows on a terminal how far it is, and nothing of it in a pipe."""
    with on_terminal("doctor", cwd=filled.directory) as terminal:
        assert "examine" in terminal.finish()[1]
    assert dibs("doctor", cwd=filled.directory).stderr == ""


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1)])
def test_purge_asks(filled: Filled, answer: str, code: int, left: int) -> None:
    """On a terminal a purge asks first; no means that nothing happens."""
    with on_terminal("dead", "purge", "--all", cwd=filled.directory) as terminal:
        terminal.read_until("for good?")
        terminal.press(answer)
        assert terminal.finish()[0] == code
    assert dibs("dead", "ls", "--json", cwd=filled.directory).stdout.count('"id"') == left
