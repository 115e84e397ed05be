"""``dibs serve``: the store behind HTTP."""

from __future__ import annotations

from pathlib import Path

import click

from dibs.cli.context import Command, Session, pass_session
from dibs.cli.errors import Exit
from dibs.errors import MissingDriver

PATH = click.Path(path_type=Path, dir_okay=False)


@click.command(
    cls=Command,
    examples="""
    dibs serve
    dibs serve --store /var/lib/dibs --config /etc/dibs/server.toml
    dibs serve --tokens tokens.toml --host 0.0.0.0
    """,
    helps={"--url": None, "--tenant": None, "--json": None},
)
@click.option("--store", metavar="URL", help="The store behind it: a directory, or shards:DIR.  [default: --url]")
@click.option("--host", metavar="ADDRESS", help="Where to listen.  [default: 127.0.0.1]")
@click.option("--port", metavar="NUMBER", type=click.IntRange(0, 65535), help="0 is any that is free.  [default: 8080]")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML: keys, limits, the rest.",
)
@click.option("--tokens", metavar="FILE", help="Accept the tokens in this file; `dibs token new` adds to it.")
@click.option("--tls-cert", metavar="FILE", help="Serve HTTPS with this certificate (PEM, with its chain).")
@click.option("--tls-key", metavar="FILE", help="The certificate's key (PEM).")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="How log lines are written.  [default: text]")
@click.option("--events-to", metavar="FILE", help="Append every event of the journal to this file, as JSON lines.")
@pass_session
def serve(
    session: Session,
    /,
    store: str | None,
    host: str | None,
    port: int | None,
    config_file: Path | None,
    tokens: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    log_format: str | None,
    events_to: str | None,
) -> int:
    """Serve the store to other machines, by HTTP.

    Without keys or tokens it is in development mode: it listens on this machine only, asks for no token, and everybody
    is the tenant `default` with every scope. SIGTERM stops it gently: no task is given out any more, whoever waits is
    answered, and what was asked for is done.
    """
    try:
        from dibs.server.app import run
        from dibs.server.config import read_config
    except ImportError as error:
        raise MissingDriver(f"the server is missing ({error.name}): pip install 'dibs[server]'") from error
    if store is not None:
        session.flags["url"] = store
    config = read_config(
        config_file,
        host=host,
        port=port,
        tokens=tokens,
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_format=log_format,
        events_to=events_to,
    )
    run(config, session.settings, lambda line: click.echo(line, err=True))
    return Exit.OK
