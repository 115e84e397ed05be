"""Waiting without polling: subscribe, look, sleep until woken, look again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dibs.stores.wakeups import Subscription

FALLBACK_LOOK_S = 1.0

Outcome = TypeVar("Outcome")


async def wait_for(
    subscription: Subscription,
    look: Callable[[], Awaitable[Outcome]],
    pause_s: Callable[[], Awaitable[float | None]],
    wait_s: float,
    over: Callable[[Outcome], bool] = bool,
) -> Outcome:
    """Subscribes, then looks until what it sees is `over` or `wait_s` have passed.

    Sleeps until it is woken, until `pause_s` says that something falls due, or for a jittered second: a lost wake-up
    delays, it never strands.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    with subscription:
        while True:
            seen = await look()
            left_s = deadline_s - loop.time()
            if over(seen) or left_s <= 0:
                return seen
            fallback_s = FALLBACK_LOOK_S * random.uniform(0.8, 1.2)
            due_s = await pause_s()
            await subscription.wait(min(left_s, fallback_s, due_s or fallback_s))


async def no_hint() -> None:
    """For a wait that nothing but a wake-up can end early."""
