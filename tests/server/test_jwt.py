"""What is believed of a JWT: everything that the server checks, and everything that it does not let a token choose."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joserfc import jwe
from joserfc.jwk import OctKey, RSAKey

from dibs.errors import SettingsError, Unauthenticated
from dibs.server.auth import TOKEN_MAX_CHARS, Authenticator, Principal, Scope, Verifier
from dibs.server.verifiers.jwks import FileSource, SecretSource
from dibs.server.verifiers.jwt import SCOPE_OF, TENANT_CLAIMS, JwtVerifier
from tests.server.issuer import (
    AUDIENCE,
    ED,
    ISSUER,
    KEYS,
    NOW_S,
    OCT,
    RSA,
    SECRET,
    Clock,
    b64,
    claims,
    hs256,
    jwks,
    signed,
)

GOOD = Principal("acme", "importer", frozenset({Scope.ENQUEUE}), None, NOW_S + 630)


def by_secret(secret: bytes = SECRET, **others: Any) -> JwtVerifier:
    """A verifier of the secret's tokens."""
    given: dict[str, Any] = {"issuer": ISSUER, "audience": AUDIENCE, "now_s": Clock()} | others
    return JwtVerifier(SecretSource(secret), **given)


@pytest.fixture(scope="session")
def by_keys(tmp_path_factory: pytest.TempPathFactory) -> JwtVerifier:
    """A verifier of tokens by any of the public keys."""
    path = tmp_path_factory.mktemp("keys") / "jwks.json"
    path.write_bytes(jwks(*KEYS.values()))
    return JwtVerifier(FileSource(path), issuer=ISSUER, audience=AUDIENCE, now_s=Clock())


async def refused(token: str, verifier: Verifier | None = None) -> str:
    """The message with which a token is refused; nothing of the token is in it."""
    with pytest.raises(Unauthenticated) as raised:
        await (verifier or by_secret()).verify(token)
    message = str(raised.value)
    assert not [part for part in token.split(".") if part and part in message]
    return message


