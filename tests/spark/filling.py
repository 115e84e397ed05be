"""Stores as the tests of Spark fill and look at them: from this process, by `connection.ask`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from dibs.spark.connection import ask
from dibs.stores.protocol import Store
from dibs.task import NewTask, Task


def fill(url: str, payloads: Iterable[Any], command: str = "work", **options: Any) -> list[bytes]:
    """Enqueues a task for each payload; returns their ids."""
    tasks = [NewTask(command=command, payload=msgspec.json.encode(one), **options) for one in payloads]

    async def put(store: Store) -> list[bytes]:
        return [outcome.id for outcome in await store.enqueue("default", tasks)]  # type: ignore[union-attr]

    return ask(url, put, create=True)


def tasks_of(url: str, ids: list[bytes]) -> list[Task]:
    """Returns tasks as they stand."""

    async def look(store: Store) -> list[Task | None]:
        return await store.get("default", ids)

    found = ask(url, look)
    assert None not in found
    return found  # type: ignore[return-value]


def results_of(url: str, ids: list[bytes]) -> list[Any]:
    """Returns the results of tasks that completed."""
    return [msgspec.json.decode((task.result and task.result.data) or b"") for task in tasks_of(url, ids)]


def statuses_of(url: str, ids: list[bytes]) -> Counter[str]:
    """Returns how many tasks stand how."""
    return Counter(task.status.value for task in tasks_of(url, ids))
