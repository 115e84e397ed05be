"""One task's way through its handler: read its arguments, run the hooks and the handler, say how it ended.

The same steps serve an event loop, a thread and a child process. Whatever a handler raises, even `SystemExit`, is an
outcome of its task and nothing else.
"""

from __future__ import annotations

import os
from typing import Any

from dibs.arguments import Call
from dibs.context import CurrentTask, Fail, running
from dibs.errors import InvalidInput
from dibs.function import TaskFunction
from dibs.listeners import Outcome
from dibs.task import Kind
from dibs.worker.outcomes import INVALID_ARGUMENTS, Ended, completed, error_info, raised

Function = TaskFunction[..., Any]


async def run_async(function: Function, task: CurrentTask) -> Ended:
    """Runs a coroutine function, in the calling asyncio task."""
    running.set(task)
    process = os.getpid()
    try:
        call = _read(function, task)
        function.app.listeners.begin(task)
        outcome = Outcome(await function.handler(*call.args, **call.kwargs))
    except BaseException as error:  # noqa: BLE001 whatever it is, it is this task's
        outcome = Outcome(error=error)
    _end_a_copy(process)
    return _told(function, task, outcome)


def run_sync(function: Function, task: CurrentTask) -> Ended:
    """Runs a plain function, in the calling thread."""
    before = running.set(task)
    process = os.getpid()
    try:
        call = _read(function, task)
        function.app.listeners.begin(task)
        outcome = Outcome(function.handler(*call.args, **call.kwargs))
    except BaseException as error:  # noqa: BLE001 whatever it is, it is this task's
        outcome = Outcome(error=error)
    finally:
        running.reset(before)
    _end_a_copy(process)
    return _told(function, task, outcome)


def _end_a_copy(process: int) -> None:
    """A handler that forked comes back twice. What comes back in the copy must not go on as a second worker."""
    if os.getpid() != process:
        os._exit(0)


def _read(function: Function, task: CurrentTask) -> Call:
    """Returns the call that the payload stands for. What does not fit now will not fit later either."""
    try:
        return function.arguments.unpack(task.lease.payload, task.lease.codec)
    except InvalidInput as error:
        raise Fail(INVALID_ARGUMENTS, str(error)) from None


def _told(function: Function, task: CurrentTask, outcome: Outcome) -> Ended:
    """Hears the hooks, and says what the outcome means for the queue."""
    try:
        outcome = function.app.listeners.finish(task, outcome)
        if outcome.error is None:
            return completed(outcome.result, task.lease.codec, outcome.result_ttl_s)
        return raised(outcome.error, function.policy.fail_on)
    except BaseException as error:  # noqa: BLE001 a task that nobody hears of again would keep its slot for ever
        return Ended(kind=Kind.RETRY, error=error_info(error))
