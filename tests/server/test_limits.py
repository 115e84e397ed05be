"""What a tenant may use is held to, by rates and by ceilings, whichever way the tasks come."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from dibs.errors import InvalidOption, LimitExceeded, PayloadTooLarge, SettingsError
from dibs.ids import new_id
from dibs.server.auth import NEEDS
from dibs.server.limiter import GROUPS, NEVER_REFUSED, TENANTS_KEPT, Limiter
from dibs.server.limits import FIELDS, UNLIMITED, LimitsTable, TenantLimits, read_limits
from dibs.settings import Settings
from dibs.stores import open_local
from dibs.stores.batches import merged
from dibs.stores.direct import DirectStore
from dibs.task import Committed, Enqueued, Kind, Lease, NewTask, Rejected, Rows, Settlement

ACME = "acme"
STORES = ["memory:", "lmdb", "shards"]


class Hand:
    """A clock that a test moves, and the limits that were hit."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now_s = start_s
        self.hits: list[tuple[str, str]] = []

    def __call__(self) -> float:
        """The time."""
        return self.now_s

    def limiter(self, default: TenantLimits = UNLIMITED, **tenants: TenantLimits) -> Limiter:
        """A limiter by this clock."""
        return Limiter(LimitsTable(default, tenants), self, lambda tenant, name: self.hits.append((tenant, name)), self)


@pytest.fixture
def hand() -> Hand:
    """Time."""
    return Hand()


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DirectStore]:
    """A new store of every embedded kind."""
    url = {"lmdb": f"lmdb:{tmp_path}/one", "shards": f"shards:{tmp_path}/set?n=2"}.get(request.param, request.param)
    async with await open_local(url, settings=Settings(durability="relaxed")) as opened:
        yield opened


def tasks(count: int, size_bytes: int = 10, **options: float) -> list[NewTask]:
    """New tasks, all alike."""
    return [NewTask(command="work", payload=b"x" * size_bytes, codec="raw", **options) for _ in range(count)]  # type: ignore[arg-type]


async def enqueue(limiter: Limiter, store: DirectStore, some: list[NewTask], tenant: str = ACME) -> list[object]:
    """What the gate does."""
    async with limiter.enqueueing(store, tenant, some) as entry:
        return [*merged(await store.enqueue(tenant, entry.tasks), entry.rejected)]


async def claim(limiter: Limiter, store: DirectStore, limit: int, wait_s: float = 0.0, **options: bytes) -> list[Lease]:
    """What the gate does."""
    async with limiter.claiming(store, ACME, limit, wait_s, options.get("claim_id")) as room:
        if not room.limit:
            return []
        taken = await store.claim(
            ACME, ["work"], limit=room.limit, wait_s=room.wait_s, claim_id=options.get("claim_id")
        )
        room.took(len(taken))
        return taken


# -------------------------------------------------------------------------------------------------------- declaration


def test_a_tenants_table_overrides_single_limits() -> None:
    """The rest is the default's; none lifts a limit; a rate of one's own comes without the default's burst."""
    table = read_limits(
        tomllib.loads("""
            enqueue_per_s = 500
            enqueue_burst = 2_000
            enqueue_bytes_per_s = "10 MiB"
            delay_max_s = "7d"
            in_flight_max = 100
            [tenants.acme]
            enqueue_per_s = 5_000
            in_flight_max = "none"
        """)
    )
    assert table.default.enqueue_bytes_per_s == 10 * 2**20
    assert table.default.delay_max_s == 7 * 86_400
    acme = table.of(ACME)
    assert (acme.enqueue_per_s, acme.enqueue_burst, acme.in_flight_max) == (5_000, None, None)
    assert (acme.delay_max_s, acme.enqueue_bytes_per_s) == (7 * 86_400, 10 * 2**20)
    assert table.of("other") is table.default
    assert table.of("*") is UNLIMITED
    assert read_limits({}).default is UNLIMITED


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("enqueue_per_sec = 5", "enqueue_per_s"),
        ("enqueue_per_s = 0", "enqueue_per_s"),
        ("enqueue_per_s = nan", "enqueue_per_s"),
        ("enqueue_per_s = true", "enqueue_per_s"),
        ("enqueue_burst = 5", "enqueue_burst"),
        ("queued_tasks_max = 1.5", "queued_tasks_max"),
        ("queued_tasks_max = 0", "queued_tasks_max"),
        ("queued_bytes_max = '5 parsecs'", "queued_bytes_max"),
        ("delay_max_s = -1", "delay_max_s"),
        ("tenants = 5", "tenants"),
        ("tenants.acme = 5", "acme"),
        ("tenants.ACME = {}", "ACME"),
        ("tenants.acme.claim_per_s = 'fast'", "claim_per_s"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, named: str) -> None:
    """A mistake in the file is refused, and the message says where."""
    with pytest.raises(SettingsError, match=named):
        read_limits(tomllib.loads(text))


