"""What dibs is told from outside, read once into one frozen value.

Each setting is declared once, as a field of :class:`Settings`; :data:`FIELDS` is that declaration as a table, for the
command line and the documentation. A value comes from the first of these places that names it::

    flag  >  environment DIBS_<NAME>  >  pyproject.toml [tool.dibs]  >  default

where the pyproject.toml is the nearest one, from the working directory upwards.

A name that is not a setting is refused in every place, so that a typing error cannot pass for a default. Sizes may be
written with a unit (``16GiB``, ``500 MB``), durations too (``7d``, ``90 min``); :func:`read_size_bytes` and
:func:`read_duration_s` are the readers, for whatever else takes one. Passwords in URLs are masked in
everything that prints: the values have no other text form.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from dibs.checks import check_tenant
from dibs.errors import InvalidName, SettingsError

Durability = Literal["sync", "relaxed"]

_PREFIX: Final = "DIBS_"
# What Kubernetes puts into every container of a namespace that has a service named dibs.
_SERVICE_LINK: Final = re.compile(r"DIBS_(SERVICE_(HOST|PORT\w*)|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, read and checked. Made by :func:`load`; made by hand it takes values, not texts with units."""

    url: Annotated[str, _text("The store: a directory or a URL; `open_store` lists the schemes.")] = "./dibs-data"
    tenant: Annotated[str, _tenant("Whose tasks are meant where a call names no tenant.")] = "default"
    max_bytes: Annotated[int, _size("Live data beyond which the store takes no new tasks.")] = 64 * 2**30
    durability: Annotated[Durability, _choice(
        "`sync`: acknowledged means on disk; `relaxed`: power loss may take the last commits.", *get_args(Durability)
    )] = "sync"  # fmt: skip
    payload_max_bytes: Annotated[int, _size("The largest encoded payload that is accepted.")] = 2**20
    result_max_bytes: Annotated[int, _size("The largest encoded result that is accepted.")] = 2**20
    journal_retention_s: Annotated[int, _duration("How long the journal keeps events.")] = 7 * 86_400
    journal_max_bytes: Annotated[int, _size("The size at which the journal is trimmed, read or not.")] = 2**30
    disk_reserve_bytes: Annotated[int, _size(
        "Free disk space below which the store takes no new tasks.", at_least=0
    )] = 256 * 2**20  # fmt: skip

    def __post_init__(self) -> None:
        for field in FIELDS:
            given = getattr(self, field.name)
            value = field.read(given, origin="Settings")
            if value != given or type(value) is not type(given):
                raise SettingsError(f"{field.name} from Settings must be the value itself: pass {value!r}")

    def __repr__(self) -> str:
        shown = (f"{field.name}={_shown(getattr(self, field.name))!r}" for field in FIELDS)
        return f"Settings({', '.join(shown)})"


class Field(msgspec.Struct, frozen=True):
    """The declaration of one setting: all that a flag, an environment variable or a line of documentation needs."""

    name: str
    default: Any
    doc: str
    shape: str
    """What to write for the value in a usage line: SIZE, DURATION, or the choices."""
    reader: Callable[[object], Any]

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return f"{_PREFIX}{self.name.upper()}"

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    def read(self, raw: object, *, origin: str) -> Any:
        """Returns the value that `raw` stands for, or raises a SettingsError that names `origin`."""
        try:
            return self.reader(raw)
        except ValueError as error:
            raise SettingsError(f"{self.name} from {origin} cannot be {_shown(raw)!r}: {error}") from None


class Setting(msgspec.Struct, frozen=True):
    """One setting as it was found. Its text form masks passwords; `value` does not."""

    name: str
    value: Any
    origin: str

    def __str__(self) -> str:
        return f"{self.name} = {_shown(self.value)} ({self.origin})"

    def __repr__(self) -> str:
        return f"Setting(name={self.name!r}, value={_shown(self.value)!r}, origin={self.origin!r})"


