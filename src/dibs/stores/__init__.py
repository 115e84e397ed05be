"""Stores: where tasks live. `open_store` is the only table of schemes."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING

from dibs.checks import Limits
from dibs.clock import Clock, SystemClock
from dibs.errors import MissingDriver, UnknownScheme
from dibs.settings import Settings

if TYPE_CHECKING:
    from dibs.stores.ordered.engine import Engine
    from dibs.stores.ordered.store import OrderedStore

__all__ = ["open_store", "restore_store"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


async def open_store(
    url: str | os.PathLike[str], *, clock: Clock | None = None, settings: Settings | None = None, create: bool = True
) -> OrderedStore:
    """Opens the store that `url` names; drivers are imported only when they are named.

    ======================  ======================================================================
    ``memory:``             in this process and gone with it; ``memory:NAME`` is shared by name
    ``lmdb:DIR`` or a path  a directory on this machine, shared by its processes; the default
    ======================  ======================================================================

    `settings` gives limits and durability; `clock` is for tests. Without `create`, a directory that holds no store yet
    is left as it is (`StoreMissing`).
    """
    settings = settings or Settings()
    clock = clock or SystemClock()
    url = _text(url)
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory":
        return _ordered(_memory(rest, clock), settings)
    if colon and scheme == "lmdb":
        return _ordered(_lmdb(rest, clock, settings, create), settings)
    if not url or _SCHEME.match(url):
        raise UnknownScheme(f"{url!r} names no store: use lmdb:DIR, a directory (with ./ in front) or memory:")
    return _ordered(_lmdb(url, clock, settings, create), settings)


async def restore_store(backup: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Makes a store in a new directory out of what `backup` wrote. It has an id of its own: cursors into the journal of
    the original are told so."""
    from dibs.stores.ordered.lmdb import restore

    await asyncio.to_thread(restore, backup, directory)


def _text(url: str | os.PathLike[str]) -> str:
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


def _ordered(engine: Engine, settings: Settings) -> OrderedStore:
    from dibs.stores.ordered.store import OrderedStore
    from dibs.stores.ordered.sweep import JournalLimits

    limits = Limits(settings.payload_max_bytes, settings.result_max_bytes)
    return OrderedStore(engine, limits, JournalLimits(settings.journal_retention_s * 1000, settings.journal_max_bytes))
