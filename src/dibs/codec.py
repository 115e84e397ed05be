"""Turns values into the bytes that a task carries, and back.

A payload is opaque bytes plus the name of its codec:

======== ============================================================================================================
json     the default: readable everywhere. Tuples and sets come back as lists; dates, UUIDs, decimals and the keys of
         objects as strings. Refused, because JSON would change them silently: bytes at any depth, NaN and infinities
msgpack  like json, and bytes, NaN, infinities, whole-number keys and dates with a time zone survive; whole numbers
         end at 64 bits
raw      bytes in, the same bytes out
a name   what :func:`register` was given
======== ============================================================================================================

Whatever goes wrong is a :class:`~dibs.errors.CodecError`; deep nesting and values that contain themselves are no
exception. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from dibs.errors import CodecError, InvalidOption


def encode(value: Any, codec: str = "json") -> bytes:
    """Returns `value` as bytes that :func:`decode` reads with the same codec."""
    found = _codecs.get(codec) or _unknown(codec)
    try:
        data = found.encode(value)
    except (CodecError, MemoryError):
        raise
    except RecursionError as error:
        raise CodecError(
            f"{codec} cannot encode a value that is nested so deeply or contains itself: flatten it"
        ) from error
    except Exception as error:
        raise CodecError(f"{codec} cannot encode this {_type_name(value)} ({error}): {_WAYS_OUT}") from error
    if type(data) is not bytes:
        raise CodecError(f"the codec {codec} returned {_type_name(data)}: its encode function must return bytes")
    return data


def decode(data: bytes, codec: str) -> Any:
    """Returns the value that `data` stands for; only a registered codec gives types beyond those of its format."""
    found = _codecs.get(codec) or _unknown(codec)
    try:
        return found.decode(data)
    except (CodecError, MemoryError):
        raise
    except RecursionError as error:
        raise CodecError(f"these bytes are nested too deeply for {codec}: flatten the value before encoding") from error
    except Exception as error:
        raise CodecError(
            f"these bytes are not {codec} ({error}): decode them with the codec they were made with"
        ) from error


def register(name: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
    """Makes `name` a codec of this process. Workers that meet the name must register it too.

    Repeating a registration changes nothing; giving a name other functions is refused, since tasks that are already
    stored carry it.
    """
    check_codec_name(name)
    if name in _BUILT_IN:
        raise InvalidOption(f"the codec {name} is built in and cannot be replaced: choose another name")
    if not (callable(encode) and callable(decode)):
        raise InvalidOption(f"the codec {name} needs two functions: encode(value) -> bytes and decode(bytes) -> value")
    codec = _Codec(encode, decode)
    if _codecs.setdefault(name, codec) != codec:
        raise InvalidOption(f"the codec {name} is already registered with other functions: choose another name")


def names() -> tuple[str, ...]:
    """Returns the names that :func:`encode` and :func:`decode` know in this process."""
    return tuple(sorted(_codecs))


def check_codec_name(name: str) -> None:
    """A codec is 1 to 32 of ``a-z 0-9 _ . + -``, starting with a letter or digit; it need not be known here."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidOption(
            f"{repr(name)[:80]} is not a codec: use 1 to 32 of a-z 0-9 _ . + -, starting with a-z or 0-9"
        )


class _Codec(NamedTuple):
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,31}")
_WAYS_OUT: Final = "convert it to plain values first, or register a codec"


def _unknown(codec: object) -> NoReturn:
    raise CodecError(f"no codec is named {codec!r}; known here: {', '.join(names())}. Register it in this process")


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _unsupported(codec: str) -> Callable[[Any], NoReturn]:
    def refuse(value: Any) -> NoReturn:
        # Of these msgspec has no fault to find but where they stand.
        place = " as a key" if isinstance(value, bool | tuple | frozenset | None) else ""
        raise CodecError(f"{codec} cannot encode {_type_name(value)}{place}: {_WAYS_OUT}")

    return refuse


_decode_json: Final = msgspec.json.Decoder().decode
_decode_msgpack: Final = msgspec.msgpack.Decoder().decode
_json_encoder: Final = msgspec.json.Encoder(enc_hook=_unsupported("json"))
_msgpack_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_unsupported("msgpack"))

_BINARY: Final = (bytes, bytearray, memoryview)
# MessagePack writes a float as 0xCB and eight bytes; an exponent of all ones is NaN or infinity.
_find_not_finite: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search


def _encode_json(value: Any) -> bytes:
    data = _json_encoder.encode(value)
    # msgspec writes bytes as base64 and NaN as null, and JSON shows neither afterwards. MessagePack marks both, and a
    # second encoding plus a look for the marks is several times faster than walking the value in Python. A mark may
    # also be part of a text or number, so it is a reason to look closer, not to refuse: where nothing was changed, both
    # encodings read back the same.
    try:
        marks = _msgpack_encoder.encode(value)
    except OverflowError:  # a whole number over 64 bits, which JSON has and MessagePack has not
        _refuse_unfaithful(value)
    else:
        marked = 0xC4 in marks or 0xC5 in marks or 0xC6 in marks or (0xCB in marks and _find_not_finite(marks))
        if marked and _decode_json(data) != _decode_msgpack(marks):
            _refuse_unfaithful(value)
    return data


def _refuse_unfaithful(value: Any) -> None:
    """Raises if JSON would change a part of `value`, keys included, silently."""
    # Not recursive, and paths are linked: this must not be what runs out of stack or memory on an odd value.
    todo: list[tuple[Any, Any]] = [(None, msgspec.to_builtins(value, builtin_types=_BINARY))]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict):
            for key, child in item.items():
                todo.append(((path, key), child))
                if not isinstance(key, str):
                    todo.append(((path, key), key))
        elif isinstance(item, list | tuple | set | frozenset):
            todo.extend(((path, index), child) for index, child in enumerate(item))
        elif isinstance(item, _BINARY):
            raise CodecError(
                f"json cannot carry {_type_name(item)} (at {_show_path(path)}): "
                'use codec="msgpack", or codec="raw" for bytes alone'
            )
        elif isinstance(item, float) and not math.isfinite(item):
            raise CodecError(f'json cannot carry {item} (at {_show_path(path)}): use None, or codec="msgpack"')


def _show_path(path: Any) -> str:
    steps = []
    while path is not None:
        path, step = path
        steps.append(f"[{step!r}]")
    shown = "".join(["$", *reversed(steps)])
    return shown if len(shown) <= 100 else f"{shown[:97]}..."


def _bytes_only(value: Any) -> bytes:
    if not isinstance(value, _BINARY):
        raise CodecError(f'raw carries bytes, not {_type_name(value)}: encode it to bytes first, or use codec="json"')
    return bytes(value)


_BUILT_IN: Final = {
    "json": _Codec(_encode_json, _decode_json),
    "msgpack": _Codec(_msgpack_encoder.encode, _decode_msgpack),
    "raw": _Codec(_bytes_only, _bytes_only),
}
_codecs: dict[str, _Codec] = dict(_BUILT_IN)
