"""How many intervals are open at once: from where they begin and end to a level at every step, and to the highest.

An interval holds its beginning and not its end. Everything is one sort by time on the JVM, whatever the number of
intervals that are open together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def levels(changes: DataFrame, keys: Sequence[str], step: str, end: int) -> DataFrame:
    """Returns a row for each step in which something changed, or after which something waits or runs, up to `end`.

    `changes` has one row for each of the `keys` and step at most, with how many intervals `readied` and `left`, how many
    `began` and `ended`, and `left_ms`: the earliest beginning of those that left. Intervals that are open have to leave
    after `end`, so that their beginning is known. The result has the columns of `changes`, which are null in steps that
    it lacks, and `backlog`, `running` and `oldest_ms`: the earliest beginning of those that wait at the end of the step.
    """
    forth = Window.partitionBy(*keys).orderBy(step)
    back = Window.partitionBy(*keys).orderBy(F.desc(step))
    so_far = forth.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    later = back.rowsBetween(Window.unboundedPreceding, -1)
    swept = changes.select(
        "*",
        F.sum(F.expr("readied - left")).over(so_far).alias("backlog"),
        F.sum(F.expr("began - ended")).over(so_far).alias("running"),
        # Of those that leave later, the earliest beginning is that of one that waits now, if any does.
        F.min("left_ms").over(later).alias("oldest_ms"),
        F.coalesce(F.lead(step).over(forth) - 1, F.lit(end)).alias("until"),
    )
    held = f"IF(backlog > 0 OR running > 0, greatest({step}, least(until, {end})), {step})"
    others = [name for name in changes.columns if name not in (*keys, step)]
    return swept.select("*", F.explode(F.expr(f"sequence({step}, {held})")).alias("now")).select(
        *keys,
        F.col("now").alias(step),
        *(F.expr(f"IF(now = {step}, {name}, NULL)").alias(name) for name in others),
        "backlog",
        "running",
        F.expr("IF(backlog > 0, oldest_ms, NULL)").alias("oldest_ms"),
    )


def peaks(intervals: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Returns for each of the `keys` the most intervals, from `from_ms` to `to_ms`, that were open at once, as `peak`.

    It is at least 1: an interval without length was there, too.
    """
    ends = intervals.select(
        *keys, F.explode(F.expr("array(2 * from_ms + 1, 2 * to_ms)")).alias("end")
    )  # of an instant, what ends comes before what begins
    by_time = Window.partitionBy(*keys).orderBy("end").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    level = F.sum(F.expr("IF(end % 2 = 1, 1, -1)")).over(by_time)
    return (
        ends.select(*keys, level.alias("level")).groupBy(*keys).agg(F.greatest(F.max("level"), F.lit(1)).alias("peak"))
    )
