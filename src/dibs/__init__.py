"""dibs: a durable task queue. A worker calls dibs on a task: until its lease runs out, nobody else gets it."""

from __future__ import annotations

from dibs.app import Dibs
from dibs.context import CurrentTask, Fail, Retry, current
from dibs.handles import Batch, Handle
from dibs.ids import id_from_text, id_to_text, new_id
from dibs.listeners import Outcome, TaskEvent
from dibs.retry import Backoff
from dibs.stores import open_store, restore_store

__version__: str

__all__ = [
    "Backoff",
    "Batch",
    "CurrentTask",
    "Dibs",
    "Fail",
    "Handle",
    "Outcome",
    "Retry",
    "TaskEvent",
    "__version__",
    "current",
    "id_from_text",
    "id_to_text",
    "new_id",
    "open_store",
    "restore_store",
]


def __getattr__(name: str) -> str:
    """Reads the version when somebody asks: looking into the package's metadata is a quarter of the import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("dibs")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
