"""Other processes: small scripts that tell what they see, one JSON line at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HEAD = """
import asyncio, json, os, sys, time
from dibs.errors import DibsError
from dibs.ids import new_id
from dibs.stores import open_local, open_store, waiting
from dibs.task import *
def tell(**what): print(json.dumps(what), flush=True)
URL, *ARGS = sys.argv[1:]
"""


class Child:
    """A process that runs a script."""

    def __init__(self, script: str, *arguments: object) -> None:
        command = [sys.executable, "-c", HEAD + script, *(str(argument) for argument in arguments)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def told(self) -> Any:
        """The next thing it tells."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the process ended: {self.process.communicate()[1]}")
        return json.loads(line)

    def go(self) -> None:
        """Lets it go on that waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        """Waits for its end, which must be a good one, and returns the last thing it told."""
        out, err = self.process.communicate(timeout=50)
        assert self.process.returncode == 0, err
        return json.loads(out.splitlines()[-1])

    def kill(self) -> None:
        """SIGKILL, by its id."""
        self.process.kill()
        self.process.communicate()


class Children:
    """The processes of one test."""

    def __init__(self) -> None:
        self._started: list[Child] = []

    def start(self, script: str, *arguments: object) -> Child:
        """Starts a script; its first argument is the store's."""
        child = Child(script, *arguments)
        self._started.append(child)
        return child

    def end(self) -> None:
        """Kills what still runs."""
        for child in self._started:
            if child.process.poll() is None:
                child.kill()
            for stream in (child.process.stdin, child.process.stdout, child.process.stderr):
                if stream is not None:
                    stream.close()
