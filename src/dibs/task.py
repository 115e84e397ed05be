"""The values of the queue: what goes in, what comes out, and which moves are legal.

Everything here is frozen, carries its unit in its name and travels unchanged through every store and every wire. Ids
and tokens are 16 opaque bytes (:mod:`dibs.ids` gives ids their text). Times are milliseconds since the epoch by the
store's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from dibs.errors import DibsError, error_from_code
from dibs.ids import ID_BYTES
from dibs.retry import Backoff

PRIORITY_MIN, PRIORITY_MAX = 0, 9
BATCH_MAX = 1_000
RUNS_MAX = 10_000
"""How many events one page of runs may hold."""
MARKS_EVERY_MIN, MARKS_EVERY_MAX = 1_000, 1_000_000
CLAIM_MAX_BYTES = 8 << 20
"""A claim takes no further task once it holds so many bytes of payload: the rest is for the next."""
LEASE_DEFAULT_S = 30.0
LEASE_MIN_S, LEASE_MAX_S = 1.0, 12 * 3600.0
MAX_ATTEMPTS_DEFAULT, MAX_ATTEMPTS_MAX = 5, 10_000
DELAY_HORIZON_S = 366 * 86_400.0
RESULT_TTL_DEFAULT_S = 86_400.0
DEAD_RETENTION_DEFAULT_S = 14 * 86_400.0
UNKEPT_STATE_S = 60.0
RELEASES_FREE = 19
CHUNK_KEEP_S = 86_400.0
"""How long a staged chunk waits for its commit."""
CHUNKS_MAX = 100_000
"""How many chunks one commit may name."""


class Status(StrEnum):
    """What a task's life has come to."""

    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """True once nothing but a replay can move the task."""
        return self in ENDED


class Place(StrEnum):
    """Where a task stands. It is always in exactly one place; one that ended well, or was cancelled, is in `none`."""

    READY = "ready"
    DELAYED = "delayed"
    LEASED = "leased"
    DEAD = "dead"
    NONE = "none"


class Kind(StrEnum):
    """How a lease is settled."""

    COMPLETE = "complete"
    RETRY = "retry"
    FAIL = "fail"
    RELEASE = "release"


class Reason(StrEnum):
    """Why a task ended other than by completing, or went on, where the queue itself decided."""

    FAILED = "FAILED"
    MAX_ATTEMPTS = "MAX_ATTEMPTS"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    DUPLICATE = "DUPLICATE"
    LIMIT = "LIMIT"
    """With `promoted`: its limit_key has room again."""
    DELAYED = "DELAYED"
    """With `enqueued` and `retried`: it becomes ready later, and `promoted` says when."""


class Cause(StrEnum):
    """Why a token was not accepted."""

    UNKNOWN = "unknown"
    NOT_IN_PROGRESS = "not_in_progress"
    OTHER_TOKEN = "other_token"


ENDED = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})

#: The legal moves. A store makes no other; the model in the test suite and `doctor` read the same table.
MOVES: frozenset[tuple[Place | None, Place]] = frozenset(
    {
        (None, Place.READY),  # enqueue
        (None, Place.DELAYED),  # enqueue with a delay
        (Place.DELAYED, Place.READY),  # promoted when due
        (Place.READY, Place.LEASED),  # claim
        (Place.LEASED, Place.READY),  # release, retry without delay, expired lease
        (Place.LEASED, Place.DELAYED),  # retry
        (Place.LEASED, Place.NONE),  # complete, or cancelled while in progress
        (Place.LEASED, Place.DEAD),  # fail, or out of attempts
        (Place.READY, Place.NONE),  # cancel, start deadline passed
        (Place.DELAYED, Place.NONE),  # cancel, start deadline passed
        (Place.DEAD, Place.READY),  # replay
    }
)

