"""Two versions of one table are the same, or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dibs.history.tables import TABLES

Row = dict[str, Any]


def by_key(table: str, rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """Returns the rows of a table by what tells them apart, of which no two have the same."""
    found = {tuple(row[column] for column in (*TABLES[table].key, "date")): row for row in rows}
    assert len(found) == len(rows)
    return found


def assert_same(table: str, rows: Sequence[Row], expected: Sequence[Row]) -> None:
    """Both are the same table, in any order; fractions agree to what a computer's sums allow."""
    found, wanted = by_key(table, rows), by_key(table, expected)
    assert found.keys() == wanted.keys()
    for key, row in found.items():
        assert row == {
            column: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            for column, value in wanted[key].items()
        }, key
