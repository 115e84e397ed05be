"""Long work in short steps: who works for one caller lets the others have their turns."""

from __future__ import annotations

import asyncio

STEP_BYTES = 256 << 10
"""So much is handled before others have their turn: a few milliseconds of work."""


class Turns:
    """Counts what one call has handled, and goes on only after the others had their turn, whenever that was much."""

    def __init__(self) -> None:
        self._handled_bytes = 0

    async def after(self, size_bytes: int) -> None:
        """Tells that so much has just been handled."""
        self._handled_bytes += size_bytes
        if self._handled_bytes >= STEP_BYTES:
            self._handled_bytes = 0
            await asyncio.sleep(0)
