"""The fingerprint of a fault: the same for the same fault, whoever it hit."""

from __future__ import annotations

import pytest

from dibs.fingerprint import fingerprint
from dibs.task import ErrorInfo


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 17 not found", "order 4711 not found"),
        ("no user 0198b7c2-7f00-7000-8000-000000000001", "no user 0198b7c2-7f00-7000-8000-0000000000ff"),
        ("object at 0x7f3a2c", "object at 0x55d0ff"),
        ("no such file: '/tmp/a'", "no such file: '/var/b'"),
        ("timeout\nfirst trace", "timeout\nsecond trace"),
    ],
)
def test_what_varies_is_left_out(one: str, other: str) -> None:
    """Numbers, ids, addresses, quoted values and later lines do not tell two faults apart."""
    assert fingerprint(ErrorInfo("E", one)) == fingerprint(ErrorInfo("E", other))


def test_different_faults_differ() -> None:
    """The type and the words of the first line tell faults apart."""
    faults = [ErrorInfo("E", "not found"), ErrorInfo("F", "not found"), ErrorInfo("E", "refused"), ErrorInfo("E")]
    assert len({fingerprint(fault) for fault in faults}) == len(faults)


def test_any_text_has_one() -> None:
    """Text that cannot be encoded does not make a failure fail again."""
    assert len(fingerprint(ErrorInfo("E", "\udc80"))) == 16
