"""The `[[keys]]` tables of a server's configuration: each kind works, and what is unsafe or unclear is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dibs.errors import SettingsError
from dibs.server.verifiers.jwt import JwtVerifier
from dibs.server.verifiers.keys import KeyConfig, verifier_of
from dibs.server.verifiers.tokens import TokenVerifier, add_token, new_token
from tests.server.issuer import AUDIENCE, ED, ISSUER, SECRET, JwksServer, claims, hs256, jwks, signed
from tests.server.test_tokens import entry


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with something of each kind."""
    (tmp_path / "secret").write_bytes(SECRET + b"\r\n")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "short").write_bytes(b"secret\n")
    (tmp_path / "jwks.json").write_bytes(jwks(ED))
    add_token(tmp_path / "tokens.toml", entry(token=new_token()))
    return tmp_path


def table(**said: Any) -> KeyConfig:
    """A table of the configuration; for a JWT's, with issuer and audience."""
    named = {} if said.get("kind") == "tokens" else {"issuer": ISSUER, "audience": AUDIENCE}
    return msgspec.convert({name: value for name, value in (named | said).items() if value is not None}, KeyConfig)


async def test_a_secret(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The secret is the file's line; the real clock counts."""
    verifier = verifier_of(table(kind="secret", path="secret"), files)
    assert await verifier.verify(hs256(claims(exp=time.time() + 60)))
    assert not caplog.records


def test_a_secret_that_everybody_can_read(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken, and the log says how to hide it; without its bytes."""
    (files / "secret").chmod(0o644)
    verifier_of(table(kind="secret", path="secret"), files)
    assert "chmod" in caplog.text
    assert SECRET.decode() not in caplog.text


async def test_public_keys(files: Path) -> None:
    """A file of public keys, and the same from an address."""
    token = signed(ED, claims(exp=time.time() + 60), alg="EdDSA", kid="ed")
    assert await verifier_of(table(kind="jwks-file", path="jwks.json"), files).verify(token)
    async with JwksServer(lambda _: jwks(ED)) as server:
        verifier = verifier_of(table(kind="jwks-url", url=server.url), files)
        assert await verifier.verify(token)
        await verifier.close()


def test_static_tokens(files: Path) -> None:
    """A file of tokens has no issuer."""
    assert isinstance(verifier_of(table(kind="tokens", path=str(files / "tokens.toml"))), TokenVerifier)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"kind": "secret"}, "have a path"),
        ({"kind": "secret", "path": "none"}, "No such file"),
        ({"kind": "secret", "path": "short"}, "32 or more"),
        ({"kind": "secret", "path": "secret", "url": "https://x/"}, "no url"),
        ({"kind": "secret", "path": "secret", "issuer": None}, "issuer and an audience"),
        ({"kind": "secret", "path": "secret", "audience": None}, "issuer and an audience"),
        ({"kind": "secret", "path": "secret", "audience": ""}, "issuer and an audience"),
        ({"kind": "secret", "path": "secret", "leeway_s": 61}, "0 to 60"),
        ({"kind": "jwks-file", "path": "none"}, "No such file"),
        ({"kind": "jwks-file", "path": "secret"}, "not JSON"),
        ({"kind": "jwks-url"}, "have a url"),
        ({"kind": "jwks-url", "path": "jwks.json"}, "have a url"),
        ({"kind": "jwks-url", "url": "http://login.example.com/"}, "not https"),
        ({"kind": "tokens"}, "have a path"),
        ({"kind": "tokens", "path": "none"}, "No such file"),
        ({"kind": "tokens", "path": "jwks.json"}, "cannot be used"),
        ({"kind": "tokens", "path": "tokens.toml", "issuer": ISSUER}, "no issuer"),
    ],
)
def test_what_is_refused(said: dict[str, Any], why: str, files: Path) -> None:
    """A table that is incomplete, says too much or is unsafe stops the server, with a reason."""
    with pytest.raises(SettingsError, match=why):
        verifier_of(table(**said), files)


@pytest.mark.parametrize("said", [{"kind": "none"}, {"kind": "secret", "algorithms": ["none"]}, {"path": "secret"}])
def test_what_no_table_can_say(said: dict[str, Any]) -> None:
    """Neither unknown kinds nor a list of algorithms: that is not the configuration's to choose."""
    with pytest.raises(msgspec.ValidationError):
        table(**said)


def test_kinds(files: Path) -> None:
    """All but static tokens are JWTs."""
    for said in ({"kind": "secret", "path": "secret"}, {"kind": "jwks-file", "path": "jwks.json"}):
        assert isinstance(verifier_of(table(**said), files), JwtVerifier)
