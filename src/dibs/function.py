"""A function that can be enqueued: still the function, and a producer of tasks that call it somewhere else."""

from __future__ import annotations

import copy
import datetime
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from msgspec import Struct

from dibs import checks
from dibs.arguments import Arguments, Returned
from dibs.errors import InvalidOption, TaskCancelled, TaskUnfinished
from dibs.handles import Batch, Handle
from dibs.ids import new_id
from dibs.retry import Backoff
from dibs.stores.batches import batches, row_ids
from dibs.stores.loading import Load
from dibs.stores.protocol import Store
from dibs.task import BATCH_MAX, Committed, Duplicate, Enqueued, NewTask, Reason, Rejected, Rows

if TYPE_CHECKING:
    from dibs.app import Dibs

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

CALL_TIMEOUT_S = 30.0

Outcome = Enqueued | Duplicate | Rejected
RunIn = Literal["loop", "thread", "process"]


class CallOptions(TypedDict, total=False):
    """What can be said of one enqueue. Each means what it means in `NewTask`; `run_at` is a time with its zone, and
    `load` names a `map`."""

    tenant: str
    priority: int
    delay_s: float
    run_at: datetime.datetime
    key: str
    on_duplicate: Literal["return", "replay_dead"]
    expires_s: float
    max_attempts: int
    lease_s: float
    timeout_s: float
    result_ttl_s: float
    retention_s: float
    keep: bool
    codec: str
    traceparent: str
    limit_key: str
    limit_cost: int
    load: str


class Policy(Struct, frozen=True, kw_only=True):
    """How a worker treats the tasks of one function."""

    run_in: RunIn
    backoff: Backoff | None = None
    """None: the queue's, else the library's."""
    fail_on: tuple[type[BaseException], ...] = ()
    """Exceptions after which there is no point in trying again."""


