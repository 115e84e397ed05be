"""``python -m tests.docs.spark_tables``: writes the tables of `docs/spark-options.md` from the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from textwrap import dedent

import msgspec

from dibs.spark.options import ActionOptions, ReadOptions, StreamReadOptions, Where, WriteOptions
from dibs.spark.schema import ANY, COLUMNS
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "spark-options.md"
OPTIONS: dict[str, type[Where]] = {
    "all": Where,
    "read": ReadOptions,
    "readStream": StreamReadOptions,
    "write": WriteOptions,
    "action": ActionOptions,
}
_PART = re.compile(r"(<!-- (options|columns) of (\w+): written by `python -m tests\.docs\.spark_tables` -->\n)"
                   r".*?(<!-- end -->)", re.DOTALL)  # fmt: skip


def page() -> str:
    """The page with the tables as they should be."""
    return _PART.sub(lambda part: part[1] + _table(part[2], part[3]) + part[4], PAGE.read_text())


def parts() -> list[tuple[str, str]]:
    """Which tables the page has."""
    return [(part[2], part[3]) for part in _PART.finditer(PAGE.read_text())]


def _table(what: str, name: str) -> str:
    if what == "columns":
        rows = [f"| `{one.name}` | {_type(one.type)} | {one.doc} |" for one in COLUMNS[name]]  # type: ignore[index]
        return "\n".join(["| column | type | meaning |", "| --- | --- | --- |", *rows]) + "\n"
    rows = [f"| `{option}` | {default} | {doc} |" for option, default, doc in _options(OPTIONS[name])]
    return "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def _type(said: str) -> str:
    return "as the option `payload` says" if said == ANY else said.replace("|", " or ")


def _options(kind: type[Where]) -> Iterator[tuple[str, str, str]]:
    """The options that this kind adds to those of its parent: name, default and meaning."""
    docs = _docs(kind)
    for field in msgspec.structs.fields(kind):
        if field.name in docs:
            default = "needed" if field.required else "" if field.default is None else f"`{_text(field.default)}`"
            yield field.encode_name, default, docs[field.name]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _docs(kind: type) -> dict[str, str]:
    """What stands below each field."""
    [declared] = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(declared, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, said in zip(declared.body, declared.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(said, ast.Expr):
            docs[field.target.id] = " ".join(ast.literal_eval(said.value).split())
    return docs


if __name__ == "__main__":
    PAGE.write_text(page())
