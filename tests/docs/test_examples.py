"""What the documentation shows runs, and what it points to exists."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import click
import pytest

from dibs import Backoff, Batch, CurrentTask, Dibs, Handle
from dibs.cli.worker import worker
from dibs.errors import all_errors
from dibs.function import CallOptions
from dibs.listeners import Happening
from dibs.server.auth import NEEDS
from dibs.server.verifiers.jwt import Claims
from dibs.server.verifiers.keys import KeyConfig
from dibs.task import NewTask
from dibs.testing.kit import Kit
from tests.docs import settings_table
from tests.docs.pages import PAGES, ROOT, Block, blocks, prose, python_blocks
from tests.server.running import ServerProcess

PROGRAMS = [block for block in python_blocks() if block.name is None]
SUITE = [block for block in blocks(ROOT / "docs" / "testing-a-store.md") if block.name is not None]
VALUES = ROOT / "docs" / "values-and-errors.md"


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_block_is_a_program_that_runs(block: Block, tmp_path: Path) -> None:
    """Copied into a file in an empty directory and run, every Python block ends well."""
    (tmp_path / "example.py").write_text(block.code)
    command = [sys.executable, "-W", "error", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_the_suite_for_store_authors_runs(tmp_path: Path) -> None:
    """The files shown to authors of stores are a test suite that passes: a part of the contract, and the model."""
    assert {block.name for block in SUITE} == {"conftest.py", "test_contract.py", "test_model.py"}
    for block in SUITE:
        assert block.name is not None
        (tmp_path / block.name).write_text(block.code)
    (tmp_path / "pytest.ini").write_text("[pytest]\nanyio_mode = auto\n")
    # A fixed seed: whether store and model agree is for tests/model to find out, not for a page.
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-k", "TestSettle or test_model"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A link within the repository names a file that exists and, after a #, a heading that is in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    """A path in backticks is there: from the root or, without a directory, somewhere in the package; or the page
    itself shows it as a file."""
    shown = {block.name for block in blocks(page)}
    for name in re.findall(r"`([\w./-]+\.(?:py|md|toml)|[\w./-]+/)`", page.read_text()):
        if re.match(r"(src|tests|docs|bench|examples)/", name):
            assert (ROOT / name).exists(), name
        elif name.endswith(".py") and "/" not in name and name not in shown:
            assert any((ROOT / "src").rglob(name)), name


def test_every_module_has_its_room() -> None:
    """The architecture names each module of the package, or the directory that it is one of many in."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    for module in (ROOT / "src" / "dibs").rglob("*.py"):
        name = module.relative_to(ROOT)
        if not name.stem.startswith("__"):
            assert f"`{name}`" in page or any(f"| `{parent}/` |" in page for parent in name.parents), name


def test_every_page_is_in_the_index() -> None:
    """The index of the documentation names each of its pages."""
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    """What the first page says of speed was measured, in the run that the benchmarks show."""
    section = (ROOT / "README.md").read_text().partition("## Performance")[2].partition("\n## ")[0]
    measured = (ROOT / "bench" / "README.md").read_text().partition("## Figures")[2]
    figures = re.findall(r"\d[\d,]*\.\d+|\d+(?:,\d{3})+", section)
    assert figures
    assert [figure for figure in figures if f"| {figure} |" not in measured] == []


def test_the_table_of_settings_is_that_of_the_code() -> None:
    """The page shows what is declared. If not: python -m tests.docs.settings_table."""
    assert settings_table.written() == settings_table.table()


def test_the_table_of_options_is_that_of_the_code() -> None:
    """Every option of a task has a row, in the order of its declaration, and no row is about anything else."""
    section = VALUES.read_text().partition("## A task")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == NewTask.__struct_fields__


def test_the_tables_of_the_decorator_are_those_of_the_code() -> None:
    """What `@app.task` takes has a row, in order: its own parameters, and the options of each enqueue."""
    declared = list(inspect.signature(Dibs.task).parameters)
    assert rows("tasks.md", "## Declaring") == [name for name in declared if name not in ("self", "handler", "options")]
    assert rows("tasks.md", "## Options") == list(CallOptions.__annotations__)


def test_the_fields_of_a_backoff_are_those_of_the_code() -> None:
    """Each has a row, in order, with its default."""
    assert rows("tasks.md", "## Failures") == list(Backoff.__struct_fields__)
    section = section_of("tasks.md", "## Failures")
    for name, default in zip(Backoff.__struct_fields__, Backoff.__struct_defaults__, strict=True):
        shown = f'`"{default}"`' if isinstance(default, str) else f"{default:g}"
        assert f"| `{name}` | {shown} |" in section


