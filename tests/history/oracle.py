"""Silver by a plain loop over the events, one at a time: what Spark makes is compared to this."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple

from tests.history.histories import EventRow

Row = dict[str, Any]

_ENDS_DELIVERY = {"completed", "retried", "released", "lease_expired", "failed", "cancelled"}
_ENDS_TASK = {"completed", "failed", "cancelled"}


class Silver(NamedTuple):
    """The rows of both tables, by column, sorted by their keys. Running deliveries are in `attempts`, too."""

    tasks: list[Row]
    attempts: list[Row]


def silver(events: Iterable[EventRow]) -> Silver:
    """Returns what the events come to, however they are ordered and cut."""
    lives: list[_Life] = []
    current: dict[tuple[str, str], _Life] = {}
    for event in sorted(events, key=lambda event: (event.shard, event.cursor)):
        if event.kind in ("cancelling", "purged"):
            continue
        who = (event.tenant, event.id)
        if who not in current or event.kind == "enqueued":
            current[who] = _Life(event)
            lives.append(current[who])
        current[who].happened(event)
    tasks = [life.task() for life in lives]
    attempts = [attempt for life in lives for attempt in life.attempts()]
    return Silver(sorted(tasks, key=by_key), sorted(attempts, key=by_key))


def by_key(row: Row) -> tuple[Any, ...]:
    """Sorts the rows of either table; what is not known comes first."""
    at = row["enqueued_at"]
    return (row["tenant"], row["id"], at is not None, at, row.get("delivery", 0))


class _Life:
    """A task, from an `enqueued` or from where the journal begins, as it moves."""

    def __init__(self, first: EventRow) -> None:
        self.first = self.last = first
        self.place: str | None = None
        self.now: datetime | None = None
        self.enqueued_at: datetime | None = None
        self.became_ready_at: datetime | None = None
        self.ended: EventRow | None = None
        self.ended_ready_at: datetime | None = None
        self.replays = 0
        self.unclaimed_wait = timedelta()
        self.error: EventRow | None = None
        self.deliveries: list[Row] = []

    def happened(self, event: EventRow) -> None:
        """Takes one more event into account."""
        if event.kind == "promoted" and self.place == "ready":
            return
        before = self.place
        self.now = event.at if self.now is None else max(self.now, event.at)
        self.last = event
        self.ended, self.ended_ready_at = None, None
        if event.error_type:
            self.error = event
        if event.kind == "enqueued":
            self.enqueued_at = self.now
        if event.kind == "claimed":
            self._claimed(before, event)
        if event.kind == "replayed":
            self.replays += 1
        if event.kind in _ENDS_DELIVERY and before == "leased":
            self.deliveries[-1] |= {"ended_at": self.now, "end": event}
        if event.kind in _ENDS_TASK:
            self.ended = event
        if event.kind == "cancelled" and before == "ready":
            assert self.became_ready_at is not None
            self.ended_ready_at = self.became_ready_at
            self.unclaimed_wait += self.now - self.became_ready_at
        self.place = _place_after(event)
        self.became_ready_at = self.now if self.place == "ready" else None

    def _claimed(self, before: str | None, event: EventRow) -> None:
        ready_at = {"ready": self.became_ready_at, "delayed": self.now}.get(before or "")
        self.deliveries.append({"claim": event, "ready_at": ready_at, "claimed_at": self.now, "ended_at": None})

    def task(self) -> Row:
        """Returns the row of `tasks`."""
        ends = [one["end"] for one in self.deliveries if "end" in one]
        claims = [one["claim"] for one in self.deliveries]
        waits = [one["claimed_at"] - one["ready_at"] for one in self.deliveries if one["ready_at"]]
        runs = [one["ended_at"] - one["claimed_at"] for one in self.deliveries if one["ended_at"]]
        ready_at = {"ready": self.became_ready_at, "none": self.ended_ready_at}.get(self.place or "")
        if self.place == "leased":
            ready_at = self.deliveries[-1]["ready_at"]
        ended_at = self.now if self.ended else None
        return {
            "tenant": self.first.tenant,
            "command": self.first.command,
            "id": self.first.id,
            "enqueued_at": self.enqueued_at,
            "first_claimed_at": self.deliveries[0]["claimed_at"] if self.deliveries else None,
            "ended_at": ended_at,
            "outcome": self.ended.kind if self.ended else None,
            "reason": (self.ended.reason or None) if self.ended and self.ended.kind != "completed" else None,
            "place": self.place,
            "changed_at": self.now,
            "ready_at": ready_at,
            "deliveries": len(self.deliveries),
            "retries": sum(end.kind == "retried" for end in ends),
            "releases": sum(end.kind == "released" for end in ends),
            "expiries": sum(end.kind == "lease_expired" or end.reason == "LEASE_EXPIRED" for end in ends),
            "replays": self.replays,
            "wait_ms": _ms(sum(waits, self.unclaimed_wait)),
            "run_ms": _ms(sum(runs, timedelta())),
            "attempt": claims[-1].attempt if claims else 0,
            "worker": claims[-1].worker or None if claims else None,
            "error_type": self.error.error_type if self.error else None,
            "error_line": (self.error.error_line or None) if self.error else None,
            "fingerprint": (self.error.fingerprint or None) if self.error else None,
            "shard": self.last.shard,
            "position": self.last.cursor,
            "date": _day(ended_at),
        }

    def attempts(self) -> list[Row]:
        """Returns the rows of `attempts`: what ended, and what runs. A claim that neither ended nor runs (its end is
        missing in the journal) is no row."""
        running = len(self.deliveries) if self.place == "leased" else 0
        return [
            self._attempt(number, one)
            for number, one in enumerate(self.deliveries, 1)
            if "end" in one or number == running
        ]

    def _attempt(self, number: int, one: Row) -> Row:
        claim: EventRow = one["claim"]
        end: EventRow | None = one.get("end")
        wait = one["claimed_at"] - one["ready_at"] if one["ready_at"] else None
        run = one["ended_at"] - one["claimed_at"] if end else None
        return {
            "tenant": self.first.tenant,
            "command": self.first.command,
            "id": self.first.id,
            "enqueued_at": self.enqueued_at,
            "delivery": number,
            "attempt": claim.attempt,
            "worker": claim.worker or None,
            "ready_at": one["ready_at"],
            "claimed_at": one["claimed_at"],
            "ended_at": one["ended_at"],
            "wait_ms": None if wait is None else _ms(wait),
            "run_ms": None if run is None else _ms(run),
            "outcome": end.kind if end else None,
            "reason": end.reason if end and end.reason not in ("", "DELAYED") else None,
            "error_type": (end.error_type or None) if end else None,
            "error_line": (end.error_line or None) if end else None,
            "fingerprint": (end.fingerprint or None) if end else None,
            "date": _day(one["ended_at"]),
        }


def _place_after(event: EventRow) -> str:
    match event.kind:
        case "claimed":
            return "leased"
        case "failed":
            return "dead"
        case "completed" | "cancelled":
            return "none"
        case "enqueued" | "retried" if event.reason:
            return "delayed"
        case _:
            return "ready"


def _ms(length: timedelta) -> int:
    return length // timedelta(milliseconds=1)


def _day(at: datetime | None) -> date | None:
    return None if at is None else at.date()
