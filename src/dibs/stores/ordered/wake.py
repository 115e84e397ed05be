"""Wake-ups between processes: a datagram to each event loop that waits, sent by whoever commits.

Each waiting loop binds a socket in ``wake/``. A committer sends to every socket of other processes without blocking; a
receiver reads what is new in the journal and wakes those for whom it matters. A datagram that is lost, or a socket that
is full, costs nothing but the fallback look of whoever waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from dibs.stores.ordered.engine import ENDS, MAKES_READY, Engine, Lane
from dibs.stores.ordered.journal import JournalReader
from dibs.stores.ordered.records import Run

ENTRIES_PER_READ = 64
RECENT_S = 0.1

# The sockets of this process: it is told of its own commits without them.
_own_names: set[str] = set()
os.register_at_fork(after_in_child=_own_names.clear)


class WakeLane(Lane):
    """A loop that can hear other processes."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        super().__init__(engine, loop)
        self._directory = directory
        self._socket: socket.socket | None = None
        self._path: Path | None = None
        self._seen = b""

    def watch(self) -> None:
        """Binds the socket, once. What was committed before is seen by the look that follows. Without a socket (no
        descriptor left, a read-only directory) whoever waits has the fallback look."""
        if self._socket is None:
            with contextlib.suppress(OSError):
                self._bind()

    def _bind(self) -> None:
        self._seen = self._newest()
        self._directory.mkdir(exist_ok=True)
        # Nobody else ever had this name: one that a killed process left behind can be told by being refused.
        path = self._directory / f"{os.getpid()}-{secrets.token_hex(8)}"
        with _reachable(self._directory) as directory:
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                _own_names.add(path.name)
                bound.bind(f"{directory}/{path.name}")
            except OSError:
                bound.close()
                raise
        self._path, self._socket = path, bound
        self.loop.add_reader(bound, self._heard)

    def _newest(self) -> bytes:
        return self.engine.read(lambda txn: JournalReader(txn, self.engine.store_id).newest().position)

    def _heard(self) -> None:
        """Reads the journal from where it was last read; one read serves all datagrams that have come in."""
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(64):
                pass
        if not self.wakeups:
            # Whoever waits next looks first: only what comes after that look matters.
            self._seen = self._newest()
            return
        while True:
            seen, runs = self.engine.read(
                lambda txn: JournalReader(txn, self.engine.store_id).runs_after(self._seen, ENTRIES_PER_READ)
            )
            self.publish(runs)
            if seen == self._seen:
                return
            self._seen = seen

    def close(self) -> None:
        super().close()
        if self._socket is not None:
            self.loop.remove_reader(self._socket)
            self.disown()

    def disown(self) -> None:
        if self._socket is not None and self._path is not None:
            self._socket.close()
            self._socket = None
            if self._path.name in _own_names:
                with contextlib.suppress(OSError):  # Gone already, perhaps with the whole directory.
                    self._path.unlink()
                _own_names.remove(self._path.name)


class WakeSender:
    """Tells other processes that there is something to look at."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._names: list[str] = []
        self._listed_ns = -1

    def send(self, runs: list[Run]) -> None:
        """Sends to every socket that is not this process's own, if anything happened that somebody may wait for."""
        if not any(run.kind in MAKES_READY or run.kind in ENDS for run in runs):
            return
        try:
            names = self._others()
        except OSError:
            # Out of descriptors, or the directory was removed: the commit stands all the same.
            return
        for name in names:
            try:
                self._socket.sendto(b"\0", f"/proc/self/fd/{self._fd}/{name}")
            except ConnectionRefusedError:
                # Nobody is behind it any more: its process died without unbinding.
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)
            except OSError:
                # Full, gone, or another user's: whoever waits there has a fallback look.
                pass

    def _others(self) -> list[str]:
        """The sockets of other processes, listed again when the directory has changed or may have within the same
        tick of its clock."""
        changed_ns = os.fstat(self._fd).st_mtime_ns
        if changed_ns != self._listed_ns or time.time_ns() - changed_ns < RECENT_S * 1e9:
            found = os.listdir(self._fd)  # noqa: PTH208 by descriptor: the directory's path may be too long for a socket
            self._names = [name for name in found if name not in _own_names]
            self._listed_ns = changed_ns
        return self._names

    def close(self) -> None:
        self._socket.close()
        os.close(self._fd)


@contextlib.contextmanager
def _reachable(directory: Path) -> Iterator[str]:
    """A name of the directory that is short enough for a socket address, however long its path is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
