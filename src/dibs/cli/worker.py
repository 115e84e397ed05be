"""``dibs worker``: runs the tasks of an app until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from dibs.app import Dibs
from dibs.cli.context import DURATION, Command, Session, pass_session
from dibs.cli.errors import Exit, exit_code_of
from dibs.importing import import_app
from dibs.portal import new_event_loop
from dibs.settings import mask
from dibs.worker import Summary, Worker, WorkerOptions
from dibs.worker.parent import die_with_parent
from dibs.worker.supervisor import Supervisor

T = TypeVar("T")

USUAL = WorkerOptions()
END_S = 3.0

EXAMPLES = """
dibs worker shop.tasks:app
dibs worker shop.tasks:app --processes 4 --concurrency 200
dibs worker shop.tasks:app --commands shop.tasks.mail --drain
dibs worker shop.tasks:app --tenant '*'
dibs worker shop/tasks.py:app --reload
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("apps", metavar="MODULE:APP...", nargs=-1, required=True)
@click.option("--commands", "-c", multiple=True, metavar="COMMAND", help="Only these; may be repeated. Default: all.")
@click.option(
    "--tenant", multiple=True, metavar="TENANT", help="Whose tasks; may be repeated; '*': all. Default: the app's."
)
@click.option("--concurrency", type=int, default=USUAL.concurrency, show_default=True, help="Async handlers at once.")
@click.option("--threads", type=int, default=USUAL.threads, show_default=True, help="Plain handlers at once.")
@click.option("--pool", type=int, default=USUAL.pool, show_default=True, help='Handlers with run_in="process" at once.')
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Worker processes, each with all of that.",
)
@click.option("--drain", is_flag=True, help="End when nothing is ready; what is delayed or paused stays.")
@click.option("--reload", is_flag=True, help="Restart when a Python file below the working directory changes.")
@click.option("--grace", type=DURATION, default=USUAL.grace_s, help="How long tasks may end after SIGTERM.  [30s]")
@click.option("--give-up", type=DURATION, default=USUAL.give_up_s, help="End if the store is silent so long.  [60s]")
@click.option("--name", default="", help="Its name in `dibs workers`.  [host:pid:random]")
@click.option("--verbose", "-v", is_flag=True, help="Log every task.")
@click.option("--quiet", "-q", is_flag=True, help="Log only what is wrong.")
@click.option("--supervised", is_flag=True, hidden=True)
@click.option("--supervisor", type=int, metavar="PID", hidden=True)
@click.option("--restarted", is_flag=True, hidden=True)
@pass_session
def worker(session: Session, /, apps: Sequence[str], **options: Any) -> None:
    """Run the tasks of an app.

    Claims tasks, runs their handlers and settles them. SIGTERM or Ctrl-C: it claims no more, lets handlers end within
    the grace time and gives back what is left; a second signal does so at once. Ends with an error when the store does
    not answer for too long.
    """
    _log(verbose=options["verbose"], quiet=options["quiet"])
    found = _import(session, apps)
    if options["supervised"]:
        if not die_with_parent(signal.SIGTERM, options["supervisor"]):
            return
    elif options["processes"] > 1 or options["reload"]:
        sys.exit(_supervise(options["processes"], reload=options["reload"], drain=options["drain"]))
    if not options["tenant"] and (before := session.flags.get("tenant")) is not None:
        options["tenant"] = (before,)  # as it may stand before the command, too
    one = _worker(found, options)
    if not options["quiet"] and not options["supervised"]:
        _greet(one)
    _collect_less()
    try:
        summary = _with_signals(one.run, one.stop)
    except BaseException as error:
        _end_soon(exit_code_of(error))
        raise
    _tell(summary, as_json=session.json, quiet=options["quiet"])
    _end_soon(Exit.OK)


def _import(session: Session, names: Sequence[str]) -> list[Dibs]:
    """Imports the apps. A flag --url is for those that leave it to the settings."""
    url = session.flags.get("url")
    if url is not None:
        os.environ["DIBS_URL"] = str(url)
    apps = [import_app(name) for name in names]
    for name, app in zip(names, apps, strict=True):
        if url is not None and app.settings.url != url:
            raise click.UsageError(f"{name} names its own store, {mask(app.settings.url)}: leave --url out.")
    return apps


def _worker(apps: Sequence[Dibs], options: dict[str, Any]) -> Worker:
    return Worker(
        apps,
        WorkerOptions(
            concurrency=options["concurrency"],
            threads=options["threads"],
            pool=options["pool"],
            commands=options["commands"],
            tenants=options["tenant"],
            name=f"{options['name']}:{os.getpid()}" if options["name"] and options["supervisor"] else options["name"],
            grace_s=options["grace"],
            give_up_s=options["give_up"],
            drain=options["drain"],
            create=not options["restarted"],
        ),
    )


def _supervise(count: int, *, reload: bool, drain: bool) -> int:
    """Runs this very command again, in processes of their own."""
    arguments = [one for one in sys.argv[1:] if one != "--reload"]
    # Flags end where a bare -- stands.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments[end:end] = ["--processes", "1", "--supervised", "--supervisor", str(os.getpid())]
    command = [sys.executable, "-m", "dibs", *arguments]
    again = [*command[: 3 + end], "--restarted", *command[3 + end :]]
    supervisor = Supervisor(command, count, again=again, ends=drain, watch=[Path.cwd()] if reload else [])
    return _with_signals(supervisor.run, supervisor.stop)


def _with_signals(run: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], None]) -> T:
    async def main() -> T:
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, stop)
        return await run()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())


def _end_soon(status: int) -> None:
    """The interpreter waits for threads at its end, such as those of ``asyncio.to_thread``: a handler that was given up
    must not keep the process."""

    def end() -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(END_S, end)
    timer.daemon = True
    timer.start()


def _collect_less() -> None:
    """What was imported stays, and tasks come and go by the thousand without cycles: looking for garbage among them at
    the usual rate is a sixth of what a small task costs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _log(*, verbose: bool, quiet: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(process)d %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dibs").setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)


def _greet(worker: Worker) -> None:
    for app in worker.apps:
        commands = [name for name in app.functions if not worker.options.commands or name in worker.options.commands]
        tenants = ", ".join(worker.options.tenants or (app.tenant,))
        click.echo(f"worker {worker.name} on {mask(app.settings.url)} (tenant {tenants})", err=True)
        if app.url.startswith("memory:"):
            click.echo("  it is in the memory of this process: nobody else can enqueue here", err=True)
        for name in sorted(commands):
            function = app.functions[name]
            click.echo(f"  {name:<40} in a {function.policy.run_in}", err=True)


def _tell(summary: Summary, *, as_json: bool, quiet: bool) -> None:
    counts = msgspec.structs.asdict(summary)
    if as_json:
        click.echo(msgspec.json.encode(counts))
    elif not quiet:
        click.echo("ended: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()), err=True)
