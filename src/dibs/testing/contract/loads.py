"""Loads: chunks are staged unseen, and one commit makes just those it names visible."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from dibs.clock import ManualClock
from dibs.errors import InvalidInput, UnknownChunk
from dibs.ids import new_id
from dibs.stores.batches import row_ids
from dibs.stores.protocol import Store
from dibs.task import (
    CHUNK_KEEP_S,
    Cancelled,
    Cause,
    Committed,
    Filter,
    Heartbeat,
    Kind,
    LeaseLost,
    NewTask,
    Place,
    Rows,
    Settlement,
    Staged,
)
from dibs.testing.contract.order import assert_order
from dibs.testing.contract.steps import (
    COMMAND,
    LOAD_SLOT,
    TENANT,
    assert_counts,
    commit,
    complete,
    drain,
    in_slot,
    list_all,
    load,
    nothing_ready,
    pass_time,
    put,
    read_events,
    some_rows,
    stage,
    sweep_all,
    take_many,
)

Reopen = Callable[[], Awaitable[Store]]

DAY_S = 86_400.0


def ids_of(chunk_id: bytes, rows: list[NewTask], *, tenant: str = TENANT) -> list[bytes]:
    """Returns the ids that the rows of a chunk have, or would have."""
    return row_ids(tenant, chunk_id, rows)


async def assert_unseen(store: Store, ids: list[bytes], *, tenant: str = TENANT) -> None:
    """No verb knows the rows: they do not exist."""
    assert await store.get(tenant, ids) == [None] * len(ids)
    assert not {task.id for task in await list_all(store, tenant=tenant)} & set(ids)
    assert not {event.id for event in await read_events(store, tenant)} & set(ids)
    assert await store.cancel(tenant, ids) == [Cancelled("unknown")] * len(ids)
    assert await store.retain(tenant, ids, 60) == [None] * len(ids)
    assert (await store.purge(tenant, ids)).ids == []
    assert (await store.replay(tenant, ids)).ids == []
    beat = Heartbeat(tenant=tenant, id=ids[0], token=new_id())
    assert await store.heartbeat([beat]) == [LeaseLost(Cause.UNKNOWN)]
    item = Settlement(tenant=tenant, id=ids[0], token=new_id(), kind=Kind.COMPLETE)
    assert await store.settle([item]) == [LeaseLost(Cause.UNKNOWN)]


@pytest.mark.anyio
class TestStage:
    """What is staged is nobody's business until a commit names it."""

    async def test_nothing_is_seen_before_the_commit(self, store: Store, clock: ManualClock) -> None:
        """Staged rows are in no listing, count, claim or event, also when they would be due or late."""
        rows = [*some_rows(5), *some_rows(5, delay_s=5), *some_rows(5, expires_s=5), *some_rows(5, "other", key="k")]
        chunk = await stage(store, rows)
        for _ in range(2):
            await assert_unseen(store, ids_of(chunk, rows))
            assert await store.claim(TENANT, [COMMAND, "other"], limit=50) == []
            total = await assert_counts(store)
            assert (total.ready, total.delayed, total.leased, total.dead, total.bytes) == (0, 0, 0, 0, 0)
            assert total.oldest_ready_ms is None
            swept = await pass_time(store, clock, 60)
            assert (swept.promoted, swept.expired, swept.cancelled) == (0, 0, 0)

    async def test_rows_by_column(self, store: Store) -> None:
        """The same rows, given by column or one by one, are the same tasks in everything but their ids."""
        options = [NewTask(command="a", priority=2), NewTask(command="b", delay_s=5, expires_s=60)]
        never = NewTask(command="never")
        columns = Rows([b"1", b"2", b"", b"4"], [*options, never], [0, 1, 1, 0], [None, "k", None, "k"])
        one_by_one = [
            replace(options[kind], payload=payload, key=key)
            for payload, kind, key in zip(columns.payloads, columns.kinds, columns.keys, strict=True)
        ]
        shown = []
        for rows in (columns, one_by_one):
            chunk = new_id()
            assert await store.stage(TENANT, chunk, rows) == Staged(4)
            assert await commit(store, chunk) == 4
            assert row_ids(TENANT, chunk, columns) == row_ids(TENANT, chunk, one_by_one)
            tasks = await store.get(TENANT, row_ids(TENANT, chunk, rows))
            shown.append([replace(task, id=b"") for task in tasks if task is not None])
        assert shown[0] == shown[1]
        assert len(shown[0]) == 4
        assert {queue.command for queue in (await store.stats(TENANT)).queues} == {"a", "b"}

    async def test_a_chunk_may_be_staged_again(self, store: Store) -> None:
        """The later staging replaces the earlier one whole, whichever has more rows."""
        for first, second in ((8, 3), (3, 8)):
            chunk = in_slot(LOAD_SLOT)
            await stage(store, some_rows(first, "first", key="k"), chunk)
            rows = some_rows(second)
            assert await store.stage(TENANT, chunk, rows) == Staged(second)
            assert await commit(store, chunk) == second
            assert await drain(store, "first") == []
            assert_order(store.order, ids_of(chunk, rows), await drain(store))
        assert {queue.command for queue in (await store.stats(TENANT)).queues} == {COMMAND}

    async def test_a_committed_chunk_stays_as_it_is(self, store: Store) -> None:
        """Staging a chunk that was committed answers `already`, also when some of its rows were claimed."""
        rows = some_rows(3)
        chunk = await stage(store, rows)
        await commit(store, chunk)
        for _ in range(2):
            answer = await store.stage(TENANT, chunk, some_rows(9, "other"))
            assert answer.already
            await store.claim(TENANT, [COMMAND])
        assert (await assert_counts(store)).ready == 1
        assert await drain(store, "other") == []

    async def test_a_committed_chunk_is_never_committed_again(self, store: Store) -> None:
        """Also when all its rows are gone, staging and committing it once more makes no row run twice."""
        rows = some_rows(3)
        chunk = await stage(store, rows)
        await commit(store, chunk)
        ids = await drain(store)
        await store.stage(TENANT, chunk, rows)
        with pytest.raises(UnknownChunk):
            await commit(store, chunk)
        assert sorted(ids) == sorted(ids_of(chunk, rows))
        assert await nothing_ready(store)
        assert (await assert_counts(store)).leased == 3

    async def test_chunks_are_dropped(self, store: Store) -> None:
        """Staged chunks are forgotten at once; those that are committed or unknown are left alone and not counted."""
        kept = await load(store, some_rows(2))
        committed = await stage(store, some_rows(2))
        await commit(store, committed)
        staged = [await stage(store, some_rows(2)) for _ in range(3)]
        assert await store.drop(TENANT, [staged[0], committed, new_id(), staged[1]]) == 2
        assert await store.drop(TENANT, [*staged, committed]) == 1
        assert await store.drop(TENANT, []) == 0
        for chunk in staged:
            with pytest.raises(UnknownChunk):
                await commit(store, chunk)
        assert (await assert_counts(store)).ready == 4
        assert (await drain(store))[:2] == kept or store.order.kind != "strict"

    async def test_many_chunks_are_dropped(self, store: Store) -> None:
        """More than one transaction holds."""
        staged = [await stage(store, some_rows(1)) for _ in range(5)]
        assert await store.drop(TENANT, [*(new_id() for _ in range(2_500)), *staged]) == 5

    async def test_a_dropped_chunk_may_be_staged_anew(self, store: Store) -> None:
        """Dropping leaves nothing behind that would be in the way."""
        chunk = await stage(store, some_rows(5))
        assert await store.drop(TENANT, [chunk]) == 1
        await stage(store, some_rows(2), chunk)
        assert await commit(store, chunk) == 2
        assert len(await drain(store)) == 2

    async def test_leftovers_are_forgotten(self, store: Store, clock: ManualClock) -> None:
        """A chunk that no commit named within a day is gone with the sweep; the commit that comes then refuses."""
        chunk = await stage(store, some_rows(3))
        await pass_time(store, clock, CHUNK_KEEP_S - 60)
        other = await stage(store, some_rows(3, "other"))
        await pass_time(store, clock, 120)
        with pytest.raises(UnknownChunk):
            await commit(store, chunk)
        with pytest.raises(UnknownChunk):
            await commit(store, other, chunk)
        assert await store.drop(TENANT, [chunk]) == 0
        assert await commit(store, other) == 3

    async def test_staging_again_begins_a_new_day(self, store: Store, clock: ManualClock) -> None:
        """The day of a chunk is counted from the last time it was staged."""
        chunk = await stage(store, some_rows(3))
        await pass_time(store, clock, CHUNK_KEEP_S - 60)
        await store.stage(TENANT, chunk, some_rows(2))
        await pass_time(store, clock, CHUNK_KEEP_S - 60)
        assert await commit(store, chunk) == 2

    async def test_what_is_committed_stays(self, store: Store, clock: ManualClock) -> None:
        """Rows that wait for days, untouched or in part taken, are not leftovers."""
        ids = await load(store, some_rows(10))
        claimed = await store.claim(TENANT, [COMMAND], limit=3, lease_s=43_200)
        for _ in range(40):
            await pass_time(store, clock, DAY_S)
        assert (await assert_counts(store)).ready == 10
        assert sorted(await drain(store, limit=4)) == sorted(ids)
        assert len(claimed) == 3


