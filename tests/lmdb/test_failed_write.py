"""A commit that fails: nobody knows what is on the disk, so nothing goes on until the store is opened again."""

from __future__ import annotations

from pathlib import Path

from dibs.stores import open_local
from dibs.testing.contract.steps import TENANT, assert_counts, put
from tests.lmdb.processes import Children

HIT_THE_LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

async def attempt(call):
    try:
        return await call
    except DibsError as error:
        return error.code

async def main():
    store = await open_local(URL)
    acknowledged = []
    async def enqueue(size):
        task = NewTask(command="work", id=new_id(), payload=b"x" * size)
        outcome = await attempt(store.enqueue("default", [task]))
        if isinstance(outcome, str):
            return outcome
        assert outcome == [Enqueued(task.id)], outcome
        acknowledged.append(task.id.hex())
    for _ in range(20):
        await enqueue(100)
    [lease] = await store.claim("default", ["work"])
    size = os.stat(os.path.join(URL, "data.mdb")).st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, resource.RLIM_INFINITY))
    first = None
    while first is None:
        first = await enqueue(50_000)
    settled = Settlement(tenant="default", id=lease.id, token=lease.token, kind=Kind.COMPLETE)
    later = [
        await enqueue(1),
        await attempt(store.settle([settled])),
        await attempt(store.cancel("default", [lease.id])),
    ]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    later.append(await enqueue(1))
    seen = await store.get("default", [bytes.fromhex(one) for one in acknowledged])
    await store.close()
    again = await open_local(URL)
    store = again
    reopened = await enqueue(1)
    tell(first=first, later=later, seen=all(seen), reopened=reopened, acknowledged=acknowledged)
    await again.close()
asyncio.run(main())
"""


async def test_a_failed_write_stops_the_store(directory: Path, children: Children) -> None:
    """The call that failed and all later ones say StoreUnavailable, reads go on, and after reopening everything that
    was acknowledged is there."""
    told = children.start(HIT_THE_LIMIT, directory).finish()
    assert told["first"] == "store_unavailable"
    assert told["later"] == ["store_unavailable"] * 4
    assert told["seen"]
    assert told["reopened"] is None
    async with await open_local(str(directory)) as store:
        tasks = await store.get(TENANT, [bytes.fromhex(one) for one in told["acknowledged"]])
        assert None not in tasks
        assert (await store.doctor()).clean
        await put(store)
        await assert_counts(store)
