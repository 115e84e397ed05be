"""``dibs bench``: how many cycles a second this machine does, in a few seconds, on a store of its own."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from dibs import codec
from dibs.cli.context import DURATION, Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import Column, count_text, echo_json, echo_table, note, progress
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Kind, NewTask, Settlement

TENANT, COMMAND = "bench", "cycle"
PAYLOAD = codec.encode({"url": "https://example.org/a.png", "width": 320, "height": 240})
RESULT = codec.encode({"ok": True})


class Measured(Struct, frozen=True):
    """What one way of calling gave: so many callers at once, each with batches of one size."""

    batch: int
    callers: int
    cycles: int
    seconds: float
    cycles_per_s: float


@click.command(
    cls=Command,
    examples="""
    dibs bench
    dibs bench --dir /var/lib --seconds 3s
    dibs bench --durability relaxed --batch 1 --batch 1000 --json
    """,
)
@click.option("--dir", "parent", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="On this disk: a directory is made in there, and removed.  [default: $TMPDIR]")  # fmt: skip
@click.option("--seconds", "each_s", type=DURATION, default=1.0, help="How long to measure each.  [default: 1s]")
@click.option("--batch", "batches", type=click.IntRange(1, BATCH_MAX), multiple=True, default=[1, 10, 100, 1000],
              help="Tasks per call; may be repeated.  [default: 1, 10, 100, 1000]")  # fmt: skip
@click.option("--callers", type=click.IntRange(1, 1000), default=1, help="Concurrent callers, in one process.")
@pass_session
def bench(session: Session, /, parent: Path | None, each_s: float, batches: tuple[int, ...], callers: int) -> int:
    """Measure this machine's cycles per second.

    A cycle is one task enqueued, claimed and completed, each step durable as --durability says. One process, on a
    store of its own that is removed afterwards; --url is not used.
    """
    with _directory(parent) as directory, progress("measure", len(batches)) as advance:
        rows = []
        for number, batch in enumerate(batches):
            rows.append(asyncio.run(_measured(session, directory / str(number), batch, callers, each_s)))
            advance(1)
        if session.json:
            echo_json(
                {"directory": str(directory), "durability": session.settings.durability, "rows": to_builtins(rows)}
            )
            return Exit.OK
    titles = ("BATCH", "CALLERS", "CYCLES", "CYCLES/S", "MS/CALL")
    echo_table([Column(title, right=True) for title in titles], [_row(row) for row in rows])
    note(f"Durability {session.settings.durability}, in {directory.parent}; another disk: --dir.")
    return Exit.OK


def _row(row: Measured) -> list[str]:
    call_ms = 1000 * row.seconds * row.callers * row.batch / (3 * row.cycles) if row.cycles else 0.0
    return [str(row.batch), str(row.callers), count_text(row.cycles), count_text(row.cycles_per_s), f"{call_ms:.2f}"]


@contextlib.contextmanager
def _directory(parent: Path | None) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="dibs-bench-", dir=parent) as name:
            yield Path(name)
    except OSError as error:
        raise click.UsageError(f"There is no room to measure in {parent}: {error.strerror}.") from error


async def _measured(session: Session, directory: Path, batch: int, callers: int, each_s: float) -> Measured:
    settings = replace(session.settings, url=str(directory))
    async with await open_store(settings.url, settings=settings) as store:
        await _cycle(store, batch)  # warms up: the first call starts threads and makes the files
        began_s = time.perf_counter()
        cycles = sum(await asyncio.gather(*(_keep_on(store, batch, began_s + each_s) for _ in range(callers))))
        seconds = time.perf_counter() - began_s
    return Measured(batch, callers, cycles, round(seconds, 3), round(cycles / seconds, 1))


async def _keep_on(store: Store, batch: int, until_s: float) -> int:
    cycles = await _cycle(store, batch)
    while time.perf_counter() < until_s:
        cycles += await _cycle(store, batch)
    return cycles


async def _cycle(store: Store, batch: int) -> int:
    await store.enqueue(TENANT, [NewTask(command=COMMAND, payload=PAYLOAD)] * batch)
    leases = await store.claim(TENANT, [COMMAND], limit=batch, worker="bench")
    await store.settle([
        Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=Kind.COMPLETE, result=RESULT) for lease in leases
    ])  # fmt: skip
    return len(leases)
