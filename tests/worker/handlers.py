"""Handlers that run in processes of their own: they must be found by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from dibs import Dibs, Fail, Retry, current
from dibs.listeners import Outcome
from dibs.retry import Backoff

app = Dibs("memory:")
NOW = Backoff(kind="fixed", base_s=0, jitter="none")


@app.task(run_in="process", backoff=NOW, max_attempts=2)
def echo(value: Any = None) -> Any:
    """Returns what it is given."""
    print("what is printed does not disturb")
    return value


@app.task(run_in="process")
async def later(value: int) -> int:
    """A coroutine function."""
    return value + 1


@app.task(run_in="process")
def who() -> list[Any]:
    """Tells where it runs."""
    task = current()
    return [os.getpid(), os.getppid(), task.attempt, task.id, task.time_left_s is not None]


@app.task(run_in="process", backoff=NOW, max_attempts=2)
def end(how: str) -> str:
    """Ends its process, or tries to, in the first attempt."""
    if current().attempt > 1:
        return "second"
    if how == "exit":
        os._exit(7)
    if how == "system exit":
        sys.exit(7)
    os.kill(os.getpid(), int(how))
    time.sleep(0.2)
    return "survived"


@app.task(run_in="process", backoff=NOW)
def tell(how: str) -> None:
    """Ends in other ways than returning."""
    raise {"fail": Fail("NO", "never"), "retry": Retry(delay_s=60), "error": ValueError("odd")}[how]


@app.task(run_in="process")
def reads() -> list[str]:
    """Looks for input, itself and in a program that it starts."""
    return [sys.stdin.read(), subprocess.run(["cat"], capture_output=True, text=True, check=True).stdout]


@app.task(run_in="process", lease_s=1)
def works(seconds: float) -> int:
    """Takes its time and tells how far it is."""
    for step in range(10):
        current().progress(step, 10, "working")
        time.sleep(seconds / 10)
    return current().attempt


@app.task(run_in="process")
def progresses(done: Any) -> str:
    """Tells an odd progress."""
    current().progress(done)
    return "done"


@app.task(run_in="process")
def hooked() -> str:
    """A hook changes what it returns."""
    return "plain"


@app.task(run_in="process")
def terminated_child() -> int:
    """Starts a program that ends when it is told to."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.terminate()
        return process.wait(20) == -signal.SIGTERM


@app.after
def change(task: Any, outcome: Outcome) -> Outcome | None:
    """Changes one result."""
    return Outcome("changed") if task.command.endswith("hooked") else None


@app.task(run_in="process", backoff=NOW)
def leaves_a_child(seconds: float) -> None:
    """Starts a process that inherits everything, and dies."""
    if os.fork() == 0:
        # It ends by itself, or with what is left of its group.
        time.sleep(min(seconds, 5))
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(run_in="process", backoff=NOW)
def odd_progress() -> str:
    """Tells progress with a note that UTF-8 cannot carry."""
    current().progress(1, 2, "caf\udce9")
    return "done"
