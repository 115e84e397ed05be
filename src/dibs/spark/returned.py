"""What a function that was given a batch returned: an outcome for each of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dibs.context import Fail, Retry
from dibs.task import Kind
from dibs.worker.outcomes import Ended, completed, raised

OUTCOMES = tuple(kind.value for kind in (Kind.COMPLETE, Kind.RETRY, Kind.FAIL))
COLUMNS = ("result", "outcome", "error", "reason", "delay_s")
_FORMS = (
    "return None, one result for each row (a list, Series or Array), or a table with a column `result` or `outcome`"
)


def outcomes(returned: Any, ids: Sequence[str], id_column: str, codec: str) -> list[Ended]:
    """Returns the outcome of each row of the batch, in its order. Raises what the function did wrong, if what it
    returned does not say that."""
    if returned is None:
        return [completed(None, codec)] * len(ids)
    if isinstance(returned, pd.DataFrame | pa.Table | pa.RecordBatch):
        return _of_table(returned, ids, id_column, codec)
    values = _values(returned)
    _check_length(len(values), len(ids), "results")
    return [completed(value, codec) for value in values]


def _of_table(
    table: pd.DataFrame | pa.Table | pa.RecordBatch, ids: Sequence[str], id_column: str, codec: str
) -> list[Ended]:
    names = list(table.columns) if isinstance(table, pd.DataFrame) else table.schema.names
    if not {"result", "outcome"} & {*names}:
        raise TypeError(f"the function returned a table with the columns {', '.join(map(str, names))}: {_FORMS}")
    columns = {name: _values(table[name]) for name in (*COLUMNS, id_column) if name in names}
    count = len(next(iter(columns.values())))
    nothing = [None] * count
    parts = [columns.get(name, nothing) for name in COLUMNS]
    if id_column not in columns:
        _check_length(count, len(ids), "rows")
        return [_outcome(codec, *row) for row in zip(*parts, strict=True)]
    found = dict(zip(columns[id_column], zip(*parts, strict=True), strict=True))
    if len(found) != count or not found.keys() <= {*ids}:
        raise ValueError(f"the function returned a table whose {id_column} is not that of a row, or is there twice")
    return [_outcome(codec, *found[one]) if one in found else _MISSING for one in ids]


_MISSING = raised(Retry("the function returned no row for it"))


def _outcome(codec: str, result: Any, outcome: Any, error: Any, reason: Any, delay_s: Any) -> Ended:
    if outcome is None or outcome == Kind.COMPLETE:
        return completed(result, codec)
    if outcome == Kind.RETRY:
        return raised(Retry(_said(error), delay_s=None if delay_s is None else float(delay_s)))
    if outcome == Kind.FAIL:
        return raised(Fail(_said(reason) or "FAILED", _said(error)))
    raise ValueError(f"the function returned the outcome {outcome!r}: use one of {', '.join(OUTCOMES)}")


def _said(text: Any) -> str:
    return "" if text is None else str(text)


def _check_length(count: int, wanted: int, what: str) -> None:
    if count != wanted:
        raise ValueError(f"the function returned {count} {what} for {wanted} rows: {_FORMS}")


def _values(returned: Any) -> Sequence[Any]:
    """Returns a column as plain values; what pandas calls missing is None."""
    if isinstance(returned, pa.Array | pa.ChunkedArray):
        return _listed(returned)
    if isinstance(returned, np.ndarray):
        returned = pd.Series(list(returned) if returned.ndim > 1 else returned)
    if isinstance(returned, pd.Series):
        if returned.dtype != object:
            return _listed(pa.Array.from_pandas(returned))
        return [_plain(value) for value in returned]
    if isinstance(returned, list | tuple):
        return [_plain(value) for value in returned]
    raise TypeError(f"the function returned a {type(returned).__name__}: {_FORMS}")


def _listed(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":  # which Python's own times have not
        array = array.cast(pa.timestamp("us", array.type.tz), safe=False)
    values: list[Any] = array.to_pylist()
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is pd.NA or value is pd.NaT or (isinstance(value, float) and isnan(value)):
        return None
    return value
