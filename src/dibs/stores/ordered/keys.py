r"""Every key of the ordered store. Integers are big-endian, so bytes sort as numbers do; `·` is a zero byte, which no
tenant, command or reader name can contain, so no name can run into its neighbour.

::

    <tenant>·T<id>                                    body: immutable, so a claim never rewrites the payload
    <tenant>·S<id>                                    state: where the task stands and who holds it
    <tenant>·R<id>                                    result, or the latest error, unless it is small: then in the state
    <tenant>·K<command>·<digest16>          → id      deduplication
    <tenant>·P<command>·<9-prio><version8><n4><kind1><id|block>    ready
    <tenant>·D<command>·<visible_ms8><kind1><id|block>      delayed
    <tenant>·L<command>·<expiry_ms8><id>              leased
    <tenant>·G<command>·<limit16><9-prio><version8><n4><kind1><id>    parked: ready, but over the limit of its limit_key
    <tenant>·H<limit16>                               how much of its limit a limit_key uses
    <tenant>·X<command>·<died_ms8><id>      → reason  dead letters
    <tenant>·Q<command>·<field>             → count   exact counters; an empty command counts the whole tenant
    <tenant>·Z<command>                               queue configuration; the command * is the whole tenant
    <tenant>·W<worker>                                worker registry
    <tenant>·O<claim_id>                    → leases  recent claims; the tenant * has those of all tenants
    <tenant>·B<chunk13>                               rows of a load that have no records of their own yet
    <tenant>·V<chunk13>                               their header: which blocks they form, whether they are committed
    <tenant>·N<load>                        → seq     committed loads
    <tenant>·U<command>                     → due_ms8 when the queue next has something due
    A<due_ms8><tenant>·<command>                      the same, in order of time
    Y<tenant>·<command>                               queues that may have ready tasks
    E<expire_ms8><kind1><tenant>·<serial>   → names   what expires: one entry for all that a call lets expire together
    F<tenant>·<load>                        → chunks  commits over several shards that are decided and not done
    J<position12>                                     journal
    C<reader>·<shard2>                      → cursor  named readers of the journal
    M<name>                                           what the store knows of itself

Why they sort so: a forward scan of P is the claim order (higher priority first, then the order of commits, then the
order within a batch). D, L, E and A are scanned from the start up to now and never further. What belongs to a tenant
starts with its name, in lower case or a digit; what belongs to all starts with an upper-case letter, so the two never
meet. `kind1` tells a single task from a block: rows of one chunk, command and priority, which stand where the first of
them that is left stands. A block is named as an id is, by 16 bytes: chunk, number, zero. Among the delayed there are
also, named by 16 bytes, the time at which a limit_key has room again, and how far a change of limits has been worked
in. A parked entry is a ready one with its limit in front, so that the first of a key to go home is the first of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

from dibs.ids import CHUNK_BYTES, ID_BYTES
from dibs.task import ALL_COMMANDS, PRIORITY_MAX

SEPARATOR = b"\0"
AFTER_SEPARATOR = b"\1"
KIND_TASK = b"t"
KIND_BLOCK = b"b"
_KIND_AT = -ID_BYTES - 1
_BLOCK = KIND_BLOCK[0]
KIND_LIMIT = b"k"
KIND_REVIEW = b"r"
_READY_RANK = struct.Struct(">BQI1s")

#: The first four are the places, in their order.
COUNTER_FIELDS = ("ready", "delayed", "leased", "dead", "bytes")
BYTES = 4

DUE = b"A"
READY_QUEUES = b"Y"
EXPIRIES = b"E"
DECISIONS = b"F"
JOURNAL = b"J"
READERS = b"C"

EXPIRE_START = b"s"
EXPIRE_RESULT = b"r"
EXPIRE_TASK = b"t"
EXPIRE_CLAIM = b"c"
EXPIRE_WORKER = b"w"
EXPIRE_CHUNK = b"k"
EXPIRE_BLOCK = b"b"
EXPIRE_LOAD = b"l"
EXPIRE_LIMIT = b"u"

META_FORMAT = b"Mformat"
META_STORE_ID = b"Mstore_id"
META_DURABILITY = b"Mdurability"
META_VERSION = b"Mversion"
META_JOURNAL_BYTES = b"Mjournal_bytes"
META_JOURNAL_TRIMMED = b"Mjournal_trimmed"
META_FACTS = b"Mfact_"


class TenantKeys:
    """The prefixes of one tenant's records."""

    __slots__ = (
        "body",
        "chunk",
        "claim",
        "configs",
        "counters",
        "first",
        "head",
        "last",
        "limit",
        "load",
        "name",
        "result",
        "state",
        "totals",
        "whole",
        "worker",
    )

    def __init__(self, tenant: str) -> None:
        head = tenant.encode() + SEPARATOR
        self.name = tenant
        self.first = head
        self.last = tenant.encode() + AFTER_SEPARATOR
        self.body = head + b"T"
        self.state = head + b"S"
        self.result = head + b"R"
        self.worker = head + b"W"
        self.claim = head + b"O"
        self.chunk = head + b"B"
        self.head = head + b"V"
        self.load = head + b"N"
        self.configs = head + b"Z"
        self.counters = head + b"Q"
        self.limit = head + b"H"
        self.whole = head + b"Z" + ALL_COMMANDS.encode()
        self.totals = tuple(head + b"Q" + SEPARATOR + field.encode() for field in COUNTER_FIELDS)


