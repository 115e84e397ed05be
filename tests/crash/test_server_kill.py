"""A server that is killed again and again while its clients work; they go on by themselves, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from dibs import Dibs
from dibs.errors import StoreUnavailable
from dibs.ids import new_id
from dibs.stores import open_local, open_store
from dibs.stores.protocol import Store
from dibs.task import Already, Enqueued, EventKind, Kind, NewTask, Settled, Settlement, Status
from tests.cli.terminal import PATIENCE_S
from tests.crash.test_kill import journal
from tests.server.running import ServerProcess, worker_process

TENANT = "default"
COMMANDS = ["a", "b"]
PRODUCERS, WORKERS = 6, 6
LEASE_S = 2.0
MAX_ATTEMPTS = 100


@pytest.mark.timeout(180)
async def test_a_server_that_is_killed(tmp_path: Path) -> None:
    """Through 20 kills at random moments, what clients were told stands, and each task is completed once."""
    await kill_often(tmp_path, kills=20, seed=7)


APP = """
from dibs import Dibs

app = Dibs()


@app.task
def double(value: int) -> int:
    return 2 * value
"""


@pytest.mark.timeout(180)
async def test_a_worker_of_a_server_that_is_killed(tmp_path: Path) -> None:
    """`dibs worker`, and an app that maps and waits, go on when their server is back; each result is there."""
    (tmp_path / "shop.py").write_text(APP)
    with ServerProcess(tmp_path) as server:
        url = f"{server.start().until_serves().url}?give_up_s=60"
        with worker_process(tmp_path, url, "shop") as worker:
            async with Dibs(url) as app:
                double = app.task(name="shop.double", lease_s=LEASE_S)(_double)
                batches = []
                for _ in range(3):
                    batches.append(await double.amap(range(700)))
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(lambda: server.start().until_serves())
                for batch in batches:
                    results = sorted([value async for value in batch.aresults(60)])
                    assert results == [2 * value for value in range(700)]
            worker.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(worker.wait, PATIENCE_S) == 0, (tmp_path / "worker.err").read_text()
        assert await server.stop() == 0, server.said
    async with await open_local(server.store) as store:
        assert (await store.doctor()).clean
        completions = Counter(event.id for event in await journal(store) if event.kind is EventKind.COMPLETED)
    assert (len(completions), set(completions.values())) == (2_100, {1})


def _double(value: int) -> int:
    raise AssertionError("not here")


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_server_that_is_killed_for_long(tmp_path: Path) -> None:
    """The same through 300 kills."""
    await kill_often(tmp_path, kills=300, seed=8)


class Told:
    """What clients were told, and whether they should end."""

    def __init__(self) -> None:
        self.acknowledged: set[bytes] = set()
        self.completed: dict[bytes, bytes] = {}
        """The token by the task."""
        self.repeats = 0
        """Answers that were lost on the way, after the server had done what it was asked."""
        self.enough = asyncio.Event()
        """No more tasks."""
        self.drained = asyncio.Event()


async def kill_often(directory: Path, kills: int, seed: int) -> None:
    """Kills and starts a server under its clients, lets them finish, and compares."""
    told = Told()
    dice = random.Random(seed)
    with ServerProcess(directory) as server:
        server.start().until_serves()
        url = f"{server.url}?give_up_s=60"
        stores = [await open_store(url) for _ in range(2)]
        clients = [asyncio.ensure_future(_produce(stores[0], told, random.Random(n))) for n in range(PRODUCERS)]
        clients += [asyncio.ensure_future(_work(stores[1], told, random.Random(n))) for n in range(WORKERS)]
        try:
            for _ in range(kills):
                await asyncio.sleep(dice.uniform(0.1, 0.8))
                await asyncio.to_thread(server.kill)
                _check_alive(clients)
                await asyncio.sleep(dice.choice([0.0, 0.1]))
                await asyncio.to_thread(lambda: server.start().until_serves())
            told.enough.set()
            await _until_drained(stores[1], told, clients)
            told.drained.set()
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            for store in stores:
                await store.close()
        assert await server.stop() == 0, server.said
    await _account(server.store, told)


def _check_alive(clients: Sequence[asyncio.Future[None]]) -> None:
    """No client gave up: their calls are repeated until the server is back."""
    for client in clients:
        if client.done():
            client.result()


async def _produce(store: Store, told: Told, dice: random.Random) -> None:
    while not told.enough.is_set():
        tasks = [
            NewTask(command=dice.choice(COMMANDS), id=new_id() if dice.random() < 0.5 else b"", payload=b"x" * 100,
                    max_attempts=MAX_ATTEMPTS)
            for _ in range(dice.choice([1, 1, 5]))
        ]  # fmt: skip
        for task, outcome in zip(tasks, await store.enqueue(TENANT, tasks), strict=True):
            assert isinstance(outcome, Enqueued), outcome
            assert task.id or not outcome.already, "an id that the client minted was there before"
            told.acknowledged.add(outcome.id)
            told.repeats += outcome.already
        await asyncio.sleep(dice.uniform(0, 0.005))


async def _work(store: Store, told: Told, dice: random.Random) -> None:
    while not told.drained.is_set():
        leases = await store.claim(
            TENANT, COMMANDS, limit=dice.choice([1, 5, 20]), lease_s=LEASE_S, wait_s=dice.choice([0.0, 0.5])
        )
        outcomes = await store.settle(
            [
                Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=Kind.COMPLETE, result=lease.token)
                for lease in leases
            ]
        )
        for lease, outcome in zip(leases, outcomes, strict=True):
            if isinstance(outcome, Settled | Already):
                assert lease.id not in told.completed, "two settlements of one task were accepted"
                told.completed[lease.id] = lease.token
                told.repeats += isinstance(outcome, Already)
        if not leases:
            await asyncio.sleep(0.01)


async def _until_drained(store: Store, told: Told, clients: Sequence[asyncio.Future[None]]) -> None:
    """Waits until nothing is left to be done; what killed servers had given out unheard runs out first."""
    while True:
        _check_alive(clients[PRODUCERS:])
        with suppress(StoreUnavailable):
            total = (await store.stats(TENANT)).total
            if all(client.done() for client in clients[:PRODUCERS]) and not total.ready + total.leased:
                return
        await asyncio.sleep(0.1)


async def _account(url: str, told: Told) -> None:
    async with await open_local(url) as store:
        report = await store.doctor()
        assert report.clean, report.problems
        ids = sorted(told.acknowledged)
        tasks = {
            task.id: task
            for start in range(0, len(ids), 1000)
            for task in await store.get(TENANT, ids[start : start + 1000])
            if task is not None
        }
        events = await journal(store)
    assert len(ids) > 100, "too little was done to tell"
    assert told.acknowledged - tasks.keys() == set(), "acknowledged tasks are lost"
    assert {task.status for task in tasks.values()} == {Status.COMPLETED}
    for task_id, token in told.completed.items():
        result = tasks[task_id].result if task_id in tasks else None
        assert result is None or result.data == token, "an accepted settlement did not stay"
    completions = Counter(event.id for event in events if event.kind is EventKind.COMPLETED)
    assert set(completions.values()) == {1}, "a task was completed twice"
    assert completions.keys() >= told.acknowledged
    enqueued = Counter(event.id for event in events if event.kind is EventKind.ENQUEUED)
    assert set(enqueued.values()) == {1}
    # A producer's calls are repeated until they are answered, so what is there was acknowledged.
    assert enqueued.keys() == told.acknowledged, "an enqueue whose answer was lost made two tasks"
    print(f"{len(ids)} tasks, {len(told.completed)} settled, {told.repeats} by a repeated call")
