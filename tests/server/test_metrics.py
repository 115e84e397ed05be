"""What Prometheus is told is what happened, within bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dibs.clock import ManualClock
from dibs.server.telemetry import depth, metrics
from dibs.server.telemetry.families import Bins, Labels
from dibs.server.telemetry.metrics import Metrics
from dibs.settings import Settings
from dibs.stores import open_local
from dibs.task import (
    Cause,
    Duplicate,
    Enqueued,
    ErrorInfo,
    Kind,
    Lease,
    LeaseLost,
    NewTask,
    Rejected,
    Settled,
    Settlement,
    Status,
)
from dibs.testing.contract.steps import put_many

ACME = "acme"
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


class Hand:
    """A monotonic clock that a test moves."""

    now_s = 50.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def samples(told: Metrics) -> dict[str, float]:
    """Everything that is told, by name and labels in the order of their names."""
    return {
        _text(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(told.render().decode())
        for sample in family.samples
    }


def _text(name: str, labels: dict[str, str]) -> str:
    shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return f"{name}{{{shown}}}" if shown else name


def settlement(lease: Lease, kind: Kind = Kind.COMPLETE) -> Settlement:
    """Ends a lease."""
    error = ErrorInfo("Boom") if kind in (Kind.RETRY, Kind.FAIL) else None
    return Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=kind, error=error)


async def test_a_life_is_counted() -> None:
    """Created, claimed, settled by kind and answer, with how long it waited and ran, and the commits it took."""
    clock, hand = ManualClock(), Hand()
    told = Metrics(hand, lambda: clock.now_ms() / 1000)
    async with await open_local("memory:", clock=clock) as store:
        store.meter = told
        batch = [NewTask(command="work", payload=b"1") for _ in range(4)]
        told.enqueued(ACME, batch, await store.enqueue(ACME, batch))
        clock.advance(2)
        leases = await store.claim(ACME, ["work"], limit=10, lease_s=5)
        told.claimed(leases)
        hand.now_s += 0.3
        first = [settlement(leases[0], Kind.COMPLETE), settlement(leases[1], Kind.FAIL)]
        told.settled(first, await store.settle(first))
        told.settled(first[:1], await store.settle(first[:1]))
        clock.advance(10)
        await store.sweep()
        late = [settlement(leases[2], Kind.RELEASE)]
        told.settled(late, await store.settle(late))
        seen = samples(told)
    queue = "command=work,tenant=acme"
    assert seen[f"dibs_tasks_created_total{{{queue}}}"] == 4
    assert seen[f"dibs_tasks_claimed_total{{{queue}}}"] == 4
    assert seen["dibs_tasks_settled_total{answer=accepted,command=work,kind=complete,tenant=acme}"] == 1
    assert seen["dibs_tasks_settled_total{answer=accepted,command=work,kind=fail,tenant=acme}"] == 1
    assert seen["dibs_tasks_settled_total{answer=already,command=other,kind=complete,tenant=other}"] == 1
    assert seen["dibs_tasks_settled_total{answer=lease_lost,command=work,kind=release,tenant=acme}"] == 1
    assert seen[f"dibs_task_wait_seconds_count{{{queue}}}"] == 4
    assert seen[f"dibs_task_wait_seconds_sum{{{queue}}}"] == pytest.approx(8)
    assert seen["dibs_task_wait_seconds_bucket{command=work,le=1.0,tenant=acme}"] == 0
    assert seen["dibs_task_wait_seconds_bucket{command=work,le=2.5,tenant=acme}"] == 4
    assert seen[f"dibs_task_run_seconds_count{{{queue}}}"] == 2
    assert seen[f"dibs_task_run_seconds_sum{{{queue}}}"] == pytest.approx(0.6)
    assert seen[f"dibs_leases_expired_total{{{queue}}}"] == 2
    assert seen["dibs_group_commit_calls_count"] == seen["dibs_group_commit_calls_bucket{le=1.0}"] == 4


def test_a_batch_of_one_kind_counts_as_its_items_do() -> None:
    """The usual batch, all accepted, goes another way to the same numbers."""
    hand = Hand()
    mixed, alike = Metrics(hand, hand), Metrics(hand, hand)
    leases = [lease(number, command="ab"[number % 2]) for number in range(10)]
    unknown = settlement(lease(99, "c"))
    mixed.claimed(leases)
    alike.claimed(leases)
    hand.now_s += 2
    items = [*map(settlement, leases), unknown]
    alike.settled(items, [Settled(Status.COMPLETED)] * 11)
    for item in items:
        mixed.settled([item, settlement(lease(98, "d"))], [Settled(Status.COMPLETED), Rejected("x", "y")])
    rejected = "dibs_tasks_settled_total{answer=rejected,command=other,kind=complete,tenant=other}"
    assert {key: value for key, value in samples(mixed).items() if key != rejected} == samples(alike)
    assert samples(alike)["dibs_task_run_seconds_sum{command=a,tenant=acme}"] == 10


def test_what_was_not_created_is_told_by_why() -> None:
    """Repeats, duplicates and rejections are not tasks; the command of what was rejected is nobody's label."""
    told = Metrics()
    batch = [NewTask(command="work"), NewTask(command="work"), NewTask(command="work"), NewTask(command="\x1b[31m")]
    answers: list[Enqueued | Duplicate | Rejected] = [
        Enqueued(b"1" * 16),
        Enqueued(b"2" * 16, already=True),
        Duplicate(b"3" * 16, Status.PENDING),
        Rejected("a", "b"),
    ]
    told.enqueued(ACME, batch, answers)
    told.loaded(ACME, 1_000)
    seen = samples(told)
    assert seen["dibs_tasks_created_total{command=work,tenant=acme}"] == 1
    assert seen["dibs_tasks_created_total{command=other,tenant=acme}"] == 1_000
    for why in ("already", "duplicate", "rejected"):
        assert seen[f"dibs_tasks_not_created_total{{tenant=acme,why={why}}}"] == 1
    assert "\x1b" not in told.render().decode()


