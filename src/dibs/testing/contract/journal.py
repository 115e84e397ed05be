"""Journal: one event per transition, with what there is to tell, in order."""

from __future__ import annotations

import pytest

from dibs.clock import ManualClock
from dibs.stores.protocol import Store
from dibs.task import ErrorInfo, Event, EventKind, Kind, NewTask
from dibs.testing.contract.steps import (
    COMMAND,
    TENANT,
    complete,
    fail,
    kinds_of,
    pass_time,
    put,
    put_dead,
    read_events,
    release,
    retry,
    settle,
    take,
)


async def events_of(store: Store, task_id: bytes) -> list[Event]:
    """Returns what the journal holds of one task."""
    return [event for event in await read_events(store) if event.id == task_id]


@pytest.mark.anyio
class TestEvents:
    """What the journal says of each transition."""

    async def test_a_whole_life(self, store: Store, clock: ManualClock) -> None:
        """Every move is one event with its time, attempt and worker, in the order they happened."""
        task_id = await put(store, delay_s=10)
        start_ms = clock.now_ms()
        await pass_time(store, clock, 10)
        await release(store, await take(store, worker="w1"))
        await retry(store, await take(store, worker="w2"), delay_s=5)
        clock.advance(5)
        await take(store, worker="w3")
        await pass_time(store, clock, 31)
        await complete(store, await take(store, worker="w4"))
        events = await events_of(store, task_id)
        told = [(event.kind, event.worker, event.at_ms - start_ms) for event in events if event.kind != "promoted"]
        assert told == [
            (EventKind.ENQUEUED, "", 0),
            (EventKind.CLAIMED, "w1", 10_000),
            (EventKind.RELEASED, "w1", 10_000),
            (EventKind.CLAIMED, "w2", 10_000),
            (EventKind.RETRIED, "w2", 10_000),
            (EventKind.CLAIMED, "w3", 15_000),
            (EventKind.LEASE_EXPIRED, "w3", 46_000),
            (EventKind.CLAIMED, "w4", 46_000),
            (EventKind.COMPLETED, "w4", 46_000),
        ]
        assert [event.kind for event in events].count(EventKind.PROMOTED) == 2
        attempts = [event.attempt for event in events if event.kind is EventKind.CLAIMED]
        assert attempts == [1, 1, 2, 3]
        assert {(event.tenant, event.command) for event in events} == {(TENANT, COMMAND)}
        assert events[-1].attempt == 3
        assert {event.kind for event in events if event.reason} == {EventKind.ENQUEUED, EventKind.RETRIED}

    @pytest.mark.parametrize(
        ("ending", "last", "reason"),
        [
            ("fail", EventKind.FAILED, "FAILED"),
            ("fail BAD", EventKind.FAILED, "BAD"),
            ("retry", EventKind.FAILED, "MAX_ATTEMPTS"),
            ("expire", EventKind.FAILED, "LEASE_EXPIRED"),
            ("cancel", EventKind.CANCELLED, "CANCELLED"),
            ("cancel expire", EventKind.CANCELLED, "CANCELLED"),
        ],
    )
    async def test_how_it_ended(
        self, store: Store, clock: ManualClock, ending: str, last: EventKind, reason: str
    ) -> None:
        """The end of a task is one event that says why."""
        task_id = await put(store, max_attempts=1)
        lease = await take(store)
        if ending.startswith("cancel"):
            await store.cancel(TENANT, [task_id])
        if ending.endswith("expire"):
            await pass_time(store, clock, 31)
        elif ending == "retry":
            await settle(store, lease, Kind.RETRY)
        else:
            await settle(store, lease, Kind.FAIL, reason="BAD" if ending == "fail BAD" else None)
        events = await events_of(store, task_id)
        middle = [EventKind.CANCELLING] if ending.startswith("cancel") else []
        assert [event.kind for event in events] == [EventKind.ENQUEUED, EventKind.CLAIMED, *middle, last]
        assert events[-1].reason == reason

    async def test_errors_are_told_in_short(self, store: Store) -> None:
        """An event carries the error's type, its first line, cut to 200 characters, and a fingerprint."""
        task_id = await put(store)
        message = "first line " + "x" * 300 + "\nsecond line"
        for error in (
            ErrorInfo("ValueError", message),
            ErrorInfo("KeyError", message),
            ErrorInfo("ValueError", message),
        ):
            await settle(store, await take(store), Kind.RETRY, error=error)
        told = [event for event in await events_of(store, task_id) if event.kind is EventKind.RETRIED]
        assert [event.error_type for event in told] == ["ValueError", "KeyError", "ValueError"]
        assert {event.error_line for event in told} == {message[:200]}
        prints = [event.fingerprint for event in told]
        assert prints[0]
        assert prints[0] == prints[2] != prints[1]

    async def test_replays_and_purges(self, store: Store) -> None:
        """What is done to a dead letter is told too."""
        task_id = await put_dead(store)
        await store.replay(TENANT, [task_id])
        await fail(store, await take(store))
        await store.purge(TENANT, [task_id])
        assert (await kinds_of(store, task_id))[3:] == [
            EventKind.REPLAYED,
            EventKind.CLAIMED,
            EventKind.FAILED,
            EventKind.PURGED,
        ]

    async def test_what_changes_nothing_is_not_told(self, store: Store) -> None:
        """Repeats, duplicates and lost leases make no events."""
        task_id = await put(store, key="k")
        lease = await take(store)
        await complete(store, lease)
        before = await read_events(store)
        await store.enqueue(TENANT, [NewTask(command=COMMAND, id=task_id), NewTask(command=COMMAND, key="k")])
        await settle(store, lease, Kind.COMPLETE)
        await settle(store, lease, Kind.FAIL)
        await store.cancel(TENANT, [task_id])
        await store.replay(TENANT, [task_id])
        assert await read_events(store) == before
