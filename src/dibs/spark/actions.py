"""Acting on tasks by their ids, from executors: replay, purge, cancel.

Spark's write tells nothing back: a read of the view `tasks` shows what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from dibs.errors import InvalidName, InvalidOption
from dibs.ids import ID_BYTES, id_from_text
from dibs.spark.connection import ask, itself
from dibs.spark.options import Action, ActionOptions
from dibs.spark.rows import parts
from dibs.stores.protocol import Store

ID, TENANT = "id", "tenant"


@dataclass(frozen=True)
class Acted(WriterCommitMessage):
    """How many ids one attempt acted on."""

    ids: int


class ActionWriter(DataSourceArrowWriter):
    """Does to each task whose id a DataFrame has what the option `action` says.

    Acts while it goes, a thousand at a time: a job that fails half-way has acted on some. A repeat is harmless, since
    what has been acted on, and what is not in a state for it, is left alone. Must be picklable.
    """

    def __init__(self, options: ActionOptions, schema: StructType) -> None:
        names = schema.fieldNames()
        if ID not in names:
            raise InvalidOption(
                f"{options.action} needs a column named id, as views have it, and finds {', '.join(names) or 'none'}"
            )
        if not isinstance(schema[ID].dataType, StringType | BinaryType):
            raise InvalidOption(f"column id is {schema[ID].dataType.simpleString().upper()}: use the text of ids")
        if TENANT in names and not isinstance(schema[TENANT].dataType, StringType):
            raise InvalidOption(f"column tenant is {schema[TENANT].dataType.simpleString().upper()}: drop it")
        self._options = options
        ask(options.url, itself)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Acted:
        """On an executor: acts on the tasks of a partition."""
        count = 0
        for part in parts(iterator):
            self._act(self._ids(part, count))
            count += part.num_rows
        return Acted(count)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: everything is done already."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: what was done stays done."""

    def _act(self, ids: Sequence[bytes]) -> None:
        act, tenant = _ACTS[self._options.action], self._options.tenant
        ask(self._options.url, lambda store: act(store, tenant, ids))

    def _ids(self, part: pa.RecordBatch, first: int) -> list[bytes]:
        """Returns the ids of some rows, each once; all of them are looked at before any is acted on."""
        if TENANT in part.schema.names:
            self._check_tenants(part.column(TENANT).to_pylist(), first)
        ids: dict[bytes, None] = {}
        for place, value in enumerate(part.column(ID).to_pylist()):
            try:
                ids[_id(value)] = None
            except InvalidName as error:
                raise InvalidName(f"{self._where(first + place)}: {error}") from error
        return [*ids]

    def _check_tenants(self, tenants: Sequence[str | None], first: int) -> None:
        mine = self._options.tenant
        for place, tenant in enumerate(tenants):
            if tenant not in (mine, None):
                raise InvalidOption(
                    f"{self._where(first + place)} is of tenant {tenant!r}, and the write is about {mine!r}: write "
                    "each tenant's by itself, with .option('tenant', …)"
                )

    def _where(self, row: int) -> str:
        context = TaskContext.get()
        return f"row {row} of partition {context.partitionId() if context is not None else 0}"


def _id(value: object) -> bytes:
    if isinstance(value, str):
        return id_from_text(value)
    if isinstance(value, bytes) and len(value) == ID_BYTES:
        return value
    raise InvalidName(f"{value!r} is not a task id: use its text, or its {ID_BYTES} bytes")


async def _replay(store: Store, tenant: str, ids: Sequence[bytes]) -> None:
    await store.replay(tenant, ids)


async def _purge(store: Store, tenant: str, ids: Sequence[bytes]) -> None:
    await store.purge(tenant, ids)


async def _cancel(store: Store, tenant: str, ids: Sequence[bytes]) -> None:
    await store.cancel(tenant, ids)


_ACTS: Mapping[Action, Callable[[Store, str, Sequence[bytes]], Coroutine[Any, Any, None]]] = {
    "replay": _replay,
    "purge": _purge,
    "cancel": _cancel,
}
