"""Caps over several shards: what is in progress in all of them counts.

A claim tells each shard what is in progress in the others, and claims of one store wait for each other where there is a
cap. Two processes may still take at the same moment, each in another shard, and neither sees what the other has not
committed. So a claim counts again after its commits and puts back what is over, before anybody gets it: of two claims
the one that committed later has seen the other. Nothing over a cap is ever handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dibs.stores.local import LocalStore
from dibs.stores.sharded.shards import Shards
from dibs.task import ALL_COMMANDS, Elsewhere, InFlight, Lease


class HasCaps(Exception):
    """A shard that was asked without saying what is in progress elsewhere has caps."""


class InProgress:
    """What was in progress in each shard, under the caps of some queues, when it was counted. A shard that is down does
    not count."""

    def __init__(self, by_shard: Sequence[Mapping[tuple[str, str], InFlight] | None]) -> None:
        self._caps: dict[tuple[str, str], int] = {}
        self._leased: list[dict[tuple[str, str], int]] = []
        for found in by_shard:
            self._caps |= {name: one.cap for name, one in (found or {}).items()}
            self._leased.append({name: one.leased for name, one in (found or {}).items()})

    def elsewhere(self, number: int, tenant: str, commands: Sequence[str]) -> Elsewhere:
        """What counts for a tenant's caps in a shard beside what is in progress in it."""
        names = [(tenant, command) for command in (ALL_COMMANDS, *commands)]
        return {name: self._total(name) - self._leased[number].get(name, 0) for name in names if name in self._caps}

    def took(self, number: int, leases: Sequence[Lease]) -> None:
        """Counts what was claimed since."""
        leased = self._leased[number]
        for lease in leases:
            for name in ((lease.tenant, lease.command), (lease.tenant, ALL_COMMANDS)):
                leased[name] = leased.get(name, 0) + 1

    def room(self, tenant: str, commands: Sequence[str]) -> int | None:
        """How many more of a tenant's tasks can be claimed, as far as caps tell; None: any number."""
        rooms = [self._room((tenant, command)) for command in commands]
        own = None if None in rooms else sum(room or 0 for room in rooms)
        whole = self._room((tenant, ALL_COMMANDS))
        return own if whole is None else whole if own is None else min(own, whole)

    def over(self, leases: Sequence[Lease]) -> list[Lease]:
        """Which of the leases have to be put back so that no cap is exceeded."""
        back: list[Lease] = []
        # The tenant's cap last: what its queues put back counts for it.
        for name in sorted(self._caps, key=lambda name: name[1] == ALL_COMMANDS):
            mine = _under(name, leases)
            left = [lease for lease in mine if lease not in back]
            excess = self._total(name) - self._caps[name] - (len(mine) - len(left))
            if excess > 0:
                back += left[-excess:]
        return back

    def in_all(self) -> dict[tuple[str, str], InFlight]:
        """The same for all shards together."""
        return {name: InFlight(self._total(name), cap) for name, cap in self._caps.items()}

    def _total(self, name: tuple[str, str]) -> int:
        return sum(leased.get(name, 0) for leased in self._leased)

    def _room(self, name: tuple[str, str]) -> int | None:
        return max(0, self._caps[name] - self._total(name)) if name in self._caps else None


async def counted(shards: Shards, tenants: Sequence[str], commands: Sequence[str]) -> InProgress:
    """Counts what is in progress under the caps of these tenants and queues."""
    return InProgress(await shards.looked(lambda store: store._in_flight(tenants, commands)))


async def note_due(shards: Shards, tenant: str, commands: Sequence[str]) -> None:
    """Has every shard note what is due: a lease that ran out does not count, wherever it is."""

    async def note(store: LocalStore) -> None:
        if await store._any_due(tenant, commands):
            for command in commands:
                await store._claim(tenant, [command], 0, None, "", None)

    await shards.looked(note)


def _under(name: tuple[str, str], leases: Sequence[Lease]) -> list[Lease]:
    tenant, command = name
    return [lease for lease in leases if lease.tenant == tenant and command in (ALL_COMMANDS, lease.command)]
