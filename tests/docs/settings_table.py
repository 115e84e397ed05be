"""``python -m tests.docs.settings_table``: writes the table of `docs/settings.md` from the declared settings."""

from __future__ import annotations

from dibs.settings import FIELDS, Field
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "settings.md"
BEGIN = "<!-- settings: written by `python -m tests.docs.settings_table` -->\n"
END = "<!-- end of settings -->"


def table() -> str:
    """One row per setting, in the order of declaration."""
    lines = ["| setting | environment | value | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for field in FIELDS:
        shape = field.shape.replace("|", " or ")
        lines.append(f"| `{field.name}` | `{field.variable}` | {shape} | `{_default(field)}` | {field.doc} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def _default(field: Field) -> str:
    """The default as one would write it: sizes and durations with the largest unit that is exact."""
    units = {"SIZE": [("GiB", 2**30), ("MiB", 2**20)], "DURATION": [("d", 86_400), ("h", 3_600)]}
    for unit, factor in units.get(field.shape, []):
        if field.default and field.default % factor == 0:
            return f"{field.default // factor}{unit}"
    return str(field.default)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
