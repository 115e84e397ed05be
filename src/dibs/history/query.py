"""Asking a lake by Spark SQL: every table is there by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.history.formats import tables
from dibs.history.lake import Lake
from dibs.history.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def query(spark: SparkSession, lake: Lake, sql: str) -> DataFrame:
    """Returns what a statement of Spark SQL says of a lake's tables."""
    kept = tables(spark, lake)
    for name in TABLES:
        kept.read(name).createOrReplaceTempView(name)
    return spark.sql(sql)
