"""The command line, workers and apps, as they are, against a server."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dibs import Dibs
from dibs.cli import run
from dibs.cli.errors import Exit
from dibs.errors import TaskFailed
from tests.cli.terminal import PATIENCE_S
from tests.server.running import ServerProcess, worker_process

APP = """
from dibs import Dibs

app = Dibs()


@app.task
def double(value: int) -> int:
    return 2 * value


@app.task(max_attempts=1)
async def fail(value: int) -> None:
    raise ValueError(f"no {value}")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server over LMDB; every test has commands of its own."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process.start().until_serves()


Cli = Callable[..., str]


@pytest.fixture
def cli(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """Runs a command line against the server, and returns what it prints."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIBS_URL", server.url)

    def ran(*args: str, code: int = Exit.OK) -> str:
        got = run(args)
        said = capsys.readouterr()
        assert got == code, said.err
        assert "Traceback" not in said.err
        return said.out if code == Exit.OK else said.err

    return ran


def test_tasks(cli: Cli) -> None:
    """Tasks are enqueued, listed, shown, waited for and cancelled."""
    first = cli("enqueue", "t.one", '{"x": 1}', "--key", "k").strip()
    assert cli("enqueue", "t.one", '{"x": 1}', "--key", "k").strip() == first
    later = cli("enqueue", "t.one", "2", "--delay", "1h").strip()
    listed = json.loads(cli("ls", "-c", "t.one", "--json"))["tasks"]
    assert {one["id"] for one in listed} == {first, later}
    assert json.loads(cli("show", first, "--json"))["payload"] == {"x": 1}
    assert "t.one" in cli("show", first)
    cli("wait", first, "--timeout", "0.1", code=Exit.TIMED_OUT)
    cli("cancel", first)
    cli("wait", first, code=Exit.NEGATIVE)
    cli("show", "01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a", code=Exit.NOT_FOUND)


def test_loads(cli: Cli, tmp_path: Path) -> None:
    """A file is loaded once, whole."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"id": {n}}}\n' for n in range(2_500)))
    assert json.loads(cli("enqueue", "t.rows", "--from", "rows.jsonl", "--json"))["enqueued"] == 2_500
    assert json.loads(cli("enqueue", "t.rows", "--from", "rows.jsonl", "--json"))["already"] is True
    [queue] = json.loads(cli("queues", "t.rows", "--json"))["queues"]
    assert queue["ready"] == 2_500
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n{"id": \n')
    cli("enqueue", "t.bad", "--from", "bad.jsonl", code=Exit.USAGE)
    assert json.loads(cli("ls", "-c", "t.bad", "--json"))["tasks"] == []


def test_queues(cli: Cli) -> None:
    """Queues are paused, resumed, configured and counted, and the screen shows them."""
    cli("enqueue", "t.queue", "1")
    cli("pause", "t.queue")
    assert "paused" in cli("queues", "t.queue")
    cli("resume", "t.queue")
    cli("configure", "t.queue", "--max-attempts", "3")
    assert json.loads(cli("queues", "t.queue", "--json"))["queues"][0]["config"]["max_attempts"] == 3
    assert json.loads(cli("stats", "--json"))["tenants"][0]["ready"] >= 1
    assert json.loads(cli("stats", "--tenant", "*", "--json"))["tenants"]
    frame = json.loads(cli("top", "--once", "--interval", "0.1s", "--json"))
    assert frame["total"]["ready"] >= 1
    assert "t.queue" in cli("top", "--once", "--interval", "0.1s")
    cli("workers")
    cli("sweep")


def test_journal(cli: Cli, tmp_path: Path) -> None:
    """The journal is exported, in pieces too."""
    made = cli("enqueue", "t.journal", "1").strip()
    events = [json.loads(line) for line in cli("export").splitlines()]
    assert [event["kind"] for event in events if event["id"] == made] == ["enqueued"]
    cli("cancel", made)
    after = [json.loads(line) for line in cli("export", "--after", events[-1]["cursor"]).splitlines()]
    assert [event["kind"] for event in after if event["id"] == made] == ["cancelled"]
    cli("export", "-o", "events.parquet")
    assert (tmp_path / "events.parquet").stat().st_size > 0


@pytest.mark.parametrize("args", [["doctor"], ["backup", "copy"]])
def test_what_is_about_files(cli: Cli, tmp_path: Path, args: list[str]) -> None:
    """What needs a store's own files is refused, and says where to run it."""
    assert "on the machine that has them" in cli(*args, code=Exit.STORE)
    assert not (tmp_path / "copy").exists()


def test_a_server_that_is_not_there(cli: Cli) -> None:
    """The message names the server, without its token."""
    told = cli("--url", "http://s3cr3t@127.0.0.1:1?give_up_s=0", "ls", code=Exit.STORE)
    assert "http://127.0.0.1:1" in told
    assert "s3cr3t" not in told
    assert "s3cr3t" not in cli("--url", "http://s3cr3t@127.0.0.1:1", "config")
    assert "s3cr3t" not in cli("--url", "http://s3cr3t@127.0.0.1:1?x=1", "ls", code=Exit.STORE)


@pytest.fixture
def worker(server: ServerProcess, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`dibs worker` of the app."""
    (tmp_path / "shop.py").write_text(APP)
    with worker_process(tmp_path, server.url, "shop") as process:
        yield process


async def test_a_worker(cli: Cli, server: ServerProcess, worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Calls, maps and handles go through a server to a worker and back; the worker drains and ends when told to."""
    app = Dibs(server.url)

    @app.task(name="shop.double")
    def double(value: int) -> int:
        raise AssertionError("not here")

    @app.task(name="shop.fail", max_attempts=1)
    def fail(value: int) -> None:
        raise AssertionError("not here")

    async with app:
        assert await double.acall(21) == 42
        batch = await double.amap(range(300))
        assert sorted([result async for result in batch.aresults()]) == [2 * value for value in range(300)]
        handle = await fail.aenqueue(1)
        with pytest.raises(TaskFailed, match="no 1"):
            await handle.awaited(PATIENCE_S)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_S) == 0, (tmp_path / "worker.err").read_text()


def test_dead_letters(cli: Cli, worker: subprocess.Popen[bytes]) -> None:
    """A dead letter is shown, replayed and purged; the worker is listed."""
    made = cli("enqueue", "shop.fail", '{"value": 7}', "--max-attempts", "1").strip()
    cli("wait", made, "--timeout", "30s", code=Exit.NEGATIVE)
    assert any(one["id"] == made for one in json.loads(cli("dead", "ls", "--json"))["tasks"])
    assert "no 7" in cli("dead", "show", made)
    assert len(json.loads(cli("workers", "--json"))["workers"]) >= 1
    cli("dead", "replay", made)
    cli("wait", made, "--timeout", "30s", code=Exit.NEGATIVE)
    cli("dead", "purge", made, "--yes")
    cli("show", made, code=Exit.NOT_FOUND)
