"""Handlers in processes of their own."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dibs.clock import ManualClock
from dibs.errors import TaskCancelled, TaskFailed
from dibs.task import Progress, Status
from dibs.worker import Summary
from tests.worker import handlers
from tests.worker.commands import Shop
from tests.worker.steps import LIMIT_S, drained, eventually, working

app = handlers.app


@pytest.fixture(autouse=True)
def empty(clock: ManualClock) -> Iterator[None]:
    """An empty store in memory, whose time stands still."""
    with app.replaced(f"memory:{uuid.uuid4().hex}", clock):
        yield


async def test_results_and_where_they_come_from() -> None:
    """Values pass both ways; the handler runs in a child of the worker, which is used again."""
    values = [None, 0, "ü", {"a": [1, 2.5]}, "x" * 500_000]
    batch = await handlers.echo.amap(values)
    coroutine = await handlers.later.aenqueue(1)
    places = [await handlers.who.options(timeout_s=60).aenqueue() for _ in range(4)]
    assert await drained(app, pool=2) == Summary(completed=10)
    assert [one async for one in batch.aresults()] == values
    assert await coroutine == 2
    seen = [await place for place in places]
    assert {row[1] for row in seen} == {os.getpid()}
    assert len({row[0] for row in seen}) <= 2
    assert [row[2:] for row in seen] == [[1, place.id, True] for place in places]


async def test_the_children_end_with_the_worker() -> None:
    """No process is left over."""
    before = set(psutil.Process().children())
    place = await handlers.who.aenqueue()
    await drained(app)
    assert not psutil.pid_exists((await place)[0])
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "exit status 7"),
        (str(int(signal.SIGKILL)), "SIGKILL"),
        (str(int(signal.SIGSEGV)), "SIGSEGV"),
        (str(int(signal.SIGRTMIN) + 5), "signal "),
    ],
)
async def test_a_process_that_dies_is_a_failure_that_is_retried(
    how: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever ends the process, its task is retried with ProcessDied, in a new one."""
    handle = await handlers.end.options(max_attempts=1).aenqueue(how)
    again = await handlers.end.aenqueue(how)
    assert await drained(app, pool=1) == Summary(completed=1, retried=1, failed=1)
    with pytest.raises(TaskFailed, match=says) as caught:
        await handle
    assert caught.value.type == "ProcessDied"
    assert await again == "second"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_to_the_group_are_the_workers_business(number: signal.Signals) -> None:
    """SIGTERM and SIGINT do not end a handler's process: the worker decides."""
    handle = await handlers.end.aenqueue(str(int(number)))
    assert await drained(app) == Summary(completed=1)
    assert await handle == "survived"


async def test_programs_that_a_handler_starts_can_be_ended() -> None:
    """They do not inherit that signals are ignored."""
    handle = await handlers.terminated_child.aenqueue()
    await drained(app)
    assert await handle == 1


async def test_sys_exit_is_an_error_like_others() -> None:
    """SystemExit ends neither the child nor the worker."""
    handle = await handlers.end.aenqueue("system exit")
    assert await drained(app) == Summary(completed=1, retried=1)
    assert await handle == "second"


async def test_retry_and_fail(clock: ManualClock) -> None:
    """They mean the same as elsewhere, and errors carry their traceback."""
    failed, retried, error = [await handlers.tell.aenqueue(how) for how in ("fail", "retry", "error")]
    await drained(app)
    assert (await failed.atask()).reason == "NO"
    assert (await retried.atask()).due_ms == clock.now_ms() + 60_000
    task = await error.atask()
    assert task.error is not None
    assert (task.error.type, task.status) == ("ValueError", Status.FAILED)
    assert "in tell" in task.error.traceback


async def test_a_handler_that_reads_finds_nothing() -> None:
    """The pipe between worker and child is not a handler's to read."""
    handles = [await handlers.reads.aenqueue() for _ in range(2)]
    assert await drained(app, pool=1) == Summary(completed=2)
    assert [await handle for handle in handles] == [["", ""]] * 2


async def test_a_process_is_killed_at_its_timeout() -> None:
    """Past timeout_s the process is killed, and the task retried."""
    handle = await handlers.works.options(timeout_s=1, max_attempts=1).aenqueue(300)
    assert await drained(app) == Summary(failed=1)
    task = await handle.atask()
    assert task.error is not None
    assert task.error.type == "TimeoutError"


async def test_progress_and_cancel() -> None:
    """Progress is seen while it runs; a cancel kills the process, and the task ends CANCELLED."""
    handle = await handlers.works.aenqueue(300)

    async def progress() -> Progress | None:
        return (await handle.atask()).progress

    async with working(app):
        assert await eventually(progress) == Progress(0, 10, "working")
        assert (await handle.acancel()).how == "cancelling"
        with pytest.raises(TaskCancelled):
            await handle.awaited(LIMIT_S)


