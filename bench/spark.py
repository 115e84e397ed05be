"""Spark: how fast rows become tasks, how fast views are read, how fast executors drain a queue; with one core and two.

Rates are of one action each, in a session that runs and has done the same in small before; starting the JVM does not
count. Beside writing stands the same DataFrame written as Parquet; beside reading, the store's own verbs in a plain
loop of one process; beside draining, a bare loop of claim and settle, and `dibs worker` with one process.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench import steps, tasks
from bench.children import Child, child
from bench.figures import Figure, figure
from bench.steps import COMMAND, PAYLOAD, RESULT, TENANT, Options, fresh_directory
from dibs.stores import open_store
from dibs.stores.loading import Load
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, RUNS_MAX, NewTask, Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASTERS = ("local[1]", "local[2]")
WARM_UP = 2_000
MIB = 1 << 20


def measure(options: Options) -> list[Figure]:
    """Returns the rates of writes, reads and drains, and the memory that writing takes."""
    rows, events, drained = (
        options.pick(1_000_000, 50_000),
        options.pick(500_000, 20_000),
        options.pick(100_000, 10_000),
    )
    with ExitStack() as stack:
        filled = stack.enter_context(_filled(options, events))
        sparks = {master: stack.enter_context(child(serve, master)) for master in MASTERS}

        def on(master: str, case: str, count: int) -> Callable[[], float]:
            return lambda: _asked(options, sparks[master], case, count, filled)

        plain: dict[str, Callable[[], float]] = {
            "read events, a plain loop": lambda: steps.run(options, _runs(filled)),
            "read tasks, a plain loop": lambda: steps.run(options, _lists(filled)),
            "drain, a plain loop": lambda: tasks.bare_drain(options, drained),
            "drain, dibs worker, 1 process": lambda: tasks.drain(options, "in_loop", drained, 1),
        }
        cases = dict(plain)
        for master in MASTERS:
            for case, count in CASES.items():
                cases[f"{case}, {master}"] = on(
                    master, case, {"rows": rows, "events": events, "drained": drained}[count]
                )
        seen = steps.rounds(options, "spark", cases)
        memory = [_memory(options, sparks["local[2]"], filled, count) for count in (rows // 10, rows)]
    return [*_figures(seen, rows, plain), *memory]


#: What is measured, and how many rows it is about.
CASES = {
    "write Parquet": "rows",
    "write tasks, payload as text": "rows",
    "write tasks, payload of columns": "rows",
    "read events": "events",
    "read tasks": "events",
    "read results": "events",
    "drain": "drained",
}
_UNITS = {"write": "rows/s", "read": "rows/s", "drain": "tasks/s"}
_BESIDE = {
    "read events": "read events, a plain loop",
    "read tasks": "read tasks, a plain loop",
    "read results": "read tasks, a plain loop",
    "drain": "drain, dibs worker, 1 process",
}


def _figures(seen: dict[str, list[float]], rows: int, plain: dict[str, Any]) -> list[Figure]:
    made = {case: figure("spark", case, _UNITS[case.split(" ")[0].rstrip(",")], seen[case]) for case in plain}
    for master in MASTERS:
        for case in CASES:
            beside = {}
            if case in _BESIDE:
                beside["worker" if case == "drain" else "plain loop"] = made[_BESIDE[case]]
            elif case != "write Parquet":
                beside["Parquet"] = made[f"write Parquet, {master}"]
            if master != MASTERS[0]:
                beside[MASTERS[0]] = made[f"{case}, {MASTERS[0]}"]
            name = f"{case}, {master}"
            note = f"{rows:,} rows" if case.startswith("write") else ""
            made[name] = figure("spark", name, _UNITS[case.split(" ")[0]], seen[name], against=beside, note=note)
    return list(made.values())


def _asked(options: Options, spark: Child, case: str, count: int, filled: Path) -> float:
    with fresh_directory(options) as directory:
        spark.send((case, count, str(directory), str(filled)))
        answer = spark.receive()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return float(answer[0])


def _memory(options: Options, spark: Child, filled: Path, count: int) -> Figure:
    with fresh_directory(options) as directory:
        spark.send(("write tasks, payload as text", count, str(directory), str(filled)))
        _, most_bytes = spark.receive()
    return figure(
        "spark",
        f"memory of a Python worker while {count:,} rows are written",
        "MiB",
        [most_bytes / MIB],
        better="lower",
        note="its own, without the pages of the map that it shares with the system's cache",
    )


# ------------------------------------------------------------------------------------------------------ plain loops


@contextmanager
def _filled(options: Options, count: int) -> Iterator[Path]:
    """A store with a load of so many tasks, half of them done: twice as many events as tasks."""
    with fresh_directory(options) as directory:
        steps.run(options, _fill(directory, count, done=count // 2))
        yield directory


async def _fill(directory: Path, count: int, done: int = 0) -> None:
    async with await open_store(f"lmdb:{directory}") as store:

        async def ask(question: Callable[[Store], Any]) -> Any:
            return await question(store)

        load = Load(ask, TENANT)
        for start in range(0, count, BATCH_MAX):
            await load.stage(Rows([PAYLOAD] * min(BATCH_MAX, count - start), [NewTask(command=COMMAND)]))
        await load.commit()
        for _ in range(done // 500):
            await steps.complete(store, await steps.claim(store, 500))


async def _runs(directory: Path) -> float:
    async with await open_store(f"lmdb:{directory}") as store:
        start_s, count, after, more = time.perf_counter(), 0, None, True
        while more:
            page = await store.runs(TENANT, after=after, limit=RUNS_MAX)
            count, after, more = count + sum(run.count() for run in page.runs), page.cursor, page.more
        return count / (time.perf_counter() - start_s)


async def _lists(directory: Path) -> float:
    async with await open_store(f"lmdb:{directory}") as store:
        start_s, count, cursor = time.perf_counter(), 0, None
        while True:
            page = await store.list(TENANT, cursor=cursor, limit=BATCH_MAX)
            count, cursor = count + len(page.tasks), page.cursor
            if cursor is None:
                return count / (time.perf_counter() - start_s)


# ------------------------------------------------------------------------------------------------- in a child process


def serve(pipe: Connection, master: str) -> None:
    """Measures what it is asked for, in a Spark session of its own, until nobody asks any more."""
    from dibs.spark import session

    spark = session("bench", master=master, config={"spark.driver.memory": "2g"})
    warm: set[str] = set()
    try:
        while True:
            case, count, directory, filled = pipe.recv()
            if case not in warm:
                _measured(spark, case, WARM_UP, Path(directory, "warm"), Path(filled))
                warm.add(case)
            pipe.send(_measured(spark, case, count, Path(directory, "measured"), Path(filled)))
    except (EOFError, OSError):
        pass
    except Exception as error:  # noqa: BLE001 the parent tells it
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        spark.stop()


def _measured(spark: SparkSession, case: str, count: int, directory: Path, filled: Path) -> tuple[float, int]:
    """Returns the rate, and how many bytes the largest Python worker had."""
    if case == "drain":
        asyncio.run(_fill(directory, count))
    with _watched() as most:
        start_s = time.perf_counter()
        done = _do(spark, case, count, directory, filled)
        rate = done / (time.perf_counter() - start_s)
    shutil.rmtree(directory, ignore_errors=True)
    return rate, most[0]


def _do(spark: SparkSession, case: str, count: int, directory: Path, filled: Path) -> int:
    from dibs.spark import drain

    if case == "drain":
        done = drain(spark, f"lmdb:{directory}", COMMAND, _trivial, form="arrow")
        return int(done.agg({"completed": "sum"}).collect()[0][0])
    if case == "write Parquet":
        _table(spark, count).write.parquet(str(directory))
        return count
    if case.startswith("write"):
        table = _table(spark, count) if case.endswith("text") else _columns(spark, count)
        table.write.format("dibs").options(url=f"lmdb:{directory}", command=COMMAND).mode("append").save()
        return count
    view = case.removeprefix("read ")
    table = spark.read.format("dibs").options(url=f"lmdb:{filled}", view=view).load()
    # Every column is asked for, and nothing is made of it.
    table.write.format("noop").mode("overwrite").save()
    return {"events": 2 * count, "tasks": count, "results": count // 2}[view]


def _table(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count).selectExpr(f"concat('{PAYLOAD.decode()[:-2]}', id % 10, '\"}}') AS payload")


def _columns(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count).selectExpr(
        "concat('https://example.org/images/', id) AS url", "320 AS width", "200 AS height", "repeat('x', 68) AS note"
    )


def _trivial(batch: Any) -> list[int]:
    return [len(RESULT)] * len(batch)


@contextmanager
def _watched() -> Iterator[list[int]]:
    """The most memory that a Python process below this one had, looked at ten times a second."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                try:
                    if "python" in process.name():
                        most[0] = max(most[0], process.memory_full_info().uss)
                except psutil.Error:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()
