"""Opening a set of shards, and making one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dibs.checks import Limits
from dibs.errors import (
    MissingDriver,
    ModeMismatch,
    NetworkFileSystem,
    NewerFormat,
    ShardMismatch,
    StoreError,
    StoreMissing,
    UnknownScheme,
)
from dibs.settings import mask
from dibs.stores.local import LocalStore
from dibs.stores.sharded.shard import Opener, Shard
from dibs.stores.sharded.shards import Shards
from dibs.stores.sharded.store import ShardedStore
from dibs.stores.sharded.table import WHOLE, Membership, check, join, membership_of, new_membership
from dibs.stores.sharded.urls import Named

#: What is wrong with how a store is asked for, rather than with the store: no later try would help.
ASKED_WRONG = (UnknownScheme, MissingDriver, ModeMismatch, NewerFormat, NetworkFileSystem)


async def open_shards(named: Named, opener: Opener, limits: Limits, *, create: bool) -> ShardedStore:
    """Opens the set, or makes it. Of a set that exists some shards may be down: they are tried again later."""
    named.check_place()
    urls = named.shard_urls(named.count or await _count(named, opener, create))
    found: list[LocalStore | StoreError] = []
    try:
        for url in urls:
            found.append(await _opened(url, opener))
        known = await _known(urls, found, opener) or await _make(urls, found, opener, create)
    except BaseException:
        for one in found:
            await _close(one)
        raise
    shards = [
        Shard(url, known.of(number), opener, one) for number, (url, one) in enumerate(zip(urls, found, strict=True))
    ]
    return ShardedStore(Shards(shards, known), limits)


async def _count(named: Named, opener: Opener, create: bool) -> int:
    """Asks what is there how many shards there are."""
    for url in named.candidates():
        store = await _opened(url, opener)
        if not isinstance(store, StoreError):
            async with store:
                member = await membership_of(store)
            if member is not None:
                return member.count
    if create:
        raise ShardMismatch(
            f"shards:{mask(named.base)} holds no shards yet: say how many it shall have, with ?n=4 at its end"
        )
    raise StoreMissing(f"there are no shards in {mask(named.base)}")


async def _known(urls: Sequence[str], found: list[LocalStore | StoreError], opener: Opener) -> Membership | None:
    """Returns what the shards that are there say of their set, after checking that they are who they should be; None
    if it has still to be made, at least in part. Everything here is read in the order opposite to that in which it is
    made, by somebody else perhaps at this moment."""
    for number, one in enumerate(found):
        if isinstance(one, StoreMissing) and not all(isinstance(other, StoreMissing) for other in found):
            found[number] = await _opened(urls[number], opener)
    first = found[0]
    whole = not isinstance(first, StoreError) and await first._fact(WHOLE) is not None
    members: dict[int, Membership | None] = {}
    for number, one in reversed([*enumerate(found)]):
        if not isinstance(one, StoreError):
            members[number] = await membership_of(one)
    known = next((member for member in members.values() if member is not None), None)
    if known is None or (members.get(0) is not None and not whole):
        return None
    expected = Membership(known.set_id, 0, len(urls), known.table)
    for number, member in sorted(members.items()):
        try:
            check(member, expected.of(number), mask(urls[number]))
        except ShardMismatch as error:
            if member is not None:
                raise
            await _close(found[number])
            found[number] = error
    return known


async def _make(urls: Sequence[str], found: list[LocalStore | StoreError], opener: Opener, create: bool) -> Membership:
    """Makes the set, or goes on where somebody who was making it stopped, or is about to."""
    for one in found:
        if isinstance(one, StoreError) and not (create and isinstance(one, StoreMissing)):
            raise one
    member = new_membership(len(urls))
    for number, url in enumerate(urls):
        one = found[number]
        if isinstance(one, StoreError):
            one = found[number] = await opener(url, True)
        joined = await join(one, member.of(number))
        if number == 0 and joined.count == member.count:
            # It may be another's: who was first has decided.
            member = joined
        check(joined, member.of(number), mask(url))
    first = found[0]
    assert not isinstance(first, StoreError)
    await first._fact(WHOLE, b"1")
    return member


async def _opened(url: str, opener: Opener) -> LocalStore | StoreError:
    try:
        return await opener(url, False)
    except ASKED_WRONG:
        raise
    except StoreError as error:
        return error


async def _close(one: LocalStore | StoreError) -> None:
    if not isinstance(one, StoreError):
        with contextlib.suppress(StoreError):
            await one.close()
