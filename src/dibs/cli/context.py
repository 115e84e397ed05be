"""What every command shares: the options that may stand anywhere, the store they name, and the types of values."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dibs.checks import RATE_MAX, RATE_MIN
from dibs.errors import InvalidName
from dibs.ids import id_from_text
from dibs.settings import FIELDS, Settings, load, read_duration_s
from dibs.stores import open_local, open_store
from dibs.stores.protocol import ALL_TENANTS

if TYPE_CHECKING:
    from dibs.stores.local import LocalStore
    from dibs.stores.protocol import Store

T = TypeVar("T")


class Session:
    """One call of the command line: its flags, and the store that they name."""

    def __init__(self) -> None:
        self.flags: dict[str, object] = {}
        self.json = False

    @cached_property
    def settings(self) -> Settings:
        """The settings that hold here. A tenant of `*` is not one: `tenant_or_all` knows it."""
        return load({name: value for name, value in self.flags.items() if (name, value) != ("tenant", ALL_TENANTS)})

    @property
    def tenant(self) -> str:
        """The one tenant that is meant."""
        if self.flags.get("tenant") == ALL_TENANTS:
            raise click.UsageError("This command is about one tenant; --tenant '*' goes with export and stats.")
        return self.settings.tenant

    @property
    def tenant_or_all(self) -> str:
        """The tenant that is meant, or `*`."""
        return ALL_TENANTS if self.flags.get("tenant") == ALL_TENANTS else self.settings.tenant

    def run(self, work: Callable[[Store], Awaitable[T]], *, create: bool = False) -> T:
        """Opens the store, does the work and closes it. Only with `create` is a store made that does not exist."""

        async def opened() -> T:
            async with await self._open(create) as store:
                return await work(store)

        return asyncio.run(opened())

    def run_local(self, work: Callable[[LocalStore], Awaitable[T]]) -> T:
        """`run`, for what is about the store's own files: a server's is refused."""

        async def opened() -> T:
            self._check_lasting()
            async with await open_local(self.settings.url, settings=self.settings, create=False) as store:
                return await work(store)

        return asyncio.run(opened())

    @contextlib.contextmanager
    def steps(self, *, create: bool = False) -> Iterator[tuple[Store, asyncio.Runner]]:
        """Opens the store for work in steps, each given to the runner; between them the process may wait for input, and
        Ctrl-C ends that at once."""
        with asyncio.Runner() as runner:
            store = runner.run(self._open(create))
            try:
                yield store, runner
            finally:
                runner.run(store.close())

    async def _open(self, create: bool) -> Store:
        self._check_lasting()
        return await open_store(self.settings.url, settings=self.settings, create=create)

    def _check_lasting(self) -> None:
        if self.settings.url.startswith(("memory:", "shards:memory:")):
            raise click.UsageError("A store in memory is gone when this command ends: name a directory with --url.")


pass_session = click.make_pass_decorator(Session, ensure=True)


# ----------------------------------------------------------------------------- options that may stand anywhere


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """The later one wins: what stands after the command is nearer to it."""
    if value is None or param.name is None:
        return
    session = ctx.ensure_object(Session)
    if param.name == "json":
        session.json = session.json or bool(value)
    else:
        session.flags[param.name] = value


def _shared_options(*, all_shown: bool) -> list[click.Option]:
    """Every setting as a flag, and --json. A subcommand's help shows the ones that everybody needs."""
    options = [
        click.Option(
            [field.flag],
            metavar=field.shape,
            help=field.doc.replace("`", ""),
            expose_value=False,
            callback=_remember,
            hidden=not all_shown and field.name not in ("url", "tenant"),
        )
        for field in FIELDS
    ]
    options.append(
        click.Option(
            ["--json"],
            is_flag=True,
            default=None,
            help="Write JSON instead of text.",
            expose_value=False,
            callback=_remember,
        )
    )
    return options


class Command(click.Command):
    """A command that takes the shared options, and whose help ends with examples."""

    all_shown = False

    def __init__(
        self, *args: Any, examples: str = "", helps: Mapping[str, str | None] | None = None, **kwargs: Any
    ) -> None:
        """`helps`: what shared options mean here, by their names; None: nothing, so they are not shown."""
        super().__init__(*args, **kwargs)
        self.examples = inspect.cleandoc(examples)
        own = {name for param in self.params for name in param.opts}
        # An option of the command's own comes before a setting of the same name.
        shared = [option for option in _shared_options(all_shown=self.all_shown) if not own & {*option.opts}]
        for option in shared:
            for name in {*option.opts} & {*(helps or {})}:
                option.help = (helps or {})[name]
                option.hidden = option.help is None
        self.params += shared

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.splitlines():
                    formatter.write(f"  {line}\n")


class Group(Command, click.Group):
    """A group whose commands take the shared options too."""

    all_shown = True
    command_class = Command


# ---------------------------------------------------------------------------------------- types of values


class _Duration(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return read_duration_s(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class _Time(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r}: give a time such as {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", param, ctx)
        if at.tzinfo is None:
            self.fail(f"{value!r}: say which time zone, with Z for UTC or an offset such as +02:00", param, ctx)
        return round(at.timestamp() * 1000)


class _Rate(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        number, _, unit = str(value).partition("/")
        try:
            rate = float(number) / RATE_UNITS[unit or "s"]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not a rate: write a number and /s, /m, /h or /d, such as 100/m", param, ctx)
        if not RATE_MIN <= rate <= RATE_MAX:  # which not-a-number is not, either
            self.fail(f"{value!r}: give a rate from 1/d to {RATE_MAX}/s", param, ctx)
        return rate


RATE_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class _Burst(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            burst = float(value)
        except ValueError:
            burst = 0.0
        if not 1 <= burst <= RATE_MAX:
            self.fail(f"{value!r}: give a number from 1 to {RATE_MAX}", param, ctx)
        return burst


class _TaskId(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if isinstance(value, bytes):
            return value
        try:
            return id_from_text(value)
        except InvalidName as error:
            self.fail(str(error), param, ctx)


DURATION = _Duration()
"""Seconds, or ``90s``, ``5m``, ``12h``, ``7d``; becomes seconds."""
RATE = _Rate()
"""Per second, or ``5/s``, ``100/m``, ``1000/h``, ``10000/d``; becomes a number per second."""
BURST = _Burst()
"""How many may start at once."""
TIME = _Time()
"""ISO 8601 with a time zone; becomes milliseconds since the epoch."""
TASK_ID = _TaskId()
"""The UUID text of a task; becomes its 16 bytes."""
