"""Producers and workers on one LMDB directory, killed at random moments; afterwards every task is accounted for."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dibs.clock import ManualClock
from dibs.stores import open_local
from dibs.stores.local import LocalStore
from dibs.task import Event, EventKind, Kind, Reason, Settled, Settlement, Status, Task
from dibs.testing.model import replayed
from tests.crash import log
from tests.crash.producer import COMMANDS, MAX_ATTEMPTS, TENANT

ROOT = Path(__file__).parents[2]
PRODUCERS, WORKERS = 2, 3


@pytest.mark.timeout(600)  # it starts some 150 processes: on a machine that others use too, that takes minutes
async def test_nothing_is_lost_or_invented(tmp_path: Path) -> None:
    """Whoever is killed whenever: acknowledged tasks stay, each is settled once, deliveries are bounded."""
    kill_many(tmp_path, kills=150)
    await account(tmp_path)


@pytest.mark.timeout(600)
async def test_nothing_is_lost_or_invented_on_shards(tmp_path: Path) -> None:
    """The same on three shards, where a call may be killed between two of them."""
    url = f"shards:{tmp_path / 'store'}?n=3"
    kill_many(tmp_path, kills=50, url=url)
    await account(tmp_path, url)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_nothing_is_lost_or_invented_for_long(tmp_path: Path) -> None:
    """The same through a thousand kills."""
    kill_many(tmp_path, kills=1_000)
    await account(tmp_path)


# -------------------------------------------------------------------------------------------------------------- killing


@dataclass
class Victim:
    """A process that was started here and will be killed here, at some moment after its first log line."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path
    dies_at_s: float | None = None

    def works(self) -> bool:
        """True once it has opened the store and told something, so that the kill meets it at work."""
        assert self.process.poll() is None, (
            f"the {self.role} ended by itself: {self.log.with_suffix('.err').read_text()}"
        )
        return self.log.exists() and self.log.stat().st_size > 0


def kill_many(directory: Path, kills: int, url: str = "") -> None:
    """Keeps producers and workers running and kills one after the other. `url`: by default a plain store."""
    dice = random.Random(kills)
    killed = 0
    with victims(directory, url or str(directory / "store")) as running:
        roles = ["producer"] * PRODUCERS + ["worker"] * WORKERS
        living = [running.start(role) for role in roles]
        while killed < kills:
            for place, victim in enumerate(living):
                if not victim.works():
                    continue
                if victim.dies_at_s is None:
                    victim.dies_at_s = time.monotonic() + dice.uniform(0, 1)
                elif time.monotonic() >= victim.dies_at_s:
                    running.kill(victim)
                    killed += 1
                    living[place] = running.start(victim.role)
            time.sleep(0.005)


@dataclass
class Victims:
    """What runs; whatever happens, it is ended."""

    directory: Path
    url: str
    processes: list[Victim] = field(default_factory=list)
    started: int = 0

    def start(self, role: str) -> Victim:
        """Starts a process of that role, with a log of its own."""
        self.started += 1
        path = self.directory / f"{role}-{self.started}.log"
        command = [sys.executable, "-m", f"tests.crash.{role}", self.url, str(path)]
        with path.with_suffix(".err").open("wb") as errors:
            process = subprocess.Popen([*command, str(self.started)], cwd=ROOT, stderr=errors)
        victim = Victim(role, process, path)
        self.processes.append(victim)
        return victim

    def kill(self, victim: Victim) -> None:
        """SIGKILL, by its id."""
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        self.processes.remove(victim)


@contextmanager
def victims(directory: Path, url: str) -> Iterator[Victims]:
    """Ends what is still running when the block is left."""
    running = Victims(directory, url)
    try:
        yield running
    finally:
        for victim in list(running.processes):
            running.kill(victim)


# ----------------------------------------------------------------------------------------------------------- accounting


