"""The shards of a set: which one a thing belongs to, and asking one, some or all of them at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dibs.errors import StoreCorrupt, StoreError, StoreUnavailable
from dibs.ids import key_digest, slot_of
from dibs.stores.local import LocalStore
from dibs.stores.sharded.shard import Shard
from dibs.stores.sharded.table import Membership
from dibs.task import ByKey, Rejected, TaskRef

T = TypeVar("T")
Item = TypeVar("Item")


#: A shard that fails so is passed over by what can go on with the others.
PASSED_OVER = (StoreUnavailable, StoreCorrupt)


class Shards:
    """All shards of one set, in order."""

    def __init__(self, shards: Sequence[Shard], member: Membership) -> None:
        self.all = tuple(shards)
        self.set_id = member.set_id
        self._table = member.table
        self._slots = [bytes(slot for slot, shard in enumerate(self._table) if shard == one.number) for one in shards]

    def __len__(self) -> int:
        return len(self.all)

    # ---------------------------------------------------------------------------------------------------------- whose

    def of_id(self, task_id: bytes) -> int:
        """The number of the shard that a task, or a chunk of a load, lives in."""
        return self._table[slot_of(task_id)]

    def of_ref(self, tenant: str, ref: TaskRef) -> int:
        """That of a task named by its id or by its key."""
        return self.of_id(key_digest(tenant, ref.command, ref.key) if isinstance(ref, ByKey) else ref)

    def of_name(self, tenant: str, name: str) -> int:
        """That of something of a tenant's that has a name and no id: a worker, a load."""
        return self.of_id(key_digest(tenant, "", name))

    def slots_of(self, number: int) -> bytes:
        """The slots of a shard."""
        return self._slots[number]

    def placed(self, task_id: bytes, number: int) -> bytes:
        """Returns an id like this one, in a slot of the given shard."""
        if self.of_id(task_id) == number:
            return task_id
        slots = self.slots_of(number)
        return task_id[:-1] + bytes((slots[slot_of(task_id) % len(slots)],))

    def from_on(self, start: int | None = None) -> list[Shard]:
        """All shards, beginning with the given one, or with any."""
        first = random.randrange(len(self.all)) if start is None else start % len(self.all)
        return [*self.all[first:], *self.all[:first]]

    # ---------------------------------------------------------------------------------------------------------- asking

    async def each(self, question: Callable[[LocalStore], Awaitable[T]]) -> list[T]:
        """Asks all shards at once; every one has to answer."""
        return await _all(shard.ask(question) for shard in self.all)

    async def some(self, question: Callable[[LocalStore], Awaitable[T]]) -> list[T | None]:
        """Asks all shards at once: None for one that does not answer, and an error if none does."""
        answers = await _together([shard.ask(question) for shard in self.all])
        _raise_all_but(PASSED_OVER, answers)
        down = [answer for answer in answers if isinstance(answer, PASSED_OVER)]
        if len(down) == len(answers):
            raise down[0]
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def looked(self, question: Callable[[LocalStore], Awaitable[T]]) -> list[T | None]:
        """`some`, one after the other: cheaper for looks, which wait for nothing."""
        answers: list[T | None] = []
        down: list[StoreError] = []
        for shard in self.all:
            try:
                answers.append(await shard.ask(question))
            except PASSED_OVER as error:
                answers.append(None)
                down.append(error)
        if len(down) == len(answers):
            raise down[0]
        return answers

    async def first(self, question: Callable[[LocalStore], Awaitable[T]], start: int | None = None) -> T:
        """Asks one shard after the other, until one answers."""
        down: StoreError | None = None
        for shard in self.from_on(start):
            try:
                return await shard.ask(question)
            except PASSED_OVER as error:
                down = down or error
        assert down is not None
        raise down

    async def split(
        self,
        items: Sequence[Item],
        shard_of: Callable[[Item], int],
        question: Callable[[LocalStore, Sequence[Item]], Awaitable[Sequence[T]]],
    ) -> list[T]:
        """Asks each shard about its own items, at once, and returns the answers in order; every shard that is asked
        has to answer."""
        groups = grouped(items, shard_of)
        answers = await _all(
            self.all[number].ask(lambda store, some=some: question(store, [items[index] for index in some]))  # type: ignore[misc]
            for number, some in groups.items()
        )
        return _in_order(len(items), zip(groups.values(), answers, strict=True))

    async def split_or_reject(
        self,
        groups: Mapping[int, Sequence[int]],
        question: Callable[[LocalStore, Sequence[int]], Awaitable[Sequence[T]]],
    ) -> list[T | Rejected]:
        """Asks each shard about its own items, given by their indexes; those of a shard that does not answer are
        rejected one by one, unless no shard answers at all."""
        answers = await self.outcomes(groups, question)
        down = [answer for answer in answers.values() if isinstance(answer, StoreUnavailable)]
        if down and len(down) == len(answers):
            raise down[0]
        return _in_order(
            sum(map(len, groups.values())),
            [
                (groups[number], [Rejected.of(answer)] * len(groups[number]))
                if isinstance(answer, StoreUnavailable)
                else (groups[number], answer)
                for number, answer in answers.items()
            ],
        )

    async def outcomes(
        self,
        groups: Mapping[int, Sequence[int]],
        question: Callable[[LocalStore, Sequence[int]], Awaitable[Sequence[T]]],
    ) -> dict[int, Sequence[T] | StoreUnavailable]:
        """Asks each shard about its own items, and returns what became of it."""
        answers = await _together(
            [self.all[number].ask(lambda store, some=some: question(store, some)) for number, some in groups.items()]  # type: ignore[misc]
        )
        _raise_all_but((StoreUnavailable,), answers)
        return dict(zip(groups, answers, strict=True))  # type: ignore[arg-type]  # other errors have been raised


def grouped(items: Sequence[Item], shard_of: Callable[[Item], int], but: Sequence[int] = ()) -> dict[int, list[int]]:
    """Returns the indexes of each shard's items, in order, but for those that are left out."""
    groups: dict[int, list[int]] = {}
    out = frozenset(but)
    for index, item in enumerate(items):
        if index not in out:
            groups.setdefault(shard_of(item), []).append(index)
    return groups


async def _all(questions: Iterable[Awaitable[T]]) -> list[T]:
    """Waits for all, also when one fails: a call is over when nothing of it is under way any more."""
    answers = await _together([*questions])
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[return-value]  # those that are errors have been raised


async def _together(questions: Sequence[Awaitable[T]]) -> Sequence[T | BaseException]:
    if len(questions) != 1:
        return await asyncio.gather(*questions, return_exceptions=True)
    # One shard, as for most calls: without the detour through a task of its own.
    try:
        return [await questions[0]]
    except Exception as error:  # noqa: BLE001 what it is, is for the caller to see
        return [error]


def _raise_all_but(passed: tuple[type[StoreError], ...], answers: Iterable[object]) -> None:
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, passed):
            raise answer


def _in_order(count: int, answers: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> list[Any]:
    merged: list[Any] = [None] * count
    for indexes, some in answers:
        for index, answer in zip(indexes, some, strict=True):
            merged[index] = answer
    return merged
