"""Looking at tasks and acting on them: ``dibs ls``, ``show``, ``wait``, ``cancel``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import click

from dibs.cli.context import DURATION, TASK_ID, Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import (
    STYLES,
    Cell,
    Column,
    JsonList,
    age_text,
    duration_text,
    echo_fields,
    echo_json,
    echo_json_line,
    echo_table,
    note,
    progress,
)
from dibs.cli.shapes import task_shape
from dibs.cli.values import value_text
from dibs.errors import TaskUnknown
from dibs.ids import id_to_text
from dibs.shapes import event_shape, time_text
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, ByKey, Event, Filter, Place, Status, Task, TaskRef

PAGE = 500
WAIT_STEP_S = 600.0


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that choose tasks by their state; `filter_of` reads them."""
    for option in (
        click.option(
            "--newer-than", "newer_than_s", type=DURATION, help="Enqueued (dead letters: died) less than so long ago."
        ),
        click.option(
            "--older-than", "older_than_s", type=DURATION, help="Enqueued (dead letters: died) more than so long ago."
        ),
        click.option("--worker", metavar="NAME", help="Held, or last held, by this worker."),
        click.option("--reason", metavar="WORD", help="Ended for this reason, such as MAX_ATTEMPTS."),
        click.option("-c", "--command", metavar="NAME", help="Of this queue only."),
    ):
        command = option(command)
    return command


def filter_of(
    *,
    command: str | None,
    reason: str | None,
    worker: str | None,
    older_than_s: float | None,
    newer_than_s: float | None,
    status: str | None = None,
    place: str | None = None,
    dead: bool = False,
) -> Filter:
    """Returns the filter that the options describe. The age of dead letters counts from their end."""
    now_ms = time.time_ns() // 1_000_000
    since_ms = None if newer_than_s is None else max(0, now_ms - round(newer_than_s * 1000))
    until_ms = None if older_than_s is None else max(0, now_ms - round(older_than_s * 1000))
    return Filter(
        command=command,
        status=None if status is None else Status(status),
        place=Place.DEAD if dead else None if place is None else Place(place),
        reason=reason,
        worker=worker,
        enqueued_from_ms=None if dead else since_ms,
        enqueued_until_ms=None if dead else until_ms,
        ended_from_ms=since_ms if dead else None,
        ended_until_ms=until_ms if dead else None,
    )


