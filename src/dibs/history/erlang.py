"""How many workers a queue needs for a wait that is aimed at: Erlang C, which takes arrivals to be independent of each
other and runs to scatter about their mean, as they do where many send small work.

Nothing here has factorials or counts up from one worker, so loads of millions are no trouble.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, isinf

import msgspec

from dibs.errors import InvalidOption

_NEGLIGIBLE = 1e-17


class Target(msgspec.Struct, frozen=True):
    """The wait that is aimed at, and for what share of the deliveries."""

    wait_ms: int = 2000
    share: float = 0.95

    def __post_init__(self) -> None:
        """Refuses a target that no number of workers meets, or any does."""
        if self.wait_ms < 0:
            raise InvalidOption(f"the wait that is aimed at is {self.wait_ms} ms; give one of 0 or more")
        if not 0 < self.share < 1:
            raise InvalidOption(f"the share of deliveries is {self.share}; give one between 0 and 1, such as 0.95")


def workers_needed(load: float, run_s: float, target_s: float, share: float) -> int:
    """Returns the least number of workers, one or more, with which `share` of the deliveries wait `target_s` at most.

    `load` is how many would be busy all the time: arrivals per second times their mean run, which is `run_s`.
    """

    def enough(workers: int) -> bool:
        return wait_share(workers, load, run_s, target_s) <= 1 - share

    # With no more workers than load the backlog would grow for ever.
    least = int(load) + 1
    more = 1
    while not enough(least + more):
        more *= 2
    return least + bisect_left(range(more), True, key=lambda extra: enough(least + extra))


def wait_share(workers: int, load: float, run_s: float, target_s: float) -> float:
    """Returns what share of the deliveries waits longer than `target_s` (Erlang C); `workers` is over the load."""
    if load == 0 or run_s == 0:
        return 0.0
    blocked = blocked_share(workers, load)
    waits = blocked / (1 - load / workers * (1 - blocked))
    return waits * exp(-(workers - load) * target_s / run_s)


def blocked_share(workers: int, load: float) -> float:
    """Returns what share would be turned away if nobody could wait (Erlang B); the load is over 0.

    Its recurrence 1/B(c) = 1 + c/load/B(c-1), unrolled from its end: every term is positive, so nothing cancels out,
    and all that counts is within a few square roots of the load.
    """
    inverse = term = 1.0
    for busy in range(workers, 0, -1):
        term *= busy / load
        inverse += term
        if isinf(inverse):
            return 0.0
        if busy < load and term < inverse * _NEGLIGIBLE:
            break
    return 1 / inverse
