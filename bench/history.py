"""The history lake: how long `dibs history run` takes from the journal of a million tasks to gold, and over 1 % more;
how much memory all its processes have, and how large the lake is.

Times are of the whole command with two cores, the start of Java included. Beside it stands a plain loop of one process
over the same journal, event by event, that does nothing with them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench import steps
from bench.figures import Figure, figure
from bench.steps import COMMAND, PAYLOAD, TENANT, Options, fresh_directory
from dibs.history.tables import SILVER
from dibs.stores import open_store
from dibs.stores.protocol import ALL_TENANTS
from dibs.task import BATCH_MAX, NewTask

MIB = 1 << 20
LOOK_S = 0.2
EVENTS_PER_TASK = 3


class Run(NamedTuple):
    """One run of the command."""

    seconds: float
    peak_bytes: int
    """The most that all processes had at once: what they have alone, and their part of what they share."""


def measure(options: Options) -> list[Figure]:
    """Returns the times of a first and of a second run, their memory, and the size of the tables."""
    count = options.pick(1_000_000, 20_000)
    more = count // 100
    seen: dict[str, list[Any]] = {"plain": [], "first": [], "more": []}
    sizes: dict[str, int] = {}
    for number in range(options.pick(min(options.repeat, 2), 1)):
        with fresh_directory(options) as directory:
            options.say(f"history, round {number + 1}: {count:,} tasks are enqueued, claimed and completed")
            steps.run(options, _work(directory / "store", count))
            options.say(f"history, round {number + 1}: a plain loop over the journal")
            seen["plain"].append(steps.run(options, _loop(directory / "store")))
            options.say(f"history, round {number + 1}: the first run")
            seen["first"].append(_run(directory))
            steps.run(options, _work(directory / "store", more))
            options.say(f"history, round {number + 1}: a run over 1 % more")
            seen["more"].append(_run(directory))
            sizes = _sizes(directory / "lake")
    return _figures(seen, sizes, count, more)


def _figures(seen: dict[str, list[Any]], sizes: dict[str, int], count: int, more: int) -> list[Figure]:
    events = count * EVENTS_PER_TASK
    first: list[Run] = seen["first"]
    plain = figure("history", "events read by a plain loop", "events/s", seen["plain"])
    peaks = [max(one.peak_bytes, two.peak_bytes) / MIB for one, two in zip(first, seen["more"], strict=True)]
    rates = [events / run.seconds for run in first]
    return [
        plain,
        figure("history", "events from the journal to gold", "events/s", rates, against={"plain loop": plain},
               note=f"{count:,} tasks, {events:,} events; the start of Java included"),
        figure("history", f"run over {count:,} tasks", "s", [run.seconds for run in first], better="lower"),
        figure("history", f"run over {more:,} tasks more", "s", [run.seconds for run in seen["more"]], better="lower"),
        figure("history", "memory of all processes", "MiB", peaks, better="lower", note="the most of either run"),
        *(
            figure("history", f"size of {table}", "bytes/task", [size / (count + more)], better="lower")
            for table, size in sizes.items()
        ),
    ]  # fmt: skip


async def _work(directory: Path, count: int) -> None:
    """Tasks of 1,000 a call, all of them claimed and completed, by four workers in turn."""
    async with await open_store(f"lmdb:{directory}") as store:
        for start in range(0, count, BATCH_MAX):
            tasks = [NewTask(command=COMMAND, payload=PAYLOAD) for _ in range(min(BATCH_MAX, count - start))]
            await store.enqueue(TENANT, tasks)
        for number in range(-(-count // 500)):
            leases = await store.claim(TENANT, [COMMAND], limit=500, worker=f"worker-{number % 4}")
            await steps.complete(store, leases)


async def _loop(directory: Path) -> float:
    async with await open_store(f"lmdb:{directory}") as store:
        start_s, count, after, more = time.perf_counter(), 0, None, True
        while more:
            page = await store.events(ALL_TENANTS, after=after)
            count, after, more = count + len(page.events), page.cursor, page.more
        return count / (time.perf_counter() - start_s)


def _run(directory: Path) -> Run:
    command = [sys.executable, "-m", "dibs", "history", "run", "--store", f"lmdb:{directory / 'store'}",
               "--lake", str(directory / "lake"), "--master", "local[2]"]  # fmt: skip
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    most, ended = [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, most, ended), daemon=True)
    watcher.start()
    _, said = process.communicate()
    seconds = time.perf_counter() - start_s
    ended.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(said.decode())
    return Run(seconds, most[0])


def _watch(pid: int, most: list[int], ended: threading.Event) -> None:
    while not ended.wait(LOOK_S):
        total = 0
        try:
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                total += _memory(process)
        except psutil.Error:
            continue
        most[0] = max(most[0], total)


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def _sizes(lake: Path) -> dict[str, int]:
    kept = {table: (lake / table).rglob("*.parquet") for table in ("events", *SILVER)}
    return {table: sum(file.stat().st_size for file in files) for table, files in kept.items()}
