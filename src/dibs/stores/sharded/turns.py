"""Fair claims over several shards: the tenants take turns over all of them, wherever their tasks are.

Whose turn it is is decided here, by looking: each shard tells which tenants may have something. Then each shard that
is needed gets one transaction with the turns that are taken there, and a tenant that has tasks in several shards gives
from one of them at a time. Where the rotation stands is a hint that each store object keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

from msgspec import Struct

from dibs.stores.local import LocalStore
from dibs.stores.ordered.fair import TURNS_PER_CLAIM, Turn
from dibs.stores.protocol import ALL_TENANTS
from dibs.stores.sharded.caps import InProgress, counted
from dibs.stores.sharded.shards import PASSED_OVER, Shards
from dibs.task import Lease, ReadyTenant, ReadyTenants, TurnsTaken


class FairCall(Struct, frozen=True, gc=False):
    """What a claim of all tenants asks of every shard."""

    commands: Sequence[str]
    lease_s: float | None
    worker: str
    claim_id: bytes | None


class Candidate(Struct, gc=False):
    """A tenant that may give something, from any of these shards."""

    name: str
    weight: int
    shards: list[int]
    in_progress: InProgress | None = None
    """If it has caps."""


class Walk:
    """Once around all tenants, beginning at a turn, some at a time; each shard by its own index."""

    def __init__(self, shards: Shards, commands: Sequence[str], turn: Turn) -> None:
        self._shards = shards
        self._commands = commands
        self._origin = turn.tenant
        self._at, self._itself, self._wrapped = turn.tenant, turn.left > 0, False
        self._from_origin = self._itself
        self.over = False

    async def next(self, limit: int) -> list[Candidate]:
        """Returns some of the next tenants, in order."""
        pages = await self._shards.looked(
            lambda store: store._ready_tenants(self._commands, self._at, limit, itself=self._itself)
        )
        page, where = merged(pages)
        found = [
            Candidate(one.name, one.weight, where[one.name], _UNCOUNTED if one.capped else None)
            for one in page.tenants
            if not self._seen(one.name)
        ]
        horizon = page.end
        if horizon is not None:
            self._at, self._itself = horizon, False
        elif self._wrapped:
            self.over = True
        else:
            self._at, self._itself, self._wrapped = "", False, True
        if self._wrapped and horizon is not None and horizon >= self._origin:
            self.over = True
        return found

    def _seen(self, name: str) -> bool:
        return self._wrapped and (name > self._origin or (self._from_origin and name == self._origin))


def merged(pages: Sequence[ReadyTenants | None]) -> tuple[ReadyTenants, dict[str, list[int]]]:
    """Returns the tenants of all shards, as far as every shard has told, and the shards of each."""
    end = min((page.end for page in pages if page is not None and page.end is not None), default=None)
    found: dict[str, ReadyTenant] = {}
    where: dict[str, list[int]] = {}
    for number, page in enumerate(pages):
        for tenant in () if page is None else page.tenants:
            if end is None or tenant.name <= end:
                known = found.get(tenant.name, tenant)
                found[tenant.name] = ReadyTenant(tenant.name, tenant.weight, known.capped or tenant.capped)
                where.setdefault(tenant.name, []).append(number)
    return ReadyTenants([found[name] for name in sorted(found)], end), where


class Turns:
    """The rotation of one store object."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._turn = Turn.anywhere()
        self._at_caps = asyncio.Lock()

    async def claim(
        self, call: FairCall, limit: int, start: int | None, give_back: Callable[[Sequence[Lease]], object]
    ) -> list[Lease]:
        """Takes at most `limit` tasks. `give_back` gets what was taken and is handed to nobody."""
        taking = Taking(self._shards, call, self._shards.from_on(start)[0].number)
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._fill(taking, limit, stack)
                over = await taking.over()
        except BaseException:
            give_back(taking.leases)
            raise
        give_back(over)
        taking.leases = [lease for lease in taking.leases if lease not in over]
        if call.claim_id is not None:
            # As a repeat would tell them: shard by shard.
            place = {shard.number: place for place, shard in enumerate(self._shards.from_on(start))}
            taking.leases.sort(key=lambda lease: place[self._shards.of_id(lease.id)])
        return taking.leases

    async def _fill(self, taking: Taking, limit: int, stack: contextlib.AsyncExitStack) -> None:
        quantum = max(1, limit // TURNS_PER_CLAIM)
        await taking.note_due()
        turn = self._turn
        walk = Walk(self._shards, taking.call.commands, turn)
        ring: list[Candidate] = []
        while (wanted := limit - len(taking.leases)) > 0:
            while not walk.over and sum(one.weight for one in ring) * quantum < wanted:
                found = await walk.next(wanted // quantum + 1)
                if not taking.capped and any(one.in_progress is not None for one in found):
                    # Claims of this store wait for each other where there are caps: all would count the same room.
                    await stack.enter_async_context(self._at_caps)
                ring += await taking.with_room(found)
            if not ring:
                return
            shares, turn = _shares(ring, turn, wanted, quantum)
            self._turn = turn
            await taking.take([(one, shares[one.name]) for one in ring if one.name in shares])
            ring = [one for one in _in_turn(ring, turn) if one.shards and taking.room(one) != 0]


def _shares(ring: Sequence[Candidate], turn: Turn, wanted: int, quantum: int) -> tuple[dict[str, int], Turn]:
    """Lets the tenants take turns until the claim would be filled; says how many each gives, and whose turn it is
    then."""
    shares: dict[str, int] = {}
    for one in itertools.cycle(ring):
        share = turn.left if turn.left and turn.tenant == one.name else one.weight * quantum
        given = min(share, wanted)
        shares[one.name] = shares.get(one.name, 0) + given
        wanted -= given
        turn = Turn(one.name, share - given)
        if wanted == 0:
            break
    return shares, turn


def _in_turn(ring: Sequence[Candidate], turn: Turn) -> list[Candidate]:
    """The same tenants, beginning with the one whose turn is next."""
    first = [one.name for one in ring].index(turn.tenant) + (0 if turn.left else 1)
    return [*ring[first:], *ring[:first]]


class Taking:
    """What one claim has taken so far, and from where."""

    def __init__(self, shards: Shards, call: FairCall, home: int) -> None:
        self._shards = shards
        self.call = call
        self._home = home
        self._been: set[int] = set()
        self.leases: list[Lease] = []
        self.capped: set[str] = set()
        """The tenants that have caps."""

    async def note_due(self) -> None:
        """Has every shard note what is due, so that it is among what there is to give."""

        async def note(store: LocalStore) -> None:
            if await store._any_due(ALL_TENANTS, self.call.commands):
                await store._claim_turns([], self.call.commands, None, "", None, {}, further=False)

        await self._shards.looked(note)

    async def with_room(self, some: Sequence[Candidate]) -> list[Candidate]:
        """Those whose caps leave anything, with what they have in progress."""
        capped = [one for one in some if one.in_progress is not None]
        if capped:
            self.capped |= {one.name for one in capped}
            in_progress = await counted(self._shards, [one.name for one in capped], self.call.commands)
            for one in capped:
                one.in_progress = in_progress
        return [one for one in some if self.room(one) != 0]

    def room(self, one: Candidate) -> int | None:
        """How much the caps of a tenant leave; None: they do not matter."""
        return None if one.in_progress is None else one.in_progress.room(one.name, self.call.commands)

    async def take(self, turns: Sequence[tuple[Candidate, int]]) -> None:
        """Takes from each tenant as many as its turn allows, from one shard after the other that may have some."""
        while turns:
            by_shard: dict[int, list[tuple[Candidate, int]]] = {}
            for one, share in turns:
                number = self._home if self._home in one.shards else one.shards[0]
                by_shard.setdefault(number, []).append((one, share))
            left: list[tuple[Candidate, int]] = []
            for number, some in by_shard.items():
                left += await self._take_here(number, some)
            turns = [(one, share) for one, share in left if one.shards and self.room(one) != 0]

    async def _take_here(self, number: int, turns: Sequence[tuple[Candidate, int]]) -> list[tuple[Candidate, int]]:
        """Takes from one shard; returns what is left of the turns. A tenant that gave less has no more here."""
        try:
            taken = await self._ask(number, turns)
        except PASSED_OVER:
            taken = TurnsTaken([], [])
        left: list[tuple[Candidate, int]] = []
        for one, share in turns:
            given = [lease for lease in taken.leases if lease.tenant == one.name]
            if one.in_progress is not None:
                one.in_progress.took(number, given)
            if len(given) < share:
                left.append((one, share - len(given)))
                if one.name not in taken.unseen:
                    one.shards.remove(number)
        return left

    async def _ask(self, number: int, turns: Sequence[tuple[Candidate, int]]) -> TurnsTaken:
        elsewhere: dict[tuple[str, str], int] = {}
        for one, _ in turns:
            if one.in_progress is not None:
                elsewhere |= one.in_progress.elsewhere(number, one.name, self.call.commands)
        call, shares = self.call, [(one.name, share) for one, share in turns]
        asked = shares, call.commands, call.lease_s, call.worker, call.claim_id, elsewhere
        further = number in self._been
        taken = await self._shards.all[number].ask(lambda store: store._claim_turns(*asked, further=further))
        self._been.add(number)
        self.leases += taken.leases
        return taken

    async def over(self) -> list[Lease]:
        """Counts again for the tenants that have caps; returns what another process has taken the room of."""
        tenants = self.capped & {lease.tenant for lease in self.leases}
        return (await counted(self._shards, [*tenants], self.call.commands)).over(self.leases) if tenants else []


_UNCOUNTED = InProgress([])
