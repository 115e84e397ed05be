"""Where and with what a run was made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sqlite3
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import lmdb

import dibs
from bench.figures import Machine, significant
from bench.steps import Options

PACKAGES = ("dibs", "lmdb", "msgspec", "anyio", "uvloop", "uvicorn", "httptools", "aiohttp")
FSYNCS = 100


def describe_machine(directory: Path) -> Machine:
    """Returns what is known of the machine, and of the file system that the stores were on."""
    return Machine(
        cpu=_cpu(),
        cores=os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        file_system=_file_system(directory),
        directory=str(directory),
    )


def fsync_ms(directory: Path) -> float:
    """Returns what a small durable write takes just now, the median of many."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(FSYNCS):
            file.write(b"\0" * 4096)
            file.flush()
            start_s = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(1000 * (time.perf_counter() - start_s))
    return significant(statistics.median(times), 3)


def versions(options: Options) -> dict[str, str]:
    """Returns the versions of what takes part."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    found["liblmdb"] = ".".join(map(str, lmdb.version()))
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not options.uvloop:
        found.pop("uvloop", None)
    return found


def revision() -> str:
    """Returns the git revision of the dibs that is imported, with a + if its files were changed; `unknown` for a copy
    outside a repository. Ask before the run: the working tree may move on meanwhile."""
    directory = Path(dibs.__file__).parent
    try:
        head = _git(directory, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(directory, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=directory, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _file_system(directory: Path) -> str:
    """Returns the type and the device, from the mount that holds the directory."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    holding = [mount for mount in mounts if directory.is_relative_to(mount[1])]
    device, _, kind, *_ = max(holding, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"