def load(
    flags: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Settings:
    """Returns the settings that hold here; `resolve` with the same arguments says where each came from."""
    return Settings(**{setting.name: setting.value for setting in resolve(flags, env, cwd)})


def resolve(
    flags: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[Setting, ...]:
    """Returns one row per setting, in the order of :data:`FIELDS`.

    `flags` are by setting name, and None means that the flag was not given; `env` is the process's environment and
    `cwd` its working directory unless given. Only the value that wins is read, so a flag helps against a bad variable.
    """
    places = [
        _from_flags(flags or {}),
        _from_environment(os.environ if env is None else env),
        _from_pyproject(cwd or Path.cwd()),
    ]
    rows = []
    for field in FIELDS:
        raw, origin = next((place[field.name] for place in places if field.name in place), (field.default, "default"))
        rows.append(Setting(field.name, field.read(raw, origin=origin), origin))
    return tuple(rows)


# What one place says: by setting name, the raw value and its origin.
_Place = dict[str, tuple[object, str]]


def _from_flags(flags: Mapping[str, object]) -> _Place:
    known = [field.name for field in FIELDS]
    for name in flags:
        check_known(name, known, "flag")
    return {name: (raw, "flag") for name, raw in flags.items() if raw is not None}


def _from_environment(env: Mapping[str, str]) -> _Place:
    names = {field.variable: field.name for field in FIELDS}
    found: _Place = {}
    for variable, raw in env.items():
        if variable.startswith(_PREFIX) and not _SERVICE_LINK.fullmatch(variable):
            check_known(variable, list(names), "environment")
            found[names[variable]] = (raw, f"environment {variable}")
    return found


def _from_pyproject(cwd: Path) -> _Place:
    here = cwd.resolve()
    path = next((path for folder in (here, *here.parents) if (path := folder / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    origin = f"pyproject.toml [tool.dibs] ({path})"
    known = [field.name for field in FIELDS]
    table = _tool_table(path, origin)
    for name in table:
        check_known(name, known, origin)
    return {name: (raw, origin) for name, raw in table.items()}


def _tool_table(path: Path, origin: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    tool = document.get("tool", {})
    table = tool.get("dibs", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise SettingsError(f"{origin} must be a table: write its settings under a line [tool.dibs]")
    return table


def check_known(name: str, known: list[str], origin: str) -> None:
    """Raises a `SettingsError` that names `origin` for a name that is not known, and what may have been meant."""
    if name in known:
        return
    # A hyphen or a capital is the likeliest mistake: compared in the spelling of the known names.
    spelled = name.replace("-", "_")
    close = get_close_matches(spelled.upper() if known[0].isupper() else spelled.lower(), known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    raise SettingsError(f"{name!r} from {origin} is not a setting: {advice}")


def mask(url: str) -> str:
    """Returns `url` with `***` for its passwords and tokens; in doubt it hides too much rather than too little."""
    # A server's URL has nothing but a token in front of its host; what is misspelled may have been one.
    url = re.sub(r"(?i)\b(https?:/*)[^\s/]\S*@", r"\1***@", url)
    url = re.sub(r"(?i)\b(?!(?:postgres(?:ql)?|rediss?)\b)([a-z][a-z0-9+.-]*://)[^\s/]\S*@", r"\1***@", url)
    url = re.sub(r"(?i)\b(https?:[^\s#]*#)(?!\*\*\*)\S+", r"\1***", url)
    # Up to the last @, since a password may hold an unescaped / ? # or @.
    url = re.sub(r"(://[^:/?#@]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)((?:^|[?&;\s])[^=&;\s]*(?:pass|secret|token|key)[^=&;\s]*=)[^&;\s]*", r"\1***", url)


def _shown(value: object) -> object:
    return mask(value) if isinstance(value, str) else value


class _Is(NamedTuple):
    """How one setting is described and read; `read` returns the value or raises ValueError saying what to give."""

    doc: str
    shape: str
    read: Callable[[object], Any]


def _text(doc: str) -> _Is:
    def read(raw: object) -> str:
        if not isinstance(raw, str) or not raw.strip():
            raise ValueError("give a text that is not empty")
        return raw

    return _Is(doc, "TEXT", read)


def _tenant(doc: str) -> _Is:
    def read(raw: object) -> str:
        if not isinstance(raw, str):
            raise ValueError("give the name of a tenant")
        try:
            check_tenant(raw)
        except InvalidName:  # whose message repeats the name, unmasked
            raise ValueError("use 1 to 64 of a-z 0-9 . _ -, starting with a-z or 0-9") from None
        return raw

    return _Is(doc, "NAME", read)


def _choice(doc: str, *choices: str) -> _Is:
    def read(raw: object) -> str:
        if not isinstance(raw, str) or raw not in choices:
            raise ValueError(f"choose one of {', '.join(choices)}")
        return raw

    return _Is(doc, "|".join(choices), read)


def _size(doc: str, *, at_least: int = 1) -> _Is:
    return _Is(doc, "SIZE", lambda raw: read_size_bytes(raw, at_least=at_least))


def _duration(doc: str, *, at_least: int = 1) -> _Is:
    return _Is(doc, "DURATION", lambda raw: _whole(_seconds(raw, at_least), "seconds"))


def read_size_bytes(raw: object, *, at_least: int = 0) -> int:
    """Returns the bytes that `raw` stands for (``1048576``, ``512MiB``); a ValueError says what to give instead."""
    return _whole(_quantity(raw, _BYTE_UNITS, at_least, "a size such as 1048576, 512MiB or 16GiB"), "bytes")


def read_duration_s(raw: object, *, at_least: int = 0) -> float:
    """Returns the seconds that `raw` stands for (``90``, ``250ms``, ``5m``, ``7d``); a ValueError says what to give
    instead."""
    return float(_seconds(raw, at_least))


def _seconds(raw: object, at_least: int) -> Decimal:
    return _quantity(raw, _SECOND_UNITS, at_least, "seconds, or a duration such as 90s, 5m, 12h or 7d")


_BYTE_UNITS: Final[dict[str, int | Decimal]] = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SECOND_UNITS: Final[dict[str, int | Decimal]] = {
    "": 1, "ms": Decimal("0.001"), "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([a-z]*)")

# What a signed 64-bit number holds: the width of these values in every store and on the wire.
_QUANTITY_MAX: Final = 2**63 - 1


def _quantity(raw: object, units: Mapping[str, int | Decimal], at_least: int, example: str) -> Decimal:
    if isinstance(raw, int) and not isinstance(raw, bool):
        value = Decimal(raw)
    else:
        match = _QUANTITY.fullmatch(raw.strip().lower()) if isinstance(raw, str) else None
        if match is None or match[2] not in units:
            raise ValueError(f"give {example}")
        value = Decimal(match[1]) * units[match[2]]
    if not at_least <= value <= _QUANTITY_MAX:
        raise ValueError(f"give {example}, from {at_least} to {_QUANTITY_MAX}")
    return value


def _whole(value: Decimal, unit: str) -> int:
    if value != int(value):
        raise ValueError(f"give a whole number of {unit}")
    return int(value)


def _declared() -> tuple[Field, ...]:
    hints = get_type_hints(Settings, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(Settings):
        (declared,) = hints[field.name].__metadata__
        rows.append(Field(field.name, field.default, declared.doc, declared.shape, declared.read))
    return tuple(rows)


FIELDS: Final = _declared()
"""Every setting, in the order of its declaration."""