#: The places a task of a given status may stand in.
PLACES: dict[Status, frozenset[Place]] = {
    Status.PENDING: frozenset({Place.READY, Place.DELAYED}),
    Status.IN_PROGRESS: frozenset({Place.LEASED}),
    Status.COMPLETED: frozenset({Place.NONE}),
    Status.FAILED: frozenset({Place.DEAD}),
    Status.CANCELLED: frozenset({Place.NONE}),
}


# ---------------------------------------------------------------------------------------------------------- enqueue


class NewTask(Struct, frozen=True, kw_only=True, gc=False):
    """A task to be enqueued. `None` means the queue's configured default, then the library's."""

    command: str
    """What kind of work it is; with the tenant it names the queue."""
    payload: bytes = b""
    """Opaque; `codec` says how to read it."""
    codec: str = "json"
    id: bytes = b""
    """Minted by the caller with `new_id`, so that an enqueue whose answer was lost can be repeated. Empty: the store
    mints one."""
    priority: int | None = None
    """0 to 9, higher first; the default is 0."""
    delay_s: float = 0.0
    """Invisible for so long, by the store's clock. Zero means now."""
    run_at_ms: int | None = None
    """Invisible until then; instead of `delay_s`. The past means now."""
    max_attempts: int | None = None
    """Deliveries before it becomes a dead letter."""
    lease_s: float | None = None
    """For claims that name no lease of their own."""
    timeout_s: float | None = None
    """How long one run may take; the worker enforces it."""
    expires_s: float | None = None
    """If it has not started by then it ends CANCELLED with reason EXPIRED."""
    key: str | None = None
    """Deduplication key, unique per tenant and command while the first task is kept."""
    on_duplicate: Literal["return", "replay_dead"] = "return"
    """`replay_dead` revives the first task if it is a dead letter."""
    result_ttl_s: float | None = None
    """How long the result is kept, from the end of the task."""
    retention_s: float | None = None
    """How long the record and its key are kept, from the end; never less than the result."""
    keep: bool = True
    """False: body, key and result go at completion."""
    traceparent: str | None = None
    """W3C trace context of the producer, handed to the worker."""
    limit_key: str | None = None
    """Whose concurrency and rate limit it counts against."""
    limit_cost: int = 1


class Enqueued(Struct, frozen=True, gc=False, tag=True):
    """The task is in the queue. `already`: this id was enqueued before, and nothing changed."""

    id: bytes
    already: bool = False


class Duplicate(Struct, frozen=True, tag=True):
    """Another task holds the key: its id, how it stands, and its result where there is one. `replayed`: it was dead
    and has just been revived."""

    id: bytes
    status: Status
    result: Result | None = None
    replayed: bool = False


class Rejected(Struct, frozen=True, gc=False, tag=True):
    """This item of the batch is not acceptable; the others are not affected."""

    code: str
    message: str

    @classmethod
    def of(cls, error: DibsError) -> Rejected:
        return cls(error.code, str(error))

    def error(self) -> DibsError:
        """Returns the error that the item would have raised by itself."""
        return error_from_code(self.code, self.message)


# ------------------------------------------------------------------------------------------------------------ loads


class Look(Struct, frozen=True, gc=False):
    """In how many seconds a claim may find something: 0 for now, None if nothing is known to become due. `capped`: the
    tenant, or one of the queues, has a cap."""

    ready_in_s: float | None
    capped: bool


class InFlight(Struct, frozen=True, gc=False):
    """How many tasks are in progress in one store, of those that share a cap, and how many may be in all."""

    leased: int
    cap: int


class ReadyTenant(Struct, frozen=True, gc=False):
    """A tenant that may have something to claim, and how much it gives at its turn. `capped`: it has caps."""

    name: str
    weight: int
    capped: bool


class ReadyTenants(Struct, frozen=True, gc=False):
    """Some of the tenants that may have something to claim, by name. `end`: go on behind this name; None: that was
    all."""

    tenants: list[ReadyTenant]
    end: str | None = None