class TestSignatures:
    """Who signed, and by what."""

    async def test_a_token_by_the_secret(self) -> None:
        """A good token says who brings it, and until when it holds."""
        assert await by_secret().verify(hs256()) == GOOD

    @pytest.mark.parametrize("algorithm", KEYS)
    async def test_a_token_by_a_public_key(self, algorithm: str, by_keys: JwtVerifier) -> None:
        """Each of the three algorithms is taken, with a key id and without."""
        key = KEYS[algorithm]
        assert await by_keys.verify(signed(key, claims(), alg=algorithm, kid=key.kid, typ="at+jwt")) == GOOD
        assert await by_keys.verify(signed(key, claims(), alg=algorithm)) == GOOD

    async def test_another_secret(self) -> None:
        """A token by another secret is refused."""
        other = signed(OctKey.import_key(SECRET[::-1]), claims(), alg="HS256")
        assert "signature" in await refused(other)

    @pytest.mark.parametrize("algorithm", KEYS)
    async def test_another_key_of_the_same_kind(self, algorithm: str, by_keys: JwtVerifier) -> None:
        """A token by a key that only claims to have the id of a known one is refused."""
        known = KEYS[algorithm]
        other = type(known).generate_key(parameters={"kid": str(known.kid)})
        assert "signature" in await refused(signed(other, claims(), alg=algorithm, kid=known.kid), by_keys)

    async def test_every_changed_byte(self) -> None:
        """A token in which any one character is another is refused, or is nobody's."""
        token = hs256()
        for index in range(len(token)):
            changed = token[:index] + ("B" if token[index] != "B" else "C") + token[index + 1 :]
            try:
                assert await by_secret().verify(changed) is None
            except Unauthenticated:
                continue

    async def test_no_algorithm(self, by_keys: JwtVerifier) -> None:
        """`none`, however it is written, is refused whatever stands as signature."""
        for name in ("none", "None", "NONE", "nOnE", ""):
            for signature in ("", b64(b"x")):
                token = f"{b64(json.dumps({'alg': name}).encode())}.{b64(json.dumps(claims()).encode())}.{signature}"
                assert "algorithm" in await refused(token)
                assert "algorithm" in await refused(token, by_keys)

    @pytest.mark.parametrize("algorithm", ["HS384", "HS512", "RS512", "PS256", "ES384", "EdDSA", "HS256 ", 256, None])
    async def test_the_token_does_not_choose_the_algorithm(self, algorithm: Any) -> None:
        """What is not on the source's list is refused, also where the signature would be right."""
        sign_as = algorithm if algorithm in ("HS384", "HS512") else "HS256"
        assert "algorithm" in await refused(hs256(alg=algorithm, sign_as=sign_as))

    async def test_a_public_key_is_no_secret(self, by_keys: JwtVerifier) -> None:
        """HS256 with the public key as its secret, in every spelling of it, is refused: the classic confusion."""
        for key in KEYS.values():
            spelled = [key.as_pem(), key.as_der(), json.dumps(key.as_dict(private=False)).encode()]  # type: ignore[union-attr]
            for public_bytes in spelled:
                confused = OctKey(public_bytes, public_bytes)
                token = signed(confused, claims(), alg="HS256", kid=key.kid)
                assert "algorithm" in await refused(token, by_keys)
                # And as if by the key's own algorithm.
                for algorithm in KEYS:
                    token = signed(confused, claims(), alg=algorithm, sign_as="HS256", kid=key.kid)
                    await refused(token, by_keys)

    async def test_a_key_is_used_for_its_own_algorithm(self, by_keys: JwtVerifier) -> None:
        """A known key id with the algorithm of another kind of key is refused."""
        assert "does not publish" in await refused(signed(RSA, claims(), alg="RS256", kid="ec"), by_keys)

    async def test_a_key_that_the_token_brings(self, by_keys: JwtVerifier) -> None:
        """Keys, and addresses of keys, in the header are never used."""
        own = RSAKey.generate_key(2048)
        for header in (
            {"jwk": own.as_dict(private=False)},
            {"jku": "https://attacker.example.com/jwks"},
            {"x5u": "https://attacker.example.com/cert"},
            {"x5c": [b64(own.as_der())]},
        ):
            assert "signature" in await refused(signed(own, claims(), alg="RS256", kid="rsa", **header), by_keys)
            assert await by_keys.verify(signed(RSA, claims(), alg="RS256", kid="rsa", **header)) == GOOD

    @pytest.mark.parametrize(
        "header",
        [{"crit": ["exp"], "exp": 1}, {"crit": []}, {"b64": False, "crit": ["b64"]}, {"b64": True}, {"zip": "DEF"}],
    )
    async def test_headers_that_change_the_meaning(self, header: dict[str, Any]) -> None:
        """A header that must be understood, or that changes how the token is read, is refused."""
        assert "header" in await refused(hs256(**header))

    async def test_unknown_headers(self) -> None:
        """Headers that say nothing to a server are passed over."""
        assert await by_secret().verify(hs256(typ="JWT", nonce="n", cty="json", kid="any")) == GOOD

    @pytest.mark.parametrize("kind", ["logout+jwt", "dpop+jwt", "secevent+jwt", 5])
    async def test_tokens_for_something_else(self, kind: Any) -> None:
        """A token of the issuer that is no access token is refused."""
        assert "type" in await refused(hs256(typ=kind))

    async def test_a_key_id_that_is_no_text(self, by_keys: JwtVerifier) -> None:
        """A kid of another type is refused."""
        for kid in (5, ["rsa"], {"a": 1}, True):
            assert "kid" in await refused(signed(RSA, claims(), alg="RS256", kid=kid), by_keys)

    async def test_encrypted_tokens(self) -> None:
        """A JWE is nobody's, whatever is inside."""
        key = OctKey.import_key(SECRET[:32])
        token = jwe.encrypt_compact({"alg": "dir", "enc": "A256GCM"}, hs256(), key)
        assert await by_secret().verify(token) is None

    async def test_a_token_within_a_token(self) -> None:
        """The payload is one set of claims: a signed token as payload is nobody's."""
        assert await by_secret().verify(hs256(hs256().encode(), cty="JWT")) is None

    async def test_json_serialisation(self) -> None:
        """A JWS in its JSON form is nobody's."""
        head, body, signature = hs256().split(".")
        flat = json.dumps({"protected": head, "payload": body, "signature": signature})
        assert await by_secret().verify(flat) is None


