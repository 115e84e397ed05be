"""Spark works a queue off: each row by itself, under a lease, and a bad one harms nobody."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType

from dibs import Fail, Retry, codec
from dibs.errors import DibsError
from dibs.ids import id_to_text
from dibs.retry import Backoff
from dibs.spark import drain
from dibs.spark.connection import ask
from dibs.spark.drain import Plan
from dibs.spark.drainer import Drainer, Held
from dibs.stores.protocol import Store
from dibs.task import Kind, NewTask, QueueConfig, QueueLimits, Settlement, Status, WorkerInfo
from tests.spark.filling import fill, results_of, statuses_of, tasks_of


def sums(summary: DataFrame) -> dict[str, int]:
    """What all Spark tasks did together; what is 0 is left out."""
    rows = [row.asDict() for row in summary.collect()]
    names = [name for name, value in rows[0].items() if isinstance(value, int) and name not in ("partition", "batches")]
    total = {name: sum(row[name] for row in rows) for name in names}
    return {name: count for name, count in total.items() if count}


def test_every_row_gets_its_result(spark: SparkSession, url: str) -> None:
    """A function of a pandas batch returns a Series; every task completes with its value."""
    ids = fill(url, ({"n": n} for n in range(700)))

    def double(batch: pd.DataFrame) -> pd.Series:
        return batch["n"] * 2

    done = drain(spark, url, "work", double, payload="n INT", batch=100)
    assert sums(done) == {"claimed": 700, "completed": 700}
    assert done.count() == 2
    assert results_of(url, ids) == [2 * n for n in range(700)]


def test_what_a_function_gets(spark: SparkSession, url: str) -> None:
    """An Arrow batch has the id, key, attempt and time of each task, and its payload as it is written."""
    [task_id] = fill(url, [{"a": "ü"}], key="one")

    def tell(batch: pa.Table) -> list[Any]:
        return [{**row, "enqueued_at": row["enqueued_at"].timestamp()} for row in batch.to_pylist()]

    drain(spark, url, "work", tell, form="arrow")
    [told] = results_of(url, [task_id])
    [task] = tasks_of(url, [task_id])
    assert told.pop("enqueued_at") == pytest.approx(task.enqueued_ms / 1000)
    assert told == {"id": id_to_text(task_id), "key": "one", "attempt": 1, "payload": '{"a":"ü"}'}


def test_a_schema_makes_columns(spark: SparkSession, url: str) -> None:
    """Fields of the payload are columns; one named as a column of the task's keeps its name, and the task's gives way.
    What is missing is null; a payload that does not fit fails its task, and no other."""
    payloads = [{"id": 7, "at": "2026-11-15T10:00:00Z", "tags": ["a"], "more": 1}, {"id": "many"}, {}, {"id": 2**40}]
    ids = fill(url, payloads)

    def tell(batch: pa.Table) -> pa.Table:
        result = [str([row["id"], row["at"] and row["at"].isoformat(), row["tags"]]) for row in batch.to_pylist()]
        return pa.table({"task_id": batch["task_id"], "result": result}).take(list(range(len(result)))[::-1])

    done = drain(spark, url, "work", tell, form="arrow", payload="id INT, at TIMESTAMP, tags ARRAY<STRING>")
    assert sums(done) == {"claimed": 4, "completed": 2, "failed": 2}
    fits, words, empty, large = tasks_of(url, ids)
    assert results_of(url, [fits.id, empty.id]) == ["[7, '2026-11-15T10:00:00+00:00', ['a']]", "[None, None, None]"]
    for task in (words, large):
        assert (task.status, task.reason) == (Status.FAILED, "INVALID_ARGUMENTS")


@pytest.mark.parametrize(
    ("payload", "seen"), [("string", '{"a":1}'), ("binary", "b'\\x81\\xa1a\\x01'"), ("a INT", "1")]
)
def test_payloads_of_other_codecs(spark: SparkSession, url: str, payload: str, seen: str) -> None:
    """MessagePack is text as JSON, bytes as it is, and values; the result is written as asked for."""

    async def put(store: Store) -> None:
        data = codec.encode({"a": 1}, "msgpack")
        await store.enqueue("default", [NewTask(command="work", payload=data, codec="msgpack", key="k")])

    ask(url, put, create=True)

    def tell(batch: pd.DataFrame) -> list[str]:
        return [str(value) for value in batch["payload" if "payload" in batch else "a"]]

    drain(spark, url, "work", tell, payload=payload, codec="msgpack")

    async def look(store: Store) -> Any:
        page = await store.list("default")
        return page.tasks[0].result

    result = ask(url, look)
    assert (result.codec, codec.decode(result.data, "msgpack")) == ("msgpack", seen)


def test_a_bad_row_stands_alone(spark: SparkSession, url: str) -> None:
    """What a function raises over some rows is settled for those: retried after the queue's backoff, as Retry says, or
    failed as Fail says. The others complete, and so does the stage."""
    ids = fill(url, range(40))
    config = QueueConfig(backoff=Backoff(kind="fixed", base_s=500.0, jitter="none"))
    ask(url, lambda store: store.configure("default", "work", config))

    def strict(batch: pd.DataFrame) -> list[int]:
        numbers = batch["payload"].astype(int)
        if (numbers == 3).any():
            raise ValueError("three is bad")
        if (numbers == 17).any():
            raise Fail("SEVENTEEN", "not this one")
        if (numbers == 39).any():
            raise Retry("later", delay_s=1000)
        return list(numbers)

    done = drain(spark, url, "work", strict)
    assert sums(done) == {"claimed": 40, "completed": 37, "retried": 2, "failed": 1}
    errors: dict[str, int] = {}
    for row in done.collect():
        errors |= row["errors"]
    assert errors == {"ValueError": 1, "dibs.context.Fail": 1, "dibs.context.Retry": 1}
    tasks = tasks_of(url, ids)
    assert tasks[3].error is not None
    assert (tasks[3].error.type, tasks[3].error.message) == ("ValueError", "three is bad")
    assert "in strict" in tasks[3].error.traceback
    assert "drainer" not in tasks[3].error.traceback
    assert [round((tasks[row].due_ms - tasks[0].enqueued_ms) / 1000, -2) for row in (3, 39)] == [500, 1000]
    assert (tasks[17].status, tasks[17].reason) == (Status.FAILED, "SEVENTEEN")


def test_outcomes_by_row(spark: SparkSession, url: str) -> None:
    """A table says of each row how it ends, by its id in any order; rows that are not in it are retried, results that
    cannot be written fail."""
    ids = fill(url, range(6), max_attempts=1)

    def decide(batch: pd.DataFrame) -> pd.DataFrame:
        n = batch["payload"].astype(int)
        made = pd.DataFrame({"id": batch["id"], "result": [{"ok": 1}, b"bytes", None, None, None, 5], "n": n})
        made["outcome"] = ["complete", "complete", "fail", "retry", None, "complete"]
        made["error"] = [None, None, "no", "again", None, None]
        made["reason"] = [None, None, "WHY", None, None, None]
        return made[n != 5].iloc[::-1]

    done = drain(spark, url, "work", decide, parallelism=1)
    assert sums(done) == {"claimed": 6, "completed": 2, "failed": 4}
    assert results_of(url, [ids[0], ids[4]]) == [{"ok": 1}, None]
    reasons = [(task.reason, task.error and task.error.message) for task in tasks_of(url, ids)]
    assert reasons[1][0] == "INVALID_RESULT"
    assert reasons[2] == ("WHY", "no")
    assert reasons[3] == ("MAX_ATTEMPTS", "again")
    assert reasons[5] == ("MAX_ATTEMPTS", "the function returned no row for it")


def test_a_budget_of_rows(spark: SparkSession, url: str) -> None:
    """No more rows are claimed than are asked for, by all Spark tasks together; the others stay ready."""
    ids = fill(url, range(100))
    done = drain(spark, url, "work", lambda _: None, max_rows=37, batch=10, parallelism=3)
    assert sums(done) == {"claimed": 37, "completed": 37}
    assert statuses_of(url, ids) == {"COMPLETED": 37, "PENDING": 63}


def test_a_budget_of_time(spark: SparkSession, url: str) -> None:
    """When the time is over, nothing more is begun, and what was claimed ahead is given back."""
    ids = fill(url, range(300))
    assert sums(drain(spark, url, "work", lambda _: None, max_s=0)) == {}

    def slower(batch: pd.DataFrame) -> None:
        time.sleep(0.2)

    done = sums(drain(spark, url, "work", slower, max_s=1.0, batch=5, parallelism=1))
    assert 0 < done["completed"] < 300
    assert done["claimed"] == done["completed"] + done.get("released", 0)
    assert statuses_of(url, ids) == {"COMPLETED": done["completed"], "PENDING": 300 - done["completed"]}


def test_large_numbers_beside_missing_ones(spark: SparkSession, url: str) -> None:
    """What a row has does not depend on the others of its batch; the task's own columns have names of their own."""
    large = 2**53 + 1
    ids = fill(url, [{"id": large, "task_id": 1}, {"id": None, "task_id": 2}])

    def told(batch: Any) -> list[Any]:
        return [[None if n is None else int(n), one] for n, one in zip(batch["id"], batch["task_task_id"], strict=True)]

    drain(spark, url, "work", told, payload="id BIGINT, task_id INT", parallelism=1)
    assert results_of(url, ids) == [[large, id_to_text(ids[0])], [None, id_to_text(ids[1])]]


