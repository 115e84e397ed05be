"""What a producer holds: results, errors, batches, calls that wait."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dibs import Dibs, Fail, new_id
from dibs.clock import ManualClock
from dibs.errors import InvalidOption, TaskCancelled, TaskError, TaskFailed, TaskUnfinished, TaskUnknown
from dibs.function import TaskFunction
from dibs.handles import BatchProgress
from dibs.task import Status
from dibs.worker import Worker


@dataclass
class Invoice:
    """What a handler may return."""

    number: int
    due: datetime


def invoice(number: int) -> Invoice:
    """Returns a dataclass."""
    return Invoice(number, datetime(2030, 1, 2, tzinfo=UTC))


def invoices(number: int) -> list[Invoice]:
    """Returns several."""
    return [invoice(number)]


async def when() -> datetime:
    """Returns a time."""
    return datetime(2030, 1, 2, tzinfo=UTC)


def picky(value: int) -> int | None:
    """Fails for some."""
    if value == 1:
        raise Fail("ONE", "not this one")
    return value or None


@pytest.fixture
def work(app: Dibs) -> TaskFunction[[int], int | None]:
    """A task that fails for 1."""
    return app.task(name="work")(picky)


def test_results_have_the_declared_type(app: Dibs) -> None:
    """A dataclass or datetime comes back as one, alone and in a list; another process sees plain values."""
    one = app.task(name="one")(invoice).enqueue(7)
    many = app.task(name="many")(invoices).map([7, 8])
    time = app.task(name="time")(when).enqueue()
    app.drain()
    expected = Invoice(7, datetime(2030, 1, 2, tzinfo=UTC))
    assert one.result() == expected
    assert next(iter(many.results())) == [expected]
    assert time.result() == datetime(2030, 1, 2, tzinfo=UTC)
    assert app.handle(one.id).result() == {"number": 7, "due": "2030-01-02T00:00:00Z"}


def test_what_a_failed_task_raises(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """TaskFailed has the reason, the type and the remote traceback, and shows it."""
    handle = work.enqueue(1)
    app.drain()
    for ask in (handle.result, handle.wait):
        with pytest.raises(TaskFailed, match=r"ONE, attempt 1 of 5.*not this one") as caught:
            ask()
        assert (caught.value.reason, caught.value.type) == ("ONE", "dibs.context.Fail")
        assert "in picky" in caught.value.remote_traceback
        assert any("In the worker" in note for note in caught.value.__notes__)


def test_other_ends(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """Unfinished, cancelled and unknown tasks each raise their own, all of them TaskErrors."""
    handle = work.enqueue(2)
    with pytest.raises(TaskUnfinished, match="has not ended: it is PENDING"):
        handle.result()
    with pytest.raises(TaskUnfinished):
        handle.wait(0)
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    handle.cancel()
    with pytest.raises(TaskCancelled, match="CANCELLED") as caught:
        handle.wait()
    assert caught.value.reason == "CANCELLED"
    assert handle.cancel().how == "ended"
    for ask in (app.handle(new_id()).wait, app.handle(new_id()).result, app.handle(new_id()).status):
        with pytest.raises(TaskUnknown):
            ask()
    with pytest.raises(TaskUnknown):
        app.handle(handle.id, tenant="other").status()
    assert issubclass(TaskUnknown, TaskError)


def test_none_is_a_result(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """A handler that returns None has completed, and wakes its waiter."""
    handle = work.enqueue(0)
    app.drain()
    assert handle.wait(5) is None
    assert handle.status() is Status.COMPLETED


def test_results_are_gone_after_their_time(
    app: Dibs, work: TaskFunction[[int], int | None], clock: ManualClock
) -> None:
    """After result_ttl_s there is no such result, and no such task after its retention; that starts at the end."""
    handle = work.options(result_ttl_s=60, retention_s=120, delay_s=48 * 3600).enqueue(2)
    clock.advance(48 * 3600)
    app.drain()
    assert handle.result() == 2
    clock.advance(61)
    app.run(app.ask(lambda store: store.sweep()))
    with pytest.raises(TaskUnknown, match="no longer kept"):
        handle.result()
    clock.advance(60)
    app.run(app.ask(lambda store: store.sweep()))
    with pytest.raises(TaskUnknown, match="there is no task"):
        handle.result()


def test_unkept_tasks(app: Dibs, work: TaskFunction[[int], int | None], clock: ManualClock) -> None:
    """keep=False: the end can be waited for, there is no result to read, and soon no task."""
    loose = work.options(keep=False)
    handle, batch = loose.enqueue(5), loose.map([6, 7])
    app.drain()
    assert handle.wait(5) is None
    assert list(batch.results()) == [None, None]
    clock.advance(61)
    app.run(app.ask(lambda store: store.sweep()))
    with pytest.raises(TaskUnknown):
        handle.status()


# ---------------------------------------------------------------------------------------------------------------- call


def test_call_waits_for_the_result(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """call returns what the handler returns, acall too, and raises what it ended with."""
    with ThreadedWorker(app):
        assert work.call(3) == 3
        assert work.call(4, timeout_s=20) == 4
        assert asyncio.run(work.acall(5)) == 5
        with pytest.raises(TaskFailed, match="not this one"):
            work.call(1)


@pytest.mark.parametrize("swept", [False, True])
def test_a_call_that_was_given_up_never_runs(app: Dibs, clock: ManualClock, swept: bool) -> None:
    """A call that times out before its task began leaves nothing that runs later."""
    runs: list[int] = []
    work = app.task(name="work")(runs.append)
    with pytest.raises(TaskUnfinished) as caught:
        work.call(1, timeout_s=0.05)
    assert any("is a worker running for work?" in note for note in caught.value.__notes__)
    clock.advance(1)
    if swept:
        app.run(app.ask(lambda store: store.sweep()))
    assert app.drain().runs == 0
    assert runs == []


def test_a_call_whose_task_expires_first_has_timed_out(app: Dibs, clock: ManualClock) -> None:
    """If a sweep notices before the caller does, the caller still hears that its time was over."""
    work = app.task(name="work")(picky)

    def sweep() -> None:
        clock.advance(5)
        app.run(app.ask(lambda store: store.sweep()))

    timer = threading.Timer(0.1, sweep)
    timer.start()
    with pytest.raises(TaskUnfinished, match="never will"):
        work.call(2, timeout_s=4)
    timer.join()


def test_a_call_keeps_an_expiry_of_its_own(app: Dibs, clock: ManualClock) -> None:
    """An explicit expires_s wins: the task may run after the caller has gone."""
    work = app.task(name="work", expires_s=3600)(picky)
    with pytest.raises(TaskUnfinished):
        work.call(2, timeout_s=0.05)
    clock.advance(60)
    assert app.drain().completed == 1


def test_a_cancelled_call_says_so(app: Dibs) -> None:
    """A task that somebody cancels is cancelled for the caller too, not late."""
    work = app.task(name="work", key="k")(picky)
    timer = threading.Timer(0.1, lambda: work.enqueue(2).cancel())
    timer.start()
    with pytest.raises(TaskCancelled):
        work.call(2, timeout_s=20)
    timer.join()


@pytest.mark.parametrize("timeout_s", [0, -1, 1e9, float("nan"), "soon"])
def test_timeouts_that_make_no_sense(app: Dibs, work: TaskFunction[..., Any], timeout_s: Any) -> None:
    """call refuses them, and enqueues nothing."""
    with pytest.raises(ValueError, match="timeout_s is"):
        work.call(1, timeout_s=timeout_s)
    assert app.drain().runs == 0


class ThreadedWorker:
    """A worker for code that has no loop of its own."""

    def __init__(self, app: Dibs) -> None:
        self._worker: Worker | None = None
        self._app = app
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _run(self) -> None:
        self._worker, self._loop = Worker(self._app), asyncio.get_running_loop()
        self._started.set()
        await self._worker.run()

    def __enter__(self) -> None:
        self._thread.start()
        self._started.wait(20)

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._worker is not None
        self._loop.call_soon_threadsafe(self._worker.stop)
        self._thread.join(20)


# --------------------------------------------------------------------------------------------------------------- batch


def test_a_batch(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """Progress, waiting and results, with errors in their places or raised."""
    batch = work.map([0, 1, 2, 3])
    assert batch.progress() == BatchProgress(4)
    batch[3].cancel()
    assert batch.progress() == BatchProgress(4, cancelled=1)
    told: list[BatchProgress] = []
    app.drain()
    ended = batch.wait(20, on_progress=told.append)
    assert ended == batch.progress() == told[-1] == BatchProgress(4, completed=2, failed=1, cancelled=1)
    assert ended.over
    assert (ended.ended, ended.total) == (4, 4)
    first, second, third, fourth = batch.results(errors=True)
    assert (first, third) == (None, 2)
    assert isinstance(second, TaskFailed)
    assert isinstance(fourth, TaskCancelled)
    with pytest.raises(TaskFailed, match="not this one"):
        list(batch.results())
    assert [handle.id for handle in batch] == [batch[index].id for index in range(4)]
    assert len(batch) == 4


async def test_a_batch_for_async_code(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """The same, awaited."""
    batch = await work.amap([2, 1, 3])
    await app.adrain()
    assert await batch == BatchProgress(3, completed=2, failed=1)
    values = [value async for value in batch.aresults(errors=True)]
    assert (values[0], values[2]) == (2, 3)
    assert await batch.acancel() == 0


def test_a_batch_that_does_not_end_in_time(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """Waiting ends with TaskUnfinished, which says how many are missing."""
    batch = work.map(range(2, 1502))
    batch[0].cancel()
    with pytest.raises(TaskUnfinished, match="1499 of 1500 tasks have not ended"):
        batch.wait(0.05)
    with pytest.raises(TaskUnfinished):
        list(batch.results(0))


def test_cancelling_a_batch(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """What has not ended is cancelled and counted; nothing of it runs."""
    batch = work.map(range(2, 1502))
    batch[0].cancel()
    assert batch.cancel() == 1499
    assert app.drain().runs == 0
    assert batch.wait(5) == BatchProgress(1500, cancelled=1500)


def test_a_batch_of_tasks_that_are_gone(app: Dibs, work: TaskFunction[[int], int | None], clock: ManualClock) -> None:
    """Tasks that are no longer kept count as unknown, and a wait for them ends."""
    batch = work.options(retention_s=10, result_ttl_s=10).map([2, 3])
    app.drain()
    clock.advance(11)
    app.run(app.ask(lambda store: store.sweep()))
    assert batch.wait(5) == BatchProgress(2, unknown=2)
    with pytest.raises(TaskUnknown):
        list(batch.results())


def test_an_empty_batch(work: TaskFunction[[int], int | None]) -> None:
    """A map over nothing has ended."""
    batch = work.map([])
    assert (batch.wait(), list(batch.results()), batch.cancel()) == (BatchProgress(0), [], 0)
    assert batch.progress().over


def test_two_waiters_of_one_task(app: Dibs, work: TaskFunction[[int], int | None]) -> None:
    """One that times out does not take the other's wake-up with it."""

    async def wait() -> Any:
        handle = await work.aenqueue(2)
        patient = asyncio.ensure_future(handle.awaited(20))
        with pytest.raises(TaskUnfinished):
            await handle.awaited(0.05)
        await app.adrain()
        return await patient

    assert asyncio.run(wait()) == 2


