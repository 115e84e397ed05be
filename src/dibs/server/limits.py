"""What a tenant may use, as declared: rates by kind of verb, and ceilings. :mod:`dibs.server.limiter` holds to it.

In the server's file::

    [limits]
    enqueue_per_s = 500
    queued_tasks_max = 1_000_000

    [limits.tenants.acme]
    enqueue_per_s = 5_000
    queued_tasks_max = "none"

A tenant's own table overrides single limits of the first; `"none"` lifts one. What ends or keeps a lease (settle,
heartbeat, unclaim) is never refused by a limit: a worker that did its work must be able to say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

import msgspec
from msgspec import Struct

from dibs.checks import ALL_TENANTS, check_tenant
from dibs.errors import InvalidName, SettingsError
from dibs.settings import read_duration_s, read_size_bytes

RATE_MIN, RATE_MAX = 1 / 86_400, 1e12
COUNT_MAX = 2**63 - 1
NONE: Final = "none"
"""In the file: this limit of the default does not hold for this tenant."""


class TenantLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one tenant. None: there is none.

    A rate is a bucket that fills at so much per second up to its burst (by default one second's worth, and at least 1).
    A batch costs as much as the tasks it has. One that costs more than the burst is let through when the bucket is
    full, and paid off afterwards.
    """

    requests_per_s: float | None = None
    """Calls of any verb but those that end or keep a lease."""
    requests_burst: float | None = None
    enqueue_per_s: float | None = None
    """Tasks: enqueued, staged for a load, replayed."""
    enqueue_burst: float | None = None
    enqueue_bytes_per_s: float | None = None
    """Bytes of the payloads of these."""
    enqueue_bytes_burst: float | None = None
    claim_per_s: float | None = None
    """Tasks that are claimed."""
    claim_burst: float | None = None
    read_per_s: float | None = None
    """Tasks, events and counts that are looked at, waited for or listed."""
    read_burst: float | None = None
    queued_tasks_max: int | None = None
    """Tasks that are ready or delayed."""
    queued_bytes_max: int | None = None
    """Payloads and results that are held, of tasks in every place."""
    in_flight_max: int | None = None
    """Tasks under a lease."""
    waiting_max: int | None = None
    """Calls that wait at once: claims, waits for results, subscriptions. Each is a connection. By default, half of the
    connections that the server can have."""
    payload_max_bytes: int | None = None
    """One payload; the store's own limit holds besides."""
    delay_max_s: float | None = None
    """How far in the future a task may be put."""

    def __post_init__(self) -> None:
        for name in FIELDS:
            value = getattr(self, name)
            if value is not None:
                _check(name, value)
        for rate in RATES:
            if getattr(self, _burst(rate)) is not None and getattr(self, rate) is None:
                raise SettingsError(f"{_burst(rate)} is set and {rate} is not: a burst needs a rate to refill it")

    def burst(self, rate: str) -> float:
        """Returns the size of a rate's bucket."""
        given: float | None = getattr(self, _burst(rate))
        per_s: float = getattr(self, rate)
        return max(1.0, per_s) if given is None else given


#: The names of rates, of all limits, and of those that are sizes.
FIELDS: Final = TenantLimits.__struct_fields__
RATES: Final = tuple(name for name in FIELDS if name.endswith("_per_s"))
_SIZES: Final = frozenset({"enqueue_bytes_per_s", "enqueue_bytes_burst", "queued_bytes_max", "payload_max_bytes"})
_WHOLE: Final = frozenset({"queued_tasks_max", "queued_bytes_max", "in_flight_max", "waiting_max", "payload_max_bytes"})


def _check(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError(f"{name} is {value!r}: give a number")
    if name in _WHOLE and not isinstance(value, int):
        raise SettingsError(f"{name} is {value!r}: give a whole number")
    lowest: float = {"delay_max_s": 0, "payload_max_bytes": 0}.get(name, RATE_MIN if name in RATES else 1)
    highest: float = COUNT_MAX if name in _WHOLE else RATE_MAX
    if not lowest <= value <= highest:
        raise SettingsError(f"{name} is {value!r}: give {lowest:g} to {highest:g}")


def _burst(rate: str) -> str:
    return f"{rate.removesuffix('_per_s')}_burst"


UNLIMITED: Final = TenantLimits()


class LimitsTable(Struct, frozen=True):
    """Whose limits are what."""

    default: TenantLimits = UNLIMITED
    tenants: Mapping[str, TenantLimits] = {}

    def of(self, tenant: str) -> TenantLimits:
        """Returns the limits of a tenant. What an operator does for all tenants at once (`*`) has none."""
        return UNLIMITED if tenant == ALL_TENANTS else self.tenants.get(tenant, self.default)


def read_limits(table: object, origin: str = "[limits]") -> LimitsTable:
    """Returns what a table of the server's file says; a `SettingsError` names the limit that cannot be read."""
    given = _table(table, origin)
    own_tables = _table(given.pop("tenants", {}), f"{origin} tenants")
    default = _fields(given, origin)
    tenants: dict[str, TenantLimits] = {}
    for tenant, own in own_tables.items():
        where = f"{origin} of the tenant {tenant!r}"
        try:
            check_tenant(tenant)
        except InvalidName as error:
            raise SettingsError(f"{where}: {error}") from None
        fields = _fields(_table(own, where), where)
        tenants[tenant] = _made(_without_orphans({**default, **fields}, fields), where)
    return LimitsTable(_made(default, origin), tenants)


def _table(raw: object, origin: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise SettingsError(f"{origin} must be a table of limits, not {type(raw).__name__}")
    return dict(raw)


def _fields(table: Mapping[str, object], origin: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, raw in table.items():
        if name not in FIELDS:
            close = get_close_matches(name.replace("-", "_").lower(), FIELDS, n=1)
            advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(FIELDS)}"
            raise SettingsError(f"{name!r} from {origin} is not a limit: {advice}")
        try:
            fields[name] = _read(name, raw)
        except ValueError as error:
            raise SettingsError(f"{name} from {origin} cannot be {raw!r}: {error}") from None
    return fields


def _without_orphans(merged: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A tenant that has no rate, or one of its own, does not inherit the burst that belongs to another."""
    for rate in RATES:
        if rate in own and _burst(rate) not in own:
            merged[_burst(rate)] = None
    return merged


def _read(name: str, raw: object) -> float | int | None:
    if raw == NONE:
        return None
    if isinstance(raw, str):
        if name in _SIZES:
            return read_size_bytes(raw)
        if name == "delay_max_s":
            return read_duration_s(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise ValueError(f'give a number, or "{NONE}"')
    return raw


def _made(fields: Mapping[str, Any], origin: str) -> TenantLimits:
    try:
        made = msgspec.structs.replace(UNLIMITED, **fields)
    except SettingsError as error:
        raise SettingsError(f"{origin}: {error}") from None
    return UNLIMITED if made == UNLIMITED else made  # who has no limits is known by that
