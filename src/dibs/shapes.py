"""The JSON of an event, as it leaves this program: from the command line, from a server, into a file.

A time is ISO 8601 text in UTC with milliseconds, and its name ends in ``_at`` (or is ``at``) where the value's ends in
``_ms``. A field that has no value is null, never left out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dibs.ids import id_to_text
from dibs.task import Event

Json = dict[str, Any]


def event_shape(event: Event) -> Json:
    """A transition, as the journal keeps it."""
    return {
        "cursor": event.cursor.hex(),
        "at": time_text(event.at_ms),
        "kind": event.kind.value,
        "tenant": event.tenant,
        "id": id_to_text(event.id),
        "command": event.command,
        "attempt": event.attempt,
        "worker": event.worker or None,
        "reason": event.reason or None,
        "error_type": event.error_type or None,
        "error_line": event.error_line or None,
        "fingerprint": event.fingerprint or None,
    }


def time_text(at_ms: int | None) -> str | None:
    """Returns a time as ISO 8601 in UTC, to the millisecond."""
    if at_ms is None:
        return None
    try:
        at = datetime.fromtimestamp(at_ms // 1000, UTC)
    except (OverflowError, ValueError, OSError):  # past the year 9999
        return f"@{at_ms}ms"
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03d}Z"
