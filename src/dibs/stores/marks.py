"""Where a call of `marks` leaves off, for the next one to go on."""

from __future__ import annotations

from msgspec import Struct

from dibs.errors import InvalidCursor
from dibs.ids import ID_BYTES

COUNT_BYTES = 8


class MarkCursor(Struct, frozen=True):
    """After which id to go on (empty: from the beginning), and how many tasks each shard has had since its last
    mark."""

    after: bytes
    counts: tuple[int, ...]

    def pack(self) -> bytes:
        return self.after + b"".join(count.to_bytes(COUNT_BYTES, "big") for count in self.counts)

    def of(self, shard: int) -> bytes | None:
        """The cursor for one shard."""
        return MarkCursor(self.after, (self.counts[shard],)).pack() if self.after else None

    @classmethod
    def unpack(cls, data: bytes | None, shards: int) -> MarkCursor:
        """Returns what was packed; an id by itself is where to begin."""
        if data is None:
            return cls(b"", (0,) * shards)
        if type(data) is not bytes or len(data) not in (ID_BYTES, ID_BYTES + shards * COUNT_BYTES):
            raise InvalidCursor("this is not a cursor of marks: start again without one")
        ends = range(ID_BYTES, len(data), COUNT_BYTES)
        counts = tuple(int.from_bytes(data[end : end + COUNT_BYTES], "big") for end in ends)
        return cls(data[:ID_BYTES], counts or (0,) * shards)
