"""Levels and surges, against counting the intervals at every step."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

from pyspark.sql import SparkSession

from dibs.history.sweep import BEGIN, END, levels, surge

STEPS, STEP_MS = 12, 10
LAST = STEPS - 1
"""The last step of which levels are asked."""
KEYS = 150


class Interval(NamedTuple):
    """From when to when something waits; one that is open leaves after the last step."""

    from_ms: int
    to_ms: int


def drawn(rng: random.Random, most: int) -> list[Interval]:
    """Returns a few intervals: long, short, without length, open."""
    found = []
    for _ in range(rng.randint(0, most)):
        begin = rng.randrange(STEPS * STEP_MS)
        length = rng.choice((0, rng.randrange(STEP_MS), rng.randrange(STEPS * STEP_MS), STEPS * STEP_MS))
        found.append(Interval(begin, min(begin + length, STEPS * STEP_MS)))
    return found


def changes(waits: list[Interval], runs: list[Interval]) -> dict[int, list[int | None]]:
    """Returns, for each step with any, how many readied, left, began and ended, and when the first that left began."""
    readied, left, began, ended = (
        Counter(getattr(one, end) // STEP_MS for one in some) for some in (waits, runs) for end in Interval._fields
    )
    return {
        step: [
            readied[step],
            left[step],
            began[step],
            ended[step],
            min((one.from_ms for one in waits if one.to_ms // STEP_MS == step), default=None),
        ]
        for step in readied.keys() | left.keys() | began.keys() | ended.keys()
    }


def test_levels_are_those_of_counting(spark: SparkSession) -> None:
    """Whatever waits and runs, each step has its backlog, its running ones and the beginning of the oldest; steps in
    between, without a change, are there as long as something waits or runs, and only then."""
    rng = random.Random("levels")
    queues = [(drawn(rng, 6), drawn(rng, 4)) for _ in range(KEYS)]
    rows = [
        (key, step, *values)
        for key, (waits, runs) in enumerate(queues)
        for step, values in changes(waits, runs).items()
    ]
    given = spark.createDataFrame(
        rows, "key INT, step INT, readied BIGINT, left BIGINT, began BIGINT, ended BIGINT, left_ms BIGINT"
    )
    found = {
        (row.key, row.step): (row.backlog, row.running, row.carried, row.oldest_ms, row.readied)
        for row in levels(given, ["key"], "step", LAST).where(f"step <= {LAST}").collect()
    }
    expected = {}
    for key, (waits, runs) in enumerate(queues):
        changed = changes(waits, runs)
        for step in range(STEPS):
            end_ms = (step + 1) * STEP_MS
            waiting = [one.from_ms for one in waits if one.from_ms < end_ms <= one.to_ms]
            carried, running = (
                sum(one.from_ms < at_ms <= one.to_ms for one in runs) for at_ms in (end_ms - STEP_MS, end_ms)
            )
            if waiting or running or step in changed:
                readied = changed[step][0] if step in changed else None
                expected[key, step] = (len(waiting), running, carried, min(waiting, default=None), readied)
    assert found == expected


def test_a_surge_is_that_of_counting(spark: SparkSession) -> None:
    """The most at once, over what there was at first, is what counting at every instant finds."""
    rng = random.Random("surges")
    keys = [drawn(rng, 8) for _ in range(KEYS)]
    carried = [rng.randint(0, 3) for _ in keys]
    rows = [
        (
            key,
            [one.from_ms for one in some],
            [*(one.to_ms for one in some), *rng.choices(range(1, 100), k=carried[key])],
        )
        for key, some in enumerate(keys)
    ]
    given = spark.createDataFrame(rows, "key INT, begins ARRAY<BIGINT>, ends ARRAY<BIGINT>")
    times = f"concat(transform(begins, t -> {BEGIN.format('t')}), transform(ends, t -> {END.format('t')}))"
    found = {row.key: row.surge for row in given.selectExpr("key", f"{surge(times)} AS surge").collect()}
    assert found == {
        key: max(
            0, *(sum(begin <= at for begin in begins) - sum(end <= at for end in ends) for at in range(STEPS * STEP_MS))
        )
        for key, begins, ends in rows
    }
