import contextlib
import datetime
import decimal
import json
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dibs import codec
from dibs.errors import CodecError, InvalidOption

FINITE = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FINITE | st.text()
JSON_VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
MSGPACK_VALUES = st.recursive(
    LEAVES | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=20,
)
BUILT_IN = ["json", "msgpack", "raw"]


@dataclass
class Picture:
    """A value with a field that JSON may or may not be able to carry."""

    data: Any


class Custom:
    """A type that no built-in codec knows."""


def nested(value: Any, depth: int) -> Any:
    """Returns `value` inside `depth` lists."""
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(codec, "_codecs", dict(codec._codecs))


class TestRoundTrip:
    """What goes in comes out."""

    @given(JSON_VALUES)
    def test_json(self, value: Any) -> None:
        """Whatever JSON can express comes back equal, and any JSON reader reads the same."""
        data = codec.encode(value)
        assert codec.decode(data, "json") == value
        assert json.loads(data) == value

    @given(MSGPACK_VALUES)
    def test_msgpack(self, value: Any) -> None:
        """MessagePack carries the same values, and bytes and whole-number keys too."""
        assert codec.decode(codec.encode(value, "msgpack"), "msgpack") == value

    @given(st.binary())
    def test_raw(self, value: bytes) -> None:
        """Raw bytes are untouched both ways."""
        assert codec.encode(value, "raw") == value
        assert codec.decode(value, "raw") == value

    @pytest.mark.parametrize("value", [bytearray(b"\x00\xff"), memoryview(b"\x00\xff")])
    def test_raw_takes_a_copy(self, value: Any) -> None:
        """What raw returns is bytes, which later changes to a buffer cannot reach."""
        assert codec.encode(value, "raw") == b"\x00\xff"
        assert type(codec.encode(value, "raw")) is bytes

    def test_json_plain_types(self) -> None:
        """Dates, UUIDs, decimals, tuples, sets and dataclasses become what JSON has for them."""
        moment = datetime.datetime(2030, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
        value = {"at": moment, "id": uuid.UUID(int=7), "cost": decimal.Decimal("1.50"), "of": ({1}, Picture("x"))}
        assert codec.decode(codec.encode(value), "json") == {
            "at": "2030-01-02T03:04:05Z",
            "id": "00000000-0000-0000-0000-000000000007",
            "cost": "1.50",
            "of": [[1], {"data": "x"}],
        }

    @pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**100])
    def test_json_large_numbers(self, number: int) -> None:
        """JSON carries whole numbers over 64 bits, and checks beside them just the same."""
        assert codec.decode(codec.encode([number]), "json") == [number]
        with pytest.raises(CodecError, match="cannot carry bytes"):
            codec.encode([number, b"x"])

    def test_msgpack_not_finite(self) -> None:
        """MessagePack has NaN and infinities, so they survive there."""
        back = codec.decode(codec.encode([math.nan, -math.inf], "msgpack"), "msgpack")
        assert math.isnan(back[0])
        assert back[1] == -math.inf


class TestRefusedByJson:
    """What JSON would change without a word is refused instead."""

    @pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        ("wrap", "path"),
        [
            (lambda x: x, r"\$\)"),
            (lambda x: {"a": [None, x]}, r"\$\['a'\]\[1\]\)"),
            (lambda x: {"when": datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC), "x": x}, r"\$\['x'\]\)"),
            (Picture, r"\$\['data'\]\)"),
            (lambda x: {x: 1}, r"\$\[-?(nan|inf)\]\)"),
        ],
    )
    def test_not_finite(self, wrap: Callable[[Any], Any], path: str, number: float) -> None:
        """NaN and infinities are refused at any depth, with their place, instead of turning into null."""
        with pytest.raises(CodecError, match=f"json cannot carry -?(nan|inf) .at {path}.*msgpack"):
            codec.encode(wrap(number))

    @pytest.mark.parametrize("size", [0, 1, 300, 70_000])
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}, Picture, lambda x: (1, {2: x})])
    def test_bytes(self, wrap: Callable[[Any], Any], kind: Callable[[bytes], Any], size: int) -> None:
        """Bytes of any size are refused at any depth, pointing at msgpack and raw, instead of turning into base64."""
        with pytest.raises(CodecError, match=r"json cannot carry (bytes|bytearray|memoryview) .*msgpack.*raw"):
            codec.encode(wrap(kind(b"x" * size)))

    def test_bytes_as_key(self) -> None:
        """Bytes are refused as the key of an object too."""
        with pytest.raises(CodecError, match="cannot carry bytes"):
            codec.encode({b"x": 1})

    @given(JSON_VALUES, st.binary(max_size=3) | st.sampled_from([math.nan, math.inf, -math.inf]))
    def test_anywhere(self, value: Any, culprit: Any) -> None:
        """However innocent the rest of a value is, what JSON would change is found in it."""
        with pytest.raises(CodecError, match="json cannot carry"):
            codec.encode({"before": value, "here": [culprit], "after": value})

    @pytest.mark.parametrize(
        "value", ["null", "żółć Ą ń Ć ŀ", [196, 197, 198, 203], {"a": None, "b": 1.7e308}, 7.5e-322]
    )
    def test_look_alikes(self, value: Any) -> None:
        """Texts and numbers that merely resemble NaN or bytes inside an encoding pass."""
        assert codec.decode(codec.encode(value), "json") == value

    def test_long_path_is_cut(self) -> None:
        """An error message stays short however deep its culprit sits."""
        with pytest.raises(CodecError) as caught:
            codec.encode(nested(b"x", 300))
        assert len(str(caught.value)) < 250


