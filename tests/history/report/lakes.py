"""Lakes as a run would leave them, made up: days with a rhythm, an incident, errors, workers of several tenants."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from dibs.history.report.source import arrow_schema
from dibs.history.tables import DATE, TABLES

Row = dict[str, Any]

BEGAN = datetime(2026, 11, 12, 0, 0, 12, tzinfo=UTC)
HORIZON = datetime(2026, 11, 14, 18, 42, 30, tzinfo=UTC)
INCIDENT = (datetime(2026, 11, 14, 15, 40, tzinfo=UTC), datetime(2026, 11, 14, 18, 15, tzinfo=UTC))
TARGET_MS = 2000


class Kind(NamedTuple):
    """A queue: how many tasks a minute at noon, how long they run, how many workers it has."""

    tenant: str
    command: str
    rate: float
    run_s: float
    workers: int
    failing: float = 0.002


KINDS = (
    Kind("acme", "resize", 14, 9, 4),
    Kind("acme", "mail.send", 9, 0.6, 2, 0.004),
    Kind("acme", "transcode", 1.2, 95, 8, 0.01),
    Kind("globex", "mail.send", 5, 0.7, 6),
    Kind("globex", "report", 0.8, 22, 2, 0.02),
)

ERRORS = (
    ("acme", "3f9c0d21", "ConnectionError", "connect to 10.4.0.17:6379 refused after 3 tries", ["resize"], 0.5),
    ("acme", "8a11b7e4", "TimeoutError", "no answer from smtp-2 within 30 s", ["mail.send"], 0.2),
    ("acme", "c77d52aa", "UnidentifiedImageError", "cannot identify image file 'uploads/8f2c.heic'", ["resize"], 0.12),
    ("acme", "19be04f6", "MemoryError", "unable to allocate 2.1 GiB for frame buffer", ["transcode"], 0.05),
    ("globex", "70d3e9c5", "KeyError", "'customer_id'", ["report"], 0.08),
    ("globex", "8a11b7e4", "TimeoutError", "no answer from smtp-1 within 30 s", ["mail.send", "report"], 0.05),
)


def write_lake(path: Path, tables: Mapping[str, Iterable[Row]], **known: Any) -> Path:
    """Writes rows as a lake: each day a directory, rows without a day in one of their own, and lake.json."""
    for name, rows in tables.items():
        table = pa.Table.from_pylist(list(rows), arrow_schema(TABLES[name]))
        by_day = ds.partitioning(arrow_schema(TABLES[name], [DATE.name]), flavor="hive")
        ds.write_dataset(table, path / name, format="parquet", partitioning=by_day)
    own = path / "_dibs"
    own.mkdir(parents=True, exist_ok=True)
    state = {
        "schema_version": 1,
        "reader": "history-1",
        "target_wait_s": 2.0,
        "target_share": 0.95,
        "gaps": [],
        **known,
    }
    (own / "lake.json").write_bytes(msgspec.json.encode(state))
    return path


def busy_lake(path: Path, kinds: Sequence[Kind] = KINDS, **known: Any) -> Path:
    """Three days of five queues of two tenants. On the last afternoon `resize` loses workers, and falls behind."""
    chance = np.random.default_rng(7)
    tables: dict[str, list[Row]] = {name: [] for name in TABLES if name not in ("events", "attempts")}
    for kind in kinds:
        _queue(kind, chance, tables)
    tables["error_groups"] = list(_errors(chance))
    tables["tenants"] = list(_tenants(tables))
    return write_lake(path, tables, **{"began": BEGAN, "horizon": HORIZON, **known})


def quiet_lake(path: Path) -> Path:
    """One queue, one afternoon, nothing went wrong."""
    chance = np.random.default_rng(3)
    tables: dict[str, list[Row]] = {name: [] for name in TABLES if name not in ("events", "attempts")}
    _queue(Kind("default", "thumbnail", 6, 1.5, 3, 0.0), chance, tables)
    began, day = HORIZON - timedelta(hours=5), HORIZON.date()
    for name, time in (("queue_minutes", "minute"), ("capacity", "hour"), ("tasks", "ended_at")):
        tables[name] = [row for row in tables[name] if row[time] >= began]
    for row in tables["queue_minutes"]:
        row["retries"] = row["expiries"] = row["failures"] = 0
    tables["workers"] = [{**row, "lost": 0, "failures": 0} for row in tables["workers"] if row["date"] == day]
    tables["tenants"] = list(_tenants(tables))
    return write_lake(path, tables, began=began, horizon=HORIZON)


def empty_lake(path: Path) -> Path:
    """A lake that has not taken in anything yet."""
    return write_lake(path, {})


def minute(at: datetime, tenant: str = "acme", command: str = "resize", **others: Any) -> Row:
    """A minute in which three tasks came and went."""
    counts = dict.fromkeys(("failures", "retries", "expiries", "releases", "cancellations", "replays", "backlog"), 0)
    measures = {f"{kind}_p{share}_ms": share * 2.0 for kind in ("wait", "run") for share in (50, 95, 99)}
    return {
        "minute": at, "tenant": tenant, "command": command, "arrivals": 3, "claims": 3, "completions": 3, **counts,
        **measures, "running": 1, "oldest_ms": None, "date": at.date(), **others,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ queues


def _queue(kind: Kind, chance: np.random.Generator, tables: dict[str, list[Row]]) -> None:
    minute, backlog, oldest_ms = BEGAN.replace(second=0), 0.0, 0.0
    hours: dict[datetime, list[Row]] = {}
    while minute <= HORIZON:
        row, backlog, oldest_ms = _minute(kind, minute, backlog, oldest_ms, chance)
        if row["arrivals"] or row["claims"] or row["backlog"] or row["running"]:
            tables["queue_minutes"].append(row)
            hours.setdefault(minute.replace(minute=0), []).append(row)
            tables["tasks"] += _tasks(kind, row, chance)
        minute += timedelta(minutes=1)
    tables["capacity"] += [_hour(kind, hour, rows) for hour, rows in hours.items()]
    tables["workers"] += _workers(kind, hours, chance)


def _minute(
    kind: Kind, minute: datetime, backlog: float, oldest_ms: float, chance: np.random.Generator
) -> tuple[Row, float, float]:
    day = math.sin((minute.hour + minute.minute / 60 - 7) / 24 * 2 * math.pi)
    arrivals = int(chance.poisson(kind.rate * max(0.06, 0.55 + 0.45 * day)))
    hurt = kind.command == "resize" and INCIDENT[0] <= minute < INCIDENT[1]
    workers = kind.workers - 3 if hurt else kind.workers
    can = workers * 60 / kind.run_s
    claims = int(min(backlog + arrivals, can * chance.uniform(0.9, 1.1)))
    backlog = backlog + arrivals - claims
    oldest_ms = backlog / max(can, 0.1) * 60_000 if backlog else 0.0
    wait = 40 + oldest_ms + 900 * (arrivals / max(can, 0.1)) ** 3
    errors = int(chance.binomial(claims, 0.25 if hurt else kind.failing * 6)) if claims else 0
    failures = int(chance.binomial(errors, 0.2))
    expiries = int(chance.binomial(claims, 0.03 if hurt else 0.0005)) if claims else 0
    run = kind.run_s * 1000 * chance.uniform(0.85, 1.1)
    known = claims > 0
    row = {
        "minute": minute, "tenant": kind.tenant, "command": kind.command, "arrivals": arrivals, "claims": claims,
        "completions": claims - errors, "failures": failures, "retries": errors - failures, "expiries": expiries,
        "releases": 0, "cancellations": int(chance.binomial(arrivals, 0.002)), "replays": 0,
        "wait_p50_ms": wait * 0.4 if known else None, "wait_p95_ms": wait if known else None,
        "wait_p99_ms": wait * 1.6 if known else None, "run_p50_ms": run * 0.8 if known else None,
        "run_p95_ms": run * 1.9 if known else None, "run_p99_ms": run * 3.1 if known else None,
        "backlog": int(backlog), "running": int(min(workers, claims)), "date": minute.date(),
        "oldest_ms": int(oldest_ms) if int(backlog) else None,
    }  # fmt: skip
    return row, backlog, oldest_ms


def _tasks(kind: Kind, row: Row, chance: np.random.Generator) -> Iterable[Row]:
    """A part of the minute's tasks: every one would take long to write."""
    size = math.ceil((row["completions"] + row["failures"]) * 0.2)
    runs_ms = chance.lognormal(math.log(kind.run_s * 800), 0.5, size).astype(int).tolist()
    waits_ms = ((row["wait_p50_ms"] or 1) * chance.lognormal(0, 0.7, size)).astype(int).tolist()
    within_ms, failing = chance.integers(60_000, size=size).tolist(), (chance.random(size) < kind.failing).tolist()
    for run_ms, wait_ms, at_ms, failed in zip(runs_ms, waits_ms, within_ms, failing, strict=True):
        ended = min(row["minute"] + timedelta(milliseconds=at_ms), HORIZON)
        yield {
            "tenant": kind.tenant, "command": kind.command, "id": str(uuid.UUID(bytes=chance.bytes(16), version=4)),
            "enqueued_at": ended - timedelta(milliseconds=run_ms + wait_ms), "ended_at": ended,
            "first_claimed_at": ended - timedelta(milliseconds=run_ms), "deliveries": 5 if failed else 1,
            "outcome": "failed" if failed else "completed", "place": "dead" if failed else "none",
            "changed_at": ended, "wait_ms": wait_ms, "run_ms": run_ms, "worker": f"{kind.command}-{run_ms % 3}",
            "error_type": "ConnectionError" if failed else None, "shard": 0, "date": ended.date(),
        }  # fmt: skip


