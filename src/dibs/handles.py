"""What a producer holds after an enqueue: one task, or a batch of them, to ask about, wait for and cancel.

Every question can be asked both ways: ``handle.status()`` in plain code, ``await handle.astatus()`` in async code. To
wait, ``handle.wait()`` and ``await handle`` (or ``await handle.awaited(timeout_s=5)``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from dibs.checks import TTL_MAX_S, WAIT_MAX_S, check_number
from dibs.errors import DibsError, TaskCancelled, TaskFailed, TaskUnfinished, TaskUnknown
from dibs.ids import id_to_text
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Cancelled, Status, Task

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

Decode = Callable[[bytes, str], Any]


class Client(Protocol):
    """What handles need of an app."""

    async def ask(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """Asks the store of the running loop."""

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call from plain code."""


class Handle(Generic[R_co]):
    """One task. `duplicate`: another task held the key already, and this is that one."""

    def __init__(
        self, client: Client, tenant: str, task_id: bytes, decode: Decode, *, kept: bool = True, duplicate: bool = False
    ) -> None:
        self._client = client
        self._decode = decode
        self._kept = kept
        self.tenant = tenant
        self.task_id = task_id
        self.duplicate = duplicate

    def __repr__(self) -> str:
        return f"<Handle {self.id} of {self.tenant}>"

    @property
    def id(self) -> str:
        """The task's id as text, as the command line and other processes name it."""
        return id_to_text(self.task_id)

    def status(self) -> Status:
        """Returns how the task stands. Raises `TaskUnknown` if it is no longer kept."""
        return self._client.run(self.astatus())

    async def astatus(self) -> Status:
        return (await self.atask()).status

    def task(self) -> Task:
        """Returns all there is to know of the task: attempts, progress, worker, times, error."""
        return self._client.run(self.atask())

    async def atask(self) -> Task:
        [task] = await _get(self._client, self.tenant, [self.task_id])
        return _known(task, self.task_id)

    def result(self) -> R_co:
        """Returns the result of a task that has ended, or raises what it ended with; `TaskUnfinished` if it has not."""
        return self._client.run(self.aresult())

    async def aresult(self) -> R_co:
        return self._value(await self.atask())

    def wait(self, timeout_s: float | None = None) -> R_co:
        """Waits for the end of the task. Returns its result, or raises `TaskFailed` with the remote traceback,
        `TaskCancelled`, or after `timeout_s` `TaskUnfinished`."""
        return self._client.run(self.awaited(timeout_s))

    async def awaited(self, timeout_s: float | None = None) -> R_co:
        """`wait`, for async code."""
        deadline_s = _deadline_s(timeout_s)
        while True:
            [task] = await _wait(self._client, self.tenant, [self.task_id], _left_s(deadline_s))
            if task is None or task.status.ended or _left_s(deadline_s) == 0:
                return self._value(_known(task, self.task_id))

    def __await__(self) -> Generator[Any, None, R_co]:
        return self.awaited().__await__()

    def cancel(self) -> Cancelled:
        """Cancels the task: at once if it has not started, else its worker is told."""
        return self._client.run(self.acancel())

    async def acancel(self) -> Cancelled:
        [outcome] = await _cancel(self._client, self.tenant, [self.task_id])
        return outcome

    def _value(self, task: Task) -> R_co:
        value: R_co = value_of(task, self._decode, kept=self._kept)
        return value


class BatchProgress(Struct, frozen=True):
    """How far a batch is."""

    total: int
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    unknown: int = 0
    """No longer kept."""

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled + self.unknown

    @property
    def over(self) -> bool:
        return self.ended == self.total


