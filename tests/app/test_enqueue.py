"""A function that is a task: still the function, and a producer of tasks."""

from __future__ import annotations

import asyncio
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
    PartlyEnqueued,
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


def test_a_map_that_breaks_off_says_what_is_in(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """PartlyEnqueued carries the batch of what was enqueued, and its cause."""
    with pytest.raises(PartlyEnqueued, match="2000 tasks are enqueued, then: the input broke") as caught:
        work.map(broken(2500))
    batch = caught.value.batch
    assert len(batch) == 2000
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert app.drain().completed == 2000
    assert list(batch.results()) == [value * 2 for value in range(2000)]


async def test_an_amap_that_breaks_off_says_what_is_in(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """PartlyEnqueued, for async code."""
    with pytest.raises(PartlyEnqueued) as caught:
        await work.amap(broken(1500))
    assert len(caught.value.batch) == 1000
    assert (await app.adrain()).completed == 1000


def test_a_map_that_enqueued_nothing_raises_what_happened(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """Without anything in the queue, the error is the input's own."""
    with pytest.raises(RuntimeError, match="the input broke") as caught:
        work.map(broken(10))
    assert caught.value.__cause__ is None
    assert app.drain().completed == 0


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_map_of_which_one_is_refused_says_what_is_in(url: str, asynchronous: bool) -> None:
    """A payload over the limit is not enqueued; those beside it are, and are told."""
    app = Dibs(settings=Settings(url=url, payload_max_bytes=100))
    work = app.task(name="work")(len)
    texts = ["a", "b" * 200, "c"]
    with pytest.raises(PartlyEnqueued, match="2 tasks are enqueued") as caught:
        await work.amap(texts) if asynchronous else work.map(texts)
    assert isinstance(caught.value.__cause__, PayloadTooLarge)
    assert len(caught.value.batch) == 2
    assert (await app.adrain()).completed == 2
    assert [one async for one in caught.value.batch.aresults()] == [1, 1]
    app.close()
    await app.aclose()


def test_listeners_hear_of_what_was_enqueued(app: Dibs, work: TaskFunction[[int], int]) -> None:
    """Every new task is told once, a duplicate is not, and a listener that raises changes nothing."""
    heard: list[TaskEvent] = []

    @app.on("enqueued")
    def raising(event: object) -> None:
        raise RuntimeError("a listener of no use")

    app.on("enqueued")(heard.append)
    first = work.options(key="k").enqueue(1)
    work.options(key="k").enqueue(2)
    batch = work.map([1, 2, 3])
    assert [event.task_id for event in heard] == [first.task_id, *batch.task_ids]
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
