"""How a run ends, and what becomes of its task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from dibs import Backoff, Dibs, Fail, Retry
from dibs.clock import ManualClock
from dibs.errors import InvalidOption, TaskFailed
from dibs.handles import Handle
from dibs.settings import Settings
from dibs.task import EventKind, NewTask, QueueConfig, Status
from dibs.worker import Summary, Worker
from tests.worker.steps import declare, drained, journal, working

LANES = pytest.mark.parametrize("lane", ["loop", "thread"])
NOW = Backoff(kind="fixed", base_s=0, jitter="none")


@LANES
@pytest.mark.parametrize("value", [None, 0, False, "", [], {"a": [1, None]}])
async def test_what_a_handler_returns_is_the_result(app: Dibs, lane: str, value: Any) -> None:
    """Every plain value is a result, None and other false ones too."""
    work = declare(app, lane, lambda given: given)
    handle = await work.aenqueue(value)
    assert await drained(app) == Summary(completed=1)
    assert await handle == value
    assert (await handle.atask()).attempts == 1


@LANES
async def test_exactly_max_attempts_runs(app: Dibs, lane: str, clock: ManualClock) -> None:
    """A handler that always raises runs max_attempts times, and its task is then dead with the last error."""
    runs = []

    def body(_: Any) -> None:
        runs.append(1)
        raise ValueError(f"run {len(runs)}")

    work = declare(app, lane, body, max_attempts=4, backoff=NOW)
    handle = await work.aenqueue()
    assert await drained(app) == Summary(retried=3, failed=1)
    clock.advance(3600)
    assert await drained(app) == Summary()
    assert len(runs) == 4
    with pytest.raises(TaskFailed, match=r"MAX_ATTEMPTS, attempt 4 of 4.*ValueError: run 4") as caught:
        await handle
    assert caught.value.reason == "MAX_ATTEMPTS"
    assert caught.value.type == "ValueError"
    assert "in body" in caught.value.remote_traceback
    assert "running.py" not in caught.value.remote_traceback


@LANES
async def test_retry_waits_as_long_as_it_says(app: Dibs, lane: str, clock: ManualClock) -> None:
    """Retry(delay_s) decides when, whatever the backoff; it counts as an attempt."""
    tried: list[int] = []

    def body(_: Any) -> str:
        if not tried:
            tried.append(1)
            raise Retry("later", delay_s=600)
        return "done"

    work = declare(app, lane, body, backoff=NOW)
    handle = await work.aenqueue()
    assert await drained(app) == Summary(retried=1)
    clock.advance(599)
    assert await drained(app) == Summary()
    clock.advance(2)
    assert await drained(app) == Summary(completed=1)
    assert await handle == "done"
    assert (await handle.atask()).attempts == 2


@LANES
async def test_fail_is_final(app: Dibs, lane: str) -> None:
    """Fail(reason) ends the task at once, under that reason."""

    def body(_: Any) -> None:
        raise Fail("EMPTY_FILE", "nothing in it")

    handle = await declare(app, lane, body).aenqueue()
    assert await drained(app) == Summary(failed=1)
    with pytest.raises(TaskFailed, match="nothing in it") as caught:
        await handle
    assert caught.value.reason == "EMPTY_FILE"


@pytest.mark.parametrize("fail_on", [LookupError, (OSError, LookupError)])
async def test_fail_on_is_final(app: Dibs, fail_on: Any) -> None:
    """An exception of `fail_on`, or of a class below it, is not tried again; others are."""

    def body(value: Any) -> None:
        raise KeyError("gone") if value else ValueError("odd")

    work = declare(app, "thread", body, fail_on=fail_on)
    final, again = await work.aenqueue(True), await work.aenqueue(False)
    assert await drained(app) == Summary(failed=1, retried=1)
    assert (await final.atask()).reason == "FAILED"
    assert (await again.atask()).status is Status.PENDING


async def due_in_s(handle: Handle[Any], clock: ManualClock) -> float:
    """When a task is tried again."""
    return ((await handle.atask()).due_ms - clock.now_ms()) / 1000


async def test_whose_backoff_counts(app: Dibs, clock: ManualClock) -> None:
    """A function's own backoff, else its queue's, else the library's."""

    def raising(_: Any = None) -> None:
        raise ValueError

    fixed = Backoff(kind="fixed", base_s=70, jitter="none")
    own = await app.task(name="own", backoff=fixed)(raising).aenqueue()
    other = Dibs(settings=Settings(url=app.url), clock=clock)
    queued = await other.task(name="queued")(raising).aenqueue()
    usual = await other.task(name="usual")(raising).aenqueue()
    queue = QueueConfig(backoff=Backoff(kind="fixed", base_s=90, jitter="none"))
    for command in ("own", "queued"):
        await app.ask(lambda store, command=command: store.configure("default", command, queue))  # type: ignore[misc]
    assert await drained([app, other]) == Summary(retried=3)
    assert await due_in_s(own, clock) == 70
    assert await due_in_s(queued, clock) == 90
    assert 0 <= await due_in_s(usual, clock) <= 5
    await other.aclose()