def _hour(kind: Kind, hour: datetime, rows: Sequence[Row]) -> Row:
    arrivals = sum(row["arrivals"] for row in rows)
    load = arrivals * kind.run_s / 3600
    waits = sorted(row["wait_p95_ms"] for row in rows if row["wait_p95_ms"] is not None)
    ran = max(row["running"] for row in rows)
    busy_ms = int(sum(row["claims"] for row in rows) * kind.run_s * 1000)
    return {
        "hour": hour, "tenant": kind.tenant, "command": kind.command, "span_s": 3600.0, "arrivals": arrivals,
        "run_mean_ms": kind.run_s * 1000, "offered_load": load, "busy_ms": busy_ms, "workers_ran": ran,
        "utilisation": min(1.0, load / max(ran, 1)), "wait_p95_ms": waits[int(len(waits) * 0.95)] if waits else None,
        "target_wait_ms": TARGET_MS, "target_share": 0.95, "workers_needed": math.ceil(load + 1.4 * math.sqrt(load)),
        "date": hour.date(),
    }  # fmt: skip


def _workers(kind: Kind, hours: Mapping[datetime, Sequence[Row]], chance: np.random.Generator) -> Iterable[Row]:
    days: dict[date, list[Row]] = {}
    for hour, rows in hours.items():
        days.setdefault(hour.date(), []).extend(rows)
    for day, rows in days.items():
        parts = chance.dirichlet([8.0] * kind.workers)
        midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
        for number, part in enumerate(parts):
            done = int(sum(row["claims"] for row in rows) * part)
            failed = int(sum(row["failures"] + row["retries"] for row in rows) * part)
            yield {
                "tenant": kind.tenant, "command": kind.command, "worker": f"{kind.command}-{number}",
                "deliveries": done, "completions": done - failed, "failures": failed, "releases": 0,
                "lost": int(sum(row["expiries"] for row in rows) * part), "cancellations": 0,
                "busy_ms": int(done * kind.run_s * 1000), "share": float(part), "date": day, "first_seen": midnight,
                "last_seen": min(HORIZON, midnight + timedelta(hours=23, minutes=59, seconds=50)),
            }  # fmt: skip


