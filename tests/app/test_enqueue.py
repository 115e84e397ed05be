"""A function that is a task: still the function, and a producer of tasks."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dibs import Dibs, new_id
from dibs.clock import ManualClock
from dibs.errors import (
    ArgumentsError,
    InvalidInput,
    InvalidName,
    InvalidOption,
    PayloadTooLarge,
    StoreUnavailable,
)
from dibs.function import TaskFunction
from dibs.listeners import TaskEvent
from dibs.settings import Settings
from dibs.task import Status
from tests.app.conftest import close_all


def double(value: int) -> int:
    """Twice as much."""
    return value * 2


async def double_later(value: int) -> int:
    """Twice as much, in a while."""
    return value * 2


@pytest.fixture
def work(app: Dibs) -> TaskFunction[[int], int]:
    """A task."""
    return app.task(name="work")(double)


async def test_a_task_is_still_its_function(app: Dibs) -> None:
    """Called plainly it runs here and now, and looks like itself."""
    plain, later = app.task(double), app.task(double_later)
    assert plain(21) == 42
    assert await later(21) == 42
    assert (plain.__name__, plain.__doc__, plain.__wrapped__) == ("double", "Twice as much.", double)  # type: ignore[attr-defined]
    assert plain.command == f"{__name__}.double"
    assert not (await app.ask(lambda store: store.stats("default"))).queues


def test_from_plain_code(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """enqueue, then a worker, then the result."""
    handle = work.enqueue(21)
    assert handle.status() is Status.PENDING
    assert not handle.duplicate
    assert app.drain().completed == 1
    assert (handle.result(), handle.wait(), handle.status()) == (42, 42, Status.COMPLETED)


async def test_from_async_code(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """aenqueue, then a worker, then await."""
    handle = await work.aenqueue(21)
    assert await handle.astatus() is Status.PENDING
    await app.adrain()
    assert (await handle.aresult(), await handle.awaited(1), await handle) == (42, 42, 42)


async def test_plain_calls_work_where_a_loop_runs(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """enqueue, status and cancel can be called inside a running event loop."""
    handle = work.enqueue(1)
    assert handle.status() is Status.PENDING
    assert (await handle.atask()).id == handle.task_id
    assert handle.cancel().how == "cancelled"


def test_from_many_threads_at_once(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """Threads that start together, on an app that was never used, enqueue each their own."""
    barrier = threading.Barrier(16)

    def enqueue(value: int) -> bytes:
        barrier.wait(20)
        return work.enqueue(value).task_id

    with ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(enqueue, range(16)))
    assert len(set(ids)) == 16
    assert app.drain().completed == 16


def test_thirty_two_enqueues_of_one_key_make_one_task(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """Concurrent enqueues of one key are one task; all but one are told that they are duplicates."""
    keyed = work.options(key="once")
    with ThreadPoolExecutor(32) as pool:
        handles = list(pool.map(keyed.enqueue, range(32)))
    assert len({handle.task_id for handle in handles}) == 1
    assert sum(not handle.duplicate for handle in handles) == 1
    assert app.drain().completed == 1


def test_several_loops_one_after_the_other(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """What one event loop enqueued is there for the next, in memory too."""
    handle = asyncio.run(work.aenqueue(1))
    assert asyncio.run(handle.astatus()) is Status.PENDING
    assert handle.status() is Status.PENDING


async def test_the_apps_own_loop_is_not_waited_for(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """A plain call from the loop that would have to answer is refused, where it would wait for itself for ever."""

    async def inside() -> None:
        for call in (lambda: work.enqueue(1), lambda: work.call(1), lambda: work.map([1])):
            with pytest.raises(InvalidInput, match="use the async form"):
                call()
        await work.aenqueue(1)

    await asyncio.to_thread(app.run, inside())
    assert (await app.adrain()).completed == 1


def test_an_app_can_be_used_again_after_it_was_closed(tmp_path: Any) -> None:
    """close lets go of everything; the next call opens it again, and the tasks are there."""
    app = Dibs(tmp_path / "store")
    handle = app.task(name="work")(double).enqueue(1)
    app.close()
    app.close()
    assert handle.status() is Status.PENDING
    app.close()


# ------------------------------------------------------------------------------------------------------------- options


def test_options_are_merged(app: Dibs, clock: ManualClock) -> None:
    """What a call says wins over what the decorator says; the function itself does not change."""
    work = app.task(name="work", priority=3, max_attempts=7)(double)
    urgent = work.options(priority=9).options(timeout_s=5)
    task = urgent.enqueue(1).task()
    assert (task.priority, task.max_attempts, task.timeout_s) == (9, 7, 5)
    assert work.enqueue(1).task().priority == 3
    assert urgent.options(priority=None).enqueue(1).task().priority == 0  # type: ignore[arg-type]


def test_options_that_say_when(app: Dibs, clock: ManualClock) -> None:
    """delay_s and run_at, with any time zone, decide when; the past means now."""
    work = app.task(name="work")(double)
    now = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    assert work.options(delay_s=60).enqueue(1).task().due_ms == clock.now_ms() + 60_000
    assert work.options(run_at=now + timedelta(hours=1)).enqueue(1).task().due_ms == clock.now_ms() + 3_600_000
    assert work.options(run_at=now - timedelta(hours=1)).enqueue(1).task().place == "ready"
    assert app.drain().completed == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prioritee": 1}, "unknown options: prioritee; there are tenant, priority"),
        ({"priority": 10}, "priority is 10"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"lease_s": 0.5}, "lease_s is 0.5"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"delay_s": "soon"}, "delay_s is 'soon'"),
        ({"expires_s": 0}, "expires_s is 0"),
        ({"key": ""}, "is not a key"),
        ({"on_duplicate": "whatever"}, "on_duplicate is 'whatever'"),
        ({"keep": "yes"}, "keep is 'yes'"),
        ({"codec": "No Codec"}, "is not a codec"),
        ({"tenant": "Not A Tenant"}, "is not a tenant"),
        ({"run_at": datetime(2030, 1, 1)}, "use a datetime with a time zone"),  # noqa: DTZ001 that is the point
        ({"run_at": "tomorrow"}, "use a datetime with a time zone"),
        ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay_s": 1}, "use one of them"),
        ({"name": "no spaces please"}, "is not a command"),
        ({"aliases": ["no spaces please"]}, "is not a command"),
        ({"run_in": "space"}, "run_in is 'space'"),
        ({"run_in": "loop"}, "would block the loop"),
    ],
)
def test_bad_options_are_refused_at_the_declaration(options: dict[str, Any], says: str) -> None:
    """A mistake in an option is an error where it is written, not at the first enqueue."""
    app = Dibs("memory:")
    with pytest.raises(InvalidInput, match=says):
        app.task(**{"name": "work", **options})(double)
    if not options.keys() & {"name", "aliases", "run_in"}:
        with pytest.raises(InvalidInput, match=says):
            app.task(name="work")(double).options(**options)


def test_a_coroutine_function_does_not_run_in_a_thread() -> None:
    """run_in that does not go with the function is refused."""
    with pytest.raises(InvalidOption, match="runs in the loop"):
        Dibs("memory:").task(run_in="thread")(double_later)


def test_settings_or_a_url() -> None:
    """Settings name the store: a URL beside them is refused."""
    with pytest.raises(InvalidOption, match="not both"):
        Dibs("memory:", settings=Settings(url="memory:"))


def test_arguments_are_checked_at_the_enqueue(work: TaskFunction[..., int]) -> None:
    """What the handler cannot take is not enqueued."""
    for args, kwargs in (((), {}), ((1, 2), {}), ((), {"values": 1}), (("two",), {})):
        with pytest.raises(ArgumentsError):
            work.enqueue(*args, **kwargs)
    with pytest.raises(ArgumentsError):
        work.map([1], other=2)


# ---------------------------------------------------------------------------------------------------------------- keys


def test_a_repeated_key_gives_the_first_task(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """A duplicate is the first task's handle, says so, and gives its result; a cancelled task frees the key."""
    keyed = work.options(key="invoice-7")
    first = keyed.enqueue(1)
    second = keyed.enqueue(2)
    assert (second.task_id, second.duplicate) == (first.task_id, True)
    app.drain()
    assert keyed.enqueue(3).wait(5) == 2
    assert keyed.call(4) == 2
    other = work.options(key="other")
    cancelled = other.enqueue(1)
    cancelled.cancel()
    again = other.enqueue(2)
    assert not again.duplicate
    assert app.drain().completed == 1
    assert again.result() == 4


