"""The LMDB engine: one directory, one writer at a time, many readers, shared by the processes of one machine.

A thread of its own holds the write transaction. Calls that arrive while it commits form the next group: one transaction
and one fsync for all of them. Reads run in the caller's thread on a snapshot and never wait for the writer.

The directory::

    data.mdb  lock.mdb   LMDB's own
    turnstile            whoever wants to write passes here first: a busy process cannot overtake a waiting one
    wake/                one datagram socket per event loop that waits; a committer tells each what is new
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from dibs.clock import Clock, SystemClock
from dibs.errors import (
    DibsError,
    ForeignDirectory,
    ModeMismatch,
    NewerFormat,
    StoreCorrupt,
    StoreFull,
    StoreMissing,
    StoreRefused,
    StoreUnavailable,
)
from dibs.stores.ordered.directory import check_directory, check_file_system
from dibs.stores.ordered.engine import Call, Engine, Group, Lane, ReadTxn, flush_txn, post, readable
from dibs.stores.ordered.keys import META_DURABILITY, META_FORMAT, META_STORE_ID, from8, ms8
from dibs.stores.ordered.lmdb_txn import LmdbReadTxn, LmdbTxn
from dibs.stores.ordered.records import FORMAT, Run
from dibs.stores.ordered.wake import WakeLane, WakeSender

T = TypeVar("T")

DURABILITIES = ("sync", "relaxed")
ADDRESS_SLACK_BYTES = 64 << 30
READERS_MAX = 1_022
GROUP_MAX_S = 0.01
FORK_WAIT_S = 5.0
META_PAGES = 2
#: With so many free pages in the file, new tasks do not need room on the disk.
FREE_PAGES_MIN = 4096

# One engine per process and directory: LMDB must not be opened twice in a process.
_open: dict[tuple[int, int], LmdbEngine] = {}
_open_lock = threading.Lock()


# The engines whose writers were held back for the fork that is under way.
_held: list[LmdbEngine] = []


def _before_fork() -> None:
    """No transaction may be open in the moment of a fork: the child could never get rid of it."""
    mine = [engine for engine in _open.values() if not engine.forked]
    _held.extend(engine for engine in mine if engine.writing.acquire(timeout=FORK_WAIT_S))


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().writing.release()


def _after_fork_in_child() -> None:
    global _open_lock  # noqa: PLW0603 a lock that another thread of the parent held is held for ever in the child
    _open_lock = threading.Lock()
    # They stay known: who opens the directory in the child gets the inherited engine, started again. A second beside
    # it would be refused, since its environment is still open in this process.
    for engine in _open.values():
        engine.disown()
    _held.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


class LmdbEngine(Engine):
    """An LMDB environment, its writer thread and its wake-up sockets."""

    def __init__(
        self, directory: Path, clock: Clock, *, max_bytes: int, durability: str, disk_reserve_bytes: int
    ) -> None:
        super().__init__(clock)
        self.directory = directory
        self.max_bytes = max_bytes
        self.durability = durability
        self.disk_reserve_bytes = disk_reserve_bytes
        self._start()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        clock: Clock,
        *,
        max_bytes: int,
        durability: str,
        disk_reserve_bytes: int,
        create: bool = True,
    ) -> LmdbEngine:
        """Returns this process's engine for a directory, opening or making it. Refuses what is not a dibs store."""
        directory = Path(path).absolute()
        try:
            check_directory(directory)
            if not create and not _has_data(directory):
                raise StoreMissing(f"there is no store in {directory}")
            directory.mkdir(parents=True, exist_ok=True)
            where = directory.stat()
        except OSError as error:
            raise StoreRefused(
                f"{directory} cannot be used: {error.strerror}; name a directory you can write"
            ) from error
        with _open_lock:
            engine = _open.get((where.st_dev, where.st_ino))
            if engine is None:
                try:
                    engine = cls(
                        directory,
                        clock,
                        max_bytes=max_bytes,
                        durability=durability,
                        disk_reserve_bytes=disk_reserve_bytes,
                    )
                except OSError as error:
                    raise StoreRefused(f"{directory} cannot be used: {error}; look at what is in it") from error
                _open[(where.st_dev, where.st_ino)] = engine
            else:
                engine.check_same(clock, max_bytes, durability, disk_reserve_bytes)
            engine.acquire()
            return engine

    def check_same(self, clock: Clock, max_bytes: int, durability: str, disk_reserve_bytes: int) -> None:
        """A directory is opened once in a process: nobody's settings may be dropped in silence."""
        if durability != self.durability:
            raise ModeMismatch(f"{self.directory} is open in this process with durability {self.durability!r}")
        same_clock = clock is self.clock or type(clock) is type(self.clock) is SystemClock
        if not same_clock or (max_bytes, disk_reserve_bytes) != (self.max_bytes, self.disk_reserve_bytes):
            raise StoreRefused(
                f"{self.directory} is open in this process with another clock, max_bytes or disk_reserve_bytes: "
                "open it with the same, or close the other first"
            )

    def _start(self) -> None:
        """Opens the environment and starts the writer; again in a child process, where threads are gone."""
        self.forked = False
        """Set in a child process: what this engine has open is the parent's."""
        self.environment = _open_environment(self.directory, self.max_bytes, self.durability)
        try:
            self.environment.reader_check()
            _check_length(self.environment, self.directory)
            self.store_id = _check_meta(self.environment, self.directory, self.durability)
            self._opened = (self.directory / "data.mdb").stat()
            self._turnstile = os.open(self.directory / "turnstile", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._sender = WakeSender(self.directory / "wake")
        except BaseException:
            # Left open, it could not be opened again in this process.
            self.environment.close()
            raise
        self._broken: BaseException | None = None
        self._closing = False
        self._live_pages_max = self.max_bytes // self.environment.stat()["psize"]
        self.writing = threading.Lock()
        """Held while a transaction is open."""
        self._queue: queue.SimpleQueue[tuple[Lane, list[Call]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_for_ever, name="dibs-lmdb-writer", daemon=True)
        self._writer.start()

    def disown(self) -> None:
        """In a child process: lets go of the parent's files. A lock on one of them would outlive the parent."""
        if not self.forked:
            self.forked = True
            os.close(self._turnstile)
            self._sender.close()

    def lane(self) -> Lane:
        if self.forked:
            self._restart_in_child()
        return super().lane()

    def _restart_in_child(self) -> None:
        """Threads, locks and event loops do not survive a fork; the directory does."""
        with _open_lock:
            if self.forked:
                self._close_the_parents()
                self._start()

    def _close_the_parents(self) -> None:
        closing = threading.Thread(target=self.environment.close, daemon=True)
        closing.start()
        closing.join(FORK_WAIT_S)
        if closing.is_alive():
            raise StoreUnavailable(
                f"{self.describe()} was being copied or examined in the moment of the fork: open it in a new process"
            )
        for lane in self._lanes.values():
            lane.disown()
        self._lanes.clear()

    def _new_lane(self, loop: Any) -> Lane:
        return WakeLane(self, loop, self.directory / "wake")

    def describe(self) -> str:
        return f"lmdb:{self.directory}"

    def read(self, fn: Callable[[ReadTxn], T]) -> T:
        if self.forked:
            self._restart_in_child()
        try:
            with readable(self.describe()), self.environment.begin() as txn:
                return fn(LmdbReadTxn(txn, self.clock.now_ms(), self.memory))
        except lmdb.Error as error:
            raise _explained(error, self) from error

    def tend(self) -> None:
        """Frees the reader slots of processes that died, and notices if the files are no longer where others look for
        them: what is written to removed files is lost, and nothing that others enqueue arrives."""
        self.environment.reader_check()
        try:
            there = os.path.samestat((self.directory / "data.mdb").stat(), self._opened)
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError as error:
            raise _explained(error, self) from error
        if not there:
            raise StoreUnavailable(f"{self.describe()} was removed or replaced while it was open: open it again")

    def release(self) -> None:
        # Under the lock to the end: another thread must not open the directory before this one has let go of it.
        with _open_lock:
            super().release()

    def _close(self) -> None:
        for where in [where for where, engine in _open.items() if engine is self]:
            del _open[where]
        if self.forked:
            self._close_the_parents()
            return
        self._queue.put(None)
        self._writer.join()
        self._sender.close()
        os.close(self._turnstile)
        self.environment.close()

    # --------------------------------------------------------------------------------------------------------- writing

    def submit(self, lane: Lane, calls: list[Call]) -> None:
        self._queue.put((lane, calls))

    def _write_for_ever(self) -> None:
        """The writer's life: take what is there, commit as much of it as one group may hold, deliver."""
        waiting: deque[tuple[Lane, Call]] = deque()
        while self._take(waiting):
            calls = [call for _, call in waiting]
            try:
                done, runs = self._commit(calls)
            except Exception as error:  # noqa: BLE001 a writer that dies would leave everybody waiting for ever
                self._broken = error
                done, runs = self._fail(calls, StoreUnavailable(f"{self.describe()} cannot be written: {error}"), error)
            by_lane: dict[Lane, list[Call]] = {}
            for _ in range(done):
                lane, call = waiting.popleft()
                by_lane.setdefault(lane, []).append(call)
            self._deliver(by_lane, runs)

    def _take(self, waiting: deque[tuple[Lane, Call]]) -> bool:
        """Adds everything that was submitted; blocks if nothing waits yet. False: the engine is closed, all is done."""
        block = not waiting and not self._closing
        while True:
            try:
                submitted = self._queue.get(block)
            except queue.Empty:
                return bool(waiting)
            if submitted is None:
                self._closing = True
                return bool(waiting)
            lane, calls = submitted
            waiting.extend((lane, call) for call in calls)
            block = False

    def _deliver(self, by_lane: dict[Lane, list[Call]], runs: list[Run]) -> None:
        if runs:
            # Other processes first: once a loop of this one wakes, it wants the interpreter for itself.
            self._sender.send(runs)
        for lane, calls in by_lane.items():
            post(lane, calls, runs)
        for lane in list(self._lanes.values()) if runs else ():
            if lane not in by_lane and lane.wakeups:
                post(lane, [], runs)

    def _commit(self, calls: list[Call]) -> tuple[int, list[Run]]:
        """Commits a group: the first so many calls, at least one. Returns how many, and what they journalled."""
        with self.writing:
            done, runs = self._transact(calls)
        if runs is not None:
            return done, runs
        # Something raised after it may have written: each call of the group gets a transaction of its own.
        runs = []
        done = max(done, 1)
        for call in calls[:done]:
            with self.writing:
                runs += self._transact([call], alone=True)[1] or []
        return done, runs

    def _transact(self, calls: list[Call], *, alone: bool = False) -> tuple[int, list[Run] | None]:
        """Runs calls in one transaction. Without runs it was aborted, and the group is to be split."""
        if self._broken is not None:
            return self._fail(
                calls,
                StoreUnavailable(
                    f"{self.describe()} failed to write ({self._broken}): close every store of this process on it, "
                    "open it again and repeat the call"
                ),
            )
        try:
            with self._turn():
                raw = self.environment.begin(write=True)
        except lmdb.Error as error:
            return self._fail(calls, StoreUnavailable(f"{self.describe()} cannot be written: {error}"), error)
        group = Group(calls, GROUP_MAX_S)
        try:
            with readable(self.describe()):
                txn = LmdbTxn(raw, self.clock.now_ms(), self.memory, lambda: self.full(raw))
                group.run(txn)
                flush_txn(txn)
        except Exception as error:  # noqa: BLE001 whatever a call raises is its caller's to see
            raw.abort()
            return self._fail(calls, _explained(error, self), error) if alone else (group.done, None)
        if not txn.dirty:
            raw.abort()
            return group.done, []
        try:
            raw.commit()
        except lmdb.Error as error:
            # After a failed write or fsync nobody knows what is on the disk: stop, reopen, and look.
            self._broken = error
            failed = StoreUnavailable(f"{self.describe()} failed to write: {error}")
            return self._fail(calls[: group.done], failed, error)
        if (meter := self.meter) is not None:
            self.measure(meter, group.done, txn.journal.runs)
        return group.done, txn.journal.runs

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Held while waiting for the write lock: at most one process of a crowd is next, and nobody passes it."""
        fcntl.flock(self._turnstile, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._turnstile, fcntl.LOCK_UN)

    def _fail(self, calls: list[Call], error: DibsError, cause: BaseException | None = None) -> tuple[int, list[Run]]:
        error.__cause__ = cause
        for call in calls:
            call.error = error
        return len(calls), []

    def full(self, txn: lmdb.Transaction) -> str | None:
        """Says why no new tasks are taken: the store's own limit, or the disk's reserve."""
        pages = txn.stat(self.environment.open_db(txn=txn))
        live_pages = pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]
        if live_pages > self._live_pages_max:
            return (
                f"{self.describe()} holds {live_pages} pages and max_bytes allows {self._live_pages_max}: "
                "purge, wait for retention, or raise max_bytes"
            )
        disk = os.statvfs(self.directory)
        free_pages = self.environment.info()["last_pgno"] + 1 - live_pages
        if disk.f_bavail * disk.f_frsize < self.disk_reserve_bytes and free_pages < FREE_PAGES_MIN:
            return f"the disk of {self.directory} has less than {self.disk_reserve_bytes} bytes free: make room on it"
        return None

    # ---------------------------------------------------------------------------------------------------------- copies

    def backup(self, directory: Path) -> None:
        with _made_whole(directory) as copy:
            self.environment.copy(str(copy), compact=True)


def restore(backup: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Makes a store in a new directory out of a backup. It has an id of its own: old cursors are told so."""
    source, target = Path(backup), Path(directory).absolute()
    if not (source / "data.mdb").is_file():
        raise ForeignDirectory(f"{source} is not a backup: it has no data.mdb")
    with _made_whole(target) as copy:
        check_file_system(copy)
        shutil.copyfile(source / "data.mdb", copy / "data.mdb")


@contextlib.contextmanager
def _made_whole(directory: Path) -> Iterator[Path]:
    """Yields a directory to copy a store into; it gets an identity of its own and its name when it is complete, so that
    half a copy is never taken for one. What the system or LMDB says against it becomes a refusal."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StoreRefused(f"{directory} is not empty: name a new directory for the copy")
    copy = directory.with_name(f"{directory.name}.partial-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        copy.mkdir(parents=True)
        yield copy
        _new_identity(copy)
        copy.rename(directory)
    except lmdb.InvalidError as error:
        raise ForeignDirectory(f"{directory} would be no store: what is copied is not an LMDB file") from error
    except (OSError, lmdb.Error) as error:
        raise StoreRefused(f"{directory} cannot take the copy: {error}; name a new directory you can write") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------- opening


def _has_data(directory: Path) -> bool:
    """LMDB would take an empty file for a database that is still to be made."""
    data = directory / "data.mdb"
    return data.exists() and data.stat().st_size > 0


def _open_environment(directory: Path, max_bytes: int, durability: str) -> lmdb.Environment:
    if durability not in DURABILITIES:
        raise StoreRefused(f"durability is {durability!r}: use one of {', '.join(DURABILITIES)}")
    try:
        return lmdb.open(
            str(directory),
            map_size=max_bytes + ADDRESS_SLACK_BYTES,
            metasync=durability == "sync",
            max_readers=READERS_MAX,
        )
    except lmdb.InvalidError as error:
        raise ForeignDirectory(
            f"{directory}/data.mdb is not an LMDB file, or damaged: name another directory, or restore a backup"
        ) from error
    except lmdb.Error as error:
        raise StoreRefused(
            f"it cannot be opened: {error}; use a directory you can write, and a smaller max_bytes if "
            "memory is what is missing"
        ) from error


def _check_length(environment: lmdb.Environment, directory: Path) -> None:
    """A file that was cut off would end the process at the first touch of what is missing. Pages at its end that were
    taken and given back in one transaction are counted though they were never written: a file may be shorter by so many
    as are free. If one of them was not, it is noticed when it is read."""
    pages, info = environment.stat(), environment.info()
    live = pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]
    needed = (META_PAGES + live) * pages["psize"]
    with (directory / "data.mdb").open("rb+") as file:
        found = os.fstat(file.fileno()).st_size
        if found < needed and info["last_txnid"]:
            raise StoreCorrupt(f"{directory}/data.mdb has {found} bytes and needs {needed}: restore a backup")
        missing = (info["last_pgno"] + 1) * pages["psize"] - found
        if missing > 0 and info["last_txnid"]:
            # Never shortens it, should it have grown meanwhile. A disk that is full is no reason not to open it.
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), found, missing)


def _check_meta(environment: lmdb.Environment, directory: Path, durability: str) -> bytes:
    """Marks a new store, or checks that this is one that we may touch. Returns its id."""
    with environment.begin() as txn:
        found = txn.get(META_FORMAT)
        empty = not txn.stat(environment.open_db(txn=txn))["entries"]
    if found is None and not empty:
        raise ForeignDirectory(f"{directory} is an LMDB database, but not a dibs store: name another directory")
    if found is None:
        with environment.begin(write=True) as txn:
            if txn.get(META_FORMAT) is None:
                txn.put(META_FORMAT, ms8(FORMAT))
                txn.put(META_DURABILITY, durability.encode())
                txn.put(META_STORE_ID, uuid.uuid4().bytes)
    with environment.begin() as txn:
        found, store_id = txn.get(META_FORMAT), txn.get(META_STORE_ID)
        made_with = bytes(txn.get(META_DURABILITY) or b"").decode()
    if from8(found or b"") > FORMAT:
        raise NewerFormat(f"{directory} has format {from8(found or b'')} and this dibs knows {FORMAT}: upgrade dibs")
    if from8(found or b"") < FORMAT:
        # Nothing of an older store changes; but what is written from now on, an older dibs could not read.
        with environment.begin(write=True) as txn:
            txn.put(META_FORMAT, ms8(FORMAT))
    if made_with != durability:
        raise ModeMismatch(f"{directory} was made with durability {made_with!r}: open it with that")
    assert store_id is not None
    return bytes(store_id)


def _new_identity(directory: Path) -> None:
    """A copy is another store: cursors into the original's journal do not hold in it."""
    environment = lmdb.open(str(directory), map_size=(directory / "data.mdb").stat().st_size + ADDRESS_SLACK_BYTES)
    with environment.begin(write=True) as txn:
        if txn.get(META_FORMAT) is None:
            environment.close()
            raise ForeignDirectory("what is copied is an LMDB file, but not a dibs store: name a backup of one")
        txn.put(META_STORE_ID, uuid.uuid4().bytes)
    environment.close()


def _explained(error: BaseException, engine: LmdbEngine) -> DibsError:
    if isinstance(error, DibsError):
        return error
    if isinstance(error, lmdb.MapFullError):
        return StoreFull(f"{engine.describe()} is full to its last page: purge, or raise max_bytes")
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError):
        return StoreCorrupt(f"{engine.describe()} is damaged ({error}): stop writing and restore a backup")
    if isinstance(error, lmdb.Error | OSError):
        # Of the system: the directory is gone, say. That is no fault of the call, which can be repeated.
        return StoreUnavailable(f"{engine.describe()} cannot be used: {error}")
    return DibsError(f"a call failed inside {engine.describe()}: {type(error).__name__}: {error}")
