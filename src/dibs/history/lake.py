"""A lake: a directory with one directory for each table, and beside them what the next run must know.

::

    LAKE/events/date=2026-11-15/000004-0.parquet     bronze: the journal
    LAKE/tasks/date=2026-11-15/…                     silver: what has ended, by the day it ended
    LAKE/tasks/date=__HIVE_DEFAULT_PARTITION__/…             and what has not, which is what the next run goes on from
    LAKE/queue_minutes/date=2026-11-15/…             gold
    LAKE/_dibs/lake.json                             how far it is: positions in the journal, version, settings
    LAKE/_dibs/commit.json                           a commit that is being carried out
    LAKE/_dibs/staging/                              what a commit will bring; nobody reads it
    LAKE/_dibs/checkpoint/                           the stream's own
    LAKE/_dibs/lock                                  held by the one run that writes

A commit brings new files and removes old ones in all tables together. Spark writes into the staging directory first;
then the list of renames and removals, with the new state, is written under one name. From then on the commit has
happened: whoever opens the lake next carries out what is left of it. Before that it has not: the staging directory is
thrown away. So a process that is killed, at any point, leaves either the old tables or the new ones.

Whoever reads files without this module may see a commit half carried out, for as long as some renames take.

The tables of a Delta lake have a log of their own beside their days. A commit then lists what is written to each table
in place of renames; each is one transaction of that table's, which it knows by the commit's number and takes only once.
Only a run can carry that out, since it takes Spark: until then readers see the tables as they are, each of them whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dibs.errors import LakeError
from dibs.history.tables import SCHEMA_VERSION, TABLES

OWN = "_dibs"
NO_DATE = "date=__HIVE_DEFAULT_PARTITION__"
"""The directory of rows that have no day."""
SWAP_PATIENCE_S = 30.0

Format = Literal["parquet", "delta"]


class Gap(Struct, frozen=True, kw_only=True):
    """Events that were trimmed from the journal before they were taken in."""

    shard: int
    after: datetime | None
    """The last event before it; None: it is at the beginning."""
    until: datetime
    """The first event after it."""


class Position(Struct, frozen=True, kw_only=True):
    """How far one shard's journal has been taken in."""

    cursor: str
    """Of the last event, as hexadecimal digits."""
    at: datetime


class LakeState(Struct, frozen=True, kw_only=True):
    """What a lake knows of itself."""

    schema_version: int = SCHEMA_VERSION
    format: Format = "parquet"
    """How the tables are kept."""
    reader: str
    """The name under which the journal waits for this lake."""
    target_wait_s: float = 2.0
    """`capacity` says how many workers it takes to wait no longer than this."""
    target_share: float = 0.95
    """For so many of the deliveries."""
    commits: int = 0
    events: int = 0
    positions: dict[str, Position] = {}
    """By shard."""
    began: datetime | None = None
    horizon: datetime | None = None
    """The earliest and the latest event."""
    gold_from: datetime | None = None
    """From then on the gold tables are not made of what silver holds now."""
    gaps: list[Gap] = []


class _Version(Struct):
    """What every version of a lake says of itself."""

    schema_version: int


class Change(NamedTuple):
    """What a commit does to a table."""

    table: str
    staged: Path | None
    """A directory with directories of days, whose files are brought in."""
    replaced: Sequence[str] = ()
    """Directories of days whose files go."""
    removed: Sequence[Path] = ()
    """Files that go, one by one."""


class Write(Struct, frozen=True):
    """What one transaction does to a table that has transactions."""

    table: str
    staged: str | None
    """Relative to the lake."""
    replaced: list[str]


class _Commit(Struct, frozen=True):
    """A commit as it is written down: names are relative to the lake."""

    state: LakeState
    removals: list[str] = []
    renames: list[tuple[str, str]] = []
    writes: list[Write] = []


Writer = Callable[[Write, LakeState], None]
"""Writes to one table for the commit that leads to this state. What it has done for that commit it does not again."""


