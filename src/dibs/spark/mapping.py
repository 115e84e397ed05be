"""`map_rows`: a column of results for a DataFrame, made by ordinary workers outside Spark.

Every row becomes a task under a key that is made of the row, all of them as one load; whoever looks for a row's result
makes the same key again. So nothing has to be remembered between the two, and both can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from msgspec import Meta, Struct

from dibs import checks
from dibs.errors import InvalidOption, StoreError
from dibs.spark import connection
from dibs.spark.options import Where, parse
from dibs.spark.payload import Values, type_named
from dibs.spark.source import check_reachable
from dibs.stores.loading import is_committed
from dibs.task import BATCH_MAX, ByKey, Status, Task

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

KEY = "__dibs_key__"
#: Options of writing that are not the caller's.
OURS = ("load", "appid", "badrows")
ADDED = ("status", "result", "error_type", "error_message", "attempts")
LOOK_FIRST_S, LOOK_LAST_S = 0.05, 1.0
"""How soon, and how seldom, to look again for tasks that are not known yet."""


class Lookup(Where, frozen=True, kw_only=True, rename={}):
    """Where the results of rows are, and how long to wait for them. Travels to executors."""

    command: str
    name: str
    timeout_s: Annotated[float, Meta(ge=0)] | None = None


def map_rows(
    df: DataFrame,
    command: str,
    *,
    url: str,
    name: str,
    tenant: str = "default",
    by: str | Sequence[str] | None = None,
    returns: str = "string",
    timeout_s: float | None = None,
    **options: Any,
) -> DataFrame:
    """Enqueues a task of `command` for every row, and returns the DataFrame with what became of them.

    The columns of a row are the fields of its payload. The call returns when all are enqueued; workers outside Spark
    do them. The DataFrame that it returns is lazy: an action on it waits for the tasks of the rows that it needs, and
    adds the columns `status`, `result`, `error_type`, `error_message` and `attempts`.

    `returns` is the type of `result`: `string`, which is the text of a result that is a text, else its JSON; a type
    such as `DOUBLE`; or a schema such as ``"title STRING, size INT"``, which makes it a struct. A result that is not of
    that type is null, and its row says so as an error.

    `name` is that of the load. The same call with the same name enqueues nothing again and finds what is there, in this
    program or the next: so it is resumed after a crash, or to wait on. Other rows, or another run over the same, need
    another name. The columns `by` tell rows apart, without them all columns do; of equal rows one is run, and all get
    its result. The rows must be the same whenever Spark computes them: what is random or reads the clock is written to
    a table first.

    `timeout_s` is how long each Spark task waits at most. What has not ended by then has the status it has, or null if
    no worker has come to it yet. Null is also the status of a task whose record is kept no longer: results are kept for
    a day unless `resultTtlSeconds` says otherwise. Other options are those of writing: `priority`, `maxAttempts` and so
    on.
    """
    lookup = _lookup(url=url, command=command, tenant=tenant, name=name, timeout_s=timeout_s)
    clash = [column for column in df.columns if column.lower() in (*ADDED, KEY)]
    if clash:
        raise InvalidOption(f"the column {clash[0]} is one that map_rows adds: rename it before")
    ours = [option for option in options if option.lower() in OURS]
    if ours:
        raise InvalidOption(f"option {ours[0]} is not for map_rows, which names the load by `name` and needs every row")
    check_reachable(lookup, df.sparkSession.conf.get("spark.master", None))
    keyed = df.withColumn(KEY, _key(df, name, by))
    kind = type_named("returns", returns)
    if not _committed(lookup):
        _enqueue(keyed, df.columns, lookup, options)

    names = [*df.columns, KEY]

    def look_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        ends_s = None if lookup.timeout_s is None else time.monotonic() + lookup.timeout_s
        values = Values(kind, unquoted=True)
        for numbered in batches:
            batch = numbered.rename_columns(names)
            for start in range(0, batch.num_rows, BATCH_MAX):
                yield _answered(batch.slice(start, BATCH_MAX), lookup, values, ends_s)

    # By number, since Spark takes a dot in a name for a way into a struct there.
    return keyed.toDF(*map(str, range(len(names)))).mapInArrow(look_up, _schema(df, kind))


def _lookup(**given: Any) -> Lookup:
    lookup = parse({name: value for name, value in given.items() if value is not None}, Lookup)
    checks.check_command(lookup.command)
    checks.check_label("load", lookup.name)
    return lookup


def _key(df: DataFrame, name: str, by: str | Sequence[str] | None) -> Column:
    """A key that the same row has in every call: the name, and a digest of what tells rows apart."""
    from pyspark.sql import functions

    columns = sorted(df.columns if by is None else [by] if isinstance(by, str) else by)
    unknown = [column for column in columns if column not in df.columns]
    if unknown or not columns:
        raise InvalidOption(f"by names {unknown or 'nothing'}: choose from {', '.join(df.columns)}")
    row = functions.to_json(functions.struct(*map(_named, columns)), {"ignoreNullFields": "false"})
    return functions.concat(functions.lit(f"{name}:"), functions.sha2(row, 256))


def _named(column: str) -> Column:
    """A column by its whole name, whatever characters that has."""
    from pyspark.sql import functions

    return functions.col("`" + column.replace("`", "``") + "`").alias(column)


def _committed(lookup: Lookup) -> bool:
    """Whether the load of that name is in. Where that cannot be told, rows are staged, and their commit finds out."""
    with contextlib.suppress(StoreError):
        return connection.ask(lookup.url, lambda store: is_committed(store, lookup.tenant, lookup.name))
    return False


def _enqueue(keyed: DataFrame, columns: Sequence[str], lookup: Lookup, options: dict[str, Any]) -> None:
    from pyspark.sql import functions

    rows = keyed.dropDuplicates([KEY]).select(
        functions.struct(*map(_named, columns)).alias("payload"), keyed[KEY].alias("key")
    )
    writer = rows.write.format("dibs").mode("append").options(**options)
    writer = writer.option("url", lookup.url).option("tenant", lookup.tenant)
    writer.option("command", lookup.command).option("load", lookup.name).save()


def _schema(df: DataFrame, returned: DataType) -> StructType:
    from pyspark.sql.types import IntegerType, StringType, StructField, StructType

    types = {"result": returned, "attempts": IntegerType()}
    return StructType([*df.schema.fields, *(StructField(name, types.get(name, StringType())) for name in ADDED)])


# --------------------------------------------------------------------------------------------------------- on executors


def _answered(batch: pa.RecordBatch, lookup: Lookup, values: Values, ends_s: float | None) -> pa.RecordBatch:
    """Returns rows with what became of their tasks, which it waits for."""
    keys: list[str] = batch.column(KEY).to_pylist()
    tasks = connection.submit(Waiting(lookup, ends_s).tasks(keys)).result()
    found = [tasks.get(key) for key in keys]
    results = [None if task is None else task.result for task in found]
    column, wrong = values.column(
        [None if one is None else one.data for one in results],
        ["json" if one is None else one.codec for one in results],
    )
    told = [_error(task, wrong.get(row)) for row, task in enumerate(found)]
    added = {
        "status": pa.array([None if task is None else task.status.value for task in found], pa.string()),
        "result": column,
        "error_type": pa.array([kind for kind, _ in told], pa.string()),
        "error_message": pa.array([message for _, message in told], pa.string()),
        "attempts": pa.array([None if task is None else task.attempts for task in found], pa.int32()),
    }
    rest = [name for name in batch.schema.names if name != KEY]
    return pa.RecordBatch.from_arrays(
        [*(batch.column(name) for name in rest), *(added[name] for name in ADDED)], [*rest, *ADDED]
    )


def _error(task: Task | None, wrong: Exception | None) -> tuple[str | None, str | None]:
    """What is told of an error: the handler's, else the reason why it ended so, else why the result is not shown."""
    if task is None:
        return None, None
    if task.error is not None and task.status is not Status.COMPLETED:
        return task.error.type, task.error.message
    if wrong is not None:
        return type(wrong).__name__, str(wrong)
    return task.reason, None


