"""Running a lake: the journal as a stream into it, once or for as long as it is let, and the journal told how far.

The lake is a named reader of the journal: what it has not taken in is not trimmed for its age, only for the journal's
size. A run begins by looking whether that has happened, and says what is missing.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql import SparkSession

from dibs.errors import JournalReset, JournalTrimmed
from dibs.history.formats import check_installed, start_spark
from dibs.history.intake import Intake
from dibs.history.lake import Format, Gap, Lake, is_lake
from dibs.spark.connection import ask
from dibs.stores.protocol import ALL_TENANTS, Store
from dibs.task import JournalBounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

BATCH_EVENTS = 4_000_000
"""So many events are taken in by one commit at most."""
LOOK_S = 1


class Options(Struct, frozen=True, kw_only=True):
    """How a lake is run."""

    url: str
    """The store."""
    follow_s: float | None = None
    """Go on, and look for news so often; None: take in what is there, and end."""
    go_on: bool = False
    """Leave out what was trimmed from the journal before it was taken in."""
    rebuild: bool = False
    """Make silver and gold anew from the events in the lake, first."""
    format: Format | None = None
    """How the tables of a new lake are kept; None: as they are, or as Parquet."""
    target_wait_s: float | None = None
    master: str | None = None
    memory: str = "1g"
    """Of Spark's Java process."""
    batch_events: int = BATCH_EVENTS


class Told(Struct, frozen=True):
    """How far a run is."""

    doing: str
    events: int
    """Taken in by this run so far."""
    until: datetime | None
    """The newest event in the lake."""


class Ended(Struct, frozen=True):
    """What a run did."""

    events: int
    commits: int
    until: datetime | None
    gaps: list[Gap]


def run(path: Path, options: Options, tell: Callable[[Told], None], stopped: threading.Event) -> Ended:
    """Brings a lake up to date with its store; with `follow_s`, until `stopped` is set."""
    if options.format is not None and not is_lake(path):
        check_installed(options.format)
    with Lake.writing(
        path, format=options.format, target_wait_s=options.target_wait_s, rebuild=options.rebuild
    ) as lake:
        journal = Journal(options.url, lake)
        gaps = journal.gaps()
        if gaps and not options.go_on:
            raise JournalTrimmed(_missing(gaps))
        journal.hold()
        progress = _Progress(lake, tell)
        progress.say("starting Spark", 0)
        warm = SparkSession.getActiveSession() is not None
        spark = start_spark(lake.state.format, options.master, options.memory)
        intake = Intake(spark, lake, progress.say)
        intake.finish()
        before = lake.state
        if options.rebuild:
            intake.rebuild()
        if gaps:
            lake.commit([], replace(lake.state, gaps=[*lake.state.gaps, *gaps]))
        with contextlib.nullcontext() if warm or not before.commits else _meanwhile(intake.warm_up):
            _stream(spark, lake, intake, journal, options, progress, stopped)
        if not stopped.is_set():
            intake.refine()
            progress.say("up to date", 0)
        state = lake.state
        return Ended(progress.events, state.commits - before.commits, state.horizon, gaps)


class Journal:
    """The journal of a store, as its named reader sees it."""

    def __init__(self, url: str, lake: Lake) -> None:
        self._url = url
        self._lake = lake

    def gaps(self) -> list[Gap]:
        """Returns what was trimmed since the lake took events in. Raises if the journal is not the one it has."""
        bounds = ask(self._url, lambda store: store.journal_bounds())
        positions = self._lake.state.positions
        if positions and not {int(shard) for shard in positions} <= {one.shard for one in bounds}:
            raise JournalReset("this lake is of a store with other shards: name another --lake")
        found = [self._gap(one) for one in bounds if str(one.shard) in positions]
        return [gap for gap in found if gap is not None]

    def _gap(self, bounds: JournalBounds) -> Gap | None:
        position = self._lake.state.positions[str(bounds.shard)]
        cursor = bytes.fromhex(position.cursor)
        try:
            ask(self._url, lambda store: store.runs(ALL_TENANTS, shard=bounds.shard, after=cursor, limit=1))
        except JournalReset as error:
            raise JournalReset(
                "this lake is of another store, or of the one that this was restored from: name another --lake"
            ) from error
        except JournalTrimmed:
            page = ask(
                self._url, lambda store: store.runs(ALL_TENANTS, shard=bounds.shard, after=bounds.oldest, limit=1)
            )
            until = datetime.fromtimestamp(page.runs[0].at_ms / 1000, UTC) if page.runs else datetime.now(UTC)
            return Gap(shard=bounds.shard, after=position.at, until=until)
        return None

    def hold(self) -> None:
        """Has trimming wait for the lake, from its very first event on."""
        positions = self._lake.state.positions

        async def hold(store: Store) -> None:
            for one in await store.journal_bounds():
                position = positions.get(str(one.shard))
                cursor = one.oldest if position is None else max(one.oldest, bytes.fromhex(position.cursor))
                await store.advance(self._lake.state.reader, one.shard, cursor)

        ask(self._url, hold)

    def advance(self, positions: dict[int, bytes]) -> None:
        """Lets what is in the lake be trimmed."""

        async def advance(store: Store) -> None:
            for shard, cursor in positions.items():
                await store.advance(self._lake.state.reader, shard, cursor)

        ask(self._url, advance)


