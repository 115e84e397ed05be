"""``dibs history``: the journal as a lake of tables, a report of it, and questions to it."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dibs.cli.context import DURATION, Command, Group, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import Column, JsonList, count_text, echo_json, echo_table, note, plural, status
from dibs.cli.spark import check_installed, told
from dibs.errors import LakeError
from dibs.stores.protocol import Store

if TYPE_CHECKING:
    from dibs.history.run import Told

SHOWN_MAX = 1_000
MEMORY_MIN_MB = 512
QUERY_ADVICE = (
    "Check the statement: DESCRIBE tasks shows the columns of a table. If a file is damaged, `dibs history run "
    "--rebuild` makes the tables anew; if memory was short, --memory and -n help."
)
EXAMPLES = """
dibs history run --store lmdb:/var/lib/jobs --lake /srv/lake
dibs history report --lake /srv/lake --open
dibs history query 'SELECT * FROM error_groups' --lake /srv/lake
"""

lake_option = click.option(
    "--lake", "lake_path", required=True, metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
    help="The directory of the tables.",
)  # fmt: skip
store_option = click.option("--store", metavar="URL", help="The store.  [--url]")
master_option = click.option(
    "--master", metavar="URL", help="Where Spark runs.  [Spark's configuration, else local[*]]"
)


def _memory(_: click.Context, __: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"\d+[mg]", value) or int(value[:-1]) * (1 if value[-1] == "m" else 1024) < MEMORY_MIN_MB:
        raise click.BadParameter(f"{value!r} is no size: write 1g or more, such as 2g or 1500m.")
    return value


memory_option = click.option(
    "--memory", callback=_memory, default="1g", show_default=True, metavar="SIZE", help="Of Spark's Java process."
)


@click.group(cls=Group, examples=EXAMPLES)
def history() -> None:
    """Keep the history of a queue as tables, look at it, ask it.

    Takes the journal into a lake: a directory of Parquet tables that Spark, pandas, Polars and DuckDB read. It says
    what became of each task, how long tasks waited and ran, what failed, and how many workers were needed.
    Running and asking it needs `pip install 'dibs[spark]'` and Java 17 or newer; the report needs no Java.
    """


@history.command(
    cls=Command,
    examples="""
    dibs history run --store lmdb:/var/lib/jobs --lake /srv/lake
    dibs history run --lake /srv/lake --follow --every 1m
    dibs history run --lake /srv/lake --rebuild --target-wait 5s
    """,
)
@store_option
@lake_option
@click.option("-f", "--follow", is_flag=True, help="Stay until Ctrl-C, and take events in as they come.")
@click.option("--every", "every_s", type=DURATION, default="30s", show_default=True,
              help="How often to look for news, with --follow.")  # fmt: skip
@click.option("--go-on", is_flag=True, help="Leave out what the journal has trimmed before it was taken in.")
@click.option("--format", type=click.Choice(["parquet", "delta"]),
              help="How a new lake keeps its tables; delta needs delta-spark.  [parquet]")  # fmt: skip
@click.option("--rebuild", is_flag=True, help="Make all other tables anew, first, from the events in the lake.")
@click.option("--target-wait", "target_wait_s", type=DURATION,
              help="The wait that `capacity` advises for, of 95 in 100 deliveries.  [2s]")  # fmt: skip
@master_option
@memory_option
@pass_session
def run(session: Session, /, store: str | None, lake_path: Path, follow: bool, every_s: float, **options: Any) -> int:
    """Take the journal into a lake: once, or for as long as it runs.

    Goes on where the last run ended; a run that was killed is repeated without a trace. The journal waits for the lake,
    up to its size (journal_max_bytes): past that a run stops, says what is missing, and goes on with --go-on.
    Every tenant is taken in, so at a server it needs an operator's token.
    """
    check_installed()
    from dibs.history import run as runs

    url = store or session.settings.url
    if every_s <= 0:
        raise click.UsageError("--every must be more than 0s.")
    asked = runs.Options(url=url, follow_s=every_s if follow else None, **options)
    began_s = time.monotonic()
    with _stoppable() as stopped, _shown(follow) as tell:
        try:
            ended = runs.run(lake_path.absolute(), asked, tell, stopped)
        except Exception as error:
            raise told(error, "Run it again: it goes on where it was.") from error
    if stopped.is_set() and not follow:
        raise KeyboardInterrupt
    seconds = time.monotonic() - began_s
    if session.json:
        echo_json({"events": ended.events, "commits": ended.commits, "until": ended.until, "seconds": round(seconds, 3),
                   "gaps": ended.gaps})  # fmt: skip
        return Exit.OK
    until = "" if ended.until is None else f", up to {_utc(ended.until)}"
    note(f"{plural(ended.events, 'event')} taken in{until}, in {seconds:.1f} s with the start of Spark.")
    for gap in ended.gaps:
        note(f"Missing, in shard {gap.shard}: after {_utc(gap.after) if gap.after else 'the beginning'}, before "
             f"{_utc(gap.until)}.")  # fmt: skip
    return Exit.OK


@history.command(
    cls=Command,
    examples="""
    dibs history report --lake /srv/lake --open
    dibs history report --lake /srv/lake --days 30 -o november.html
    dibs history report --lake /srv/lake --since 2026-11-01 --until 2026-11-07
    """,
)
@lake_option
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Into this file.  [report.html in the lake]")  # fmt: skip
@click.option("--open", "shown", is_flag=True, help="Show it in the browser.")
@click.option("--days", type=click.IntRange(1, 3_660), metavar="N", help="The last so many days.  [7]")
@click.option("--since", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="From this day on, in UTC.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="Up to this day, which is in it.")
@pass_session
def report(
    session: Session,
    /,
    lake_path: Path,
    output: Path | None,
    shown: bool,
    days: int | None,
    since: datetime | None,
    until: datetime | None,
) -> int:
    """Write a report of a lake: one page that opens without the internet.

    Throughput, backlog, waits and runs, errors, workers, how many would have been needed, the slowest tasks; by queue
    and tenant. The terminal gets the short version. Needs no Java, unless it is a Delta lake.
    """
    check_installed()
    from pyarrow.lib import ArrowException

    from dibs.history.report.page import write
    from dibs.history.report.short import short
    from dibs.history.report.summary import summary

    if days is not None and since is not None:
        raise click.UsageError("Give --days or --since, not both.")
    out = output or lake_path / "report.html"
    with status("adding up"):
        try:
            summed = summary(lake_path, days=days, since=since and since.date(), until=until and until.date())
        except (ArrowException, OSError) as error:
            raise LakeError(
                f"a file of {lake_path} cannot be read: {error}. `dibs history run --rebuild` makes the tables anew"
            ) from error
        try:
            write(summed, out)
        except OSError as error:
            raise click.UsageError(f"{out} cannot be written: {error.strerror}.") from error
    if session.json:
        echo_json({"report": str(out), "begin": summed.begin, "end": summed.end, "gaps": summed.gaps,
                   "advice": [one.text for one in summed.advice]})  # fmt: skip
    else:
        for line in short(summed):
            click.echo(line)
        click.echo(f"\nThe report: {out}")
    if shown and click.launch(out.absolute().as_uri()):
        note(f"No browser could be started: open {out} yourself.")
    return Exit.OK


@history.command(
    cls=Command,
    examples="""
    dibs history query 'SELECT * FROM error_groups' --lake /srv/lake
    dibs history query --lake lake --json 'SELECT max(backlog) FROM queue_minutes'
    """,
)
@click.argument("sql")
@lake_option
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N",
              help=f"At most so many rows.  [{SHOWN_MAX:,} in a table, all as JSON]")  # fmt: skip
@master_option
@memory_option
@pass_session
def query(session: Session, /, sql: str, lake_path: Path, limit: int | None, master: str | None, memory: str) -> int:
    """Ask a lake by Spark SQL.

    The tables: events, attempts, tasks, queue_minutes, error_groups, workers, capacity, tenants. Times are in UTC.
    """
    check_installed()
    from dibs.history import query as queries
    from dibs.history.formats import start_spark
    from dibs.history.lake import Lake

    lake = Lake.open(lake_path.absolute())
    lake.check_version()
    queries.check(lake, sql)
    # PySpark logs what it raises.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        with status("asking Spark"):
            found = queries.query(start_spark(lake.state.format, master, memory), lake, sql)
            most = limit if limit is not None else None if session.json else SHOWN_MAX
            rows = [] if most is None else found.limit(most + 1).collect()
    except Exception as error:
        raise told(error, QUERY_ADVICE) from error
    names, cut = found.columns, most is not None and len(rows) > most
    rows = rows[:most] if cut else rows
    if session.json:
        listed = JsonList("rows")
        try:
            for row in rows if most is not None else found.toLocalIterator():
                listed.add({name: _plain(value) for name, value in zip(names, row, strict=True)})
        except Exception as error:
            raise told(error, QUERY_ADVICE) from error
        listed.end(more=cut)
        return Exit.OK
    numbers = {field.name for field in found.schema if field.dataType.typeName() not in TEXTS}
    echo_table(
        [Column(name.upper(), right=name in numbers) for name in names],
        [[_text(value) for value in row] for row in rows],
        empty="No rows.",
    )
    if cut:
        note(f"The first {plural(len(rows), 'row')}: there are more; -n shows them.")
    return Exit.OK


@history.command(
    cls=Command,
    examples="""
    dibs history forget --lake /srv/lake
    dibs history forget --store lmdb:/var/lib/jobs --lake /srv/lake
    """,
)
@store_option
@lake_option
@pass_session
def forget(session: Session, /, store: str | None, lake_path: Path) -> int:
    """Let the journal no longer wait for a lake.

    For a lake that will not be run any more. Its tables stay; a later run says what is missing by then.
    """
    from dibs.history.lake import Lake

    if store is not None:
        session.flags["url"] = store
    reader = Lake.open(lake_path.absolute()).state.reader

    async def forgotten(opened: Store) -> int:
        waiting = [one for one in await opened.readers() if one.name == reader]
        for one in waiting:
            await opened.advance(reader, one.shard, None)
        return len(waiting)

    count = session.run(forgotten)
    note(
        f"The journal does not wait for {lake_path} any more."
        if count
        else f"The journal did not wait for {lake_path}."
    )
    return Exit.OK


def in_short(url: str, lake_path: Path, page: Path) -> list[str]:
    """Makes a lake of a store and a page of the lake, and returns the short version of it."""
    from dibs.history import run as runs
    from dibs.history.report.page import write
    from dibs.history.report.short import short
    from dibs.history.report.summary import summary

    with _stoppable() as stopped, _shown(follow=False) as tell:
        runs.run(lake_path, runs.Options(url=url), tell, stopped)
    if stopped.is_set():
        raise KeyboardInterrupt
    summed = summary(lake_path)
    write(summed, page)
    return [*short(summed), "", f"The report: {page}"]


# ------------------------------------------------------------------------------------------------------------ progress


@contextlib.contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """Yields what Ctrl-C and SIGTERM set, so that a run ends between its steps."""
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _shown(follow: bool) -> Iterator[Callable[[Told], None]]:
    """Shows how far a run is: a line that changes on a terminal; elsewhere, with --follow, a line for each commit."""
    told_events = 0
    with status("starting") as say:

        def tell(news: Told) -> None:
            nonlocal told_events
            until = "" if news.until is None else f", up to {_utc(news.until)}"
            say(f"{news.doing}: {plural(news.events, 'event')}{until}")
            if follow and not sys.stderr.isatty() and news.events > told_events:
                note(f"{plural(news.events - told_events, 'event')} taken in{until}")
                told_events = news.events

        yield tell


# -------------------------------------------------------------------------------------------------------------- values

TEXTS = {"string", "date", "timestamp", "timestamp_ntz", "boolean", "array", "map", "struct", "binary"}


def _utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _plain(value: Any) -> Any:
    """A value of Spark's as JSON has it."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case bytearray() | bytes():
            return value.hex()
        case Decimal():
            return float(value)
        case tuple() if hasattr(value, "asDict"):
            return {name: _plain(one) for name, one in value.asDict().items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case _:
            return value


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int():
            return count_text(value)
        case float():
            return f"{value:,.3f}".rstrip("0").rstrip(".")
        case datetime():
            return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
        case _:
            return str(_plain(value))
