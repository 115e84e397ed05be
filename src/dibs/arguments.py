"""A handler's parameters: what turns a call into a payload, and a payload into a call.

A payload is an object with an entry for each argument, by its name (``{"url": …, "width": 320}``), and further
positional ones under ``"*"``: a producer that knows nothing of Python can write it. A payload that is not an object is
the first argument.

The same reading is done twice. At the enqueue it shows at once what the worker would refuse; at the worker it gives the
handler values of the types that it declares, so that a ``datetime`` arrives as one. A parameter without an annotation,
or with one that has no plain form, takes what the codec gives.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from dibs import codec
from dibs.errors import ArgumentsError, CodecError, InvalidInput

VARIADIC: Final = "*"

# One object: decoders are kept by the identity of their type.
_OBJECT: Final = dict[str, Any]
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MSGPACK_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])


class Call(NamedTuple):
    """Arguments as a function takes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Arguments:
    """The parameters of one handler; `name` is for messages."""

    def __init__(self, handler: Callable[..., Any], name: str) -> None:
        self._handler = handler
        self._name = name
        self._signature = inspect.signature(handler)
        parameters = self._signature.parameters.values()
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._only_positional = sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
        self._unnameable = frozenset([VARIADIC, *self._positional[: self._only_positional]])
        self._named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._nameable = frozenset(self._named)
        self._required = frozenset(
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        )
        self._variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._open = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)

    # --------------------------------------------------------------------------------------------- a call → its payload

    def pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec_name: str = "json") -> bytes:
        """Returns the payload of a call. Raises `ArgumentsError` if the handler could not be called so."""
        named = self._bind(args, kwargs)
        if codec_name == "raw":
            return codec.encode(self._only_value(named), codec_name)
        payload = codec.encode(named, codec_name)
        decoders = _DECODERS.get(codec_name)
        if decoders is not None:
            try:
                decoders.decode(payload, self._shape)
            except _UNREADABLE as error:
                raise self._misfit(error, codec_name) from None
        return payload

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        positional = self._positional
        named = dict(zip(positional, args, strict=False))
        fits = len(args) <= len(positional) or self._variadic is not None
        if kwargs:
            fits = (
                fits and named.keys().isdisjoint(kwargs) and (self._open is not None or self._nameable >= kwargs.keys())
            )
            named.update(kwargs)
        # Where further names are taken, these would pass for parameters that they are not.
        ambiguous = self._open is not None and kwargs and not self._unnameable.isdisjoint(kwargs)
        if not fits or not self._required <= named.keys() or ambiguous:
            self._explain(args, kwargs)
        if len(args) > len(positional):
            named[VARIADIC] = list(args[len(positional) :])
        return named

    def _explain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises what Python itself has to say about such a call."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentsError(f"{self._name}{self._signature} cannot be called like this: {error}") from None
        raise ArgumentsError(
            f'{self._name}: no further argument can be named "{VARIADIC}" or like one that is positional only'
        )

    def _only_value(self, named: dict[str, Any]) -> Any:
        if len(named) != 1 or VARIADIC in named:
            raise ArgumentsError(f"{self._name}: the codec raw carries one argument, and this call has {len(named)}")
        [(name, value)] = named.items()
        if name not in self._positional[:1]:
            raise ArgumentsError(f"{self._name}: the codec raw carries the first argument, and this call names {name}")
        self._first(value)
        return value

    # --------------------------------------------------------------------------------------------- a payload → its call

    def unpack(self, payload: bytes, codec_name: str) -> Call:
        """Returns the call that a payload stands for. Raises `ArgumentsError` if it does not fit the handler, and
        `CodecError` if it cannot be read."""
        decoders = _DECODERS.get(codec_name)
        if decoders is None:
            return self._unpack_plain(codec.decode(payload, codec_name))
        try:
            if not payload:
                return self._call(msgspec.convert({}, self._shape))
            if not decoders.is_object(payload):
                return self._first(decoders.decode(payload, self._type_of_first))
            if self._open is None:
                return self._call(decoders.decode(payload, self._shape))
            return self._unpack_open(decoders.decode(payload, _OBJECT))
        except _UNREADABLE as error:
            raise self._misfit(error, codec_name) from None

    def _misfit(self, error: Exception, codec_name: str) -> InvalidInput:
        if isinstance(error, msgspec.ValidationError):
            return ArgumentsError(f"the payload does not fit {self._name}{self._signature}: {error}")
        return CodecError(f"the payload of {self._name} cannot be read as {codec_name}: {error}")

    def _unpack_plain(self, value: Any) -> Call:
        """A value whose types are its codec's business."""
        if not isinstance(value, dict):
            return self._first(value)
        named = dict(value)
        try:
            call = self._arranged(named, named.pop(VARIADIC, None) if self._variadic else None)
            self._signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise ArgumentsError(f"the payload does not fit {self._name}{self._signature}: {error}") from None
        return call

    def _unpack_open(self, named: dict[str, Any]) -> Call:
        """For a handler with ``**kwargs``: what it names by itself has types, the rest is passed on."""
        known = {name: named.pop(name) for name in self._fields if name in named}
        args, kwargs = self._call(msgspec.convert(known, self._shape, str_keys=True))
        return Call(args, {**kwargs, **named})

    def _first(self, value: Any) -> Call:
        if not self._positional and self._variadic is None:
            raise ArgumentsError(f"{self._name} takes no arguments, and the payload is one: send an object")
        if not self._required <= set(self._positional[:1]):
            raise ArgumentsError(f"{self._name}{self._signature} needs more than one argument: send an object")
        return Call((value,), {})

    def _call(self, shape: Any) -> Call:
        values = msgspec.structs.astuple(shape)
        named = {name: value for name, value in zip(self._fields, values, strict=True) if value is not UNSET}
        return self._arranged(named, named.pop(VARIADIC, None))

    def _arranged(self, named: dict[str, Any], rest: Any) -> Call:
        """Gives by position what cannot be named: positional-only arguments, and all that stand before the `rest`."""
        if rest is None:
            names = self._positional[: self._only_positional]
            while names and names[-1] not in named:
                names.pop()
        else:
            names = self._positional
        args = [named.pop(name) if name in named else self._default(name) for name in names]
        return Call((*args, *(rest or ())), named)

    def _default(self, name: str) -> Any:
        default = self._signature.parameters[name].default
        if default is inspect.Parameter.empty:
            raise ArgumentsError(f"the payload does not fit {self._name}{self._signature}: {name} is missing")
        return default

    # ------------------------------------------------------------------------------------------------------ their types

    @cached_property
    def _hints(self) -> dict[str, Any]:
        """The annotations, as far as they can be resolved here."""
        return _hints_of(self._handler)

    @cached_property
    def _fields(self) -> list[str]:
        only_named = [name for name in self._named if name not in self._positional]
        return [*self._positional, *only_named, *([VARIADIC] if self._variadic else [])]

    @cached_property
    def _shape(self) -> type[msgspec.Struct]:
        """The payload as a struct."""
        # Neutral names for its fields: a parameter may be called like something that structs have themselves.
        names = {f"p{index}": name for index, name in enumerate(self._fields)}
        fields = [
            (field, self._type_of(name), msgspec.NODEFAULT if name in self._required else UNSET)
            for field, name in names.items()
        ]
        return msgspec.defstruct(
            "Arguments", fields, rename=names, kw_only=True, forbid_unknown_fields=self._open is None
        )

    @cached_property
    def _type_of_first(self) -> Any:
        return self._type_of(self._positional[0] if self._positional else self._variadic or "")

    def _type_of(self, name: str) -> Any:
        if name == VARIADIC:
            return list[self._type_of(self._variadic or "")]  # type: ignore[misc]
        kind = plain_type(self._hints.get(name, Any))
        parameter = self._signature.parameters.get(name)
        if kind is Any or parameter is None:
            return kind
        return kind | None if parameter.default is None else kind


