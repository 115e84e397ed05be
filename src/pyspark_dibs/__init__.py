"""Where Spark looks by itself: it imports every installed package named `pyspark_*` for a data source, so that
``format("dibs")`` works without :func:`dibs.spark.register`."""

from dibs.spark.source import DibsSource as DefaultSource

__all__ = ["DefaultSource"]
