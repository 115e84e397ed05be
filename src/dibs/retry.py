"""How long a failed task waits before it is tried again.

A :class:`Backoff` is a value and its delays are pure: the same attempt and the same random number give the same delay,
no clock is read and nothing is remembered. Jitter is drawn from the operating system unless a caller brings its own
generator, so workers do not retry in step: not after a fork, and not when a program seeds `random` for its own ends.
"""

from __future__ import annotations

import math
import random
from typing import Final, Literal, get_args

import msgspec

from dibs.errors import InvalidOption

Kind = Literal["fixed", "linear", "exponential"]
Jitter = Literal["none", "equal", "full"]

# SystemRandom has no state: `random.seed(0)` in a handler cannot bring a fleet into lockstep.
_SYSTEM_RNG: Final = random.SystemRandom()

# Counting further changes no delay that anybody waits for, and a float holds every integer up to here.
_STEPS_MAX: Final = 2**53


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The delays of one retry policy; one that exists is valid. Decoding a bad one gives `msgspec.ValidationError`."""

    kind: Kind = "exponential"
    """`fixed`: base_s; `linear`: base_s · attempt; `exponential`: base_s · factor^(attempt - 1)."""
    base_s: float = 5.0
    """The delay after the first attempt, before jitter; at most cap_s."""
    factor: float = 2.0
    """What an exponential delay is multiplied by from one attempt to the next; at least 1."""
    cap_s: float = 900.0
    """No delay is longer."""
    jitter: Jitter = "full"
    """`none`: the delay itself; `equal`: between half of it and all of it; `full`: between zero and all of it."""

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, get_args(Kind))
        _check_choice("jitter", self.jitter, get_args(Jitter))
        _check_number("base_s", self.base_s, at_least=0)
        _check_number("factor", self.factor, at_least=1)
        _check_number("cap_s", self.cap_s, at_least=0)
        if self.base_s > self.cap_s:
            raise InvalidOption(f"base_s {self.base_s} is over cap_s {self.cap_s}: raise cap_s or lower base_s")

    def delay_s(self, attempt: int, rng: random.Random = _SYSTEM_RNG) -> float:
        """Returns the seconds to wait after `attempt` (the first is 1) failed: from 0 to cap_s, however large it is."""
        full_s = self.ceiling_s(attempt)
        if self.jitter == "none":
            return full_s
        if self.jitter == "equal":
            return full_s / 2 + full_s / 2 * rng.random()
        return full_s * rng.random()

    def ceiling_s(self, attempt: int) -> float:
        """Returns the delay before jitter: what `delay_s` never exceeds for this attempt."""
        if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 1:
            raise InvalidOption(f"attempt must be a whole number from 1, not {attempt!r}")
        return float(min(self.cap_s, self.base_s * self._growth(min(attempt, _STEPS_MAX))))

    def _growth(self, steps: int) -> float:
        """Returns what base_s is multiplied by; finite, so that a base of zero stays zero."""
        if self.kind == "fixed":
            return 1.0
        if self.kind == "linear":
            return float(steps)
        try:
            # A whole factor would be raised exactly, to a number of as many bits as there were attempts.
            return float(self.factor) ** (steps - 1)
        except OverflowError:
            return math.inf if self.base_s else 0.0


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidOption(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_number(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidOption(f"{name} must be a number, not {value!r}")
    # Compared as it is: turning a huge whole number into a float would raise.
    if not at_least <= value <= _STEPS_MAX:
        raise InvalidOption(f"{name} must be from {at_least} to {_STEPS_MAX}, not {value!r}")