# ------------------------------------------------------------------------------------------------------------ processes


FORKING = """
import os, sys
from dibs import Dibs
app = Dibs(sys.argv[1])

@app.task(name="work")
def work(value: int) -> int:
    return value * 2

first = work.enqueue(1)
children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = work.enqueue(10 + number)
            assert own.status() == first.status() == "PENDING"
            status = 0
        finally:
            os._exit(status)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
assert codes == [0, 0, 0], codes
assert app.drain().completed == 4
assert first.result() == 2
child = os.fork()
if child == 0:
    sys.exit(0)  # runs what is registered for the end, in a child that never used the app
assert os.waitpid(child, 0)[1] == 0
print("fine")
"""


def test_an_app_works_after_a_fork(tmp_path: Path) -> None:
    """A child of a process that used the app can use it too; parent and child go on, and both can end."""
    command = [sys.executable, "-W", "error", "-c", FORKING, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_progress_is_told_in_the_callers_thread(url: str) -> None:
    """`on_progress` may ask the app, and may raise."""
    app = Dibs(url)
    work = app.task(name="work")(lambda value: value)
    batch = work.map(range(3))
    app.drain()
    seen: list[tuple[int, int, str]] = []
    batch.wait(30, lambda counts: seen.append((threading.get_ident(), counts.ended, batch[0].status())))
    assert seen[-1] == (threading.get_ident(), 3, "COMPLETED")
    again = work.map(range(3))
    with pytest.raises(SystemExit):
        again.wait(0.5, lambda _: sys.exit("enough"))
    app.close()


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "x", True])
def test_a_timeout_is_a_number_of_seconds(app: Dibs, timeout_s: Any) -> None:
    """Anything else is refused at once."""
    work = app.task(name="work")(lambda value: value)
    handle, batch = work.enqueue(1), work.map([1])
    for wait in (handle.wait, batch.wait):
        with pytest.raises(InvalidOption, match="timeout_s"):
            wait(timeout_s)
