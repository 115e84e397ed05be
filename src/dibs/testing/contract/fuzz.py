"""Fuzz: many clients doing everything at once; what must hold, holds at every look."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from msgspec import Struct, field

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.batches import row_ids
from dibs.stores.protocol import Store
from dibs.task import (
    MOVES,
    PLACES,
    Already,
    Enqueued,
    EventKind,
    Filter,
    Heartbeat,
    Kind,
    Lease,
    NewTask,
    Place,
    Reason,
    Rejected,
    Settled,
)
from dibs.testing.contract.steps import (
    TENANT,
    assert_counts,
    list_all,
    pass_time,
    read_events,
    settlement,
    sweep_all,
)

COMMANDS = ["a", "a.b", "b"]
STEPS = 120

#: Where each event takes its task, unless it says that the task waits; the moves are checked against the legal ones.
TO: dict[EventKind, Place] = {
    EventKind.ENQUEUED: Place.READY,
    EventKind.PROMOTED: Place.READY,
    EventKind.CLAIMED: Place.LEASED,
    EventKind.COMPLETED: Place.NONE,
    EventKind.RETRIED: Place.READY,
    EventKind.RELEASED: Place.READY,
    EventKind.LEASE_EXPIRED: Place.READY,
    EventKind.FAILED: Place.DEAD,
    EventKind.CANCELLED: Place.NONE,
    EventKind.REPLAYED: Place.READY,
}


class Seen(Struct):
    """What the clients were told, to be held against what the store says."""

    enqueued: set[bytes] = field(default_factory=set)
    purged: set[bytes] = field(default_factory=set)
    leases: list[Lease] = field(default_factory=list)
    accepted: list[tuple[bytes, Kind]] = field(default_factory=list)
    repeated: list[tuple[bytes, Kind]] = field(default_factory=list)
    tokens: set[bytes] = field(default_factory=set)


class Clients:
    """Random calls on one store, remembered in `seen`."""

    def __init__(self, store: Store, clock: ManualClock, seed: int) -> None:
        self.store = store
        self.clock = clock
        self.random = random.Random(seed)
        self.seen = Seen()

    async def step(self) -> None:
        """Several clients act at the same time; now and then time passes."""
        acts: list[Callable[[], Awaitable[None]]] = [
            self.enqueue, self.enqueue, self.claim, self.claim, self.settle, self.settle, self.settle,
            self.heartbeat, self.cancel, self.replay, self.purge, self.sweep, self.load,
        ]  # fmt: skip
        await asyncio.gather(*(act() for act in self.random.choices(acts, k=4)))
        if self.random.random() < 0.3:
            self.clock.advance(self.random.choice([0.5, 5, 20, 40]))

    async def enqueue(self) -> None:
        """New tasks of all kinds, some with a key that may be taken."""
        tasks = [self._new() for _ in range(self.random.randrange(1, 5))]
        for outcome in await self.store.enqueue(TENANT, tasks):
            assert not isinstance(outcome, Rejected)
            if isinstance(outcome, Enqueued):
                self.seen.enqueued.add(outcome.id)

    async def load(self) -> None:
        """Chunks staged at the same time, of which some are committed, now and then by two callers."""
        chunks: dict[bytes, list[NewTask]] = {}
        for _ in range(self.random.randrange(1, 4)):
            rows = [self._new() for _ in range(self.random.randrange(1, 3))]
            chunks[new_id()] = [self.random.choice(rows) for _ in range(self.random.randrange(1, 9))]
        await asyncio.gather(*(self.store.stage(TENANT, chunk, rows) for chunk, rows in chunks.items()))
        named = [chunk for chunk in chunks if self.random.random() < 0.7]
        name, count = new_id().hex(), sum(len(chunks[chunk]) for chunk in named)
        commits = [self.store.commit_load(TENANT, name, 1, named) for _ in range(self.random.randrange(1, 3))]
        assert sum(outcome.rows for outcome in await asyncio.gather(*commits)) == count
        self.seen.enqueued |= {task_id for chunk in named for task_id in row_ids(TENANT, chunk, chunks[chunk])}

    def _new(self) -> NewTask:
        return NewTask(
            command=self.random.choice(COMMANDS),
            payload=bytes(self.random.randrange(50)),
            priority=self.random.randrange(3),
            delay_s=self.random.choice([0, 0, 0, 3, 30]),
            max_attempts=self.random.choice([1, 2, 5]),
            expires_s=self.random.choice([None, None, 60]),
            key=self.random.choice([None, None, "k1", "k2"]),
            on_duplicate=self.random.choice(["return", "replay_dead"]),
        )

    async def claim(self) -> None:
        """A claim of some queues; no token ever comes twice."""
        commands = self.random.sample(COMMANDS, self.random.randrange(1, 4))
        leases = await self.store.claim(TENANT, commands, limit=self.random.randrange(1, 6), worker="w")
        for lease in leases:
            assert lease.token not in self.seen.tokens
            assert lease.attempt <= lease.max_attempts
            assert lease.command in commands
            self.seen.tokens.add(lease.token)
        self.seen.leases += leases

    async def settle(self) -> None:
        """Any lease ever given, in any way: current, lost or settled before."""
        if not self.seen.leases:
            return
        lease = self.random.choice(self.seen.leases[-12:])
        kind = self.random.choice(list(Kind))
        delay_s = self.random.choice([0, 4, 25]) if kind is Kind.RETRY else 0
        [outcome] = await self.store.settle([settlement(lease, kind, delay_s=delay_s)])
        assert not isinstance(outcome, Rejected)
        if isinstance(outcome, Settled):
            self.seen.accepted.append((lease.token, kind))
        if isinstance(outcome, Already):
            self.seen.repeated.append((lease.token, kind))

    async def heartbeat(self) -> None:
        """Extends any lease ever given."""
        if self.seen.leases:
            lease = self.random.choice(self.seen.leases[-12:])
            await self.store.heartbeat([Heartbeat(tenant=TENANT, id=lease.id, token=lease.token)])

    async def cancel(self) -> None:
        """Cancels any task ever enqueued."""
        if self.seen.enqueued and self.random.random() < 0.5:
            await self.store.cancel(TENANT, [self.random.choice(sorted(self.seen.enqueued))])

    async def replay(self) -> None:
        """Replays some dead letters."""
        if self.random.random() < 0.3:
            await self.store.replay(TENANT, Filter(place=Place.DEAD), limit=2)

    async def purge(self) -> None:
        """Purges one dead letter, now and then."""
        if self.random.random() < 0.2:
            acted = await self.store.purge(TENANT, Filter(place=Place.DEAD), limit=1)
            self.seen.purged |= set(acted.ids)

    async def sweep(self) -> None:
        """A sweep with a small budget, among everything else."""
        await self.store.sweep(5)


@pytest.mark.anyio
class TestFuzz:
    """Random histories of concurrent calls."""

    @pytest.mark.parametrize("seed", range(6))
    async def test_nothing_is_lost_doubled_or_miscounted(self, store: Store, clock: ManualClock, seed: int) -> None:
        """Every acknowledged task is where its status says; every lease was settled at most once; counts are exact."""
        clients = Clients(store, clock, seed)
        for step in range(STEPS):
            await clients.step()
            if step % 20 == 0:
                await assert_counts(store)
        seen = clients.seen
        settled = [token for token, _ in seen.accepted]
        assert len(settled) == len(set(settled))
        assert set(seen.repeated) <= set(seen.accepted)
        assert seen.repeated, "the history never repeated a settlement"
        tasks = {task.id: task for task in await list_all(store)}
        assert set(tasks) == seen.enqueued - seen.purged
        for task in tasks.values():
            assert task.place in PLACES[task.status]
            assert task.attempts <= task.max_attempts
            assert (task.ended_ms is not None) == task.status.ended
        await assert_counts(store)

    @pytest.mark.parametrize("seed", range(6, 10))
    async def test_the_journal_tells_legal_lives(self, store: Store, clock: ManualClock, seed: int) -> None:
        """Every task's events are a chain of legal moves from its enqueue to where it stands now."""
        clients = Clients(store, clock, seed)
        for _ in range(STEPS):
            await clients.step()
        places: dict[bytes, Place] = {}
        purged: set[bytes] = set()
        for event in await read_events(store):
            before = places.get(event.id)
            assert (before is None) == (event.kind is EventKind.ENQUEUED)
            assert event.id not in purged
            if event.kind is EventKind.CANCELLING:
                assert before is Place.LEASED
            elif event.kind is EventKind.PURGED:
                assert before in (Place.DEAD, Place.NONE)
                purged.add(event.id)
            else:
                after = Place.DELAYED if event.reason == Reason.DELAYED else TO[event.kind]
                assert (before, after) in MOVES, event
                places[event.id] = after
        for task in await list_all(store):
            assert task.place is places[task.id]

    @pytest.mark.parametrize("seed", range(10, 13))
    async def test_everything_comes_to_an_end(self, store: Store, clock: ManualClock, seed: int) -> None:
        """After any history, workers that complete what they get empty the queues; nothing is stranded."""
        clients = Clients(store, clock, seed)
        for _ in range(STEPS):
            await clients.step()
        for _ in range(5):
            await pass_time(store, clock, 60)
            while leases := await store.claim(TENANT, COMMANDS, limit=50):
                answers = await store.settle([settlement(lease, Kind.COMPLETE) for lease in leases])
                assert all(isinstance(answer, Settled) for answer in answers)
        total = await assert_counts(store)
        assert (total.ready, total.delayed, total.leased) == (0, 0, 0)
        assert all(task.status.ended for task in await list_all(store))
        clock.advance(30 * 86_400)
        await sweep_all(store)
        assert await list_all(store) == []
        assert (await assert_counts(store)).bytes == 0