@pytest.mark.anyio
class TestCommit:
    """A commit is all or nothing, and happens once."""

    async def test_just_the_named_chunks_become_visible(self, store: Store, clock: ManualClock) -> None:
        """What a failed attempt staged never appears, however much time passes."""
        rows = some_rows(4)
        failed = [await stage(store, rows), await stage(store, rows)]
        good = [await stage(store, rows), await stage(store, rows)]
        assert await commit(store, *good) == 8
        for _ in range(2):
            await assert_unseen(store, [row for chunk in failed for row in ids_of(chunk, rows)])
            await pass_time(store, clock, 3600)
        expected = [row for chunk in good for row in ids_of(chunk, rows)]
        assert_order(store.order, expected, await drain(store, limit=3))
        await pass_time(store, clock, 2 * DAY_S)
        assert len(await drain(store)) == 8, "the leases of the named ones ran out, and nothing else came"

    async def test_chunks_come_in_the_order_named(self, store: Store) -> None:
        """The commit decides the order, not the staging."""
        rows = some_rows(3)
        chunks = [await stage(store, rows) for _ in range(4)]
        order = [chunks[2], chunks[0], chunks[3], chunks[1]]
        await commit(store, *order)
        assert_order(store.order, [row for chunk in order for row in ids_of(chunk, rows)], await drain(store))

    async def test_a_repeat_changes_nothing(self, store: Store) -> None:
        """A commit whose answer was lost can be repeated, with the same or other chunks: `already`, no rows."""
        chunk = await stage(store, some_rows(3))
        assert await store.commit_load(TENANT, "nightly", 5, [chunk]) == Committed(3)
        other = await stage(store, some_rows(2))
        before = await store.stats(TENANT)
        for seq, chunks in ((5, [chunk]), (5, [other]), (4, [chunk]), (0, []), (3, [new_id()])):
            assert await store.commit_load(TENANT, "nightly", seq, chunks) == Committed(0, already=True)
        assert await store.stats(TENANT) == before
        assert len(await read_events(store)) == 3
        assert await store.commit_load(TENANT, "nightly", 6, [other]) == Committed(2)

    async def test_a_repeat_after_the_rows_are_gone(self, store: Store, clock: ManualClock) -> None:
        """The name remembers for as long as it is kept, whatever became of the rows."""
        chunk = await stage(store, some_rows(3))
        await store.commit_load(TENANT, "nightly", 0, [chunk])
        for lease in await take_many(store, 3):
            await complete(store, lease)
        await pass_time(store, clock, 400 * DAY_S)
        assert await list_all(store) == []
        assert await store.commit_load(TENANT, "nightly", 0, [chunk]) == Committed(0, already=True)

    async def test_numbers_only_have_to_grow(self, store: Store) -> None:
        """Gaps are fine, and so are numbers as large as they get."""
        for seq in (0, 1, 7, 1_000_000, (1 << 62) - 1):
            chunk = await stage(store, some_rows(1))
            assert await store.commit_load(TENANT, "stream", seq, [chunk]) == Committed(1)
        assert await store.commit_load(TENANT, "stream", 5, []) == Committed(0, already=True)
        assert len(await drain(store)) == 5

    async def test_an_empty_commit_counts(self, store: Store) -> None:
        """A batch without rows is committed like any other, and remembered."""
        assert await store.commit_load(TENANT, "stream", 3, []) == Committed(0)
        assert await store.commit_load(TENANT, "stream", 3, []) == Committed(0, already=True)
        chunk = await stage(store, some_rows(1))
        assert await store.commit_load(TENANT, "stream", 3, [chunk]) == Committed(0, already=True)
        assert await store.commit_load(TENANT, "stream", 4, [chunk]) == Committed(1)

    async def test_names_are_apart(self, store: Store) -> None:
        """Every name, of every tenant, has its own numbers."""
        for name in ("a", "A", "a b", "a/b", "ab", "é", "n" * 128):
            chunk = await stage(store, some_rows(1))
            assert await store.commit_load(TENANT, name, 9, [chunk]) == Committed(1)
        chunk = await stage(store, some_rows(1), tenant="other")
        assert await store.commit_load("other", "a", 9, [chunk]) == Committed(1)

    @pytest.mark.parametrize("bad", ["unknown", "dropped", "committed", "another tenant's"])
    async def test_one_bad_chunk_refuses_the_whole(self, store: Store, bad: str) -> None:
        """Nothing is committed, the name has not moved, and without the bad one the same commit goes through."""
        rows = some_rows(3)
        good = [await stage(store, rows) for _ in range(2)]
        chunk = new_id()
        if bad == "another tenant's":
            await stage(store, rows, chunk, tenant="other")
        elif bad != "unknown":
            await stage(store, rows, chunk)
        if bad == "dropped":
            await store.drop(TENANT, [chunk])
        if bad == "committed":
            await commit(store, chunk)
        before = await store.stats(TENANT)
        events = await read_events(store)
        for chunks in ([chunk, *good], [good[0], chunk, good[1]], [*good, chunk]):
            with pytest.raises(UnknownChunk, match="stage"):
                await store.commit_load(TENANT, "load", 0, chunks)
        await assert_unseen(store, [row for one in good for row in ids_of(one, rows)])
        assert await store.stats(TENANT) == before
        assert await read_events(store) == events
        assert await store.commit_load(TENANT, "load", 0, good) == Committed(6)

    async def test_a_chunk_goes_into_one_load(self, store: Store) -> None:
        """Loads committed at once that name one chunk: just one of them has it, and no row comes twice."""
        rows = [*some_rows(5), *(NewTask(command=COMMAND, key=f"k{n}") for n in range(5))]
        chunk = await stage(store, rows)
        outcomes = await asyncio.gather(
            *(store.commit_load(TENANT, f"load {n}", 0, [chunk]) for n in range(4)), return_exceptions=True
        )
        committed = [outcome for outcome in outcomes if isinstance(outcome, Committed)]
        assert committed == [Committed(10)]
        assert sum(isinstance(outcome, UnknownChunk) for outcome in outcomes) == 3
        assert (await assert_counts(store)).ready == 10
        assert sorted(await drain(store)) == sorted(ids_of(chunk, rows))

    async def test_chunks_whose_rows_would_be_the_same(self, store: Store) -> None:
        """Two ids that differ only where rows have their number never make one row two: the second is refused, or each
        row is there once."""
        rows = some_rows(3)
        chunk = await stage(store, rows)
        alike = chunk[:13] + bytes((chunk[13] ^ 1, chunk[14])) + chunk[15:]
        try:
            await store.stage(TENANT, alike, rows)
            await commit(store, chunk, alike)
        except InvalidInput:
            assert await nothing_ready(store)
            assert await commit(store, chunk) == 3
        claimed = await drain(store)
        assert len(set(claimed)) == len(claimed) == 3
        assert (await assert_counts(store)).ready == 0

    async def test_an_id_that_is_taken_is_not_taken_again(self, store: Store) -> None:
        """A plain task that somebody gave a row's id before the commit: it is there once, and whoever loses is told."""
        rows = some_rows(3)
        chunk = await stage(store, rows)
        [_, taken, _] = ids_of(chunk, rows)
        await put(store, id=taken, payload=b"plain")
        try:
            await commit(store, chunk)
        except InvalidInput:
            assert await drain(store) == [taken]
            return
        claimed = await drain(store)
        assert sorted(claimed) == sorted(ids_of(chunk, rows))
        assert (await assert_counts(store)).leased == 3

    async def test_one_commit_at_a_time_per_number(self, store: Store) -> None:
        """The same commit asked for several times at once is done once."""
        chunk = await stage(store, some_rows(5))
        outcomes = await asyncio.gather(*(store.commit_load(TENANT, "load", 1, [chunk]) for _ in range(5)))
        assert sorted(outcome.rows for outcome in outcomes) == [0, 0, 0, 0, 5]
        assert sum(outcome.already for outcome in outcomes) == 4

    async def test_a_name_may_be_forgotten(self, store: Store, clock: ManualClock) -> None:
        """With `forget_s` the name is kept for so long, and then the sweep lets it go."""
        await store.commit_load(TENANT, "once", 1, [await stage(store, some_rows(1))], forget_s=60)
        await pass_time(store, clock, 59)
        assert (await store.commit_load(TENANT, "once", 1, [])).already
        await pass_time(store, clock, 2)
        assert await store.commit_load(TENANT, "once", 1, [await stage(store, some_rows(1))]) == Committed(1)
        assert len(await drain(store)) == 2

    async def test_a_later_commit_decides_how_long_a_name_is_kept(self, store: Store, clock: ManualClock) -> None:
        """A name that goes on is not forgotten at the time its first commit gave."""
        for seq, forget_s in ((0, 60), (1, 60), (2, None)):
            assert await store.commit_load(TENANT, "stream", seq, [], forget_s=forget_s) == Committed(0)
            await pass_time(store, clock, 40)
        for _ in range(3):
            await pass_time(store, clock, 400 * DAY_S)
            assert await store.commit_load(TENANT, "stream", 2, []) == Committed(0, already=True)

    async def test_ten_stagers_at_once(self, store: Store) -> None:
        """Chunks staged side by side; a commit of half of them shows just those, each row once."""
        rows = some_rows(40)
        chunks = [[new_id() for _ in range(4)] for _ in range(10)]

        async def stager(own: list[bytes]) -> None:
            for chunk in own:
                assert await store.stage(TENANT, chunk, rows) == Staged(40)

        await asyncio.gather(*(stager(own) for own in chunks))
        named = [chunk for own in chunks[::2] for chunk in own]
        assert await commit(store, *named) == 800
        expected = [row for chunk in named for row in ids_of(chunk, rows)]
        assert (await assert_counts(store)).ready == 800
        claimed = await drain(store, limit=100)
        assert sorted(claimed) == sorted(expected)
        if store.order.kind == "strict":
            assert claimed == expected
        await assert_unseen(store, [row for own in chunks[1::2] for row in ids_of(own[0], rows)])

    async def test_another_tenants_chunks_do_not_exist(self, store: Store) -> None:
        """The same id staged by two tenants is two chunks; nobody commits or drops another's."""
        chunk = new_id()
        mine, others = some_rows(2), some_rows(3, "other")
        await stage(store, mine, chunk, tenant="mine")
        assert await store.drop("other", [chunk]) == 0
        await stage(store, others, chunk, tenant="other")
        assert await commit(store, chunk, tenant="mine") == 2
        await assert_unseen(store, ids_of(chunk, others, tenant="other"), tenant="other")
        assert await store.drop("mine", [chunk]) == 0
        assert await commit(store, chunk, tenant="other") == 3
        assert sorted(await drain(store, tenant="mine")) == ids_of(chunk, mine, tenant="mine")
        assert sorted(await drain(store, "other", tenant="other")) == ids_of(chunk, others, tenant="other")
        assert {event.tenant for event in await read_events(store, "mine")} == {"mine"}

    async def test_a_tenant_with_rows_is_listed(self, store: Store) -> None:
        """A tenant whose only tasks are rows that nobody has claimed has something here."""
        await load(store, some_rows(2), tenant="bulk")
        assert (await store.tenants()).tenants == ["bulk"]

    @pytest.mark.timeout(180)
    async def test_a_large_load_is_shared(self, store: Store) -> None:
        """20,000 rows in 20 chunks, taken by several claimers at once: each row once, and in order for each of them."""
        rows = some_rows(1_000)
        ids = await load(store, *([rows] * 20))
        place = {task_id: number for number, task_id in enumerate(ids)}
        assert (await store.stats(TENANT)).total.ready == 20_000

        async def claimer(name: str, limit: int) -> list[bytes]:
            claimed: list[bytes] = []
            while leases := await store.claim(TENANT, [COMMAND], limit=limit, worker=name, lease_s=3600):
                claimed += [lease.id for lease in leases]
            return claimed

        shares = await asyncio.gather(*(claimer(f"w{n}", limit) for n, limit in enumerate((1_000, 300, 77, 500))))
        assert sorted(task_id for share in shares for task_id in share) == sorted(ids)
        for share in shares:
            if store.order.kind != "window":
                places = [place[task_id] for task_id in share]
                assert places == sorted(places)
        total = (await store.stats(TENANT)).total
        assert (total.ready, total.leased) == (0, 20_000)