class TestClaims:
    """What a good signature does not yet make good."""

    async def test_another_issuer(self) -> None:
        """A token of another issuer, or of none, is not this verifier's business."""
        for issuer in ("https://login.example.com/", "HTTPS://LOGIN.EXAMPLE.COM", "", 5, [ISSUER], None):
            assert await by_secret().verify(hs256(claims(iss=issuer))) is None

    @pytest.mark.parametrize(
        "audience", ["other", "Dibs", "dib", "", [], ["other"], 5, ["dibs", 5], {"dibs": 1}, None, True]
    )
    async def test_another_audience(self, audience: Any) -> None:
        """A token for another server, for none or for something odd is refused."""
        await refused(hs256(claims(aud=audience)))

    async def test_one_of_several_audiences(self) -> None:
        """`aud` may be a list with this server in it."""
        assert await by_secret().verify(hs256(claims(aud=["other", AUDIENCE]))) == GOOD

    async def test_time(self) -> None:
        """A token holds from nbf to exp, either give or take the leeway."""
        clock = Clock()
        verifier = by_secret(now_s=clock, leeway_s=10)
        token = hs256(claims(nbf=NOW_S, iat=NOW_S, exp=NOW_S + 100))
        clock.now_s = NOW_S - 11
        assert "not valid yet" in await refused(token, verifier)
        for now_s in (NOW_S - 10, NOW_S, NOW_S + 100, NOW_S + 109.9):
            clock.now_s = now_s
            assert await verifier.verify(token)
        clock.now_s = NOW_S + 110
        assert "expired" in await refused(token, verifier)

    async def test_issued_in_the_future(self) -> None:
        """A token from the future is refused."""
        assert "future" in await refused(hs256(claims(iat=NOW_S + 31)))

    @pytest.mark.parametrize("leeway_s", [60.1, -1, float("nan"), float("inf")])
    def test_leeway_is_capped(self, leeway_s: float) -> None:
        """Clocks that differ by more than a minute are to be set, not tolerated."""
        with pytest.raises(SettingsError, match="leeway"):
            by_secret(leeway_s=leeway_s)

    @pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
    @pytest.mark.parametrize(
        "value",
        [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"true", b'"1900000000"', b"[1900000000]", b"{}", b"1e300",
         b"1" + b"0" * 400, b"1" + b"0" * 5000, b"-1" + b"0" * 400],
    )  # fmt: skip
    async def test_times_that_are_none(self, name: str, value: bytes) -> None:
        """Not-a-number, infinity, booleans, texts, lists and numbers beyond all time are refused as times."""
        good = json.dumps(claims(**{name: 12345.5})).encode()
        with contextlib.suppress(Unauthenticated):
            assert await by_secret().verify(hs256(good.replace(b"12345.5", value))) is None

    @pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity"])
    async def test_what_is_not_json(self, value: bytes) -> None:
        """Claims in which anything is not JSON are nobody's, also where it is in a claim that nobody reads."""
        token = hs256(json.dumps(claims())[:-1].encode() + b', "x": [' + value + b"]}")
        assert "cannot be read" in await refused(token)

    async def test_null_is_no_claim(self) -> None:
        """A claim that is null is refused, not taken for one that is absent."""
        for name in ("exp", "nbf", "iat", "aud", "sub", "tid", "tenantId", "scope", "commands"):
            await refused(hs256(json.dumps(claims() | {name: None}).encode()))

    async def test_no_expiry(self) -> None:
        """A token that never ends is refused."""
        assert "exp" in await refused(hs256(claims(exp=None)))

    @pytest.mark.parametrize("subject", [None, "", "a\nb", "a\x00", "x" * 129, "é" * 65, 5, ["a"], "\ud800"])
    async def test_subjects(self, subject: Any) -> None:
        """A subject is printable, not empty and at most 128 bytes."""
        assert "sub" in await refused(hs256(claims(sub=subject)))

    async def test_a_name_that_comes_twice(self) -> None:
        """Claims with one name twice are refused: two readers could see two tenants, or two issuers."""
        good = json.dumps(claims())
        for again in ('"tid": "other"', '"tid": "acme"', f'"iss": "{ISSUER}"', '"x": {"y": 1, "y": 2}'):
            token = hs256(f"{good[:-1]}, {again}}}".encode())
            assert "cannot be read: a name comes twice" in await refused(token)
        twice = b64(b'{"alg": "none", "alg": "HS256"}')
        assert "header" in await refused(".".join([twice, *hs256().split(".")[1:]]))

    async def test_deep_json(self) -> None:
        """Nesting as deep as a token can be is refused, in the header and in the claims."""
        deep = b"[" * 2_800 + b"]" * 2_800
        assert await by_secret().verify(hs256(json.dumps(claims())[:-1].encode() + b', "x": ' + deep + b"}")) is None
        head = b64(b'{"alg": "HS256", "x": ' + deep + b"}")
        await refused(".".join([head, *hs256(claims(tid="a")).split(".")[1:]]))

    async def test_claims_in_another_encoding(self) -> None:
        """JSON is UTF-8: other encodings, and byte order marks, are nobody's."""
        for encoding in ("utf-16", "utf-32", "utf-8-sig"):
            assert await by_secret().verify(hs256(json.dumps(claims()).encode(encoding))) is None

    async def test_huge_tokens(self) -> None:
        """A token over the cap is not even looked at, and the authenticator says why."""
        token = hs256(claims(x="x" * TOKEN_MAX_CHARS))
        assert await by_secret().verify(token) is None
        with pytest.raises(Unauthenticated, match="characters"):
            await Authenticator([by_secret()]).principal_of(f"Bearer {token}")


