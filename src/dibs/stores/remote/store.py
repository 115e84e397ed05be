"""A server's store: every verb is a question to it.

The checks of the seam are made here as well as there, so bad input never travels. Waiting is the server's: a claim, or
a wait, is a call that takes as long. What an answer that was lost on the way leaves behind is put right: ids and claim
ids are minted here, so a repeat is recognised, and a claim that its caller gives up is given back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from dibs.checks import Limits
from dibs.errors import PayloadTooLarge
from dibs.ids import new_id
from dibs.stores.direct import wait_by_looking
from dibs.stores.protocol import Order, Store
from dibs.stores.remote import verbs
from dibs.stores.remote.address import Address
from dibs.stores.remote.client import Client
from dibs.stores.wakeups import Subscription, Topic, Wakeups
from dibs.task import (
    Acted,
    Already,
    Cancelled,
    Committed,
    Duplicate,
    Enqueued,
    Extended,
    Filter,
    Heartbeat,
    JournalBounds,
    Lease,
    LeaseLost,
    Marks,
    NewTask,
    Page,
    QueueConfig,
    Reader,
    Rejected,
    Rows,
    RunPage,
    Settled,
    Settlement,
    Staged,
    Stats,
    Swept,
    Task,
    TaskRef,
    TenantPage,
    WorkerInfo,
)


async def open_remote(url: str) -> RemoteStore:
    """Opens the store of the server at ``http(s)://[TOKEN@]HOST[:PORT]``, and asks it what it is like."""
    client = Client(Address.of(url))
    try:
        about = await client.ask(verbs.ABOUT, verbs.AskNothing())
    except BaseException:
        await client.close()
        raise
    return RemoteStore(client, Limits(about.payload_max_bytes, about.result_max_bytes), about.order)