@pytest.mark.anyio
class TestLoadsOutlive:
    """What was staged and committed outlives the process that did it, where the store promises so."""

    async def test_committed(self, store: Store, reopen: Reopen) -> None:
        """Rows taken, in part or not at all, are found as they were left; names are remembered."""
        chunk = await stage(store, [*some_rows(6), *some_rows(3, delay_s=60)])
        await store.commit_load(TENANT, "load", 0, [chunk])
        store = await reopen()
        first = await store.claim(TENANT, [COMMAND], limit=2)
        before = await list_all(store)
        stats = await store.stats(TENANT)
        store = await reopen()
        assert await list_all(store) == before
        assert await store.stats(TENANT) == stats
        assert await store.commit_load(TENANT, "load", 0, [chunk]) == Committed(0, already=True)
        assert len(await read_events(store)) == 11
        rest = await drain(store)
        assert_order(store.order, ids_of(chunk, some_rows(6)), [lease.id for lease in first] + rest)

    async def test_staged(self, store: Store, clock: ManualClock, reopen: Reopen) -> None:
        """A chunk staged before can be committed after, and is forgotten in its time all the same."""
        rows = some_rows(3)
        chunk, left = await stage(store, rows), await stage(store, rows)
        store = await reopen()
        assert await nothing_ready(store)
        assert await commit(store, chunk) == 3
        assert_order(store.order, ids_of(chunk, rows), await drain(store))
        await sweep_all(store)
        clock.advance(CHUNK_KEEP_S + 60)
        store = await reopen()
        await sweep_all(store)
        with pytest.raises(UnknownChunk):
            await commit(store, left)

    async def test_between_clients(self, store: Store, second: Store) -> None:
        """What one client stages another commits, and a third claim finds."""
        rows = some_rows(3)
        chunk = await stage(store, rows)
        assert await commit(second, chunk) == 3
        assert_order(store.order, ids_of(chunk, rows), await drain(store))
        assert await put(second) in {task.id for task in await list_all(store, Filter(place=Place.READY))}