@pytest.mark.parametrize(
    ("heading", "kind", "not_for_users"),
    [
        ("## Handles", Handle, set()),
        ("## Handles", Batch, {"task_ids"}),
        ("## In a handler", CurrentTask, {"stop", "tell"}),
        ("## The fixture", Kit, set()),
    ],
)
def test_what_can_be_asked_is_told(heading: str, kind: type, not_for_users: set[str]) -> None:
    """Every public name of a handle, a batch, the current task and the kit is on its page."""
    section = section_of("testing-your-tasks.md" if kind is Kit else "tasks.md", heading)
    for name in {name for name in dir(kind) if not name.startswith("_")} - not_for_users:
        assert re.search(rf"\b{name}\b", section), name


def test_the_flags_of_a_worker_are_those_of_the_code() -> None:
    """The table has every flag of `dibs worker` that is its own, in order, and its default where it shows one."""
    own = [option for option in worker.params if isinstance(option, click.Option) and not option.hidden]
    own = own[: next(index for index, option in enumerate(own) if option.name == "url")]
    section = section_of("workers.md", "## Options")
    assert re.findall(r"^\| `(--[\w-]+)` \|", section, re.MULTILINE) == [option.opts[0] for option in own]
    for option in own:
        if option.show_default and option.name != "pool":
            assert f"| `{option.opts[0]}` | {option.default} |" in section


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_workers_are_started_with_flags_that_exist(page: Path) -> None:
    """Wherever a page shows how to start a worker, it can be started so."""
    known = {name for option in worker.params for name in option.opts} | {"--help"}
    for line in re.findall(r"dibs worker [^`\n]*", page.read_text()):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known, line


def test_every_event_is_told() -> None:
    """The table of events has all that one can listen to, and nothing else."""
    table = re.findall(r"^\| (`.*?) \|", section_of("tasks.md", "## Events"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(table)) == list(Happening)


def test_the_tree_of_errors_is_that_of_the_code() -> None:
    """The page draws every error, parents first, and no other."""
    tree = VALUES.read_text().partition("## Errors")[2].split("```")[1]
    drawn = re.findall(r"^[│├└─ ]*(\w+)", tree, re.MULTILINE)
    assert [name for name in drawn if name] == [error.__name__ for error in all_errors() if "dibs" in error.__module__]


def test_the_table_of_scopes_is_that_of_the_code() -> None:
    """Every verb of a server has a place in the table, with the scopes that it asks for."""
    told: dict[str, frozenset[str]] = {}
    for verbs, scopes in re.findall(r"^\| (`.*?) \| (`.*?) \|$", section_of("security.md", "## Scopes"), re.MULTILINE):
        told |= {verb: frozenset(re.findall(r"`(\w+)`", scopes)) for verb in re.findall(r"`(\w+)`", verbs)}
    assert told == dict(NEEDS)


def test_the_fields_of_a_table_of_keys_are_those_of_the_code() -> None:
    """Each has a row, in order."""
    section = section_of("security.md", "## Which kind of token").partition("Fields of a")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == KeyConfig.__struct_fields__


def test_the_claims_are_those_of_the_code() -> None:
    """The table of claims names every claim that is read, and no other."""
    table = re.findall(r"^\| (`.*?) \|", section_of("security.md", "## Claims"), re.MULTILINE)
    named = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert named | {"nbf", "iat"} == set(Claims.__struct_encode_fields__)


def section_of(page: str, heading: str) -> str:
    """The text below a heading, up to the next of its level."""
    return (ROOT / "docs" / page).read_text().partition(f"\n{heading}")[2].partition("\n## ")[0]


def rows(page: str, heading: str) -> list[str]:
    """What the rows of a section's tables begin with, where that is one name."""
    return re.findall(r"^\| `(\w+)` \|", section_of(page, heading), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_bulk_load_example_runs() -> None:
    """What breaks leaves nothing, and a name is loaded once."""
    command = [sys.executable, "-W", "error", "examples/bulk_load.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing is enqueued: line 70000 cannot be read" in done.stdout
    assert done.stdout.count("100,000 are ready") == 2


def test_the_bare_store_example_runs() -> None:
    """The example of the verbs beneath the app runs by itself."""
    command = [sys.executable, "-W", "error", "examples/bare_store.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("COMPLETED b'\"ok\"'\n")


def test_the_worker_by_http_runs(tmp_path: Path) -> None:
    """Tasks that are enqueued are done by a program that knows nothing but HTTP, and it ends when there are none."""
    with ServerProcess(tmp_path) as server:
        server.start().until_serves()
        for word in ("hello", "world"):
            asked = json.dumps({"command": "shout", "payload": word}).encode()
            headers = {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/tasks", asked, headers)).close()
        command = [sys.executable, "-W", "error", "examples/http_worker.py", server.url, "0.2"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in lines[:2]] == ["HELLO!", "WORLD!"]
    assert lines[2:] == ["nothing to do"]


def test_the_hello_example_is_the_readmes() -> None:
    """The first example of the README is a file that can be run as it stands."""
    shown = next(block.code for block in blocks(ROOT / "README.md") if block.name == "hello.py")
    example = (ROOT / "examples" / "hello.py").read_text()
    task = shown[shown.index("app = Dibs()") : shown.index("    print(")]
    assert task in example
