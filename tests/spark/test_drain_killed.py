"""Processes of a drain are killed: what they held comes back, and in the end every task is done once."""

from __future__ import annotations

from collections import Counter

import pytest

from dibs.spark.connection import ask
from dibs.stores.protocol import Store
from dibs.task import EventKind
from tests.spark.conftest import OnCluster
from tests.spark.filling import tasks_of
from tests.spark.standalone import PATIENCE_S


@pytest.mark.timeout(PATIENCE_S + 30)
def test_killed_python_workers(on_cluster: OnCluster) -> None:
    """Two Python processes are killed with -9 in mid-batch: Spark starts their tasks again, which go on with others;
    the rows they held are taken back when their leases end, and every row is completed once."""
    rounds = on_cluster.told["killed"]
    assert not all(worker.endswith(".0") for worker in rounds[0]), "another try of a Spark task"
    assert {mark.name for mark in (on_cluster.directory / "marks").iterdir()} == {"150", "620"}

    async def ends(store: Store) -> Counter[tuple[bytes, EventKind]]:
        seen: Counter[tuple[bytes, EventKind]] = Counter()
        after = None
        while True:
            page = await store.events("default", after=after)
            seen.update((event.id, event.kind) for event in page.events if event.command == "work")
            if not page.more:
                return seen
            after = page.cursor

    events = ask(on_cluster.url, ends)
    ids = [one for one, kind in events if kind is EventKind.ENQUEUED]
    assert len(ids) == 1_000
    assert all(events[one, EventKind.COMPLETED] == 1 for one in ids)
    expired = {one for one in ids if events[one, EventKind.LEASE_EXPIRED]}
    assert len(expired) >= 2
    assert {task.id for task in tasks_of(on_cluster.url, ids) if task.attempts == 2} == expired
