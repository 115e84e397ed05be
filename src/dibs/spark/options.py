"""What a DataFrame reader or writer is told, read once into a frozen value, on the driver.

Each option is a field of one of the values below: its name on Spark's side is the field's in camel case (Spark itself
does not tell upper from lower case), and its type says how the text is read. An option that is unknown, missing or out
of range is an :class:`~dibs.errors.InvalidOption` before any task starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from dibs import checks
from dibs.errors import InvalidName, InvalidOption
from dibs.task import (
    DELAY_HORIZON_S,
    MAX_ATTEMPTS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    EventKind,
    Status,
)

View = Literal["tasks", "results", "dead", "events", "queues"]
Action = Literal["replay", "purge", "cancel"]
Codec = Literal["json", "msgpack", "raw"]

#: Spark's own, which every sink or source is handed along with its options.
SPARKS_OWN = frozenset(
    {"checkpointlocation", "queryname", "mergeschema", "__dummy__", "provider", "owner", "external", "comment"}
)
#: What `payload` says, as far as it can be told without Spark: a word of ours, or names with types.
_SCHEMA = re.compile(r"^\s*(string|binary)\s*$|\S[\s:]+\S", re.IGNORECASE)
_FIELD_AT = re.compile(r" - at `\$\.(\w+)`")

Whole = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=DELAY_HORIZON_S)]


class Where(Struct, frozen=True, kw_only=True, rename="camel"):
    """The store, and whose tasks are meant."""

    url: str
    """The store: a directory, `lmdb:DIR`, `shards:DIR`, `http(s)://HOST`. Executors must reach it, too."""
    tenant: str = "default"
    """Whose tasks."""


class ReadOptions(Where, frozen=True, kw_only=True, rename="camel"):
    """How a view is read as a batch. The tenant `*` is all of them, which is the operator's."""

    view: View = "tasks"
    """What is read: `tasks`, `results`, `dead`, `events` or `queues`."""
    payload: str = "string"
    """Payloads and results as `string` (text of what is JSON), as `binary` (the bytes as they are), or as columns: a
    schema in Spark's words, such as `url STRING, width INT`."""
    rows_per_partition: Annotated[int, Meta(ge=1_000, le=1_000_000)] = 200_000
    """About so many tasks or events are one Spark task's."""
    command: str | None = None
    """Only of this queue, or of these: `fetch` or `fetch,resize`."""
    status: str | None = None
    """Only of this status, or of these, such as `COMPLETED,CANCELLED`. Of `tasks` and `results`."""
    kind: str | None = None
    """Only of this kind, or of these, such as `claimed,completed`. Of `events`."""
    since: datetime | None = None
    """Only from this time on (`2026-01-31T12:00:00Z`): when a task was enqueued, in `results` and `dead` when it ended,
    in `events` when it happened. A time without a zone is in UTC."""
    until: datetime | None = None
    """Only before this time."""
    push_filters: bool = False
    """Whether filters that Spark hands over are taken. Needs `spark.sql.python.filterPushdown.enabled`. Spark keeps one
    plan for a DataFrame that was loaded, with the filters of the query that was planned last: with this, give each
    filter a DataFrame of its own. The options above have no such trap."""


class StreamReadOptions(ReadOptions, frozen=True, kw_only=True, rename="camel"):
    """How the journal is read as a stream: the view is `events`."""

    starting_position: Literal["earliest", "latest"] = "earliest"
    """Where a query without a checkpoint begins: with the oldest event that is kept, or with what comes next."""
    max_events_per_trigger: Whole | None = None
    """So many events a micro-batch has at most. Without it: what is there."""
    fail_on_data_loss: bool = True
    """Whether the query stops if events were trimmed, or the store was replaced, before they were read."""


class WriteOptions(Where, frozen=True, kw_only=True, rename="camel"):
    """How rows become tasks. What is said here holds for all rows that have no column saying otherwise."""

    command: str | None = None
    """The queue of rows that have no `command` of their own."""
    codec: Codec | None = None
    """How a payload is written: `json`, `msgpack` or `raw`. Without it: `raw` for a binary column, else `json`."""
    priority: Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None = None
    """0 to 9, higher first."""
    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS_MAX)] | None = None
    """Deliveries before a task becomes a dead letter."""
    delay_seconds: Seconds = 0.0
    """Invisible for so long, from the commit on."""
    expires_seconds: Annotated[float, Meta(ge=0.001, le=DELAY_HORIZON_S)] | None = None
    """What has not started by then ends cancelled."""
    result_ttl_seconds: Seconds | None = None
    """How long results are kept."""
    load: str | None = None
    """The name of the load: a write of this name counts once, however often it is repeated. Batch only."""
    app_id: str | None = None
    """The name of the stream's load. Without it: the id of the streaming query, which lives as long as its checkpoint.
    Streams only."""
    bad_rows: Annotated[str, Meta(min_length=1)] = "fail"
    """`fail`: the first row that cannot become a task fails the job, and names itself. Else a directory (or URI) that
    driver and executors reach: such rows are set aside there as JSON lines, and the others are enqueued."""


