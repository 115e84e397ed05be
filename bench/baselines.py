"""What the queue is held against: the floor it stands on, and a familiar yardstick.

:class:`Floor` is bare LMDB. It writes, reads and deletes as many records of the same sizes as the queue does, in
transactions with fsync, from keys and values made beforehand: no queue rules, no event loop, no threads. What the queue
costs beyond it is Python. :class:`NaiveQueue` is the queue that many write on a Sunday: one SQLite table (WAL,
synchronous=FULL), no group commit, no journal, no retention.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

import lmdb
from msgspec import Struct

from bench.steps import PAYLOAD, RESULT

MAP_BYTES = 64 << 30

#: Sizes of the ordered store's records for the benchmark's task, as it was when these lines were written. They stay as
#: they are, so that the floor means the same from one version of dibs to the next.
BODY, STATE_READY, STATE_LEASED, STATE_ENDED, STORED_RESULT = (os.urandom(n) for n in (170, 93, 137, 157, 29))
EVENT_BYTES = 19
COUNTERS = [(b"default\0Qbench\0" + field, b"\0" * 8) for field in (b"ready", b"leased", b"bytes", b"dead")]

_ids = itertools.count(1)

Times = tuple[float, float, float]
"""Seconds for enqueue, claim and complete."""


class Cycler(Protocol):
    """Something that takes batches through their whole life."""

    def cycle(self, batch: int) -> Times: ...

    def close(self) -> None: ...


def rate(cycler: Cycler, batch: int, seconds: float) -> float:
    """Returns cycles per second, over about so many seconds."""
    done, spent_s = 0, 0.0
    while spent_s < seconds:
        spent_s += sum(cycler.cycle(batch))
        done += batch
    cycler.close()
    return done / spent_s


# ------------------------------------------------------------------------------------------------------------- floor


class Records(Struct, gc=False):
    """The keys of one batch, made before the clock starts."""

    bodies: list[bytes]
    states: list[bytes]
    ready: list[bytes]
    leased: list[bytes]
    results: list[bytes]
    expiries: list[bytes]
    journal: bytes

    @classmethod
    def new(cls, batch: int) -> Self:
        ids = [next(_ids).to_bytes(8, "big") + os.urandom(8) for _ in range(batch)]
        return cls(
            bodies=[b"default\0T" + one for one in ids],
            states=[b"default\0S" + one for one in ids],
            ready=[b"default\0Pbench\0" + one[:8] + b"\0" * 6 + one for one in ids],
            leased=[b"default\0Lbench\0" + one[:8] + one for one in ids],
            results=[b"default\0R" + one for one in ids],
            expiries=[b"E" + one[:8] + b"tdefault\0" + one for one in ids],
            journal=os.urandom(EVENT_BYTES * batch + 40),
        )


class Floor:
    """Bare LMDB with the queue's records."""

    def __init__(self, directory: Path) -> None:
        self._environment = lmdb.open(str(directory), map_size=MAP_BYTES, max_spare_txns=4)

    def cycle(self, batch: int) -> Times:
        """Takes one new batch through three durable transactions."""
        records = Records.new(batch)
        return (
            self._timed(self._enqueue, records),
            self._timed(self._claim, records),
            self._timed(self._complete, records),
        )

    def enqueue(self, batch: int) -> None:
        """Puts one new batch in and leaves it there."""
        self._timed(self._enqueue, Records.new(batch))

    def look(self) -> None:
        """What an idle sweep cannot do without: a read transaction and three seeks."""
        with self._environment.begin() as txn:
            cursor = txn.cursor()
            for start in (b"A", b"E", b"J"):
                cursor.set_range(start)

    def close(self) -> None:
        self._environment.close()

    def _timed(self, step: Callable[[lmdb.Transaction, lmdb.Cursor, Records], None], records: Records) -> float:
        start_s = time.perf_counter()
        with self._environment.begin(write=True) as txn:
            cursor = txn.cursor()
            step(txn, cursor, records)
            cursor.putmulti([*COUNTERS, (b"J" + next(_ids).to_bytes(12, "big"), records.journal)])
        return time.perf_counter() - start_s

    def _enqueue(self, _: lmdb.Transaction, cursor: lmdb.Cursor, records: Records) -> None:
        cursor.getmulti(records.states)
        cursor.putmulti([(key, b"") for key in records.ready])
        cursor.putmulti([(key, STATE_READY) for key in records.states])
        cursor.putmulti([(key, BODY) for key in records.bodies])

    def _claim(self, txn: lmdb.Transaction, cursor: lmdb.Cursor, records: Records) -> None:
        cursor.set_range(records.ready[0])
        for _ in zip(range(len(records.ready)), cursor.iternext(values=False), strict=False):
            pass
        cursor.getmulti(records.states)
        cursor.getmulti(records.bodies)
        for key in records.ready:
            txn.delete(key)
        cursor.putmulti([(key, b"") for key in records.leased])
        cursor.putmulti([(key, STATE_LEASED) for key in records.states])

    def _complete(self, txn: lmdb.Transaction, cursor: lmdb.Cursor, records: Records) -> None:
        cursor.getmulti(records.states)
        for key in records.leased:
            txn.delete(key)
        cursor.putmulti([(key, b"") for key in records.expiries])
        cursor.putmulti([(key, STORED_RESULT) for key in records.results])
        cursor.putmulti([(key, STATE_ENDED) for key in records.states])


# ------------------------------------------------------------------------------------------------------------ sqlite

SCHEMA = """
CREATE TABLE task (
    id INTEGER PRIMARY KEY, command TEXT, priority INTEGER, status TEXT, payload BLOB, result BLOB,
    token BLOB, lease_end REAL, attempts INTEGER DEFAULT 0
);
CREATE INDEX ready ON task (command, priority DESC, id) WHERE status = 'ready';
"""
CLAIM = """
UPDATE task SET status = 'leased', token = randomblob(16), lease_end = ?, attempts = attempts + 1
WHERE id IN (SELECT id FROM task WHERE command = 'bench' AND status = 'ready' ORDER BY priority DESC, id LIMIT ?)
RETURNING id, token, payload
"""
COMPLETE = "UPDATE task SET status = 'completed', result = ? WHERE id = ? AND token = ? AND status = 'leased'"


class NaiveQueue:
    """One table, one connection, one transaction per call."""

    def __init__(self, directory: Path) -> None:
        self._db = sqlite3.connect(directory / "queue.sqlite", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(SCHEMA)

    def cycle(self, batch: int) -> Times:
        """Takes one new batch through three durable transactions."""
        at = [time.perf_counter()]
        with _Transaction(self._db):
            new = [(PAYLOAD,)] * batch
            self._db.executemany(
                "INSERT INTO task (command, priority, status, payload) VALUES ('bench', 0, 'ready', ?)", new
            )
        at.append(time.perf_counter())
        with _Transaction(self._db):
            leases = self._db.execute(CLAIM, (time.time() + 30, batch)).fetchall()
        at.append(time.perf_counter())
        with _Transaction(self._db):
            self._db.executemany(COMPLETE, [(RESULT, task_id, token) for task_id, token, _ in leases])
        at.append(time.perf_counter())
        assert len(leases) == batch
        return at[1] - at[0], at[2] - at[1], at[3] - at[2]

    def close(self) -> None:
        self._db.close()


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, *error: Any) -> None:
        self._db.execute("COMMIT")
