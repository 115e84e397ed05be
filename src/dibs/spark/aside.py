"""Where rows go that cannot become tasks: they fail the job, or are set aside as files that `spark.read.json` reads.

::

    bad+nightly+0+00003.json     what partition 3 of the load `nightly` set aside, seq 0
    _bad+nightly+….json          the same of an attempt that has not been committed: Spark does not read such names

Executors write the second; the driver gives those of the successful attempts their names just before it commits the
load, so that no row of a committed load is in neither place. An attempt that failed after that is replaced by the next;
the files of a load that is committed stay as they are, however often it is repeated.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
from msgspec import Struct
from pyarrow import fs

from dibs.errors import InvalidInput, InvalidOption
from dibs.spark.rows import to_python

FAIL = "fail"
SHOWN_MAX_CHARS = 300
_NAME_MAX_CHARS = 100
_CANNOT = (OSError, pa.ArrowException)


class Aside(Struct, frozen=True):
    """A directory for bad rows. Travels to executors."""

    where: str

    @classmethod
    def of(cls, bad_rows: str) -> Aside | None:
        """Returns what the option asks for, with the directory made; None: a bad row fails the job."""
        if bad_rows.lower() == FAIL:
            return None
        # Executors may run elsewhere on this machine.
        aside = cls(bad_rows if "://" in bad_rows else os.path.abspath(bad_rows))  # noqa: PTH100 it may not exist
        try:
            files, path = aside.place()
            files.create_dir(path, recursive=True)
            name = f"{path}/_dibs-{uuid.uuid4().hex}"
            files.open_output_stream(name).close()
            files.delete_file(name)
        except _CANNOT as error:
            raise InvalidOption(
                f"option badRows is {bad_rows!r}, where nothing can be written ({error}): name a directory, or its "
                "URI, that driver and executors reach, or 'fail'"
            ) from error
        return aside

    def place(self) -> tuple[fs.FileSystem, str]:
        """Returns the file system, and the path of the directory in it."""
        files, path = fs.FileSystem.from_uri(self.where)
        return files, path.rstrip("/") or "/"

    def publish(self, load: str, seq: int, files_of: Mapping[int, str]) -> None:
        """Gives the files of the successful attempts, by partition, the names that are read, and removes what other
        attempts at the same load and seq left."""
        files, path = self.place()
        head = f"bad+{_safe(load)}+"
        names = {f"{head}{seq}+{partition:05}.json": name for partition, name in files_of.items()}
        for name, hidden in names.items():
            files.move(f"{path}/{hidden}", f"{path}/{name}")
        for found in files.get_file_info(fs.FileSelector(path)):
            name = PurePosixPath(found.path).name
            if name.startswith((f"_{head}", f"{head}{seq}+")) and name not in names:
                files.delete_file(found.path)

    def remove(self, hidden: Iterable[str]) -> None:
        """Removes files that were not published; a file that cannot be removed is left: nobody reads it."""
        files, path = self.place()
        for name in hidden:
            with contextlib.suppress(*_CANNOT):
                files.delete_file(f"{path}/{name}")


class BadRows:
    """What one attempt does with its bad rows. `name`: the file that has them, once there are any."""

    def __init__(self, aside: Aside | None, load: str, partition: int) -> None:
        self._aside = aside
        self._load = load
        self._partition = partition
        self._stream: Any = None
        self.name: str | None = None
        self.count = 0

    def put(self, part: pa.RecordBatch, first: int, bad: Mapping[int, InvalidInput]) -> None:
        """Sets rows of a part aside, or raises for the first of them. `first` is the number of the part's first row."""
        lines = []
        for place in sorted(bad):
            values = shown(part, place)
            if self._aside is None:
                raise type(bad[place])(self._refusal(first + place, bad[place], values)) from bad[place]
            line = {"partition": self._partition, "row": first + place, "error": str(bad[place]), "values": values}
            lines.append(msgspec.json.encode(line))
        self.count += len(lines)
        self._opened(self._aside).write(b"".join(line + b"\n" for line in lines))

    def close(self) -> None:
        """Ends the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def remove(self) -> None:
        """Ends the file and takes it away."""
        with contextlib.suppress(*_CANNOT):
            self.close()
        if self._aside is not None and self.name is not None:
            self._aside.remove([self.name])

    def _opened(self, aside: Aside | None) -> Any:
        if self._stream is None and aside is not None:
            files, path = aside.place()
            self.name = f"_bad+{_safe(self._load)}+{uuid.uuid4().hex}.json"
            self._stream = files.open_output_stream(f"{path}/{self.name}")
        return self._stream

    def _refusal(self, row: int, error: InvalidInput, values: str) -> str:
        picture = values if len(values) <= SHOWN_MAX_CHARS else f"{values[: SHOWN_MAX_CHARS - 3]}..."
        return (
            f"row {row} of partition {self._partition} cannot become a task: {error}\nThe row: {picture}\n"
            "Nothing was enqueued. .option('badRows', DIRECTORY) sets such rows aside there and enqueues the others."
        )


def shown(part: pa.RecordBatch, row: int) -> str:
    """Returns a row as JSON text, whatever is wrong with it: bytes as text, and what has no JSON as Python shows it."""
    values = {name: _value(part.column(name), row) for name in part.schema.names}
    return msgspec.json.encode(values, enc_hook=repr).decode()


def _value(column: pa.Array, row: int) -> Any:
    try:
        [value] = to_python(column.slice(row, 1))
        return _plain(value)
    except (pa.ArrowException, ValueError, OverflowError):
        return str(column[row].cast(pa.string(), safe=False)) if column.type.num_fields == 0 else str(column.type)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value


def _safe(load: str) -> str:
    """The name of a load as a part of a file's name: no other has the same, and it has no `+`."""
    name = quote(load, safe="")
    return name if len(name) <= _NAME_MAX_CHARS else blake2b(load.encode(), digest_size=16).hexdigest()
