"""Where the keys come from that tokens are checked with: a secret, a JWKS file, a JWKS URL.

The source fixes the algorithms. What a token says about itself chooses among the keys of a source, never how they are
used: a public key is no HMAC secret, whatever a header claims.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from dibs.errors import SettingsError, StoreUnavailable
from dibs.server.config import is_loopback
from dibs.server.verifiers.watched import WatchedFile

SECRET_MIN_BYTES = 32
"""As many as HMAC-SHA256 has: shorter ones can be guessed from a single token, offline."""
RSA_MIN_BITS = 2_048
RSA_MAX_BITS = 8_192
"""Checking a signature must stay cheap."""
KEYS_MAX = 64
JWKS_MAX_BYTES = 256 * 1024
REFRESH_S = 600.0
"""Keys this old are fetched again in the background when one is used."""
REFETCH_S = 30.0
"""An unknown key id makes a fetch at most so often, however many such tokens come."""
FIRST_REFETCH_S = 2.0
"""The same while no fetch has ever succeeded, and no token can be judged."""
FETCH_TIMEOUT_S = 5.0

#: The algorithm that a public key is used with, by its type and curve; no other keys are taken from a JWKS.
_ALGORITHM_OF = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_KINDS: dict[str, type[RSAKey | ECKey | OKPKey]] = {"RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}

log = logging.getLogger("dibs.server")


class KeySource(Protocol):
    """Keys of one kind, and the algorithms that they are for."""

    algorithms: frozenset[str]

    async def keys(self, algorithm: str, key_id: str | None) -> Sequence[Key]:
        """Returns the keys that a token of this header may be signed with, maybe none."""

    async def close(self) -> None:
        """Lets go of what is open."""


class SecretSource:
    """One secret that the issuer and the server share: HS256 and nothing else."""

    algorithms = frozenset({"HS256"})

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_MIN_BYTES:
            raise SettingsError(
                f"the secret has {len(secret)} bytes: use {SECRET_MIN_BYTES} or more (`dibs token secret` makes one)"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", SecurityWarning)
                self._keys = [OctKey.import_key(secret)]
        except (ValueError, SecurityWarning) as error:
            raise SettingsError("the secret is a key of another kind: give that as a JWKS") from error

    async def keys(self, algorithm: str, key_id: str | None) -> Sequence[Key]:  # noqa: ARG002 there is but one
        return self._keys

    async def close(self) -> None:
        pass


class FileSource:
    """The public keys of a JWKS file, read again when it changes."""

    algorithms = frozenset(_ALGORITHM_OF.values())

    def __init__(self, path: Path, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._file = WatchedFile(path, lambda data: read_jwks(data, str(path)), max_bytes=JWKS_MAX_BYTES, now_s=now_s)

    async def keys(self, algorithm: str, key_id: str | None) -> Sequence[Key]:
        return fitting(self._file.value, algorithm, key_id)

    async def close(self) -> None:
        pass


class UrlSource:
    """The public keys that an issuer publishes. Fetched when first needed, again in the background every ten minutes,
    and for an unknown key id at a bounded rate; all who wait share one fetch. A fetch that fails changes nothing."""

    algorithms = frozenset(_ALGORITHM_OF.values())

    def __init__(
        self, url: str, *, timeout_s: float = FETCH_TIMEOUT_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        check_jwks_url(url)
        self._url = url
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._known: Sequence[Key] = ()
        self._fetched_s: float | None = None
        self._tried_s: float | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def keys(self, algorithm: str, key_id: str | None) -> Sequence[Key]:
        """Raises `StoreUnavailable` while no fetch has ever succeeded: the token may be good, and nobody knows."""
        found = fitting(self._known, algorithm, key_id)
        if not found:
            await self._fetch(REFETCH_S if self._fetched_s is not None else FIRST_REFETCH_S)
            found = fitting(self._known, algorithm, key_id)
        elif self._fetched_s is not None and self._now_s() - self._fetched_s >= REFRESH_S:
            self._start(REFETCH_S)
        if self._fetched_s is None:
            raise StoreUnavailable("the keys of the token's issuer cannot be fetched now: repeat the call later")
        return found

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, every_s: float) -> None:
        self._start(every_s)
        if self._fetching is not None:
            # Shielded: a caller that goes away must not end the fetch of the others.
            await asyncio.shield(self._fetching)

    def _start(self, every_s: float) -> None:
        """Starts a fetch unless one is under way, or the last one began too short a time ago."""
        now_s = self._now_s()
        if self._fetching is None and (self._tried_s is None or now_s - self._tried_s >= every_s):
            self._tried_s = now_s
            self._fetching = asyncio.create_task(self._fetch_once(), name="dibs-jwks")

    async def _fetch_once(self) -> None:
        try:
            known = read_jwks(await self._get(), self._url)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a time-out is an OSError
            kept = "the keys fetched before still hold" if self._fetched_s is not None else "there are no keys yet"
            log.warning("%s cannot be used, %s: %s", self._url, kept, str(error)[:200] or type(error).__name__)
        else:
            self._known = known
            self._fetched_s = self._now_s()
        finally:
            self._fetching = None

    async def _get(self) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Uncompressed, or not at all: a few bytes could become gigabytes.
                headers={"Accept": "application/json", "Accept-Encoding": "identity"},
                auto_decompress=False,
            )
        async with self._session.get(self._url, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"it answers {response.status}; redirects are not followed")
            data = bytearray()
            async for part in response.content.iter_any():
                data += part
                if len(data) > JWKS_MAX_BYTES:
                    raise ValueError(f"its answer is over {JWKS_MAX_BYTES} bytes")
        return bytes(data)


def check_jwks_url(url: str) -> None:
    """Keys come by https, or from this very machine; raises `SettingsError` otherwise."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise SettingsError("the JWKS URL cannot be read: write https://HOST/PATH") from None
    if parts.username is not None or parts.password is not None:
        raise SettingsError("the JWKS URL has a password in it: keys are public, leave it out")
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
        raise SettingsError(f"the JWKS URL {url!r} is not https: who can change the answer could sign tokens")


