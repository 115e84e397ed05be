from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs import Dibs
from dibs.errors import StoreUnavailable
from dibs.ids import new_id
from dibs.stores import open_store
from dibs.task import NewTask, Status
from dibs.testing.contract.steps import TENANT, in_slot
from dibs.worker import Worker, WorkerOptions
from tests.shards.faults import RELAXED, Faults, open_faulty

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("at_once")]


@pytest.mark.parametrize("alone", [False, True])
async def test_an_outcome_waits_for_its_shard(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """A task whose shard goes down while its handler runs is completed when the shard is back: not failed, not run
    again; the tasks of other shards do not wait for it."""
    faults = Faults()
    url = "memory:worker?n=2"
    app = Dibs(f"shards:{url}")
    runs: list[str] = []
    started = asyncio.Event()

    @app.task(name="work")
    async def work() -> str:
        runs.append("run")
        if len(runs) == (1 if alone else 2):
            faults.down = {1}
            asyncio.get_running_loop().call_later(0.8, faults.down.clear)
            started.set()
        await started.wait()
        return "done"

    async def open_with_faults(*_: Any, **__: Any) -> Any:
        return await open_faulty(url, faults)

    async with await open_store(f"shards:{url}", settings=RELAXED) as store:
        ids = [in_slot(1)] if alone else [in_slot(0), in_slot(1)]
        await store.enqueue(TENANT, [NewTask(command="work", id=task_id, payload=b"{}") for task_id in ids])
        monkeypatch.setattr("dibs.app.open_store", open_with_faults)
        async with asyncio.timeout(30):
            await Worker(app, WorkerOptions(drain=True)).run()
        tasks = await store.get(TENANT, [*ids, new_id()])
        assert [task.status for task in tasks if task] == [Status.COMPLETED] * len(ids)
        assert len(runs) == len(ids)


@pytest.mark.parametrize("back", [True, False])
async def test_a_drain_waits_for_a_shard(monkeypatch: pytest.MonkeyPatch, back: bool) -> None:
    """While a shard is down nobody knows what is ready in it: a drain ends when it is back and empty, or gives up."""
    faults = Faults()
    url = "memory:drained?n=2"
    app = Dibs(f"shards:{url}")
    runs: list[int] = []

    @app.task(name="work")
    async def work() -> None:
        runs.append(1)
        if back:
            asyncio.get_running_loop().call_later(0.3, faults.down.clear)

    async def open_with_faults(*_: Any, **__: Any) -> Any:
        return await open_faulty(url, faults)

    async with await open_store(f"shards:{url}", settings=RELAXED) as store:
        await store.enqueue(TENANT, [NewTask(command="work", id=in_slot(slot), payload=b"{}") for slot in (0, 1)])
        monkeypatch.setattr("dibs.app.open_store", open_with_faults)
        faults.down = {1}
        worker = Worker(app, WorkerOptions(drain=True, give_up_s=30 if back else 0.3))
        async with asyncio.timeout(30):
            if back:
                await worker.run()
            else:
                with pytest.raises(StoreUnavailable, match="shard 1"):
                    await worker.run()
        faults.down.clear()
        assert len(runs) == (2 if back else 1)
        assert (await store.stats(TENANT)).total.ready == 2 - len(runs)
