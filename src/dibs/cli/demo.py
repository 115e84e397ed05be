"""``dibs demo``: the queue at work, with workers that are killed and tasks that fail, and every task accounted for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import to_builtins

from dibs.cli.context import Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import echo_json
from dibs.errors import MissingDriver
from dibs.settings import FIELDS

if TYPE_CHECKING:
    from dibs.demo.account import Account
    from dibs.demo.screen import Screen

PATIENCE_S = 300.0
"""Far beyond what a busy machine needs: then something is stuck."""

EXAMPLES = """
dibs demo
dibs demo --quick
dibs demo --keep --dir /var/tmp
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.option("--quick", is_flag=True, help="Fewer tasks, and no pauses to read.")
@click.option("--keep", is_flag=True, help="Leave the store behind, to look at.")
@click.option("--history/--no-history", "told", default=None,
              help="End with the history of it, by Spark.  [if Spark and Java are there]")  # fmt: skip
@click.option("--dir", "parent", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="On this disk: a directory is made in there.  [default: $TMPDIR]")  # fmt: skip
@pass_session
def demo(session: Session, /, quick: bool, keep: bool, told: bool | None, parent: Path | None) -> int:
    """Watch the queue at work, and a worker being killed.

    A producer and three real workers share a store of their own: tasks that succeed, fail, are retried, delayed,
    cancelled, replayed. It ends by accounting for every task, and with status 1 if one is missing; then with the
    history of what it did, as a page to look at. --url is not used.
    """
    with _world(parent, keep=keep) as world:
        _set_up(session, world)
        try:
            account = asyncio.run(_play(world, quick=quick, aside=session.json))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        report = None if account is None else _tell_history(world, parent, wanted=told, aside=session.json)
        if session.json:
            echo_json(_shown(account, report))
        elif account is not None and account.holds:
            _say_next(world, keep=keep)
    return Exit.OK if account is not None and account.holds else Exit.NEGATIVE


@contextlib.contextmanager
def _world(parent: Path | None, *, keep: bool) -> Iterator[Path]:
    """A new directory for the store and all that goes with it."""
    try:
        world = Path(tempfile.mkdtemp(prefix="dibs-demo-", dir=parent)).resolve()
    except OSError as error:
        raise click.UsageError(f"There is no room for the demo in {parent}: {error.strerror}.") from error
    try:
        (world / "logs").mkdir()
        (world / "runs.log").touch()
        yield world
    finally:
        if not keep:
            shutil.rmtree(world)


def _set_up(session: Session, world: Path) -> None:
    """Has the app of the demo, here and in the workers, find its settings where every app finds them."""
    variables = {field.name: field.variable for field in FIELDS}
    for name, value in {**session.flags, "url": str(world / "store")}.items():
        os.environ[variables[name]] = str(value)


async def _play(world: Path, *, quick: bool, aside: bool) -> Account | None:
    """Plays the demo; None: it could not be played to its end, and the screen said why."""
    from dibs.demo import shop
    from dibs.demo.crew import Crew, WorkerDied
    from dibs.demo.screen import Screen
    from dibs.demo.story import FULL, QUICK, Story
    from dibs.stores import open_local

    screen = Screen(aside=aside)
    crew = Crew(world / "logs")
    with _signals_cancel():
        try:
            async with asyncio.timeout(PATIENCE_S), await open_local(shop.app.url, settings=shop.app.settings) as store:
                screen.line("dibs demo: a shop whose producer and workers share a queue in a directory.")
                account = await Story(store, crew, QUICK if quick else FULL, screen).play()
                screen.summary(account)
                _tell_end(screen, account)
                return account
        except WorkerDied as error:
            screen.warn(str(error))
        except TimeoutError:
            screen.warn(f"This took more than {PATIENCE_S:g} s: something is stuck.")
        except asyncio.CancelledError:
            screen.warn("Interrupted: ending the workers.")
            raise
        finally:
            await crew.end()
    return None


def _tell_end(screen: Screen, account: Account) -> None:
    screen.line()
    total = account.total
    if account.holds:
        screen.line(f"All {total.enqueued:,} tasks are accounted for, in {screen.elapsed_s:.0f} s.", "bold green")
    else:
        wrong = sum(not check.holds for check in account.checks)
        screen.warn(f"The books are wrong in {wrong} places: please report this output.")


@contextlib.contextmanager
def _signals_cancel() -> Iterator[None]:
    """Has the signals that would end the process here and now cancel the demo instead, as Ctrl-C does."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None
    signals = (signal.SIGTERM, signal.SIGHUP)
    for one in signals:
        loop.add_signal_handler(one, me.cancel)
    try:
        yield
    finally:
        for one in signals:
            loop.remove_signal_handler(one)


def _tell_history(world: Path, parent: Path | None, *, wanted: bool | None, aside: bool) -> Path | None:
    """Takes the journal of the demo into a lake, tells its short version and returns the page, which stays."""
    from dibs.cli.history import in_short
    from dibs.cli.spark import check_installed

    if wanted is False:
        return None
    try:
        check_installed()
        from dibs.spark.session import check_java

        check_java()
    except MissingDriver as error:
        if wanted:
            raise
        click.echo(f"\nFor the history of this, as a page: {error}.", err=aside)
        return None
    handle, name = tempfile.mkstemp(prefix="dibs-demo-", suffix=".html", dir=parent)
    os.close(handle)
    click.echo("\nThe history of it, by Spark:", err=aside)
    for line in in_short(str(world / "store"), world / "lake", Path(name)):
        click.echo(line, err=aside)
    return Path(name)


def _shown(account: Account | None, report: Path | None) -> dict[str, object] | None:
    if account is None:
        return None
    return {"holds": account.holds, **to_builtins(account), "report": None if report is None else str(report)}


def _say_next(world: Path, *, keep: bool) -> None:
    """A few commands to go on with."""
    program = _program()
    commands = {f"{program} {command}": what for command, what in (KEPT if keep else GONE).items()}
    widest = max(map(len, commands))
    click.echo("\nTry next:")
    if keep:
        click.echo(f"  export DIBS_URL={shlex.quote(str(world / 'store'))}")
    for command, what in commands.items():
        click.echo(f"  {command.ljust(widest)}  # {what}")
    click.echo("The tasks of this demo, an app to start from, are in")
    click.echo(f"  {_near(Path(__file__).parents[1] / 'demo' / 'shop.py')}")


def _program() -> str:
    """How dibs is called from here."""
    beside = _near(Path(sys.executable).with_name("dibs"))
    if shutil.which("dibs"):
        return "dibs"
    return str(beside) if beside.exists() and not beside.is_absolute() else "python -m dibs"


def _near(path: Path) -> Path:
    """The path, from the working directory if it is in there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


KEPT = {
    "queues": "what is where",
    "dead ls": "the one that stayed dead",
    "ls --status cancelled": "what was cancelled",
    "export | head -3": "the journal, event by event",
    'enqueue price \'{"item": "tea"}\'': "a task of your own",
    "worker dibs.demo.shop:app": "runs it; Ctrl-C ends it",
}

GONE = {
    "demo --keep": "leaves the store, to look around in",
    "--help": "every command",
}