class Lake:
    """A lake that is there. `open` reads; `writing` makes, locks and changes one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = path / OWN
        self.state = self._load()

    @classmethod
    def open(cls, path: Path) -> Lake:
        """Opens a lake for reading."""
        if not is_lake(path):
            raise LakeError(f"there is no lake in {path}: `dibs history run --lake {path}` makes one")
        _finish_if_left(path)
        return cls(path)

    @classmethod
    @contextlib.contextmanager
    def writing(
        cls,
        path: Path,
        *,
        format: Format | None = None,  # noqa: A002 as the flag is called
        target_wait_s: float | None = None,
        rebuild: bool = False,
    ) -> Iterator[Lake]:
        """Opens a lake for one run, and makes it where there is none. Only one run writes a lake at a time. What does
        not fit the tables that are there is refused, unless they are going to be rebuilt. A commit that was left, and
        takes a writer, is `finish`'s; the state is already that to which it leads."""
        own = path / OWN
        if not is_lake(path) and any(path.glob("*/date=*/*")):
            raise LakeError(
                f"{path} has tables of a lake, but no {OWN}/lake.json: bring that back from a backup, or name another "
                "directory"
            )
        if not own.is_dir() and path.is_dir() and any(path.iterdir()):
            raise LakeError(f"{path} holds something that is not a lake: name a new or empty directory")
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LakeError(f"{path} cannot be made: {error.strerror}") from error
        with _locked(own / "lock") as locked:
            if not locked:
                raise LakeError(f"another run writes {path}: let it end, or name another lake")
            _finish(path)
            left = _left(path)
            if left is None:
                shutil.rmtree(own / "staging", ignore_errors=True)
            if not (own / "lake.json").exists():
                made = LakeState(reader=f"history-{uuid.uuid4().hex[:12]}", format=format or "parquet")
                _write(own / "lake.json", made if target_wait_s is None else replace(made, target_wait_s=target_wait_s))
            for table in TABLES:
                (path / table).mkdir(exist_ok=True)
            lake = cls(path)
            lake.state = lake.state if left is None else left.state
            lake._fit(format, target_wait_s, rebuild)
            yield lake

    def _fit(self, format: Format | None, target_wait_s: float | None, rebuild: bool) -> None:  # noqa: A002
        if format is not None and not self.state.commits:
            self.state = replace(self.state, format=format)
        if format not in (None, self.state.format):
            raise LakeError(
                f"the tables of this lake are kept as {self.state.format}: leave --format out, or name another --lake"
            )
        target_wait_s = self.state.target_wait_s if target_wait_s is None else target_wait_s
        if rebuild:
            self.state = replace(self.state, target_wait_s=target_wait_s)
            return
        self.check_version()
        if target_wait_s != self.state.target_wait_s:
            raise LakeError(
                f"this lake aims at waits of {self.state.target_wait_s:g} s: leave --target-wait out, or give "
                "--rebuild with it, to make its tables anew"
            )

    def _load(self) -> LakeState:
        data = (self._own / "lake.json").read_bytes()
        try:
            version = msgspec.json.decode(data, type=_Version).schema_version
            if version > SCHEMA_VERSION:
                raise LakeError(f"this lake was written by a newer dibs (version {version}): upgrade dibs")
            return msgspec.json.decode(data, type=LakeState)
        except msgspec.DecodeError as error:
            raise LakeError(f"{self._own / 'lake.json'} cannot be read: {error}") from error

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def checkpoint(self) -> Path:
        """Where Spark keeps the stream's offsets."""
        return self._own / "checkpoint"

    def check_version(self) -> None:
        """Raises if the tables are of an older version than this program writes."""
        if self.state.schema_version != SCHEMA_VERSION:
            raise LakeError(
                f"the tables of this lake are of version {self.state.schema_version}, and this is {SCHEMA_VERSION}: "
                "`dibs history run --rebuild` makes them anew, from the events in it"
            )

    def files(self, table: str, day: str | None = None) -> list[Path]:
        """Returns the files of a table, or of one of its directories (`date=…`), in order."""
        return sorted((self.path / table).glob(f"{day or 'date=*'}/*.parquet"))

    # ------------------------------------------------------------------------------------------------------ writing

    def staging(self, name: str) -> Path:
        """Returns a new directory to write into, which `commit` takes from."""
        path = self._own / "staging" / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, changes: Iterable[Change], state: LakeState, write: Writer | None = None) -> None:
        """Brings in what was staged, removes what it replaces and takes the new state, all or nothing: by moving files,
        or by `write`, table by table, where the tables are more than their files."""
        state = replace(state, commits=self.state.commits + 1)
        commit = self._moves(changes, state) if write is None else self._writes(changes, state)
        _write(self._own / "commit.json", commit)
        self.finish(write)
        self.state = state

    def finish(self, write: Writer | None = None) -> None:
        """Carries out what is left of a commit, if there is any."""
        _finish(self.path, write)
        shutil.rmtree(self._own / "staging", ignore_errors=True)

    def _moves(self, changes: Iterable[Change], state: LakeState) -> _Commit:
        removals: list[str] = []
        renames: list[tuple[str, str]] = []
        for change in changes:
            gone = [file for day in change.replaced for file in self.files(change.table, day)]
            removals += [str(file.relative_to(self.path)) for file in (*gone, *change.removed)]
            for file in staged_files(change.staged):
                _sync(file)
                name = f"{change.table}/{file.parent.name}/{state.commits:06}-{len(renames)}.parquet"
                renames.append((str(file.relative_to(self.path)), name))
        return _Commit(state, removals, renames)

    def _writes(self, changes: Iterable[Change], state: LakeState) -> _Commit:
        writes: list[Write] = []
        for change in changes:
            for file in staged_files(change.staged):
                _sync(file)
            staged = None if change.staged is None else str(change.staged.relative_to(self.path))
            writes.append(Write(change.table, staged, list(change.replaced)))
        return _Commit(state, writes=writes)