def test_keys_belong_to_a_command_and_a_tenant(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """The same key elsewhere is another task."""
    elsewhere = app.task(name="elsewhere")(double)
    handles = [work.options(key="k").enqueue(1), elsewhere.options(key="k").enqueue(1)]
    handles.append(work.options(key="k", tenant="other").enqueue(1))
    assert not any(handle.duplicate for handle in handles)
    assert len({handle.task_id for handle in handles}) == 3


# ----------------------------------------------------------------------------------------------------------------- map


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 3500])
def test_map(app: Dibs, work: TaskFunction[[int], int], count: int) -> None:
    """One task for each item of any iterable, in its order, however many chunks that takes."""
    batch = work.map(value for value in range(count))
    assert len(batch) == count
    assert app.drain().completed == count
    assert list(batch.results()) == [value * 2 for value in range(count)]


async def test_amap_with_several_iterables_and_fixed_arguments(app: Dibs) -> None:
    """Like the built-in map, with arguments that are the same for all."""

    def area(width: int, height: int, *, unit: str) -> str:
        return f"{width * height}{unit}"

    batch = await app.task(name="area")(area).amap([1, 2, 3], [10, 20], unit="m²")
    await app.adrain()
    assert [value async for value in batch.aresults()] == ["10m²", "40m²"]


