"""Does what a page says: writes its files, runs its commands, and compares what they print with what is shown.

In a ``console`` block a line after ``$`` is a command; what follows is some of what it prints, in order. Ids, times,
durations, sizes and the names of workers may be others than those shown, ``…`` stands for anything, and an id, or the
token of a lease, that was shown once means the same in later commands. A server, and a worker that does not drain, goes
on in the background, until ``^C`` or the end of the page.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.docs.pages import Block

COMMAND_S = 20.0
ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32}\b"

#: What differs from run to run, most special first.
VARIES = [
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z",
    r"\d\d:\d\d:\d\d",
    r"[\w.-]+:\d+:[0-9a-f]{4}\b",
    r"\d+(?:\.\d+)? (?:B|[KMG]iB)\b",
    r"\d+(?:\.\d+)? ?(?:ms|s|m|h|d)\b",
]


class Command(NamedTuple):
    """A command line, and the lines that are shown of its output."""

    line: str
    shown: list[str]

    @property
    def in_background(self) -> bool:
        """True for a server, and for a worker that goes on."""
        return self.line.startswith(("dibs serve", "dibs worker")) and "--drain" not in self.line


class Transcript:
    """A directory in which the blocks of a page are done, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workers: list[subprocess.Popen[bytes]] = []
        self._ids: dict[str, str] = {}
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("DIBS_")}
        # The programs of this very environment; a file that grew within a second is not taken from a cache.
        path = f"{Path(sys.executable).parent}{os.pathsep}{self._env.get('PATH', '')}"
        self._env |= {"PATH": path, "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if error is None:
            self.interrupt()
        for worker in self._workers:
            worker.kill()
            worker.wait()

    def do(self, blocks: Sequence[Block]) -> None:
        """Does all that is a file or a console."""
        for block in blocks:
            if block.name is not None:
                self.write(block)
            elif block.language == "console":
                for command in commands(block.code):
                    self.run(command, block)

    def write(self, block: Block) -> None:
        """Writes a file, or more of it."""
        assert block.name is not None
        with (self._directory / block.name).open("a" if block.continued else "w") as file:
            file.write("\n\n" * block.continued + block.code)

    def run(self, command: Command, block: Block) -> None:
        """Runs one command; it ends well and prints what is shown."""
        if command.line == "^C":
            output = self.interrupt()
        else:
            line = re.sub(ID, lambda match: self._ids.get(match[0], match[0]), command.line)
            output = self._start(line, command) if command.in_background else self._finish(line, block)
        self._compare(command, output, block)

    def interrupt(self) -> str:
        """Ends the worker as Ctrl-C does; returns all it has said."""
        while self._workers:
            worker = self._workers[-1]
            worker.send_signal(signal.SIGINT)
            assert worker.wait(COMMAND_S) == 0, self._log.read_text()
            self._workers.pop()
        return self._log.read_text() if self._log.exists() else ""

    @property
    def _log(self) -> Path:
        return self._directory.with_name(f"{self._directory.name}.log")

    def _finish(self, line: str, block: Block) -> str:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self._directory,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {line}\n{done.stdout}"
        return done.stdout

    def _start(self, line: str, command: Command) -> str:
        """Starts a worker and returns what it says first."""
        with self._log.open("wb") as log:
            self._workers.append(
                subprocess.Popen(
                    ["sh", "-c", f"exec {line.removesuffix('&')}"],
                    cwd=self._directory,
                    env=self._env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        end_s = time.monotonic() + COMMAND_S
        while len(self._log.read_text().splitlines()) < max(1, len(command.shown)) and time.monotonic() < end_s:
            assert self._workers[-1].poll() is None, self._log.read_text()
            time.sleep(0.05)
        return self._log.read_text()

    def _compare(self, command: Command, output: str, block: Block) -> None:
        printed = iter(output.splitlines())
        for shown in command.shown:
            expected = pattern(shown)
            found = next((match for line in printed if (match := expected.fullmatch(tidy(line)))), None)
            assert found, f"{block}: {command.line}\nis shown to print\n{shown}\nand printed\n{output}"
            self._ids.update(zip(re.findall(ID, shown), found.groups(), strict=True))


def commands(text: str) -> Iterator[Command]:
    """Yields the commands of a console block."""
    found: Command | None = None
    for line in text.splitlines():
        if line.startswith("$ ") or line == "^C":
            if found is not None:
                yield found
            found = Command(line.removeprefix("$ "), [])
        elif found is not None and line.strip("… "):
            found.shown.append(line)
    if found is not None:
        yield found


def pattern(shown: str) -> re.Pattern[str]:
    """Returns what matches a line like the one that is shown."""
    text = ""
    for part in re.split(f"({ID}|…|{'|'.join(VARIES)})", tidy(shown)):
        if part == "…":
            text += ".*"
        elif re.fullmatch(ID, part):
            text += f"({ID})"
        else:
            text += next((kind for kind in VARIES if re.fullmatch(kind, part)), re.escape(part))
    return re.compile(text)


def tidy(line: str) -> str:
    """A line without the spaces that only align it."""
    return " ".join(line.split())
