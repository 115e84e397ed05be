"""Several worker processes under one: started, restarted when one dies or code changes, stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType

from dibs.errors import MissingDriver
from dibs.worker.parent import signal_name

log = logging.getLogger("dibs.worker")

TOO_SOON_S = 5.0
"""A worker that ends with an error sooner than this has no chance; starting it again would only repeat it."""
RESTART_PAUSE_S = 1.0


class Supervisor:
    """Keeps `count` processes of one command running until it is told to stop, or they end well by themselves."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        again: Sequence[str] | None = None,
        ends: bool = False,
        watch: Sequence[Path] = (),
    ) -> None:
        """`again`: the command that takes the place of one that had run for a while. `ends`: one that ends well has
        done its work."""
        self._command = command
        self._again = again or command
        self._count = count
        self._ends = ends
        self._watch = watch
        self._children: set[Process] = set()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._status = 0
        if watch:
            _import_watcher()

    async def run(self) -> int:
        """Returns the exit status: 0, or that of the first worker that could not work."""
        watching = asyncio.ensure_future(self._restart_on_changes()) if self._watch else None
        try:
            await asyncio.gather(*(self._keep() for _ in range(self._count)))
        finally:
            if watching is not None:
                watching.cancel()
        return self._status

    def stop(self) -> None:
        """Has all workers stop; called again, at once."""
        self._stopping.set()
        self._changed.set()
        self._signal(signal.SIGTERM)

    async def _keep(self) -> None:
        """One place: a process, and the next one when it dies."""
        command = self._command
        while not self._stopping.is_set():
            started_s = time.monotonic()
            # A session of its own: an interrupt at the terminal reaches the supervisor alone, which passes it on once.
            child = await asyncio.create_subprocess_exec(*command, start_new_session=True)
            self._children.add(child)
            if self._stopping.is_set():  # while it was being started
                child.send_signal(signal.SIGTERM)
            status = await child.wait()
            self._children.discard(child)
            lasted_s = time.monotonic() - started_s
            if self._over(status, lasted_s):
                return
            command = self._again if lasted_s >= TOO_SOON_S else command
            await self._pause(failed=status > 0)

    async def _pause(self, *, failed: bool) -> None:
        """Waits before the next start; what failed and is being edited waits for the next change."""
        if failed and self._watch:
            log.warning("waiting for a change")
            self._changed.clear()
            await self._changed.wait()
        elif not self._watch:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RESTART_PAUSE_S)

    def _over(self, status: int, lasted_s: float) -> bool:
        """True if the place stays empty."""
        if self._stopping.is_set() or (status == 0 and self._ends and not self._watch):
            return True
        if status > 0 and lasted_s < TOO_SOON_S and not self._watch:
            self._status = self._status or status
            self.stop()
            return True
        if status < 0:
            log.warning("a worker was killed by %s; starting another", signal_name(-status))
        elif status > 0:
            log.warning("a worker ended with status %d", status)
        return False

    async def _restart_on_changes(self) -> None:
        async for changed in _changes(self._watch):
            log.warning("%s changed: restarting", ", ".join(changed))
            self._changed.set()
            self._signal(signal.SIGTERM)

    def _signal(self, which: signal.Signals) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(which)


async def _changes(directories: Sequence[Path]) -> AsyncIterator[list[str]]:
    """Yields the names of Python files that changed."""
    watchfiles = _import_watcher()
    async for changes in watchfiles.awatch(*directories, watch_filter=watchfiles.PythonFilter()):
        yield sorted({Path(path).name for _, path in changes})


def _import_watcher() -> ModuleType:
    try:
        import watchfiles
    except ImportError as error:
        raise MissingDriver("--reload needs watchfiles: pip install 'dibs[reload]'") from error
    return watchfiles
