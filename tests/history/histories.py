"""Histories to test with: the journals of a made-up queue that obeys the rules, with all that can happen to a task,
clocks that step and shards whose clocks are apart. The same seed gives the same history."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession

from dibs.fingerprint import fingerprint
from dibs.history.tables import TABLES
from dibs.ids import id_to_text
from dibs.task import ErrorInfo

START = datetime(2026, 11, 14, 20, 0, tzinfo=UTC)
"""Four hours before a midnight, so that even short histories have two days."""

_SECOND_MS, _MINUTE_MS, _HOUR_MS = 1_000, 60_000, 3_600_000
_SLOTS = 256
_MAX_ATTEMPTS = 2


class EventRow(NamedTuple):
    """A row of `events`."""

    shard: int
    cursor: bytes
    at: datetime
    kind: str
    tenant: str
    id: str
    command: str
    attempt: int = 0
    worker: str = ""
    reason: str = ""
    error_type: str = ""
    error_line: str = ""
    fingerprint: str = ""


def history(seed: int, *, tasks: int = 100, shards: int = 2, pace_ms: int = 4 * _SECOND_MS) -> list[EventRow]:
    """Returns what the journals say of so many tasks, in the order in which it happened.

    Some of them are open at the end. Between two things that happen lies about `pace_ms`, now and then a thousand times
    that: a hundred tasks take a day or two.
    """
    simulation = _Simulation(random.Random(f"history {seed}"), shards, pace_ms)
    left = tasks
    while left > 0:
        left -= simulation.step(left)
    return simulation.rows


def story(name: str, *events: Sequence[object], shard: int = 0, after: int = 0) -> list[EventRow]:
    """Returns a history of one task, told by hand: of each event its kind and its time in seconds after START, then
    what else it has, by name: ``("claimed", 5, {"worker": "ann"})``. The journal is at position `after` before."""
    rows = []
    for number, (kind, at_s, *more) in enumerate(events, after + 1):
        assert isinstance(at_s, (int, float))
        fields = dict(pair for given in more for pair in dict(given).items())  # type: ignore[call-overload]
        at = START + timedelta(seconds=at_s)
        rows.append(EventRow(shard, cursor(shard, number), at, str(kind), "acme", name, "resize", **fields))
    return rows


def cursor(shard: int, position: int, index: int = 0) -> bytes:
    """Returns the place of an event in a shard's journal; they sort."""
    return bytes([shard]) * 16 + position.to_bytes(8, "big") + index.to_bytes(4, "big")


def cut(rows: Sequence[EventRow], seed: int, pieces: int) -> list[list[EventRow]]:
    """Divides a history into batches: of each journal, each has a piece that follows that of the batch before. Some
    pieces are empty."""
    rng = random.Random(f"cut {seed}")
    batches: list[list[EventRow]] = [[] for _ in range(pieces)]
    for shard in sorted({row.shard for row in rows}):
        journal = sorted((row for row in rows if row.shard == shard), key=lambda row: row.cursor)
        cuts = sorted(rng.choices(range(len(journal) + 1), k=pieces - 1))
        for batch, begin, end in zip(batches, [0, *cuts], [*cuts, len(journal)], strict=True):
            batch.extend(journal[begin:end])
    return batches


def trimmed(rows: Sequence[EventRow], seed: int, share: float = 0.3) -> list[EventRow]:
    """Returns what is left when about that share of each journal, its beginning, is gone."""
    rng = random.Random(f"trim {seed}")
    kept: list[EventRow] = []
    for shard in sorted({row.shard for row in rows}):
        journal = sorted((row for row in rows if row.shard == shard), key=lambda row: row.cursor)
        kept += journal[int(len(journal) * share * rng.uniform(0.5, 1.5)) :]
    return kept


def frame(spark: SparkSession, table: str, rows: Iterable[Sequence[object]]) -> DataFrame:
    """Returns rows as a DataFrame with the columns of a table of the lake. Of those of `events`, the day is added; rows
    of other tables end with it."""
    found = [(*row, row.at.date()) if isinstance(row, EventRow) else tuple(row) for row in rows]
    return spark.createDataFrame(found, TABLES[table].ddl(), verifySchema=False)


@dataclass(eq=False)
class _Task:
    tenant: str
    id: str
    command: str
    shard: int
    place: str = "gone"
    attempts: int = 0
    worker: str = ""
    due_ms: int = 0
    cancelling: bool = False


