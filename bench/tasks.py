"""End to end: from a call of a function to its result, through the real command ``dibs worker``.

A drain starts with a full queue that is paused, and with workers that wait for it; its time runs from the first claim
to the last completion, as the journal has them. Beside it stands the same store drained by a bare loop of claim and
settle, without app, handlers or encoding.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from bench import steps
from bench.baselines import Floor
from bench.figures import Figure, by_percentile, figure
from bench.steps import PAYLOAD, TENANT, Options, fresh_directory
from dibs import Batch, Dibs, codec
from dibs.function import TaskFunction
from dibs.portal import LoopThread
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import EventKind, QueueConfig
from dibs.worker import Worker

ARGUMENTS = codec.decode(PAYLOAD, "json")
BATCH = 100
PERCENTILES = (50, 99)
ROOT = Path(__file__).parent.parent


def measure(options: Options) -> list[Figure]:
    """Returns the rates of maps and drains, the latencies of calls, and what a worker costs."""
    count = options.pick(100_000, 20_000)
    cases: dict[str, Callable[[], float]] = {
        "map": lambda: _map(options, count),
        "store alone": lambda: bare_drain(options, count),
        "async, 1 process": lambda: drain(options, "in_loop", count, 1),
        "async, 2 processes": lambda: drain(options, "in_loop", count, 2),
        "async, 2 processes, 500 slots each": lambda: drain(options, "in_loop", count, 2, slots=500),
        "sync, 1 process": lambda: drain(options, "in_thread", count // 2, 1),
        "sync, 2 processes": lambda: drain(options, "in_thread", count // 2, 2),
    }
    seen = steps.rounds(options, "tasks", cases)
    alone = figure("tasks", "drain, store alone, 1 process", "tasks/s", seen["store alone"])
    drains = [
        figure("tasks", f"drain, {case}", "tasks/s", seen[case], against={"store": alone}) for case in list(cases)[2:]
    ]
    return [
        figure("tasks", f"map of {count:,}", "tasks/s", seen["map"]),
        alone,
        *drains,
        *_latencies(options),
        *_costs(options, count),
    ]


# ------------------------------------------------------------------------------------------------------------- rates


def _map(options: Options, count: int) -> float:
    with fresh_directory(options) as directory, app_on(directory) as function:
        start_s = time.perf_counter()
        batch = _fill(function("in_loop"), count)
        rate = count / (time.perf_counter() - start_s)
        assert len(batch) == count
        return rate


def drain(options: Options, name: str, count: int, processes: int, slots: int | None = None) -> float:
    """Returns how many tasks a second so many processes of `dibs worker` drain."""
    with fresh_directory(options) as directory, app_on(directory) as function:
        handler = function(name)
        _set_paused(handler, paused=True)
        _fill(handler, count)
        with workers_on(directory, processes, slots):
            _wait_until(lambda: len(handler.app.run(handler.app.ask(_workers_of))) == processes)
            _set_paused(handler, paused=False)
            _wait_until(lambda: _left(handler) == 0)
        return count / handler.app.run(handler.app.ask(_spent_s))


def bare_drain(options: Options, count: int) -> float:
    """Returns how many tasks a second a loop of claim and settle drains, in one process."""

    async def drain(store: Store) -> float:
        for _ in range(count // 1_000):
            await steps.enqueue(store, 1_000)
        start_s = time.perf_counter()
        for _ in range(count // BATCH):
            await steps.complete(store, await steps.claim(store, BATCH))
        return count / (time.perf_counter() - start_s)

    async def main(directory: Path) -> float:
        async with await open_store(str(directory)) as store:
            return await drain(store)

    with fresh_directory(options) as directory:
        return steps.run(options, main(directory))


def _fill(function: TaskFunction[..., object], count: int) -> Batch[object]:
    url, fixed = ARGUMENTS["url"], {name: value for name, value in ARGUMENTS.items() if name != "url"}
    return function.map((url for _ in range(count)), **fixed)


# --------------------------------------------------------------------------------------------------------- latencies


def _latencies(options: Options) -> list[Figure]:
    """A call and its answer: both in one process, and across two."""
    count = options.pick(600, 150) // options.repeat
    floors, within, across = [], [], []
    for number in range(options.repeat):
        options.say(f"tasks, calls, round {number + 1} of {options.repeat}")
        floors.append(_three_commits(options, count))
        within.append(_calls_within(options, count))
        across.append(_calls_across(options, count))
    floor = by_percentile("tasks", "LMDB floor, three commits", "ms", floors, of=PERCENTILES)
    against = {"floor": floor}
    return [
        *floor.values(),
        *by_percentile("tasks", "call, one process", "ms", within, of=PERCENTILES, against=against).values(),
        *by_percentile("tasks", "call, two processes", "ms", across, of=PERCENTILES, against=against).values(),
    ]


def _three_commits(options: Options, count: int) -> list[float]:
    with fresh_directory(options) as directory:
        floor = Floor(directory)
        times = [1000 * sum(floor.cycle(1)) for _ in range(count)]
        floor.close()
    return times


def _calls_within(options: Options, count: int) -> list[float]:
    with fresh_directory(options) as directory, app_on(directory) as function:
        thread = LoopThread("bench-worker")
        worker = Worker(function("in_loop").app)
        running = thread.submit(worker.run())
        times = calls(function("in_loop"), count)
        thread.loop.call_soon_threadsafe(worker.stop)
        running.result()
        thread.stop()
    return times


def _calls_across(options: Options, count: int) -> list[float]:
    with fresh_directory(options) as directory, app_on(directory) as function, workers_on(directory, 1):
        return calls(function("in_loop"), count)


def calls(function: TaskFunction[..., object], count: int) -> list[float]:
    """Milliseconds of each call; the first few, which find everything cold, are not counted."""
    times = []
    for number in range(count + 10):
        start_s = time.perf_counter()
        function.call(**ARGUMENTS, timeout_s=60)
        if number >= 10:
            times.append(1000 * (time.perf_counter() - start_s))
        time.sleep(0.002)
    return times


# -------------------------------------------------------------------------------------------------------------- costs


def _costs(options: Options, count: int) -> list[Figure]:
    """What a worker takes: CPU while it waits, memory before and after many tasks."""
    idle_s = options.pick(10.0, 3.0)
    options.say("tasks, costs of a worker")
    with fresh_directory(options) as directory, app_on(directory) as function, workers_on(directory, 1) as pids:
        handler = function("in_loop")
        _fill(handler, count // 10)
        _wait_until(lambda: _left(handler) == 0)
        process = psutil.Process(pids[0])
        early = _own_bytes(process)
        spent_s, start_s = sum(process.cpu_times()[:2]), time.perf_counter()
        time.sleep(idle_s)
        idle = 100 * (sum(process.cpu_times()[:2]) - spent_s) / (time.perf_counter() - start_s)
        _fill(handler, count)
        _wait_until(lambda: _left(handler) == 0)
        late = _own_bytes(process)
    note = "its own, without the pages of the map that it shares with the system's cache"
    return [
        figure("tasks", "CPU of an idle worker", "% of a core", [idle], better="lower"),
        figure("tasks", f"worker after {count // 10:,} tasks", "MB", [early / 1e6], better="lower", note=note),
        figure("tasks", f"worker after {count:,} more", "MB", [late / 1e6], better="lower", note=note),
    ]


def _own_bytes(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


# ------------------------------------------------------------------------------------------------------------- helpers


@contextlib.contextmanager
def app_on(url: str | Path) -> Iterator[Callable[[str], TaskFunction[..., object]]]:
    """The bench's app, on a store of its own: gives its functions by name."""
    from bench import handlers

    app = Dibs(url)
    functions = {
        name: app.task(name=f"bench.handlers.{name}")(getattr(handlers, name).handler)
        for name in ("in_loop", "in_thread")
    }
    try:
        yield lambda name: functions[name]
    finally:
        app.close()


