"""Where the time goes: which thread is busy, and with which functions.

Two looks at the same load. The first disturbs nothing: the CPU time of each thread, by the kernel's count. The second
is cProfile in the event loop's thread and in the writer's. It slows Python several times over and C hardly at all: read
its Python rows for what is called how often, and only those of single long C calls (`commit`, `putmulti`) as times.

There is no sampling of stacks here on purpose. A sampler needs the interpreter's lock, so it looks when somebody lets
go of that lock, which is in LMDB's calls: it finds them everywhere, and Python nowhere.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import threading
import time

from bench import steps
from bench.cycle import saturate
from bench.steps import Options, fresh_store

CASES = [(500, 1), (1, 64)]
TOP = 22


def show(options: Options) -> None:
    """Prints both looks for batches of 500 and for 64 single callers."""
    seconds = options.pick(4.0, 2.0)
    for batch, callers in CASES:
        print(f"\n== {batch} per call, callers: {callers}")
        for _ in range(options.repeat):
            _show_threads(options, batch, callers, seconds)
        _show_calls(options, batch, callers, seconds)


def _show_threads(options: Options, batch: int, callers: int, seconds: float) -> None:
    async def main() -> tuple[float, float, dict[str, float]]:
        async with fresh_store(options) as store:
            await steps.cycle(store, batch)
            before, start_s = _cpu_s(), time.perf_counter()
            rate = await saturate(store, batch, callers, seconds)
            took_s, after = time.perf_counter() - start_s, _cpu_s()
            return rate, took_s, {name: after[name] - before[name] for name in before}

    rate, took_s, spent = steps.run(options, main())
    done = rate * took_s
    print(f"\n{rate:,.0f} cycles/s undisturbed, {1e6 / rate:.1f} µs each; CPU of it, by thread:")
    for name, cpu_s in spent.items():
        print(f"  {1e6 * cpu_s / done:6.1f} µs a cycle, {cpu_s / took_s:4.0%} of a core: {name}")


def _cpu_s() -> dict[str, float]:
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }


def _show_calls(options: Options, batch: int, callers: int, seconds: float) -> None:
    """From Python 3.12 on a profiler sees all threads at once, so there is one for both."""
    loop, writer = cProfile.Profile(), cProfile.Profile()
    apart = sys.version_info < (3, 12)

    async def main() -> tuple[float, float]:
        if apart:
            # The first event in a new thread, the writer, starts that thread's profiler.
            threading.setprofile(lambda *_: writer.enable())
        async with fresh_store(options) as store:
            threading.setprofile(None)
            await steps.cycle(store, batch)
            loop.enable()
            start_s = time.perf_counter()
            rate = await saturate(store, batch, callers, seconds)
            loop.disable()
            return rate, time.perf_counter() - start_s

    rate, took_s = steps.run(options, main())
    print(f"\n{rate:,.0f} cycles/s under cProfile, {rate * took_s:,.0f} cycles")
    for name, profile in {"event loop": loop, "writer": writer}.items():
        if profile is loop or apart:
            print(f"\n{name}: own time")
            pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(TOP)
