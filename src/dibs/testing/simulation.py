"""A hypothesis machine that holds a store against the model of the queue's rules.

:class:`StoreMachine` makes up operations, runs each on a store and on :class:`dibs.testing.model.Model`, and after
every step compares answers, every task as `get` shows it, and the counts; at the end the journal must tell the same
story. A store author gives it a way to open the store on a clock::

    def test_model():
        run_state_machine_as_test(lambda: StoreMachine(open_my_store))

Needs ``hypothesis``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from dibs.clock import Clock, ManualClock
from dibs.errors import UnknownChunk
from dibs.ids import CHUNK_BYTES, ID_BYTES, key_digest
from dibs.stores.batches import row_ids
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.task import (
    ALL_COMMANDS,
    PLACES,
    ByKey,
    Committed,
    ErrorInfo,
    Event,
    Filter,
    Heartbeat,
    KeyLimit,
    Kind,
    Lease,
    NewTask,
    Progress,
    QueueConfig,
    QueueLimits,
    Settlement,
    Status,
    Swept,
    Task,
)
from dibs.testing.model import Known, Model, replayed

T = TypeVar("T")

TENANTS = ("acme", "default")
COMMANDS = ("mail", "resize", "resize.large")

Pick = st.integers(0, 1 << 16)
"""Which of the things there are; taken modulo how many there are."""

seconds = st.sampled_from([1.0, 2.5, 10.0, 60.0])
news = st.fixed_dictionaries(
    {
        "command": st.sampled_from(COMMANDS),
        "payload": st.sampled_from([b"", b"p", b"\x00\xff\x00"]),
        "limit_key": st.sampled_from(["l", "l", "l/2", None]),
    },
    optional={
        "priority": st.sampled_from([0, 1, 9]),
        "delay_s": st.sampled_from([0.5, 5.0, 90_000.0]),
        "max_attempts": st.integers(1, 3),
        "lease_s": seconds,
        "expires_s": st.sampled_from([0.5, 5.0, 100.0]),
        "key": st.sampled_from(["k", "k/2"]),
        "on_duplicate": st.sampled_from(["return", "replay_dead"]),
        "result_ttl_s": st.sampled_from([0.0, 1.0, 30.0]),
        "retention_s": st.sampled_from([0.0, 20.0, 60.0]),
        "keep": st.booleans(),
    },
)
tenants = st.sampled_from(TENANTS)
caps = st.none() | st.sampled_from([1, 2, 5])
chunks = st.lists(st.tuples(news, st.integers(1, 4)), min_size=1, max_size=3)
"""Rows of which some are alike, so that they stand in one block."""


class StoreMachine(RuleBasedStateMachine):
    """Random operations on a store and on the model, side by side."""

    def __init__(
        self,
        opener: Callable[[Clock], Awaitable[Store]],
        *,
        reopens: bool = False,
        in_turn: bool = False,
        shard_of: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        """`opener` opens a store without any data on the given clock. `reopens`: what was stored outlives `close`, and
        the opener finds it again. `in_turn`: calls made at once take effect in the order in which they were made.
        `shard_of`: where a task is, for a store that keeps order within its shards."""
        super().__init__()
        self.in_turn = in_turn
        self.opener = opener
        self.reopens = reopens
        self.clock = ManualClock()
        self.model = Model(self.clock, shard_of=shard_of)
        self.ids: list[tuple[str, NewTask]] = []
        self.leases: list[Lease] = []
        self.settlements: list[Settlement] = []
        self.claim_ids: list[bytes] = []
        self.chunks: list[tuple[str, bytes]] = []
        self.unseen: list[tuple[str, bytes]] = []
        """Ids of rows that were staged; they are tasks only if the model says so."""
        self.committing: set[tuple[str, bytes]] = set()
        self._loop = asyncio.new_event_loop()
        self._minted = 0
        self._observed = True
        self.store = self.run(self._open())
        self.run(self._hold_the_journal())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call of the store in the machine's loop."""
        return self._loop.run_until_complete(call)

    async def _open(self) -> Store:
        return await self.opener(self.clock)

    @initialize(per_key=st.sampled_from([1, 1, 2, None]))
    def begin_with_limits(self, per_key: int | None) -> None:
        """Most histories have them from the beginning, in some queues."""
        if per_key is not None:
            for tenant in TENANTS:
                self._limit(tenant, COMMANDS[0], QueueLimits(per_key=KeyLimit(in_flight=per_key)))

    # ------------------------------------------------------------------------------------------------ life of a task

    @rule(tenant=tenants, batch=st.lists(news, min_size=1, max_size=4))
    def enqueue(self, tenant: str, batch: list[dict[str, Any]]) -> None:
        self.step()
        tasks = [NewTask(id=self._mint(tenant, options), **options) for options in batch]
        self.ids += [(tenant, task) for task in tasks]
        self.same(self.run(self.store.enqueue(tenant, tasks)), self.model.enqueue(tenant, tasks))

    @rule(
        tenant=tenants,
        limit_key=st.sampled_from(["l", "l/2"]),
        priorities=st.lists(st.sampled_from([0, 0, 1, 9]), min_size=2, max_size=6),
    )
    def enqueue_of_one_key(self, tenant: str, limit_key: str, priorities: list[int]) -> None:
        """More of one limit_key than its limit lets go at once."""
        self.step()
        options = {"command": COMMANDS[0], "limit_key": limit_key}
        tasks = [NewTask(id=self._mint(tenant, options), priority=one, **options) for one in priorities]  # type: ignore[arg-type]
        self.ids += [(tenant, task) for task in tasks]
        self.same(self.run(self.store.enqueue(tenant, tasks)), self.model.enqueue(tenant, tasks))

    @precondition(lambda self: self.ids)
    @rule(picks=st.lists(Pick, min_size=1, max_size=3), tenant=tenants)
    def enqueue_again(self, picks: list[int], tenant: str) -> None:
        """Ids that were used before, here or by the other tenant, twice in one batch perhaps."""
        self.step()
        tasks = [task for whose, task in (self._pick(self.ids, n) for n in picks) if whose == tenant or not task.key]
        if tasks:
            self.same(self.run(self.store.enqueue(tenant, tasks)), self.model.enqueue(tenant, tasks))

    @rule(
        tenant=tenants,
        commands=st.permutations(COMMANDS),
        count=st.integers(1, len(COMMANDS)),
        limit=st.integers(1, 4),
        lease_s=st.none() | seconds,
        worker=st.sampled_from(["", "w1", "w2"]),
        with_id=st.booleans(),
    )
    def claim(
        self,
        tenant: str,
        commands: list[str],
        count: int,
        limit: int,
        lease_s: float | None,
        worker: str,
        with_id: bool,
    ) -> None:
        claim_id = self._number(b"c") if with_id else None
        if claim_id is not None:
            self.claim_ids.append(claim_id)
        self._claim(tenant, commands[:count], limit, lease_s, worker, claim_id)

    @rule(commands=st.permutations(COMMANDS), count=st.integers(1, len(COMMANDS)), limit=st.integers(1, 6))
    def claim_of_all_tenants(self, commands: list[str], count: int, limit: int) -> None:
        self.step()
        leases = self.run(self.store.claim(ALL_TENANTS, commands[:count], limit=limit))
        seen = self._seen()
        self.model.claimed_fairly(TENANTS, commands[:count], limit, leases, lambda task: seen[(task.tenant, task.id)])
        self.leases += leases

    @precondition(lambda self: self.claim_ids)
    @rule(pick=Pick, tenant=tenants, limit=st.integers(1, 4))
    def claim_again(self, pick: int, tenant: str, limit: int) -> None:
        self._claim(tenant, list(COMMANDS), limit, None, "w1", self._pick(self.claim_ids, pick))

    def _claim(
        self, tenant: str, commands: list[str], limit: int, lease_s: float | None, worker: str, claim_id: bytes | None
    ) -> None:
        self.step()
        known = {lease.token for lease in self.leases}
        leases = self.run(
            self.store.claim(tenant, commands, limit=limit, lease_s=lease_s, worker=worker, claim_id=claim_id)
        )
        seen = self._seen()
        self.model.claimed(
            tenant, commands, limit, lease_s, worker, claim_id, leases, lambda task: seen[(task.tenant, task.id)]
        )
        self.leases += [lease for lease in leases if lease.token not in known]

    @precondition(lambda self: self.leases)
    @rule(
        picks=st.lists(Pick, min_size=1, max_size=3),
        extend_s=st.none() | seconds,
        progress=st.none() | st.builds(Progress, st.just(0.5), st.none(), st.just("half")),
    )
    def heartbeat(self, picks: list[int], extend_s: float | None, progress: Progress | None) -> None:
        self.step()
        beats = [
            Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token, extend_s=extend_s, progress=progress)
            for lease in (self._recent(n) for n in picks)
        ]
        self.same(self.run(self.store.heartbeat(beats)), self.model.heartbeat(beats))

    @precondition(lambda self: self.leases)
    @rule(
        what=st.lists(
            st.tuples(Pick, st.sampled_from(Kind), st.sampled_from([0.0, 0.0, 3.0, 90_000.0]), st.booleans()),
            min_size=1,
            max_size=3,
        )
    )
    def settle(self, what: list[tuple[int, Kind, float, bool]]) -> None:
        """Leases of now and of long ago."""
        self.step()
        items = [self._settlement(self._recent(n), kind, delay_s, flag) for n, kind, delay_s, flag in what]
        self.settlements += items
        self.same(self.run(self.store.settle(items)), self.model.settle(items))

    @precondition(lambda self: self.settlements)
    @rule(picks=st.lists(Pick, min_size=1, max_size=2))
    def settle_again(self, picks: list[int]) -> None:
        self.step()
        items = [self._pick(self.settlements, -1 - n % 4) for n in picks]
        self.same(self.run(self.store.settle(items)), self.model.settle(items))

    @precondition(lambda self: self.leases)
    @rule(pick=Pick, kind=st.sampled_from(Kind))
    def settle_with_a_made_up_token(self, pick: int, kind: Kind) -> None:
        self.step()
        lease = self._recent(pick)
        forged = Settlement(tenant=lease.tenant, id=lease.id, token=self._number(b"f"), kind=kind)
        self.same(self.run(self.store.settle([forged])), self.model.settle([forged]))

    @precondition(lambda self: self.model.tasks)
    @rule(tenant=tenants, kind=st.sampled_from(Kind), delay_s=st.sampled_from([0.0, 3.0]), flag=st.booleans())
    def work_off(self, tenant: str, kind: Kind, delay_s: float, flag: bool) -> None:
        """What a worker does: claim, then settle."""
        before = len(self.leases)
        self._claim(tenant, list(COMMANDS), 2, None, "w1", None)
        self.step()
        items = [self._settlement(lease, kind, delay_s, flag) for lease in self.leases[before:]]
        self.settlements += items
        self.same(self.run(self.store.settle(items)), self.model.settle(items))

    @precondition(lambda self: self.leases)
    @rule(pick=Pick, times=st.integers(2, 22))
    def release_again_and_again(self, pick: int, times: int) -> None:
        """A task that everybody gives back."""
        lease = self._recent(pick)
        for _ in range(times):
            self.step()
            item = self._settlement(lease, Kind.RELEASE, 0.0, False)
            self.same(self.run(self.store.settle([item])), self.model.settle([item]))
            self._claim(lease.tenant, [lease.command], 1, None, "w2", None)
            lease = self.leases[-1]

    @precondition(lambda self: self.in_turn and self.ids)
    @rule(
        calls=st.lists(
            st.tuples(
                st.sampled_from(
                    ["enqueue", "claim", "claim", "settle", "settle", "heartbeat", "cancel", "replay", "purge", "load"]
                ),
                tenants,
                Pick,
                st.sampled_from(Kind),
                news,
            ),
            min_size=2,
            max_size=6,
        )
    )
    def at_once(self, calls: list[tuple[str, str, int, Kind, dict[str, Any]]]) -> None:
        """Several calls that share a transaction, where the store has groups: each must see what those before did.
        Without rows whose key is open: what each of the calls decided could not be told."""
        self.sweep(1_000)
        self._observe()
        if self.model.undecided():
            return
        self.committing.clear()
        made = [self._call(*call) for call in calls if self.leases or call[0] not in ("settle", "heartbeat")]

        async def together() -> list[Any]:
            return await asyncio.gather(*(call for call, _ in made))

        for outcome, (_, check) in zip(self.run(together()), made, strict=True):
            self.step()
            check(outcome)

    def _call(
        self, verb: str, tenant: str, pick: int, kind: Kind, options: dict[str, Any]
    ) -> tuple[Coroutine[Any, Any, Any], Callable[[Any], None]]:
        """A call, and what checks its answer against the model."""
        store, model = self.store, self.model
        if verb == "enqueue":
            tasks = [NewTask(id=self._mint(tenant, options), **options)]
            self.ids += [(tenant, task) for task in tasks]
            return store.enqueue(tenant, tasks), lambda answer: self.same(answer, model.enqueue(tenant, tasks))
        if verb == "load":
            named, name = self._plain_chunk(tenant), self._number(b"l").hex()
            return store.commit_load(tenant, name, 0, named), lambda answer: self._committed(
                answer, tenant, name, 0, named
            )
        if verb == "claim":
            return store.claim(tenant, COMMANDS, limit=2), lambda leases: self._check_claim(tenant, leases)
        if verb == "settle":
            items = [self._settlement(self._recent(pick), kind, 3.0 * (pick % 2), pick % 3 == 0)]
            self.settlements += items
            return store.settle(items), lambda answer: self.same(answer, model.settle(items))
        if verb == "heartbeat":
            lease = self._recent(pick)
            beats = [Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token, extend_s=10)]
            return store.heartbeat(beats), lambda answer: self.same(answer, model.heartbeat(beats))
        ids = self._some_ids([pick])
        if verb == "cancel":
            return store.cancel(tenant, ids), lambda answer: self.same(answer, model.cancel(tenant, ids))
        if verb == "replay":
            return store.replay(tenant, ids), lambda answer: self.same(set(answer.ids), model.replay(tenant, ids))
        return store.purge(tenant, ids), lambda answer: self.same(set(answer.ids), model.purge(tenant, ids))

    def _plain_chunk(self, tenant: str) -> list[bytes]:
        """A chunk that waits, has no keys, and is not named by another call of the group; if there is none, none."""
        for (whose, chunk_id), (rows, _) in self.model.staged.items():
            free = whose == tenant and (tenant, chunk_id) not in self.committing and self.model.waits(tenant, chunk_id)
            if free and all(row.key is None for row in rows):
                self.committing.add((tenant, chunk_id))
                return [chunk_id]
        return []

    def _check_claim(self, tenant: str, leases: list[Lease]) -> None:
        """Checks a claim of a group: nothing was due before it, so time moved nothing."""
        self.model.claimed(tenant, COMMANDS, 2, None, "", None, leases, lambda task: task.shown(self.now_ms))
        self.leases += leases

    # ---------------------------------------------------------------------------------------------------------- loads

    @rule(tenant=tenants, chunk=chunks)
    def stage(self, tenant: str, chunk: list[tuple[dict[str, Any], int]]) -> None:
        self._stage(tenant, self._number(b"b", CHUNK_BYTES), chunk)

    @precondition(lambda self: self.chunks)
    @rule(pick=Pick, chunk=chunks)
    def stage_again(self, pick: int, chunk: list[tuple[dict[str, Any], int]]) -> None:
        """Chunks that wait, and such that were committed or dropped."""
        self._stage(*self._pick(self.chunks, pick), chunk)

    @precondition(lambda self: self.chunks)
    @rule(
        tenant=tenants,
        picks=st.lists(Pick, max_size=3),
        name=st.sampled_from(["nightly", "stream"]),
        later=st.sampled_from([-1, 0, 1, 1, 1, 5]),
    )
    def commit_load(self, tenant: str, picks: list[int], name: str, later: int) -> None:
        """Some of what is staged, and now and then a chunk that is not."""
        known = [chunk for whose, chunk in self.chunks if whose == tenant]
        waiting = [chunk for chunk in known if self.model.waits(tenant, chunk)]
        some = [self._pick(waiting if waiting and n % 8 else [c for _, c in self.chunks], n) for n in picks]
        self._commit(tenant, name, max(0, self.model.loads.get((tenant, name), 0) + later), list(dict.fromkeys(some)))

    @rule(tenant=tenants, some=st.lists(chunks, min_size=1, max_size=2))
    def load(self, tenant: str, some: list[list[tuple[dict[str, Any], int]]]) -> None:
        """What most callers do: stage, then commit."""
        named = [self._number(b"b", CHUNK_BYTES) for _ in some]
        for chunk_id, chunk in zip(named, some, strict=True):
            self._stage(tenant, chunk_id, chunk)
        self._commit(tenant, "load", self.model.step, named)

    @precondition(lambda self: self.chunks)
    @rule(tenant=tenants, picks=st.lists(Pick, min_size=1, max_size=3))
    def drop(self, tenant: str, picks: list[int]) -> None:
        self.step()
        named = [self._pick(self.chunks, n)[1] for n in picks]
        # Of chunks whose day is over, swept or not, the rules do not say.
        named = [c for c in named if (tenant, c) not in self.model.staged or self.model.waits(tenant, c)]
        self.same(self.run(self.store.drop(tenant, named)), self.model.drop(tenant, named))

    def _stage(self, tenant: str, chunk_id: bytes, chunk: list[tuple[dict[str, Any], int]]) -> None:
        self.step()
        rows = [NewTask(**_row(options)) for options, count in chunk for _ in range(count)]
        self.chunks.append((tenant, chunk_id))
        self.unseen = [*self.unseen[-20:], *((tenant, row) for row in row_ids(tenant, chunk_id, rows))]
        self.same(self.run(self.store.stage(tenant, chunk_id, rows)), self.model.stage(tenant, chunk_id, rows))

    def _commit(self, tenant: str, name: str, seq: int, chunk_ids: list[bytes]) -> None:
        self.step()
        answer: Committed | None
        try:
            answer = self.run(self.store.commit_load(tenant, name, seq, chunk_ids))
        except UnknownChunk:
            answer = None
        self._committed(answer, tenant, name, seq, chunk_ids)

    def _committed(self, answer: Committed | None, tenant: str, name: str, seq: int, chunk_ids: list[bytes]) -> None:
        before = set(self.model.tasks)
        self.same(answer, self.model.commit_load(tenant, name, seq, chunk_ids))
        self.ids += [(who[0], task.new) for who, task in self.model.tasks.items() if who not in before]

    # ------------------------------------------------------------------------------------------------- what people do

    @precondition(lambda self: self.ids)
    @rule(tenant=tenants, picks=st.lists(Pick, min_size=1, max_size=3), by_key=st.booleans())
    def cancel(self, tenant: str, picks: list[int], by_key: bool) -> None:
        self.step()
        refs: list[bytes | ByKey] = [
            ByKey(task.command, task.key) if by_key and task.key else task.id
            for _, task in (self._pick(self.ids, n) for n in picks)
        ]
        answer = self.run(self.store.cancel(tenant, refs))
        seen = self._seen()
        self.same(answer, self.model.cancel(tenant, refs, lambda task: seen[(task.tenant, task.id)]))

    @precondition(lambda self: self.ids)
    @rule(tenant=tenants, picks=st.lists(Pick, max_size=6), command=st.none() | st.sampled_from(COMMANDS))
    def replay(self, tenant: str, picks: list[int], command: str | None) -> None:
        self.step()
        which = self._some_ids(picks) or Filter(command=command)
        acted = self.run(self.store.replay(tenant, which))
        self.same(len(acted.ids), len(set(acted.ids)))
        self.same(set(acted.ids), self.model.replay(tenant, which))

    @precondition(lambda self: self.ids)
    @rule(tenant=tenants, picks=st.lists(Pick, max_size=3), status=st.sampled_from(Status))
    def purge(self, tenant: str, picks: list[int], status: Status) -> None:
        self.step()
        which = self._some_ids(picks) or Filter(status=status)
        acted = self.run(self.store.purge(tenant, which))
        self.same(len(acted.ids), len(set(acted.ids)))
        self.same(set(acted.ids), self.model.purge(tenant, which))

    @precondition(lambda self: self.ids)
    @rule(
        tenant=tenants,
        picks=st.lists(Pick, min_size=1, max_size=3),
        ttl_s=st.sampled_from([0.0, 5.0, 100.0, 100_000.0]),
    )
    def retain(self, tenant: str, picks: list[int], ttl_s: float) -> None:
        self.step()
        ids = [
            task_id
            for task_id in self._some_ids(picks)
            # A result that was pruned, under a clock that was then set back: the rules do not say.
            if not ((task := self.model.task(tenant, task_id)) and task.faded and task.result_until_ms > self.now_ms)
        ]
        if ids:
            self.same(self.run(self.store.retain(tenant, ids, ttl_s)), self.model.retain(tenant, ids, ttl_s))

    @rule(tenant=tenants, command=st.sampled_from(COMMANDS), paused=st.sampled_from([False, False, True]))
    def pause_or_resume(self, tenant: str, command: str, paused: bool) -> None:
        self.step()
        config = QueueConfig(paused=paused, limits=self.model.limits.get((tenant, command)))
        self.same(self.run(self.store.configure(tenant, command, config)), config)
        if paused:
            self.model.paused.add((tenant, command))
        else:
            self.model.paused.discard((tenant, command))

    @rule(tenant=tenants, command=st.sampled_from(COMMANDS), cap=caps, per_key=caps)
    def limit(self, tenant: str, command: str, cap: int | None, per_key: int | None) -> None:
        """A queue's limits are set, changed or taken away."""
        limits = QueueLimits(in_flight=cap, per_key=None if per_key is None else KeyLimit(in_flight=per_key))
        self._limit(tenant, command, None if limits == QueueLimits() else limits)

    @rule(tenant=tenants, cap=caps)
    def limit_all(self, tenant: str, cap: int | None) -> None:
        """A cap on all the queues of a tenant."""
        self._limit(tenant, ALL_COMMANDS, None if cap is None else QueueLimits(in_flight=cap))

    def _limit(self, tenant: str, command: str, limits: QueueLimits | None) -> None:
        self.step()
        config = QueueConfig(paused=(tenant, command) in self.model.paused, limits=limits)
        self.same(self.run(self.store.configure(tenant, command, config)), config)
        if limits is None:
            self.model.limits.pop((tenant, command), None)
        else:
            self.model.limits[(tenant, command)] = limits

    # ------------------------------------------------------------------------------------------------------- time

    @rule(seconds=st.sampled_from([0.001, 0.5, 1.0, 5.0, 29.999, 61.0, 3_600.0, 90_000.0, 20 * 86_400.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([0.001, 0.5, 3.0]))
    def the_clock_is_set_back(self, seconds: float) -> None:
        self.clock.advance(-seconds)

    @rule(budget=st.sampled_from([1, 2, 1_000]))
    def sweep(self, budget: int) -> None:
        """Bounded sweeps, until one finds nothing."""
        self.step()
        promoted = expired = cancelled = 0
        for _ in range(1_000):
            swept = self.run(self.store.sweep(budget))
            promoted, expired, cancelled = (
                promoted + swept.promoted,
                expired + swept.expired,
                cancelled + swept.cancelled,
            )
            if swept == Swept():
                break
        else:
            raise AssertionError("the sweep never ends")
        # What is due and past its start deadline may be promoted first, or not.
        either = sum(task.due(self.now_ms) and task.late(self.now_ms) for task in self.model.tasks.values())
        expected = self.model.sweep()
        lost = self._observe()
        self.same(expired, expected.expired)
        assert expected.cancelled <= cancelled <= expected.cancelled + lost, (expected, cancelled, lost)
        assert expected.promoted - either - lost <= promoted <= expected.promoted, (expected, promoted, either, lost)

    @precondition(lambda self: self.reopens)
    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.store = self.run(self._open())

    # ------------------------------------------------------------------------------------------------------ comparing

    @invariant()
    def every_task_is_as_the_model_says(self) -> None:
        self._observe()
        seen = self._seen()
        for who, task in self.model.tasks.items():
            shown = task.shown(self.now_ms)
            if seen[who] != shown:
                self.same(*(_comparable(side, task, self.now_ms) for side in (seen[who], shown)))
        for tenant, new in self.ids:
            if (tenant, new.id) not in self.model.tasks:
                self.same(seen[(tenant, new.id)], None)
        for who in self.unseen:
            if who not in self.model.tasks:
                self.same(seen[who], None)

    @invariant()
    def the_counts_are_exact(self) -> None:
        self._observe()
        for tenant in TENANTS:
            stats = self.run(self.store.stats(tenant, COMMANDS))
            for queue in stats.queues:
                self.model.check_stats(tenant, queue)
            for name in ("ready", "delayed", "leased", "dead", "bytes"):
                self.same(getattr(stats.total, name), sum(getattr(queue, name) for queue in stats.queues))

    def teardown(self) -> None:
        try:
            # After a step that failed the model is behind: what it would say then only hides the cause.
            if sys.exc_info()[0] is None:
                self.run(self._check_listings())
                self.run(self._check_journal())
                self.run(self.check_at_the_end())
        finally:
            self.run(self.store.close())
            self._loop.close()

    async def check_at_the_end(self) -> None:
        """For checks that only one store has; nothing here."""

    async def _hold_the_journal(self) -> None:
        """A named reader that reads nothing until the end: nothing may be trimmed."""
        for bounds in await self.store.journal_bounds():
            await self.store.advance("model", bounds.shard, bounds.oldest)

    async def _check_listings(self) -> None:
        """Listings of every kind, in pages, have each task once; so have the two halves of a range of ids."""
        for tenant in TENANTS:
            tasks = [task for task in self.model.tasks.values() if task.tenant == tenant and task.visible(self.now_ms)]
            kinds = {(None, None)} | {(None, task.place) for task in tasks}
            for command, place in kinds | {(task.new.command, task.place) for task in tasks}:
                which = Filter(command=command, place=place)
                known = sorted(t.id for t in tasks if command in (None, t.new.command) and place in (None, t.place))
                self.same(await self._listed(tenant, which), known)
                for middle in known[len(known) // 2 :][:1]:
                    self.same(await self._listed(tenant, replace(which, id_until=middle)), known[: len(known) // 2])
                    self.same(await self._listed(tenant, replace(which, id_from=middle)), known[len(known) // 2 :])

    async def _listed(self, tenant: str, which: Filter) -> list[bytes]:
        listed: list[bytes] = []
        cursor: str | None = None
        while True:
            page = await self.store.list(tenant, which, cursor=cursor, limit=3)
            listed += [task.id for task in page.tasks]
            cursor = page.cursor
            if cursor is None:
                return sorted(listed)

    async def _check_journal(self) -> None:
        """What the journal tells leads to the statuses that the tasks have, and to where they stand."""
        events: list[Event] = []
        for bounds in await self.store.journal_bounds():
            after: bytes | None = None
            while True:
                page = await self.store.events("*", shard=bounds.shard, after=after)
                events += page.events
                after = page.cursor
                if not page.more:
                    break
        told = replayed(events, frozenset(self.model.pruned))
        for who, task in self.model.tasks.items():
            self.same(told[who], (task.status, task.place))
            assert task.place in PLACES[task.status]

    # -------------------------------------------------------------------------------------------------------- helpers

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def step(self) -> None:
        self._observe()
        self._observed = False
        self.model.begin()

    def _observe(self) -> int:
        """Tells the model which keys of rows the store has decided in the last operation; returns how many rows lost
        theirs."""
        rows = [] if self._observed else self.model.undecided()
        self._observed = True
        if not rows:
            return 0
        holders: dict[tuple[str, str, str], bytes | None] = {}
        for tenant, command, key in dict.fromkeys(row.name for row in rows):
            [task] = self.run(self.store.get(tenant, [ByKey(command, key)]))
            holders[(tenant, command, key)] = None if task is None else task.id
        seen = self._seen()
        return self.model.decide(lambda task: seen[(task.tenant, task.id)], holders.__getitem__)

    def same(self, store_says: object, model_says: object) -> None:
        """The one comparison."""
        assert store_says == model_says, f"\nstore: {store_says}\nmodel: {model_says}"

    def _seen(self) -> dict[tuple[str, bytes], Task | None]:
        """Every task that anybody ever named, as the store shows it."""
        names = dict.fromkeys((tenant, task.id) for tenant, task in self.ids) | dict.fromkeys(self.model.tasks)
        names |= dict.fromkeys(self.unseen)
        seen: dict[tuple[str, bytes], Task | None] = {}
        for tenant in TENANTS:
            ids = [task_id for whose, task_id in names if whose == tenant]
            tasks = self.run(self.store.get(tenant, ids))
            seen |= {(tenant, task_id): task for task_id, task in zip(ids, tasks, strict=True)}
        return seen

    def _settlement(self, lease: Lease, kind: Kind, delay_s: float, flag: bool) -> Settlement:
        bare = Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=kind)
        if kind is Kind.COMPLETE:
            return replace(bare, result=b"result" if flag else None, result_ttl_s=delay_s or None)
        error = ErrorInfo("Boom", f"attempt {lease.attempt}") if flag else None
        if kind is Kind.RETRY:
            return replace(bare, delay_s=delay_s, error=error)
        if kind is Kind.FAIL:
            return replace(bare, error=error, reason="BAD_INPUT" if delay_s else None)
        return bare

    def _mint(self, tenant: str, options: dict[str, Any]) -> bytes:
        """Ids that are the same in every run of an example, in the slot of the key or of the limit_key."""
        minted = self._number(b"i")
        where = options.get("key", options.get("limit_key"))
        return minted if where is None else minted[:-1] + key_digest(tenant, options["command"], where)[-1:]

    def _number(self, mark: bytes, size: int = ID_BYTES - 1) -> bytes:
        """A name that nobody has, told by its first `size` bytes."""
        self._minted += 1
        name = mark + self._minted.to_bytes(size - 1, "big")
        return name.ljust(ID_BYTES - 1, b"\0") + bytes((self._minted % 256,))

    def _some_ids(self, picks: list[int]) -> list[bytes]:
        """Ids that were used before, now and then one of them twice."""
        ids = [self._pick(self.ids, n)[1].id for n in picks]
        return ids + ids[:1] if sum(picks) % 4 == 1 else ids

    def _recent(self, n: int) -> Lease:
        """Mostly a lease of the last few, now and then an older one."""
        return self.leases[-1 - n % min(6, len(self.leases))] if n % 5 else self._pick(self.leases, n)

    def _pick(self, things: list[T], n: int) -> T:
        return things[n % len(things)]


def _row(options: dict[str, Any]) -> dict[str, Any]:
    """A row has a key or a limit_key. When a row that is over its limit leaves its block, and takes its key, is up to
    the store."""
    return {**options, "limit_key": None} if "key" in options else options


def _comparable(task: Task | None, known: Known, now_ms: int) -> dict[str, object] | None:
    """A task without what the rules leave open."""
    if task is None:
        return None
    fields = {name: getattr(task, name) for name in task.__struct_fields__}
    if known.status.ended:
        # When an ended task was last visible interests nobody; one that expired may have been promoted first.
        del fields["due_ms"]
    if known.unkept:
        # Nothing is left that the codec could say how to read.
        del fields["codec"]
    if known.faded and known.result_until_ms > now_ms:
        # A result that was pruned, under a clock that was then set back.
        del fields["result"]
    if known.status.ended and known.result_until_ms <= now_ms:
        # The error goes with the result, at once or with the sweep.
        del fields["error"]
    return fields
