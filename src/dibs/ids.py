"""Task ids: 16 bytes, ordered by time, written as UUIDv7 text; the last byte is the task's slot.

::

    48 bits         4   12 bits    2   54 bits    8 bits
    unix time, ms   7   sequence   10  random     slot

The time in front keeps new tasks together in an ordered store. The slot decides the shard. A keyed task's slot comes
from its key, so that every enqueue with that key meets the first one in the same shard; that of a task with a
`limit_key` only comes from there, so that all that share a limit are in one shard.

A row of a load has the first 13 bytes of its chunk's id, then its number in the chunk, then its slot: that of its key
or `limit_key`, or the chunk's own. So an id alone tells which chunk it may be of, and staging a chunk again gives the
same ids.

The chunks of a load that has a name have ids made from the name, which tell no time: whoever loads the same again gives
its rows the same ids.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import time
import uuid
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

from dibs.errors import InvalidName

ID_BYTES = 16
DIGEST_BYTES = 16
CHUNK_BYTES = 13
"""So many bytes of a chunk's id are those of all its rows."""

_VERSION_7 = 7 << 76
_VARIANT_RFC = 2 << 62
_HALVES = struct.Struct(">QQ")

# A sequence shared by all threads: ids minted within one millisecond still sort in the order they were minted.
_sequence = itertools.count(int.from_bytes(os.urandom(2), "big"))
# Seeded by the system, and again in a child process, which would otherwise repeat its parent's ids. Ids are unique, not
# secret: what proves ownership is the token of a lease.
_random = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def new_id(tenant: str = "default", command: str = "", key: str | None = None, limit_key: str | None = None) -> bytes:
    """Returns a new id; with a `key`, or else a `limit_key`, one in the slot that it belongs to."""
    head = (time.time_ns() // 1_000_000 << 80) | _VERSION_7 | ((next(_sequence) & 0x0FFF) << 64) | _VARIANT_RFC
    task_id = (head | _random.getrandbits(62)).to_bytes(ID_BYTES, "big")
    where = limit_key if key is None else key
    return task_id if where is None else task_id[:-1] + key_digest(tenant, command, where)[-1:]


# Asked for twice within one enqueue: for the slot check and for the index entry.
@lru_cache(maxsize=2048)
def key_digest(tenant: str, command: str, key: str) -> bytes:
    """Returns 16 bytes for a key of either kind; every part is prefixed by its length, so no two triples collide."""
    digest = _digest_begun(tenant, command).copy()
    data = key.encode()
    digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()


@lru_cache(maxsize=1024)
def _digest_begun(tenant: str, command: str) -> blake2b:
    """What the digests of all keys of a queue have in common."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in (tenant, command):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest


def new_ids(count: int) -> list[bytes]:
    """Returns so many ids without a key, in order and in one slot, so that a batch is one shard's; cheaper than one by
    one."""
    head = time.time_ns() // 1_000_000 << 16 | _VERSION_7 >> 64
    pack, bits = _HALVES.pack, _random.getrandbits
    tail = _VARIANT_RFC | bits(8)
    return [pack(head | number & 0x0FFF, tail | bits(54) << 8) for number in islice(_sequence, count)]


def row_id(chunk_id: bytes, number: int, slot: int) -> bytes:
    """Returns the id of a row of a load: where the chunk's id has random bits, it has the row's number."""
    return chunk_id[:CHUNK_BYTES] + number.to_bytes(2, "big") + bytes((slot,))


def chunk_id_of(tenant: str, load: str, number: int) -> bytes:
    """Returns the id of a chunk of a named load: the same for the same name and number, and in order of the numbers."""
    name = key_digest(tenant, "", load)
    own = blake2b(name + number.to_bytes(4, "big"), digest_size=DIGEST_BYTES).digest()
    high, low = divmod(number, 1 << 12)
    head = int.from_bytes(name[:6], "big") << 80 | _VERSION_7 | (high & 0x0FFF) << 64 | _VARIANT_RFC | low << 50
    return (head | int.from_bytes(own, "big") & ((1 << 50) - 1)).to_bytes(ID_BYTES, "big")


def slot_of(task_id: bytes) -> int:
    """Returns the slot, 0 to 255, of an id or of a key's digest."""
    return task_id[-1]


def id_to_text(task_id: bytes) -> str:
    """Returns the id as people and JSON see it."""
    return str(uuid.UUID(bytes=task_id))


def id_from_text(text: str) -> bytes:
    """Returns the id written as `text`; anything that is not a UUID raises :class:`InvalidName`."""
    try:
        return uuid.UUID(text).bytes
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidName(f"{text!r} is not a task id: expected a UUID such as {id_to_text(new_id())}") from error
