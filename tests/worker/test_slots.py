"""How much a worker takes, from whom, and when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dibs import Dibs
from dibs.clock import ManualClock
from dibs.errors import InvalidOption
from dibs.task import Event, EventKind, KeyLimit, QueueConfig, QueueLimits, Status
from dibs.worker import Summary, Worker, WorkerOptions
from tests.app.conftest import close_all
from tests.worker.steps import LIMIT_S, declare, drained, eventually, journal, working


def leased_at_most(events: list[Event]) -> int:
    """The largest number of tasks that were under a lease at any moment."""
    held = most = 0
    for event in events:
        held += event.kind is EventKind.CLAIMED
        held -= event.kind in (EventKind.COMPLETED, EventKind.RETRIED, EventKind.FAILED, EventKind.RELEASED)
        most = max(most, held)
    return most


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("lane", ["loop", "thread"])
async def test_never_more_leases_than_slots(app: Dibs, lane: str, drain: bool) -> None:
    """A worker holds no task that it has no slot for: others could run it. Beside those that run there are only those
    whose outcome is on its way."""
    work = declare(app, lane, lambda value: value)
    batch = await work.amap(range(50))
    async with working(app, concurrency=3, threads=3, drain=drain):
        await batch.awaited(LIMIT_S)
    assert 1 < leased_at_most(await journal(app)) <= 3 * 2


@pytest.mark.parametrize("drain", [False, True])
async def test_no_lease_without_a_free_slot(app: Dibs, drain: bool) -> None:
    """While handlers run, as many tasks are leased as there are slots, and for each that ends one more."""
    gate = threading.Semaphore(0)
    work = declare(app, "thread", lambda _: gate.acquire(timeout=LIMIT_S))
    batch = await work.amap(range(50))

    async def leased() -> int:
        return (await app.ask(lambda store: store.stats("default"))).total.leased

    async with working(app, threads=3, drain=drain) as worker:
        for count in range(10):
            await eventually(lambda count=count: worker.summary.completed == count and worker.running == 3)  # type: ignore[misc]
            assert await leased() <= 3
            gate.release()
        gate.release(50)
        await batch.awaited(LIMIT_S)


async def test_as_many_at_once_as_there_are_slots(app: Dibs) -> None:
    """All slots are used: handlers that wait for each other get there."""
    barrier = threading.Barrier(8)
    batch = await declare(app, "thread", lambda _: barrier.wait(LIMIT_S)).amap(range(8))
    assert await drained(app, threads=8) == Summary(completed=8)
    assert sorted([one async for one in batch.aresults()]) == list(range(8))


async def test_handlers_in_a_loop_share_it(app: Dibs) -> None:
    """Coroutines run at once, up to the concurrency."""
    seen: list[int] = []

    @app.task(name="meet")
    async def meet() -> None:
        seen.append(1)
        await eventually(lambda: len(seen) == 50)

    for _ in range(50):
        await meet.aenqueue()
    assert await drained(app, concurrency=50) == Summary(completed=50)


async def test_a_busy_queue_does_not_starve_another(app: Dibs) -> None:
    """Every command is asked first in turn: one task of a quiet queue does not wait for a thousand of a busy one."""
    order: list[str] = []

    async def handler(name: str) -> None:
        order.append(name)

    busy = app.task(name="busy")(handler)
    quiet = app.task(name="quiet")(handler)
    await busy.amap(["busy"] * 300)
    await quiet.aenqueue("quiet")
    await drained(app, concurrency=2)
    assert order.index("quiet") < 20


async def test_order_and_priority(app: Dibs) -> None:
    """Within one queue the higher priority runs first, then the earlier."""
    order: list[int] = []
    work = declare(app, "thread", order.append)
    for value, priority in ((1, 0), (2, 9), (3, 0), (4, 9)):
        await work.options(priority=priority).aenqueue(value)
    await drained(app, threads=1)
    assert order == [2, 4, 1, 3]


@pytest.mark.parametrize("count", [101, 250])
async def test_more_commands_than_one_claim_can_name(app: Dibs, count: int) -> None:
    """However many functions an app has, the tasks of each are run."""

    async def handler(value: int) -> int:
        return value

    functions = [app.task(name=f"work-{index}")(handler) for index in range(count)]
    async with working(app):
        for index in (0, 99, 100, count - 1):
            assert await (await functions[index].aenqueue(index)).awaited(LIMIT_S) == index


async def test_only_some_commands(app: Dibs) -> None:
    """A worker that is for some commands leaves the others alone; one that does not exist is refused."""
    a = app.task(name="a")(lambda: None)
    b = app.task(name="b")(lambda: None)
    await a.aenqueue()
    left = await b.aenqueue()
    assert await drained(app, commands=("a",)) == Summary(completed=1)
    assert (await left.atask()).attempts == 0
    with pytest.raises(InvalidOption, match="no task is named c; there are a, b"):
        Worker(app, WorkerOptions(commands=("c",)))


async def test_several_apps_in_one_worker(app: Dibs, clock: ManualClock, tmp_path: Any) -> None:
    """Apps on different stores, with functions of the same name, each run their own."""
    async with Dibs(tmp_path / "other", clock=clock) as other:
        one = await app.task(name="work")(lambda: "one").aenqueue()
        two = await other.task(name="work")(lambda: "two").aenqueue()
        assert await drained([app, other]) == Summary(completed=2)
        assert (await one, await two) == ("one", "two")


async def test_several_tenants_in_one_worker(app: Dibs) -> None:
    """A worker serves the tenants it is told to, and no other; results go to their own."""
    work = declare(app, "thread", lambda value: value)
    handles = {name: await work.options(tenant=name).aenqueue(name) for name in ("red", "green", "blue")}
    assert await drained(app, tenants=("red", "green")) == Summary(completed=2)
    assert [await handles[name] for name in ("red", "green")] == ["red", "green"]
    assert (await handles["blue"].atask()).attempts == 0
    assert await drained(app) == Summary()


@pytest.mark.parametrize("drain", [False, True])
async def test_all_tenants_in_one_worker(app: Dibs, drain: bool) -> None:
    """A worker of all tenants runs everybody's tasks, also of tenants that come later, with a single slot; it is known
    to its app's own tenant."""
    work = declare(app, "thread", lambda value: value)
    names = [f"tenant-{n}" for n in range(5)]
    handles = [await work.options(tenant=name).aenqueue(name) for name in names]
    async with working(app, tenants=("*",), threads=1, drain=drain):
        assert [await handle for handle in handles] == names
        if not drain:
            assert await (await work.options(tenant="new").aenqueue("late")) == "late"
            assert len(await app.ask(lambda store: store.workers(app.tenant))) == 1


