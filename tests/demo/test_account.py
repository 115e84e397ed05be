"""The books of the demo are worth reading only if they can be wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dibs.demo.account import Account, close_books
from dibs.ids import id_to_text, new_id
from dibs.task import Event, EventKind, Place, Status, Task

E = EventKind
DONE = [E.ENQUEUED, E.CLAIMED, E.COMPLETED]
ONE, OTHER = new_id(), new_id()


def events(task_id: bytes, kinds: Sequence[EventKind]) -> list[Event]:
    """The journal of one task."""
    return [Event(cursor=b"", at_ms=0, kind=kind, tenant="t", id=task_id, command="mail", attempt=1) for kind in kinds]


def task(task_id: bytes, status: Status) -> Task:
    """A task as the store lists it."""
    return Task(
        tenant="t", id=task_id, command="mail", status=status, place=Place.NONE, priority=0, attempts=1,
        max_attempts=5, releases=0, payload=b"", codec="json", enqueued_ms=0, due_ms=0,
    )  # fmt: skip


def books(
    kinds: Sequence[EventKind], status: Status = Status.COMPLETED, handle: Status | None = None, runs: int = 1
) -> Account:
    """The account of one task with such a journal, that stands so in the store and by its handle."""
    log = f"{id_to_text(ONE)} 1\n" * runs
    return close_books(
        {ONE: "mail"}, events(ONE, kinds), {ONE: task(ONE, status)}, {ONE: handle or status}, log
    )  # fmt: skip


def test_books_that_are_right() -> None:
    """A task that failed, was taken back, replayed and then completed is delivered for a reason each time."""
    life = [E.ENQUEUED, E.PROMOTED, E.CLAIMED, E.RETRIED, E.PROMOTED, E.CLAIMED, E.LEASE_EXPIRED, E.CLAIMED, E.FAILED]
    account = books([*life, E.REPLAYED, E.CLAIMED, E.COMPLETED], runs=4)
    assert account.holds
    assert account.deliveries == {"first": 1, "after a failure": 1, "after a lease ran out": 1, "replayed": 1}
    assert (account.total.enqueued, account.total.completed, account.total.deliveries) == (1, 1, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        books([*DONE, E.COMPLETED]),
        books([E.ENQUEUED, E.CLAIMED, E.CLAIMED, E.COMPLETED]),
        books([*DONE, E.CLAIMED, E.COMPLETED]),
        books([E.ENQUEUED, E.COMPLETED]),
        books([*DONE, E.PURGED]),
        books(DONE, Status.PENDING),
        books(DONE, handle=Status.FAILED),
        books(DONE, runs=2),
        books(DONE, runs=0),
        close_books({ONE: "mail", OTHER: "mail"}, events(ONE, DONE), {ONE: task(ONE, Status.COMPLETED)}, {}, ""),
        close_books({}, events(ONE, DONE), {}, {}, ""),
    ],
    ids=["completed twice", "held twice", "delivered after its end", "completed by nobody", "purged",
         "the store disagrees", "the handle disagrees", "ran too often", "never ran", "lost", "from nowhere"],
)  # fmt: skip
def test_books_that_are_wrong(wrong: Account) -> None:
    """What must not happen to a task shows."""
    assert not wrong.holds
