"""What a function may return for a batch, and what that means for its rows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dibs.spark.returned import outcomes
from dibs.task import Kind

IDS = ["a", "b", "c"]
AT = datetime(2026, 11, 15, tzinfo=UTC)


@pytest.mark.parametrize(
    ("returned", "written"),
    [
        (None, [b"null"] * 3),
        ([1, "x", None], [b"1", b'"x"', b"null"]),
        ((1.5, {"a": [1]}, True), [b"1.5", b'{"a":[1]}', b"true"]),
        (pd.Series([1.0, None, 2.0]), [b"1.0", b"null", b"2.0"]),
        (pd.Series([{"a": 1}, {"b": float("nan")}, pd.NA]), [b'{"a":1}', None, b"null"]),
        (pd.Series([AT] * 3), [b'"2026-11-15T00:00:00Z"'] * 3),
        (pd.Series(["x", "y", "x"], dtype="category"), [b'"x"', b'"y"', b'"x"']),
        (np.array([1, 2, 3]), [b"1", b"2", b"3"]),
        (np.array([[1, 2], [3, 4], [5, 6]]), [b"[1,2]", b"[3,4]", b"[5,6]"]),
        (pa.array([1, None, 3]), [b"1", b"null", b"3"]),
        (pa.chunked_array([[1], [2, 3]]), [b"1", b"2", b"3"]),
        (pd.DataFrame({"result": [1, 2, 3]}, index=[9, 8, 7]), [b"1", b"2", b"3"]),
        (pa.table({"result": [1, 2, 3], "id": ["c", "a", "b"]}), [b"2", b"3", b"1"]),
        (pa.record_batch({"result": pa.array([[1], [], None])}), [b"[1]", b"[]", b"null"]),
        ([1, object(), b"x"], [b"1", None, None]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_results(returned: Any, written: list[bytes | None]) -> None:
    """One for each row, in its order or by its id; missing values are null, and what JSON has no form for fails its
    row."""
    ended = outcomes(returned, IDS, "id", "json")
    assert [one.result for one in ended] == written
    for one in ended:
        assert (one.kind, one.reason) == ((Kind.COMPLETE, None) if one.result else (Kind.FAIL, "INVALID_RESULT"))


def test_outcomes() -> None:
    """A table without results may say how rows end."""
    ended = outcomes(
        pd.DataFrame(
            {"outcome": ["retry", "fail", "complete"], "delay_s": [1.5, None, None], "error": ["e", "f", None]}
        ),
        IDS,
        "id",
        "json",
    )
    told = [(one.kind, one.delay_s, one.reason, one.error and one.error.message) for one in ended]
    assert told == [
        (Kind.RETRY, 1.5, None, "e"),
        (Kind.FAIL, None, "FAILED", "f"),
        (Kind.COMPLETE, None, None, None),
    ]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1, 2], "returned 2 results for 3 rows: return None, one result for each row"),
        (pd.DataFrame({"result": [1]}), "returned 1 rows for 3 rows"),
        (pd.DataFrame({"a": [1, 2, 3]}), "a table with the columns a: return None"),
        ("abc", "returned a str: return None"),
        ({"a": 1}, "returned a dict"),
        (iter([1, 2, 3]), "returned a list_iterator"),
        (pd.DataFrame({"outcome": ["done"] * 3}), "outcome 'done': use one of complete, retry, fail"),
        (pd.DataFrame({"result": [1, 2], "id": ["a", "a"]}), "is there twice"),
        (pd.DataFrame({"result": [1], "id": ["z"]}), "not that of a row"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_it_may_not_return(returned: Any, text: str) -> None:
    """Is the function's error, and says what to return."""
    with pytest.raises((TypeError, ValueError), match=text):
        outcomes(returned, IDS, "id", "json")
