"""The wire between a remote store and a server: what each verb asks, and what is answered.

A call is ``POST /v1/store/<verb>`` with a msgpack struct and is answered by one value. Both ends read this table. The
values are those of :mod:`dibs.task`; a field that is new on one side has a default on the other.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, Generic, TypeVar

from msgspec import Struct

from dibs.stores.protocol import SWEEP_BUDGET, Order
from dibs.stores.wakeups import Ended, Journalled, Ready
from dibs.task import (
    BATCH_MAX,
    Acted,
    Already,
    Cancelled,
    Committed,
    Duplicate,
    Enqueued,
    Extended,
    Filter,
    Heartbeat,
    JournalBounds,
    Lease,
    LeaseLost,
    Marks,
    NewTask,
    Page,
    QueueConfig,
    Reader,
    Rejected,
    Rows,
    RunPage,
    Settled,
    Settlement,
    Staged,
    Stats,
    Swept,
    Task,
    TaskRef,
    TenantPage,
    WorkerInfo,
)

PATH = "/v1/store/"
WAIT_MAX_S = 50.0
"""So long a server lets a call wait; a client that wants to wait for longer asks again."""

WAITED_MAX = 100
"""So many tasks one call waits for; a client that waits for more listens and looks."""


class AskEnqueue(Struct):
    """Puts tasks in; every one has an id, so that the call can be repeated."""

    tenant: str
    tasks: list[NewTask]


class AskClaim(Struct):
    """Takes tasks, waiting at most `WAIT_MAX_S`."""

    tenant: str
    commands: list[str]
    limit: int = 1
    lease_s: float | None = None
    wait_s: float = 0.0
    worker: str = ""
    claim_id: bytes | None = None


class AskUnclaim(Struct):
    """Gives up a claim whose answer did not arrive. `for_good`: nobody will use this claim id again."""

    tenant: str
    claim_id: bytes
    for_good: bool = False


class AskHeartbeat(Struct):
    """Extends leases."""

    beats: list[Heartbeat]


class AskSettle(Struct):
    """Ends leases."""

    settlements: list[Settlement]


class AskAbout(Struct):
    """Names tasks, to get or cancel them."""

    tenant: str
    refs: list[TaskRef]


class AskWait(Struct):
    """Waits for the first end."""

    tenant: str
    ids: list[bytes]
    wait_s: float


class AskAct(Struct):
    """Names tasks, by id or by a filter, to replay or purge them."""

    tenant: str
    which: list[bytes] | Filter
    limit: int = BATCH_MAX
    cursor: str | None = None


class AskRetain(Struct):
    """Keeps results for longer."""

    tenant: str
    ids: list[bytes]
    result_ttl_s: float


class AskList(Struct):
    """Lists tasks."""

    tenant: str
    which: Filter
    cursor: str | None = None
    limit: int = 100


class AskMarks(Struct):
    """Divides the tasks into ranges of ids."""

    tenant: str
    every: int
    after: bytes | None = None


class AskStage(Struct):
    """Stages a chunk."""

    tenant: str
    chunk_id: bytes
    rows: Rows


class AskCommit(Struct):
    """Commits a load."""

    tenant: str
    name: str
    seq: int
    chunk_ids: list[bytes]
    forget_s: float | None = None


class AskDrop(Struct):
    """Drops chunks."""

    tenant: str
    chunk_ids: list[bytes]


class AskStats(Struct):
    """Counts."""

    tenant: str
    commands: list[str] | None = None


class AskConfigure(Struct):
    """Sets a queue's configuration."""

    tenant: str
    command: str
    config: QueueConfig


class AskQueue(Struct):
    """Reads a queue's configuration."""

    tenant: str
    command: str


class AskRegister(Struct):
    """Registers a worker."""

    tenant: str
    info: WorkerInfo
    ttl_s: float


class AskTenant(Struct):
    """Names a tenant."""

    tenant: str


class AskTenants(Struct):
    """Pages through the tenants."""

    cursor: str | None = None
    limit: int = 100


class AskRuns(Struct):
    """Reads the journal, by runs."""

    tenant: str
    shard: int = 0
    after: bytes | None = None
    until: bytes | None = None
    limit: int = BATCH_MAX


class AskAdvance(Struct):
    """Moves a named reader."""

    reader: str
    shard: int
    position: bytes | None


class AskSweep(Struct):
    """Sweeps."""

    budget: int = SWEEP_BUDGET


