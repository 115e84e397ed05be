"""What a process that a worker started knows of its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def signal_name(number: int) -> str:
    """What a signal is called; some have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(with_signal: signal.Signals, parent: int | None = None) -> bool:
    """Has the kernel send this process a signal when its parent ends. Linux only; elsewhere nothing happens. False: the
    parent, a process of this id, is gone already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    return parent is None or os.getppid() == parent