class RemoteStore(Store):
    """A client of a server. `open_remote` opens one."""

    sweeps_itself = True

    def __init__(self, client: Client, limits: Limits, order: Order) -> None:
        super().__init__(limits)
        self.order = order
        self._client = client

    # ------------------------------------------------------------------------------------------------- life of a task

    async def _enqueue(
        self, tenant: str, tasks: Sequence[NewTask], ids: Sequence[bytes]
    ) -> Sequence[Enqueued | Duplicate | Rejected]:
        sent = [task if task.id else replace(task, id=task_id) for task, task_id in zip(tasks, ids, strict=True)]
        answers = await self._client.ask(verbs.ENQUEUE, verbs.AskEnqueue(tenant, sent))
        for index, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if not task.id and isinstance(answer, Enqueued) and answer.already:
                # Nobody else knows an id that was minted here: its enqueue is the one whose answer was lost.
                answers[index] = Enqueued(answer.id)
        return answers

    async def _claim_within(
        self,
        tenant: str,
        commands: Sequence[str],
        limit: int,
        lease_s: float | None,
        wait_s: float,
        worker: str,
        claim_id: bytes | None,
    ) -> list[Lease]:
        asked = verbs.AskClaim(tenant, [*commands], limit, lease_s, 0.0, worker, claim_id or new_id())
        assert asked.claim_id is not None
        undo = verbs.AskUnclaim(tenant, asked.claim_id, for_good=claim_id is None)
        deadline_s = time.monotonic() + wait_s
        while True:
            asked.wait_s = min(wait_s, verbs.WAIT_MAX_S)
            leases = await self._client.ask(verbs.CLAIM, asked, wait_s=asked.wait_s, undo=undo)
            wait_s = deadline_s - time.monotonic()
            if leases or wait_s <= 0:
                return leases

    async def _unclaim(self, tenant: str, claim_id: bytes) -> int:
        return await self._client.ask(verbs.UNCLAIM, verbs.AskUnclaim(tenant, claim_id))

    async def _heartbeat(self, beats: Sequence[Heartbeat]) -> Sequence[Extended | LeaseLost | Rejected]:
        return await self._client.ask(verbs.HEARTBEAT, verbs.AskHeartbeat([*beats]))

    async def _settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Already | LeaseLost | Rejected]:
        return await self._client.ask(verbs.SETTLE, verbs.AskSettle([*settlements]))

    # ------------------------------------------------------------------------------------------------ looking, acting

    async def _get(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Task | None]:
        try:
            return await self._client.ask(verbs.GET, verbs.AskAbout(tenant, [*refs]))
        except PayloadTooLarge:
            if len(refs) == 1:
                raise
            # Large tasks come a few at a time.
            middle = len(refs) // 2
            return [*await self._get(tenant, refs[:middle]), *await self._get(tenant, refs[middle:])]

    async def _cancel(self, tenant: str, refs: Sequence[TaskRef]) -> Sequence[Cancelled]:
        return await self._client.ask(verbs.CANCEL, verbs.AskAbout(tenant, [*refs]))

    async def _wait(self, tenant: str, ids: Sequence[bytes], wait_s: float) -> Sequence[Task | None]:
        if len(ids) > verbs.WAITED_MAX:
            return await wait_by_looking(self, tenant, ids, wait_s)
        deadline_s = time.monotonic() + wait_s
        while True:
            asked = verbs.AskWait(tenant, [*ids], min(wait_s, verbs.WAIT_MAX_S))
            tasks = await self._client.ask(verbs.WAIT, asked, wait_s=asked.wait_s)
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0 or any(task is None or task.status.ended for task in tasks):
                return tasks

    async def _replay(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
        return await self._client.ask(verbs.REPLAY, _act(tenant, which, limit, cursor))

    async def _purge(self, tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> Acted:
        return await self._client.ask(verbs.PURGE, _act(tenant, which, limit, cursor))

    async def _retain(self, tenant: str, ids: Sequence[bytes], result_ttl_s: float) -> Sequence[int | None]:
        return await self._client.ask(verbs.RETAIN, verbs.AskRetain(tenant, [*ids], result_ttl_s))

    async def _list(self, tenant: str, which: Filter, cursor: str | None, limit: int) -> Page:
        return await self._client.ask(verbs.LIST, verbs.AskList(tenant, which, cursor, limit))

    async def _marks(self, tenant: str, every: int, after: bytes | None) -> Marks:
        return await self._client.ask(verbs.MARKS, verbs.AskMarks(tenant, every, after))

    # ---------------------------------------------------------------------------------------------------------- loads

    async def _stage(self, tenant: str, chunk_id: bytes, rows: Rows) -> Staged | None:
        return await self._client.ask(verbs.STAGE, verbs.AskStage(tenant, chunk_id, rows))

    async def _commit_load(
        self, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], forget_s: float | None
    ) -> Committed:
        asked = verbs.AskCommit(tenant, name, seq, [*chunk_ids], forget_s)
        return await self._client.ask(verbs.COMMIT_LOAD, asked)

    async def _drop(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        return await self._client.ask(verbs.DROP, verbs.AskDrop(tenant, [*chunk_ids]))

    # --------------------------------------------------------------------------------------------- queues and workers

    async def _stats(self, tenant: str, commands: Sequence[str] | None) -> Stats:
        named = None if commands is None else [*commands]
        return await self._client.ask(verbs.STATS, verbs.AskStats(tenant, named))

    async def _configure(self, tenant: str, command: str, config: QueueConfig | None) -> QueueConfig:
        if config is None:
            return await self._client.ask(verbs.QUEUE, verbs.AskQueue(tenant, command))
        return await self._client.ask(verbs.CONFIGURE, verbs.AskConfigure(tenant, command, config))

    async def _register(self, tenant: str, info: WorkerInfo, ttl_s: float) -> None:
        await self._client.ask(verbs.REGISTER, verbs.AskRegister(tenant, info, ttl_s))

    async def _workers(self, tenant: str) -> Sequence[WorkerInfo]:
        return await self._client.ask(verbs.WORKERS, verbs.AskTenant(tenant))

    async def _tenants(self, cursor: str | None, limit: int) -> TenantPage:
        return await self._client.ask(verbs.TENANTS, verbs.AskTenants(cursor, limit))

    # -------------------------------------------------------------------------------------------------------- journal

    async def journal_bounds(self) -> Sequence[JournalBounds]:
        return await self._client.ask(verbs.JOURNAL_BOUNDS, verbs.AskNothing())

    async def _runs(self, tenant: str, shard: int, after: bytes | None, until: bytes | None, limit: int) -> RunPage:
        asked = verbs.AskRuns(tenant, shard, after, until, limit)
        return await self._client.ask(verbs.RUNS, asked)

    async def readers(self) -> Sequence[Reader]:
        return await self._client.ask(verbs.READERS, verbs.AskNothing())

    async def _advance(self, reader: str, shard: int, position: bytes | None) -> None:
        await self._client.ask(verbs.ADVANCE, verbs.AskAdvance(reader, shard, position))

    async def _sweep(self, budget: int) -> Swept:
        return await self._client.ask(verbs.SWEEP, verbs.AskSweep(budget))

    def subscribe(self, topics: Iterable[Topic], limit: int = 1) -> Subscription:
        return RemoteSubscription(self._client, tuple(topics), limit)

    async def close(self) -> None:
        await self._client.close()


def _act(tenant: str, which: Sequence[bytes] | Filter, limit: int, cursor: str | None) -> verbs.AskAct:
    return verbs.AskAct(tenant, which if isinstance(which, Filter) else [*which], limit, cursor)


class RemoteSubscription(Subscription):
    """Listens at the server from when it is entered, and again from when a wake-up was taken: what is asked after that
    is asked when the server listens."""

    def __init__(self, client: Client, topics: tuple[Topic, ...], limit: int) -> None:
        super().__init__(Wakeups(), topics, limit)
        self._client = client
        self._asked = verbs.AskSubscribe([verbs.on_wire(topic) for topic in topics], limit)
        self._listening: asyncio.Task[None] | None = None

    async def wait(self, timeout_s: float) -> bool:
        woken = await super().wait(timeout_s)
        if woken:
            self._listen()
        return woken

    def __enter__(self) -> Self:
        self._listen()
        return super().__enter__()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        super().__exit__()
        if self._listening is not None:
            self._listening.cancel()

    def _listen(self) -> None:
        holds = asyncio.Event()
        self._listening = asyncio.ensure_future(self._client.listen(self._asked, self, holds))
        # Also if it ends, or is cancelled, before it holds.
        self._listening.add_done_callback(lambda _: holds.set())
        self._client.first(_until(holds))


async def _until(event: asyncio.Event) -> None:
    await event.wait()
