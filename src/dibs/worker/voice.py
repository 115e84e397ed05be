"""Tells listeners, in a thread of theirs."""

from __future__ import annotations

import logging
import queue
import threading

from dibs.listeners import Listeners, TaskEvent

log = logging.getLogger("dibs.worker")


class Voice:
    """A slow listener holds up the events behind it, and nothing else. The thread is a daemon: the interpreter would
    wait for a listener that never returns."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Listeners, TaskEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dibs-listeners", daemon=True)
        self._thread.start()

    def say(self, listeners: Listeners, event: TaskEvent) -> None:
        """Has listeners told."""
        self._events.put((listeners, event))

    def end(self, patience_s: float) -> None:
        """Waits until they have heard everything, but not longer than that."""
        self._events.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            log.warning("listeners are still busy; what they have not heard yet, they will not hear")

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            listeners, event = item
            try:
                listeners.tell(event)
            except BaseException:
                log.exception("a listener to %s raised; the task is not affected", event.kind)
