"""What a report says: everything that the page and the terminal show, and no more."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from dibs.errors import InvalidOption
from dibs.history.lake import Gap
from dibs.history.report.advice import ORDER, Advice, Hour, advise
from dibs.history.report.ended import Spread, Task, ended
from dibs.history.report.minutes import End, Totals, joined
from dibs.history.report.queues import Queues
from dibs.history.report.source import Source, opened, read

DAYS = 7
TRIES = 3
ERRORS_MAX = 100
WORKERS_MAX = 300
TENANTS_MAX = 50
HOURS_MAX = 10_000
TEXT_MAX = 400


class Queue(Struct, frozen=True):
    """A queue, or all those that are not shown one by one: then it has no name."""

    tenant: str | None
    command: str | None
    totals: Totals
    end: End
    waits: Spread
    runs: Spread
    busy_ms: int
    series: dict[str, list[int | None]]
    capacity: dict[str, list[int | None]]
    """`at`, the number of the hour (or of the day, as `capacity_step_s` says), `needed`, `ran`."""


class Fault(Struct, frozen=True):
    """An error group over all days of the span."""

    tenant: str
    fingerprint: str
    error_type: str
    sample: str
    sample_id: str
    commands: list[str]
    count: int
    tasks: int
    deaths: int
    first_seen: datetime
    last_seen: datetime


class Worker(Struct, frozen=True):
    """A worker's part of a queue over all days of the span."""

    queue: int
    worker: str
    deliveries: int
    completions: int
    failures: int
    lost: int
    releases: int
    busy_ms: int
    last_seen: datetime


class Tenant(Struct, frozen=True):
    """A tenant's part over all days of the span."""

    tenant: str
    arrivals: int
    deliveries: int
    completions: int
    failures: int
    busy_ms: int
    work_share: float
    wait_ms: int
    wait_mean_ms: float | None
    wait_share: float


class LeftOut(Struct, frozen=True):
    """How many there are beyond those that are shown."""

    queues: int
    faults: int
    workers: int
    tenants: int


class Summary(Struct, frozen=True, kw_only=True):
    """A lake's last days."""

    lake: str
    begin: datetime | None
    """None: the lake knows nothing of these days."""
    end: datetime | None
    target_wait_s: float
    target_share: float
    gaps: list[Gap]
    first: date | None
    """Steps are counted from the beginning of this day."""
    step_s: int
    capacity_step_s: int
    queues: list[Queue]
    advice: list[Advice]
    faults: list[Fault]
    workers: list[Worker]
    tenants: list[Tenant]
    longest_waits: list[Task]
    longest_runs: list[Task]
    left_out: LeftOut


def summary(
    lake: Path | Source, *, days: int | None = None, since: date | None = None, until: date | None = None
) -> Summary:
    """Sums up a lake: the days from `since` to `until`, or the last `days` before `until`, or the last that it knows.

    Its size has a limit, however much the lake holds: long spans have longer steps, and long lists are cut. A run may
    go on meanwhile: what it replaces is read again.
    """
    if not isinstance(lake, Path):
        return _summed(lake, days, since, until)
    for _ in range(TRIES - 1):
        source = opened(lake)
        with contextlib.suppress(FileNotFoundError):
            summed = _summed(source, days, since, until)
            if not source.changed():
                return summed
    return _summed(opened(lake), days, since, until)


def _summed(source: Source, days: int | None, since: date | None, until: date | None) -> Summary:
    span = _span(source, days, since, until)
    if span is None:
        return _nothing(source)
    begin, end = span
    first, last = begin.date(), end.date()
    queues = Queues.busiest(source, first, last)
    minutes = joined(source, queues, first, begin, end)
    tasks = ended(source, queues, first, last)
    capacity_step_s, capacity, advice = _capacity(source, queues, first, last)
    busy_ms, workers, workers_out = _workers(source, queues, first, last)
    faults, faults_out = _faults(source, first, last)
    tenants, tenants_out = _tenants(source, first, last)
    names: list[tuple[str | None, str | None]] = [*queues.names, *([(None, None)] if queues.left_out else [])]
    return Summary(
        lake=source.name,
        begin=begin,
        end=end,
        target_wait_s=source.state.target_wait_s,
        target_share=source.state.target_share,
        gaps=[gap for gap in source.state.gaps if _touches(gap, begin, end)],
        first=first,
        step_s=minutes.step_s,
        capacity_step_s=capacity_step_s,
        queues=[
            Queue(
                tenant=tenant,
                command=command,
                totals=minutes.totals[number],
                end=minutes.ends[number],
                waits=tasks.waits[number],
                runs=tasks.runs[number],
                busy_ms=busy_ms.get(number, 0),
                series=minutes.series[number],
                capacity=capacity.get(number, {"at": [], "needed": [], "ran": []}),
            )
            for number, (tenant, command) in enumerate(names)
        ],
        advice=advice,
        faults=faults,
        workers=workers,
        tenants=tenants,
        longest_waits=list(tasks.longest_waits),
        longest_runs=list(tasks.longest_runs),
        left_out=LeftOut(queues.left_out, faults_out, workers_out, tenants_out),
    )


