"""The queue at work: a producer, three workers, one of them killed, and in the end every task accounted for.

::

    python examples/core_demo.py            # about ten seconds
    python examples/core_demo.py --quick    # fewer tasks
    python examples/core_demo.py --keep     # leaves the store behind, to look at

Producers and workers are processes of their own: this file, started again with a role. All they share is a directory.
What the screen shows comes from the journal, as any program could follow it. The worker below is the smallest that is
correct: claim, heartbeat while the handler runs, settle; and a sweep every second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dibs import codec, open_store
from dibs.retry import Backoff
from dibs.stores.ordered.store import OrderedStore
from dibs.stores.protocol import Store
from dibs.stores.wakeups import Journalled
from dibs.task import (
    ByKey,
    Duplicate,
    Enqueued,
    ErrorInfo,
    Event,
    EventKind,
    Extended,
    Filter,
    Heartbeat,
    Kind,
    Lease,
    NewTask,
    Place,
    Reason,
    Settlement,
    Stats,
    Status,
    Task,
)

TENANT = "default"
COMMANDS = ("ping", "invoice", "webhook", "welcome", "reminder", "video", "thumbnail")
QUEUES = (*COMMANDS, "newsletter")
WORKERS, SLOTS = 3, 4
LEASE_S = 1.5
BACKOFF = Backoff(base_s=0.2, factor=2, cap_s=1, jitter="full")
HOUR_S, DAY_S = 3_600, 86_400
PATIENCE_S = 45.0
PAYMENTS_UP = "payments-up"


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    thumbnails: int
    welcomes: int
    video_s: float
    pings: int


FULL, QUICK = Size(900, 20, 2.0, 30), Size(90, 5, 1.0, 8)


# ------------------------------------------------------------------------------------------------------------ producers


async def produce(url: str, size: Size) -> None:
    """Enqueues the backlog in one call, and tells which ids were acknowledged."""
    tasks = list(backlog(size))
    async with await open_store(url) as store:
        outcomes = await store.enqueue(TENANT, tasks)
    new = {one.id.hex(): task.command for one, task in zip(outcomes, tasks, strict=True) if isinstance(one, Enqueued)}
    tell(acknowledged=new, duplicates=sum(isinstance(outcome, Duplicate) for outcome in outcomes))


def backlog(size: Size) -> Iterator[NewTask]:
    for n in range(size.thumbnails):
        yield NewTask(command="thumbnail", payload=codec.encode({"photo": n}), priority=(0, 5, 9)[n % 3])
    for n in range(3 * size.welcomes):  # every sign-up is told three times
        yield NewTask(command="welcome", payload=codec.encode({}), key=f"user-{n % size.welcomes}")
    for n in range(6):
        yield NewTask(command="reminder", payload=codec.encode({}), delay_s=1 + n / 2)
    for n in range(4):
        yield NewTask(command="webhook", payload=codec.encode({"order": n}))
    for amount in (100, 200, 300, -1):
        yield NewTask(command="invoice", payload=codec.encode({"amount": amount}), max_attempts=3)
    yield NewTask(command="video", payload=codec.encode({"work_s": size.video_s}))
    yield NewTask(command="newsletter", delay_s=HOUR_S, key="draft")
    yield NewTask(command="newsletter", delay_s=HOUR_S, expires_s=1)
    yield NewTask(command="newsletter", delay_s=DAY_S)


async def ping(url: str, size: Size) -> None:
    """Enqueues tasks one at a time for workers that wait, and waits for each result: how long the task was on its
    way, from the call of the enqueue to the handler."""
    acknowledged, ways_ms = {}, []
    async with await open_store(url) as store:
        for _ in range(size.pings):
            await asyncio.sleep(0.03)
            body = codec.encode({"sent_ns": time.monotonic_ns()})
            [outcome] = await store.enqueue(TENANT, [NewTask(command="ping", payload=body)])
            assert isinstance(outcome, Enqueued)
            [task] = await store.wait(TENANT, [outcome.id], wait_s=10)
            assert task is not None
            assert task.result is not None
            assert task.result.data is not None
            acknowledged[outcome.id.hex()] = "ping"
            ways_ms.append(codec.decode(task.result.data, task.result.codec) / 1e6)
    tell(acknowledged=acknowledged, median_ms=statistics.median(ways_ms))


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


# --------------------------------------------------------------------------------------------------------------- worker


async def work(url: str, name: str) -> None:
    """Runs tasks in several slots until it is told to stop. What a killed worker held, its leases give back."""
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    async with await open_store(url) as store:
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                group.create_task(sweep(store))
                for _ in range(SLOTS):
                    group.create_task(slot(store, name, Path(url).parent))


async def sweep(store: Store) -> None:
    while True:
        while (await store.sweep()).more:
            pass
        await asyncio.sleep(1)


async def slot(store: Store, name: str, world: Path) -> None:
    while True:
        for lease in await store.claim(TENANT, COMMANDS, lease_s=LEASE_S, wait_s=10, worker=name):
            await store.settle([await run(store, lease, world)])


async def run(store: Store, lease: Lease, world: Path) -> Settlement:
    """Runs the handler under heartbeats and returns how the task is to be settled."""
    handler = asyncio.ensure_future(handle(lease, world))
    while not (await asyncio.wait({handler}, timeout=LEASE_S / 3))[0]:
        [beat] = await store.heartbeat([Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token)])
        if not isinstance(beat, Extended) or beat.cancel_requested:
            handler.cancel()
    release = Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=Kind.RELEASE)
    if handler.cancelled():
        return release
    error = handler.exception()
    if error is None:
        return replace(release, kind=Kind.COMPLETE, result=codec.encode(handler.result()))
    info = ErrorInfo(type(error).__name__, str(error))
    if isinstance(error, ValueError):  # it would fail however often it is tried
        return replace(release, kind=Kind.FAIL, error=info, reason="INVALID")
    return replace(release, kind=Kind.RETRY, error=info, delay_s=BACKOFF.delay_s(lease.attempt))


async def handle(lease: Lease, world: Path) -> object:
    """Does what a task asks for, or pretends to."""
    payload = codec.decode(lease.payload, lease.codec)
    if lease.command == "ping":
        return time.monotonic_ns() - payload["sent_ns"]
    if lease.command == "webhook" and lease.attempt < 3:
        raise ConnectionError(f"503 for order {payload['order']}")
    if lease.command == "invoice" and payload["amount"] < 0:
        raise ValueError("an invoice over less than nothing")
    if lease.command == "invoice" and not (world / PAYMENTS_UP).exists():
        raise ConnectionError("the payment service is down")
    await asyncio.sleep(payload.get("work_s", 0.05))
    return "done"


# ---------------------------------------------------------------------------------------------------------------- story


class Demo:
    """The conductor: starts the processes, follows the journal, and interferes."""

    def __init__(self, store: OrderedStore, world: Path, size: Size, screen: Screen) -> None:
        self.store = store
        self.world = world
        self.size = size
        self.screen = screen
        self.processes = Processes(str(world / "store"), size)
        self.acknowledged: dict[bytes, str] = {}
        self.journal = Journal(store)

    async def play(self) -> bool:
        """Plays all scenes; returns whether everything is accounted for."""
        watching = [asyncio.create_task(self.journal.follow()), asyncio.create_task(self.show())]
        try:
            await self.backlog()
            for number in range(1, WORKERS + 1):
                await self.processes.start(f"worker-{number}", "work")
            await self.kill()
            await self.cancel()
            await self.retries()
            await self.wakeups()
            await self.dead_letters()
            healthy = await self.backup()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await self.processes.stop()
        return await self.account(healthy)

    async def backlog(self) -> None:
        told = await self.produced("produce")
        self.screen.say(f"A producer process put in {len(told['acknowledged'])} tasks and ended.")
        self.screen.say(f"Keys: {told['duplicates']} repeats were recognised and put in nothing.")

    async def kill(self) -> None:
        [claimed] = await self.journal.until(EventKind.CLAIMED, "video")
        self.screen.say(f"{WORKERS} worker processes started; {claimed.worker} is busy with a video.")
        await asyncio.sleep(self.size.video_s / 3)
        await self.processes.kill(claimed.worker)
        held = await self.store.list(TENANT, Filter(status=Status.IN_PROGRESS, worker=claimed.worker))
        killed_s = time.monotonic()
        self.screen.say(f"kill -9: {claimed.worker} is gone, in the middle of {plural(len(held.tasks), 'task')}.")
        lost = {task.id for task in held.tasks}
        await self.journal.until_true(
            lambda: lost <= {one.id for one in self.journal.of(EventKind.CLAIMED) if one.worker != claimed.worker}
        )
        waited_s = time.monotonic() - killed_s
        self.screen.say(f"Others took them over {waited_s:.1f} s later, when their leases of {LEASE_S:g} s ran out.")

    async def cancel(self) -> None:
        [draft] = await self.store.cancel(TENANT, [ByKey("newsletter", "draft")])
        film = NewTask(command="video", payload=codec.encode({"work_s": HOUR_S}))
        [outcome] = await self.store.enqueue(TENANT, [film])
        assert isinstance(outcome, Enqueued)
        self.acknowledged[outcome.id] = film.command
        await self.journal.until_true(lambda: self.journal.statuses.get(outcome.id) is Status.IN_PROGRESS)
        [running] = await self.store.cancel(TENANT, [outcome.id])
        asked_s = time.monotonic()
        await self.store.wait(TENANT, [outcome.id], wait_s=10)
        stopped_s = time.monotonic() - asked_s
        self.screen.say(f"Cancel: a waiting task, {draft.how}; a running one, {running.how}: {stopped_s:.1f} s.")

    async def retries(self) -> None:
        await self.journal.until(EventKind.COMPLETED, "webhook", 4)
        retried = self.journal.of(EventKind.RETRIED, "webhook")
        self.screen.say(f"Retries: 4 webhooks failed {len(retried)} times, backed off, and completed.")

    async def wakeups(self) -> None:
        await self.journal.until_true(self.all_ended)
        await self.journal.until(EventKind.CANCELLED, "newsletter", 2)
        self.screen.say("All done; the workers wait. One newsletter missed its start: EXPIRED.")
        told = await self.produced("ping")
        median_ms, count = told["median_ms"], len(told["acknowledged"])
        self.screen.say(f"Wake-ups: enqueue to a handler elsewhere in {median_ms:.1f} ms (median of {count}).")

    async def dead_letters(self) -> None:
        dead = await self.store.list(TENANT, Filter(command="invoice", status=Status.FAILED))
        reasons = Counter(task.reason for task in dead.tasks)
        self.screen.say(f"Dead letters: {', '.join(f'{count} {reason}' for reason, count in reasons.items())}.")
        (self.world / PAYMENTS_UP).touch()
        revived = await self.store.replay(TENANT, Filter(command="invoice", reason=Reason.MAX_ATTEMPTS))
        await self.journal.until(EventKind.COMPLETED, "invoice", len(revived.ids))
        self.screen.say(f"The payment service is up again: {len(revived.ids)} replayed, and completed.")

    async def backup(self) -> bool:
        copy = self.world / "backup"
        await self.store.backup(copy)
        async with await open_store(str(copy)) as copied:
            reports = [await self.store.doctor(), await copied.doctor()]
        tasks = " and ".join(f"{report.tasks:,}" for report in reports)
        self.screen.say(f"Backup taken. The doctor examined {tasks} tasks in store and copy.")
        return all(report.clean for report in reports)

    async def account(self, healthy: bool) -> bool:
        """Holds what was acknowledged against the listing, the counters and the journal."""
        await self.journal.catch_up()
        tasks, stats = await all_tasks(self.store), await self.store.stats(TENANT)
        checks = {
            "The doctor found nothing wrong.": healthy,
            "The store holds what was acknowledged, and nothing else.": self.acknowledged
            == {task.id: task.command for task in tasks},
            f"The journal says the same of every task, in {len(self.journal.all):,} events.": self.journal.statuses
            == {task.id: task.status for task in tasks},
            "The counters say the same as the listing.": counted(stats) == listed(tasks),
            "No task was completed twice.": len(self.journal.of(EventKind.COMPLETED))
            == sum(task.status is Status.COMPLETED for task in tasks),
            "Thumbnails were claimed by priority: 9, then 5, then 0.": in_order(self.journal, tasks),
        }
        balanced = self.screen.balance(self.acknowledged, tasks)
        self.screen.check(checks | {"Enqueued = completed + dead + cancelled + left.": balanced})
        return balanced and all(checks.values())

    def all_ended(self) -> bool:
        """Whether nothing is left for the workers to do."""
        stands = self.journal.statuses
        return all(
            task in stands and stands[task].ended for task, queue in self.acknowledged.items() if queue in COMMANDS
        )

    async def produced(self, role: str) -> dict[str, Any]:
        told = await self.processes.ask(role)
        self.acknowledged |= {bytes.fromhex(text): command for text, command in told["acknowledged"].items()}
        return told

    async def show(self) -> None:
        """Keeps the live part of the screen up to date."""
        if not self.screen.console.is_terminal:
            return
        with self.screen.live:
            while True:
                self.screen.draw(await self.store.stats(TENANT), self.journal, self.processes)
                await asyncio.sleep(0.1)


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


async def all_tasks(store: Store) -> list[Task]:
    page = await store.list(TENANT, limit=1_000)
    tasks = page.tasks
    while page.cursor:
        page = await store.list(TENANT, cursor=page.cursor, limit=1_000)
        tasks += page.tasks
    return tasks


def counted(stats: Stats) -> tuple[int, ...]:
    total = stats.total
    return total.ready, total.delayed, total.leased, total.dead


def listed(tasks: list[Task]) -> tuple[int, ...]:
    places = Counter(task.place for task in tasks)
    return tuple(places[place] for place in (Place.READY, Place.DELAYED, Place.LEASED, Place.DEAD))


def in_order(journal: Journal, tasks: list[Task]) -> bool:
    """Whether no thumbnail was first delivered before one of a higher priority; all were there from the start."""
    priorities = {task.id: task.priority for task in tasks}
    first = [priorities.get(one.id, -1) for one in journal.of(EventKind.CLAIMED, "thumbnail") if one.attempt == 1]
    return all(earlier >= later for earlier, later in pairwise(first))


#: How a task stands after an event.
STANDS = {
    EventKind.ENQUEUED: Status.PENDING,
    EventKind.PROMOTED: Status.PENDING,
    EventKind.CLAIMED: Status.IN_PROGRESS,
    EventKind.COMPLETED: Status.COMPLETED,
    EventKind.RETRIED: Status.PENDING,
    EventKind.RELEASED: Status.PENDING,
    EventKind.LEASE_EXPIRED: Status.PENDING,
    EventKind.FAILED: Status.FAILED,
    EventKind.CANCELLING: Status.IN_PROGRESS,
    EventKind.CANCELLED: Status.CANCELLED,
    EventKind.REPLAYED: Status.PENDING,
}


class Journal:
    """What the journal has told so far."""

    def __init__(self, store: Store) -> None:
        self.all: list[Event] = []
        self.statuses: dict[bytes, Status] = {}
        self._store = store
        self._cursor: bytes | None = None
        self._grown = asyncio.Condition()

    async def follow(self) -> None:
        """Reads whenever the journal has grown, whichever process made it grow."""
        with self._store.subscribe([Journalled()]) as subscription:
            while True:
                await self.catch_up()
                await subscription.wait(1.0)
                await asyncio.sleep(0.02)  # what comes in quick succession is read together

    async def catch_up(self) -> None:
        """Reads to the end."""
        more = True
        while more:
            page = await self._store.events(TENANT, after=self._cursor)
            self._cursor, more = page.cursor, page.more
            self.all += page.events
            self.statuses |= {event.id: STANDS[event.kind] for event in page.events}
        async with self._grown:
            self._grown.notify_all()

    def of(self, kind: EventKind, command: str | None = None) -> list[Event]:
        return [event for event in self.all if event.kind is kind and command in (None, event.command)]

    async def until(self, kind: EventKind, command: str, count: int = 1) -> list[Event]:
        """Returns once there are so many such events."""
        await self.until_true(lambda: len(self.of(kind, command)) >= count)
        return self.of(kind, command)

    async def until_true(self, seen: Callable[[], bool]) -> None:
        async with self._grown:
            await self._grown.wait_for(seen)


class Processes:
    """The processes that the demo started; it ends no others."""

    def __init__(self, url: str, size: Size) -> None:
        self.running: dict[str, Process] = {}
        self.killed: list[str] = []
        self._arguments = [url, *(["--quick"] if size is QUICK else [])]

    async def start(self, name: str, role: str) -> Process:
        command = [sys.executable, __file__, "--role", role, "--name", name, "--url", *self._arguments]
        # A session of its own: an interrupt from the keyboard is for the conductor alone.
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, start_new_session=True)
        self.running[name] = process
        return process

    async def ask(self, role: str) -> dict[str, Any]:
        """Runs a process to its end and returns what it told."""
        out, _ = await (await self.start(role, role)).communicate()
        if self.running.pop(role).returncode != 0:
            raise SystemExit(f"the process {role} failed")
        told: dict[str, Any] = json.loads(out)
        return told

    async def kill(self, name: str) -> None:
        """SIGKILL: it has no time to say good-bye."""
        process = self.running.pop(name)
        process.kill()
        await process.wait()
        self.killed.append(name)

    async def stop(self) -> None:
        """Asks what still runs to stop, and waits for it."""
        while self.running:
            _, process = self.running.popitem()
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                await process.wait()


# --------------------------------------------------------------------------------------------------------------- screen


class Screen:
    """Lines that stay, and on a terminal a live table under them."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        time_s = f"{time.monotonic() - self._began_s:5.1f} s  "
        width = min(self.console.width, 100)
        self.console.print(textwrap.fill(text, width, initial_indent=time_s, subsequent_indent=" " * len(time_s)))

    def draw(self, stats: Stats, journal: Journal, processes: Processes) -> None:
        completed = Counter(event.command for event in journal.all if event.kind is EventKind.COMPLETED)
        table = Table("queue", box=SIMPLE_HEAD, pad_edge=False)
        for name in ("ready", "delayed", "leased", "dead", "completed"):
            table.add_column(name, justify="right", min_width=9)
        for queue in stats.queues:
            counts = queue.ready, queue.delayed, queue.leased, queue.dead, completed[queue.command]
            table.add_row(queue.command, *(str(count or "·") for count in counts))
        by_worker = Counter(event.worker for event in journal.all if event.kind is EventKind.COMPLETED)
        names = sorted(name for name in (*processes.running, *processes.killed) if name.startswith("worker"))
        workers = (
            f"{name} {'killed' if name in processes.killed else 'runs'}, {by_worker[name]} done" for name in names
        )
        self.live.update(Group(table, Text("   ".join(workers))), refresh=True)

    def balance(self, acknowledged: dict[bytes, str], tasks: list[Task]) -> bool:
        """Shows where every task went, queue by queue; returns whether the sums are right."""
        table = Table("queue", box=SIMPLE_HEAD, pad_edge=False, show_footer=True)
        enqueued = Counter(acknowledged.values())
        ended = Counter((task.command, task.status) for task in tasks)
        ways = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
        rows = []
        for queue in QUEUES:
            went = [ended[(queue, way)] for way in ways]
            left = ended[(queue, Status.PENDING)] + ended[(queue, Status.IN_PROGRESS)]
            rows.append([enqueued[queue], *went, left])
        sums = [sum(column) for column in zip(*rows, strict=True)]
        table.columns[0].footer = "all"
        for name, total in zip(("enqueued", "completed", "dead", "cancelled", "left"), sums, strict=True):
            table.add_column(name, str(total), justify="right", min_width=9)
        for queue, row in zip(QUEUES, rows, strict=True):
            table.add_row(queue, *(str(count or "·") for count in row))
        self.console.print(table)
        return all(row[0] == sum(row[1:]) for row in rows)

    def check(self, checks: dict[str, bool]) -> None:
        for text, holds in checks.items():
            self.console.print(
                Text("  holds  " if holds else "  FAILS  ", style="green" if holds else "bold red"), text
            )