async def test_backoff_grows(app: Dibs, clock: ManualClock) -> None:
    """The delay is that of the attempt which failed."""

    def raising(_: Any) -> None:
        raise ValueError

    work = declare(app, "thread", raising, backoff=Backoff(base_s=10, factor=3, jitter="none"))
    handle = await work.aenqueue()
    for expected in (10, 30, 90):
        await drained(app)
        assert await due_in_s(handle, clock) == expected
        clock.advance(expected)


@LANES
@pytest.mark.parametrize(
    "payload", [b'{"value": 1, "unknown": 2}', b'{"value": ', b'{"value": "\xff"}', b'{"value": NaN}']
)
async def test_arguments_that_do_not_fit_fail_once(app: Dibs, lane: str, payload: bytes) -> None:
    """A payload that the handler cannot take is one failure, not a loop, and the handler does not run."""
    runs: list[Any] = []
    declare(app, lane, runs.append)
    await app.ask(lambda store: store.enqueue("default", [NewTask(command="work", payload=payload)]))
    assert await drained(app) == Summary(failed=1)
    assert runs == []
    [failed] = [event for event in await journal(app) if event.kind is EventKind.FAILED]
    assert failed.reason == "INVALID_ARGUMENTS"


@LANES
@pytest.mark.parametrize("value", [object(), b"bytes", float("nan"), {1j: 2}])
async def test_results_that_cannot_be_encoded_fail_once(app: Dibs, lane: str, value: Any) -> None:
    """A result that has no plain form is one failure; running the handler again would not help."""
    runs = []

    def body(_: Any) -> Any:
        runs.append(1)
        return value

    handle = await declare(app, lane, body).aenqueue()
    assert await drained(app) == Summary(failed=1)
    assert len(runs) == 1
    assert (await handle.atask()).reason == "INVALID_RESULT"


@LANES
async def test_a_result_that_is_too_large_fails_once(url: str, lane: str) -> None:
    """A result over the limit is one failure that says so."""
    runs = []

    def body(_: Any) -> str:
        runs.append(1)
        return "x" * 2000

    async with Dibs(settings=Settings(url=url, result_max_bytes=1000)) as app:
        handle = await declare(app, lane, body).aenqueue()
        assert await drained(app) == Summary(failed=1)
        assert len(runs) == 1
        with pytest.raises(TaskFailed, match="2002 bytes and the limit 1000") as caught:
            await handle
        assert caught.value.reason == "INVALID_RESULT"


@LANES
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseException("odd")]
)
async def test_nothing_that_a_handler_raises_ends_the_worker(app: Dibs, lane: str, error: BaseException) -> None:
    """Whatever it raises is the outcome of its task; the next task runs."""

    def body(value: Any) -> Any:
        if value:
            raise error
        return "fine"

    work = declare(app, lane, body, backoff=NOW, max_attempts=2)
    bad, good = await work.aenqueue(True), await work.aenqueue(False)
    assert await drained(app) == Summary(completed=1, retried=1, failed=1)
    assert await good == "fine"
    assert (await bad.atask()).reason == "MAX_ATTEMPTS"