#: Calls that are wrong as a whole: they raise, and nothing is staged, committed or dropped.
BAD_CALLS: dict[str, Callable[[Store, Any], Awaitable[Any]]] = {
    "stage with a short id": lambda store, _: store.stage(TENANT, b"short", some_rows(1)),
    "stage with a long id": lambda store, _: store.stage(TENANT, b"x" * 17, some_rows(1)),
    "stage with an id of text": lambda store, _: store.stage(TENANT, "x" * 16, some_rows(1)),  # type: ignore[arg-type]
    "stage with no id": lambda store, _: store.stage(TENANT, None, some_rows(1)),  # type: ignore[arg-type]
    "stage no rows": lambda store, chunk: store.stage(TENANT, chunk, []),
    "stage too many rows": lambda store, chunk: store.stage(TENANT, chunk, some_rows(1_001)),
    "stage nothing at all": lambda store, chunk: store.stage(TENANT, chunk, None),  # type: ignore[arg-type]
    "stage a single row": lambda store, chunk: store.stage(TENANT, chunk, NewTask(command="a")),  # type: ignore[arg-type]
    "stage text": lambda store, chunk: store.stage(TENANT, chunk, "rows"),  # type: ignore[arg-type]
    "stage a dict": lambda store, chunk: store.stage(TENANT, chunk, [{"command": "a"}]),  # type: ignore[list-item]
    "stage None": lambda store, chunk: store.stage(TENANT, chunk, [None]),  # type: ignore[list-item]
    "stage over 1 MiB": lambda store, chunk: store.stage(
        TENANT, chunk, [NewTask(command="a", payload=b"x" * (1 << 19)), NewTask(command="a", payload=b"x" * 524_289)]
    ),
    "commit no name": lambda store, chunk: store.commit_load(TENANT, "", 0, [chunk]),
    "commit a long name": lambda store, chunk: store.commit_load(TENANT, "n" * 129, 0, [chunk]),
    "commit a long name in bytes": lambda store, chunk: store.commit_load(TENANT, "é" * 65, 0, [chunk]),
    "commit a name with a line break": lambda store, chunk: store.commit_load(TENANT, "a\nb", 0, [chunk]),
    "commit a surrogate": lambda store, chunk: store.commit_load(TENANT, "\ud800", 0, [chunk]),
    "commit None": lambda store, chunk: store.commit_load(TENANT, None, 0, [chunk]),  # type: ignore[arg-type]
    "commit bytes": lambda store, chunk: store.commit_load(TENANT, b"name", 0, [chunk]),  # type: ignore[arg-type]
    "commit before zero": lambda store, chunk: store.commit_load(TENANT, "load", -1, [chunk]),
    "commit far too high": lambda store, chunk: store.commit_load(TENANT, "load", 1 << 62, [chunk]),
    "commit a fraction": lambda store, chunk: store.commit_load(TENANT, "load", 1.5, [chunk]),  # type: ignore[arg-type]
    "commit a truth": lambda store, chunk: store.commit_load(TENANT, "load", True, [chunk]),
    "commit a text": lambda store, chunk: store.commit_load(TENANT, "load", "1", [chunk]),  # type: ignore[arg-type]
    "commit a chunk twice": lambda store, chunk: store.commit_load(TENANT, "load", 0, [chunk, chunk]),
    "commit one bare chunk": lambda store, chunk: store.commit_load(TENANT, "load", 0, chunk),
    "commit no chunks at all": lambda store, _: store.commit_load(TENANT, "load", 0, None),  # type: ignore[arg-type]
    "commit a number": lambda store, _: store.commit_load(TENANT, "load", 0, 7),  # type: ignore[arg-type]
    "commit a short id": lambda store, chunk: store.commit_load(TENANT, "load", 0, [chunk, b"short"]),
    "commit an id of text": lambda store, chunk: store.commit_load(TENANT, "load", 0, [chunk, "x" * 16]),  # type: ignore[list-item]
    "commit a list of lists": lambda store, chunk: store.commit_load(TENANT, "load", 0, [chunk, []]),  # type: ignore[list-item]
    "commit too many chunks": lambda store, chunk: store.commit_load(
        TENANT, "load", 0, [chunk, *(b"%016d" % n for n in range(100_000))]
    ),
    "commit and forget at once": lambda store, chunk: store.commit_load(TENANT, "load", 0, [chunk], forget_s=0),
    "commit and forget before": lambda store, chunk: store.commit_load(TENANT, "load", 0, [chunk], forget_s=-1),
    "commit and forget never": lambda store, chunk: store.commit_load(
        TENANT, "load", 0, [chunk], forget_s=float("nan")
    ),
    "commit and forget a text": lambda store, chunk: store.commit_load(TENANT, "load", 0, [chunk], forget_s="60"),  # type: ignore[arg-type]
    "drop a short id": lambda store, chunk: store.drop(TENANT, [chunk, b"short"]),
    "drop one bare chunk": lambda store, chunk: store.drop(TENANT, chunk),
    "drop None": lambda store, _: store.drop(TENANT, None),  # type: ignore[arg-type]
    "drop too many": lambda store, chunk: store.drop(TENANT, [chunk, *(b"%016d" % n for n in range(100_000))]),
}

