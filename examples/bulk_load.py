"""A hundred thousand tasks at once: all or nothing, and only once.

``python examples/bulk_load.py`` runs by itself, on a store in memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from dibs import Dibs

app = Dibs("memory:")


@app.task
def mail(to: str, subject: str) -> None:
    """Sends a mail."""


def addresses(count: int, *, broken_at: int | None = None) -> Iterator[str]:
    """What is to be loaded, read bit by bit; it may turn out to be broken."""
    for number in range(count):
        if number == broken_at:
            raise ValueError(f"line {number} cannot be read")
        yield f"reader{number}@example.org"


def main() -> None:
    # An input that breaks on the way leaves nothing behind.
    try:
        mail.map(addresses(100_000, broken_at=70_000), subject="News")
    except ValueError as error:
        print(f"nothing is enqueued: {error}")

    # Under a name the same input is enqueued once, however often the script is run.
    november = mail.options(load="news-2026-11")
    for _ in range(2):
        begin_s = time.perf_counter()
        batch = november.map(addresses(100_000), subject="News")
        stats = app.run(app.ask(lambda store: store.stats(app.tenant)))
        print(f"{len(batch):,} tasks in {time.perf_counter() - begin_s:.2f} s; {stats.total.ready:,} are ready")


if __name__ == "__main__":
    main()
