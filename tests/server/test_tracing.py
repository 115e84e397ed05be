"""From an enqueue to the end of a task, spans are linked by what the task carries."""

from __future__ import annotations

import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from dibs.errors import StoreFull
from dibs.ids import new_id
from dibs.server.telemetry import tracing as module
from dibs.server.telemetry.tracing import Tracing, context_of, text_of
from dibs.stores import open_local
from dibs.stores.local import LocalStore
from dibs.task import Cause, Kind, Lease, LeaseLost, NewTask, Rows, Settled, Settlement, Status

ACME = "acme"
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01"
TRACE = int("4bf92f3577b34da6a3ce929d0e0e4736", 16)


class Recorded:
    """A real provider, not the process's, and what it exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    def spans(self) -> list[ReadableSpan]:
        """All that have ended."""
        return [*self._exporter.get_finished_spans()]


@pytest.fixture
def recorded() -> Recorded:
    """Spans that can be looked at."""
    return Recorded()


async def put(tracing: Tracing, store: LocalStore, tasks: list[NewTask], caller: str | None = None) -> None:
    """What the gate does."""
    with tracing.enqueue(ACME, tasks, caller) as given:
        await store.enqueue(ACME, given)


def settlement(lease: Lease) -> Settlement:
    """Completes a task."""
    return Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=Kind.COMPLETE)


async def test_the_chain_from_enqueue_to_settle(recorded: Recorded) -> None:
    """The caller's trace goes on in enqueue, and claim and settle are linked to it, in a trace of the worker's."""
    tracing = recorded.tracing
    async with await open_local("memory:") as store:
        await put(tracing, store, [NewTask(command="work"), NewTask(command="work")], CALLER)
        began_ns = time.time_ns()
        leases = await store.claim(ACME, ["work"], limit=10)
        tracing.claimed(leases, began_ns, OTHER)
        items = [settlement(lease) for lease in leases]
        tracing.settled(items, await store.settle(items), time.time_ns(), OTHER)
    enqueue, claim, settle = recorded.spans()
    assert [span.name for span in (enqueue, claim, settle)] == ["enqueue", "claim", "settle"]
    assert enqueue.context is not None
    assert enqueue.parent is not None
    assert enqueue.context.trace_id == enqueue.parent.trace_id == TRACE
    assert {lease.traceparent for lease in leases} == {text_of(enqueue.context)}
    for span in (claim, settle):
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == "a" * 32
        assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [
            (TRACE, enqueue.context.span_id)
        ]
    assert claim.start_time == began_ns
    assert not tracing._contexts
    assert enqueue.attributes is not None
    assert enqueue.attributes["messaging.destination.name"] == "work"
    assert enqueue.attributes["messaging.batch.message_count"] == 2


async def test_without_a_trace_of_its_own_a_claim_of_one_task_is_in_the_tasks(recorded: Recorded) -> None:
    """One trace from enqueue to settle, though nobody sent a context."""
    tracing = recorded.tracing
    async with await open_local("memory:") as store:
        await put(tracing, store, [NewTask(command="work")])
        leases = await store.claim(ACME, ["work"])
        tracing.claimed(leases, time.time_ns())
        tracing.settled([settlement(leases[0])], [Settled(Status.COMPLETED)], time.time_ns())
    assert len({span.context.trace_id for span in recorded.spans() if span.context}) == 1
    assert len(recorded.spans()) == 3


async def test_a_tasks_own_context_is_kept(recorded: Recorded) -> None:
    """The span of the enqueue is linked to it; the task is handed on with it."""
    tasks = [NewTask(command="work", traceparent=OTHER), NewTask(command="work")]
    with recorded.tracing.enqueue(ACME, tasks, CALLER) as given:
        assert given[0].traceparent == OTHER
        assert given[1].traceparent is not None
        assert given[1].traceparent.startswith(CALLER[:36])
    [span] = recorded.spans()
    assert [f"{link.context.trace_id:032x}" for link in span.links] == ["a" * 32]


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "00-ab-cd-01",
        CALLER.upper(),
        CALLER + "-more",
        "ff" + CALLER[2:],
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        CALLER + "\n",
        CALLER.replace("4", "٤"),
        "00-" + "a" * 10_000,
    ],
)
async def test_a_context_that_cannot_be_read_is_ignored(recorded: Recorded, bad: str) -> None:
    """Of a caller, and of a task: the span begins a trace of its own, and nothing fails."""
    assert context_of(bad) is None
    tracing = recorded.tracing
    with tracing.enqueue(ACME, [NewTask(command="work", traceparent=bad)], bad) as given:
        assert given[0].traceparent == bad
    tracing.claimed([lease(1, bad)], time.time_ns(), bad)
    tracing.settled([settlement(lease(1, bad))], [Settled(Status.COMPLETED)], time.time_ns(), bad)
    assert [(span.parent, len(span.links)) for span in recorded.spans()] == [(None, 0)] * 3


def test_a_context_of_a_later_version_is_read() -> None:
    """As the standard asks: what is known of it counts."""
    context = context_of("01" + CALLER[2:] + "-what-comes-later")
    assert context is not None
    assert context.trace_id == TRACE


def test_links_and_memory_are_bounded(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 1,000 has a span of some links; leases that never end are forgotten."""
    monkeypatch.setattr(module, "LEASES_KEPT", 500)
    leases = [lease(number, f"00-{number + 1:032x}-{1:016x}-01") for number in range(1_000)]
    recorded.tracing.claimed(leases, time.time_ns())
    [span] = recorded.spans()
    assert len(span.links) == module.LINKS_MAX
    assert len(recorded.tracing._contexts) == 500
    recorded.tracing.claimed([], time.time_ns())
    assert len(recorded.spans()) == 1


