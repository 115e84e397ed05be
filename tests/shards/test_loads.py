from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dibs.clock import ManualClock
from dibs.errors import StoreUnavailable, UnknownChunk
from dibs.ids import new_id
from dibs.stores import open_local
from dibs.stores.local import LocalStore
from dibs.stores.protocol import Store
from dibs.stores.sharded.loads import ABANDONED_S, HOLD_S
from dibs.stores.sharded.store import ShardedStore
from dibs.task import CHUNK_KEEP_S, Committed, Decision, NewTask, Staged
from dibs.testing.contract.steps import COMMAND, TENANT, in_slot, sweep_all
from tests.lmdb.processes import Children
from tests.shards.faults import RELAXED, Crash, Faults, in_shard, open_faulty

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("at_once")]

N = 3


def rows(chunk: int, count: int = 12) -> list[NewTask]:
    """Rows of a chunk, two thirds of them with keys, of all shards."""
    return [
        NewTask(command=COMMAND, payload=b"%d/%d" % (chunk, n), key=f"{chunk}/{n}" if n % 3 else None)
        for n in range(count)
    ]


def keyed(shard: int) -> list[NewTask]:
    """Rows whose keys are all in one shard."""
    return [NewTask(command=COMMAND, payload=b"%d" % n, key=in_shard(shard, N, what=f"x{n}-")) for n in range(5)]


async def take_all(store: Store) -> Counter[bytes]:
    """Claims everything, and returns how often each payload came."""
    found: Counter[bytes] = Counter()
    while leases := await store.claim(TENANT, [COMMAND], limit=7):
        found.update(lease.payload for lease in leases)
    return found


def once(*chunks: int) -> Counter[bytes]:
    """Every row of the chunks, once."""
    return Counter(row.payload for chunk in chunks for row in rows(chunk))


@pytest.fixture
def faults() -> Faults:
    """None yet."""
    return Faults()


@pytest.fixture
async def store(clock: ManualClock, faults: Faults) -> AsyncIterator[ShardedStore]:
    """Three shards that fail when they are told to."""
    # Held open apart: a store in memory is gone when nobody has it open.
    async with await open_local(f"shards:memory:loads?n={N}", clock=clock):
        opened = await open_faulty(f"memory:loads?n={N}", faults, clock)
        yield opened
        faults.down, faults.crash_at = set(), None
        await opened.close()


async def test_rows_are_where_their_keys_are(store: ShardedStore) -> None:
    """A chunk's rows spread over the shards; nothing is seen before the commit, everything once after it."""
    chunks = [in_slot(n) for n in range(4)]
    for n, chunk_id in enumerate(chunks):
        assert await store.stage(TENANT, chunk_id, rows(n)) == Staged(12)
    assert (await store.stats(TENANT)).total.ready == 0
    assert await store.commit_load(TENANT, "load", 1, chunks) == Committed(48)
    assert (await store.stats(TENANT)).total.ready == 48
    assert await store.commit_load(TENANT, "load", 1, chunks) == Committed(0, already=True)
    assert await store.commit_load(TENANT, "load", 0, []) == Committed(0, already=True)
    assert await take_all(store) == once(0, 1, 2, 3)
    assert (await store.doctor()).clean


@pytest.mark.parametrize("own", range(N))
async def test_a_chunk_without_rows_of_its_own(store: ShardedStore, own: int) -> None:
    """All rows of a chunk may live in other shards: its own shard knows it all the same."""
    chunk_id = in_slot(own)
    assert await store.stage(TENANT, chunk_id, keyed((own + 1) % N)) == Staged(5)
    assert await store.commit_load(TENANT, "load", 1, [chunk_id]) == Committed(5)
    assert await take_all(store) == Counter(row.payload for row in keyed(0))
    assert (await store.doctor()).clean


async def test_a_chunk_that_is_not_staged_refuses_all(store: ShardedStore) -> None:
    """One unknown chunk, and nothing of the load is committed in any shard."""
    chunks = [in_slot(0), in_slot(1)]
    await store.stage(TENANT, chunks[0], rows(0))
    with pytest.raises(UnknownChunk):
        await store.commit_load(TENANT, "load", 1, chunks)
    assert (await store.stats(TENANT)).total.ready == 0
    await store.stage(TENANT, chunks[1], rows(1))
    assert await store.commit_load(TENANT, "load", 1, chunks) == Committed(24)


