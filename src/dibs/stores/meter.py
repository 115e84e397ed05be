"""What a store tells of its commits to whoever measures it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Meter(Protocol):
    """Is told of every commit of this process, once, from whatever thread made it; so it must be quick, and it is
    dropped if it raises."""

    def committed(self, calls: int, expired: Mapping[tuple[str, str], int]) -> None:
        """So many calls shared one commit. `expired`: leases that it took back, by tenant and command; not those of
        tasks that ended because a cancel was asked for."""
