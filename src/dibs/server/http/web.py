"""HTTP, as far as the server needs it: a table of routes, a request, an answer, and the way from one to the other.

The way is the same for every route: find it, recognise the caller, check that it may, read the body (whose size is
judged before it is read), decode it, handle it, and turn whatever was raised into the answer that its table names.
Nobody's body is read before its sender is known.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from dibs.errors import DibsError
from dibs.ids import new_id
from dibs.server.auth import Authenticator, Principal
from dibs.server.http.bounded import item_counter
from dibs.server.http.problems import Problem, body_of, problem_of, unreadable
from dibs.task import BATCH_MAX

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = "application/json"
MSGPACK = "application/msgpack"
WHOLE = "whole"
"""In the state of a request of which all has arrived."""
BODY_READ_S = 30.0
"""How long a client may take to send a body."""
BUFFERED_MAX_BYTES = 256 << 20
"""How much of all bodies together may be in memory; those that come on top are asked to come again."""

T = TypeVar("T")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_encode = msgspec.json.Encoder().encode


class Answer(Struct, frozen=True):
    """What goes back, whole."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: Headers = []


class Stream(Struct, frozen=True):
    """What goes back bit by bit, until its source ends or the client has gone."""

    chunks: AsyncGenerator[bytes, None]
    status: int = 200
    content_type: str = MSGPACK


def json_answer(value: Any, status: int = 200, headers: Headers | None = None) -> Answer:
    """Returns a value as JSON."""
    return Answer(status, _encode(value), JSON, headers or [])


