"""Where Spark looks by itself: it imports every installed package named `pyspark_*` for a data source, so that
``format("dibs")`` works without :func:`dibs.spark.register`. Without the extra there is none to be found here."""

import contextlib

from dibs.errors import MissingDriver

with contextlib.suppress(MissingDriver):
    from dibs.spark.source import DibsSource as DefaultSource

__all__ = ["DefaultSource"]
