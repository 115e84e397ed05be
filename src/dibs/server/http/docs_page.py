"""The OpenAPI document as a page: plain HTML, made once, with nothing in it that comes from elsewhere and no script."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import msgspec

Json = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --line: #8883; --soft: #8881; --dim: #888; --get: #0a7d4f; --post: #1d63d8;
  --put: #a15c00; --delete: #c0293b }
@media (prefers-color-scheme: dark) { :root { --get: #4cc38a; --post: #6ea8fe; --put: #f0b429; --delete: #ff7a85 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 6rem; font: 16px/1.55 system-ui, sans-serif }
h1 { margin: 0 0 .25rem; font-size: 2rem } h2 { margin: 3rem 0 .75rem; font-size: 1.35rem }
h3 { margin: 1.25rem 0 .4rem; font-size: .8rem; letter-spacing: .06em; text-transform: uppercase; color: var(--dim) }
p { margin: .4rem 0 } a { color: inherit } .dim { color: var(--dim) }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1rem 0 }
code, pre { font: 13.5px/1.5 ui-monospace, "Cascadia Mono", Menlo, monospace }
pre { margin: .4rem 0; padding: .8rem 1rem; overflow-x: auto; background: var(--soft); border-radius: 6px }
details { border: 1px solid var(--line); border-radius: 8px; margin: .5rem 0; scroll-margin-top: 1rem }
summary { display: flex; flex-wrap: wrap; gap: .25rem .75rem; align-items: baseline; padding: .55rem .9rem;
  cursor: pointer; list-style: none } summary::-webkit-details-marker { display: none }
summary:hover { background: var(--soft) } details[open] > summary { border-bottom: 1px solid var(--line) }
.body { padding: .4rem 1rem 1rem } .what { margin-left: auto; color: var(--dim); font-size: .93rem }
.method { min-width: 4.2rem; font-weight: 700 } .get { color: var(--get) } .post { color: var(--post) }
.put { color: var(--put) } .delete { color: var(--delete) }
.table { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .93rem }
th { text-align: left; font-weight: 600 }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td:first-child { white-space: nowrap }
.scope { padding: .05rem .5rem; border: 1px solid var(--line); border-radius: 99px; font-size: .82rem }
"""

_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""What the page may load: its own style, and nothing else."""


def page(document: Json) -> str:
    """Returns the document as a page."""
    info, schemas = document["info"], document["components"]["schemas"]
    tags = [tag["name"] for tag in document["tags"]]
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(info['title'])} HTTP API</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(info['title'])} <span class=dim>{escape(info['version'])}</span></h1>",
            f"<p>{escape(info['description'])}</p>",
            "<p>Every call has a token, unless the server is in development mode. In the lines to try below ",
            "<code>$DIBS</code> is the address of this server, and <code>$TOKEN</code> is yours.</p><nav>",
            *(f'<a href="#{_anchor(tag)}">{escape(tag)}</a>' for tag in tags),
            '<a href="#schemas">Schemas</a><a href="openapi.json">openapi.json</a></nav>',
            *(part for tag in tags for part in _section(tag, document["paths"])),
            '<h2 id="schemas">Schemas</h2>',
            *(_schema_details(name, schema) for name, schema in sorted(schemas.items())),
            "</body></html>",
        ]
    )


def _section(tag: str, paths: Json) -> Iterator[str]:
    yield f'<h2 id="{_anchor(tag)}">{escape(tag)}</h2>'
    for path, methods in paths.items():
        for method, operation in methods.items():
            if tag in operation.get("tags", ()):
                yield _operation(method, path, operation)


def _operation(method: str, path: str, operation: Json) -> str:
    scopes = "".join(f"<span class=scope>{escape(scope)}</span> " for scope in operation.get("x-scopes", ()))
    needs = f"<p class=dim>A token with one of these scopes: {scopes}</p>" if scopes else ""
    return (
        f'<details><summary><code class="method {method}">{method.upper()}'
        f"</code><code>{escape(path)}</code><span class=what>{escape(operation['summary'])}</span></summary>"
        f'<div class=body id="{escape(operation["operationId"])}">'
        f"<p>{_text(operation.get('description', ''))}</p>{needs}"
        f"{_parameters(operation['parameters'])}{_body(operation)}"
        f"<h3>Try it</h3><pre>{escape(curl(method, path, operation))}</pre>{_answers(operation['responses'])}"
        "</div></details>"
    )


def _parameters(parameters: list[Json]) -> str:
    if not parameters:
        return ""
    rows = (
        (f"<code>{escape(one['name'])}</code>", escape(one["in"]), _kind(one["schema"]), _text(one.get("description")))
        for one in parameters
    )
    return f"<h3>Parameters</h3>{_table(rows)}"


def _body(operation: Json) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    optional = "" if body["required"] else " <span class=dim>may be left out</span>"
    return f"<h3>Body</h3><p>{_kind(body['content']['application/json']['schema'])}{optional}</p>"


def _answers(responses: Json) -> str:
    rows = []
    for status, answer in responses.items():
        content = answer.get("content", {}).get("application/json")
        rows.append(
            (f"<code>{status}</code>", _text(answer["description"]), _kind(content["schema"]) if content else "")
        )
    return f"<h3>Answers</h3>{_table(rows)}"


def curl(method: str, path: str, operation: Json) -> str:
    """Returns a line for a shell that calls the route."""
    words = ["curl"] if method == "get" else ["curl", "-X", method.upper()]
    line = f'{" ".join(words)} "$DIBS{path.replace("{id}", "$ID").replace("{command}", "$COMMAND")}"'
    if operation.get("security"):
        line += ' \\\n  -H "Authorization: Bearer $TOKEN"'
    body = operation.get("requestBody")
    if body is not None:
        example = msgspec.json.encode(body["content"]["application/json"].get("example", {})).decode()
        line += f" \\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(example)}"
    return line


def _schema_details(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = (
        (
            f"<code>{escape(field)}</code>",
            _kind(one),
            "required" if field in required else _default(one),
            _text(one.get("description")),
        )
        for field, one in schema.get("properties", {}).items()
    )
    values = ", ".join(f"<code>{escape(str(value))}</code>" for value in schema.get("enum", ()))
    return (
        f'<details><summary><code>{escape(name)}</code></summary><div class=body id="{escape(name)}">'
        f"<p>{_text(schema.get('description'))}</p><p>{values}</p>{_table(rows)}</div></details>"
    )


def _kind(schema: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{escape(name)}"><code>{escape(name)}</code></a>'
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}{_range(schema)}"
    return f"{escape(str(schema.get('format') or schema.get('type') or 'any JSON'))}{_range(schema)}"


def _range(schema: Json) -> str:
    names = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤", "minItems": "length ≥",
             "maxItems": "length ≤"}  # fmt: skip
    bounds = [f"{sign} {schema[name]:g}" for name, sign in names.items() if name in schema]
    bounds += [f"matches {schema['pattern']}"] if "pattern" in schema else []
    return f" <span class=dim>{escape(', '.join(bounds))}</span>" if bounds else ""


def _default(schema: Json) -> str:
    value = schema.get("default")
    return "" if value is None or value in ("", []) else f"<span class=dim>default {escape(str(value))}</span>"


def _table(rows: Any) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=table><table>{lines}</table></div>" if lines else ""


def _text(text: str | None) -> str:
    """Text, with what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text or ""))


def _anchor(tag: str) -> str:
    return escape(tag.lower().replace(" ", "-"))
