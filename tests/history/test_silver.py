"""Events become tasks and attempts: the same as a plain loop makes of them, however the journal is cut."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dibs.history import silver
from tests.history import oracle
from tests.history.histories import START, EventRow, cut, frame, history, story, trimmed
from tests.history.oracle import Row, Silver

SEEDS = range(12)


class Tables:
    """The silver tables, kept as a lake keeps them: rows that have a day stay, unless a dead letter comes back."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._ended: list[Row] = []
        self._tasks: list[Row] = []
        self._running: list[Row] = []

    def take(self, events: Sequence[EventRow]) -> None:
        """Folds a batch in: with the tasks that have not ended, and the dead ones of which it has a `replayed`."""
        back = {(event.tenant, event.id) for event in events if event.kind == "replayed"}
        state = [row for row in self._tasks if row["date"] is None or (row["place"] == "dead" and _who(row) in back)]
        tasks = frame(self._spark, "tasks", [tuple(row.values()) for row in state])
        folded = silver.fold(frame(self._spark, "events", events), tasks)
        folded.followed.persist()
        now, ended = _rows(folded.tasks), _rows(folded.attempts)
        self._running = _rows(silver.running(folded.tasks)) + [
            row for row in self._running if _who(row) not in {_who(event._asdict()) for event in events}
        ]
        folded.followed.unpersist()
        touched = {_who(row) for row in now}
        kept = [row for row in self._tasks if row not in state or _who(row) not in touched]
        self._tasks, self._ended = kept + now, self._ended + ended

    def silver(self) -> Silver:
        """Returns both tables."""
        return Silver(sorted(self._tasks, key=oracle.by_key), sorted(self._ended + self._running, key=oracle.by_key))


def _who(row: Row) -> tuple[str, str]:
    return row["tenant"], row["id"]


def _rows(frame: DataFrame) -> list[Row]:
    rows: list[Row] = frame.toArrow().to_pylist()
    return rows


def _same(found: Silver, expected: Silver) -> None:
    """Says which columns of which row differ, first, which whole tables would hide."""
    for made, right in ((found.tasks, expected.tasks), (found.attempts, expected.attempts)):
        for row, other in zip(made, right, strict=False):
            assert row == other, {name: (row[name], other[name]) for name in other if row[name] != other[name]}
        assert len(made) == len(right)
    assert list(found.tasks[0]) == list(expected.tasks[0])


@pytest.fixture(scope="module")
def events() -> list[EventRow]:
    """Many histories, some of which lack their beginning."""
    whole = [row for seed in SEEDS for row in history(seed)]
    return whole + [row for seed in SEEDS for row in trimmed(history(seed + 1_000), seed)]


def test_at_once(spark: SparkSession, events: list[EventRow]) -> None:
    """All events at once give what a plain loop over them gives, whatever order they come in; some tasks have two lives
    in them, some no beginning, and some an end of which the claim is not known."""
    tables = Tables(spark)
    tables.take(events[::-1])
    expected = oracle.silver(events)
    _same(tables.silver(), expected)
    lives = [_who(row) for row in expected.tasks]
    assert len(set(lives)) < len(lives)
    assert any(row["enqueued_at"] is None and row["replays"] for row in expected.tasks)
    assert any(row["outcome"] == "completed" and not row["deliveries"] for row in expected.tasks)
    assert any(row["ready_at"] is None for row in expected.attempts)


@pytest.mark.parametrize(("seed", "pieces"), [(1, 2), (2, 5)])
def test_any_cut(spark: SparkSession, events: list[EventRow], seed: int, pieces: int) -> None:
    """Batch after batch, wherever the journals are cut, gives the same as all at once: tasks go on, end, come back and
    begin anew across the cuts."""
    tables = Tables(spark)
    for batch in cut(events, seed, pieces):
        tables.take(batch)
    _same(tables.silver(), oracle.silver(events))


def test_every_cut_of_a_task(spark: SparkSession) -> None:
    """A task that has seen everything, cut at every place: the same task under many names, each cut elsewhere."""
    seen = _everything("x")
    named = [[row._replace(id=f"cut-{place:02}") for row in _everything("x")] for place in range(len(seen) + 1)]
    tables = Tables(spark)
    tables.take([row for place, rows in enumerate(named) for row in rows[:place]])
    tables.take([row for place, rows in enumerate(named) for row in rows[place:]])
    _same(tables.silver(), oracle.silver(row for rows in named for row in rows))


