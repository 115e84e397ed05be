"""Handlers that take too long, are cancelled, or lose their lease."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dibs import Backoff, Dibs, current
from dibs.clock import ManualClock
from dibs.context import Cancelled
from dibs.errors import TaskCancelled
from dibs.settings import Settings
from dibs.task import EventKind, Status
from dibs.worker import Summary
from tests.worker.steps import LIMIT_S, declare, drained, eventually, journal, working

NOW = Backoff(kind="fixed", base_s=0, jitter="none")


@pytest.fixture
async def live(url: str) -> AsyncIterator[Dibs]:
    """An app whose time passes."""
    opened = Dibs(url)
    yield opened
    opened.close()
    await opened.aclose()


# ------------------------------------------------------------------------------------------------------------- timeout


async def test_a_coroutine_is_cancelled_at_its_timeout(app: Dibs) -> None:
    """Past timeout_s an async handler is cancelled, can clean up, and its task is retried."""
    seen: list[str] = []

    @app.task(name="slow", timeout_s=0.2, backoff=NOW, max_attempts=2)
    async def slow() -> None:
        try:
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            seen.append(f"attempt {current().attempt} {current().cancelled}")
            raise

    handle = await slow.aenqueue()
    assert await drained(app) == Summary(retried=1, failed=1)
    assert seen == ["attempt 1 True", "attempt 2 True"]
    task = await handle.atask()
    assert (task.reason, task.error and task.error.type) == ("MAX_ATTEMPTS", "TimeoutError")


async def test_what_a_handler_returns_after_its_timeout_does_not_count(app: Dibs) -> None:
    """A handler that answers its cancellation with a result is too late."""

    @app.task(name="stubborn", timeout_s=0.1, backoff=NOW, max_attempts=1)
    async def stubborn() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LIMIT_S)
        return "late"

    handle = await stubborn.aenqueue()
    assert await drained(app) == Summary(failed=1)
    assert (await handle.atask()).status is Status.FAILED


async def test_a_thread_is_abandoned_at_its_timeout(app: Dibs) -> None:
    """Past timeout_s the task of a thread is retried at once; its slot stays taken until it returns, and what it then
    returns is dropped."""
    release = threading.Event()
    runs: list[int] = []

    @app.task(name="slow", timeout_s=0.1, backoff=NOW)
    def slow() -> str:
        runs.append(current().attempt)
        if len(runs) == 1:
            release.wait(LIMIT_S)
            return "dropped"
        return "kept"

    handle = await slow.aenqueue()
    async with working(app, threads=1) as worker:
        await eventually(lambda: worker.summary.retried == 1)
        assert (await handle.atask()).status is Status.PENDING
        await asyncio.sleep(0.3)
        assert runs == [1]
        release.set()
        assert await handle.awaited(LIMIT_S) == "kept"
    assert runs == [1, 2]
    assert worker.summary == Summary(completed=1, retried=1)


async def test_a_drain_ends_although_a_thread_does_not(app: Dibs) -> None:
    """A handler that was given up does not keep a drain from ending, as long as others can run."""
    release = threading.Event()

    @app.task(name="stuck", timeout_s=0.1, max_attempts=1)
    def stuck() -> None:
        release.wait(LIMIT_S)

    await stuck.aenqueue()
    assert await drained(app, threads=2, grace_s=0.2) == Summary(failed=1)
    release.set()


async def test_a_drain_runs_everything_although_all_threads_are_abandoned_for_a_while(app: Dibs) -> None:
    """Slots that are taken by handlers that were given up delay a drain; it does not leave tasks behind."""
    release = threading.Event()

    @app.task(name="work", timeout_s=0.1, max_attempts=1)
    def work(value: int) -> None:
        if value == 0:
            release.wait(LIMIT_S)

    batch = await work.amap(range(5))
    draining = asyncio.ensure_future(drained(app, threads=1))
    await eventually(lambda: batch.progress().failed == 1)
    release.set()
    assert await draining == Summary(completed=4, failed=1)


async def test_a_job_that_is_stopped_before_it_began_gives_its_slot_back(app: Dibs) -> None:
    """While one handler blocks the loop, another's timeout passes: the slot of both is free afterwards."""
    blocked = threading.Event()

    @app.task(name="block")
    async def block() -> None:
        blocked.set()
        time.sleep(0.8)  # noqa: ASYNC251 that is the point

    @app.task(name="late", timeout_s=0.2, max_attempts=1)
    async def late() -> None: ...

    together: list[int] = []

    @app.task(name="next")
    async def following() -> int:
        together.append(1)
        await eventually(lambda: len(together) == 2)
        return len(together)

    async with working(app, concurrency=2) as worker:
        await block.aenqueue()
        await eventually(blocked.is_set)
        handle = await late.aenqueue()
        await eventually(lambda: worker.summary.completed == 1 and worker.summary.failed == 1)
        assert (await handle.atask()).status is Status.FAILED
        assert worker.running == 0
        both = [await following.aenqueue() for _ in range(2)]
        # They wait for each other, so they need both slots.
        assert [await one.awaited(LIMIT_S) for one in both] == [2, 2]


