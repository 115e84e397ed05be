"""The app: a store, and the functions whose calls it carries.

From a call to the bytes: `TaskFunction.enqueue` (function.py) → `Dibs.ask` (here) → `Store.enqueue`
(stores/protocol.py) → the store. Plain code goes through a loop thread of the app's own (portal.py); async code asks in
its own loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar, Unpack, cast, overload

from dibs import codec
from dibs.checks import check_id, check_tenant
from dibs.clock import Clock
from dibs.errors import InvalidOption, StoreClosed, StoreUnavailable
from dibs.function import AsyncTaskFunction, CallOptions, Policy, RunIn, TaskFunction
from dibs.handles import Handle
from dibs.ids import id_from_text
from dibs.importing import Here, command_of, module_of
from dibs.listeners import After, Before, Listener, Listeners, plain
from dibs.portal import Portal
from dibs.retry import Backoff
from dibs.settings import Settings, load, mask
from dibs.stores import open_store
from dibs.stores.protocol import Store

if TYPE_CHECKING:
    from dibs.worker import Summary

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
ListenerT = TypeVar("ListenerT", bound=Listener)
BeforeT = TypeVar("BeforeT", bound=Before)
AfterT = TypeVar("AfterT", bound=After)


class Decorator(Protocol):
    """What ``@app.task(...)`` is: it keeps the handler's signature."""

    @overload
    def __call__(self, handler: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTaskFunction[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, R], /) -> TaskFunction[P, R]: ...


class Dibs:
    """A store and the tasks on it::

        app = Dibs("./dibs-data")

        @app.task(max_attempts=5)
        async def thumbnail(url: str, width: int = 200) -> dict: ...

        thumbnail.enqueue("https://…", width=320)

    Without a URL the settings decide (``DIBS_URL``, ``[tool.dibs]``, else ``./dibs-data``). Opens nothing until it is
    first used.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        tenant: str | None = None,
        settings: Settings | None = None,
        clock: Clock | None = None,
    ) -> None:
        flags = {"url": None if url is None else os.fspath(url), "tenant": tenant}
        if settings is None:
            settings = load(flags)
        elif url is not None or tenant is not None:
            raise InvalidOption("settings name the url and the tenant: give those, or settings, not both")
        self.settings = settings
        self.tenant = settings.tenant
        self.clock = clock
        self.functions: dict[str, TaskFunction[..., Any]] = {}
        self.listeners = Listeners()
        # What `memory:` means is this app's alone, but the same for its loops and its workers.
        self.url = f"memory:app-{uuid.uuid4().hex}" if settings.url == "memory:" else settings.url
        self._portal = Portal()
        self._stores: dict[asyncio.AbstractEventLoop, Store] = {}

    def __repr__(self) -> str:
        return f"Dibs({mask(self.settings.url)!r})"

    # ------------------------------------------------------------------------------------------------------ declaration

    @overload
    def task(self, handler: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTaskFunction[P, R]: ...
    @overload
    def task(self, handler: Callable[P, R], /) -> TaskFunction[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
        run_in: RunIn | None = None,
        backoff: Backoff | None = None,
        fail_on: type[BaseException] | tuple[type[BaseException], ...] = (),
        **options: Unpack[CallOptions],
    ) -> Decorator: ...
    def task(  # type: ignore[misc]  # mypy does not see that Any takes what CallOptions names
        self,
        handler: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
        run_in: RunIn | None = None,
        backoff: Backoff | None = None,
        fail_on: type[BaseException] | tuple[type[BaseException], ...] = (),
        **options: Any,
    ) -> Any:
        """Makes a function a task of this app.

        `name` is its command, by default ``module.function``; `aliases` are names it had before, whose tasks it still
        runs. `run_in`: coroutine functions run in the worker's ``loop``, others in a ``thread``, or in a ``process``
        for work that keeps a core busy. `backoff` is how long failures wait; after an exception of `fail_on` there is
        no second attempt. Everything else is an option of each enqueue.
        """

        def declare(handler: Callable[..., Any]) -> TaskFunction[..., Any]:
            if isinstance(handler, TaskFunction):  # of another app, or a second name
                handler = handler.handler
            is_async = _is_async(handler)
            policy = Policy(
                run_in=_run_in(run_in, is_async=is_async), backoff=_backoff(backoff), fail_on=_exceptions(fail_on)
            )
            kind = AsyncTaskFunction if is_async else TaskFunction
            return self._declare(
                kind(self, handler, name or command_of(handler), policy, cast(CallOptions, options), aliases)
            )

        return declare if handler is None else declare(handler)

    def _declare(self, function: TaskFunction[..., Any]) -> TaskFunction[..., Any]:
        commands = (function.command, *function.aliases)
        for command in commands:
            known = self.functions.get(command)
            # The same function again is a module that was imported or run anew.
            if known is not None and _whence(known) != _whence(function):
                raise InvalidOption(f"two functions are named {command}: give one of them another name")
        self.functions.update(dict.fromkeys(commands, function))
        return function

    def on(self, kind: str) -> Callable[[ListenerT], ListenerT]:
        """Has the function below it told of every such event: enqueued, claimed, completed, retried, failed,
        cancelled, lease_lost."""

        def add(listener: ListenerT) -> ListenerT:
            self.listeners.add(kind, listener)
            return listener

        return add

    def before(self, hook: BeforeT) -> BeforeT:
        """Has `hook` run before each handler."""
        self.listeners.before.append(plain(hook))
        return hook

    def after(self, hook: AfterT) -> AfterT:
        """Has `hook` run after each handler; it may return a changed outcome."""
        self.listeners.after.append(plain(hook))
        return hook

    # ----------------------------------------------------------------------------------------------------------- asking

    def handle(self, task_id: str | bytes, tenant: str | None = None) -> Handle[Any]:
        """Returns the handle of a task that was enqueued somewhere else."""
        key = id_from_text(task_id) if isinstance(task_id, str) else task_id
        check_id(key)
        whose = self.tenant if tenant is None else tenant
        check_tenant(whose)
        return Handle(self, whose, key, codec.decode)

    async def open(self, *, create: bool = True) -> Store:
        """Opens another store of this app's, for the running loop; the caller closes it. Without `create`, one that is
        not there is not made."""
        return await open_store(self.url, clock=self.clock, settings=self.settings, create=create)

    async def ask(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """Asks the running loop's store, which is opened at the first question, and again after it broke."""
        Here.refuse("asks for its store")
        store = await self._store()
        try:
            return await question(store)
        except (StoreUnavailable, StoreClosed):
            await self._forget(store)
            raise

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call in the app's own loop and waits for it: for plain code."""
        if not self._portal.started():
            atexit.register(self.close)
        return self._portal.run(call)

    async def _store(self) -> Store:
        loop = asyncio.get_running_loop()
        store = self._stores.get(loop)
        if store is None:
            opened = await self.open()
            store = self._stores.setdefault(loop, opened)
            if store is not opened:
                await opened.close()
            # Afterwards: a store in memory is gone when nobody has it open.
            for ended in [other for other in list(self._stores) if other.is_closed()]:
                await self._forget_of(ended)
        return store

    async def _forget(self, store: Store) -> None:
        loop = asyncio.get_running_loop()
        if self._stores.get(loop) is store:
            del self._stores[loop]
        with contextlib.suppress(StoreUnavailable, StoreClosed):
            await store.close()

    # ---------------------------------------------------------------------------------------------------------- testing

    def drain(self) -> Summary:
        """Runs every task that is due, and those that they enqueue, with a worker of its own; returns what it did.

        What is delayed stays; what a limit holds back is waited for, unless the clock is one that is moved by hand. For
        tests and small scripts: the handlers run in this process.
        """
        return self.run(self.adrain())

    async def adrain(self) -> Summary:
        """`drain`, for async code."""
        from dibs.worker import Worker, WorkerOptions

        return await Worker(self, WorkerOptions(drain=True)).run()

    @contextlib.contextmanager
    def replaced(self, url: str, clock: Clock | None = None) -> Iterator[None]:
        """Works on another store for a while, and leaves its own alone."""
        before = self.url, self.clock, self._stores
        self.url, self.clock, self._stores = url, clock, {}
        try:
            yield
        finally:
            self.run(self._close_all())
            self.url, self.clock, self._stores = before

    async def _close_all(self) -> None:
        for loop in list(self._stores):
            await self._forget_of(loop)

    # ---------------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Lets go of everything that plain code opened; the next call opens it again."""
        if self._portal.started():
            atexit.unregister(self.close)
            with contextlib.suppress(StoreClosed):  # by another thread, at the same time
                self._portal.run(self.aclose())
            self._portal.stop()

    async def aclose(self) -> None:
        """Closes the running loop's store, and those of loops that have ended."""
        loop = asyncio.get_running_loop()
        for one in [other for other in list(self._stores) if other is loop or other.is_closed()]:
            await self._forget_of(one)

    async def _forget_of(self, loop: asyncio.AbstractEventLoop) -> None:
        store = self._stores.pop(loop, None)
        if store is not None:
            with contextlib.suppress(StoreUnavailable, StoreClosed):
                await store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.aclose()


