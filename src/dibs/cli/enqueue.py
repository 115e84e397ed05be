"""``dibs enqueue``: one task from the command line, or a stream of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import click
import msgspec

from dibs import codec as codecs
from dibs.cli import shapes
from dibs.cli.context import DURATION, TASK_ID, TIME, Command, Session, pass_session
from dibs.cli.errors import Exit, exit_code_of
from dibs.cli.loads import Picks, Wish, key_of, load_file
from dibs.cli.output import count_text, echo_json, echo_json_line, note, plural, progress
from dibs.cli.rows import Source, standard_input
from dibs.errors import CodecError
from dibs.ids import id_to_text
from dibs.shapes import Json
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, PRIORITY_MAX, PRIORITY_MIN, Duplicate, Enqueued, NewTask, Rejected

Outcome = Enqueued | Duplicate | Rejected
REFUSALS_SHOWN = 20
READ_BYTES = 1 << 20


@click.command(
    cls=Command,
    examples="""
    dibs enqueue thumbnail '{"url": "a.png", "width": 320}'
    dibs enqueue report @month.json --delay 5m --max-attempts 3
    dibs enqueue import --from rows.parquet
    dibs enqueue import --from rows.csv --load monday --skip-bad
    tail -f log | dibs enqueue import --lines --key-field sku --quiet
    """,
)
@click.argument("command", default="", metavar="[COMMAND]")
@click.argument("payload", default="", metavar="[PAYLOAD]")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="One task per row of JSON lines, CSV or Parquet (- for stdin): all of them at once, or none.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet"]),
    help="With --from: what FILE is; default: by its name.",
)
@click.option(
    "--load",
    metavar="NAME",
    help="With --from: a name under which rows are loaded once; default: made from FILE and this call.",
)
@click.option("--skip-bad", is_flag=True, help="With --from: set bad rows aside in FILE.bad.jsonl, and go on.")
@click.option("--lines", is_flag=True, help="One task per line of PAYLOAD, @FILE or - (the default), as they come.")
@click.option("--key", metavar="TEXT", help="Deduplication key: one task per key while it is kept.")
@click.option("--key-field", metavar="NAME",
              help="With --from or --lines: the key is this field of each payload, which must have it.")  # fmt: skip
@click.option("--limit-key-field", metavar="NAME", help="With --from: a row's --limit-key is this field, if it has it.")
@click.option("--command-field", metavar="NAME", help="With --from: a row's command is this field.")
@click.option("--priority-field", metavar="NAME", help="With --from: its priority, a whole number.")
@click.option("--delay-field", metavar="NAME", help="With --from: its delay, such as 90 or 5m.")
@click.option("--run-at-field", metavar="NAME", help="With --from: when, a time with its zone.")
@click.option("--on-duplicate", type=click.Choice(["return", "replay_dead"]), default="return", show_default=True,
              help="What a taken key does; replay_dead revives a dead letter.")  # fmt: skip
@click.option("--priority", type=click.IntRange(PRIORITY_MIN, PRIORITY_MAX), help="Higher first.")
@click.option("--delay", "delay_s", type=DURATION, help="Invisible for so long.")
@click.option("--run-at", "run_at_ms", type=TIME, help="Invisible until then, such as 2030-01-31T08:00:00Z.")
@click.option("--max-attempts", type=click.IntRange(min=1), help="Deliveries before it is a dead letter.")
@click.option("--lease", "lease_s", type=DURATION, help="How long a claim holds it without a heartbeat.")
@click.option("--timeout", "timeout_s", type=DURATION, help="How long one run may take.")
@click.option("--expires", "expires_s", type=DURATION, help="Cancelled if it has not started by then.")
@click.option("--result-ttl", "result_ttl_s", type=DURATION, help="How long its result is kept.")
@click.option("--retention", "retention_s", type=DURATION, help="How long its record and key are kept.")
@click.option("--keep/--no-keep", default=True, help="--no-keep: payload, key and result go at completion.")
@click.option("--codec", default="json", show_default=True, metavar="NAME",
              help="json, msgpack (PAYLOAD is JSON), raw or another (PAYLOAD is taken as it is).")  # fmt: skip
@click.option("--id", "task_id", type=TASK_ID, help="An id of your own: repeating the call changes nothing.")
@click.option("--traceparent", metavar="TEXT", help="W3C trace context, handed to the worker.")
@click.option("--limit-key", metavar="TEXT", help="Whose limits it counts against.")
@click.option("--limit-cost", type=click.IntRange(min=1), default=1, help="How much it counts there.")
@click.option("-q", "--quiet", is_flag=True, help="Print no ids.")
@pass_session
def enqueue(
    session: Session,
    /,
    command: str,
    payload: str,
    source: str | None,
    form: str | None,
    load: str | None,
    skip_bad: bool,
    lines: bool,
    key_field: str | None,
    limit_key_field: str | None,
    command_field: str | None,
    priority_field: str | None,
    delay_field: str | None,
    run_at_field: str | None,
    task_id: bytes | None,
    delay_s: float | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Put a task, or many, into a queue.

    COMMAND is what kind of work it is and names the queue. PAYLOAD is JSON text, @FILE, or - for stdin; without
    it, {}. Prints the id of each task; when it returns, the tasks survive a crash. Makes the store if there is none.

    With --from, each row of FILE is a payload. Nothing is visible before all are in; one bad row, Ctrl-C or a crash,
    and none is. The same call again loads nothing twice.
    """
    task = NewTask(command=command, id=task_id or b"", delay_s=delay_s or 0.0, **options)
    if source is not None:
        if task.key is not None or task.id or payload or lines:
            raise click.UsageError("--from takes its payloads from FILE: leave out PAYLOAD, --lines, --key and --id.")
        if not command and command_field is None:
            raise click.UsageError("Name the COMMAND, or the field that has it: --command-field.")
        picks = Picks(key_field, limit_key_field, command_field, priority_field, delay_field, run_at_field)
        return load_file(session, Source(source, form), Wish(task, picks, load, skip_bad, quiet))
    of_rows = [limit_key_field, command_field, priority_field, delay_field, run_at_field]
    if form or load is not None or skip_bad or any(field is not None for field in of_rows):
        raise click.UsageError("--format, --load, --skip-bad and the fields of rows go with --from.")
    if not command:
        raise click.UsageError("Missing argument 'COMMAND'.")
    if key_field and not lines:
        raise click.UsageError("--key-field goes with --from and --lines; for one task, give --key.")
    if not lines:
        return _enqueue_one(session, msgspec.structs.replace(task, payload=_encoded(_read(payload), task.codec)), quiet)
    if task.key is not None or task.id:
        raise click.UsageError("--key and --id name one task; with --lines, use --key-field.")
    if payload not in ("", "-") and not payload.startswith("@"):
        raise click.UsageError("With --lines, PAYLOAD is @FILE or - (stdin).")
    return _enqueue_lines(session, task, payload, key_field, quiet)