# ----------------------------------------------------------------------------------------------------------------- main


async def conduct(size: Size, keep: bool) -> int:
    """Plays the demo in a temporary directory; returns the exit code."""
    world = Path(tempfile.mkdtemp(prefix="dibs-demo-"))
    screen = Screen()
    try:
        async with await open_store(str(world / "store")) as store, asyncio.timeout(PATIENCE_S):
            accounted = await Demo(store, world, size, screen).play()
    except TimeoutError:
        screen.console.print(f"This took more than {PATIENCE_S:g} s: something is stuck.", style="bold red")
        accounted = False
    finally:
        if not keep:
            shutil.rmtree(world)
    screen.console.print(f"\nThe store is in {world / 'store'}." if keep else NEXT, soft_wrap=True)
    return 0 if accounted else 1


NEXT = """
Next: run it with --keep and open the directory with dibs.open_store;
read README.md, then docs/guarantees.md for what is promised and what is not,
and docs/architecture.md for how it is done. The worker in this file is short."""


def main() -> int:
    parser = argparse.ArgumentParser(description="The queue at work, in several processes over one directory.")
    parser.add_argument("--quick", action="store_true", help="fewer tasks")
    parser.add_argument("--keep", action="store_true", help="leave the store behind")
    for hidden in ("--role", "--name", "--url"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.role == "produce":
        asyncio.run(produce(options.url, size))
    elif options.role == "ping":
        asyncio.run(ping(options.url, size))
    elif options.role == "work":
        asyncio.run(work(options.url, options.name))
    else:
        return asyncio.run(conduct(size, options.keep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
