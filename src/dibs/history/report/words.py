"""Numbers, durations and times as people read them. The page's script says them the same way."""

from __future__ import annotations

from datetime import datetime


def count_text(number: float) -> str:
    """``12,304``."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count_text(number)} {noun}{'' if number == 1 else 's'}"


def duration_text(ms: float) -> str:
    """``38 ms``, ``1.2 s``, ``42 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if ms < 999.5:
        return f"{ms:.0f} ms"
    if ms < 9_950:
        return f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    seconds = round(ms / 1000)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return _pair(seconds // 60, "min", seconds % 60, "s")
    minutes = round(seconds / 60)
    if minutes < 1440:
        return _pair(minutes // 60, "h", minutes % 60, "min")
    hours = round(minutes / 60)
    return _pair(hours // 24, "d", hours % 24, "h")


def time_text(at: datetime) -> str:
    """``Sat 14 Nov 14:00``."""
    return f"{at:%a} {at.day} {at:%b %H:%M}"


def share_text(share: float) -> str:
    """``99.2 %``: never rounded up to all."""
    if share >= 1:
        return "100 %"
    return f"{min(share * 100, 99.9):.1f} %"


def printable(text: str) -> str:
    """Returns `text` in one line, with a question mark for everything that is not to be shown."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _pair(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit} {small} {small_unit}" if small else f"{large} {large_unit}"
