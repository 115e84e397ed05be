"""A store with something of everything in it."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from dibs.ids import id_to_text
from dibs.stores import open_store
from dibs.stores.protocol import Store
from dibs.task import Enqueued, ErrorInfo, Kind, Lease, NewTask, QueueConfig, Settlement, WorkerInfo

TENANT = "default"
LONG = "send-the-very-long-monthly-newsletter-to-everybody"
ESCAPE = "\x1b[2J\x1b[31m"
ERROR = ErrorInfo(
    "requests.exceptions.ConnectionError", f"no route {ESCAPE}\nto host", "Traceback:\n  File x\n    go()"
)


class Filled:
    """A directory with a store, and the ids (as text) of the tasks in it, by what became of them."""

    def __init__(self, directory: Path, ids: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.ids = dict(ids or {})

    async def fill(self) -> None:
        """Puts in tasks of every state, with names and texts that strain a screen."""
        async with await open_store(self.directory / "dibs-data") as store:
            for name in ("completed", "failed", "retried", "leased"):
                await self._put(store, name, NewTask(command="thumbnail", payload=b'{"url": "a.png"}', key=name))
            leases = await store.claim(TENANT, ["thumbnail"], limit=4, lease_s=600, worker="a worker with a long name")
            await store.settle([
                _settled(leases[0], Kind.COMPLETE, result=b'{"ok": true}'),
                _settled(leases[1], Kind.FAIL, error=ERROR),
                _settled(leases[2], Kind.RETRY, delay_s=600, error=ERROR),
            ])  # fmt: skip
            await self._put(store, "ready", NewTask(command="report", payload="日本語".encode(), codec="raw"))
            await self._put(store, "binary", NewTask(command="report", payload=b"\x00\xff", codec="raw"))
            await self._put(store, "delayed", NewTask(command=LONG, payload=b"1", delay_s=3600))
            await self._put(store, "cancelled", NewTask(command=LONG))
            await store.cancel(TENANT, [_id(self.ids["cancelled"])])
            await store.configure(TENANT, "report", QueueConfig(paused=True, lease_s=300))
            info = WorkerInfo(name="web-1.internal.example.org:4711", host="web-1.internal.example.org", pid=4711,
                              slots=8, busy=3, commands=["thumbnail", LONG], memory_bytes=123_456_789)  # fmt: skip
            await store.register(TENANT, info, 3600)
            await store.enqueue("acme", [NewTask(command="theirs")])

    async def _put(self, store: Store, name: str, task: NewTask) -> None:
        [outcome] = await store.enqueue(TENANT, [task])
        assert isinstance(outcome, Enqueued)
        self.ids[name] = id_to_text(outcome.id)


def _settled(lease: Lease, kind: Kind, **others: object) -> Settlement:
    return Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=kind, **others)  # type: ignore[arg-type]


def _id(text: str) -> bytes:
    return bytes.fromhex(text.replace("-", ""))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A directory without a store, where no pyproject.toml above it is found."""
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """The store that each test gets a copy of: copying is quicker than filling."""
    store = Filled(tmp_path_factory.mktemp("original"))
    asyncio.run(store.fill())
    return store


@pytest.fixture
def filled(empty: Path, original: Filled) -> Filled:
    """A store with something of everything in it."""
    (empty / "dibs-data").mkdir()
    shutil.copyfile(original.directory / "dibs-data" / "data.mdb", empty / "dibs-data" / "data.mdb")
    return Filled(empty, original.ids)


@pytest.fixture
def here(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> Filled:
    """The same, as the working directory of this process and with nothing set: for calls within it."""
    for name in [name for name in os.environ if name.startswith("DIBS_") or name in ("COLUMNS", "FORCE_COLOR")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(filled.directory)
    return filled
