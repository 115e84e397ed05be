"""JSON that is judged by its bytes is judged as if it had been decoded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dibs.server.http.json_text import DECODED_MAX_BYTES, check_json, is_deeper

# In front of JSON it changes nothing, but its length.
PADDING = b" " * DECODED_MAX_BYTES

PIECES = (
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b",",
        b":",
        b'"a":',
        b"true",
        b"null",
        b" ",
        b"\n",
        b"\x1f",
        b"a",
        b"\xc3",
        b"\xa9",
    ),
    *(b"\\", b"\\\\", b'\\"', b"\\u", b"d834", b"dd1e"),
    *(b"1", b"0", b"-", b"e", b".", b"E+", b"999", b"e400", b"9" * 320),
)
TEXTS = st.text(alphabet='[]{}"\\a,:é\n')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def refused_by(check: Any, data: bytes) -> bool:
    """Whether something raises what a decoder may raise."""
    try:
        check(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return True
    return False


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
@example(b"1e999")
@example(b"[1.5, -1e309]")
@example(b"9" * 310 + b".5")
@example(b"9" * 5_000)
@example(b"9" * 250 + b"e99")
@example(b"1e+0000000400")
@example(b'["1e999", "\\"1e999"]')
@example(b'["\\\\", 1e999]')
@example(b'"\\ud834\\udd1e"')
@example(b'"\\ud834"')
@example(b'"\xff"')
@example(b"[" * 100_000)
@example(b"[" * 100_000 + b"]" * 100_000)
def test_what_cannot_be_decoded_is_refused(data: bytes) -> None:
    """What is wrong is refused, and what is right is not, however long it is."""
    expected = refused_by(msgspec.json.decode, data)
    assert refused_by(check_json, PADDING + data) == expected
    assert refused_by(check_json, data) == expected


@given(VALUES, st.booleans())
def test_what_can_be_decoded_is_accepted(value: Any, ascii_only: bool) -> None:
    """Any value passes, in whichever way its text is written."""
    check_json(PADDING + json.dumps(value, ensure_ascii=ascii_only).encode())


@pytest.mark.parametrize("number", [b"1e308", b"1e-999", b"0e999", b"-1.5E+300", b"9" * 309, b"0." + b"0" * 400 + b"1"])
def test_long_numbers_that_a_double_holds(number: bytes) -> None:
    """A closer look finds nothing wrong with them."""
    check_json(PADDING + b'["1e999", ' + number + b"]")


def test_what_was_skipped_is_not_skipped_again() -> None:
    """Of that, only the bytes and the numbers are left to judge."""
    for wrong in (b'"\xff"', b"[1e999]"):
        assert refused_by(lambda data: check_json(data, skipped=True), PADDING + wrong)


def depth(value: Any) -> int:
    """How deeply lists and objects are nested."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(0, 8), st.booleans())
@example(["]" * 10 + '"', {'"[[[\\': [[["\\"]]]}], 4, True)
@example([[], [], [[]]], 2, True)
def test_depth(value: Any, levels: int, ascii_only: bool) -> None:
    """What stands in strings does not count, and nothing is walked through."""
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert is_deeper(data, levels) == (depth(value) > levels)
