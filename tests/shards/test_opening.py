from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from dibs.clock import ManualClock, SystemClock
from dibs.errors import ShardMismatch, StoreMissing, UnknownScheme
from dibs.ids import id_to_text
from dibs.stores import open_local, open_single
from dibs.stores.sharded import table
from dibs.stores.sharded.table import membership_of
from dibs.stores.sharded.urls import Named, listed, parse
from dibs.task import NewTask
from dibs.testing.contract.steps import TENANT, in_slot, look, put
from tests.lmdb.processes import Children
from tests.shards.faults import RELAXED, Crash, directories

pytestmark = pytest.mark.anyio


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("/data?n=4", Named(base="lmdb:/data", count=4)),
        ("lmdb:/data/?n=2", Named(base="lmdb:/data", count=2)),
        ("./data", Named(base="lmdb:./data")),
        ("memory:name?n=256", Named(base="memory:name", count=256)),
        ("memory:?n=1", Named(base="memory:", count=1)),
        ("[lmdb:/a, /b]", Named(urls=("lmdb:/a", "/b"), count=2)),
    ],
)
def test_what_a_text_names(text: str, named: Named) -> None:
    """Each form says where the shards are, and how many if it does."""
    assert parse(text) == named


@pytest.mark.parametrize(
    "text",
    ["", "?n=4", "/data?n=0", "/data?n=257", "/data?n=x", "/data?m=4", "[/a,/b", "[]", "[/a,]", "redis://host",
     "[shards:/a,/b]"],
)  # fmt: skip
async def test_what_names_no_shards(text: str) -> None:
    """A text that cannot be meant is refused, and nothing is made."""
    with pytest.raises(UnknownScheme):
        await open_local(f"shards:{text}")


def test_each_shard_is_a_store_of_its_own() -> None:
    """One store twice in a list is refused; stores in memory without a name are different ones."""
    with pytest.raises(ShardMismatch):
        listed(["/a", "/b", "/a"])
    assert listed(["memory:", "memory:"]).count == 2


async def test_the_number_is_given_once(tmp_path: Path) -> None:
    """A set knows how many shards it has: later the number may be left out, and another is refused."""
    with pytest.raises(ShardMismatch, match=r"\?n="):
        await open_local(f"shards:{tmp_path / 'set'}")
    async with await open_local(f"shards:{tmp_path / 'set'}?n=3", settings=RELAXED) as store:
        ids = [await put(store, id=in_slot(slot)) for slot in range(6)]
    assert len(directories(tmp_path / "set")) == 3
    for url in ("", "?n=3"):
        async with await open_local(f"shards:{tmp_path / 'set'}{url}", settings=RELAXED) as store:
            assert [(await look(store, task_id)).id for task_id in ids] == ids
    for other in (1, 2, 4):
        with pytest.raises(ShardMismatch, match="n=3"):
            await open_local(f"shards:{tmp_path / 'set'}?n={other}", settings=RELAXED)
    assert len(directories(tmp_path / "set")) == 3


async def test_shards_are_named_in_their_order(tmp_path: Path) -> None:
    """A list in another order, with a shard too few, too many, or of another set, is refused; the right one is not."""
    mine = [f"lmdb:{tmp_path / name}" for name in "abc"]
    async with await open_local(mine, settings=RELAXED):
        pass
    async with await open_local([f"lmdb:{tmp_path / 'x'}", f"lmdb:{tmp_path / 'y'}"], settings=RELAXED):
        pass
    a, b, c = mine
    x = f"lmdb:{tmp_path / 'x'}"
    for wrong in ([a, c, b], [b, a, c], [a, b], [a, b, c, x], [a, b, x], [x, b, c]):
        with pytest.raises(ShardMismatch):
            await open_local(wrong, settings=RELAXED)
    async with await open_local(f"shards:[{','.join(mine)}]", settings=RELAXED) as store:
        await put(store)


async def test_a_store_with_tasks_is_no_new_shard(tmp_path: Path) -> None:
    """What holds tasks already, in no set, does not become a shard: they would be in the wrong place."""
    async with await open_local(f"lmdb:{tmp_path / 'set' / '1'}", settings=RELAXED) as plain:
        task_id = await put(plain)
    with pytest.raises(ShardMismatch, match="tasks of its own"):
        await open_local(f"shards:{tmp_path / 'set'}?n=2", settings=RELAXED)
    async with await open_local(f"lmdb:{tmp_path / 'set' / '1'}", settings=RELAXED) as plain:
        assert (await look(plain, task_id)).id == task_id


async def test_a_plain_store_does_not_become_a_set(tmp_path: Path) -> None:
    """A directory that is a store by itself is refused as that of a set, to make or to open, and stays as it is."""
    async with await open_local(tmp_path / "store", settings=RELAXED) as plain:
        task_id = await put(plain)
    for url in (f"shards:{tmp_path / 'store'}?n=2", f"shards:lmdb:{tmp_path / 'store'}/"):
        for create in (True, False):
            with pytest.raises(ShardMismatch, match="holds a plain store"):
                await open_local(url, settings=RELAXED, create=create)
    assert directories(tmp_path / "store") == []
    async with await open_local(tmp_path / "store", settings=RELAXED) as plain:
        assert (await look(plain, task_id)).id == task_id


async def test_a_set_does_not_become_a_plain_store(tmp_path: Path) -> None:
    """A directory that holds a set is refused as that of a store, which says how to open it."""
    directory = tmp_path / "set"
    async with await open_local(f"shards:{directory}?n=2", settings=RELAXED):
        pass
    for url in (f"lmdb:{directory}", str(directory)):
        for create in (True, False):
            with pytest.raises(ShardMismatch, match=f"open it as shards:{directory}"):
                await open_local(url, settings=RELAXED, create=create)
    assert sorted(names(directory)) == ["0", "1"]


