from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dibs.cli import run
from dibs.errors import SettingsError, StoreUnavailable
from dibs.server.config import read_config
from dibs.stores import open_local, open_store
from dibs.stores.remote.verbs import PATH, AskClaim, AskEnqueue, AskStats, AskSubscribe, OnReady
from dibs.task import Enqueued, Kind, NewTask, Settlement, Status
from tests.cli.terminal import dibs
from tests.server.running import ServerProcess, connected, request, until

TENANT = "default"
NOTHING = msgspec.msgpack.encode([])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that waits a second, at most, for what is being done when it stops."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "server.toml").write_text("stop_within_s = 1.0\n")
    with ServerProcess(tmp_path, "--config", "server.toml") as process:
        yield process.start().until_serves()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_gentle_stop(server: ServerProcess, number: signal.Signals) -> None:
    """Whoever waits is answered with nothing, at once; what was acknowledged is there afterwards; the exit is 0."""
    claim = request(PATH + "claim", msgspec.msgpack.encode(AskClaim(TENANT, ["rare"], wait_s=50.0)))
    listen = request(PATH + "subscribe", msgspec.msgpack.encode(AskSubscribe([OnReady(TENANT, "rare")])))
    store = await open_store(server.url)
    outcomes = await store.enqueue(TENANT, [NewTask(command="kept") for _ in range(100)])
    [lease] = await store.claim(TENANT, ["kept"])
    async with (
        connected(server.port, claim) as first,
        connected(server.port, claim) as second,
        connected(server.port, listen) as listening,
        connected(server.port) as idle,
    ):
        assert b"200" in await listening.reader.readuntil(b"\r\n\r\n")
        server.send(number)
        answers = [await raw.answer() for raw in (first, second)]
        assert {(status, headers["connection"], body) for status, headers, body in answers} == {(200, "close", NOTHING)}
        for raw in (first, second, listening, idle):
            assert await raw.hung_up()
    assert await server.ended() == 0, server.said
    await store.close()
    assert "Traceback" not in server.said
    async with await open_local(server.store) as local:
        assert (await local.doctor()).clean
        tasks = await local.get(TENANT, [outcome.id for outcome in outcomes if isinstance(outcome, Enqueued)])
        assert len([task for task in tasks if task is not None]) == 100
        settled = await local.settle([Settlement(tenant=TENANT, id=lease.id, token=lease.token, kind=Kind.COMPLETE)])
        assert [type(one).__name__ for one in settled] == ["Settled"]


async def test_calls_under_way(server: ServerProcess) -> None:
    """Calls that have arrived when the signal comes are answered, and what they were told holds."""
    async with await open_store(server.url + "?give_up_s=0") as store:
        calls = [
            asyncio.ensure_future(store.enqueue(TENANT, [NewTask(command="a") for _ in range(50)])) for _ in range(40)
        ]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        server.send(signal.SIGTERM)
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert await server.ended() == 0
    acknowledged = []
    for answer in answers:
        if isinstance(answer, BaseException):
            assert isinstance(answer, StoreUnavailable), answer
        else:
            acknowledged += [outcome.id for outcome in answer if isinstance(outcome, Enqueued)]
    assert acknowledged
    async with await open_local(server.store) as local:
        pages = [await local.get(TENANT, acknowledged[at : at + 1000]) for at in range(0, len(acknowledged), 1000)]
        assert {task.status if task else None for page in pages for task in page} == {Status.PENDING}


async def test_no_new_claims(server: ServerProcess) -> None:
    """While a stop waits for somebody's call, nothing is given out any more, and other calls still work."""
    async with await open_store(server.url) as store:
        await store.enqueue(TENANT, [NewTask(command="a")])
    slow = msgspec.msgpack.encode(AskEnqueue(TENANT, [NewTask(command="slow")]))
    stats = msgspec.msgpack.encode(AskStats(TENANT))
    head = request(PATH + "enqueue", length=str(len(slow)))
    claim = msgspec.msgpack.encode(AskClaim(TENANT, ["a"]))
    async with connected(server.port, head) as raw, connected(server.port) as other, connected(server.port) as third:
        # Their heads have arrived, so the stop waits for them.
        await other.send(request(PATH + "claim", length=str(len(claim))))
        await third.send(request(PATH + "stats", length=str(len(stats))))
        async with connected(server.port, request("/healthz", method="GET")) as asking:
            assert (await asking.answer())[0] == 200
        server.send(signal.SIGTERM)
        await until(lambda: "stopping" in server.said)
        await other.send(claim)
        await third.send(stats)
        status, headers, body = await other.answer()
        assert (status, msgspec.json.decode(body)["code"]) == (503, "store_unavailable")
        assert headers["retry-after"] == "1"
        assert (await third.answer())[0] == 200
        await raw.send(slow)
        assert (await raw.answer())[0] == 200
    assert await server.ended() == 0


@pytest.mark.parametrize(
    "data",
    [b"", b"POST /v1/st", request(PATH + "stats", length="100"), request(PATH + "stats", length="100") + b"123"],
    ids=["nothing", "half a head", "no body", "half a body"],
)
async def test_a_half_sent_request(server: ServerProcess, data: bytes) -> None:
    """Who never finishes its request does not hold up a stop for longer than its bound."""
    async with connected(server.port, data) as raw, connected(server.port, request("/healthz", method="GET")) as idle:
        assert (await idle.answer())[0] == 200
        assert await server.stop() == 0
        assert await raw.hung_up()
        assert await idle.hung_up()
    assert "Traceback" not in server.said, server.said