# -------------------------------------------------------------------------------------------------------------- cancel


async def test_cancel_stops_a_running_coroutine(live: Dibs) -> None:
    """A cancel reaches the handler with a heartbeat; the task ends CANCELLED and is not tried again."""
    started, stopped = threading.Event(), threading.Event()

    @live.task(name="slow", lease_s=1)
    async def slow() -> None:
        started.set()
        try:
            await asyncio.sleep(LIMIT_S)
        finally:
            stopped.set()

    handle = await slow.aenqueue()
    async with working(live) as worker:
        await eventually(started.is_set)
        assert (await handle.acancel()).how == "cancelling"
        with pytest.raises(TaskCancelled, match="CANCELLED"):
            await handle.awaited(LIMIT_S)
        assert stopped.is_set()
    task = await handle.atask()
    assert (task.reason, task.error) == ("CANCELLED", None)
    assert worker.summary == Summary(cancelled=1)


async def test_complete_wins_over_cancel(live: Dibs) -> None:
    """A handler that answers its cancellation with a result has completed."""
    started = threading.Event()

    @live.task(name="slow", lease_s=1)
    async def slow() -> str:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LIMIT_S)
        return "still done"

    handle = await slow.aenqueue()
    async with working(live):
        await eventually(started.is_set)
        assert (await handle.acancel()).how == "cancelling"
        assert await handle.awaited(LIMIT_S) == "still done"


async def test_complete_wins_over_cancel_in_a_thread(live: Dibs) -> None:
    """A thread that returns although its task was cancelled has completed it: nothing but its own end decides."""
    started = threading.Event()

    @live.task(name="slow", lease_s=1)
    def slow() -> str:
        started.set()
        task, deadline_s = current(), time.monotonic() + LIMIT_S
        while not task.cancelled and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.1)
        return "still done"

    handle = await slow.aenqueue()
    async with working(live):
        await eventually(started.is_set)
        assert (await handle.acancel()).how == "cancelling"
        assert await handle.awaited(LIMIT_S) == "still done"


async def test_a_worker_ends_although_a_cancelled_thread_does_not(live: Dibs) -> None:
    """A thread that hears no cancel does not keep its worker: when that ends, the task is CANCELLED."""
    started, end = threading.Event(), threading.Event()

    @live.task(name="deaf", lease_s=1)
    def deaf() -> None:
        started.set()
        end.wait(LIMIT_S)

    handle = await deaf.aenqueue()
    try:
        async with working(live, grace_s=0.1):
            await eventually(started.is_set)
            await handle.acancel()
            # Renewed once more with the cancel known, so that the worker has heard of it.
            await asyncio.sleep(1)
        assert await handle.astatus() is Status.CANCELLED
    finally:
        end.set()


async def test_a_thread_can_see_that_it_was_cancelled(live: Dibs) -> None:
    """`current().cancelled` becomes true, and `check` raises; then the task is CANCELLED."""
    seen: list[str] = []
    started = threading.Event()

    @live.task(name="slow", lease_s=1)
    def slow() -> None:
        task = current()
        task.check()
        started.set()
        deadline_s = time.monotonic() + LIMIT_S
        while not task.cancelled and time.monotonic() < deadline_s:
            time.sleep(0.01)
        try:
            task.check()
        except Cancelled as error:
            seen.append(str(error))
            raise

    handle = await slow.aenqueue()
    async with working(live) as worker:
        await eventually(started.is_set)
        await handle.acancel()
        with pytest.raises(TaskCancelled):
            await handle.awaited(LIMIT_S)
        await eventually(lambda: seen)
    assert seen == ["cancelled"]
    assert worker.summary == Summary(cancelled=1)


# --------------------------------------------------------------------------------------------------------------- lease


async def test_a_lost_lease_stops_the_handler(app: Dibs, clock: ManualClock) -> None:
    """When the task was taken back, the handler is stopped at the next heartbeat and its outcome dropped."""
    runs: list[int] = []
    stopped = threading.Event()

    @app.task(name="slow", lease_s=1)
    async def slow() -> str:
        runs.append(current().attempt)
        if len(runs) == 2:
            return "from the second"
        try:
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            stopped.set()
        return "from the first"

    handle = await slow.aenqueue()
    async with working(app) as worker:
        await eventually(lambda: runs)
        clock.advance(100)
        await app.ask(lambda store: store.sweep())
        await eventually(stopped.is_set)
        assert await handle.awaited(LIMIT_S) == "from the second"
    assert worker.summary == Summary(completed=1, lost=1)
    assert runs == [1, 2]


