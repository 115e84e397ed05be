"""``format("dibs")``: which reader or writer a DataFrame gets.

Options are read here, on the driver, so that a wrong one is told before any task starts. What is made here travels to
executors: readers and writers hold plain values only, and open the store where they run (:mod:`dibs.spark.connection`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType
from pyspark.sql.utils import is_remote

from dibs.errors import InvalidOption
from dibs.settings import mask
from dibs.spark import schema as schemas
from dibs.spark.options import ActionOptions, Options, ReadOptions, StreamReadOptions, Where, WriteOptions, parse
from dibs.stores import REMOTE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class DibsSource(DataSource):
    """A queue as a source and sink of rows."""

    master: ClassVar[str | None] = None
    """Where executors run, if that is known."""

    @classmethod
    def name(cls) -> str:
        return "dibs"

    def schema(self) -> str:
        # Spark asks before it says whether a batch or a stream is read.
        return schemas.ddl(parse(self.options, StreamReadOptions))

    def reader(self, schema: StructType) -> DataSourceReader:
        from dibs.spark.views import ViewReader

        return ViewReader(self._reachable(parse(self.options, ReadOptions)), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        from dibs.spark.stream import EventStream

        options = self._reachable(parse(self.options, StreamReadOptions))
        if options.view != "events":
            raise InvalidOption(f"{options.view} cannot be read as a stream: use .option('view', 'events')")
        return EventStream(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from dibs.spark.actions import ActionWriter
        from dibs.spark.sink import LoadWriter

        if overwrite:
            raise InvalidOption("a queue is not overwritten: use .mode('append')")
        if "action" in self.options:
            return ActionWriter(self._reachable(parse(self.options, ActionOptions)), schema)
        return LoadWriter(self._reachable(parse(self.options, WriteOptions)), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 Spark's name
        from dibs.spark.sink import StreamLoadWriter

        if overwrite:
            raise InvalidOption("a queue is appended to: use .outputMode('append')")
        return StreamLoadWriter(self._reachable(parse(self.options, WriteOptions)), schema)

    def _reachable(self, options: Options) -> Options:
        check_reachable(options, self.master)
        return options


def check_reachable(options: Where, master: str | None) -> None:
    """Refuses a store on this machine's disk if executors run on others."""
    if master is not None and not master.startswith("local") and not options.url.startswith(REMOTE):
        raise InvalidOption(
            f"option url is {mask(options.url)!r}, which the executors of {master} do not share: run "
            "`dibs serve` on the machine that has it, and use http://HOST:PORT"
        )


def register(spark: SparkSession) -> None:
    """Lets a session, and the thread that calls, know ``format("dibs")``, and where its executors are."""
    known = spark.conf.get("spark.master", None)

    class DibsHere(DibsSource):
        """Made here, so that it travels with what it knows."""

        master = known

    spark.dataSource.register(DibsHere)
    if not is_remote():
        # A writer looks for formats in the session of its thread, and a thread that Python started has none.
        jvm: Any = spark._jvm
        jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)
