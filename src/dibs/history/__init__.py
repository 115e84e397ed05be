"""The history of a queue: its journal as a lake of Parquet tables, made by Spark, and a report that people look at."""
