"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\w+\.py)\n")


class Block(NamedTuple):
    """A fenced block of Python. With a `name`, it is a file of a test suite; otherwise it is a program."""

    page: Path
    line: int
    code: str
    name: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def python_blocks() -> list[Block]:
    """Every Python block of every page."""
    blocks = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            if match[1] == "python":
                named = _FILE_NAME.match(match[2])
                line = text.count("\n", 0, match.start()) + 1
                blocks.append(Block(page, line, match[2], named[1] if named else None))
    return blocks


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text())