class _Progress:
    def __init__(self, lake: Lake, tell: Callable[[Told], None]) -> None:
        self._lake = lake
        self._tell = tell
        self.events = 0

    def say(self, doing: str, _: int) -> None:
        self._tell(Told(doing, self.events, self._lake.state.horizon))


def _stream(
    spark: SparkSession,
    lake: Lake,
    intake: Intake,
    journal: Journal,
    options: Options,
    progress: _Progress,
    stopped: threading.Event,
) -> None:
    """Runs the stream to what was newest at its start, or until it is stopped."""
    failed: list[BaseException] = []

    def take(events: DataFrame, _: int) -> None:
        try:
            taken = intake.take(events)
            journal.advance(taken.positions)
            progress.events += taken.events
            if options.follow_s is not None:
                intake.refine()
                progress.say("waiting for news", 0)
        except BaseException as error:  # noqa: BLE001 it is raised where the stream is waited for
            failed.append(error)
            # Spark looks through the text of an error, and its search overflows with a long one.
            raise _Failed(type(error).__name__) from None

    source = spark.readStream.format("dibs").option("url", options.url).option("view", "events")
    source = source.option("tenant", ALL_TENANTS).option("maxEventsPerTrigger", options.batch_events)
    source = source.option("failOnDataLoss", str(not options.go_on).lower())
    writer = source.load().writeStream.foreachBatch(take).option("checkpointLocation", str(_checkpoint(lake)))
    if options.follow_s is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{options.follow_s:g} seconds")
    context = spark.sparkContext
    # What goes wrong is raised here, and a stream that is stopped is no error: Spark need not tell either.
    context.setLogLevel("OFF")
    try:
        with _ended(writer.start(), failed, stopped) as query:
            while not query.awaitTermination(LOOK_S) and not stopped.is_set():
                pass
    finally:
        if not stopped.is_set():
            context.setLogLevel("ERROR")


def _checkpoint(lake: Lake) -> Path:
    """Where the stream keeps its offsets. Without any events in the lake it starts anew."""
    if not lake.state.positions:
        shutil.rmtree(lake.checkpoint, ignore_errors=True)
    return lake.checkpoint


@contextlib.contextmanager
def _meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Does something that only saves time beside something else: the start of a stream leaves a core idle."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=attempt, name="dibs-warm-up", daemon=True)
    thread.start()
    yield
    thread.join()


class _Failed(Exception):
    """A batch was not taken in: what Spark hears of it."""


@contextlib.contextmanager
def _ended(query: StreamingQuery, failed: list[BaseException], stopped: threading.Event) -> Iterator[StreamingQuery]:
    """Stops the query at the end. What failed in this process is raised as it is, not as Spark tells it; what failed
    because it was stopped is not."""
    try:
        yield query
    except Exception:
        if failed:
            raise failed[0] from None
        raise
    finally:
        with contextlib.suppress(*((Exception,) if stopped.is_set() else ())):
            query.stop()


def _missing(gaps: list[Gap]) -> str:
    spans = "; ".join(
        f"in shard {gap.shard} what happened after {gap.after:%Y-%m-%d %H:%M:%S} and before "
        f"{gap.until:%Y-%m-%d %H:%M:%S} UTC"
        for gap in gaps
    )
    return (
        f"the journal was trimmed before this lake took it in: missing is {spans}. The journal reached its size "
        "(journal_max_bytes): run the lake more often, or raise it"
    )
