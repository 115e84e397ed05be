"""Rows of a load: from the commit on they are tasks like any others, whether a claim has reached them or not."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from dibs.clock import ManualClock
from dibs.ids import new_id
from dibs.stores.batches import row_ids
from dibs.stores.protocol import Store
from dibs.stores.wakeups import Ready
from dibs.task import (
    Cancelled,
    Cause,
    Enqueued,
    EventKind,
    Filter,
    Heartbeat,
    Kind,
    Lease,
    LeaseLost,
    NewTask,
    Place,
    QueueConfig,
    Settlement,
    Status,
    Task,
)
from dibs.testing.contract.order import SLOT, assert_order, line_up
from dibs.testing.contract.steps import (
    COMMAND,
    LONG_S,
    TENANT,
    assert_counts,
    commit,
    complete,
    drain,
    fail,
    in_slot,
    kinds_of,
    list_all,
    load,
    look,
    nothing_ready,
    pass_time,
    release,
    retry,
    settle,
    some_rows,
    soon,
    stage,
    take,
    take_many,
    waiting,
)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

#: Options that a row may have; whatever they are, it must look and live as the plain task does that has the same.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"payload": bytes(range(256)), "codec": "raw"},
    {"payload": b""},
    {"priority": 0},
    {"priority": 9, "max_attempts": 1},
    {"delay_s": 30},
    {"run_at_ms": 5},
    {"lease_s": 90, "timeout_s": 12.5, "traceparent": TRACE},
    {"expires_s": 60},
    {"delay_s": 0.001, "expires_s": 0.002, "priority": 3},
    {"key": "k/é", "on_duplicate": "replay_dead"},
    {"result_ttl_s": 0, "retention_s": 5},
    {"result_ttl_s": 100},
    {"keep": False},
    {"limit_key": "customer", "limit_cost": 3},
]


async def both(store: Store, options: dict[str, Any]) -> tuple[bytes, bytes]:
    """Makes a row, among others of its chunk, and a plain task with the same options, in queues of their own; returns
    their ids."""
    chunk = [NewTask(command="elsewhere"), NewTask(command="row", **options), NewTask(command="elsewhere")]
    [_, row, _] = await load(store, chunk)
    [plain] = await store.enqueue(TENANT, [NewTask(command="plain", **options)])
    assert isinstance(plain, Enqueued)
    return row, plain.id


async def assert_alike(store: Store, row: bytes, plain: bytes) -> Task:
    """The two are the same in everything but name."""
    task = await look(store, row)
    assert replace(task, id=plain, command="plain") == await look(store, plain)
    assert [task] == [one for one in await list_all(store, Filter(command="row")) if one.id == row]
    stats = {queue.command: queue for queue in (await store.stats(TENANT, ["row", "plain"])).queues}
    assert replace(stats["row"], command="plain") == stats["plain"]
    return task


def alike(lease: Lease) -> dict[str, Any]:
    """What a lease says, but for what is its own."""
    fields = {name: getattr(lease, name) for name in lease.__struct_fields__}
    return fields | {"id": b"", "token": b"", "command": ""}


@pytest.mark.anyio
class TestShownRows:
    """`get`, `list` and `stats` do not tell rows from plain tasks."""

    @pytest.mark.parametrize("options", OPTIONS, ids=lambda value: repr(value)[:50])
    @pytest.mark.parametrize("end", list(Kind))
    async def test_a_row_lives_as_a_plain_task_does(
        self, store: Store, clock: ManualClock, options: dict[str, Any], end: Kind
    ) -> None:
        """At every stage of its life it looks the same, in every field, and its leases say the same."""
        row, plain = await both(store, options)
        await assert_alike(store, row, plain)
        if options.get("delay_s"):
            clock.advance(options["delay_s"])
        leases = [await take(store, command, worker="w") for command in ("row", "plain")]
        assert alike(leases[0]) == alike(leases[1])
        assert [lease.id for lease in leases] == [row, plain]
        assert (await assert_alike(store, row, plain)).place is Place.LEASED
        for lease in leases:
            await settle(store, lease, end)
        await assert_alike(store, row, plain)
        await pass_time(store, clock, 200)
        if await store.get(TENANT, [row, plain]) != [None, None]:
            await assert_alike(store, row, plain)

    async def test_stats_count_every_row(self, store: Store, clock: ManualClock) -> None:
        """Ready, delayed, leased, bytes and the oldest are exact before, while and after rows are taken."""
        payload = b"x" * 10
        await load(
            store,
            [NewTask(command=COMMAND, payload=payload) for _ in range(20)]
            + [NewTask(command=COMMAND, payload=payload, delay_s=60) for _ in range(5)],
            [NewTask(command="other", payload=payload, priority=n % 3) for n in range(7)],
        )
        start_ms = clock.now_ms()
        clock.advance(1)
        for taken in range(0, 20, 4):
            [queue] = (await store.stats(TENANT, [COMMAND])).queues
            assert (queue.ready, queue.delayed, queue.leased) == (20 - taken, 5, taken)
            assert (queue.bytes, queue.oldest_ready_ms) == (250, start_ms)
            total = await assert_counts(store)
            assert (total.ready, total.bytes) == (27 - taken, 320)
            await take_many(store, 4)
        [queue] = (await store.stats(TENANT, [COMMAND])).queues
        assert (queue.ready, queue.delayed, queue.leased, queue.oldest_ready_ms) == (0, 5, 20, None)
        await pass_time(store, clock, 60)
        [queue] = (await store.stats(TENANT, [COMMAND])).queues
        assert (queue.ready, queue.delayed, queue.oldest_ready_ms) == (25, 0, clock.now_ms())
        await assert_counts(store)

    @pytest.mark.parametrize("taken", [0, 1, 10, 23, 30])
    async def test_listings_have_each_row_once(self, store: Store, taken: int) -> None:
        """By place, by command, by status or without a filter, in pages of any size, however far it has been taken."""
        plain = await line_up(store, 3)
        ids = await load(store, some_rows(20), some_rows(7) + some_rows(5, delay_s=60), some_rows(6, "other"))
        plain += await line_up(store, 2)
        if taken:
            await take_many(store, taken)
        work = [task for task in plain + ids if task not in ids[-6:]]
        by_id = {task.id: task for task in await list_all(store)}
        assert await store.get(TENANT, ids) == [by_id[task_id] for task_id in ids]
        for limit in (1, 7, 1_000):
            assert sorted(task.id for task in await list_all(store, limit=limit)) == sorted(plain + ids)
            assert sorted(task.id for task in await list_all(store, Filter(command=COMMAND), limit=limit)) == sorted(
                work
            )
            for place, count in ((Place.READY, 38 - taken), (Place.DELAYED, 5), (Place.LEASED, taken)):
                found = await list_all(store, Filter(place=place), limit=limit)
                assert len(found) == count
                assert {task.place for task in found} <= {place}
            ready = await list_all(store, Filter(command=COMMAND, place=Place.READY), limit=limit)
            assert len(ready) == 32 - taken
            pending = await list_all(store, Filter(command="other", status=Status.PENDING), limit=limit)
            assert [task.id for task in pending] == ids[-6:] or store.order.kind != "strict"

    async def test_listings_by_time_and_reason(self, store: Store, clock: ManualClock) -> None:
        """A row was enqueued when it was committed, and has not ended."""
        chunk = await stage(store, some_rows(3))
        clock.advance(100)
        await commit(store, chunk)
        start_ms = clock.now_ms()
        assert len(await list_all(store, Filter(enqueued_from_ms=start_ms - 1, enqueued_until_ms=start_ms + 1))) == 3
        assert await list_all(store, Filter(enqueued_until_ms=start_ms - 50_000)) == []
        assert await list_all(store, Filter(ended_from_ms=0)) == []
        assert await list_all(store, Filter(reason="CANCELLED")) == []
        assert await list_all(store, Filter(place=Place.DEAD)) == []
        assert await list_all(store, Filter(worker="w")) == []

    async def test_paging_while_rows_are_taken(self, store: Store) -> None:
        """A listing that goes on while claims take rows still names each of them once."""
        ids = await load(store, some_rows(30), some_rows(30))
        seen: list[bytes] = []
        cursor: str | None = None
        for _ in range(100):
            page = await store.list(TENANT, cursor=cursor, limit=7)
            seen += [task.id for task in page.tasks]
            cursor = page.cursor
            if cursor is None:
                break
            await store.claim(TENANT, [COMMAND], limit=5)
        assert cursor is None
        assert sorted(seen) == sorted(ids)

    async def test_a_cursor_of_an_empty_page_leads_on(self, store: Store) -> None:
        """What matches behind thousands of rows that do not is found."""
        await load(store, *([some_rows(1_000, priority=5)] * 6), some_rows(3, "rare"))
        assert len(await list_all(store, Filter(command="rare"))) == 3
        assert len(await list_all(store, Filter(place=Place.READY, command="rare"))) == 3
        assert len(await list_all(store, limit=1_000)) == 6_003


@pytest.mark.anyio
class TestLoadRows:
    """Claims take rows as they come, in order, wherever blocks and chunks begin and end."""

    @pytest.mark.parametrize("limit", [1, 7, 1_000])
    async def test_the_place_is_that_of_the_commit(self, store: Store, limit: int) -> None:
        """What was enqueued before the commit comes before the rows, what came after it behind them."""
        rows = some_rows(10)
        first, second = await stage(store, rows), await stage(store, rows)
        before = await line_up(store, 3)
        assert await commit(store, first, second) == 20
        after = await line_up(store, 3)
        later = await load(store, some_rows(5))
        last = await line_up(store, 2)
        loaded = row_ids(TENANT, first, rows) + row_ids(TENANT, second, rows)
        assert_order(store.order, [*before, *loaded, *after, *later, *last], await drain(store, limit=limit))

    @pytest.mark.parametrize("limit", [1, 7, 1_000])
    async def test_priorities_and_commands_in_one_load(self, store: Store, limit: int) -> None:
        """Each command's rows come by priority, then in the order of chunks and rows, with plain tasks between."""
        chunks = [
            [NewTask(command="ab"[n % 2], priority=(n * 7 + turn) % 10, payload=b"%d" % n) for n in range(30)]
            for turn in range(3)
        ]
        plain = [(5, (await line_up(store, 1, "a", priority=5))[0])]
        ids = await load(store, *chunks)
        everything = [row for rows in chunks for row in rows]
        rows_a = [(row.priority or 0, i) for row, i in zip(everything, ids, strict=True) if row.command == "a"]
        rows_b = [(row.priority or 0, i) for row, i in zip(everything, ids, strict=True) if row.command == "b"]
        late = [(p, (await line_up(store, 1, "a", priority=p))[0]) for p in (9, 0)]
        expected_a = [i for _, i in sorted([*plain, *rows_a, *late], key=lambda pair: -pair[0])]
        expected_b = [i for _, i in sorted(rows_b, key=lambda pair: -pair[0])]
        assert_order(store.order, expected_a, await drain(store, "a", limit=limit))
        assert_order(store.order, expected_b, await drain(store, "b", limit=limit))

    @pytest.mark.parametrize("limit", [1, 3, 7, 1_000])
    async def test_a_priority_that_some_rows_name(self, store: Store, limit: int) -> None:
        """Rows that name the priority which the others get from their queue stand among those, in the load's order."""
        await store.configure(TENANT, COMMAND, QueueConfig(priority=4))
        rows = [NewTask(command=COMMAND, priority=4 if n % 3 else None) for n in range(30)]
        ids = await load(store, rows, rows)
        assert_order(store.order, ids, await drain(store, limit=limit))

    async def test_a_time_that_has_come_by_the_commit(self, store: Store, clock: ManualClock) -> None:
        """Rows for a time that passes before the commit do not wait, and stand where the commit puts them."""
        at_ms = clock.now_ms() + 10_000
        rows = [NewTask(command=COMMAND, run_at_ms=at_ms + n if n % 2 else None) for n in range(12)]
        chunk = await stage(store, rows, in_slot(SLOT))
        await pass_time(store, clock, 60)
        before = await line_up(store, 2)
        assert await commit(store, chunk) == len(rows)
        after = await line_up(store, 2)
        counted = await assert_counts(store)
        assert (counted.ready, counted.delayed) == (len(rows) + 4, 0)
        assert {task.due_ms for task in await list_all(store)} == {clock.now_ms()}
        assert_order(store.order, [*before, *row_ids(TENANT, chunk, rows), *after], await drain(store, limit=5))

    async def test_a_late_higher_priority_overtakes(self, store: Store) -> None:
        """A plain task of a higher priority comes between the rows of a block that is half taken."""
        ids = await load(store, some_rows(10, priority=1))
        first = [lease.id for lease in await take_many(store, 4)]
        high = await line_up(store, 1, priority=2)
        loaded = await load(store, some_rows(2, priority=2))
        assert_order(store.order, [*ids[:4], *high, *loaded, *ids[4:]], first + await drain(store, limit=3))

    async def test_a_claim_across_everything(self, store: Store) -> None:
        """One claim takes plain tasks, rows of several blocks and chunks, and of several commands, up to its limit."""
        plain = await line_up(store, 2, "a")
        ids = await load(store, some_rows(5, "a"), some_rows(5, "b"), some_rows(5, "a", priority=1))
        leases = await store.claim(TENANT, ["a", "b"], limit=14)
        expected = [*ids[10:], *plain, *ids[:5], *ids[5:7]]
        assert_order(store.order, expected, [lease.id for lease in leases])
        assert len({lease.token for lease in leases}) == 14
        assert (await assert_counts(store)).ready == 3

    async def test_released_rows_stand_before_the_rest_of_their_block(self, store: Store) -> None:
        """What is given back comes first again, in its old order, with its attempt returned."""
        ids = await load(store, some_rows(10))
        leases = await take_many(store, 5)
        for index in (3, 0, 4):
            await release(store, leases[index])
        again = await store.claim(TENANT, [COMMAND], limit=100)
        assert_order(store.order, [ids[0], *ids[3:]], [lease.id for lease in again])
        assert {lease.attempt for lease in again} == {1}

    async def test_retried_and_expired_rows_go_to_the_back(self, store: Store, clock: ManualClock) -> None:
        """Behind the rest of their load, and behind what is ready by then."""
        ids = await load(store, some_rows(6))
        plain = await line_up(store)
        retried, expired = await take(store, lease_s=3600), await take(store)
        await retry(store, retried)
        await pass_time(store, clock, 31)
        others = [i for i in ids if i not in (retried.id, expired.id)]
        assert_order(store.order, [*others, *plain, retried.id, expired.id], await drain(store))

    async def test_a_repeated_claim_returns_the_same_rows(self, store: Store) -> None:
        """The repeat takes nothing more and counts no attempt, although the block has more."""
        await load(store, some_rows(10))
        claim_id = new_id()
        first = await store.claim(TENANT, [COMMAND], limit=4, claim_id=claim_id, worker="w")
        again = await store.claim(TENANT, [COMMAND], limit=4, claim_id=claim_id, worker="w")
        assert len(first) == 4
        assert {lease.id: lease for lease in again} == {lease.id: lease for lease in first}
        assert len(await drain(store)) == 6

    async def test_claims_at_once_share_a_block(self, store: Store) -> None:
        """Claims at the same time, alike or not, take different rows, and together all of them."""
        ids = await load(store, some_rows(30), some_rows(30))
        answers = await asyncio.gather(
            *(store.claim(TENANT, [COMMAND], limit=7, worker="same") for _ in range(4)),
            *(store.claim(TENANT, [COMMAND], limit=5, worker=f"w{n}") for n in range(4)),
        )
        claimed = [lease.id for leases in answers for lease in leases]
        assert len(claimed) == len(set(claimed)) == 48
        assert sorted(claimed + await drain(store)) == sorted(ids)

    async def test_a_cancelled_claim_gives_its_rows_back(self, store: Store) -> None:
        """A claimer that goes away leaves the rows to others, their attempts unused."""
        ids = await load(store, some_rows(6))
        for turns in (1, 2, 3, 1, 2, 3):
            claim = asyncio.ensure_future(store.claim(TENANT, [COMMAND], limit=2))
            for _ in range(turns):
                await asyncio.sleep(0)
            claim.cancel()
            await asyncio.gather(claim, return_exceptions=True)
            if not claim.cancelled():
                for lease in claim.result():
                    await release(store, lease)
        leases = [lease for _ in ids for lease in await soon(store.claim(TENANT, [COMMAND], wait_s=LONG_S))]
        assert sorted(lease.id for lease in leases) == sorted(ids)
        assert {lease.attempt for lease in leases} == {1}

    async def test_every_delivery_counts(self, store: Store) -> None:
        """A row that always fails is delivered max_attempts times, and is a dead letter then; it can be replayed."""
        [row, *_] = await load(store, some_rows(1, max_attempts=2) + some_rows(3, "other"))
        for attempt in (1, 2):
            lease = await take(store)
            assert lease.attempt == attempt
            await settle(store, lease, Kind.RETRY)
        task = await look(store, row)
        assert (task.place, task.reason) == (Place.DEAD, "MAX_ATTEMPTS")
        assert (await store.replay(TENANT, Filter(command=COMMAND))).ids == [row]
        await complete(store, await take(store))
        assert (await look(store, row)).status is Status.COMPLETED

    @pytest.mark.parametrize("count", [1, 3, 10])
    async def test_an_id_that_a_row_has_is_taken(self, store: Store, count: int) -> None:
        """Enqueueing it, alone or in a batch, answers `already` and changes nothing, reached or not."""
        ids = await load(store, some_rows(12))
        await take_many(store, 2)
        before = await store.get(TENANT, ids)
        for some in (ids[:count], ids[-count:], ids):
            tasks = [NewTask(command="other", id=task_id, payload=b"other") for task_id in some]
            assert await store.enqueue(TENANT, tasks) == [Enqueued(task_id, already=True) for task_id in some]
        fresh = in_slot(7)
        mixed = [NewTask(command=COMMAND, id=task_id) for task_id in (ids[5], fresh, ids[6], fresh)]
        assert await store.enqueue(TENANT, mixed) == [
            Enqueued(ids[5], already=True),
            Enqueued(fresh),
            Enqueued(ids[6], already=True),
            Enqueued(fresh, already=True),
        ]
        assert await store.get(TENANT, ids) == before
        assert_order(store.order, [*ids[2:], fresh], await drain(store))
        assert await nothing_ready(store, "other")

    async def test_a_lease_that_nobody_has(self, store: Store) -> None:
        """Settling or extending a row that was never claimed is refused: it is not in progress."""
        ids = await load(store, some_rows(3))
        before = await store.get(TENANT, ids)
        for task_id in ids:
            for kind in Kind:
                item = Settlement(tenant=TENANT, id=task_id, token=new_id(), kind=kind)
                assert await store.settle([item]) == [LeaseLost(Cause.NOT_IN_PROGRESS)]
            beat = Heartbeat(tenant=TENANT, id=task_id, token=new_id())
            assert await store.heartbeat([beat]) == [LeaseLost(Cause.NOT_IN_PROGRESS)]
        assert await store.get(TENANT, ids) == before
        assert_order(store.order, ids, await drain(store))

    async def test_what_is_about_the_ended_leaves_rows_alone(self, store: Store) -> None:
        """Purge, replay and retain, by id or by filter, do nothing to rows that wait."""
        ids = await load(store, some_rows(5), some_rows(3, delay_s=60))
        before = await list_all(store)
        assert (await store.purge(TENANT, ids)).ids == []
        assert (await store.purge(TENANT, Filter(command=COMMAND))).ids == []
        assert (await store.purge(TENANT, Filter(status=Status.PENDING))).ids == []
        assert (await store.replay(TENANT, ids)).ids == []
        assert (await store.replay(TENANT, Filter())).ids == []
        assert await store.retain(TENANT, ids, 60) == [None] * 8
        assert await list_all(store) == before
        assert_order(store.order, ids[:5], await drain(store))

    async def test_what_is_about_the_ended_finds_rows_that_ended(self, store: Store) -> None:
        """Rows of one chunk that ended are purged and replayed while their neighbours wait."""
        ids = await load(store, some_rows(8))
        leases = await take_many(store, 4)
        await fail(store, leases[0])
        await fail(store, leases[1])
        await complete(store, leases[2])
        assert (await store.replay(TENANT, ids)).ids == [leases[0].id, leases[1].id]
        assert (await store.purge(TENANT, ids)).ids == [leases[2].id]
        assert (await look(store, leases[3].id)).place is Place.LEASED
        left = [task_id for task_id in ids if task_id not in (leases[2].id, leases[3].id)]
        assert sorted(await drain(store)) == sorted(left)

    async def test_a_purged_row_is_gone(self, store: Store) -> None:
        """While its neighbours still wait in their chunk, it does not exist, and its id can be used again."""
        ids = await load(store, some_rows(5))
        await complete(store, await take(store))
        assert (await store.purge(TENANT, ids[:1])).ids == ids[:1]
        assert await store.get(TENANT, ids[:1]) == [None]
        assert await store.cancel(TENANT, ids[:1]) == [Cancelled("unknown")]
        assert sorted(task.id for task in await list_all(store)) == sorted(ids[1:])
        assert await store.enqueue(TENANT, [NewTask(command="again", id=ids[0])]) == [Enqueued(ids[0])]
        assert (await take(store, "again")).id == ids[0]
        assert (await assert_counts(store)).ready == 4

    async def test_rows_that_are_not_kept(self, store: Store, clock: ManualClock) -> None:
        """With `keep=False` body and result go at completion; who comes later finds the state for a minute."""
        ids = await load(store, some_rows(4, keep=False))
        for lease in await take_many(store, 2):
            await complete(store, lease)
        assert (await look(store, ids[0])).payload == b""
        assert (await assert_counts(store)).bytes == 2
        await pass_time(store, clock, 61)
        assert await store.get(TENANT, ids[:2]) == [None, None]
        assert (await assert_counts(store)).ready == 2

    async def test_a_paused_queue_keeps_its_rows(self, store: Store) -> None:
        """Rows are committed into a paused queue, shown and counted, and claimed when it goes on."""
        await store.configure(TENANT, COMMAND, QueueConfig(paused=True))
        ids = await load(store, some_rows(4), some_rows(2, "other"))
        assert await nothing_ready(store)
        assert (await assert_counts(store)).ready == 6
        assert len(await drain(store, COMMAND, "other")) == 2
        await store.configure(TENANT, COMMAND, QueueConfig())
        assert_order(store.order, ids[:4], await drain(store))

    async def test_the_queues_defaults_are_those_of_the_commit(self, store: Store, clock: ManualClock) -> None:
        """What a row leaves open is taken from the queue as it is when the load is committed, as for an enqueue."""
        await store.configure(TENANT, COMMAND, QueueConfig(priority=1, max_attempts=9, result_ttl_s=5))
        chunk = await stage(store, [*some_rows(2), *some_rows(1, priority=7, max_attempts=2, result_ttl_s=50)])
        await store.configure(TENANT, COMMAND, QueueConfig(priority=4, max_attempts=3, result_ttl_s=20))
        await commit(store, chunk)
        plain = (await line_up(store))[0]
        await store.configure(TENANT, COMMAND, QueueConfig(priority=8, max_attempts=7, result_ttl_s=70))
        leases = await take_many(store, 4)
        assert [(lease.priority, lease.max_attempts) for lease in leases] == [(7, 2), (4, 3), (4, 3), (4, 3)]
        assert leases[3].id == plain
        for lease in leases:
            await complete(store, lease)
        kept = [(await look(store, lease.id)).kept_until_ms for lease in leases]
        assert kept == [clock.now_ms() + 1_000 * ttl_s for ttl_s in (50, 20, 20, 20)]

    @pytest.mark.usefixtures("no_fallback")
    async def test_a_waiting_claim_is_woken(self, store: Store) -> None:
        """A commit wakes a claim that waits for one of its queues, and staging does not."""
        async with waiting(store.claim(TENANT, ["a", "b"], wait_s=LONG_S)) as [claim]:
            chunk = await stage(store, some_rows(2, "b"))
            await asyncio.sleep(0.1)
            assert not claim.done()
            await commit(store, chunk)
            [lease] = await soon(claim)
        assert lease.command == "b"

    @pytest.mark.usefixtures("no_fallback")
    async def test_a_commit_wakes_as_many_as_have_work(self, store: Store) -> None:
        """Several waiting claims share the rows of one commit; nobody is stranded."""
        claims = (store.claim(TENANT, [COMMAND], wait_s=LONG_S) for _ in range(5))
        async with waiting(*claims) as waits:
            ids = await load(store, some_rows(2), some_rows(3))
            leases = [lease for wait in waits for lease in await soon(wait)]
        assert sorted(lease.id for lease in leases) == sorted(ids)

    @pytest.mark.usefixtures("no_fallback")
    async def test_a_commit_wakes_no_more_than_it_has_rows(self, store: Store) -> None:
        """Three rows wake three of six waiters."""
        with ExitStack() as stack:
            waiters = [stack.enter_context(store.subscribe([Ready(TENANT, COMMAND)])) for _ in range(6)]
            await load(store, some_rows(2), some_rows(1), some_rows(5, "other"))
            await asyncio.sleep(0.1)
            assert sum(waiter.woken for waiter in waiters) == 3

    @pytest.mark.usefixtures("no_fallback")
    async def test_another_clients_claim_is_woken(self, store: Store, second: Store) -> None:
        """What one client commits wakes a claim that waits at another."""
        async with waiting(store.claim(TENANT, [COMMAND], wait_s=LONG_S)) as [claim]:
            [task_id] = await load(second, some_rows(1))
            [lease] = await soon(claim)
        assert lease.id == task_id

    @pytest.mark.usefixtures("no_fallback")
    async def test_waiting_for_a_row(self, store: Store) -> None:
        """A wait for a row that nobody has claimed yet is told how it ends, like any other."""
        ids = await load(store, some_rows(3))
        async with waiting(*(store.wait(TENANT, [task_id], LONG_S) for task_id in ids)) as waits:
            assert not any(wait.done() for wait in waits)
            await store.cancel(TENANT, [ids[2]])
            [task] = await soon(waits[2])
            assert task.status is Status.CANCELLED
            for lease in await take_many(store, 2):
                await complete(store, lease)
            for wait in waits[:2]:
                [task] = await soon(wait)
                assert task.status is Status.COMPLETED


