"""An app whose worker the tests run beside a lake that follows it."""

from __future__ import annotations

from dibs import Backoff, Dibs, current

app = Dibs()


@app.task(name="live.work", max_attempts=2, backoff=Backoff(kind="fixed", base_s=0.05))
def work(number: int) -> int:
    """Takes no time; some tasks fail at first, some for good."""
    if number % 5 == 0 and (current().attempt == 1 or number % 10 == 0):
        raise OSError(f"disk {number} is full")
    return number
