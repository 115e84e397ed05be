"""JSON Web Tokens: signed by an issuer that the server trusts, checked without asking anybody.

What is believed of a token, and in which order: its form and size; its `iss`, unverified, only to see whose it is; the
algorithm and the key, from the server's configuration; the signature; then the claims, from the bytes that were signed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import Key
from joserfc.jws import JWSRegistry
from joserfc.util import urlsafe_b64decode
from msgspec import UNSET, Struct, UnsetType, field

from dibs.checks import check_command, check_label, check_tenant
from dibs.errors import InvalidName, SettingsError, Unauthenticated
from dibs.server.auth import TOKEN_MAX_CHARS, Principal, Scope
from dibs.server.verifiers.jwks import KeySource

LEEWAY_S = 30.0
LEEWAY_MAX_S = 60.0
TIME_MAX_S = 1 << 46
"""No clock of ours gets there; beyond, numbers stop being exact."""
ALL_COMMANDS_CLAIM = "*"

TENANT_CLAIMS = ("tid", "tenantId", "tenant_id", "organizationId", "organization_id")
"""Where issuers put the tenant; all that a token has must agree."""

#: Scopes by the words that tokens use for them, also behind the prefix `dibs:`. codeQ has one for each thing that a
#: worker does, behind its own prefix.
SCOPE_OF = {
    **{prefix + scope: scope for scope in Scope for prefix in ("", "dibs:", "codeq:")},
    **{f"codeq:{word}": Scope.CLAIM for word in ("heartbeat", "abandon", "nack", "result")},
    "codeq:publish": Scope.ENQUEUE,
}

_TYPES = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
_REFUSED_HEADERS = ("crit", "b64", "zip", "enc")
_Time = int | float


class Claims(Struct, frozen=True):
    """What a token says, of what is read here; a claim of another type is refused, and so is null."""

    iss: str
    aud: str | list[str]
    exp: _Time
    sub: str
    nbf: _Time | UnsetType = UNSET
    iat: _Time | UnsetType = UNSET
    tid: str | UnsetType = UNSET
    tenant_id_camel: str | UnsetType = field(name="tenantId", default=UNSET)
    tenant_id: str | UnsetType = UNSET
    organization_id_camel: str | UnsetType = field(name="organizationId", default=UNSET)
    organization_id: str | UnsetType = UNSET
    scope: str | list[str] | UnsetType = UNSET
    scp: str | list[str] | UnsetType = UNSET
    scopes: str | list[str] | UnsetType = UNSET
    commands: list[str] | UnsetType = UNSET
    event_types: list[str] | UnsetType = field(name="eventTypes", default=UNSET)


class _Registry(JWSRegistry):
    """joserfc's checks with the algorithms of one key source. Its own look-up of an algorithm warns of EdDSA's name
    with every token; here the list decides, and it is fixed."""

    max_header_length = 2_048
    max_payload_length = TOKEN_MAX_CHARS
    max_signature_length = 2_048

    def get_alg(self, name: str) -> Any:
        if self.allowed is None or name not in self.allowed:
            raise Unauthenticated("the token is signed by an algorithm that this server does not take from its issuer")
        return self.algorithms[name]


class JwtVerifier:
    """Checks tokens of one issuer for one audience. Those of others, and what is no JWT, are not its business."""

    def __init__(
        self,
        keys: KeySource,
        *,
        issuer: str,
        audience: str,
        leeway_s: float = LEEWAY_S,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        if not issuer or not audience:
            raise SettingsError("tokens are checked for an issuer and an audience: name both")
        if not 0 <= leeway_s <= LEEWAY_MAX_S:
            raise SettingsError(f"leeway_s is {leeway_s}: use 0 to {LEEWAY_MAX_S:g} seconds")
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._leeway_s = leeway_s
        self._now_s = now_s
        # Unknown headers are ignored, as the standard wants it; the few that would change the meaning are refused.
        self._registry = _Registry(algorithms=keys.algorithms, strict_check_header=False)

    async def verify(self, token: str) -> Principal | None:
        """Returns who brings a token of this issuer; None for any other. Raises `Unauthenticated`, never with a part of
        the token in its message."""
        if len(token) > TOKEN_MAX_CHARS or not token.isascii() or token.count(".") != 2:
            return None
        head, body, _ = token.encode().split(b".")
        try:
            unverified = _object(body)
        except _Strict as error:
            raise Unauthenticated(f"the token cannot be read: {error}") from None
        if unverified is None or unverified.get("iss") != self._issuer:
            return None
        algorithm, key_id = self._checked_header(head)
        payload = self._signed(token, await self._keys.keys(algorithm, key_id))
        return self._principal(_claims(payload))

    async def close(self) -> None:
        """Lets go of what the keys come from."""
        await self._keys.close()

    def _checked_header(self, head: bytes) -> tuple[str, str | None]:
        """Returns the algorithm, which is one of the source's, and the id of the key."""
        try:
            header = _object(head)
        except _Strict:
            header = None
        if header is None:
            raise Unauthenticated("the token's header cannot be read")
        for name in _REFUSED_HEADERS:
            if name in header:
                raise Unauthenticated(f"the token's header has {name!r}, which this server does not take")
        if not isinstance(kind := header.get("typ", "JWT"), str) or kind.lower() not in _TYPES:
            raise Unauthenticated("the token is of another type than JWT: bring an access token")
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in self._keys.algorithms:
            wanted = ", ".join(sorted(self._keys.algorithms))
            raise Unauthenticated(f"the token is signed by another algorithm than its issuer's: use {wanted}")
        if key_id is not None and not isinstance(key_id, str):
            raise Unauthenticated("the token's header has a kid that is not text")
        return algorithm, key_id

    def _signed(self, token: str, keys: Sequence[Key]) -> bytes:
        """Returns the payload that one of the keys has signed."""
        if not keys:
            raise Unauthenticated("the token is signed by a key that its issuer does not publish: get a new token")
        for key in keys:
            try:
                return jws.deserialize_compact(token, key, registry=self._registry).payload
            except (JoseError, ValueError, TypeError, RecursionError):
                continue
        raise Unauthenticated("the token's signature is not its issuer's: get a new token")

    def _principal(self, claims: Claims) -> Principal:
        # Once more, of what was signed.
        if claims.iss != self._issuer:
            raise Unauthenticated("the token is of another issuer")
        if self._audience not in ([claims.aud] if isinstance(claims.aud, str) else claims.aud):
            raise Unauthenticated(f"the token is for another audience: get one with aud {self._audience!r}")
        expires_s = self._check_times(claims)
        return Principal(
            tenant=_tenant(claims),
            subject=_checked("sub", claims.sub, lambda sub: check_label("subject", sub)),
            scopes=_scopes(claims),
            commands=_commands(claims),
            expires_s=expires_s,
        )

    def _check_times(self, claims: Claims) -> float:
        """Returns from when on the token is refused."""
        now_s = self._now_s()
        for name, value in (("exp", claims.exp), ("nbf", claims.nbf), ("iat", claims.iat)):
            if value is not UNSET and not 0 <= value <= TIME_MAX_S:  # which not-a-number is not, either
                raise Unauthenticated(f"the token's claim {name!r} is no time: write seconds since 1970")
        if now_s >= claims.exp + self._leeway_s:
            raise Unauthenticated("the token has expired: get a new one")
        if claims.nbf is not UNSET and claims.nbf > now_s + self._leeway_s:
            raise Unauthenticated("the token is not valid yet: wait, or check the clocks")
        if claims.iat is not UNSET and claims.iat > now_s + self._leeway_s:
            raise Unauthenticated("the token was issued in the future: check the clocks")
        return float(claims.exp) + self._leeway_s


