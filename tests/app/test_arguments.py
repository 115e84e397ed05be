"""A call becomes a payload and a payload a call, as if the handler had been called directly."""

from __future__ import annotations

import contextlib
import enum
import gc
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dibs import codec
from dibs.arguments import Arguments, Call, Returned
from dibs.errors import ArgumentsError, CodecError, InvalidInput

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CODECS = st.sampled_from(["json", "msgpack", "test-plain"])


@pytest.fixture(scope="module", autouse=True)
def plain_codec() -> Iterator[None]:
    """A codec that is not built in."""
    codec.register("test-plain", lambda value: json.dumps(value).encode(), json.loads)
    yield
    del codec._codecs["test-plain"]


@st.composite
def handlers(draw: st.DrawFn) -> Callable[..., Any]:
    """A function of a random signature that returns what it was given."""
    names = iter(["self", "cls", "a", "p0", "json", "x", "key", "class_", "y", "z", "items", "args"])
    taken: list[str] = []
    defaults = False

    def some(most: int, *, late: bool = False) -> list[str]:
        nonlocal defaults
        found = []
        for name in [next(names) for _ in range(draw(st.integers(0, most)))]:
            default = draw(st.booleans()) if late else defaults or draw(st.booleans())
            defaults = default if not late else defaults
            found.append(f"{name}={draw(JSON)!r}" if default else name)
            taken.append(name)
        return found

    parts = some(2)
    parts += ["/"] if parts else []
    parts += some(2)
    rest = draw(st.sampled_from(["", "*rest", "*"]))
    named = some(2, late=True) if rest else []
    parts += [rest] if rest == "*rest" or named else []
    parts += named
    taken += ["rest"] if "*rest" in parts else []
    if draw(st.booleans()):
        parts.append("**extra")
        taken.append("extra")
    scope: dict[str, Any] = {}
    exec(f"def handler({', '.join(parts)}): return dict({', '.join(f'{name}={name}' for name in taken)})", scope)
    made: Callable[..., Any] = scope["handler"]
    return made


CALLS = st.tuples(
    st.lists(JSON, max_size=5),
    st.dictionaries(
        st.sampled_from(["self", "cls", "a", "p0", "json", "x", "key", "class_", "more", "*", "rest"]), JSON, max_size=4
    ),
)


@given(handlers(), CALLS, CODECS)
def test_a_packed_call_is_the_call(
    handler: Callable[..., Any], call: tuple[list[Any], dict[str, Any]], name: str
) -> None:
    """What can be called directly arrives as it was called; what cannot is refused before it is enqueued."""
    args, kwargs = call
    arguments = Arguments(handler, "handler")
    try:
        expected = handler(*args, **kwargs)
    except TypeError:
        with pytest.raises(ArgumentsError):
            arguments.pack(tuple(args), kwargs, name)
        return
    try:
        payload = arguments.pack(tuple(args), kwargs, name)
    except ArgumentsError as error:
        # The only calls that Python takes and a payload cannot hold.
        assert "positional only" in str(error)  # noqa: PT017
        return
    seen = arguments.unpack(payload, name)
    assert handler(*seen.args, **seen.kwargs) == expected


@given(
    handlers(), st.dictionaries(st.text(max_size=5) | st.sampled_from(["a", "x", "self", "*"]), JSON, max_size=4) | JSON
)
def test_any_payload_is_a_call_or_a_refusal(handler: Callable[..., Any], payload: Any) -> None:
    """Whatever JSON comes from outside, either the handler can be called with it or an error of dibs says why not."""
    arguments = Arguments(handler, "handler")
    for name in ("json", "msgpack", "test-plain"):
        try:
            args, kwargs = arguments.unpack(codec.encode(payload, name), name)
        except InvalidInput:
            continue
        handler(*args, **kwargs)


@given(st.binary(max_size=30), CODECS)
def test_any_bytes_are_a_call_or_a_refusal(payload: bytes, name: str) -> None:
    """Bytes that are nothing are an error of dibs, never one of the reader's own."""

    def handler(value: Any = None, *rest: Any, **more: Any) -> None: ...

    assume(payload or name != "test-plain")
    with contextlib.suppress(InvalidInput):
        Arguments(handler, "handler").unpack(payload, name)


class Colour(enum.Enum):
    """An enumeration."""

    RED = "red"


@dataclass
class Point:
    """A dataclass."""

    x: int
    y: int = 0


class Size(msgspec.Struct):
    """A struct."""

    width: int


class Pair(NamedTuple):
    """A named tuple."""

    left: int
    right: str


class Row(TypedDict, total=False):
    """A typed dictionary."""

    id: int


class Alien:
    """A class that has no plain form."""


