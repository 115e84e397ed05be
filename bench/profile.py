"""Where the time goes: which functions, in the event loop's thread and in the writer's.

Two looks at the same load. Samples of both threads' stacks, a thousand a second, cost little and say how each thread's
wall time divides. cProfile counts calls and makes small functions look dearer than they are; read it for what is called
how often.
"""

from __future__ import annotations

import collections
import cProfile
import pstats
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bench import steps
from bench.cycle import saturate
from bench.steps import Options, fresh_store

CASES = [(500, 1), (1, 64)]
EVERY_S = 0.001
TOP = 22


def show(options: Options) -> None:
    """Prints both looks for batches of 500 and for 64 single callers."""
    seconds = options.pick(4.0, 2.0)
    for batch, callers in CASES:
        print(f"\n== {batch} per call, {callers} callers")
        _show_samples(options, batch, callers, seconds)
        _show_calls(options, batch, callers, seconds)


# ------------------------------------------------------------------------------------------------------------- samples


class Sampler:
    """Looks at every thread's stack, over and over, from a thread of its own."""

    def __init__(self) -> None:
        self.own: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        """By thread: the function at the top of the stack."""
        self.under: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        """By thread: every function in the stack."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sampler")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Samples while the block runs."""
        interval_s = sys.getswitchinterval()
        # Otherwise it would mostly see the moments in which somebody gives the interpreter away.
        sys.setswitchinterval(EVERY_S / 5)
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            sys.setswitchinterval(interval_s)

    def _look(self) -> None:
        while not self._stop.wait(EVERY_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if (name := names.get(ident, "")) != "sampler":
                    self._count(name, frame)

    def _count(self, thread: str, frame: FrameType | None) -> None:
        if frame is not None:
            self.own[thread][f"{_name(frame)}, line {frame.f_lineno}"] += 1
        seen: set[str] = set()
        while frame is not None:
            seen.add(_name(frame))
            frame = frame.f_back
        self.under[thread].update(seen)


def _show_samples(options: Options, batch: int, callers: int, seconds: float) -> None:
    sampler = Sampler()

    async def main() -> tuple[float, float]:
        async with fresh_store(options) as store:
            await steps.cycle(store, batch)
            with sampler.at_work():
                cpu_s, start_s = time.process_time(), time.perf_counter()
                rate = await saturate(store, batch, callers, seconds)
                return rate, (time.process_time() - cpu_s) / (time.perf_counter() - start_s)

    rate, cores = steps.run(options, main())
    print(f"sampled at {rate:,.0f} cycles/s, {cores:.2f} cores busy")
    for thread, own in sampler.own.items():
        total = sum(own.values())
        print(f"\n{thread}: {total} samples; with what each function calls")
        _print_shares(sampler.under[thread], total)
        print(f"\n{thread}: in the line itself, or in C code that it calls")
        _print_shares(own, total)


def _print_shares(counts: collections.Counter[str], total: int) -> None:
    for name, count in counts.most_common(TOP):
        print(f"  {count / total:6.1%}  {name}")


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-2:])} {code.co_qualname}"


# --------------------------------------------------------------------------------------------------------------- calls


def _show_calls(options: Options, batch: int, callers: int, seconds: float) -> None:
    """From Python 3.12 on a profiler sees all threads at once, so there is one for both."""
    loop, writer = cProfile.Profile(), cProfile.Profile()
    apart = sys.version_info < (3, 12)

    async def main() -> float:
        if apart:
            # The first event in a new thread, the writer, starts that thread's profiler.
            threading.setprofile(lambda *_: writer.enable())
        async with fresh_store(options) as store:
            threading.setprofile(None)
            await steps.cycle(store, batch)
            loop.enable()
            rate = await saturate(store, batch, callers, seconds)
            loop.disable()
            return rate

    rate = steps.run(options, main())
    print(f"\nprofiled at {rate:,.0f} cycles/s")
    for name, profile in {"event loop": loop, "writer": writer}.items():
        if profile is loop or apart:
            print(f"\n{name}: own time")
            pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(TOP)
