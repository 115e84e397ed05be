"""What goes through the gate is limited, counted and traced."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dibs.errors import LimitExceeded
from dibs.ids import new_id
from dibs.server.auth import ALL_SCOPES, Principal
from dibs.server.gate import Gate
from dibs.server.limiter import Limiter
from dibs.server.limits import LimitsTable, TenantLimits
from dibs.server.telemetry.metrics import Metrics
from dibs.server.telemetry.tracing import Tracing
from dibs.stores import open_local
from dibs.task import Enqueued, Kind, NewTask, Rejected, Rows, Settled, Settlement

ACME = Principal("acme", "shop", ALL_SCOPES)
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LIMITS = TenantLimits(
    requests_per_s=0.001, requests_burst=4, enqueue_per_s=0.001, enqueue_burst=10, payload_max_bytes=100
)


class Watched:
    """A gate, and all that watches it."""

    def __init__(self, gate: Gate, metrics: Metrics, exporter: InMemorySpanExporter) -> None:
        self.gate = gate
        self.metrics = metrics
        self.exporter = exporter

    def told(self, name: str) -> float:
        """The sum of a metric over all labels."""
        return sum(
            sample.value for family in self.metrics.collect() for sample in family.samples if sample.name == name
        )


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    """A gate before a store, for a tenant that has little."""
    exporter, metrics = InMemorySpanExporter(), Metrics()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    limiter = Limiter(LimitsTable(LIMITS), on_hit=metrics.limit_hit)
    async with await open_local("memory:") as store:
        store.meter = metrics
        yield Watched(Gate(store, limiter, metrics, Tracing(provider)), metrics, exporter)


def tasks(count: int, size_bytes: int = 1) -> list[NewTask]:
    """New tasks."""
    return [NewTask(command="work", payload=b"1" * size_bytes) for _ in range(count)]


async def test_a_life_is_limited_counted_and_traced(watched: Watched) -> None:
    """One bad task does not spoil its batch; leases are settled though the tenant has used up everything."""
    gate = watched.gate
    outcomes = await gate.enqueue(ACME, "acme", [*tasks(8), *tasks(1, 101)], traceparent=CALLER)
    assert [type(outcome) for outcome in outcomes] == [*[Enqueued] * 8, Rejected]
    with pytest.raises(LimitExceeded, match="enqueue_per_s"):
        await gate.enqueue(ACME, "acme", tasks(3))
    leases = await gate.claim(ACME, "acme", ["work"], limit=10)
    assert len(leases) == 8
    await gate.get(ACME, "acme", [leases[0].id])
    await gate.get(ACME, "acme", [leases[0].id])
    with pytest.raises(LimitExceeded, match="requests_per_s"):
        await gate.get(ACME, "acme", [leases[0].id])
    items = [Settlement(tenant="acme", id=one.id, token=one.token, kind=Kind.COMPLETE) for one in leases]
    for item in items:
        assert [type(outcome) for outcome in await gate.settle(ACME, [item])] == [Settled]
    assert watched.told("dibs_tasks_created_total") == 8
    assert watched.told("dibs_tasks_not_created_total") == 1
    assert watched.told("dibs_tasks_claimed_total") == 8
    assert watched.told("dibs_tasks_settled_total") == 8
    assert watched.told("dibs_task_run_seconds_count") == 8
    assert watched.told("dibs_limit_hits_total") == 3
    spans = watched.exporter.get_finished_spans()
    assert [span.name for span in spans] == ["enqueue", "claim", *["settle"] * 8]
    assert {f"{link.context.trace_id:032x}" for span in spans[1:] for link in span.links} == {CALLER[3:35]}


async def test_a_load_pays_as_its_rows_would(watched: Watched) -> None:
    """Staged in chunks instead of enqueued, tasks cost the same."""
    gate, chunk_id = watched.gate, new_id()
    rows = Rows([b"1"] * 10, [NewTask(command="work")])
    await gate.stage(ACME, "acme", chunk_id, rows, traceparent=CALLER)
    with pytest.raises(LimitExceeded, match="enqueue_per_s"):
        await gate.stage(ACME, "acme", new_id(), rows)
    with pytest.raises(LimitExceeded, match="enqueue_per_s"):
        await gate.enqueue(ACME, "acme", tasks(1))
    assert (await gate.commit_load(ACME, "acme", "load", 0, [chunk_id])).rows == 10
    assert watched.told("dibs_tasks_created_total") == 10
    [lease, *_] = await gate.claim(ACME, "acme", ["work"], limit=10)
    assert lease.traceparent is not None
    assert lease.traceparent.startswith(CALLER[:36])
