"""A file that is read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Generic, NamedTuple, TypeVar

from dibs.errors import SettingsError

T = TypeVar("T")

LOOK_EVERY_S = 1.0
AT_ONCE_MAX_BYTES = 32 << 10
"""What is larger is read beside everything else: some hundred tokens take some milliseconds."""

log = logging.getLogger("dibs.server")


class _Stamp(NamedTuple):
    changed_ns: int
    size_bytes: int
    inode: int


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
        self._reading: Future[T] | None = None

    @property
    def value(self) -> T:
        """What the file says; looked at anew at most once a second. What is large is read by a thread, and until that
        is done the file says what it said before."""
        if self._reading is not None:
            if not self._reading.done():
                return self._value
            reading, self._reading = self._reading, None
            self._take(reading)
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
        reading: Future[T] = Future()
        if stamp is None or stamp.size_bytes <= AT_ONCE_MAX_BYTES:
            self._load_into(reading)
            self._take(reading)
        else:
            self._reading = reading
            Thread(target=self._load_into, args=(reading,), name="dibs-watched-file", daemon=True).start()

    def _load_into(self, reading: Future[T]) -> None:
        try:
            reading.set_result(self._loaded())
        except BaseException as error:  # noqa: BLE001 - raised again where it is taken
            reading.set_exception(error)

    def _take(self, reading: Future[T]) -> None:
        try:
            self._value = reading.result()
        except (OSError, ValueError) as error:
            log.error("%s was changed and cannot be used; what it said before still holds: %s", self.path, _said(error))
        else:
            log.info("%s was changed and has been read again", self.path)

    def _stamped(self) -> _Stamp | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return _Stamp(found.st_mtime_ns, found.st_size, found.st_ino)

    def _loaded(self) -> T:
        with self.path.open("rb") as file:
            data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise ValueError(f"it is over {self._max_bytes} bytes")
        return self._read(data)


def _said(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