async def test_a_second_signal(tmp_path: Path) -> None:
    """A second signal ends a stop that still waits for somebody."""
    (tmp_path / "server.toml").write_text("stop_within_s = 3600.0\n")
    with ServerProcess(tmp_path, "--config", "server.toml") as server:
        server.start().until_serves()
        async with connected(server.port, request(PATH + "stats", length="100")):
            async with connected(server.port, request("/healthz", method="GET")) as asking:
                assert (await asking.answer())[0] == 200
            server.send(signal.SIGTERM)
            await until(lambda: "stopping" in server.said)
            assert await server.stop() == 0
        assert "Traceback" not in server.said, server.said


async def test_clients_wait_for_the_next(server: ServerProcess) -> None:
    """A claim that waits while its server stops goes on waiting at the next one."""
    async with await open_store(server.url + "?give_up_s=30") as store:
        claiming = asyncio.ensure_future(store.claim(TENANT, ["late"], wait_s=30.0))
        async with connected(server.port, request("/healthz", method="GET")) as asking:
            assert (await asking.answer())[0] == 200
        assert await server.stop() == 0
        server.start().until_serves()
        [outcome] = await store.enqueue(TENANT, [NewTask(command="late")])
        assert isinstance(outcome, Enqueued)
        [lease] = await claiming
        assert lease.id == outcome.id


# ------------------------------------------------------------------------------------------------- what cannot start


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A directory without a store, where no pyproject.toml above it is found."""
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--host", "0.0.0.0"], 2, "without keys"),
        (["--host", "::"], 2, "without keys"),
        (["--host", "192.0.2.1"], 2, "without keys"),
        (["--host", "no such host"], 2, "without keys"),
        (["--host", "::1%nowhere"], 2, "nowhere"),
        (["--port", "65536"], 2, "65536"),
        (["--port", "http"], 2, "http"),
        (["--tls-cert", "cert.pem"], 2, "go together"),
        (["--tls-cert", "cert.pem", "--tls-key", "key.pem"], 2, "cert.pem, which tls_cert names, cannot be read"),
        (["--tls-cert", "broken.toml", "--tls-key", "broken.toml"], 2, "cannot be used"),
        (["--config", "missing.toml"], 2, "missing.toml"),
        (["--config", "broken.toml"], 2, "broken.toml"),
        (["--config", "unknown.toml"], 2, "colour"),
        (["--config", "nearly.toml"], 2, "did you mean log_format"),
        (["--config", "wrong.toml"], 2, "port"),
        (["--config", "."], 2, "directory"),
        (["--store", "http://127.0.0.1:1"], 3, "already"),
        (["--store", "nothing:here"], 3, "names no store"),
        (["--store", "occupied"], 3, "occupied"),
    ],
)
def test_what_cannot_start(
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    said: str,
) -> None:
    """What cannot work is refused with a message that says why, an exit code, and no traceback."""
    (empty / "broken.toml").write_text("port = = 1")
    (empty / "unknown.toml").write_text("colour = 'red'")
    (empty / "nearly.toml").write_text("log-fromat = 'text'")
    (empty / "wrong.toml").write_text("port = 'high'")
    (empty / "occupied").mkdir()
    (empty / "occupied" / "letter.txt").write_text("dear")
    monkeypatch.chdir(empty)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a server adds its own
    assert run(["serve", *args]) == code
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert "dibs serves" not in told


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("body_max_bytes = '8 MiB'", 8 << 20),
        ("body_max_bytes = 1", 1),
        ("body_max_bytes = 0", None),
        ("body_max_bytes = -1", None),
        ("body_max_bytes = 'much'", None),
        ("stop_within_s = '2m'", 120.0),
        ("stop_within_s = 0.5", 0.5),
        ("stop_within_s = 0", 0.0),
        ("stop_within_s = -1", None),
        ("stop_within_s = -0.5", None),
        ("stop_within_s = nan", None),
        ("stop_within_s = inf", None),
        ("port = 0", 0),
        ("port = 65536", None),
        ("port = -1", None),
    ],
)
def test_quantities(tmp_path: Path, line: str, value: float | None) -> None:
    """Sizes and durations may have units, as settings have them; what is out of range is refused by name."""
    (tmp_path / "server.toml").write_text(line)
    name = line.partition(" ")[0]
    if value is None:
        with pytest.raises(SettingsError, match=name):
            read_config(tmp_path / "server.toml")
    else:
        assert getattr(read_config(tmp_path / "server.toml"), name) == value


async def test_sighup(server: ServerProcess) -> None:
    """It is logged, and nothing else."""
    server.send(signal.SIGHUP)
    await until(lambda: "SIGHUP is ignored" in server.said)
    assert await server.stop() == 0


def test_a_port_in_use(empty: Path) -> None:
    """A port that somebody has is named, with what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = dibs("serve", "--port", str(port), cwd=empty)
    assert done.returncode == 2, done.stderr
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