class Waiting(Struct, frozen=True):
    """Waits for tasks by their keys."""

    lookup: Lookup
    ends_s: float | None

    async def tasks(self, keys: Sequence[str]) -> dict[str, Task]:
        """Returns the tasks that have these keys: all ended, or as they stand when the time is over; those that there
        are none of, or no more, are left out."""
        found: dict[str, Task] = {}
        open_keys = list(dict.fromkeys(keys))
        pause_s = LOOK_FIRST_S
        while True:
            idle = await self._idle()
            found |= await self._get(open_keys)
            unknown = [key for key in open_keys if key not in found]
            open_keys = [key for key in open_keys if key not in found or not found[key].status.ended]
            left_s = self._left_s()
            if not open_keys or left_s <= 0 or (idle and len(unknown) == len(open_keys)):
                return found
            if len(unknown) < len(open_keys):
                # All of them are waited for; the last one put in is likely to be the last to end.
                known = [found[key] for key in open_keys if key in found]
                last = max(known, key=lambda task: (task.enqueued_ms, task.id))
                await self._wait(last.id, left_s if not unknown else min(left_s, pause_s))
            else:
                await asyncio.sleep(min(left_s, pause_s))
            pause_s = min(pause_s * 2, LOOK_LAST_S)

    async def _get(self, keys: Sequence[str]) -> dict[str, Task]:
        refs = [ByKey(self.lookup.command, key) for key in keys]
        tasks = await connection.link(self.lookup.url).ask(lambda store: store.get(self.lookup.tenant, refs))
        return {key: task for key, task in zip(keys, tasks, strict=True) if task is not None}

    async def _idle(self) -> bool:
        """Whether the queue has nothing that is to be done: then a task that is unknown will not become known."""
        stats = await connection.link(self.lookup.url).ask(
            lambda store: store.stats(self.lookup.tenant, [self.lookup.command])
        )
        return not any(queue.ready or queue.delayed or queue.leased for queue in stats.queues)

    async def _wait(self, task_id: bytes, wait_s: float) -> None:
        wait_s = min(wait_s, checks.WAIT_MAX_S)
        await connection.link(self.lookup.url).ask(lambda store: store.wait(self.lookup.tenant, [task_id], wait_s))

    def _left_s(self) -> float:
        return checks.WAIT_MAX_S if self.ends_s is None else self.ends_s - time.monotonic()