def _enqueue_one(session: Session, task: NewTask, quiet: bool) -> int:
    [outcome] = session.run(lambda store: store.enqueue(session.tenant, [task]), create=True)
    if isinstance(outcome, Rejected):
        raise outcome.error()
    if not quiet:
        if session.json:
            echo_json(outcome_shape(outcome))
        else:
            click.echo(id_to_text(outcome.id))
    if isinstance(outcome, Duplicate) and not session.json:
        how = "it was a dead letter and is replayed" if outcome.replayed else f"it is {outcome.status}"
        note(f"The key is taken by this task: {how}.")
    return Exit.OK


def outcome_shape(outcome: Outcome) -> Json:
    """What became of one task: `outcome` is enqueued, already, duplicate, replayed or rejected."""
    shape: Json = {"outcome": "enqueued", "id": None, "status": None, "result": None}
    shape |= {"error": None, "message": None}
    match outcome:
        case Rejected(code, message):
            return shape | {"outcome": "rejected", "error": code, "message": message}
        case Enqueued(task_id, already):
            return shape | {"outcome": "already" if already else "enqueued", "id": id_to_text(task_id)}
        case Duplicate(task_id, status, result, replayed):
            shape |= {"outcome": "replayed" if replayed else "duplicate", "id": id_to_text(task_id)}
            return shape | {"status": status.value, "result": None if result is None else shapes.result_shape(result)}


# ----------------------------------------------------------------------------------------------- many at once


class Line(NamedTuple):
    """A line of the input: a task, or why it is none."""

    number: int
    task: NewTask | Rejected


