"""Asking a lake by Spark SQL: every table is there by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dibs.errors import InvalidOption
from dibs.history.formats import tables
from dibs.history.lake import Lake
from dibs.history.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


ASKS = ("select", "with", "from", "values", "table", "describe", "desc", "show", "explain")
DELTAS = ("vacuum", "delete", "optimize")
"""How statements begin that only read; and those that tend Delta tables."""
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|--[^\n]*|/\*.*?\*/", re.DOTALL)


def check(lake: Lake, sql: str) -> None:
    """Raises if a statement would write: a lake's tables are changed by its runs alone."""
    words = re.findall(r"[a-z_]+", _QUOTED.sub(" ", sql).lower())
    known = ASKS + (DELTAS if lake.state.format == "delta" else ())
    if not words or words[0] not in known or "insert" in words:
        raise InvalidOption("a lake can only be asked: write a SELECT; its tables are changed by its runs alone")


def query(spark: SparkSession, lake: Lake, sql: str) -> DataFrame:
    """Returns what a statement of Spark SQL says of a lake's tables."""
    check(lake, sql)
    kept = tables(spark, lake)
    for name in TABLES:
        kept.read(name).createOrReplaceTempView(name)
    return spark.sql(sql)