#: A row that is not acceptable, and what its message must say.
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"command": "a b"}, "row 2"),
    ({"command": 7}, "row 2"),
    ({"command": ["a"]}, "row 2"),
    ({"payload": "text"}, "row 2"),
    ({"payload": b"x" * ((1 << 20) + 1)}, "row 2"),
    ({"priority": 10}, "row 2"),
    ({"priority": True}, "row 2"),
    ({"delay_s": -1}, "row 2"),
    ({"delay_s": float("nan")}, "row 2"),
    ({"delay_s": 5, "run_at_ms": 5}, "row 2"),
    ({"run_at_ms": 1.5}, "row 2"),
    ({"max_attempts": 0}, "row 2"),
    ({"lease_s": 0.5}, "row 2"),
    ({"timeout_s": 0}, "row 2"),
    ({"expires_s": 0}, "row 2"),
    ({"key": ""}, "row 2"),
    ({"key": "\ud800"}, "row 2"),
    ({"key": "k", "on_duplicate": "overwrite"}, "row 2"),
    ({"codec": "no such codec"}, "row 2"),
    ({"keep": None}, "row 2"),
    ({"traceparent": "a\nb"}, "row 2"),
    ({"limit_key": "k", "limit_cost": 0}, "row 2"),
    ({"id": b"short"}, "row 2"),
    ({"id": b"x" * 16}, "chunk"),
]


