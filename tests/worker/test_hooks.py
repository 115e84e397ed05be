"""Hooks, listeners, and what a running handler may know."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import msgspec
import pytest

from dibs import Backoff, CurrentTask, Dibs, Fail, current
from dibs.clock import ManualClock
from dibs.errors import InvalidInput, InvalidOption, TaskFailed
from dibs.listeners import Happening, Outcome, TaskEvent
from dibs.task import Progress, Status
from dibs.worker import Summary
from tests.worker.steps import LIMIT_S, declare, drained, eventually, working

LANES = pytest.mark.parametrize("lane", ["loop", "thread"])
NOW = Backoff(kind="fixed", base_s=0, jitter="none")


@LANES
async def test_hooks_run_around_the_handler(app: Dibs, lane: str) -> None:
    """`before` hooks, the handler, `after` hooks, each in the order of their declaration."""
    order: list[str] = []
    work = declare(app, lane, lambda _: order.append("handler"))
    for name in ("a", "b"):
        app.before(lambda task, name=name: order.append(f"before {name} {task.command}"))
        app.after(lambda _, outcome, name=name: order.append(f"after {name} {outcome.error}"))
    await work.aenqueue()
    await drained(app)
    assert order == ["before a work", "before b work", "handler", "after a None", "after b None"]


@LANES
async def test_a_hook_may_change_the_result(app: Dibs, lane: str, clock: ManualClock) -> None:
    """What an `after` hook returns is the outcome: another result, and how long it is kept."""
    work = declare(app, lane, lambda value: value)

    @app.after
    def more(_: CurrentTask, outcome: Outcome) -> Outcome:
        return msgspec.structs.replace(outcome, result=[outcome.result, "more"], result_ttl_s=7)

    handle = await work.options(retention_s=3600).aenqueue(1)
    await drained(app)
    assert await handle == [1, "more"]
    clock.advance(8)
    await app.ask(lambda store: store.sweep())
    assert (await handle.atask()).result is None


@LANES
async def test_a_hook_may_change_the_error(app: Dibs, lane: str) -> None:
    """A hook may make an error final, forgive it, or make one of a result."""

    def body(value: Any) -> Any:
        if value != "fine":
            raise ValueError(value)
        return value

    @app.after
    def judge(_: CurrentTask, outcome: Outcome) -> Outcome | None:
        if outcome.error is None:
            return Outcome(error=Fail("TOO_FINE"))
        return Outcome("forgiven") if str(outcome.error) == "small" else Outcome(error=Fail("FINAL"))

    work = declare(app, lane, body)
    fine, small, large = [await work.aenqueue(value) for value in ("fine", "small", "large")]
    assert await drained(app) == Summary(completed=1, failed=2)
    assert await small == "forgiven"
    assert (await fine.atask()).reason == "TOO_FINE"
    assert (await large.atask()).reason == "FINAL"


@LANES
async def test_hooks_that_raise_change_nothing(app: Dibs, lane: str, caplog: pytest.LogCaptureFixture) -> None:
    """What a hook raises, or returns by mistake, is logged; the task runs and its outcome stands."""

    @app.before
    def bad_before(_: CurrentTask) -> None:
        raise RuntimeError("before is broken")

    @app.after
    def bad_after(_: CurrentTask, outcome: Outcome) -> None:
        with pytest.raises(AttributeError):
            outcome.result = "changed in place"  # type: ignore[misc]
        raise RuntimeError("after is broken")

    app.after(lambda *_: "no outcome")  # type: ignore[type-var]
    handle = await declare(app, lane, lambda value: value).aenqueue("as it was")
    assert await drained(app) == Summary(completed=1)
    assert await handle == "as it was"
    for text in ("before is broken", "after is broken", "returns an Outcome or None"):
        assert text in caplog.text


@LANES
async def test_an_outcome_of_no_use_is_a_failure_of_the_task(app: Dibs, lane: str) -> None:
    """A hook that makes nonsense of an outcome costs the task a run, not the worker its slot."""
    app.after(lambda *_: Outcome(error="not an exception"))  # type: ignore[arg-type]
    handle = await declare(app, lane, lambda value: value, max_attempts=2, backoff=NOW).aenqueue()
    assert await drained(app, threads=1, concurrency=1) == Summary(retried=1, failed=1)
    assert (await handle.atask()).status is Status.FAILED


async def test_listeners_hear_of_everything(app: Dibs, clock: ManualClock) -> None:
    """Every kind of event is told once, in the order of its attempt; all are told when the worker has ended."""
    heard: list[TaskEvent] = []
    for kind in Happening:
        app.on(kind)(heard.append)

    @app.task(name="work", backoff=NOW, max_attempts=2, lease_s=3600)
    async def work(value: str) -> None:
        if value == "fail":
            raise ValueError(value)
        if value == "lose" and current().attempt == 1:
            clock.advance(4000)
            await app.ask(lambda store: store.sweep())

    kinds: dict[str, list[tuple[str, int, str]]] = {}
    for value in ("complete", "fail", "lose"):
        handle = await work.aenqueue(value)
        await drained(app)
        mine = [event for event in heard if event.task_id == handle.task_id]
        # The next attempt may begin before the worker has heard that the one before was in vain.
        mine.sort(key=lambda event: event.attempt)
        kinds[value] = [(event.kind.value, event.attempt, event.error.type if event.error else "") for event in mine]
    assert kinds == {
        "complete": [("enqueued", 0, ""), ("claimed", 1, ""), ("completed", 1, "")],
        "fail": [
            ("enqueued", 0, ""),
            ("claimed", 1, ""),
            ("retried", 1, "ValueError"),
            ("claimed", 2, ""),
            ("failed", 2, "ValueError"),
        ],
        "lose": [
            ("enqueued", 0, ""),
            ("claimed", 1, ""),
            ("lease_lost", 1, ""),
            ("claimed", 2, ""),
            ("completed", 2, ""),
        ],
    }
    assert {event.tenant for event in heard} == {"default"}


async def test_listeners_hear_of_a_cancel(app: Dibs) -> None:
    """A running task that is cancelled is told as such."""
    heard: list[TaskEvent] = []
    app.on("cancelled")(heard.append)
    started = threading.Event()

    @app.task(name="work", lease_s=1)
    async def work() -> None:
        started.set()
        await asyncio.sleep(LIMIT_S)

    handle = await work.aenqueue()
    async with working(app):
        await eventually(started.is_set)
        await handle.acancel()
        await eventually(lambda: heard)
    assert [event.id for event in heard] == [handle.id]


async def test_a_listener_that_raises_after_completion_changes_nothing(app: Dibs) -> None:
    """The task is done, does not run again, and later events are told."""
    runs: list[Any] = []
    heard: list[TaskEvent] = []
    app.on("completed")(heard.append)

    @app.on("completed")
    def raising(_: TaskEvent) -> None:
        raise SystemExit("a listener of no use")

    work = declare(app, "thread", runs.append)
    await work.amap([1, 2, 3])
    assert await drained(app) == Summary(completed=3)
    assert sorted(runs) == [1, 2, 3]
    assert len(heard) == 3


async def test_a_slow_listener_holds_up_no_task(app: Dibs) -> None:
    """Listeners have a thread of their own."""
    gate = threading.Event()
    app.on("claimed")(lambda _: gate.wait(LIMIT_S))
    batch = await declare(app, "thread", lambda value: value).amap(range(20))
    async with working(app):
        assert (await batch.awaited(LIMIT_S)).completed == 20
        gate.set()


@pytest.mark.parametrize(
    "make", [lambda app: app.on("finished")(print), lambda app: app.on("completed")(asyncio.sleep)]
)
def test_listeners_that_cannot_be(make: Any) -> None:
    """An event that does not exist, or a coroutine function, is refused."""
    with pytest.raises(InvalidOption):
        make(Dibs("memory:"))


@pytest.mark.parametrize("kind", ["before", "after"])
def test_hooks_that_cannot_be(kind: str) -> None:
    """Hooks are plain functions."""
    app = Dibs("memory:")
    with pytest.raises(InvalidOption, match="plain functions"):
        getattr(app, kind)(asyncio.sleep)


# ------------------------------------------------------------------------------------------------------------- current


def test_nothing_is_current_outside_a_handler() -> None:
    """current() is for handlers."""
    with pytest.raises(InvalidInput, match="no task is running here"):
        current()


@LANES
async def test_what_a_handler_knows(app: Dibs, lane: str) -> None:
    """Its id, tenant, command, key, attempt, and how much time is left."""
    seen: list[CurrentTask] = []
    left: list[float | None] = []

    def body(_: Any) -> None:
        seen.append(current())
        left.append(current().time_left_s)
        assert not current().cancelled
        current().check()

    work = declare(app, lane, body)
    first = await work.options(key="k", max_attempts=3, timeout_s=100).aenqueue()
    await drained(app)
    await work.options(tenant="other").aenqueue()
    await drained(app, tenants=("other",))
    assert [(one.id, one.tenant, one.command, one.key) for one in seen[:1]] == [(first.id, "default", "work", "k")]
    assert [(one.attempt, one.max_attempts, one.tenant) for one in seen] == [(1, 3, "default"), (1, 5, "other")]
    assert left[0] is not None
    assert 0 < left[0] <= 100
    assert left[1] is None


async def test_each_handler_has_its_own(app: Dibs) -> None:
    """Handlers that run at once, and threads that they start, see their own task."""
    barrier = asyncio.Barrier(5)

    @app.task(name="work")
    async def work() -> list[str]:
        await barrier.wait()
        return [current().id, await asyncio.to_thread(lambda: current().id)]

    handles = [await work.aenqueue() for _ in range(5)]
    await drained(app)
    assert [await handle for handle in handles] == [[handle.id, handle.id] for handle in handles]


@LANES
async def test_progress_is_seen_while_it_runs(app: Dibs, lane: str) -> None:
    """What a handler tells is with the task soon; nonsense is left out, and the lease is renewed all the same."""
    gate = threading.Event()

    @app.task(name="work")
    async def in_loop() -> str:
        current().progress(3, 10, "halfway or so")
        await asyncio.to_thread(gate.wait, LIMIT_S)
        current().progress(float("nan"))
        await asyncio.sleep(0.8)
        return "done"

    @app.task(name="thread")
    def in_thread() -> str:
        current().progress(3, 10, "halfway or so")
        gate.wait(LIMIT_S)
        current().progress(float("nan"))
        time.sleep(0.8)
        return "done"

    handle = await (in_loop if lane == "loop" else in_thread).aenqueue()

    async def progress() -> Progress | None:
        return (await handle.atask()).progress

    async with working(app):
        assert await eventually(progress) == Progress(3, 10, "halfway or so")
        gate.set()
        assert await handle.awaited(LIMIT_S) == "done"


async def test_a_heartbeat_can_be_asked_for(app: Dibs, clock: ManualClock) -> None:
    """`heartbeat` renews the lease soon, long before its third."""
    gate = threading.Event()

    @app.task(name="work", lease_s=600)
    def work() -> None:
        current().heartbeat()
        gate.wait(LIMIT_S)

    handle = await work.aenqueue()

    async def lease_end() -> int | None:
        return (await handle.atask()).lease_end_ms

    async with working(app):
        first: int = await eventually(lease_end)
        clock.advance(30)

        async def renewed() -> bool:
            return (await lease_end() or 0) >= first + 30_000

        await eventually(lambda: gate.is_set() or renewed())
        gate.set()


async def test_the_error_of_a_hooked_handler_is_still_the_handlers(app: Dibs) -> None:
    """Hooks do not show up in the traceback."""
    app.after(lambda *_: None)

    def body(_: Any) -> None:
        raise ValueError("mine")

    handle = await declare(app, "thread", body, max_attempts=1).aenqueue()
    await drained(app)
    with pytest.raises(TaskFailed) as caught:
        await handle
    assert "in body" in caught.value.remote_traceback
    assert "listeners.py" not in caught.value.remote_traceback


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_hook_that_exits_changes_nothing(app: Dibs, when: str) -> None:
    """Not even sys.exit() in a hook costs a task its outcome, or the worker its slot."""
    getattr(app, when)(lambda *_: sys.exit("no"))

    @app.task(name="fine")
    def fine() -> str:
        return "fine"

    handle = await fine.aenqueue()
    assert await drained(app) == Summary(completed=1)
    assert await handle == "fine"


async def test_a_task_beside_a_handler_that_exits_does_not_end_the_loop(app: Dibs) -> None:
    """sys.exit() in a task that a handler started raises out of the event loop; the loop goes on with the others."""

    async def sub() -> None:
        sys.exit("no")

    @app.task(name="spawns", max_attempts=1)
    async def spawns() -> None:
        await asyncio.gather(sub(), asyncio.sleep(0.01))

    @app.task(name="other")
    async def other() -> str:
        return "fine"

    first, second = await spawns.aenqueue(), await other.options(delay_s=0).aenqueue()
    summary = await drained(app, concurrency=1)
    assert (summary.completed, summary.failed) == (1, 1)
    assert await second == "fine"
    with pytest.raises(TaskFailed):
        await first
