"""``/v1/store/<verb>``: the verbs of the store as they are, in msgpack. What a remote store speaks."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from dibs.errors import InvalidOption
from dibs.server.auth import Principal
from dibs.server.gate import Gate
from dibs.server.http.problems import told
from dibs.server.http.web import MSGPACK, Answer, Request, Route, Stream
from dibs.stores.remote import verbs
from dibs.stores.remote.verbs import PATH, VERBS, WAIT_MAX_S, Verb, topic_of
from dibs.task import BATCH_MAX

_encode = msgspec.msgpack.Encoder().encode

UNCOUNTED = (verbs.REPLAY, verbs.PURGE, verbs.COMMIT_LOAD, verbs.DROP)
"""Whose lists may be longer than a batch, or may be something else: here the size of the body is what bounds them."""
UNCOUNTED_BODY_MAX_BYTES = 2 << 20
"""Room for the chunks of the largest load."""

#: What a verb may have many of. The chunks of a commit are limited by the store.
LISTS = ("tasks", "commands", "beats", "settlements", "refs", "ids", "which", "topics")

#: Does what a verb asks for. The last is the caller's trace context.
Act = Callable[[Principal, Any, str | None], Awaitable[Any]]


def verb_routes(gate: Gate) -> list[Route]:
    """Returns one route for each verb."""
    acts = _acts(gate)
    return [
        Route(
            method="POST",
            path=PATH + verb.name,
            handle=_subscribed(gate) if verb is verbs.SUBSCRIBE else _answered(gate, verb, acts[verb.name]),
            summary=(verb.asks.__doc__ or "").partition("\n")[0],
            verb=verb.name,
            takes=verb.asks,
            content_type=MSGPACK,
            body_max_bytes=UNCOUNTED_BODY_MAX_BYTES if verb in UNCOUNTED else sys.maxsize,
            items_max=None if verb in UNCOUNTED else BATCH_MAX,
            gives={200: verb.answers},
            tag="store",
        )
        for verb in VERBS
    ]


def _acts(gate: Gate) -> dict[str, Act]:
    async def about(*_: Any) -> verbs.About:
        limits = gate.store.limits
        return verbs.About(gate.store.order, limits.payload_max_bytes, limits.result_max_bytes)

    async def claim(who: Principal, ask: verbs.AskClaim, trace: str | None) -> Any:
        return await gate.claim(
            who,
            ask.tenant,
            ask.commands,
            limit=ask.limit,
            lease_s=ask.lease_s,
            wait_s=_within(ask.wait_s),
            worker=ask.worker,
            claim_id=ask.claim_id,
            traceparent=trace,
        )

    return {
        "about": about,
        "enqueue": lambda who, ask, trace: gate.enqueue(who, ask.tenant, ask.tasks, traceparent=trace),
        "claim": claim,
        "unclaim": lambda who, ask, _: gate.unclaim(who, ask.tenant, ask.claim_id, for_good=ask.for_good),
        "heartbeat": lambda who, ask, _: gate.heartbeat(who, ask.beats),
        "settle": lambda who, ask, trace: gate.settle(who, ask.settlements, traceparent=trace),
        "get": lambda who, ask, _: gate.get(who, ask.tenant, ask.refs),
        "cancel": lambda who, ask, _: gate.cancel(who, ask.tenant, ask.refs),
        "wait": lambda who, ask, _: gate.wait(who, ask.tenant, ask.ids, _within(ask.wait_s)),
        "replay": lambda who, ask, _: gate.replay(who, ask.tenant, ask.which, limit=ask.limit, cursor=ask.cursor),
        "purge": lambda who, ask, _: gate.purge(who, ask.tenant, ask.which, limit=ask.limit, cursor=ask.cursor),
        "retain": lambda who, ask, _: gate.retain(who, ask.tenant, ask.ids, ask.result_ttl_s),
        "list": lambda who, ask, _: gate.list(who, ask.tenant, ask.which, cursor=ask.cursor, limit=ask.limit),
        "marks": lambda who, ask, _: gate.marks(who, ask.tenant, every=ask.every, after=ask.after),
        "stage": lambda who, ask, trace: gate.stage(who, ask.tenant, ask.chunk_id, ask.rows, traceparent=trace),
        "commit_load": lambda who, ask, _: gate.commit_load(
            who, ask.tenant, ask.name, ask.seq, ask.chunk_ids, forget_s=ask.forget_s
        ),
        "drop": lambda who, ask, _: gate.drop(who, ask.tenant, ask.chunk_ids),
        "stats": lambda who, ask, _: gate.stats(who, ask.tenant, ask.commands),
        "queue": lambda who, ask, _: gate.configure(who, ask.tenant, ask.command),
        "configure": lambda who, ask, _: gate.configure(who, ask.tenant, ask.command, ask.config),
        "register": lambda who, ask, _: gate.register(who, ask.tenant, ask.info, ask.ttl_s),
        "workers": lambda who, ask, _: gate.workers(who, ask.tenant),
        "tenants": lambda who, ask, _: gate.tenants(who, cursor=ask.cursor, limit=ask.limit),
        "journal_bounds": lambda who, *_: gate.journal_bounds(who),
        "runs": lambda who, ask, _: gate.runs(
            who, ask.tenant, shard=ask.shard, after=ask.after, until=ask.until, limit=ask.limit
        ),
        "readers": lambda who, *_: gate.readers(who),
        "advance": lambda who, ask, _: gate.advance(who, ask.reader, ask.shard, ask.position),
        "sweep": lambda who, ask, _: gate.sweep(who, ask.budget),
    }


def _answered(gate: Gate, verb: Verb[Any], act: Act) -> Callable[[Request], Awaitable[Answer]]:
    waits = verb in (verbs.CLAIM, verbs.WAIT)
    lost = gate.give_back if verb is verbs.CLAIM else None

    async def handle(request: Request) -> Answer:
        _check_sizes(request.data)
        work = act(request.principal, request.data, request.header(b"traceparent"))
        answer = await (request.while_there(work, lost) if waits and request.data.wait_s else work)
        return Answer(200, _encode(told(answer)), MSGPACK)

    return handle


def _subscribed(gate: Gate) -> Callable[[Request], Awaitable[Stream]]:
    async def handle(request: Request) -> Stream:
        ask: verbs.AskSubscribe = request.data
        _check_sizes(ask)
        topics = [topic_of(one) for one in ask.topics]
        return Stream(_bytes(gate.subscribe(request.principal, topics, ask.limit)))

    return handle


async def _bytes(news: AsyncGenerator[bool, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for happened in news:
            yield b"\1" if happened else b"\0"
    finally:
        await news.aclose()


def _check_sizes(ask: Any) -> None:
    """A client splits what it asks into batches of this size; what is larger was not made by one."""
    for name in LISTS:
        items = getattr(ask, name, ())
        if isinstance(items, list) and len(items) > BATCH_MAX:
            raise InvalidOption(f"{name} has {len(items)} items: ask for at most {BATCH_MAX} at once")


def _within(wait_s: float) -> float:
    return min(wait_s, WAIT_MAX_S)