def test_map_of_nothing(work: TaskFunction[[int], int]) -> None:
    """Without an iterable there is nothing to map over."""
    with pytest.raises(InvalidOption, match="at least one iterable"):
        work.map()


def broken(count: int) -> Any:
    """An input that ends with an error."""
    yield from range(count)
    raise RuntimeError("the input broke")


async def in_the_store(app: Dibs) -> int:
    """How many tasks there are, whatever became of them."""
    return sum(queue.ready for queue in (await app.ask(lambda store: store.stats("default"))).queues)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("count", [10, 1000, 5000])
async def test_a_map_that_breaks_off_leaves_nothing(
    app: Dibs, work: TaskFunction[[int], int], count: int, asynchronous: bool
) -> None:
    """If the input raises, the map raises just that, and nothing is enqueued, however far it had come."""
    with pytest.raises(RuntimeError, match="the input broke") as caught:
        await work.amap(broken(count)) if asynchronous else work.map(broken(count))
    assert caught.value.__cause__ is None
    assert await in_the_store(app) == 0
    assert (await app.adrain()).completed == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("before", [1, 2500])
async def test_a_map_of_which_one_is_refused_leaves_nothing(url: str, before: int, asynchronous: bool) -> None:
    """A payload over the limit is not enqueued, and nor is anything beside it."""
    app = Dibs(settings=Settings(url=url, payload_max_bytes=100))
    work = app.task(name="work")(len)
    texts = ["a"] * before + ["b" * 200, "c"]
    with pytest.raises(PayloadTooLarge, match="the limit 100"):
        await work.amap(texts) if asynchronous else work.map(texts)
    assert await in_the_store(app) == 0
    with pytest.raises(PayloadTooLarge, match="the limit 100"):
        await work.options(key="once").amap(texts)
    assert await in_the_store(app) == 0
    assert len(await work.amap(["a"] * before)) == before
    app.close()
    await app.aclose()