def test_requests_and_limits_are_told() -> None:
    """By route and class of status, and by limit; what is under way now is a gauge."""
    told = Metrics()
    told.answered("/v1/tasks/{id}", 204, 0.004)
    told.answered("/v1/tasks/{id}", 503, 2.0)
    told.requests_in_progress.inc()
    told.waiting_claims.inc()
    told.waiting_claims.inc()
    told.waiting_claims.dec()
    told.limit_hit(ACME, "enqueue_per_s")
    seen = samples(told)
    assert seen["dibs_request_duration_seconds_bucket{le=0.005,route=/v1/tasks/{id},status=2xx}"] == 1
    assert seen["dibs_request_duration_seconds_bucket{le=1.0,route=/v1/tasks/{id},status=5xx}"] == 0
    assert seen["dibs_request_duration_seconds_bucket{le=2.5,route=/v1/tasks/{id},status=5xx}"] == 1
    assert seen["dibs_requests_in_progress"] == seen["dibs_claims_waiting"] == 1
    assert seen["dibs_limit_hits_total{limit=enqueue_per_s,tenant=acme}"] == 1


def test_labels_are_bounded() -> None:
    """A hundred thousand tenants, commands and routes make no more series than a few hundred."""
    told = Metrics()
    for number in range(10_000):
        told.created(f"t{number}", "work")
        told.created(ACME, f"command-{number}")
        told.answered(f"/{number}", 200, 0.1)
        told.limit_hit(f"t{number}", "read_per_s")
        told.claimed([lease(number, command=f"c{number}")])
        told.committed(1, {(f"t{number}", "work"): 1})
    seen = samples(told)
    assert len(seen) < 12_000
    assert seen["dibs_tasks_created_total{command=other,tenant=other}"] >= 20_000 - metrics.QUEUES_MAX
    assert sum(value for key, value in seen.items() if key.startswith("dibs_tasks_created_total")) == 20_000
    assert seen["dibs_limit_hits_total{limit=read_per_s,tenant=other}"] == 10_000 - metrics.TENANTS_MAX
    assert sum(value for key, value in seen.items() if key.startswith("dibs_leases_expired_total")) == 10_000