class ActionOptions(Where, frozen=True, kw_only=True, rename="camel"):
    """What is done to the tasks whose ids a DataFrame has."""

    action: Action
    """`replay` dead letters, `purge` what has ended, or `cancel` what has not."""


Options = TypeVar("Options", bound=Where)


def parse(given: Mapping[str, Any], kind: type[Options]) -> Options:
    """Returns the options as a value of this kind, or says which of them is wrong and what to write."""
    fields = {field.encode_name.lower(): field.encode_name for field in msgspec.structs.fields(kind)}
    named: dict[str, Any] = {}
    for name, value in given.items():
        if name.lower() in fields:
            named[fields[name.lower()]] = value
        elif name.lower() not in SPARKS_OWN:
            raise InvalidOption(_unknown(name, list(fields.values())))
    if "url" not in named:
        raise InvalidOption("option url is missing: name the store, as in .option('url', 'lmdb:DIR')")
    try:
        options = msgspec.convert(named, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidOption(_told(str(error), named, kind)) from None
    _check(options)
    return replace(options, url=_whole(options.url))


def _whole(url: str) -> str:
    """Returns a URL that means the same in every process of this machine, whatever directory it works in."""
    for scheme in ("lmdb:", "shards:"):
        path = url.removeprefix(scheme)
        if path != url:
            return url if not path or path.startswith(("[", "lmdb:")) else f"{scheme}{Path(path).absolute()}"
    return url if not url or ":" in url.partition("/")[0] else str(Path(url).absolute())


def _unknown(name: str, known: list[str]) -> str:
    if name.lower() == "path":
        return "name the store by .option('url', …), not by a path: load() and save() take none"
    close = get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"option {name} is not known here: {advice}"


def _told(error: str, named: Mapping[str, Any], kind: type[Where]) -> str:
    at = _FIELD_AT.search(error)
    if at is None:
        return f"the options cannot be read: {error}"
    name, said = at[1], _FIELD_AT.sub("", error).replace("RFC3339 encoded datetime", "time: write 2026-01-31T12:00:00Z")
    [words] = [_words(field.type) for field in msgspec.structs.fields(kind) if field.encode_name == name]
    advice = f"use one of {', '.join(words)}" if words else f"{said[:1].lower()}{said[1:]}"
    return f"option {name} is {named.get(name)!r}: {advice}"


def _words(kind: Any) -> list[str]:
    """The words that an option can be, where it is one of a few."""
    return [one for part in (kind, *get_args(kind)) if get_origin(part) is Literal for one in get_args(part)]


def _check(options: Where) -> None:
    url, tenant = options.url, options.tenant
    if url.startswith(("memory:", "shards:memory:")):
        raise InvalidOption(f"option url is {url!r}: Spark's processes cannot share it; use a directory or a server")
    if not (isinstance(options, ReadOptions) and tenant == checks.ALL_TENANTS):
        _named("tenant", checks.check_tenant, tenant)
    if isinstance(options, ReadOptions):
        _check_read(options)
    if isinstance(options, ReadOptions) and not _SCHEMA.search(options.payload):
        raise InvalidOption(
            f"option payload is {options.payload!r}: use string, binary, or a schema such as 'url STRING, width INT'"
        )
    if isinstance(options, WriteOptions):
        if options.command is not None:
            _named("command", checks.check_command, options.command)
        for name, label in (("load", options.load), ("appId", options.app_id)):
            if label is not None:
                _named(name, lambda text: checks.check_label("load", text), label)


def _check_read(options: ReadOptions) -> None:
    for command in words(options.command):
        _named("command", checks.check_command, command)
    for name, known, views in (("status", Status, ("tasks", "results")), ("kind", EventKind, ("events",))):
        given = words(getattr(options, name))
        if given and options.view not in views:
            raise InvalidOption(f"option {name} is for {' and '.join(views)}: the view is {options.view}")
        for word in given:
            if word not in list(known):
                raise InvalidOption(f"option {name} is {word!r}: use {', '.join(known)}, or some of these")
    if options.view == "queues" and (options.since or options.until):
        raise InvalidOption("options since and until are for tasks, results, dead and events: the view is queues")


def words(text: str | None) -> list[str]:
    """Returns what an option names: one, or several with commas between them."""
    return [] if text is None else [word.strip() for word in text.split(",")]


def _named(name: str, check: Any, value: str) -> None:
    try:
        check(value)
    except InvalidName as error:
        raise InvalidOption(f"option {name}: {error}") from error
