"""The app of the demo: the tasks of a small shop. A worker runs it by name, as it would run yours::

    dibs worker dibs.demo.shop:app --url DIR

What goes wrong in here goes wrong on command: a file beside the store says that the bank is closed, or that a disk
hangs, so that the story can wait for a fault instead of hoping for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from dibs import Backoff, CurrentTask, Dibs, Fail, current

app = Dibs()

WORLD = Path(app.settings.url).parent
BANK_CLOSED = WORLD / "bank-closed"
DISK_HANGS = WORLD / "disk-hangs"
RUNS = WORLD / "runs.log"

SOON = Backoff(base_s=0.2, factor=2, cap_s=1, jitter="equal")
LEASE_S = 2.0
"""Of films: short, so that the demo need not wait long for one of them to run out. The default is 30 s."""


@app.before
def note(task: CurrentTask) -> None:
    """Writes a line for each run: the handlers' own record, beside the queue's."""
    # Only where the demo made the file; a single write to the end of it is not torn by other processes.
    with contextlib.suppress(FileNotFoundError):
        file = os.open(RUNS, os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{task.id} {task.attempt}\n".encode())
        os.close(file)


@app.task(name="thumbnail")
async def thumbnail(photo: int) -> str:
    """Many small tasks."""
    await asyncio.sleep(0.05)
    return f"{photo}.small.jpg"


@app.task(name="welcome")
async def welcome(user: str) -> str:
    """Enqueued with a key: one mail, however often the form was sent."""
    return f"Welcome, {user}!"


@app.task(name="reminder")
async def reminder(cart: int) -> str:
    """Enqueued with a delay."""
    return f"Cart {cart} is still waiting for you."


@app.task(name="webhook", backoff=SOON)
def webhook(order: int) -> int:
    """A plain function, run in a thread. The other side answers the third attempt only."""
    if current().attempt < 3:
        raise ConnectionError(f"503 for order {order}")
    return 200


@app.task(name="primes", run_in="process")
def primes(start: int, stop: int) -> int:
    """Keeps a core busy, and so it runs in a process of its own."""
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(max(start, 2), stop))


@app.task(name="film", lease_s=LEASE_S, max_attempts=50)
async def film(title: str, scenes: int = 8) -> str:
    """Long, and tells how far it is. While the disk hangs, it does not get beyond the second scene."""
    for scene in range(scenes):
        await asyncio.sleep(0.1)
        current().progress(scene, scenes)
        while scene == 2 and DISK_HANGS.exists():  # noqa: ASYNC110 no event tells it
            await asyncio.sleep(0.1)
    return f"{title}.mp4"


@app.task(name="charge", max_attempts=2, backoff=SOON)
async def charge(order: int, card: str = "4242") -> str:
    """Fails while the bank is closed, and for a void card whenever it is tried."""
    if card == "void":
        raise Fail("CARD_VOID", "this card will not do, now or later")
    if BANK_CLOSED.exists():
        raise ConnectionError("the bank does not answer")
    return f"order {order} is paid"


@app.task(name="newsletter")
async def newsletter(edition: str) -> str:
    """Enqueued for later."""
    return f"{edition} is out"


@app.task(name="price")
async def price(item: str, count: int = 1) -> int:
    """Called, and its answer waited for."""
    return count * sum(item.encode())