class TestTenants:
    """One tenant, under whichever name the issuer has for it."""

    @pytest.mark.parametrize("name", TENANT_CLAIMS)
    async def test_each_alias(self, name: str) -> None:
        """Every alias alone names the tenant."""
        assert await by_secret().verify(hs256(claims(**{"tid": None, name: "acme"}))) == GOOD

    async def test_all_agree(self) -> None:
        """Several that say the same are one."""
        assert await by_secret().verify(hs256(claims(**dict.fromkeys(TENANT_CLAIMS, "acme")))) == GOOD

    @pytest.mark.parametrize("name", TENANT_CLAIMS)
    async def test_conflicting_tenants(self, name: str) -> None:
        """If any one of them says another, the token is refused."""
        told = dict.fromkeys(TENANT_CLAIMS, "acme") | {name: "other"}
        assert "several tenants" in await refused(hs256(claims(**told)))

    async def test_no_tenant(self) -> None:
        """A token without a tenant is refused, also if it has one under a name that is none."""
        for other in ({}, {"tenant": "acme"}, {"TID": "acme"}, {"org_id": "acme"}):
            assert "names no tenant" in await refused(hs256(claims(tid=None, **other)))

    @pytest.mark.parametrize(
        "tenant", ["", "*", "Acme", "a/b", "acme\n", "a" * 65, "-a", "\uff41cme", 5, True, ["acme"], {}]
    )
    async def test_what_is_no_tenant(self, tenant: Any) -> None:
        """An empty tenant, all tenants, and whatever is no tenant's name are refused."""
        await refused(hs256(claims(tid=tenant)))
        await refused(hs256(claims(tenantId=tenant)))


