"""What becomes of a batch at the seam: its items listed, split into transactions of bounded size, answered in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import astuple, replace

from dibs.errors import InvalidOption
from dibs.ids import CHUNK_BYTES, key_digest, new_id, new_ids, row_id, slot_of
from dibs.task import BATCH_MAX, CLAIM_MAX_BYTES, Lease, NewTask, Rejected, Rows

BATCH_MAX_BYTES = 1 << 20

Item = TypeVar("Item")

_NUMBERS = [number.to_bytes(2, "big") for number in range(BATCH_MAX)]
_PAYLOAD, _KEY = map(NewTask.__struct_fields__.index, ("payload", "key"))
_BEFORE, _BETWEEN, _AFTER = slice(_PAYLOAD), slice(_PAYLOAD + 1, _KEY), slice(_KEY + 1, None)


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
    if len(tasks) > 1 and not tasks[0].id and not any(task.id or is_bound(task) for task in tasks):
        return new_ids(len(tasks))
    return [task.id or new_id(tenant, task.command, task.key, task.limit_key) for task in tasks]


def is_full(leases: Sequence[Lease]) -> bool:
    """Whether a claim holds so much that the rest is for the next."""
    return sum(len(lease.payload) for lease in leases) >= CLAIM_MAX_BYTES


def is_bound(task: NewTask) -> bool:
    """Whether one of its keys says where a task belongs."""
    return task.key is not None or task.limit_key is not None


def rows_of(tasks: Sequence[NewTask]) -> Rows:
    """Returns tasks as rows by column."""
    found: dict[tuple[Any, ...], int] = {}
    options: list[NewTask] = []
    kinds: list[int] = []
    # Rows mostly say what the one before them said: comparing is cheaper than looking up.
    before: tuple[Any, ...] = ()
    between: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    kind = -1
    columns = list(map(astuple, tasks))
    try:
        for said in columns:
            if said[_BETWEEN] != between or said[_AFTER] != after or said[_BEFORE] != before:
                before, between, after = said[_BEFORE], said[_BETWEEN], said[_AFTER]
                kind = found.setdefault((before, between, after), len(options))
                if kind == len(options):
                    options.append(replace(tasks[len(kinds)], payload=b"", key=None))
            kinds.append(kind)
    except TypeError as error:
        raise InvalidOption(f"row {len(kinds)}: an option is of a type that none has ({error})") from error
    keys = [said[_KEY] for said in columns]
    return Rows(
        [said[_PAYLOAD] for said in columns],
        options,
        kinds if len(options) > 1 else [],
        keys if any(key is not None for key in keys) else [],
    )


def row_ids(tenant: str, chunk_id: bytes, rows: Rows | Sequence[NewTask]) -> list[bytes]:
    """Returns the ids that the rows of a chunk have."""
    if not isinstance(rows, Rows):
        rows = rows_of(rows)
    own = slot_of(chunk_id)
    if not rows.bound():
        head, slot = chunk_id[:CHUNK_BYTES], bytes((own,))
        return [head + number + slot for number in _NUMBERS[: len(rows.payloads)]]
    said = [rows.options[kind] for kind in rows.kinds] or rows.options * len(rows.payloads)
    keys = rows.keys or [None] * len(rows.payloads)
    where = [options.limit_key if key is None else key for options, key in zip(said, keys, strict=True)]
    return [
        row_id(chunk_id, number, own if key is None else slot_of(key_digest(tenant, options.command, key)))
        for number, (options, key) in enumerate(zip(said, where, strict=True))
    ]


def merged(outcomes: list[Any], rejected: Mapping[int, Rejected]) -> list[Any]:
    """Returns the outcomes of all items, in their order."""
    for index, outcome in rejected.items():
        outcomes.insert(index, outcome)
    return outcomes


def slices(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    """Returns the items, so many at a time as one transaction may hold."""
    return (items[start : start + BATCH_MAX] for start in range(0, len(items), BATCH_MAX))
