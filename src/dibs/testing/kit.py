"""For those who test code that enqueues tasks: a store in memory, a clock that is moved by hand, and questions to ask.

::

    from dibs.testing.kit import kit

    def test_signing_up_sends_a_mail():
        with kit(app) as k:
            sign_up("ada@example.org")
            k.assert_enqueued(send_mail, to="ada@example.org")
            k.drain()
            assert outbox == ["ada@example.org"]

Nothing is faked: arguments are encoded, stored, claimed, decoded, run and settled as in production. With pytest, the
fixture `dibs_kit` does the same for the app that your fixture `dibs_app` returns.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from dibs import codec
from dibs.app import Dibs
from dibs.clock import ManualClock
from dibs.function import TaskFunction
from dibs.task import Filter, Status, Task
from dibs.worker import Summary


@contextlib.contextmanager
def kit(app: Dibs, clock: ManualClock | None = None) -> Iterator[Kit]:
    """Puts `app` on an empty store in memory until the block ends; its own store is not touched."""
    clock = clock or ManualClock()
    with app.replaced(f"memory:kit-{uuid.uuid4().hex}", clock):
        yield Kit(app, clock)


class Kit:
    """An app under test. `clock` is its store's: ``kit.clock.advance(60)`` makes what is due in a minute due now."""

    def __init__(self, app: Dibs, clock: ManualClock) -> None:
        self.app = app
        self.clock = clock

    def drain(self) -> Summary:
        """Runs what is due, and what that enqueues; returns how many tasks ended how."""
        return self.app.drain()

    def tasks(self, function: TaskFunction[..., Any], status: Status | None = None) -> list[Task]:
        """Returns the tasks of a function, the oldest first; of one status, or all."""
        return self.app.run(self._tasks(function, status))

    def enqueued(self, function: TaskFunction[..., Any]) -> list[Any]:
        """Returns the arguments, by name, of every call that waits to be run."""
        return [codec.decode(task.payload, task.codec) for task in self.tasks(function, Status.PENDING)]

    def assert_enqueued(
        self, function: TaskFunction[..., Any], /, *, count: int | None = None, **arguments: Any
    ) -> None:
        """Fails unless a call of `function` waits that has these arguments, whatever others it has; with `count`,
        exactly so many."""
        waiting = self.enqueued(function)
        wanted = codec.decode(codec.encode(arguments), "json")
        found = [call for call in waiting if isinstance(call, dict) and wanted.items() <= call.items()]
        if found if count is None else len(found) == count:
            return
        calls = "".join(f"\n  {call}" for call in waiting) or " none"
        raise AssertionError(
            f"{len(found)} calls of {function.command} wait with {arguments}, "
            f"expected {'at least one' if count is None else count}; waiting:{calls}"
        )

    async def _tasks(self, function: TaskFunction[..., Any], status: Status | None) -> list[Task]:
        tasks: list[Task] = []
        cursor: str | None = None
        which = Filter(command=function.command, status=status)
        while True:
            page = await self.app.ask(lambda store, cursor=cursor: store.list(function.tenant, which, cursor=cursor))  # type: ignore[misc]
            tasks += page.tasks
            cursor = page.cursor
            if cursor is None:
                return sorted(tasks, key=lambda task: task.id)
