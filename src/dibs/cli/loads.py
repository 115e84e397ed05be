"""``dibs enqueue --from``: a file of rows becomes tasks, all at once."""

from __future__ import annotations

import math
import time
from asyncio import Runner
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import click
import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from dibs import checks
from dibs import codec as codecs
from dibs.checks import Limits
from dibs.cli.context import Session
from dibs.cli.errors import Exit
from dibs.cli.output import count_text, echo_json, exact_duration_text, note, plural, rows_progress
from dibs.cli.rows import Bad, Block, Reader, Row, Source
from dibs.errors import CodecError, InvalidInput, InvalidOption
from dibs.settings import read_duration_s
from dibs.shapes import Json
from dibs.stores.batches import batches
from dibs.stores.loading import Load, asking
from dibs.task import BATCH_MAX, DELAY_HORIZON_S, Committed, NewTask, Rows

T = TypeVar("T")


class Picks(Struct, frozen=True, omit_defaults=True):
    """Which fields of a row say how it is enqueued. The keys are data too and stay in the payload; the others are taken
    out of it."""

    key: str | None = None
    limit_key: str | None = None
    command: str | None = None
    priority: str | None = None
    delay: str | None = None
    run_at: str | None = None

    def options(self) -> dict[str, str]:
        """The fields that are named, by the options that name them."""
        named = {name: field for name, field in asdict(self).items() if field is not None}
        return {f"--{name.replace('_', '-')}-field": field for name, field in named.items()}


class Wish(NamedTuple):
    """What is asked for: what all tasks have in common, what comes from each row, and how to go about it."""

    task: NewTask
    picks: Picks
    name: str | None
    skip_bad: bool
    quiet: bool


def load_file(session: Session, source: Source, wish: Wish) -> int:
    """Enqueues the rows of a file, all of them or none, and tells how many there were."""
    if wish.task.codec not in ("json", "msgpack"):
        raise click.UsageError("--from makes a payload of each row: --codec is json or msgpack.")
    _check_picks(wish.picks)
    checks.check_new_task(session.tenant, replace(wish.task, command=wish.task.command or "any"), Limits())
    if wish.name is not None:
        checks.check_label("load", wish.name)
    begin_s = time.perf_counter()
    with ExitStack() as stack:
        reader = source.open(stack)
        _check_names(wish.picks, reader.names, source.name)
        aside = stack.enter_context(Aside(source, reader.unit, wish.skip_bad))
        store, runner = stack.enter_context(session.steps(create=True))
        tasks = Tasks(wish, session.tenant, store.limits)
        load = Load(asking(store), session.tenant, wish.name or _name_of(source, wish))

        def stage(chunk: Rows) -> bool:
            runner.run(load.stage(chunk))
            return not load.already

        try:
            _read_all(reader, source.name, tasks, aside, stage)
            source.check_unchanged()
            done = _commit(load, runner)
        except BaseException:
            runner.run(load.drop())
            raise
    if done.rows:
        for option, field in tasks.unseen.items():
            note(f"No row has a field {field!r} for {option}: check the name.")
    return _tell(session, wish, load.name, done, aside, time.perf_counter() - begin_s)


def _check_picks(picks: Picks) -> None:
    named: dict[str, str] = {}
    for option, field in picks.options().items():
        if field in named:
            raise click.UsageError(f"{named[field]} and {option} both name {field!r}: a field says one thing.")
        named[field] = option


def _check_names(picks: Picks, names: Sequence[str] | None, file: str) -> None:
    for option, field in picks.options().items():
        if names is not None and field not in names:
            raise click.UsageError(f"{option}: {file} has no field {field!r}. It has: {', '.join(names)}.")


def _commit(load: Load, runner: Runner) -> Committed:
    try:
        return runner.run(load.commit())
    except KeyboardInterrupt:
        again = "Run the same call again: nothing is enqueued twice." if load.named else "`dibs queues` shows which."
        note(f"Interrupted while it was being committed: all of it is enqueued, or nothing. {again}")
        raise


def _read_all(reader: Reader, name: str, tasks: Tasks, aside: Aside, stage: Callable[[Rows], bool]) -> None:
    """Stages what becomes of the rows, chunk by chunk, unless the store knows them already."""
    try:
        with rows_progress(f"load {name}", reader.total) as advance:
            for block in reader.blocks():
                good = aside.sort_out(block, tasks.made_of(block.rows))
                if not all(map(stage, tasks.chunks(good))):
                    return
                advance(block.size, len(block.rows))
    except KeyboardInterrupt:
        note("Interrupted: nothing was enqueued.")
        raise


def _name_of(source: Source, wish: Wish) -> str | None:
    """The same file, unchanged, and the same call have the same name; what comes through a pipe has none."""
    identity = source.identity()
    if identity is None:
        return None
    call = [identity, source.form, _said(wish.task), wish.picks]
    return f"file-{blake2b(msgspec.json.encode(call), digest_size=16).hexdigest()}"


