"""Which directories the embedded store may be put into."""

from __future__ import annotations

import re
from pathlib import Path

from dibs.errors import ForeignDirectory, NetworkFileSystem, ShardMismatch

OWN_NAMES = frozenset({"data.mdb", "lock.mdb", "turnstile", "wake"})
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "glusterfs", "lustre", "9p", "fuse.sshfs"}
    | {"fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "beegfs", "gpfs", "orangefs", "davfs", "fuse.davfs2", "drvfs"}
)


def check_directory(directory: Path) -> None:
    """Refuses what is, or belongs to, something else."""
    if directory.exists():
        if not directory.is_dir():
            raise ForeignDirectory(f"{directory} is a file: name a directory")
        # Another process may be making the store at this moment, and then its files come one by one.
        names = {path.name for path in directory.iterdir()}
        if "data.mdb" not in names and not names <= OWN_NAMES:
            if any((directory / name / "data.mdb").exists() for name in names if name.isdecimal()):
                raise ShardMismatch(f"{directory} holds a set of shards: open it as shards:{directory}")
            raise ForeignDirectory(f"{directory} is not empty and not a dibs store: name a new or empty directory")
    check_file_system(directory)


def check_file_system(directory: Path) -> None:
    """Refuses network file systems: neither locks nor memory maps hold there."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return
    kind = file_system(directory.resolve(), mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise NetworkFileSystem(f"{directory} is on {kind}: locks and memory maps do not hold there; use a local disk")


def file_system(directory: Path, mounts: str) -> str:
    """Returns the kind of file system that `directory` is, or will be, on, given what is mounted (the text of
    ``/proc/self/mountinfo``); empty where that cannot be told."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if len(point) >= len(best) and directory.is_relative_to(point):
            best, kind = point, fields[fields.index("-") + 1]
    return kind
