"""Decisions: what a load over several shards commits where, kept in the shard that is the load's home until it is done.

The decision is the commit: once it is kept, whoever finds it finishes it. It is kept before the first shard commits and
forgotten after the last has, so that a crash anywhere between leaves it to be found.
"""

from __future__ import annotations

from msgspec.structs import replace

from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.keys import DECISIONS, decision_key, end_of, parse_decision_key, split_ids, tenant_keys
from dibs.stores.ordered.loads import known_load, note_load, raise_fence
from dibs.stores.ordered.records import StoredDecision, decode_decision, encode_decision
from dibs.stores.ordered.work import Work
from dibs.task import Decision, LoadState

#: A decision names up to so many chunks, and few are ever pending: a look at these finds what is left of a crash.
PENDING_MAX = 100


def decide(txn: Txn, decision: Decision, seen: LoadState) -> Decision | None:
    """Keeps a decision and returns it as it is kept, unless the load is not as it was seen before its chunks were
    reserved: somebody may have them by now."""
    if load_state(txn, decision.tenant, decision.name) != seen:
        return None
    chunk_ids = [b"".join(ids) for ids in decision.chunk_ids]
    stored = StoredDecision(decision.seq, txn.now_ms, decision.forget_s, chunk_ids, b"".join(decision.empty))
    txn.put(decision_key(decision.tenant, decision.name), encode_decision(stored))
    return replace(decision, decided_ms=txn.now_ms)


def fence(txn: Txn, tenant: str, name: str) -> Decision | None:
    """Keeps a commit that has reserved chunks, and is not decided, from being decided; returns the decision if there is
    one."""
    state = load_state(txn, tenant, name)
    if state.pending is None:
        work = Work.of(txn)
        raise_fence(work, tenant, name)
        work.flush()
    return state.pending


def load_state(txn: ReadTxn, tenant: str, name: str) -> LoadState:
    """How far a load has come, and what of it is decided and may not be done."""
    key = decision_key(tenant, name)
    stored = txn.get(key)
    pending = None if stored is None else _decision(key, decode_decision(stored))
    load = known_load(txn, tenant_keys(tenant), name)
    return LoadState(load.seq, pending, load.fence)


def pending(txn: ReadTxn, older_ms: int) -> list[Decision]:
    """Decisions that are at least so old. A clock that was set back makes none of them too young for ever."""
    found = [(key, decode_decision(value)) for key, value in txn.scan(DECISIONS, end_of(DECISIONS), PENDING_MAX)]
    return [_decision(key, stored) for key, stored in found if abs(txn.now_ms - stored.decided_ms) >= older_ms]


def done(txn: Txn, decision: Decision) -> None:
    """Notes that the load has come so far, and forgets the decision; unless somebody has done it before."""
    key = decision_key(decision.tenant, decision.name)
    stored = txn.get(key)
    if stored is None or decode_decision(stored).seq != decision.seq:
        return
    work = Work.of(txn)
    forget_ms = None if decision.forget_s is None else round(decision.forget_s * 1000)
    note_load(work, decision.tenant, decision.name, decision.seq, forget_ms)
    work.deletes.append(key)
    work.flush()


def _decision(key: bytes, stored: StoredDecision) -> Decision:
    tenant, name = parse_decision_key(key)
    return Decision(
        tenant=tenant,
        name=name,
        seq=stored.seq,
        chunk_ids=[split_ids(ids) for ids in stored.chunk_ids],
        empty=split_ids(stored.empty),
        forget_s=stored.forget_s,
        decided_ms=stored.decided_ms,
    )