def test_told_by_hand(spark: SparkSession) -> None:
    """What the columns say of some tasks that are simple enough to be reckoned by hand."""
    stories = [
        story("limit", ("enqueued", 0), ("promoted", 4, {"reason": "LIMIT"}), ("claimed", 10, _by("ann", 1)),
              ("cancelling", 11), ("completed", 15, {"attempt": 1})),
        story("later", ("enqueued", 0, {"reason": "DELAYED"}), ("promoted", 60), ("claimed", 61.5, _by("ann", 1)),
              ("retried", 63, {"reason": "DELAYED", **_ERROR}), ("claimed", 70, _by("bob", 2)),
              ("failed", 71, {"reason": "LEASE_EXPIRED"}), ("replayed", 100),
              ("cancelled", 107, {"reason": "EXPIRED"})),
        story("clock", ("enqueued", 100), ("claimed", 40, _by("ann", 1)), ("completed", 130)),
        story("no claim", ("retried", 0), ("claimed", 5, _by("ann", 2))),
        story("no beginning", ("claimed", 3, _by("ann", 4)), ("released", 4)),
        story("not here", ("cancelling", 0), ("purged", 1)),
    ]  # fmt: skip
    tables = Tables(spark)
    tables.take([row for rows in stories for row in rows])
    found = tables.silver()
    tasks = {row["id"]: row for row in found.tasks}
    assert sorted(tasks) == ["clock", "later", "limit", "no beginning", "no claim"]

    def told(name: str, *columns: str) -> list[Any]:
        seconds = {START + timedelta(seconds=number / 2): number / 2 for number in range(300)}
        return [seconds.get(tasks[name][column], tasks[name][column]) for column in columns]

    assert told("limit", "ready_at", "wait_ms", "run_ms", "place", "outcome") == [
        None,
        10_000,
        5_000,
        "none",
        "completed",
    ]
    assert told("later", "first_claimed_at", "ended_at", "ready_at", "outcome", "reason") == [
        61.5, 107, 100, "cancelled", "EXPIRED"
    ]  # fmt: skip
    assert told("later", "deliveries", "retries", "expiries", "replays") == [2, 1, 1, 1]
    assert told("later", "wait_ms", "run_ms", "attempt", "worker") == [8_500, 2_500, 2, "bob"]
    assert told("later", "error_type", "error_line") == ["ValueError", None]
    assert told("clock", "enqueued_at", "first_claimed_at", "wait_ms", "run_ms") == [100, 100, 0, 30_000]
    assert told("no claim", "enqueued_at", "retries", "place", "ready_at", "wait_ms") == [None, 0, "leased", 0, 5_000]
    attempts = [(row["id"], row["delivery"], row["outcome"], row["reason"], row["wait_ms"]) for row in found.attempts]
    assert attempts == [
        ("clock", 1, "completed", None, 0),
        ("later", 1, "retried", None, 1_500),
        ("later", 2, "failed", "LEASE_EXPIRED", 0),
        ("limit", 1, "completed", None, 10_000),
        ("no beginning", 1, "released", None, None),
        ("no claim", 1, None, None, 5_000),
    ]


def test_state_beside_events(spark: SparkSession) -> None:
    """What is known of tasks comes back if they have an event here, even one that changes nothing, and only then. Of
    two rows of one id the latest goes on, and the other comes back as it was."""
    dies: list[tuple[Any, ...]] = [("enqueued", 0), ("claimed", 1, _by("ann", 1)), ("failed", 2, {"reason": "FAILED"})]
    twice = story("twice", *dies) + story("twice", *((kind, at_s + 60, *more) for kind, at_s, *more in dies), after=5)
    known = oracle.silver(twice).tasks
    known += oracle.silver(story("flagged", ("enqueued", 0), ("claimed", 1, _by("ann", 1)))).tasks
    known += oracle.silver(story("elsewhere", ("enqueued", 0), ("claimed", 1, _by("ann", 1)))).tasks
    new = story("twice", ("replayed", 90), after=9) + story("flagged", ("cancelling", 9), after=9)
    folded = silver.fold(frame(spark, "events", new), frame(spark, "tasks", [tuple(row.values()) for row in known]))
    flagged, older, replayed = sorted(_rows(folded.tasks), key=oracle.by_key)
    assert (flagged, older) == (known[2], known[0])
    assert (replayed["enqueued_at"], replayed["place"]) == (START + timedelta(seconds=60), "ready")
    assert folded.attempts.isEmpty()


def test_times_never_run_backwards(events: list[EventRow]) -> None:
    """The histories have clocks that step, and yet no wait or run is negative, and nothing ends before it began: of the
    loop, to which the tables are equal."""
    backwards = 0
    for seed in SEEDS:
        latest: dict[tuple[str, str], EventRow] = {}
        for row in history(seed):
            before = latest.get((row.tenant, row.id))
            backwards += before is not None and row.at < before.at
            latest[row.tenant, row.id] = row
    assert backwards
    tasks, attempts = oracle.silver(events)
    assert all(one["wait_ms"] >= 0 and one["run_ms"] >= 0 for one in tasks)
    for one in attempts:
        times = [one[name] for name in ("enqueued_at", "ready_at", "claimed_at", "ended_at") if one[name]]
        assert times == sorted(times)


_ERROR = {"error_type": "ValueError", "error_line": "", "fingerprint": "f00d"}


def _by(worker: str, attempt: int) -> dict[str, object]:
    return {"worker": worker, "attempt": attempt}


def _everything(name: str) -> list[EventRow]:
    return story(
        name,
        ("enqueued", 0, {"reason": "DELAYED"}), ("promoted", 10), ("promoted", 12, {"reason": "LIMIT"}),
        ("claimed", 15, _by("ann", 1)), ("cancelling", 16), ("released", 17, _by("ann", 1)),
        ("claimed", 14, _by("bob", 1)), ("retried", 20, {**_by("bob", 1), **_ERROR}),
        ("promoted", 21, {"reason": "LIMIT"}), ("claimed", 30, _by("ann", 2)),
        ("retried", 31, {"reason": "DELAYED", **_ERROR}), ("claimed", 40, _by("cy", 3)),
        ("lease_expired", 70, _by("cy", 3)), ("claimed", 71, _by("ann", 4)),
        ("failed", 72, {**_by("ann", 4), **_ERROR, "reason": "MAX_ATTEMPTS"}), ("replayed", 90_000),
        ("claimed", 90_001, _by("ann", 1)), ("failed", 90_002, {"reason": "LEASE_EXPIRED"}), ("purged", 90_003),
        ("enqueued", 90_010), ("cancelled", 90_020, {"reason": "CANCELLED"}), ("purged", 90_021),
        ("enqueued", 90_030), ("claimed", 90_031, _by("ann", 1)), ("completed", 90_032),
    )  # fmt: skip
