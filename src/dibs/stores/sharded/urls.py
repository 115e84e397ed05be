"""How a set of shards is named by one text.

::

    DIR?n=4              LMDB stores in DIR/0 to DIR/3
    memory:NAME?n=4      stores in the memory of this process: memory:NAME/0 to memory:NAME/3
    [URL1,URL2,…]        any stores, in their order

Once the set exists it knows how many it has, and `?n=` may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from dibs.errors import ShardMismatch, UnknownScheme

SLOTS = 256
SHARDS_MAX = SLOTS

_QUERY = re.compile(r"\?([A-Za-z_]\w*)=([^?]*)\Z")


class Named(Struct, frozen=True):
    """What the text says: where each shard is, or where all of them are and perhaps how many."""

    urls: tuple[str, ...] = ()
    """In a list."""
    base: str = ""
    """`lmdb:DIR` or `memory:NAME`, without a list."""
    count: int | None = None

    def shard_urls(self, count: int) -> tuple[str, ...]:
        """Returns the URL of each of so many shards."""
        if self.urls:
            return self.urls
        if self.base == "memory:":
            return (self.base,) * count
        return tuple(f"{self.base}/{number}" for number in range(count))

    def candidates(self) -> tuple[str, ...]:
        """Returns the URLs of what may be shards of the set, for one whose number is not known."""
        if self.base == "memory:":
            return ()
        if self.base.startswith("memory:"):
            return self.shard_urls(1)
        directory = self.directory()
        found = [path.name for path in directory.iterdir()] if directory is not None and directory.is_dir() else []
        return tuple(f"{self.base}/{number}" for number in sorted(int(name) for name in found if name.isdecimal()))

    def directory(self) -> Path | None:
        """Returns the directory that all shards are in, if the text names one."""
        return Path(self.base.removeprefix("lmdb:")) if self.base.startswith("lmdb:") else None

    def check_place(self) -> None:
        """Refuses a directory that is a store by itself: its tasks would not be seen in the set."""
        directory = self.directory()
        if directory is not None and (directory / "data.mdb").exists():
            raise ShardMismatch(
                f"{directory} holds a plain store: open it as lmdb:{directory}, and name another directory for a set "
                "of shards"
            )


def parse(text: str) -> Named:
    """Reads what follows ``shards:``."""
    if text.startswith("["):
        if not text.endswith("]"):
            raise UnknownScheme(f"shards:{text} has no closing bracket: use shards:[URL1,URL2]")
        return listed([url.strip() for url in text[1:-1].split(",")])
    base, count = text, None
    if query := _QUERY.search(text):
        base, count = text[: query.start()], _count(query[1], query[2])
    if base.startswith("memory:"):
        return Named(base=base, count=count)
    directory = base.removeprefix("lmdb:")
    if not directory or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", directory):
        raise UnknownScheme(f"shards:{text} names no shards: use shards:DIR?n=4 or shards:[URL1,URL2]")
    return Named(base=f"lmdb:{directory.rstrip('/') or '/'}", count=count)


def listed(urls: Sequence[str]) -> Named:
    """Shards that are named one by one."""
    if not 1 <= len(urls) <= SHARDS_MAX or not all(urls):
        raise UnknownScheme(f"{len(urls)} URLs, or an empty one, name no set of shards: give 1 to {SHARDS_MAX}")
    if any(url.startswith("shards:") for url in urls):
        raise UnknownScheme("a shard cannot be a set of shards itself: name all the stores in one list")
    if len({*urls} - {"memory:"}) != len([url for url in urls if url != "memory:"]):
        raise ShardMismatch("one store is named twice in a list of shards: each must be a store of its own")
    return Named(urls=tuple(urls), count=len(urls))


def _count(name: str, value: str) -> int:
    if name != "n" or not re.fullmatch(r"[0-9]{1,3}", value) or not 1 <= int(value) <= SHARDS_MAX:
        raise UnknownScheme(f"?{name}={value} says nothing about shards: use ?n= with 1 to {SHARDS_MAX}")
    return int(value)