class TurnsTaken(Struct, frozen=True, gc=False):
    """What some tenants gave at their turns. `unseen`: those that may have more, behind so much that was in the way
    that it is left to another call."""

    leases: list[Lease]
    unseen: list[str]


#: What is in progress in other shards, by tenant and command; the command `*` is all of the tenant's.
Elsewhere = Mapping[tuple[str, str], int]
NOTHING: Elsewhere = MappingProxyType({})


class Rows(Struct, frozen=True):
    """The rows of a chunk by column: what most of them share is said once, and nothing is made for each.

    `stage` takes it as well as a list of `NewTask`, and is faster with it.
    """

    payloads: list[bytes]
    options: list[NewTask]
    """What rows say beyond payload and key: each kind once, with neither, and without an id."""
    kinds: list[int] = []
    """Which of `options` each row has; empty: all have the first."""
    keys: list[str | None] = []
    """The deduplication key of each row; empty: none has one."""

    def bound(self) -> bool:
        """Whether a key or a `limit_key` says of any row where it belongs."""
        return bool(self.keys) or any(one.limit_key is not None for one in self.options)

    def part(self, rows: Sequence[int]) -> Rows:
        """Returns some of the rows."""
        return Rows(
            [self.payloads[row] for row in rows],
            self.options,
            [self.kinds[row] for row in rows] if self.kinds else [],
            [self.keys[row] for row in rows] if self.keys else [],
        )


class Staged(Struct, frozen=True, gc=False):
    """A chunk is stored and waits for the commit that names it. `already`: it was committed before, and nothing
    changed."""

    rows: int
    already: bool = False


class Committed(Struct, frozen=True, gc=False):
    """The rows of a load are in their queues. `already`: a commit of this name had come to this seq, or past it, and
    nothing changed; `rows` is 0 then."""

    rows: int
    already: bool = False


class StagedPart(Struct, frozen=True, gc=False):
    """What one store holds of a chunk that waits for its commit."""

    rows: int
    parts: list[int] = []
    """The shards that hold the others."""
    content: bytes = b""
    """The same in all parts of one staging."""
    holder: str = ""
    """The load that is about to commit it, or has decided to."""
    hold: int = 0
    """Tells one reservation from another."""
    lapsed: bool = False
    """The holder has had it for so long that it may have died."""


class Decision(Struct, frozen=True, kw_only=True):
    """What a load over several shards commits in which of them. It is kept before any of that is done, so that whoever
    finds it can finish it."""

    tenant: str
    name: str
    seq: int
    chunk_ids: list[list[bytes]]
    """By shard."""
    empty: list[bytes] = []
    """Those without rows in their own shard."""
    forget_s: float | None = None
    decided_ms: int = 0
    """When it was kept: the time of the commit in every shard."""


class LoadState(Struct, frozen=True):
    """How far the commits of a name have come (-1: there was none), and what is decided and may not be done yet."""

    seq: int = -1
    pending: Decision | None = None
    fence: int = 0
    """Changes when somebody takes chunks from under a commit that is not decided."""


# ------------------------------------------------------------------------------------------------------------ claim


class Lease(Struct, frozen=True, gc=False):
    """A task held by one worker until `lease_end_ms`. The token is new for every claim: it is what settles the task."""

    tenant: str
    id: bytes
    token: bytes
    command: str
    payload: bytes
    codec: str
    priority: int
    attempt: int
    """1 for the first delivery."""
    max_attempts: int
    lease_s: float
    lease_end_ms: int
    enqueued_ms: int
    timeout_s: float | None = None
    key: str | None = None
    traceparent: str | None = None


class Heartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """Extends a lease to `extend_s` from now (default: as long as it was granted for), and may tell progress."""

    tenant: str
    id: bytes
    token: bytes
    extend_s: float | None = None
    progress: Progress | None = None


class Progress(Struct, frozen=True, gc=False):
    """How far a running task says it is."""

    done: float
    total: float | None = None
    note: str = ""


