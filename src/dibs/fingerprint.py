"""A short name for a kind of fault: errors that differ only in ids, numbers, addresses or quoted values share it."""

from __future__ import annotations

import re
from hashlib import blake2b

from dibs.task import ErrorInfo

ERROR_LINE_MAX_CHARS = 200

_VARIABLE = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}"  # UUIDs
    r"|0x[0-9a-fA-F]+"  # addresses
    r"|\b[0-9a-fA-F]{12,}\b"  # digests
    r"|'[^']*'|\"[^\"]*\""  # quoted values
    r"|\d+"
)


def fingerprint(error: ErrorInfo) -> str:
    """Returns 16 hexadecimal digits for the error's type and the shape of its first line."""
    line = error.message.strip().split("\n", 1)[0][: 2 * ERROR_LINE_MAX_CHARS]
    shape = f"{error.type}\0{_VARIABLE.sub('?', line)}"
    return blake2b(shape.encode(errors="replace"), digest_size=8).hexdigest()