class About(Struct):
    """What a client has to know of the store behind a server."""

    order: Order
    payload_max_bytes: int
    result_max_bytes: int


class AskNothing(Struct):
    """For a verb that is not about anything."""


class OnReady(Struct, tag=True):
    """A topic: something became ready in a queue."""

    tenant: str
    command: str


class OnEnded(Struct, tag=True):
    """A topic: a task ended."""

    tenant: str
    id: bytes


class OnJournalled(Struct, tag=True):
    """A topic: the journal grew."""


class AskSubscribe(Struct):
    """Listens. The answer is a stream: a byte 0 when the subscription holds, and from time to time; a byte 1, and the
    end, when something happened."""

    topics: list[OnReady | OnEnded | OnJournalled]
    limit: int = 1


Answer = TypeVar("Answer")


class Verb(Struct, Generic[Answer], frozen=True):
    """One verb on the wire."""

    name: str
    asks: type[Struct]
    answers: type[Answer]


ABOUT = Verb("about", AskNothing, About)
ENQUEUE = Verb("enqueue", AskEnqueue, list[Enqueued | Duplicate | Rejected])
CLAIM = Verb("claim", AskClaim, list[Lease])
UNCLAIM = Verb("unclaim", AskUnclaim, int)
HEARTBEAT = Verb("heartbeat", AskHeartbeat, list[Extended | LeaseLost | Rejected])
SETTLE = Verb("settle", AskSettle, list[Settled | Already | LeaseLost | Rejected])
GET = Verb("get", AskAbout, list[Task | None])
CANCEL = Verb("cancel", AskAbout, list[Cancelled])
WAIT = Verb("wait", AskWait, list[Task | None])
REPLAY = Verb("replay", AskAct, Acted)
PURGE = Verb("purge", AskAct, Acted)
RETAIN = Verb("retain", AskRetain, list[int | None])
LIST = Verb("list", AskList, Page)
MARKS = Verb("marks", AskMarks, Marks)
STAGE = Verb("stage", AskStage, Staged)
COMMIT_LOAD = Verb("commit_load", AskCommit, Committed)
DROP = Verb("drop", AskDrop, int)
STATS = Verb("stats", AskStats, Stats)
QUEUE = Verb("queue", AskQueue, QueueConfig)
CONFIGURE = Verb("configure", AskConfigure, QueueConfig)
REGISTER = Verb("register", AskRegister, NoneType)
WORKERS = Verb("workers", AskTenant, list[WorkerInfo])
TENANTS = Verb("tenants", AskTenants, TenantPage)
JOURNAL_BOUNDS = Verb("journal_bounds", AskNothing, list[JournalBounds])
RUNS = Verb("runs", AskRuns, RunPage)
READERS = Verb("readers", AskNothing, list[Reader])
ADVANCE = Verb("advance", AskAdvance, NoneType)
SWEEP = Verb("sweep", AskSweep, Swept)
SUBSCRIBE = Verb("subscribe", AskSubscribe, NoneType)
"""Answered by a stream, see `AskSubscribe`."""

VERBS: tuple[Verb[Any], ...] = (
    ABOUT,
    ENQUEUE,
    CLAIM,
    UNCLAIM,
    HEARTBEAT,
    SETTLE,
    GET,
    CANCEL,
    WAIT,
    REPLAY,
    PURGE,
    RETAIN,
    LIST,
    MARKS,
    STAGE,
    COMMIT_LOAD,
    DROP,
    STATS,
    QUEUE,
    CONFIGURE,
    REGISTER,
    WORKERS,
    TENANTS,
    JOURNAL_BOUNDS,
    RUNS,
    READERS,
    ADVANCE,
    SWEEP,
    SUBSCRIBE,
)


def on_wire(topic: Ready | Ended | Journalled) -> OnReady | OnEnded | OnJournalled:
    """Returns a topic as it travels."""
    if isinstance(topic, Ready):
        return OnReady(topic.tenant, topic.command)
    return OnEnded(topic.tenant, topic.id) if isinstance(topic, Ended) else OnJournalled()


def topic_of(one: OnReady | OnEnded | OnJournalled) -> Ready | Ended | Journalled:
    """Returns the topic that travelled."""
    if isinstance(one, OnReady):
        return Ready(one.tenant, one.command)
    return Ended(one.tenant, one.id) if isinstance(one, OnEnded) else Journalled()
