"""Events as lines of JSON at the end of a file: the shape is that of ``dibs export``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dibs.errors import SettingsError
from dibs.shapes import event_shape
from dibs.task import Event

TAIL_BYTES = 1 << 20
"""Where the end of the last whole line is looked for, after a crash."""

_encode = msgspec.json.Encoder().encode


class EventsFile:
    """Appends events to a file. When `append` returns they are on the disk.

    The file may be renamed or removed at any time: the next events go into a new one of its name. What a crash left of
    a line is taken away when the file is opened, and what could not be written whole is not left behind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None

    async def append(self, events: Sequence[Event]) -> None:
        """Writes a line for each event, in order. Raises `OSError` if it cannot, and nothing of them was written."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._append, events))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # A thread cannot be stopped: whoever closes the file must not do so under it.
            await asyncio.wait([writing])
            raise

    def open(self) -> None:
        """Opens the file now, so that a server that could not write it does not start."""
        try:
            self._opened()
        except OSError as error:
            raise SettingsError(
                f"events cannot be written to {self.path}: {error.strerror}; name another file"
            ) from error

    def close(self) -> None:
        """Lets go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, events: Sequence[Event]) -> None:
        lines = b"".join(_encode(event_shape(event)) + b"\n" for event in events)
        descriptor = self._opened()
        before = os.fstat(descriptor).st_size
        try:
            _write(descriptor, lines)
            os.fsync(descriptor)
        except OSError:
            # They come again: half of them now would be there twice.
            os.ftruncate(descriptor, before)
            raise

    def _opened(self) -> int:
        """Returns the file that has the name now."""
        if self._descriptor is not None:
            try:
                if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                    return self._descriptor
            except FileNotFoundError:
                pass
            self.close()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        _cut_to_lines(self._descriptor)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return self._descriptor


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _cut_to_lines(descriptor: int) -> None:
    """Takes away what is behind the last line break."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - TAIL_BYTES)
    tail = os.pread(descriptor, size - start, start)
    if not tail.endswith(b"\n") and (tail.rfind(b"\n") >= 0 or start == 0):
        os.ftruncate(descriptor, start + tail.rfind(b"\n") + 1)
