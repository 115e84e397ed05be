"""The worker processes of the demo: started as anybody would start them, watched, killed, stopped. Ends no others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

APP = "dibs.demo.shop:app"
SLOTS = ("--concurrency", "8", "--threads", "4", "--pool", "1", "--grace", "10s")
LOG_LINES_SHOWN = 20


class WorkerDied(Exception):
    """A worker of the demo ended when nobody had told it to."""


class Crew:
    """Workers by name."""

    def __init__(self, logs: Path) -> None:
        self.running: dict[str, Process] = {}
        self.names: list[str] = []
        self.killed: list[str] = []
        self._logs = logs

    async def start(self, name: str) -> None:
        """Starts ``dibs worker``; what it says goes to a file."""
        # Supervised: it ends when the demo does, even if that is killed. In a session of its own, an interrupt from the
        # keyboard does not reach it: the demo decides.
        command = [sys.executable, "-m", "dibs", "worker", APP, "--name", name, *SLOTS, "--supervised"]
        with (self._logs / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.running[name] = process
        self.names.append(name)

    async def watch(self) -> None:
        """Raises `WorkerDied` when one ends by itself: a demo that waited for it would wait for ever."""
        while True:
            for name, process in self.running.items():
                if process.returncode is not None:
                    said = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
                    raise WorkerDied("\n".join([f"{name} ended by itself, with status {process.returncode}.", *said]))
            await asyncio.sleep(0.2)

    async def kill(self, name: str) -> None:
        """SIGKILL: it has no time to say good-bye."""
        process = self.running.pop(name)
        self.killed.append(name)
        process.kill()
        await process.wait()

    async def stop(self) -> list[int]:
        """Asks all to stop and waits; returns their exit statuses."""
        stopping, self.running = list(self.running.values()), {}
        try:
            for process in stopping:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            return [await process.wait() for process in stopping]
        finally:
            await _ended(stopping)

    async def end(self) -> None:
        """Ends what still runs, at once. Their store is thrown away, or bears it."""
        running, self.running = list(self.running.values()), {}
        await _ended(running)


async def _ended(processes: list[Process]) -> None:
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    for process in processes:
        await process.wait()
