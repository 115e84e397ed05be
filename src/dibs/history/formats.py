"""How a lake's tables are kept: one class for each format, and the Spark session that it takes.

Parquet is plain files, and needs nothing else. Delta adds a log of transactions to each table, and needs its package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dibs.history.lake import Change, Format, Lake, LakeState, staged_files
from dibs.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SMALL_FILES_MAX = 8
"""So many small files a day has before they become one."""
SMALL_BYTES = 32 * 2**20

CONFIG = {
    "spark.sql.shuffle.partitions": "8",
    # Gold keeps the waits and runs of a minute as a list; a sort of all rows instead would take twice as long.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "4096",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "1",
}

JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"
"""A run is over before Java's second compiler, which takes a core for itself, has paid for itself."""

Say = Callable[[str], None]
"""Is told what is being done."""


class Tables(Protocol):
    """A lake's tables, by one Spark session."""

    def read(self, table: str) -> DataFrame:
        """Returns a table as it is now; without rows, if nothing was ever written to it."""
        ...

    def days(self, table: str) -> list[str]:
        """Returns the days that a table has rows of, as directories are called (`date=…`), in order."""
        ...

    def commit(self, changes: Iterable[Change], state: LakeState, say: Say) -> None:
        """Makes a commit of changes, one for each table, and joins small files where there are too many."""
        ...

    def finish(self) -> None:
        """Carries out what a run that was killed has left of its commit."""
        ...


def start_spark(kept_as: Format, master: str | None = None, memory: str = "1g") -> SparkSession:
    """Returns a Spark session that suits lakes of a format. Raises MissingDriver if what it needs is not here."""
    config = {**CONFIG, "spark.driver.memory": memory}
    if kept_as == "delta":
        from dibs.history import delta

        return delta.start_spark(master, config, JAVA)
    return session("dibs history", master=master, config=config, java=JAVA)


def check_installed(kept_as: Format) -> None:
    """Raises MissingDriver, with advice, if the package that a format needs is not here."""
    if kept_as == "delta":
        from dibs.history import delta

        delta.check_installed()


def tables(spark: SparkSession, lake: Lake) -> Tables:
    """Returns the tables of a lake."""
    if lake.state.format == "delta":
        from dibs.history.delta import DeltaTables

        return DeltaTables(spark, lake)
    from dibs.history.parquet import ParquetTables

    return ParquetTables(spark, lake)


def crowded(
    changes: Iterable[Change], files: Callable[[str, str], list[Path]]
) -> Iterator[tuple[str, str, list[Path]]]:
    """Yields the table, the day and the small files of each day that these changes add to, and that has too many."""
    for change in changes:
        for day in sorted({file.parent.name for file in staged_files(change.staged)} - set(change.replaced)):
            small = [file for file in files(change.table, day) if file.stat().st_size < SMALL_BYTES]
            if len(small) >= SMALL_FILES_MAX:
                yield change.table, day, small
