"""A store that reaches its data itself, not through a server: it waits by subscribing, and it can be a shard.

Beside the queue's verbs it has those by which :mod:`dibs.stores.sharded` makes several stores one, and by which a
server finds out who holds what. They are called by those two, with sound input.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from dibs import checks
from dibs.stores.batches import slices
from dibs.stores.protocol import Store
from dibs.stores.waiting import no_hint, wait_for
from dibs.stores.wakeups import Ended, Ready
from dibs.task import (
    CHUNK_KEEP_S,
    NOTHING,
    Decision,
    Elsewhere,
    InFlight,
    Lease,
    LoadState,
    Look,
    Marks,
    ReadyTenants,
    Rows,
    Staged,
    StagedPart,
    Task,
    TurnsTaken,
)


class DirectStore(Store):
    """What a store implements that is no client of a server."""

    async def held(self, tenant: str, ids: Sequence[bytes], worker: str) -> list[bytes | None]:
        """Returns the tokens of the leases that a worker of this name holds; None: it does not hold that task.

        For clients that know no token. A name proves nothing: whoever asks has to know who the worker is.
        """
        checks.check_tenant(tenant)
        checks.check_label("worker", worker)
        for task_id in ids:
            checks.check_id(task_id)
        return [token for batch in slices(ids) for token in await self._held(tenant, batch, worker)]

    # --------------------------------------------------------------------------------------------- waiting, by looking

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
        if not wait_s:
            return await self._claim(tenant, commands, limit, lease_s, worker, claim_id)
        if claim_id is not None and (repeated := await self._claimed(tenant, claim_id)):
            return repeated
        due_s: float | None = None

        # A claim that finds nothing would still have to wait its turn to write: looking is cheaper.
        async def look() -> list[Lease]:
            nonlocal due_s
            due_s = await self._ready_in_s(tenant, commands)
            return await self._claim(tenant, commands, limit, lease_s, worker, claim_id) if due_s == 0 else []

        async def pause_s() -> float | None:
            return due_s

        topics = [Ready(tenant, command) for command in commands]
        return await wait_for(self.subscribe(topics, limit), look, pause_s, wait_s)

    async def _unclaim(self, tenant: str, claim_id: bytes) -> int:
        leases = await self._claimed(tenant, claim_id)
        if not leases:
            return 0
        await self._undo_claim(leases)
        return len(leases)

    async def _wait(self, tenant: str, ids: Sequence[bytes], wait_s: float) -> Sequence[Task | None]:
        return await wait_by_looking(self, tenant, ids, wait_s)

    # ------------------------------------------------------------------------------------------------- what is beneath

    @abc.abstractmethod
    async def _held(self, tenant: str, ids: Sequence[bytes], worker: str) -> Sequence[bytes | None]: ...

    @abc.abstractmethod
    async def _marks(self, tenant: str, every: int, after: bytes | None, until: bytes | None = None) -> Marks:
        """`until`: as far as this id, and then with a cursor, also if there is nothing behind it."""

    @abc.abstractmethod
    async def _claim(
        self,
        tenant: str,
        commands: Sequence[str],
        limit: int,
        lease_s: float | None,
        worker: str,
        claim_id: bytes | None,
        elsewhere: Elsewhere = NOTHING,
    ) -> list[Lease]:
        """`elsewhere`: what counts for the caps beside what is in progress here."""

    @abc.abstractmethod
    async def _claimed(self, tenant: str, claim_id: bytes) -> list[Lease] | None:
        """The leases of an earlier claim of this id that are still alive; None: no such claim is known here."""

    @abc.abstractmethod
    async def _undo_claim(self, leases: Sequence[Lease]) -> None:
        """Puts back what was claimed and never reached anybody, as if it had not been claimed; what was taken back
        meanwhile is left alone."""

    @abc.abstractmethod
    async def _ready_in_s(self, tenant: str, commands: Sequence[str]) -> float | None:
        """In how many seconds a claim may find something: 0 for now, None if nothing is known to become due."""

    @abc.abstractmethod
    async def _look(self, tenant: str, commands: Sequence[str], elsewhere: Elsewhere) -> Look:
        """`_ready_in_s`, with what is in progress in other shards, and whether caps make that matter."""

    @abc.abstractmethod
    async def _in_flight(self, tenants: Sequence[str], commands: Sequence[str]) -> Mapping[tuple[str, str], InFlight]:
        """What is in progress under those caps that are set: of the tenants, as the command `*`, and of these queues of
        theirs. Cheap, above all where none is set."""

    @abc.abstractmethod
    async def _any_due(self, tenant: str, commands: Sequence[str]) -> bool:
        """Whether a claim from one of these queues would first note what time has done, such as leases that ran out."""

    @abc.abstractmethod
    async def _ready_tenants(self, commands: Sequence[str], after: str, limit: int, *, itself: bool) -> ReadyTenants:
        """The next tenants behind a name, or from it on, that may have something ready in queues of these commands."""

    @abc.abstractmethod
    async def _claim_turns(
        self,
        turns: Sequence[tuple[str, int]],
        commands: Sequence[str],
        lease_s: float | None,
        worker: str,
        claim_id: bytes | None,
        elsewhere: Elsewhere,
        *,
        further: bool,
    ) -> TurnsTaken:
        """This store's part of a claim of all tenants: from each named tenant at most so many. `further`: the same
        claim has been here before."""

    @abc.abstractmethod
    async def _stage(
        self,
        tenant: str,
        chunk_id: bytes,
        rows: Rows,
        ids: Sequence[bytes] | None = None,
        parts: Sequence[int] = (),
        keep_s: float = CHUNK_KEEP_S,
        content: bytes = b"",
    ) -> Staged | None:
        """`ids`: those of the rows, if they are not their whole chunk. `parts`: the shards that hold the others.
        `content`: the same for all parts of the same rows. None: a load holds the chunk, with other rows."""

    @abc.abstractmethod
    async def _has_rows(self, tenant: str, chunk_id: bytes) -> bool:
        """Whether rows of this chunk that were committed are here."""

    @abc.abstractmethod
    async def _staged(self, tenant: str, chunk_ids: Sequence[bytes]) -> Sequence[StagedPart | None]:
        """What is held of each chunk; None: it does not wait for a commit here."""

    @abc.abstractmethod
    async def _reserve(
        self, tenant: str, chunk_ids: Sequence[bytes], holder: str, hold_s: float
    ) -> Sequence[StagedPart | None]:
        """`_staged`; if all wait for a commit, and no other load holds one, they are kept for the load `holder`: nobody
        stages or drops them until `_release`. After `hold_s` others may ask what became of the holder."""

    @abc.abstractmethod
    async def _release(self, tenant: str, holds: Sequence[tuple[bytes, int]]) -> None:
        """Ends reservations of chunks, each named by its number. The holder's load has to be fenced before."""

    @abc.abstractmethod
    async def _commit_chunks(self, tenant: str, chunk_ids: Sequence[bytes], at_ms: int) -> None:
        """Does this store's part of a decision that is kept elsewhere: commits what is there of the chunks, in time or
        not, as of the time of the decision. Done again it changes nothing."""

    @abc.abstractmethod
    async def _decide(self, decision: Decision, seen: LoadState) -> Decision | None:
        """Keeps a decision that is to be done on several shards, of which this is the home of the load, and returns it
        with its time; None: the load is not as it was seen before."""

    @abc.abstractmethod
    async def _fence(self, tenant: str, name: str) -> Decision | None:
        """Returns what a load, whose home this is, has decided and may not have done. If that is nothing, no commit
        that has looked at the load before can be decided."""

    @abc.abstractmethod
    async def _load_state(self, tenant: str, name: str) -> LoadState:
        """How far a load has come whose home this is."""

    @abc.abstractmethod
    async def _decisions(self, older_s: float) -> Sequence[Decision]:
        """Decisions that were kept here so long ago, at least, and are pending; a bounded number."""

    @abc.abstractmethod
    async def _done(self, decision: Decision) -> None:
        """Notes that a load, whose home this is, has come as far as a decision that is done everywhere, and forgets the
        decision."""

    @abc.abstractmethod
    async def _fact(self, name: str, value: bytes | None = None) -> bytes | None:
        """A fact about the store itself: the first `value` given under this name, kept and returned ever after.
        None: nobody has given one."""


async def wait_by_looking(store: Store, tenant: str, ids: Sequence[bytes], wait_s: float) -> Sequence[Task | None]:
    """What `Store.wait` does, by a subscription: looks when something has ended."""

    async def look() -> Sequence[Task | None]:
        return await store._get(tenant, ids)

    def over(tasks: Sequence[Task | None]) -> bool:
        return any(task is None or task.status.ended for task in tasks)

    topics = [Ended(tenant, task_id) for task_id in dict.fromkeys(ids)]
    return await wait_for(store.subscribe(topics), look, no_hint, wait_s, over)