async def test_chunks_come_in_the_order_named_in_every_shard(store: ShardedStore) -> None:
    """Also where one of them is at home, and another is not."""
    chunks = [in_slot(n) for n in range(6)]
    for n, chunk_id in enumerate(chunks):
        await store.stage(TENANT, chunk_id, rows(n))
    order = [4, 1, 0, 5, 3, 2]
    assert await store.commit_load(TENANT, "load", 1, [chunks[n] for n in order]) == Committed(72)
    for shard in store._shards.all:
        assert shard.store is not None
        came = [int(lease.payload[:1]) for lease in await shard.store.claim(TENANT, [COMMAND], limit=100)]
        assert list(dict.fromkeys(came)) == order
        assert came == sorted(came, key=order.index)


async def test_staged_again_it_is_replaced_everywhere(store: ShardedStore) -> None:
    """What a chunk held before is gone, in whatever shards it was."""
    chunk_id = in_slot(0)
    for shard in (1, 2, 0, 1):
        await store.stage(TENANT, chunk_id, keyed(shard))
    assert await store.commit_load(TENANT, "load", 1, [chunk_id]) == Committed(5)
    assert sum((await take_all(store)).values()) == 5


async def test_dropped_it_is_gone_everywhere(store: ShardedStore) -> None:
    """A dropped chunk is in no shard any more; a committed one stays."""
    kept, dropped = in_slot(0), in_slot(1)
    await store.stage(TENANT, kept, rows(0))
    await store.stage(TENANT, dropped, rows(1))
    await store.commit_load(TENANT, "load", 1, [kept])
    assert await store.drop(TENANT, [kept, dropped, new_id()]) == 1
    with pytest.raises(UnknownChunk):
        await store.commit_load(TENANT, "load", 2, [dropped])
    for shard in store._shards.all:
        assert shard.store is not None
        assert await shard.store._staged(TENANT, [dropped]) == [None]
    assert await take_all(store) == once(0)


async def test_no_half_of_a_chunk_expires(store: ShardedStore, clock: ManualClock) -> None:
    """Up to its last moment a chunk is there in all its parts; after it, it is in none that a commit would find."""
    chunks = [in_slot(0), in_slot(1)]
    for n, chunk_id in enumerate(chunks):
        await store.stage(TENANT, chunk_id, rows(n))
    clock.advance(CHUNK_KEEP_S - 1)
    await sweep_all(store)
    assert await store.commit_load(TENANT, "load", 1, chunks[:1]) == Committed(12)
    clock.advance(1)
    await sweep_all(store)
    with pytest.raises(UnknownChunk):
        await store.commit_load(TENANT, "load", 2, chunks[1:])
    clock.advance(CHUNK_KEEP_S)
    await sweep_all(store)
    assert await take_all(store) == once(0)
    assert (await store.doctor()).clean


async def test_who_stages_and_commits_at_once(store: ShardedStore) -> None:
    """Ten stagers at once, and the same commit from ten callers: every row once."""
    chunks = [new_id() for _ in range(10)]
    await asyncio.gather(*(store.stage(TENANT, chunk_id, rows(n)) for n, chunk_id in enumerate(chunks)))
    answers = await asyncio.gather(*(store.commit_load(TENANT, "load", 1, chunks) for _ in range(10)))
    assert sorted(answer.rows for answer in answers) == [0] * 9 + [120]
    assert await take_all(store) == once(*range(10))


