"""Keys that issuers publish: which are taken, when they are fetched, and what a bad day at the issuer changes."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from dibs.errors import SettingsError, StoreUnavailable, Unauthenticated
from dibs.server.verifiers.jwks import (
    FIRST_REFETCH_S,
    JWKS_MAX_BYTES,
    KEYS_MAX,
    REFETCH_S,
    REFRESH_S,
    FileSource,
    UrlSource,
    check_jwks_url,
    read_jwks,
    read_public_key,
)
from dibs.server.verifiers.jwt import JwtVerifier
from dibs.server.verifiers.watched import LOOK_EVERY_S
from tests.server.issuer import AUDIENCE, EC, ED, ISSUER, RSA, Clock, JwksServer, claims, jwks, public, signed


def es256(key: Key = EC, kid: str | None = None) -> str:
    """A good token."""
    return signed(key, claims(), alg="ES256", kid=kid or key.kid)


class TestReading:
    """What is taken from a JWKS."""

    @pytest.mark.parametrize(
        ("entry", "why"),
        [
            (OctKey.generate_key().as_dict(private=True), "secret"),
            (EC.as_dict(private=True), "private"),
            (RSA.as_dict(private=True), "private"),
            (ED.as_dict(private=True), "private"),
            (ECKey.generate_key("P-384").as_dict(private=False), "algorithm"),
            (ECKey.generate_key("secp256k1").as_dict(private=False), "algorithm"),
            (OKPKey.generate_key("Ed448").as_dict(private=False), "algorithm"),
            (OKPKey.generate_key("X25519").as_dict(private=False), "algorithm"),
            (EC.as_dict(private=False, use="enc"), "signatures"),
            (EC.as_dict(private=False, key_ops=["encrypt"]), "signatures"),
            (EC.as_dict(private=False, key_ops="verify"), "signatures"),
            (RSA.as_dict(private=False, alg="PS256"), "algorithm"),
            (RSA.as_dict(private=False, alg="HS256"), "algorithm"),
            (RSA.as_dict(private=False, kid=5), "kid"),
            ({"kty": "RSA", "n": "AQAB", "e": "AQAB"}, "bits|numbers"),
            ({"kty": "AKP", "kid": "post-quantum"}, "kty"),
            ({"kty": ["RSA"]}, "kty"),
            ({}, "kty"),
            ("RSA", "object"),
            (None, "object"),
        ],
    )
    def test_keys_that_are_left_out(self, entry: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
        """Secrets, private keys, and keys for something else are not taken, the log says so, and the others hold."""
        with pytest.raises(ValueError, match=why):
            read_public_key(entry)
        found = read_jwks(json.dumps({"keys": [entry, *public(ED)]}).encode(), "jwks.json")
        assert [key.kid for key in found] == ["ed"]
        assert "key 0 is left out" in caplog.text

    @pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
    def test_short_rsa_keys(self) -> None:
        """RSA under 2,048 bits is not taken."""
        with pytest.raises(ValueError, match="1024 bits"):
            read_public_key(RSAKey.generate_key(1024).as_dict(private=False))

    def test_what_an_issuer_adds(self) -> None:
        """Certificates and unknown members of a key are passed over."""
        entry = RSA.as_dict(
            private=False, alg="RS256", use="sig", key_ops=["verify"], x5c=["?"], x5t=5, x5u="ftp:", z={}
        )
        assert read_public_key(entry).kid == "rsa"

    @pytest.mark.parametrize(
        "data", [b"", b"[]", b"{}", b'{"keys": {}}', b'{"keys": []}', b'{"keys": [5]}', b"\xff", b"[" * 100_000]
    )
    def test_what_is_no_jwks(self, data: bytes) -> None:
        """What is no JWKS, or has no key, is refused as a whole."""
        with pytest.raises(ValueError, match="it "):
            read_jwks(data, "jwks.json")

    def test_too_many_keys(self) -> None:
        """A JWKS has a bounded number of keys."""
        with pytest.raises(ValueError, match=str(KEYS_MAX)):
            read_jwks(json.dumps({"keys": public(ED) * (KEYS_MAX + 1)}).encode(), "jwks.json")

    @given(
        st.fixed_dictionaries(
            {"kty": st.sampled_from(["RSA", "EC", "OKP"])},
            optional={
                name: st.none() | st.integers() | st.text() | st.lists(st.text()) | st.just("AQAB")
                for name in ("n", "e", "crv", "x", "y", "use", "key_ops", "alg", "kid")
            },
        )
    )
    def test_odd_keys(self, entry: dict[str, Any]) -> None:
        """Whatever a key is made of, it is read or refused."""
        try:
            read_public_key(entry)
        except ValueError:
            return


class TestFile:
    """Keys in a file."""

    def test_a_file_that_is_missing(self, tmp_path: Path) -> None:
        """Without the file a server does not start."""
        with pytest.raises(SettingsError, match="No such file"):
            FileSource(tmp_path / "jwks.json")

    def test_a_file_that_is_wrong(self, tmp_path: Path) -> None:
        """Nor with one that is no JWKS."""
        (tmp_path / "jwks.json").write_text("{}")
        with pytest.raises(SettingsError, match="not a JWKS"):
            FileSource(tmp_path / "jwks.json")

    async def test_a_change_of_keys(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A changed file is read again, at most once a second; a broken or missing one changes nothing."""
        clock = Clock()
        path = tmp_path / "jwks.json"
        path.write_bytes(jwks(ED))
        source = FileSource(path, now_s=clock)
        path.write_bytes(jwks(EC, ED))
        assert not await source.keys("ES256", "ec")
        clock.now_s += LOOK_EVERY_S
        assert await source.keys("ES256", "ec")
        for spoil in (lambda: path.write_text("{"), path.unlink):
            spoil()
            clock.now_s += LOOK_EVERY_S
            assert await source.keys("ES256", "ec")
            assert caplog.records[-1].levelno == logging.ERROR
            clock.now_s += LOOK_EVERY_S
            assert await source.keys("ES256", "ec")
            assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
            caplog.clear()
        path.write_bytes(jwks(ED))
        os.utime(path, ns=(1, 1))
        clock.now_s += LOOK_EVERY_S
        assert not await source.keys("ES256", "ec")