class Request:
    """One call: who makes it, what it says, and whether anybody still waits for the answer."""

    __slots__ = ("_receive", "_scope", "body", "caller", "data", "id", "inside", "params", "route")

    def __init__(self, scope: Scope, receive: Receive, request_id: str) -> None:
        self._scope = scope
        self._receive = receive
        self.id = request_id
        self.route: Route
        self.params: Mapping[str, str] = {}
        """What stands in the places of the path."""
        self.caller: Principal | None = None
        """Who calls; None: a route that is open to everybody, or somebody who was not recognised."""
        self.body = b""
        self.data: Any = None
        """The body, as the route's `takes`."""
        self.inside = ""
        """What went wrong, in words that are for the log only."""

    @property
    def method(self) -> str:
        method: str = self._scope["method"]
        return method

    @property
    def path(self) -> str:
        path: str = self._scope["path"]
        return path

    @property
    def client(self) -> str:
        """The address that the connection comes from; empty if that is not known."""
        client: tuple[str, int] | None = self._scope.get("client")
        return "" if client is None else client[0]

    @property
    def principal(self) -> Principal:
        """Who calls, on a route that is not open to everybody."""
        assert self.caller is not None
        return self.caller

    @property
    def is_whole(self) -> bool:
        """True if all of it has arrived."""
        return WHOLE in self._scope.get("state", ())

    def header(self, name: bytes) -> str | None:
        """Returns a header by its name in lower case; None: it is not there."""
        for known, value in self._scope["headers"]:
            if known == name:
                text: str = value.decode("latin-1")
                return text
        return None

    @property
    def has_no_body(self) -> bool:
        """True if its head says that there is nothing to read."""
        return self.header(b"transfer-encoding") is None and (self.header(b"content-length") or "0") == "0"

    def query(self, kind: type[Any]) -> Any:
        """Returns the query string as a struct; what is unknown, twice there or of the wrong type is a 422."""
        try:
            pairs = parse_qsl(self._scope["query_string"].decode(), keep_blank_values=True, errors="strict")
            values = dict(pairs)
            if len(values) != len(pairs):
                raise Problem(422, "invalid", "a parameter of the query is given twice: give it once")
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise unreadable(error) from None
        except UnicodeError:
            raise Problem(400, "malformed", "the query is not UTF-8") from None

    async def gone(self) -> None:
        """Returns when the client has gone. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def while_there(self, work: Awaitable[T], lost: Callable[[T], Awaitable[None]] | None = None) -> T:
        """Returns what `work` does. If the client goes first, the work is cancelled; if it has gone when the work is
        done, `lost` gets what nobody will hear of. Both are a `ClientGone`."""
        doing = asyncio.current_task()
        assert doing is not None
        working = True

        def cut(gone: asyncio.Future[None]) -> None:
            if working and not gone.cancelled():
                doing.cancel()

        going = asyncio.ensure_future(self.gone())
        going.add_done_callback(cut)
        try:
            done = await work
        except asyncio.CancelledError:
            if not going.done() or doing.uncancel():
                raise
            raise ClientGone from None
        finally:
            working = False
            going.cancel()
        if going.done():
            if lost is not None:
                await lost(done)
            raise ClientGone
        return done


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


Handler = Callable[[Request], Awaitable[Answer | Stream]]


class Route(Struct, frozen=True, kw_only=True):
    """One thing that can be asked for. Documentation, checks and tests read the same table as the router."""

    method: str
    path: str
    """With `{name}` where something stands."""
    handle: Handler
    summary: str
    verb: str | None = None
    """What the caller must be allowed to do (`auth.NEEDS`); None: open to everybody."""
    takes: Any = None
    """The type of the body; None: it has none."""
    content_type: str = JSON
    """What the body has to be."""
    body_max_bytes: int = sys.maxsize
    """How large the body may be, where nobody needs as much as the server takes at most."""
    items_max: int | None = BATCH_MAX
    """How many items a list of the body may have; None: as many as there is room for."""
    body_optional: bool = False
    """A request without a body is taken for one with an empty object."""
    query: Any = None
    """The struct of the query; None: it is not looked at."""
    gives: Mapping[int, Any] = {}
    """Good answers: the type of the body by status; None: it has none."""
    fails: Sequence[int] = ()
    """How it is answered if things are not as the caller thinks: statuses beyond those that any route may have."""
    example: Any = None
    """A body that works."""
    tag: str = ""
    """Under which heading it is documented."""


class Watch(Protocol):
    """Hears of every request when it is over."""

    def begun(self) -> None: ...

    def ended(self, request: Request, route: Route | None, status: int, seconds: float, size_bytes: int) -> None: ...

    def failed(self, request: Request, error: Exception) -> None:
        """Something was raised that nobody foresaw."""


class Web:
    """The ASGI application: routes every request."""

    def __init__(
        self, routes: Iterable[Route], authenticator: Authenticator, watch: Watch, *, body_max_bytes: int
    ) -> None:
        self.routes = tuple(routes)
        self._authenticator = authenticator
        self._watch = watch
        self._body_max_bytes = body_max_bytes
        self._buffered_bytes = 0
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: dict[int, list[tuple[list[str], dict[str, Route]]]] = {}
        self._decoders: dict[int, Callable[[bytes], Any]] = {}
        self._item_counters: dict[int, Callable[[bytes], None]] = {}
        for route in self.routes:
            self._add(route)
        self.accepts: Callable[[Request], bool] | None = None
        """Judges by the headers where a request comes from; None: from anywhere."""

    def _add(self, route: Route) -> None:
        if route.takes is not None:
            kind = msgspec.json if route.content_type == JSON else msgspec.msgpack
            self._decoders[id(route)] = kind.Decoder(route.takes).decode
            counter = None if route.items_max is None else item_counter(route.takes, kind, route.items_max)
            if counter is not None:
                self._item_counters[id(route)] = counter
        if "{" not in route.path:
            self._exact.setdefault(route.path, {})[route.method] = route
            return
        parts = route.path.split("/")
        known = self._patterns.setdefault(len(parts), [])
        for others, methods in known:
            if others == parts:
                methods[route.method] = route
                return
        known.append((parts, {route.method: route}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP only, not {scope['type']}")
        request = Request(scope, receive, _request_id(scope["headers"]))
        began_s = time.perf_counter()
        self._watch.begun()
        route: Route | None = None
        status, size = 499, 0
        try:
            try:
                route, request.params = self._find(request.method, request.path)
                request.route = route
                answer = await self._answer(request, route)
            except ClientGone:
                return
            except asyncio.CancelledError:
                # By a stop whose time is over, or because the call was given up by its caller.
                answer = self._refusal(request, _cut_short())
            except (DibsError, Problem) as error:
                answer = self._refusal(request, problem_of(error))
            except Exception as error:  # noqa: BLE001 the last resort: logged with its traceback, answered as a 500
                self._watch.failed(request, error)
                answer = self._refusal(request, problem_of(error))
            status = answer.status
            if isinstance(answer, Stream):
                await _send_stream(send, request, answer)
            else:
                size = len(answer.body)
                await _send(send, request, answer)
        finally:
            self._watch.ended(request, route, status, time.perf_counter() - began_s, size)

    def _find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        exact = self._exact.get(path)
        methods, params = self._match(path) if exact is None else (exact, {})
        # A HEAD is answered like a GET; whoever sends the answer leaves out the body.
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))
            problem = Problem(405, "method_not_allowed", f"{path} takes {allowed}, not {method}")
            raise problem.with_header(b"allow", allowed.encode())
        return route, params

    def _match(self, path: str) -> tuple[Mapping[str, Route], Mapping[str, str]]:
        parts = path.split("/")
        for pattern, methods in self._patterns.get(len(parts), ()):
            params: dict[str, str] = {}
            for wanted, part in zip(pattern, parts, strict=True):
                if wanted[:1] == "{":
                    params[wanted[1:-1]] = part
                elif wanted != part:
                    break
            else:
                return methods, params
        raise Problem(404, "no_such_route", "there is nothing under this path: /docs lists what there is")

    async def _answer(self, request: Request, route: Route) -> Answer | Stream:
        if self.accepts is not None and not self.accepts(request):
            raise Problem(421, "wrong_host", "in development mode only this machine, by its own name, is answered")
        if route.verb is not None:
            request.caller = await self._authenticator.principal_of(request.header(b"authorization"))
            request.caller.check_verb(route.verb)
        if route.takes is None:
            return await route.handle(request)
        if route.body_optional and request.has_no_body:
            request.data = self._decoders[id(route)](b"{}")
            return await route.handle(request)
        self._check_content(request, route)
        held = 0
        try:
            request.body, held = await self._read(request, min(self._body_max_bytes, route.body_max_bytes))
            if id(route) in self._item_counters:
                self._item_counters[id(route)](request.body)
            try:
                request.data = self._decoders[id(route)](request.body)
            except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                raise unreadable(error) from None
            return await route.handle(request)
        finally:
            self._buffered_bytes -= held

    def _check_content(self, request: Request, route: Route) -> None:
        said = (request.header(b"content-type") or "").partition(";")[0].strip().lower()
        if said != route.content_type:
            raise Problem(415, "unsupported_media_type", f"send the body as Content-Type: {route.content_type}")
        encoding = request.header(b"content-encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise Problem(415, "unsupported_encoding", "send the body as it is: no Content-Encoding is taken")

    async def _read(self, request: Request, max_bytes: int) -> tuple[bytes, int]:
        """Returns the body, and for how many bytes of it memory is held."""
        length = request.header(b"content-length")
        if length is not None and int(length) > max_bytes:
            raise _too_large(max_bytes)
        if not request.is_whole:
            return await self._read_slowly(request, max_bytes)
        body, more = await self._part(request)
        if more:
            return await self._read_on(request, bytearray(body), max_bytes)
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body, 0

    async def _read_slowly(self, request: Request, max_bytes: int) -> tuple[bytes, int]:
        try:
            async with asyncio.timeout(BODY_READ_S):
                return await self._read_on(request, bytearray(), max_bytes)
        except TimeoutError:
            problem = Problem(408, "too_slow", f"the body did not arrive within {BODY_READ_S:.0f} s")
            raise problem.with_header(b"connection", b"close") from None

    async def _read_on(self, request: Request, body: bytearray, max_bytes: int) -> tuple[bytes, int]:
        held = 0
        try:
            more = True
            while more:
                part, more = await self._part(request)
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                self._buffered_bytes += len(body) - held
                held = len(body)
                if self._buffered_bytes > BUFFERED_MAX_BYTES:
                    problem = Problem(503, "overloaded", "too many large bodies at once: repeat the call later")
                    raise problem.with_header(b"retry-after", b"1")
            return bytes(body), held
        except BaseException:
            self._buffered_bytes -= held
            raise

    async def _part(self, request: Request) -> tuple[bytes, bool]:
        """Returns the next part of the body, and whether there is more."""
        message = await request._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def _refusal(self, request: Request, problem: Problem) -> Answer:
        request.inside = problem.inside
        return json_answer(body_of(problem, request.id), problem.status, problem.headers)


def _too_large(max_bytes: int) -> Problem:
    problem = Problem(413, "body_too_large", f"the body is over {max_bytes} bytes: send less at once")
    return problem.with_header(b"connection", b"close")


def _cut_short() -> Problem:
    problem = Problem(503, "cut_short", "the call was cut short, by a stop of the server or by another call: ask again")
    return problem.with_header(b"retry-after", b"1").with_header(b"connection", b"close")


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The caller's own, if it is a sane one, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return new_id().hex()


def _head(request: Request, answer: Answer | Stream) -> Headers:
    headers = [(b"x-request-id", request.id.encode()), (b"x-content-type-options", b"nosniff")]
    if isinstance(answer, Stream) or answer.body:
        headers.append((b"content-type", answer.content_type.encode()))
    return headers


async def _send(send: Send, request: Request, answer: Answer) -> None:
    headers = _head(request, answer)
    if answer.status != 204:
        headers.append((b"content-length", str(len(answer.body)).encode()))
    headers += answer.headers
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


async def _send_stream(send: Send, request: Request, answer: Stream) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": _head(request, answer)})
    going = asyncio.ensure_future(request.gone())
    chunks = answer.chunks
    try:
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            await asyncio.wait((coming, going), return_when=asyncio.FIRST_COMPLETED)
            if going.done() or (chunk := await coming) is None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        going.cancel()
        await chunks.aclose()