def fitting(keys: Iterable[Key], algorithm: str, key_id: str | None) -> list[Key]:
    """Returns the keys for an algorithm that have this id; for a token without an id, all for its algorithm."""
    return [key for key in keys if algorithm_of(key) == algorithm and key_id in (None, key.get("kid"))]


def algorithm_of(key: Key) -> str | None:
    """Returns the one algorithm that a public key is used with; None: not with any."""
    curve = key.curve_name if isinstance(key, ECKey | OKPKey) else None
    return _ALGORITHM_OF.get((key.key_type, curve))


# ------------------------------------------------------------------------------------------------- reading a JWKS


def read_jwks(data: bytes, origin: str) -> list[Key]:
    """Returns the public keys for signatures in a JWKS. Keys that cannot be used here are left out, with a line in the
    log. Raises `ValueError` if it is no JWKS, or has no key that can be used."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or len(listed) > KEYS_MAX:
        raise ValueError(f'it is not a JWKS: {{"keys": […]}}, with at most {KEYS_MAX} keys')
    keys = []
    for number, entry in enumerate(listed):
        try:
            keys.append(read_public_key(entry))
        except ValueError as error:
            log.warning("%s: key %d is left out: %s", origin, number, error)
    if not keys:
        raise ValueError("it has no key that can be used: RSA of 2048 bits or more, EC P-256 or Ed25519, and public")
    return keys


def read_public_key(entry: Any) -> Key:
    """Returns the key that a JWK is, or raises `ValueError`. Neither secrets nor private keys are taken: whoever
    publishes one has lost it."""
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    kind = entry.get("kty")
    if kind == "oct":
        raise ValueError("it is a secret, and public keys are wanted")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError("its kty is not RSA, EC or OKP")
    if entry.keys() & {"d", "p", "q", "k"}:
        raise ValueError("it is a private key: publish the public half only, and make a new key")
    if entry.get("use", "sig") != "sig" or "verify" not in _listed(entry.get("key_ops", ["verify"])):
        raise ValueError("it is not for signatures")
    if not isinstance(entry.get("kid", ""), str):
        raise ValueError("its kid is not text")
    key = _imported(_KINDS[kind], entry)
    algorithm = algorithm_of(key)
    if algorithm is None or entry.get("alg", algorithm) != algorithm:
        raise ValueError("it is for an algorithm other than RS256, ES256 and EdDSA with Ed25519")
    if isinstance(key, RSAKey) and not RSA_MIN_BITS <= key.public_key.key_size <= RSA_MAX_BITS:
        raise ValueError(f"it has {key.public_key.key_size} bits: use {RSA_MIN_BITS} to {RSA_MAX_BITS}")
    return key


def _imported(kind: type[RSAKey | ECKey | OKPKey], entry: dict[str, Any]) -> Key:
    # Members beside these say nothing about the key: a certificate, or whatever an issuer adds.
    wanted: dict[str, Any] = {name: entry[name] for name in ("kty", "kid", "n", "e", "crv", "x", "y") if name in entry}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecurityWarning)  # about short keys, which are refused anyway
            return kind.import_key(wanted)
    except (JoseError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError("its numbers are not those of such a key") from error


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