async def test_a_shard_is_not_opened_by_itself(tmp_path: Path, clock: ManualClock) -> None:
    """What is a shard says so, and of which set, while that is open and after; the set is not disturbed."""
    base = f"shards:{tmp_path / 'set'}"
    async with await open_local(f"{base}?n=2", clock=clock, settings=RELAXED) as store:
        task_id = await put(store)
        with pytest.raises(ShardMismatch, match=f"shard 1 of a set of 2: open the set, {base}$"):
            await open_local(f"lmdb:{tmp_path / 'set' / '1'}", clock=clock, settings=RELAXED)
        assert (await look(store, task_id)).id == task_id
    for create in (True, False):
        with pytest.raises(ShardMismatch, match="shard 0"):
            await open_local(tmp_path / "set" / "0", settings=RELAXED, create=create)
    async with await open_local(["memory:a", "memory:b"], clock=clock):
        with pytest.raises(ShardMismatch, match=r"shard 1 of a set of 2: open the set, shards:\["):
            await open_local("memory:b", clock=clock)
    async with await open_local(base, settings=RELAXED) as store:
        assert (await look(store, task_id)).id == task_id


async def test_the_doctor_finds_what_is_in_the_wrong_shard(clock: ManualClock) -> None:
    """Tasks and rows of loads that somebody put into a shard by itself are problems if they belong elsewhere."""
    async with await open_local("shards:memory:wrong?n=2", clock=clock) as store:
        await put(store, id=in_slot(0))
        async with open_single("memory:wrong/0", clock, RELAXED, create=False) as shard:
            chunk = in_slot(3)
            await put(shard, id=in_slot(2))
            assert (await store.doctor()).clean
            task_id = await put(shard, id=in_slot(1))
            await shard.stage(TENANT, chunk, [NewTask(command="work")])
            await shard.commit_load(TENANT, "load", 0, [chunk])
        report = await store.doctor()
        assert report.tasks == 4
        assert [problem.what.startswith("shard 0: in a shard") for problem in report.problems] == [True, True]
        assert id_to_text(task_id) in report.problems[0].where
        assert not (await store.doctor(mend=True)).clean


async def test_nothing_is_made_without_create(tmp_path: Path) -> None:
    """Where there is no set, opening without `create` says so and leaves nothing behind."""
    for url in (f"shards:{tmp_path / 'set'}?n=2", f"shards:{tmp_path / 'set'}", f"shards:[{tmp_path / 'a'}]"):
        with pytest.raises(StoreMissing):
            await open_local(url, create=False)
    assert names(tmp_path) == []


async def test_who_stopped_in_the_middle_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that was made half, by a process that died, is completed by the next."""

    async def stops(store: object, member: table.Membership) -> table.Membership:
        if member.number == 2:
            raise Crash
        return await table.join(store, member)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr("dibs.stores.sharded.opening.join", stops)
        with pytest.raises(Crash):
            await open_local(f"shards:{tmp_path / 'set'}?n=3", settings=RELAXED)
    async with open_single(f"lmdb:{tmp_path / 'set' / '0'}", SystemClock(), RELAXED, create=False) as first:
        member = await membership_of(first)
    async with await open_local(f"shards:{tmp_path / 'set'}", settings=RELAXED) as store:
        await put(store)
        assert member is not None
        assert store.store_id == member.set_id


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_lost_shard_is_not_made_anew(tmp_path: Path, lost: int) -> None:
    """A shard whose directory was removed, or replaced by an empty store, stays down: its loss is not hidden."""
    url = f"shards:{tmp_path / 'set'}?n=2"
    async with await open_local(url, settings=RELAXED) as store:
        ids = {slot: await put(store, id=in_slot(slot)) for slot in (0, 1)}
    shutil.rmtree(tmp_path / "set" / str(lost))
    for _ in range(2):
        async with await open_local(url, settings=RELAXED) as store:
            assert (await look(store, ids[1 - lost])).id == ids[1 - lost]
            [problem] = (await store.doctor()).problems
            assert f"shard {lost}" in problem.what
        async with await open_local(str(tmp_path / "set" / str(lost)), settings=RELAXED):
            pass


async def test_processes_that_make_it_at_once_agree(tmp_path: Path, children: Children) -> None:
    """Several processes open a new set at the same moment: all have the same, and see each other's tasks."""
    script = """
from dibs.settings import Settings
async def main():
    sys.stdin.readline()
    async with await open_local(URL, settings=Settings(durability="relaxed")) as store:
        answers = await store.enqueue("default", [NewTask(command="work", id=new_id()) for _ in range(8)])
        tell(set=store.store_id.hex(), ids=[answer.id.hex() for answer in answers])
tell(ready=True)
asyncio.run(main())
"""
    url = f"shards:{tmp_path / 'set'}?n=4"
    started = [children.start(script, url) for _ in range(3)]
    for child in started:
        assert child.told()
    for child in started:
        child.go()
    told = [child.told() for child in started]
    assert len({one["set"] for one in told}) == 1
    async with await open_local(url, settings=RELAXED) as store:
        assert (await store.stats(TENANT)).total.ready == 24
        for task_id in [bytes.fromhex(one) for child in told for one in child["ids"]]:
            assert (await look(store, task_id)).id == task_id
        assert (await store.doctor()).clean


async def test_loops_of_one_process_share_it(clock: ManualClock) -> None:
    """Opened at once by several callers, it is one set."""
    stores = await asyncio.gather(*(open_local("shards:memory:shared?n=2", clock=clock) for _ in range(5)))
    task_id = await put(stores[0])
    assert (await look(stores[4], task_id)).id == task_id
    for store in stores:
        await store.close()