class TestCannotEncode:
    """Values that a codec has no form for."""

    @pytest.mark.parametrize("name", ["json", "msgpack"])
    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}])
    def test_names_the_type(self, name: str, wrap: Callable[[Any], Any]) -> None:
        """A value of an unknown type is named with its module, and the ways out are told."""
        with pytest.raises(
            CodecError, match=rf"{name} cannot encode .*test_codec\.Custom: convert it .* register a codec"
        ):
            codec.encode(wrap(Custom()), name)

    @pytest.mark.parametrize(
        ("value", "name"),
        [
            ("\ud800", "json"),
            pytest.param(10**5000, "json", id="5001 digits"),
            ("\ud800", "msgpack"),
            (2**64, "msgpack"),
            (-(2**63) - 1, "msgpack"),
        ],
    )
    def test_says_what(self, value: Any, name: str) -> None:
        """Texts and numbers that a format lacks are codec errors with the reason inside."""
        with pytest.raises(CodecError, match=rf"{name} cannot encode this {type(value).__name__} \(.+\)") as caught:
            codec.encode(value, name)
        assert caught.value.__cause__ is not None

    @pytest.mark.parametrize("key", [None, True, (1, 2), frozenset({1})])
    def test_json_keys(self, key: Any) -> None:
        """A key that JSON has no text for is refused as a key: elsewhere it may be fine."""
        with pytest.raises(CodecError, match=f"json cannot encode {type(key).__name__} as a key"):
            codec.encode([{key: 1}])

    @pytest.mark.parametrize("value", ["text", 1, None, [b"x"]])
    def test_raw_takes_bytes_only(self, value: Any) -> None:
        """Raw guesses no encoding: what is not bytes is refused."""
        with pytest.raises(CodecError, match=f"raw carries bytes, not {type(value).__name__}: encode it to bytes"):
            codec.encode(value, "raw")
        with pytest.raises(CodecError, match="raw carries bytes"):
            codec.decode(value, "raw")

    @pytest.mark.parametrize("name", ["json", "msgpack"])
    def test_deep(self, name: str) -> None:
        """A value nested beyond the interpreter's stack is a codec error, not a RecursionError."""
        with pytest.raises(CodecError, match="nested so deeply"):
            codec.encode(nested(1, 100_000), name)

    @pytest.mark.parametrize("name", ["json", "msgpack"])
    def test_contains_itself(self, name: str) -> None:
        """A value that contains itself is a codec error."""
        value: list[Any] = []
        value.append(value)
        with pytest.raises(CodecError, match="contains itself"):
            codec.encode(value, name)

    @pytest.mark.parametrize("depth", range(850, 1000, 10))
    def test_near_the_limit(self, depth: int) -> None:
        """Near the depth limit a value is either encoded and checked, or refused: never half of it."""
        with pytest.raises(CodecError):
            codec.encode(nested(math.nan, depth))


