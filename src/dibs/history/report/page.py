"""The page: the summary, our style and script, and the charts' library, in one file that may not reach for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import string
from importlib import resources
from pathlib import Path

import msgspec

from dibs.history.report.summary import Summary

_ASSETS = resources.files("dibs.history.report") / "assets"
_SCRIPTS = ("words.js", "data.js", "headline.js", "charts.js", "drawing.js", "tables.js", "page.js")


def write(summed: Summary, out: Path) -> Path:
    """Writes the page to `out`, whole or not at all, and returns its path."""
    page = render(summed)
    out.parent.mkdir(parents=True, exist_ok=True)
    half = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        half.write_text(page, encoding="utf-8")
        half.replace(out)
    finally:
        half.unlink(missing_ok=True)
    return out


def render(summed: Summary) -> str:
    """Returns the page. Whatever is in the summary is text there: it can neither end its element nor run."""
    style, library, script = _asset("page.css"), _asset("echarts/echarts.common.min.js"), _script()
    policy = (
        f"default-src 'none'; script-src {_allowed(library)} {_allowed(script)}; style-src {_allowed(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return string.Template(_asset("page.html")).substitute(
        policy=policy,
        title=html.escape(f"{summed.lake}: history"),
        style=style,
        library=library,
        script=script,
        data=_data(summed),
    )


def _data(summed: Summary) -> str:
    """JSON in which no character means anything to HTML."""
    text = msgspec.json.encode(summed).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _script() -> str:
    """Our script's files as one, in which each knows those before it."""
    return "\n".join(['"use strict";', *map(_asset, _SCRIPTS)])


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _allowed(text: str) -> str:
    """Names an inline script or style by its hash, as the page's policy does."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
