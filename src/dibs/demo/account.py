"""The books of the demo: what the producer was told, what the store lists, what the journal says and what the handlers
wrote down, held against each other, task by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from dibs.ids import id_from_text
from dibs.task import Event, EventKind, Status, Task

WAITING = frozenset({Status.PENDING})
HELD = frozenset({Status.IN_PROGRESS})

#: For each event, how a task may stand before it, and how it stands after. Anything else in a journal is a fault: one
#: that is held is not delivered to another, and one that has ended does not end again.
MOVES: dict[EventKind, tuple[frozenset[Status | None], Status]] = {
    EventKind.ENQUEUED: (frozenset({None}), Status.PENDING),
    EventKind.PROMOTED: (WAITING, Status.PENDING),
    EventKind.CLAIMED: (WAITING, Status.IN_PROGRESS),
    EventKind.COMPLETED: (HELD, Status.COMPLETED),
    EventKind.RETRIED: (HELD, Status.PENDING),
    EventKind.RELEASED: (HELD, Status.PENDING),
    EventKind.LEASE_EXPIRED: (HELD, Status.PENDING),
    EventKind.FAILED: (HELD, Status.FAILED),
    EventKind.CANCELLING: (HELD, Status.IN_PROGRESS),
    EventKind.CANCELLED: (WAITING | HELD, Status.CANCELLED),
    EventKind.REPLAYED: (frozenset({Status.FAILED}), Status.PENDING),
}  # fmt: skip

#: Why a task is delivered: for the first time, or once more.
BECAUSE = {
    EventKind.ENQUEUED: "first",
    EventKind.RETRIED: "after a failure",
    EventKind.LEASE_EXPIRED: "after a lease ran out",
    EventKind.RELEASED: "given back",
    EventKind.REPLAYED: "replayed",
}


class Ledger:
    """The journal read from its beginning: where every task stands, and why it was delivered how often."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.status: dict[bytes, Status] = {}
        self.command: dict[bytes, str] = {}
        self.deliveries: Counter[bytes] = Counter()
        self.reasons: Counter[str] = Counter()
        self.faults: list[Event] = []
        self._because: dict[bytes, str] = {}
        for event in events:
            self._book(event)

    def _book(self, event: Event) -> None:
        before, after = MOVES.get(event.kind, (frozenset(), Status.PENDING))
        if self.status.get(event.id) not in before:
            self.faults.append(event)
        self.status[event.id] = after
        self.command[event.id] = event.command
        if event.kind in BECAUSE:
            self._because[event.id] = BECAUSE[event.kind]
        if event.kind is EventKind.CLAIMED:
            self.deliveries[event.id] += 1
            self.reasons[self._because.get(event.id, "for no reason")] += 1


class Row(Struct, frozen=True):
    """One queue's tasks, by how they stand, and how often they were delivered."""

    queue: str
    enqueued: int = 0
    completed: int = 0
    dead: int = 0
    cancelled: int = 0
    waiting: int = 0
    deliveries: int = 0

    @property
    def balanced(self) -> bool:
        """Whether everything that went in is somewhere."""
        return self.enqueued == self.completed + self.dead + self.cancelled + self.waiting


class Check(Struct, frozen=True):
    """Something that must be so, and whether it is."""

    text: str
    holds: bool


class Account(Struct, frozen=True):
    """The result of the demo."""

    rows: list[Row]
    total: Row
    deliveries: dict[str, int]
    """How many, by why."""
    checks: list[Check]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def balance(acknowledged: Mapping[bytes, str], ledger: Ledger, tasks: Mapping[bytes, Task]) -> list[Row]:
    """A row for each queue: what the producer put in, where the store has it, and how often the journal says it went
    out."""
    put_in = Counter(acknowledged.values())
    stand = Counter((task.command, task.status) for task in tasks.values())
    went_out = Counter(dict.fromkeys(put_in, 0))
    for task_id, count in ledger.deliveries.items():
        went_out[ledger.command[task_id]] += count
    return [
        Row(
            queue,
            put_in[queue],
            stand[(queue, Status.COMPLETED)],
            stand[(queue, Status.FAILED)],
            stand[(queue, Status.CANCELLED)],
            stand[(queue, Status.PENDING)] + stand[(queue, Status.IN_PROGRESS)],
            went_out[queue],
        )
        for queue in dict.fromkeys([*put_in, *went_out, *(task.command for task in tasks.values())])
    ]


def total(rows: Sequence[Row]) -> Row:
    """The sum of all rows."""
    counts = ([row.enqueued, row.completed, row.dead, row.cancelled, row.waiting, row.deliveries] for row in rows)
    return Row("all", *(sum(column) for column in zip(*counts, strict=True)))


def close_books(
    acknowledged: Mapping[bytes, str],
    events: Sequence[Event],
    listed: Mapping[bytes, Task],
    handles: Mapping[bytes, Status],
    runs: str,
) -> Account:
    """Holds all records against each other. `runs`: a line for each start of a handler, with the id in front."""
    ledger = Ledger(events)
    rows = balance(acknowledged, ledger, listed)
    ran = Counter(id_from_text(line.split()[0]) for line in runs.splitlines())
    checks = [
        Check("Enqueued = completed + dead + cancelled + waiting, in every queue.", all(row.balanced for row in rows)),
        Check(
            f"Producer, store and journal name the same {len(acknowledged):,} ids.",
            acknowledged.keys() == listed.keys() == ledger.status.keys(),
        ),
        Check(
            "Every handle, the store and the journal tell the same outcome.",
            handles == ledger.status == {task_id: task.status for task_id, task in listed.items()},
        ),
        Check(
            f"Journal: {len(events):,} events, no task held twice at a time or ended twice.",
            not ledger.faults,
        ),
        Check(
            f"Handlers: {ran.total():,} runs by their own log, none that was not delivered.",
            all(count <= ledger.deliveries[task_id] for task_id, count in ran.items()),
        ),
        Check(
            "Everything that completed has run.",
            all(ran[task_id] for task_id, status in ledger.status.items() if status is Status.COMPLETED),
        ),
    ]
    return Account(rows, total(rows), dict(ledger.reasons), checks)
