"""What a process that a worker started knows of its parent."""

from __future__ import annotations

import contextlib
import ctypes
import signal

_PR_SET_PDEATHSIG = 1


class Here:
    """What kind of process this is. A module that starts a worker when it is imported must not start one in the
    processes that run handlers, and that one its own."""

    in_child = False


def signal_name(number: int) -> str:
    """What a signal is called; some have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(with_signal: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent ends. Linux only; elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