class Returned:
    """What a handler returns, as its callers get it: of the declared type where that has a plain form."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler

    def decode(self, data: bytes, codec_name: str) -> Any:
        """Returns the value; one that is not of the declared type comes as the codec gives it."""
        decoders = _DECODERS.get(codec_name)
        if decoders is not None and self._type is not Any:
            try:
                return decoders.decode(data, self._type)
            except msgspec.ValidationError:
                pass
        return codec.decode(data, codec_name)

    @cached_property
    def _type(self) -> Any:
        return plain_type(_hints_of(self._handler).get("return", Any))


def _hints_of(handler: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(handler, include_extras=True)
    except Exception:  # noqa: BLE001 an annotation is any expression, and what it raises when it is evaluated its own
        return {}


def plain_type(kind: Any) -> Any:
    """Returns `kind` if values of it can be made from plain ones, else Any."""
    try:
        info = msgspec.inspect.type_info(kind)
    except (TypeError, NameError, AttributeError, RecursionError):
        return Any
    return Any if _has_custom(info) else kind


def _has_custom(info: object) -> bool:
    """True if a part of a type, other than the fields of a class, is nothing that msgspec can make."""
    if isinstance(info, msgspec.inspect.CustomType | msgspec.inspect.RawType | msgspec.inspect.ExtType):
        return True
    parts: list[object] = []
    for name in ("item_type", "key_type", "value_type", "type"):
        parts.append(getattr(info, name, None))
    for name in ("types", "item_types"):
        parts += getattr(info, name, ())
    return any(isinstance(part, msgspec.inspect.Type) and _has_custom(part) for part in parts)


class _Decoders(NamedTuple):
    decode: Callable[[bytes, Any], Any]
    is_object: Callable[[bytes], bool]


def _cached(make: Callable[[Any], Any]) -> Callable[[bytes, Any], Any]:
    """A decoder is made once for each type, which takes longer than to use it."""
    known: dict[int, tuple[Any, Any]] = {}

    def decode(data: bytes, kind: Any) -> Any:
        found = known.get(id(kind))
        if found is None:
            # The type is kept beside its decoder, so that its id stays its own.
            found = known[id(kind)] = (kind, make(kind).decode)
        return found[1](data)

    return decode


_DECODERS: Final = {
    "json": _Decoders(_cached(msgspec.json.Decoder), lambda data: data.lstrip()[:1] == b"{"),
    "msgpack": _Decoders(_cached(msgspec.msgpack.Decoder), lambda data: data[0] in _MSGPACK_MAPS),
}
