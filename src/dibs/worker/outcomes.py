"""What a run comes to, in the queue's words: the same rules for whoever runs tasks.

What a handler returned becomes a result, what it raised an error with or without another try; what the store does not
take fails the task, and says why.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dibs import codec
from dibs.checks import ERROR_TEXT_MAX_CHARS
from dibs.context import Fail, Retry
from dibs.errors import CodecError, PayloadTooLarge
from dibs.retry import Backoff
from dibs.stores.protocol import Store
from dibs.task import ErrorInfo, Kind, Lease, QueueConfig, Rejected, Settlement

T = TypeVar("T")

INVALID_ARGUMENTS = "INVALID_ARGUMENTS"
INVALID_RESULT = "INVALID_RESULT"
MESSAGE_MAX_CHARS = 8 * 1024
TRACEBACK_MAX_CHARS = ERROR_TEXT_MAX_CHARS - MESSAGE_MAX_CHARS - 1024
CONFIG_KEPT_S = 30.0
USUAL_BACKOFF = Backoff()


class Ended(Struct, frozen=True, kw_only=True, gc=False):
    """How a run ended, ready to be settled. `delay_s` None: as the backoff says."""

    kind: Kind
    result: bytes | None = None
    codec: str = "json"
    error: ErrorInfo | None = None
    reason: str | None = None
    delay_s: float | None = None
    result_ttl_s: float | None = None


def completed(value: Any, codec_name: str, result_ttl_s: float | None = None) -> Ended:
    """What a returned value means. It is written as it is asked for; JSON has a form for what others may not have:
    nothing, and, with raw, what is not bytes. A value that cannot be written fails the task."""
    if value is None or (codec_name == "raw" and not isinstance(value, bytes | bytearray | memoryview)):
        codec_name = "json"
    try:
        result = codec.encode(value, codec_name)
    except (CodecError, MemoryError) as error:
        return Ended(kind=Kind.FAIL, reason=INVALID_RESULT, error=error_info(error))
    return Ended(kind=Kind.COMPLETE, result=result, codec=codec_name, result_ttl_s=result_ttl_s)


def raised(error: BaseException, fail_on: tuple[type[BaseException], ...] = ()) -> Ended:
    """What a raised error means: another try, unless it says otherwise."""
    if isinstance(error, Fail):
        return Ended(kind=Kind.FAIL, reason=_storable(str(error.reason)), error=error_info(error))
    if isinstance(error, Retry):
        return Ended(kind=Kind.RETRY, delay_s=error.delay_s, error=error_info(error))
    if isinstance(error, fail_on):
        return Ended(kind=Kind.FAIL, error=error_info(error))
    return Ended(kind=Kind.RETRY, error=error_info(error))


def refused(ended: Ended, answer: Rejected) -> Ended:
    """What becomes of a task whose outcome the store does not take: it fails, and says why."""
    reason = INVALID_RESULT if answer.code == PayloadTooLarge.code or ended.kind is Kind.COMPLETE else ended.reason
    error = ErrorInfo(answer.code, answer.message)
    if ended.kind is Kind.FAIL:
        return replace(ended, error=error, reason=None)
    return Ended(kind=Kind.FAIL, reason=reason, error=error)


def settlement(lease: Lease, ended: Ended, delay_s: float = 0.0) -> Settlement:
    """Returns what the store is told."""
    return Settlement(
        tenant=lease.tenant,
        id=lease.id,
        token=lease.token,
        kind=ended.kind,
        result=ended.result,
        codec=ended.codec,
        error=ended.error,
        # Reasons of the queue's own are an enum's members; a store takes plain text.
        reason=None if ended.reason is None else str(ended.reason),
        delay_s=delay_s,
        result_ttl_s=ended.result_ttl_s,
    )


def error_info(error: BaseException) -> ErrorInfo:
    """Returns an error as text, with the part of its traceback that is the handler's."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    # The first frame is the one that called the handler.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        message = str(error)
        text = "".join(traceback.format_exception(kind, error, frames))
    except BaseException as broken:  # noqa: BLE001 an error that cannot even be shown must not cost the task its outcome
        message, text = f"(cannot be shown: {type(broken).__name__})", ""
    return ErrorInfo(
        _storable(name[:200]), _storable(message[:MESSAGE_MAX_CHARS]), _storable(text[-TRACEBACK_MAX_CHARS:])
    )


def _storable(text: str) -> str:
    """Returns text as UTF-8 can carry it: file names that could not be decoded put lone surrogates into messages."""
    return text.encode(errors="replace").decode()


class Asks(Protocol):
    """Whoever can ask a store."""

    async def ask(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """Returns the answer."""


class Delays:
    """How long failures wait: as the function says, else its queue, else as usual."""

    def __init__(self, link: Asks) -> None:
        self._link = link
        self._configs: dict[tuple[str, str], tuple[float, QueueConfig]] = {}

    async def of(self, lease: Lease, ended: Ended, backoff: Backoff | None = None) -> float:
        """Returns the delay that goes with an outcome; `backoff` is the function's own."""
        if ended.kind is not Kind.RETRY:
            return 0.0
        if ended.delay_s is not None:
            return ended.delay_s
        if backoff is None:
            backoff = (await self._config(lease.tenant, lease.command)).backoff or USUAL_BACKOFF
        return backoff.delay_s(lease.attempt)

    async def _config(self, tenant: str, command: str) -> QueueConfig:
        known = self._configs.get((tenant, command))
        if known is None or known[0] < time.monotonic():
            config = await self._link.ask(lambda store: store.configure(tenant, command))
            known = self._configs[(tenant, command)] = (time.monotonic() + CONFIG_KEPT_S, config)
        return known[1]
