"""Reading the journal in parallel: ranges of it, cut on the driver, each read by one Spark task.

Cutting looks at every event of the journal, by runs, which is ten times as fast as showing them and more; it also
leaves out what has nothing that is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from dibs.spark.connection import ask
from dibs.spark.wanted import Wanted
from dibs.stores.protocol import Store
from dibs.task import RUNS_MAX, EventRun, RunPage


class EventRange(Struct, frozen=True):
    """The events of a shard after one cursor, up to another. It travels to executors: must be picklable."""

    shard: int
    after: bytes
    until: bytes


async def cut(store: Store, tenant: str, whole: EventRange, every: int, wanted: Wanted) -> list[EventRange]:
    """Divides a range into some of about so many wanted events each; what has none may be in no range."""
    ranges: list[EventRange] = []
    begin = at = whole.after
    count = 0
    while True:
        page = await store.runs(tenant, shard=whole.shard, after=at, until=whole.until, limit=min(every, RUNS_MAX))
        found = sum(run.count() for run in wanted.runs(page.runs))
        begin = begin if count else at
        count += found
        at = page.cursor or at
        if count >= every or (count and not page.more):
            ranges.append(EventRange(whole.shard, begin, at))
            count = 0
        if not page.more:
            return ranges


def pages(url: str, tenant: str, one: EventRange, wanted: Wanted) -> Iterator[list[EventRun]]:
    """Yields the events of a range that are wanted."""
    at = one.after
    while True:

        async def next_page(store: Store, after: bytes = at) -> RunPage:
            return await store.runs(tenant, shard=one.shard, after=after, until=one.until, limit=RUNS_MAX)

        page = ask(url, next_page)
        runs = wanted.runs(page.runs)
        if runs:
            yield runs
        if not page.more or page.cursor is None:
            return
        at = page.cursor
