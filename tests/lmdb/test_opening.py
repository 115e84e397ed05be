"""What may be opened, by whom, and how often."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from dibs.clock import ManualClock
from dibs.errors import (
    ForeignDirectory,
    ModeMismatch,
    NetworkFileSystem,
    NewerFormat,
    StoreClosed,
    StoreMissing,
    StoreRefused,
)
from dibs.settings import Settings
from dibs.stores import open_local
from dibs.stores.ordered import directory as directory_module
from dibs.stores.ordered.directory import file_system
from dibs.stores.ordered.keys import META_FORMAT, ms8
from dibs.stores.ordered.records import FORMAT
from dibs.stores.ordered.store import OrderedStore
from dibs.testing.contract.steps import TENANT, look, put, take
from tests.lmdb.processes import Children


@pytest.mark.parametrize(("mode", "other"), [("sync", "relaxed"), ("relaxed", "sync")])
async def test_the_durability_is_stored(directory: Path, mode: str, other: str) -> None:
    """A store opens again in the mode it was made with, and in no other; a refusal changes nothing."""
    made, wrong = (Settings(durability=durability) for durability in (mode, other))  # type: ignore[arg-type]
    async with await open_local(str(directory), settings=made) as store:
        task_id = await put(store)
        with pytest.raises(ModeMismatch):
            await open_local(str(directory), settings=wrong)
        assert (await look(store, task_id)).id == task_id
    with pytest.raises(ModeMismatch):
        await open_local(str(directory), settings=wrong)
    async with await open_local(str(directory), settings=made) as store:
        assert (await look(store, task_id)).id == task_id


async def test_one_engine_per_process(directory: Path) -> None:
    """Two stores of one directory share an engine, whatever the path is called; closing one leaves the other."""
    link = directory.with_name("link")
    first = await open_local(str(directory))
    link.symlink_to(directory)
    second = await open_local(f"lmdb:{link}")
    assert isinstance(first, OrderedStore)
    assert isinstance(second, OrderedStore)
    assert first._engine is second._engine
    task_id = await put(first)
    await first.close()
    await first.close()
    with pytest.raises(StoreClosed):
        await put(first)
    assert (await take(second)).id == task_id
    await second.close()
    async with await open_local(str(directory)) as third:
        assert isinstance(third, OrderedStore)
        assert third._engine is not first._engine
        assert (await look(third, task_id)).id == task_id


async def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    """A directory that holds other files is neither taken nor touched."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ForeignDirectory):
        await open_local(str(tmp_path))
    assert read(tmp_path / "notes.txt") == b"mine"
    assert not (tmp_path / "data.mdb").exists()


async def test_a_file_is_refused(tmp_path: Path) -> None:
    """A store is a directory."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ForeignDirectory):
        await open_local(str(tmp_path / "file"))


async def test_another_lmdb_database_is_refused(directory: Path) -> None:
    """Somebody else's LMDB database is left as it is."""
    with lmdb.open(str(directory)) as foreign, foreign.begin(write=True) as txn:
        txn.put(b"key", b"value")
    with pytest.raises(ForeignDirectory):
        await open_local(str(directory))
    with lmdb.open(str(directory)) as foreign, foreign.begin() as txn:
        assert list(txn.cursor()) == [(b"key", b"value")]


def write(path: Path, content: bytes) -> None:
    """Makes a file and its directory."""
    path.parent.mkdir()
    path.write_bytes(content)


def read(path: Path) -> bytes:
    """What a file holds."""
    return path.read_bytes()


@pytest.mark.parametrize("there", [False, True], ids=["missing", "empty"])
async def test_a_store_is_not_made_unless_asked(directory: Path, there: bool) -> None:
    """Without `create`, a directory that is missing or empty is left so; a store that is there is opened."""
    if there:
        directory.mkdir()  # noqa: ASYNC240 nothing else runs in this loop
    with pytest.raises(StoreMissing, match="there is no store in"):
        await open_local(str(directory), create=False)
    assert names(directory) == ([] if there else None)
    async with await open_local(str(directory)) as store:
        store_id = store.store_id
    async with await open_local(str(directory), create=False) as store:
        assert store.store_id == store_id


def names(directory: Path) -> list[str] | None:
    """What a directory holds, if it exists."""
    return [path.name for path in directory.iterdir()] if directory.exists() else None