def test_every_verb_has_its_bucket_or_is_never_refused() -> None:
    """What the gate can be asked for is what limits know of; ending and keeping a lease is free."""
    assert {*GROUPS, *NEVER_REFUSED} == set(NEEDS)
    assert {"settle", "heartbeat", "unclaim"} == NEVER_REFUSED


# -------------------------------------------------------------------------------------------------------------- rates


def test_a_batch_costs_what_it_holds(hand: Hand) -> None:
    """A hundred tasks at once spend a hundred; the wait is what it takes to refill."""
    limiter = hand.limiter(TenantLimits(enqueue_per_s=100, enqueue_burst=100))
    limiter.spend(ACME, "enqueue", 100)
    with pytest.raises(LimitExceeded) as refused:
        limiter.spend(ACME, "enqueue", 50)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    hand.now_s += refused.value.retry_after_s
    limiter.spend(ACME, "enqueue", 50)
    assert hand.hits == [(ACME, "enqueue_per_s")]


def test_a_batch_over_the_burst_is_let_through_and_paid_off(hand: Hand) -> None:
    """It needs a full bucket, never the impossible, and the rate holds in the long run."""
    limiter = hand.limiter(TenantLimits(enqueue_per_s=10, enqueue_burst=10))
    limiter.spend(ACME, "enqueue", 1)
    with pytest.raises(LimitExceeded):
        limiter.spend(ACME, "enqueue", 1_000)
    hand.now_s += 1
    limiter.spend(ACME, "enqueue", 1_000)
    with pytest.raises(LimitExceeded) as refused:
        limiter.spend(ACME, "enqueue", 1)
    assert refused.value.retry_after_s == 60  # never told to wait longer at once
    hand.now_s += 99.05
    with pytest.raises(LimitExceeded):
        limiter.spend(ACME, "enqueue", 1)
    hand.now_s += 0.1
    limiter.spend(ACME, "enqueue", 1)


def test_a_refusal_spends_nothing_of_any_bucket(hand: Hand) -> None:
    """A call that one bucket refuses leaves the others as they were."""
    limiter = hand.limiter(TenantLimits(requests_per_s=2, enqueue_per_s=1_000, enqueue_bytes_per_s=100))
    limiter.spend(ACME, "enqueue", 1, 100)
    for _ in range(50):
        with pytest.raises(LimitExceeded, match="enqueue_bytes_per_s"):
            limiter.spend(ACME, "enqueue", 900, 50)
    limiter.spend(ACME, "enqueue", 900, 0)
    with pytest.raises(LimitExceeded, match="requests_per_s"):
        limiter.spend(ACME, "cancel")


def test_tenants_and_kinds_of_verbs_have_buckets_of_their_own(hand: Hand) -> None:
    """One tenant's haste, or one verb's, is nobody else's wait."""
    limiter = hand.limiter(TenantLimits(enqueue_per_s=1, claim_per_s=1, read_per_s=1), quick=TenantLimits())
    for verb in ("enqueue", "claim", "get"):
        limiter.spend(ACME, verb)
        limiter.spend("other", verb)
        with pytest.raises(LimitExceeded):
            limiter.spend(ACME, verb)
    for _ in range(1_000):
        limiter.spend("quick", "enqueue", 1_000)
        limiter.spend("*", "claim", 1_000)