@pytest.mark.anyio
class TestCancelledRows:
    """A row can be cancelled wherever it stands; then it is never delivered."""

    @pytest.mark.parametrize(
        "which",
        [[0], [9], [10], [19], [4, 5, 6], [0, 9, 10, 19], list(range(10)), list(range(20)), list(range(0, 20, 2))],
        ids=repr,
    )
    @pytest.mark.parametrize("taken", [0, 3, 12])
    async def test_before_it_is_reached(self, store: Store, which: list[int], taken: int) -> None:
        """At the beginning, in the middle, at the end of a chunk, or all of it: gone at once, the others as before."""
        ids = await load(store, some_rows(10), some_rows(10))
        first = [lease.id for lease in await take_many(store, taken)] if taken else []
        cancelled = [ids[n] for n in which if ids[n] not in first]
        expected = Cancelled("cancelled", Status.CANCELLED)
        assert await store.cancel(TENANT, cancelled) == [expected] * len(cancelled)
        total = await assert_counts(store)
        assert (total.ready, total.leased) == (20 - taken - len(cancelled), taken)
        for task_id in cancelled:
            task = await look(store, task_id)
            assert (task.status, task.place, task.reason) == (Status.CANCELLED, Place.NONE, "CANCELLED")
            assert task.result is not None
            assert await kinds_of(store, task_id) == [EventKind.ENQUEUED, EventKind.CANCELLED]
        left = [task_id for task_id in ids if task_id not in cancelled and task_id not in first]
        assert_order(store.order, left, await drain(store, limit=3))
        assert (await assert_counts(store)).ready == 0

    async def test_twice(self, store: Store) -> None:
        """The second cancel, in the same call or later, finds it ended."""
        ids = await load(store, some_rows(5))
        expected = [Cancelled("cancelled", Status.CANCELLED), Cancelled("ended", Status.CANCELLED)]
        assert await store.cancel(TENANT, [ids[2], ids[2]]) == expected
        assert await store.cancel(TENANT, [ids[2], ids[3]]) == expected[::-1]
        assert len(await drain(store)) == 3

    async def test_while_delayed(self, store: Store, clock: ManualClock) -> None:
        """A delayed row that was cancelled does not come when it would be due."""
        ids = await load(store, some_rows(5, delay_s=60))
        await store.cancel(TENANT, [ids[0], ids[3]])
        assert (await assert_counts(store)).delayed == 3
        assert (await pass_time(store, clock, 60)).promoted == 3
        assert (await assert_counts(store)).ready == 3
        assert sorted(await drain(store)) == sorted([ids[1], ids[2], ids[4]])

    async def test_after_it_was_promoted(self, store: Store, clock: ManualClock) -> None:
        """A row that fell due and waits to be claimed is cancelled like any other."""
        ids = await load(store, some_rows(5, delay_s=60))
        await pass_time(store, clock, 60)
        await store.cancel(TENANT, [ids[0], ids[3]])
        assert (await assert_counts(store)).ready == 3
        assert sorted(await drain(store)) == sorted([ids[1], ids[2], ids[4]])

    async def test_while_in_progress(self, store: Store) -> None:
        """The holder of a row is told to stop; the rest of its block is not touched."""
        ids = await load(store, some_rows(4))
        lease = await take(store)
        assert await store.cancel(TENANT, [lease.id]) == [Cancelled("cancelling", Status.IN_PROGRESS)]
        assert await settle(store, lease, Kind.RETRY) is not None
        assert (await look(store, lease.id)).status is Status.CANCELLED
        assert_order(store.order, ids[1:], await drain(store))

    async def test_released_then_cancelled(self, store: Store) -> None:
        """A row that was given back is cancelled where it stands."""
        ids = await load(store, some_rows(4))
        await release(store, await take(store))
        assert await store.cancel(TENANT, [ids[0]]) == [Cancelled("cancelled", Status.CANCELLED)]
        assert_order(store.order, ids[1:], await drain(store))

    async def test_many_at_once(self, store: Store) -> None:
        """A cancel of thousands of rows, and of ids between them that nobody knows, answers each in its place."""
        ids = await load(store, some_rows(1_000), some_rows(1_000))
        refs = [ref for n, task_id in enumerate(ids) for ref in ([task_id, new_id()] if n % 100 == 0 else [task_id])]
        outcomes = await store.cancel(TENANT, refs)
        assert [outcome.how for outcome in outcomes].count("unknown") == 20
        assert [outcome.how for outcome in outcomes].count("cancelled") == 2_000
        assert (await assert_counts(store)).ready == 0
        assert await nothing_ready(store)

    async def test_against_a_claim(self, store: Store) -> None:
        """Cancels and claims at the same time: each row is either delivered or gone, and all are accounted for."""
        ids = await load(store, some_rows(60))
        claims, cancels = await asyncio.gather(
            asyncio.gather(*(store.claim(TENANT, [COMMAND], limit=5, worker=f"w{n}") for n in range(4))),
            asyncio.gather(*(store.cancel(TENANT, ids[n::4][:8]) for n in range(4))),
        )
        gone = sum(outcome.how == "cancelled" for outcomes in cancels for outcome in outcomes)
        held = {lease.id for leases in claims for lease in leases}
        assert len(held) == 20
        total = await assert_counts(store)
        assert (total.leased, total.ready) == (20, 40 - gone)
        rest = await drain(store)
        assert not held & set(rest)
        assert len(rest) == 40 - gone

    async def test_retention_takes_cancelled_rows(self, store: Store, clock: ManualClock) -> None:
        """In their time they go, while their neighbours still wait in their chunk."""
        ids = await load(store, some_rows(6))
        await store.cancel(TENANT, ids[1:3])
        await pass_time(store, clock, 2 * 86_400)
        assert await store.get(TENANT, ids[1:3]) == [None, None]
        assert_order(store.order, [ids[0], *ids[3:]], await drain(store))
        assert sorted(task.id for task in await list_all(store)) == sorted([ids[0], *ids[3:]])
