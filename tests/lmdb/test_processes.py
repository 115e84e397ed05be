"""Several processes on one directory: they see each other, wake each other, and survive each other's death."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from dibs.ids import id_from_text
from dibs.stores import open_local
from dibs.stores.batches import row_ids
from dibs.stores.ordered.lmdb import LmdbEngine
from dibs.stores.ordered.store import OrderedStore
from dibs.task import Committed, NewTask, Status
from dibs.testing.contract.steps import TENANT, assert_counts, complete, list_all, look, put, put_many, take
from tests.lmdb.processes import Child, Children

PRODUCE = """
async def main():
    async with await open_local(URL) as store:
        for _ in range(int(ARGS[0]) // 10):
            await asyncio.gather(*(store.enqueue("default", [NewTask(command="work")]) for _ in range(10)))
asyncio.run(main())
tell(done=True)
"""

WORK = """
async def main():
    done = 0
    async with await open_local(URL) as store:
        while leases := await store.claim("default", ["work"], limit=7, wait_s=2):
            outcomes = await store.settle(
                [Settlement(tenant="default", id=l.id, token=l.token, kind=Kind.COMPLETE) for l in leases])
            assert outcomes == [Settled(Status.COMPLETED)] * len(leases)
            done += len(leases)
    tell(done=done)
asyncio.run(main())
"""

WAIT_FOR_A_TASK = """
waiting.FALLBACK_LOOK_S = 60
async def main():
    store = await open_local(URL)
    leases = await store.claim("default", ["work"], wait_s=30)
    tell(ids=[lease.id.hex() for lease in leases], at_s=time.time())
    await store.close()
asyncio.run(main())
"""

WAIT_FOR_AN_END = """
waiting.FALLBACK_LOOK_S = 60
async def main():
    store = await open_local(URL)
    [task] = await store.wait("default", [bytes.fromhex(ARGS[0])], wait_s=30)
    tell(status=task.status, at_s=time.time())
    await store.close()
asyncio.run(main())
"""


def _sockets(directory: Path) -> list[Path]:
    wake = directory / "wake"
    return list(wake.iterdir()) if wake.is_dir() else []


async def listening(directory: Path, count: int = 1) -> None:
    """Returns when so many loops of other processes have bound their sockets."""
    async with asyncio.timeout(20):
        while len(_sockets(directory)) < count:  # noqa: ASYNC110 it is another process that binds them
            await asyncio.sleep(0.01)


async def test_producers_and_workers_share_a_directory(directory: Path, children: Children) -> None:
    """What some processes enqueue others complete, each task once."""
    async with await open_local(str(directory)) as store:
        producers = [children.start(PRODUCE, directory, 300) for _ in range(3)]
        workers = [children.start(WORK, directory) for _ in range(2)]
        for producer in producers:
            await asyncio.to_thread(producer.finish)
        done = [(await asyncio.to_thread(worker.finish))["done"] for worker in workers]
        assert sum(done) == 900
        assert {task.status for task in await list_all(store, limit=1_000)} == {Status.COMPLETED}
        await assert_counts(store)
        assert (await store.doctor()).clean


@pytest.mark.parametrize("deep", [False, True], ids=["short path", "very long path"])
async def test_an_enqueue_wakes_a_claim_in_another_process(tmp_path: Path, children: Children, deep: bool) -> None:
    """The claim waits without looking, and is woken; a socket's address has no room for the path of a deep one."""
    directory = tmp_path / ("x" * 200) / ("y" * 200) / "store" if deep else tmp_path / "store"
    async with await open_local(str(directory)) as store:
        child = children.start(WAIT_FOR_A_TASK, directory)
        await listening(directory)
        started_s = time.time()
        task_id = await put(store)
        told = await asyncio.to_thread(child.finish)
        assert told["ids"] == [task_id.hex()]
        print(f"woken after {(told['at_s'] - started_s) * 1000:.1f} ms")
        assert told["at_s"] - started_s < 15


async def test_an_end_wakes_a_wait_in_another_process(directory: Path, children: Children) -> None:
    """Whoever waits for a task is told by whichever process settles it."""
    async with await open_local(str(directory)) as store:
        task_id = await put(store)
        child = children.start(WAIT_FOR_AN_END, directory, task_id.hex())
        await listening(directory)
        started_s = time.time()
        await complete(store, await take(store))
        told = await asyncio.to_thread(child.finish)
        assert told["status"] == "COMPLETED"
        assert told["at_s"] - started_s < 15


async def test_each_of_several_waiting_processes_gets_its_task(directory: Path, children: Children) -> None:
    """Three wait, three tasks come in one by one: nobody is left sleeping."""
    async with await open_local(str(directory)) as store:
        waiting = [children.start(WAIT_FOR_A_TASK, directory) for _ in range(3)]
        await listening(directory, 3)
        ids = [await put(store) for _ in range(3)]
        told = [await asyncio.to_thread(child.finish) for child in waiting]
        assert sorted(task_id for each in told for task_id in each["ids"]) == sorted(one.hex() for one in ids)


STAGE = """
async def main():
    async with await open_local(URL) as store:
        chunks = [new_id() for _ in range(8)]
        rows = [NewTask(command="work", payload=b"%d" % n) for n in range(100)]
        await asyncio.gather(*(store.stage("default", chunk, rows) for chunk in chunks))
        tell(chunks=[chunk.hex() for chunk in chunks])
asyncio.run(main())
"""


async def test_ten_stagers_and_one_commit(directory: Path, children: Children) -> None:
    """What ten processes stage at once is seen as far as the commit names it; claims that wait in other processes are
    woken by it, and workers share the rows."""
    async with await open_local(str(directory)) as store:
        stagers = [children.start(STAGE, directory) for _ in range(10)]
        told = [await asyncio.to_thread(stager.finish) for stager in stagers]
        chunks = [[bytes.fromhex(one) for one in each["chunks"]] for each in told]
        assert await list_all(store) == []
        named = [chunk for own in chunks for chunk in own[::2]]
        waiting = [children.start(WAIT_FOR_A_TASK, directory) for _ in range(2)]
        await listening(directory, 2)
        assert await store.commit_load(TENANT, "load", 0, named) == Committed(4_000)
        first = [(await asyncio.to_thread(child.finish))["ids"] for child in waiting]
        assert [len(ids) for ids in first] == [1, 1]
        workers = [children.start(WORK, directory) for _ in range(2)]
        done = [(await asyncio.to_thread(worker.finish))["done"] for worker in workers]
        assert sum(done) == 3_998
        rows = [NewTask(command="work")] * 100
        expected = {task_id for chunk in named for task_id in row_ids(TENANT, chunk, rows)}
        assert {task.id for task in await list_all(store, limit=1_000)} == expected
        assert await store.drop(TENANT, [chunk for own in chunks for chunk in own]) == 40
        await assert_counts(store)
        assert (await store.doctor()).clean


STAGE_AND_DIE = """
async def main():
    store = await open_local(URL)
    chunk = new_id()
    await store.stage("default", chunk, [NewTask(command="work") for _ in range(10)])
    tell(chunk=chunk.hex())
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_stager_that_was_killed(directory: Path, children: Children) -> None:
    """What it had staged can be committed by another process."""
    async with await open_local(str(directory)) as store:
        child = children.start(STAGE_AND_DIE, directory)
        chunk = bytes.fromhex((await asyncio.to_thread(child.told))["chunk"])
        child.kill()
        assert await store.commit_load(TENANT, "load", 0, [chunk]) == Committed(10)
        assert len(await store.claim(TENANT, ["work"], limit=100)) == 10


async def test_the_sockets_of_the_dead_are_removed(store: OrderedStore, directory: Path, children: Children) -> None:
    """A process that was killed leaves its socket; the next commit that meets it removes it."""
    child = children.start(WAIT_FOR_A_TASK, directory)
    await listening(directory)
    child.kill()
    assert len(_sockets(directory)) == 1
    await put(store)
    await store._engine.drained()
    assert _sockets(directory) == []


async def test_the_sockets_of_the_living_are_removed_by_them(directory: Path, children: Children) -> None:
    """A process that closes its store leaves nothing behind."""
    async with await open_local(str(directory)) as store:
        child = children.start(WAIT_FOR_A_TASK, directory)
        await listening(directory)
        await put(store)
        await asyncio.to_thread(child.finish)
        assert _sockets(directory) == []


HOLD_A_SNAPSHOT = """
async def main():
    store = await open_local(URL)
    held = store._engine.environment.begin()
    held.get(b"Mformat")
    tell(pid=os.getpid())
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_stale_readers_are_cleared(store: OrderedStore, directory: Path, children: Children) -> None:
    """The snapshot of a dead process, which would keep every page it sees from being reused, is let go by a sweep."""
    assert isinstance(store._engine, LmdbEngine)
    await put(store)
    child = children.start(HOLD_A_SNAPSHOT, directory)
    pid = str((await asyncio.to_thread(child.told))["pid"])
    assert pid in store._engine.environment.readers()
    child.kill()
    assert pid in store._engine.environment.readers()
    await store.sweep()
    assert pid not in store._engine.environment.readers()


WRITE_FOR_EVER = """
async def one(store):
    while True:
        ids = [new_id() for _ in range(50)]
        await store.enqueue("default", [NewTask(command="work", id=i, payload=os.urandom(2000)) for i in ids])
        tell(ids=[i.hex() for i in ids])
async def main():
    store = await open_local(URL)
    await asyncio.gather(one(store), one(store), one(store))
asyncio.run(main())
"""


async def test_recovery_after_a_kill_in_the_middle_of_writing(directory: Path, children: Children) -> None:
    """Whoever is killed while it holds the write lock does not stop the others, and what it was told is there."""
    async with await open_local(str(directory)) as store:
        for _ in range(8):
            writer = children.start(WRITE_FOR_EVER, directory)
            acknowledged = [await asyncio.to_thread(writer.told) for _ in range(4)]
            writer.kill()
            async with asyncio.timeout(20):
                await put(store)
            for told in acknowledged:
                assert all(await store.get(TENANT, [bytes.fromhex(one) for one in told["ids"]]))
        await assert_counts(store)
        assert (await store.doctor()).clean
    async with await open_local(str(directory)) as again:
        assert (await again.doctor()).clean


SATURATE = """
async def one(store):
    while True:
        await store.enqueue("other", [NewTask(command="work", payload=b"x" * 200) for _ in range(200)])
async def main():
    store = await open_local(URL)
    await store.enqueue("other", [NewTask(command="work")])
    tell(ready=True)
    await asyncio.gather(*(one(store) for _ in range(16)))
asyncio.run(main())
"""


async def test_a_busy_process_does_not_starve_another(directory: Path, children: Children) -> None:
    """Beside a process that writes without a pause, single calls of another are answered."""
    async with await open_local(str(directory)) as store:
        busy = children.start(SATURATE, directory)
        await asyncio.to_thread(busy.told)
        took_s: list[float] = []
        for _ in range(100):
            started_s = time.perf_counter()
            await put(store)
            took_s.append(time.perf_counter() - started_s)
        assert (await store.stats("other")).total.ready > 200, "the other process was not busy"
        busy.kill()
        took_s.sort()
        print(f"beside a saturating process: p50 {took_s[50] * 1000:.1f} ms, p99 {took_s[98] * 1000:.1f} ms")
        assert (await store.stats(TENANT)).total.ready == 100


async def test_ids_are_the_same_in_every_process(store: OrderedStore, directory: Path, children: Children) -> None:
    """A task that one process enqueued is the one that another sees, byte for byte."""
    payload = bytes(range(256))
    task_id = await put(store, payload=payload, codec="raw")
    script = """
async def main():
    async with await open_local(URL) as store:
        [task] = await store.get("default", [bytes.fromhex(ARGS[0])])
        from dibs.ids import id_to_text
        tell(payload=task.payload.hex(), text=id_to_text(task.id))
asyncio.run(main())
"""
    child: Child = children.start(script, directory, task_id.hex())
    told = await asyncio.to_thread(child.finish)
    assert bytes.fromhex(told["payload"]) == payload == (await look(store, task_id)).payload
    assert id_from_text(told["text"]) == task_id
    assert await put_many(store, 1) != [task_id]
