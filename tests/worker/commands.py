"""Real processes: an app in a directory, and the command line that works on it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dibs import Dibs

ROOT = Path(__file__).parents[2]
LIMIT_S = 40.0


class Running:
    """A process whose output is kept."""

    def __init__(self, command: list[str], directory: Path, **environment: str) -> None:
        path = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        # A file that is changed within a second is not taken from a cache.
        steered = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **steered, **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def output(self) -> str:
        """What it has written so far."""
        return "".join(self.lines)

    def says(self, text: str, times: int = 1) -> None:
        """Waits until it has written a text."""
        until(lambda: self.output.count(text) >= times or self.process.poll() is not None, lambda: self.output)
        if self.output.count(text) < times:
            self._reader.join(5)
        assert self.output.count(text) >= times, self.output

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end; returns its exit status."""
        try:
            status = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.output}") from None
        self._reader.join(5)
        return status

    def end(self) -> None:
        """Kills it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


class Shop:
    """A directory that holds ``shop.py``, a store, and what handlers leave behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = str(directory / "store")
        self._started: list[Running] = []

    def write(self, code: str, name: str = "shop.py") -> None:
        """Writes a module."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD.format(url=self.url) + code)

    def start(self, *command: str, **environment: str) -> Running:
        """Starts a process of Python here."""
        running = Running([sys.executable, *command], self.directory, **environment)
        self._started.append(running)
        return running

    def worker(self, *options: str, app: str = "shop:app") -> Running:
        """Starts ``dibs worker``."""
        return self.start("-m", "dibs", "worker", app, *options)

    def app(self) -> Dibs:
        """The app, as seen from this process, without its functions."""
        return Dibs(self.url)

    def log(self, name: str = "log") -> list[str]:
        """The lines that handlers have noted, all processes together."""
        return [line for path in sorted(self.directory.glob(f"{name}*.txt")) for line in path.read_text().splitlines()]

    def end(self) -> None:
        """Kills what still runs."""
        for running in self._started:
            running.end()


HEAD = """
import asyncio, os, signal, sys, time
from pathlib import Path
from dibs import Dibs, Fail, Retry, current

app = Dibs({url!r})
HERE = Path({url!r}).parent

def note(text, name="log"):
    descriptor = os.open(HERE / f"{{name}}-{{os.getpid()}}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{{text}}\\n".encode())
    os.close(descriptor)

"""


def until(condition: Callable[[], Any], explain: Callable[[], str] = lambda: "it has not come true") -> Any:
    """Returns what `condition` says, once that is true."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (seen := condition()):
        assert time.monotonic() < deadline_s, explain()
        time.sleep(0.02)
    return seen