#: What is wrong with rows by column.
BAD_COLUMNS: dict[str, Any] = {
    "no rows": Rows([], [NewTask(command="a")]),
    "no options": Rows([b""], []),
    "too many rows": Rows([b""] * 1_001, [NewTask(command="a")]),
    "too few kinds": Rows([b"", b""], [NewTask(command="a")], [0]),
    "a kind that is not there": Rows([b"", b""], [NewTask(command="a")], [0, 1]),
    "a kind from the end": Rows([b"", b""], [NewTask(command="a")], [0, -1]),
    "a kind that is a truth": Rows([b"", b""], [NewTask(command="a")] * 2, [0, True]),
    "too many keys": Rows([b""], [NewTask(command="a")], [], ["k", "l"]),
    "an empty key": Rows([b"", b""], [NewTask(command="a")], [], ["k", ""]),
    "a key that is no text": Rows([b""], [NewTask(command="a")], [], [7]),  # type: ignore[list-item]
    "a payload of text": Rows([b"", "x"], [NewTask(command="a")]),  # type: ignore[list-item]
    "payloads in a tuple": Rows((b"",), [NewTask(command="a")]),  # type: ignore[arg-type]
    "no payloads at all": Rows(None, [NewTask(command="a")]),  # type: ignore[arg-type]
    "options with a payload": Rows([b""], [NewTask(command="a", payload=b"x")]),
    "options with a key": Rows([b""], [NewTask(command="a", key="k")]),
    "options with an id": Rows([b""], [NewTask(command="a", id=b"x" * 16)]),
    "bad options": Rows([b""], [NewTask(command="a", priority=10)]),
    "options that are none": Rows([b""], [None]),  # type: ignore[list-item]
    "over 1 MiB": Rows([b"x" * (1 << 19), b"x" * 524_289], [NewTask(command="a")]),
}


