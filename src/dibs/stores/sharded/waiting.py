"""Waiting on several stores at once: one waiter that has a place in the waiting room of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from dibs.errors import StoreError
from dibs.stores.local import LocalStore
from dibs.stores.sharded.shard import Shard
from dibs.stores.wakeups import Subscription, Topic, Wakeups


class SharedSubscription(Subscription):
    """Woken by any shard that has something for it. A shard that comes back while it waits is joined at its next
    `wait`; the fallback look finds what it missed until then."""

    def __init__(
        self,
        shards: Sequence[Shard],
        topics_of: Callable[[Shard], Sequence[Topic]],
        topics: Iterable[Topic],
        limit: int,
    ) -> None:
        super().__init__(Wakeups(), tuple(topics), limit)
        self._shards = shards
        self._topics_of = topics_of
        self._parts: dict[Shard, tuple[LocalStore, Subscription]] = {}

    def __enter__(self) -> SharedSubscription:
        self._join()
        return super().__enter__()

    async def wait(self, timeout_s: float) -> bool:
        self._join()
        return await super().wait(timeout_s)

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        # A wake-up that was not used is passed on in every room: nobody knows whose it was.
        while self._parts:
            self._parts.popitem()[1][1].__exit__(*error)
        super().__exit__(*error)

    def _join(self) -> None:
        for shard in self._shards:
            store = shard.store
            joined = self._parts.get(shard)
            if joined is not None and joined[0] is not store:
                self._parts.pop(shard)[1].__exit__()
            elif joined is not None:
                continue
            topics = self._topics_of(shard)
            if store is not None and topics:
                try:
                    part = store.subscribe(topics, self.limit)
                except StoreError:
                    # It is going down at this moment: the look that follows will say so.
                    continue
                part.share(self)
                self._parts[shard] = (store, part)
                part.__enter__()
