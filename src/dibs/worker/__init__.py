"""The worker: claims tasks, runs their handlers, settles them.

=============  ======================================================================================================
worker.py      its life: what it starts, how it drains and stops
claiming.py    takes tasks for a lane, never more than the lane has free slots
running.py     runs one task: a short pipeline from a lease to how it ended
lanes.py       where handlers run: an event loop, threads
processes.py   where handlers run that keep a core busy; ``child.py`` is the other end
settling.py    batches of outcomes back to the store
tending.py     heartbeats, sweeps, registration
voice.py       tells listeners
link.py        the connection to a store, opened again when it breaks
supervisor.py  several worker processes, and restarts when code changes
parent.py      what the processes it starts know of it
=============  ======================================================================================================
"""

from __future__ import annotations

from dibs.worker.worker import Summary, Worker, WorkerOptions

__all__ = ["Summary", "Worker", "WorkerOptions"]
