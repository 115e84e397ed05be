"""Spans of enqueue, claim and settle, linked by the trace context that a task carries (`traceparent`).

::

    the caller's span ──parent──▶ enqueue ◀──link── claim ◀──link── settle        (link: by the task's traceparent)

Only the API of OpenTelemetry is used here: whoever runs the server configures an SDK, or nothing is recorded. Then all
that is done is to hand on the caller's context to tasks that have none. A context that cannot be read is ignored.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
)

from dibs.task import Already, Lease, LeaseLost, NewTask, Rejected, Rows, Settled, Settlement

LINKS_MAX = 64
"""So many tasks of a batch are linked to its span."""
LEASES_KEPT = 100_000
"""Leases whose end has not been seen and whose context is remembered; the oldest are forgotten first."""
NAME_MAX_CHARS = 128

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_HEADER_MAX_CHARS = 512


class Tracing:
    """Makes the spans of one server."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """`provider`: whose spans they are; without one, that of the process."""
        provider = provider or trace.get_tracer_provider()
        self.on = not isinstance(provider, ProxyTracerProvider | NoOpTracerProvider)
        """False: nobody configured an SDK, so nothing is recorded."""
        self._tracer = provider.get_tracer("dibs")
        self._contexts: OrderedDict[bytes, SpanContext] = OrderedDict()

    @contextlib.contextmanager
    def enqueue(
        self, tenant: str, tasks: Sequence[NewTask], traceparent: str | None = None
    ) -> Iterator[Sequence[NewTask]]:
        """A span around an enqueue; `traceparent` is its caller's. Yields the tasks, those without a context of their
        own with the span's."""
        caller = context_of(traceparent)
        if not self.on:
            yield tasks if caller is None else _given(tasks, text_of(caller))
            return
        links = _contexts(task.traceparent for task in tasks)
        attributes = _attributes("enqueue", tenant, {task.command for task in tasks}, len(tasks))
        with self._span("enqueue", SpanKind.PRODUCER, caller, links, attributes) as span:
            yield _given(tasks, text_of(span.get_span_context()))

    @contextlib.contextmanager
    def stage(self, tenant: str, rows: Rows, traceparent: str | None = None) -> Iterator[Rows]:
        """The same for a chunk of a load."""
        caller = context_of(traceparent)
        if not self.on:
            yield rows if caller is None else replace(rows, options=[*_given(rows.options, text_of(caller))])
            return
        attributes = _attributes("stage", tenant, {one.command for one in rows.options}, len(rows.payloads))
        with self._span("stage", SpanKind.PRODUCER, caller, [], attributes) as span:
            yield replace(rows, options=[*_given(rows.options, text_of(span.get_span_context()))])

    def claimed(self, leases: Sequence[Lease], began_ns: int, traceparent: str | None = None) -> None:
        """A span of a claim that began at `began_ns` by the epoch and took something, linked to what it took."""
        if not self.on or not leases:
            return
        found = [context_of(lease.traceparent) for lease in leases]
        for lease, context in zip(leases, found, strict=True):
            if context is not None:
                self._contexts[lease.token] = context
        while len(self._contexts) > LEASES_KEPT:
            self._contexts.popitem(last=False)
        attributes = _attributes("claim", leases[0].tenant, {lease.command for lease in leases}, len(leases))
        self._past("claim", began_ns, context_of(traceparent), _distinct(found), attributes)

    def settled(
        self,
        settlements: Sequence[Settlement],
        outcomes: Sequence[Settled | Already | LeaseLost | Rejected],
        began_ns: int,
        traceparent: str | None = None,
    ) -> None:
        """A span of settlements that began at `began_ns` by the epoch, linked to the tasks whose leases it ended, if
        they were claimed here."""
        if not self.on or not settlements:
            return
        found = [
            self._contexts.pop(item.token, None) if isinstance(outcome, Settled | Already) else None
            for item, outcome in zip(settlements, outcomes, strict=True)
        ]
        attributes = _attributes("settle", settlements[0].tenant, (), len(settlements))
        attributes["dibs.refused"] = sum(not isinstance(outcome, Settled | Already) for outcome in outcomes)
        self._past("settle", began_ns, context_of(traceparent), _distinct(found), attributes)

    # --------------------------------------------------------------------------------------------------------- helpers

    @contextlib.contextmanager
    def _span(
        self,
        name: str,
        kind: SpanKind,
        parent: SpanContext | None,
        links: Sequence[SpanContext],
        attributes: dict[str, str | int],
    ) -> Iterator[Span]:
        span = self._tracer.start_span(
            name, _under(parent), kind, attributes, [Link(context) for context in links[:LINKS_MAX]]
        )
        try:
            yield span
        except Exception as error:
            # Its kind only: what it says may hold what a caller sent.
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()

    def _past(
        self,
        name: str,
        began_ns: int,
        parent: SpanContext | None,
        links: Sequence[SpanContext],
        attributes: dict[str, str | int],
    ) -> None:
        if parent is None and len(links) == 1:
            # About one task, for a caller without a trace of its own: it belongs to the task's.
            parent = links[0]
        span = self._tracer.start_span(
            name,
            _under(parent),
            SpanKind.CONSUMER,
            attributes,
            [Link(context) for context in links[:LINKS_MAX]],
            start_time=began_ns,
        )
        span.end(max(began_ns, time.time_ns()))


def context_of(traceparent: str | None) -> SpanContext | None:
    """Returns the span that a traceparent names; None if it names none, or cannot be read."""
    return None if not traceparent or len(traceparent) > _HEADER_MAX_CHARS else _parsed(traceparent)


@lru_cache(maxsize=1024)
def _parsed(traceparent: str) -> SpanContext | None:
    found = _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    context = SpanContext(
        int(found[2], 16), int(found[3], 16), True, TraceFlags(int(found[4], 16) & TraceFlags.SAMPLED)
    )
    return context if context.is_valid else None


def text_of(context: SpanContext) -> str | None:
    """Returns a span's traceparent; None for one that is not valid."""
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _given(tasks: Sequence[NewTask], traceparent: str | None) -> Sequence[NewTask]:
    if traceparent is None:
        return tasks
    return [replace(task, traceparent=traceparent) if task.traceparent is None else task for task in tasks]


def _under(parent: SpanContext | None) -> Context:
    """A context of its own in any case: what happens to be current in the loop has nothing to do with it."""
    return Context() if parent is None else trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _contexts(traceparents: Iterable[str | None]) -> list[SpanContext]:
    return _distinct(context_of(one) for one in traceparents)


def _distinct(contexts: Iterable[SpanContext | None]) -> list[SpanContext]:
    seen: dict[tuple[int, int], SpanContext] = {}
    for context in contexts:
        if context is not None:
            seen.setdefault((context.trace_id, context.span_id), context)
    return [*seen.values()]


def _attributes(verb: str, tenant: str, commands: Iterable[str], count: int) -> dict[str, str | int]:
    """What a span says of its call: names, if they can be names, and how many."""
    attributes: dict[str, str | int] = {
        "messaging.system": "dibs",
        "messaging.operation.name": verb,
        "messaging.batch.message_count": count,
    }
    if tenant.isascii():
        attributes["dibs.tenant"] = tenant[:NAME_MAX_CHARS]
    names = [*commands]
    if len(names) == 1 and names[0].isascii():
        attributes["messaging.destination.name"] = names[0][:NAME_MAX_CHARS]
    return attributes
