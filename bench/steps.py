"""What the scenarios share: the options of a run, fresh stores, and the verbs with the benchmark's task."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from dibs.clock import Clock
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import Enqueued, Kind, Lease, NewTask, Settled, Settlement

TENANT = "default"
COMMAND = "bench"
PAYLOAD = b'{"url":"https://example.org/images/0123456789","width":320,"height":200,"note":"' + b"x" * 68 + b'"}'
RESULT = b'{"bytes":1234567890}'
assert (len(PAYLOAD), len(RESULT)) == (150, 20)

T = TypeVar("T")


class Options(Struct, frozen=True, kw_only=True):
    """What the command line says."""

    quick: bool = False
    repeat: int = 3
    directory: Path = Path("/var/tmp")
    uvloop: bool = True
    say: Callable[[str], None] = print
    """Tells what is being done."""

    def pick(self, full: T, quick: T) -> T:
        """Returns one of two sizes of the same thing."""
        return quick if self.quick else full


# ------------------------------------------------------------------------------------------------------------- running


def run(options: Options, main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a new loop, uvloop's where there is one."""
    with asyncio.Runner(loop_factory=_loop_factory(options.uvloop)) as runner:
        return runner.run(main)


def _loop_factory(wanted: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop if wanted else None


def rounds(options: Options, scenario: str, cases: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Runs every case once per round, so that a noisy minute of the machine hits all of them, baselines included."""
    seen: dict[str, list[T]] = {case: [] for case in cases}
    for number in range(options.repeat):
        for case, measure in cases.items():
            options.say(f"{scenario}, round {number + 1} of {options.repeat}: {case}")
            seen[case].append(measure())
    return seen


@contextlib.contextmanager
def fresh_directory(options: Options) -> Iterator[Path]:
    """A new directory on the file system under test, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="dibs-bench-", dir=options.directory))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.asynccontextmanager
async def fresh_store(options: Options, kind: str = "lmdb", clock: Clock | None = None) -> AsyncIterator[Store]:
    """A new, empty store: `lmdb` or `memory`."""
    with fresh_directory(options) as directory:
        async with await open_store("memory:" if kind == "memory" else f"lmdb:{directory}", clock=clock) as store:
            yield store


# --------------------------------------------------------------------------------------------------- a task's life


async def enqueue(store: Store, count: int, **fields: Any) -> None:
    """Enqueues `count` of the benchmark's task."""
    tasks = [NewTask(command=COMMAND, payload=PAYLOAD, **fields) for _ in range(count)]
    outcomes = await store.enqueue(TENANT, tasks)
    assert [type(outcome) for outcome in outcomes[-1:]] == [Enqueued], outcomes[-1:]


async def claim(store: Store, count: int) -> list[Lease]:
    """Claims exactly `count`: there must be as many."""
    leases = await store.claim(TENANT, [COMMAND], limit=count, worker="bench")
    assert len(leases) == count, f"{len(leases)} of {count} tasks were there"
    return leases


async def complete(store: Store, leases: Sequence[Lease]) -> None:
    """Completes tasks with the benchmark's result."""
    outcomes = await store.settle(
        [
            Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=Kind.COMPLETE, result=RESULT)
            for lease in leases
        ]
    )
    assert [type(outcome) for outcome in outcomes[-1:]] == [Settled], outcomes[-1:]


async def cycle(store: Store, batch: int, **fields: Any) -> None:
    """The whole life of a batch of tasks."""
    await enqueue(store, batch, **fields)
    await complete(store, await claim(store, batch))
