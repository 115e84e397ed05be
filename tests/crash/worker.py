"""``python -m tests.crash.worker STORE LOG SEED``: claims and settles until it is killed.

Logs ``delivered ID TOKEN CLAIM_ID`` when a claim was answered, ``releasing ID TOKEN`` before a release, and
``settled ID TOKEN KIND`` when a settlement was accepted.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from msgspec.structs import replace

from dibs.ids import new_id
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import ErrorInfo, Heartbeat, Kind, Lease, Settled, Settlement
from tests.crash.lifeline import die_with_parent
from tests.crash.log import Log
from tests.crash.producer import COMMANDS, TENANT

CALLERS = 4
LEASE_S = 1.0


async def main(url: str, log: Log, seed: int) -> None:
    """Several slots and a sweep, as a worker has them."""
    store = await open_store(url)
    slots = (_work(store, log, random.Random(seed * CALLERS + n)) for n in range(CALLERS))
    await asyncio.gather(_sweep(store), *slots)


async def _sweep(store: Store) -> None:
    while True:
        await store.sweep()
        await asyncio.sleep(0.2)


async def _work(store: Store, log: Log, dice: random.Random) -> None:
    while True:
        claim_id = new_id()
        limit = dice.choice([1, 1, 5, 50])
        leases: list[Lease] = []
        for _ in range(dice.choice([1, 1, 1, 2])):  # now and then the answer is asked for again
            leases = await store.claim(
                TENANT, dice.sample(COMMANDS, 2), limit=limit, lease_s=LEASE_S, wait_s=0.5, claim_id=claim_id
            )
            log.write(*(("delivered", lease.id.hex(), lease.token.hex(), claim_id.hex()) for lease in leases))
        if dice.random() < 0.2:
            await store.heartbeat([Heartbeat(tenant=TENANT, id=lease.id, token=lease.token) for lease in leases])
        items = [item for lease in leases if (item := _settlement(lease, dice)) is not None]
        log.write(*(("releasing", item.id.hex(), item.token.hex()) for item in items if item.kind is Kind.RELEASE))
        outcomes = await store.settle(items)
        log.write(
            *(
                ("settled", item.id.hex(), item.token.hex(), item.kind)
                for item, outcome in zip(items, outcomes, strict=True)
                if isinstance(outcome, Settled)
            )
        )


def _settlement(lease: Lease, dice: random.Random) -> Settlement | None:
    """How the work went; None: the worker forgot it, and the lease must run out."""
    luck = dice.random()
    release = Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=Kind.RELEASE)
    if luck < 0.7:
        return replace(release, kind=Kind.COMPLETE, result=lease.token, codec="raw")
    if luck < 0.8:
        return replace(release, kind=Kind.RETRY, delay_s=dice.choice([0.0, 0.2]), error=ErrorInfo("Boom"))
    if luck < 0.85:
        return replace(release, kind=Kind.FAIL)
    return release if luck < 0.95 else None


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(sys.argv[1], Log(Path(sys.argv[2])), int(sys.argv[3])))
