"""Loads over several shards.

A chunk's rows without key live in the chunk's own shard, those with a key or a `limit_key` in the shards of those.
The parts in other shards are staged first and live longer, and the part in the chunk's own shard, perhaps an empty one,
names them; all have the same `content`, so that no commit takes half of one staging and half of another.

A commit over several shards is a decision. First the load *holds* every part: nobody stages, drops or commits it then
who does not ask the load's home shard first. Then the decision is kept there; then it is done in every shard it names,
each at once and once; then home notes how far the load has come and forgets the decision. A crash leaves one that is
pending; a repeat of the commit, a later commit of the same name, the sweep or whoever wants one of the parts finishes
it. Others may see one shard's rows before another's.

Whoever asks for a held part finishes what is decided. If nothing is, home is told that the load may not decide on what
it holds: its commit begins anew. Then the part is free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct

from dibs.errors import StoreError, StoreUnavailable, UnknownChunk
from dibs.ids import id_to_text
from dibs.stores.batches import row_ids
from dibs.stores.local import LocalStore
from dibs.stores.sharded.shards import PASSED_OVER, Shards, grouped
from dibs.task import CHUNK_KEEP_S, Committed, Decision, Rows, Staged, StagedPart

PART_KEEP_S = CHUNK_KEEP_S + 3_600.0
#: So old a decision's maker has died, or its shard was down; a younger one is left to who made it.
ABANDONED_S = 5.0
#: A load that has not come to its decision by then has died on the way: other loads may have its chunks.
HOLD_S = 60.0
_CONTENT_BYTES = 16


class Part(Struct, frozen=True, gc=False):
    """A chunk, or what one shard has of it."""

    number: int
    """The shard's."""
    chunk_id: bytes


# --------------------------------------------------------------------------------------------------------------- stage


async def stage(shards: Shards, tenant: str, chunk_id: bytes, rows: Rows, keep_s: float) -> Staged | None:
    """Stores a chunk where its rows belong."""
    if len(shards) == 1:
        return await shards.all[0].ask(lambda store: store._stage(tenant, chunk_id, rows, keep_s=keep_s))
    own = shards.of_id(chunk_id)
    ids = row_ids(tenant, chunk_id, rows) if rows.bound() else []
    groups = grouped(ids, shards.of_id)
    content = blake2b(msgspec.msgpack.encode(rows), digest_size=_CONTENT_BYTES).digest()

    async def put(store: LocalStore, some: Sequence[int]) -> Sequence[Staged | None]:
        part, part_ids = rows.part(some), [ids[row] for row in some]
        part_keep_s = keep_s + PART_KEEP_S - CHUNK_KEEP_S
        return [await store._stage(tenant, chunk_id, part, part_ids, (), part_keep_s, content)] * len(some)

    async def put_own(store: LocalStore) -> Staged | None:
        if not groups:
            return await store._stage(tenant, chunk_id, rows, keep_s=keep_s, content=content)
        part, part_ids = rows.part(mine), [ids[row] for row in mine]
        return await store._stage(tenant, chunk_id, part, part_ids, sorted(groups), keep_s, content)

    mine = groups.pop(own, [])
    while True:
        # In any shard: staged again with other keys, its rows would be elsewhere than those that were committed.
        if any(await shards.some(lambda store: store._has_rows(tenant, chunk_id))):
            return Staged(len(rows.payloads), already=True)
        answers: list[Staged | None] = []
        for outcome in (await shards.outcomes(groups, put)).values():
            if isinstance(outcome, StoreUnavailable):
                raise outcome
            answers.append(outcome[0])
        if None not in answers:
            answers.append(await shards.all[own].ask(put_own))
        if None not in answers:
            return Staged(len(rows.payloads), any(answer is not None and answer.already for answer in answers))
        await _free(shards, tenant, await _all_parts(shards, tenant, [chunk_id], groups))


# -------------------------------------------------------------------------------------------------------------- commit