class QueueKeys:
    """The prefixes of one queue. `of_place` is where a task in that place has its entry, `counters` what counts it."""

    __slots__ = (
        "command",
        "config",
        "counters",
        "dead",
        "delayed",
        "due",
        "key",
        "leased",
        "name",
        "of_place",
        "parked",
        "ready",
        "ready_end",
        "ready_mark",
        "tenant",
    )

    def __init__(self, tenant: str, command: str) -> None:
        head, tail = tenant.encode() + SEPARATOR, command.encode() + SEPARATOR
        self.tenant = tenant_keys(tenant)
        self.command = command
        self.name = tenant.encode() + SEPARATOR + command.encode()
        self.key = head + b"K" + tail
        self.ready = head + b"P" + tail
        self.ready_end = self.ready[:-1] + AFTER_SEPARATOR
        self.delayed = head + b"D" + tail
        self.leased = head + b"L" + tail
        self.dead = head + b"X" + tail
        self.parked = head + b"G" + tail
        self.config = head + b"Z" + command.encode()
        self.due = head + b"U" + command.encode()
        self.ready_mark = READY_QUEUES + self.name
        self.counters = tuple(head + b"Q" + tail + field.encode() for field in COUNTER_FIELDS)
        # Whoever is nowhere has no entry.
        self.of_place = (self.ready, self.delayed, self.leased, self.dead, b"", self.parked)


@lru_cache(maxsize=4096)
def tenant_keys(tenant: str) -> TenantKeys:
    """Returns a tenant's prefixes, made once."""
    return TenantKeys(tenant)


@lru_cache(maxsize=16_384)
def queue_keys(tenant: str, command: str) -> QueueKeys:
    """Returns a queue's prefixes, made once."""
    return QueueKeys(tenant, command)


