"""What `dibs token` makes is what a server takes."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from joserfc.jwk import ECKey, OKPKey, RSAKey

from dibs.cli import run
from dibs.cli.errors import Exit
from dibs.server.auth import Principal, Scope
from dibs.server.verifiers.keys import KeyConfig, verifier_of
from tests.cli.test_commands import Shell

GRANT = ["--tenant", "acme", "--subject", "importer", "--scope", "enqueue", "--scope", "claim"]
JWT = ["token", "jwt", "--issuer", "me", "--audience", "dibs", *GRANT]


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Calls of the command line in an empty directory, with nothing set."""
    for name in [name for name in os.environ if name.startswith("DIBS_") or name in ("COLUMNS", "FORCE_COLOR")]:
        monkeypatch.delenv(name)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return Shell(capfd)


def principal(token: str, **table: Any) -> Principal:
    """Whom a server recognises by a token, which is given a table of keys."""
    named = {} if table["kind"] == "tokens" else {"issuer": "me", "audience": "dibs"}
    found = asyncio.run(verifier_of(msgspec.convert(named | table, KeyConfig)).verify(token.strip()))
    assert found is not None
    return found


class TestFile:
    """new, list, revoke."""

    def test_a_new_token_is_known(self, shell: Shell) -> None:
        """The token is all that stdout has; its hash is in the file, and the server knows it."""
        token = shell("token", "new", "--file", "tokens.toml", *GRANT, "--command", "thumbnail", "--expires", "90d")
        found = principal(token, kind="tokens", path="tokens.toml")
        assert (found.tenant, found.subject, found.commands) == ("acme", "importer", frozenset({"thumbnail"}))
        assert found.scopes == {Scope.ENQUEUE, Scope.CLAIM}
        assert found.expires_s is not None
        assert "shown this once" in shell.err
        assert token.strip() not in shell.err + Path("tokens.toml").read_text()
        assert stat.S_IMODE(Path("tokens.toml").stat().st_mode) == 0o600

    def test_list(self, shell: Shell) -> None:
        """Everything but the tokens is shown, also of those that have expired."""
        shell("token", "new", "-f", "tokens.toml", *GRANT)
        made = shell.json("token", "new", "-f", "tokens.toml", *GRANT, "--name", "next", "-c", "b", "--expires", "1d")
        assert made.pop("token").startswith("dibs_")
        [first, second] = shell.json("token", "list", "-f", "tokens.toml")["tokens"]
        assert second == made
        assert first == {
            "name": "importer", "tenant": "acme", "subject": "importer", "scopes": ["enqueue", "claim"],
            "commands": None, "expires_at": None,
        }  # fmt: skip
        assert (second["name"], second["subject"], second["commands"]) == ("next", "importer", ["b"])
        past = Path("tokens.toml").read_text().replace(second["expires_at"][:10], "2020-01-01")
        Path("tokens.toml").write_text(past)
        shown = shell("token", "list", "-f", "tokens.toml")
        assert "never" in shown
        assert "expired" in shown

    def test_an_empty_list(self, shell: Shell) -> None:
        """A file without tokens has none to show."""
        Path("tokens.toml").write_text("")
        assert shell("token", "list", "-f", "tokens.toml") == ""
        assert "no tokens" in shell.err

    def test_revoke(self, shell: Shell) -> None:
        """What is revoked is gone; if one name is wrong, nothing is."""
        for name in ("a", "b", "c"):
            shell("token", "new", "-f", "tokens.toml", *GRANT, "--name", name)
        shell("token", "revoke", "a", "d", "-f", "tokens.toml", code=Exit.USAGE)
        assert "'d'" in shell.err
        assert shell("token", "revoke", "a", "c", "a", "-f", "tokens.toml") == "2 tokens revoked.\n"
        assert [token["name"] for token in tomllib.loads(Path("tokens.toml").read_text())["tokens"]] == ["b"]
        assert shell.json("token", "revoke", "b", "-f", "tokens.toml") == {"revoked": ["b"]}

    @pytest.mark.parametrize(
        ("args", "told"),
        [
            (["--tenant", "Acme"], "tenant"),
            (["--tenant", "*"], "one tenant"),
            (["--subject", "a\nb"], "subject"),
            (["--scope", "root"], "root"),
            (["--command", "a b"], "command"),
            (["--expires", "0s"], "--expires"),
            (["--expires", "9999d"], "--expires"),
            (["--file", "none/tokens.toml"], "No such file"),
        ],
    )
    def test_what_is_refused(self, args: list[str], told: str, shell: Shell) -> None:
        """What a server would not take is not written."""
        shell("token", "new", "--file", "tokens.toml", *GRANT, *args, code=Exit.USAGE)
        assert told in shell.err
        assert not Path("tokens.toml").exists()

    def test_a_name_that_is_taken(self, shell: Shell) -> None:
        """A second token of one subject needs a name of its own, and the message says how."""
        shell("token", "new", "-f", "tokens.toml", *GRANT)
        shell("token", "new", "-f", "tokens.toml", *GRANT, code=Exit.USAGE)
        assert "--name" in shell.err