def test_what_ends_a_lease_is_never_refused(hand: Hand) -> None:
    """Settle, heartbeat and unclaim cost nothing, not even a request."""
    limiter = hand.limiter(TenantLimits(requests_per_s=1))
    limiter.spend(ACME, "cancel")
    for verb in NEVER_REFUSED:
        limiter.spend(ACME, verb, 1_000, 10**9)
    hand.now_s += 1
    limiter.spend(ACME, "cancel")


def test_buckets_of_idle_tenants_are_forgotten(hand: Hand) -> None:
    """A hundred thousand tenants that come once leave no more than a bounded number behind; who is in debt stays."""
    limiter = hand.limiter(TenantLimits(enqueue_per_s=10))
    limiter.spend("debtor", "enqueue", 10_000_000)
    for number in range(100_000):
        hand.now_s += 0.01
        limiter.spend(f"t{number}", "enqueue")
    assert len(limiter._buckets) <= 2 * TENANTS_KEPT
    with pytest.raises(LimitExceeded):
        limiter.spend("debtor", "enqueue")


# ----------------------------------------------------------------------------------------------------------- ceilings


async def test_items_over_a_limit_are_rejected_one_by_one(store: DirectStore, hand: Hand) -> None:
    """A payload or a delay beyond the tenant's limit does not spoil the rest of the batch, and costs nothing."""
    limiter = hand.limiter(TenantLimits(payload_max_bytes=100, delay_max_s=60, enqueue_per_s=2))
    in_an_hour_ms = round((hand.now_s + 3600) * 1000)
    batch = [
        *tasks(1, 100),
        *tasks(1, 101),
        *tasks(1, delay_s=60),
        *tasks(1, delay_s=60.5),
        NewTask(command="work", run_at_ms=in_an_hour_ms),
    ]
    outcomes = await enqueue(limiter, store, batch)
    assert [type(outcome) for outcome in outcomes] == [Enqueued, Rejected, Enqueued, Rejected, Rejected]
    codes = [outcome.code for outcome in outcomes if isinstance(outcome, Rejected)]
    assert codes == [PayloadTooLarge.code, InvalidOption.code, InvalidOption.code]
    assert [name for _, name in hand.hits] == ["payload_max_bytes", "delay_max_s", "delay_max_s"]


async def test_queued_tasks_have_a_ceiling(store: DirectStore, hand: Hand) -> None:
    """Ready and delayed count, others do not; a batch that does not fit is refused whole, and pays nothing."""
    limiter = hand.limiter(TenantLimits(queued_tasks_max=10, enqueue_per_s=16, enqueue_burst=16))
    await enqueue(limiter, store, tasks(4))
    await enqueue(limiter, store, tasks(4, delay_s=3600))
    for _ in range(5):
        with pytest.raises(LimitExceeded, match="queued_tasks_max") as refused:
            await enqueue(limiter, store, tasks(3))
        assert refused.value.retry_after_s > 0
    assert len(await store.claim(ACME, ["work"], limit=10)) == 4
    await enqueue(limiter, store, tasks(6))
    await enqueue(limiter, store, tasks(2), "other")
    assert {*hand.hits} == {(ACME, "queued_tasks_max")}


async def test_the_wait_at_a_ceiling_follows_how_fast_the_queue_empties(store: DirectStore, hand: Hand) -> None:
    """Ten tasks a second went since the last refusal: thirty too many are gone in three seconds."""
    limiter = hand.limiter(TenantLimits(queued_tasks_max=100))
    await enqueue(limiter, store, tasks(100))
    with pytest.raises(LimitExceeded):
        await enqueue(limiter, store, tasks(1))
    await store.claim(ACME, ["work"], limit=10)
    hand.now_s += 1
    with pytest.raises(LimitExceeded) as refused:
        await enqueue(limiter, store, tasks(40))
    assert refused.value.retry_after_s == pytest.approx(3)


