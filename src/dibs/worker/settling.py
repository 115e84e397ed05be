"""Outcomes back to the store, in batches: what ends while one batch is on its way goes with the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dibs.errors import StoreUnavailable
from dibs.ids import id_to_text
from dibs.listeners import Happening
from dibs.task import (
    BATCH_MAX,
    Already,
    ErrorInfo,
    Kind,
    LeaseLost,
    Rejected,
    Settled,
    Status,
)
from dibs.worker.jobs import Job
from dibs.worker.link import Link
from dibs.worker.outcomes import Delays, Ended, refused, settlement

log = logging.getLogger("dibs.worker")

AGAIN_S = 0.5

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
        self._delays = Delays(link)

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
        settlements = [
            settlement(job.lease, ended, await self._delays.of(job.lease, ended, job.function.policy.backoff))
            for job, ended in batch
        ]
        answers = await self._link.ask(lambda store: store.settle(settlements))
        for (job, ended), answer in zip(batch, answers, strict=True):
            self._hear(job, ended, answer)

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
            self.put(job, refused(ended, answer))

    def _put_again(self, job: Job, ended: Ended) -> None:
        self._put_off -= 1
        self.put(job, ended)