class TestJwt:
    """secret, key, jwks, jwt."""

    def test_by_a_secret(self, shell: Shell) -> None:
        """A token by a secret that was made here is good where the secret is."""
        Path("secret").write_text(shell("token", "secret"))
        token = shell(*JWT, "--secret-file", "secret", "-c", "a", "-c", "b", "--expires", "5m")
        found = principal(token, kind="secret", path="secret")
        assert (found.tenant, found.subject) == ("acme", "importer")
        assert (found.scopes, found.commands) == (frozenset({Scope.ENQUEUE, Scope.CLAIM}), frozenset({"a", "b"}))

    def test_secrets_differ(self, shell: Shell) -> None:
        """Each call makes another."""
        assert shell("token", "secret") != shell.json("token", "secret")["secret"]

    @pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
    def test_by_a_key(self, algorithm: str, shell: Shell) -> None:
        """A key made here signs; its public half, and no more, is what the server needs."""
        Path("private.json").write_text(shell("token", "key", "--algorithm", algorithm))
        Path("jwks.json").write_text(shell("token", "jwks", "private.json"))
        [public] = json.loads(Path("jwks.json").read_text())["keys"]
        assert not {"d", "p", "q"} & public.keys()
        token = shell(*JWT, "--key-file", "private.json")
        assert principal(token, kind="jwks-file", path="jwks.json").tenant == "acme"

    @pytest.mark.parametrize("kind", [RSAKey, ECKey, OKPKey])
    def test_by_a_pem_file(self, kind: type[RSAKey | ECKey | OKPKey], shell: Shell) -> None:
        """Keys of other tools work too, and several stand side by side."""
        key = kind.generate_key()
        Path("key.pem").write_bytes(key.as_pem(private=True))
        Path("public.pem").write_bytes(key.as_pem())
        Path("other.json").write_text(shell("token", "key"))
        Path("jwks.json").write_text(shell("token", "jwks", "other.json", "public.pem"))
        assert principal(shell(*JWT, "--key-file", "key.pem"), kind="jwks-file", path="jwks.json").tenant == "acme"
        shell(*JWT, "--key-file", "public.pem", code=Exit.USAGE)
        assert "private" in shell.err

    def test_as_json(self, shell: Shell) -> None:
        """With --json one sees what was signed."""
        Path("secret").write_text(shell("token", "secret"))
        made = shell.json(*JWT, "--secret-file", "secret")
        assert made["claims"]["exp"] - made["claims"]["iat"] in (3599, 3600, 3601)
        assert principal(made["token"], kind="secret", path="secret").tenant == made["claims"]["tid"] == "acme"

    @pytest.mark.parametrize(
        ("args", "told"),
        [
            ([], "one of the two"),
            (["--secret-file", "short", "--key-file", "short"], "one of the two"),
            (["--secret-file", "short"], "32 or more"),
            (["--secret-file", "none"], "No such file"),
            (["--key-file", "none"], "No such file"),
            (["--key-file", "short"], "no key that can be used"),
            (["--key-file", "small.pem"], "no key that can be used"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
    def test_what_is_refused(self, args: list[str], told: str, shell: Shell) -> None:
        """What a server would not take is not signed with."""
        Path("short").write_text("secret")
        Path("small.pem").write_bytes(RSAKey.generate_key(1024).as_pem(private=True))
        shell(*JWT, *args, code=Exit.USAGE)
        assert told in shell.err

    def test_without_the_extra(
        self, monkeypatch: pytest.MonkeyPatch, shell: Shell, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """JWTs need an extra, and the message names it; static tokens do not."""
        monkeypatch.setitem(__import__("sys").modules, "joserfc", None)
        assert run(["token", "key"]) == Exit.STORE
        assert "dibs[server]" in capfd.readouterr().err
        shell("token", "new", "-f", "tokens.toml", *GRANT)