async def commit_load(
    shards: Shards, tenant: str, name: str, seq: int, chunk_ids: Sequence[bytes], forget_s: float | None
) -> Committed:
    """Commits chunks in all the shards that hold rows of them, as one decision."""
    if len(shards) == 1:
        return await shards.all[0].ask(lambda store: store._commit_load(tenant, name, seq, chunk_ids, forget_s))
    home = shards.all[shards.of_name(tenant, name)]
    while True:
        seen = await home.ask(lambda store: store._load_state(tenant, name))
        if seen.pending is not None:
            await finish(shards, seen.pending)
            continue
        if seen.seq >= seq:
            return Committed(0, already=True)
        try:
            held = await _reserve(shards, tenant, name, chunk_ids)
        except UnknownChunk:
            # Unless somebody else has made this commit, or has staged a chunk again meanwhile.
            if await home.ask(lambda store: store._load_state(tenant, name)) != seen:
                continue
            await _let_go(shards, tenant, name, chunk_ids)
            raise
        except StoreError:
            await _let_go(shards, tenant, name, chunk_ids)
            raise
        by_shard: list[list[bytes]] = [[] for _ in shards.all]
        for part, rows in held:
            if rows:
                by_shard[part.number].append(part.chunk_id)
        empty = [part.chunk_id for part, rows in held if not rows]
        wanted = Decision(tenant=tenant, name=name, seq=seq, chunk_ids=by_shard, empty=empty, forget_s=forget_s)
        decision = await home.ask(lambda store: store._decide(wanted, seen))  # noqa: B023 asked at once
        if decision is not None:
            await finish(shards, decision)
            return Committed(sum(rows for _, rows in held))


async def finish(shards: Shards, decision: Decision) -> None:
    """Does what was decided in every shard where it is not done, then forgets the decision."""

    async def commit(store: LocalStore, some: Sequence[Part]) -> Sequence[None]:
        chunk_ids = [part.chunk_id for part in some]
        await store._commit_chunks(decision.tenant, chunk_ids, decision.decided_ms)
        return [None] * len(some)

    parts = [Part(number, chunk_id) for number, ids in enumerate(decision.chunk_ids) for chunk_id in ids]
    await shards.split(parts, lambda part: part.number, commit)
    # Their commit leaves nothing behind: before it, all that they name has to be committed.
    empty = [Part(shards.of_id(chunk_id), chunk_id) for chunk_id in decision.empty]
    await shards.split(empty, lambda part: part.number, commit)
    home = shards.all[shards.of_name(decision.tenant, decision.name)]
    await home.ask(lambda store: store._done(decision))


async def finish_abandoned(shards: Shards) -> None:
    """Finishes what somebody decided and did not live to see done. What needs a shard that is down waits for it."""
    for found in await shards.some(lambda store: store._decisions(ABANDONED_S)):
        for decision in found or ():
            with contextlib.suppress(*PASSED_OVER):
                await finish(shards, decision)


async def _reserve(shards: Shards, tenant: str, name: str, chunk_ids: Sequence[bytes]) -> list[tuple[Part, int]]:
    """Holds all parts of chunks for a load that is about to be decided. Returns them, in the order of the chunks, and
    how many rows each has; without one of them there is no commit."""
    parts = [Part(shards.of_id(chunk_id), chunk_id) for chunk_id in chunk_ids]
    own = await _hold(shards, tenant, name, parts)
    others = [Part(number, chunk.chunk_id) for chunk, held in zip(parts, own, strict=True) for number in held.parts]
    contents = {chunk_id: held.content for chunk_id, held in zip(chunk_ids, own, strict=True)}
    # Who has the own part has the others: what another load still holds of them, it has lost.
    elsewhere = await _hold(shards, tenant, name, others, takes=True)
    for part, held in zip(others, elsewhere, strict=True):
        if held.content != contents[part.chunk_id]:
            raise _unknown(part.chunk_id)
    order = {chunk_id: place for place, chunk_id in enumerate(chunk_ids)}
    found = [*zip(parts, own, strict=True), *zip(others, elsewhere, strict=True)]
    return sorted([(part, held.rows) for part, held in found], key=lambda one: order[one[0].chunk_id])


