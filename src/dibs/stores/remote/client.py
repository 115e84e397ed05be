"""A connection to a server: asks, asks again when no answer comes, and listens.

Whatever is asked may be repeated, so a question that got no answer is asked again, with growing pauses, until the time
for it is over. Errors that the server names come back as the errors they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dibs.errors import (
    DibsError,
    LimitExceeded,
    PayloadTooLarge,
    StoreClosed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    Unauthenticated,
    error_from_code,
)
from dibs.stores.remote.address import Address
from dibs.stores.remote.exchange import CutOff, Exchange
from dibs.stores.remote.verbs import PATH, SUBSCRIBE, UNCLAIM, VERBS, Answer, AskSubscribe, AskUnclaim, Verb
from dibs.stores.wakeups import Subscription

ANSWER_S = 30.0
"""How long a call may take, beside what it waits on purpose."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 2.0
SAID_MAX_CHARS = 4096
WORKED_S = 2.0
"""A call that was cut off after so long had been with a server that worked: the time to give up begins anew."""
LISTEN_S = 45.0
"""A server that is silent for so long has gone: it says something every few seconds."""

_AGAIN = frozenset({408, 502, 503, 504})
_TOO_LARGE = 413
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"})
_encode = msgspec.msgpack.Encoder().encode
_decoders = {verb.name: msgspec.msgpack.Decoder(verb.answers) for verb in VERBS}

T = TypeVar("T")


class Problem(Struct):
    """An error, as a server writes it."""

    error: str = ""
    code: str = ""
    retry_after_s: float | None = msgspec.field(name="retryAfterSeconds", default=None)


