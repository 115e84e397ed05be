"""Which rows of a view are wanted: what the options say, and the filters that Spark hands over.

A filter is taken only if the reader then gives just the rows that Spark would have kept: equality with words (tenant,
command, status and such), and bounds of times. Spark's times are microseconds and the store's are milliseconds, so a
bound between two milliseconds becomes the next one. Whatever is not taken, Spark does itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from dibs import checks
from dibs.errors import InvalidName
from dibs.ids import id_from_text, id_to_text
from dibs.spark.options import ReadOptions, View, words
from dibs.task import EventKind, EventRun, Place, Status, Task
from dibs.task import Filter as Which

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)
_US_PER_MS = 1_000
_WHOSE = ("tenant", "command")
#: Columns that may be asked for by value, and columns of times: all that filters are taken of.
WORDS: Mapping[View, tuple[str, ...]] = {
    "tasks": (*_WHOSE, "id", "status", "place"),
    "results": (*_WHOSE, "id", "status"),
    "dead": (*_WHOSE, "id"),
    "events": (*_WHOSE, "kind", "shard"),
    "queues": _WHOSE,
}
TIMES: Mapping[View, tuple[str, ...]] = {
    "tasks": ("enqueued_at", "ended_at"),
    "results": ("enqueued_at", "ended_at"),
    "dead": ("enqueued_at", "ended_at"),
    "events": ("at",),
    "queues": (),
}
#: What the options `since` and `until` are about.
_WHEN: Mapping[View, str] = {
    "tasks": "enqueued_at",
    "results": "ended_at",
    "dead": "ended_at",
    "events": "at",
}
#: Columns of times that some rows have nothing in.
_MAYBE_NULL = frozenset({"ended_at"})


class Span(Struct, frozen=True):
    """Times from one millisecond up to another, which is not meant any more."""

    from_ms: int | None = None
    until_ms: int | None = None

    def within(self, other: Span) -> Span:
        """Returns what is in both."""
        starts = [ms for ms in (self.from_ms, other.from_ms) if ms is not None]
        ends = [ms for ms in (self.until_ms, other.until_ms) if ms is not None]
        return Span(max(starts, default=None), min(ends, default=None))

    def has(self, at_ms: int) -> bool:
        return (self.from_ms is None or self.from_ms <= at_ms) and (self.until_ms is None or at_ms < self.until_ms)

    def empty(self) -> bool:
        return self.from_ms is not None and self.until_ms is not None and self.from_ms >= self.until_ms


class Wanted(Struct, frozen=True):
    """The rows that are wanted: those whose columns have one of some words, and times within spans."""

    words: dict[str, frozenset[Any]] = {}
    times: dict[str, Span] = {}

    def with_filter(self, view: View, one: Filter) -> Wanted | None:
        """Returns what is left of this by one more filter; None: that is for Spark to do."""
        path: tuple[str, ...] = getattr(one, "attribute", ())
        column = path[0] if len(path) == 1 else ""
        if isinstance(one, IsNotNull):
            known = column in WORDS[view] or column in TIMES[view]
            return self if known and column not in _MAYBE_NULL else None
        if column in WORDS[view]:
            named = _words(column, one)
            return None if named is None else self.with_words(column, named)
        if column in TIMES[view]:
            span = _span(one)
            return None if span is None else self.with_times(column, span)
        return None

    def with_words(self, column: str, named: frozenset[Any]) -> Wanted:
        """Returns what is left of this with one of these in a column."""
        return replace(self, words=self.words | {column: named & self.words.get(column, named)})

    def with_times(self, column: str, span: Span) -> Wanted:
        """Returns what is left of this with a column's times in a span."""
        return replace(self, times=self.times | {column: span.within(self.times.get(column, Span()))})

    def nothing(self) -> bool:
        """True if no row can be wanted."""
        return not all(self.words.values()) or any(span.empty() for span in self.times.values())

    def only(self, column: str) -> Any:
        """Returns the one word that a column may have; None: any, or one of several."""
        known = self.words.get(column, frozenset())
        return next(iter(known)) if len(known) == 1 else None

    def allows(self, column: str, word: Any) -> bool:
        """Whether a column may have a word."""
        return column not in self.words or word in self.words[column]

    def which(
        self, *, queue: tuple[str, Place] | None = None, id_from: bytes | None = None, id_until: bytes | None = None
    ) -> Which:
        """Returns as much of this as the filter of a listing can say: of the tasks in one place of a queue, or of those
        in a range of ids, which must not name a queue and a place, or they are listed by that."""
        enqueued, ended = self.times.get("enqueued_at", Span()), self.times.get("ended_at", Span())
        command, place = queue or (self.only("command"), self.only("place"))
        status = self.only("status")
        if queue is None and (place not in (None, Place.NONE) or status in (Status.IN_PROGRESS, Status.FAILED)):
            command = None
        return Which(
            command=command,
            status=status,
            place=place,
            enqueued_from_ms=enqueued.from_ms,
            enqueued_until_ms=enqueued.until_ms,
            ended_from_ms=ended.from_ms,
            ended_until_ms=ended.until_ms,
            id_from=id_from,
            id_until=id_until,
        )

    def tasks(self, tasks: list[Task]) -> list[Task]:
        """Returns those of some tasks that are wanted, of those that a listing by `which` gave."""
        for column in ("command", "status", "place"):
            known = self.words.get(column)
            if known is not None:
                tasks = [task for task in tasks if getattr(task, column) in known]
        return tasks

    def tasks_by_id(self, tasks: Iterable[Task | None]) -> list[Task]:
        """Returns those of some tasks that are wanted, whatever they were found by."""
        enqueued, ended = self.times.get("enqueued_at", Span()), self.times.get("ended_at")
        found = [task for task in tasks if task is not None and enqueued.has(task.enqueued_ms)]
        if ended is not None:
            found = [task for task in found if task.ended_ms is not None and ended.has(task.ended_ms)]
        return self.tasks(found)

    def runs(self, runs: list[EventRun]) -> list[EventRun]:
        """Returns those of some runs of events that are wanted."""
        for column in ("tenant", "command", "kind"):
            known = self.words.get(column)
            if known is not None:
                runs = [run for run in runs if getattr(run, column) in known]
        span = self.times.get("at")
        return runs if span is None else [run for run in runs if span.has(run.at_ms)]


