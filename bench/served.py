"""A server to measure: ``dibs serve`` in a process of its own, and those who ask it by HTTP."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import psutil

from bench.steps import COMMAND, PAYLOAD, RESULT, Options, fresh_directory

CONNECTIONS = 64
START_S = 30.0
WITHOUT_WRK = "by a client in Python: apt-get install wrk for a faster one"

_encode = msgspec.json.encode


class Served:
    """A server that runs."""

    def __init__(self, process: psutil.Process, url: str) -> None:
        self._process = process
        self.url = url

    def cpu_s(self) -> float:
        """The processor time that it has used."""
        return float(sum(self._process.cpu_times()[:2]))

    def anonymous_bytes(self) -> int:
        """Its own memory, without the pages of LMDB's map, which are the kernel's to keep or drop."""
        rollup = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        found = re.search(r"^Anonymous:\s+(\d+) kB$", rollup, re.MULTILINE)
        assert found is not None, rollup
        return 1024 * int(found[1])


@contextlib.contextmanager
def served(options: Options) -> Iterator[Served]:
    """A server in development mode, over a fresh store with fsync; ended with the block."""
    with fresh_directory(options) as directory:
        command = [sys.executable, "-m", "dibs", "--url", str(directory / "store"), "serve", "--port", "0"]
        told = directory / "server.err"
        with told.open("wb") as errors:
            process = subprocess.Popen(command, stderr=errors)
        try:
            yield Served(psutil.Process(process.pid), _url(process, told))
        finally:
            process.terminate()
            process.wait(60)


def _url(process: subprocess.Popen[bytes], told: Path) -> str:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if (found := re.search(r"dibs serves .* at (http://\S+)\n", told.read_text())) is not None:
            return found[1]
        time.sleep(0.02)
    raise RuntimeError(f"the server did not start: {told.read_text()}")


# ------------------------------------------------------------------------------------------------------------- bodies


def new_task() -> dict[str, object]:
    """The benchmark's task, as JSON has it."""
    return {"command": COMMAND, "payload": msgspec.Raw(PAYLOAD)}


def create_body(batch: int) -> tuple[str, bytes]:
    """The path and the body that create so many tasks."""
    if batch == 1:
        return "/v1/tasks", _encode(new_task())
    return "/v1/tasks/batch", _encode({"tasks": [new_task()] * batch})


# --------------------------------------------------------------------------------------------------------------- rates


def has_wrk() -> bool:
    """Whether wrk is installed, which costs less than any client in Python."""
    return shutil.which("wrk") is not None


def wrk(url: str, seconds: float, body: bytes | None = None, connections: int = CONNECTIONS) -> float:
    """Returns good answers per second, with so many connections that never pause. Without a body it GETs."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "post.lua"
        data = Path(directory) / "body"
        data.write_bytes(body or b"")
        post = [
            'wrk.method = "POST"',
            'wrk.headers["Content-Type"] = "application/json"',
            f'wrk.body = io.open("{data}", "rb"):read("*a")',
        ]
        counted = [
            "done = function(summary, latency, requests)",
            "  local no = summary.errors",
            "  local bad = no.status + no.connect + no.read + no.write + no.timeout",
            '  print(string.format("good %d of us %d", summary.requests - bad, summary.duration))',
            "end",
        ]
        script.write_text("\n".join([*(post if body is not None else []), *counted]))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script), url]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60 + seconds).stdout
    found = re.search(r"good (\d+) of us (\d+)", said)
    assert found is not None, said
    return 1e6 * int(found[1]) / int(found[2])


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
    """Posts JSON and returns the answer."""
    async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
        said = await answer.read()
        assert answer.status in (200, 202), said
        return said


class _Claimed(msgspec.Struct, rename="camel"):
    id: str
    lease_token: str


class _ClaimedSome(msgspec.Struct):
    tasks: list[_Claimed]


_claimed = msgspec.json.Decoder(_Claimed)
_claimed_some = msgspec.json.Decoder(_ClaimedSome)


async def http_cycle(session: aiohttp.ClientSession, url: str, batch: int) -> None:
    """The whole life of a batch of tasks, by the routes of the HTTP API."""
    path, body = create_body(batch)
    await post(session, url + path, body)
    result = {"status": "COMPLETED", "result": msgspec.Raw(RESULT)}
    if batch == 1:
        task = _claimed.decode(await post(session, url + "/v1/tasks/claim", _encode({"commands": [COMMAND]})))
        settled = _encode({**result, "leaseToken": task.lease_token})
        await post(session, f"{url}/v1/tasks/{task.id}/result", settled)
        return
    asked = _encode({"commands": [COMMAND], "count": batch})
    tasks = _claimed_some.decode(await post(session, url + "/v1/tasks/claim/batch", asked)).tasks
    results = [{**result, "taskId": task.id, "leaseToken": task.lease_token} for task in tasks]
    await post(session, url + "/v1/tasks/batch/results", _encode({"results": results}))
