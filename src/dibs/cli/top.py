"""``dibs top``: queues, rates and workers, live.

Counts are the store's own and exact. Rates are counted from the journal, by the time at which things happened: the
reader of a frame may be late, the numbers are right all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import click
from msgspec import Struct
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dibs.cli.context import DURATION, Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import (
    Cell,
    Column,
    age_text,
    clean,
    count_text,
    echo_json,
    echo_rich,
    is_terminal,
    plural,
    screen_width,
    size_text,
    table,
)
from dibs.cli.queues import WORKER_COLUMNS, worker_row
from dibs.cli.shapes import counts_shape, worker_shape
from dibs.settings import mask
from dibs.shapes import time_text
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Event, EventKind, QueueStats, Stats, WorkerInfo

WINDOW_S = 10
#: So much of an interval may go into reading the journal; after that the frame is drawn, and the next one catches up.
READING_SHARE = 0.5
#: Further behind than this, what happened meanwhile is passed over.
LAG_MAX_S = 30

IN, DONE, FAILED = "in", "done", "failed"
RATE_OF = {
    EventKind.ENQUEUED: IN, EventKind.REPLAYED: IN, EventKind.COMPLETED: DONE,
    EventKind.FAILED: FAILED, EventKind.RETRIED: FAILED, EventKind.LEASE_EXPIRED: FAILED,
}  # fmt: skip


@click.command(
    cls=Command,
    examples="""
    dibs top
    dibs top --interval 5s
    dibs top --once --json | jq '.total.ready'
    """,
)
@click.option("--interval", "interval_s", type=DURATION, default=1.0, help="Between two looks.  [default: 1s]")
@click.option("--once", is_flag=True, help="Print one frame, after one interval, and end; in a pipe, always.")
@pass_session
def top(session: Session, /, interval_s: float, once: bool) -> int:
    """Watch queues, rates and workers live.

    IN, DONE and FAIL are tasks per second over the last ten seconds; FAIL counts attempts, retried or not. q or Ctrl-C
    ends it. A frame in JSON: --once --json.
    """
    if session.json and not once:
        raise click.UsageError("--json goes with --once here; for a stream of events there is `dibs export --follow`.")
    if once or not is_terminal():
        frame = session.run(lambda store: _one_frame(store, session, interval_s))
        if session.json:
            echo_json(frame_shape(frame))
        else:
            echo_rich(screen(frame, screen_width(), None))
        return Exit.OK
    with contextlib.suppress(KeyboardInterrupt):
        session.run(lambda store: _watch(store, session, max(interval_s, 0.1)))
    return Exit.OK


async def _one_frame(store: Store, session: Session, interval_s: float) -> Frame:
    rates = Rates(store, session.tenant)
    await rates.begin()
    await asyncio.sleep(interval_s)
    await rates.read(budget_s=max(interval_s, 1.0))
    return await _look(store, session, rates)


async def _watch(store: Store, session: Session, interval_s: float) -> None:
    console = Console()
    rates = Rates(store, session.tenant)
    await rates.begin()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        async for _ in _every(interval_s, pressed):
            await rates.read(budget_s=interval_s * READING_SHARE)
            frame = await _look(store, session, rates)
            live.update(screen(frame, console.width, console.height), refresh=True)


async def _every(interval_s: float, pressed: asyncio.Event) -> AsyncIterator[None]:
    """Yields at once and then every interval, until a key ends it."""
    while not pressed.is_set():
        yield
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await pressed.wait()


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """An event that is set when q is pressed or the process is told to end. The terminal is put back as it was."""
    pressed = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, pressed.set)
    if not sys.stdin.isatty():
        yield pressed
        return
    import termios
    import tty

    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def read() -> None:
        try:
            keys = os.read(stdin, 16)
        except OSError:
            keys = b""
        if not keys or keys.lower().startswith((b"q", b"\x1b")):  # no keys: the terminal is gone
            pressed.set()

    tty.setcbreak(stdin)
    loop.add_reader(stdin, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(stdin)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


# -------------------------------------------------------------------------------------------------------- rates


class Rates:
    """What happened in the last seconds, by queue, as the journal tells it."""

    def __init__(self, store: Store, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._after: dict[int, bytes | None] = {}
        """By shard."""
        self._began_s = time.time()
        self._buckets: dict[int, Counter[tuple[str, str]]] = {}
        """By second."""

    async def begin(self) -> None:
        """Starts with what happens from now on."""
        self._after = {bounds.shard: bounds.newest for bounds in await self._store.journal_bounds()}
        self._began_s, self._buckets = time.time(), {}

    async def read(self, budget_s: float) -> None:
        """Reads what is new, for at most so long."""
        stop_s = time.monotonic() + budget_s
        for shard in [*self._after]:
            if not await self._read_shard(shard, stop_s):
                await self.begin()
                break
        for second in [second for second in self._buckets if second < time.time() - WINDOW_S - LAG_MAX_S]:
            del self._buckets[second]

    async def _read_shard(self, shard: int, stop_s: float) -> bool:
        """Reads what is new in one journal, until then; False: it is too far behind to catch up."""
        while True:
            page = await self._store.events(self._tenant, shard=shard, after=self._after[shard], limit=BATCH_MAX)
            self._after[shard] = page.cursor
            self._count(page.events)
            if page.more and page.events and time.time() - page.events[-1].at_ms / 1000 > LAG_MAX_S:
                return False
            if not page.more or time.monotonic() > stop_s:
                return True

    def _count(self, events: list[Event]) -> None:
        for event in events:
            what = RATE_OF.get(event.kind)
            if what is not None:
                self._buckets.setdefault(event.at_ms // 1000, Counter())[event.command, what] += 1

    def per_s(self) -> dict[tuple[str, str], float]:
        """Tasks per second by (command, what), over the window or as much of it as there has been."""
        now_s = time.time()
        first = int(now_s) - WINDOW_S + 1
        seconds = max(0.1, now_s - max(first, self._began_s))
        sums: Counter[tuple[str, str]] = Counter()
        for second, counts in self._buckets.items():
            if second >= first:
                sums.update(counts)
        return {what: count / seconds for what, count in sums.items()}


# ------------------------------------------------------------------------------------------------------- frames


class Frame(Struct, frozen=True):
    """Everything that one look saw."""

    url: str
    tenant: str
    at_ms: int
    stats: Stats
    workers: list[WorkerInfo]
    per_s: dict[tuple[str, str], float]

    def rate(self, what: str, command: str | None = None) -> float:
        """Tasks per second of one queue, or of all."""
        if command is not None:
            return self.per_s.get((command, what), 0.0)
        return sum((rate for (_, kind), rate in self.per_s.items() if kind == what), start=0.0)


async def _look(store: Store, session: Session, rates: Rates) -> Frame:
    return Frame(
        mask(session.settings.url),
        session.tenant,
        time.time_ns() // 1_000_000,
        await store.stats(session.tenant),
        list(await store.workers(session.tenant)),
        rates.per_s(),
    )


def frame_shape(frame: Frame) -> dict[str, Any]:
    """A frame as JSON."""
    total = {name: value for name, value in counts_shape(frame.stats.total).items() if "oldest" not in name}
    del total["command"]
    return {
        "at": time_text(frame.at_ms),
        "tenant": frame.tenant,
        "total": total | _rates_shape(frame, None),
        "queues": [
            counts_shape(queue) | {"paused": queue.paused} | _rates_shape(frame, queue.command)
            for queue in frame.stats.queues
        ],
        "workers": [worker_shape(worker) for worker in frame.workers],
    }


def _rates_shape(frame: Frame, command: str | None) -> dict[str, float]:
    return {f"{what}_per_s": round(frame.rate(what, command), 2) for what in (IN, DONE, FAILED)}


def screen(frame: Frame, width: int, height: int | None) -> Group:
    """A frame as it is shown; with a `height`, rows that do not fit are counted instead."""
    workers_room = None if height is None else min(len(frame.workers), max(3, height // 3))
    queues_room = None if height is None or workers_room is None else max(3, height - workers_room - 9)
    queues, queues_left = _fitting(frame.stats.queues, queues_room)
    parts: list[Text] = [*_head(frame, width), Text()]
    parts.append(table(QUEUE_COLUMNS, [_queue_row(frame, queue) for queue in queues], width))
    parts += [Text(f"… and {count_text(queues_left)} more queues with less", style="dim")] if queues_left else []
    if frame.workers:
        shown = frame.workers[:workers_room]
        parts += [Text(), table(WORKER_COLUMNS, [worker_row(worker) for worker in shown], width)]
        left = len(frame.workers) - len(shown)
        parts += [Text(f"… and {count_text(left)} more workers", style="dim")] if left else []
    return Group(*parts)


def _fitting(queues: list[QueueStats], room: int | None) -> tuple[list[QueueStats], int]:
    """In order of name, so that lines keep their place; if not all fit, those where the most stands."""
    if room is None or len(queues) <= room:
        return queues, 0
    fullest = sorted(queues, key=lambda queue: -(queue.ready + queue.delayed + queue.leased + queue.dead))[:room]
    return sorted(fullest, key=lambda queue: queue.command), len(queues) - room


def _head(frame: Frame, width: int) -> list[Text]:
    total, failing = frame.stats.total, frame.rate(FAILED)
    busy, slots = sum(worker.busy for worker in frame.workers), sum(worker.slots for worker in frame.workers)
    clock = (time_text(frame.at_ms) or "")[11:19]
    lines: list[list[tuple[str, str]]] = [
        [("dibs top", "bold"), (frame.url, ""), (f"tenant {frame.tenant}", ""), (f"{clock}Z", "dim")],
        [
            (f"{count_text(total.ready)} ready", "cyan"),
            (f"{count_text(total.delayed)} delayed", ""),
            (f"{count_text(total.leased)} in progress", "yellow"),
            (f"{count_text(total.dead)} dead", "red" if total.dead else ""),
            (size_text(total.bytes), "dim"),
        ],
        [
            (f"{_rate(frame.rate(IN))}/s in", "cyan"),
            (f"{_rate(frame.rate(DONE))}/s done", "green"),
            (f"{_rate(failing)}/s failed", "red" if failing else ""),
            (f"{plural(len(frame.workers), 'worker')}, {busy} of {slots} slots busy", ""),
        ],
    ]
    texts = [Text("  ").join(Text(clean(text), style=style) for text, style in line) for line in lines]
    for text in texts:
        text.truncate(width, overflow="ellipsis")
    return texts


QUEUE_COLUMNS = [
    Column("QUEUE", least=8), Column("READY", right=True), Column("DELAYED", right=True), Column("LEASED", right=True),
    Column("DEAD", right=True), Column("OLDEST", right=True), Column("IN/S", right=True), Column("DONE/S", right=True),
    Column("FAIL/S", right=True),
]  # fmt: skip


def _queue_row(frame: Frame, queue: QueueStats) -> list[Cell]:
    failing = frame.rate(FAILED, queue.command)
    return [
        (f"{queue.command} (paused)" if queue.paused else queue.command, "yellow" if queue.paused else ""),
        (count_text(queue.ready), "cyan" if queue.ready else "dim"),
        (count_text(queue.delayed), "" if queue.delayed else "dim"),
        (count_text(queue.leased), "yellow" if queue.leased else "dim"),
        (count_text(queue.dead), "red" if queue.dead else "dim"),
        age_text(queue.oldest_ready_ms, frame.at_ms),
        _rate(frame.rate(IN, queue.command)),
        _rate(frame.rate(DONE, queue.command)),
        (_rate(failing), "red" if failing else ""),
    ]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}"
