"""How Spark's Python processes reach the store: each opens it once, after its fork, and keeps it.

Spark runs the code of a data source in many short and long-lived processes, some of them forked from one another. A
store belongs to one process and one event loop, so every process has its own, in a thread of its own, found by URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dibs import settings
from dibs.errors import StoreClosed, StoreUnavailable
from dibs.portal import Portal
from dibs.stores import open_store
from dibs.stores.protocol import Store

T = TypeVar("T")

_portal = Portal("dibs-spark")
_stores: dict[tuple[int, str], Store] = {}


def ask(url: str, question: Callable[[Store], Awaitable[T]], *, create: bool = False) -> T:
    """Asks the store at `url` something, and waits for the answer. `create`: makes the store where there is none."""
    return _portal.run(_ask(url, question, create))


async def _ask(url: str, question: Callable[[Store], Awaitable[T]], create: bool) -> T:
    key = os.getpid(), url
    store = _stores.get(key)
    if store is None:
        opened = await open_store(url, settings=settings.load({"url": url}), create=create)
        store = _stores.setdefault(key, opened)
        if store is not opened:
            await opened.close()
    try:
        return await question(store)
    except (StoreUnavailable, StoreClosed):
        # Spark's processes outlive a task: the next one of them opens it anew.
        if _stores.get(key) is store:
            del _stores[key]
        with contextlib.suppress(StoreUnavailable, StoreClosed):
            await store.close()
        raise


async def itself(store: Store) -> Store:
    """The question for the store that is open."""
    return store
