"""How many intervals are open at once: from where they begin and end to a level at every step, and to the highest.

An interval holds its beginning and not its end. Everything is one sort by time on the JVM, whatever the number of
intervals that are open together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as fn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def levels(changes: DataFrame, keys: Sequence[str], step: str, end: int) -> DataFrame:
    """Returns a row for each step in which something changed, or after which something waits or runs, up to `end`.

    `changes` has at most one row for each of the `keys` and step, with how many intervals `readied` and `left`, how
    many `began` and `ended`, and `left_ms`: the earliest beginning of those that left. Intervals that are open have to
    leave after `end`, so that their beginning is known. The result has the columns of `changes`, null in steps that it
    lacks, and of the end of the step `backlog`, `running` and `oldest_ms`, the earliest beginning of those that wait;
    `carried` is how many ran at the end of the step before.
    """
    forth = Window.partitionBy(*keys).orderBy(step)
    back = Window.partitionBy(*keys).orderBy(fn.desc(step))
    so_far = forth.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = forth.rowsBetween(Window.unboundedPreceding, -1)
    later = back.rowsBetween(Window.unboundedPreceding, -1)
    swept = changes.select(
        "*",
        fn.sum(fn.expr("readied - left")).over(so_far).alias("backlog"),
        fn.sum(fn.expr("began - ended")).over(so_far).alias("running"),
        fn.coalesce(fn.sum(fn.expr("began - ended")).over(before), fn.lit(0)).alias("carried"),
        # Of those that leave later, the earliest beginning is that of one that waits now, if any does.
        fn.min("left_ms").over(later).alias("oldest_ms"),
        fn.coalesce(fn.lead(step).over(forth) - 1, fn.lit(end)).alias("until"),
    )
    held = f"IF(backlog > 0 OR running > 0, greatest({step}, least(until, {end})), {step})"
    others = [name for name in changes.columns if name not in (*keys, step)]
    return swept.select("*", fn.explode(fn.expr(f"sequence({step}, {held})")).alias("now")).select(
        *keys,
        fn.col("now").alias(step),
        *(fn.expr(f"IF(now = {step}, {name}, NULL)").alias(name) for name in others),
        "backlog",
        "running",
        fn.expr(f"IF(now = {step}, carried, running)").alias("carried"),
        fn.expr("IF(backlog > 0, oldest_ms, NULL)").alias("oldest_ms"),
    )


BEGIN, END = "2 * {} + 1", "2 * {}"
"""A time at which an interval begins or ends, in SQL: of an instant, what ends comes before what begins."""


def surge(times: str) -> str:
    """Returns, in SQL, by how much the level rose at most over what it was at first; 0 if it only fell.

    `times` is an array of when intervals began and ended, each written as `BEGIN` and `END` say.
    """
    risen = "named_struct('now', now.now + 1, 'most', greatest(now.most, now.now + 1))"
    fallen = "named_struct('now', now.now - 1, 'most', now.most)"
    return (
        f"aggregate(sort_array({times}), named_struct('now', 0, 'most', 0), "
        f"(now, time) -> IF(time % 2 = 1, {risen}, {fallen}), now -> now.most)"
    )
