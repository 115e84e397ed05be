"""A queue at work for days, in a real store whose clock is set by hand; lakes of it, and what their tables hold."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds

from dibs.clock import ManualClock
from dibs.history import run as runs
from dibs.history.report.source import arrow_schema
from dibs.history.tables import DATE, TABLES
from dibs.ids import id_to_text
from dibs.stores import open_store
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.task import ErrorInfo, Filter, Kind, Lease, NewTask, Settlement, Status
from tests.history.histories import EventRow

START_MS = 1_767_218_400_000
"""Six hours before a midnight."""
COMMANDS = ("resize", "mail", "bill")
Row = dict[str, Any]


class Work:
    """Producers and workers in a process of their own: this one has the store open, too, with the system's clock."""

    def __init__(self, url: str, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=_work, args=(theirs, url, seed), daemon=True).start()
        theirs.close()

    def go_on(self, steps: int) -> None:
        """Does so much more, and returns when it is done."""
        self._pipe.send(steps)
        failed = self._pipe.recv()
        assert failed is None, failed


def _work(pipe: Connection, url: str, seed: int) -> None:
    crew = _Crew(url, seed)
    with contextlib.suppress(EOFError):
        while True:
            steps = pipe.recv()
            try:
                asyncio.run(crew.go_on(steps))
            except Exception:  # noqa: BLE001 the test that waits for it fails with it
                pipe.send(traceback.format_exc())
            else:
                pipe.send(None)


class _Crew:
    """Producers and workers, in one loop, drawn by a seed. The clock goes on between what they do, sometimes by hours;
    now and then it is set back."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self._rng = random.Random(f"work {seed}")
        self._now_ms = START_MS

    async def go_on(self, steps: int) -> None:
        clock = ManualClock(self._now_ms)
        async with await open_store(self.url, clock=clock, create=True) as store:
            for _ in range(steps):
                await self._step(store)
                clock.advance(self._rng.choice((0.001, 0.02, 0.3, 4, 60, 600, 3_600, -5)))
                await store.sweep()
        self._now_ms = clock.now_ms()

    async def _step(self, store: Store) -> None:
        rng, tenant = self._rng, self._rng.choice(("acme", "globex"))
        match rng.choice(("enqueue", "enqueue", "claim", "claim", "claim", "cancel", "replay")):
            case "enqueue":
                tasks = [
                    NewTask(
                        command=rng.choice(COMMANDS), payload=b"1", max_attempts=2,
                        delay_s=rng.choice((0.0, 0.0, 30.0)), expires_s=rng.choice((None, None, 3_600.0)),
                    )
                    for _ in range(rng.randint(1, 6))
                ]  # fmt: skip
                await store.enqueue(tenant, tasks)
            case "claim":
                leases = await store.claim(tenant, COMMANDS, limit=3, lease_s=60, worker=rng.choice(("ann", "bob")))
                await store.settle([self._settled(lease) for lease in leases if rng.random() < 0.8])
            case "cancel":
                page = await store.list(tenant, Filter(status=Status.PENDING), limit=5)
                await store.cancel(tenant, [task.id for task in page.tasks[-1:]])
            case "replay":
                page = await store.list(tenant, Filter(status=Status.FAILED), limit=1)
                await store.replay(tenant, [task.id for task in page.tasks])

    def _settled(self, lease: Lease) -> Settlement:
        kind = self._rng.choice((Kind.COMPLETE, Kind.COMPLETE, Kind.RETRY, Kind.FAIL, Kind.RELEASE))
        wrong = kind in (Kind.RETRY, Kind.FAIL)
        error = ErrorInfo(type="IOError", message=f"disk {self._rng.randint(1, 99)} is full") if wrong else None
        delay_s = self._rng.choice((0.0, 20.0)) if kind is Kind.RETRY else 0.0
        return Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=kind, error=error, delay_s=delay_s)


def journal(url: str) -> list[EventRow]:
    """Returns all that the journals of a store hold."""

    async def read() -> list[EventRow]:
        rows: list[EventRow] = []
        async with await open_store(url, create=False) as store:
            for bounds in await store.journal_bounds():
                after, more = None, True
                while more:
                    page = await store.events(ALL_TENANTS, shard=bounds.shard, after=after)
                    rows += [_row(bounds.shard, event) for event in page.events]
                    after, more = page.cursor, page.more
        return rows

    return asyncio.run(read())


def _row(shard: int, event: Any) -> EventRow:
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC)
    named = {name: getattr(event, name) for name in EventRow._fields if name not in ("shard", "at", "kind", "id")}
    return EventRow(shard=shard, at=at, kind=event.kind.value, id=id_to_text(event.id), **named)


def take_in(url: str, path: Path, **options: Any) -> runs.Ended:
    """Runs a lake once."""
    return runs.run(path, runs.Options(url=url, **options), lambda _: None, threading.Event())


def rows(path: Path, table: str) -> list[Row]:
    """Returns the rows of a table, sorted, read without Spark."""
    known = TABLES[table]
    by_day = ds.partitioning(arrow_schema(known, [DATE.name]), flavor="hive")
    read = ds.dataset(path / table, arrow_schema(known), format="parquet", partitioning=by_day).to_table()
    return in_order(table, read)


def in_order(table: str, read: pa.Table) -> list[Row]:
    """Returns rows that were read of a table, sorted."""
    found: list[Row] = pa.Table.to_pylist(read)
    keys = (*TABLES[table].key, DATE.name)
    return sorted(found, key=lambda row: [(row[name] is not None, row[name]) for name in keys])


def digests(path: Path) -> dict[str, str]:
    """Returns a hash of each table's rows, whatever files they are in."""
    return {table: digest(rows(path, table)) for table in TABLES}


def digest(rows: list[Row]) -> str:
    """Returns a hash of rows."""
    return blake2b(msgspec.msgpack.encode(rows)).hexdigest()


def files(path: Path) -> Iterator[Path]:
    """Yields the files that readers see."""
    return path.glob("[a-z]*/date=*/*.parquet")
