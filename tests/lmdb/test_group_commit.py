"""Concurrent calls share one transaction; what goes wrong in one of them is its own affair."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dibs.clock import ManualClock
from dibs.errors import DibsError, InvalidOption, StoreCorrupt
from dibs.stores.ordered import claim as claim_module
from dibs.stores.ordered import lmdb as engine_module
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import ms8, tenant_keys
from dibs.stores.ordered.lmdb import LmdbEngine
from dibs.stores.ordered.store import OrderedStore
from dibs.task import Kind, Place, Settled, Status
from dibs.testing.contract.steps import COMMAND, TENANT, look, put, put_many, settlement, take_many

CALLERS = 64


@pytest.fixture(autouse=True)
def _groups_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a group may be over its time before it is complete: here only what belongs together counts."""
    monkeypatch.setattr(engine_module, "GROUP_MAX_S", 60.0)


def commits(store: OrderedStore) -> int:
    """How many write transactions the directory has seen."""
    assert isinstance(store._engine, LmdbEngine)
    return int(store._engine.environment.info()["last_txnid"])


async def transact(store: OrderedStore, *calls: Any) -> list[Any]:
    """Hands the calls over together, as callers of one iteration of the loop do."""
    lane = store._engine.lane()
    return await asyncio.gather(*(lane.transact(call) for call in calls), return_exceptions=True)


def writes(name: bytes) -> Any:
    """A call that writes one record and returns its name."""

    def call(txn: Txn) -> bytes:
        txn.put(b"M" + name, name)
        return name

    return call


async def test_concurrent_calls_share_a_commit(store: OrderedStore) -> None:
    """64 callers at once cost one transaction, so one fsync, and every one of them is answered."""
    before = commits(store)
    ids = await asyncio.gather(*(put(store) for _ in range(CALLERS)))
    assert commits(store) - before == 1
    assert len(set(ids)) == CALLERS
    assert (await store.stats(TENANT)).total.ready == CALLERS


async def test_each_call_has_a_version_of_its_own(store: OrderedStore) -> None:
    """Also within one transaction, and a call that raises uses one up at most."""

    def write(txn: Txn) -> int:
        txn.put(b"Mlatest", ms8(txn.version))
        return txn.version

    versions = await transact(store, *[write] * CALLERS)
    assert len(set(versions)) == CALLERS
    assert versions == sorted(versions)


async def test_a_refusal_does_not_spoil_the_group(store: OrderedStore) -> None:
    """A call that raises a DibsError gets it; the others of its transaction are committed."""

    def refuse(txn: Txn) -> None:
        raise InvalidOption("no")

    names = [b"%02d" % n for n in range(CALLERS)]
    calls = [writes(name) for name in names]
    calls[20] = refuse
    before = commits(store)
    outcomes = await transact(store, *calls)
    assert commits(store) - before == 1
    assert isinstance(outcomes.pop(20), InvalidOption)
    del names[20]
    assert outcomes == names
    assert store._engine.read(lambda txn: [txn.get(b"M" + name) for name in names]) == names


async def test_an_error_after_a_write_does_not_spoil_the_group(store: OrderedStore) -> None:
    """What the failing call had written is gone; what the others wrote is there."""

    def stumble(txn: Txn) -> None:
        txn.put(b"Mstumble", b"half done")
        raise ValueError("oops")

    names = [b"%02d" % n for n in range(CALLERS)]
    calls = [writes(name) for name in names]
    calls[20] = stumble
    outcomes = await transact(store, *calls)
    assert isinstance(outcomes.pop(20), DibsError)
    del names[20]
    assert outcomes == names
    assert store._engine.read(lambda txn: [txn.get(b"M" + name) for name in names]) == names
    assert store._engine.read(lambda txn: txn.get(b"Mstumble")) is None