def test_leases_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first; their settlements are counted under other."""
    monkeypatch.setattr(metrics, "LEASES_KEPT", 100)
    told = Metrics()
    leases = [lease(number) for number in range(150)]
    told.claimed(leases[:90])
    told.claimed(leases[90:])
    assert len(told._leases) == 100
    told.settled([*map(settlement, leases)], [Settled(Status.COMPLETED)] * 150)
    assert not told._leases
    assert samples(told)["dibs_task_run_seconds_count{command=work,tenant=acme}"] == 100


def test_a_lease_that_was_lost_may_still_be_settled() -> None:
    """An answer that changes nothing forgets nothing."""
    told = Metrics()
    told.claimed([lease(1)])
    told.settled([settlement(lease(1))], [Rejected("store_unavailable", "down")])
    told.settled([settlement(lease(1))], [Settled(Status.COMPLETED)])
    assert samples(told)["dibs_task_run_seconds_count{command=work,tenant=acme}"] == 1
    told.settled([settlement(lease(2))], [LeaseLost(Cause.OTHER_TOKEN)])
    assert samples(told)["dibs_tasks_settled_total{answer=lease_lost,command=other,kind=complete,tenant=other}"] == 1


@pytest.mark.parametrize("now_ms", [0, 5, 999, 1_000, 5_000, 10_000_000, 200_000_000])
def test_many_times_at_once_are_binned_as_one_by_one(now_ms: int) -> None:
    """Also those that lie on a bound, beyond the last, or ahead of the clock."""
    times_ms = sorted([0, 5, 10, 995, 999, 1_000, 4_000, 100_000, 86_400_000, 86_400_001, 199_999_999])
    bulk, single = (Bins("x", "y", metrics.WAIT_BOUNDS_S, ("l",)) for _ in range(2))
    bulk.add_since(("v",), times_ms, now_ms)
    for at_ms in times_ms:
        single.add(("v",), max(0, now_ms - at_ms) / 1000)
    bulk_seen, single_seen = (
        [(sample.labels, pytest.approx(sample.value)) for sample in one.family().samples] for one in (bulk, single)
    )
    assert bulk_seen == single_seen


def test_labels_admit_the_first() -> None:
    """Those that have a name keep it."""
    labels = Labels(2, 2)
    assert labels.of("a", "b") == ("a", "b")
    assert labels.of("a", "c") == ("a", "c")
    assert labels.of("a", "d") == ("other", "other")
    assert labels.of("a", "b") == ("a", "b")


# -------------------------------------------------------------------------------------------------------------- depth


@pytest.mark.parametrize("url", ["memory:", "lmdb", "shards"])
async def test_queues_are_told_by_place(url: str, tmp_path: Path) -> None:
    """Counts, bytes and the age of the head, of queues that nobody used through this server too."""
    url = {"lmdb": f"lmdb:{tmp_path}/one", "shards": f"shards:{tmp_path}/set?n=2"}.get(url, url)
    async with await open_local(url, settings=Settings(durability="relaxed")) as store:
        await put_many(store, 3, "work", tenant=ACME, payload=b"12345")
        await put_many(store, 2, "work", tenant=ACME, delay_s=60)
        await put_many(store, 4, "other-work", tenant="globex")
        await store.claim(ACME, ["work"], limit=1)
        told = Metrics()
        await told.refresh(store)
        seen = samples(told)
    names = ("ready", "delayed", "leased", "dead")
    places = [seen[f"dibs_queue_tasks{{command=work,place={name},tenant=acme}}"] for name in names]
    assert places == [2, 2, 1, 0]
    assert seen["dibs_queue_tasks{command=other-work,place=ready,tenant=globex}"] == 4
    assert seen["dibs_queue_bytes{command=work,tenant=acme}"] == 15
    assert 0 <= seen["dibs_queue_oldest_ready_seconds{command=work,tenant=acme}"] < 60
    assert seen["dibs_tenants"] == 2
    assert seen["dibs_store_up"] == 1


async def test_queues_beyond_the_bound_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first have a name, the others are other, before and after they are looked for by name."""
    hand = Hand()
    monkeypatch.setattr(metrics, "QUEUES_MAX", 5)
    async with await open_local("memory:") as store:
        for number in range(12):
            await put_many(store, 2, f"c{number:02}", tenant=ACME)
        told = Metrics(hand)
        await told.refresh(store)
        first = samples(told)
        hand.now_s += depth.REFRESH_S
        await told.refresh(store)
        assert samples(told)["dibs_queue_tasks{command=other,place=ready,tenant=other}"] == 14
        assert first["dibs_queue_tasks{command=other,place=ready,tenant=other}"] == 14
        assert sum(value for key, value in first.items() if key.startswith("dibs_queue_tasks")) == 24


