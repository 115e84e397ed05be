"""An app among threads and event loops."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dibs import Dibs
from dibs.errors import StoreClosed
from tests.app.conftest import close_all


def test_a_close_tells_who_still_waits(url: str) -> None:
    """A call in another thread is not left waiting for ever when the app is closed under it."""
    app = Dibs(url)
    work = app.task(name="work")(lambda: None)
    handle = work.enqueue()
    told: list[StoreClosed] = []

    def wait() -> None:
        try:
            handle.wait(600)
        except StoreClosed as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    app.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert "closed" in str(told[0])


def test_loops_of_many_threads_come_and_go(url: str) -> None:
    """Threads that each run one event loop after the other find the lanes of ended loops at the same time."""
    app = Dibs(url)
    work = app.task(name="work")(lambda value: value)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as pool:
            done = [pool.submit(lambda: asyncio.run(work.aenqueue(1))) for _ in range(60)]
            assert len({one.result().id for one in done}) == 60
    finally:
        sys.setswitchinterval(before)
        close_all(app)
