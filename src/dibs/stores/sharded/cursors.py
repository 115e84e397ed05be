"""Cursors into a listing that goes from shard to shard: which set and listing, which shard, and the shard's own."""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b

import msgspec
from msgspec import Struct

from dibs.errors import InvalidCursor
from dibs.task import Filter

DIGEST_BYTES = 8


class Cursor(Struct, frozen=True, array_like=True):
    """Where a listing goes on."""

    listing: bytes
    """Of which set, tenant and filter: it means nothing in another."""
    shard: int = 0
    inner: str | None = None
    """The shard's own; None: from its beginning."""

    def pack(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()


def listing_of(set_id: bytes, tenant: str, which: Filter) -> bytes:
    """Names a listing."""
    return blake2b(msgspec.msgpack.encode((set_id, tenant, which)), digest_size=DIGEST_BYTES).digest()


def unpack(text: str | None, listing: bytes, shards: int) -> Cursor:
    """Returns where to go on; a cursor of another listing is refused."""
    if text is None:
        return Cursor(listing)
    try:
        cursor = msgspec.msgpack.decode(base64.urlsafe_b64decode(text.encode("ascii")), type=Cursor)
    except (binascii.Error, ValueError, AttributeError) as error:
        raise InvalidCursor("this is not a cursor of a listing: start again without one") from error
    if cursor.listing != listing or not 0 <= cursor.shard < shards:
        raise InvalidCursor("this cursor is of another listing: start again without one")
    return cursor
