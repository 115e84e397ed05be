"""Log lines: one line for each event, as text or as JSON.

What callers sent is escaped (control characters, line breaks, terminal sequences, characters that turn the reading
direction, lone surrogates), so that nobody can forge a line or steer a terminal. What looks like a token is masked
wherever it stands; in doubt it hides too much rather than too little.

::

    2026-03-01T12:00:00.123Z INFO dibs.access request id=0195… method=POST route=/v1/tasks status=202 …
    {"time": "2026-03-01T12:00:00.123Z", "level": "INFO", "logger": "dibs.access", "message": "request", "id": "0195…"}
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal, TextIO

Format = Literal["text", "json"]
FORMATS: Final[tuple[Format, ...]] = ("text", "json")
LINE_MAX_CHARS = 16_384
"""What is longer is cut: a log is no place for payloads."""
KNOWN_MAX_CHARS = 256
MASK: Final = "***"

_ACCESS: Final = logging.getLogger("dibs.access")
#: The loggers of a server, which say what the level lets through; others are heard from warnings on.
_OURS: Final = ("dibs", "uvicorn")

# Every repetition has an end: a line that somebody made up to be slow to search is searched as fast as any.
_SECRETS: Final = re.compile(
    r"(?P<keep>\b(?:bearer|basic)\s{1,8})[^\s\"',;]+"
    # token=…, "secret": "…", X-Lease-Token: …
    r"|(?P<key>(?:token|secret|password|passwd|authorization|api[-_]?key)[\w-]{0,32}[\"']?\s{0,8}[=:]\s{0,8}"
    r"[\"']?(?:b[\"'])?(?:(?:bearer|basic)\s{1,8})?)(?!\s)[^\s\"',;&)}\]]+"
    # token@host and user:password@host
    r"|(?P<scheme>\b[a-z][a-z0-9+.-]{0,15}://)[^\s/?#\"']+@"
    # JWTs, static tokens of a server, lease tokens in base64
    r"|\beyJ[\w-]{5,2048}+(?:\.[\w-]{0,8192}+){1,4}"
    r"|\bdibs_[\w-]{32,}"
    r"|(?<![\w+/-])[\w+/-]{22}==(?!\w)",
    re.IGNORECASE,
)
# 16 bytes in hexadecimal, as lease tokens are written; as trace ids and some request ids are, too.
_HEX: Final = re.compile(r"(?<![0-9A-Za-z-])[0-9a-fA-F]{32}(?![0-9A-Za-z-])")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:{}@+*-]+")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def setup(form: Format = "text", level: int | str = logging.INFO, stream: TextIO | None = None) -> logging.Handler:
    """Has everything that is logged written to `stream` (stderr), in this form; again, it replaces what it did before.
    Returns the handler. The access log of uvicorn is off: ours has the tenant, and no raw path."""
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, _LineHandler):
            root.removeHandler(handler)
    handler = _LineHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root.addHandler(handler)
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"
    logging.getLogger("uvicorn.access").disabled = True
    return handler


def access(
    *,
    request_id: str,
    method: str,
    route: str,
    status: int,
    duration_s: float,
    size_bytes: int,
    client: str = "",
    tenant: str = "",
    subject: str = "",
    error: str = "",
) -> None:
    """Writes the line of a request. `route` is the template, never the path; `client` is the address that it came from;
    `tenant` and `subject` are empty for a caller that was not recognised; `error` is what the caller was not told."""
    if not _ACCESS.isEnabledFor(logging.INFO):
        return
    # Made by hand: finding out which line of the code it came from would cost more than all the rest.
    record = logging.LogRecord(_ACCESS.name, logging.INFO, "", 0, "request", None, None)
    fields = record.fields = {
        "id": request_id,
        "client": client,
        "method": method,
        "route": route,
        "status": status,
        "duration_ms": round(duration_s * 1000, 3),
        "bytes": size_bytes,
        "tenant": tenant,
        "subject": subject,
    }
    if error:
        fields["error"] = error
    _ACCESS.handle(record)


class _LineHandler(logging.StreamHandler[TextIO]):
    """Ours, to be found again."""


class TextLines(logging.Formatter):
    """Time, level, logger, message, and fields as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        parts = [_time_text(record), record.levelname, record.name, _message(record)]
        parts += [f"{name}={_quoted(value)}" for name, value in _fields(record).items() if value != ""]
        trace = _trace(record)
        if trace:
            parts.append(f"traceback={_quoted(escape(trace))}")
        return " ".join(parts)


class JsonLines(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line: dict[str, object] = {
            "time": _time_text(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        line.update((name, value) for name, value in _fields(record).items() if name not in line)
        trace = _trace(record)
        if trace:
            line["traceback"] = "\n".join(map(escape, trace.split("\n")))
        return json.dumps(line, default=str)


def mask(text: str, *, hexadecimal: bool = True) -> str:
    """Returns the text without what looks like a token. Without `hexadecimal`, 32 hexadecimal digits may stay: they
    are an id."""
    text = _SECRETS.sub(_masked, text)
    return _HEX.sub(MASK, text) if hexadecimal else text


def escape(text: str) -> str:
    """Returns the text with nothing in it but what can be printed, on one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _masked(match: re.Match[str]) -> str:
    at = "@" if match["scheme"] else ""
    return f"{match['keep'] or match['key'] or match['scheme'] or ''}{MASK}{at}"


def _escaped(char: str) -> str:
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _message(record: logging.LogRecord) -> str:
    if not record.args and isinstance(record.msg, str) and len(record.msg) <= KNOWN_MAX_CHARS:
        return _known_safe(record.msg)
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 a line that does not fit its arguments must not end in a traceback with both
        text = f"{record.msg} (its arguments do not fit)"
    # Escaped first: a line break inside a token must not save the rest of it.
    return mask(escape(text[:LINE_MAX_CHARS]))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return {name: _safe(name, value) if isinstance(value, str) else value for name, value in fields.items()}


def _safe(name: str, value: str) -> str:
    if name == "id":
        return mask(escape(value[:LINE_MAX_CHARS]), hexadecimal=False)
    # Routes, tenants and subjects come again and again.
    return _known_safe(value) if len(value) <= KNOWN_MAX_CHARS else mask(escape(value[:LINE_MAX_CHARS]))


@lru_cache(maxsize=1024)
def _known_safe(value: str) -> str:
    return mask(escape(value))


def _trace(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    lines = traceback.format_exception(record.exc_info[1])
    return mask("".join(lines)[:LINE_MAX_CHARS].rstrip("\n"))


def _quoted(value: object) -> str:
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _time_text(record: logging.LogRecord) -> str:
    return f"{_second_text(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=4)
def _second_text(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
