"""A reader of the journal sees every event, in order and at least once, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from dibs.clock import ManualClock
from dibs.errors import SettingsError
from dibs.server.readers import follower as module
from dibs.server.readers.events_file import EventsFile
from dibs.server.readers.follower import Handle, JournalFollower
from dibs.settings import Settings
from dibs.shapes import event_shape
from dibs.stores import open_local, restore_store
from dibs.stores.local import LocalStore
from dibs.stores.sharded import shard as shard_module
from dibs.task import Event
from dibs.testing.contract.steps import put, put_many
from tests.shards.faults import Faults, open_faulty

RELAXED = Settings(durability="relaxed")
LONG_S = 20.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again soon."""
    monkeypatch.setattr(module, "BACKOFF_MIN_S", 0.01)
    monkeypatch.setattr(module, "BACKOFF_MAX_S", 0.05)


@contextlib.asynccontextmanager
async def following(store: LocalStore, handle: Handle, name: str = "file") -> AsyncIterator[asyncio.Task[None]]:
    """A follower at work; stopped, and waited for, at the end."""
    task = asyncio.ensure_future(JournalFollower(store, name, handle, linger_s=0.0).run())
    yield task
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None


async def until(true: Callable[[], bool]) -> None:
    """Waits for something to become true."""
    async with asyncio.timeout(LONG_S):
        while not true():  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.005)


async def all_events(store: LocalStore, shard: int = 0) -> list[Event]:
    """What a journal holds."""
    return (await store.events("*", shard=shard, limit=1_000)).events


class Seen:
    """A handler that remembers, and can fail."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.failing: Exception | None = None
        self.failed = 0

    async def __call__(self, events: Sequence[Event]) -> None:
        """Takes events, unless it is to fail."""
        if self.failing is not None:
            self.failed += 1
            raise self.failing
        self.events += events


@pytest.mark.parametrize("url", ["memory:", "lmdb", "shards"])
async def test_every_event_of_every_tenant_comes_in_order(url: str, tmp_path: Path) -> None:
    """Those from before it began, and those that happen meanwhile, once each; by shard in the order of the journal."""
    url = {"lmdb": f"lmdb:{tmp_path}/one", "shards": f"shards:{tmp_path}/set?n=3"}.get(url, url)
    seen = Seen()
    async with await open_local(url, settings=RELAXED) as store:
        await put_many(store, 50)
        async with following(store, seen):
            for _ in range(10):
                await put_many(store, 10, tenant="other")
            await until(lambda: len(seen.events) >= 150)
            for bounds in await store.journal_bounds():
                journal = await all_events(store, bounds.shard)
                wanted = {event.cursor for event in journal}
                assert [event for event in seen.events if event.cursor in wanted] == journal
        assert len(seen.events) == 150
        assert {reader.name for reader in await store.readers()} == {"file"}


async def test_many_events_are_read_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one page, and more pages than are handled at once."""
    monkeypatch.setattr(module, "BATCH_MAX", 7)
    monkeypatch.setattr(module, "PAGES_MAX", 2)
    seen = Seen()
    async with await open_local("memory:") as store:
        await put_many(store, 100)
        async with following(store, seen):
            await until(lambda: len(seen.events) >= 100)
        assert seen.events == await all_events(store)


async def test_a_handler_that_fails_gets_the_events_again() -> None:
    """Nothing is passed over, and the position stays until it succeeds."""
    seen = Seen()
    seen.failing = ValueError("no")
    async with await open_local("memory:") as store:
        await put_many(store, 5)
        async with following(store, seen):
            await until(lambda: seen.failed >= 3)
            [reader] = await store.readers()
            [bounds] = await store.journal_bounds()
            assert reader.position == bounds.oldest
            seen.failing = None
            await until(lambda: len(seen.events) == 5)


async def test_stopped_while_handling_it_begins_there_again() -> None:
    """What was being handled when it was stopped comes again; it stops at once."""
    entered = asyncio.Event()

    async def never(events: Sequence[Event]) -> None:
        entered.set()
        await asyncio.Event().wait()

    seen = Seen()
    async with await open_local("memory:") as store:
        await put_many(store, 5)
        async with following(store, never):
            await entered.wait()
        async with following(store, seen):
            await until(lambda: len(seen.events) == 5)


async def test_a_shard_that_is_down_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events come when it is back, from where the reader was."""
    monkeypatch.setattr(shard_module, "AGAIN_AFTER_S", 0.0)
    faults, seen = Faults(), Seen()
    async with await open_faulty(f"{tmp_path}/set?n=2", faults) as store:
        async with following(store, seen):
            for _ in range(8):
                await put(store)
            await until(lambda: len(seen.events) == 8)
            faults.down.add(1)
            for _ in range(4):
                await put(store)
            await until(lambda: len(seen.events) == 12)
            faults.down.clear()
            for _ in range(4):
                await put(store)
            await until(lambda: len(seen.events) == 16)
        assert len({event.cursor for event in seen.events}) == 16


async def test_it_begins_when_the_store_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is down at the start is waited for."""
    monkeypatch.setattr(shard_module, "AGAIN_AFTER_S", 0.0)
    faults, seen = Faults(), Seen()
    async with await open_faulty(f"{tmp_path}/set?n=2", faults) as store:
        faults.down.add(1)
        async with following(store, seen):
            await put(store)
            await asyncio.sleep(0.1)
            assert not seen.events
            faults.down.clear()
            await until(lambda: len(seen.events) == 1)


