"""The story of ``dibs demo``, told from a producer's side while real workers run beside it.

Import it only when the environment names the store: the app in shop.py reads its settings then, as any app does.
Nothing here waits for a time to pass, only for what the journal or the store tells, so that a slow machine makes the
story longer and not wrong.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import pairwise

from msgspec import Struct

from dibs.demo import shop
from dibs.demo.account import Account, Check, close_books
from dibs.demo.crew import APP, Crew
from dibs.demo.record import Record
from dibs.demo.screen import Screen
from dibs.errors import TaskCancelled
from dibs.handles import Handle
from dibs.listeners import TaskEvent
from dibs.stores.local import LocalStore
from dibs.task import EventKind, Filter, Reason, Status, Task

WORKERS = ("worker-1", "worker-2", "worker-3")
PRIORITIES = (0, 5, 9)
HOUR_S, DAY_S = 3600.0, 86_400.0
CALL_TIMEOUT_S = 120.0


class Size(Struct, frozen=True):
    """How much there is to do."""

    thumbnails: int
    """Of each priority."""
    delays_s: tuple[float, ...]
    webhooks: int
    primes_below: int
    calls: int
    pause_s: float
    """After each phase, for somebody who reads."""


FULL = Size(400, (9.0, 6.0, 3.0), 8, 420_000, 300, 1.2)
QUICK = Size(40, (3.0, 2.0, 1.0), 3, 60_000, 30, 0.0)

SETTLED = (
    EventKind.COMPLETED, EventKind.RETRIED, EventKind.FAILED, EventKind.RELEASED, EventKind.CANCELLED
)  # fmt: skip

#: Each phase: what is about to be seen, and why it matters.
PHASES = {
    "Enqueue": "a task is on disk before enqueue returns. No worker runs yet.",
    "Work": "three processes share the queue; higher priorities go first.",
    "Retry": "a task that fails is tried again, after a growing pause.",
    "Processes": "work that keeps a core busy runs in processes of its own.",
    "Crash": "kill -9 of a worker loses nothing: its leases run out.",
    "Cancel": "a task can be stopped before it starts, and while it runs.",
    "Dead letters": "what keeps failing is set aside, to look at and replay.",
    "Call": "enqueue, and wait for the answer: a function call that is durable.",
    "Account": "every task is found again, by its id, in four records.",
}


class Story:
    """The producer, who also starts the workers, follows the journal, and interferes."""

    def __init__(self, store: LocalStore, crew: Crew, size: Size, screen: Screen) -> None:
        self.store = store
        self.crew = crew
        self.size = size
        self.screen = screen
        self.tenant = shop.app.tenant
        self.record = Record(store, self.tenant)
        self.acknowledged: dict[bytes, str] = {}
        self.checks: list[Check] = []
        self._in_order: list[bytes] = []
        self._due_s: dict[bytes, float] = {}
        shop.app.on("enqueued")(self._note)

    def _note(self, event: TaskEvent) -> None:
        self.acknowledged[event.task_id] = event.command

    async def play(self) -> Account:
        """Plays all phases and returns the account. Raises what keeps it from going on."""
        helpers = [self.record.follow(), self._show(), self.crew.watch()]
        playing = asyncio.ensure_future(self._phases())
        tasks = [playing, *map(asyncio.ensure_future, helpers)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and task is not playing:
                    task.result()  # a helper ends only by an error
            return await playing
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.screen.stop()
            await shop.app.aclose()

    async def _phases(self) -> Account:
        self.screen.start()
        scenes = {
            "Enqueue": self._enqueue,
            "Work": self._work,
            "Retry": self._retry,
            "Processes": self._processes,
            "Crash": self._crash,
            "Cancel": self._cancel,
            "Dead letters": self._dead_letters,
            "Call": self._call,
        }
        for name, scene in scenes.items():
            self._announce(name)
            await scene()
            await asyncio.sleep(self.size.pause_s if self.screen.is_live else 0)
        self._announce("Account")
        return await self._account()

    def _announce(self, name: str) -> None:
        number = 1 + list(PHASES).index(name)
        self.screen.phase(number, len(PHASES), name, PHASES[name])

    async def _show(self) -> None:
        """Keeps the live part of the screen up to date."""
        while True:
            if self.screen.is_live:
                self.screen.draw(await self.store.stats(self.tenant), self.record, self.crew)
            await asyncio.sleep(0.15)

    # ----------------------------------------------------------------------------------------------------------- phases

    async def _enqueue(self) -> None:
        began_s = time.perf_counter()
        for priority in PRIORITIES:
            batch = await shop.thumbnail.options(priority=priority).amap(range(self.size.thumbnails))
            self._in_order = [*batch.task_ids, *self._in_order]
        took_ms = 1000 * (time.perf_counter() - began_s)
        for cart, delay_s in enumerate(self.size.delays_s):
            handle = await shop.reminder.options(delay_s=delay_s).aenqueue(cart)
            self._due_s[handle.task_id] = delay_s
        welcomes = [await shop.welcome.options(key="sign-up-ada").aenqueue("Ada") for _ in range(3)]
        await shop.newsletter.options(delay_s=DAY_S).aenqueue("tomorrow's edition")
        ids = {handle.task_id for handle in welcomes}
        self.screen.say(
            f"{len(self._in_order):,} thumbnails in {took_ms:.0f} ms: priority 0 first, then 5, then 9 on top."
        )
        self.screen.say(f"{len(self._due_s)} reminders, delayed; one newsletter, for tomorrow.")
        self.screen.say(f"One sign-up sent {len(welcomes)} times with the same key: {_plural(len(ids), 'task')}.")
        self._check("Three enqueues with one key made one task.", len(ids) == 1)

    async def _work(self) -> None:
        self.screen.say(f"$ dibs worker {APP} --name {WORKERS[0]}   (and two more)")
        for name in WORKERS:
            await self.crew.start(name)
        await self._until_up()
        await self.record.until_all(EventKind.COMPLETED, set(self._in_order))
        claimed = list(dict.fromkeys(event.id for event in self.record.of(EventKind.CLAIMED, "thumbnail")))
        shares = ", ".join(f"{self.record.by_worker[name]:,}" for name in WORKERS)
        self.screen.say(f"All thumbnails are done, shared by the workers: {shares}.")
        self.screen.say(f"First claimed: priority {await self._priorities(claimed)}. Put in last, they went first.")
        await self.record.until_all(EventKind.COMPLETED, set(self._due_s))
        self.screen.say("The reminders ran when they were due, none before.")
        self._check("Priority 9, then 5, then 0; first in, first out in each.", claimed == self._in_order)
        self._check("No delayed task ran before its time; they ran in order.", self._were_due())

    async def _retry(self) -> None:
        batch = await shop.webhook.amap(range(self.size.webhooks))
        counts = await batch
        await self.record.catch_up()
        retried = self.record.of(EventKind.RETRIED, "webhook")
        error = f"{retried[0].error_type}: {retried[0].error_line}" if retried else ""
        self.screen.say(f"{_plural(len(batch), 'webhook')}; the other side answers the third attempt only.")
        self.screen.say(f"{len(retried)} failures ({error}),")
        self.screen.say(f"and {counts.completed} of {len(batch)} completed in the end.")
        self._check("Every task that failed was tried again until it completed.", counts.completed == len(batch))

    async def _processes(self) -> None:
        below = self.size.primes_below
        starts = range(0, below, below // 6)
        began_s = time.monotonic()
        batch = await shop.primes.amap(starts, (start + starts.step for start in starts))
        found = sum([count async for count in batch.aresults()])
        took_s = time.monotonic() - began_s
        self.screen.say(f"{len(batch)} tasks counted the primes below {below:,}: {found:,}, in {took_s:.1f} s.")

    async def _crash(self) -> None:
        shop.DISK_HANGS.touch()
        films = [await shop.film.aenqueue(title) for title in ("Metropolis", "Nosferatu", "M")]
        stuck = await self._half_way(films[0])
        victim = stuck.worker or ""
        self.screen.say(f"A disk hangs: {victim} is stuck at {_progress(stuck)} of a film.")
        await self.crew.kill(victim)
        killed_s = time.monotonic()
        await self.record.catch_up()
        held = self._left_by(victim)
        self.screen.say(f"kill -9 {victim}: gone in the middle of {_plural(len(held), 'task')}.")
        shop.DISK_HANGS.unlink()
        await self.record.until(lambda: held <= self._claimed_after(victim))
        waited_s = time.monotonic() - killed_s
        self.screen.say(f"{waited_s:.1f} s later their leases of {shop.LEASE_S:g} s ran out, and others took over.")
        titles = [await film.awaited() for film in films]
        self.screen.say(f"Completed: {', '.join(titles)}.")
        self._check(f"The tasks of {victim}, killed with -9, were completed by others.", films[0].task_id in held)

    async def _cancel(self) -> None:
        waiting = await shop.newsletter.options(delay_s=HOUR_S).aenqueue("the wrong edition")
        at_once = await waiting.acancel()
        self.screen.say(f"A newsletter that waits for its hour: {at_once.how}, at once.")
        shop.DISK_HANGS.touch()
        running = await shop.film.aenqueue("Heaven's Gate")
        stuck = await self._half_way(running)
        told = await running.acancel()
        began_s = time.monotonic()
        try:
            await running
        except TaskCancelled:
            took_s = time.monotonic() - began_s
            self.screen.say(f"A film at {_progress(stuck)}: {told.how}; its worker stopped {took_s:.1f} s later.")
        shop.DISK_HANGS.unlink()
        statuses = [await handle.astatus() for handle in (waiting, running)]
        self._check("What was cancelled is CANCELLED.", statuses == [Status.CANCELLED, Status.CANCELLED])

    async def _dead_letters(self) -> None:
        shop.BANK_CLOSED.touch()
        charges = [await shop.charge.aenqueue(order) for order in (1, 2, 3)]
        charges.append(await shop.charge.aenqueue(4, card="void"))
        await self.record.until_all(EventKind.FAILED, {handle.task_id for handle in charges})
        self.screen.say("The bank is closed. After two attempts, `dibs dead ls` shows:")
        for order, task in enumerate([await handle.atask() for handle in charges], 1):
            error = task.error.message if task.error is not None else ""
            self.screen.say(f"  order {order}  {task.reason}: {error}")
        shop.BANK_CLOSED.unlink()
        again = await self.store.replay(self.tenant, Filter(command="charge", reason=Reason.MAX_ATTEMPTS))
        self.screen.say(f"The bank opens. `dibs dead replay --reason MAX_ATTEMPTS` puts {len(again.ids)} back:")
        for handle in charges[:3]:
            self.screen.say(f"  {await handle}")
        left = await self._dead()
        self.screen.say(f"{len(left)} stays dead, for a person to look at: its card will not do.")
        replayed = set(again.ids) == {handle.task_id for handle in charges[:3]}
        self._check("Dead letters were replayed and completed; the hopeless one is kept.", replayed and len(left) == 1)

    async def _call(self) -> None:
        times_ms = []
        right = True
        for count in range(self.size.calls):
            began_s = time.perf_counter()
            right &= await shop.price.acall("tea", count, timeout_s=CALL_TIMEOUT_S) == shop_price(count)
            times_ms.append(1000 * (time.perf_counter() - began_s))
        cuts = statistics.quantiles(times_ms, n=100, method="inclusive")
        self.screen.say(f"{len(times_ms)} calls, one after the other, each durable and run by a worker.")
        self.screen.say(f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, three waits for the disk included.")
        self._check("Every call had its answer.", right)

    async def _account(self) -> Account:
        stopped = await self.crew.stop()
        self.screen.say(f"SIGTERM: {len(stopped)} workers finished what they had and ended.")
        await self.record.catch_up()
        self._tell_slowness()
        report = await self.store.doctor()
        handles = {task_id: await shop.app.handle(task_id).astatus() for task_id in self.acknowledged}
        listed = {task.id: task for task in await self._listed()}
        account = close_books(self.acknowledged, self.record.events, listed, handles, shop.RUNS.read_text())
        self._check("Workers ended with status 0.", not any(stopped))
        self._check(f"`dibs doctor` examined {report.tasks:,} tasks and found nothing wrong.", report.clean)
        return Account(account.rows, account.total, account.deliveries, [*account.checks, *self.checks])

    # ---------------------------------------------------------------------------------------------------------- looking

    def _check(self, text: str, holds: bool) -> None:
        self.checks.append(Check(text, holds))

    async def _until_up(self) -> None:
        while not {info.name for info in await self.store.workers(self.tenant)} >= set(WORKERS):  # noqa: ASYNC110 no event tells it
            await asyncio.sleep(0.05)

    async def _priorities(self, ids: list[bytes]) -> str:
        """The priorities of tasks, without repeats: ``9, 5, 0``."""
        tasks = [task for start in range(0, len(ids), 500) for task in await self._get(ids[start : start + 500])]
        seen = [task.priority for task in tasks]
        return ", ".join(map(str, [seen[0], *(later for earlier, later in pairwise(seen) if later != earlier)]))

    async def _get(self, ids: list[bytes]) -> list[Task]:
        return [task for task in await self.store.get(self.tenant, ids) if task is not None]

    def _were_due(self) -> bool:
        """Whether delayed tasks were claimed when they were due: none too early, and in that order."""
        due_ms = {
            event.id: event.at_ms + 1000 * self._due_s[event.id]
            for event in self.record.of(EventKind.ENQUEUED, "reminder")
        }
        claims = self.record.of(EventKind.CLAIMED, "reminder")
        order = list(dict.fromkeys(event.id for event in claims))
        return order == sorted(due_ms, key=due_ms.__getitem__) and all(
            event.at_ms >= due_ms[event.id] for event in claims
        )

    async def _half_way(self, handle: Handle[str]) -> Task:
        """Returns a task once it runs and has told how far it is."""
        while True:
            task = await handle.atask()
            if task.status is Status.IN_PROGRESS and task.progress is not None and task.progress.done >= 2:
                return task
            await asyncio.sleep(0.05)

    def _left_by(self, worker: str) -> set[bytes]:
        """Tasks that a worker claimed and did not settle."""
        left: set[bytes] = set()
        for event in self.record.events:
            if event.worker == worker and event.kind is EventKind.CLAIMED:
                left.add(event.id)
            elif event.worker == worker and event.kind in SETTLED:
                left.discard(event.id)
        return left

    def _claimed_after(self, worker: str) -> set[bytes]:
        """Tasks that another worker claimed after `worker` had."""
        mine: set[bytes] = set()
        taken: set[bytes] = set()
        for event in self.record.of(EventKind.CLAIMED):
            if event.worker == worker:
                mine.add(event.id)
                taken.discard(event.id)
            elif event.id in mine:
                taken.add(event.id)
        return taken

    async def _dead(self) -> list[Task]:
        page = await self.store.list(self.tenant, Filter(status=Status.FAILED), limit=1000)
        return page.tasks

    async def _listed(self) -> list[Task]:
        page = await self.store.list(self.tenant, limit=1000)
        tasks = page.tasks
        while page.cursor:
            page = await self.store.list(self.tenant, cursor=page.cursor, limit=1000)
            tasks += page.tasks
        return tasks

    def _tell_slowness(self) -> None:
        """Says so if a worker that lived was too slow to keep a lease: that is no fault of the queue."""
        ran_out = self.record.of(EventKind.LEASE_EXPIRED)
        others = [event for event in ran_out if event.worker not in self.crew.killed]
        if others:
            self.screen.say(f"This machine was busy: {_plural(len(others), 'lease')} of live workers ran out too.")


def shop_price(count: int) -> int:
    """What the shop asks for so much tea."""
    return count * sum(b"tea")


def _progress(task: Task) -> str:
    done = task.progress
    return "the start" if done is None or not done.total else f"{100 * done.done / done.total:.0f}%"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