class TestScopes:
    """What a token is for."""

    @pytest.mark.parametrize(
        "said",
        [{"scope": "claim enqueue"}, {"scp": ["claim", "enqueue"]}, {"scopes": ["claim", "enqueue"]},
         {"scp": "claim enqueue"}, {"scope": "openid  dibs:claim dibs:enqueue email"},
         {"scope": "claim", "scp": ["enqueue"]}],
    )  # fmt: skip
    async def test_where_scopes_stand(self, said: dict[str, Any]) -> None:
        """Scopes are taken from `scope`, `scp` and `scopes`, as text or list; others than ours are passed over."""
        principal = await by_secret().verify(hs256(claims(scope=None) | said))
        assert principal is not None
        assert principal.scopes == {Scope.CLAIM, Scope.ENQUEUE}

    @pytest.mark.parametrize("word", ["codeq:claim", "codeq:heartbeat", "codeq:abandon", "codeq:nack", "codeq:result"])
    async def test_scopes_of_codeq(self, word: str) -> None:
        """What codeQ has five scopes for is claim."""
        principal = await by_secret().verify(hs256(claims(scope=word)))
        assert principal is not None
        assert principal.scopes == {Scope.CLAIM}

    def test_every_word(self) -> None:
        """Each scope has its own name, and that with either prefix."""
        for scope in Scope:
            assert {SCOPE_OF[word] for word in (scope, f"dibs:{scope}", f"codeq:{scope}")} == {scope}
        assert SCOPE_OF["codeq:publish"] is Scope.ENQUEUE
        assert len(SCOPE_OF) == 3 * len(Scope) + 5

    @pytest.mark.parametrize(
        "scope", [None, "", "openid", "ADMIN", "admin\n", "claim,admin", ["claim admin"], [], "admin:dibs", "xadmin"]
    )
    async def test_no_scope(self, scope: Any) -> None:
        """A token without a scope of ours is refused, and told which there are."""
        assert "enqueue, claim, admin, operator" in await refused(hs256(claims(scope=scope)))

    @pytest.mark.parametrize("scope", [{"claim": True}, 5, True, [5], ["claim", None], [["claim"]]])
    async def test_scopes_of_odd_types(self, scope: Any) -> None:
        """A scope that is neither text nor a list of texts is refused."""
        for name in ("scope", "scp", "scopes"):
            assert f"$.{name}" in await refused(hs256(claims(**{name: scope})))

    async def test_commands(self) -> None:
        """A token may be limited to commands, by our claim or codeQ's; `*` is all, and none is a mistake."""
        for said in (
            {"commands": ["a", "b"]},
            {"eventTypes": ["b", "a"]},
            {"commands": ["a", "b"], "eventTypes": ["b", "a"]},
        ):
            principal = await by_secret().verify(hs256(claims(**said)))
            assert principal is not None
            assert principal.commands == frozenset({"a", "b"})
        for said in ({"commands": ["*"]}, {"eventTypes": ["*"]}, {}):
            assert await by_secret().verify(hs256(claims(**said))) == GOOD
        wrong: list[Any] = [[], "a", [5], ["a b"], [""], {"a": 1}, None]
        for bad in wrong:
            await refused(hs256(json.dumps(claims() | {"commands": bad}).encode()))
            await refused(hs256(json.dumps(claims() | {"eventTypes": bad}).encode()))
        assert "differ" in await refused(hs256(claims(commands=["a"], eventTypes=["b"])))


class TestSecrets:
    """What a secret may be."""

    @pytest.mark.parametrize("secret", [b"", b"secret", b"x" * 31])
    def test_short_secrets(self, secret: bytes) -> None:
        """A secret under 32 bytes is refused at the start."""
        with pytest.raises(SettingsError, match="32 or more"):
            SecretSource(secret)

    def test_keys_are_no_secrets(self) -> None:
        """A PEM file given as a secret is refused: its public half is known to all."""
        for key in (RSA.as_pem(), ED.as_pem(), RSA.as_pem(private=True)):
            with pytest.raises(SettingsError, match="another kind"):
                SecretSource(key)

    def test_an_issuer_and_an_audience_are_a_must(self) -> None:
        """No verifier without either."""
        with pytest.raises(SettingsError, match="name both"):
            by_secret(issuer="")
        with pytest.raises(SettingsError, match="name both"):
            by_secret(audience="")