def test_leases_are_renewed(spark: SparkSession, url: str) -> None:
    """A function that takes longer than the lease keeps its rows, and those that are claimed ahead."""
    ids = fill(url, range(40))

    def slow_at_last(batch: pd.DataFrame) -> None:
        if batch["payload"].astype(int).max() >= 10:
            time.sleep(2.0)

    done = drain(spark, url, "work", slow_at_last, lease_s=1.0, batch=10, parallelism=1)
    assert sums(done) == {"claimed": 40, "completed": 40}
    assert {task.attempts for task in tasks_of(url, ids)} == {1}


def test_cancelled_while_it_runs(spark: SparkSession, url: str) -> None:
    """A row that is cancelled while the function runs ends cancelled if the function fails it, and completed if it was
    quicker."""
    ids = fill(url, range(2))

    def cancels_itself(batch: pd.DataFrame) -> None:
        mine = [bytes.fromhex(text.replace("-", "")) for text in batch["id"]]
        if len(batch) == 1:
            ask(url, lambda store: store.cancel("default", mine))
            time.sleep(1.5)
        if (batch["payload"] == "1").any():
            raise ValueError("the second")

    done = drain(spark, url, "work", cancels_itself, lease_s=1.0, parallelism=1)
    assert sums(done) == {"claimed": 2, "completed": 1, "cancelled": 1}
    assert [task.status for task in tasks_of(url, ids)] == [Status.COMPLETED, Status.CANCELLED]