class Extended(Struct, frozen=True, gc=False, tag=True):
    """The lease holds until `lease_end_ms`. `cancel_requested`: stop the handler and settle."""

    lease_end_ms: int
    cancel_requested: bool = False


class LeaseLost(Struct, frozen=True, gc=False, tag=True):
    """The token is not the task's current one; nothing was changed."""

    cause: Cause


# ----------------------------------------------------------------------------------------------------------- settle


class ErrorInfo(Struct, frozen=True, gc=False):
    """What went wrong in a handler, as text: the worker that reads it need not have the class."""

    type: str
    message: str = ""
    traceback: str = ""


class Settlement(Struct, frozen=True, kw_only=True, gc=False):
    """Ends a lease. Exactly one settlement per token is accepted; the same again answers :class:`Already`."""

    tenant: str
    id: bytes
    token: bytes
    kind: Kind
    result: bytes | None = None
    """With `complete`: the encoded result."""
    codec: str = "json"
    error: ErrorInfo | None = None
    """With `retry` and `fail`."""
    reason: str | None = None
    """With `fail`: why, in one word; the default is FAILED."""
    delay_s: float = 0.0
    """With `retry`: explicit here; the policy that computed it lives above the store."""
    result_ttl_s: float | None = None
    """With `complete`: overrides the task's."""


class Settled(Struct, frozen=True, gc=False, tag=True):
    """Accepted; how the task stands now."""

    status: Status


class Already(Struct, frozen=True, gc=False, tag=True):
    """This token was settled in this way before; the first outcome stands, and is `status` if it is still known."""

    status: Status


class Result(Struct, frozen=True, gc=False):
    """The one result slot of a task: a value, or the error it ended with."""

    status: Status
    data: bytes | None = None
    codec: str = "json"
    error: ErrorInfo | None = None
    reason: str | None = None


# ------------------------------------------------------------------------------------------------- looking and acting


class Task(Struct, frozen=True, kw_only=True, gc=False):
    """A task as it stands: its body, its state and its result."""

    tenant: str
    id: bytes
    command: str
    status: Status
    place: Place
    priority: int
    attempts: int
    max_attempts: int
    releases: int
    payload: bytes
    codec: str
    enqueued_ms: int
    due_ms: int
    """When a delayed task becomes ready; otherwise when it last became visible."""
    key: str | None = None
    worker: str | None = None
    """Who holds it, or held it last."""
    lease_end_ms: int | None = None
    cancel_requested: bool = False
    expires_ms: int | None = None
    ended_ms: int | None = None
    kept_until_ms: int | None = None
    result: Result | None = None
    reason: str | None = None
    error: ErrorInfo | None = None
    """The latest one, also of a task that will be tried again."""
    progress: Progress | None = None
    timeout_s: float | None = None
    traceparent: str | None = None
    limit_key: str | None = None
    """If its queue limits what those of one key may use: what it may have to wait for while it is ready."""
    limit_cost: int = 1


class ByKey(Struct, frozen=True, gc=False):
    """Names a task by its deduplication key instead of its id."""

    command: str
    key: str


TaskRef = bytes | ByKey


class Cancelled(Struct, frozen=True, gc=False):
    """What a cancel did: `cancelled` at once, `cancelling` (the worker will be told), too late because it has `ended`,
    or there is no such task (`unknown`)."""

    how: Literal["cancelled", "cancelling", "ended", "unknown"]
    status: Status | None = None


class Filter(Struct, frozen=True, kw_only=True, gc=False):
    """Which tasks a listing, replay or purge is about; every field that is given must match."""

    command: str | None = None
    status: Status | None = None
    place: Place | None = None
    reason: str | None = None
    worker: str | None = None
    enqueued_from_ms: int | None = None
    enqueued_until_ms: int | None = None
    ended_from_ms: int | None = None
    ended_until_ms: int | None = None
    id_from: bytes | None = None
    """This id and those after it."""
    id_until: bytes | None = None
    """Ids before this one."""