def end_of(prefix: bytes) -> bytes:
    """Returns the first key after everything that starts with `prefix`, whose last byte is not 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def ms8(at_ms: int) -> bytes:
    """Returns a time, or a version, as eight sortable bytes."""
    return at_ms.to_bytes(8, "big")


def from8(data: bytes) -> int:
    """The way back from `ms8`."""
    return int.from_bytes(data, "big")


def from_count(data: bytes | None) -> int:
    """Reads a counter; one at zero has no key."""
    return 0 if data is None else int.from_bytes(data, "big", signed=True)


def ready_ranks(priority: int, version: int, numbers: Iterable[int], kind: bytes = KIND_TASK) -> list[bytes]:
    """Where the tasks that a call puts at the back of a priority stand among the ready ones, by their number in it."""
    pack, before = _READY_RANK.pack, PRIORITY_MAX - priority
    return [pack(before, version, number, kind) for number in numbers]


def delayed_rank(visible_ms: int, kind: bytes = KIND_TASK) -> bytes:
    """Where a task stands among the delayed ones of its queue."""
    return visible_ms.to_bytes(8, "big") + kind


def is_block(entry: bytes) -> bool:
    """Whether a ready or delayed entry is about a block of rows rather than a task."""
    return entry[_KIND_AT] == _BLOCK


def names_block(tenant: TenantKeys, entry: bytes) -> bool:
    """The same for an entry of any place: the others have no blocks, and a time where these have their kind."""
    return entry[len(tenant.first)] in b"PD" and is_block(entry)


def block_name(chunk: bytes, number: int) -> bytes:
    """What a block is called where a task has its id. `chunk`: the first 13 bytes of the chunk's id."""
    return chunk + number.to_bytes(2, "big") + SEPARATOR


def parse_block_name(name: bytes) -> tuple[bytes, int]:
    """Returns the chunk and the number of a block."""
    return name[:CHUNK_BYTES], int.from_bytes(name[CHUNK_BYTES:-1], "big")


def kind_of(entry: bytes) -> bytes:
    """What a delayed entry is about: the byte before the 16 that name it."""
    return entry[-ID_BYTES - 1 : -ID_BYTES]


def due_key(due_ms: bytes, queue: QueueKeys) -> bytes:
    """The queue's entry in the due index."""
    return DUE + due_ms + queue.name


def parse_due_key(key: bytes) -> tuple[int, QueueKeys]:
    """Returns when, and which queue, a due index entry is about."""
    return from8(key[1:9]), parse_queue_name(key[9:])


def parse_queue_name(name: bytes) -> QueueKeys:
    """Returns the queue that ``<tenant>·<command>`` names."""
    tenant, _, command = name.partition(SEPARATOR)
    return queue_keys(tenant.decode(), command.decode())


def expiry_key(at_ms: int, kind: bytes, tenant: str, serial: bytes) -> bytes:
    """An entry of the expiry index. `serial` is one of a kind, so that no entry replaces another."""
    return EXPIRIES + ms8(at_ms) + kind + tenant.encode() + SEPARATOR + serial


def parse_expiry_key(key: bytes) -> tuple[int, bytes, str]:
    """Returns when, what kind and whose records an expiry entry is about; its value names them."""
    tenant, _, _ = key[10:].partition(SEPARATOR)
    return from8(key[1:9]), key[9:10], tenant.decode()


def split_ids(data: bytes) -> list[bytes]:
    """Returns the ids that an expiry entry names."""
    return [data[start : start + ID_BYTES] for start in range(0, len(data), ID_BYTES)]


def reader_key(reader: str, shard: int) -> bytes:
    """Where a named reader's cursor is kept."""
    return READERS + reader.encode() + SEPARATOR + shard.to_bytes(2, "big")


def parse_reader_key(key: bytes) -> tuple[str, int]:
    """Returns the reader's name and shard."""
    return key[1:-3].decode(), int.from_bytes(key[-2:], "big")


def decision_key(tenant: str, load: str) -> bytes:
    """Where the pending decision of a load is kept."""
    return DECISIONS + tenant.encode() + SEPARATOR + load.encode()


def parse_decision_key(key: bytes) -> tuple[str, str]:
    """Returns the tenant and the load."""
    tenant, _, load = key[1:].partition(SEPARATOR)
    return tenant.decode(), load.decode()


def fact_key(name: str) -> bytes:
    """Where a fact about the store itself is kept, apart from those that the store needs for its own work."""
    return META_FACTS + name.encode()


def id_of(key: bytes) -> bytes:
    """The id that an index entry ends with."""
    return key[-ID_BYTES:]
