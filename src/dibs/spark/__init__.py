"""Spark around the queue: ``format("dibs")`` reads and writes it, `drain` works on it, `map_rows` maps rows by it.

::

    from dibs.spark import session

    spark = session()
    pages.write.format("dibs").option("url", "lmdb:jobs").option("command", "fetch").mode("append").save()
    spark.read.format("dibs").option("url", "lmdb:jobs").option("view", "dead").show()
"""

from dibs.errors import MissingDriver

try:
    from dibs.spark.drain import drain
    from dibs.spark.mapping import map_rows
    from dibs.spark.session import session
    from dibs.spark.source import register
except ImportError as error:
    raise MissingDriver(f"Spark needs {error.name}, which is not installed: pip install 'dibs[spark]'") from error

__all__ = ["drain", "map_rows", "register", "session"]
