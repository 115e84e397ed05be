"""The page about the command line shows what there is, and what it shows works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from dibs.cli import COMMANDS
from dibs.cli.errors import Exit
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "command-line.md"
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXPECTED = re.compile(r"# exit code (\d+)$")


def test_every_command_is_on_the_page() -> None:
    """Each command has a heading, or a place in one, and no heading names a command that does not exist."""
    named = {
        name for heading in re.findall(r"^### (.*)$", PAGE.read_text(), re.MULTILINE) for name in heading.split(", ")
    }
    assert named == {f"`{name}`" for name in COMMANDS}


def test_the_exit_codes_are_those_of_the_code() -> None:
    """The table has every code, in order, with the words of the code."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(str(code.value), code.meaning.replace("|", r"\|")) for code in Exit]


def test_the_examples_run(tmp_path: Path) -> None:
    """Typed one after the other into one shell in an empty directory, every line ends with the code that it says."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dibs").write_text(f'#!/bin/sh\nexec {sys.executable} -W error -m dibs "$@"\n')
    (tmp_path / "bin" / "dibs").chmod(0o755)
    (tmp_path / "pyproject.toml").write_text("")
    lines = [
        line[2:] for block in _CONSOLE.findall(PAGE.read_text()) for line in block.splitlines() if line[:2] == "$ "
    ]
    script = "\n".join(f"{line}\necho exit:$? >&3" for line in lines)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIBS_")}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"exec 3>codes\n{script}"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50,
        check=False,
    )  # fmt: skip
    codes = [int(code) for code in re.findall(r"exit:(\d+)", (tmp_path / "codes").read_text())]
    expected = [int(found[1]) if (found := _EXPECTED.search(line)) else 0 for line in lines]
    assert list(zip(lines, codes, strict=True)) == list(zip(lines, expected, strict=True)), done.stderr
