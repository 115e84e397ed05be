"""The help teaches, is quick, and knows every command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dibs.cli import COMMANDS, cli, run
from tests.cli.terminal import dibs, shown


def commands() -> dict[str, click.Command]:
    """Every command by the words that call it, with those inside groups."""
    found: dict[str, click.Command] = {}
    context = click.Context(cli, info_name="dibs")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": command.commands[inner] for inner in command.commands}
    return found


EVERY = commands()
#: Shared options that mean nothing there.
UNSHOWN = {"serve": {"--tenant", "--json"}, "token new": {"--url"}, "token jwt": {"--url"}}


@pytest.mark.parametrize("words", EVERY)
def test_every_command_teaches(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help has a sentence, its options, examples that call it, and no line over 80 columns."""
    assert run([*words.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: dibs {words}" in text
    assert re.search(r"\n\n  [A-Z][^\n]*[.;]", text)
    last = words.rsplit(maxsplit=1)[-1]
    assert len(re.findall(rf"\bdibs (--\S+ \S+ )*(dead |token |spark |history )?{last}\b", text)) >= 3, (
        "usage and two examples"
    )
    shown = set(re.findall(r"--[a-z-]+", text))
    assert {"--url", "--tenant", "--json", "--help"} - UNSHOWN.get(words, set()) <= shown
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    """The line in the list of commands is the first sentence of the command's own help."""
    assert (EVERY[name].help or "").partition("\n")[0] == COMMANDS[name].summary


def test_examples_parse() -> None:
    """Every example in a help is a command line that exists, options and all."""
    parsed = 0
    for command in EVERY.values():
        for line in getattr(command, "examples", "").splitlines():
            for call in re.findall(r"(?<![\w./])dibs ((?:[^|&>#$\"')]|'[^']*'|\"[^\"]*\")+)", line):
                _parse([*shlex.split(call), *(["01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a"] if "$(" in line else [])])
                parsed += 1
    assert parsed >= 2 * len(COMMANDS)


def _parse(args: list[str]) -> None:
    context = cli.make_context("dibs", list(args))
    command: click.Command = cli
    rest = [*context._protected_args, *context.args]
    while isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
        context = command.make_context(command.name or "", rest, parent=context)
        rest = [*context._protected_args, *context.args]


def test_help_before_the_command(empty: Path) -> None:
    """`dibs --help ls` is `dibs ls --help`; without a command it lists them all, commands first."""
    assert dibs("--help", "ls", cwd=empty).stdout == dibs("ls", "--help", cwd=empty).stdout
    text = shown("--help", cwd=empty)
    assert all(f"  {name} " in text for name in COMMANDS)
    assert text.index("enqueue") < text.index("--durability")
    assert max(map(len, text.splitlines())) <= 80


def test_help_imports_no_command() -> None:
    """The list of commands needs neither the store's engine, nor rich, nor any of the commands."""
    program = (
        "import sys; from dibs.cli import run; run(['--help']); "
        "print([name for name in sys.modules if name in ('rich', 'lmdb', 'rich.console') "
        "or name.startswith('dibs.cli.') and name not in ('dibs.cli.context', 'dibs.cli.errors')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_version(empty: Path) -> None:
    """--version names the program and its version."""
    assert re.fullmatch(r"dibs \d+\.\d+.*\n", dibs("--version", cwd=empty).stdout)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each shell gets a script of its own, which asks dibs for what may come next."""
    assert run(["completion", shell]) == 0
    assert "_DIBS_COMPLETE" in capsys.readouterr().out


def test_completion_completes(empty: Path) -> None:
    """What a shell asks is answered with commands and options."""
    asked = {"_DIBS_COMPLETE": "bash_complete", "COMP_WORDS": "dibs ca", "COMP_CWORD": "1"}
    assert "cancel" in dibs(cwd=empty, env=asked).stdout
    asked = {"_DIBS_COMPLETE": "bash_complete", "COMP_WORDS": "dibs ls --sta", "COMP_CWORD": "2"}
    assert "--status" in dibs(cwd=empty, env=asked).stdout
