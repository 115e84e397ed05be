"""Erlang's formulas, against printed tables and against the sums they abbreviate."""

from __future__ import annotations

from math import exp, factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dibs.errors import InvalidOption
from dibs.history.erlang import Target, blocked_share, wait_share, workers_needed


def summed(workers: int, load: float) -> float:
    """Erlang C as it is defined."""
    queued = load**workers / factorial(workers) * workers / (workers - load)
    return queued / (sum(load**busy / factorial(busy) for busy in range(workers)) + queued)


@pytest.mark.parametrize(
    ("workers", "load", "blocked"),
    [(1, 1.0, 0.5), (2, 1.0, 0.2), (5, 2.5, 0.0697), (10, 5.0, 0.0184), (100, 84.06, 0.01), (20, 12.03, 0.01)],
)
def test_erlang_b_is_that_of_the_tables(workers: int, load: float, blocked: float) -> None:
    """Printed tables of Erlang B give the same share, to the digits they have."""
    assert blocked_share(workers, load) == pytest.approx(blocked, abs=1e-4)


def test_one_worker_waits_as_its_load() -> None:
    """With one worker the share that waits is the load itself, and falls off by what is left of the worker."""
    assert wait_share(1, 0.7, 10.0, 0.0) == pytest.approx(0.7)
    assert wait_share(1, 0.7, 10.0, 5.0) == pytest.approx(0.7 * exp(-0.3 * 0.5))


def test_a_call_centre_of_the_textbooks() -> None:
    """200 calls an hour of three minutes, 80 of 100 to be answered within 20 s: 14 agents, of whom 88.8 % get it."""
    assert workers_needed(10.0, 180.0, 20.0, 0.8) == 14
    assert wait_share(14, 10.0, 180.0, 20.0) == pytest.approx(0.1116, abs=1e-4)
    assert wait_share(13, 10.0, 180.0, 20.0) == pytest.approx(0.2045, abs=1e-4)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_erlang_c_is_the_sum_that_it_abbreviates(workers: int, utilisation: float) -> None:
    """For any number of workers the sum over their states gives the same."""
    load = workers * utilisation
    assert wait_share(workers, load, 1.0, 0.0) == pytest.approx(summed(workers, load), rel=1e-9)


@given(st.floats(0, 40), st.floats(0.001, 1000), st.floats(0, 100), st.floats(0.01, 0.999))
def test_no_fewer_workers_would_do(load: float, run_s: float, target_s: float, share: float) -> None:
    """What is needed is the first number that is enough, counting up from one."""
    needed = 1
    while needed <= load or (load > 0 and summed(needed, load) * exp(-(needed - load) * target_s / run_s) > 1 - share):
        needed += 1
    said = workers_needed(load, run_s, target_s, share)
    assert said == needed or wait_share(min(said, needed), load, run_s, target_s) == pytest.approx(1 - share)


def test_large_and_small_loads() -> None:
    """Thousands and millions of workers are counted, as Halfin and Whitt say for many; a trifle needs one."""
    assert workers_needed(5000.0, 1.0, 0.0, 0.95) == pytest.approx(5000 + 1.740 * 5000**0.5, abs=3)
    assert workers_needed(1e8, 1.0, 0.0, 0.95) == pytest.approx(1e8 + 1.740e4, abs=10)
    assert [workers_needed(load, 0.001, 2.0, 0.95) for load in (0.0, 1e-300, 1e-9)] == [1, 1, 1]


@pytest.mark.parametrize(("wait_ms", "share"), [(-1, 0.5), (0, 0.0), (0, 1.0)])
def test_a_target_out_of_reach_is_refused(wait_ms: int, share: float) -> None:
    """No number of workers makes all wait no longer than a target; nor is there a wait under 0."""
    with pytest.raises(InvalidOption):
        Target(wait_ms, share)
