"""How Spark's Python processes reach the store: each opens it once, after its fork, and keeps it.

Spark runs the code of a data source in many short and long-lived processes, some of them forked from one another. A
store belongs to one process and one event loop, so every process has its own, in a thread of its own, found by URL.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from dibs import settings
from dibs.errors import StoreClosed, StoreUnavailable
from dibs.portal import Portal
from dibs.settings import mask
from dibs.stores import open_store
from dibs.stores.local import LocalStore
from dibs.stores.protocol import Store
from dibs.worker.link import StoreLink

T = TypeVar("T")

GIVE_UP_S = 60.0
"""A store that does not answer is asked again for so long, by those who may wait."""

CHECK_S = 0.05
"""So long a store on this machine is taken to be where it was."""

_portal = Portal("dibs-spark")
_links: dict[tuple[int, str], StoreLink] = {}
_checked_s: WeakKeyDictionary[Store, float] = WeakKeyDictionary()


def ask(url: str, question: Callable[[Store], Awaitable[T]], *, create: bool = False) -> T:
    """Asks the store at `url` something, and waits for the answer. `create`: makes the store where there is none."""
    return _portal.run(_ask(url, question, create))


def submit(call: Coroutine[Any, Any, T]) -> Future[T]:
    """Starts a call in the thread that has the stores; it asks them by `link`."""
    return _portal.submit(call)


def link(url: str) -> StoreLink:
    """Returns this process's link to the store at `url`, for use in the thread that has the stores."""
    key = os.getpid(), url
    if key not in _links:
        given = settings.load({"url": url})
        _links[key] = StoreLink(
            lambda create: open_store(url, settings=given, create=create), mask(url), GIVE_UP_S, create=False
        )
    return _links[key]


async def _ask(url: str, question: Callable[[Store], Awaitable[T]], create: bool) -> T:
    known = link(url)
    before = known.is_open
    store = await known.store(create=create)
    # Spark's processes outlive a job: files that were moved away since, or made anew, are opened once more.
    again = before and isinstance(store, LocalStore)
    try:
        if isinstance(store, LocalStore):
            await _check_there(store)
        return await question(store)
    except (StoreUnavailable, StoreClosed):
        await known.let_go(store)
        if not again:
            raise
    return await _ask(url, question, create)


async def _check_there(store: LocalStore) -> None:
    """Raises if the store is not any more where others look for it; looks once in a while."""
    now_s = time.monotonic()
    if now_s >= _checked_s.get(store, 0.0) + CHECK_S:
        await store.probe()
        _checked_s[store] = now_s


async def itself(store: Store) -> Store:
    """The question for the store that is open."""
    return store