async def _hold(
    shards: Shards, tenant: str, name: str, parts: Sequence[Part], *, takes: bool = False
) -> list[StagedPart]:
    """Holds parts for a load. One that another load holds is that load's, unless it has died or this one `takes` it."""
    while True:
        answers = await shards.split(
            parts,
            lambda part: part.number,
            lambda store, some: store._reserve(tenant, [part.chunk_id for part in some], name, HOLD_S),
        )
        mine: list[StagedPart] = []
        others: list[Part] = []
        for part, answer in zip(parts, answers, strict=True):
            if answer is None or (answer.holder not in ("", name) and not (answer.lapsed or takes)):
                raise _unknown(part.chunk_id)
            if answer.holder == name:
                mine.append(answer)
            elif answer.holder:
                others.append(part)
        if len(mine) == len(parts):
            return mine
        await _free(shards, tenant, others)


async def _let_go(shards: Shards, tenant: str, name: str, chunk_ids: Sequence[bytes]) -> None:
    """Gives back what a load holds that will not be committed. Where a shard does not answer, others ask for it."""
    with contextlib.suppress(StoreError):
        await _free(shards, tenant, await _all_parts(shards, tenant, chunk_ids), name)


def _unknown(chunk_id: bytes) -> UnknownChunk:
    return UnknownChunk(
        f"chunk {id_to_text(chunk_id)} is not staged: it never was, was dropped, has expired or is committed; "
        "nothing of this load was committed"
    )


# ---------------------------------------------------------------------------------------------------------------- drop


async def drop(shards: Shards, tenant: str, chunk_ids: Sequence[bytes]) -> int:
    """Forgets chunks, all their parts; those of a decision that is pending are committed, if not everywhere yet."""
    chunk_ids = list(dict.fromkeys(chunk_ids))
    parts = await _all_parts(shards, tenant, chunk_ids)
    await _free(shards, tenant, parts)

    async def forget(store: LocalStore, some: Sequence[Part]) -> Sequence[int]:
        return [await store._drop(tenant, [part.chunk_id for part in some]), *[0] * (len(some) - 1)]

    # The part that names the others first: from then on no commit finds the chunk.
    own, others = parts[: len(chunk_ids)], parts[len(chunk_ids) :]
    dropped = await shards.split(own, lambda part: part.number, forget)
    await shards.split(others, lambda part: part.number, forget)
    return sum(dropped)


# ---------------------------------------------------------------------------------------------------------- held parts


async def _all_parts(shards: Shards, tenant: str, chunk_ids: Sequence[bytes], also: Iterable[int] = ()) -> list[Part]:
    """Returns the parts of chunks: those in the chunks' own shards, in order, then the others that these name, and
    those in some shards besides."""
    own = [Part(shards.of_id(chunk_id), chunk_id) for chunk_id in chunk_ids]
    found = await shards.split(
        own, lambda part: part.number, lambda store, some: store._staged(tenant, [part.chunk_id for part in some])
    )
    named = [
        Part(number, part.chunk_id)
        for part, staged in zip(own, found, strict=True)
        for number in sorted({*also, *(staged.parts if staged is not None else ())})
    ]
    return [*own, *named]


async def _free(shards: Shards, tenant: str, parts: Sequence[Part], only: str | None = None) -> None:
    """Ends the hold that loads, or a single one, have on parts, in the shards that answer: finishes what they have
    decided, or sees to it that they do not decide before they have reserved anew."""

    async def look(store: LocalStore, some: Sequence[int]) -> Sequence[StagedPart | None]:
        return await store._staged(tenant, [parts[index].chunk_id for index in some])

    groups = grouped(parts, lambda part: part.number)
    by_holder: dict[str, list[tuple[Part, int]]] = {}
    for number, answer in (await shards.outcomes(groups, look)).items():
        for index, staged in zip(groups[number], () if isinstance(answer, StoreUnavailable) else answer, strict=False):
            if staged is not None and staged.holder and only in (None, staged.holder):
                by_holder.setdefault(staged.holder, []).append((parts[index], staged.hold))

    async def release(store: LocalStore, some: Sequence[tuple[Part, int]]) -> Sequence[None]:
        await store._release(tenant, [(part.chunk_id, hold) for part, hold in some])
        return [None] * len(some)

    for name, holds in by_holder.items():
        home = shards.all[shards.of_name(tenant, name)]
        pending = await home.ask(lambda store: store._fence(tenant, name))  # noqa: B023 asked at once
        if pending is None:
            await shards.split(holds, lambda hold: hold[0].number, release)
        else:
            await finish(shards, pending)
