"""Values of wrong types, and times that are none: nothing gets as far as a record that could never be read again."""

from __future__ import annotations

from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.errors import InvalidInput, JournalError
from dibs.ids import new_id
from dibs.stores.protocol import Store
from dibs.task import Already, Enqueued, Filter, Kind, NewTask, Place, Rejected, Status
from dibs.testing.contract.steps import COMMAND, TENANT, complete, look, put, put_dead, read_events, settle, take


@pytest.mark.anyio
class TestWrongTypes:
    """What is of a wrong type is refused before it is written."""

    @pytest.mark.parametrize("worker", [None, 0, False, b"", [], {}], ids=repr)
    async def test_a_worker_is_named_by_text(self, store: Store, worker: Any) -> None:
        """A claim whose worker is no text is refused, and the queue is as it was."""
        await put(store)
        with pytest.raises(InvalidInput):
            await store.claim(TENANT, [COMMAND], worker=worker)
        await complete(store, await take(store))
        assert await read_events(store)

    @pytest.mark.parametrize(
        "fields", [{"status": "FAILED"}, {"place": "x"}, {"command": "a b"}, {"ended_from_ms": "x"}], ids=repr
    )
    async def test_a_filter_is_of_the_right_words(self, store: Store, fields: dict[str, Any]) -> None:
        """A word that is none is refused instead of matching nothing in silence."""
        dead = await put_dead(store)
        with pytest.raises(InvalidInput):
            await store.list(TENANT, Filter(**fields))
        with pytest.raises(InvalidInput):
            await store.replay(TENANT, Filter(**fields))
        with pytest.raises(InvalidInput):
            await store.purge(TENANT, Filter(**fields))
        assert (await look(store, dead)).place is Place.DEAD

    @pytest.mark.parametrize("fields", [{"place": Place.READY}, {"status": Status.COMPLETED}], ids=repr)
    async def test_only_the_dead_can_be_replayed(self, store: Store, fields: dict[str, Any]) -> None:
        """A replay that names another place or status is refused, not widened."""
        dead = await put_dead(store)
        with pytest.raises(InvalidInput):
            await store.replay(TENANT, Filter(**fields))
        assert (await look(store, dead)).place is Place.DEAD

    async def test_one_unhashable_item_does_not_spoil_the_batch(self, store: Store) -> None:
        """Even a command that is a list is the item's own fault."""
        bad: Any = [COMMAND]
        outcomes = await store.enqueue(TENANT, [NewTask(command=COMMAND), NewTask(command=bad)])
        assert [type(outcome) for outcome in outcomes] == [Enqueued, Rejected]

    async def test_a_generator_is_a_batch_too(self, store: Store) -> None:
        """Whatever can be gone through once is taken; a single task is told to be put into a list."""
        tasks: Any = (NewTask(command=COMMAND) for _ in range(3))
        assert len(await store.enqueue(TENANT, tasks)) == 3
        one: Any = NewTask(command=COMMAND)
        with pytest.raises(InvalidInput, match="list"):
            await store.enqueue(TENANT, one)

    @pytest.mark.parametrize("position", [b"", b"short", b"x" * 32], ids=repr)
    async def test_a_reader_stands_in_this_journal(self, store: Store, position: bytes) -> None:
        """A named reader cannot be put where this store's journal has no place."""
        with pytest.raises((InvalidInput, JournalError)):
            await store.advance("reader", 0, position)
        assert not await store.readers()


@pytest.mark.anyio
class TestNoTime:
    """Kept for no time at all, a task is still known for a minute."""

    async def test_repeats_are_recognised(self, store: Store) -> None:
        """With `result_ttl_s=0` the result is gone at once, but a repeated settle or enqueue is told `already`."""
        task_id = await put(store, id=new_id(), result_ttl_s=0)
        lease = await take(store)
        await complete(store, lease)
        assert isinstance(await settle(store, lease, Kind.COMPLETE), Already)
        assert await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id)]) == [Enqueued(task_id, True)]
        assert (await look(store, task_id)).result is None

    async def test_many_past_their_start_hide_nothing(self, store: Store, clock: ManualClock) -> None:
        """However many tasks at the head missed their start, a claim finds what is behind them."""
        await store.enqueue(TENANT, [NewTask(command=COMMAND, expires_s=1) for _ in range(2_500)])
        behind = await put(store)
        clock.advance(2)
        assert (await take(store)).id == behind
