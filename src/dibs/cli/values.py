"""Payloads and results as people read them."""

from __future__ import annotations

from typing import Any

import msgspec

from dibs import codec
from dibs.cli.shapes import value_shape
from dibs.errors import CodecError

SHOWN_MAX_CHARS = 4_000


def value_text(data: bytes, codec_name: str) -> str:
    """Returns a payload or result as text: JSON where it can be read, text where it is text, else its size."""
    if not data:
        return "(empty)"
    if codec_name == "raw":
        return _bytes_text(data)
    try:
        value: Any = codec.decode(data, codec_name)
    except CodecError:
        return f"{_bytes_text(data)} (codec {codec_name})"
    text = value if isinstance(value, str) and codec_name not in ("json", "msgpack") else _json(data, codec_name)
    return _cut(text)


def _json(data: bytes, codec_name: str) -> str:
    encoded = msgspec.json.encode(value_shape(data, codec_name))
    return msgspec.json.format(encoded, indent=2 if len(encoded) > 60 else -1).decode()


def _bytes_text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"{len(data)} bytes, beginning {data[:16].hex(' ')}"
    return _cut(text)


def _cut(text: str) -> str:
    if len(text) <= SHOWN_MAX_CHARS:
        return text
    return f"{text[:SHOWN_MAX_CHARS]}… ({len(text):,} characters; --json shows all)"
