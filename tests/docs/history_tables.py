"""``python -m tests.docs.history_tables``: writes the tables of `docs/history-tables.md` from the code."""

from __future__ import annotations

import re

from dibs.history.tables import DATE, TABLES, Column
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "history-tables.md"
_PART = re.compile(r"(<!-- columns of (\w+): written by `python -m tests\.docs\.history_tables` -->\n)"
                   r".*?(<!-- end -->)", re.DOTALL)  # fmt: skip


def page() -> str:
    """The page with the tables as they should be."""
    return _PART.sub(lambda part: part[1] + _table(part[2]) + part[3], PAGE.read_text())


def parts() -> list[str]:
    """Which tables the page has."""
    return [part[2] for part in _PART.finditer(PAGE.read_text())]


def _table(name: str) -> str:
    table = TABLES[name]
    rows = [_row(column) for column in (*table.columns, DATE)]
    return "\n".join([table.doc, "", "| column | type | unit | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _row(column: Column) -> str:
    return f"| `{column.name}` | {column.type} | {column.unit} | {column.doc} |"


if __name__ == "__main__":
    PAGE.write_text(page())
