"""``python -m tests.crash.producer STORE LOG SEED``: enqueues until it is killed.

Logs ``intended ID`` before a call and ``acknowledged ID`` after its answer.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from dibs.ids import new_id
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import Enqueued, NewTask
from tests.crash.lifeline import die_with_parent
from tests.crash.log import Log

TENANT = "crash"
COMMANDS = ("a", "b")
MAX_ATTEMPTS = 4
CALLERS = 4


async def main(url: str, log: Log, seed: int) -> None:
    """Several callers at once, so that a kill meets groups of calls in one transaction."""
    store = await open_store(url)
    await asyncio.gather(*(_produce(store, log, random.Random(seed * CALLERS + n)) for n in range(CALLERS)))


async def _produce(store: Store, log: Log, dice: random.Random) -> None:
    while True:
        tasks = [_task(dice) for _ in range(dice.choice([1, 1, 1, 5, 20]))]
        log.write(*(("intended", task.id.hex()) for task in tasks))
        outcomes = await store.enqueue(TENANT, tasks)
        log.write(*(("acknowledged", outcome.id.hex()) for outcome in outcomes if isinstance(outcome, Enqueued)))
        await asyncio.sleep(dice.uniform(0, 0.05))


def _task(dice: random.Random) -> NewTask:
    command = dice.choice(COMMANDS)
    key = f"k{dice.randrange(1_000)}" if dice.random() < 0.2 else None
    return NewTask(
        command=command,
        id=new_id(TENANT, command, key),
        key=key,
        payload=dice.randbytes(dice.choice([0, 10, 5_000])),
        priority=dice.randrange(10),
        delay_s=dice.choice([0, 0, 0, 0.3]),
        max_attempts=MAX_ATTEMPTS,
    )


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(sys.argv[1], Log(Path(sys.argv[2])), int(sys.argv[3])))