def is_lake(path: Path) -> bool:
    """Returns whether there is a lake in a directory."""
    return (path / OWN / "lake.json").is_file()


def staged_files(directory: Path | None, day: str = "date=*") -> list[Path]:
    """Returns the files that Spark wrote into a directory, in order."""
    return [] if directory is None else sorted(directory.glob(f"{day}/*.parquet"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds the lock for as long as it lasts, and tells whether it could be had. The system frees a dead process's."""
    with path.open("wb") as file:
        yield _lock(file)


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _finish_if_left(path: Path) -> None:
    """Waits while a run carries out a commit, or does so in the place of one that was killed."""
    own = path / OWN
    patience_s = time.monotonic() + SWAP_PATIENCE_S
    while (own / "commit.json").exists() and time.monotonic() < patience_s:
        with _locked(own / "lock") as locked:
            if locked:
                _finish(path)
                return
        time.sleep(0.05)


def _left(path: Path) -> _Commit | None:
    """Returns the commit that is written down, and not carried out."""
    try:
        return msgspec.json.decode((path / OWN / "commit.json").read_bytes(), type=_Commit)
    except FileNotFoundError:
        return None


def _finish(path: Path, write: Writer | None = None) -> None:
    """Carries out what is left of a commit. Every step may have been done before. What takes a writer is left without
    one."""
    commit = _left(path)
    if commit is None:
        return
    for one in commit.writes:
        if write is None:
            return
        write(one, commit.state)
    touched = {path / name for name in commit.removals} | {path / name for _, name in commit.renames}
    for name in commit.removals:
        (path / name).unlink(missing_ok=True)
    for staged, name in commit.renames:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (path / staged).rename(path / name)
    for directory in {file.parent for file in touched}:
        with contextlib.suppress(OSError):
            directory.rmdir()
        _sync(directory if directory.exists() else directory.parent)
    _write(path / OWN / "lake.json", commit.state)
    (path / OWN / "commit.json").unlink()


def _write(path: Path, value: Struct) -> None:
    """Writes a value whole, or not at all."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value)))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