class TestSeveralVerifiers:
    """Each token is judged by whoever knows its issuer."""

    async def test_two_issuers(self) -> None:
        """Two issuers with keys of their own: each signs for itself only."""
        other = b"another secret of more than 32 bytes"
        both = Authenticator([by_secret(), by_secret(other, issuer="b")], now_s=Clock())
        assert await both.principal_of(f"Bearer {hs256()}") == GOOD
        theirs = signed(OctKey.import_key(other), claims(iss="b"), alg="HS256")
        assert await both.principal_of(f"bearer  {theirs} ") == GOOD
        forged = signed(OctKey.import_key(other), claims(), alg="HS256")
        with pytest.raises(Unauthenticated, match="signature"):
            await both.principal_of(f"Bearer {forged}")
        await both.close()

    async def test_a_change_of_secrets(self) -> None:
        """Two secrets of one issuer, old and new, both hold; the new one need not come first."""
        new = b"a new secret, of more than 32 bytes!"
        both = Authenticator([by_secret(), by_secret(new)], now_s=Clock())
        for key in (OCT, OctKey.import_key(new)):
            assert await both.principal_of(f"Bearer {signed(key, claims(), alg='HS256')}") == GOOD

    async def test_nobodys_token(self) -> None:
        """What no verifier knows is refused."""
        with pytest.raises(Unauthenticated, match="not one that this server knows"):
            await Authenticator([by_secret()]).principal_of(f"Bearer {hs256(claims(iss='other'))}")

    async def test_a_token_is_remembered_no_longer_than_it_holds(self) -> None:
        """A token that was verified is not verified again for a minute, and never after its end."""
        clock = Clock()
        verifier = by_secret(now_s=clock)
        authenticator = Authenticator([verifier], now_s=clock)
        header = f"Bearer {hs256(claims(exp=NOW_S + 5))}"
        assert (await authenticator.principal_of(header)).tenant == "acme"
        clock.now_s = NOW_S + 34.9
        assert (await authenticator.principal_of(header)).tenant == "acme"
        clock.now_s = NOW_S + 35
        with pytest.raises(Unauthenticated, match="expired"):
            await authenticator.principal_of(header)


# ----------------------------------------------------------------------------------------------- anything at all


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(
    [*claims(), *TENANT_CLAIMS, "nbf", "iat", "scp", "scopes", "commands", "eventTypes", "alg", "kid", "typ", "crit"]
)
_FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def harmless(token: str, *verifiers: JwtVerifier) -> None:
    """A token is nobody's, refused or good; anything else is a fault."""
    for verifier in verifiers:
        try:
            principal = await verifier.verify(token)
        except Unauthenticated:
            continue
        assert principal is None or principal.tenant


@_FUZZ
@given(st.text() | st.lists(st.text() | st.binary().map(b64), min_size=3, max_size=3).map(".".join))
async def test_garbage(by_keys: JwtVerifier, garbage: str) -> None:
    """Whatever text comes as a token is refused, or nobody's."""
    await harmless(garbage, by_secret(), by_keys)


@_FUZZ
@given(st.dictionaries(_NAMES, _JSON, max_size=4), st.dictionaries(_NAMES, _JSON, max_size=2))
async def test_odd_claims_and_headers(by_keys: JwtVerifier, said: dict[str, Any], header: dict[str, Any]) -> None:
    """Whatever JSON a signed token has for its claims and headers, it is refused, nobody's, or good."""
    payload = json.dumps(claims() | said).encode()
    await harmless(hs256(payload, **{"sign_as": "HS256", **header}), by_secret())
    await harmless(signed(RSA, payload, **{"alg": "RS256", "sign_as": "RS256", **header}), by_keys)