@pytest.mark.parametrize("content", [b"rubbish" * 10_000, b"x"], ids=["long", "short"])
async def test_rubbish_is_refused(directory: Path, content: bytes) -> None:
    """A data.mdb that LMDB cannot read is refused and kept."""
    write(directory / "data.mdb", content)
    with pytest.raises(StoreRefused):
        await open_local(str(directory))
    assert read(directory / "data.mdb") == content


async def test_a_newer_format_is_refused(directory: Path) -> None:
    """A store of a newer dibs is not touched, however often one tries."""
    async with await open_local(str(directory)) as store:
        assert isinstance(store, OrderedStore)
        await store._engine.lane().transact(lambda txn: txn.put(META_FORMAT, ms8(FORMAT + 1)))
    for _ in range(2):
        with pytest.raises(NewerFormat):
            await open_local(str(directory))


async def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system that the directory will be on decides, also while the directory does not exist."""
    here = _file_system_here(tmp_path)
    assert here not in directory_module.NETWORK_FILE_SYSTEMS
    monkeypatch.setattr(directory_module, "NETWORK_FILE_SYSTEMS", frozenset({here}))
    with pytest.raises(NetworkFileSystem):
        await open_local(str(tmp_path / "new" / "store"))
    assert not (tmp_path / "new").exists()


def _file_system_here(directory: Path) -> str:
    return file_system(directory.resolve(), Path("/proc/self/mountinfo").read_text())


MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
61 22 0:52 / /srv/share rw,relatime shared:31 - nfs4 filer:/export rw,vers=4.2
62 61 8:1 / /srv/share/local rw,relatime - xfs /dev/sdb1 rw
63 22 0:53 / /mnt/two\040words rw - cifs //host/share rw
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/var/lib/dibs", "ext4"),
        ("/proc/self", "proc"),
        ("/srv/share/queue", "nfs4"),
        ("/srv/share", "nfs4"),
        ("/srv/shared/queue", "ext4"),
        ("/srv/share/local/queue", "xfs"),
        ("/mnt/two words/queue", "cifs"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(directory: str, kind: str) -> None:
    """The deepest mount point above a directory counts, names with blanks included, a longer name beside it not."""
    assert file_system(Path(directory), MOUNTS.strip()) == kind


FORK = """
async def produce(store, count):
    outcomes = await store.enqueue("t", [NewTask(command="c") for _ in range(count)])
    assert all(isinstance(outcome, Enqueued) for outcome in outcomes)

async def in_child(store):
    await produce(store, 5)
    assert len(await store.claim("t", ["c"], limit=2)) == 2
    async with await open_local(URL) as new:
        assert new._engine is store._engine
        await produce(new, 5)
    await produce(store, 5)
    assert (await store.doctor()).clean
    await store.close()

async def in_parent(store):
    await produce(store, 5)
    assert len(await store.claim("t", ["c"], limit=2)) == 2

loop = asyncio.new_event_loop()
store = loop.run_until_complete(open_local(URL))
loop.run_until_complete(produce(store, 5))
pids = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        # Not the parent's loop: it belongs to the parent, with its file descriptors.
        try:
            asyncio.run(in_child(store))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    pids.append(pid)
    loop.run_until_complete(in_parent(store))
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
loop.run_until_complete(in_parent(store))
total = loop.run_until_complete(store.stats("t")).total
clean = loop.run_until_complete(store.doctor()).clean
loop.run_until_complete(store.close())
loop.close()
tell(codes=codes, ready=total.ready, leased=total.leased, clean=clean)
"""


def test_fork(directory: Path, children: Children) -> None:
    """After a fork parent and child both go on, the child with the store it inherited and with a new one."""
    told = children.start(FORK, directory).finish()
    leased = 2 * (3 + 4)
    assert told == {"codes": [0, 0, 0], "ready": 5 + 3 * 15 + 4 * 5 - leased, "leased": leased, "clean": True}


async def test_a_relative_directory_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    """A store opened by a relative path does not move with the working directory."""
    monkeypatch.chdir(tmp_path)
    store = await open_local("here", clock=clock)
    monkeypatch.chdir("/")
    await put(store)
    assert (await store.stats(TENANT)).total.ready == 1
    await store.backup(tmp_path / "copy")
    await store.close()
    assert (tmp_path / "here" / "data.mdb").is_file()
