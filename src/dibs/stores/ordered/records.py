"""What the ordered store keeps under its keys: bodies, states, results, journal runs, as msgpack arrays.

Fields are only ever added at the end, with a default: an older record stays readable. A change that this cannot carry
raises the store's format number.
"""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from dibs.ids import CHUNK_BYTES, ID_BYTES, row_id, slot_of
from dibs.task import ErrorInfo, EventKind, Kind, NewTask, Place, Progress, QueueConfig, Status, WorkerInfo

FORMAT = 2

# A state keeps its words as numbers: they are written, compared and counted for every task, and a number is several
# times cheaper than an enumeration.
STATUSES = tuple(Status)
PENDING, IN_PROGRESS, COMPLETED, FAILED, CANCELLED = range(len(STATUSES))
# Parked is where a ready task stands while its limit_key is at its limit: outside it is ready like any other.
PLACES = (*Place, Place.READY)
READY, DELAYED, LEASED, DEAD, NOWHERE, PARKED = range(len(PLACES))
#: What a state remembers of the last settlement: its token and one of these.
KIND_MARKS = {Kind.COMPLETE: b"c", Kind.RETRY: b"r", Kind.FAIL: b"f", Kind.RELEASE: b"b"}

RESULT_INLINE_MAX_BYTES = 512
TAIL_BYTES = ID_BYTES - CHUNK_BYTES


class Body(Struct, frozen=True, array_like=True, gc=False):
    """What the producer said. Never rewritten."""

    command: str
    payload: bytes
    codec: str
    key: str | None
    lease_ms: int
    """0: the queue's."""
    timeout_ms: int
    """0: none."""
    traceparent: str | None
    limit_key: str | None
    limit_cost: int


class StoredResult(Struct, frozen=True, array_like=True, gc=False):
    """A result, or the latest error of a task that is not completed."""

    data: bytes | None
    codec: str
    error: ErrorInfo | None


class State(Struct, array_like=True, gc=False):
    """Where a task stands. Rewritten by every move."""

    rank: bytes
    """The place's key, without the queue's prefix and the id; empty in `none`."""
    size: int
    """Bytes of payload and result."""
    command: str
    status: int
    place: int
    priority: int
    attempts: int
    max_attempts: int
    enqueued_ms: int
    due_ms: int
    expires_ms: int
    """Start deadline; 0: none."""
    result_ttl_ms: int
    retention_ms: int
    keep: bool
    digest: bytes
    """Of the deduplication key; empty: none, or freed."""
    home: bytes = b""
    """The rank it was claimed from: where a release puts it back."""
    releases: int = 0
    token: bytes = b""
    settled: bytes = b""
    """Token and kind of the last settlement: its repeat is recognised, also after later claims."""
    worker: str = ""
    lease_ms: int = 0
    cancel: bool = False
    ended_ms: int = 0
    result_until_ms: int = 0
    kept_until_ms: int = 0
    """0 while the task has not ended."""
    reason: str = ""
    progress: Progress | None = None
    result: StoredResult | None = None
    """The result slot, if it is small; a large one has a record of its own."""
    result_apart: bool = False
    limit: bytes = b""
    """The digest of its limit_key, if a limit was ever applied to it."""
    cost: int = 1
    held: bool = False
    """It counts as ready, or leased, in what its limit_key uses."""

    def expired_unstarted(self, now_ms: int) -> bool:
        """True if the start deadline has passed. A released task counts as not started: its attempt was returned."""
        return 0 < self.expires_ms <= now_ms and self.attempts == 0 and self.status == PENDING

    def lease_end_ms(self) -> int:
        """When the lease of a leased task runs out: the rank says it."""
        return int.from_bytes(self.rank, "big")

    def ended(self) -> bool:
        """True once nothing but a replay can move the task."""
        return self.status >= COMPLETED

    def gone(self, now_ms: int) -> bool:
        """True once retention is over, whether or not a sweep has been here."""
        return 0 < self.kept_until_ms <= now_ms


class StoredClaim(Struct, frozen=True, array_like=True, gc=False):
    """The leases that one claim id got: ids and tokens, in order."""

    expires_ms: int
    leases: list[tuple[bytes, bytes]]
    tenants: list[str] = []
    """Whose they are, if the claim was of all tenants."""


class KeyUse(Struct, array_like=True, gc=False):
    """How much of its limit one limit_key uses. A record that is gone is one that uses nothing."""

    command: str
    leased: int
    ready: list[int]
    """Tasks that stand among the ready ones of the queue and count, by priority."""
    costs: list[int]
    """What those cost, by priority."""
    parked: int
    tokens: float
    """What was left of the burst at `refilled_ms`; less than nothing after a task that cost more than the burst."""
    refilled_ms: int
    """0: the burst is untouched."""
    timer_ms: int = 0
    """When the next parked one can have its tokens, if that is all that it waits for."""
    expires_ms: int = 0
    """When the expiry index looks at this record; 0: it does not name it."""
    last: dict[int, bytes] = {}
    """By priority, the last rank that was let into the queue: what is parked before it was overtaken."""

    def idle(self) -> bool:
        """True if no task counts here."""
        return not (self.leased or self.parked or any(self.ready))


