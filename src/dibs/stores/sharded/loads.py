"""Loads over several shards.

A chunk's rows without key live in the chunk's own shard, those with a key or a `limit_key` in the shards of those.
The parts in other shards are staged first and live longer, and the part in the chunk's own shard, perhaps an empty one,
names them: if it is there, all of them are.

A commit over several shards is a decision first: kept in the load's home shard, then done in every shard it names,
each at once and once; then home notes how far the load has come and forgets the decision. A crash leaves one that is
pending; a repeat of the commit, a later commit of the same name or the sweep finishes it. Others may see one shard's
rows before another's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import monotonic

from dibs.errors import StoreUnavailable, UnknownChunk
from dibs.ids import id_to_text
from dibs.stores.batches import row_ids
from dibs.stores.local import LocalStore
from dibs.stores.sharded.shards import PASSED_OVER, Shards, grouped
from dibs.task import CHUNK_KEEP_S, Committed, Decision, Rows, Staged, StagedPart

PART_KEEP_S = CHUNK_KEEP_S + 3_600.0
#: So old a decision's maker has died, or its shard was down; a younger one is left to who made it.
ABANDONED_S = 5.0
#: A load that has not come to its decision by then has died on the way: others may have its chunks.
HOLD_S = 60.0


async def stage(shards: Shards, tenant: str, chunk_id: bytes, rows: Rows, keep_s: float) -> Staged:
    """Stores a chunk where its rows belong."""
    # In any shard: staged again with other keys, its rows would be elsewhere than those that were committed.
    if len(shards) > 1 and any(await shards.some(lambda store: store._has_rows(tenant, chunk_id))):
        return Staged(len(rows.payloads), already=True)
    own = shards.of_id(chunk_id)
    home = shards.all[own]
    ids = row_ids(tenant, chunk_id, rows) if rows.bound() and len(shards) > 1 else []
    groups = grouped(ids, shards.of_id)
    mine = groups.pop(own, [])
    if not groups:
        return await home.ask(lambda store: store._stage(tenant, chunk_id, rows, keep_s=keep_s))

    # Staged before, in whatever parts: what it names must not be half of the one and half of the other.
    async def clear(store: LocalStore) -> None:
        if (await store._staged(tenant, [chunk_id]))[0] is not None:
            await store._drop(tenant, [chunk_id])

    async def put(store: LocalStore, some: Sequence[int]) -> Sequence[None]:
        part, part_ids = rows.part(some), [ids[row] for row in some]
        await store._stage(tenant, chunk_id, part, part_ids, keep_s=keep_s + PART_KEEP_S - CHUNK_KEEP_S)
        return [None] * len(some)

    await home.ask(clear)
    for answer in (await shards.outcomes(groups, put)).values():
        if isinstance(answer, StoreUnavailable):
            raise answer
    staged = await home.ask(
        lambda store: store._stage(
            tenant, chunk_id, rows.part(mine), [ids[row] for row in mine], sorted(groups), keep_s
        )
    )
    return Staged(len(rows.payloads), staged.already)


async def commit_load(
    shards: Shards, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], forget_s: float | None
) -> Committed:
    """Commits chunks in all the shards that hold rows of them, as one decision."""
    if len(shards) == 1:
        return await shards.all[0].ask(lambda store: store._commit_load(tenant, name, seq, chunk_ids, forget_s))
    home = shards.all[shards.of_name(tenant, name)]
    while True:
        state = await home.ask(lambda store: store._load_state(tenant, name))
        if state.pending is not None:
            await finish(shards, state.pending)
            continue
        if state.seq >= seq:
            return Committed(0, already=True)
        reserved_s = monotonic()
        by_shard, rows = await _reserve(shards, tenant, name, chunk_ids)
        if monotonic() > reserved_s + HOLD_S / 2:
            continue
        decision = Decision(tenant=tenant, name=name, seq=seq, chunk_ids=by_shard, forget_s=forget_s)
        if await home.ask(lambda store: store._decide(decision)):  # noqa: B023 asked at once
            await finish(shards, decision)
            return Committed(rows)


async def finish(shards: Shards, decision: Decision) -> None:
    """Does what was decided in every shard where it is not done, then forgets the decision."""
    pairs = [(number, chunk_id) for number, ids in enumerate(decision.chunk_ids) for chunk_id in ids]

    async def commit(store: LocalStore, some: Sequence[tuple[int, bytes]]) -> Sequence[None]:
        await store._commit_chunks(decision.tenant, [chunk_id for _, chunk_id in some])
        return [None] * len(some)

    await shards.split(pairs, lambda pair: pair[0], commit)
    home = shards.all[shards.of_name(decision.tenant, decision.name)]
    await home.ask(lambda store: store._done(decision))


async def finish_abandoned(shards: Shards) -> None:
    """Finishes what somebody decided and did not live to see done. What needs a shard that is down waits for it."""
    for found in await shards.some(lambda store: store._decisions(ABANDONED_S)):
        for decision in found or ():
            with contextlib.suppress(*PASSED_OVER):
                await finish(shards, decision)


async def drop(shards: Shards, tenant: str, chunk_ids: Sequence[bytes]) -> int:
    """Forgets chunks, all their parts; those of a decision that is pending are committed, if not everywhere yet."""
    decided = {
        chunk_id
        for decisions in await shards.each(lambda store: store._decisions(0))
        for decision in decisions
        if decision.tenant == tenant
        for ids in decision.chunk_ids
        for chunk_id in ids
    }
    left = [chunk_id for chunk_id in dict.fromkeys(chunk_ids) if chunk_id not in decided]
    held = await shards.split(left, shards.of_id, lambda store, some: store._staged(tenant, some))
    waiting = [(chunk_id, part) for chunk_id, part in zip(left, held, strict=True) if part is not None]

    # The part that names the others first: from then on no commit finds the chunk.
    async def forget(store: LocalStore, some: Sequence[bytes]) -> Sequence[int]:
        return [await store._drop(tenant, some), *[0] * (len(some) - 1)]

    dropped = sum(await shards.split([chunk_id for chunk_id, _ in waiting], shards.of_id, forget))
    elsewhere = [(number, chunk_id) for chunk_id, part in waiting for number in part.parts]
    await shards.split(
        elsewhere, lambda pair: pair[0], lambda store, some: forget(store, [chunk_id for _, chunk_id in some])
    )
    return dropped


async def _reserve(shards: Shards, tenant: str, name: str, chunk_ids: Sequence[bytes]) -> tuple[list[list[bytes]], int]:
    """Keeps chunks for a load that is about to be decided: two loads at once do not both get one. Returns the chunks of
    each shard, in order, and how many rows they have; without one of them there is no commit."""

    async def hold(hold_s: float) -> Sequence[StagedPart | None]:
        return await shards.split(
            chunk_ids, shards.of_id, lambda store, some: store._reserve(tenant, some, name, hold_s)
        )

    own = await hold(HOLD_S)
    try:
        return await _found(shards, tenant, chunk_ids, own)
    except UnknownChunk:
        await hold(0)
        raise


async def _found(
    shards: Shards, tenant: str, chunk_ids: Sequence[bytes], own: Sequence[StagedPart | None]
) -> tuple[list[list[bytes]], int]:
    pairs = [
        (number, chunk_id)
        for chunk_id, part in zip(chunk_ids, own, strict=True)
        if part is not None
        for number in part.parts
    ]
    others = await shards.split(
        pairs, lambda pair: pair[0], lambda store, some: store._staged(tenant, [chunk_id for _, chunk_id in some])
    )
    by_shard: list[list[bytes]] = [[] for _ in shards.all]
    rows = 0
    held: dict[tuple[int, bytes], StagedPart | None] = dict(zip(pairs, others, strict=True))
    for chunk_id, part in zip(chunk_ids, own, strict=True):
        numbers = [shards.of_id(chunk_id), *([] if part is None else part.parts)]
        for number in numbers:
            found = part if number == numbers[0] else held[(number, chunk_id)]
            if found is None:
                raise UnknownChunk(
                    f"chunk {id_to_text(chunk_id)} is not staged: it never was, was dropped, has expired or is "
                    "committed; nothing of this load was committed"
                )
            by_shard[number].append(chunk_id)
            rows += found.rows
    return by_shard, rows
