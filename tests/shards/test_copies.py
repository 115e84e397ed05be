from __future__ import annotations

from pathlib import Path

import pytest

from dibs.clock import ManualClock
from dibs.errors import StoreRefused
from dibs.stores import open_local, restore_store
from dibs.testing.contract.steps import TENANT, in_slot, look, put
from tests.shards.faults import RELAXED, directories

pytestmark = pytest.mark.anyio


async def test_a_copy_is_a_set_of_its_own(tmp_path: Path, clock: ManualClock) -> None:
    """A backup, and what is restored from it, hold what the set held; what happens later to one is not in the other."""
    async with await open_local(f"shards:{tmp_path / 'set'}?n=3", clock=clock, settings=RELAXED) as store:
        ids = [await put(store, id=in_slot(slot)) for slot in range(6)]
        await store.backup(tmp_path / "copy")
        await store.cancel(TENANT, ids)
    await restore_store(tmp_path / "copy", tmp_path / "restored")
    for name in ("copy", "restored"):
        assert len(directories(tmp_path / name)) == 3
        async with await open_local(f"shards:{tmp_path / name}", clock=clock, settings=RELAXED) as copy:
            assert [(await look(copy, task_id)).id for task_id in ids] == ids
            assert (await copy.stats(TENANT)).total.ready == 6
            assert (await copy.doctor()).clean


async def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """A directory with something in it takes no copy, and half a copy is not left behind."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    async with await open_local(f"shards:{tmp_path / 'set'}?n=2", settings=RELAXED) as store:
        with pytest.raises(StoreRefused):
            await store.backup(tmp_path / "taken")
        await store.backup(tmp_path / "copy")
    with pytest.raises(StoreRefused):
        await restore_store(tmp_path / "copy", tmp_path / "taken")
    async with await open_local("shards:memory:?n=2") as memory:
        with pytest.raises(StoreRefused):
            await memory.backup(tmp_path / "none")
    assert names(tmp_path) == ["copy", "set", "taken"]


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return sorted(path.name for path in directory.iterdir())