class StoredWorker(Struct, frozen=True, array_like=True):
    """A registered worker and when to forget it."""

    expires_ms: int
    info: WorkerInfo


class StoredDecision(Struct, frozen=True, array_like=True):
    """A commit over several shards that is not known to be done: the chunk ids of each, one after the other."""

    seq: int
    decided_ms: int
    forget_s: float | None
    chunk_ids: list[bytes]
    empty: bytes = b""


class Detail(Struct, frozen=True, array_like=True, gc=False):
    """What an event says beyond which task and which attempt."""

    reason: str = ""
    error_type: str = ""
    error_line: str = ""
    fingerprint: str = ""


ROOM_IN_QUEUE, ROOM_IN_TENANT = 1, 2


class RunRows(Struct, frozen=True, array_like=True, gc=False):
    """The rows of a load that a run is about: their chunk, how many, and what their ids end with; without `tails`, they
    are the chunk's first so many, all in its own slot."""

    chunk_id: bytes
    count: int
    tails: bytes = b""

    def id(self, index: int) -> bytes:
        """Returns the id of one of them."""
        if self.tails:
            return self.chunk_id[:CHUNK_BYTES] + self.tails[index * TAIL_BYTES : (index + 1) * TAIL_BYTES]
        return row_id(self.chunk_id, index, slot_of(self.chunk_id))

    def ids(self, first: int, end: int) -> bytes:
        """Returns the ids of some of them, one after the other. None is made by itself: column by column the tails are
        put into as many copies of the chunk's id."""
        made = bytearray(self.chunk_id * (end - first))
        tails, width = self.tails[first * TAIL_BYTES : end * TAIL_BYTES], TAIL_BYTES
        if not self.tails:
            tails, width = struct.pack(f">{end - first}H", *range(first, end)), TAIL_BYTES - 1
        for column in range(width):
            made[CHUNK_BYTES + column :: ID_BYTES] = tails[column::width]
        return bytes(made)


class Run(Struct, array_like=True, gc=False):
    """Consecutive events of one kind in one queue: what they share is written once. The rows of a load are named by
    their chunk."""

    kind: EventKind
    tenant: str
    command: str
    at_ms: int
    worker: str
    ids: list[bytes]
    attempts: list[int]
    detail: Detail | None = None
    rows: RunRows | None = None
    room: int = 0
    """A lease that ends makes room: `ROOM_IN_QUEUE` or `ROOM_IN_TENANT`."""

    def count(self) -> int:
        """How many events it is."""
        return len(self.ids) if self.rows is None else self.rows.count

    def ids_of(self, first: int, end: int) -> bytes:
        """Which tasks some of the events are about, one id after the other."""
        return b"".join(self.ids[first:end]) if self.rows is None else self.rows.ids(first, end)

    def attempts_of(self, first: int, end: int) -> list[int]:
        """At which attempts some of the events happened; a single one if all are the same."""
        if self.rows is not None:
            return [0]
        attempts = self.attempts[first:end]
        return attempts[:1] if attempts.count(attempts[0]) == len(attempts) else attempts


class Block(Struct, array_like=True, gc=False):
    """Rows of a chunk that share command, priority and whether they are delayed: they stand in a place as one."""

    command: str
    priority: int | None
    """None: the queue's, which the commit fills in."""
    wait: int
    """`NO_WAIT`, or what `due` counts from: `FROM_COMMIT`, `FROM_EPOCH`."""
    due: int
    """When the next row is due, in milliseconds."""
    next: int
    """The next row to leave, by its number in the chunk's record."""
    count: int
    size: int
    """Bytes of all its payloads."""
    expires_ms: int
    """The shortest start deadline of its rows, from the commit; 0: none has one."""
    tails: bytes
    """What the ids of its rows end with; empty: see `RunRows`."""
    config: QueueConfig | None = None
    """The queue's as of the commit: rows are what they would be had they been enqueued then."""
    taken: int = 0
    """So many rows have left."""
    last_due: int = 0
    """When the last row is due, if rows fall due in the order of the chunk and not from the commit: if that has passed
    at the commit, none of them waits."""


NO_WAIT, FROM_COMMIT, FROM_EPOCH = range(3)


