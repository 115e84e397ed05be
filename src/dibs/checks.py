"""The one place that says what input is acceptable. Every check raises an `InvalidInput` that tells what to do.

Called by :class:`dibs.stores.protocol.Store` before anything reaches a transaction, so that no store checks again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import NoneType
from typing import Any

from msgspec import Struct, msgpack
from msgspec.structs import astuple, replace

from dibs.codec import check_codec_name
from dibs.errors import InvalidInput, InvalidName, InvalidOption, PayloadTooLarge
from dibs.ids import ID_BYTES, key_digest, slot_of
from dibs.task import (
    ALL_COMMANDS,
    BATCH_MAX,
    CHUNKS_MAX,
    DELAY_HORIZON_S,
    LEASE_MAX_S,
    LEASE_MIN_S,
    MAX_ATTEMPTS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    WEIGHT_MAX,
    ByKey,
    ErrorInfo,
    Filter,
    Heartbeat,
    KeyLimit,
    Kind,
    NewTask,
    Place,
    Progress,
    QueueConfig,
    QueueLimits,
    Rows,
    Settlement,
    Status,
    TaskRef,
    WorkerInfo,
)

ALL_TENANTS = "*"
"""The operator's tenant: every tenant at once, for the verbs that say they take it."""
NAME_MAX_BYTES = 128
KEY_MAX_BYTES = 512
TEXT_MAX_CHARS = 200
ERROR_TEXT_MAX_CHARS = 64 * 1024
WAIT_MAX_S = 3600.0
TTL_MAX_S = 10 * 366 * 86_400.0
TIMEOUT_MAX_S = 7 * 86_400.0
LIMIT_COST_MAX = 1_000_000
IN_FLIGHT_MAX = 1_000_000
RATE_MIN, RATE_MAX = 1 / 86_400, 1_000_000
COMMANDS_MAX = 100
CHUNK_MAX_BYTES = 1 << 20
SEQ_MAX = (1 << 62) - 1
TOKEN_BYTES = 16
RUN_AT_MAX_MS = 1 << 46
"""Year 4199: far past the delay horizon of any clock that is roughly right."""

_COMPLETE = Kind.COMPLETE
_OPTIONS_FROM = NewTask.__struct_fields__.index("priority")
_NO_OPTIONS = astuple(NewTask(command="c"))[_OPTIONS_FROM:]
_NO_CONFIG = QueueConfig()
_NO_LIMITS = QueueLimits()

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_COMMAND = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PLAIN_TEXT = re.compile(r"[^\x00-\x1f\x7f]*")


@lru_cache(maxsize=4096)
def _is_tenant(name: str) -> bool:
    return _TENANT.fullmatch(name) is not None


@lru_cache(maxsize=4096)
def _is_command(name: str) -> bool:
    return _COMMAND.fullmatch(name) is not None


@lru_cache(maxsize=4096)
def _is_plain(name: str) -> bool:
    return _PLAIN_TEXT.fullmatch(name) is not None


class Limits(Struct, frozen=True):
    """How large one payload and one result may be."""

    payload_max_bytes: int = 1 << 20
    result_max_bytes: int = 1 << 20


def check_tenant(name: str) -> None:
    """A tenant is 1 to 64 of ``a-z 0-9 . _ -``, starting with a letter or digit."""
    if type(name) is not str or not _is_tenant(name):
        if name == ALL_TENANTS:
            raise InvalidName("'*' is every tenant, which claim, events and runs take: name a single tenant here")
        raise InvalidName(f"{_short(name)} is not a tenant: use 1 to 64 of a-z 0-9 . _ -, starting with a-z or 0-9")


def check_command(name: str) -> None:
    """A command is 1 to 128 of ``A-Z a-z 0-9 . _ -``, starting with a letter, digit or underscore."""
    if type(name) is not str or not _is_command(name):
        raise InvalidName(
            f"{_short(name)} is not a command: use 1 to 128 of A-Z a-z 0-9 . _ -, starting with a letter, digit or _"
        )


def check_commands(commands: Sequence[str]) -> None:
    """A claim names 1 to 100 different commands."""
    if not isinstance(commands, list | tuple) or not 1 <= len(commands) <= COMMANDS_MAX:
        raise InvalidOption(f"a claim takes a list of 1 to {COMMANDS_MAX} commands, not {_short(commands)}")
    for command in commands:
        check_command(command)
    if 1 < len(commands) != len(set(commands)):
        raise InvalidOption(f"a claim names each command once, and this one {_short(commands)}")