@dataclass
class _Simulation:
    rng: random.Random
    shards: int
    pace_ms: int
    rows: list[EventRow] = field(default_factory=list)
    tasks: list[_Task] = field(default_factory=list)
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.apart_ms = [self.rng.choice((0, self.rng.randint(-_HOUR_MS, _HOUR_MS))) for _ in range(self.shards)]
        self.positions = [self.rng.randrange(1, 1 << 40) for _ in range(self.shards)]
        self.queues = [("acme", "resize"), ("acme", "mail"), ("globex", "resize"), ("globex", "é.Ω")]
        self.workers = ["ann", "bob", "cy-1", "dee"]
        self.moves = {
            "ready": self.from_ready, "delayed": self.from_delayed, "leased": self.from_leased,
            "dead": self.from_dead, "none": self.from_none, "gone": self.from_gone,
        }  # fmt: skip

    def step(self, left: int) -> int:
        """Lets something happen, and returns how many tasks are new."""
        self.now_ms += int(self.rng.expovariate(1) * self.pace_ms * self.rng.choice((0, 1, 1, 1, 1, 1, 1, 1, 1, 1)))
        if self.rng.random() < 0.02:
            self.now_ms += self.pace_ms * 1_000
        if self.rng.random() < 0.01:
            self.apart_ms[self.rng.randrange(self.shards)] += self.rng.choice(
                (-_HOUR_MS, -_MINUTE_MS, -700, 700, _MINUTE_MS, _HOUR_MS)
            )
        if self.rng.random() < 0.06 or not self.tasks:
            return self.enqueue(min(left, self.rng.choice((1, 1, 1, 2, 5))))
        # The newer ones have more to do, and some of the old ones wait for days.
        task = self.rng.choice(self.tasks[-30:] if self.rng.random() < 0.8 else self.tasks)
        self.position(task.shard)
        self.moves[task.place](task)
        return 0

    def enqueue(self, count: int) -> int:
        """Puts some tasks in, as one entry of each journal that has one of them."""
        tenant, command = self.rng.choice(self.queues)
        for shard in range(self.shards):
            self.position(shard)
        for _ in range(count):
            raw = self.rng.randbytes(16)
            task = _Task(tenant, id_to_text(raw), command, raw[-1] * self.shards // _SLOTS)
            self.tasks.append(task)
            self.begin(task)
        return count

    def begin(self, task: _Task) -> None:
        """A life begins."""
        task.attempts = 0
        self.put(task, "enqueued", self.rng.random() < 0.25)

    def from_ready(self, task: _Task) -> None:
        """Claimed, mostly."""
        what = self.rng.random()
        if what < 0.75:
            task.attempts += 1
            task.worker, task.place = self.rng.choice(self.workers), "leased"
            self.journal(task, "claimed")
        elif what < 0.85:
            self.journal(task, "promoted", "LIMIT")
        elif what < 0.95:
            self.end(task, "cancelled", self.rng.choice(("CANCELLED", "EXPIRED", "DUPLICATE")))

    def from_delayed(self, task: _Task) -> None:
        """Promoted when it is due, mostly; rarely, it is claimed at once."""
        what = self.rng.random()
        if what < 0.03:
            self.end(task, "cancelled", self.rng.choice(("CANCELLED", "EXPIRED")))
        elif what < 0.06:
            task.attempts += 1
            task.worker, task.place = self.rng.choice(self.workers), "leased"
            self.journal(task, "claimed")
        elif task.due_ms <= self.now_ms:
            task.place = "ready"
            self.journal(task, "promoted")

    def from_leased(self, task: _Task) -> None:
        """Settled, mostly; or its lease runs out, or it is to be cancelled."""
        what = self.rng.random()
        last = task.attempts >= _MAX_ATTEMPTS
        if what < 0.1:
            task.cancelling = True
            self.journal(task, "cancelling")
        elif what < 0.45:
            self.end(task, "completed")
        elif task.cancelling:
            self.end(task, "cancelled", "CANCELLED", error=self.rng.random() < 0.5)
        elif what < 0.5:
            self.end(task, "failed", "FAILED", error=True)
        elif what < 0.7 and not last:
            self.put(task, "retried", self.rng.random() < 0.6, error=self.rng.random() < 0.9)
        elif what < 0.7:
            self.end(task, "failed", "MAX_ATTEMPTS", error=True)
        elif what < 0.85 and not last:
            self.put(task, "lease_expired")
        elif what < 0.85:
            self.end(task, "failed", "LEASE_EXPIRED")
        else:
            self.put(task, "released")
            task.attempts -= 1

    def from_dead(self, task: _Task) -> None:
        """Replayed or purged."""
        what = self.rng.random()
        if what < 0.3:
            task.attempts = 0
            self.put(task, "replayed")
        elif what < 0.4:
            task.place = "gone"
            self.journal(task, "purged")

    def from_none(self, task: _Task) -> None:
        """Purged."""
        if self.rng.random() < 0.2:
            task.place = "gone"
            self.journal(task, "purged")

    def from_gone(self, task: _Task) -> None:
        """Its id is used again, now and then."""
        if self.rng.random() < 0.3:
            self.begin(task)

    def put(self, task: _Task, kind: str, delayed: bool = False, error: bool = False) -> None:
        """It becomes ready, now or later."""
        task.place = "delayed" if delayed else "ready"
        task.due_ms = self.now_ms + int(self.rng.expovariate(1) * 20 * self.pace_ms)
        self.journal(task, kind, "DELAYED" if delayed else "", error)
        task.worker, task.cancelling = "", False

    def end(self, task: _Task, kind: str, reason: str = "", error: bool = False) -> None:
        """It ends."""
        task.place = "dead" if kind == "failed" else "none"
        self.journal(task, kind, reason, error)
        task.worker, task.cancelling = "", False

    def position(self, shard: int) -> None:
        """A new entry of a journal begins, though not for everything that happens."""
        self.positions[shard] += self.rng.choice((0, 1, 1, 7))

    def journal(self, task: _Task, kind: str, reason: str = "", error: bool = False) -> None:
        """Writes an event."""
        index = len(self.rows)
        at = START + timedelta(milliseconds=self.now_ms + self.apart_ms[task.shard])
        what = ("", "", "")
        if error:
            told = ErrorInfo(
                type=self.rng.choice(("ValueError", "shop.PaymentRefused")),
                message=self.rng.choice((f"order {index} is 'late'", f"no answer after {index} s\nat all", "")),
            )
            what = (told.type, told.message.split("\n", 1)[0], fingerprint(told))
        self.rows.append(
            EventRow(
                task.shard, cursor(task.shard, self.positions[task.shard], index), at, kind, task.tenant, task.id,
                task.command, task.attempts, task.worker, reason, *what,
            )
        )  # fmt: skip
