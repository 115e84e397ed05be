"""The queues that a report shows one by one, and the rest, which it shows as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc

from dibs.history.report.source import Source

QUEUES_MAX = 50
_NUL = "\0"


class Queues:
    """Numbers the busiest queues from 0 on, busiest first; all others have the number after the last of them."""

    def __init__(self, names: Sequence[tuple[str, str]], left_out: int = 0) -> None:
        self.names = names
        """Tenant and command of each."""
        self.left_out = left_out
        """How many queues are shown as one."""
        self._numbers = {_NUL.join(name): number for number, name in enumerate(names)}

    @classmethod
    def busiest(cls, source: Source, first: date, last: date) -> Queues:
        """Finds the queues with the most arrivals and deliveries in those days."""
        work: Counter[str] = Counter()
        columns = ["tenant", "command", "arrivals", "claims", "backlog"]
        for batch in source.batches("queue_minutes", columns, first, last):
            weight = pc.add(pc.add(batch["arrivals"], batch["claims"]), pc.min_element_wise(batch["backlog"], 1))
            table = pa.table({"queue": _joined(batch), "work": weight})
            for row in table.group_by("queue").aggregate([("work", "sum")]).to_pylist():
                work[row["queue"]] += row["work_sum"]
        ordered = sorted(work, key=lambda queue: (-work[queue], queue))
        names = [_split(queue) for queue in ordered[:QUEUES_MAX]]
        return cls(names, len(ordered) - len(names))

    def name(self, number: int) -> str:
        """Returns the queue's name in backticks; with its tenant's, if there are several."""
        tenant, command = self.names[number]
        alone = all(other == tenant for other, _ in self.names)
        return f"`{command}`" if alone else f"`{command}` of `{tenant}`"

    @property
    def size(self) -> int:
        """How many there are, those that are shown as one included."""
        return len(self.names) + bool(self.left_out)

    def numbered(self, rows: pa.Table) -> pa.Table:
        """Returns the rows with the number of their queue, `queue`; without those of queues that have no minutes."""
        encoded = pa.chunked_array(_joined(rows)).combine_chunks().dictionary_encode()
        others = len(self.names)
        known = [self._numbers.get(queue, others) for queue in encoded.dictionary.to_pylist()]
        numbers = pc.take(pa.array(known, pa.int64()), encoded.indices)
        numbered = rows.append_column("queue", numbers)
        return numbered if self.left_out else numbered.filter(pc.less(numbers, others))


def _joined(rows: pa.RecordBatch | pa.Table) -> pa.Array | pa.ChunkedArray:
    return pc.binary_join_element_wise(rows["tenant"], rows["command"], _NUL)


def _split(queue: str) -> tuple[str, str]:
    tenant, _, command = queue.partition(_NUL)
    return tenant, command