class World:
    """An issuer's server whose keys a test changes, and a verifier that fetches them."""

    def __init__(self, server: JwksServer) -> None:
        self.server = server
        self.clock = Clock(1000.0)
        self.keys: tuple[Key, ...] = (EC,)
        self.source = UrlSource(server.url, now_s=self.clock)
        self.verifier = JwtVerifier(self.source, issuer=ISSUER, audience=AUDIENCE, now_s=Clock())
        self.heal()

    def heal(self) -> None:
        """The server answers with its keys."""
        self.server.answer = lambda _: jwks(*self.keys)

    async def good(self, token: str) -> bool:
        """Whether a token is taken."""
        try:
            return await self.verifier.verify(token) is not None
        except Unauthenticated:
            return False


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A server and who asks it."""
    async with JwksServer(lambda _: b"") as server:
        world = World(server)
        yield world
        await world.verifier.close()


NEW = ECKey.generate_key("P-256", {"kid": "new"})


def broken(what: str) -> Any:
    """An answer that cannot be used."""
    redirect = web.Response(status=302, headers={"Location": "/elsewhere"})
    answers = {
        "500": lambda _: web.Response(status=500),
        "not JSON": lambda _: b"<html>",
        "no keys": lambda _: b'{"keys": []}',
        "too large": lambda _: jwks(NEW) + b" " * JWKS_MAX_BYTES,
        "a redirect": lambda request: jwks(NEW) if request.path != "/jwks" else redirect,
        "compressed": lambda _: web.Response(body=gzip.compress(jwks(NEW)), headers={"Content-Encoding": "gzip"}),
        "cut off": lambda request: request.transport.close() or b"",
    }
    return answers[what]


BROKEN = ["500", "not JSON", "no keys", "too large", "a redirect", "compressed", "cut off"]


class TestUrl:
    """Keys that are fetched."""

    async def test_keys_are_fetched_once(self, world: World) -> None:
        """The first token has the keys fetched; later ones do not."""
        for _ in range(20):
            assert await world.good(es256())
        assert world.server.asked == 1

    async def test_many_at_once_share_one_fetch(self, world: World) -> None:
        """Tokens that come while the keys are fetched wait for that fetch."""
        assert all(await asyncio.gather(*(world.good(es256()) for _ in range(50))))
        assert world.server.asked == 1

    async def test_rotation(self, world: World) -> None:
        """A key that is new is found by its id; one that is gone is not used any more after the next fetch."""
        assert await world.good(es256())
        world.keys = (NEW,)
        world.clock.now_s += REFETCH_S
        assert await world.good(es256(NEW))
        assert not await world.good(es256())
        assert world.server.asked == 2

    async def test_a_flood_of_unknown_key_ids(self, world: World) -> None:
        """However many tokens with unknown key ids come, keys are fetched once in half a minute, and good tokens go
        through meanwhile."""
        assert await world.good(es256())
        for _ in range(3):
            world.clock.now_s += REFETCH_S
            flood = (world.good(es256(NEW, f"unknown-{number}")) for number in range(100))
            assert not any(await asyncio.gather(*flood))
            assert await world.good(es256())
        assert world.server.asked == 4

    async def test_refused_tokens_fetch_nothing(self, world: World) -> None:
        """A token that is refused for its issuer, header or algorithm has no keys fetched."""
        bad = [
            signed(EC, claims(iss="other"), alg="ES256", kid="x"),
            signed(EC, claims(), alg="HS256", sign_as="ES256", kid="x"),
            signed(EC, claims(), alg="ES256", kid="x", crit=["exp"]),
        ]
        assert not any([await world.good(token) for token in bad])
        assert world.server.asked == 0

    @pytest.mark.parametrize("what", BROKEN)
    async def test_a_failed_fetch_keeps_the_keys(
        self, what: str, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whatever goes wrong at the issuer, the keys from before still hold; and once it is well, new ones too."""
        assert await world.good(es256())
        world.server.answer = broken(what)
        world.clock.now_s += REFETCH_S
        assert not await world.good(es256(NEW))
        assert await world.good(es256())
        assert "still hold" in caplog.text
        world.keys = (EC, NEW)
        world.heal()
        world.clock.now_s += REFETCH_S
        assert await world.good(es256(NEW))

    async def test_an_issuer_that_is_away_from_the_start(self, world: World) -> None:
        """Without any keys nobody is refused for good: the call is to be repeated, and works once they are there."""
        world.server.answer = broken("500")
        for _ in range(10):
            with pytest.raises(StoreUnavailable, match="repeat"):
                await world.verifier.verify(es256())
        assert world.server.asked == 1
        world.heal()
        world.clock.now_s += FIRST_REFETCH_S
        assert await world.good(es256())

    async def test_nobody_listens(self) -> None:
        """A server that is not there is one that is away."""
        async with JwksServer(lambda _: b"") as server:
            source = UrlSource(server.url)
        with pytest.raises(StoreUnavailable, match="repeat"):
            await source.keys("ES256", "ec")
        await source.close()

    async def test_an_issuer_that_does_not_answer(self, caplog: pytest.LogCaptureFixture) -> None:
        """Who accepts a connection and says nothing is given up on, after a time."""
        async with JwksServer(lambda _: asyncio.sleep(3600)) as server:
            source = UrlSource(server.url, timeout_s=0.05)
            with pytest.raises(StoreUnavailable, match="repeat"):
                await source.keys("ES256", "ec")
            await source.close()
        assert "Timeout" in caplog.text

    async def test_old_keys_are_refreshed_in_the_background(self, world: World) -> None:
        """After ten minutes the keys are fetched again, and the token that made it so does not wait."""
        assert await world.good(es256())
        world.keys = (NEW,)
        fetched = asyncio.Event()

        def answer(_: web.Request) -> bytes:
            fetched.set()
            return jwks(NEW)

        world.server.answer = answer
        world.clock.now_s += REFRESH_S
        assert await world.good(es256())
        assert not fetched.is_set()
        await fetched.wait()
        while await world.good(es256()):  # noqa: ASYNC110 the moment at which the keys are read is nobody's event
            await asyncio.sleep(0.01)
        assert world.server.asked == 2

    async def test_who_gives_up_does_not_end_the_fetch(self, world: World) -> None:
        """A caller that goes away while keys are fetched leaves the others their fetch."""
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> bytes:
            asked.set()
            await go_on.wait()
            return jwks(EC)

        world.server.answer = lambda _: slowly()
        first = asyncio.create_task(world.good(es256()))
        second = asyncio.create_task(world.good(es256()))
        await asked.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        go_on.set()
        assert await second
        assert world.server.asked == 1

    async def test_closing_ends_a_fetch(self, world: World) -> None:
        """Closing does not wait for an issuer that does not answer."""
        asked = asyncio.Event()

        async def never() -> bytes:
            asked.set()
            await asyncio.sleep(3600)
            return b""

        world.server.answer = lambda _: never()
        waiting = asyncio.create_task(world.good(es256()))
        await asked.wait()
        await world.verifier.close()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.done()

    @pytest.mark.parametrize(
        "url",
        ["http://login.example.com/jwks", "http://127.0.0.1.example.com/", "http://10.0.0.1/", "ftp://localhost/jwks",
         "jwks.json", "https://", "file:///etc/jwks.json", "https://user:password@login.example.com/jwks", "https://[::1",
         "https://a:x/", ""],
    )  # fmt: skip
    def test_addresses_that_are_refused(self, url: str) -> None:
        """Keys come by https, or from this machine, and without a password."""
        with pytest.raises(SettingsError, match="JWKS URL") as raised:
            check_jwks_url(url)
        assert "password@" not in str(raised.value)

    @pytest.mark.parametrize(
        "url", ["https://login.example.com/jwks", "http://127.0.0.1:80/", "http://[::1]/", "http://localhost/"]
    )
    def test_addresses_that_are_good(self, url: str) -> None:
        """https, and loopback."""
        check_jwks_url(url)
