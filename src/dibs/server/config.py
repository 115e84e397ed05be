"""What a server is told: a TOML file, and flags that come before it."""

from __future__ import annotations

import ipaddress
import math
import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dibs.errors import SettingsError
from dibs.server.verifiers.keys import KeyConfig
from dibs.settings import check_known, read_duration_s, read_size_bytes

PORT_MAX = 65_535


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a server."""

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: str | None = None
    tls_key: str | None = None
    log_format: Literal["text", "json"] = "text"
    access_log: Literal["all", "errors"] = "errors"
    """Which requests get a line: `errors` are those answered with 400 and more. All are in the metrics."""
    events_to: str | None = None
    """A file that gets every event of the journal."""
    keys: list[KeyConfig] = []
    """Whose tokens are believed."""
    limits: dict[str, Any] = {}
    """What tenants may use; `read_limits` reads it."""
    metrics_open: bool = False
    """Whether /metrics asks for no token: for a network in which everybody may know the names of tenants and queues."""
    body_max_bytes: int = 8 << 20
    """The largest request that is read."""
    codeq_without_tokens: bool | None = None
    """Whether on /v1/codeq the lease of the caller's subject is meant where no lease token is given. None: in
    development mode only."""
    stop_within_s: float = 20.0
    """How long a stop waits for what is being done."""

    def check(self) -> None:
        """Raises a `SettingsError` for what cannot work together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("a certificate and its key go together: give both tls_cert and tls_key")
        if not 0 <= self.port <= PORT_MAX:
            raise SettingsError(f"port cannot be {self.port}: give one from 1 to {PORT_MAX}, or 0 for any that is free")
        if not self.development:
            return
        if not is_loopback(self.host):
            raise SettingsError(
                f"without keys everybody would be allowed everything, so {self.host} is refused: listen at 127.0.0.1, "
                "or name keys ([[keys]] in --config, or --tokens FILE)"
            )

    @property
    def development(self) -> bool:
        """True without keys: nobody is asked for a token."""
        return not self.keys

    @property
    def leases_by_subject(self) -> bool:
        """Whether codeQ's clients need no lease token."""
        return self.development if self.codeq_without_tokens is None else self.codeq_without_tokens


@lru_cache(maxsize=256)  # asked for every request in development mode
def is_loopback(host: str) -> bool:
    """True for this machine's own address, by number or as `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


PATHS = ("tls_cert", "tls_key", "events_to")
"""Settings that are files."""


def read_config(file: Path | None, *, tokens: str | None = None, **flags: Any) -> ServerConfig:
    """Returns what the file says, and the flags that are given before that. `tokens`: a file of static tokens, beside
    the keys that the file names. Relative paths in the file start where it lies."""
    said = _said(file)
    for name in said:
        check_known(name, [*ServerConfig.__struct_fields__], str(file))
    beside = Path() if file is None else file.parent
    for name in PATHS:
        if isinstance(said.get(name), str):
            said[name] = str(beside / said[name])
    said |= {name: value for name, value in flags.items() if value is not None}
    for name, read in _QUANTITIES.items():
        if name in said:
            try:
                said[name] = read(said[name])
            except ValueError as error:
                raise SettingsError(f"{name} from {file} cannot be {said[name]!r}: {error}") from None
    try:
        config = msgspec.convert(said, ServerConfig)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{file or 'the flags'}: {error}") from None
    keys = [one if one.path is None else replace(one, path=str(beside / one.path)) for one in config.keys]
    if tokens is not None:
        keys.append(KeyConfig(kind="tokens", path=tokens))
    config = replace(config, keys=keys)
    config.check()
    for name, path in (("tls_cert", config.tls_cert), ("tls_key", config.tls_key)):
        if path is not None:
            _check_readable(name, Path(path))
    return config


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise SettingsError(f"{path}, which {name} names, cannot be read: {error.strerror}") from error


def _read_seconds(raw: object) -> float:
    """A duration, or any number of seconds that is one."""
    if isinstance(raw, float) and 0 <= raw < math.inf:
        return raw
    return read_duration_s(raw)


#: Settings that may be written with a unit.
_QUANTITIES: Mapping[str, Callable[[object], float]] = {
    "body_max_bytes": partial(read_size_bytes, at_least=1),
    "stop_within_s": _read_seconds,
}


def _said(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
