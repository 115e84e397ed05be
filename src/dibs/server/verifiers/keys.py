"""One `[[keys]]` table of a server's configuration, and the verifier that it asks for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from msgspec import Struct

from dibs.errors import MissingDriver, SettingsError
from dibs.server.auth import Verifier
from dibs.server.verifiers.tokens import TokenVerifier

SECRET_FILE_MAX_BYTES = 64 * 1024

log = logging.getLogger("dibs.server")


class KeyConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a server believes: tokens of an issuer, or those of a file. Several tables may stand side by side, also for
    one issuer, while one key takes the place of another."""

    kind: Literal["secret", "jwks-file", "jwks-url", "tokens"]
    """`secret`: HS256 by a file that the issuer has too; `jwks-file`, `jwks-url`: RS256, ES256 or EdDSA by the issuer's
    public keys; `tokens`: the file that `dibs token new` writes."""
    path: str | None = None
    """The file; from where the configuration lies, if it is not absolute. Of all kinds but `jwks-url`."""
    url: str | None = None
    """Where the issuer publishes its keys, by https."""
    issuer: str | None = None
    """What `iss` of a JWT must be, to the letter."""
    audience: str | None = None
    """What `aud` of a JWT must be, or have among others."""
    leeway_s: float = 30.0
    """By how much the clocks of issuer and server may differ; at most 60."""


def verifier_of(keys: KeyConfig, beside: Path | None = None) -> Verifier:
    """Returns the verifier that a table asks for; relative paths start at the directory `beside`. Raises
    `SettingsError` for what is missing, superfluous or unsafe."""
    path = _path(keys, beside or Path())
    if keys.kind == "tokens":
        if keys.issuer is not None or keys.audience is not None:
            raise SettingsError('keys of the kind "tokens" have no issuer and no audience: leave them out')
        assert path is not None
        return TokenVerifier(path)
    if not keys.issuer or not keys.audience:
        raise SettingsError(
            f"keys of the kind {keys.kind!r} need an issuer and an audience: tokens are checked for both"
        )
    try:
        from dibs.server.verifiers.jwks import FileSource, KeySource, SecretSource, UrlSource
        from dibs.server.verifiers.jwt import JwtVerifier
    except ImportError as error:
        raise MissingDriver("JWTs need joserfc and aiohttp: pip install 'dibs[server]'") from error
    source: KeySource
    if keys.kind == "jwks-url":
        assert keys.url is not None
        source = UrlSource(keys.url)
    elif keys.kind == "jwks-file":
        assert path is not None
        source = FileSource(path)
    else:
        assert path is not None
        source = SecretSource(read_secret(path))
    return JwtVerifier(source, issuer=keys.issuer, audience=keys.audience, leeway_s=keys.leeway_s)


def read_secret(path: Path) -> bytes:
    """Returns the secret in a file: its bytes, without the end of the line."""
    try:
        with path.open("rb") as file:
            secret = file.read(SECRET_FILE_MAX_BYTES)
        open_to_all = path.stat().st_mode & 0o007
    except OSError as error:
        raise SettingsError(f"the secret in {path} cannot be read: {error.strerror}") from error
    if open_to_all:
        log.warning("%s is open to everybody on this machine: chmod 600 it", path)
    return secret.rstrip(b"\r\n")


def _path(keys: KeyConfig, beside: Path) -> Path | None:
    if keys.kind == "jwks-url":
        if keys.url is None or keys.path is not None:
            raise SettingsError('keys of the kind "jwks-url" have a url, and no path')
        return None
    if keys.path is None or keys.url is not None:
        raise SettingsError(f"keys of the kind {keys.kind!r} have a path, and no url")
    return beside / keys.path
