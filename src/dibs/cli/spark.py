"""``dibs spark``: what Spark does with a queue, from the command line."""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from dibs import errors
from dibs.cli.context import DURATION, Command, Group, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import Column, count_text, echo_json, echo_table, note, plural, rows_progress
from dibs.errors import DibsError, MissingDriver
from dibs.importing import import_function
from dibs.shapes import Json
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, QueueStats

COUNTS = ("claimed", "completed", "retried", "failed", "cancelled", "lost", "released")
LOOK_S = 0.3
ACCOUNT_LINES = 3
"""So much of what Spark says of a job that failed."""
INTERRUPTED = "Interrupted: what has begun ends, or comes back when its leases do."
_SAID = re.compile(r"dibs\.errors\.(\w+): (.+)")


@click.group(
    cls=Group,
    examples="""
    dibs spark drain shop.images:thumbnails --command thumbnail
    dibs spark drain score.py:score -c score --payload 'n INT, text STRING'
    """,
)
def spark() -> None:
    """Work a queue off with Spark.

    Needs `pip install 'dibs[spark]'` and Java 17 or newer. Reading and writing a queue by Spark is done in programs,
    with format("dibs").
    """


@spark.command(
    cls=Command,
    examples="""
    dibs spark drain shop.images:thumbnails --command thumbnail
    dibs spark drain score.py:score -c score --payload 'n INT, text STRING'
    dibs spark drain score.py:score -c score --max-rows 10000 --max-time 5m
    dibs --url http://TOKEN@queue:8080 spark drain etl:load -c load --json
    dibs spark drain etl:load -c load --master spark://head:7077 --parallelism 64
    """,
)
@click.argument("function", metavar="MODULE:FN")
@click.option("--command", "-c", required=True, metavar="COMMAND", help="The queue to work off.")
@click.option("--form", type=click.Choice(["pandas", "arrow"]), default="pandas", show_default=True,
              help="What FN gets: a pandas.DataFrame or a pyarrow.Table.")  # fmt: skip
@click.option("--payload", metavar="TYPE", default="string", show_default=True,
              help="The payload as string, binary, or as columns: 'url STRING, width INT'.")  # fmt: skip
@click.option("--codec", type=click.Choice(["json", "msgpack", "raw"]), default="json", show_default=True,
              help="How results are written.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, BATCH_MAX), default=500, show_default=True,
              help="Rows that FN gets at most.")  # fmt: skip
@click.option("--lease", "lease_s", type=DURATION, help="How long a row of a killed executor is kept from others.")
@click.option("--max-rows", type=click.IntRange(1), metavar="N", help="End after so many rows.")
@click.option("--max-time", "max_s", type=DURATION, help="End after so long; a batch that runs is not cut off.")
@click.option("--parallelism", type=click.IntRange(1), metavar="N", help="Spark tasks at work.  [Spark's default]")
@click.option("--master", metavar="URL", help="Where Spark runs.  [Spark's configuration, else local[*]]")
@pass_session
def drain(session: Session, /, function: str, command: str, master: str | None, **options: Any) -> int:
    """Run a function over the tasks of a queue, on Spark's executors.

    FN gets batches of rows with the columns id, key, attempt, enqueued_at and payload (or the payload's fields, with
    --payload), and returns None, a result for each row, or a table with the columns result, outcome, error, reason,
    delay_s. Each row is settled by itself: where FN raises, its batch is halved until the bad rows stand alone. Ends
    when nothing is ready. The exit code is 1 if tasks failed.
    """
    check_installed()
    from dibs import spark as sparks

    fn = _travelling(import_function(function))
    ready = session.run(lambda store: _ready(store, session.tenant, command))
    total = min(ready.ready, options["max_rows"] or ready.ready)
    began_s = time.monotonic()
    try:
        with _shown(session, command, total, ready):
            running = sparks.session(f"dibs drain {command}", master=master)
            done = sparks.drain(running, session.settings.url, command, fn, tenant=session.tenant, **options)
            rows = [row.asDict() for row in done.sort("partition").collect()]
    except KeyboardInterrupt:
        note(INTERRUPTED)
        raise
    except Exception as error:
        if _interrupted(error):
            note(INTERRUPTED)
            raise KeyboardInterrupt from error
        raise told(error, "What executors held comes back when its leases end: run it again.") from error
    return _tell(session, rows, time.monotonic() - began_s)