class Batch(Generic[R]):
    """Many tasks of one `map`, in the order of its input."""

    def __init__(self, client: Client, tenant: str, decode: Decode, *, kept: bool = True) -> None:
        self._client = client
        self._decode = decode
        self._kept = kept
        self._ended: dict[bytes, Status | None] = {}
        self.tenant = tenant
        self.task_ids: list[bytes] = []

    def __len__(self) -> int:
        return len(self.task_ids)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} tasks of {self.tenant}>"

    def __getitem__(self, index: int) -> Handle[R]:
        return Handle(self._client, self.tenant, self.task_ids[index], self._decode, kept=self._kept)

    def __iter__(self) -> Iterator[Handle[R]]:
        return (self[index] for index in range(len(self)))

    def progress(self) -> BatchProgress:
        """Returns how many have ended, and how."""
        return self._client.run(self.aprogress())

    async def aprogress(self) -> BatchProgress:
        open_ids = [task_id for task_id in self.task_ids if task_id not in self._ended]
        for chunk in _chunks(open_ids):
            self._note(chunk, await _get(self._client, self.tenant, chunk))
        return self._counts()

    def wait(
        self, timeout_s: float | None = None, on_progress: Callable[[BatchProgress], object] | None = None
    ) -> BatchProgress:
        """Waits until all have ended, however they did, and returns the counts; `TaskUnfinished` after `timeout_s`.
        `on_progress` is told now and then how far it is."""
        deadline_s = _deadline_s(timeout_s)
        for chunk in _chunks(self.task_ids):
            while self._open(chunk):
                self._client.run(self._look(chunk, deadline_s))
                if on_progress is not None:
                    on_progress(self._counts())
        return self._counts()

    async def awaited(
        self, timeout_s: float | None = None, on_progress: Callable[[BatchProgress], object] | None = None
    ) -> BatchProgress:
        """`wait`, for async code."""
        deadline_s = _deadline_s(timeout_s)
        for chunk in _chunks(self.task_ids):
            while self._open(chunk):
                await self._look(chunk, deadline_s)
                if on_progress is not None:
                    on_progress(self._counts())
        return self._counts()

    def __await__(self) -> Generator[Any, None, BatchProgress]:
        return self.awaited().__await__()

    def results(self, timeout_s: float | None = None, *, errors: bool = False) -> Iterator[R | Any]:
        """Waits for the results and yields them in the order of the input. With `errors`, a task that failed yields
        its error; without, the first one is raised."""
        deadline_s = _deadline_s(timeout_s)
        for chunk in _chunks(self.task_ids):
            yield from self._client.run(self._values(chunk, deadline_s, errors))

    async def aresults(self, timeout_s: float | None = None, *, errors: bool = False) -> AsyncIterator[R | Any]:
        """`results`, for async code."""
        deadline_s = _deadline_s(timeout_s)
        for chunk in _chunks(self.task_ids):
            for value in await self._values(chunk, deadline_s, errors):
                yield value

    def cancel(self) -> int:
        """Cancels what has not ended; returns how many were cancelled or told to stop."""
        return self._client.run(self.acancel())

    async def acancel(self) -> int:
        count = 0
        for chunk in _chunks(self.task_ids):
            outcomes = await _cancel(self._client, self.tenant, chunk)
            count += sum(outcome.how in ("cancelled", "cancelling") for outcome in outcomes)
        return count

    def _open(self, chunk: Sequence[bytes]) -> list[bytes]:
        return [task_id for task_id in dict.fromkeys(chunk) if task_id not in self._ended]

    async def _look(self, chunk: Sequence[bytes], deadline_s: float | None) -> None:
        """Waits until some more have ended; raises when the time is over."""
        wait_s = _left_s(deadline_s)
        left = self._open(chunk)
        self._note(left, await _wait(self._client, self.tenant, left, wait_s))
        if wait_s == 0 and self._open(chunk):
            counts = self._counts()
            raise TaskUnfinished(f"{counts.total - counts.ended} of {counts.total} tasks have not ended in time")

    async def _values(self, chunk: Sequence[bytes], deadline_s: float | None, errors: bool) -> list[R | Any]:
        while self._open(chunk):
            await self._look(chunk, deadline_s)
        tasks = await _get(self._client, self.tenant, chunk)
        values: list[R | Any] = []
        for task_id, task in zip(chunk, tasks, strict=True):
            try:
                values.append(value_of(_known(task, task_id), self._decode, kept=self._kept))
            except DibsError as error:
                if not errors:
                    raise
                values.append(error)
        return values

    def _note(self, ids: Sequence[bytes], tasks: Sequence[Task | None]) -> None:
        for task_id, task in zip(ids, tasks, strict=True):
            if task is None or task.status.ended:
                self._ended[task_id] = None if task is None else task.status

    def _counts(self) -> BatchProgress:
        counts = dict.fromkeys([*Status, None], 0)
        for task_id in self.task_ids:
            if task_id in self._ended:
                counts[self._ended[task_id]] += 1
        return BatchProgress(
            len(self.task_ids), counts[Status.COMPLETED], counts[Status.FAILED], counts[Status.CANCELLED], counts[None]
        )


async def _get(client: Client, tenant: str, ids: Sequence[bytes]) -> Sequence[Task | None]:
    return await client.ask(lambda store: store.get(tenant, ids))


async def _wait(client: Client, tenant: str, ids: Sequence[bytes], wait_s: float) -> Sequence[Task | None]:
    return await client.ask(lambda store: store.wait(tenant, ids, wait_s))


async def _cancel(client: Client, tenant: str, ids: Sequence[bytes]) -> Sequence[Cancelled]:
    return await client.ask(lambda store: store.cancel(tenant, ids))


def value_of(task: Task, decode: Decode, *, kept: bool = True) -> Any:
    """Returns the result of a task, or raises what it ended with."""
    if not task.status.ended:
        raise TaskUnfinished(f"task {id_to_text(task.id)} of {task.command} has not ended: it is {task.status}")
    if task.status is Status.FAILED:
        raise _failure(task)
    if task.status is Status.CANCELLED:
        cancelled = TaskCancelled(f"task {id_to_text(task.id)} of {task.command} was cancelled ({task.reason})")
        cancelled.reason = task.reason or ""
        raise cancelled
    if not kept:
        return None
    if task.result is None:
        raise TaskUnknown(f"task {id_to_text(task.id)} has completed, and its result is no longer kept")
    return None if task.result.data is None else decode(task.result.data, task.result.codec)


def _failure(task: Task) -> TaskFailed:
    error = task.error
    what = f"{error.type}: {error.message}" if error is not None and error.message else (error and error.type) or ""
    failure = TaskFailed(
        f"task {id_to_text(task.id)} of {task.command} failed ({task.reason}, attempt {task.attempts} of "
        f"{task.max_attempts})" + (f": {what}" if what else "")
    )
    failure.reason = task.reason or ""
    if error is not None:
        failure.type = error.type
        failure.remote_traceback = error.traceback
        if error.traceback:
            failure.add_note(f"In the worker:\n{error.traceback}")
    return failure


def _known(task: Task | None, task_id: bytes) -> Task:
    if task is None:
        raise TaskUnknown(f"there is no task {id_to_text(task_id)}, or it is no longer kept")
    return task


def _deadline_s(timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    check_number("timeout_s", timeout_s, 0, TTL_MAX_S)
    return time.monotonic() + timeout_s


def _left_s(deadline_s: float | None) -> float:
    """Seconds left, within what one wait of a store may take."""
    if deadline_s is None:
        return WAIT_MAX_S
    return min(max(0.0, deadline_s - time.monotonic()), WAIT_MAX_S)


def _chunks(ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (ids[start : start + BATCH_MAX] for start in range(0, len(ids), BATCH_MAX))
