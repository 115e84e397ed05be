"""Copies of a set of shards: a directory with a copy of each in a directory of its number."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dibs.errors import StoreRefused
from dibs.stores.ordered import lmdb


def is_copy(directory: str | os.PathLike[str]) -> bool:
    """Says whether this is a copy of a set, rather than of one store."""
    return (Path(directory) / "0" / "data.mdb").is_file()


def restore(backup: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Makes a set of shards in a new directory out of a copy."""
    source = Path(backup)
    with made_whole(Path(directory)) as copy:
        for path in source.iterdir():
            if path.name.isdecimal():
                lmdb.restore(path, copy / path.name)


@contextlib.contextmanager
def made_whole(directory: Path) -> Iterator[Path]:
    """Yields a directory to copy shards into, which gets its name when all are there."""
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StoreRefused(f"{directory} is not empty: name a new directory for the copy")
    copy = directory.with_name(f"{directory.name}.partial-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield copy
        copy.rename(directory)
    except OSError as error:
        raise StoreRefused(f"{directory} cannot take the copy: {error}; name a new directory you can write") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)