def test_a_lease_that_was_not_ended_is_remembered(recorded: Recorded) -> None:
    """Another settlement may follow, and is linked."""
    tracing = recorded.tracing
    tracing.claimed([lease(1, CALLER)], time.time_ns())
    tracing.settled([settlement(lease(1))], [LeaseLost(Cause.OTHER_TOKEN)], time.time_ns())
    tracing.settled([settlement(lease(1))], [Settled(Status.COMPLETED)], time.time_ns())
    _, lost, settled = recorded.spans()
    assert (len(lost.links), len(settled.links)) == (0, 1)
    assert lost.attributes is not None
    assert lost.attributes["dibs.refused"] == 1


async def test_rows_of_a_load_carry_the_span_too(recorded: Recorded) -> None:
    """Through the options that rows share."""
    chunk_id, rows = new_id(), Rows([b"1", b"2"], [NewTask(command="work")])
    async with await open_local("memory:") as store:
        with recorded.tracing.stage(ACME, rows, CALLER) as given:
            await store.stage(ACME, chunk_id, given)
        await store.commit_load(ACME, "load", 0, [chunk_id])
        leases = await store.claim(ACME, ["work"], limit=10)
    [span] = recorded.spans()
    assert span.context is not None
    assert {one.traceparent for one in leases} == {text_of(span.context)}


def test_what_fails_is_marked_without_its_words(recorded: Recorded) -> None:
    """The error goes on; its message may hold what a caller sent."""
    with pytest.raises(StoreFull), recorded.tracing.enqueue(ACME, [NewTask(command="work")]):
        raise StoreFull("secret words")
    [span] = recorded.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "secret" not in span.to_json()


def test_without_an_sdk_the_callers_context_is_handed_on() -> None:
    """Nothing is recorded or remembered, and tasks without a context get the caller's; without one, they stay as they
    are."""
    tracing = Tracing()
    assert not tracing.on
    tasks = [NewTask(command="work")]
    with tracing.enqueue(ACME, tasks) as given:
        assert given is tasks
    with tracing.enqueue(ACME, tasks, CALLER) as given:
        assert [task.traceparent for task in given] == [CALLER]
    with tracing.stage(ACME, Rows([b""], tasks), CALLER) as rows:
        assert [task.traceparent for task in rows.options] == [CALLER]
    tracing.claimed([lease(1, CALLER)], 0)
    tracing.settled([settlement(lease(1))], [Settled(Status.COMPLETED)], 0)
    assert not tracing._contexts


def test_what_is_not_sampled_is_handed_on_as_such() -> None:
    """The worker learns that the trace is not recorded."""
    tracing = Tracing(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    with tracing.enqueue(ACME, [NewTask(command="work")], CALLER) as given:
        assert given[0].traceparent is not None
        assert given[0].traceparent.startswith(CALLER[:36])
        assert given[0].traceparent.endswith("-00")


def lease(number: int, traceparent: str | None = None) -> Lease:
    """A lease that nobody gave."""
    token = number.to_bytes(16, "big")
    return Lease(ACME, token, token, "work", b"", "json", 0, 1, 5, 30.0, 0, 0, traceparent=traceparent)
