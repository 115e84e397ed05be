"""The logs that outlive their writers: whole lines, appended by one write each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


class Log:
    """An append-only file. What was written is kept by the kernel, whoever is killed next."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *lines: Iterable[object]) -> None:
        """Appends lines in one write, so that none is ever torn."""
        text = "".join(" ".join(str(word) for word in line) + "\n" for line in lines)
        os.write(self._fd, text.encode())


def read(directory: Path) -> Iterator[list[str]]:
    """Yields the words of every line of every log."""
    for path in sorted(directory.glob("*.log")):
        for line in path.read_text().splitlines():
            yield line.split()
