"""JSON that is passed on and not used: whether everybody can read it, found out without making its values.

A megabyte of `[],` is a third of a million lists: made, walked and thrown away, they keep everybody else waiting. Here
all of the work is done by a few passes over the bytes, none of them in Python, each in a time that grows with the
length alone.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Final

import msgspec

DECODED_MAX_BYTES = 4 << 10
"""What is no longer than that is simply decoded: that is quicker than all the passes."""

_skip: Final = msgspec.json.Decoder(msgspec.Raw).decode
# Of these a number has at least five if it can be too large for a double. Possessive: what matched is not tried again.
_long_numbers: Final = re.compile(rb"[-+.0-9eE]{5,}+").findall
_DIGITS_AS_ZERO: Final = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE: Final = (b"e000", b"e+000", b"0" * 200)
"""One of these, all digits written as 0, is in every number that is too large: an exponent under 100 takes one of under
200 digits to no more than 1e299."""
_ALL_BUT_QUOTES_AND_BRACKETS: Final = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def check_json(data: bytes, *, skipped: bool = False) -> None:
    """Raises what `msgspec.json.decode` would raise, if that would. `skipped`: msgspec has found it to be JSON, and
    passed over it as `Raw`."""
    if len(data) <= DECODED_MAX_BYTES:
        msgspec.json.decode(data)
        return
    if not skipped:
        _skip(data)
    # Skipping finds everything that is wrong, but for bytes that are not UTF-8 and numbers that no double holds.
    data.decode()
    digits = data.translate(_DIGITS_AS_ZERO)
    if any(large in digits for large in _LARGE):
        msgspec.json.decode(b"[" + b",".join(_long_numbers(_without_strings(_unescaped(data)))) + b"]")


def is_deeper(data: bytes, levels: int) -> bool:
    """Whether the lists and objects of JSON are nested over so many levels."""
    if data.count(b"[") + data.count(b"{") <= levels:
        return False
    brackets = _without_strings(_unescaped(data).translate(None, _ALL_BUT_QUOTES_AND_BRACKETS))
    return max(accumulate(memoryview(brackets.translate(_STEPS)).cast("b")), default=0) > levels


def _unescaped(data: bytes) -> bytes:
    """Without escaped quotes. Pairs of backslashes go first, so that one before a quote is certain to escape it."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data


def _without_strings(data: bytes) -> bytes:
    """What stands outside the quotes of JSON that has no more escaped ones."""
    # Two quotes side by side, whether they are an empty string or where two meet, change nothing for anything else.
    return b"".join(data.replace(b'""', b"").split(b'"')[::2])
