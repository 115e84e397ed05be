"""What a server tells Prometheus. Every name, unit and label is in ``docs/operations.md``; a test compares.

Labels are bounded: the first so many queues, tenants and routes have a name, the others are `other`, and no label is
text that a caller can choose beyond that. Methods on the way of a task take a whole batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from dibs.server.telemetry.depth import Depth
from dibs.server.telemetry.families import OTHER, Bins, Counts, Labels, Values
from dibs.stores.protocol import Store
from dibs.task import (
    Already,
    Duplicate,
    Enqueued,
    Lease,
    LeaseLost,
    NewTask,
    Rejected,
    Settled,
    Settlement,
)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

QUEUES_MAX = 200
TENANTS_MAX = 200
ROUTES_MAX = 200
LEASES_KEPT = 200_000
"""Leases that this server gave and whose end it has not seen; the oldest are forgotten first."""

WAIT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 3_600, 86_400)
RUN_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 3_600)
REQUEST_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GROUP_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024)

_QUEUE = ("tenant", "command")
_ANSWERS: Mapping[type, str] = {
    Settled: "accepted",
    Already: "already",
    LeaseLost: "lease_lost",
    Rejected: "rejected",
}
_kind_of = attrgetter("kind")
_token_of = attrgetter("token")
_command_of = attrgetter("command")
_tenant_of = attrgetter("tenant")
_enqueued_ms_of = attrgetter("enqueued_ms")


class Metrics:
    """All of a server's metrics, in a registry of its own. A `Meter` too: give it to the store."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, wall_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._wall_s = wall_s
        self._queues = Labels(QUEUES_MAX, 2)
        self._tenants = Labels(TENANTS_MAX, 1)
        self._routes = Labels(ROUTES_MAX, 1)
        self._leases: dict[bytes, _Given] = {}
        self._created = Counts("dibs_tasks_created", "Tasks put into queues.", _QUEUE)
        self._unmade = Counts(
            "dibs_tasks_not_created", "Tasks that were sent and not put in, by why.", ("tenant", "why")
        )
        self._claimed = Counts("dibs_tasks_claimed", "Leases given.", _QUEUE)
        self._settled = Counts(
            "dibs_tasks_settled", "Settlements, by kind and by what became of them.", (*_QUEUE, "kind", "answer")
        )
        self._wait = Bins("dibs_task_wait_seconds", "From enqueue to claim, a delay included.", WAIT_BOUNDS_S, _QUEUE)
        self._run = Bins("dibs_task_run_seconds", "From claim to accepted settlement.", RUN_BOUNDS_S, _QUEUE)
        self._expired = Counts("dibs_leases_expired", "Leases that ran out and were taken back.", _QUEUE)
        self._groups = Bins("dibs_group_commit_calls", "Calls that shared one commit.", GROUP_BOUNDS)
        self._requests = Bins(
            "dibs_request_duration_seconds",
            "Requests by route and class of status.",
            REQUEST_BOUNDS_S,
            ("route", "status"),
        )
        self.requests_in_progress = Counts("dibs_requests_in_progress", "Requests not answered yet.", gauge=True)
        self.waiting_claims = Counts("dibs_claims_waiting", "Claims that wait for tasks.", gauge=True)
        self.shards_down = Counts("dibs_shards_down", "Shards of the store that do not answer.", gauge=True)
        self._cut = Counts("dibs_connections_cut", "Connections refused or cut off, by why.", ("why",))
        self._hits = Counts("dibs_limit_hits", "Calls or tasks refused by a limit.", ("tenant", "limit"))
        self.depth = Depth(self._queues, now_s)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    # ------------------------------------------------------------------------------------------------- life of a task

    def enqueued(
        self, tenant: str, tasks: Sequence[NewTask], outcomes: Sequence[Enqueued | Duplicate | Rejected]
    ) -> None:
        """Counts what became of a batch."""
        kinds = Counter(map(type, outcomes))
        if len(kinds) == 1 and Enqueued in kinds and not any(outcome.already for outcome in outcomes):  # type: ignore[union-attr]
            for command, count in Counter(map(_command_of, tasks)).items():
                self.created(tenant, command, count)
            return
        for task, outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, Enqueued) and not outcome.already:
                self.created(tenant, task.command)
            else:
                why = {Enqueued: "already", Duplicate: "duplicate", Rejected: "rejected"}[type(outcome)]
                self._unmade.inc(*self._tenants.of(tenant), why)

    def created(self, tenant: str, command: str, count: int = 1) -> None:
        """So many tasks were put into a queue."""
        self._created.add(self._queues.of(tenant, command), count)

    def loaded(self, tenant: str, rows: int) -> None:
        """So many rows of a load were put in; their commands are not known here."""
        self._created.add((*self._tenants.of(tenant), OTHER), rows)

    def claimed(self, leases: Sequence[Lease]) -> None:
        """Counts leases that are given to somebody."""
        if not leases:
            return
        now_s = self._now_s()
        by_queue: Iterable[tuple[str, str, Sequence[Lease]]]
        first = leases[0]
        if len({*map(_command_of, leases)}) == len({*map(_tenant_of, leases)}) == 1:
            by_queue = [(first.tenant, first.command, leases)]
        else:
            by_queue = _by_queue(leases)
        for tenant, command, some in by_queue:
            values = self._queues.of(tenant, command)
            self._claimed.add(values, len(some))
            self._wait.add_since(values, sorted(map(_enqueued_ms_of, some)), round(self._wall_s() * 1000))
            self._leases.update(dict.fromkeys(map(_token_of, some), _Given(values, now_s)))
        excess = len(self._leases) - LEASES_KEPT
        if excess > 0:
            for token in [*islice(self._leases, excess)]:
                del self._leases[token]

    def settled(
        self, settlements: Sequence[Settlement], outcomes: Sequence[Settled | Already | LeaseLost | Rejected]
    ) -> None:
        """Counts what became of a batch of settlements. The queue of a lease that another server gave, or that is long
        forgotten, is `other`."""
        if not settlements:
            return
        now_s = self._now_s()
        if {*map(type, outcomes)} == {Settled} and len({*map(id, map(_kind_of, settlements))}) == 1:
            # The usual batch: all of a kind and all accepted.
            pop, kind = self._leases.pop, settlements[0].kind.value
            for given, count in Counter([pop(token, None) for token in map(_token_of, settlements)]).items():
                if given is None:
                    self._settled.add((OTHER, OTHER, kind, "accepted"), count)
                else:
                    self._settled.add((*given.values, kind, "accepted"), count)
                    self._run.add(given.values, now_s - given.at_s, count)
            return
        for item, outcome in zip(settlements, outcomes, strict=True):
            ends = isinstance(outcome, Settled | Already)
            given = self._leases.pop(item.token, None) if ends else self._leases.get(item.token)
            values = (OTHER, OTHER) if given is None else given.values
            self._settled.inc(*values, item.kind.value, _ANSWERS[type(outcome)])
            if given is not None and isinstance(outcome, Settled):
                self._run.add(values, now_s - given.at_s)

    # -------------------------------------------------------------------------------------------------------- the rest

    def committed(self, calls: int, expired: Mapping[tuple[str, str], int]) -> None:
        """Of the store: a commit, from its own thread."""
        self._groups.add((), calls)
        for (tenant, command), count in expired.items():
            self._expired.add(self._queues.of(tenant, command), count)

    def answered(self, route: str, status: int, duration_s: float) -> None:
        """A request was answered. `route`: the template, never the path."""
        self._requests.add((*self._routes.of(route), f"{status // 100}xx"), duration_s)

    def connection_cut(self, why: str) -> None:
        """A connection was refused or cut off."""
        self._cut.inc(why)

    def limit_hit(self, tenant: str, limit: str) -> None:
        """A limit refused something."""
        self._hits.inc(*self._tenants.of(tenant), limit)

    async def refresh(self, store: Store) -> None:
        """Looks at the queues, unless that was a moment ago: before `render`."""
        await self.depth.refresh(store)

    def render(self) -> bytes:
        """Returns everything as Prometheus reads it."""
        return generate_latest(self.registry)

    def families(self) -> Sequence[Counts | Bins]:
        """Every metric, in the order in which they are shown."""
        return (
            self._created, self._unmade, self._claimed, self._settled, self._wait, self._run, self._expired,
            self._groups, *self.depth.families(), self._requests, self.requests_in_progress, self.waiting_claims,
            self.shards_down, self._cut, self._hits,
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        for family in self.families():
            yield family.family()


class _Given:
    """Leases of one queue that were given together."""

    __slots__ = ("at_s", "values")

    def __init__(self, values: Values, at_s: float) -> None:
        self.values = values
        self.at_s = at_s


def _by_queue(leases: Sequence[Lease]) -> list[tuple[str, str, Sequence[Lease]]]:
    groups: dict[tuple[str, str], list[Lease]] = {}
    for lease in leases:
        groups.setdefault((lease.tenant, lease.command), []).append(lease)
    return [(*queue, some) for queue, some in groups.items()]
