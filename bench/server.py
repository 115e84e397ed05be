"""Through a server: full cycles by the remote store and by HTTP, creates, calls, and what waiting clients cost.

Clients and server share the machine, as everything here does; the server is ``dibs serve`` over LMDB with fsync. What
the remote store does is held against the embedded store doing the same in the same round, creates by HTTP against
answers of the same server that ask the store for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection

import aiohttp

from bench import steps
from bench.children import child
from bench.cycle import saturate
from bench.figures import Figure, by_percentile, figure
from bench.served import CONNECTIONS, WITHOUT_WRK, create_body, has_wrk, http_cycle, post, served, wrk
from bench.steps import COMMAND, TENANT, Options, fresh_directory, fresh_store
from bench.tasks import PERCENTILES, app_on, calls, workers_on
from dibs.stores import open_store
from dibs.task import BATCH_MAX

CYCLES = "cycles/s"
#: Tasks per call and callers, of the remote store.
CASES = [(500, 1), (500, 4), (1, CONNECTIONS)]
HTTP_CASES = [(100, 4), (1, CONNECTIONS)]
CREATES = [1, 100, 1_000]
WAITING = 1_000
KEPT = 100_000
MIB = 1 << 20


def measure(options: Options) -> list[Figure]:
    """Returns cycles, creates, latencies of calls, and what a server costs."""
    return [*_cycles(options), *_creates(options), *_latencies(options), *_costs(options)]


# -------------------------------------------------------------------------------------------------------------- cycles


def _cycles(options: Options) -> list[Figure]:
    seconds = options.pick(2.0, 0.5)
    embedded = {_name("embedded store", *case): partial(_embedded, options, *case, seconds) for case in CASES}
    remote = {_name("remote store", *case): partial(_remote, options, *case, seconds) for case in CASES}
    http = {_name("HTTP", *case): partial(_http, options, *case, seconds) for case in HTTP_CASES}
    seen = steps.rounds(options, "server", embedded | remote | http)
    base = {name: figure("server", name, CYCLES, seen[name]) for name in embedded}
    figures = [*base.values()]
    for name, (batch, callers) in zip([*remote, *http], [*CASES, *HTTP_CASES], strict=True):
        beside = base.get(_name("embedded store", batch, callers))
        against = {} if beside is None else {"embedded": beside}
        figures.append(figure("server", name, CYCLES, seen[name], against=against))
    return figures


def _name(kind: str, batch: int, callers: int) -> str:
    return f"{kind}, {batch} per call, {callers} caller{'s' if callers > 1 else ''}"


def _embedded(options: Options, batch: int, callers: int, seconds: float) -> float:
    async def main() -> float:
        async with fresh_store(options) as store:
            await steps.cycle(store, batch)
            return await saturate(store, batch, callers, seconds)

    return steps.run(options, main())


def _remote(options: Options, batch: int, callers: int, seconds: float) -> float:
    async def main(url: str) -> float:
        async with await open_store(url) as store:
            await steps.cycle(store, batch)
            return await saturate(store, batch, callers, seconds)

    with served(options) as server:
        return steps.run(options, main(server.url))


def _http(options: Options, batch: int, callers: int, seconds: float) -> float:
    with served(options) as server:
        return batch * _rate(options, callers, seconds, lambda session: http_cycle(session, server.url, batch))


def _rate(
    options: Options, callers: int, seconds: float, call: Callable[[aiohttp.ClientSession], Awaitable[object]]
) -> float:
    """Returns calls per second with so many callers, from the first call to the last answer."""

    async def main() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await call(session)
            start_s = time.perf_counter()

            async def caller() -> int:
                done = 0
                while time.perf_counter() < start_s + seconds:
                    await call(session)
                    done += 1
                return done

            done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
            return done / (time.perf_counter() - start_s)

    return steps.run(options, main())


# ------------------------------------------------------------------------------------------------------------- creates


def _creates(options: Options) -> list[Figure]:
    seconds = options.pick(3.0, 1.0)
    cases: dict[str, Callable[[], float]] = {
        f"HTTP creates, {batch} per call, {CONNECTIONS if batch == 1 else 4} connections": partial(
            _create, options, batch, CONNECTIONS if batch == 1 else 4, seconds
        )
        for batch in CREATES
    }
    nothing = f"GET /healthz, {CONNECTIONS} connections"
    seen = steps.rounds(options, "server", {nothing: partial(_nothing, options, seconds)} | cases)
    note = "" if has_wrk() else WITHOUT_WRK
    base = figure("server", nothing, "requests/s", seen[nothing], note=note)
    figures = [base]
    for batch, name in zip(CREATES, cases, strict=True):
        against = {"healthz": base} if batch == 1 else {}
        figures.append(figure("server", name, "creates/s", seen[name], against=against, note=note))
    return figures


def _nothing(options: Options, seconds: float) -> float:
    with served(options) as server:
        url = server.url + "/healthz"
        if has_wrk():
            return wrk(url, seconds)

        async def get(session: aiohttp.ClientSession) -> bytes:
            async with session.get(url) as answer:
                return await answer.read()

        return _rate(options, CONNECTIONS, seconds, get)


def _create(options: Options, batch: int, connections: int, seconds: float) -> float:
    path, body = create_body(batch)
    with served(options) as server:
        url = server.url + path
        if has_wrk():
            return batch * wrk(url, seconds, body, connections)
        return batch * _rate(options, connections, seconds, lambda session: post(session, url, body))


# ----------------------------------------------------------------------------------------------------------- latencies


def _latencies(options: Options) -> list[Figure]:
    """A call and its answer, with a worker in another process: by the embedded store, and through a server."""
    count = options.pick(600, 150) // options.repeat
    seen = steps.rounds(
        options,
        "server",
        {"embedded": partial(_calls_embedded, options, count), "served": partial(_calls_served, options, count)},
    )
    base = by_percentile("server", "call, embedded store", "ms", seen["embedded"], of=PERCENTILES)
    against = {"embedded": base}
    through = by_percentile("server", "call, through a server", "ms", seen["served"], of=PERCENTILES, against=against)
    return [*base.values(), *through.values()]


def _calls_embedded(options: Options, count: int) -> list[float]:
    with fresh_directory(options) as directory, app_on(directory) as function, workers_on(directory, 1):
        return calls(function("in_loop"), count)


def _calls_served(options: Options, count: int) -> list[float]:
    with served(options) as server, app_on(server.url) as function, workers_on(server.url, 1):
        return calls(function("in_loop"), count)


# --------------------------------------------------------------------------------------------------------------- costs


def _costs(options: Options) -> list[Figure]:
    """What a server uses while a thousand claims wait, and what it keeps of tasks that wait."""
    idle_s = options.pick(10.0, 4.0)
    options.say(f"server, {WAITING:,} waiting claims")
    with served(options) as server, child(_wait_in_child, server.url, options.uvloop) as waiting:
        waiting.receive()
        spent_s, start_s = server.cpu_s(), time.perf_counter()
        time.sleep(idle_s)
        idle = 100 * (server.cpu_s() - spent_s) / (time.perf_counter() - start_s)
        waiting.send("enough")
        waiting.receive()
    options.say(f"server, {KEPT:,} waiting tasks")
    with served(options) as server:
        empty = server.anonymous_bytes() / MIB
        steps.run(options, _fill(server.url, KEPT))
        full = server.anonymous_bytes() / MIB
    return [
        figure("server", f"CPU of a server, {WAITING:,} waiting claims", "% of a core", [idle], better="lower"),
        figure("server", "anonymous memory of a server, no tasks", "MiB", [empty], better="lower"),
        figure("server", f"anonymous memory of a server, {KEPT:,} waiting tasks", "MiB", [full], better="lower"),
    ]


def _wait_in_child(pipe: Connection, url: str, uvloop: bool) -> None:
    async def main() -> None:
        async with await open_store(url) as store:
            claims = [
                asyncio.ensure_future(store.claim(TENANT, [f"{COMMAND}.{number % 10}"], wait_s=300.0))
                for number in range(WAITING)
            ]
            await asyncio.sleep(2.0)  # all are there, and have looked
            assert not any(claim.done() for claim in claims)
            pipe.send("waiting")
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            assert not any(claim.done() for claim in claims)
            for claim in claims:
                claim.cancel()
            await asyncio.gather(*claims, return_exceptions=True)
        pipe.send("done")

    steps.run(Options(uvloop=uvloop), main())


async def _fill(url: str, count: int) -> None:
    async with await open_store(url) as store:
        for _ in range(0, count, BATCH_MAX):
            await steps.enqueue(store, BATCH_MAX)
