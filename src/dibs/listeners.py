"""Who is told what happens to tasks, and who may have a say in how they run.

A *listener* is told; a *hook* runs around the handler and may change the outcome. Both are plain functions, called in
the order in which they were given. Neither can do harm: what they raise is logged, and the outcome stands.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from dibs.context import CurrentTask
from dibs.errors import InvalidOption
from dibs.ids import id_to_text
from dibs.task import ErrorInfo

log = logging.getLogger("dibs")


class Happening(StrEnum):
    """What a listener can be told of."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    RETRIED = "retried"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LEASE_LOST = "lease_lost"


class TaskEvent(Struct, frozen=True):
    """What happened to one task, as this process saw it."""

    kind: Happening
    tenant: str
    task_id: bytes
    command: str
    attempt: int = 0
    error: ErrorInfo | None = None

    @property
    def id(self) -> str:
        return id_to_text(self.task_id)


class Outcome(Struct, frozen=True):
    """How a handler ended. An `after` hook may return another one."""

    result: Any = None
    error: BaseException | None = None
    """None: the handler returned `result`."""
    result_ttl_s: float | None = None
    """How long the result is kept; None: as the task says."""


Listener = Callable[[TaskEvent], object]
Before = Callable[[CurrentTask], object]
After = Callable[[CurrentTask, Outcome], Outcome | None]


class Listeners:
    """The listeners and hooks of one app."""

    def __init__(self) -> None:
        self._listeners: dict[Happening, list[Listener]] = {kind: [] for kind in Happening}
        self.before: list[Before] = []
        self.after: list[After] = []

    def add(self, kind: str, listener: Listener) -> None:
        """Has `listener` told of every event of this kind."""
        if kind not in Happening.__members__.values():
            raise InvalidOption(f"{kind!r} is nothing to listen to: there are {', '.join(Happening)}")
        self._listeners[Happening(kind)].append(plain(listener))

    def wants(self, kind: Happening) -> bool:
        """True if anybody listens."""
        return bool(self._listeners[kind])

    def tell(self, event: TaskEvent) -> None:
        """Tells who listens."""
        for listener in self._listeners[event.kind]:
            try:
                listener(event)
            except Exception:
                log.exception("a listener to %s raised; the task is not affected", event.kind)

    def tell_enqueued(self, tenant: str, command: str, ids: Sequence[bytes]) -> None:
        """Tells that tasks were enqueued."""
        if self._listeners[Happening.ENQUEUED]:
            for task_id in ids:
                self.tell(TaskEvent(Happening.ENQUEUED, tenant, task_id, command))

    def begin(self, task: CurrentTask) -> None:
        """Runs the hooks before a handler."""
        for hook in self.before:
            try:
                hook(task)
            except BaseException:
                log.exception("a hook before task %s raised; the task runs", task.id)

    def finish(self, task: CurrentTask, outcome: Outcome) -> Outcome:
        """Runs the hooks after a handler, and returns what they made of its outcome."""
        for hook in self.after:
            try:
                changed = hook(task, outcome)
                if changed is not None and not isinstance(changed, Outcome):
                    raise TypeError(f"a hook returns an Outcome or None, not {type(changed).__name__}")
                outcome = changed or outcome
            except BaseException:
                log.exception("a hook after task %s raised; its outcome stands", task.id)
        return outcome


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` if it can be called just so."""
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise InvalidOption("hooks and listeners are plain functions: start a task of your own for async work")
    return function