def listing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say how much of a listing is wanted."""
    for option in (
        click.option("--cursor", metavar="TEXT", help="Go on where a listing said that there is more."),
        click.option("-a", "--all", "everything", is_flag=True, help="All that match."),
        click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="So many."),
    ):
        command = option(command)
    return command


# --------------------------------------------------------------------------------------------------------- ls


@click.command(
    cls=Command,
    examples="""
    dibs ls --status in_progress
    dibs ls -c thumbnail --place delayed --limit 10
    dibs ls --all --json | jq -r '.tasks[] | select(.attempts > 1).id'
    """,
)
@filter_options
@click.option("--status", type=click.Choice([*Status], case_sensitive=False), help="In this state.")
@click.option("--place", type=click.Choice([*Place], case_sensitive=False), help="In this place.")
@listing_options
@pass_session
def ls(session: Session, /, limit: int, everything: bool, cursor: str | None, **options: Any) -> int:
    """List tasks.

    In the order in which they are due where a queue and a place are named, else oldest first. Filters go together:
    every one that is given must match.
    """
    which = filter_of(**options)
    return session.run(lambda store: list_tasks(session, store, which, None if everything else limit, cursor, LISTING))


Listing = tuple[list[Column], Callable[[Task], list[Cell]]]


async def list_tasks(
    session: Session, store: Store, which: Filter, limit: int | None, cursor: str | None, listing: Listing
) -> int:
    """Prints what matches, page by page, so that a long listing costs no memory; says where to go on."""
    columns, row = listing
    document = JsonList("tasks") if session.json else None
    left, first = limit, True
    while True:
        page = await store.list(session.tenant, which, cursor=cursor, limit=PAGE if left is None else min(PAGE, left))
        if document is not None:
            for task in page.tasks:
                document.add(task_shape(task))
        elif page.tasks or (first and page.cursor is None):
            echo_table(columns, [row(task) for task in page.tasks], head=first, empty="No task matches.")
            first = False
        left = None if left is None else left - len(page.tasks)
        cursor = page.cursor
        if cursor is None or left == 0:
            break
    if document is not None:
        document.end(cursor=cursor)
    elif cursor is not None:
        note(f"There may be more: --all, or --cursor {cursor}")
    return Exit.OK


def _row(task: Task) -> list[Cell]:
    return [
        id_to_text(task.id),
        task.command,
        (task.status.lower() if task.place is Place.NONE else task.place.value, STYLES[task.status]),
        f"{task.attempts}/{task.max_attempts}",
        age_text(task.enqueued_ms),
        _detail(task),
    ]


def _detail(task: Task) -> str:
    """What one wants to know next, in a few words."""
    if task.place is Place.DELAYED:
        left_s = task.due_ms / 1000 - time.time()
        return f"in {duration_text(left_s)}" if left_s > 0 else "due"
    if task.place is Place.LEASED:
        over = (task.lease_end_ms or 0) / 1000 < time.time()
        how = "expired, " if over else "cancelling, " if task.cancel_requested else ""
        return f"{how}{task.worker or ''}"
    if task.status.ended:
        return "" if task.reason == task.status else task.reason or ""
    return f"retry, {task.error.type}" if task.error else ""


LISTING: Listing = (
    [Column("ID"), Column("COMMAND", least=6), Column("STATE"), Column("TRY", right=True),
     Column("AGE", right=True), Column("", least=1)],
    _row,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- show


@click.command(
    cls=Command,
    examples="""
    dibs show 01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a
    dibs show --by-key import sku-1234
    dibs show 01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a --events --json
    """,
)
@click.argument("task_id", metavar="[ID]", type=TASK_ID, required=False)
@click.option("--by-key", nargs=2, metavar="COMMAND KEY", help="The task that holds this key, instead of an ID.")
@click.option("--events", "with_events", is_flag=True, help="Its history too: reads the whole journal.")
@pass_session
def show(session: Session, /, task_id: bytes | None, by_key: tuple[str, str] | None, with_events: bool) -> int:
    """Show everything about one task.

    Its payload decoded, its state, its result or error with the traceback. The journal is not indexed by task: with
    --events all of it is read, which takes a while if it is long.
    """
    ref = _ref(task_id, by_key)

    async def look(store: Store) -> tuple[Task, list[Event] | None]:
        [task] = await store.get(session.tenant, [ref])
        if task is None:
            raise _not_found(session.tenant, ref)
        return task, await _history(store, session.tenant, task.id) if with_events else None

    task, events = session.run(look)
    if session.json:
        shape = task_shape(task)
        echo_json(shape if events is None else {**shape, "events": [event_shape(event) for event in events]})
    else:
        _print_task(task, events)
    return Exit.OK


def _ref(task_id: bytes | None, by_key: tuple[str, str] | None) -> TaskRef:
    if (task_id is None) == (by_key is None):
        raise click.UsageError("Name one task: by its ID or with --by-key COMMAND KEY.")
    return ByKey(*by_key) if by_key else task_id or b""


def _not_found(tenant: str, ref: TaskRef) -> TaskUnknown:
    what = id_to_text(ref) if isinstance(ref, bytes) else f"with the key {ref.key!r} of {ref.command}"
    return TaskUnknown(f"There is no task {what} (tenant {tenant}): never enqueued here, or no longer kept.")


async def _history(store: Store, tenant: str, task_id: bytes) -> list[Event]:
    found: list[Event] = []
    with progress("read the journal") as advance:
        for bounds in await store.journal_bounds():
            after: bytes | None = None
            more = True
            while more:
                page = await store.events(tenant, shard=bounds.shard, after=after, until=bounds.newest, limit=BATCH_MAX)
                found += [event for event in page.events if event.id == task_id]
                advance(len(page.events))
                after, more = page.cursor, page.more
    return found


def _print_task(task: Task, events: list[Event] | None) -> None:
    echo_fields(_fields(task))
    if events is not None:
        click.echo()
        echo_table(
            [
                Column("TIME"),
                Column("EVENT"),
                Column("TRY", right=True),
                Column("WORKER", least=6),
                Column("", least=1),
            ],
            [_event_row(event) for event in events],
        )


def _fields(task: Task) -> list[tuple[str, Cell]]:
    tries = f"{task.attempts} of {task.max_attempts}" + (f", {task.releases} released" if task.releases else "")
    fields: list[tuple[str, Cell | None]] = [
        ("id", id_to_text(task.id)),
        ("tenant", task.tenant),
        ("command", task.command),
        ("status", (task.status if task.place is Place.NONE else f"{task.status} ({task.place})", STYLES[task.status])),
        ("reason", task.reason),
        ("cancelling", "the worker is told at its next heartbeat" if task.cancel_requested else None),
        ("key", task.key),
        ("limit key", task.limit_key),
        ("limit cost", None if task.limit_key is None else str(task.limit_cost)),
        ("priority", str(task.priority)),
        ("attempts", tries),
        ("enqueued", _time(task.enqueued_ms)),
        ("due", _time(task.due_ms) if task.place is Place.DELAYED else None),
        ("expires", _time(task.expires_ms)),
        ("worker", task.worker),
        ("lease end", _time(task.lease_end_ms)),
        ("progress", _progress(task)),
        ("timeout", None if task.timeout_s is None else f"{task.timeout_s:g}s"),
        ("ended", _time(task.ended_ms)),
        ("kept until", _time(task.kept_until_ms)),
        ("trace", task.traceparent),
        ("payload", value_text(task.payload, task.codec)),
        ("result", _result(task)),
        ("error", (f"{task.error.type}: {task.error.message}", "red") if task.error else None),
        ("traceback", task.error.traceback.rstrip() or None if task.error else None),
    ]  # fmt: skip
    return [(name, cell) for name, cell in fields if cell is not None]


def _time(at_ms: int | None) -> str | None:
    if at_ms is None:
        return None
    now_ms = time.time_ns() // 1_000_000
    when = f"in {age_text(now_ms, at_ms)}" if at_ms > now_ms else f"{age_text(at_ms, now_ms)} ago"
    return f"{time_text(at_ms)} ({when})"


def _progress(task: Task) -> str | None:
    if task.progress is None:
        return None
    total = "" if task.progress.total is None else f" of {task.progress.total:g}"
    return f"{task.progress.done:g}{total} {task.progress.note}".rstrip()


def _result(task: Task) -> str | None:
    if task.status is not Status.COMPLETED:
        return None
    if task.result is None:
        return "(no longer kept)"
    return "(none)" if task.result.data is None else value_text(task.result.data, task.result.codec)


def _event_row(event: Event) -> list[Cell]:
    detail = " ".join(part for part in (event.reason, event.error_type, event.error_line) if part)
    return [time_text(event.at_ms) or "", event.kind.value, str(event.attempt), event.worker, detail]


# ------------------------------------------------------------------------------------------------------- wait


@click.command(
    cls=Command,
    examples="""
    dibs wait 01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a
    dibs wait --timeout 30s $(dibs enqueue report) && echo well done
    dibs wait --json 01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a | jq .result.value
    """,
)
@click.argument("ids", metavar="ID...", type=TASK_ID, nargs=-1, required=True)
@click.option("--timeout", "timeout_s", type=DURATION, help="Give up after so long; the tasks go on.")
@pass_session
def wait(session: Session, /, ids: tuple[bytes, ...], timeout_s: float | None) -> int:
    """Wait until tasks have ended; the exit code says how.

    0: all completed. 1: one failed or was cancelled. 4: one does not exist. 5: the timeout came first. Prints a line
    for each task as it ends; with --json, the task.
    """
    seen: set[int] = set()

    async def until_ended(store: Store) -> None:
        async for task_id, task in _as_they_end(store, session.tenant, ids):
            seen.add(_tell_end(session, task_id, task))

    async def in_time(store: Store) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await until_ended(store)
        except TimeoutError:
            seen.add(Exit.TIMED_OUT)
            note(f"Timed out after {timeout_s:g}s.")

    session.run(in_time)
    order = [Exit.NOT_FOUND, Exit.NEGATIVE, Exit.TIMED_OUT, Exit.OK]
    return next(code for code in order if code in seen)


async def _as_they_end(store: Store, tenant: str, ids: tuple[bytes, ...]) -> AsyncIterator[tuple[bytes, Task | None]]:
    waiting = list(dict.fromkeys(ids))
    while waiting:
        tasks = await store.wait(tenant, waiting, WAIT_STEP_S)
        over = [(task_id, task) for task_id, task in zip(waiting, tasks, strict=True) if not task or task.status.ended]
        for task_id, task in over:
            waiting.remove(task_id)
            yield task_id, task


def _tell_end(session: Session, task_id: bytes, task: Task | None) -> Exit:
    if task is None:
        if session.json:
            echo_json_line({"id": id_to_text(task_id), "status": None})
        else:
            note(str(_not_found(session.tenant, task_id)))
        return Exit.NOT_FOUND
    if session.json:
        echo_json_line(task_shape(task))
    else:
        detail = _result(task) if task.status is Status.COMPLETED else _ended_badly(task)
        echo_table(
            [Column(""), Column(""), Column("", least=1)],
            [[id_to_text(task.id), (task.status.value, STYLES[task.status]), detail or ""]],
            head=False,
        )
    return Exit.OK if task.status is Status.COMPLETED else Exit.NEGATIVE


def _ended_badly(task: Task) -> str:
    reason = "" if task.reason == task.status else task.reason or ""
    error = f"{task.error.type}: {task.error.message}" if task.error else ""
    return f"{reason} {error}".strip()


# ----------------------------------------------------------------------------------------------------- cancel


@click.command(
    cls=Command,
    examples="""
    dibs cancel 01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a
    dibs cancel --by-key import sku-1234
    dibs ls -c report --all --json | jq -r '.tasks[].id' | xargs dibs cancel
    """,
)
@click.argument("ids", metavar="[ID]...", type=TASK_ID, nargs=-1)
@click.option("--by-key", nargs=2, metavar="COMMAND KEY", multiple=True, help="The task that holds this key.")
@pass_session
def cancel(session: Session, /, ids: tuple[bytes, ...], by_key: tuple[tuple[str, str], ...]) -> int:
    """Cancel tasks that have not ended.

    What waits is cancelled at once. What is in progress is `cancelling`: its worker learns of it at its next heartbeat.
    Exit code 1 if one had ended already, 4 if one does not exist.
    """
    refs: list[TaskRef] = [*ids, *(ByKey(*pair) for pair in by_key)]
    if not refs:
        raise click.UsageError("Name the tasks: by ID or with --by-key COMMAND KEY.")
    outcomes = session.run(lambda store: store.cancel(session.tenant, refs))
    rows = [(_ref_text(ref), outcome.how, outcome.status) for ref, outcome in zip(refs, outcomes, strict=True)]
    if session.json:
        echo_json({"cancelled": [{"task": ref, "outcome": how, "status": status} for ref, how, status in rows]})
    else:
        echo_table(
            [Column("TASK", least=36), Column("OUTCOME")], [[ref, _how(how, status)] for ref, how, status in rows]
        )
    seen = {how for _, how, _ in rows}
    return Exit.NOT_FOUND if "unknown" in seen else Exit.NEGATIVE if "ended" in seen else Exit.OK


def _ref_text(ref: TaskRef) -> str:
    return id_to_text(ref) if isinstance(ref, bytes) else f"{ref.command} {ref.key}"


def _how(how: str, status: Status | None) -> str:
    return f"had ended: {status}" if how == "ended" else "no such task" if how == "unknown" else how
