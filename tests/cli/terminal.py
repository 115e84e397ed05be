"""The command line as a process: in a pipe, or on a terminal of a given size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

DIBS = [sys.executable, "-W", "error", "-m", "dibs"]
PATIENCE_S = 30.0

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\(B")


def environment(**others: str) -> dict[str, str]:
    """This process's environment without what steers dibs or its colours."""
    steering = ("DIBS_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return kept | {"TERM": "xterm-256color"} | others


def dibs(
    *args: str, cwd: Path, stdin: str | bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command with its output in pipes."""
    done = subprocess.run(
        [*DIBS, *args],
        cwd=cwd,
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        env=environment(**(env or {})),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class Terminal:
    """A process on a terminal: what it wrote, and keys to press."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self.raw = ""

    def press(self, keys: str) -> None:
        """Types on the terminal."""
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """What Ctrl-C does, where the terminal is the one that controls the process."""
        self.process.send_signal(signal.SIGINT)

    def read_until(self, text: str) -> str:
        """Reads until `text` has appeared; returns everything so far, without escape sequences."""
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self.text():
            assert time.monotonic() < deadline_s, self.raw
            assert self._read_some() or text in self.text(), self.raw
        return self.text()

    def finish(self) -> tuple[int, str]:
        """Reads to the end; returns the exit code and what was written, without escape sequences."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._read_some():
            assert time.monotonic() < deadline_s, self.raw
        return self.process.wait(PATIENCE_S), self.text()

    def text(self) -> str:
        """What was written, without escape sequences."""
        return _ESCAPE.sub("", self.raw).replace("\r\n", "\n")

    def _read_some(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
        if not ready:
            return False
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # the other side is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def on_terminal(
    *args: str, cwd: Path, columns: int = 80, lines: int = 24, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Starts a command on a terminal of so many columns and lines."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [*DIBS, *args], cwd=cwd, env=environment(**(env or {})), stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
        os.close(master)


def shown(*args: str, cwd: Path, columns: int = 80, env: Mapping[str, str] | None = None) -> str:
    """What a command shows on a terminal of so many columns; it must end well."""
    with on_terminal(*args, cwd=cwd, columns=columns, env=env) as terminal:
        code, text = terminal.finish()
    assert code == 0, text
    return text