class Page(Struct, frozen=True):
    """Some of what matches, and where to go on; without a cursor the listing is complete. May be short, even empty,
    with a cursor."""

    tasks: list[Task]
    cursor: str | None = None


class Marks(Struct, frozen=True):
    """Ids that divide a tenant's tasks into ranges, in order: up to the first, from each to the next, from the last on.
    `cursor`: where to go on; None: that was all."""

    ids: list[bytes]
    cursor: bytes | None = None


class Acted(Struct, frozen=True):
    """The tasks that a replay or purge acted on. `cursor`: where the same call goes on, if there may be more."""

    ids: list[bytes]
    cursor: str | None = None


# ----------------------------------------------------------------------------------------------------------- queues


class KeyLimit(Struct, frozen=True, kw_only=True, gc=False):
    """What the tasks of one queue that share a `limit_key` may use together. Those over it wait, and hold up nobody
    else."""

    in_flight: int | None = None
    """So many of them are in progress at once."""
    rate: float | None = None
    """So many may start per second, in the long run; a task counts for its `limit_cost`."""
    burst: float | None = None
    """So many may start at once after a pause; the default is one second's worth, and at least 1. A task that costs
    more than that starts when nothing has started for long enough."""


class QueueLimits(Struct, frozen=True, kw_only=True, gc=False):
    """How much of a queue, or of a whole tenant, may be in progress."""

    in_flight: int | None = None
    """So many of its tasks are in progress at once."""
    per_key: KeyLimit | None = None
    """The same for each `limit_key` by itself."""


#: The command that stands for all the queues of a tenant, in `configure`.
ALL_COMMANDS = "*"
WEIGHT_DEFAULT, WEIGHT_MAX = 1, 100


class QueueConfig(Struct, frozen=True, kw_only=True):
    """How one queue behaves; what a task leaves open is taken from here. That of the command `*` is about the whole
    tenant: `paused`, `limits.in_flight` and `weight`."""

    paused: bool = False
    """Nothing is claimed; everything else goes on."""
    priority: int | None = None
    max_attempts: int | None = None
    lease_s: float | None = None
    result_ttl_s: float | None = None
    retention_s: float | None = None
    dead_retention_s: float | None = None
    backoff: Backoff | None = None
    """For workers and servers that have no policy of their own for a task."""
    limits: QueueLimits | None = None
    weight: int | None = None
    """Of a tenant: how many tasks it has for each one of a tenant of weight 1 (the default), where workers serve them
    all."""


class QueueStats(Struct, frozen=True, kw_only=True, gc=False):
    """Exact counts of one queue, or of a whole tenant (`command` empty)."""

    command: str
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    dead: int = 0
    bytes: int = 0
    """Payloads and results held."""
    paused: bool = False
    oldest_ready_ms: int | None = None
    """When the task at the head of the queue was enqueued or last became ready."""
    limits: QueueLimits | None = None

    @classmethod
    def sum_of(cls, command: str, parts: Sequence[QueueStats]) -> QueueStats:
        """Returns what several have together; limits are not added."""
        return cls(
            command=command,
            ready=sum(part.ready for part in parts),
            delayed=sum(part.delayed for part in parts),
            leased=sum(part.leased for part in parts),
            dead=sum(part.dead for part in parts),
            bytes=sum(part.bytes for part in parts),
            paused=any(part.paused for part in parts),
            oldest_ready_ms=min(
                (part.oldest_ready_ms for part in parts if part.oldest_ready_ms is not None), default=None
            ),
        )


class Stats(Struct, frozen=True):
    """A tenant's queues and their sum."""

    total: QueueStats
    queues: list[QueueStats]


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """What a worker tells about itself."""

    name: str
    host: str = ""
    pid: int = 0
    slots: int = 0
    busy: int = 0
    commands: list[str] = []
    started_ms: int = 0
    memory_bytes: int = 0
    tasks: list[bytes] = []
    """Some of those it runs, the oldest first."""
    seen_ms: int = 0
    """Set by the store."""


