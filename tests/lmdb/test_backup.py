"""A backup is another store with the same tasks, as of one moment."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from dibs.clock import ManualClock
from dibs.errors import ForeignDirectory, JournalReset, StoreRefused
from dibs.stores import open_local
from dibs.stores.ordered.lmdb import restore
from dibs.stores.ordered.store import OrderedStore
from dibs.task import Status
from dibs.testing.contract.steps import (
    TENANT,
    assert_counts,
    complete,
    drain,
    list_all,
    look,
    put,
    put_many,
    read_shard,
    take,
)


async def test_a_backup_while_producers_write(store: OrderedStore, clock: ManualClock, tmp_path: Path) -> None:
    """Everything acknowledged before it began is in it, nothing is torn, and production does not stop."""
    before = await put_many(store, 500)
    acknowledged: list[bytes] = []
    going, stop = asyncio.Event(), asyncio.Event()

    async def produce() -> None:
        while not stop.is_set():
            acknowledged.extend(await put_many(store, 20))
            going.set()

    producers = [asyncio.ensure_future(produce()) for _ in range(4)]
    await going.wait()
    known, copied = 0, tmp_path
    # Where the disk is slow, a copy may be made between two of their batches: then there is another.
    for copied in (tmp_path / f"copy-{number}" for number in itertools.count()):
        known = len(acknowledged)
        await store.backup(copied)
        if len(acknowledged) > known:
            break
    before += acknowledged[:known]
    stop.set()
    await asyncio.gather(*producers)
    restore(copied, tmp_path / "restored")
    for directory in (copied, tmp_path / "restored"):
        async with await open_local(str(directory), clock=clock) as copy:
            assert None not in await copy.get(TENANT, before)
            assert {task.id for task in await list_all(copy, limit=1_000)} <= {*before, *acknowledged}
            await assert_counts(copy)
            assert (await copy.doctor()).clean
    assert (await store.stats(TENANT)).total.ready == 500 + len(acknowledged)


async def test_a_copy_is_another_store(store: OrderedStore, clock: ManualClock, tmp_path: Path) -> None:
    """It has an id of its own, its journal is its own, and a cursor of the original is refused, not misread."""
    await put_many(store, 3)
    [bounds] = await store.journal_bounds()
    cursor = (await read_shard(store))[0].cursor
    await store.backup(tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "restored")
    ids = {store.store_id}
    for directory in (tmp_path / "copy", tmp_path / "restored"):
        async with await open_local(str(directory), clock=clock) as copy:
            ids.add(copy.store_id)
            for old in (cursor, bounds.oldest, bounds.newest):
                with pytest.raises(JournalReset):
                    await copy.events(TENANT, after=old)
            assert [event.id for event in await read_shard(copy)] == [event.id for event in await read_shard(store)]
    assert len(ids) == 3
    assert len(await read_shard(store)) == 3


async def test_a_restored_store_goes_on(store: OrderedStore, clock: ManualClock, tmp_path: Path) -> None:
    """Order, leases and journal go on where the original stood; the compacting copy did not set the version back."""
    ids = await put_many(store, 3)
    lease = await take(store)
    await store.backup(tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "restored")
    async with await open_local(str(tmp_path / "restored"), clock=clock) as restored:
        later = await put(restored)
        await complete(restored, lease)
        assert await drain(restored) == [*ids[1:], later]
        cursors = [event.cursor for event in await read_shard(restored)]
        assert cursors == sorted(set(cursors))
        assert (await restored.doctor()).clean
    assert (await look(store, lease.id)).status is Status.IN_PROGRESS


async def test_what_is_there_is_not_overwritten(store: OrderedStore, tmp_path: Path) -> None:
    """Neither a backup nor a restore goes into a directory that holds anything; a restore needs a backup."""
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(StoreRefused):
        await store.backup(taken)
    await store.backup(tmp_path / "copy")
    with pytest.raises(StoreRefused):
        restore(tmp_path / "copy", taken)
    with pytest.raises(ForeignDirectory):
        restore(taken, tmp_path / "new")
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]


async def test_what_cannot_be_written_is_refused(store: OrderedStore, tmp_path: Path) -> None:
    """A file in the way, or a backup that is rubbish, is told as a refusal and not as the system's error."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreRefused, match="is not empty"):
        await store.backup(tmp_path / "file")
    await store.backup(tmp_path / "copy")
    with pytest.raises(StoreRefused, match="cannot take the copy"):
        restore(tmp_path / "copy", tmp_path / "file" / "below")
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "data.mdb").write_bytes(b"rubbish" * 10_000)
    with pytest.raises(StoreRefused):
        restore(tmp_path / "rubbish", tmp_path / "new")


async def test_a_copy_that_fails_leaves_nothing(store: OrderedStore, tmp_path: Path) -> None:
    """Half a copy is never taken for one: after a failed restore the same name can be used again."""
    await store.backup(tmp_path / "copy")
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "data.mdb").write_bytes(b"rubbish" * 10_000)
    before = names(tmp_path)
    with pytest.raises(StoreRefused):
        restore(tmp_path / "rubbish", tmp_path / "new")
    assert names(tmp_path) == before
    restore(tmp_path / "copy", tmp_path / "new")
    assert (tmp_path / "new" / "data.mdb").is_file()


def names(directory: Path) -> list[str]:
    """Returns what is in a directory."""
    return sorted(path.name for path in directory.iterdir())
