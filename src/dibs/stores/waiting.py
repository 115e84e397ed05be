"""Waiting without polling: subscribe, look, sleep until woken, look again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from dibs.stores.wakeups import Subscription

FALLBACK_LOOK_S = 1.0
LOOKS_PER_S = 50
"""All who wait in one loop look so often together: a thousand of them look every twenty seconds, and cost what fifty
do."""

Outcome = TypeVar("Outcome")

_crowds: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
"""How many wait in each loop."""


async def wait_for(
    subscription: Subscription,
    look: Callable[[], Awaitable[Outcome]],
    pause_s: Callable[[], Awaitable[float | None]],
    wait_s: float,
    over: Callable[[Outcome], bool] = bool,
) -> Outcome:
    """Subscribes, then looks until what it sees is `over` or `wait_s` have passed.

    Sleeps until it is woken, until `pause_s` says that something falls due, or for a jittered second (more in a crowd):
    a lost wake-up delays, it never strands.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    _crowds[loop] = _crowds.get(loop, 0) + 1
    try:
        with subscription:
            while True:
                seen = await look()
                left_s = deadline_s - loop.time()
                if over(seen) or left_s <= 0:
                    return seen
                fallback_s = max(FALLBACK_LOOK_S, _crowds[loop] / LOOKS_PER_S) * random.uniform(0.8, 1.2)
                due_s = await pause_s()
                await subscription.wait(min(left_s, fallback_s, due_s or fallback_s))
    finally:
        _crowds[loop] -= 1


async def no_hint() -> None:
    """For a wait that nothing but a wake-up can end early."""
