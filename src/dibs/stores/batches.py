"""What becomes of a batch at the seam: its items listed, split into transactions of bounded size, answered in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dibs.errors import InvalidOption
from dibs.ids import CHUNK_BYTES, key_digest, new_id, new_ids, row_id, slot_of
from dibs.task import BATCH_MAX, NewTask, Rejected

BATCH_MAX_BYTES = 1 << 20

_NUMBERS = [number.to_bytes(2, "big") for number in range(BATCH_MAX)]

Item = TypeVar("Item")


def listed(items: Sequence[Item]) -> Sequence[Item]:
    """Returns the items of a batch as a list, also those of a generator."""
    if type(items) is list:
        return items
    try:
        return list(items)
    except TypeError as error:
        raise InvalidOption(f"a batch is a list, not {type(items).__name__}: put a single item into one") from error


def batches(
    items: Sequence[Item], rejected: Mapping[int, Rejected], size_of: Callable[[Item], int]
) -> Iterable[Sequence[Item]]:
    """Returns the items that were not rejected, in transactions of bounded count and size."""
    if not items or (len(items) == 1 and not rejected):
        return (items,) if items else ()
    if not rejected and len(items) <= BATCH_MAX and sum(map(size_of, items)) <= BATCH_MAX_BYTES:
        return (items,)
    return _split([item for index, item in enumerate(items) if index not in rejected], size_of)


def _split(items: Sequence[Item], size_of: Callable[[Item], int]) -> Iterable[Sequence[Item]]:
    batch: list[Item] = []
    batch_bytes = 0
    for item in items:
        size = size_of(item)
        if len(batch) == BATCH_MAX or (batch and batch_bytes + size > BATCH_MAX_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch


def ids_of(tenant: str, tasks: Sequence[NewTask]) -> list[bytes]:
    """Returns the tasks' own ids, and mints those that are missing."""
    if len(tasks) > 1 and not tasks[0].id and not any(task.id or task.key is not None for task in tasks):
        return new_ids(len(tasks))
    return [task.id or new_id(tenant, task.command, task.key) for task in tasks]


def row_ids(tenant: str, chunk_id: bytes, rows: Sequence[NewTask]) -> list[bytes]:
    """Returns the ids that the rows of a chunk have."""
    own = slot_of(chunk_id)
    if all(row.key is None for row in rows):
        head, slot = chunk_id[:CHUNK_BYTES], bytes((own,))
        return [head + number + slot for number in _NUMBERS[: len(rows)]]
    return [
        row_id(chunk_id, number, own if row.key is None else slot_of(key_digest(tenant, row.command, row.key)))
        for number, row in enumerate(rows)
    ]


def merged(outcomes: list[Any], rejected: Mapping[int, Rejected]) -> list[Any]:
    """Returns the outcomes of all items, in their order."""
    for index, outcome in rejected.items():
        outcomes.insert(index, outcome)
    return outcomes


def slices(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    """Returns the items, so many at a time as one transaction may hold."""
    return (items[start : start + BATCH_MAX] for start in range(0, len(items), BATCH_MAX))