class Head(Struct, array_like=True, gc=False):
    """What is known of a chunk without its rows."""

    chunk_id: bytes
    nonce: bytes
    """Tells one staging from another of the same id: rows read once can be kept in memory."""
    expires_ms: int
    blocks: list[Block]
    parts: list[int]
    """The shards that hold other rows of this chunk."""
    version: int = 0
    """Of the commit; 0: there was none yet."""
    at_ms: int = 0
    base: int = 0
    """The commit's number for its first row."""
    out: bytes = b""
    """Rows that left before it was their turn: a bit for each, up to the last of them."""
    holder: str = ""
    """The load that is about to commit it over several shards, or has decided to: until it is known not to have, nobody
    else touches the chunk."""
    held_until_ms: int = 0
    """After that, others may ask whether the holder has decided."""
    hold: int = 0
    """The version that reserved it."""
    content: bytes = b""
    """The same in all parts of one staging."""

    def is_out(self, row: int) -> bool:
        """True if a row left before it was its turn."""
        return row >> 3 < len(self.out) and bool(self.out[row >> 3] >> (row & 7) & 1)

    def put_out(self, row: int) -> None:
        """Notes that a row leaves before it is its turn."""
        bits = bytearray(self.out.ljust((row >> 3) + 1, b"\0"))
        bits[row >> 3] |= 1 << (row & 7)
        self.out = bytes(bits)

    def done(self) -> bool:
        """True once every row has left."""
        return all(block.taken == block.count for block in self.blocks)


class StoredRows(Struct, frozen=True, array_like=True):
    """The rows of a chunk, as :class:`dibs.task.Rows` and their order. Never rewritten."""

    payloads: list[bytes]
    options: list[NewTask]
    kinds: list[int]
    keys: list[str | None]
    dues: list[int]
    """When each row is due, as its block counts; empty: none waits."""
    blocks: list[list[int]]
    """The rows of each block, in the order in which they leave; empty: one block, of all rows in their order."""
    tails: bytes
    """What each row's id ends with; empty: see `RunRows`."""


class StoredLoad(Struct, frozen=True, array_like=True, gc=False):
    """How far the commits of a name have come, and when to forget it (0: never)."""

    seq: int
    forget_ms: int
    fence: int = 0
    """See `LoadState`."""


#: What a decoder raises for bytes that it cannot read; the engine turns it into `StoreCorrupt`, once.
UnreadableRecord = msgspec.DecodeError

_encode = msgspec.msgpack.Encoder().encode
encode_body = _encode
encode_state = _encode
encode_size = _encode
encode_result = _encode
encode_config = _encode
encode_runs = _encode
encode_claim = _encode
encode_worker = _encode
encode_head = _encode
encode_rows = _encode
encode_load = _encode
encode_decision = _encode
encode_use = _encode

_body = msgspec.msgpack.Decoder(Body)
_state = msgspec.msgpack.Decoder(State)
_result = msgspec.msgpack.Decoder(StoredResult)
_config = msgspec.msgpack.Decoder(QueueConfig)
_claim = msgspec.msgpack.Decoder(StoredClaim)
_worker = msgspec.msgpack.Decoder(StoredWorker)
_head = msgspec.msgpack.Decoder(Head)
_rows = msgspec.msgpack.Decoder(StoredRows)
_load = msgspec.msgpack.Decoder(StoredLoad)
_decision = msgspec.msgpack.Decoder(StoredDecision)
_use = msgspec.msgpack.Decoder(KeyUse)
_runs = msgspec.msgpack.Decoder(list[Run])


decode_body = _body.decode
decode_state = _state.decode
decode_result = _result.decode
decode_config = _config.decode
decode_claim = _claim.decode
decode_worker = _worker.decode
decode_head = _head.decode
decode_rows = _rows.decode
decode_load = _load.decode
decode_decision = _decision.decode
decode_use = _use.decode
decode_runs = _runs.decode

_FIELDS_OF_NEW = len(State.__struct_fields__) - len(State.__struct_defaults__)


def encode_new_state(state: State) -> bytes:
    """Returns the record of a task that was never claimed: what still has its default is left out, which makes the
    claim's reading of it cheaper."""
    return _encode(state) if state.limit else _encode(astuple(state)[:_FIELDS_OF_NEW])


# Reading a state takes several times as long as writing it, and whoever claims a task mostly settles it: what a claim
# wrote is kept with its bytes. They hold a token, so equal bytes are the same claim, and nothing has changed since.
_LEASED_MAX = 8_192
_leased: dict[bytes, State] = {}


def remember_leased(data: bytes, state: State) -> None:
    """Keeps the state that a claim wrote as `data`, which the caller no longer changes."""
    if len(_leased) >= _LEASED_MAX:
        _leased.clear()
    _leased[data] = state


def recall_state(data: bytes) -> State:
    """Returns the state that `data` holds; the caller may change it."""
    state = _leased.pop(data, None)
    return decode_state(data) if state is None else state
