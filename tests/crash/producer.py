"""``python -m tests.crash.producer STORE LOG SEED``: enqueues and loads until it is killed.

Logs ``intended ID`` before a call and ``acknowledged ID`` after its answer; of a load, ``committing ID LOAD`` for every
row before its commit, and ``committed LOAD`` after the answer. Rows that are staged and never named are not told of.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from msgspec.structs import replace

from dibs.ids import new_id
from dibs.stores import open_store
from dibs.stores.batches import row_ids
from dibs.stores.protocol import Store
from dibs.task import Committed, Enqueued, NewTask
from tests.crash.lifeline import die_with_parent
from tests.crash.log import Log

TENANT = "crash"
COMMANDS = ("a", "b")
MAX_ATTEMPTS = 4
CALLERS = 4
LOADERS = 2


async def main(url: str, log: Log, seed: int) -> None:
    """Several callers at once, so that a kill meets groups of calls in one transaction."""
    store = await open_store(url)
    dice = [random.Random(seed * (CALLERS + LOADERS) + n) for n in range(CALLERS + LOADERS)]
    await asyncio.gather(
        *(_produce(store, log, one) for one in dice[:CALLERS]), *(_load(store, log, one) for one in dice[CALLERS:])
    )


async def _produce(store: Store, log: Log, dice: random.Random) -> None:
    while True:
        tasks = [_task(dice) for _ in range(dice.choice([1, 1, 1, 5, 20]))]
        log.write(*(("intended", task.id.hex()) for task in tasks))
        outcomes = await store.enqueue(TENANT, tasks)
        log.write(*(("acknowledged", outcome.id.hex()) for outcome in outcomes if isinstance(outcome, Enqueued)))
        await asyncio.sleep(dice.uniform(0, 0.05))


async def _load(store: Store, log: Log, dice: random.Random) -> None:
    """Stages more than it commits, as attempts that fail do, and now and then repeats a commit."""
    while True:
        name = new_id().hex()
        named: list[bytes] = []
        ids: list[bytes] = []
        for _ in range(dice.choice([1, 2, 5])):
            chunk_id = new_id()
            rows = _rows(dice)
            await store.stage(TENANT, chunk_id, rows)
            if dice.random() < 0.8:
                named.append(chunk_id)
                ids += row_ids(TENANT, chunk_id, rows)
        log.write(*(("committing", task_id.hex(), name) for task_id in ids))
        assert await store.commit_load(TENANT, name, 7, named) == Committed(len(ids))
        log.write(("committed", name))
        if dice.random() < 0.3:
            assert await store.commit_load(TENANT, name, 7, named) == Committed(0, already=True)
        await asyncio.sleep(dice.uniform(0, 0.3))


def _rows(dice: random.Random) -> list[NewTask]:
    """Rows of a few kinds, so that some stand in blocks of many."""
    kinds = [replace(_task(dice), id=b"", key=None) for _ in range(dice.choice([1, 1, 3]))]
    return [
        replace(dice.choice(kinds), key=f"k{dice.randrange(1_000)}" if dice.random() < 0.1 else None)
        for _ in range(dice.choice([1, 5, 30]))
    ]


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
