"""Where a report's rows come from: a lake's Parquet files, read without Spark; Delta tables, read with it; or whatever
else has the same tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from dibs.history.lake import NO_DATE, Lake, LakeState
from dibs.history.tables import DATE, TABLES, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TYPES = {
    "STRING": pa.string(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "DATE": pa.date32(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "BINARY": pa.binary(),
    "ARRAY<STRING>": pa.list_(pa.string()),
}


class Source(Protocol):
    """A lake's tables, whoever reads them."""

    name: str
    state: LakeState

    def batches(self, table: str, columns: Sequence[str], first: date, last: date) -> Iterator[pa.RecordBatch]:
        """Yields these columns of the table's rows of those days, in any order; nothing if there are none."""
        ...


class Files:
    """A lake's Parquet files. Only the directories of the days that are asked for are read."""

    def __init__(self, path: Path) -> None:
        lake = Lake.open(path)
        lake.check_version()
        self._path = path
        self._datasets: dict[str, ds.Dataset] = {}
        self.name = path.resolve().name
        self.state = lake.state

    def changed(self) -> bool:
        """Whether a run has committed since this was opened: what was read may be half old and half new."""
        return Lake.open(self._path).state.commits != self.state.commits

    def batches(self, table: str, columns: Sequence[str], first: date, last: date) -> Iterator[pa.RecordBatch]:
        """See :class:`Source`."""
        if not (self._path / table).is_dir():
            return
        if table not in self._datasets:
            self._datasets[table] = self._dataset(TABLES[table])
        days = (pc.field(DATE.name) >= first) & (pc.field(DATE.name) <= last)
        yield from self._datasets[table].to_batches(columns=list(columns), filter=days)

    def _dataset(self, table: Table) -> ds.Dataset:
        by_day = ds.partitioning(arrow_schema(table, [DATE.name]), flavor="hive")
        return ds.dataset(self._path / table.name, arrow_schema(table), format="parquet", partitioning=by_day)


class Asked:
    """The tables of a lake that is more than its files, as Spark reads them."""

    def __init__(self, path: Path, spark: SparkSession | None = None) -> None:
        from dibs.history.formats import start_spark, tables

        lake = Lake.open(path)
        lake.check_version()
        self._path = path
        self._tables = tables(spark or start_spark(lake.state.format), lake)
        self.name = path.resolve().name
        self.state = lake.state

    def changed(self) -> bool:
        """Whether a run has committed since this was opened: what was read may be half old and half new."""
        return Lake.open(self._path).state.commits != self.state.commits

    def batches(self, table: str, columns: Sequence[str], first: date, last: date) -> Iterator[pa.RecordBatch]:
        """See :class:`Source`. The large tables are had a day at a time."""
        rows = self._tables.read(table)
        spans = [f"DATE'{first}' AND DATE'{last}'"]
        if TABLES[table].layer != "gold":
            days = [day.removeprefix("date=") for day in self._tables.days(table) if day != NO_DATE]
            spans = [f"DATE'{day}' AND DATE'{day}'" for day in days if str(first) <= day <= str(last)]
        for span in spans:
            found = rows.where(f"{DATE.name} BETWEEN {span}").select(*columns).toArrow()
            yield from found.cast(arrow_schema(TABLES[table], columns)).to_batches()


def opened(path: Path) -> Files | Asked:
    """Returns the tables of a lake, by what it takes to read them."""
    return Files(path) if Lake.open(path).state.format == "parquet" else Asked(path.absolute())


def read(source: Source, table: str, columns: Sequence[str], first: date, last: date) -> pa.Table:
    """Returns what :meth:`Source.batches` yields as one table."""
    schema = arrow_schema(TABLES[table], columns)
    return pa.Table.from_batches(source.batches(table, columns, first, last), schema)


def arrow_schema(table: Table, columns: Sequence[str] = ()) -> pa.Schema:
    """Returns the types of these columns of the table, or of all."""
    types = {column.name: _TYPES[column.type] for column in (*table.columns, DATE)}
    return pa.schema([(name, types[name]) for name in columns or types])
