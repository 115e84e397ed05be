"""Keys of rows: decided when a row is reached; one holder at a time, and a loser says whose fault it was not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import ByKey, Cancelled, Duplicate, Enqueued, EventKind, NewTask, Place, Result, Status
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    drain,
    fail,
    kinds_of,
    load,
    look,
    nothing_ready,
    pass_time,
    put,
    put_completed,
    put_dead,
    read_events,
    release,
    some_rows,
    sweep_all,
    take,
)


def keyed(*keys: str | None, command: str = COMMAND, **options: Any) -> list[NewTask]:
    """Returns a row for each key."""
    return [NewTask(command=command, key=key, payload=b"%d" % n, **options) for n, key in enumerate(keys)]


async def assert_lost(store: Store, *ids: bytes) -> None:
    """The rows ended because their key had another holder: told, counted, with a result."""
    for task_id in ids:
        task = await look(store, task_id)
        assert (task.status, task.place, task.reason) == (Status.CANCELLED, Place.NONE, "DUPLICATE")
        assert task.attempts == 0
        assert task.result is not None
        assert (task.result.status, task.result.reason) == (Status.CANCELLED, "DUPLICATE")
        kinds = await kinds_of(store, task_id)
        assert [kind for kind in kinds if kind != "promoted"] == [EventKind.ENQUEUED, EventKind.CANCELLED]
        [event] = [one for one in await read_events(store) if one.id == task_id and one.kind == "cancelled"]
        assert event.reason == "DUPLICATE"


async def again(store: Store, key: str = "k", **options: Any) -> object:
    """Enqueues with a key that may be taken."""
    [outcome] = await store.enqueue(TENANT, [NewTask(command=COMMAND, key=key, **options)])
    return outcome


@pytest.mark.anyio
class TestLoadKeys:
    """At most one task at a time holds a key, rows of loads included."""

    @pytest.mark.parametrize("limit", [1, 7, 1_000])
    async def test_the_first_of_a_load_wins(self, store: Store, limit: int) -> None:
        """Of rows with one key, in one chunk or in several, the first is delivered; the others end as duplicates."""
        ids = await load(store, keyed("a", "b", "a", None, "a"), keyed("b", "c", "a"), keyed("c"))
        claimed = await drain(store, limit=limit)
        assert sorted(claimed) == sorted([ids[0], ids[1], ids[3], ids[6]])
        await assert_lost(store, ids[2], ids[4], ids[5], ids[7], ids[8])
        total = await assert_counts(store)
        assert (total.ready, total.leased) == (0, 4)

    async def test_a_load_of_losers_hides_nothing(self, store: Store) -> None:
        """However many rows lose their key, a claim finds what is behind them."""
        first = await put(store, key="k")
        lease = await take(store, lease_s=3600)
        ids = await load(store, *([some_rows(1_000, key="k")] * 2))
        behind = await put(store)
        claimed = [lease.id for lease in await store.claim(TENANT, [COMMAND], limit=10)]
        assert claimed == [behind]
        assert await nothing_ready(store)
        assert {task.reason for task in await store.get(TENANT, ids) if task is not None} == {"DUPLICATE"}
        total = await assert_counts(store)
        assert (total.ready, total.leased) == (0, 2)
        assert lease.id == first

    @pytest.mark.parametrize("stands", ["ready", "delayed", "leased", "completed", "dead"])
    async def test_who_was_there_before_wins(self, store: Store, stands: str) -> None:
        """A plain task that holds the key when a row is reached keeps it, however it stands."""
        if stands == "completed":
            first = await put_completed(store, key="k", result=b"1")
        elif stands == "dead":
            first = await put_dead(store, key="k")
        else:
            first = await put(store, key="k", delay_s=60 if stands == "delayed" else 0)
        if stands == "leased":
            await take(store)
        before = await look(store, first)
        [row, other] = await load(store, keyed("k", "other"))
        claimed = await drain(store)
        assert sorted(claimed) == sorted([first, other] if stands == "ready" else [other])
        await assert_lost(store, row)
        if stands != "ready":
            assert await look(store, first) == before
        assert isinstance(await again(store), Duplicate), "the loser did not free what was never its own"

    async def test_a_row_that_was_claimed_holds_its_key(self, store: Store) -> None:
        """From then on it is the first: enqueues with the key are its duplicates at every stage."""
        [row, *_] = await load(store, keyed("k", None, None))
        lease = await take(store)
        assert lease.key == "k"
        assert await again(store) == Duplicate(row, Status.IN_PROGRESS)
        assert (await store.get(TENANT, [ByKey(COMMAND, "k")]))[0] == await look(store, row)
        await complete(store, lease, b"42")
        assert await again(store) == Duplicate(row, Status.COMPLETED, Result(Status.COMPLETED, b"42"))

    async def test_a_later_load_meets_the_first(self, store: Store) -> None:
        """The same rows loaded twice, as two loads: each key runs once."""
        first = await load(store, keyed("a", "b", "c"))
        second = await load(store, keyed("a", "b", "c", "d"))
        claimed = await drain(store, limit=2)
        assert sorted(claimed) == sorted([*first, second[3]])
        await assert_lost(store, *second[:3])

    async def test_enqueued_between_commit_and_claim(self, store: Store) -> None:
        """A plain task with the key of a row that waits: one of the two is delivered, the other is told so."""
        [row] = await load(store, keyed("k"))
        outcome = await again(store, payload=b"plain")
        claimed = await drain(store)
        assert len(claimed) == 1
        if isinstance(outcome, Enqueued):
            assert claimed == [outcome.id]
            await assert_lost(store, row)
        else:
            assert outcome == Duplicate(row, Status.PENDING)
            assert claimed == [row]

    async def test_keys_are_the_commands_own(self, store: Store) -> None:
        """The same key of another command, or of another tenant, is another key."""
        await load(store, keyed("k"), keyed("k", command="other"))
        await load(store, keyed("k"), tenant="other")
        assert len(await drain(store, COMMAND, "other")) == 2
        assert len(await drain(store, tenant="other")) == 1

    async def test_higher_priorities_are_reached_first(self, store: Store) -> None:
        """Of rows with one key the one that is claimed first wins, not the one that was written first."""
        [low, high] = await load(store, keyed("k", priority=1) + keyed("k", priority=2))
        claimed = await drain(store)
        assert len(claimed) == 1
        if store.order.kind != "window":
            assert claimed == [high]
            await assert_lost(store, low)

    async def test_replay_dead_revives_the_first(self, store: Store) -> None:
        """A row that asks for it has the dead letter that holds its key run again, and ends as its duplicate."""
        dead = await put_dead(store, key="k")
        [row, other] = await load(store, keyed("k", "other", on_duplicate="replay_dead"))
        claimed = await drain(store)
        assert sorted(claimed) == sorted([dead, other])
        await assert_lost(store, row)
        assert (await look(store, dead)).attempts == 1
        assert EventKind.REPLAYED in await kinds_of(store, dead)
        await assert_counts(store)

    async def test_replay_dead_leaves_the_living(self, store: Store) -> None:
        """A holder that is not dead is not touched."""
        first = await put_completed(store, key="k")
        before = await look(store, first)
        [row] = await load(store, keyed("k", on_duplicate="replay_dead"))
        assert await nothing_ready(store)
        await assert_lost(store, row)
        assert await look(store, first) == before

    async def test_a_dead_row_may_be_revived(self, store: Store) -> None:
        """A row that failed holds its key as a dead letter does."""
        [row, _] = await load(store, keyed("k", None))
        await fail(store, await take(store))
        assert await again(store) == Duplicate(row, Status.FAILED, (await look(store, row)).result)
        assert await again(store, on_duplicate="replay_dead") == Duplicate(row, Status.PENDING, replayed=True)
        assert sorted(await drain(store))[0] == row

    @pytest.mark.parametrize("reached", [True, False])
    async def test_a_cancelled_row_holds_nothing(self, store: Store, reached: bool) -> None:
        """Its key is free at once, also when it was cancelled before a claim came to it."""
        [row, _] = await load(store, keyed("k") + some_rows(1, "other"))
        if reached:
            await release(store, await take(store))
        assert await store.cancel(TENANT, [row]) == [Cancelled("cancelled", Status.CANCELLED)]
        outcome = await again(store)
        assert isinstance(outcome, Enqueued)
        assert await drain(store) == [outcome.id]

    async def test_a_loser_that_is_cancelled_first(self, store: Store) -> None:
        """A row that would have lost its key may be cancelled before: it ends, and the holder keeps the key."""
        first = await put(store, key="k", delay_s=60)
        [row, other] = await load(store, keyed("k", None))
        [outcome] = await store.cancel(TENANT, [row])
        assert outcome.status is Status.CANCELLED
        assert (await look(store, row)).status is Status.CANCELLED
        assert await again(store) == Duplicate(first, Status.PENDING)
        assert await drain(store) == [other]

    async def test_a_cancel_revives_nobody(self, store: Store) -> None:
        """Cancelling a row that asks for `replay_dead` before it is reached leaves the dead letter dead."""
        dead = await put_dead(store, key="k")
        before = await look(store, dead)
        [row] = await load(store, keyed("k", on_duplicate="replay_dead"))
        [outcome] = await store.cancel(TENANT, [row])
        assert outcome.status is Status.CANCELLED
        assert await look(store, dead) == before
        assert await nothing_ready(store)

    async def test_an_expired_row_holds_nothing(self, store: Store, clock: ManualClock) -> None:
        """A row that was not started in time leaves its key to the next."""
        [late, _] = await load(store, keyed("k", None, expires_s=60))
        await pass_time(store, clock, 61)
        assert (await look(store, late)).reason == "EXPIRED"
        assert isinstance(await again(store), Enqueued)
        assert len(await drain(store)) == 1

    async def test_a_key_whose_holder_is_gone_is_free(self, store: Store, clock: ManualClock) -> None:
        """Once retention let the first go, a row that is reached has the key to itself, swept or not."""
        await put_completed(store, key="k", result_ttl_s=60)
        [row] = await load(store, keyed("k"))
        clock.advance(61)
        assert await drain(store) == [row]
        assert await again(store) == Duplicate(row, Status.IN_PROGRESS)

    async def test_delayed_rows_with_keys(self, store: Store, clock: ManualClock) -> None:
        """A key is decided when its row is due or reached, not while it is delayed."""
        ids = await load(store, keyed("k", "k", delay_s=60), keyed("k"))
        assert await drain(store, lease_s=3600) == [ids[2]]
        await pass_time(store, clock, 60)
        assert await nothing_ready(store)
        await assert_lost(store, *ids[:2])
        await assert_counts(store)

    @pytest.mark.parametrize("by", ["sweep", "claim"])
    async def test_chunks_that_fall_due_together(self, store: Store, clock: ManualClock, by: str) -> None:
        """Rows of several chunks with one key, due at the same time: one of them is delivered."""
        ids = await load(store, *([keyed("k", "other", None, delay_s=60)] * 3))
        clock.advance(60)
        if by == "sweep":
            await sweep_all(store)
        claimed = await drain(store)
        assert len(claimed) == 5
        await assert_lost(store, *(task_id for task_id in ids if task_id not in claimed))
        assert (await assert_counts(store)).ready == 0

    async def test_chunks_with_deadlines_that_pass_together(self, store: Store, clock: ManualClock) -> None:
        """Rows of several chunks with one key, beside rows whose start deadline passes: one of them is delivered."""
        ids = await load(store, *([some_rows(1, expires_s=1) + keyed("k", "k")] * 3))
        await pass_time(store, clock, 2)
        claimed = await drain(store)
        assert len(claimed) == 1
        late = ids[::3]
        assert {(await look(store, task_id)).reason for task_id in late} == {"EXPIRED"}
        await assert_lost(store, *(task_id for task_id in ids if task_id not in claimed and task_id not in late))
        assert (await assert_counts(store)).ready == 0

    async def test_a_key_that_is_freed_as_rows_fall_due(self, store: Store, clock: ManualClock) -> None:
        """Who held the key is taken back, cancelled, by the same sweep: the row that falls due has the key."""
        first = await put(store, key="k")
        await take(store)
        await store.cancel(TENANT, [first])
        [row] = await load(store, keyed("k", delay_s=60))
        await pass_time(store, clock, 60)
        assert (await look(store, first)).status is Status.CANCELLED
        assert await drain(store) == [row]

    async def test_rows_that_are_not_kept_free_their_key(self, store: Store) -> None:
        """With `keep=False` the key goes at completion, and a later row with it runs."""
        [first, second] = await load(store, keyed("k", "k", keep=False))
        lease = await take(store)
        assert lease.id == first or store.order.kind == "window"
        await complete(store, lease)
        statuses = {(await look(store, task_id)).status for task_id in (first, second)}
        assert Status.COMPLETED in statuses
        rest = await drain(store)
        assert rest in ([], [second])
        assert isinstance(await again(store), Enqueued if not rest else Duplicate)

    async def test_many_claims_at_once_deliver_a_key_once(self, store: Store) -> None:
        """Claims that share a transaction, or race, decide each key once."""
        ids = await load(store, *([keyed(*(f"k{n}" for n in range(10)))] * 6))
        answers = await asyncio.gather(*(store.claim(TENANT, [COMMAND], limit=3, worker=f"w{n % 3}") for n in range(9)))
        claimed = [lease for leases in answers for lease in leases]
        claimed += [lease for _ in range(3) for lease in await store.claim(TENANT, [COMMAND], limit=100)]
        assert sorted(lease.key or "" for lease in claimed) == sorted(f"k{n}" for n in range(10))
        won = {lease.id for lease in claimed}
        await assert_lost(store, *(task_id for task_id in ids if task_id not in won))
        assert (await assert_counts(store)).ready == 0

    async def test_a_claim_and_an_enqueue_at_once(self, store: Store) -> None:
        """A claim that reaches a keyed row while others enqueue its key: one task of that key is alive."""
        for turn in range(10):
            key = f"key {turn}"
            [row] = await load(store, keyed(key))
            enqueues = [store.enqueue(TENANT, [NewTask(command=COMMAND, key=key)]) for _ in range(3)]
            claim = store.claim(TENANT, [COMMAND], limit=5)
            calls: list[Any] = [claim, *enqueues] if turn % 2 else [*enqueues, claim]
            answers = await asyncio.gather(*calls)
            leases = answers.pop(0 if turn % 2 else -1)
            outcomes = [outcome for answer in answers for outcome in answer]
            made = [outcome.id for outcome in outcomes if isinstance(outcome, Enqueued)]
            alive = {lease.id for lease in leases} | set(await drain(store))
            assert len(alive) == 1
            assert len(made) <= 1
            assert alive == set(made or [row])

    async def test_the_key_leads_to_the_holder(self, store: Store) -> None:
        """Looking and cancelling by key is about who holds it, not about rows that will lose."""
        first = await put(store, key="k", delay_s=60)
        await load(store, keyed("k"))
        [task] = await store.get(TENANT, [ByKey(COMMAND, "k")])
        assert task is not None
        assert task.id == first
        assert await store.cancel(TENANT, [ByKey(COMMAND, "k")]) == [Cancelled("cancelled", Status.CANCELLED)]
        assert len(await drain(store)) == 1, "the key is free now, and the row has it"
