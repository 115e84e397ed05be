"""A lake of Delta tables: each has a log of transactions, so that whoever reads it sees it whole.

A commit is one transaction for each table. It carries the lake's name and the commit's number, by which Delta knows
what it has been through already: a commit that is carried out again, after a crash, does only what is missing.

Delta is a Java library that fits one version of Spark. The Python package `delta-spark` says which, and Spark fetches
it; or Spark's own configuration names its jars.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from dibs.errors import MissingDriver
from dibs.history.formats import SMALL_BYTES, Say, crowded
from dibs.history.lake import NO_DATE, Change, Lake, LakeState, Write, staged_files
from dibs.history.tables import DATE, TABLES
from dibs.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
SESSION = {
    "spark.sql.extensions": EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}
WRITING = {
    # What replaces some days may bring rows of others, too.
    "spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false",
    "spark.databricks.delta.optimize.minFileSize": str(SMALL_BYTES),
    "spark.databricks.delta.optimize.maxFileSize": str(4 * SMALL_BYTES),
}


class DeltaTables:
    """See :class:`dibs.history.formats.Tables`."""

    def __init__(self, spark: SparkSession, lake: Lake) -> None:
        self._spark = spark
        self._lake = lake
        for name, value in WRITING.items():
            spark.conf.set(name, value)

    def read(self, table: str) -> DataFrame:
        if not self._exists(table):
            return self._spark.createDataFrame([], TABLES[table].ddl())
        return self._spark.read.format("delta").load(str(self._lake.path / table))

    def days(self, table: str) -> list[str]:
        rows = self.read(table).select(DATE.name).distinct().collect()
        return sorted(NO_DATE if row[0] is None else f"date={row[0].isoformat()}" for row in rows)

    def commit(self, changes: Iterable[Change], state: LakeState, say: Say) -> None:
        news = [change for change in changes if self._is_news(change)]
        full = [(table, day) for table, day, _ in crowded(news, self._files)]
        say("committing")
        self._lake.commit(news, state, self._write)
        for table, day in full:
            say("joining small files")
            self._spark.sql(f"OPTIMIZE delta.`{self._path(table).replace('`', '``')}` WHERE {_within([day])}")

    def finish(self) -> None:
        self._lake.finish(self._write)

    def _write(self, write: Write, state: LakeState) -> None:
        """Does to a table what a commit says, in one transaction; nothing, if its log says that it has been done."""
        if write.staged is None:
            rows = self._spark.createDataFrame([], TABLES[write.table].ddl())
        else:
            rows = self._spark.read.schema(TABLES[write.table].ddl()).parquet(str(self._lake.path / write.staged))
        writer = rows.coalesce(self._spark.sparkContext.defaultParallelism).write.format("delta").partitionBy(DATE.name)
        writer = writer.option("txnAppId", state.reader).option("txnVersion", state.commits)
        if write.replaced and self._exists(write.table):
            writer = writer.mode("overwrite").option("replaceWhere", _within(write.replaced))
        else:
            writer = writer.mode("append")
        writer.save(self._path(write.table))

    def _is_news(self, change: Change) -> bool:
        """Whether a change says anything. That a table is there, with its columns and no rows, is news, too."""
        return bool(change.replaced or staged_files(change.staged)) or not self._exists(change.table)

    def _files(self, table: str, day: str) -> list[Path]:
        """The files that a day has now; those that it had before lie beside them until they are vacuumed."""
        if not self._exists(table):
            return []
        files = [Path(unquote(urlparse(uri).path)) for uri in self.read(table).where(_within([day])).inputFiles()]
        return [file for file in files if file.parent.name == day]

    def _exists(self, table: str) -> bool:
        return (self._lake.path / table / "_delta_log").is_dir()

    def _path(self, table: str) -> str:
        return str(self._lake.path / table)


def _within(days: Iterable[str]) -> str:
    """The condition that a row is of one of these days (`date=…`)."""
    return " OR ".join(
        f"{DATE.name} IS NULL" if day == NO_DATE else f"{DATE.name} = DATE'{day.removeprefix('date=')}'" for day in days
    )


# ------------------------------------------------------------------------------------------------------------- session


def start_spark(master: str | None, config: dict[str, str], java: str) -> SparkSession:
    """Returns a session that has Delta, as Spark is configured for it or by what the Python package names."""
    from pyspark.errors import PySparkRuntimeError

    packages = _packages()
    try:
        spark = session("dibs history", master=master, config={**config, **SESSION, **packages}, java=java)
    except PySparkRuntimeError as error:
        if not packages:
            raise
        named = packages["spark.jars.packages"]
        raise MissingDriver(f"Spark did not start with {named}, which it fetches from Maven: {_fitting()}") from error
    if EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
        raise MissingDriver("the Spark session that runs here was started without Delta: stop it, and start again")
    return spark


def check_installed() -> None:
    """Raises, with advice, if Delta is neither installed nor configured."""
    if find_spec("delta") is None and not _is_configured():
        raise MissingDriver(f"a Delta lake needs delta-spark, not installed here: {_fitting()}")


def _packages() -> dict[str, str]:
    """What has Spark fetch Delta, unless it is configured to have it."""
    check_installed()
    if _is_configured():
        return {}
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    return dict(configure_spark_with_delta_pip(SparkSession.Builder())._options)


def _is_configured() -> bool:
    """Whether Spark's configuration names Delta, or Spark's own directory of jars holds it."""
    import pyspark

    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    defaults = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf") / "spark-defaults.conf"
    said = [os.environ.get("PYSPARK_SUBMIT_ARGS", ""), defaults.read_text() if defaults.is_file() else ""]
    return any("delta-spark" in text for text in said) or any((home / "jars").glob("delta-spark*.jar"))


def _fitting() -> str:
    try:
        here = f"delta-spark {version('delta-spark')} and PySpark {version('pyspark')}"
    except PackageNotFoundError:
        here = f"PySpark {version('pyspark')}"
    return (
        "pip install delta-spark, in the version that is made for the PySpark that is installed, or name its jars in "
        f"Spark's configuration (spark.jars). Here: {here}"
    )
