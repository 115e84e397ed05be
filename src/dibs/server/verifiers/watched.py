"""A small file that is read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from dibs.errors import SettingsError

T = TypeVar("T")

LOOK_EVERY_S = 1.0

log = logging.getLogger("dibs.server")


class WatchedFile(Generic[T]):
    """What a file says, as `read` understands its bytes. A file that becomes unreadable or wrong keeps saying what it
    said before, and an error is logged: a slip of an editor must not lock everybody out, nor let anybody in.

    Raises `SettingsError` if there is nothing good in it to begin with. `read` raises `ValueError` for what is wrong,
    which is told to an operator and must not repeat secrets.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[bytes], T],
        *,
        max_bytes: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._read = read
        self._max_bytes = max_bytes
        self._now_s = now_s
        self._stamp = self._stamped()
        try:
            self._value = self._loaded()
        except (OSError, ValueError) as error:
            raise SettingsError(f"{path} cannot be used: {_said(error)}") from error
        self._looked_s = now_s()

    @property
    def value(self) -> T:
        """What the file says; looked at anew at most once a second."""
        now_s = self._now_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._value

    def _look(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        # Remembered before it is read: what changes meanwhile has another stamp, and is read at the next look.
        self._stamp = stamp
        try:
            self._value = self._loaded()
        except (OSError, ValueError) as error:
            log.error("%s was changed and cannot be used; what it said before still holds: %s", self.path, _said(error))
        else:
            log.info("%s was changed and has been read again", self.path)

    def _stamped(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _loaded(self) -> T:
        with self.path.open("rb") as file:
            data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise ValueError(f"it is over {self._max_bytes} bytes")
        return self._read(data)


def _said(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