def _said(task: NewTask) -> dict[str, Any]:
    """What a task has that is not the default."""
    usual = asdict(NewTask(command=""))
    return {name: value for name, value in asdict(task).items() if value != usual[name]}


def _tell(session: Session, wish: Wish, name: str, done: Committed, aside: Aside, seconds: float) -> int:
    per_s = round(done.rows / seconds)
    if wish.quiet:
        pass
    elif session.json:
        shape: Json = {"load": name, "enqueued": done.rows, "already": done.already, "set_aside": aside.count}
        echo_json(shape | {"set_aside_in": aside.file and str(aside.file), "seconds": seconds, "rows_per_s": per_s})
    elif done.already:
        again = "" if wish.name else " Under a name of its own, with --load, it is loaded again."
        click.echo(f"Already loaded, nothing enqueued.{again}")
    else:
        click.echo(f"{plural(done.rows, 'task')} enqueued in {seconds:.1f} s ({count_text(per_s)} rows/s).")
    if aside.count:
        note(f"{plural(aside.count, aside.unit)} set aside in {aside.file}, with the reasons.")
    return Exit.NEGATIVE if aside.count else Exit.OK


# ------------------------------------------------------------------------------------------- what becomes of a row


class Told(NamedTuple):
    """A row that says more than its payload."""

    payload: bytes
    key: str | None
    options: NewTask


Made = bytes | Told
"""What becomes of a row: a payload, where it says nothing else."""


class Tasks:
    """Makes tasks of rows."""

    def __init__(self, wish: Wish, tenant: str, limits: Limits) -> None:
        self._task = replace(wish.task, command=wish.task.command or "any")
        self._needs_command = not wish.task.command
        self._picks = wish.picks
        self._takes_out = replace(wish.picks, key=None, limit_key=None) != Picks()
        self._has_options = replace(wish.picks, key=None) != Picks()
        self.unseen = wish.picks.options()
        """The fields that no row had so far."""
        self._picking = wish.picks != Picks()
        self._tenant = tenant
        self._limits = limits
        self._options = lru_cache(maxsize=4 * BATCH_MAX)(self._made_options)

    def made_of(self, rows: Sequence[Row]) -> Sequence[Made | Bad]:
        """Returns what becomes of each row, or why it is no task."""
        if self._task.codec == "json" and not self._picking:
            texts = [row for row in rows if type(row) is bytes]
            if len(texts) == len(rows) and self._are_good(texts):
                return texts
        return [self._one(row) for row in rows]

    def chunks(self, made: Sequence[Made]) -> Iterator[Rows]:
        """Yields chunks of a load of what was made of rows."""
        if self._picking:
            told = [one for one in made if isinstance(one, Told)]
            return map(self._chunk, batches(told, {}, lambda one: len(one.payload)))
        payloads = [one for one in made if isinstance(one, bytes)]
        return (Rows([*some], [self._task]) for some in batches(payloads, {}, len))

    def _chunk(self, told: Sequence[Told]) -> Rows:
        options = {id(one.options): one.options for one in told}
        numbers = {name: number for number, name in enumerate(options)}
        kinds = [numbers[id(one.options)] for one in told] if len(options) > 1 else []
        keys = [one.key for one in told] if self._picks.key is not None else []
        return Rows([one.payload for one in told], [*options.values()], kinds, keys)

    def _are_good(self, texts: Sequence[bytes]) -> bool:
        """Whether all can be taken as they are: a quick look for the usual case."""
        try:
            deque(map(_decode_json, texts), maxlen=0)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        return max(map(len, texts)) <= self._limits.payload_max_bytes

    def _one(self, row: Row) -> Made | Bad:
        if isinstance(row, Bad):
            return row
        try:
            value = _value(row) if isinstance(row, bytes) else dict(row)
            key, options = self._picked(value) if self._picking else (None, self._task)
            # JSON that nothing was taken out of is kept as it is written.
            whole = self._task.codec == "json" and not self._takes_out
            payload = row if whole and isinstance(row, bytes) else codecs.encode(value, self._task.codec)
            checks.check_payload(payload, self._limits)
        except InvalidInput as error:
            return Bad(error, row)
        return Told(payload, key, options) if self._picking else payload

    def _picked(self, value: Any) -> tuple[str | None, NewTask]:
        """Returns the key and the options that a row has, and takes the options out of it."""
        if not isinstance(value, dict):
            raise CodecError("it is no object, so that no field can be taken from it")
        if self.unseen:
            self.unseen = {option: field for option, field in self.unseen.items() if field not in value}
        picks, key = self._picks, None
        if picks.key is not None:
            key = key_of(value, picks.key)
            checks.check_key(key)
        if not self._has_options:
            return key, self._task
        return key, self._options(
            _option(value, picks.limit_key, _key, stays=True),
            _option(value, picks.command, _text),
            _option(value, picks.priority, _whole),
            _option(value, picks.delay, _duration_s),
            _option(value, picks.run_at, _time_ms),
        )

    def _made_options(
        self,
        limit_key: str | None,
        command: str | None,
        priority: int | None,
        delay_s: float | None,
        run_at_ms: int | None,
    ) -> NewTask:
        if self._needs_command and command is None:
            raise InvalidOption(f"it has no command under {self._picks.command!r}, and none is given for all")
        named: dict[str, Any] = {"limit_key": limit_key, "command": command, "priority": priority}
        named |= {"delay_s": delay_s, "run_at_ms": run_at_ms}
        task = replace(self._task, **{name: value for name, value in named.items() if value is not None})
        checks.check_new_task(self._tenant, task, self._limits)
        return task