class TestCannotDecode:
    """Bytes that are not what their codec says."""

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"{",
            b"NaN",
            b"[Infinity]",
            b"-Infinity",
            b"1e999",
            b'"\xff"',
            b'"\\ud800"',
            b"1 2",
            b"'x'",
            b"1" * 5000,
        ],
    )
    def test_json(self, data: bytes) -> None:
        """Bytes that are not strict JSON are refused, NaN and numbers beyond every float among them."""
        with pytest.raises(CodecError, match="these bytes are not json"):
            codec.decode(data, "json")

    @pytest.mark.parametrize("data", [b"", b"\xc1", b"\x01\x02", b"\xdd\xff\xff\xff\xff", b"\xa1\xff", b"\x81\x80\x01"])
    def test_msgpack(self, data: bytes) -> None:
        """Bytes that are not one MessagePack value are refused; a length that lies allocates nothing."""
        with pytest.raises(CodecError, match="these bytes are not msgpack"):
            codec.decode(data, "msgpack")

    @pytest.mark.parametrize(("data", "name"), [(b"[" * 100_000, "json"), (b"\x91" * 100_000, "msgpack")])
    def test_deep(self, data: bytes, name: str) -> None:
        """Deeply nested bytes are a codec error, not a RecursionError."""
        with pytest.raises(CodecError, match="nested too deeply"):
            codec.decode(data, name)

    @given(st.binary(), st.sampled_from(BUILT_IN))
    def test_any_bytes(self, data: bytes, name: str) -> None:
        """Whatever bytes arrive, decoding gives a value or a CodecError."""
        with contextlib.suppress(CodecError):
            codec.decode(data, name)


class TestRegister:
    """Codecs of the user's own."""

    def test_used_by_name(self) -> None:
        """A registered codec is used where it is named, and listed."""
        codec.register("upper", lambda text: text.upper().encode(), lambda data: data.decode().lower())
        assert codec.encode("abc", "upper") == b"ABC"
        assert codec.decode(b"ABC", "upper") == "abc"
        assert {"json", "msgpack", "raw", "upper"} <= set(codec.names())

    def test_unknown(self) -> None:
        """An unknown codec is refused both ways, with the names that are known."""
        for call in (lambda: codec.encode(1, "pickle"), lambda: codec.decode(b"1", "pickle")):
            with pytest.raises(CodecError, match="'pickle'; known here: json, msgpack, raw"):
                call()

    @pytest.mark.parametrize("name", ["a", "0", "json+zstd", "my_codec.v-2", "x" * 32])
    def test_names(self, name: str) -> None:
        """Lower-case names of up to 32 characters are allowed."""
        codec.check_codec_name(name)
        codec.register(name, bytes, bytes)
        assert name in codec.names()

    @pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a/b", "é", "a\n", "x" * 33, None, 7, ["a"]])
    def test_bad_names(self, name: Any) -> None:
        """Any other name is refused, wherever it is checked."""
        with pytest.raises(InvalidOption, match="is not a codec: use 1 to 32 of"):
            codec.check_codec_name(name)
        with pytest.raises(InvalidOption, match="is not a codec: use 1 to 32 of"):
            codec.register(name, bytes, bytes)

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_built_in_stays(self, name: str) -> None:
        """A built-in codec cannot be replaced: stored tasks rely on it."""
        with pytest.raises(InvalidOption, match="built in"):
            codec.register(name, bytes, bytes)

    def test_repeat(self) -> None:
        """Registering the same functions again is harmless; other functions are refused and change nothing."""
        codec.register("own", bytes, bytes)
        codec.register("own", bytes, bytes)
        with pytest.raises(InvalidOption, match="already registered with other functions"):
            codec.register("own", bytes, str)
        assert codec.decode(b"x", "own") == b"x"

    def test_needs_functions(self) -> None:
        """What cannot be called is not registered."""
        with pytest.raises(InvalidOption, match="two functions"):
            codec.register("own", "encode", bytes)  # type: ignore[arg-type]
        assert "own" not in codec.names()

    def test_errors_are_wrapped(self) -> None:
        """An error inside a registered codec is a CodecError that keeps its cause."""

        def fail(_: Any) -> Any:
            raise KeyError("inside")

        codec.register("own", fail, fail)
        for call in (lambda: codec.encode(1, "own"), lambda: codec.decode(b"1", "own")):
            with pytest.raises(CodecError, match="inside") as caught:
                call()
            assert isinstance(caught.value.__cause__, KeyError)

    def test_must_return_bytes(self) -> None:
        """A registered codec that encodes to anything but bytes is caught before it reaches a store."""
        codec.register("own", str, bytes)  # type: ignore[arg-type]
        with pytest.raises(CodecError, match="returned str: its encode function must return bytes"):
            codec.encode(1, "own")


def test_msgspec_still_needs_the_check() -> None:
    """msgspec alone turns NaN into null and bytes into base64: the reason for the second look in `_encode_json`."""
    assert msgspec.json.encode([math.nan, b"x"]) == b'[null,"eA=="]'