def check_label(what: str, name: str) -> None:
    """Worker, reader and load names are printable and at most 128 bytes."""
    if type(name) is not str or not name or not _is_plain(name):
        raise InvalidName(f"{_short(name)} is not a {what} name: use printable text without control characters")
    if len(name) > NAME_MAX_BYTES or len(_encoded(what, name)) > NAME_MAX_BYTES:
        raise InvalidName(f"the {what} name {_short(name)} is over {NAME_MAX_BYTES} bytes: shorten it")


def check_key(key: str) -> None:
    """A deduplication key is text of 1 to 512 bytes."""
    if not isinstance(key, str) or not key:
        raise InvalidName(f"{_short(key)} is not a key: use non-empty text")
    if len(_encoded("key", key)) > KEY_MAX_BYTES:
        raise InvalidName(f"the key {_short(key)} is over {KEY_MAX_BYTES} bytes: use a digest of it")


def check_id(task_id: bytes) -> None:
    """An id is 16 bytes, as `new_id` mints them."""
    if type(task_id) is not bytes or len(task_id) != ID_BYTES:
        raise InvalidName(f"{_short(task_id)} is not a task id: use the 16 bytes of new_id() or id_from_text()")


def check_ref(ref: TaskRef) -> None:
    """A task is named by its id or by command and key."""
    if isinstance(ref, ByKey):
        check_command(ref.command)
        check_key(ref.key)
    else:
        check_id(ref)


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """`value` is a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidOption(f"{name} is {_short(value)}: use a number from {low:g} to {high:g}")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """`value` is a whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidOption(f"{name} is {_short(value)}: use a whole number from {low} to {high}")


def check_limit(limit: int) -> None:
    """A batch is 1 to 1,000."""
    check_whole("limit", limit, 1, BATCH_MAX)


def check_new_task(tenant: str, task: NewTask, limits: Limits) -> None:
    """Everything about a task that can be wrong before it meets the queue."""
    if type(task) is not NewTask:
        raise InvalidOption(f"enqueue takes NewTask values, not {type(task).__name__}")
    check_command(task.command)
    if type(task.payload) is not bytes or len(task.payload) > limits.payload_max_bytes:
        check_payload(task.payload, limits)
    if task.codec != "json":
        check_codec_name(task.codec)
    if task.id:
        check_id(task.id)
    # Most tasks leave everything else to the queue: one comparison then does for all of it.
    if astuple(task)[_OPTIONS_FROM:] == _NO_OPTIONS and type(task.keep) is bool and type(task.limit_cost) is int:
        return
    if task.delay_s != 0:
        check_number("delay_s", task.delay_s, 0, DELAY_HORIZON_S)
    if task.key is not None:
        _check_keyed(tenant, task)
    _check_task_options(task)


def check_tasks(what: str, tasks: Sequence[NewTask]) -> Sequence[NewTask]:
    """Everything in a list is a `NewTask`. Returns the list."""
    for index, task in enumerate(tasks):
        if type(task) is not NewTask:
            raise InvalidOption(f"{what} takes NewTask values, and number {index} is {type(task).__name__}")
    return tasks


def check_payload(payload: bytes, limits: Limits) -> None:
    """A payload is bytes, within the limit."""
    if type(payload) is not bytes:
        raise InvalidOption(f"the payload is {type(payload).__name__}: encode it to bytes first (dibs.codec)")
    if len(payload) > limits.payload_max_bytes:
        raise PayloadTooLarge(
            f"the payload is {len(payload)} bytes and the limit {limits.payload_max_bytes}: "
            "keep the data elsewhere and send a reference, or raise payload_max_bytes"
        )


def check_rows(tenant: str, rows: Rows, limits: Limits) -> None:
    """A chunk is 1 to 1,000 rows, each a good task without an id of its own, and at most 1 MiB unless it is one row.
    What rows share is checked once."""
    if type(rows) is not Rows or not all(type(column) is list for column in astuple(rows)):
        raise InvalidOption(f"{_short(rows)} is given where Rows belong: make them of lists")
    count = len(rows.payloads)
    check_whole("the number of rows", count, 1, BATCH_MAX)
    for column in (rows.kinds, rows.keys):
        if column and len(column) != count:
            raise InvalidOption(f"a column has {len(column)} values and there are {count} rows: give one for each")
    if any(type(kind) is not int or not 0 <= kind < len(rows.options) for kind in rows.kinds) or not rows.options:
        raise InvalidOption("kinds name options that are not there: use their numbers")
    for kind, options in enumerate(rows.options):
        with _naming(rows.kinds.index(kind) if rows.kinds and kind in rows.kinds else 0):
            check_new_task(tenant, options, limits)
            if options.id or options.key is not None or options.payload:
                raise InvalidOption("a row of a load has no id of its own: it gets one from its chunk's id")
    _check_payloads(rows.payloads, limits)
    _check_keys(rows.keys)