# ----------------------------------------------------------------------------------------------- reading a token


class _Strict(ValueError):
    """JSON that two readers could understand differently."""


def _object(segment: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a part of a token; None if it is none. Raises `_Strict` for an odd one."""
    try:
        return _json_object(urlsafe_b64decode(segment))
    except _Strict:
        raise
    except (ValueError, RecursionError):
        return None


def _json_object(data: bytes) -> dict[str, Any]:
    value = json.loads(data.decode("utf-8"), object_pairs_hook=_once_each, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that comes twice has two meanings: the issuer's library may see the one, and this server the other."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _Strict("a name comes twice")
    return made


def _no_constant(name: str) -> Any:
    raise _Strict(f"{name} is not JSON")


def _claims(payload: bytes) -> Claims:
    try:
        return msgspec.convert(_json_object(payload), Claims)
    except msgspec.ValidationError as error:  # says which claim and what it should be, not what it is
        raise Unauthenticated(f"the token's claims are not as they should be: {error}") from None
    except (ValueError, RecursionError):
        raise Unauthenticated("the token's claims cannot be read: one JSON object, each name once") from None


def _tenant(claims: Claims) -> str:
    values = (
        claims.tid,
        claims.tenant_id_camel,
        claims.tenant_id,
        claims.organization_id_camel,
        claims.organization_id,
    )
    said = {value for value in values if value is not UNSET}
    if not said:
        raise Unauthenticated(f"the token names no tenant: give it the claim {TENANT_CLAIMS[0]!r}")
    if len(said) > 1:
        raise Unauthenticated(f"the token names several tenants: {', '.join(TENANT_CLAIMS)} must agree")
    return _checked("the tenant", said.pop(), check_tenant)


def _scopes(claims: Claims) -> frozenset[Scope]:
    scopes: set[Scope] = set()
    for said in (claims.scope, claims.scp, claims.scopes):
        if said is not UNSET:
            words: Iterable[str] = said.split(" ") if isinstance(said, str) else said
            scopes |= {SCOPE_OF[word] for word in words if word in SCOPE_OF}
    if not scopes:
        raise Unauthenticated(f"the token has no scope for dibs: give its claim 'scope' one of {', '.join(Scope)}")
    return frozenset(scopes)


def _commands(claims: Claims) -> frozenset[str] | None:
    """Returns the commands that a token is limited to; None: all."""
    said = {frozenset(names) for names in (claims.commands, claims.event_types) if names is not UNSET}
    if not said:
        return None
    if len(said) > 1:
        raise Unauthenticated("the token's claims 'commands' and 'eventTypes' differ: leave one out")
    [names] = said
    if ALL_COMMANDS_CLAIM in names:
        return None
    if not names:
        raise Unauthenticated("the token's claim 'commands' is empty: name some, or leave it out")
    return frozenset(_checked("commands", name, check_command) for name in names)


def _checked(what: str, value: str, check: Callable[[str], None]) -> str:
    try:
        check(value)
    except InvalidName as error:
        raise Unauthenticated(f"in the token, {what}: {error}") from None
    return value
