"""What a store on this machine does beside the queue's verbs: it has a doctor, can be measured and copied."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence

from dibs.stores.direct import DirectStore
from dibs.stores.meter import Meter
from dibs.stores.ordered.doctor import Report


class LocalStore(DirectStore):
    """A store whose data is within reach of this process. `open_store` returns one."""

    reopens = False
    """True: what breaks of it is opened again by itself. Else whoever holds it closes it and opens it again."""

    @property
    @abc.abstractmethod
    def store_id(self) -> bytes:
        """Names this store."""

    @property
    @abc.abstractmethod
    def meter(self) -> Meter | None:
        """Who is told of the commits that this process makes. Stores of one process that share an engine share it: the
        last one that was set counts, until its store is closed."""

    @meter.setter
    @abc.abstractmethod
    def meter(self, meter: Meter | None) -> None: ...

    @abc.abstractmethod
    async def probe(self) -> Sequence[int]:
        """Raises unless the store can be written, at the place that others know it by. Goes the way of a write and
        changes nothing. Returns which shards do not answer, if others do."""

    @abc.abstractmethod
    async def doctor(self, *, mend: bool = False, slots: bytes | None = None) -> Report:
        """Checks every invariant of the store; with `mend`, repairs what it can and looks again. `slots`: of a shard,
        those that are its own; a task of another is a problem, which only who enqueued it can mend.

        Reads everything: minutes for many millions of tasks. Nothing else stops meanwhile.
        """

    @abc.abstractmethod
    async def backup(self, directory: str | os.PathLike[str]) -> None:
        """Copies the store into a new directory, while everything goes on."""