def _check_keys(keys: Sequence[str | None]) -> None:
    row = 0
    try:
        for row, key in enumerate(keys):  # noqa: B007 named if it is bad
            if key is not None:
                check_key(key)
    except InvalidInput as error:
        raise type(error)(f"row {row}: {error}") from error


def _check_payloads(payloads: Sequence[bytes], limits: Limits) -> None:
    if set(map(type, payloads)) != {bytes} or max(map(len, payloads)) > limits.payload_max_bytes:
        for row, payload in enumerate(payloads):
            with _naming(row):
                check_payload(payload, limits)
    size = sum(map(len, payloads))
    if size > CHUNK_MAX_BYTES and len(payloads) > 1:
        raise PayloadTooLarge(f"the payloads are {size} bytes, a chunk takes {CHUNK_MAX_BYTES}: stage fewer rows")


@contextmanager
def _naming(row: int) -> Iterator[None]:
    """Says which row of a chunk an error is about."""
    try:
        yield
    except InvalidInput as error:
        raise type(error)(f"row {row}: {error}") from error


def check_chunk_id(chunk_id: bytes) -> None:
    """A chunk id is 16 bytes, as `new_id` mints them."""
    if type(chunk_id) is not bytes or len(chunk_id) != ID_BYTES:
        raise InvalidName(f"{_short(chunk_id)} is not a chunk id: use the 16 bytes of new_id()")


def check_load(name: str, seq: int, chunk_ids: Sequence[bytes]) -> None:
    """A commit has a name, a number and at most 100,000 chunks, each once."""
    check_label("load", name)
    check_whole("seq", seq, 0, SEQ_MAX)
    check_chunk_ids(chunk_ids)
    if len(set(chunk_ids)) != len(chunk_ids):
        raise InvalidOption("a commit names each chunk once, and this one some of them several times")


def check_chunk_ids(chunk_ids: Sequence[bytes]) -> None:
    """At most 100,000 chunk ids."""
    check_whole("the number of chunks", len(chunk_ids), 0, CHUNKS_MAX)
    for chunk_id in chunk_ids:
        check_chunk_id(chunk_id)


def _check_keyed(tenant: str, task: NewTask) -> None:
    assert task.key is not None
    check_key(task.key)
    if task.id and slot_of(task.id) != slot_of(key_digest(tenant, task.command, task.key)):
        raise InvalidName("the id is not in the slot of its key: mint it with new_id(tenant, command, key)")


def _check_task_options(task: NewTask) -> None:
    if task.run_at_ms is not None:
        if task.delay_s != 0:
            raise InvalidOption("delay_s and run_at_ms are both given: use one of them")
        check_whole("run_at_ms", task.run_at_ms, 0, RUN_AT_MAX_MS)
    if task.timeout_s is not None:
        check_number("timeout_s", task.timeout_s, 0.001, TIMEOUT_MAX_S)
    if task.expires_s is not None:
        check_number("expires_s", task.expires_s, 0.001, DELAY_HORIZON_S)
    if task.traceparent is not None:
        _check_text("traceparent", task.traceparent)
    if task.limit_key is not None:
        check_key(task.limit_key)
    if task.on_duplicate not in ("return", "replay_dead"):
        raise InvalidOption(f"on_duplicate is {_short(task.on_duplicate)}: use 'return' or 'replay_dead'")
    if task.limit_cost != 1 or type(task.limit_cost) is not int:
        check_whole("limit_cost", task.limit_cost, 1, LIMIT_COST_MAX)
    if type(task.keep) is not bool:
        raise InvalidOption(f"keep is {_short(task.keep)}: use True or False")
    _check_defaults(task)


def _check_defaults(options: NewTask | QueueConfig) -> None:
    """The options that both a task and its queue may set."""
    if options.priority is not None:
        check_whole("priority", options.priority, PRIORITY_MIN, PRIORITY_MAX)
    if options.max_attempts is not None:
        check_whole("max_attempts", options.max_attempts, 1, MAX_ATTEMPTS_MAX)
    if options.lease_s is not None:
        check_lease_s(options.lease_s)
    if options.result_ttl_s is not None:
        check_number("result_ttl_s", options.result_ttl_s, 0, TTL_MAX_S)
    if options.retention_s is not None:
        check_number("retention_s", options.retention_s, 0, TTL_MAX_S)


