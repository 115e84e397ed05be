"""Everything that is done to Delta lakes, in a process whose Spark has Delta; what came of it is printed as JSON.

The same work is taken in as Parquet, too, by the same steps. `different` lists the tables whose rows differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from pyspark.sql import SparkSession

from dibs.errors import MissingDriver
from dibs.history import formats
from dibs.history.delta import DeltaTables
from dibs.history.lake import NO_DATE, Lake, LakeState, Write
from dibs.history.query import query
from dibs.history.report import Summary, summary
from dibs.history.report.source import arrow_schema
from dibs.history.tables import TABLES
from tests.history.lakes import Work, digest, digests, in_order, take_in


class Killed(Exception):
    """Stands for the end of the process."""


class Pair:
    """A Delta lake and a Parquet lake of one store."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self.url = f"shards:{directory / 'store'}?n=2"
        self.work = Work(self.url, seed=11)
        self.delta, self.parquet = directory / "delta", directory / "parquet"

    def run_parquet(self) -> None:
        """Takes in what is there."""
        take_in(self.url, self.parquet, batch_events=300)

    def run_delta(self, **options: Any) -> None:
        """Takes in what is there."""
        take_in(self.url, self.delta, batch_events=300, **options)

    def different(self) -> list[str]:
        """Returns the tables whose rows differ."""
        theirs, ours = digests(self.parquet), self.digests()
        return [table for table in TABLES if theirs[table] != ours[table]]

    def digests(self) -> dict[str, str]:
        """Returns a hash of each Delta table's rows."""
        kept = formats.tables(self._spark, Lake(self.delta))
        found = {name: kept.read(name).toArrow().cast(arrow_schema(table)) for name, table in TABLES.items()}
        return {name: digest(in_order(name, read)) for name, read in found.items()}

    def files(self, table: str) -> int:
        """Returns how many files the newest day of a Delta table has."""
        kept = formats.tables(self._spark, Lake(self.delta))
        newest = max(day for day in kept.days(table) if day != NO_DATE)
        return sum(Path(uri).parent.name == newest for uri in kept.read(table).inputFiles())

    def joined(self, table: str) -> int:
        """Returns how often small files of a Delta table were joined."""
        log = (self.delta / table / "_delta_log").glob("*.json")
        return sum('"operation":"OPTIMIZE"' in file.read_text() for file in log)

    def versions(self) -> dict[str, int]:
        """Returns how many transactions each Delta table has had."""
        return {table: len(list((self.delta / table / "_delta_log").glob("*.json"))) for table in TABLES}

    def counted(self) -> list[int]:
        """Returns what a question says of each lake."""
        sql = "SELECT count(*) FROM tasks WHERE outcome IS NOT NULL AND date IS NOT NULL"
        return [query(self._spark, Lake.open(path), sql).collect()[0][0] for path in (self.delta, self.parquet)]


@contextmanager
def killed_after(tables: int) -> Iterator[None]:
    """Ends a run when it has written to so many tables, as if it were killed there."""
    written, left = DeltaTables._write, iter(range(tables - 1))

    def some(self: DeltaTables, write: Write, state: LakeState) -> None:
        written(self, write, state)
        if next(left, None) is None:
            raise Killed

    DeltaTables._write = some  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeltaTables._write = written  # type: ignore[method-assign]


def kill(pair: Pair, tables: int) -> dict[str, Any]:
    """Kills a run between two tables of its first commit, looks, and runs again."""
    pair.work.go_on(25)
    before = pair.digests()
    ended = "not at all"
    with killed_after(tables):
        try:
            pair.run_delta()
        except Killed:
            ended = "killed"
    left = (pair.delta / "_dibs" / "commit.json").exists()
    Lake.open(pair.delta)
    changed = [table for table, digest in pair.digests().items() if digest != before[table]]
    pair.run_delta()
    return {"ended": ended, "left": left, "changed": changed}


def without_ties(summed: Summary) -> tuple[Any, ...]:
    """Returns all that a report says but its own name, and which of several tasks that took equally long are listed."""
    longest = sorted((one.queue, one.wait_ms) for one in summed.longest_waits)
    longest += sorted((one.queue, one.run_ms) for one in summed.longest_runs)
    return longest, replace(summed, lake="", longest_waits=[], longest_runs=[])


def main(directory: Path) -> dict[str, Any]:
    """Does it all, in a new directory."""
    try:
        spark = formats.start_spark("delta", "local[2]")
    except MissingDriver as error:
        return {"missing": str(error)}
    pair = Pair(spark, directory)
    pair.work.go_on(150)
    pair.run_parquet()
    pair.run_delta(format="delta")
    told: dict[str, Any] = {"kept": Lake(pair.delta).state.format, "first": pair.different()}
    told["killed"] = {tables: kill(pair, tables) for tables in (1, 3)}
    formats.SMALL_FILES_MAX = 2
    for _ in range(2):
        pair.work.go_on(2)
        pair.run_delta()
    pair.run_parquet()
    told["joined"] = {"times": pair.joined("events"), "files": pair.files("events")}
    told["after"] = pair.different()
    versions = pair.versions()
    pair.run_delta()
    told["idle"] = pair.versions() == versions
    pair.run_delta(rebuild=True)
    told["rebuilt"] = pair.different()
    told["counted"] = pair.counted()
    both = [summary(path) for path in (pair.delta, pair.parquet)]
    told["reports"] = without_ties(both[0]) == without_ties(both[1])
    told["tasks"] = sum(queue.totals.arrivals for queue in both[0].queues)
    spark.stop()
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
