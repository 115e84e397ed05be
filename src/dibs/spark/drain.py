"""`drain`: Spark works a queue off. Each Spark task is a worker: it claims batches, has a function run over them under
leases that are renewed, and settles every row by itself.

What travels to executors is a :class:`Plan` and the function; the loop there is :mod:`dibs.spark.drainer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow as pa
from msgspec import Meta
from msgspec.structs import replace

from dibs import checks
from dibs.errors import DibsError, InvalidOption, StoreError
from dibs.spark import connection
from dibs.spark.options import Codec, Seconds, Where, Whole, parse
from dibs.spark.payload import type_named
from dibs.spark.source import check_reachable
from dibs.task import BATCH_MAX, LEASE_MAX_S, LEASE_MIN_S, WorkerInfo
from dibs.worker.tending import REGISTER_EVERY_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Form = Literal["pandas", "arrow"]

DRIVER_KNOWN_S = 120.0

#: What a Spark task tells of its work; the last column counts errors by their type.
SUMMARY = (
    "partition INT, worker STRING, claimed BIGINT, completed BIGINT, retried BIGINT, failed BIGINT, cancelled BIGINT, "
    "lost BIGINT, released BIGINT, batches BIGINT, seconds DOUBLE, errors MAP<STRING, BIGINT>"
)


class Plan(Where, frozen=True, kw_only=True, rename={}):
    """What is drained, and how: the arguments of `drain`, as they travel to executors."""

    command: str
    form: Form = "pandas"
    batch: Annotated[int, Meta(ge=1, le=BATCH_MAX)] = 500
    lease_s: Annotated[float, Meta(ge=LEASE_MIN_S, le=LEASE_MAX_S)] | None = None
    max_rows: Whole | None = None
    max_s: Seconds | None = None
    parallelism: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    payload: str = "string"
    codec: Codec = "json"
    app: str = ""
    """The Spark application, for the names of the workers."""
    ends_s: float | None = None
    """When the budget of time is used up, by the clock."""
    driver: str = ""
    """The name under which the driver says that it waits for this drain; empty: it cannot."""

    def share(self, partition: int) -> int | None:
        """How many rows are this partition's; None: as many as there are."""
        if self.max_rows is None:
            return None
        of = self.parallelism or 1
        return self.max_rows // of + (partition < self.max_rows % of)


def drain(
    spark: SparkSession,
    url: str,
    command: str,
    fn: Callable[[Any], Any],
    *,
    tenant: str = "default",
    form: Form = "pandas",
    batch: int = 500,
    lease_s: float | None = None,
    max_rows: int | None = None,
    max_s: float | None = None,
    parallelism: int | None = None,
    payload: str = "string",
    codec: Codec = "json",
) -> DataFrame:
    """Has `fn` run over the tasks of a queue on Spark's executors, and returns what became of them: a row for each
    Spark task.

    `fn` gets a batch of up to `batch` rows, a `pandas.DataFrame` or with `form="arrow"` a `pyarrow.Table`, with the
    columns `id`, `key`, `attempt`, `enqueued_at` and `payload`. With a schema as `payload`, such as ``"url STRING,
    width INT"``, its fields are columns instead; a field that has the name of one of the others keeps it, and the
    task's own is then called `task_id` or the like. `fn` and what it refers to must be picklable, and be importable on
    the executors if it is of a module.

    What it returns says how each row ends: None, all complete without a result; a list, Series or Array, each with its
    result; a table with the columns `result`, `outcome` (`complete`, `retry` or `fail`), `error`, `reason` and
    `delay_s`, all but one of the first two optional, row by row, or by the column `id` in any order: rows that are not
    in it are retried. Results are written as `codec` says.

    If `fn` raises, it is called again with the halves of the batch, until what it raises is about one row: that row is
    retried as its queue's backoff says, or as `Retry` or `Fail` says. So a bad row fails neither the others nor the
    stage; but a row may be seen several times by `fn`.

    Ends when nothing is ready (what is delayed, paused or in the hands of others stays), when `max_rows` were claimed,
    or at the first batch that ends after `max_s`. If the job is cancelled, what has not begun is given back. What an
    executor held that was killed comes back when its leases end, after `lease_s`, or what the tasks or their queue say;
    Spark's second try of that task claims other tasks, and what the first had done is not in the summary.
    """
    given = {
        "url": url, "command": command, "tenant": tenant, "form": form, "batch": batch, "lease_s": lease_s,
        "max_rows": max_rows, "max_s": max_s, "parallelism": parallelism, "payload": payload, "codec": codec,
    }  # fmt: skip
    plan = parse({name: value for name, value in given.items() if value is not None}, Plan)
    checks.check_command(plan.command)
    check_reachable(plan, spark.conf.get("spark.master", None))
    _check_picklable(fn)
    kind = type_named("payload", plan.payload)
    count = plan.parallelism or _default_parallelism(spark)
    ends_s = None if plan.max_s is None else time.time() + plan.max_s
    plan = replace(plan, parallelism=count, app=spark.conf.get("spark.app.id", None) or "spark", ends_s=ends_s)

    with _waited_for(plan) as known:

        def work(partitions: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from dibs.spark.drainer import Drainer

            for numbers in partitions:
                for number in numbers.column(0).to_pylist():
                    yield Drainer(known, number, kind, fn).run()

        done = spark.range(0, count, 1, count).mapInArrow(work, SUMMARY).toArrow()
    return spark.createDataFrame(done)


@contextlib.contextmanager
def _waited_for(plan: Plan) -> Iterator[Plan]:
    """Lets executors know, by the store, whether anybody waits for them. Spark only kills the processes of a job that
    is cancelled, some seconds later: until then they can give back what they have not begun."""
    name = f"spark:{plan.app}:driver:{secrets.token_hex(4)}"[-128:]
    info = WorkerInfo(name=name, host=socket.gethostname(), pid=os.getpid(), commands=[plan.command])
    try:
        connection.ask(plan.url, lambda store: store.register(plan.tenant, info, DRIVER_KNOWN_S))
    except StoreError:  # only executors reach it, as may be with Spark Connect; or it is not there, as they will say
        yield plan
        return
    waiting = connection.submit(_wait(plan, info))
    try:
        yield replace(plan, driver=name)
    finally:
        waiting.cancel()
        with contextlib.suppress(DibsError):
            connection.ask(plan.url, lambda store: store.register(plan.tenant, info, 0))


async def _wait(plan: Plan, info: WorkerInfo) -> None:
    while True:
        await asyncio.sleep(REGISTER_EVERY_S)
        with contextlib.suppress(DibsError):
            await connection.link(plan.url).ask(lambda store: store.register(plan.tenant, info, DRIVER_KNOWN_S))


def _check_picklable(fn: Callable[[Any], Any]) -> None:
    from pyspark import cloudpickle

    if not callable(fn):
        raise InvalidOption(f"fn is a {type(fn).__name__}: give a function of a batch")
    try:
        cloudpickle.dumps(fn)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InvalidOption(
            f"fn cannot be sent to executors ({error}): open connections, locks and the like inside of it"
        ) from error


def _default_parallelism(spark: SparkSession) -> int:
    from pyspark.sql.functions import spark_partition_id
    from pyspark.sql.utils import is_remote

    if is_remote():  # which has no SparkContext to ask, and divides a range as it would
        return spark.range(100_000).select(spark_partition_id()).distinct().count()
    return spark.sparkContext.defaultParallelism
