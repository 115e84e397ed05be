import math
import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dibs.errors import InvalidOption
from dibs.retry import Backoff

ATTEMPTS = st.integers(1, 50) | st.integers(1, 10**400)


@st.composite
def backoffs(draw: st.DrawFn, /, **fixed: Any) -> Backoff:
    """Any policy that can be constructed, with whole numbers and floats."""
    cap_s = draw(st.floats(0, 2.0**53) | st.integers(0, 2**53))
    options: dict[str, Any] = {
        "kind": draw(st.sampled_from(["fixed", "linear", "exponential"])),
        "base_s": draw(st.floats(0, float(cap_s)).filter(lambda base_s: base_s <= cap_s)),
        "factor": draw(st.floats(1, 1e6) | st.integers(1, 10**6)),
        "cap_s": cap_s,
        "jitter": draw(st.sampled_from(["none", "equal", "full"])),
    }
    return Backoff(**(options | fixed))


class Always(random.Random):
    """A generator that always draws the same number."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self.drawn = drawn

    def random(self) -> float:
        """Returns the number it was made with."""
        return self.drawn


class TestDelay:
    """How long a policy waits."""

    def test_default(self) -> None:
        """The default doubles from 5 s up to 900 s and may draw anything below that."""
        assert Backoff() == Backoff(kind="exponential", base_s=5, factor=2, cap_s=900, jitter="full")
        assert [Backoff().ceiling_s(n) for n in range(1, 11)] == [5, 10, 20, 40, 80, 160, 320, 640, 900, 900]

    @pytest.mark.parametrize(
        ("kind", "delays_s"),
        [("fixed", [3, 3, 3, 3]), ("linear", [3, 6, 9, 10]), ("exponential", [3, 4.5, 6.75, 10])],
    )
    def test_kinds(self, kind: Any, delays_s: list[float]) -> None:
        """Without jitter a delay is exactly what its kind says, cut at the cap."""
        backoff = Backoff(kind=kind, base_s=3, factor=1.5, cap_s=10, jitter="none")
        assert [backoff.delay_s(n) for n in range(1, 5)] == delays_s

    @pytest.mark.parametrize(("jitter", "low_s", "middle_s"), [("none", 40, 40), ("equal", 20, 30), ("full", 0, 20)])
    def test_jitter_spans(self, jitter: Any, low_s: float, middle_s: float) -> None:
        """Jitter spreads a delay evenly: `full` from zero, `equal` from half, `none` not at all."""
        backoff = Backoff(kind="fixed", base_s=40, jitter=jitter)
        assert backoff.delay_s(1, rng=Always(0.0)) == low_s
        assert backoff.delay_s(1, rng=Always(0.5)) == middle_s

    @given(backoffs(), ATTEMPTS, st.floats(0, 1, exclude_max=True))
    def test_bounds(self, backoff: Backoff, attempt: int, drawn: float) -> None:
        """No policy, attempt and luck give a delay outside 0 to cap_s, or an overflow."""
        delay_s = backoff.delay_s(attempt, rng=Always(drawn))
        assert type(delay_s) is float
        assert 0 <= delay_s <= backoff.cap_s
        assert delay_s <= backoff.ceiling_s(attempt)

    @given(backoffs(jitter="none"), ATTEMPTS, ATTEMPTS)
    def test_never_shrinks(self, backoff: Backoff, one: int, other: int) -> None:
        """A later attempt never waits shorter than an earlier one, jitter aside."""
        assert backoff.delay_s(min(one, other)) <= backoff.delay_s(max(one, other))

    @given(backoffs(kind="exponential", jitter="none"), st.integers(1, 60))
    def test_grows_by_factor(self, backoff: Backoff, attempt: int) -> None:
        """Below the cap each exponential delay is the one before times the factor."""
        now_s, next_s = backoff.delay_s(attempt), backoff.delay_s(attempt + 1)
        assert next_s == backoff.cap_s or math.isclose(next_s, now_s * backoff.factor, rel_tol=1e-9, abs_tol=1e-300)

    def test_zero_base_stays_zero(self) -> None:
        """A base of zero means no delay, also where the growth is beyond any float."""
        assert Backoff(base_s=0).delay_s(10**9) == 0

    @pytest.mark.parametrize("attempt", [0, -1, True, 1.0, "1", None])
    def test_attempts_count_from_one(self, attempt: Any) -> None:
        """An attempt that is not a whole number from 1 is refused."""
        with pytest.raises(InvalidOption, match="from 1"):
            Backoff().delay_s(attempt)


class TestRandomness:
    """Where jitter comes from."""

    def test_seeding_random_changes_nothing(self) -> None:
        """A program that seeds `random` with a constant does not make its retries predictable."""
        draws = []
        for _ in range(2):
            random.seed(0)
            draws.append([Backoff().delay_s(9) for _ in range(4)])
        assert draws[0] != draws[1]

    def test_processes_differ(self) -> None:
        """Two fresh processes draw different delays: a fleet does not retry in lockstep."""
        program = "from dibs.retry import Backoff; print([Backoff().delay_s(9) for _ in range(4)])"
        draws = [subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout for _ in "12"]
        assert draws[0] != draws[1]

    def test_own_generator(self) -> None:
        """With a generator of the caller's, delays repeat: that is what simulations need."""
        draws = [[Backoff().delay_s(n, rng=rng) for n in range(1, 5)] for rng in (random.Random(7), random.Random(7))]
        assert draws[0] == draws[1]


class TestConstruction:
    """Which policies exist."""

    @pytest.mark.parametrize(
        ("options", "advice"),
        [
            ({"kind": "quadratic"}, "kind must be one of fixed, linear, exponential"),
            ({"jitter": "some"}, "jitter must be one of none, equal, full"),
            ({"jitter": None}, "jitter must be one of"),
            ({"base_s": -1}, "base_s must be from 0"),
            ({"base_s": math.nan}, "base_s must be from 0"),
            ({"base_s": "5"}, "base_s must be a number"),
            ({"base_s": True}, "base_s must be a number"),
            ({"factor": 0.5}, "factor must be from 1"),
            ({"cap_s": math.inf}, "cap_s must be from 0"),
            ({"cap_s": 10**400}, "cap_s must be from 0"),
            ({"base_s": 3600}, "raise cap_s or lower base_s"),
        ],
    )
    def test_refused(self, options: dict[str, Any], advice: str) -> None:
        """A policy that makes no sense is not constructed, and the message says what would."""
        with pytest.raises(InvalidOption, match=advice):
            Backoff(**options)

    def test_refused_when_decoded(self) -> None:
        """A bad policy cannot come in over the wire either."""
        with pytest.raises(msgspec.ValidationError, match="factor must be from 1"):
            msgspec.json.decode(b'{"factor": 0}', type=Backoff)

    @given(backoffs())
    def test_round_trip(self, backoff: Backoff) -> None:
        """A policy survives being stored."""
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(backoff), type=Backoff) == backoff
