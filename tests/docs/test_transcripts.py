"""Pages that show files and a terminal are done as they say, with real workers in processes of their own."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from dibs.server.verifiers.keys import KeyConfig, verifier_of
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.ports import at_a_free_port
from tests.docs.transcript import Transcript

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
LOADS = ROOT / "docs" / "bulk-loads.md"
SECURITY = ROOT / "docs" / "security.md"
TESTING = ROOT / "docs" / "testing-your-tasks.md"


def test_the_readme_is_as_it_says(tmp_path: Path) -> None:
    """The example of the first page works, and so do the commands below it."""
    with Transcript(tmp_path) as transcript:
        transcript.do(at_a_free_port(blocks(README)))


def test_the_readme_has_a_running_example_on_its_first_screen() -> None:
    """A file, a worker and what comes out, before anything has to be scrolled."""
    file, console = list(blocks(README))[:2]
    assert (file.language, console.language) == ("python", "console")
    assert console.line + console.code.count("\n") <= 40


def test_the_page_about_loads_is_as_it_says(tmp_path: Path) -> None:
    """Files are loaded, repeated and refused as the page shows."""
    with Transcript(tmp_path) as transcript:
        transcript.do(list(blocks(LOADS)))


def test_the_tutorial_is_as_it_says(tmp_path: Path) -> None:
    """From the first file to the last command, up to its tests."""
    with Transcript(tmp_path) as transcript:
        transcript.do([block for block in blocks(TUTORIAL) if not runs_pytest(block)])


def test_the_tests_of_the_tutorial_pass(tmp_path: Path) -> None:
    """What the tutorial shows as tests of its program are tests that pass."""
    with Transcript(tmp_path) as transcript:
        transcript.do([block for block in blocks(TUTORIAL) if block.name is not None or runs_pytest(block)])


def test_the_examples_of_testing_pass(tmp_path: Path) -> None:
    """The suite that is shown for the kit is one that passes, with as many tests as it says."""
    with Transcript(tmp_path) as transcript:
        transcript.do(list(blocks(TESTING)))


def test_the_page_about_security_is_as_it_says(tmp_path: Path) -> None:
    """Tokens and keys are made as the page shows, and its tables of keys are ones that a server takes."""
    with Transcript(tmp_path) as transcript:
        transcript.do(list(blocks(SECURITY)))
    kinds = []
    for block in blocks(SECURITY):
        if block.language == "toml":
            for table in tomllib.loads(block.code)["keys"]:
                verifier_of(msgspec.convert(table, KeyConfig), tmp_path)
                kinds.append(table["kind"])
    assert kinds == ["tokens", "secret", "jwks-file", "jwks-url"]


def runs_pytest(block: Block) -> bool:
    """True for a block whose command is pytest."""
    return block.language == "console" and block.code.startswith("$ pytest")
