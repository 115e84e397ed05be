"""What a store holds, for plain code: tests, and functions that Spark runs on executors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dibs.codec import decode
from dibs.stores import open_store
from dibs.stores.ordered.engine import ReadTxn
from dibs.stores.ordered.keys import end_of, tenant_keys
from dibs.stores.ordered.records import decode_head
from dibs.stores.ordered.store import OrderedStore
from dibs.stores.protocol import Store
from dibs.task import Task

T = TypeVar("T")


def look(url: str, question: Callable[[Store], Awaitable[T]]) -> T:
    """Opens a store, asks it something, and closes it."""

    async def asked() -> T:
        async with await open_store(url) as store:
            return await question(store)

    return asyncio.run(asked())


def tasks(url: str, tenant: str = "default") -> list[Task]:
    """Returns all tasks of a tenant."""

    async def listed(store: Store) -> list[Task]:
        found: list[Task] = []
        cursor = None
        while True:
            page = await store.list(tenant, cursor=cursor, limit=1000)
            found += page.tasks
            cursor = page.cursor
            if cursor is None:
                return found

    return look(url, listed)


def values(url: str, tenant: str = "default") -> list[Any]:
    """Returns what the payloads say, in no order."""
    return [decode(task.payload, task.codec) for task in tasks(url, tenant)]


def seen(url: str, field: str = "n") -> Counter[int]:
    """Returns how many tasks there are for each value of a field of their payloads."""
    return Counter(value[field] for value in values(url))


def staged_chunks(url: str, tenant: str = "default") -> int:
    """Returns how many chunks wait for a commit."""

    def count(txn: ReadTxn) -> int:
        prefix = tenant_keys(tenant).head
        return sum(not decode_head(value).version for _, value in txn.scan(prefix, end_of(prefix), 1_000_000))

    async def counted(store: Store) -> int:
        assert isinstance(store, OrderedStore)
        return store._engine.read(count)

    return look(url, counted)