def test_it_is_a_worker(spark: SparkSession, url: str) -> None:
    """While it runs, a Spark task is among the workers, with its application and partition in its name; so is the
    driver that waits for it."""
    [task_id] = fill(url, [1])

    def look(batch: pd.DataFrame) -> list[Any]:
        time.sleep(0.5)
        return [[one.name for one in ask(url, lambda store: store.workers("default"))]]

    drain(spark, url, "work", look, parallelism=1)
    app = f"spark:{spark.conf.get('spark.app.id')}"
    [[task, driver]] = results_of(url, [task_id])
    assert (task, driver.rpartition(":")[0]) == (f"{app}:0", f"{app}:driver")
    assert ask(url, lambda store: store.workers("default")) == []


def test_the_store_is_missing(spark: SparkSession, url: str) -> None:
    """Spark's error has ours in it."""
    with pytest.raises(Exception, match=r"dibs.errors.StoreMissing: .*there is no"):
        drain(spark, url, "work", lambda _: None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "option batch is 0: expected `int` >= 1"),
        ({"batch": 1001}, "option batch is 1001: expected `int` <= 1000"),
        ({"form": "csv"}, "option form is 'csv'"),
        ({"lease_s": 0.1}, r"option lease_s is 0\.1: expected `float` >= 1\.0"),
        ({"max_rows": 0}, "option max_rows is 0"),
        ({"max_s": -1}, "option max_s is -1"),
        ({"parallelism": 0}, "option parallelism is 0"),
        ({"payload": "url STRNG"}, r"payload is 'url STRNG', which is neither a type nor a schema.*write 'string'"),
        ({"codec": "xml"}, "option codec is 'xml'"),
        ({"tenant": "*"}, "option tenant: "),
        ({"command": ""}, "is not a command"),
        ({"url": "memory:"}, "option url"),
        ({"fn": 5}, "fn is a int: give a function of a batch"),
        ({"fn": threading.Lock().acquire}, r"fn cannot be sent to executors \(.*open connections, locks"),
    ],
)
def test_bad_options(spark: SparkSession, url: str, options: dict[str, Any], text: str) -> None:
    """Are told on the driver, before anything starts."""
    fill(url, [1])
    given: dict[str, Any] = {"url": url, "command": "work", "fn": lambda _: None} | options
    with pytest.raises(DibsError, match=text):
        drain(spark, **given)


# ------------------------------------------------------------------------------------- one Spark task, in this process