class TenantPage(Struct, frozen=True):
    """Some tenants in order of name, and where to go on."""

    tenants: list[str]
    cursor: str | None = None


# ---------------------------------------------------------------------------------------------------------- journal


class EventKind(StrEnum):
    """What happened to a task."""

    ENQUEUED = "enqueued"
    PROMOTED = "promoted"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    RETRIED = "retried"
    RELEASED = "released"
    LEASE_EXPIRED = "lease_expired"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    REPLAYED = "replayed"
    PURGED = "purged"


class Event(Struct, frozen=True, kw_only=True, gc=False):
    """One transition of one task, as the journal keeps it."""

    cursor: bytes
    """Reading `after` it goes on with the next event. Its last four bytes are the event's index within its entry of the
    journal, big-endian: those of a run follow each other."""
    at_ms: int
    kind: EventKind
    tenant: str
    id: bytes
    command: str
    attempt: int
    worker: str = ""
    reason: str = ""
    error_type: str = ""
    error_line: str = ""
    fingerprint: str = ""


class EventPage(Struct, frozen=True):
    """Events in order. `cursor` is where to go on, also past events of other tenants that were passed over; `more`
    says that something is there already."""

    events: list[Event]
    cursor: bytes | None
    more: bool


class EventRun(Struct, frozen=True, kw_only=True, gc=False):
    """Events that follow each other in one journal and agree in all but task and attempt."""

    cursor: bytes
    """Of its first event; that of event n is `cursor_at(n)`."""
    at_ms: int
    kind: EventKind
    tenant: str
    command: str
    ids: bytes
    """16 bytes for each event, in order."""
    attempts: list[int]
    """One for each event, or one for all of them."""
    worker: str = ""
    reason: str = ""
    error_type: str = ""
    error_line: str = ""
    fingerprint: str = ""

    def count(self) -> int:
        """How many events it is."""
        return len(self.ids) // ID_BYTES

    def cursor_at(self, index: int) -> bytes:
        """The cursor of one of its events."""
        return self.cursor[:-4] + (int.from_bytes(self.cursor[-4:], "big") + index).to_bytes(4, "big")

    def events(self) -> list[Event]:
        """Returns its events one by one."""
        count = self.count()
        attempts = self.attempts if len(self.attempts) == count else self.attempts * count
        return [
            Event(
                cursor=self.cursor_at(index),
                at_ms=self.at_ms,
                kind=self.kind,
                tenant=self.tenant,
                id=self.ids[index * ID_BYTES : (index + 1) * ID_BYTES],
                command=self.command,
                attempt=attempt,
                worker=self.worker,
                reason=self.reason,
                error_type=self.error_type,
                error_line=self.error_line,
                fingerprint=self.fingerprint,
            )
            for index, attempt in enumerate(attempts)
        ]


class RunPage(Struct, frozen=True):
    """An `EventPage` by runs."""

    runs: list[EventRun]
    cursor: bytes | None
    more: bool


class JournalBounds(Struct, frozen=True, gc=False):
    """What one shard's journal holds now: the cursors just before its oldest event and of its newest one."""

    shard: int
    oldest: bytes
    newest: bytes


class Reader(Struct, frozen=True, gc=False):
    """A named reader: the journal is not trimmed past its position, within the size cap."""

    name: str
    shard: int
    position: bytes


class Swept(Struct, frozen=True, gc=False):
    """What one sweep did. `more`: the budget ended before the work did."""

    promoted: int = 0
    expired: int = 0
    cancelled: int = 0
    pruned: int = 0
    trimmed: int = 0
    more: bool = False

    def __add__(self, later: Swept) -> Swept:
        return Swept(
            self.promoted + later.promoted,
            self.expired + later.expired,
            self.cancelled + later.cancelled,
            self.pruned + later.pruned,
            self.trimmed + later.trimmed,
            later.more,
        )
