"""An issuer of tokens, good and bad: whatever header and claims a test wants, really signed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

NOW_S = 1_800_000_000.0
ISSUER = "https://login.example.com"
AUDIENCE = "dibs"
SECRET = b"0123456789abcdefghijklmnopqrstuvwxyz-0123456789"

RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
EC = ECKey.generate_key("P-256", {"kid": "ec"})
ED = OKPKey.generate_key("Ed25519", {"kid": "ed"})
OCT = OctKey.import_key(SECRET)
KEYS: dict[str, Key] = {"RS256": RSA, "ES256": EC, "EdDSA": ED}


def claims(**others: Any) -> dict[str, Any]:
    """Claims that are good, but for what is given; a claim of None is left out."""
    good = {"iss": ISSUER, "aud": AUDIENCE, "sub": "importer", "tid": "acme", "scope": "enqueue", "exp": NOW_S + 600}
    return {name: value for name, value in (good | others).items() if value is not None}


def signed(key: Key, payload: dict[str, Any] | bytes, **header: Any) -> str:
    """A token with exactly this header and payload, and a signature that is right for them; `sign_as` names another
    algorithm for that than the header says."""
    algorithm = header.pop("sign_as", header.get("alg"))
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    signing = f"{b64(json.dumps(header).encode())}.{b64(body)}"
    signature = JWSRegistry.algorithms[algorithm].sign(signing.encode(), key)
    return f"{signing}.{b64(signature)}"


def hs256(payload: dict[str, Any] | bytes | None = None, **header: Any) -> str:
    """A token by the secret."""
    return signed(OCT, claims() if payload is None else payload, **{"alg": "HS256", **header})


def public(*keys: Key) -> list[Any]:
    """The public halves, as a JWKS lists them."""
    return [key.as_dict(private=False) for key in keys]


def jwks(*keys: Key) -> bytes:
    """A JWKS of public halves."""
    return json.dumps({"keys": public(*keys)}).encode()


def b64(data: bytes) -> str:
    """As tokens are encoded."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Clock:
    """A time that tests move, in seconds."""

    def __init__(self, now_s: float = NOW_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Returns it."""
        return self.now_s


class JwksServer:
    """An issuer's server on loopback: counts who asks, and answers what the test says."""

    def __init__(self, answer: Callable[[web.Request], Any]) -> None:
        self.answer = answer
        self.asked = 0
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        answer = self.answer(request)
        if hasattr(answer, "__await__"):
            answer = await answer
        return web.Response(body=answer) if isinstance(answer, bytes) else answer

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/jwks"
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._runner.cleanup()
