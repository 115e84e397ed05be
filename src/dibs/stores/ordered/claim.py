"""Claim: the first ready tasks of some queues, each under a lease of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from itertools import takewhile

from msgspec import Struct

from dibs.checks import ALL_TENANTS
from dibs.ids import ID_BYTES
from dibs.stores.batches import is_full
from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.keys import (
    EXPIRE_CLAIM,
    QueueKeys,
    from8,
    from_count,
    is_block,
    ms8,
    queue_keys,
    tenant_keys,
)
from dibs.stores.ordered.loads import Leaving, leave_block
from dibs.stores.ordered.records import (
    LEASED,
    PARKED,
    Body,
    State,
    StoredClaim,
    decode_body,
    decode_claim,
    decode_config,
    decode_state,
    encode_claim,
)
from dibs.stores.ordered.sweep import settle_due
from dibs.stores.ordered.work import QueueWork, Work
from dibs.task import ALL_COMMANDS, CLAIM_MAX_BYTES, LEASE_DEFAULT_S, NOTHING, Elsewhere, InFlight, Lease

PROMOTED_PER_CLAIM = 200
FEW = 8
ASIDE_PER_CLAIM = 1_000
ASIDE_FEW, ASIDE_STEP = 20, 200
RANDOM_BYTES = 8


class ClaimCall(Struct, frozen=True, gc=False):
    """What a claim asks for."""

    tenant: str
    commands: tuple[str, ...]
    lease_ms: int
    """0: the task's own, else the queue's."""
    worker: str
    claim_id: bytes | None
    elsewhere: Elsewhere = NOTHING


def new_randoms(limit: int) -> list[bytes]:
    """Mints the random halves of tokens, before the transaction: one for each lease that is wanted."""
    randoms = os.urandom(RANDOM_BYTES * limit)
    return [randoms[start : start + RANDOM_BYTES] for start in range(0, len(randoms), RANDOM_BYTES)]


def claim(txn: Txn, call: ClaimCall, randoms: Sequence[bytes]) -> list[Lease | None]:
    """Takes up to as many tasks as there are `randoms`, trying the queues in the order given. None for the rest, rather
    than nothing: so many tasks were past their start deadline, or over their limit, that it is left to another
    transaction."""
    if call.claim_id is not None:
        again = claimed(txn, call.tenant, call.claim_id)
        if again is not None:
            return [*again]
    work = Work.of(txn)
    tokens = [ms8(txn.version) + random for random in randoms]
    leases: list[Lease] = []
    more = False
    if work.whole(tenant_keys(call.tenant)).limits is not None:
        # A lease that ran out in any of the queues makes room in all of them.
        for command in call.commands:
            _settle_due(work.queue(call.tenant, command))
    for command in call.commands:
        queue = work.queue(call.tenant, command)
        if queue.paused():
            continue
        _settle_due(queue)
        more = take(queue, call, tokens, leases)
        if more or len(leases) == len(tokens) or is_full(leases):
            break
    if call.claim_id is not None and leases:
        remember(work, call, leases)
    work.flush()
    return [*leases, *[None] * (len(tokens) - len(leases))] if more else [*leases]


def _settle_due(queue: QueueWork) -> None:
    """Does what time alone does to a queue, if anything is due and it is not paused."""
    due = None if queue.paused() else queue.work.txn.get(queue.keys.due)
    if due is not None and from8(due) <= queue.work.now_ms:
        settle_due(queue, PROMOTED_PER_CLAIM)


def claimed(txn: ReadTxn, tenant: str, claim_id: bytes) -> list[Lease] | None:
    """Returns the leases of an earlier claim of this id that are still alive; None if there was none."""
    keys = tenant_keys(tenant)
    stored = txn.get(keys.claim + claim_id)
    if stored is None:
        return None
    leases: list[Lease] = []
    claim = decode_claim(stored)
    whose = [tenant_keys(name) for name in claim.tenants] or [keys] * len(claim.leases)
    for keys, (task_id, token) in zip(whose, claim.leases, strict=True):
        state_data = txn.get(keys.state + task_id)
        body_data = txn.get(keys.body + task_id)
        if state_data is None or body_data is None:
            continue
        state = decode_state(state_data)
        if state.token == token:
            leases.append(_lease_of(keys.name, task_id, state, decode_body(body_data)))
    return leases


def ready_in_ms(txn: ReadTxn, tenant: str, commands: Sequence[str]) -> int | None:
    """In how many milliseconds a claim may find something; None: nothing is known to become due."""
    return look(txn, tenant, commands, NOTHING)[0]


def look(txn: ReadTxn, tenant: str, commands: Sequence[str], elsewhere: Elsewhere) -> tuple[int | None, bool]:
    """`ready_in_ms`, and whether the tenant or any of these queues has a cap."""
    soonest: int | None = None
    whole = Caps.of(txn, queue_keys(tenant, ALL_COMMANDS), tenant_keys(tenant).totals)
    queues = [queue_keys(tenant, command) for command in commands]
    each = [Caps.of(txn, queue, queue.counters) for queue in queues]
    capped = whole.cap is not None or any(caps.cap is not None for caps in each)
    if whole.paused:
        return None, capped
    whole_reached = whole.reached(elsewhere.get((tenant, ALL_COMMANDS), 0))
    for queue, caps in zip(queues, each, strict=True):
        if caps.paused:
            continue
        # At its cap only a lease that ends makes room: one that runs out is among what is due.
        reached = whole_reached or caps.reached(elsewhere.get((tenant, queue.command), 0))
        if not reached and txn.scan_keys(queue.ready, queue.ready_end, 1):
            return 0, capped
        due = txn.get(queue.due)
        if due is not None:
            wait_ms = max(0, from8(due) - txn.now_ms)
            soonest = wait_ms if soonest is None else min(soonest, wait_ms)
    return soonest, capped


def in_flight(txn: ReadTxn, tenants: Sequence[str], commands: Sequence[str]) -> dict[tuple[str, str], InFlight]:
    """What is in progress under those caps that are set: of the tenants (`*`) and of these queues of theirs."""
    found: dict[tuple[str, str], InFlight] = {}
    for tenant, command in itertools.product(tenants, (ALL_COMMANDS, *commands)):
        queue = queue_keys(tenant, command)
        caps = Caps.of(txn, queue, queue.tenant.totals if command == ALL_COMMANDS else queue.counters)
        if caps.cap is not None:
            found[(tenant, command)] = InFlight(caps.leased, caps.cap)
    return found


def any_due(txn: ReadTxn, tenant: str, commands: Sequence[str]) -> bool:
    """Whether there is something that time has made ready, or taken from its worker, and nobody has noted yet."""
    dues = txn.get_many([queue_keys(tenant, command).due for command in commands])
    return any(due is not None and from8(due) <= txn.now_ms for due in dues)


class Caps(Struct, frozen=True, gc=False):
    """What keeps everybody from claiming from a queue, or from a tenant."""

    paused: bool = False
    cap: int | None = None
    leased: int = 0

    def reached(self, elsewhere: int = 0) -> bool:
        """Whether there is no room, with so many in progress elsewhere."""
        return self.cap is not None and self.leased + elsewhere >= self.cap

    @classmethod
    def of(cls, txn: ReadTxn, queue: QueueKeys, counters: Sequence[bytes]) -> Caps:
        """Looks, without changing anything."""
        stored = txn.get(queue.config)
        if stored is None:
            return _NO_CAPS
        config = decode_config(stored)
        cap = None if config.limits is None else config.limits.in_flight
        return cls(config.paused, cap, 0 if cap is None else from_count(txn.get(counters[LEASED])))


_NO_CAPS = Caps()


def take(queue: QueueWork, call: ClaimCall, tokens: list[bytes], leases: list[Lease]) -> bool:
    """Leases from the head of one queue until the claim is satisfied, the queue is empty or at its cap; True if it gave
    up before, because too many tasks were past their start deadline or over their limit."""
    aside = 0
    work, keys, limited = queue.work, queue.keys, queue.key_limit is not None
    txn = work.txn
    state_prefix, body_prefix = keys.tenant.state, keys.tenant.body
    queue_lease_ms = round((queue.config.lease_s or LEASE_DEFAULT_S) * 1000)
    while (wanted := queue.room(len(tokens) - len(leases), call.elsewhere)) > 0:
        # Where many are late or over their limit, they are read by the hundred, however few are wanted.
        many, before = wanted if aside < ASIDE_FEW else max(wanted, ASIDE_STEP), aside
        # Of blocks just the first is taken from: a claim of many does not read the names of as many others.
        entries = txn.scan_keys(keys.ready, keys.ready_end, 2) if many > FEW else []
        if not entries or not is_block(entries[0]):
            entries = txn.scan_keys(keys.ready, keys.ready_end, many)
        all_seen = len(entries) < many
        if any(map(is_block, entries)):
            if is_block(entries[0]):
                aside += _take_rows(queue, call, tokens[: len(leases) + wanted], leases, entries[:2], many)
                if aside >= ASIDE_PER_CLAIM:
                    return True
                work.flush()
                if len(leases) < len(tokens) and is_full(leases):
                    break
                continue
            entries, all_seen = list(takewhile(_is_task, entries)), False
        ids = [entry[-ID_BYTES:] for entry in entries]
        # A ready task without a state, or without a body, is one that cannot be read: no bytes decode to nothing.
        states = [decode_state(data or b"") for data in txn.get_many([state_prefix + task_id for task_id in ids])]
        if (within := _within_bytes(states, leases)) < len(ids):
            ids, all_seen = ids[:within], False
        bodies = txn.get_many([body_prefix + task_id for task_id in ids])
        taken: list[tuple[bytes, bytes, State, Body]] = []
        for entry, task_id, state, body_data in zip(entries, ids, states, bodies, strict=False):
            if len(taken) == wanted:
                break
            if state.expires_ms and state.expired_unstarted(work.now_ms):
                queue.expire_unstarted(task_id, state)
                aside += 1
                continue
            body = decode_body(body_data or b"")
            if (state.limit or (limited and body.limit_key is not None)) and not queue.limiter.take(
                task_id, state, body
            ):
                aside += 1
                continue
            state.token = tokens[len(leases) + len(taken)]
            state.lease_ms = call.lease_ms or body.lease_ms or queue_lease_ms
            state.worker = call.worker
            state.attempts += 1
            taken.append((entry, task_id, state, body))
        queue.lease([one[0] for one in taken], [one[1] for one in taken], [one[2] for one in taken], call.worker)
        leases += [_lease_of(keys.tenant.name, task_id, state, body) for _, task_id, state, body in taken]
        # What leaves the queue under a limit per key may let others in.
        if all_seen and len(taken) < wanted and not (limited and aside > before):
            queue.emptied()
            return False
        if aside >= ASIDE_PER_CLAIM:
            return True
        if len(leases) < len(tokens):
            work.flush()
            if is_full(leases):
                break
    return False


def _within_bytes(states: Sequence[State], leases: Sequence[Lease]) -> int:
    """How many of these tasks, at least one, may be read beside what was taken before."""
    if sum(state.size for state in states) <= CLAIM_MAX_BYTES and not leases:
        return len(states)
    held = sum(len(lease.payload) for lease in leases)
    for count, state in enumerate(states):
        if held >= CLAIM_MAX_BYTES and (count or leases):
            return count
        held += state.size
    return len(states)


def _take_rows(
    queue: QueueWork, call: ClaimCall, tokens: list[bytes], leases: list[Lease], entries: list[bytes], many: int
) -> int:
    """Leases rows straight from the block at the head of a queue, up to the entry that follows; returns how many it met
    that have ended, or were parked, instead."""
    queue_lease_ms = round((queue.config.lease_s or LEASE_DEFAULT_S) * 1000)
    limited, wanted = queue.key_limit is not None, len(tokens) - len(leases)
    before = entries[1] if len(entries) > 1 else None
    left = leave_block(queue, entries[0], many if limited else wanted, before=before)
    rows, aside = left.rows, left.seen - len(left.rows)
    if limited:
        rows = _within_limits(queue, rows, wanted)
        aside += sum(row.state.place == PARKED for row in left.rows)
    for row, token in zip(rows, tokens[len(leases) :], strict=False):
        state = row.state
        state.token = token
        state.lease_ms = call.lease_ms or row.body.lease_ms or queue_lease_ms
        state.worker = call.worker
        state.attempts = 1
    queue.lease([], [row.id for row in rows], [row.state for row in rows], call.worker)
    leases += [_lease_of(queue.tenant.name, row.id, row.state, row.body) for row in rows]
    return aside


def _within_limits(queue: QueueWork, rows: list[Leaving], wanted: int) -> list[Leaving]:
    """Returns the first rows that their limits let anybody lease. Those over it are parked; what comes after the last
    that is wanted stands in the queue, and is looked at when it is claimed."""
    taken: list[Leaving] = []
    for row in rows:
        if len(taken) == wanted:
            queue.place(row.id, row.state)
        elif row.body.limit_key is None or queue.limiter.take(row.id, row.state, row.body):
            taken.append(row)
        else:
            queue.expire_start(row.id, row.state)
    return taken


def _is_task(entry: bytes) -> bool:
    return not is_block(entry)


def _lease_of(tenant: str, task_id: bytes, state: State, body: Body) -> Lease:
    return Lease(
        tenant,
        task_id,
        state.token,
        state.command,
        body.payload,
        body.codec,
        state.priority,
        state.attempts,
        state.max_attempts,
        state.lease_ms / 1000,
        state.lease_end_ms(),
        state.enqueued_ms,
        body.timeout_ms / 1000 if body.timeout_ms else None,
        body.key,
        body.traceparent,
    )


def remember(work: Work, call: ClaimCall, leases: list[Lease], earlier: StoredClaim | None = None) -> None:
    """Keeps the claim as long as the longest of its leases was granted for; `earlier`: what is known of it already."""
    assert call.claim_id is not None
    expires_ms = max(lease.lease_end_ms for lease in leases)
    tenants = [lease.tenant for lease in leases] if call.tenant == ALL_TENANTS else []
    claim = StoredClaim(expires_ms, [(lease.id, lease.token) for lease in leases], tenants)
    if earlier is not None:
        expires_ms = max(expires_ms, earlier.expires_ms)
        claim = StoredClaim(expires_ms, [*earlier.leases, *claim.leases], [*earlier.tenants, *tenants])
    work.others.append((tenant_keys(call.tenant).claim + call.claim_id, encode_claim(claim)))
    work.expire(expires_ms, EXPIRE_CLAIM, call.tenant, call.claim_id)