def test_all_tenants_and_some_is_refused() -> None:
    """Every tenant, and one of them: it makes no sense."""
    with pytest.raises(InvalidOption, match="alone"):
        WorkerOptions(tenants=("*", "acme"))


async def test_tenants_share_the_slots_fairly(app: Dibs) -> None:
    """Tenants that share one slot each get it in turn, also when one of them has much more to do."""
    order: list[str] = []
    work = declare(app, "loop", order.append)
    await work.options(tenant="busy").amap(["busy"] * 100)
    await work.options(tenant="quiet").amap(["quiet"] * 3)
    async with working(app, tenants=("busy", "quiet"), concurrency=2):
        await eventually(lambda: len(order) == 103)
    assert order.index("quiet") < 50


def test_every_sharer_needs_a_slot(url: str) -> None:
    """More tenants than slots is refused: one of them would wait for ever."""
    app = Dibs(url)
    declare(app, "loop", print)
    worker = Worker(app, WorkerOptions(concurrency=1, tenants=("a", "b")))
    with pytest.raises(InvalidOption, match="each needs a slot"):
        asyncio.run(worker.run())


async def test_a_drain_ends_after_what_its_handlers_enqueue(app: Dibs) -> None:
    """A drain runs what was enqueued meanwhile, to any depth, and only then ends; what is delayed stays."""
    runs: Counter[int] = Counter()

    @app.task(name="grow")
    async def grow(depth: int) -> None:
        runs[depth] += 1
        if depth:
            await grow.aenqueue(depth - 1)
            await asyncio.to_thread(grow.enqueue, depth - 1)
        await grow.options(delay_s=60).aenqueue(0)

    await grow.aenqueue(5)
    await drained(app)
    assert runs == {depth: 2 ** (5 - depth) for depth in range(6)}