def check_queue_config(command: str, config: QueueConfig) -> None:
    """A queue's configuration obeys the ranges of the options it is the default for; the whole tenant's (`*`) has a
    few fields of it only."""
    _check_typed(config, QueueConfig)
    if command == ALL_COMMANDS:
        _check_tenant_config(config)
    else:
        check_command(command)
        if config.weight is not None:
            raise InvalidOption("a weight is the whole tenant's: configure the command '*'")
    _check_defaults(config)
    if config.dead_retention_s is not None:
        check_number("dead_retention_s", config.dead_retention_s, 0, TTL_MAX_S)
    if config.limits is not None:
        _check_limits(config.limits)


def _check_tenant_config(config: QueueConfig) -> None:
    if replace(config, paused=False, limits=None, weight=None) != _NO_CONFIG:
        raise InvalidOption("all the queues of a tenant ('*') have paused, limits.in_flight and weight in common only")
    if config.limits is not None and config.limits.per_key is not None:
        raise InvalidOption("limits per key are a queue's: configure its command, not '*'")
    if config.weight is not None:
        check_whole("weight", config.weight, 1, WEIGHT_MAX)


def _check_limits(limits: QueueLimits) -> None:
    if limits == _NO_LIMITS:
        raise InvalidOption("limits without a limit: give in_flight or per_key, or leave limits out")
    if limits.in_flight is not None:
        check_whole("limits.in_flight", limits.in_flight, 1, IN_FLIGHT_MAX)
    if limits.per_key is not None:
        _check_key_limit(limits.per_key)


def _check_key_limit(limit: KeyLimit) -> None:
    if limit.in_flight is None and limit.rate is None:
        raise InvalidOption("a limit per key without a limit: give in_flight or rate")
    if limit.in_flight is not None:
        check_whole("limits.per_key.in_flight", limit.in_flight, 1, IN_FLIGHT_MAX)
    if limit.rate is not None:
        check_number("limits.per_key.rate", limit.rate, RATE_MIN, RATE_MAX)
    if limit.burst is not None:
        if limit.rate is None:
            raise InvalidOption("burst goes with rate: give both, or none")
        check_number("limits.per_key.burst", limit.burst, 1, RATE_MAX)


def check_lease_s(lease_s: float) -> None:
    """A lease is 1 s to 12 h."""
    check_number("lease_s", lease_s, LEASE_MIN_S, LEASE_MAX_S)


def check_token(token: bytes) -> None:
    """A token is the 16 bytes that a claim returned."""
    if type(token) is not bytes or len(token) != TOKEN_BYTES:
        raise InvalidName(f"{_short(token)} is not a lease token: use the 16 bytes that the claim returned")


def check_claim_id(claim_id: bytes) -> None:
    """A claim id is 16 bytes, as `new_id` mints them."""
    if type(claim_id) is not bytes or len(claim_id) != ID_BYTES:
        raise InvalidName(f"{_short(claim_id)} is not a claim id: use the 16 bytes of new_id()")


def check_heartbeat(beat: Heartbeat) -> None:
    """A heartbeat names a task and a token; its extension is a lease, its progress is finite."""
    if type(beat) is not Heartbeat:
        raise InvalidOption(f"heartbeat takes Heartbeat values, not {type(beat).__name__}")
    check_tenant(beat.tenant)
    check_id(beat.id)
    check_token(beat.token)
    if beat.extend_s is not None:
        check_lease_s(beat.extend_s)
    if beat.progress is not None:
        if type(beat.progress) is not Progress:
            raise InvalidOption(f"progress is {_short(beat.progress)}: use a Progress(done, total, note)")
        check_number("progress.done", beat.progress.done, 0, 1e15)
        if beat.progress.total is not None:
            check_number("progress.total", beat.progress.total, 0, 1e15)
        _check_text("progress.note", beat.progress.note)