# -------------------------------------------------------------------------------------------------------- days


def _span(source: Source, days: int | None, since: date | None, until: date | None) -> tuple[datetime, datetime] | None:
    """The days that are asked for, as far as the lake knows them."""
    if days is not None and days < 1:
        raise InvalidOption(f"days must be 1 or more, not {days}")
    if days is not None and since is not None:
        raise InvalidOption("name either the number of days or the first of them")
    if since is not None and until is not None and since > until:
        raise InvalidOption(f"the last day, {until}, is before the first, {since}")
    began, horizon = source.state.began, source.state.horizon
    if began is None or horizon is None:
        return None
    last = until or horizon.astimezone(UTC).date()
    first = since or last - timedelta(days=(days or DAYS) - 1)
    begin = max(_midnight(first), began.astimezone(UTC))
    end = min(_midnight(last) + timedelta(days=1, microseconds=-1), horizon.astimezone(UTC))
    return (begin, end) if begin <= end else None


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _touches(gap: Gap, begin: datetime, end: datetime) -> bool:
    return gap.until >= begin and (gap.after is None or gap.after <= end)


def _nothing(source: Source) -> Summary:
    return Summary(
        lake=source.name,
        begin=None,
        end=None,
        target_wait_s=source.state.target_wait_s,
        target_share=source.state.target_share,
        gaps=source.state.gaps,
        first=None,
        step_s=60,
        capacity_step_s=3600,
        queues=[],
        advice=[],
        faults=[],
        workers=[],
        tenants=[],
        longest_waits=[],
        longest_runs=[],
        left_out=LeftOut(0, 0, 0, 0),
    )


# ------------------------------------------------------------------------------------------------------ tables


def _capacity(
    source: Source, queues: Queues, first: date, last: date
) -> tuple[int, dict[int, dict[str, list[int | None]]], list[Advice]]:
    columns = ["hour", "tenant", "command", "workers_ran", "wait_p95_ms", "workers_needed"]
    rows = read(source, "capacity", columns, first, last).sort_by("hour")
    hours: dict[int, list[Hour]] = {}
    for row in queues.numbered(rows).to_pylist():
        if row["queue"] < len(queues.names):
            hour = Hour(row["hour"], row["workers_needed"], row["workers_ran"] or 0, row["wait_p95_ms"])
            hours.setdefault(row["queue"], []).append(hour)
    step_s = 3600 if sum(map(len, hours.values())) <= HOURS_MAX else 86_400
    start = _midnight(first)
    series = {number: _capacity_series(own, start, step_s) for number, own in hours.items()}
    aim = source.state
    said = (
        advise(number, queues.name(number), own, aim.target_wait_s, aim.target_share) for number, own in hours.items()
    )
    advice = sorted((one for one in said if one), key=lambda one: (ORDER.index(one.kind), -one.rank, one.queue))
    return step_s, series, advice


def _capacity_series(hours: Sequence[Hour], start: datetime, step_s: int) -> dict[str, list[int | None]]:
    """Of each step the hour that needed most, and the one in which most ran."""
    steps: dict[int, tuple[int | None, int]] = {}
    for hour in hours:
        at = int((hour.at - start).total_seconds()) // step_s
        needed, ran = steps.get(at, (None, 0))
        steps[at] = (needed if hour.needed is None else max(hour.needed, needed or 0), max(hour.ran, ran))
    return {
        "at": list(steps),
        "needed": [needed for needed, _ in steps.values()],
        "ran": [ran for _, ran in steps.values()],
    }


