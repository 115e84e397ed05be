"""One task's way through its handler: read its arguments, run the hooks and the handler, say how it ended.

The same steps serve an event loop, a thread and a child process. Whatever a handler raises, even `SystemExit`, is an
outcome of its task and nothing else.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

from msgspec import Struct

from dibs import codec
from dibs.arguments import Call
from dibs.checks import ERROR_TEXT_MAX_CHARS
from dibs.context import CurrentTask, Fail, Retry, running
from dibs.errors import CodecError, InvalidInput
from dibs.function import TaskFunction
from dibs.listeners import Outcome
from dibs.task import ErrorInfo, Kind

INVALID_ARGUMENTS = "INVALID_ARGUMENTS"
INVALID_RESULT = "INVALID_RESULT"
MESSAGE_MAX_CHARS = 8 * 1024
TRACEBACK_MAX_CHARS = ERROR_TEXT_MAX_CHARS - MESSAGE_MAX_CHARS - 1024

Function = TaskFunction[..., Any]


class Ended(Struct, frozen=True, kw_only=True, gc=False):
    """How a run ended, ready to be settled. `delay_s` None: as the backoff says."""

    kind: Kind
    result: bytes | None = None
    codec: str = "json"
    error: ErrorInfo | None = None
    reason: str | None = None
    delay_s: float | None = None
    result_ttl_s: float | None = None


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
            return _completed(task.lease.codec, outcome)
        return _raised(function, outcome.error)
    except BaseException as error:  # noqa: BLE001 a task that nobody hears of again would keep its slot for ever
        return Ended(kind=Kind.RETRY, error=error_info(error))


def _completed(codec_name: str, outcome: Outcome) -> Ended:
    """A result is written as the arguments were; JSON has a form for what others may not have: nothing, and, with raw,
    what is not bytes."""
    value = outcome.result
    if value is None or (codec_name == "raw" and not isinstance(value, bytes | bytearray | memoryview)):
        codec_name = "json"
    try:
        result = codec.encode(value, codec_name)
    except (CodecError, MemoryError) as error:
        return Ended(kind=Kind.FAIL, reason=INVALID_RESULT, error=error_info(error))
    return Ended(kind=Kind.COMPLETE, result=result, codec=codec_name, result_ttl_s=outcome.result_ttl_s)


def _raised(function: Function, error: BaseException) -> Ended:
    if isinstance(error, Fail):
        return Ended(kind=Kind.FAIL, reason=_storable(str(error.reason)), error=error_info(error))
    if isinstance(error, Retry):
        return Ended(kind=Kind.RETRY, delay_s=error.delay_s, error=error_info(error))
    if isinstance(error, function.policy.fail_on):
        return Ended(kind=Kind.FAIL, error=error_info(error))
    return Ended(kind=Kind.RETRY, error=error_info(error))


def error_info(error: BaseException) -> ErrorInfo:
    """Returns an error as text, with the part of its traceback that is the handler's."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    # The first frame is the one above that called the handler.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        message = str(error)
        text = "".join(traceback.format_exception(kind, error, frames))
    except BaseException as broken:  # noqa: BLE001 an error that cannot even be shown must not cost the task its outcome
        message, text = f"(cannot be shown: {type(broken).__name__})", ""
    return ErrorInfo(
        _storable(name[:200]), _storable(message[:MESSAGE_MAX_CHARS]), _storable(text[-TRACEBACK_MAX_CHARS:])
    )


def _storable(text: str) -> str:
    """Returns text as UTF-8 can carry it: file names that could not be decoded put lone surrogates into messages."""
    return text.encode(errors="replace").decode()