class Client:
    """Asks one server. Belongs to the event loop that first uses it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._exchange: Exchange | None = None
        self._token: str | None = None
        self._closed = False
        self._asking = 0
        self._idle = asyncio.Event()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._first: set[asyncio.Task[Any]] = set()
        """What was begun before, and has to hold before anything else is asked."""

    async def ask(
        self, verb: Verb[Answer], asked: Struct, *, wait_s: float = 0.0, undo: AskUnclaim | None = None
    ) -> Answer:
        """Returns the answer. With `wait_s` the server may take so long to give it, and `close` does not wait for it.
        `undo`: what to ask, before anything else, if the caller goes away before."""
        self._check_open()
        if self._first:
            await asyncio.wait(set(self._first))
        if wait_s:
            return await self._waited(self._repeat(verb, asked, wait_s, undo), undo)
        self._asking += 1
        self._idle.clear()
        try:
            return await self._repeat(verb, asked, 0.0, undo)
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle.set()

    def first(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Does something in the background; whatever is asked from now on waits for it."""
        task = asyncio.ensure_future(work)
        self._first.add(task)
        task.add_done_callback(self._first.discard)
        return task

    async def close(self) -> None:
        """Lets those who ask have their answers, sends those who wait away, and closes the connections."""
        if self._closed:
            return
        self._closed = True
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        if self._asking:
            await self._idle.wait()
        if self._first:
            await asyncio.gather(*self._first, return_exceptions=True)
        if self._exchange is not None:
            await self._exchange.close()

    async def _waited(self, work: Coroutine[Any, Any, T], undo: AskUnclaim | None) -> T:
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancel() and undo is not None:
                self.first(self._quietly_undo(undo))  # the answer had come, and nobody took it
            if self._closed and not _is_cancelled():
                raise self._was_closed() from None
            raise
        finally:
            self._waiting.discard(task)

    async def _repeat(self, verb: Verb[Answer], asked: Struct, wait_s: float, undo: AskUnclaim | None) -> Answer:
        """Asks until there is an answer, or the time for that is over. A call that waits, and was with a server for a
        while when it was cut off, has as much time again; what it waited is waited."""
        body = _encode(asked)
        deadline_s = time.monotonic() + self.address.give_up_s
        until_s = time.monotonic() + wait_s
        pause_s = PAUSE_MIN_S
        while True:
            began_s, token = time.monotonic(), self._token
            try:
                return await self._once(verb, body, wait_s)
            except asyncio.CancelledError:
                if undo is not None:
                    self.first(self._quietly_undo(undo))
                raise
            except StoreUnavailable as error:
                if wait_s and _was_cut_off(error) and time.monotonic() - began_s > WORKED_S:
                    deadline_s = time.monotonic() + self.address.give_up_s
                    pause_s = PAUSE_MIN_S
                if time.monotonic() + pause_s > deadline_s or self._closed:
                    raise
                again_s = pause_s * random.uniform(0.5, 1.0)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            except Unauthenticated:
                if token == self._token and not self._has_new_token():
                    raise
                again_s = 0.0
            except LimitExceeded as error:
                if time.monotonic() + error.retry_after_s > deadline_s or self._closed:
                    raise
                again_s = error.retry_after_s
            await asyncio.sleep(again_s)
            if wait_s:
                wait_s = max(0.0, until_s - time.monotonic())
                body = _encode(replace(asked, wait_s=wait_s))

    def _has_new_token(self) -> bool:
        """Reads the token's file again, if there is one: tokens end, and whoever sees to it writes the next."""
        token = self.address.bearer()
        if token is None or token == self._token or self._exchange is None:
            return False
        self._token = token
        self._exchange.bring(token)
        return True

    async def _quietly_undo(self, undo: AskUnclaim) -> None:
        """If this fails too, leases run out by themselves."""
        with contextlib.suppress(DibsError):
            await self._repeat(UNCLAIM, undo, 0.0, None)

    async def _once(self, verb: Verb[Answer], body: bytes, wait_s: float) -> Answer:
        try:
            status, answer = await self._open().post(PATH + verb.name, body, ANSWER_S + wait_s)
        except TimeoutError as error:
            raise self._silent("no answer in time") from error
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLEOFError):
                raise self._silent(str(error)) from error
            raise self._untrusted(error) from error
        except OSError as error:
            raise self._silent(error.strerror or str(error) or type(error).__name__) from error
        except ValueError as error:
            raise StoreRefused(f"{self.address.base}: {error}") from error
        if status == 200:
            return self._read(verb, answer)
        raise self._error(status, answer)

    def _untrusted(self, error: ssl.SSLError) -> StoreRefused:
        if error.reason in _NO_TLS:
            return StoreRefused(f"{self.address.base} does not speak TLS: use http://, or its port for https")
        return StoreRefused(
            f"{self.address.base} has no certificate that is trusted here ({error}): "
            "name that of its authority with ?ca_file="
        )

    def _read(self, verb: Verb[Answer], answer: bytes) -> Answer:
        try:
            read: Answer = _decoders[verb.name].decode(answer)
            return read
        except msgspec.MsgspecError as error:
            raise StoreRefused(f"{self.address.base} does not answer as a dibs server does: {error}") from error

    def _error(self, status: int, answer: bytes) -> DibsError:
        try:
            problem = msgspec.json.decode(answer, type=Problem)
        except msgspec.MsgspecError:
            problem = Problem()
        problem.error, problem.code = _line(problem.error), _line(problem.code)
        if status in _AGAIN:
            return self._silent(problem.error or f"HTTP {status}")
        if not problem.code:
            return StoreRefused(f"{self.address.base} is no dibs server: it answers HTTP {status}")
        if status == _TOO_LARGE:
            return PayloadTooLarge(problem.error)
        error = error_from_code(problem.code, problem.error)
        if isinstance(error, LimitExceeded) and problem.retry_after_s is not None:
            error.retry_after_s = problem.retry_after_s
        return error

    def _silent(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(f"the server {self.address.base} does not answer: {why}")

    # -------------------------------------------------------------------------------------------------------- listening

    async def listen(self, asked: AskSubscribe, subscription: Subscription, holds: asyncio.Event) -> None:
        """Sets the subscription as soon as the server says that something happened. `holds` is set when the server
        listens, or cannot be reached. Where a connection is lost, something may have happened unseen: that counts."""
        pause_s = PAUSE_MIN_S
        while not self._closed and not await self._heard(asked, holds):
            holds.set()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        subscription.set()

    async def _heard(self, asked: AskSubscribe, holds: asyncio.Event) -> bool:
        """Listens until something happened, or may have; False: the server could not be asked to."""
        missed = holds.is_set()
        began = False
        try:
            parts = self._open().listen(PATH + SUBSCRIBE.name, _encode(asked), LISTEN_S)
            # Closed here, not when somebody gets round to it: the connection goes with it.
            async with contextlib.aclosing(parts):
                async for part in parts:
                    began = True
                    holds.set()
                    if missed or 1 in part:
                        return True
        except (OSError, StoreError):
            pass
        return began

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _open(self) -> Exchange:
        if self._exchange is None:
            self._exchange = Exchange(self.address)
            self._token = self.address.bearer()
            self._exchange.bring(self._token)
        return self._exchange

    def _check_open(self) -> None:
        if self._closed:
            raise self._was_closed()

    def _was_closed(self) -> StoreClosed:
        return StoreClosed(f"the connection to {self.address.base} was closed: open it again")


def _line(text: str) -> str:
    """What a server says, on one line: it could be any server."""
    return "".join(char if char.isprintable() else " " for char in text[:SAID_MAX_CHARS])


def _was_cut_off(error: StoreUnavailable) -> bool:
    """Whether there was a connection, and no answer."""
    return isinstance(error.__cause__, CutOff)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