def in_this_process(url: str, fn: Any, **plan: Any) -> Drainer:
    """A Spark task of a drain, without Spark."""
    return Drainer(Plan(url=url, command="work", **{"parallelism": 1, **plan}), 0, StringType(), fn)


def counted(drainer: Drainer) -> dict[str, Any]:
    """What it did, those counts left out that are 0."""
    [row] = drainer.run().to_pylist()
    return {name: value for name, value in row.items() if isinstance(value, int) and value}


def test_the_first_batch_is_a_share(url: str) -> None:
    """Of a queue that is shorter than a batch, one of four Spark tasks takes a quarter first, so that all have work."""
    fill(url, range(100))
    sizes: list[int] = []
    counted(in_this_process(url, lambda batch: sizes.append(len(batch)), parallelism=4))
    assert (sizes[0], sum(sizes)) == (25, 100)


def test_a_lost_lease(url: str) -> None:
    """A row that somebody else may have is counted as lost, and its outcome dropped."""
    ids = fill(url, range(3))
    runs = 0

    def loses_one(batch: pd.DataFrame) -> list[int]:
        nonlocal runs
        runs += 1
        if runs == 1:
            lease = drainer._held[0].leases[1]
            back = Settlement(tenant="default", id=lease.id, token=lease.token, kind=Kind.RELEASE)
            ask(url, lambda store: store.settle([back]))
        return [runs] * len(batch)

    drainer = in_this_process(url, loses_one)
    assert counted(drainer) == {"claimed": 4, "completed": 3, "lost": 1, "batches": 2}
    assert results_of(url, ids) == [1, 2, 1]


def test_an_error_gives_back_what_is_held(url: str) -> None:
    """A Spark task that ends by an error releases at once what it has claimed and not settled."""

    class Broken(Drainer):
        def _work(self, held: Held) -> None:
            self._claim_ahead()
            raise RuntimeError("the disk is full")

    ids = fill(url, range(50))
    broken = Broken(Plan(url=url, command="work", parallelism=1, batch=10), 0, StringType(), print)
    with pytest.raises(RuntimeError):
        broken.run()
    assert statuses_of(url, ids) == {"PENDING": 50}
    assert sorted(task.releases for task in tasks_of(url, ids)) == [0] * 30 + [1] * 20


def test_a_drain_that_nobody_waits_for(url: str) -> None:
    """If the job is cancelled, what was claimed ahead is given back while the function still runs; what it has begun is
    settled if it lives so long, and nothing else is claimed."""
    ids = fill(url, range(100))
    driver = WorkerInfo(name="driver")
    ask(url, lambda store: store.register("default", driver, 60))
    runs = 0

    def cancelled_at_the_second(batch: pd.DataFrame) -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            while statuses_of(url, ids)["IN_PROGRESS"] < 20:
                time.sleep(0.01)
            ask(url, lambda store: store.register("default", driver, 0))
            while statuses_of(url, ids)["IN_PROGRESS"] > 10:
                time.sleep(0.01)

    drainer = in_this_process(url, cancelled_at_the_second, batch=10, driver="driver")
    assert counted(drainer) == {"claimed": 30, "completed": 20, "released": 10, "batches": 2}
    assert statuses_of(url, ids) == {"COMPLETED": 20, "PENDING": 80}


def test_what_cannot_be_claimed_is_waited_for(url: str) -> None:
    """A queue's limit lets one task run at a time: the drain goes on until all are done."""
    fill(url, range(5))
    ask(url, lambda store: store.configure("default", "work", QueueConfig(limits=QueueLimits(in_flight=1))))
    assert counted(in_this_process(url, lambda _: None)) == {"claimed": 5, "completed": 5, "batches": 5}


def test_paused_is_not_ready(url: str) -> None:
    """A paused queue ends a drain."""
    fill(url, range(5))
    ask(url, lambda store: store.configure("default", "work", QueueConfig(paused=True)))
    assert counted(in_this_process(url, lambda _: None)) == {}


def test_a_result_that_is_too_large(url: str) -> None:
    """Fails its row, as in any worker, and says why."""
    ids = fill(url, range(2))
    drainer = in_this_process(url, lambda batch: ["x" * (20 << 20) if n == "0" else 1 for n in batch["payload"]])
    assert counted(drainer)["failed"] == 1
    large, small = tasks_of(url, ids)
    assert (large.status, large.reason, small.status) == (Status.FAILED, "INVALID_RESULT", Status.COMPLETED)
    assert msgspec.json.decode((small.result and small.result.data) or b"") == 1
