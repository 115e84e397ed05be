"""Where a store's time comes from: the host, or a test's hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Milliseconds since the epoch. A store asks its clock, never the caller's."""

    def now_ms(self) -> int: ...


class SystemClock:
    """The host's wall clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """Stands still until it is told to move, so that a test never waits for a lease."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, seconds: float) -> None:
        """Moves time by `seconds`; a negative number is a clock that was set back."""
        self._now_ms += round(seconds * 1000)
