"""How an app is found by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dibs import Dibs
from dibs.errors import AppNotFound
from dibs.importing import import_app

APP = "from dibs import Dibs\napp = Dibs('memory:')\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("store_a.py", "store_a:app"),
        ("store_b.py", "store_b"),
        ("store_c.py", "store_c.py:app"),
        ("store_d.py", "./store_d.py"),
        ("pack_e/tasks.py", "pack_e.tasks:app"),
        ("pack_f/tasks.py", "pack_f/tasks.py:app"),
        ("loose_g/tasks_g.py", "loose_g/tasks_g.py:app"),
        ("pack_h/__init__.py", "pack_h:app"),
        ("pack_i/__init__.py", "pack_i/__init__.py:app"),
        ("pack_j/deep/tasks.py", "pack_j/deep/tasks.py"),
    ],
)
def test_an_app_is_found(here: Path, file: str, name: str) -> None:
    """By module or by file, with its attribute or as the only app, from the working directory."""
    path = here / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in path.parents:
        if folder.is_relative_to(here) and folder.name.startswith(("pack_", "deep")):
            (folder / "__init__.py").touch()
    path.write_text(APP + "@app.task\ndef work() -> None: ...\n")
    app = import_app(name)
    assert isinstance(app, Dibs)
    module = file.removesuffix(".py").removesuffix("/__init__").removeprefix("loose_g/").replace("/", ".")
    assert list(app.functions) == [f"{module}.work"]


def test_an_app_inside_something(here: Path) -> None:
    """An attribute may be a path."""
    (here / "nested_k.py").write_text(APP + "class Config:\n    the_app = app\n")
    assert isinstance(import_app("nested_k:Config.the_app"), Dibs)


def test_one_app_under_two_names_is_one_app(here: Path) -> None:
    """A second name for the same app does not make it ambiguous."""
    (here / "twice_l.py").write_text(APP + "also = app\n")
    assert isinstance(import_app("twice_l"), Dibs)


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        (APP, "nowhere_m:app", r"there is no module nowhere_m, looking from /"),
        (APP, "nowhere_m.deeper:app", r"there is no module nowhere_m.deeper"),
        (APP, "nowhere_m.py", r"there is no file nowhere_m.py"),
        (APP, ":app", r"':app' names no module"),
        (APP, "", r"'' names no module"),
        (APP, "mine_m:other", r"mine_m:other is not an app: there is no such name in .*mine_m.py"),
        (APP, "mine_m:app.functions", r"that is a dict"),
        (APP + "other = Dibs('memory:')\n", "mine_m", r"it has 2: app, other. Write mine_m:app"),
        ("", "mine_m", r"it has none"),
        ("def broken(:\n", "mine_m:app", r"mine_m cannot be imported: SyntaxError"),
        ("import not_installed_here\n", "mine_m:app", r"it needs not_installed_here, which is not installed"),
        ("import mine_m.sub\n", "mine_m:app", r"cannot be imported"),
        ("raise KeyError('at import')\n", "mine_m:app", r"mine_m cannot be imported: KeyError: 'at import'"),
        (APP, "../up:app", r"cannot be imported"),
        (APP, ".mine_m:app", r"cannot be imported"),
    ],
)
def test_an_app_that_is_not_found(here: Path, code: str, name: str, says: str) -> None:
    """Each way to be wrong has a message that tells what to do."""
    (here / "mine_m.py").write_text(code)
    with pytest.raises(AppNotFound, match=says):
        import_app(name)