class Tally:
    """What became of the lines so far; tells each of them as it becomes known."""

    def __init__(self, session: Session, quiet: bool) -> None:
        self._session = session
        self._quiet = quiet
        self.counts = {"enqueued": 0, "already": 0, "duplicate": 0, "replayed": 0, "rejected": 0}
        self.exit_code: int = Exit.OK

    def add(self, number: int, outcome: Outcome) -> None:
        shape = outcome_shape(outcome)
        self.counts[shape["outcome"]] += 1
        if isinstance(outcome, Rejected):
            self.exit_code = self.exit_code or Exit.NEGATIVE
            if exit_code_of(outcome.error()) == Exit.STORE:
                self.exit_code = Exit.STORE
            self._refuse(number, outcome)
        if self._session.json:
            if not self._quiet:
                echo_json_line({"line": number, **shape})
        elif not self._quiet and not isinstance(outcome, Rejected):
            click.echo(shape["id"])

    def _refuse(self, number: int, outcome: Rejected) -> None:
        if self.counts["rejected"] <= REFUSALS_SHOWN and not self._session.json:
            note(f"line {number}: {outcome.message}")
        elif self.counts["rejected"] == REFUSALS_SHOWN + 1 and not self._session.json:
            note("More lines were refused; they are only counted.")

    def told(self) -> str:
        """All the counts that are not zero, in one line."""
        others = [f"{count_text(count)} {name}" for name, count in self.counts.items() if count and name != "enqueued"]
        return ", ".join([f"{plural(self.counts['enqueued'], 'task')} enqueued", *others])


def _enqueue_lines(session: Session, task: NewTask, source: str, key_field: str | None, quiet: bool) -> int:
    tally = Tally(session, quiet)
    try:
        with ExitStack() as stack:
            stream = _opened(source, stack)
            store, runner = stack.enter_context(session.steps(create=True))
            advance = stack.enter_context(progress(f"enqueue {task.command}"))
            for texts in _batches(stream):
                batch = [_line(number, text, task, key_field) for number, text in texts]
                runner.run(_enqueue_batch(store, session.tenant, batch, tally))
                advance(len(batch))
    finally:
        # Also after Ctrl-C or an error: what was acknowledged stays enqueued.
        note(f"{tally.told()}.")
    return tally.exit_code


async def _enqueue_batch(store: Store, tenant: str, batch: Sequence[Line], tally: Tally) -> None:
    tasks = [line.task for line in batch if isinstance(line.task, NewTask)]
    outcomes = iter(await store.enqueue(tenant, tasks))
    for line in batch:
        tally.add(line.number, line.task if isinstance(line.task, Rejected) else next(outcomes))


def _batches(stream: BinaryIO) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Yields lines with their numbers, blank ones left out: as many as have come in, so that nothing that was written
    to a pipe waits for what is still to be written."""
    number = 0
    for lines in _lines_as_they_come(stream):
        texts = [(number + index, line.rstrip(b"\r")) for index, line in enumerate(lines, start=1) if line.strip()]
        number += len(lines)
        yield from (texts[start : start + BATCH_MAX] for start in range(0, len(texts), BATCH_MAX))


def _lines_as_they_come(stream: BinaryIO) -> Iterator[list[bytes]]:
    rest = b""
    while chunk := stream.read1(READ_BYTES):  # type: ignore[attr-defined]
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
    yield [rest]


def _line(number: int, text: bytes, task: NewTask, key_field: str | None) -> Line:
    try:
        payload = _encoded(text, task.codec)
        key = None if key_field is None else key_of(codecs.decode(payload, task.codec), key_field)
    except (CodecError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        return Line(number, Rejected(CodecError.code, message))
    return Line(number, msgspec.structs.replace(task, payload=payload, key=key))


# ---------------------------------------------------------------------------------------------------- payloads


def _read(source: str) -> bytes:
    with ExitStack() as stack:
        if source == "-" or source.startswith("@"):
            return _opened(source, stack).read()
    return source.encode(errors="surrogateescape")


def _opened(source: str, stack: ExitStack) -> BinaryIO:
    if source in ("", "-"):
        return standard_input()
    try:
        return stack.enter_context(Path(source[1:]).open("rb"))
    except OSError as error:
        raise click.UsageError(f"The payload file {source[1:]!r} cannot be read: {error.strerror}.") from error


def _encoded(text: bytes, codec: str) -> bytes:
    """Returns the payload that `text` stands for. JSON is checked here, so that a worker does not meet the mistake."""
    if codec not in ("json", "msgpack"):
        return text
    text = text.strip() or b"{}"  # no arguments
    try:
        value = codecs.decode(text, "json")
    except CodecError as error:
        raise click.UsageError(f"The payload is not JSON ({_cause(error)}): {_advice(text)}") from error
    return text if codec == "json" else codecs.encode(value, codec)


def _cause(error: CodecError) -> str:
    return str(error.__cause__ or error).rstrip(".")


def _advice(text: bytes) -> str:
    shown = text[:20].decode(errors="replace") + ("…" if len(text) > 20 else "")
    return f"a text needs quotes inside the shell's, as in '\"{shown}\"'; --codec raw takes it as it is."