KINDS: list[tuple[Any, Any]] = [
    (int, 3),
    (float, 2),
    (str, "ü"),
    (bool, True),
    (None, None),
    (datetime, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
    (date, date(2026, 1, 2)),
    (timedelta, timedelta(seconds=90)),
    (Decimal, Decimal("1.50")),
    (uuid.UUID, uuid.UUID(int=7)),
    (Colour, Colour.RED),
    (Point, Point(1, 2)),
    (Size, Size(3)),
    (Pair, Pair(1, "b")),
    (Row, {"id": 1}),
    (list[Point], [Point(1)]),
    (dict[str, Size], {"a": Size(1)}),
    (dict[int, str], {1: "a"}),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (int | None, None),
    (Point | None, Point(1)),
    (int | str, "a"),
    (Literal["a", "b"], "b"),
    (Annotated[int, msgspec.Meta(ge=0)], 5),
    (Any, {"any": [1, None]}),
    (object, 1),
]


@pytest.mark.parametrize("open_ended", [False, True])
@pytest.mark.parametrize("name", ["json", "msgpack"])
@pytest.mark.parametrize(("kind", "value"), KINDS, ids=[str(kind) for kind, _ in KINDS])
def test_annotated_values_arrive_as_they_were(kind: Any, value: Any, name: str, open_ended: bool) -> None:
    """An argument whose type has a plain form arrives as that type, by position and by name, with ** or without."""

    def closed(value: Any, *, other: Any = None) -> None: ...

    def opened(value: Any, *, other: Any = None, **more: Any) -> None: ...

    handler = opened if open_ended else closed
    handler.__annotations__.update(value=kind, other=kind)
    arguments = Arguments(handler, "handler")
    call = arguments.unpack(arguments.pack((value,), {"other": value}, name), name)
    assert call == Call((), {"value": value, "other": value})
    assert type(call.kwargs["value"]) is type(value) or kind is float


@pytest.mark.parametrize(
    "kind", [Alien, list[Alien], "Missing", "not python", "1 / 0", type[int], Callable[[], None], Iterator[int]]
)
def test_annotations_without_a_plain_form_change_nothing(kind: Any) -> None:
    """A parameter that is annotated with something else takes what the codec gives."""

    def handler(value: Any) -> None: ...

    handler.__annotations__["value"] = kind
    arguments = Arguments(handler, "handler")
    assert arguments.unpack(arguments.pack(([1, "a"],), {}), "json") == Call((), {"value": [1, "a"]})


def test_a_path_has_no_plain_form_and_is_refused_at_the_enqueue() -> None:
    """What the codec cannot write is an error where the call is made."""

    def handler(where: Path) -> None: ...

    with pytest.raises(CodecError, match="PosixPath"):
        Arguments(handler, "handler").pack((Path("a"),), {})


def test_a_default_of_none_takes_none() -> None:
    """``width: int = None`` takes null, as the default says."""

    def handler(width: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013 that is the point

    assert Arguments(handler, "handler").unpack(b'{"width": null}', "json") == Call((), {"width": None})


def test_wrong_types_are_refused_where_the_call_is_made() -> None:
    """The enqueue says what the worker would refuse."""

    def handler(width: int) -> None: ...

    with pytest.raises(ArgumentsError, match=r"Expected `int`, got `str`.*width"):
        Arguments(handler, "handler").pack(("wide",), {})


def payload_cases() -> Iterator[Any]:
    """Payloads that a producer outside may send to ``handler(url: str, width: int = 200)``."""
    yield pytest.param(b'"a.png"', Call(("a.png",), {}), id="not an object")
    yield pytest.param(b'{"url": "a.png"}', Call((), {"url": "a.png"}), id="an object")
    yield pytest.param(b' \n{"url": "a.png"} ', Call((), {"url": "a.png"}), id="an object after white space")
    yield pytest.param(b"", "missing required field `url`", id="empty")
    yield pytest.param(b"{}", "missing required field `url`", id="nothing in it")
    yield pytest.param(b'{"url": "a", "hight": 1}', "unknown field `hight`", id="an unknown field")
    yield pytest.param(b'{"url": 1}', r"Expected `str`, got `int`", id="a wrong type")
    yield pytest.param(b"7", r"Expected `str`, got `int`", id="a wrong type alone")
    yield pytest.param(b'{"url": "a", "width": NaN}', "cannot be read as json", id="NaN")
    yield pytest.param(b'{"url": "a", "width": 1e999}', "Expected `int`|out of range|cannot be read", id="an infinity")
    yield pytest.param(b'{"url": ' + b"[" * 100_000, "Expected `str`", id="deep nesting, of the wrong type")
    yield pytest.param(b"url=a.png", "cannot be read as json", id="not JSON")
    yield pytest.param(b'{"url": "a"', "cannot be read as json", id="cut off")
    yield pytest.param(b'{"url": "a"} x', "cannot be read as json", id="more after it")
    yield pytest.param(b'{"url": "\xff"}', "cannot be read as json", id="not UTF-8")
    yield pytest.param(b'{"url": "a", "*": [1]}', r"unknown field `\*`", id="variadic, of which there are none")


@pytest.mark.parametrize(("payload", "expected"), list(payload_cases()))
def test_payloads_from_outside(payload: bytes, expected: Call | str) -> None:
    """A payload that fits is a call; any other is a clear refusal."""

    def handler(url: str, width: int = 200) -> None: ...

    arguments = Arguments(handler, "thumbnail")
    if isinstance(expected, Call):
        assert arguments.unpack(payload, "json") == expected
    else:
        with pytest.raises(InvalidInput, match=expected) as caught:
            arguments.unpack(payload, "json")
        assert "thumbnail" in str(caught.value)


def test_deep_nesting_is_refused() -> None:
    """A payload that is nested without end costs its task one failure, not the worker its stack."""

    def handler(value: Any) -> None: ...

    for payload in (b"[" * 100_000, b'{"value": ' + b"[" * 100_000, b'{"value":' * 100_000):
        with pytest.raises(CodecError, match="cannot be read"):
            Arguments(handler, "handler").unpack(payload, "json")


def test_one_value_for_a_handler_that_takes_more_or_none() -> None:
    """A payload that is no object must be enough for the handler."""

    def two(a: int, b: int) -> None: ...

    def none() -> None: ...

    def named(*, a: int) -> None: ...

    def many(*values: int) -> None: ...

    with pytest.raises(ArgumentsError, match="needs more than one"):
        Arguments(two, "two").unpack(b"1", "json")
    with pytest.raises(ArgumentsError, match="takes no arguments"):
        Arguments(none, "none").unpack(b"1", "json")
    with pytest.raises(ArgumentsError, match="takes no arguments"):
        Arguments(named, "named").unpack(b"1", "json")
    assert Arguments(many, "many").unpack(b"1", "json") == Call((1,), {})
    assert Arguments(none, "none").unpack(b"", "json") == Call((), {})


def test_positional_only_arguments_have_names_in_a_payload() -> None:
    """A producer names them like all others; gaps are filled with the defaults."""

    def handler(a: int = 1, b: int = 2, /, c: int = 3, *rest: int) -> list[int]:
        return [a, b, c, *rest]

    arguments = Arguments(handler, "handler")

    def called(payload: bytes) -> list[int]:
        call = arguments.unpack(payload, "json")
        return handler(*call.args, **call.kwargs)

    assert called(b'{"b": 5}') == [1, 5, 3]
    assert called(b'{"c": 5}') == [1, 2, 5]
    assert called(b'{"*": [7, 8]}') == [1, 2, 3, 7, 8]


def test_raw_carries_the_first_argument_as_it_is() -> None:
    """Bytes in, the same bytes out; a call that raw cannot carry is refused where it is made."""

    def handler(data: bytes, more: bytes = b"") -> None: ...

    def named(*, data: bytes) -> None: ...

    arguments = Arguments(handler, "handler")
    assert arguments.unpack(arguments.pack((b"\0\xff{",), {}, "raw"), "raw") == Call((b"\0\xff{",), {})
    assert arguments.unpack(arguments.pack((), {"data": b"x"}, "raw"), "raw") == Call((b"x",), {})
    with pytest.raises(CodecError):
        arguments.pack(("text",), {}, "raw")
    with pytest.raises(ArgumentsError, match="one argument"):
        arguments.pack((b"a", b"b"), {}, "raw")
    with pytest.raises(ArgumentsError, match="data"):
        arguments.pack((), {"more": b"b"}, "raw")
    with pytest.raises(ArgumentsError, match="data"):
        Arguments(named, "named").pack((), {"data": b"b"}, "raw")


def test_an_unknown_codec_is_a_refusal() -> None:
    """A payload of a codec that nobody registered here cannot be read."""

    def handler(data: Any) -> None: ...

    with pytest.raises(CodecError, match="no codec is named"):
        Arguments(handler, "handler").unpack(b"", "nobody-knows")


def test_reading_payloads_keeps_nothing() -> None:
    """However many payloads are read, also for a handler with ``**``, no decoder is left over for each."""

    def handler(a: int = 0, **more: Any) -> None: ...

    arguments = Arguments(handler, "handler")
    arguments.unpack(b'{"a": 1, "b": 2}', "json")
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(500):
        arguments.unpack(b'{"a": 1, "b": 2}', "json")
    gc.collect()
    assert len(gc.get_objects()) - before < 250


def test_results_come_as_they_are_declared() -> None:
    """A result is of the type that the handler declares; one that is not comes as the codec gives it."""

    def point() -> Point: ...  # type: ignore[empty-body]

    def when() -> datetime: ...  # type: ignore[empty-body]

    def bare(): ...  # type: ignore[no-untyped-def]

    assert Returned(point).decode(b'{"x": 1}', "json") == Point(1)
    assert Returned(point).decode(b'"no point"', "json") == "no point"
    assert Returned(when).decode(b'"2026-01-02T03:04:05Z"', "json") == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert Returned(bare).decode(b'{"x": 1}', "json") == {"x": 1}
    assert Returned(point).decode(b"bytes", "raw") == b"bytes"
    assert get_type_hints(point)["return"] is Point
