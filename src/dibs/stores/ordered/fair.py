"""Fair claims: the tenants that have ready tasks take turns, whatever the number of tasks that each has.

The index Y names the queues that may have ready tasks; a claim skips in it from tenant to tenant and never looks at an
idle one. At its turn a tenant gives as many tasks as its weight says, times a quantum that grows with the size of the
claim. Where the rotation stands is a hint that each store object keeps: it is handed to the transaction and comes back
with every lease, so that running the function again changes nothing. Several processes rotate each by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from string import ascii_lowercase, digits

from msgspec import Struct

from dibs.stores.ordered.claim import PROMOTED_PER_CLAIM, Caps, ClaimCall, claimed, ready_in_ms, remember, take
from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.keys import (
    AFTER_SEPARATOR,
    DUE,
    READY_QUEUES,
    SEPARATOR,
    end_of,
    ms8,
    parse_due_key,
    queue_keys,
    tenant_keys,
)
from dibs.stores.ordered.records import StoredClaim, decode_claim, decode_config
from dibs.stores.ordered.sweep import settle_due
from dibs.stores.ordered.work import Work
from dibs.task import ALL_COMMANDS, WEIGHT_DEFAULT, Lease, ReadyTenant, ReadyTenants, TurnsTaken

VISITS_MAX = 400
LOOKS_MAX = 1_000
TURNS_PER_CLAIM = 16
_MARKS_END = end_of(READY_QUEUES)


class Turn(Struct, frozen=True, gc=False):
    """Whose turn it is, and how many tasks that tenant may still give; with none left it is the next one's."""

    tenant: str
    left: int = 0

    @classmethod
    def anywhere(cls) -> Turn:
        """Where a store that has not claimed yet begins: several that start together should not all begin alike."""
        return cls("".join(random.choices(digits + ascii_lowercase, k=4)))


class Round(Struct, frozen=True, gc=False):
    """Once around all the tenants: from `origin` to the last name and, `wrapped`, from the first to `origin`."""

    origin: str
    turn: Turn
    wrapped: bool = False


class Given(Struct, frozen=True, gc=False):
    """A lease, and how the round stands after it. Without a lease: the round goes on in another transaction."""

    lease: Lease | None
    around: Round


def fair_claim(txn: Txn, call: ClaimCall, randoms: Sequence[bytes], around: Round) -> list[Given]:
    """Takes up to as many tasks as there are `randoms`, the tenants taking turns. Fewer: there are no more."""
    if call.claim_id is not None:
        again = claimed(txn, call.tenant, call.claim_id)
        if again is not None:
            return [Given(lease, around) for lease in again]
    work = Work.of(txn)
    tokens = [ms8(txn.version) + one for one in randoms]
    _settle_due(work, call.commands)
    # What this transaction has made ready, here or in an earlier call, is in the index at its end only.
    work.mark()
    given = _rotate(work, call, tokens, around)
    leases = [one.lease for one in given if one.lease is not None]
    if call.claim_id is not None and leases:
        remember(work, call, leases)
    work.flush()
    return given


def claim_turns(
    txn: Txn, call: ClaimCall, turns: Sequence[tuple[str, int]], randoms: Sequence[bytes], *, further: bool
) -> TurnsTaken:
    """Takes from each of these tenants at most so many tasks. Whose turn it is was decided over several stores, of
    which this is one. `further`: the same claim has taken here before."""
    earlier: StoredClaim | None = None
    if call.claim_id is not None:
        if not further:
            again = claimed(txn, call.tenant, call.claim_id)
            if again is not None:
                return TurnsTaken(again, [])
        stored = txn.get(tenant_keys(call.tenant).claim + call.claim_id)
        earlier = None if stored is None else decode_claim(stored)
    work = Work.of(txn)
    tokens = [ms8(txn.version) + one for one in randoms]
    _settle_due(work, call.commands)
    work.mark()
    leases: list[Lease] = []
    unseen = [name for name, share in turns if _visit(work, call, tokens[: len(leases) + share], leases, name)]
    if call.claim_id is not None and leases:
        remember(work, call, leases, earlier)
    work.flush()
    return TurnsTaken(leases, unseen)


def _settle_due(work: Work, commands: Sequence[str]) -> None:
    """Promotes and takes back what is due in queues of these commands, which nobody else may claim from."""
    txn, left = work.txn, PROMOTED_PER_CLAIM
    for key in txn.scan_keys(DUE, DUE + ms8(txn.now_ms + 1), PROMOTED_PER_CLAIM):
        at_ms, keys = parse_due_key(key)
        if txn.get(keys.due) != ms8(at_ms):
            txn.delete(key)
        elif keys.command in commands:
            left -= settle_due(work.queue(keys.tenant.name, keys.command), left) or 1
            if left <= 0:
                return