async def test_queued_bytes_have_a_ceiling(store: DirectStore, hand: Hand) -> None:
    """Payloads that are held count; what could never fit says so."""
    limiter = hand.limiter(TenantLimits(queued_bytes_max=1_000))
    await enqueue(limiter, store, tasks(9, 100))
    with pytest.raises(LimitExceeded, match="queued_bytes_max"):
        await enqueue(limiter, store, tasks(2, 100))
    with pytest.raises(PayloadTooLarge, match="send fewer"):
        await enqueue(limiter, store, tasks(20, 100))


async def test_concurrent_callers_do_not_overshoot(store: DirectStore, hand: Hand) -> None:
    """All look before any has written: what is on its way counts too, and is let go when it failed."""
    limiter = hand.limiter(TenantLimits(queued_tasks_max=50))
    outcomes = await asyncio.gather(*(enqueue(limiter, store, tasks(5)) for _ in range(40)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, LimitExceeded)]
    queued = (await store.stats(ACME, [])).total.ready
    assert queued == 5 * (40 - len(refused))
    assert 0 < queued <= 50
    while queued < 50:
        await enqueue(limiter, store, tasks(5))
        queued += 5
    await store.purge(ACME, [])
    with pytest.raises(ValueError, match="boom"):
        async with limiter.enqueueing(store, "other", tasks(50)):
            raise ValueError("boom")
    await enqueue(limiter, store, tasks(50), "other")


async def stage(limiter: Limiter, store: DirectStore, chunk_id: bytes, rows: Sequence[NewTask] | Rows) -> None:
    """Stages a chunk as a server does."""
    async with limiter.staging(store, ACME, chunk_id, rows) as entry:
        await store.stage(ACME, chunk_id, rows)
        entry.done()


async def commit(limiter: Limiter, store: DirectStore, name: str, seq: int, chunk_ids: Sequence[bytes]) -> Committed:
    """Commits a load as a server does."""
    async with limiter.committing(store, ACME, chunk_ids) as entry:
        committed = await store.commit_load(ACME, name, seq, chunk_ids)
        if not committed.already:
            entry.done()
        return committed


async def test_loads_count_too(store: DirectStore, hand: Hand) -> None:
    """Rows are paid for when they are staged, and their room is held from then on."""
    limiter = hand.limiter(TenantLimits(queued_tasks_max=25, enqueue_per_s=40, payload_max_bytes=100))
    rows = Rows([b"1"] * 10, [NewTask(command="work")])
    first, second, third = (new_id() for _ in range(3))
    for chunk_id in (first, second, second):  # staged again it counts once
        await stage(limiter, store, chunk_id, rows)
    with pytest.raises(LimitExceeded, match="enqueue_per_s"):
        await stage(limiter, store, third, tasks(11))
    with pytest.raises(PayloadTooLarge):
        await stage(limiter, store, third, Rows([b"", b"1" * 101], [NewTask(command="work")]))
    hand.now_s += 1
    with pytest.raises(LimitExceeded, match="queued_tasks_max"):
        await stage(limiter, store, third, rows)
    with pytest.raises(LimitExceeded, match="queued_tasks_max"):
        await enqueue(limiter, store, tasks(6))
    assert (await commit(limiter, store, "load", 0, [first])).rows == 10
    with pytest.raises(LimitExceeded, match="queued_tasks_max"):
        await stage(limiter, store, third, rows)
    await store.drop(ACME, [second])
    limiter.dropped(ACME, [second])
    await stage(limiter, store, third, rows)


async def test_a_commit_that_changes_nothing_makes_no_room(store: DirectStore, hand: Hand) -> None:
    """Naming chunks in a commit that was made before does not have them forgotten: what waits still counts."""
    limiter = hand.limiter(TenantLimits(queued_tasks_max=25))
    chunks = [new_id(), new_id()]
    for chunk_id in chunks:
        await stage(limiter, store, chunk_id, Rows([b"1"] * 10, [NewTask(command="work")]))
    await commit(limiter, store, "load", 1, [])
    assert (await commit(limiter, store, "load", 1, chunks)).already
    with pytest.raises(LimitExceeded, match="queued_tasks_max"):
        await stage(limiter, store, new_id(), Rows([b"1"] * 10, [NewTask(command="work")]))