@pytest.mark.parametrize("where", ["memory", "lmdb"])
async def test_a_commit_and_a_drop_at_once(tmp_path: Path, where: str) -> None:
    """One store commits the chunks that another drops, many times: what the commit says is what is there, all rows or
    none, and a repeat says the same."""
    url = f"shards:memory:{tmp_path}?n=4" if where == "memory" else f"shards:{tmp_path / 'set'}?n=4"
    async with await open_local(url, settings=RELAXED) as mine, await open_local(url, settings=RELAXED) as yours:
        for n in range(40):
            chunks = [new_id() for _ in range(5)]
            for chunk, chunk_id in enumerate(chunks):
                some = [replace(row, command=f"work-{n}") for row in rows(chunk)]
                await mine.stage(TENANT, chunk_id, some)

            async def drop(dropped: list[bytes], steps: int) -> None:
                for _ in range(steps):
                    await asyncio.sleep(0)
                await yours.drop(TENANT, dropped)

            commit = mine.commit_load(TENANT, f"load-{n}", 0, chunks)
            # Sometimes the drop goes first, sometimes it meets the commit on its way.
            calls = [drop(chunks, 0), commit] if n % 4 == 0 else [commit, drop(chunks, n)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            told = next(answer for answer in answers if answer is not None)
            [queue] = (await mine.stats(TENANT, [f"work-{n}"])).queues
            if isinstance(told, UnknownChunk):
                assert queue.ready == 0
                with pytest.raises(UnknownChunk):
                    await yours.commit_load(TENANT, f"load-{n}", 0, chunks)
            else:
                assert (told, queue.ready) == (Committed(60), 60)
                assert await yours.commit_load(TENANT, f"load-{n}", 0, chunks) == Committed(0, already=True)
        assert (await yours.doctor()).clean


# ------------------------------------------------------------------------------------------------------------ crashes


async def commit_and_die(store: ShardedStore, faults: Faults, chunks: list[bytes], steps: int) -> bool:
    """Stages and commits two chunks, and dies after so many writes. False: it did not come to that."""
    faults.crash_at = steps
    try:
        for n, chunk_id in enumerate(chunks):
            await store.stage(TENANT, chunk_id, rows(n))
        await store.commit_load(TENANT, "load", 1, chunks)
    except Crash:
        return True
    finally:
        faults.crash_at = None
    return False


STAGED = 6
"""Writes of two chunks in three parts each."""
RESERVED = STAGED + 5
"""Two shards hold the chunks' own parts, then three the others."""
STEPS = RESERVED + 6
"""More than it takes: the decision, a commit in each shard, the end."""


@pytest.mark.parametrize("steps", range(STEPS))
@pytest.mark.parametrize("how", ["repeat", "sweep", "later", "drop"])
async def test_a_crash_between_any_two_steps(
    store: ShardedStore, faults: Faults, clock: ManualClock, steps: int, how: str
) -> None:
    """Wherever it died, no row is lost and none comes twice: a repeat, the sweep or a later commit of the same name
    finishes what was decided, and what was not decided is not seen."""
    chunks = [in_slot(0), in_slot(1)]
    died = await commit_and_die(store, faults, chunks, steps)
    assert died or steps == STEPS - 1
    decided = ("decide", store._shards.of_name(TENANT, "load")) in faults.told
    if how == "sweep":
        clock.advance(ABANDONED_S + 1)
        await sweep_all(store)
        assert (await store.stats(TENANT)).total.ready == (24 if decided else 0)
    elif how == "drop":
        await store.drop(TENANT, chunks)
    elif how == "later":
        extra = in_slot(2)
        await store.stage(TENANT, extra, keyed(1))
        assert (await store.commit_load(TENANT, "load", 2, [extra])).rows == 5
        ready = (await store.stats(TENANT)).total.ready
        assert ready == (29 if decided else 5)
        return
    if not decided:
        for n, chunk_id in enumerate(chunks):
            await store.stage(TENANT, chunk_id, rows(n))
    assert await store.commit_load(TENANT, "load", 1, chunks) == Committed(0 if decided else 24, already=decided)
    assert await take_all(store) == once(0, 1)
    assert (await store.doctor()).clean


class Meddler:
    """What others do to the chunks of a commit, while it is made or after it has died on the way."""

    def __init__(self, store: ShardedStore, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.chunks = [in_slot(0), in_slot(1)]
        self.answers: list[Committed] = []

    def rows(self, chunk: int, what: str) -> list[NewTask]:
        """Rows of a chunk in one version or another. The second chunk has none in its own shard."""
        shards = {"a": (0, 1, 2), "b": (1, 2)}[what] if chunk == 0 else {"a": (2,), "b": (0,)}[what]
        keys = [in_shard(shard, N, what=f"{what}{chunk}-{n}-") for n in range(2) for shard in shards]
        plain = [None, None] if chunk == 0 else []
        return [NewTask(command=COMMAND, payload=f"{chunk}{what}{key}".encode(), key=key) for key in (*keys, *plain)]

    async def commit(self, name: str) -> None:
        """Commits both chunks under a name; a chunk that is not there, or a shard, is no commit."""
        with contextlib.suppress(UnknownChunk, StoreUnavailable):
            self.answers.append(await self.store.commit_load(TENANT, name, 0, self.chunks))

    async def stage(self, what: str) -> list[Staged]:
        """Stages both chunks."""
        return [await self.store.stage(TENANT, chunk_id, self.rows(n, what)) for n, chunk_id in enumerate(self.chunks)]

    async def act(self, how: str) -> None:
        """Does something to the chunks."""
        if how.startswith("stage"):
            with contextlib.suppress(StoreUnavailable):
                await self.stage(how[-1])
        elif how == "drop":
            with contextlib.suppress(StoreUnavailable):
                await self.store.drop(TENANT, self.chunks)
        elif how == "sweep":
            self.clock.advance(ABANDONED_S + 1)
            await sweep_all(self.store)
        else:
            self.clock.advance(HOLD_S + 1 if how == "commit later" else 0)
            await self.commit("other")

    async def check(self) -> None:
        """Each chunk is there whole, in one version, or not at all; what is not there can be loaded, once."""
        self.clock.advance(ABANDONED_S + 1)
        await sweep_all(self.store)
        ready = (await self.store.stats(TENANT)).total.ready
        staged = await self.stage("a")
        assert [one.already for one in staged] == [ready > 0] * 2
        if not ready:
            assert await self.store.commit_load(TENANT, "end", 0, self.chunks) == Committed(sum(s.rows for s in staged))
        else:
            with pytest.raises(UnknownChunk):
                await self.store.commit_load(TENANT, "end", 0, self.chunks)
        found = await take_all(self.store)
        for n in range(2):
            mine = Counter({payload: count for payload, count in found.items() if payload.startswith(b"%d" % n)})
            assert mine in [Counter(row.payload for row in self.rows(n, what)) for what in "ab"]
        assert (await self.store.doctor()).clean


MEDDLING = ["stage a", "stage b", "drop", "commit", "commit later", "sweep"]
MEDDLED = 12
"""More than the writes of one of these commits."""


@pytest.mark.parametrize("steps", range(MEDDLED))
@pytest.mark.parametrize("how", MEDDLING)
async def test_whatever_comes_between_two_steps(
    store: ShardedStore, faults: Faults, clock: ManualClock, steps: int, how: str
) -> None:
    """Staged again, dropped, named by another load or swept at any moment of its commit, a chunk is committed once and
    whole, and who is told that it committed has."""
    others = Meddler(store, clock)
    await others.stage("a")
    faults.between = steps, lambda: others.act(how)
    await others.commit("load")
    if faults.between is not None:
        assert steps > 8, "it took fewer writes than it did"
    told = sum(answer.rows for answer in others.answers)
    assert (await store.stats(TENANT)).total.ready == told
    assert told or how == "drop"
    await others.check()


@pytest.mark.parametrize("steps", range(MEDDLED))
@pytest.mark.parametrize("how", MEDDLING)
@pytest.mark.parametrize("down", [None, 0, 1, 2])
async def test_whatever_comes_after_a_death(
    store: ShardedStore, faults: Faults, clock: ManualClock, steps: int, how: str, down: int | None
) -> None:
    """The same where the commit has died before, also with a shard that is down for a while and comes back."""
    others = Meddler(store, clock)
    await others.stage("a")
    faults.crash_at = steps
    with contextlib.suppress(Crash):
        await others.commit("load")
    faults.crash_at = None
    decided = "decide" in dict(faults.told)
    if down is not None:
        faults.down = {down}
        await others.act(how)
        clock.advance(2 * CHUNK_KEEP_S if decided else 0)
        await sweep_all(store)
        faults.down = set()
    await others.act(how)
    await others.commit("load")
    ready = (await store.stats(TENANT)).total.ready
    assert ready or how == "drop"
    if decided:
        assert ready == sum(len(others.rows(n, "a")) for n in range(2))
    await others.check()


@pytest.mark.parametrize("down", range(N))
async def test_a_shard_that_is_down_during_a_commit(
    store: ShardedStore, faults: Faults, clock: ManualClock, down: int
) -> None:
    """Before the decision the commit is refused; after it, the shard's part is done when it is back, however late."""
    chunks = [in_slot(0), in_slot(1)]
    for n, chunk_id in enumerate(chunks):
        await store.stage(TENANT, chunk_id, rows(n))
    faults.down = {down}
    with pytest.raises(StoreUnavailable, match=f"shard {down}"):
        await store.commit_load(TENANT, "load", 1, chunks)
    faults.down = set()
    assert (await store.stats(TENANT)).total.ready == 0
    decide = store._shards.all[store._shards.of_name(TENANT, "load")]
    assert decide.store is not None
    before = type(decide.store)._decide

    async def decide_then_fail(self: LocalStore, *args: Any) -> Decision | None:
        answer = await before(self, *args)
        faults.down = {down}
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(decide.store), "_decide", decide_then_fail)
        with pytest.raises(StoreUnavailable, match=f"shard {down}"):
            await store.commit_load(TENANT, "load", 1, chunks)
    clock.advance(3 * CHUNK_KEEP_S)
    await store.sweep()
    faults.down = set()
    await sweep_all(store)
    assert await take_all(store) == once(0, 1)
    assert await store.commit_load(TENANT, "load", 1, chunks) == Committed(0, already=True)


async def test_a_commit_that_was_done_late_is_of_its_decision(
    store: ShardedStore, faults: Faults, clock: ManualClock
) -> None:
    """Delays and deadlines count from the decision in every shard, however late a shard does its part."""
    chunk_id = in_slot(0)
    plain, delayed, expiring = (
        [NewTask(command=command, key=in_shard(shard, N, command=command), **said) for shard in range(N)]  # type: ignore[arg-type]
        for command, said in ((COMMAND, {}), ("delayed", {"delay_s": 60}), ("expiring", {"expires_s": 60}))
    )
    await store.stage(TENANT, chunk_id, [*plain, *delayed, *expiring])
    decided_ms = clock.now_ms()
    faults.crash_at = 3 + 1 + 1  # three shards hold it, the decision, and one of them commits
    with pytest.raises(Crash):
        await store.commit_load(TENANT, "load", 1, [chunk_id])
    faults.crash_at = None
    clock.advance(50)
    await sweep_all(store)
    tasks = (await store.list(TENANT)).tasks
    assert len(tasks) == 3 * N
    assert {task.enqueued_ms for task in tasks} == {decided_ms}
    clock.advance(9)
    assert await store.claim(TENANT, ["delayed"], limit=10) == []
    clock.advance(1)
    assert len(await store.claim(TENANT, ["delayed"], limit=10)) == N
    assert await store.claim(TENANT, ["expiring"], limit=10) == []
    await sweep_all(store)
    assert (await store.doctor()).clean


async def test_a_name_that_was_forgotten_begins_anew(store: ShardedStore, faults: Faults, clock: ManualClock) -> None:
    """How far a load has come is known in one place: a shard that did its part late does not remember it longer."""
    chunks = [in_slot(0), in_slot(1)]
    for n, chunk_id in enumerate(chunks):
        await store.stage(TENANT, chunk_id, rows(n))
    await store.commit_load(TENANT, "load", 7, chunks, forget_s=10)
    clock.advance(11)
    extra = in_slot(2)
    await store.stage(TENANT, extra, rows(2))
    assert await store.commit_load(TENANT, "load", 0, [extra], forget_s=10) == Committed(12)
    assert await store.commit_load(TENANT, "load", 0, [extra], forget_s=10) == Committed(0, already=True)
    await sweep_all(store)
    assert await take_all(store) == once(0, 1, 2)


KILLED = """
from tests.shards.faults import Faults, open_faulty
from tests.shards.test_loads import TENANT, rows
async def main():
    faults = Faults()
    faults.kill, faults.crash_at = True, int(ARGS[0])
    store = await open_faulty(URL, faults)
    chunks = [bytes.fromhex(one) for one in ARGS[1:]]
    for n, chunk_id in enumerate(chunks):
        await store.stage(TENANT, chunk_id, rows(n))
    await store.commit_load(TENANT, "load", 1, chunks)
    await store.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("steps", [STAGED, STAGED + 3, *range(RESERVED, STEPS - 1)])
@pytest.mark.parametrize("swept", [False, True])
async def test_killed_between_two_steps(tmp_path: Path, children: Children, steps: int, swept: bool) -> None:
    """The same on LMDB, where a process is really killed: who opens the set next finishes what was decided."""
    chunks = [in_slot(0), in_slot(1)]
    url = f"{tmp_path / 'set'}?n={N}"
    killed = children.start(KILLED, url, steps, *(chunk_id.hex() for chunk_id in chunks))
    killed.process.communicate(timeout=50)
    assert killed.process.returncode == -9
    clock = ManualClock(4_000_000_000_000) if swept else None
    async with await open_faulty(url, Faults(), clock) as store:
        decided = steps > RESERVED
        if swept and decided:
            await sweep_all(store)
            assert (await store.stats(TENANT)).total.ready == 24
        elif not decided:
            for n, chunk_id in enumerate(chunks):
                await store.stage(TENANT, chunk_id, rows(n))
        again = await store.commit_load(TENANT, "load", 1, chunks)
        assert again == Committed(0 if decided else 24, already=decided)
        assert await take_all(store) == once(0, 1)
        assert (await store.doctor()).clean
