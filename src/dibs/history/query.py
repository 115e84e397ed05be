"""Asking a lake by Spark SQL: every table is there by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.history.lake import Lake
from dibs.history.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def table(spark: SparkSession, lake: Lake, name: str) -> DataFrame:
    """Returns a table of a lake, as it is now."""
    return spark.read.schema(TABLES[name].ddl()).parquet(str(lake.path / name))


def query(spark: SparkSession, lake: Lake, sql: str) -> DataFrame:
    """Returns what a statement of Spark SQL says of a lake's tables."""
    for name in TABLES:
        table(spark, lake, name).createOrReplaceTempView(name)
    return spark.sql(sql)
