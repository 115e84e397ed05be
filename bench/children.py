"""Child processes that measure, or disturb, and the pipe to them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

ANSWER_WITHIN_S = 120.0
STOP_WITHIN_S = 10.0


class Child:
    """The parent's end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def receive(self) -> Any:
        """Returns what the child sends next; a child that died, or says nothing, raises."""
        if not self._pipe.poll(ANSWER_WITHIN_S):
            raise TimeoutError(f"a child process said nothing for {ANSWER_WITHIN_S:.0f} s")
        return self._pipe.recv()

    def send(self, message: object) -> None:
        self._pipe.send(message)


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[Child]:
    """Runs ``target(pipe, *arguments)`` in a new process, which has ended, or is ended, when the block does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    # Without the parent's copy of the child's end, a child that dies closes the pipe.
    theirs.close()
    try:
        yield Child(ours)
    except BaseException:
        process.kill()
        raise
    finally:
        process.join(STOP_WITHIN_S)
        if process.is_alive():
            process.kill()
