"""``dibs dead``: dead letters, that is tasks that ended FAILED: list, show, replay, purge."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

from dibs.cli.context import TASK_ID, Group, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import Cell, Column, age_text, echo_json, note, plural, progress
from dibs.cli.tasks import Listing, filter_of, filter_options, list_tasks, listing_options, show
from dibs.ids import id_to_text
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Acted, Filter, Place, Task

Act = Callable[..., Awaitable[Acted]]


@click.group(
    cls=Group,
    examples="""
    dibs dead ls -c thumbnail
    dibs dead replay --reason MAX_ATTEMPTS
    dibs dead purge --older-than 30d --yes
    """,
)
def dead() -> None:
    """Look at dead letters, replay or purge them.

    A dead letter is a task that failed for good: by its handler's word, or because its attempts were used up.
    """


def _row(task: Task) -> list[Cell]:
    error = f"{task.error.type.rpartition('.')[2]}: {task.error.message}" if task.error else ""
    return [id_to_text(task.id), task.command, (task.reason or "", "red"), age_text(task.ended_ms), error]


DEAD_LISTING: Listing = (
    [Column("ID"), Column("COMMAND", least=6), Column("REASON", least=8), Column("DIED", right=True),
     Column("ERROR", least=8)],
    _row,
)  # fmt: skip


@dead.command(
    "ls",
    examples="""
    dibs dead ls
    dibs dead ls -c thumbnail --reason LEASE_EXPIRED --all
    dibs dead ls --json | jq -r '.tasks[].error.type' | sort | uniq -c
    """,
)
@filter_options
@listing_options
@pass_session
def ls(session: Session, /, limit: int, everything: bool, cursor: str | None, **options: Any) -> int:
    """List dead letters, with reason and error."""
    which = filter_of(**options, dead=True)
    how_many = None if everything else limit
    return session.run(lambda store: list_tasks(session, store, which, how_many, cursor, DEAD_LISTING))


dead.add_command(show)


@dead.command(
    "replay",
    examples="""
    dibs dead replay 01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a
    dibs dead replay -c thumbnail
    dibs dead replay --all
    """,
)
@click.argument("ids", metavar="[ID]...", type=TASK_ID, nargs=-1)
@filter_options
@click.option("-a", "--all", "everything", is_flag=True, help="Every dead letter of the tenant.")
@pass_session
def replay(session: Session, /, ids: tuple[bytes, ...], everything: bool, **options: Any) -> int:
    """Put dead letters back at the end of their queues, with no attempts used.

    Those named by ID, or all that match the filters. What is not dead (any more) is left alone, so a repeat is
    harmless.
    """
    which = _which(ids, everything, options)
    return _act(session, which, "replayed", lambda store: store.replay)


@dead.command(
    "purge",
    examples="""
    dibs dead purge 01979a3e-5f0c-7a31-9c55-0b8f8e1d2c4a --yes
    dibs dead purge -c thumbnail --older-than 30d
    dibs dead purge --all --yes --json
    """,
)
@click.argument("ids", metavar="[ID]...", type=TASK_ID, nargs=-1)
@filter_options
@click.option("-a", "--all", "everything", is_flag=True, help="Every dead letter of the tenant.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@pass_session
def purge(session: Session, /, ids: tuple[bytes, ...], everything: bool, yes: bool, **options: Any) -> int:
    """Remove dead letters for good and free their keys.

    Those named by ID, or all that match the filters. Asks first, unless --yes is given.
    """
    which = _which(ids, everything, options)
    if not yes and not _confirmed(which):
        note("Nothing was purged.")
        return Exit.NEGATIVE
    return _act(session, which, "purged", lambda store: store.purge)


def _which(ids: tuple[bytes, ...], everything: bool, options: dict[str, Any]) -> Sequence[bytes] | Filter:
    filtered = any(value is not None for value in options.values())
    if bool(ids) + everything + filtered != 1:
        raise click.UsageError("Say which: IDs, or filters such as --command, or --all; one of the three.")
    return list(dict.fromkeys(ids)) if ids else filter_of(**options, dead=True)


def _confirmed(which: Sequence[bytes] | Filter) -> bool:
    if not sys.stdin.isatty():
        raise click.UsageError("Nobody can be asked here: give --yes to purge.")
    what = "all dead letters that match" if isinstance(which, Filter) else plural(len(which), "dead letter")
    return click.confirm(f"Remove {what} for good?", err=True)


def _act(session: Session, which: Sequence[bytes] | Filter, verb: str, act_of: Callable[[Store], Act]) -> int:
    """Acts on all of them, a transaction at a time, and tells how many they were."""

    async def work(store: Store) -> tuple[int, list[bytes]]:
        if isinstance(which, Filter):
            return await _act_on_matches(store, act_of(store), session.tenant, which, verb), []
        return await _act_on_ids(store, act_of(store), session.tenant, which)

    count, missed = session.run(work)
    left_alone = [id_to_text(task_id) for task_id in missed]
    if session.json:
        echo_json({verb: count, "not_dead": left_alone})
    else:
        click.echo(f"{plural(count, 'dead letter')} {verb}.")
        for text in left_alone:
            note(f"{text} is no dead letter: left alone.")
    return Exit.NOT_FOUND if missed else Exit.OK


async def _act_on_matches(store: Store, act: Act, tenant: str, which: Filter, verb: str) -> int:
    # No more than there were at the start: a worker may fail what is replayed as fast as it is replayed.
    left = (await store.stats(tenant)).total.dead
    count, cursor = 0, None
    with progress(verb) as advance:
        while left > 0:
            acted = await act(tenant, which, limit=min(left, BATCH_MAX), cursor=cursor)
            count += len(acted.ids)
            left -= len(acted.ids)
            advance(len(acted.ids))
            cursor = acted.cursor
            if cursor is None:
                break
    return count


async def _act_on_ids(store: Store, act: Act, tenant: str, ids: Sequence[bytes]) -> tuple[int, list[bytes]]:
    """Returns how many it acted on, and which were no dead letters."""
    done: set[bytes] = set()
    for start in range(0, len(ids), BATCH_MAX):
        tasks = await store.get(tenant, ids[start : start + BATCH_MAX])
        # Purge by itself would take any task that has ended.
        dead_ids = [task.id for task in tasks if task is not None and task.place is Place.DEAD]
        done.update((await act(tenant, dead_ids)).ids)
    return len(done), [task_id for task_id in ids if task_id not in done]