async def test_a_trimmed_journal_is_told_and_gone_on_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Events that were trimmed before they were read are lost, loudly; the others come."""
    clock = ManualClock()
    settings = Settings(durability="relaxed", journal_retention_s=60, journal_max_bytes=2_000)
    seen = Seen()
    async with await open_local(tmp_path / "store", clock=clock, settings=settings) as store:
        await put_many(store, 5)
        async with following(store, seen):
            await until(lambda: len(seen.events) == 5)
            await until_position(store)
        # Nobody reads while the journal outgrows its size.
        for _ in range(60):
            await put_many(store, 5)
        for _ in range(20):
            clock.advance(120)
            await store.sweep()
        await put_many(store, 3)
        left = await all_events(store)
        assert 3 <= len(left) < 300
        async with following(store, seen):
            await until(lambda: len(seen.events) >= 5 + len(left))
        assert seen.events[5:] == left
    assert "has lost events" in caplog.text


async def test_a_restored_store_is_read_from_its_oldest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its journal is another: the position of the original does not hold in it."""
    seen = Seen()
    async with await open_local(tmp_path / "store", settings=RELAXED) as store:
        await put_many(store, 5)
        async with following(store, seen):
            await until(lambda: len(seen.events) == 5)
            await until_position(store)
        await store.backup(tmp_path / "backup")
    await restore_store(tmp_path / "backup", tmp_path / "again")
    async with await open_local(tmp_path / "again", settings=RELAXED) as store, following(store, seen):
        await until(lambda: len(seen.events) == 10)
    assert [event.id for event in seen.events[:5]] == [event.id for event in seen.events[5:]]
    assert "has lost events" in caplog.text


async def test_a_store_that_is_closed_ends_it() -> None:
    """Without an error: a server that stops closes its store."""
    store = await open_local("memory:")
    async with following(store, Seen()) as task:
        await asyncio.sleep(0.05)
        await store.close()
        async with asyncio.timeout(LONG_S):
            await task


# --------------------------------------------------------------------------------------------------------------- file


def lines_of(path: Path) -> list[object]:
    """What is in the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_events_arrive_in_a_file_once_over_restarts(tmp_path: Path) -> None:
    """In the shape of an export, in order; a second run goes on where the first stopped."""
    path = tmp_path / "events.jsonl"
    async with await open_local(tmp_path / "store", settings=RELAXED) as store:
        for run in range(3):
            file = EventsFile(path)
            file.open()
            async with following(store, file.append):
                await put_many(store, 10)
                await until(lambda run=run: len(lines_of(path)) == 10 * (run + 1))  # type: ignore[misc]
                await until_position(store)
            file.close()
        assert lines_of(path) == [event_shape(event) for event in await all_events(store)]


async def test_a_rotated_file_is_begun_anew(tmp_path: Path) -> None:
    """Renamed or removed: what comes later goes into a file of the name; emptied in place, it goes on in it."""
    path, old = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    async with await open_local("memory:") as store:
        await put_many(store, 10)
        events = await all_events(store)
    file = EventsFile(path)
    await file.append(events[:3])
    path.rename(old)
    await file.append(events[3:5])
    assert (len(lines_of(old)), len(lines_of(path))) == (3, 2)
    path.unlink()
    await file.append(events[5:6])
    assert len(lines_of(path)) == 1
    os.truncate(path, 0)
    await file.append(events[6:])
    assert lines_of(path) == [event_shape(event) for event in events[6:]]
    file.close()


@pytest.mark.parametrize("torn", [b'{"cursor":"ab', b"", b'{"a":1}\n{"b', b'{"a":1}\n'])
async def test_what_a_crash_left_of_a_line_is_taken_away(tmp_path: Path, torn: bytes) -> None:
    """Its event comes again, and every line can be read."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(torn)
    async with await open_local("memory:") as store:
        await put(store)
        events = await all_events(store)
    file = EventsFile(path)
    await file.append(events)
    file.close()
    assert lines_of(path)[torn.count(b"\n") :] == [event_shape(event) for event in events]


async def test_a_disk_that_is_full_leaves_no_half_of_it(tmp_path: Path) -> None:
    """What could not be written whole is not there; it is written when it can be."""
    path = tmp_path / "events.jsonl"
    async with await open_local("memory:") as store:
        await put_many(store, 100)
        events = await all_events(store)
    script = f"""
import asyncio, resource, signal
from dibs.server.readers.events_file import EventsFile
from dibs.task import Event
import msgspec, pathlib
events = msgspec.msgpack.decode(pathlib.Path({str(tmp_path / "events.bin")!r}).read_bytes(), type=list[Event])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = EventsFile({str(path)!r})
asyncio.run(file.append(events[:5]))
resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 1000, resource.RLIM_INFINITY))
try:
    asyncio.run(file.append(events[5:]))
except OSError:
    print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(file.path.read_bytes().splitlines()))
asyncio.run(file.append(events[5:]))
"""
    (tmp_path / "events.bin").write_bytes(msgspec.msgpack.encode(events))
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout.split() == ["refused", "5"], done.stderr
    assert lines_of(path) == [event_shape(event) for event in events]


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """The message says which, and what to do."""
    with pytest.raises(SettingsError, match="nowhere"):
        EventsFile(tmp_path / "nowhere" / "events.jsonl").open()


async def until_position(store: LocalStore, name: str = "file") -> None:
    """Waits until the reader's position is that of the newest event."""
    async with asyncio.timeout(LONG_S):
        while True:
            newest = {bounds.shard: bounds.newest for bounds in await store.journal_bounds()}
            if {one.shard: one.position for one in await store.readers() if one.name == name} == newest:
                return
            await asyncio.sleep(0.005)