def _whence(function: TaskFunction[..., Any]) -> tuple[str, str]:
    handler = function.handler
    return module_of(handler), getattr(handler, "__qualname__", repr(handler))


def _is_async(handler: Callable[..., Any]) -> bool:
    """Whether a handler is a coroutine function. Refuses what returns no value at all."""
    if not callable(handler):
        raise InvalidOption(f"@app.task is for functions, not for {type(handler).__name__}")
    calls = (handler, getattr(handler, "__call__", None))  # noqa: B004 an object may be called by a coroutine function
    if any(inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call) for call in calls):
        raise InvalidOption(f"{handler!r} yields instead of returning a result: return a list, or enqueue more tasks")
    return any(inspect.iscoroutinefunction(call) for call in calls)


def _backoff(asked: Backoff | None) -> Backoff | None:
    if asked is not None and not isinstance(asked, Backoff):
        raise InvalidOption(f"backoff is {asked!r}: use a Backoff, such as Backoff(kind='fixed', base_s=5)")
    return asked


def _exceptions(asked: Any) -> tuple[type[BaseException], ...]:
    kinds = asked if isinstance(asked, tuple) else (asked,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise InvalidOption(f"fail_on is {asked!r}: use an exception class, or a tuple of them")
    return kinds


def _run_in(asked: RunIn | None, *, is_async: bool) -> RunIn:
    usual: RunIn = "loop" if is_async else "thread"
    if asked not in (None, "loop", "thread", "process"):
        raise InvalidOption(f"run_in is {asked!r}: use loop, thread or process")
    if asked == "loop" and not is_async:
        raise InvalidOption('run_in="loop" is for coroutine functions: this one would block the loop')
    if asked == "thread" and is_async:
        raise InvalidOption('run_in="thread" is for plain functions: a coroutine function runs in the loop')
    return asked or usual
