"""What a type checker sees: results have their types, and wrong calls are errors before they run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Lines that end with `# E: code` are errors of that kind; all others are right.
SNIPPETS = """
from collections.abc import Coroutine
from typing import Any, assert_type

from dibs import Batch, Dibs, Handle
from dibs.task import Status

app = Dibs("memory:")

@app.task
def plain(url: str, width: int = 200) -> list[str]:
    return [url] * width

@app.task(max_attempts=5, run_in="process", timeout_s=10)
def with_options(url: str, *, wide: bool = False) -> int:
    return len(url)

@app.task
async def later(value: int) -> dict[str, int]:
    return {"value": value}

@app.task(priority=3)
async def nothing() -> None: ...

# The function is still the function.
assert_type(plain("a", width=3), list[str])
assert_type(with_options("a", wide=True), int)
assert_type(later(1), Coroutine[Any, Any, dict[str, int]])
plain(1)  # E: arg-type
plain()  # E: call-arg
plain("a", height=1)  # E: call-arg
with_options("a", True)  # E: call-arg
later("a")  # E: arg-type

# Plain code.
handle = plain.enqueue("a", 3)
assert_type(handle, Handle[list[str]])
assert_type(handle.wait(), list[str])
assert_type(handle.result(), list[str])
assert_type(handle.status(), Status)
assert_type(with_options.enqueue("a", wide=True), Handle[int])
assert_type(later.enqueue(1), Handle[dict[str, int]])
assert_type(nothing.enqueue(), Handle[None])
plain.enqueue(1)  # E: arg-type
plain.enqueue()  # E: call-arg
plain.enqueue("a", 1, 2)  # E: call-arg
plain.enqueue("a", height=1)  # E: call-arg
later.enqueue(value="a")  # E: arg-type
nothing.enqueue(1)  # E: call-arg

# Calls that wait.
assert_type(plain.call("a"), list[str])
assert_type(plain.call("a", width=3), list[str])
assert_type(plain.call("a", timeout_s=5), list[str])
assert_type(later.call(1), dict[str, int])
plain.call(1)  # E: call-overload
plain.call()  # E: call-overload
plain.call("a", timeout_s="soon")  # E: call-overload

# Async code.
async def main() -> None:
    handle = await plain.aenqueue("a")
    assert_type(handle, Handle[list[str]])
    assert_type(await handle, list[str])
    assert_type(await handle.awaited(5), list[str])
    assert_type(await handle.aresult(), list[str])
    assert_type(await later.aenqueue(1), Handle[dict[str, int]])
    assert_type(await (await later.aenqueue(1)), dict[str, int])
    assert_type(await later.acall(1), dict[str, int])
    assert_type(await plain.acall("a", timeout_s=5), list[str])
    assert_type(await later(1), dict[str, int])
    await plain.aenqueue(1)  # E: arg-type
    await later.acall("a")  # E: call-overload
    assert_type(await plain.amap(["a", "b"]), Batch[list[str]])

# Many, and other options.
batch = plain.map(["a", "b"], width=3)
assert_type(batch, Batch[list[str]])
assert_type(batch[0], Handle[list[str]])
plain.options(priority=9, delay_s=5).enqueue(1)  # E: arg-type
assert_type(plain.options(priority=9).enqueue("a"), Handle[list[str]])
assert_type(later.options(key="k").enqueue(1), Handle[dict[str, int]])
assert_type(later.options(key="k")(1), Coroutine[Any, Any, dict[str, int]])
plain.options(prioritee=9)  # E: call-arg
plain.options(priority="high")  # E: arg-type
plain.options(key=7)  # E: arg-type

@app.task(prioritee=1)  # E: call-overload
def misspelt() -> None: ...

@app.task(run_in="space")  # E: call-overload
def misplaced() -> None: ...
"""


def test_what_a_type_checker_says(tmp_path: Path) -> None:
    """mypy --strict finds the errors that are marked, of that kind, and no other."""
    module = tmp_path / "snippets.py"
    module.write_text(SNIPPETS)
    options = ["--strict", "--no-error-summary", "--no-color-output", "--config-file="]
    # Consequences of what is marked, or of writing snippets.
    options += ["--disable-error-code=unused-coroutine", "--disable-error-code=untyped-decorator"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache"), str(module)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )
    lines = SNIPPETS.splitlines()
    expected = {(number, line.rpartition("# E: ")[2]) for number, line in enumerate(lines, 1) if "# E: " in line}
    found = set()
    for number, code in re.findall(r"^.*snippets\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE):
        found.add((int(number), code))
    told = {(number, code, lines[number - 1]) for number, code in found ^ expected}
    assert not told, done.stdout + done.stderr
