"""What the capacity table means, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from msgspec import Struct

from dibs.history.report.words import duration_text, plural, time_text

Kind = Literal["short", "bursts", "ample", "enough"]
"""`short`: more workers were needed. `bursts`: tasks waited though there were enough by the hour. `ample`: even the
busiest hour needed less than half of what ran."""

ORDER: Sequence[Kind] = ("short", "bursts", "ample", "enough")


class Hour(Struct, frozen=True):
    """An hour of a queue, as the capacity table has it."""

    at: datetime
    needed: int | None
    ran: int
    wait_p95_ms: float | None


class Advice(Struct, frozen=True):
    """What one queue's hours come to. Names stand in backticks."""

    queue: int
    kind: Kind
    text: str
    hours: int
    """In how many hours it was so."""
    rank: float
    """How much it matters among those of its kind."""


def advise(queue: int, name: str, hours: Sequence[Hour], target_wait_s: float, share: float) -> Advice | None:
    """Returns what to say of a queue; None if nothing can be: no delivery of it ended."""
    known = [(hour, hour.needed) for hour in hours if hour.needed is not None]
    if not known:
        return None
    late = [(hour, needed) for hour, needed in known if (hour.wait_p95_ms or 0) > target_wait_s * 1000]
    short = [(hour, needed) for hour, needed in late if needed > hour.ran]
    aim = f"a p{share * 100:g} wait under {duration_text(target_wait_s * 1000)}"
    if short:
        worst, needed = max(short, key=lambda one: (one[1] - one[0].ran, one[0].wait_p95_ms or 0))
        text = (
            f"At {time_text(worst.at)} {name} needed {plural(needed, 'worker')} for {aim}; {worst.ran} ran, and p95 "
            f"was {duration_text(worst.wait_p95_ms or 0)}.{_often(len(short), len(known), 'It was short')}"
        )
        return Advice(queue, "short", text, len(short), sum(needed - hour.ran for hour, needed in short))
    if late:
        worst, needed = max(late, key=lambda one: one[0].wait_p95_ms or 0)
        text = (
            f"At {time_text(worst.at)} {name} had a p95 wait of {duration_text(worst.wait_p95_ms or 0)} although "
            f"{worst.ran} ran and {needed} would do for an even flow: its tasks come in bursts, or its workers came "
            f"late.{_often(len(late), len(known), 'It was so')}"
        )
        return Advice(queue, "bursts", text, len(late), len(late))
    busiest, most = max(known, key=lambda one: one[1])
    ran = max(hour.ran for hour, _ in known)
    if ran >= 2 * most and ran - most > 1:
        text = (
            f"{name} had more than enough: its busiest hour, {time_text(busiest.at)}, needed "
            f"{plural(most, 'worker')} for {aim}; up to {ran} ran."
        )
        return Advice(queue, "ample", text, len(known), ran - most)
    text = (
        f"{name} had enough: its hourly p95 wait stayed within {duration_text(target_wait_s * 1000)}. Its busiest "
        f"hour, {time_text(busiest.at)}, called for {plural(most, 'worker')}; {busiest.ran} ran."
    )
    return Advice(queue, "enough", text, len(known), most)


def _often(some: int, of: int, what: str) -> str:
    return f" {what} in {some} of {plural(of, 'hour')}." if some > 1 else ""