@LANES
@pytest.mark.parametrize(
    "error",
    [
        ValueError("\udcff is no text"),
        ValueError("x" * 200_000),
        ValueError("x" * 40_000),
        ExceptionGroup("both", [ValueError("a"), KeyError("b")]),
        type("Broken", (Exception,), {"__str__": lambda _: 1 / 0})(),
        type("E" * 500, (Exception,), {})("long name"),
    ],
    ids=["surrogate", "huge", "large", "group", "broken", "long name"],
)
async def test_odd_exceptions_are_retried_like_others(app: Dibs, lane: str, error: Exception) -> None:
    """An error that is hard to write down costs its task no attempt more than any other."""

    def body(_: Any) -> None:
        raise error

    minute = Backoff(kind="fixed", base_s=60, jitter="none")
    handle = await declare(app, lane, body, backoff=minute).aenqueue()
    assert await drained(app) == Summary(retried=1)
    task = await handle.atask()
    assert task.status is Status.PENDING
    assert task.error is not None
    assert task.error.type


@pytest.mark.parametrize(
    "raised", [Retry(delay_s=-5), Retry(delay_s=float("nan")), Fail("two\nlines"), Fail("x" * 500)], ids=repr
)
async def test_orders_that_make_no_sense_end_the_task(app: Dibs, raised: Exception) -> None:
    """A Retry or Fail that the store does not take is a failure, and the worker goes on."""

    def body(_: Any) -> None:
        raise raised

    handle = await declare(app, "thread", body).aenqueue()
    assert await drained(app) == Summary(failed=1)
    assert (await handle.atask()).status is Status.FAILED


async def test_a_result_is_encoded_as_the_arguments_were(app: Dibs) -> None:
    """msgpack and raw carry bytes both ways, also for one call; with raw, nothing and what is not bytes come too."""

    def body(value: Any) -> Any:
        return {b"back": b"\xffback", b"none": None, b"number": 7}[value]

    work = declare(app, "thread", body)
    for codec in ("raw", "msgpack"):
        handles = await work.options(codec=codec).amap([b"back", b"none", b"number"])
        assert await drained(app) == Summary(completed=3)
        assert [one async for one in handles.aresults()] == [b"\xffback", None, 7]


async def test_payloads_and_results_are_not_logged(app: Dibs, caplog: pytest.LogCaptureFixture) -> None:
    """The log names tasks, not what they carry."""
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "dibs.worker"):
        handle = await declare(app, "loop", lambda _: "secret-result").aenqueue("secret-argument")
        await drained(app)
    assert await handle == "secret-result"
    assert handle.id in caplog.text
    assert "secret" not in caplog.text


async def test_a_running_worker_takes_what_comes(app: Dibs) -> None:
    """An idle worker is woken by an enqueue, from its own loop and any thread, again and again."""
    work = declare(app, "loop", lambda value: value)
    async with working(app) as worker:
        for value in range(20):
            assert await (await work.aenqueue(value)).awaited(20) == value
        assert await asyncio.to_thread(work.call, 7) == 7
    assert worker.summary.completed == 21


async def test_one_failing_task_does_not_hold_up_its_batch(app: Dibs) -> None:
    """Outcomes go back in batches; one that the store refuses touches no other."""

    def body(value: Any) -> Any:
        if value == 13:
            raise Fail("bad\nreason")
        return value

    batch = await declare(app, "loop", body).amap(range(50))
    assert await drained(app) == Summary(completed=49, failed=1)
    progress = await batch
    assert (progress.completed, progress.failed) == (49, 1)


@pytest.mark.parametrize("make", [lambda: Dibs("memory:"), list])
def test_a_worker_without_tasks_is_refused(make: Callable[[], Any]) -> None:
    """There must be something to work on."""
    with pytest.raises(InvalidOption, match="nothing to work on"):
        Worker(make())


async def test_waiters_are_woken_by_every_kind_of_end(app: Dibs) -> None:
    """A waiter learns of a completed, a failed and a cancelled task alike."""

    def body(value: Any) -> Any:
        if value:
            raise Fail("NO")

    work = declare(app, "thread", body)
    handles = [await work.aenqueue(value) for value in (0, 1, 2)]
    waiting = [asyncio.ensure_future(one.awaited(20)) for one in handles]
    await asyncio.sleep(0)
    await handles[2].acancel()
    await drained(app)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one).__name__ for one in outcomes] == ["NoneType", "TaskFailed", "TaskCancelled"]
