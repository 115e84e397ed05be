"""What ties a victim to the test that started it."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when its starter is gone: a test run that is itself killed, or times out, leaves
    nobody who enqueues for ever."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