def _errors(chance: np.random.Generator) -> Iterable[Row]:
    for tenant, fingerprint, error_type, sample, commands, weight in ERRORS:
        for offset in range(3):
            day = BEGAN.date() + timedelta(days=offset)
            count = int(chance.poisson(600 * weight * (3 if offset == 2 else 0.4)))
            begin = datetime(day.year, day.month, day.day, tzinfo=UTC)
            if count:
                yield {
                    "tenant": tenant, "fingerprint": fingerprint, "error_type": error_type, "sample": sample,
                    "sample_id": str(uuid.UUID(bytes=chance.bytes(16), version=4)), "commands": commands,
                    "count": count, "tasks": math.ceil(count * 0.7), "deaths": count // 9, "date": day,
                    "first_seen": begin + timedelta(minutes=int(chance.integers(0, 500))),
                    "last_seen": begin + timedelta(minutes=int(chance.integers(600, 1120))),
                }  # fmt: skip


def _tenants(tables: Mapping[str, Sequence[Row]]) -> Iterable[Row]:
    days = sorted({row["date"] for row in tables["queue_minutes"]})
    for day in days:
        parts: dict[str, Row] = {}
        for row in (row for row in tables["queue_minutes"] if row["date"] == day):
            part = parts.setdefault(row["tenant"], dict.fromkeys(
                ("arrivals", "deliveries", "completions", "failures", "busy_ms", "wait_ms", "claims"), 0))  # fmt: skip
            for name in ("arrivals", "completions", "failures", "claims"):
                part[name] += row[name]
            part["deliveries"] += row["completions"] + row["failures"] + row["retries"]
            part["wait_ms"] += int((row["wait_p50_ms"] or 0) * 1.3) * row["claims"]
        for row in (row for row in tables["workers"] if row["date"] == day):
            parts[row["tenant"]]["busy_ms"] += row["busy_ms"]
        busy_ms, wait_ms = (sum(part[name] for part in parts.values()) for name in ("busy_ms", "wait_ms"))
        for tenant, part in parts.items():
            claims = part.pop("claims")
            yield {
                **part, "tenant": tenant, "date": day, "work_share": part["busy_ms"] / max(busy_ms, 1),
                "wait_mean_ms": part["wait_ms"] / claims if claims else None,
                "wait_share": part["wait_ms"] / max(wait_ms, 1),
            }  # fmt: skip
