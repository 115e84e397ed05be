"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\w+\.py)( \(continued\))?\n")


class Block(NamedTuple):
    """A fenced block. Python with a `name` is a file, one that is `continued` is more of it; without a name it is a
    program."""

    page: Path
    line: int
    language: str
    code: str
    name: str | None
    continued: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Every block of a page, in order."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        named = _FILE_NAME.match(match[2]) if match[1] == "python" else None
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[1], match[2], named and named[1], bool(named and named[2]))


def python_blocks() -> list[Block]:
    """Every Python block of every page but those about Spark. Python that is shown and not meant to run is fenced as
    `py`."""
    return [block for page in PAGES for block in blocks(page) if block.language == "python" and not _is_spark(page)]


def spark_programs(topic: str) -> list[Block]:
    """Every Python block of pages about a topic that needs a Spark session."""
    pages = [page for page in PAGES if _is_spark(page) and page.name.startswith(topic)]
    return [block for page in pages for block in blocks(page) if block.language == "python"]


def _is_spark(page: Path) -> bool:
    return page.name.startswith(("spark", "history"))


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text())