def asked(options: ReadOptions) -> Wanted:
    """Returns what the options ask for."""
    wanted = Wanted()
    if options.view == "dead":
        wanted = wanted.with_words("status", frozenset({Status.FAILED}))
    elif options.view == "results":
        # Only what has ended has a time of its end.
        wanted = wanted.with_times("ended_at", Span(from_ms=0))
    for column, given in (("command", options.command), ("status", options.status), ("kind", options.kind)):
        if given is not None:
            wanted = wanted.with_words(column, frozenset(map(_READ[column], words(given))))
    span = Span(
        None if options.since is None else _first_ms(_us(options.since)),
        None if options.until is None else _first_ms(_us(options.until)),
    )
    return wanted if span == Span() else wanted.with_times(_WHEN[options.view], span)


def _words(column: str, one: Filter) -> frozenset[Any] | None:
    if isinstance(one, EqualTo | EqualNullSafe) and one.value is not None:
        given: Iterable[Any] = (one.value,)
    elif isinstance(one, In):
        given = (value for value in one.value if value is not None)
    else:
        return None
    read = _READ.get(column, _text)
    return frozenset(word for word in map(read, given) if word is not None)


def _span(one: Filter) -> Span | None:
    value = getattr(one, "value", None)
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    us = _us(value)
    this_ms, next_ms = _first_ms(us), us // _US_PER_MS + 1
    if isinstance(one, EqualTo | EqualNullSafe):
        return Span(this_ms, next_ms)
    if isinstance(one, GreaterThanOrEqual):
        return Span(from_ms=this_ms)
    if isinstance(one, GreaterThan):
        return Span(from_ms=next_ms)
    if isinstance(one, LessThan):
        return Span(until_ms=this_ms)
    if isinstance(one, LessThanOrEqual):
        return Span(until_ms=next_ms)
    return None


def _us(time: datetime) -> int:
    """A time as Spark counts it; without a zone it is in UTC."""
    return ((time if time.tzinfo is not None else time.replace(tzinfo=UTC)) - _EPOCH) // _US


def _first_ms(us: int) -> int:
    """The first whole millisecond that is not before a time."""
    return -(-us // _US_PER_MS)


# What no row can have is no word: None. It must not reach the store, which would refuse it instead of finding nothing.


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _named(check: Callable[[str], object]) -> Callable[[Any], str | None]:
    def read(value: Any) -> str | None:
        try:
            check(value)
        except InvalidName:
            return None
        return str(value)

    return read


def _one_of(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            return None

    return read


def _id(value: Any) -> bytes | None:
    try:
        task_id = id_from_text(value)
    except InvalidName:
        return None
    return task_id if id_to_text(task_id) == value else None


_READ: Mapping[str, Callable[[Any], Any]] = {
    "tenant": _named(checks.check_tenant),
    "command": _named(checks.check_command),
    "status": _one_of(Status),
    "place": _one_of(Place),
    "kind": _one_of(EventKind),
    "shard": _one_of(int),
    "id": _id,
}
