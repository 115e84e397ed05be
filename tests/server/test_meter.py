"""A store tells its meter of every commit, and of every lease that ran out, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from dibs.clock import ManualClock
from dibs.settings import Settings
from dibs.stores import open_local
from dibs.stores.sharded import shard
from dibs.testing.contract.steps import COMMAND, TENANT, put, put_many
from tests.shards.faults import Faults, open_faulty

RELAXED = Settings(durability="relaxed")
URLS = ["memory:", "lmdb", "shards:memory:meter?n=3", "shards:lmdb"]


class Tally:
    """A meter that remembers everything."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.expired: Counter[tuple[str, str]] = Counter()

    def committed(self, calls: int, expired: Mapping[tuple[str, str], int]) -> None:
        """Adds up."""
        self.sizes.append(calls)
        self.expired.update(expired)


def url_of(kind: str, tmp_path: Path) -> str:
    """A new store of this kind."""
    return {"lmdb": f"lmdb:{tmp_path}/one", "shards:lmdb": f"shards:{tmp_path}/set?n=2"}.get(kind, kind)


@pytest.mark.parametrize("kind", URLS)
async def test_every_lease_that_ran_out_is_counted_once(kind: str, tmp_path: Path) -> None:
    """Those that go back to ready and those that are out of attempts, whether a claim or the sweep finds them."""
    clock = ManualClock()
    async with await open_local(url_of(kind, tmp_path), clock=clock, settings=RELAXED) as store:
        store.meter = tally = Tally()
        await put_many(store, 5)
        await put_many(store, 3, "once", max_attempts=1)
        await put_many(store, 2, "held")
        for command in (COMMAND, "once", "held"):
            assert await store.claim(TENANT, [command], limit=10, lease_s=3600 if command == "held" else 5)
        clock.advance(6)
        assert len(await store.claim(TENANT, [COMMAND], limit=10, lease_s=3600)) == 5
        swept = await store.sweep()
        assert swept.expired == 3
        await store.sweep()
        assert tally.expired == {(TENANT, COMMAND): 5, (TENANT, "once"): 3}


async def test_a_group_is_told_by_how_many_calls_share_its_commit(tmp_path: Path) -> None:
    """All calls are in some group, and callers at once share one."""
    async with await open_local(tmp_path / "store", settings=RELAXED) as store:
        store.meter = tally = Tally()
        await asyncio.gather(*(put(store) for _ in range(64)))
        assert sum(tally.sizes) == 64
        assert len(tally.sizes) < 64


@pytest.mark.parametrize("kind", ["memory:", "lmdb"])
async def test_what_writes_nothing_is_no_commit(kind: str, tmp_path: Path) -> None:
    """A claim that finds nothing and a look are not told."""
    async with await open_local(url_of(kind, tmp_path), settings=RELAXED) as store:
        store.meter = tally = Tally()
        await store.claim(TENANT, [COMMAND])
        await store.stats(TENANT)
        assert tally.sizes == []


async def test_a_meter_that_fails_is_dropped_and_the_store_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody's task is lost because somebody could not count it."""

    class Broken:
        def committed(self, calls: int, expired: Mapping[tuple[str, str], int]) -> None:
            raise ValueError("no")

    async with await open_local(tmp_path / "store", settings=RELAXED) as store:
        store.meter = Broken()
        await put(store)
        await put(store)
        assert store.meter is None
        assert (await store.stats(TENANT)).total.ready == 2
    assert "no longer told" in caplog.text


async def test_a_meter_goes_with_the_store_it_was_given_to() -> None:
    """Another store of the process, on the same data, is not measured for one that was closed."""
    async with await open_local("memory:shared-meter") as other:
        async with await open_local("memory:shared-meter") as store:
            store.meter = tally = Tally()
            await put(other)
        await put(other)
        assert tally.sizes == [1]
        assert other.meter is None


async def test_a_shard_that_comes_back_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter is given to the store that takes the place of the one that was lost."""
    monkeypatch.setattr(shard, "AGAIN_AFTER_S", 0.0)
    faults = Faults()
    async with await open_faulty(f"{tmp_path}/set?n=2", faults) as store:
        store.meter = tally = Tally()
        faults.down.add(1)
        await put(store)
        await put(store)
        faults.down.clear()
        before = len(tally.sizes)
        for _ in range(4):
            await put(store)
        assert len(tally.sizes) == before + 4