def _workers(source: Source, queues: Queues, first: date, last: date) -> tuple[dict[int, int], list[Worker], int]:
    counts = ["deliveries", "completions", "failures", "lost", "releases", "busy_ms"]
    rows = read(source, "workers", ["tenant", "command", "worker", *counts, "last_seen"], first, last)
    grouped = _grouped(queues.numbered(rows), ["queue", "worker"], counts, [("last_seen", "max")])
    by_queue = grouped.group_by("queue").aggregate([("busy_ms", "sum")]).to_pylist()
    order = [("busy_ms", "descending"), ("deliveries", "descending"), ("worker", "ascending")]
    shown = grouped.sort_by(order).slice(0, WORKERS_MAX).to_pylist()
    workers = [Worker(**{**row, "worker": _cut(row["worker"])}) for row in shown]
    return {row["queue"]: row["busy_ms_sum"] for row in by_queue}, workers, grouped.num_rows - len(workers)


def _faults(source: Source, first: date, last: date) -> tuple[list[Fault], int]:
    texts, counts = ["error_type", "sample", "sample_id"], ["count", "tasks", "deaths"]
    key = ["tenant", "fingerprint"]
    columns = [*key, *texts, "commands", *counts, "first_seen", "last_seen"]
    rows = read(source, "error_groups", columns, first, last).sort_by("first_seen")
    firsts = [(name, "first") for name in texts]
    grouped = _grouped(rows, key, counts, [*firsts, ("first_seen", "min"), ("last_seen", "max")])
    shown = grouped.sort_by([("count", "descending"), ("first_seen", "ascending")]).slice(0, ERRORS_MAX).to_pylist()
    commands: dict[tuple[str, str], set[str]] = {(row["tenant"], row["fingerprint"]): set() for row in shown}
    wanted = pc.is_in(rows["fingerprint"], pa.array([row["fingerprint"] for row in shown], pa.string()))
    for row in rows.select([*key, "commands"]).filter(wanted).to_pylist():
        commands.get((row["tenant"], row["fingerprint"]), set()).update(row["commands"] or [])
    faults = [
        Fault(
            **{**row, **{name: _cut(row[name]) for name in texts}},
            commands=sorted(commands[row["tenant"], row["fingerprint"]]),
        )
        for row in shown
    ]
    return faults, grouped.num_rows - len(faults)


def _tenants(source: Source, first: date, last: date) -> tuple[list[Tenant], int]:
    counts = ["arrivals", "deliveries", "completions", "failures", "busy_ms", "wait_ms"]
    rows = read(source, "tenants", ["tenant", *counts, "wait_mean_ms"], first, last)
    # How many deliveries began that day: what the sum and the mean of their waits say; if nothing waited, what ended.
    idle = pc.equal(rows["wait_mean_ms"], 0)
    means = pc.if_else(idle, 1.0, rows["wait_mean_ms"])
    began = pc.divide(pc.if_else(idle, rows["deliveries"], rows["wait_ms"]).cast(pa.float64()), means)
    rows = rows.append_column("began", pc.fill_null(began, 0.0))
    grouped = _grouped(rows, ["tenant"], [*counts, "began"], [])
    grouped = grouped.sort_by([("busy_ms", "descending"), ("tenant", "ascending")])
    busy_ms, wait_ms = (pc.sum(grouped[name]).as_py() or 0 for name in ("busy_ms", "wait_ms"))
    tenants = []
    for row in grouped.slice(0, TENANTS_MAX).to_pylist():
        began_count = row.pop("began")
        tenants.append(
            Tenant(
                **row,
                work_share=row["busy_ms"] / busy_ms if busy_ms else 0.0,
                wait_mean_ms=row["wait_ms"] / began_count if began_count else None,
                wait_share=row["wait_ms"] / wait_ms if wait_ms else 0.0,
            )
        )
    return tenants, grouped.num_rows - len(tenants)


def _grouped(rows: pa.Table, key: list[str], summed: list[str], others: list[tuple[str, str]]) -> pa.Table:
    """Adds up `summed`; columns keep their names, whatever became of them."""
    how = [*((name, "sum") for name in summed), *others]
    grouped = rows.group_by(key, use_threads=False).aggregate(how)
    names = {f"{name}_{kind}": name for name, kind in how}
    return grouped.rename_columns([names.get(name, name) for name in grouped.column_names])


def _cut(value: Any) -> str:
    """Texts are the tasks' own, and of any length."""
    text = str(value or "")
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}… ({len(text):,} characters)"