@pytest.mark.parametrize("done", ["half", -1, None, [1]])
async def test_an_odd_progress_costs_nobody_a_slot(done: Any) -> None:
    """Progress that is no number is a failure or is left out; the worker goes on."""
    await handlers.progresses.options(max_attempts=1).aenqueue(done)
    fine = await handlers.echo.aenqueue(1)
    await drained(app, pool=1)
    assert await fine == 1


async def test_a_stop_kills_and_gives_back() -> None:
    """After the grace time the process is killed and the task released with its attempt."""
    handle = await handlers.works.aenqueue(300)
    async with working(app, grace_s=0.1) as worker:
        await eventually(lambda: worker.running)
    task = await handle.atask()
    assert (task.status, task.attempts) == (Status.PENDING, 0)


async def test_hooks_run_where_the_handler_does() -> None:
    """A hook of the module changes the outcome in the child."""
    handle = await handlers.hooked.aenqueue()
    await drained(app)
    assert await handle == "changed"


async def test_arguments_that_do_not_fit() -> None:
    """Also in a child they are one failure."""
    from dibs.task import NewTask

    [enqueued] = await app.ask(
        lambda store: store.enqueue("default", [NewTask(command=handlers.later.command, payload=b'{"x": 1}')])
    )
    assert await drained(app) == Summary(failed=1)
    assert (await app.handle(enqueued.id).atask()).reason == "INVALID_ARGUMENTS"  # type: ignore[union-attr]


BOMB = """
@app.task(name="work", run_in="process", max_attempts=1)
def work(value: int) -> int:
    return value

if not (HERE / "armed").exists():
    (HERE / "armed").touch()
else:
    from dibs.worker import Worker, WorkerOptions
    asyncio.run(Worker(app, WorkerOptions(drain=True)).run())
"""


async def test_a_module_that_starts_a_worker_does_not_multiply(shop: Shop, tmp_path: Path) -> None:
    """A module without a guard fails its tasks with a hint, instead of starting workers within workers."""
    shop.write(BOMB)
    async with shop.app() as other:
        handle = await other.task(name="work", max_attempts=1)(lambda value: value).aenqueue(1)
        worker = shop.worker("--drain")
        assert worker.ended() == 0, worker.output
        with pytest.raises(TaskFailed, match="guard that by if __name__"):
            await handle.awaited(5)


MULTIPLIES = """
@app.task(name="work", run_in="process", max_attempts=3)
def work(value: int) -> int:
    return value

work.enqueue(1)
"""


async def test_a_module_that_enqueues_when_it_is_imported_does_not_multiply(shop: Shop) -> None:
    """Imported to run a handler it would enqueue again, and again for each of those: it is refused, once for all."""
    shop.write(MULTIPLIES)
    worker = shop.worker("--drain")
    assert worker.ended() == 0, worker.output
    async with shop.app() as other:
        page = await other.ask(lambda store: store.list("default"))
    [task] = page.tasks
    assert (task.status, task.attempts) == (Status.FAILED, 1)
    assert task.error is not None
    assert "guard that by if __name__" in task.error.message


async def test_a_process_that_dies_is_noticed_although_what_it_started_lives() -> None:
    """A program that the handler started may hold the pipe open; the death of the handler's process is what counts."""
    handle = await handlers.leaves_a_child.options(max_attempts=1).aenqueue(LIMIT_S)
    assert await drained(app) == Summary(failed=1)
    with pytest.raises(TaskFailed, match="SIGKILL"):
        await handle


@pytest.mark.parametrize("lane", ["process", "thread", "loop"])
async def test_a_handler_that_forks_comes_back_once(shop: Shop, lane: str) -> None:
    """The copy of the process that returns from the handler ends there: it is no second worker."""
    kind = "async def" if lane == "loop" else "def"
    shop.write(
        f'''
@app.task(name="forks", run_in="{lane}")
{kind} forks() -> int:
    return 1 if os.fork() else 2
'''
    )
    async with shop.app() as other:
        batch = [await other.task(name="forks")(lambda: 0).aenqueue() for _ in range(4)]
        worker = shop.worker("--drain", "--pool", "1", "--concurrency", "1", "--threads", "1")
        assert worker.ended() == 0, worker.output
        assert [await one.awaited(5) for one in batch] == [1, 1, 1, 1]


async def test_progress_that_cannot_be_written_costs_nothing() -> None:
    """A note that is no text is not told; the handler goes on."""
    handle = await handlers.odd_progress.aenqueue()
    assert await drained(app) == Summary(completed=1)
    assert await handle == "done"
