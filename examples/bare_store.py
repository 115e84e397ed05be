"""The verbs beneath the app: enqueue, claim, heartbeat, settle, as a worker in any language would use them.

``python examples/bare_store.py`` runs by itself, on a store in memory.
"""

from __future__ import annotations

import asyncio

from dibs import id_to_text, open_store
from dibs.task import Duplicate, Enqueued, Heartbeat, Kind, NewTask, Progress, Settlement


async def main() -> None:
    async with await open_store("memory:") as store:
        task = NewTask(command="resize", payload=b'{"width": 320}', priority=9, key="img-42")
        # The key makes a repeat harmless: the second one is told of the first.
        [first, second] = await store.enqueue("default", [task, task])
        assert isinstance(first, Enqueued)
        assert isinstance(second, Duplicate)

        [lease] = await store.claim("default", ["resize"], lease_s=30, wait_s=5, worker="me")
        print(f"claimed {id_to_text(lease.id)}, attempt {lease.attempt}: {lease.payload.decode()}")

        # Sent every third of the lease while the work goes on; the answer tells whether somebody asked to cancel.
        beat = Heartbeat(tenant=lease.tenant, id=lease.id, token=lease.token, progress=Progress(1, 2))
        print(await store.heartbeat([beat]))

        # Only the token of this claim settles it, and only once: the same again is recognised.
        done = Settlement(tenant=lease.tenant, id=lease.id, token=lease.token, kind=Kind.COMPLETE, result=b'"ok"')
        print(await store.settle([done]))
        print(await store.settle([done]))

        [ended] = await store.get("default", [first.id])
        assert ended is not None
        assert ended.result is not None
        print(ended.status, ended.result.data)


if __name__ == "__main__":
    asyncio.run(main())
