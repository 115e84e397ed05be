"""Gold in plain Python, every minute and hour asked of every row of silver: what Spark makes is compared to this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from math import exp, floor
from typing import NamedTuple

from dibs.history.erlang import Target
from dibs.history.gold import Span
from tests.history.histories import EventRow
from tests.history.oracle import Row, Silver

_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
_MS = timedelta(milliseconds=1)


def span(events: Iterable[EventRow]) -> Span:
    """Returns what a lake of these events knows."""
    times = [event.at for event in events]
    return Span(min(times), max(times))


def gold(silver: Silver, replays: Iterable[EventRow], known: Span, target: Target) -> dict[str, list[Row]]:
    """Returns the rows of each table, for all that is known."""
    lake = _Lake(silver.attempts, silver.tasks, list(replays), known, target)
    return {
        "queue_minutes": list(lake.queue_minutes()),
        "error_groups": list(lake.error_groups()),
        "workers": list(lake.workers()),
        "capacity": list(lake.capacity()),
        "tenants": list(lake.tenants()),
    }


class _Lake(NamedTuple):
    attempts: list[Row]
    tasks: list[Row]
    replays: list[EventRow]
    known: Span
    target: Target

    def of(self, wanted: Callable[[str, str], bool]) -> _Lake:
        """Returns what is about some queues only."""
        attempts = [one for one in self.attempts if wanted(one["tenant"], one["command"])]
        tasks = [one for one in self.tasks if wanted(one["tenant"], one["command"])]
        return self._replace(
            attempts=attempts, tasks=tasks, replays=[one for one in self.replays if wanted(one.tenant, one.command)]
        )

    def queues(self) -> Iterator[tuple[str, str, _Lake]]:
        for queue in sorted({(row["tenant"], row["command"]) for row in self.tasks}):
            yield *queue, self.of(lambda *one, queue=queue: one == queue)

    def steps(self, length: timedelta) -> Iterator[datetime]:
        """Returns the beginnings of all days, hours or minutes that are known."""
        begin = self.known.began.replace(hour=0, minute=0, second=0, microsecond=0)
        while begin <= self.known.horizon:
            yield begin
            begin += length

    def waits(self) -> list[tuple[datetime, datetime | None]]:
        """Returns from when to when a task could be claimed and was not."""
        claimed = [(one["ready_at"], one["claimed_at"]) for one in self.attempts if one["ready_at"]]
        others = [
            (one["ready_at"], one["ended_at"])
            for one in self.tasks
            if one["place"] == "ready" or (one["outcome"] == "cancelled" and one["ready_at"])
        ]
        return claimed + others

    def end(self, attempt: Row) -> datetime:
        found: datetime = attempt["ended_at"] or self.known.horizon
        return found

    def began_in(self, begin: datetime, length: timedelta) -> list[Row]:
        return [one for one in self.attempts if begin <= one["claimed_at"] < begin + length]

    def ended_in(self, begin: datetime, length: timedelta) -> list[Row]:
        return [one for one in self.attempts if one["ended_at"] and begin <= one["ended_at"] < begin + length]

    def put_in(self, begin: datetime, length: timedelta) -> int:
        return sum(1 for one in self.tasks if one["enqueued_at"] and begin <= one["enqueued_at"] < begin + length)

    def under_way_in(self, begin: datetime, length: timedelta) -> list[Row]:
        """Returns the deliveries that were under way, at its first instant at least."""
        return [one for one in self.attempts if one["claimed_at"] < begin + length and self.end(one) >= begin]

    def busy_ms(self, attempts: Iterable[Row], begin: datetime, length: timedelta) -> int:
        pieces = (min(self.end(one), begin + length) - max(one["claimed_at"], begin) for one in attempts)
        return sum(max(0, piece // _MS) for piece in pieces)

    # --- the tables ---------------------------------------------------------------------------------------------------

    def queue_minutes(self) -> Iterator[Row]:
        for tenant, command, lake in self.queues():
            waits = lake.waits()
            for minute in lake.steps(_MINUTE):
                row = lake.minute(minute, waits)
                if any(value for value in row.values()):
                    yield {"minute": minute, "tenant": tenant, "command": command, **row, "date": minute.date()}

    def minute(self, minute: datetime, waits: list[tuple[datetime, datetime | None]]) -> Row:
        end = minute + _MINUTE
        began, ended = self.began_in(minute, _MINUTE), self.ended_in(minute, _MINUTE)
        ready = [since for since, until in waits if since < end and (until is None or until >= end)]
        cancelled = [one for one in self.tasks if one["outcome"] == "cancelled" and minute <= one["ended_at"] < end]
        ran = [one["run_ms"] for one in ended if one["outcome"] in ("completed", "retried", "failed")]
        waited = [one["wait_ms"] for one in began if one["wait_ms"] is not None]
        return {
            "arrivals": self.put_in(minute, _MINUTE),
            "claims": len(began),
            "completions": _count(ended, "completed"),
            "failures": _count(ended, "failed"),
            "retries": _count(ended, "retried"),
            "expiries": sum(map(_is_lost, ended)),
            "releases": _count(ended, "released"),
            "cancellations": len(cancelled),
            "replays": sum(minute <= one.at < end for one in self.replays),
            "wait_p50_ms": _percentile(waited, 0.5),
            "wait_p95_ms": _percentile(waited, 0.95),
            "wait_p99_ms": _percentile(waited, 0.99),
            "run_p50_ms": _percentile(ran, 0.5),
            "run_p95_ms": _percentile(ran, 0.95),
            "run_p99_ms": _percentile(ran, 0.99),
            "backlog": len(ready),
            "running": sum(
                one["claimed_at"] < end and (one["ended_at"] is None or one["ended_at"] >= end) for one in self.attempts
            ),
            "oldest_ms": (min(end, self.known.horizon) - min(ready)) // _MS if ready else None,
        }

    def error_groups(self) -> Iterator[Row]:
        faults = [one for one in self.attempts if one["fingerprint"]]
        for tenant, fingerprint, day in sorted({(one["tenant"], one["fingerprint"], one["date"]) for one in faults}):
            group = [
                one for one in faults if (one["tenant"], one["fingerprint"], one["date"]) == (tenant, fingerprint, day)
            ]
            first = min(group, key=lambda one: (one["ended_at"], one["id"], one["delivery"]))
            yield {
                "tenant": tenant,
                "fingerprint": fingerprint,
                "error_type": first["error_type"],
                "sample": first["error_line"],
                "sample_id": first["id"],
                "commands": sorted({one["command"] for one in group}),
                "count": len(group),
                "tasks": len({(one["id"], one["enqueued_at"]) for one in group}),
                "deaths": _count(group, "failed"),
                "first_seen": first["ended_at"],
                "last_seen": max(one["ended_at"] for one in group),
                "date": day,
            }

    def workers(self) -> Iterator[Row]:
        for tenant, command, lake in self.queues():
            for day in lake.steps(_DAY):
                here = lake.under_way_in(day, _DAY)
                all_busy_ms = lake.busy_ms(here, day, _DAY)
                for worker in sorted({one["worker"] for one in here}):
                    its = [one for one in here if one["worker"] == worker]
                    ended = [one for one in its if one["date"] == day.date()]
                    busy_ms = lake.busy_ms(its, day, _DAY)
                    yield {
                        "tenant": tenant,
                        "command": command,
                        "worker": worker,
                        "deliveries": len(ended),
                        "completions": _count(ended, "completed"),
                        "failures": sum(one["outcome"] in ("retried", "failed") and not _is_lost(one) for one in ended),
                        "lost": sum(map(_is_lost, ended)),
                        "releases": _count(ended, "released"),
                        "cancellations": _count(ended, "cancelled"),
                        "busy_ms": busy_ms,
                        "share": _ratio(busy_ms, all_busy_ms),
                        "first_seen": max(day, min(one["claimed_at"] for one in its)),
                        "last_seen": min(day + _DAY, max(lake.end(one) for one in its)),
                        "date": day.date(),
                    }

    def capacity(self) -> Iterator[Row]:
        for tenant, command, lake in self.queues():
            waits = lake.waits()
            for hour in lake.steps(_HOUR):
                arrivals = sum(hour <= since < hour + _HOUR for since, _ in waits)
                here = lake.under_way_in(hour, _HOUR)
                if arrivals or here:
                    row = lake.hour(hour, arrivals, here)
                    yield {"hour": hour, "tenant": tenant, "command": command, **row, "date": hour.date()}

    def hour(self, hour: datetime, arrivals: int, here: list[Row]) -> Row:
        known = min(self.known.horizon, hour + _HOUR) - max(self.known.began, hour)
        span_s = max(1.0, known.total_seconds())
        ended = self.ended_in(hour, _HOUR)
        run_mean_ms = _ratio(sum(one["run_ms"] for one in ended), len(ended))
        load = None if run_mean_ms is None else arrivals / span_s * run_mean_ms / 1000
        busy_ms, most = self.busy_ms(here, hour, _HOUR), self.most_at_once(hour, here)
        waited = [one["wait_ms"] for one in self.began_in(hour, _HOUR) if one["wait_ms"] is not None]
        return {
            "span_s": span_s,
            "arrivals": arrivals,
            "run_mean_ms": run_mean_ms,
            "offered_load": load,
            "busy_ms": busy_ms,
            "workers_ran": most,
            "utilisation": _ratio(busy_ms, most * span_s * 1000),
            "wait_p95_ms": _percentile(waited, 0.95),
            "target_wait_ms": self.target.wait_ms,
            "target_share": self.target.share,
            "workers_needed": None if load is None or run_mean_ms is None else _needed(load, run_mean_ms, self.target),
        }

    def most_at_once(self, hour: datetime, here: list[Row]) -> int:
        instants = [hour, *(one["claimed_at"] for one in here if one["claimed_at"] >= hour)]
        levels = [sum(one["claimed_at"] <= instant < self.end(one) for one in here) for instant in instants]
        return max(1, *levels, 1) if here else 0

    def tenants(self) -> Iterator[Row]:
        for day in self.steps(_DAY):
            all_busy_ms = self.busy_ms(self.attempts, day, _DAY)
            all_wait_ms = sum(one["wait_ms"] or 0 for one in self.began_in(day, _DAY))
            for tenant in sorted({one["tenant"] for one in self.tasks}):
                lake = self.of(lambda one, _, tenant=tenant: one == tenant)  # type: ignore[misc]
                ended, here = lake.ended_in(day, _DAY), lake.under_way_in(day, _DAY)
                arrivals, busy_ms = lake.put_in(day, _DAY), lake.busy_ms(here, day, _DAY)
                waited = [one["wait_ms"] for one in lake.began_in(day, _DAY) if one["wait_ms"] is not None]
                if arrivals or here:
                    yield {
                        "tenant": tenant,
                        "arrivals": arrivals,
                        "deliveries": len(ended),
                        "completions": _count(ended, "completed"),
                        "failures": _count(ended, "failed"),
                        "busy_ms": busy_ms,
                        "work_share": _ratio(busy_ms, all_busy_ms),
                        "wait_ms": sum(waited),
                        "wait_mean_ms": _ratio(sum(waited), len(waited)),
                        "wait_share": _ratio(sum(waited), all_wait_ms),
                        "date": day.date(),
                    }


def _count(attempts: list[Row], outcome: str) -> int:
    return sum(one["outcome"] == outcome for one in attempts)


def _is_lost(attempt: Row) -> bool:
    return (attempt["outcome"], attempt["reason"]) == ("failed", "LEASE_EXPIRED") or bool(
        attempt["outcome"] == "lease_expired"
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentile(values: list[int], share: float) -> float | None:
    if not values:
        return None
    values = sorted(values)
    place = share * (len(values) - 1)
    below = floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def _needed(load: float, run_mean_ms: float, target: Target) -> int:
    """Counts up from one worker, by the recurrence of Erlang B."""
    workers, blocked = 0, 1.0
    while True:
        workers += 1
        blocked = load * blocked / (workers + load * blocked)
        if workers > load:
            waits = workers * blocked / (workers - load * (1 - blocked))
            if load == 0 or waits * exp(-(workers - load) * target.wait_ms / run_mean_ms) <= 1 - target.share:
                return workers