@pytest.mark.parametrize("lane", ["loop", "thread"])
async def test_a_drain_runs_what_a_handler_waits_for(app: Dibs, lane: str) -> None:
    """A handler that calls another task gets its result, also from a worker that drains."""

    def add(value: int) -> int:
        return value + 1

    inner = app.task(name="inner")(add)
    if lane == "loop":

        async def outer(value: int) -> int:
            return await inner.acall(value) * 10
    else:

        def outer(value: int) -> int:  # type: ignore[misc]
            return inner.call(value) * 10

    handle = await app.task(name="outer")(outer).aenqueue(1)
    assert await drained(app) == Summary(completed=2)
    assert await handle == 20


async def test_a_drain_of_nothing_ends(app: Dibs) -> None:
    """Without tasks a drain returns at once; with delayed ones too."""
    work = declare(app, "loop", print)
    assert await drained(app) == Summary()
    await work.options(delay_s=60).aenqueue()
    assert await drained(app) == Summary()


LIMITS = {
    "rate": QueueLimits(per_key=KeyLimit(rate=1, burst=1)),
    "cap": QueueLimits(in_flight=1),
    "cap of a key": QueueLimits(per_key=KeyLimit(in_flight=1)),
}


@pytest.fixture
def timely(url: str) -> Iterator[Dibs]:
    """An app whose time goes on."""
    opened = Dibs(url)
    yield opened
    close_all(opened)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("tenants", [(), ("*",), ("default", "other")])
