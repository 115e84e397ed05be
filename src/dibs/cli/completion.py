"""``dibs completion``: the script that makes a shell complete dibs's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dibs.cli.context import Command
from dibs.cli.errors import Exit


@click.command(
    cls=Command,
    examples="""
    dibs completion bash > ~/.local/share/bash-completion/completions/dibs
    dibs completion zsh > ~/.zfunc/_dibs     # with ~/.zfunc in your fpath
    dibs completion fish > ~/.config/fish/completions/dibs.fish
    """,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    Put it where the shell looks for completions, and open a new shell.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "dibs", "_DIBS_COMPLETE").source())
    return Exit.OK
