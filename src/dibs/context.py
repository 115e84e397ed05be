"""What a running handler may know, say and ask: the current task, and the two ways to end other than returning.

::

    from dibs import Fail, Retry, current

    @app.task
    def import_file(url: str) -> int:
        for done, row in enumerate(rows):
            current().progress(done, len(rows))
        if quota_used_up():
            raise Retry(delay_s=600)
        if not rows:
            raise Fail("EMPTY_FILE")
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Final

from dibs.errors import InvalidInput
from dibs.ids import id_to_text
from dibs.task import Lease, Progress


class Retry(Exception):
    """Raised by a handler: try again, after `delay_s` or as the task's backoff says. Counts as an attempt."""

    def __init__(self, message: str = "", *, delay_s: float | None = None) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class Fail(Exception):
    """Raised by a handler: do not try again. `reason` is one word for the dead letter; `message` explains."""

    def __init__(self, reason: str = "FAILED", message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class Cancelled(Exception):
    """Raised by `CurrentTask.check`: the task was cancelled, its lease was lost, or its time is over."""


class CurrentTask:
    """The task that the caller's handler is running."""

    __slots__ = ("_deadline_s", "_stop", "lease")

    def __init__(self, lease: Lease) -> None:
        self.lease: Final = lease
        self._stop = ""
        self._deadline_s = None if lease.timeout_s is None else time.monotonic() + lease.timeout_s

    @property
    def id(self) -> str:
        return id_to_text(self.lease.id)

    @property
    def tenant(self) -> str:
        return self.lease.tenant

    @property
    def command(self) -> str:
        return self.lease.command

    @property
    def key(self) -> str | None:
        return self.lease.key

    @property
    def attempt(self) -> int:
        """1 for the first run."""
        return self.lease.attempt

    @property
    def max_attempts(self) -> int:
        return self.lease.max_attempts

    @property
    def time_left_s(self) -> float | None:
        """Seconds until `timeout_s` is over, negative after; None: the task has no timeout."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    @property
    def cancelled(self) -> bool:
        """True once the handler should stop: its outcome will not count. An async handler is cancelled by itself."""
        return bool(self._stop)

    def check(self) -> None:
        """Raises `Cancelled` once the handler should stop."""
        if self._stop:
            raise Cancelled(self._stop)

    def heartbeat(self) -> None:
        """Asks for the lease to be renewed now. The worker renews it anyway, every third of its length."""
        self.tell(None)

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Tells how far the task is; kept with the task, at most once a second. Never blocks."""
        self.tell(Progress(done, total, note))

    def tell(self, progress: Progress | None) -> None:
        """The worker's: how a heartbeat is sent soon, with this progress. Any thread."""
        raise NotImplementedError

    def stop(self, why: str) -> None:
        """The worker's: from now on the handler is to stop."""
        self._stop = why


running: ContextVar[CurrentTask | None] = ContextVar("dibs_current_task", default=None)


def current() -> CurrentTask:
    """Returns the task that the calling handler runs."""
    task = running.get()
    if task is None:
        raise InvalidInput("no task is running here: current() is for handlers, called by a worker")
    return task
