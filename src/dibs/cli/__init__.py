"""The command line: every verb of the queue for people and scripts.

:data:`COMMANDS` lists what there is. A command is imported when it is called, so that ``dibs --help`` is quick: a new
one is a module with a click command in it and one line in that table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import click

from dibs.cli.context import Group
from dibs.cli.errors import Exit, exit_code_of, go_quietly, tell


class Entry(NamedTuple):
    """Where a command lives, and what it is for in one line: the first line of its own help."""

    section: str
    where: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "worker": Entry("Work", "dibs.cli.worker:worker", "Run the tasks of an app."),
    "spark": Entry("Work", "dibs.cli.spark:spark", "Work a queue off with Spark."),
    "serve": Entry("Work", "dibs.cli.serve:serve", "Serve the store to other machines, by HTTP."),
    "enqueue": Entry("Tasks", "dibs.cli.enqueue:enqueue", "Put a task, or many, into a queue."),
    "ls": Entry("Tasks", "dibs.cli.tasks:ls", "List tasks."),
    "show": Entry("Tasks", "dibs.cli.tasks:show", "Show everything about one task."),
    "wait": Entry("Tasks", "dibs.cli.tasks:wait", "Wait until tasks have ended; the exit code says how."),
    "cancel": Entry("Tasks", "dibs.cli.tasks:cancel", "Cancel tasks that have not ended."),
    "dead": Entry("Tasks", "dibs.cli.dead:dead", "Look at dead letters, replay or purge them."),
    "top": Entry("Queues", "dibs.cli.top:top", "Watch queues, rates and workers live."),
    "queues": Entry("Queues", "dibs.cli.queues:queues", "Show each queue's counts and configuration."),
    "pause": Entry("Queues", "dibs.cli.queues:pause", "Stop claims from a queue; everything else goes on."),
    "resume": Entry("Queues", "dibs.cli.queues:resume", "Let a paused queue be claimed from again."),
    "configure": Entry(
        "Queues", "dibs.cli.queues:configure", "Set what a queue's tasks get by default, and its limits."
    ),
    "workers": Entry("Queues", "dibs.cli.queues:workers", "Show the workers that are alive."),
    "stats": Entry("Queues", "dibs.cli.queues:stats", "Show a tenant's totals, or every tenant's."),
    "history": Entry("Store", "dibs.cli.history:history", "Keep the history of a queue as tables, look at it, ask it."),
    "export": Entry("Store", "dibs.cli.journal:export", "Write the journal as JSON lines or Parquet."),
    "sweep": Entry("Store", "dibs.cli.care:sweep", "Promote, take back and prune what time has made due."),
    "backup": Entry("Store", "dibs.cli.care:backup", "Copy the store, as of one moment, into a new directory."),
    "restore": Entry("Store", "dibs.cli.care:restore", "Make a store out of a backup."),
    "doctor": Entry("Store", "dibs.cli.care:doctor", "Check every record against every other."),
    "config": Entry("Setup", "dibs.cli.care:config", "Show every setting and where it came from."),
    "token": Entry("Setup", "dibs.cli.token:token", "Make, list and revoke the tokens of a server."),
    "demo": Entry("Setup", "dibs.cli.demo:demo", "Watch the queue at work, and a worker being killed."),
    "bench": Entry("Setup", "dibs.cli.bench:bench", "Measure this machine's cycles per second."),
    "completion": Entry("Setup", "dibs.cli.completion:completion", "Print the completion script of a shell."),
}


class Root(Group):
    """The group of all commands: lists them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.where.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS, n=1)
            advice = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"There is no command {args[0]!r}.{advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            rows = [(name.ljust(widest), entry.summary) for name, entry in COMMANDS.items() if entry.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    examples="""
    dibs enqueue thumbnail '{"url": "a.png"}'
    dibs top
    dibs --url /var/lib/jobs ls --status failed --json
    """,
)
@click.version_option(package_name="dibs", message="dibs %(version)s")
def cli() -> None:
    """dibs: a durable task queue in a directory.

    Options that stand here may stand before or after the command. A setting comes from its flag, else from DIBS_<NAME>
    in the environment, else from [tool.dibs] in pyproject.toml; `dibs config` shows which.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command line and ends the process with its exit code. The entry point of ``dibs``."""
    if os.environ.get("_DIBS_COMPLETE"):
        cli.main(prog_name="dibs")
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; errors that are expected are told without a traceback."""
    args = list(argv)
    if args[0:1] in (["--help"], ["-h"]):
        args = [*args[1:], args[0]]  # `dibs --help ls` is `dibs ls --help`
    as_json = "--json" in args
    try:
        return _invoked(args)
    except BrokenPipeError:
        return go_quietly()
    except Exception as error:  # noqa: BLE001 the last resort: told with its traceback, and its exit code says so
        tell(error, as_json=as_json)
        return exit_code_of(error)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _invoked(args: list[str]) -> int:
    try:
        with cli.make_context("dibs", args) as ctx:
            code: Any = cli.invoke(ctx)
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    sys.stdout.flush()
    return code if isinstance(code, int) else Exit.OK
