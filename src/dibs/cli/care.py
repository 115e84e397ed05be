"""Care of a store: ``dibs sweep``, ``backup``, ``restore``, ``doctor``, ``config``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
from msgspec import to_builtins

from dibs.cli.context import Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import (
    Column,
    count_text,
    echo_json,
    echo_styled,
    echo_table,
    exact_duration_text,
    exact_size_text,
    note,
    plural,
    progress,
)
from dibs.settings import FIELDS, Setting, mask, resolve
from dibs.stores import restore_store
from dibs.stores.ordered.doctor import Report
from dibs.stores.protocol import Store
from dibs.task import Swept

PROBLEMS_SHOWN = 20


@click.command(
    cls=Command,
    examples="""
    dibs sweep
    dibs sweep --json
    """,
)
@pass_session
def sweep(session: Session, /) -> int:
    """Promote, take back and prune what time has made due.

    Workers do this every second. Without one, delayed tasks and expired leases wait for the next claim, and what
    retention lets go stays.
    """

    async def work(store: Store) -> Swept:
        total = Swept()
        with progress("sweep") as advance:
            while True:
                step = await store.sweep()
                total += step
                advance(step.promoted + step.expired + step.cancelled + step.pruned + step.trimmed)
                if not step.more:
                    return total

    swept: dict[str, int] = to_builtins(session.run(work))
    del swept["more"]
    if session.json:
        echo_json(swept)
    else:
        click.echo(", ".join(f"{count_text(count)} {what}" for what, count in swept.items()) + ".")
    return Exit.OK


@click.command(
    cls=Command,
    examples="""
    dibs backup /backups/dibs-monday
    dibs --url /var/lib/jobs backup ./copy
    """,
)
@click.argument("directory", type=click.Path(path_type=Path))
@pass_session
def backup(session: Session, /, directory: Path) -> int:
    """Copy the store, as of one moment, into a new directory.

    Nothing stops meanwhile. The copy is a store of its own; `dibs restore` makes another out of it.
    """
    with progress("backup", counted=False):
        session.run_local(lambda store: store.backup(directory))
    return _copied(session, directory)


@click.command(
    cls=Command,
    examples="""
    dibs restore /backups/dibs-monday /var/lib/jobs
    dibs restore ./copy ./restored && dibs --url ./restored doctor
    """,
)
@click.argument("backup", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@pass_session
def restore(session: Session, /, backup: Path, directory: Path) -> int:
    """Make a store out of a backup.

    In a new directory; --url is not used. What ended after the backup was taken will be delivered again.
    """
    with progress("restore", counted=False):
        asyncio.run(restore_store(backup, directory))
    return _copied(session, directory)


def _copied(session: Session, directory: Path) -> int:
    size_bytes = sum(path.stat().st_size for path in directory.rglob("data.mdb"))
    if session.json:
        echo_json({"directory": str(directory.absolute()), "bytes": size_bytes})
    else:
        click.echo(f"{directory} ({size_bytes:,} bytes)")
    return Exit.OK


@click.command(
    cls=Command,
    examples="""
    dibs doctor
    dibs doctor --json | jq '.problems[].what'
    dibs backup ./before && dibs doctor --repair
    """,
)
@click.option("--repair", is_flag=True, help="Repair what can be repaired, then look again.")
@pass_session
def doctor(session: Session, /, repair: bool) -> int:
    """Check every record against every other.

    Reads everything on one consistent view; nothing stops meanwhile. Exit code 1 if something does not agree. --repair
    rebuilds indexes and counters from the tasks' states, in one transaction that others wait for: look without it
    first, and keep a backup.
    """
    with progress("examine", counted=False):
        report = session.run_local(lambda store: store.doctor(mend=repair))
    if session.json:
        echo_json({"clean": report.clean, **to_builtins(report)})
    else:
        _print_report(report)
    return Exit.OK if report.clean else Exit.NEGATIVE


def _print_report(report: Report) -> None:
    seen = f"{plural(report.tasks, 'task')} and {plural(report.events, 'event')} examined"
    if report.clean:
        echo_styled(f"Clean: {seen}.", "green")
        return
    echo_styled(f"{plural(len(report.problems), 'problem')}: {seen}.", "red")
    rows = [[problem.what, problem.where] for problem in report.problems[:PROBLEMS_SHOWN]]
    echo_table([Column("WHAT", least=20), Column("WHERE", least=20)], rows)
    if len(report.problems) > PROBLEMS_SHOWN:
        note(f"The first {PROBLEMS_SHOWN} are shown; --json shows all.")


@click.command(
    cls=Command,
    examples="""
    dibs config
    DIBS_URL=/var/lib/jobs dibs config
    dibs config --json | jq -r '.settings[] | select(.name == "url").value'
    """,
)
@pass_session
def config(session: Session, /) -> int:
    """Show every setting and where it came from.

    Passwords in URLs are masked. The store is not opened.
    """
    rows = resolve(session.flags)
    if session.json:
        echo_json({"settings": [{"name": row.name, "value": _shown(row), "origin": row.origin} for row in rows]})
    else:
        columns = [Column("SETTING"), Column("VALUE", least=16), Column("FROM", least=16)]
        echo_table(columns, [[row.name, _written(row), row.origin] for row in rows])
    return Exit.OK


def _shown(row: Setting) -> object:
    return mask(row.value) if isinstance(row.value, str) else row.value


def _written(row: Setting) -> str:
    """The value as one would write it: sizes and durations with a unit."""
    shape = next(field.shape for field in FIELDS if field.name == row.name)
    written = {"SIZE": exact_size_text, "DURATION": exact_duration_text}.get(shape)
    return written(row.value) if written else str(_shown(row))
