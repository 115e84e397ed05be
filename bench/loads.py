"""Loads: how fast rows are staged and committed, how fast they are claimed, and how long others wait meanwhile.

Rates are of one caller with a few chunks in flight, as `map` and `dibs enqueue --from` do it; beside them stand plain
enqueues of a thousand in the same way. For the pauses a million rows are loaded and then claimed, while a loop of
enqueue, claim, heartbeat and complete goes on with tasks of its own, in the same event loop or in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from bench import steps
from bench.children import Child, child
from bench.figures import Figure, figure, percentiles
from bench.steps import COMMAND, PAYLOAD, TENANT, Options, fresh_directory, fresh_store
from dibs import Dibs, codec
from dibs.ids import new_id
from dibs.stores import open_store
from dibs.stores.loading import CHUNKS_IN_FLIGHT
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Heartbeat, NewTask, Rows

ARGUMENTS = codec.decode(PAYLOAD, "json")
OTHER = "other"
BATCH = 100
CLAIM = 500
ALONE_S = 2.0
GAP_S = (0.0, 0.004)
ROOT = Path(__file__).parent.parent

Chunk = Rows | list[NewTask]
Times = list[tuple[str, float]]
"""What was called, and how many milliseconds that took."""


def measure(options: Options) -> list[Figure]:
    """Returns the rates of loads and of claims from them, and the pauses of others."""
    count = options.pick(1_000_000, 50_000)
    return [*_rates(options, count), *_claims(options, count // 5), *_pauses(options, count)]


# --------------------------------------------------------------------------------------------------------- rates


def _rates(options: Options, count: int) -> list[Figure]:
    cases: dict[str, Callable[[], float]] = {
        "plain enqueues, tasks made before": lambda: _rate(options, count // 5, _enqueued, _same_tasks),
        "load, tasks made before": lambda: _rate(options, count, _loaded, _same_tasks),
        "load, tasks made meanwhile": lambda: _rate(options, count, _loaded, _new_tasks),
        "load, rows by column made before": lambda: _rate(options, count, _loaded, _same_rows),
        "load, rows by column made meanwhile": lambda: _rate(options, count, _loaded, _new_rows),
        f"map of {count:,}": lambda: _map(options, count),
        "dibs enqueue --from, JSON lines": lambda: _from_file(options, count),
    }
    seen = steps.rounds(options, "loads", cases)
    [base, *_] = cases
    plain = figure("loads", base, "rows/s", seen[base], note=f"{BATCH_MAX:,} per call, {CHUNKS_IN_FLIGHT} in flight")
    against = {"plain": plain}
    return [plain, *(figure("loads", case, "rows/s", seen[case], against=against) for case in list(cases)[1:])]


Put = Callable[[Store, Iterator[Chunk]], Awaitable[None]]


def _rate(options: Options, count: int, put: Put, make: Callable[[int], Iterator[Chunk]]) -> float:
    async def main() -> float:
        async with fresh_store(options) as store:
            await steps.enqueue(store, 1)
            chunks = make(count)
            start_s = time.perf_counter()
            await put(store, chunks)
            rate = count / (time.perf_counter() - start_s)
            assert (await store.stats(TENANT)).total.ready == count + 1
            return rate

    return steps.run(options, main())


async def _loaded(store: Store, chunks: Iterator[Chunk]) -> None:
    """One load of all chunks."""
    chunk_ids: list[bytes] = []

    def stage(chunk: Chunk) -> Awaitable[object]:
        chunk_ids.append(new_id())
        return store.stage(TENANT, chunk_ids[-1], chunk)

    await _several(stage, chunks)
    await store.commit_load(TENANT, "bench", 0, chunk_ids)


async def _enqueued(store: Store, chunks: Iterator[Chunk]) -> None:
    """The same as plain enqueues."""

    def enqueue(chunk: Chunk) -> Awaitable[object]:
        assert isinstance(chunk, list)
        return store.enqueue(TENANT, chunk)

    await _several(enqueue, chunks)


async def _several(call: Callable[[Chunk], Awaitable[object]], chunks: Iterator[Chunk]) -> None:
    """Calls with each chunk, a few at a time."""
    in_flight: deque[asyncio.Future[object]] = deque()
    for chunk in chunks:
        in_flight.append(asyncio.ensure_future(call(chunk)))
        await asyncio.sleep(0)
        if len(in_flight) == CHUNKS_IN_FLIGHT:
            await in_flight.popleft()
    await asyncio.gather(*in_flight)


def _same_tasks(count: int) -> Iterator[Chunk]:
    tasks = [NewTask(command=COMMAND, payload=PAYLOAD) for _ in range(BATCH_MAX)]
    return iter([tasks] * (count // BATCH_MAX))


def _same_rows(count: int) -> Iterator[Chunk]:
    return iter([Rows([PAYLOAD] * BATCH_MAX, [NewTask(command=COMMAND)])] * (count // BATCH_MAX))


def _new_tasks(count: int) -> Iterator[Chunk]:
    for number in range(count // BATCH_MAX):
        yield [NewTask(command=COMMAND, payload=payload) for payload in _payloads(number)]


def _new_rows(count: int) -> Iterator[Chunk]:
    options = [NewTask(command=COMMAND)]
    for number in range(count // BATCH_MAX):
        yield Rows(_payloads(number), options)


def _payloads(chunk: int) -> list[bytes]:
    encode = msgspec.json.Encoder().encode
    return [encode({**ARGUMENTS, "width": chunk * BATCH_MAX + row}) for row in range(BATCH_MAX)]


def _map(options: Options, count: int) -> float:
    from bench import handlers

    url, fixed = ARGUMENTS["url"], {name: value for name, value in ARGUMENTS.items() if name != "url"}
    with fresh_directory(options) as directory, Dibs(directory) as app:
        function = app.task(name="bench.handlers.in_loop")(handlers.in_loop.handler)
        start_s = time.perf_counter()
        batch = function.map((url for _ in range(count)), **fixed)
        rate = count / (time.perf_counter() - start_s)
        assert len(batch) == count
        return rate


def _from_file(options: Options, count: int) -> float:
    """As the command tells it: without the start of the interpreter."""
    with fresh_directory(options) as directory:
        rows = directory / "rows.jsonl"
        with rows.open("wb") as file:
            for number in range(count // BATCH_MAX):
                file.write(b"\n".join(_payloads(number)) + b"\n")
        command = [sys.executable, "-m", "dibs", "enqueue", COMMAND, "--from", str(rows), "--json"]
        environment = {**os.environ, "DIBS_URL": str(directory / "store")}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
        told = msgspec.json.decode(done.stdout)
        assert told["enqueued"] == count
        return float(told["rows_per_s"])


# -------------------------------------------------------------------------------------------------------- claims


def _claims(options: Options, count: int) -> list[Figure]:
    """Claiming and completing what was loaded, against what was enqueued."""
    cases: dict[str, Callable[[], float]] = {
        "plain tasks": lambda: _drain(options, count, _enqueued),
        "rows of a load": lambda: _drain(options, count, _loaded),
    }
    seen = steps.rounds(options, "loads, claims", cases)
    plain = figure("loads", f"claim and complete plain tasks, {BATCH} per call", "tasks/s", seen["plain tasks"])
    name = f"claim and complete rows of a load, {BATCH} per call"
    return [plain, figure("loads", name, "tasks/s", seen["rows of a load"], against={"plain": plain})]


def _drain(options: Options, count: int, put: Put) -> float:
    async def main() -> float:
        async with fresh_store(options) as store:
            await put(store, _same_tasks(count))
            start_s = time.perf_counter()
            for _ in range(count // BATCH):
                await steps.complete(store, await steps.claim(store, BATCH))
            return count / (time.perf_counter() - start_s)

    return steps.run(options, main())


# -------------------------------------------------------------------------------------------------------- pauses


def _pauses(options: Options, count: int) -> list[Figure]:
    """What others wait, at worst, while rows are loaded and claimed: alone first, in the same store."""
    figures: list[Figure] = []
    for where, beside in (("in the same loop", _beside_in_loop), ("in another process", _beside_in_child)):
        options.say(f"loads, pauses {where}")
        with fresh_directory(options) as directory:
            seen = steps.run(options, _load_beside(options, directory, count, beside))
        base = _worst(f"others {where}, alone", seen.pop("alone"))
        figures += base.values()
        for phase, times in seen.items():
            figures += _worst(f"others {where}, while {count:,} rows are {phase}", times, base).values()
    return figures


def _worst(case: str, times: Times, base: dict[str, Figure] | None = None) -> dict[str, Figure]:
    found = [ms for _, ms in times]
    slowest, _ = max(times, key=lambda one: one[1])
    samples = {"p99": percentiles(found, (99,))[99], "max": max(found)}
    notes = {"p99": f"of {len(found):,} calls", "max": slowest}
    return {
        name: figure(
            "loads", f"{case}, {name}", "ms", [sample], better="lower", note=notes[name],
            against={"alone": base[name]} if base else None,
        )
        for name, sample in samples.items()
    }  # fmt: skip


Take = Callable[[], Awaitable[Times]]
"""Returns the times since it was last asked."""
Beside = Callable[[Options, Path, Store], contextlib.AbstractAsyncContextManager[Take]]


async def _load_beside(options: Options, directory: Path, count: int, beside: Beside) -> dict[str, Times]:
    async with await open_store(str(directory)) as store, beside(options, directory, store) as take:
        await asyncio.sleep(ALONE_S)
        seen = {"alone": await take()}
        await _loaded(store, _same_rows(count))
        seen["loaded"] = await take()
        for _ in range(count // CLAIM):
            await steps.complete(store, await steps.claim(store, CLAIM))
        seen["claimed"] = await take()
        return seen


@contextlib.asynccontextmanager
async def _beside_in_loop(_options: Options, _directory: Path, store: Store) -> AsyncIterator[Take]:
    times: Times = []

    async def take() -> Times:
        taken, times[:] = [*times], []
        return taken

    async def go_on() -> None:
        while True:
            await _live(store, times)

    going = asyncio.ensure_future(go_on())
    yield take
    going.cancel()


@contextlib.asynccontextmanager
async def _beside_in_child(options: Options, directory: Path, _store: Store) -> AsyncIterator[Take]:
    with child(_live_in_child, directory, options.uvloop) as other:
        other.receive()
        yield lambda: _taken(other)
        other.send("enough")


async def _taken(other: Child) -> Times:
    other.send("so far")
    times: Times = await asyncio.to_thread(other.receive)
    return times


def _live_in_child(pipe: Connection, directory: Path, uvloop: bool) -> None:
    """Goes on until it is told "enough"; at any other message it sends the times since the last."""

    async def main() -> None:
        times: Times = []
        async with await open_store(str(directory)) as store:
            pipe.send("at it")
            while True:
                await _live(store, times)
                if pipe.poll():
                    if pipe.recv() == "enough":
                        return
                    pipe.send(times)
                    times = []

    steps.run(Options(uvloop=uvloop), main())


async def _live(store: Store, times: Times) -> None:
    """The life of one task, call by call, with a pause at random before each: back to back, most calls would fit into
    the gaps of what goes on beside."""
    await _timed(times, "enqueue", store.enqueue(TENANT, [NewTask(command=OTHER, payload=PAYLOAD)]))
    leases = await _timed(times, "claim", store.claim(TENANT, [OTHER], worker="other"))
    for lease in leases:
        beat = Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token)
        await _timed(times, "heartbeat", store.heartbeat([beat]))
    await _timed(times, "complete", steps.complete(store, leases))


async def _timed(times: Times, what: str, call: Awaitable[steps.T]) -> steps.T:
    await asyncio.sleep(random.uniform(*GAP_S))
    start_s = time.perf_counter()
    answer = await call
    times.append((what, 1000 * (time.perf_counter() - start_s)))
    return answer