async def test_chunks_of_before_a_restart(store: DirectStore, hand: Hand) -> None:
    """Of what was staged before, nothing is known but that there must be room."""
    limiter = hand.limiter(TenantLimits(queued_tasks_max=5))
    unknown = new_id()
    async with limiter.committing(store, ACME, [unknown]):
        pass
    await enqueue(limiter, store, tasks(5))
    with pytest.raises(LimitExceeded, match="queued_tasks_max"):
        async with limiter.committing(store, ACME, [unknown]):
            raise AssertionError


# -------------------------------------------------------------------------------------------------------------- claims


async def test_a_claim_is_cut_to_what_may_be_in_flight(store: DirectStore, hand: Hand) -> None:
    """At the ceiling it is refused, and a settled task makes room."""
    limiter = hand.limiter(TenantLimits(in_flight_max=5))
    await store.enqueue(ACME, tasks(20))
    taken = await claim(limiter, store, 3)
    taken += await claim(limiter, store, 10)
    assert len(taken) == 5
    with pytest.raises(LimitExceeded, match="in_flight_max"):
        await claim(limiter, store, 1, wait_s=30)
    one = taken[0]
    await store.settle([Settlement(tenant=ACME, id=one.id, token=one.token, kind=Kind.COMPLETE)])
    assert len(await claim(limiter, store, 10)) == 1


async def test_a_repeated_claim_is_answered_at_the_ceiling(store: DirectStore, hand: Hand) -> None:
    """The answer that was lost can be asked for again: it takes nothing new."""
    limiter = hand.limiter(TenantLimits(in_flight_max=5))
    await store.enqueue(ACME, tasks(20))
    first = await claim(limiter, store, 5, claim_id=b"c" * 16)
    again = await claim(limiter, store, 5, claim_id=b"c" * 16)
    assert {lease.token for lease in again} == {lease.token for lease in first}


async def test_waiting_claims_do_not_overshoot_in_flight(store: DirectStore, hand: Hand) -> None:
    """Twenty wait for ten places: when forty tasks come, ten are taken."""
    limiter = hand.limiter(TenantLimits(in_flight_max=10))
    waiting = [asyncio.create_task(claim(limiter, store, 1, wait_s=1.5)) for _ in range(20)]
    await asyncio.sleep(0.05)
    await store.enqueue(ACME, tasks(40))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    taken = [lease for outcome in outcomes if isinstance(outcome, list) for lease in outcome]
    assert len(taken) == 10
    assert all(isinstance(outcome, list | LimitExceeded) for outcome in outcomes)
    assert (await store.stats(ACME, [])).total.leased == 10


async def test_the_rate_of_claims_holds_for_batches_and_waits(store: DirectStore, hand: Hand) -> None:
    """A claim is cut to what its bucket has; those that waited are paid for when they get something."""
    limiter = hand.limiter(TenantLimits(claim_per_s=10, claim_burst=10))
    await store.enqueue(ACME, tasks(8))
    assert len(await claim(limiter, store, 1_000)) == 8
    waiting = [asyncio.create_task(claim(limiter, store, 5, wait_s=10)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await store.enqueue(ACME, tasks(30))
    taken = sum(len(leases) for leases in await asyncio.gather(*waiting))
    assert 0 < taken <= 6  # each was cut to the two that were left
    owed = taken - 2
    with pytest.raises(LimitExceeded) as refused:
        await claim(limiter, store, 1)
    assert refused.value.retry_after_s == pytest.approx((owed + 1) / 10)
    hand.now_s += 1
    assert len(await claim(limiter, store, 1_000)) == 10 - owed


async def test_an_empty_claim_is_not_paid_for(store: DirectStore, hand: Hand) -> None:
    """Polling an empty queue spends requests only."""
    limiter = hand.limiter(TenantLimits(claim_per_s=1))
    for _ in range(100):
        assert await claim(limiter, store, 10) == []


def test_the_names_of_limits_say_their_units() -> None:
    """Every limit says of what and per what it is, or that it is a most."""
    assert all(name.endswith(("_per_s", "_burst", "_max", "_max_bytes", "_max_s")) for name in FIELDS)
