"""What a million tasks take: on disk, and in the anonymous memory of the process that put them there.

A process of its own for every measurement: memory that others left behind would count. The quick run takes fewer tasks
and scales. LMDB's pages are the kernel's to keep or drop, so they are no part of anonymous memory; a journal entry for
every move is part of the disk figure.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from bench import steps
from bench.backlog import fill
from bench.baselines import Floor
from bench.children import child
from bench.figures import Figure, figure
from bench.steps import Options, fresh_directory
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX

MILLION = 1_000_000
UNIT = "MB per million"
Sizes = dict[str, tuple[float, float]]
"""Disk and anonymous memory by state, in megabytes per million tasks."""


def measure(options: Options) -> list[Figure]:
    """Returns disk and memory per million waiting, and per million completed and kept."""
    count = options.pick(300_000, 100_000)
    options.say(f"footprint: {count:,} tasks in bare LMDB")
    floors = {
        state: _figure(f"LMDB floor, {state}: disk", megabytes) for state, megabytes in _floors(options, count).items()
    }
    figures = list(floors.values())
    for kind in ("lmdb", "memory"):
        options.say(f"footprint: {count:,} tasks in {kind}")
        for state, (disk, memory) in _in_child(options, kind, count).items():
            if kind == "lmdb":
                figures.append(_figure(f"{kind}, {state}: disk", disk, {"floor": floors[state]}))
            figures.append(_figure(f"{kind}, {state}: anonymous memory", memory))
    for one in figures:
        one.note = f"scaled from {count:,}"
    return figures


def _figure(name: str, megabytes: float, against: dict[str, Figure] | None = None) -> Figure:
    return figure("footprint", name, UNIT, [megabytes], better="lower", against=against)


def _floors(options: Options, count: int) -> dict[str, float]:
    """Returns what bare LMDB takes for the records of a waiting and of a completed task."""
    sizes = {}
    for state in ("waiting", "completed"):
        with fresh_directory(options) as directory:
            floor = Floor(directory)
            step = floor.enqueue if state == "waiting" else floor.cycle
            for _ in range(0, count, BATCH_MAX):
                step(BATCH_MAX)
            floor.close()
            sizes[state] = _disk_bytes(directory) / count
    return sizes


def _in_child(options: Options, kind: str, count: int) -> Sizes:
    with (
        fresh_directory(options) as directory,
        child(_fill_in_child, directory, kind, options.uvloop, count) as filling,
    ):
        sizes: Sizes = filling.receive()
    return sizes


def _fill_in_child(pipe: Connection, directory: Path, kind: str, uvloop: bool, count: int) -> None:
    async def main() -> None:
        async with await open_store("memory:" if kind == "memory" else str(directory)) as store:
            await steps.cycle(store, BATCH_MAX)
            before = _anonymous_bytes()
            sizes: Sizes = {}
            await fill(store, count)
            sizes["waiting"] = (_disk_bytes(directory) / count, (_anonymous_bytes() - before) / count)
            await _complete_all(store, count)
            sizes["completed"] = (_disk_bytes(directory) / count, (_anonymous_bytes() - before) / count)
            pipe.send(sizes)

    steps.run(Options(uvloop=uvloop), main())


async def _complete_all(store: Store, count: int) -> None:
    for _ in range(0, count, BATCH_MAX):
        await steps.complete(store, await steps.claim(store, BATCH_MAX))


def _disk_bytes(directory: Path) -> int:
    """What the directory's files really take up."""
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*") if path.is_file())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0