async def test_a_record_that_cannot_be_read_stops_only_its_call(store: OrderedStore) -> None:
    """A batch that meets a broken record changes nothing; calls of the same transaction go ahead."""
    good, broken, other = await put_many(store, 3)
    leases = {lease.id: lease for lease in await take_many(store, 3)}
    state_key = tenant_keys(TENANT).state + broken
    await transact(store, lambda txn: txn.put(state_key, b"\xc1rubbish"))
    batch = [settlement(leases[task_id], Kind.COMPLETE, result=b"1") for task_id in (good, broken)]
    outcomes = await asyncio.gather(
        put(store, "elsewhere"),
        store.settle(batch),
        store.settle([settlement(leases[other], Kind.COMPLETE, result=b"1")]),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], StoreCorrupt)
    assert outcomes[2] == [Settled(Status.COMPLETED)]
    assert (await look(store, other)).status is Status.COMPLETED
    assert (await look(store, good)).place is Place.LEASED
    assert isinstance(outcomes[0], bytes)
    assert (await look(store, outcomes[0])).place is Place.READY
    assert (await store.stats(TENANT)).total.leased == 2


async def test_a_cancelled_caller_does_not_spoil_the_group(store: OrderedStore) -> None:
    """A caller that goes away while its group commits takes nobody with it, and its claim is given back."""
    await put_many(store, 2)
    callers = [asyncio.ensure_future(store.claim(TENANT, ["work"])), asyncio.ensure_future(put(store, "elsewhere"))]
    await asyncio.sleep(0)
    callers[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await callers[0]
    await callers[1]
    await store._engine.drained()
    assert len(await take_many(store, 2)) == 2


async def test_claims_that_run_as_one_are_served_in_their_order(store: OrderedStore) -> None:
    """Each gets what it would have got by itself: the first what it asks for, the last what is left."""
    ids = await put_many(store, 25)
    answers = await asyncio.gather(*(store.claim(TENANT, [COMMAND], limit=10, worker="w") for _ in range(4)))
    assert [len(leases) for leases in answers] == [10, 10, 5, 0]
    assert [lease.id for leases in answers for lease in leases] == ids
    assert len({lease.token for leases in answers for lease in leases}) == 25


async def test_claims_that_ask_for_something_else_get_that(store: OrderedStore) -> None:
    """Only claims that agree in everything run as one: each lease has its own caller's worker and length."""
    await put_many(store, 4)
    asked = [("a", 10.0), ("a", 10.0), ("a", 20.0), ("b", 10.0)]
    answers = await asyncio.gather(
        *(store.claim(TENANT, [COMMAND], lease_s=lease_s, worker=worker) for worker, lease_s in asked)
    )
    assert [lease.lease_s for [lease] in answers] == [lease_s for _, lease_s in asked]
    assert [(await look(store, lease.id)).worker for [lease] in answers] == [worker for worker, _ in asked]


async def test_who_leaves_gives_back_only_its_own(store: OrderedStore) -> None:
    """Of claims that run as one, one that is cancelled releases its task and the others keep theirs."""
    ids = await put_many(store, 3)
    claims = [asyncio.ensure_future(store.claim(TENANT, [COMMAND], worker="w")) for _ in range(3)]
    await asyncio.sleep(0)
    claims[1].cancel()
    first, gone, last = await asyncio.gather(*claims, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert [lease.id for leases in (first, last) for lease in leases] == [ids[0], ids[2]]  # type: ignore[union-attr]
    assert [lease.id for lease in await take_many(store, 1)] == [ids[1]]


async def test_claims_past_many_deadlines_ask_again(
    store: OrderedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims that gave up amid tasks past their start deadline go on in another transaction, each to its task."""
    monkeypatch.setattr(claim_module, "ASIDE_PER_CLAIM", 4)
    await put_many(store, 20, expires_s=0.001)
    ids = await put_many(store, 3)
    clock.advance(1)
    answers = await asyncio.gather(*(store.claim(TENANT, [COMMAND], worker="w") for _ in range(3)))
    assert {lease.id for [lease] in answers} == set(ids)
