"""Which slot belongs to which shard: decided once, when the set is made, and kept in every shard.

Each shard holds its membership: the set's id, its own number and the whole table. So stores in another order, of
another number or of another set are told apart, whichever of them can be opened. Shard 0 gets its membership first:
who makes the set at the same time takes over what is there. When all have theirs, shard 0 notes that the set is whole:
from then on a shard without membership is not a new one but one that was lost.
"""

from __future__ import annotations

import uuid

import msgspec
from msgspec import Struct

from dibs.errors import ShardMismatch
from dibs.settings import mask
from dibs.stores.local import LocalStore
from dibs.stores.sharded.urls import SLOTS

MEMBERSHIP = "shards"
WHOLE = "shards_whole"


class Membership(Struct, frozen=True, array_like=True):
    """What a shard knows of the set it belongs to."""

    set_id: bytes
    number: int
    count: int
    table: bytes
    """The number of the shard of each slot."""

    def of(self, number: int) -> Membership:
        """The same set, as another of its shards knows it."""
        return msgspec.structs.replace(self, number=number)


def new_membership(count: int) -> Membership:
    """Returns that of shard 0 of a new set."""
    return Membership(uuid.uuid4().bytes, 0, count, bytes(slot % count for slot in range(SLOTS)))


async def membership_of(store: LocalStore) -> Membership | None:
    """Returns what a store knows of its set; None: it is in none."""
    stored = await store._fact(MEMBERSHIP)
    return None if stored is None else msgspec.msgpack.decode(stored, type=Membership)


async def join(store: LocalStore, member: Membership) -> Membership:
    """Makes a store a shard, and returns what it is a shard of: it may have been made one before. What holds tasks
    already does not become one: they would be in the wrong place."""
    used = (await store.tenants(limit=1)).tenants
    known = await membership_of(store)
    if known is None and used:
        raise ShardMismatch(
            f"what is named as shard {member.number} is a store with tasks of its own: name new stores, and move the "
            "tasks by enqueueing them there"
        )
    stored = await store._fact(MEMBERSHIP, msgspec.msgpack.encode(member))
    return msgspec.msgpack.decode(stored or b"", type=Membership)


async def check_alone(store: LocalStore, url: str) -> None:
    """Refuses a shard that is opened as if it were a whole store: what is enqueued there is in the wrong place."""
    member = await membership_of(store)
    if member is not None:
        base, _, last = url.rstrip("/").rpartition("/")
        named = base and last == str(member.number)
        whole = f"shards:{base.removeprefix('lmdb:')}" if named else "shards:[…] with all of them in their order"
        raise ShardMismatch(
            f"{mask(url)} is shard {member.number} of a set of {member.count}: open the set, {mask(whole)}"
        )


def check(found: Membership | None, member: Membership, url: str) -> None:
    """Refuses a store that is not the shard it is taken for."""
    if found is None:
        raise ShardMismatch(
            f"{url} holds nothing of its set, where shard {member.number} belongs: it was removed or replaced; "
            "restore a backup of it"
        )
    if found.count != member.count:
        raise ShardMismatch(
            f"{url} is one of {found.count} shards, and {member.count} are named: open it with n={found.count}, and "
            "make a new set for another number"
        )
    if found.set_id != member.set_id:
        raise ShardMismatch(f"{url} is a shard of another set: name the shards of one set")
    if found.number != member.number:
        raise ShardMismatch(
            f"{url} is shard {found.number} of its set and is named as shard {member.number}: name the shards in their "
            "order"
        )
    if found != member:
        raise ShardMismatch(f"{url} has another table of slots than the other shards of its set: restore a backup")
