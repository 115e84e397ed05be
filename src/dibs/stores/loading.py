"""A load on its way into a store: chunks are staged several at a time, then one commit makes all of them visible."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from dibs.errors import InvalidInput, InvalidOption, StoreError, UnknownChunk
from dibs.ids import chunk_id_of, id_to_text, new_id
from dibs.stores.protocol import Store
from dibs.task import CHUNKS_MAX, Committed, Rows, Staged

T = TypeVar("T")

CHUNKS_IN_FLIGHT = 4
UNNAMED_KEEP_S = 86_400.0
"""How long the name of a load that was given none is kept: nobody will repeat it."""


class Ask(Protocol):
    """How a load reaches its store."""

    async def __call__(self, question: Callable[[Store], Awaitable[T]]) -> T: ...


def asking(store: Store) -> Ask:
    """Returns the way to a store that is open."""

    async def ask(question: Callable[[Store], Awaitable[T]]) -> T:
        return await question(store)

    return ask


def new_name() -> str:
    """Returns a name for a load that is given none."""
    return f"load-{id_to_text(new_id())}"


async def is_committed(store: Store, tenant: str, name: str, seq: int = 0) -> bool:
    """Whether a load has come so far. Asked by a commit of a chunk that nobody staged, which can change nothing."""
    try:
        return (await store.commit_load(tenant, name, seq, [new_id(tenant)])).already
    except UnknownChunk:
        return False


class Load:
    """Chunks that become visible together, or never.

    With a `name` the ids of chunks and rows come from it, so that the same load again has the same ids, and a store
    that knows the name enqueues nothing twice. Belongs to one event loop.
    """

    def __init__(self, ask: Ask, tenant: str, name: str | None = None) -> None:
        self._ask = ask
        self._tenant = tenant
        self.named = name is not None
        self.name = name if name is not None else new_name()
        self.rows = 0
        self.already = False
        """True once the store said that it knows this load: there is no point in staging more of it."""
        self._chunk_ids: list[bytes] = []
        self._in_flight: deque[asyncio.Task[Staged]] = deque()

    async def stage(self, rows: Rows) -> bytes:
        """Begins to stage a chunk, and returns its id. Waits while too many are on their way, and raises what has
        become of an earlier one."""
        number = len(self._chunk_ids)
        if number == CHUNKS_MAX:
            raise InvalidOption(f"a load has at most {CHUNKS_MAX:,} chunks, and this one {self.rows:,} rows already: "
                                "load it in parts")  # fmt: skip
        chunk_id = chunk_id_of(self._tenant, self.name, number) if self.named else new_id()
        self._chunk_ids.append(chunk_id)
        if not self.already:
            self._in_flight.append(asyncio.create_task(self._stage(chunk_id, rows, self.rows)))
        self.rows += len(rows.payloads)
        await asyncio.sleep(0)  # it begins now, and others in this loop have their turn
        # The first one is waited for: a store that refuses, or knows this load, says so before much is read.
        while len(self._in_flight) >= (CHUNKS_IN_FLIGHT if number else 1):
            await self._first()
        return chunk_id

    async def staged(self) -> Sequence[bytes]:
        """Waits until everything is staged, and returns the ids of the chunks: for a commit that is made elsewhere."""
        while self._in_flight:
            await self._first()
        return tuple(self._chunk_ids)

    async def commit(self) -> Committed:
        """Makes everything visible, now and at once."""
        await self.staged()
        if not self._chunk_ids:
            return Committed(0)
        forget_s = None if self.named else UNNAMED_KEEP_S
        done = await self._ask(
            lambda store: store.commit_load(self._tenant, self.name, 0, self._chunk_ids, forget_s=forget_s)
        )
        if done.already:
            await self.drop()
        return done

    async def drop(self) -> None:
        """Forgets what was staged; what was committed is left alone. A store that cannot is left to forget by
        itself."""
        # Those that are done may be of a loop that is gone.
        await asyncio.gather(*(task for task in self._in_flight if not task.done()), return_exceptions=True)
        while self._in_flight:
            task = self._in_flight.popleft()
            if not task.cancelled():
                task.exception()  # it is known that it failed
        if self._chunk_ids:
            with contextlib.suppress(StoreError):
                await self._ask(lambda store: store.drop(self._tenant, self._chunk_ids))

    async def _first(self) -> None:
        staged = await self._in_flight[0]
        self._in_flight.popleft()
        self.already = self.already or staged.already

    async def _stage(self, chunk_id: bytes, rows: Rows, before: int) -> Staged:
        try:
            return await self._ask(lambda store: store.stage(self._tenant, chunk_id, rows))
        except InvalidInput as error:
            if before:
                error.add_note(f"Its rows are counted after the first {before:,} of the load.")
            raise
