"""Outcomes back to the store, in batches: what ends while one batch is on its way goes with the next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from dibs.errors import PayloadTooLarge, StoreUnavailable
from dibs.ids import id_to_text
from dibs.listeners import Happening
from dibs.retry import Backoff
from dibs.task import (
    BATCH_MAX,
    Already,
    ErrorInfo,
    Kind,
    LeaseLost,
    QueueConfig,
    Rejected,
    Settled,
    Settlement,
    Status,
)
from dibs.worker.jobs import Job
from dibs.worker.link import Link
from dibs.worker.running import INVALID_RESULT, Ended

log = logging.getLogger("dibs.worker")

CONFIG_KEPT_S = 30.0
AGAIN_S = 0.5
USUAL_BACKOFF = Backoff()

Answer = Settled | Already | LeaseLost | Rejected
Tell = Callable[[Job, Happening, ErrorInfo | None], None]

_HAPPENINGS = {
    Status.COMPLETED: Happening.COMPLETED,
    Status.FAILED: Happening.FAILED,
    Status.CANCELLED: Happening.CANCELLED,
    Status.PENDING: Happening.RETRIED,
}


class Settler:
    """Settles what the handlers of one app ended with."""

    def __init__(self, link: Link, tell: Tell, done: Callable[[], None]) -> None:
        self._link = link
        self._tell = tell
        self._done = done
        self._outbox: list[tuple[Job, Ended]] = []
        self._changed = asyncio.Event()
        self._in_flight = 0
        self._put_off = 0
        self._configs: dict[tuple[str, str], tuple[float, QueueConfig]] = {}

    @property
    def pending(self) -> int:
        """How many outcomes the store does not have yet."""
        return len(self._outbox) + self._in_flight + self._put_off

    def put(self, job: Job, ended: Ended) -> None:
        """Takes the one outcome of a job."""
        job.settled = True
        self._outbox.append((job, ended))
        self._changed.set()

    async def run(self) -> None:
        """Settles for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._outbox:
                batch, self._outbox = self._outbox[:BATCH_MAX], self._outbox[BATCH_MAX:]
                self._in_flight = len(batch)
                await self._settle(batch)
                self._in_flight = 0
                self._done()

    async def _settle(self, batch: list[tuple[Job, Ended]]) -> None:
        settlements = [await self._settlement(job, ended) for job, ended in batch]
        answers = await self._link.ask(lambda store: store.settle(settlements))
        for (job, ended), answer in zip(batch, answers, strict=True):
            self._hear(job, ended, answer)

    async def _settlement(self, job: Job, ended: Ended) -> Settlement:
        lease = job.lease
        delay_s = 0.0
        if ended.kind is Kind.RETRY:
            delay_s = await self._delay_s(job) if ended.delay_s is None else ended.delay_s
        return Settlement(
            tenant=lease.tenant,
            id=lease.id,
            token=lease.token,
            kind=ended.kind,
            result=ended.result,
            codec=ended.codec,
            error=ended.error,
            reason=ended.reason,
            delay_s=delay_s,
            result_ttl_s=ended.result_ttl_s,
        )

    async def _delay_s(self, job: Job) -> float:
        """How long a failure waits: as the function says, else its queue, else as usual."""
        backoff = job.function.policy.backoff
        if backoff is None:
            backoff = (await self._config(job.lease.tenant, job.lease.command)).backoff or USUAL_BACKOFF
        return backoff.delay_s(job.lease.attempt)

    async def _config(self, tenant: str, command: str) -> QueueConfig:
        known = self._configs.get((tenant, command))
        if known is None or known[0] < time.monotonic():
            config = await self._link.ask(lambda store: store.configure(tenant, command))
            known = self._configs[(tenant, command)] = (time.monotonic() + CONFIG_KEPT_S, config)
        return known[1]

    def _hear(self, job: Job, ended: Ended, answer: Answer) -> None:
        if isinstance(answer, Settled | Already):
            if ended.kind is not Kind.RELEASE:
                # A repeated settlement may find its task claimed again: then it had been retried.
                self._tell(job, _HAPPENINGS.get(answer.status, Happening.RETRIED), ended.error)
        elif isinstance(answer, LeaseLost):
            log.warning(
                "task %s of %s: the lease was lost (%s), its outcome is dropped",
                id_to_text(job.lease.id),
                job.lease.command,
                answer.cause,
            )
            self._tell(job, Happening.LEASE_LOST, None)
        elif answer.code == StoreUnavailable.code:
            # The shard that has this task is down, and others are not: nothing is wrong with the outcome.
            self._put_off += 1
            asyncio.get_running_loop().call_later(AGAIN_S, self._put_again, job, ended)
        else:
            self.put(job, _refused(ended, answer))

    def _put_again(self, job: Job, ended: Ended) -> None:
        self._put_off -= 1
        self.put(job, ended)


def _refused(ended: Ended, answer: Rejected) -> Ended:
    """What becomes of a task whose outcome the store does not take: it fails, and says why."""
    reason = INVALID_RESULT if answer.code == PayloadTooLarge.code or ended.kind is Kind.COMPLETE else ended.reason
    error = ErrorInfo(answer.code, answer.message)
    if ended.kind is Kind.FAIL:
        return replace(ended, error=error, reason=None)
    return Ended(kind=Kind.FAIL, reason=reason, error=error)