class CallMethod(Protocol[P, R_co]):
    """`call`: with the handler's own arguments, and a `timeout_s` beside them. Type checkers cannot combine both, so
    a call that names `timeout_s` has its arguments checked when it is made."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, timeout_s: float, **kwargs: Any) -> R_co: ...


class TaskFunction(Generic[P, R]):
    """A handler and how its tasks are enqueued. Made by ``@app.task``."""

    def __init__(
        self,
        app: Dibs,
        handler: Callable[..., Any],
        command: str,
        policy: Policy,
        options: CallOptions,
        aliases: Sequence[str] = (),
    ) -> None:
        self.app = app
        self.handler = handler
        self.command = command
        if isinstance(aliases, str):
            raise InvalidOption(f"aliases is {aliases!r}: use a list of names")
        self.aliases = tuple(aliases)
        for alias in self.aliases:
            checks.check_command(alias)
        self.policy = policy
        self.arguments = Arguments(handler, command)
        self.returned = Returned(handler)
        if options.get("load") is not None:
            raise InvalidOption("load names one map: give it with .options(load=…) where the map is called")
        self._set_options(options)
        functools.update_wrapper(self, handler, updated=())

    def __repr__(self) -> str:
        return f"<task {self.command} of {self.app!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function itself, here and now."""
        value: R = self.handler(*args, **kwargs)
        return value

    def options(self, **options: Unpack[CallOptions]) -> Self:
        """Returns this function with other options for its enqueues."""
        changed = copy.copy(self)
        changed._set_options({**self._options, **options})
        return changed

    # --------------------------------------------------------------------------------------------------------- one task

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueues a call and returns when it is safe. Works anywhere, also where an event loop runs."""
        new = self._new(args, kwargs)
        return self._told(self.app.run(self._put(new)), new)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """`enqueue`, for async code."""
        new = self._new(args, kwargs)
        return self._told(await self._put(new), new)

    if TYPE_CHECKING:

        @property
        def call(self) -> CallMethod[P, R]:
            """Enqueues a call, waits for its end and returns its result; `TaskUnfinished` after `timeout_s` (30).

            What has not started by then never will, unless the options say `expires_s`.
            """

        @property
        def acall(self) -> CallMethod[P, Coroutine[Any, Any, R]]:
            """`call`, for async code."""

    else:

        def call(self, *args, timeout_s=CALL_TIMEOUT_S, **kwargs):
            """Enqueues a call, waits for its end and returns its result; `TaskUnfinished` after `timeout_s` (30).

            What has not started by then never will, unless the options say `expires_s`.
            """
            return self.app.run(self.acall(*args, timeout_s=timeout_s, **kwargs))

        async def acall(self, *args, timeout_s=CALL_TIMEOUT_S, **kwargs):
            """`call`, for async code."""
            return await self._call(args, kwargs, timeout_s)

    async def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout_s: float) -> R:
        checks.check_number("timeout_s", timeout_s, 0.001, checks.WAIT_MAX_S)
        patient = self if "expires_s" in self._options else self.options(expires_s=timeout_s)
        new = patient._new(args, kwargs)
        handle = self._told(await self._put(new), new)
        hint = f"call waited {timeout_s:g} s; is a worker running for {self.command}?"
        try:
            return await handle.awaited(timeout_s)
        except TaskUnfinished as error:
            error.add_note(hint)
            raise
        except TaskCancelled as error:
            if patient is self or error.reason != Reason.EXPIRED:
                raise
            # Its time was this call's: whoever swept it away was only a moment ahead of the timeout.
            late = TaskUnfinished(f"task {handle.id} of {self.command} had not started in time, and never will")
            late.add_note(hint)
            raise late from None

    async def _put(self, new: NewTask) -> Enqueued | Duplicate:
        [outcome] = await self.app.ask(lambda store: store.enqueue(self.tenant, [new]))
        if isinstance(outcome, Rejected):
            raise outcome.error()
        return outcome

    def _told(self, outcome: Enqueued | Duplicate, new: NewTask) -> Handle[R]:
        duplicate = isinstance(outcome, Duplicate)
        if not duplicate:
            self.app.listeners.tell_enqueued(self.tenant, self.command, [new.id])
        return Handle(self.app, self.tenant, outcome.id, self.returned.decode, kept=new.keep, duplicate=duplicate)

    # ------------------------------------------------------------------------------------------------------- many tasks

    def map(self, *iterables: Iterable[Any], **fixed: Any) -> Batch[R]:
        """Enqueues one task for each item, like the built-in `map`: with several iterables, one argument of each;
        `fixed` arguments are the same for all.

        All or nothing: whatever goes wrong on the way, nothing is enqueued. So nothing is visible before the input
        ends. With the option `load` the map has a name: repeated with the same input it enqueues nothing and returns
        the same batch.
        """
        batch = self._batch()
        few, chunks = self._read(iterables, fixed)
        if few:
            return self._added(batch, self.app.run(self._put_all(few)))
        load = Load(self.app.ask, self.tenant, self.load)
        try:
            for chunk in chunks:
                batch.task_ids += row_ids(self.tenant, self.app.run(load.stage(chunk)), chunk)
            return self._loaded(batch, self.app.run(load.commit()))
        except BaseException:
            self.app.run(load.drop())
            raise

    async def amap(self, *iterables: Iterable[Any], **fixed: Any) -> Batch[R]:
        """`map`, for async code."""
        batch = self._batch()
        few, chunks = self._read(iterables, fixed)
        if few:
            return self._added(batch, await self._put_all(few))
        load = Load(self.app.ask, self.tenant, self.load)
        try:
            for chunk in chunks:
                batch.task_ids += row_ids(self.tenant, await load.stage(chunk), chunk)
            return self._loaded(batch, await load.commit())
        except BaseException:
            await load.drop()
            raise

    def _batch(self) -> Batch[R]:
        return Batch(self.app, self.tenant, self.returned.decode, kept=self._fixed.get("keep", True))

    def _read(
        self, iterables: Sequence[Iterable[Any]], fixed: Mapping[str, Any]
    ) -> tuple[Sequence[bytes], Iterator[Rows]]:
        """Returns all payloads, if one plain enqueue is the way to put them in, or else the chunks of a load."""
        some = self._payloads(iterables, fixed)
        if self.load is None:
            if "key" in self._fixed:  # every item is about one and the same task, and only an enqueue tells which
                return [*chain.from_iterable(some)], iter(())
            begin = list(islice(some, 2))
            if len(begin) == 1:
                return begin[0], iter(())
            some = chain(begin, some)
        options = [NewTask(command=self.command, **self._fixed)]
        return [], (Rows([*payloads], options) for payloads in some)

    def _payloads(self, iterables: Sequence[Iterable[Any]], fixed: Mapping[str, Any]) -> Iterator[Sequence[bytes]]:
        """Yields as many at a time as one transaction may hold."""
        if not iterables:
            raise InvalidOption("map takes at least one iterable: one task is enqueued for each of its items")
        pack, codec_name = self.arguments.pack, self._fixed.get("codec", "json")
        calls = zip(*iterables, strict=False)
        while some := list(islice(calls, BATCH_MAX)):
            yield from batches([pack(args, fixed, codec_name) for args in some], {}, len)

    async def _put_all(self, payloads: Sequence[bytes]) -> list[Outcome]:
        def put(store: Store) -> Awaitable[list[Outcome]]:
            # An enqueue refuses one and takes the others.
            for payload in payloads:
                checks.check_payload(payload, store.limits)
            tasks = [NewTask(command=self.command, payload=payload, **self._fixed) for payload in payloads]
            return store.enqueue(self.tenant, tasks)

        return await self.app.ask(put)

    def _added(self, batch: Batch[R], outcomes: Sequence[Outcome]) -> Batch[R]:
        for one in outcomes:
            if isinstance(one, Rejected):
                raise one.error()
            batch.task_ids.append(one.id)
        new = [one.id for one in outcomes if isinstance(one, Enqueued)]
        self.app.listeners.tell_enqueued(self.tenant, self.command, new)
        return batch

    def _loaded(self, batch: Batch[R], done: Committed) -> Batch[R]:
        if not done.already:
            self.app.listeners.tell_enqueued(self.tenant, self.command, batch.task_ids)
        return batch

    # ---------------------------------------------------------------------------------------------------------- options

    def _set_options(self, options: CallOptions) -> None:
        self._options = options
        self._fixed = new_task_fields(options)
        self.load = options.get("load")
        if self.load is not None:
            checks.check_label("load", self.load)
            if "key" in self._fixed:
                raise InvalidOption("a load puts in a task for each item, and a key allows one: leave out either")
        tenant = options.get("tenant")
        self.tenant: str = self.app.tenant if tenant is None else tenant
        checks.check_tenant(self.tenant)
        checks.check_new_task(self.tenant, NewTask(command=self.command, **self._fixed), checks.Limits())

    def _new(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewTask:
        if self.load is not None:
            raise InvalidOption("the option load names a map: leave it out to enqueue a single task")
        fixed = self._fixed
        payload = self.arguments.pack(args, kwargs, fixed.get("codec", "json"))
        task_id = new_id(self.tenant, self.command, fixed.get("key"), fixed.get("limit_key"))
        return NewTask(command=self.command, payload=payload, id=task_id, **fixed)


class AsyncTaskFunction(TaskFunction[P, R]):
    """A handler that is a coroutine function."""

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
            """Calls the function itself: await it."""


def new_task_fields(options: CallOptions) -> dict[str, Any]:
    """Returns the fields of `NewTask` that options stand for. Raises `InvalidOption` for a name that is none."""
    unknown = options.keys() - CallOptions.__annotations__.keys()
    if unknown:
        raise InvalidOption(
            f"unknown options: {', '.join(sorted(unknown))}; there are {', '.join(CallOptions.__annotations__)}"
        )
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    fields.pop("tenant", None)
    fields.pop("load", None)
    run_at = fields.pop("run_at", None)
    if run_at is not None:
        if not isinstance(run_at, datetime.datetime) or run_at.tzinfo is None:
            raise InvalidOption(f"run_at is {run_at!r}: use a datetime with a time zone, such as datetime.now(UTC)")
        fields["run_at_ms"] = max(0, round(run_at.timestamp() * 1000))
    return fields