def test_a_map_of_one_key_is_one_task(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """With a key every item is about the same task, however many there are."""
    batch = work.options(key="once").map(range(2500))
    assert len(batch) == 2500
    assert len(set(batch.task_ids)) == 1
    assert app.drain().completed == 1


def test_large_items_go_in_chunks_of_their_own(app: Dibs) -> None:
    """A map of few items that are together over what one transaction holds is a load too, in its order."""
    measure = app.task(name="measure")(len)
    batch = measure.map("x" * (400_000 + number) for number in range(7))
    app.drain()
    assert list(batch.results()) == [400_000 + number for number in range(7)]


def test_nothing_is_visible_before_the_input_ends(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """While its input is being read, a map has enqueued nothing; then everything at once."""
    seen: list[int] = []

    def watching() -> Any:
        for value in range(3500):
            if value % 700 == 0:
                seen.append(app.run(in_the_store(app)))
            yield value

    work.map(watching())
    assert seen == [0] * 5
    assert app.run(in_the_store(app)) == 3500


def test_an_interrupted_map_leaves_nothing(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """Ctrl-C in the middle ends a map like any other error, and the app goes on."""

    def interrupted() -> Any:
        yield from range(2500)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.map(interrupted())
    assert app.run(in_the_store(app)) == 0
    assert len(work.map(range(1500))) == 1500


def test_a_map_in_slices(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """An input that does not end, or is slow, is enqueued slice by slice: each is there before the next is read."""
    endless, enqueued = itertools.count(), 0
    for _ in range(3):
        enqueued += len(work.map(itertools.islice(endless, 500)))
        assert app.run(in_the_store(app)) == enqueued
    assert next(endless) == 1500


KILLED = """
import os, signal, sys
from dibs import Dibs

app = Dibs(sys.argv[1])

def double(value: int) -> int:
    return value * 2

def values():
    for value in range(8_000):
        if value == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield value

print(len(app.task(name="work")(double).options(load="import").map(values())))
"""


def test_a_killed_map_leaves_nothing(tmp_path: Any) -> None:
    """kill -9 in the middle enqueues nothing; the same map again, under its name, enqueues each once."""
    results = []
    for killed_at in (5_000, -1, -1):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(killed_at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        with Dibs(tmp_path / "store") as app:
            results.append((done.returncode, done.stdout.strip(), app.run(in_the_store(app))))
    assert results == [(-9, "", 0), (0, "8000", 8_000), (0, "8000", 8_000)]


# --------------------------------------------------------------------------------------------------------- named loads


@pytest.mark.parametrize("count", [1, 1000, 2500])
def test_a_named_map_is_enqueued_once(app: Dibs, work: TaskFunction[[int], int], count: int) -> None:
    """Repeated under its name, also when everything has been done, a map enqueues nothing and gives the same batch."""
    named = work.options(load="import-2026-11")
    first, second = named.map(range(count)), named.map(range(count))
    assert first.task_ids == second.task_ids
    assert len(set(first.task_ids)) == count
    assert app.drain().completed == count
    third = named.map(range(count))
    assert app.drain().completed == 0
    assert list(third.results()) == [value * 2 for value in range(count)]
    other = work.options(load="import-2026-12").map(range(count))
    assert set(other.task_ids).isdisjoint(first.task_ids)
    assert app.drain().completed == count


async def test_a_named_map_that_broke_off_is_made_good(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """What a broken map had staged is no hindrance to the next one of its name."""
    named = work.options(load="import")
    with pytest.raises(RuntimeError):
        await named.amap(broken(3200))
    batch = await named.amap(range(2500))
    assert (await app.adrain()).completed == 2500
    assert [value async for value in batch.aresults()] == [value * 2 for value in range(2500)]


def test_a_named_map_of_nothing(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """An empty input does not use up the name."""
    named = work.options(load="import")
    assert len(named.map([])) == 0
    named.map([1])
    assert app.drain().completed == 1


def test_a_load_is_the_name_of_a_map(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """Where a name of a load makes no sense, it is refused."""
    for call in (work.options(load="x").enqueue, work.options(load="x").call):
        with pytest.raises(InvalidOption, match="names a map"):
            call(1)
    with pytest.raises(InvalidOption, match="leave out either"):
        work.options(load="x", key="k")
    with pytest.raises(InvalidName, match="not a load name"):
        work.options(load="")
    with pytest.raises(InvalidOption, match="where the map is called"):
        app.task(name="other", load="x")(double)
    assert len(work.options(load="x").options(load=None).map([1])) == 1  # type: ignore[arg-type]


def test_listeners_hear_of_what_was_enqueued(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """Every new task is told once, a duplicate is not, and a listener that raises changes nothing."""
    heard: list[TaskEvent] = []

    @app.on("enqueued")
    def raising(event: object) -> None:
        raise RuntimeError("a listener of no use")

    app.on("enqueued")(heard.append)
    first = work.options(key="k").enqueue(1)
    work.options(key="k").enqueue(2)
    batch, many = work.map([1, 2, 3]), work.options(load="many").map(range(1200))
    work.options(load="many").map(range(1200))
    with pytest.raises(RuntimeError):
        work.map(broken(1200))
    assert [event.task_id for event in heard] == [first.task_id, *batch.task_ids, *many.task_ids]
    assert {event.command for event in heard} == {"work"}


# -------------------------------------------------------------------------------------------------------------- naming


def test_two_functions_of_one_name_are_refused() -> None:
    """A name belongs to one function; the same one declared again is a module that was loaded anew."""
    app = Dibs("memory:")
    app.task(name="work")(double)
    app.task(name="work")(double)

    def other() -> None: ...

    def double_elsewhere(value: int) -> int:
        return value

    double_elsewhere.__qualname__, double_elsewhere.__module__ = "double", "another.module"
    for function in (other, double_elsewhere):
        with pytest.raises(InvalidOption, match="two functions are named work"):
            app.task(name="work")(function)
    with pytest.raises(InvalidOption, match="two functions are named work"):
        app.task(name="fresh", aliases=["work"])(other)
    assert list(app.functions) == ["work"]


def test_aliases_run_tasks_of_former_names(url: str, clock: ManualClock) -> None:
    """After a rename, tasks that were enqueued under the old name are run."""
    before, after = Dibs(url, clock=clock), Dibs(url, clock=clock)
    after.url = before.url
    handle = before.task(name="old.name")(double).enqueue(4)
    renamed = after.task(name="new.name", aliases=["old.name", "older.name"])(double)
    assert renamed.enqueue(1).task().command == "new.name"
    assert after.drain().completed == 2
    assert handle.wait(5) == 8
    before.close()
    after.close()


def test_functions_without_a_name_of_their_own_are_refused() -> None:
    """A worker could not find what is defined inside a function, unless it is given a name."""

    def inner() -> None: ...

    app = Dibs("memory:")
    for handler in (inner, lambda: None):
        with pytest.raises(InvalidName, match="give name="):
            app.task(handler)
        assert app.task(name="named")(inner).command == "named"


def test_a_task_of_another_app_can_be_declared_too() -> None:
    """The same function in two apps is a task of each."""
    one, two = Dibs("memory:"), Dibs("memory:")
    first = one.task(name="first")(double_later)
    second = two.task(name="second")(first)
    assert (first.app, second.app) == (one, two)
    assert (second.command, second.policy.run_in) == ("second", "loop")


def test_what_a_function_carries_does_not_change_its_task() -> None:
    """Attributes of a function stay its own, whatever they are called."""

    def handler() -> None: ...

    handler.__dict__.update(app="mine", command="mine", options="mine")
    task = Dibs("memory:").task(name="work")(handler)
    assert (task.command, task.handler) == ("work", handler)
    assert callable(task.options)


def test_handles_of_other_processes(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """A task's id, as text or bytes, is enough to ask about it."""
    handle = work.enqueue(3)
    app.drain()
    assert app.handle(handle.id).result() == 6
    assert app.handle(handle.task_id).result() == 6
    assert repr(handle) == f"<Handle {handle.id} of default>"
    with pytest.raises(InvalidName):
        app.handle("no id")
    assert app.handle(new_id()).cancel().how == "unknown"


def test_a_store_that_breaks_is_opened_again(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """After StoreUnavailable the next call asks a newly opened store."""
    work.enqueue(1)
    stores: list[object] = []

    async def fail(store: object) -> None:
        stores.append(store)
        raise StoreUnavailable("gone")

    async def look(store: object) -> None:
        stores.append(store)

    if app.settings.url == "memory:":
        return  # what is in memory is gone with its store
    with pytest.raises(StoreUnavailable):
        app.run(app.ask(fail))
    app.run(app.ask(look))
    assert stores[0] is not stores[1]
    assert app.drain().completed == 1


@pytest.mark.parametrize("_", range(10))
def test_loops_that_open_a_store_at_once_have_the_same(url: str, _: int) -> None:
    """Threads with event loops of their own, which start together, see each other's tasks."""
    app = Dibs(url)
    work = app.task(name="work")(double)
    barrier = threading.Barrier(4)

    async def put_and_look(value: int) -> int:
        await work.aenqueue(value)
        await asyncio.to_thread(barrier.wait, 20)
        return (await app.ask(lambda store: store.stats("default"))).total.ready

    def start(value: int) -> int:
        barrier.wait(20)
        return asyncio.run(put_and_look(value))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(start, range(4))) == [4] * 4
    close_all(app)