def check_installed() -> None:
    """Raises, with advice, if Spark's Python packages are not here."""
    missing = [name for name in ("pyspark", "pyarrow", "pandas") if find_spec(name) is None]
    if missing:
        raise MissingDriver(f"Spark needs {', '.join(missing)}, not installed here: pip install 'dibs[spark]'")


def _travelling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a module that is not installed travels as it is: executors need not find the module."""
    from pyspark import cloudpickle

    module = sys.modules.get(fn.__module__)
    file = getattr(module, "__file__", None)
    if file is not None and not Path(file).is_relative_to(sysconfig.get_path("purelib")):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return fn


async def _ready(store: Store, tenant: str, command: str) -> QueueStats:
    stats = await store.stats(tenant, [command])
    return stats.queues[0] if stats.queues else QueueStats(command=command)


@contextlib.contextmanager
def _shown(session: Session, command: str, total: int, before: QueueStats) -> Iterator[None]:
    """Shows, if stderr is a terminal, how the queue gets shorter."""
    ended = threading.Event()

    def look(advance: Callable[[int, int], None]) -> None:
        from dibs.spark import connection

        most = before.ready + before.leased
        shown = 0
        while not ended.wait(LOOK_S):
            with contextlib.suppress(DibsError):
                now = connection.ask(session.settings.url, lambda store: _ready(store, session.tenant, command))
                done = max(shown, most - now.ready - now.leased)
                advance(done - shown, done - shown)
                shown = done

    with rows_progress(f"drain {command}", total or None) as advance:
        watcher = threading.Thread(target=look, args=(advance,), name="dibs-progress", daemon=True)
        if sys.stderr.isatty():
            watcher.start()
        try:
            yield
        finally:
            ended.set()
            if watcher.is_alive():
                watcher.join()


def _interrupted(error: BaseException | None) -> bool:
    """Whether it came of Ctrl-C: Spark cancels its job then, and raises an error over that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def told(error: Exception, advice: str) -> Exception:
    """Returns the error that an executor raised, where it is ours: Spark hands on its text, in a long one of its own.
    What is Spark's is told in short, with `advice`."""
    if isinstance(error, (ConnectionError, EOFError)):
        return click.ClickException(
            f"Spark's Java process has gone: it was killed, or had too little memory.\n{advice}"
        )
    if not type(error).__module__.startswith(("pyspark", "py4j")):
        return error
    found = [(getattr(errors, name, None), text) for name, text in _SAID.findall(str(error))]
    ours = [(kind, text) for kind, text in found if isinstance(kind, type) and issubclass(kind, DibsError)]
    if ours:
        kind, text = ours[-1]
        return kind(text)
    # What follows the first lines is Java's; what begins like this, Spark's own drawing of a statement.
    lines = [line for line in str(error).splitlines() if not line.startswith(("'", "+-", " ", ":", "\t"))]
    account = "\n".join(lines[:ACCOUNT_LINES])
    return click.ClickException(f"Spark gave up: {account}\n{advice}")


def _tell(session: Session, rows: list[Json], seconds: float) -> int:
    sums = {name: sum(row[name] for row in rows) for name in (*COUNTS, "batches")}
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row["errors"])
    if session.json:
        echo_json({**sums, "seconds": round(seconds, 3), "errors": dict(kinds.most_common()), "partitions": rows})
    else:
        titles = ("PARTITION", *(name.upper() for name in COUNTS), "BATCHES", "SECONDS")
        echo_table(
            [Column(title, right=True) for title in titles],
            [
                [
                    str(row["partition"]),
                    *(count_text(row[name]) for name in (*COUNTS, "batches")),
                    f"{row['seconds']:.1f}",
                ]
                for row in rows
            ],
        )
        for kind, count in kinds.most_common(5):
            note(f"{plural(count, 'row')} with {kind}.")
        note(f"{plural(sums['completed'], 'task')} completed in {seconds:.1f} s, the start of Spark included.")
    return Exit.NEGATIVE if sums["failed"] else Exit.OK