@dataclass
class Told:
    """What the processes told before they died."""

    intended: set[bytes] = field(default_factory=set)
    acknowledged: set[bytes] = field(default_factory=set)
    loads: dict[str, set[bytes]] = field(default_factory=dict)
    """The rows of every load that was about to be committed."""
    committed: set[str] = field(default_factory=set)
    claims: dict[bytes, tuple[bytes, str]] = field(default_factory=dict)
    """By token: the task and the claim it was delivered to."""
    releasing: set[bytes] = field(default_factory=set)
    settled: dict[bytes, tuple[bytes, Kind]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Told:
        """Reads the logs, and checks that no token came to two claims and none was settled twice."""
        told = cls()
        for what, name, *rest in log.read(directory):
            if what == "committed":
                told.committed.add(name)
                continue
            task_id = bytes.fromhex(name)
            if what == "committing":
                told.loads.setdefault(rest[0], set()).add(task_id)
            elif what == "intended":
                told.intended.add(task_id)
            elif what == "acknowledged":
                told.acknowledged.add(task_id)
            elif what == "delivered":
                token, claim_id = bytes.fromhex(rest[0]), rest[1]
                assert told.claims.setdefault(token, (task_id, claim_id)) == (task_id, claim_id)
            elif what == "releasing":
                told.releasing.add(bytes.fromhex(rest[0]))
            else:
                token, kind = bytes.fromhex(rest[0]), Kind(rest[1])
                assert token not in told.settled, "two settlements of one lease were accepted"
                told.settled[token] = (task_id, kind)
        for load, rows in told.loads.items():
            told.intended |= rows
            told.acknowledged |= rows if load in told.committed else set()
        return told


async def account(directory: Path, url: str = "") -> None:
    """Opens what is left, an hour later by its clock, lets time do its work, drains it, and compares."""
    told = Told.read(directory)
    clock = ManualClock(time.time_ns() // 1_000_000 + 3_600_000)
    store = await open_local(url or str(directory / "store"), clock=clock)
    try:
        report = await store.doctor()
        assert report.clean, report.problems
        drained = await drain(store, clock)
        tasks = await everything(store)
        events = await journal(store)
        await check_store(store, tasks, events)
    finally:
        await store.close()
    check_told(told, tasks, events, drained)
    print(
        f"{len(told.acknowledged)} acknowledged, {len(told.committed & told.loads.keys())} of {len(told.loads)} loads, "
        f"{len(told.claims)} deliveries, {len(told.settled)} settled, "
        f"{len(drained)} left to drain, {Counter(task.status.value for task in tasks.values())}"
    )


async def drain(store: LocalStore, clock: ManualClock) -> dict[bytes, bytes]:
    """Takes back what the dead held, then completes everything. Returns the tokens, by task."""
    for _ in range(2):
        while (await store.sweep()).more:
            pass
        # The sweep may have finished a commit across shards: delays of those rows count from then.
        clock.advance(10)
    tokens: dict[bytes, bytes] = {}
    while leases := await store.claim(TENANT, COMMANDS, limit=1_000):
        items = [
            Settlement(
                tenant=TENANT, id=lease.id, token=lease.token, kind=Kind.COMPLETE, result=lease.token, codec="raw"
            )
            for lease in leases
        ]
        assert await store.settle(items) == [Settled(Status.COMPLETED)] * len(items)
        assert not tokens.keys() & {lease.id for lease in leases}
        tokens |= {lease.id: lease.token for lease in leases}
    return tokens


async def everything(store: LocalStore) -> dict[bytes, Task]:
    """Lists every task there is."""
    tasks: dict[bytes, Task] = {}
    cursor: str | None = None
    while True:
        page = await store.list(TENANT, cursor=cursor, limit=1_000)
        tasks |= {task.id: task for task in page.tasks}
        cursor = page.cursor
        if cursor is None:
            return tasks


async def journal(store: LocalStore) -> list[Event]:
    """Reads the journal from its beginning."""
    events: list[Event] = []
    for bounds in await store.journal_bounds():
        after: bytes | None = None
        more = True
        while more:
            page = await store.events("*", shard=bounds.shard, after=after)
            events += page.events
            after, more = page.cursor, page.more
    return events


async def check_store(store: LocalStore, tasks: dict[bytes, Task], events: list[Event]) -> None:
    """The store agrees with itself: records, counts and journal."""
    report = await store.doctor()
    assert report.clean, report.problems
    assert report.tasks == len(tasks)
    stats = (await store.stats(TENANT)).total
    dead = sum(task.status is Status.FAILED for task in tasks.values())
    assert (stats.ready, stats.delayed, stats.leased, stats.dead) == (0, 0, 0, dead)
    assert stats.bytes == sum(
        len(task.payload) + len((task.result and task.result.data) or b"") for task in tasks.values()
    )
    assert replayed(events) == {(TENANT, task_id): (task.status, task.place) for task_id, task in tasks.items()}
    ends = {(task.status, task.reason) for task in tasks.values() if task.status is not Status.FAILED}
    assert ends <= {(Status.COMPLETED, None), (Status.CANCELLED, Reason.DUPLICATE)}


def check_told(told: Told, tasks: dict[bytes, Task], events: list[Event], drained: dict[bytes, bytes]) -> None:
    """The store agrees with what was said while processes died, and enough was said to tell."""
    assert {kind for _, kind in told.settled.values()} == set(Kind), "not every kind of settlement was accepted"
    assert tasks.keys() - told.acknowledged, "no producer was killed between its commit and its answer"
    assert told.acknowledged - tasks.keys() == set(), "acknowledged tasks are lost"
    assert tasks.keys() - told.intended == set(), "there are tasks that nobody enqueued"
    assert {task_id for task_id, _ in told.claims.values()} <= tasks.keys()
    completions = Counter(event.id for event in events if event.kind is EventKind.COMPLETED)
    for token, (task_id, kind) in told.settled.items():
        task = tasks[task_id]
        if kind is Kind.COMPLETE:
            assert task.result is not None
            assert (task.status, task.result.data) == (Status.COMPLETED, token), "an accepted completion did not stay"
        elif kind is Kind.FAIL:
            assert task.status is Status.FAILED, "an accepted failure did not stay"
    check_loads(told, tasks)
    held = [task for task in tasks.values() if task.key is not None and task.status is not Status.CANCELLED]
    keys = [(task.command, task.key) for task in held]
    assert keys, "no task had a key"
    assert len(set(keys)) == len(keys), "two tasks have one key"
    for task_id, task in tasks.items():
        assert completions[task_id] == (task.status is Status.COMPLETED), "completed other than once"
        if task_id in drained:
            assert task.result is not None
            assert task.result.data == drained[task_id]
    check_deliveries(told, events, drained)


def check_loads(told: Told, tasks: dict[bytes, Task]) -> None:
    """Of every load all rows are there or none; only rows whose key another task has may end without having run."""
    rows = set().union(*told.loads.values())
    unanswered = [load for load in told.loads if load not in told.committed]
    assert told.committed & told.loads.keys(), "no load was committed"
    assert unanswered, "no producer was killed between its commit and its answer"
    for load in unanswered:
        assert told.loads[load] <= tasks.keys() or not told.loads[load] & tasks.keys(), "a load was committed in part"
    keys = {(task.command, task.key) for task in tasks.values() if task.status is not Status.CANCELLED}
    lost = [task for task in tasks.values() if task.status is Status.CANCELLED]
    assert lost, "no row found its key taken"
    for task in lost:
        assert task.id in rows, "a plain task ended as a duplicate"
        assert (task.command, task.key) in keys, "a row was a duplicate of nothing"


def check_deliveries(told: Told, events: list[Event], drained: dict[bytes, bytes]) -> None:
    """No task was delivered more often than allowed, by the journal and by what workers saw."""
    claimed = Counter(event.id for event in events if event.kind is EventKind.CLAIMED)
    released = Counter(event.id for event in events if event.kind is EventKind.RELEASED)
    seen = Counter(task_id for task_id, _ in told.claims.values()) + Counter(drained.keys())
    given_back = Counter(told.claims[token][0] for token in told.releasing)
    for task_id, count in claimed.items():
        assert count - released[task_id] <= MAX_ATTEMPTS
        assert seen[task_id] - given_back[task_id] <= MAX_ATTEMPTS
        assert seen[task_id] <= count, "a delivery that the journal does not know"