async def test_a_drain_waits_for_limits(
    timely: Dibs, limit: str, tenants: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """What is ready and held back by a limit is run before a drain ends, also if it is a lease of somebody who died
    that uses the limit up; once, it says what it waits for. What is paused or delayed does not keep it."""
    caplog.set_level("INFO", "dibs.worker")
    work = declare(timely, "loop", lambda value: value)
    await timely.ask(lambda store: store.configure("default", "work", QueueConfig(limits=LIMITS[limit])))
    await timely.ask(lambda store: store.configure("other", "work", QueueConfig(paused=True)))
    await work.options(delay_s=60).aenqueue()
    await work.options(tenant="other").aenqueue()
    for _ in range(3):
        await work.options(limit_key="k").aenqueue()
    if limit != "rate":
        assert len(await timely.ask(lambda store: store.claim("default", ["work"], limit=1, lease_s=1))) == 1
    assert await drained(timely, tenants=tenants) == Summary(completed=3)
    [told] = [record.getMessage() for record in caplog.records if "held back" in record.getMessage()]
    assert told.endswith(": 2 of work")


async def test_a_drain_does_not_wait_for_a_clock_that_stands(app: Dibs, clock: ManualClock) -> None:
    """Where a test moves the clock, what a limit holds back stays until it has."""
    work = declare(app, "loop", lambda value: value)
    await app.ask(lambda store: store.configure("default", "work", QueueConfig(limits=LIMITS["rate"])))
    await work.options(limit_key="k").amap([1, 2, 3])
    assert await drained(app) == Summary(completed=1)
    clock.advance(1)
    assert await drained(app) == Summary(completed=1)


async def test_a_paused_tenant_is_left_alone(timely: Dibs) -> None:
    """A drain ends while all that is ready is in queues of a tenant that is paused."""
    work = declare(timely, "loop", lambda value: value)
    await timely.ask(lambda store: store.configure("default", "*", QueueConfig(paused=True)))
    await work.aenqueue(1)
    assert await drained(timely) == Summary()


async def test_a_paused_queue_is_left_alone(app: Dibs) -> None:
    """A worker takes nothing from a paused queue, and goes on when it is resumed."""
    work = declare(app, "loop", lambda value: value)
    await app.ask(lambda store: store.configure("default", "work", QueueConfig(paused=True)))
    handle = await work.aenqueue(1)
    assert await drained(app) == Summary()
    await app.ask(lambda store: store.configure("default", "work", QueueConfig()))
    assert await drained(app) == Summary(completed=1)
    assert await handle == 1


async def test_workers_are_registered(app: Dibs) -> None:
    """A worker is among its tenants' workers while it runs, with what it does, and gone after its end."""
    release = threading.Event()
    work = declare(app, "thread", lambda _: release.wait(LIMIT_S))

    async def workers() -> Any:
        return await app.ask(lambda store: store.workers("default"))

    await work.aenqueue()
    async with working(app, name="me", threads=7):
        [info] = await eventually(workers)
        assert (info.name, info.slots, info.commands) == ("me", 7, ["work"])
        assert info.pid > 0
        assert info.memory_bytes > 0
        release.set()
    assert await workers() == []


async def test_the_worker_sweeps(app: Dibs, clock: ManualClock) -> None:
    """Tasks of a queue that nobody works on expire while any worker runs."""
    declare(app, "loop", print)
    other = app.task(name="other", expires_s=10)(lambda: None)
    handle = await other.aenqueue()
    clock.advance(11)
    async with working(app, commands=("work",)):
        await eventually(lambda: handle.status().ended)
    assert (await handle.atask()).reason == "EXPIRED"


async def test_delayed_tasks_run_when_they_are_due(app: Dibs, clock: ManualClock) -> None:
    """An idle worker takes a delayed task once its time has come, without an enqueue to wake it."""
    work = declare(app, "loop", lambda value: value)
    handle = await work.options(delay_s=3600).aenqueue(1)
    async with working(app) as worker:
        await eventually(lambda: worker._claimers)
        clock.advance(3601)
        assert await handle.awaited(LIMIT_S) == 1


async def test_an_idle_worker_goes_on_delivering(app: Dibs, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its claims came back empty, the next task is taken."""
    monkeypatch.setattr("dibs.worker.claiming.WAIT_S", 0.02)
    work = declare(app, "loop", lambda value: value)
    async with working(app):
        for value in range(3):
            await asyncio.sleep(0.2)
            assert await (await work.aenqueue(value)).awaited(LIMIT_S) == value


async def test_a_stopped_worker_has_taken_nothing_with_it(app: Dibs) -> None:
    """A claim that waits when the worker stops leaves no task leased to nobody."""
    work = declare(app, "loop", lambda value: value)
    handles = []
    for value in range(10):
        async with working(app, concurrency=1):
            handles.append(await work.aenqueue(value))
    await drained(app)
    assert [await handle for handle in handles] == list(range(10))
    assert [(await handle.atask()).attempts for handle in handles] == [1] * 10


async def test_timers_of_ended_tasks_are_gone(app: Dibs) -> None:
    """A long timeout keeps nothing of a task that has ended."""
    work = declare(app, "loop", print, timeout_s=86_400)
    loop = asyncio.get_running_loop()
    await work.amap([""] * 200)
    await drained(app)
    await asyncio.sleep(0)
    waiting = [one for one in loop._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
    assert len([one for one in waiting if one.when() > loop.time() + 3600]) == 0


async def test_a_worker_that_is_cancelled_gives_back(app: Dibs) -> None:
    """Cancelling `run`, as Ctrl-C does in a program that holds a worker, returns what it held with its attempt."""
    started = threading.Event()

    @app.task(name="slow")
    async def slow() -> None:
        started.set()
        await asyncio.sleep(LIMIT_S)

    handle = await slow.aenqueue()
    running = asyncio.ensure_future(Worker(app, WorkerOptions()).run())
    await eventually(started.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    task = await handle.atask()
    assert (task.status, task.attempts) == (Status.PENDING, 0)