def _rotate(work: Work, call: ClaimCall, tokens: list[bytes], around: Round) -> list[Given]:
    """Visits tenants until the claim is satisfied, a whole round has given nothing, or there were enough visits."""
    quantum = max(1, len(tokens) // TURNS_PER_CLAIM)
    leases: list[Lease] = []
    given: list[Given] = []
    # Tenants that have nothing more to give, in this transaction.
    dry: set[str] = set()
    for _ in range(VISITS_MAX):
        if len(leases) == len(tokens):
            return given
        turn = around.turn
        name = _next_tenant(work.txn, turn)
        if name is None or (around.wrapped and name > around.origin):
            if around.wrapped:
                return given
            around = Round(around.origin, Turn(""), wrapped=True)
            continue
        share = turn.left if name == turn.tenant else _weight(work, name) * quantum
        around = Round(around.origin, Turn(name), around.wrapped)
        if name in dry:
            continue
        before = len(leases)
        more = _visit(work, call, tokens[: before + share], leases, name)
        for lease in leases[before:]:
            share -= 1
            # Whoever gave something may have more: the round begins anew behind it.
            around = Round(name, Turn(name, share))
            given.append(Given(lease, around))
        if more:
            around = Round(around.origin, Turn(name, max(1, share)), around.wrapped)
            break
        if share and len(leases) < len(tokens):
            dry.add(name)
            around = Round(around.origin, Turn(name), around.wrapped)
    return given + [Given(None, around)] * (len(tokens) - len(given))


def _visit(work: Work, call: ClaimCall, tokens: list[bytes], leases: list[Lease], tenant: str) -> bool:
    """Takes a tenant's share, from its queues in the order that the claim names them. True: not everything was seen."""
    more = False
    for command in call.commands:
        if work.txn.get(queue_keys(tenant, command).ready_mark) is None:
            continue
        queue = work.queue(tenant, command)
        if queue.paused():
            continue
        more = take(queue, call, tokens, leases)
        # The next visit must not find what this one took.
        work.flush()
        if more or len(leases) == len(tokens):
            break
    return more


def _weight(work: Work, tenant: str) -> int:
    return work.whole(tenant_keys(tenant)).weight or WEIGHT_DEFAULT


def _next_tenant(txn: ReadTxn, turn: Turn) -> str | None:
    """The tenant whose turn it is: the first that has a mark at or behind the turn's."""
    behind = SEPARATOR if turn.left else AFTER_SEPARATOR
    start = READY_QUEUES + turn.tenant.encode() + behind if turn.tenant else READY_QUEUES
    found = txn.scan_keys(start, _MARKS_END, 1)
    return found[0][1:].partition(SEPARATOR)[0].decode() if found else None


def ready_tenants(txn: ReadTxn, commands: Sequence[str], after: str, limit: int, *, itself: bool) -> ReadyTenants:
    """Returns the next tenants behind a name, or from it on, that may give something here."""
    found: list[ReadyTenant] = []
    at = Turn(after, int(itself))
    for _ in range(LOOKS_MAX):
        name = _next_tenant(txn, at)
        if name is None:
            return ReadyTenants(found)
        at = Turn(name)
        tenant = _ready_tenant(txn, name, commands)
        if tenant is not None:
            found.append(tenant)
            if len(found) == limit:
                break
    return ReadyTenants(found, at.tenant)


def _ready_tenant(txn: ReadTxn, name: str, commands: Sequence[str]) -> ReadyTenant | None:
    queues = [queue_keys(name, command) for command in commands]
    caps = [Caps.of(txn, queue, queue.counters) for queue in queues if txn.get(queue.ready_mark) is not None]
    if all(one.paused or one.reached() for one in caps):
        return None
    keys = tenant_keys(name)
    stored = txn.get(keys.whole)
    whole = Caps.of(txn, queue_keys(name, ALL_COMMANDS), keys.totals)
    if whole.paused or whole.reached():
        return None
    weight = None if stored is None else decode_config(stored).weight
    return ReadyTenant(
        name, weight or WEIGHT_DEFAULT, whole.cap is not None or any(one.cap is not None for one in caps)
    )


def any_due(txn: ReadTxn, commands: Sequence[str]) -> bool:
    """Whether something in queues of these commands is due, whoever's it is."""
    return _due_in_ms(txn, commands) == 0


def fair_ready_in_ms(txn: ReadTxn, commands: Sequence[str], turn: Turn) -> int | None:
    """In how many milliseconds a claim of all tenants may find something; None: nothing is known to become due. Looks
    at the tenants whose turns come next; where all of a crowd can give nothing, the rest is left to the next look."""
    wrapped = False
    at = turn
    for _ in range(LOOKS_MAX):
        name = _next_tenant(txn, at)
        if name is None or (wrapped and name > turn.tenant):
            if wrapped:
                break
            at, wrapped = Turn(""), True
            continue
        at = Turn(name)
        marked = [one for one in commands if txn.get(queue_keys(name, one).ready_mark) is not None]
        if marked and ready_in_ms(txn, name, marked) == 0:
            return 0
    return _due_in_ms(txn, commands)


def _due_in_ms(txn: ReadTxn, commands: Sequence[str]) -> int | None:
    """When the first of the queues is due, as far as it is among those that are due first."""
    for key in txn.scan_keys(DUE, end_of(DUE), PROMOTED_PER_CLAIM):
        at_ms, keys = parse_due_key(key)
        if keys.command in commands:
            return max(0, at_ms - txn.now_ms)
    return None
