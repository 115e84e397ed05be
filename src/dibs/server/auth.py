"""Who calls, and what a caller may do.

A request brings a bearer token; one of the server's verifiers makes a :class:`Principal` of it, or all of them refuse.
:data:`NEEDS` is the one table of what each verb asks for, whatever it comes in by.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from dibs.errors import Forbidden, Unauthenticated

TOKEN_MAX_CHARS = 8_192
"""Longer tokens are refused unread."""
REMEMBERED_MAX = 4_096
REMEMBERED_S = 60.0
"""How long a verified token is not verified again: a revoked one works so much longer, at most."""


class Scope(StrEnum):
    """What a token lets its bearer do."""

    ENQUEUE = "enqueue"
    """Put tasks in, look at them, wait for them, cancel them."""
    CLAIM = "claim"
    """Take tasks, renew and settle their leases."""
    ADMIN = "admin"
    """Everything about the queues of one's own tenant."""
    OPERATOR = "operator"
    """Every tenant, and the store itself."""


ALL_SCOPES = frozenset(Scope)


class Principal(Struct, frozen=True):
    """A caller that was recognised."""

    tenant: str
    subject: str
    scopes: frozenset[Scope]
    commands: frozenset[str] | None = None
    """The only ones it may enqueue, claim or see; None: all."""
    expires_s: float | None = None
    """When its token ends, by the epoch."""

    @property
    def operates(self) -> bool:
        """True for an operator: every tenant is within reach."""
        return Scope.OPERATOR in self.scopes

    def may(self, verb: str) -> bool:
        """True if one of its scopes allows the verb."""
        return self.operates or not NEEDS[verb].isdisjoint(self.scopes)

    def check_verb(self, verb: str) -> None:
        """Raises `Forbidden` unless one of its scopes allows the verb."""
        if not self.may(verb):
            wanted = " or ".join(sorted(NEEDS[verb] | {Scope.OPERATOR}))
            raise Forbidden(f"{verb} needs a token with scope {wanted}")

    def check_tenant(self, tenant: str) -> None:
        """Raises `Forbidden` unless the tenant is its own, or it is an operator."""
        if tenant != self.tenant and not self.operates:
            raise Forbidden(
                f"this token is for the tenant {self.tenant!r}: name that one, or bring an operator's token"
            )

    def check_commands(self, commands: Sequence[str]) -> None:
        """Raises `Forbidden` unless it may have to do with all of these."""
        if self.commands is not None:
            for command in commands:
                if command not in self.commands:
                    raise Forbidden(f"this token is not for the command {command!r}")

    def sees(self, command: str) -> bool:
        """True if tasks of this command exist for it."""
        return self.commands is None or command in self.commands


_OF_PRODUCERS = frozenset({Scope.ENQUEUE, Scope.ADMIN})
_OF_WORKERS = frozenset({Scope.CLAIM})
_OF_ADMINS = frozenset({Scope.ADMIN})
_OF_ANYBODY = frozenset({Scope.ENQUEUE, Scope.CLAIM, Scope.ADMIN})
_OF_OPERATORS = frozenset({Scope.OPERATOR})

#: What each verb of the store asks for: one of these scopes. An operator's token has them all.
NEEDS: Mapping[str, frozenset[Scope]] = {
    "enqueue": frozenset({Scope.ENQUEUE}),
    "stage": frozenset({Scope.ENQUEUE}),
    "commit_load": frozenset({Scope.ENQUEUE}),
    "drop": frozenset({Scope.ENQUEUE}),
    "claim": _OF_WORKERS,
    "unclaim": _OF_WORKERS,
    "heartbeat": _OF_WORKERS,
    "settle": _OF_WORKERS,
    "register": _OF_WORKERS,
    "about": _OF_ANYBODY,
    "get": _OF_ANYBODY,
    "wait": _OF_ANYBODY,
    "list": _OF_PRODUCERS,
    "marks": _OF_PRODUCERS,
    "cancel": _OF_PRODUCERS,
    "retain": _OF_PRODUCERS,
    "stats": _OF_ANYBODY,
    "queue": _OF_ANYBODY,
    "subscribe": _OF_ANYBODY,
    "configure": _OF_ADMINS,
    "replay": _OF_ADMINS,
    "purge": _OF_ADMINS,
    "workers": _OF_ADMINS,
    "journal_bounds": _OF_ADMINS,
    "runs": _OF_ADMINS,
    "tenants": _OF_OPERATORS,
    "readers": _OF_OPERATORS,
    "advance": _OF_OPERATORS,
    "sweep": _OF_OPERATORS,
    "metrics": _OF_OPERATORS,
}


class Verifier(Protocol):
    """Makes a principal of one kind of token."""

    async def verify(self, token: str) -> Principal | None:
        """Returns who brings it; None: it is not of this verifier's kind. Raises `Unauthenticated` if it is, and not
        good; `StoreUnavailable` if nobody can tell now."""

    async def close(self) -> None:
        """Lets go of what is open."""


class Authenticator:
    """All verifiers of a server, asked in turn. Without any, everybody is `anybody`: development mode."""

    def __init__(
        self,
        verifiers: Sequence[Verifier],
        anybody: Principal | None = None,
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._verifiers = verifiers
        self._anybody = anybody
        self._now_s = now_s
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    @property
    def open(self) -> bool:
        """True in development mode: no token is asked for."""
        return self._anybody is not None

    async def principal_of(self, header: str | None) -> Principal:
        """Returns who sends an `Authorization` header, or raises `Unauthenticated`."""
        if self._anybody is not None:
            return self._anybody
        if header is None:
            raise Unauthenticated("no token: send one in the header Authorization: Bearer TOKEN")
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("the header Authorization has no token: write Authorization: Bearer TOKEN")
        if len(token) > TOKEN_MAX_CHARS:
            raise Unauthenticated(f"the token is over {TOKEN_MAX_CHARS} characters")
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        now_s = self._now_s()
        known = self._known.get(digest)
        if known is not None and 0 < known[0] - now_s <= REMEMBERED_S:  # also if the clock was set back
            return known[1]
        principal = await self._verified(token)
        until_s = now_s + REMEMBERED_S
        if principal.expires_s is not None:
            until_s = min(until_s, principal.expires_s)
        self._known[digest] = (until_s, principal)
        self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return principal

    async def close(self) -> None:
        """Closes all verifiers."""
        for verifier in self._verifiers:
            await verifier.close()

    async def _verified(self, token: str) -> Principal:
        refused: Unauthenticated | None = None
        for verifier in self._verifiers:
            try:
                principal = await verifier.verify(token)
            except Unauthenticated as error:
                refused = refused or error
            else:
                if principal is not None:
                    return principal
        raise refused or Unauthenticated("the token is not one that this server knows: check its issuer")