@contextlib.contextmanager
def workers_on(url: str | Path, count: int, slots: int | None = None) -> Iterator[list[int]]:
    """Runs ``dibs worker`` in so many processes, with as many slots as usual unless told otherwise; gives their ids."""
    command = [sys.executable, "-m", "dibs", "worker", "bench.handlers:app", "--quiet"]
    if slots is not None:
        command += ["--concurrency", str(slots)]
    environment = {**os.environ, "DIBS_URL": str(url)}
    workers = [subprocess.Popen(command, cwd=ROOT, env=environment) for _ in range(count)]
    try:
        yield [worker.pid for worker in workers]
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)


def _wait_until(holds: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a worker did not do its work in {within_s:.0f} s")
        time.sleep(0.1)


def _set_paused(function: TaskFunction[..., object], *, paused: bool) -> None:
    config = QueueConfig(paused=paused)
    function.app.run(function.app.ask(lambda store: store.configure(TENANT, function.command, config)))


def _left(function: TaskFunction[..., object]) -> int:
    stats = function.app.run(function.app.ask(lambda store: store.stats(TENANT, [function.command])))
    return stats.total.ready + stats.total.leased


async def _workers_of(store: Store) -> list[object]:
    return list(await store.workers(TENANT))


async def _spent_s(store: Store) -> float:
    """Seconds from the first claim to the last completion."""
    first = last = 0
    cursor, more = None, True
    while more:
        page = await store.events(TENANT, after=cursor)
        for event in page.events:
            if event.kind is EventKind.CLAIMED:
                first = first or event.at_ms
            elif event.kind is EventKind.COMPLETED:
                last = event.at_ms
        cursor, more = page.cursor, page.more
    return (last - first) / 1000