def check_settlement(item: Settlement, limits: Limits) -> None:
    """A settlement carries only what its kind can use, within the limits."""
    if type(item) is not Settlement:
        raise InvalidOption(f"settle takes Settlement values, not {type(item).__name__}")
    check_tenant(item.tenant)
    if type(item.id) is not bytes or len(item.id) != ID_BYTES:
        check_id(item.id)
    if type(item.token) is not bytes or len(item.token) != TOKEN_BYTES:
        check_token(item.token)
    if item.kind is _COMPLETE:
        if item.result is not None:
            check_result(item.result, item.codec, limits)
    elif type(item.kind) is not Kind:
        raise InvalidOption(
            f"kind is {_short(item.kind)}: use one of {', '.join(f'Kind.{kind.name}' for kind in Kind)}"
        )
    elif item.result is not None:
        raise InvalidOption(f"a result goes with kind complete, not {item.kind}")
    if item.delay_s != 0:
        _check_retry_delay(item)
    if item.error is not None or item.reason is not None:
        _check_failure(item)
    if item.result_ttl_s is not None:
        if item.kind is not _COMPLETE:
            raise InvalidOption(f"result_ttl_s goes with kind complete, not {item.kind}")
        check_number("result_ttl_s", item.result_ttl_s, 0, TTL_MAX_S)


def _check_retry_delay(item: Settlement) -> None:
    if item.kind is not Kind.RETRY:
        raise InvalidOption(f"delay_s goes with kind retry, not {item.kind}")
    check_number("delay_s", item.delay_s, 0, DELAY_HORIZON_S)


def check_result(result: bytes, codec: str, limits: Limits) -> None:
    """A result is bytes, within the limit, of a codec."""
    if type(result) is not bytes:
        raise InvalidOption(f"the result is {type(result).__name__}: encode it to bytes first (dibs.codec)")
    if len(result) > limits.result_max_bytes:
        raise PayloadTooLarge(
            f"the result is {len(result)} bytes and the limit {limits.result_max_bytes}: "
            "keep the data elsewhere and return a reference, or raise result_max_bytes"
        )
    if codec != "json":
        check_codec_name(codec)


def _check_failure(item: Settlement) -> None:
    if item.kind is Kind.COMPLETE or item.kind is Kind.RELEASE:
        raise InvalidOption(f"error and reason go with kind retry or fail, not {item.kind}")
    if item.reason is not None:
        check_label("reason", item.reason)
    if item.error is not None:
        _check_typed(item.error, ErrorInfo)
        size = len(item.error.type) + len(item.error.message) + len(item.error.traceback)
        if size > ERROR_TEXT_MAX_CHARS:
            raise PayloadTooLarge(f"the error's text is {size} characters: cut it to {ERROR_TEXT_MAX_CHARS}")


def check_worker(info: WorkerInfo) -> None:
    """A worker's registration is small and has a name."""
    _check_typed(info, WorkerInfo)
    check_label("worker", info.name)
    _check_text("host", info.host)
    if len(info.commands) > COMMANDS_MAX:
        raise InvalidOption(f"a worker registers at most {COMMANDS_MAX} commands, not {len(info.commands)}")
    for command in info.commands:
        check_command(command)
    if len(info.tasks) > COMMANDS_MAX:
        raise InvalidOption(f"a worker registers at most {COMMANDS_MAX} tasks, not {len(info.tasks)}")
    for task_id in info.tasks:
        check_id(task_id)


def check_filter(which: Filter) -> None:
    """Every field of a filter is of its type; an unknown word would match nothing in silence."""
    _check_typed(which, Filter)
    if type(which.status) not in (Status, NoneType):
        raise InvalidOption(
            f"status is {_short(which.status)}: use one of {', '.join(f'Status.{one}' for one in Status)}"
        )
    if type(which.place) not in (Place, NoneType):
        raise InvalidOption(
            f"place is {_short(which.place)}: use one of {', '.join(f'Place.{one.name}' for one in Place)}"
        )
    if which.command is not None:
        check_command(which.command)
    for task_id in (which.id_from, which.id_until):
        if task_id is not None:
            check_id(task_id)


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str) or len(text) > TEXT_MAX_CHARS or not text.isprintable():
        raise InvalidOption(f"{name} is {_short(text)}: use printable text of at most {TEXT_MAX_CHARS} characters")


def _check_typed(value: Struct, kind: type[Struct]) -> None:
    """Every field has the type it is declared with; otherwise the record could be written and never read again."""
    if type(value) is not kind:
        raise InvalidOption(f"{_short(value)} is given where a {kind.__name__} belongs: make one")
    try:
        read_back = msgpack.decode(msgpack.encode(value), type=kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOption(f"{_short(value)} is not a proper {kind.__name__}: {error}") from error
    if read_back != value:
        raise InvalidOption(
            f"{_short(value)} is not a proper {kind.__name__}: it would read back as {_short(read_back)}"
        )


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidName(f"the {what} has a lone surrogate and cannot be stored: use well-formed text") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