@pytest.mark.anyio
class TestLoadInput:
    """What is not acceptable is refused as a whole, with an error that says what to do."""

    @pytest.mark.parametrize("name", BAD_CALLS)
    async def test_a_bad_call(self, store: Store, name: str) -> None:
        """It raises the typed error at once; what was staged before is still there, unseen, and can be committed."""
        chunk = await stage(store, some_rows(3))
        target = new_id() if name.startswith("stage") else chunk
        with pytest.raises(InvalidInput) as raised:
            await BAD_CALLS[name](store, target)
        assert not isinstance(raised.value, UnknownChunk)
        assert 20 < len(str(raised.value)) < 500
        assert await nothing_ready(store)
        if target != chunk:
            assert await store.drop(TENANT, [target]) == 0
        assert await store.commit_load(TENANT, "load", 0, [chunk]) == Committed(3)

    @pytest.mark.parametrize(("options", "told"), BAD_ROWS, ids=lambda value: repr(value)[:50])
    async def test_a_bad_row(self, store: Store, options: dict[str, Any], told: str) -> None:
        """One bad row refuses its chunk, and the error names the row."""
        rows = some_rows(4)
        rows[2] = NewTask(**{"command": COMMAND} | options)
        chunk = new_id()
        with pytest.raises(InvalidInput, match=told) as raised:
            await store.stage(TENANT, chunk, rows)
        assert "row 2" in str(raised.value)
        assert len(str(raised.value)) < 500
        assert await store.drop(TENANT, [chunk]) == 0
        with pytest.raises(UnknownChunk):
            await commit(store, chunk)

    @pytest.mark.parametrize("name", BAD_COLUMNS)
    async def test_bad_columns(self, store: Store, name: str) -> None:
        """Rows by column that do not fit together, or are not acceptable, refuse the chunk."""
        chunk = new_id()
        with pytest.raises(InvalidInput) as raised:
            await store.stage(TENANT, chunk, BAD_COLUMNS[name])
        assert 20 < len(str(raised.value)) < 500
        assert await store.drop(TENANT, [chunk]) == 0

    async def test_a_bad_row_leaves_what_was_staged(self, store: Store) -> None:
        """A staging that is refused does not replace the one before it."""
        chunk = await stage(store, some_rows(3))
        with pytest.raises(InvalidInput):
            await store.stage(TENANT, chunk, [NewTask(command=COMMAND, priority=99)])
        assert await commit(store, chunk) == 3

    async def test_as_large_as_a_chunk_may_be(self, store: Store) -> None:
        """1,000 rows, 1 MiB in many rows, and one row as large as a task may be."""
        many = await stage(store, some_rows(1_000))
        large = await stage(store, [NewTask(command=COMMAND, payload=b"x" * (1 << 18)) for _ in range(4)])
        single = await stage(store, [NewTask(command=COMMAND, payload=b"x" * (1 << 20))])
        assert await commit(store, many, large, single) == 1_005
        leases = [lease for _ in range(2) for lease in await store.claim(TENANT, [COMMAND], limit=1_000)]
        assert sum(len(lease.payload) for lease in leases) == (1 << 21) + sum(len(b"%d" % n) for n in range(1_000))

    async def test_generators_are_lists_too(self, store: Store) -> None:
        """Whatever can be gone through once is taken, for rows and for chunks."""
        chunks = [new_id() for _ in range(3)]
        for chunk in chunks:
            rows: Any = (row for row in some_rows(2))
            assert await store.stage(TENANT, chunk, rows) == Staged(2)
        some: Any = (chunk for chunk in chunks[:1])
        assert await store.drop(TENANT, some) == 1
        rest: Any = (chunk for chunk in chunks[1:])
        assert await store.commit_load(TENANT, "load", 0, rest) == Committed(4)

    async def test_many_unknown_chunks(self, store: Store) -> None:
        """A commit of as many chunks as are allowed is taken as such, and refused for what it names."""
        with pytest.raises(UnknownChunk):
            await store.commit_load(TENANT, "load", 0, [b"%016d" % n for n in range(100_000)])
        assert await store.commit_load(TENANT, "load", 0, []) == Committed(0)