def _option(
    value: dict[str, Any], field: str | None, read: Callable[[str, object], T], *, stays: bool = False
) -> T | None:
    if field is None:
        return None
    found = value.get(field) if stays else value.pop(field, None)
    return None if found is None else read(field, found)


_decode_json = msgspec.json.Decoder().decode


def _value(text: bytes) -> Any:
    try:
        return codecs.decode(text, "json")
    except CodecError as error:
        raise CodecError(f"not JSON ({str(error.__cause__ or error).rstrip('.')})") from error


def key_of(value: Any, field: str) -> str:
    """Returns the key that a payload has under a field."""
    key = value.get(field) if isinstance(value, dict) else None
    if key is None or isinstance(key, bool | dict | list | float):
        raise CodecError(f"the payload has no text or whole number under {field!r} to be its key")
    return str(key)


def _key(field: str, value: object) -> str:
    if isinstance(value, bool | dict | list | float):
        raise InvalidOption(f"{field} is {value!r}: use a text or whole number")
    return str(value)


def _text(field: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise InvalidOption(f"{field} is {value!r}: use a text")


def _whole(field: str, value: object) -> int:
    """Also of 3.0 and "3.0": who makes files from tables with gaps in them gets such numbers."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise InvalidOption(f"{field} is {value!r}: use a whole number")
    return int(number)


def _duration_s(field: str, value: object) -> float:
    try:
        delay_s = value if isinstance(value, float) and value >= 0 else read_duration_s(value)
    except ValueError as error:
        raise InvalidOption(f"{field} is {value!r}: {error}") from None
    if delay_s > DELAY_HORIZON_S:
        raise InvalidOption(f"{field} is {value!r}: use at most {exact_duration_text(DELAY_HORIZON_S)}")
    return delay_s


def _time_ms(field: str, value: object) -> int:
    said = f"{field} is {repr(value) if isinstance(value, str) else value}"
    try:
        at = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        raise InvalidOption(f"{said}: use a time such as 2030-01-31T08:00:00Z") from None
    if at.tzinfo is None:
        raise InvalidOption(f"{said}: say which time zone, with Z for UTC or an offset such as +02:00")
    at_ms = round(at.timestamp() * 1000)
    if not 0 <= at_ms <= checks.RUN_AT_MAX_MS:
        raise InvalidOption(f"{said}: use a time from 1970 to 4199")
    return at_ms


# ------------------------------------------------------------------------------------------------------- bad rows


class Aside:
    """Where bad rows go: with `skip`, into a file beside the source; without, the first one ends the load."""

    def __init__(self, source: Source, unit: str, skip: bool) -> None:
        self._source = source
        self._skip = skip
        self._stream: BinaryIO | None = None
        self.unit = unit
        self.count = 0
        self.file: Path | None = None

    def sort_out(self, block: Block, made: Sequence[Made | Bad]) -> list[Made]:
        """Returns those that became something."""
        good = [one for one in made if not isinstance(one, Bad)]
        if len(good) < len(made):
            for number, one in zip(block.numbers, made, strict=True):
                if isinstance(one, Bad):
                    self._put(number, one)
        return good

    def _put(self, number: int, bad: Bad) -> None:
        if not self._skip:
            raise type(bad.error)(
                f"{self._source.name}, {self.unit} {number}: {bad.error}\n"
                "Nothing was enqueued. --skip-bad sets such rows aside and loads the others."
            )
        self.count += 1
        self._opened().write(msgspec.json.encode({self.unit: number, "error": str(bad.error), "row": _shown(bad.row)}))
        self._opened().write(b"\n")

    def _opened(self) -> BinaryIO:
        if self._stream is None:
            self.file = Path(f"{self._source.name}.bad.jsonl")
            try:
                self._stream = self.file.open("wb")
            except OSError as error:
                raise click.UsageError(f"{self.file} cannot be written: {error.strerror}.") from error
        return self._stream

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()


def _shown(row: Any) -> Any:
    """A row as it can be written, whatever is wrong with it."""
    if isinstance(row, bytes):
        return row.decode(errors="backslashreplace")
    try:
        msgspec.json.encode(row)
    except (TypeError, ValueError, RecursionError):
        return ascii(row)
    return row