async def test_an_outcome_that_comes_after_the_lease_is_dropped(app: Dibs, clock: ManualClock) -> None:
    """A handler that ends before it is told finds its settlement refused; the task runs again elsewhere."""
    runs: list[int] = []

    @app.task(name="slow", lease_s=3600)
    async def slow() -> int:
        runs.append(1)
        if len(runs) == 1:
            clock.advance(4000)
            await app.ask(lambda store: store.sweep())
        return len(runs)

    handle = await slow.aenqueue()
    assert await drained(app) == Summary(completed=1, lost=1)
    assert await handle == 2


async def test_heartbeats_keep_a_long_handler_alive(live: Dibs) -> None:
    """A handler that takes longer than its lease keeps it, in a loop and in a thread, and runs once."""

    @live.task(name="loop", lease_s=1)
    async def in_loop() -> int:
        await asyncio.sleep(2.2)
        return current().attempt

    @live.task(name="thread", lease_s=1)
    def in_thread() -> int:
        time.sleep(2.2)
        return current().attempt

    handles = [await in_loop.aenqueue(), await in_thread.aenqueue()]
    async with working(live), working(live):
        assert [await one.awaited(LIMIT_S) for one in handles] == [1, 1]
    assert not [event for event in await journal(live) if event.kind is EventKind.LEASE_EXPIRED]


async def test_a_blocked_loop_stops_renewing(live: Dibs, caplog: pytest.LogCaptureFixture) -> None:
    """A handler that blocks its loop for longer than the lease loses it to another worker, and the log says where. The
    blocked worker does not take the task again."""
    release = threading.Event()
    workers: list[str] = []
    other = Dibs(settings=Settings(url=live.url))

    async def block() -> str:
        workers.append("first")
        release.wait(LIMIT_S)
        return "too late"

    async def quick() -> str:
        return "done"

    handle = await live.task(name="work", lease_s=1)(block).aenqueue()
    other.task(name="work", lease_s=1)(quick)
    async with working(live) as first:
        await eventually(lambda: workers)
        async with working(other) as second:
            assert await handle.awaited(LIMIT_S) == "done"
            release.set()
            await eventually(lambda: first.summary.lost == 1)
    assert second.summary == Summary(completed=1)
    assert (await handle.atask()).attempts == 2
    assert "blocked the event loop" in caplog.text
    assert "release.wait" in caplog.text
    await other.aclose()


# ------------------------------------------------------------------------------------------------------------ shutdown


@pytest.mark.parametrize("lane", ["loop", "thread"])
async def test_a_stop_lets_handlers_end(app: Dibs, lane: str) -> None:
    """Handlers that end within the grace time complete; nothing new is claimed."""
    started = threading.Event()

    def body(value: Any) -> Any:
        started.set()
        time.sleep(0.3)
        return value

    work = declare(app, lane, body)
    batch = await work.amap(range(3))
    async with working(app, threads=1, concurrency=1) as worker:
        await eventually(started.is_set)
    assert worker.summary == Summary(completed=1)
    assert [task.attempts for task in [await one.atask() for one in batch]] == [1, 0, 0]


@pytest.mark.parametrize("hurry", [False, True])
async def test_a_stop_gives_back_what_does_not_end(app: Dibs, hurry: bool) -> None:
    """After the grace time, or at the second stop, handlers are stopped and tasks released with their attempt."""
    started = threading.Event()
    release = threading.Event()

    @app.task(name="loop")
    async def in_loop() -> None:
        started.set()
        await asyncio.sleep(LIMIT_S)

    @app.task(name="thread")
    def in_thread() -> None:
        release.wait(LIMIT_S)

    handles = [await in_loop.aenqueue(), await in_thread.aenqueue()]
    async with working(app, grace_s=LIMIT_S if hurry else 0.1) as worker:
        await eventually(started.is_set)
        await eventually(lambda: len(worker._jobs) == 2)
        worker.stop()
        if hurry:
            worker.stop()
    release.set()
    tasks = [await one.atask() for one in handles]
    assert [(task.status, task.attempts) for task in tasks] == [(Status.PENDING, 0)] * 2
    assert worker.summary == Summary()
    assert [event.kind for event in await journal(app)].count(EventKind.RELEASED) == 2
