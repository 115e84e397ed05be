"""How many items the lists of a body have, found out before any of them is made.

msgspec judges the length of a list when it has all of it. A body of some megabytes can have millions of items, each an
object; here the first that is too many ends it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, defstruct

from dibs.errors import InvalidOption
from dibs.server.http.problems import Problem

LOOKED_THROUGH_BYTES = 32 << 10
"""In what is smaller no list is long enough to matter."""


@functools.cache
def item_counter(kind: Any, content: Any, items_max: int) -> Callable[[bytes], None] | None:
    """Returns what raises a `Problem` for a body of this type with a list that is too long; None: it has no lists.
    `content`: `msgspec.json` or `msgspec.msgpack`. A list that says how long it may be is held to that. Made once for
    all the servers of a process: it takes longer than the rest of their start."""
    guard = _guard(kind, items_max)
    if guard is None:
        return None
    decode = content.Decoder(guard).decode
    # A remote store makes an error of the code.
    code = InvalidOption.code if content is msgspec.msgpack else "invalid"

    def count(body: bytes) -> None:
        if len(body) <= LOOKED_THROUGH_BYTES:
            return
        try:
            decode(body)
        except msgspec.ValidationError as error:
            if "length" in str(error):
                raise Problem(422, code, "a list of the body has too many items: send fewer at once") from None
            # Of another type: who decodes it says so, just as soon.
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            pass  # As above.

    return count


def _guard(kind: Any, items_max: int) -> Any:
    """A type that takes what `kind` takes and makes nothing of it but counts its lists; None: there are none."""
    if get_origin(kind) is Annotated:
        kind, *metas = get_args(kind)
        lengths = [meta.max_length for meta in metas if isinstance(meta, Meta) and meta.max_length is not None]
        return _guard(kind, min([items_max, *lengths]))
    if get_origin(kind) in (Union, UnionType):
        guards = [_guard(one, items_max) for one in get_args(kind) if one not in (type(None), UnsetType)]
        # Of a value that may be several things only its decoder knows which it is.
        return guards[0] if len(guards) == 1 else None
    if get_origin(kind) is list:
        return _few(items_max) | None
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        return None
    guarded = [(field.encode_name, _guard(field.type, items_max)) for field in msgspec.structs.fields(kind)]
    fields = [(name, guard | UnsetType, UNSET) for name, guard in guarded if guard is not None]
    return defstruct(f"{kind.__name__}Counted", fields) | None if fields else None


@functools.cache
def _few(items_max: int) -> type[Struct]:
    """A list of at most so many items, which are passed over: a struct without names refuses what is one too many."""
    fields = [(f"item_{index}", Raw | UnsetType, UNSET) for index in range(items_max)]
    return defstruct("Few", fields, array_like=True, forbid_unknown_fields=True)