async def test_a_new_queue_is_named_once_it_is_used_or_looked_for() -> None:
    """Until then it counts as other; nothing is counted twice."""
    hand = Hand()
    told = Metrics(hand)
    async with await open_local("memory:") as store:
        await told.refresh(store)
        await put_many(store, 3, "elsewhere", tenant=ACME)
        await put_many(store, 2, "here", tenant=ACME)
        told.created(ACME, "here", 2)
        await told.refresh(store)
        assert not [key for key in samples(told) if key.startswith("dibs_queue_tasks")]  # a moment ago
        hand.now_s += depth.REFRESH_S
        await told.refresh(store)
        seen = samples(told)
        assert seen["dibs_queue_tasks{command=here,place=ready,tenant=acme}"] == 2
        assert seen["dibs_queue_tasks{command=other,place=ready,tenant=other}"] == 3
        hand.now_s += depth.DISCOVER_S
        await told.refresh(store)
        seen = samples(told)
        assert seen["dibs_queue_tasks{command=elsewhere,place=ready,tenant=acme}"] == 3
        assert "dibs_queue_tasks{command=other,place=ready,tenant=other}" not in seen


async def test_a_store_that_does_not_answer_is_told() -> None:
    """The old figures stay, and up is 0 until it answers again."""
    hand = Hand()
    told = Metrics(hand)

    async with await open_local("memory:") as store:
        await put_many(store, 3, tenant=ACME)
        await told.refresh(store)
    hand.now_s += depth.REFRESH_S
    await told.refresh(store)
    seen = samples(told)
    assert seen["dibs_store_up"] == 0
    assert seen["dibs_queue_tasks{command=work,place=ready,tenant=acme}"] == 3


async def test_readers_that_lag_are_told() -> None:
    """By the age of the oldest event that they have not read; one that has read all has none."""
    clock = ManualClock(1_000_000_000_000)
    told = Metrics()
    async with await open_local("memory:", clock=clock) as store:
        await put_many(store, 3, tenant=ACME)
        [bounds] = await store.journal_bounds()
        await store.advance("slow", 0, bounds.oldest)
        await store.advance("quick", 0, bounds.newest)
        await told.refresh(store)
    seen = samples(told)
    assert seen["dibs_journal_reader_lag_seconds{reader=quick,shard=0}"] == 0
    assert seen["dibs_journal_reader_lag_seconds{reader=slow,shard=0}"] > 3600


# -------------------------------------------------------------------------------------------------------------- names


def test_names_follow_the_conventions() -> None:
    """The prefix first, the unit last, counters end in total."""
    for family in Metrics().collect():
        assert family.name.startswith("dibs_")
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_calls"))


def test_the_page_has_every_metric() -> None:
    """Name, kind and labels, in the order in which they are shown."""
    rows = re.findall(r"^\| `(dibs_\w+)` \| (\w+) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    told = Metrics()
    expected = []
    for family, shown in zip(told.families(), told.collect(), strict=True):
        name = f"{family.name}_total" if shown.type == "counter" else family.name
        expected.append((name, shown.type, ", ".join(f"`{label}`" for label in family.labels) or "none"))
    assert rows == expected


def lease(number: int, command: str = "work") -> Lease:
    """A lease that nobody gave."""
    token = number.to_bytes(16, "big")
    return Lease(ACME, token, token, command, b"", "json", 0, 1, 5, 30.0, 0, 0)
