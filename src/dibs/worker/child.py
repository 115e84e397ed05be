"""The other end of a process lane: runs one task after the other, told through a pipe.

Frames are msgpack behind their length, both ways. What a handler prints goes to the worker's standard error. The
process ends when its worker does, even in the middle of a handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import signal
import sys
import time
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from dibs.app import Dibs
from dibs.context import CurrentTask
from dibs.errors import AppNotFound, InvalidInput
from dibs.function import TaskFunction
from dibs.importing import Here
from dibs.task import Kind, Lease, Progress
from dibs.worker.outcomes import Ended, error_info
from dibs.worker.parent import die_with_parent
from dibs.worker.running import run_async, run_sync

log = logging.getLogger("dibs.worker")

PROGRESS_EVERY_S = 0.5


class Order(Struct, frozen=True, array_like=True):
    """Run this task."""

    module: str
    path: list[str]
    lease: Lease


class Told(Struct, frozen=True, array_like=True):
    """What a child says: progress on the way, `ended` at last."""

    id: bytes
    """Of the task it is about."""
    progress: Progress | None = None
    ended: Ended | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
decode_told = msgspec.msgpack.Decoder(Told).decode


def frame(message: Order | Told) -> bytes:
    """Returns a message as it goes through the pipe."""
    data = _encode(message)
    return len(data).to_bytes(4, "big") + data


def main() -> None:
    """Serves the worker until it closes the pipe."""
    if not die_with_parent(signal.SIGKILL, int(sys.argv[1])):
        return
    Here.in_child = True
    for one in (signal.SIGINT, signal.SIGTERM):
        # The worker decides what they mean, also where they reach the whole group. Not SIG_IGN, which the processes
        # that a handler starts would inherit.
        signal.signal(one, lambda *_: None)
    with contextlib.suppress(EOFError, BrokenPipeError), _own_input() as orders, _own_output() as answers:
        while True:
            order = _receive(orders)
            _send(answers, Told(order.lease.id, ended=_run(order, answers)))


def _run(order: Order, answers: BinaryIO) -> Ended:
    sys.path[:0] = [path for path in order.path if path not in sys.path]
    task = _Task(order.lease, answers)
    Here.importing = True
    try:
        function = find(order.module, order.lease.command)
    except InvalidInput as error:
        return Ended(kind=Kind.FAIL, error=error_info(error))
    except BaseException as error:  # noqa: BLE001 an import can raise anything, and the task must be told
        return Ended(kind=Kind.RETRY, error=error_info(error))
    finally:
        Here.importing = False
    if inspect.iscoroutinefunction(function.handler):
        return asyncio.run(run_async(function, task))
    return run_sync(function, task)


def find(module_name: str, command: str) -> TaskFunction[..., Any]:
    """Returns the function that runs a command, from the module that declares it."""
    module = importlib.import_module(module_name)
    for value in vars(module).values():
        app = value.app if isinstance(value, TaskFunction) else value
        if isinstance(app, Dibs) and command in app.functions:
            return app.functions[command]
    raise AppNotFound(f"{module_name} has no app with a task {command}: declare it where it can be imported")


class _Task(CurrentTask):
    """Passes progress on to the worker, not too often."""

    __slots__ = ("_answers", "_next_s")

    def __init__(self, lease: Lease, answers: BinaryIO) -> None:
        super().__init__(lease)
        self._answers = answers
        self._next_s = 0.0

    def tell(self, progress: Progress | None) -> None:
        now_s = time.monotonic()
        if progress is None or now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_EVERY_S
            try:
                _send(self._answers, Told(self.lease.id, progress=progress))
            except (ValueError, TypeError) as error:
                log.warning("task %s: its progress cannot be told: %s", self.id, error)


def _own_input() -> BinaryIO:
    """Keeps the pipe of orders; a handler that reads, or a program that it starts, finds nothing."""
    orders = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return orders


def _own_output() -> BinaryIO:
    """Keeps the pipe for answers; what is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _receive(orders: BinaryIO) -> Order:
    head = orders.read(4)
    size = int.from_bytes(head, "big")
    data = orders.read(size) if len(head) == 4 else b""
    if not data or len(data) < size:
        raise EOFError
    return _decode_order(data)


def _send(answers: BinaryIO, told: Told) -> None:
    answers.write(frame(told))
    answers.flush()
