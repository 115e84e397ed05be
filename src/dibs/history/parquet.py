"""A lake of plain Parquet files: they are read as they lie there, and a commit moves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dibs.history.formats import Say, crowded
from dibs.history.lake import Change, Lake, LakeState
from dibs.history.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ParquetTables:
    """See :class:`dibs.history.formats.Tables`."""

    def __init__(self, spark: SparkSession, lake: Lake) -> None:
        self._spark = spark
        self._lake = lake

    def read(self, table: str) -> DataFrame:
        return self._spark.read.schema(TABLES[table].ddl()).parquet(str(self._lake.path / table))

    def days(self, table: str) -> list[str]:
        return sorted({file.parent.name for file in self._lake.files(table)})

    def commit(self, changes: Iterable[Change], state: LakeState, say: Say) -> None:
        changes = list(changes)
        joined = self._joined(changes, say)
        say("committing")
        self._lake.commit([*changes, *joined], state)

    def finish(self) -> None:
        self._lake.finish()

    def _joined(self, changes: list[Change], say: Say) -> list[Change]:
        """Stages small files as one, for the same commit."""
        joined: list[Change] = []
        for table, day, small in crowded(changes, self._lake.files):
            say("joining small files")
            columns = [column.name for column in TABLES[table].columns]
            rows = self._spark.read.parquet(*map(str, small)).select(*columns).coalesce(1)
            staged = self._lake.staging(f"joined-{table}-{day.removeprefix('date=')}")
            rows.write.parquet(str(staged / day))
            joined.append(Change(table, staged, removed=small))
        return joined
