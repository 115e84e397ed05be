"""The doctor: every way in which records can disagree is named, and what can be rebuilt is rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from dibs.clock import ManualClock
from dibs.errors import StoreCorrupt
from dibs.ids import id_to_text, new_id
from dibs.stores.ordered.engine import Txn
from dibs.stores.ordered.keys import (
    DUE,
    EXPIRE_TASK,
    EXPIRIES,
    JOURNAL,
    META_JOURNAL_BYTES,
    end_of,
    expiry_key,
    ms8,
    queue_keys,
    tenant_keys,
)
from dibs.stores.ordered.store import OrderedStore
from dibs.task import ByKey, Duplicate, Kind, NewTask, Settled, Status
from dibs.testing.contract.steps import (
    BOOM,
    COMMAND,
    TENANT,
    assert_counts,
    complete,
    drain,
    fail,
    list_all,
    look,
    pass_time,
    put,
    put_completed,
    retry,
    settle,
    sweep_all,
    take,
)

QUEUE = queue_keys(TENANT, COMMAND)
OWNER = tenant_keys(TENANT)


class Ward(NamedTuple):
    """One task in every place."""

    ready: bytes
    delayed: bytes
    leased: bytes
    dead: bytes
    done: bytes
    keyed: bytes


async def fill(store: OrderedStore) -> Ward:
    """Makes one task for every place, with results, errors and a key."""
    done = await put(store, payload=b"payload")
    await complete(store, await take(store), b"result")
    dead = await put(store)
    await fail(store, await take(store))
    delayed = await put(store)
    await retry(store, await take(store), 90.0)
    leased = await put(store)
    await take(store)
    keyed = await put(store, key="k", priority=1)
    ready = await put(store, payload=b"ready")
    ward = Ward(ready, delayed, leased, dead, done, keyed)
    assert (await store.doctor()).clean
    return ward


async def break_it(store: OrderedStore, how: Callable[[Txn], object]) -> None:
    """Does something to the records that no verb would do."""
    await store._engine.lane().transact(how)


def entry(txn: Txn, prefix: bytes, task_id: bytes) -> bytes:
    """The index entry of a task."""
    [key] = [key for key in txn.scan_keys(prefix, end_of(prefix), 1_000) if key.endswith(task_id)]
    return key


def move(txn: Txn, key: bytes, to: bytes) -> None:
    """Puts a record under another key."""
    value = txn.get(key)
    assert value is not None
    txn.delete(key)
    txn.put(to, value)


def no_ready_entry(txn: Txn, ward: Ward) -> None:
    """No ready entry."""
    txn.delete(entry(txn, QUEUE.ready, ward.ready))


def no_delayed_entry(txn: Txn, ward: Ward) -> None:
    """No delayed entry."""
    txn.delete(entry(txn, QUEUE.delayed, ward.delayed))


def no_leased_entry(txn: Txn, ward: Ward) -> None:
    """No leased entry."""
    txn.delete(entry(txn, QUEUE.leased, ward.leased))


def no_dead_entry(txn: Txn, ward: Ward) -> None:
    """No dead entry."""
    txn.delete(entry(txn, QUEUE.dead, ward.dead))


def ready_twice(txn: Txn, ward: Ward) -> None:
    """Ready twice."""
    txn.put(QUEUE.ready + bytes(13) + b"t" + ward.ready, b"")


def finished_and_ready(txn: Txn, ward: Ward) -> None:
    """Finished and ready."""
    txn.put(QUEUE.ready + bytes(13) + b"t" + ward.done, b"")


def ready_for_nobody(txn: Txn, ward: Ward) -> None:
    """Ready for nobody."""
    txn.put(QUEUE.ready + bytes(13) + b"t" + new_id(), b"")


def an_old_lease_entry(txn: Txn, ward: Ward) -> None:
    """An old lease entry."""
    txn.put(QUEUE.leased + ms8(1) + ward.leased, b"")


def no_ready_mark(txn: Txn, ward: Ward) -> None:
    """No ready mark."""
    txn.delete(QUEUE.ready_mark)


def no_due_time(txn: Txn, ward: Ward) -> None:
    """No due time."""
    due = txn.get(QUEUE.due)
    assert due is not None
    txn.delete(QUEUE.due)
    txn.delete(DUE + due + QUEUE.name)


def a_due_time_too_late(txn: Txn, ward: Ward) -> None:
    """A due time too late."""
    due = txn.get(QUEUE.due)
    assert due is not None
    late = ms8(int.from_bytes(due, "big") + 1_000_000)
    txn.put(QUEUE.due, late)
    move(txn, DUE + due + QUEUE.name, DUE + late + QUEUE.name)


def a_due_time_not_indexed(txn: Txn, ward: Ward) -> None:
    """A due time not indexed."""
    due = txn.get(QUEUE.due)
    assert due is not None
    txn.delete(DUE + due + QUEUE.name)


def a_stale_due_entry(txn: Txn, ward: Ward) -> None:
    """A stale due entry."""
    txn.put(DUE + ms8(5) + QUEUE.name, b"")


def a_due_entry_of_an_unknown_queue(txn: Txn, ward: Ward) -> None:
    """A due entry of an unknown queue."""
    txn.put(DUE + ms8(5) + b"nobody\0nothing", b"")


def a_body_without_a_task(txn: Txn, ward: Ward) -> None:
    """A body without a task."""
    body = txn.get(OWNER.body + ward.ready)
    assert body is not None
    txn.put(OWNER.body + new_id(), body)


def a_key_without_a_task(txn: Txn, ward: Ward) -> None:
    """A key without a task."""
    txn.put(QUEUE.key + new_id(), new_id())


def a_key_of_another_task(txn: Txn, ward: Ward) -> None:
    """A key of another task."""
    txn.put(QUEUE.key + new_id(), ward.ready)


def a_wrong_counter(txn: Txn, ward: Ward) -> None:
    """A wrong counter."""
    txn.add(QUEUE.counters[0], 3)


def a_wrong_total(txn: Txn, ward: Ward) -> None:
    """A wrong total."""
    txn.add(OWNER.totals[0], -1)


def a_counter_of_an_unknown_queue(txn: Txn, ward: Ward) -> None:
    """A counter of an unknown queue."""
    txn.add(queue_keys(TENANT, "ghost").counters[0], 7)


def a_wrong_journal_size(txn: Txn, ward: Ward) -> None:
    """A wrong journal size."""
    txn.add(META_JOURNAL_BYTES, 11)


def ended_for_ever(txn: Txn, ward: Ward) -> None:
    """Ended for ever."""
    for key in txn.scan_keys(EXPIRIES, end_of(EXPIRIES), 1_000):
        txn.delete(key)


MENDABLE = [
    (no_ready_entry, "no entry in its place, ready"),
    (no_delayed_entry, "no entry in its place, delayed"),
    (no_leased_entry, "no entry in its place, leased"),
    (no_dead_entry, "no entry in its place, dead"),
    (ready_twice, "ready entry that no task names"),
    (finished_and_ready, "ready entry that no task names"),
    (ready_for_nobody, "ready entry that no task names"),
    (an_old_lease_entry, "leased entry that no task names"),
    (no_ready_mark, "the ready index does not know"),
    (no_due_time, "the due index does not know"),
    (a_due_time_too_late, "the due index does not know"),
    (a_due_time_not_indexed, "the due index does not know"),
    (a_stale_due_entry, "due entry that its queue does not name"),
    (a_due_entry_of_an_unknown_queue, "due entry that its queue does not name"),
    (a_body_without_a_task, "body without a task"),
    (a_key_without_a_task, "key that its task does not have"),
    (a_key_of_another_task, "key that its task does not have"),
    (a_wrong_counter, "a recount gives"),
    (a_wrong_total, "a recount gives"),
    (a_counter_of_an_unknown_queue, "a recount gives"),
    (a_wrong_journal_size, "the journal's size"),
    (ended_for_ever, "will expire"),
]


@pytest.mark.parametrize(("how", "named"), MENDABLE, ids=[how.__name__ for how, _ in MENDABLE])
async def test_it_is_named_and_mended(
    store: OrderedStore, clock: ManualClock, how: Callable[[Txn, Ward], None], named: str
) -> None:
    """The doctor says what is wrong without touching it; mended, the store is clean and every task lives on."""
    ward = await fill(store)
    before = await list_all(store)
    await break_it(store, lambda txn: how(txn, ward))
    for _ in range(2):
        problems = (await store.doctor()).problems
        assert any(named in problem.what for problem in problems), problems
    report = await store.doctor(mend=True)
    assert report.clean, report.problems
    assert await list_all(store) == before
    await assert_counts(store)
    await pass_time(store, clock, 3_600)
    assert sorted(await drain(store)) == sorted([ward.ready, ward.keyed, ward.delayed, ward.leased])
    await pass_time(store, clock, 30 * 86_400)
    assert {task.id for task in await list_all(store)} == {ward.ready, ward.keyed, ward.delayed, ward.leased}
    assert (await store.doctor()).clean


async def test_a_lost_key_is_named(store: OrderedStore) -> None:
    """A task that is kept holds its key: without the record a repeat would be accepted as new, until it is mended."""
    ward = await fill(store)

    def lose(txn: Txn) -> None:
        [key] = txn.scan_keys(QUEUE.key, end_of(QUEUE.key), 10)
        txn.delete(key)

    await break_it(store, lose)
    [problem] = (await store.doctor()).problems
    assert problem.what == "does not hold its deduplication key"
    assert id_to_text(ward.keyed) in problem.where
    assert (await store.doctor(mend=True)).clean
    [repeat] = await store.enqueue(TENANT, [NewTask(command=COMMAND, key="k")])
    assert repeat == Duplicate(ward.keyed, Status.PENDING)


async def test_a_key_passed_on_is_no_problem(store: OrderedStore, clock: ManualClock) -> None:
    """A key went to a second task when the first was over; a clock set back shows both, and one has the key."""
    first = await put_completed(store, key="k", result_ttl_s=10)
    clock.advance(11)
    second = await put(store, key="k")
    clock.advance(-2)
    assert {task.id for task in await list_all(store)} == {first, second}
    assert [task and task.id for task in await store.get(TENANT, [ByKey(COMMAND, "k")])] == [second]
    report = await store.doctor()
    assert report.clean, report.problems


async def test_an_expiry_that_names_a_task_twice(store: OrderedStore, clock: ManualClock) -> None:
    """Such entries were written once: what they name is removed, and counted, once."""
    ward = await fill(store)
    until_ms = (await look(store, ward.done)).kept_until_ms
    assert until_ms is not None
    twice = expiry_key(until_ms, EXPIRE_TASK, TENANT, bytes(12))
    await break_it(store, lambda txn: txn.put(twice, ward.done * 2))
    clock.advance((until_ms - clock.now_ms()) / 1000)
    await sweep_all(store)
    report = await store.doctor()
    assert report.clean, report.problems
    assert ward.done not in {task.id for task in await list_all(store)}


async def test_a_result_without_a_task(store: OrderedStore) -> None:
    """A result that nobody can ask for is named and dropped."""
    await put(store)
    await settle(store, await take(store), Kind.COMPLETE, result=b"r" * 10_000)
    [(_, result)] = store._engine.read(lambda txn: txn.scan(OWNER.result, end_of(OWNER.result), 10))
    await break_it(store, lambda txn: txn.put(OWNER.result + new_id(), result))
    assert [problem.what for problem in (await store.doctor()).problems] == ["result without a task"]
    assert (await store.doctor(mend=True)).clean


async def test_a_missing_body_is_named(store: OrderedStore) -> None:
    """What the producer said cannot be rebuilt: the doctor names the task, and mending takes it out of the way."""
    ward = await fill(store)
    await break_it(store, lambda txn: txn.delete(OWNER.body + ward.ready))
    [problem] = (await store.doctor()).problems
    assert problem.what == "no body"
    assert id_to_text(ward.ready) in problem.where
    assert (await store.doctor(mend=True)).clean
    assert ward.ready not in {lease.id for lease in await store.claim(TENANT, [COMMAND], limit=100)}


@pytest.mark.parametrize("letter", [b"S", b"T"], ids=["state", "body"])
async def test_a_record_that_cannot_be_read_is_named(store: OrderedStore, letter: bytes) -> None:
    """The doctor names a broken record instead of breaking down at it."""
    ward = await fill(store)
    key = TENANT.encode() + b"\0" + letter + ward.ready
    await break_it(store, lambda txn: txn.put(key, b"\xc1rubbish"))
    problems = (await store.doctor()).problems
    assert any("cannot be read" in problem.what for problem in problems), problems


async def test_a_broken_state_is_made_anew(store: OrderedStore) -> None:
    """A state that cannot be read blocks its queue until it is mended; then the task can run (again), with its key."""
    ward = await fill(store)
    await break_it(store, lambda txn: txn.put(OWNER.state + ward.keyed, b"\xc1rubbish"))
    with pytest.raises(StoreCorrupt):
        await store.claim(TENANT, [COMMAND], limit=100)
    assert (await store.doctor(mend=True)).clean
    assert ward.keyed in {lease.id for lease in await store.claim(TENANT, [COMMAND], limit=100)}
    assert (await look(store, ward.keyed)).key is not None


async def test_a_broken_journal_entry_is_named(store: OrderedStore) -> None:
    """An entry that cannot be read is named; mending drops it, and the rest can be read again."""
    await fill(store)

    def breakage(txn: Txn) -> None:
        key, value = txn.scan(JOURNAL, end_of(JOURNAL), 1)[0]
        txn.put(key, b"\xc1" * len(value))

    await break_it(store, breakage)
    assert [problem.what for problem in (await store.doctor()).problems] == ["journal entry cannot be read"]
    assert (await store.doctor(mend=True)).clean
    assert (await store.events(TENANT)).events


async def test_a_lease_is_taken_back_after_its_entry_was_lost(store: OrderedStore, clock: ManualClock) -> None:
    """Mending makes a stranded task run again: that is what the doctor is for."""
    ward = await fill(store)
    await break_it(store, lambda txn: no_leased_entry(txn, ward))
    await pass_time(store, clock, 60)
    assert (await store.get(TENANT, [ward.leased]))[0] is not None
    assert (await store.doctor(mend=True)).clean
    await pass_time(store, clock, 1)
    leases = await store.claim(TENANT, [COMMAND], limit=10)
    assert ward.leased in {lease.id for lease in leases}
    lease = next(lease for lease in leases if lease.id == ward.leased)
    assert await settle(store, lease, Kind.FAIL, error=BOOM) == Settled(Status.FAILED)


async def test_no_time_is_taken_for_a_block(store: OrderedStore, clock: ManualClock) -> None:
    """Leased tasks and dead letters have a time where ready ones have their kind: at no millisecond is one taken for a
    block of a load, found fault with, or mended away."""
    for _ in range(256):
        await put(store)
        await put(store)
        await fail(store, await take(store))
        await take(store, lease_s=3600)
        clock.advance(0.001)
    report = await store.doctor(mend=True)
    assert report.clean, report.problems[:3]
    assert (await pass_time(store, clock, 3600)).expired == 256
