"""Stores: where tasks live. `open_store` is the only table of schemes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.checks import Limits
from dibs.clock import Clock, SystemClock
from dibs.errors import UnknownScheme
from dibs.settings import Settings

if TYPE_CHECKING:
    from dibs.stores.ordered.engine import Engine
    from dibs.stores.ordered.store import OrderedStore

__all__ = ["open_store"]


async def open_store(url: str, *, clock: Clock | None = None, settings: Settings | None = None) -> OrderedStore:
    """Opens the store that `url` names; drivers are imported only when they are named.

    ======================  ======================================================================
    ``memory:``             in this process and gone with it; ``memory:NAME`` is shared by name
    ``lmdb:DIR`` or a path  a directory on this machine, shared by its processes; the default
    ======================  ======================================================================

    `settings` gives limits and durability; `clock` is for tests.
    """
    settings = settings or Settings()
    clock = clock or SystemClock()
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory":
        return _ordered(_memory(rest, clock), settings)
    if colon and scheme == "lmdb":
        return _ordered(_lmdb(rest, clock, settings), settings)
    if not url or "://" in url:
        raise UnknownScheme(f"{url!r} names no store: use a directory, lmdb:DIR or memory:")
    return _ordered(_lmdb(url, clock, settings), settings)


def _memory(name: str, clock: Clock) -> Engine:
    from dibs.stores.ordered.memory import MemoryEngine

    return MemoryEngine.open(name, clock)


def _lmdb(directory: str, clock: Clock, settings: Settings) -> Engine:
    from dibs.stores.ordered.lmdb import LmdbEngine

    if not directory:
        raise UnknownScheme("lmdb: names no directory: use lmdb:DIR")
    return LmdbEngine.open(
        directory,
        clock,
        max_bytes=settings.max_bytes,
        durability=settings.durability,
        disk_reserve_bytes=settings.disk_reserve_bytes,
    )


def _ordered(engine: Engine, settings: Settings) -> OrderedStore:
    from dibs.stores.ordered.store import OrderedStore
    from dibs.stores.ordered.sweep import JournalLimits

    limits = Limits(settings.payload_max_bytes, settings.result_max_bytes)
    return OrderedStore(engine, limits, JournalLimits(settings.journal_retention_s * 1000, settings.journal_max_bytes))
