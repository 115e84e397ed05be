"""How a command ends: one table of exit codes, and one place that tells errors to people and scripts."""

from __future__ import annotations

import os
import sys
import traceback
from enum import IntEnum

import click
import msgspec

from dibs.errors import (
    AccessError,
    DibsError,
    InvalidInput,
    JournalError,
    JournalReset,
    JournalTrimmed,
    LakeError,
    LeaseLostError,
    LimitExceeded,
    ModeMismatch,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMissing,
    TaskError,
    TaskUnfinished,
    TaskUnknown,
    UnknownScheme,
)
from dibs.settings import mask


class Exit(IntEnum):
    """Every exit code there is; a member's `meaning` is what the documentation says of it."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Exit:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    OK = 0, "done, and the outcome is the one that was asked for"
    NEGATIVE = 1, "done, but the outcome is negative: a task failed, an item was refused, the doctor found problems"
    USAGE = 2, "the call is wrong: an option, a name, a payload, a setting; nothing was changed"
    STORE = 3, "the store, or a lake, is missing, refused, full, damaged or does not answer"
    NOT_FOUND = 4, "there is no such task"
    TIMED_OUT = 5, "the time to wait ran out"
    JOURNAL = 6, "the journal cannot be read from that cursor"
    DENIED = 7, "the server does not allow it: the token, or a limit of the tenant"
    INTERNAL = 70, "a fault of dibs itself; please report the traceback"
    INTERRUPTED = 130, "interrupted (Ctrl-C), or a question was not answered"
    PIPE = 141, "whoever read the output went away, as with `| head`"


#: Errors by the exit code they end with; what is not named ends as its nearest parent does.
EXIT_OF: dict[type[DibsError], Exit] = {
    InvalidInput: Exit.USAGE,
    LeaseLostError: Exit.NEGATIVE,
    TaskError: Exit.NEGATIVE,
    TaskUnfinished: Exit.TIMED_OUT,
    TaskUnknown: Exit.NOT_FOUND,
    JournalError: Exit.JOURNAL,
    LakeError: Exit.STORE,
    AccessError: Exit.DENIED,
    LimitExceeded: Exit.DENIED,
    StoreError: Exit.STORE,
}

#: What to do at a command line, where the message alone speaks to a program.
HINT_OF: dict[type[DibsError], str] = {
    StoreMissing: "Check --url or DIBS_URL (`dibs config` shows where it comes from). `dibs enqueue` makes a store.",
    UnknownScheme: "Name a directory or a server with --url: ./dibs-data, lmdb:/var/lib/dibs, http://TOKEN@HOST:8080.",
    ModeMismatch: "Give --durability, or set DIBS_DURABILITY, to what the store was made with.",
    StoreFull: "`dibs dead purge` makes room; --max-bytes raises the limit.",
    StoreCorrupt: "Stop the workers, copy the directory, then run `dibs doctor`.",
    JournalReset: "To start from the oldest event: leave --after out (export), or name a new --lake (history run).",
    JournalTrimmed: "To go on from the oldest event that is kept: leave --after out (export), or give --go-on (history "
    "run).",
}


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code that an error ends the process with."""
    if isinstance(error, click.Abort):
        return Exit.INTERRUPTED
    if isinstance(error, click.ClickException):
        return error.exit_code
    return next((EXIT_OF[kind] for kind in type(error).__mro__ if kind in EXIT_OF), Exit.INTERNAL)


def tell(error: Exception, *, as_json: bool) -> None:
    """Writes an error to stderr: what happened and what to do; as JSON, one object with `error`, `message`, `hint`."""
    if isinstance(error, click.Abort):
        click.echo("Aborted.", err=True)
        return
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return
    if exit_code_of(error) == Exit.INTERNAL:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    code, message, hint = _told(error)
    if as_json:
        click.echo(msgspec.json.encode({"error": code, "message": message, "hint": hint}), err=True)
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"Try `{error.ctx.command_path} --help`."
    from dibs.cli.output import clean

    click.echo("Error: " + "\n".join(map(clean, message.split("\n"))), err=True)
    if hint:
        click.echo(hint, err=True)


def go_quietly() -> int:
    """Whoever read our output is gone: says nothing, also not when the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.PIPE


def _told(error: Exception) -> tuple[str, str, str | None]:
    if isinstance(error, click.UsageError):
        return "usage", error.format_message(), None
    if isinstance(error, click.ClickException):
        return "failed", error.format_message(), None
    if isinstance(error, DibsError):
        hint = next((HINT_OF[kind] for kind in type(error).__mro__ if kind in HINT_OF), None)
        return error.code, mask(str(error)), hint
    return "internal", f"{type(error).__name__}: {error}", None
