"""Stores: where tasks live. `open_store` is the only table of schemes."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dibs.checks import Limits
from dibs.clock import Clock, SystemClock
from dibs.errors import MissingDriver, StoreCorrupt, StoreRefused, UnknownScheme
from dibs.settings import Settings, mask

if TYPE_CHECKING:
    from dibs.stores.local import LocalStore
    from dibs.stores.ordered.engine import Engine
    from dibs.stores.ordered.store import OrderedStore
    from dibs.stores.protocol import Store

__all__ = ["open_local", "open_store", "restore_store"]

REMOTE = ("http://", "https://")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


async def open_store(
    url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    clock: Clock | None = None,
    settings: Settings | None = None,
    create: bool = True,
) -> Store:
    """Opens the store that `url` names; drivers are imported only when they are named.

    ==========================  ======================================================================
    ``memory:``                 in this process and gone with it; ``memory:NAME`` is shared by name
    ``lmdb:DIR`` or a path      a directory on this machine, shared by its processes; the default
    ``shards:DIR?n=4``          so many ``lmdb:`` stores as one, in DIR/0, DIR/1 and so on
    ``shards:memory:NAME?n=4``  the same in memory
    ``shards:[URL,URL]``        any stores as one; a Python list of URLs means the same
    ``http(s)://TOKEN@HOST``    a server's
    ==========================  ======================================================================

    `settings` gives limits and durability; `clock` is for tests. Without `create`, a directory that holds no store yet
    is left as it is (`StoreMissing`). A set of shards knows how many it has: ``?n=`` is needed to make it, and refused
    if it says something else later.
    """
    settings = settings or Settings()
    if isinstance(url, str) and url.startswith(REMOTE):
        return await _remote(url)
    return await open_local(url, clock=clock, settings=settings, create=create)


async def open_local(
    url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    clock: Clock | None = None,
    settings: Settings | None = None,
    create: bool = True,
) -> LocalStore:
    """`open_store`, for what only a store on this machine can do: a server's is refused."""
    settings = settings or Settings()
    clock = clock or SystemClock()
    if isinstance(url, str) and url.startswith(REMOTE):
        raise StoreRefused("this is about a store's own files: run it on the machine that has them, not on a server's")
    if isinstance(url, list | tuple):
        return await _sharded([_text(one) for one in url], clock, settings, create)
    url = _text(url)
    if url.startswith("shards:"):
        return await _sharded(url.removeprefix("shards:"), clock, settings, create)
    store = open_single(url, clock, settings, create=create)
    await _check_alone(store, url)
    return store


def open_single(url: str, clock: Clock, settings: Settings, *, create: bool) -> OrderedStore:
    """Opens a store that is no set, whether it belongs to one or not: only the set should have a shard of its own."""
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory":
        return _ordered(_memory(rest, clock), settings)
    if colon and scheme == "lmdb":
        return _ordered(_lmdb(rest, clock, settings, create), settings)
    if not url or _SCHEME.match(url):
        raise UnknownScheme(
            f"{mask(url)!r} names no store: use lmdb:DIR, a directory (with ./ in front), shards:, memory: or http://HOST"
        )
    return _ordered(_lmdb(url, clock, settings, create), settings)


async def restore_store(backup: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Makes a store in a new directory out of what `backup` wrote. It has an id of its own: cursors into the journal of
    the original are told so."""
    from dibs.stores.ordered import lmdb
    from dibs.stores.sharded import copies

    restore = copies.restore if copies.is_copy(backup) else lmdb.restore
    await asyncio.to_thread(restore, backup, directory)


async def _remote(url: str) -> Store:
    try:
        from dibs.stores.remote.store import open_remote
    except ImportError as error:
        raise MissingDriver("the client of a server is missing: pip install 'dibs[remote]'") from error
    return await open_remote(url)


def _text(url: object) -> str:
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise UnknownScheme(f"{url!r} names no store: use the text of a URL or of a path")
    return text


def _memory(name: str, clock: Clock) -> Engine:
    from dibs.stores.ordered.memory import MemoryEngine

    return MemoryEngine.open(name, clock)


def _lmdb(directory: str, clock: Clock, settings: Settings, create: bool) -> Engine:
    try:
        from dibs.stores.ordered.lmdb import LmdbEngine
    except ImportError as error:
        raise MissingDriver("the driver of the embedded store is missing: pip install lmdb") from error
    if not directory:
        raise UnknownScheme("lmdb: names no directory: use lmdb:DIR")
    return LmdbEngine.open(
        directory,
        clock,
        max_bytes=settings.max_bytes,
        durability=settings.durability,
        disk_reserve_bytes=settings.disk_reserve_bytes,
        create=create,
    )


async def _sharded(named: str | Sequence[str], clock: Clock, settings: Settings, create: bool) -> LocalStore:
    from dibs.stores.sharded.opening import open_shards
    from dibs.stores.sharded.urls import listed, parse

    async def opener(url: str, create: bool) -> LocalStore:
        return open_single(url, clock, settings, create=create)

    whole = parse(named) if isinstance(named, str) else listed(named)
    return await open_shards(whole, opener, _limits(settings), create=create)


async def _check_alone(store: OrderedStore, url: str) -> None:
    """Refuses a shard that is opened by itself."""
    from dibs.stores.sharded.table import check_alone

    try:
        await check_alone(store, url)
    except StoreCorrupt:
        pass  # The doctor can still be asked.
    except BaseException:
        await store.close()
        raise


def _limits(settings: Settings) -> Limits:
    return Limits(settings.payload_max_bytes, settings.result_max_bytes)


def _ordered(engine: Engine, settings: Settings) -> OrderedStore:
    from dibs.stores.ordered.store import OrderedStore
    from dibs.stores.ordered.sweep import JournalLimits

    journal = JournalLimits(settings.journal_retention_s * 1000, settings.journal_max_bytes)
    return OrderedStore(engine, _limits(settings), journal)
