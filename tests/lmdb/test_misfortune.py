"""What goes wrong around the store must not stop it, nor leave anybody waiting for ever."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dibs.clock import ManualClock
from dibs.errors import DibsError, StoreCorrupt, StoreRefused, StoreUnavailable, UnknownScheme
from dibs.stores import open_local
from dibs.task import Kind, NewTask, Settlement

SOON_S = 20.0


def _start(script: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE, text=True)


async def test_a_clock_that_raises_is_told(directory: Path) -> None:
    """An error in the writer's own code reaches the caller; nobody waits for ever, and close returns."""

    class Breaking(ManualClock):
        broken = False

        def now_ms(self) -> int:
            if self.broken:
                raise ZeroDivisionError("no time")
            return super().now_ms()

    clock = Breaking()
    store = await open_local(directory, clock=clock)
    clock.broken = True
    for _ in range(2):
        with pytest.raises(DibsError):
            await asyncio.wait_for(store.enqueue("t", [NewTask(command="c")]), SOON_S)
    await asyncio.wait_for(store.close(), SOON_S)


async def test_out_of_descriptors_the_commit_stands(directory: Path) -> None:
    """Wake-ups that cannot be sent cost a fallback look, not the answer."""
    async with await open_local(directory) as store:
        await store.enqueue("t", [NewTask(command="c")])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            [outcome] = await asyncio.wait_for(store.enqueue("t", [NewTask(command="c")]), SOON_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert outcome is not None
        assert (await store.stats("t")).total.ready == 2


async def test_a_refused_opening_leaves_nothing_open(directory: Path) -> None:
    """After what is in the way was removed, the same process can open the directory."""
    await (await open_local(directory)).close()
    in_the_way = directory / "turnstile"
    in_the_way.unlink()
    in_the_way.mkdir()
    with pytest.raises(StoreRefused):
        await open_local(directory)
    in_the_way.rmdir()
    async with await open_local(directory) as store:
        assert (await store.doctor()).clean


async def test_a_file_that_was_cut_off_is_refused(directory: Path) -> None:
    """Touching what is missing would end the process: it is noticed before."""
    async with await open_local(directory) as store:
        await store.enqueue("t", [NewTask(command="c", payload=b"x" * 1000) for _ in range(500)])
    os.truncate(directory / "data.mdb", 64 * 1024)
    with pytest.raises(StoreCorrupt):
        await open_local(directory)


async def test_opening_does_not_wait_for_a_writer(directory: Path) -> None:
    """A store can be opened, read and closed while another process holds the write lock."""
    await (await open_local(directory)).close()
    holder = _start(HOLD, directory)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        store = await open_local(directory)
        assert (await store.stats("t")).total.ready == 0
        await asyncio.wait_for(store.close(), SOON_S)
    finally:
        holder.kill()
        holder.communicate()


HOLD = """
import sys, time, lmdb
environment = lmdb.open(sys.argv[1], map_size=1 << 36)
with environment.begin(write=True):
    print("held", flush=True)
    time.sleep(60)
"""


async def test_an_idle_child_of_a_killed_process_stops_nobody(directory: Path) -> None:
    """A lock that a process holds when it is killed does not live on in a child that it had forked."""
    store = await open_local(directory)
    told = _start(FORK_AND_HOLD, directory)
    assert told.stdout is not None
    child = int(told.stdout.readline())
    try:
        told.kill()
        told.wait()
        [outcome] = await asyncio.wait_for(store.enqueue("t", [NewTask(command="c")]), SOON_S)
        assert outcome is not None
    finally:
        os.kill(child, signal.SIGKILL)
        told.communicate()
        await store.close()


FORK_AND_HOLD = """
import asyncio, fcntl, os, sys, time
from dibs.stores import open_local

async def main():
    store = await open_local(sys.argv[1])
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    # As if killed in the moment between the turnstile and the write lock.
    fcntl.flock(store._engine._turnstile, fcntl.LOCK_EX)
    print(child, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


async def test_a_claim_cancelled_before_close_leaves_no_lease(directory: Path) -> None:
    """The normal end of a worker, cancel and close, gives back what a claim on its way took."""
    async with await open_local(directory) as store:
        await store.enqueue("t", [NewTask(command="c") for _ in range(50)])
    for _ in range(20):
        store = await open_local(directory)
        claim = asyncio.ensure_future(store.claim("t", ["c"], limit=2, lease_s=3600))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        claim.cancel()
        await store.close()
        if not claim.cancelled():
            await asyncio.gather(claim, return_exceptions=True)
    async with await open_local(directory) as store:
        total = (await store.stats("t")).total
        assert (total.ready, total.leased) == (50, 0)
        [first] = await store.claim("t", ["c"])
        assert first.attempt == 1
        assert (await store.doctor()).clean


@pytest.mark.parametrize("url", [None, 5, b"bytes", "nul\0byte", "", "fdb:cluster", "redis://host"])
async def test_what_is_no_url_is_refused(url: object) -> None:
    """Whatever cannot name a store is refused with what to do."""
    with pytest.raises(UnknownScheme, match="use"):
        await open_local(url)  # type: ignore[arg-type]


async def test_a_broken_engine_says_how_to_go_on(directory: Path) -> None:
    """After a failed write every later one is refused, until all stores of the process on it were closed."""
    first, second = await open_local(directory), await open_local(directory)
    first._engine._broken = OSError("disk on fire")  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match="close every store"):
        await first.enqueue("t", [NewTask(command="c")])
    await first.close()
    await second.close()
    async with await open_local(directory) as store:
        await store.enqueue("t", [NewTask(command="c")])
        [lease] = await store.claim("t", ["c"])
        await store.settle([Settlement(tenant="t", id=lease.id, token=lease.token, kind=Kind.COMPLETE)])
