"""Static tokens: a file of hashes, read while a server runs, written by several at once."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dibs.errors import InvalidInput, SettingsError, Unauthenticated
from dibs.server.auth import Authenticator, Principal, Scope
from dibs.server.verifiers.tokens import (
    StaticToken,
    TokenVerifier,
    add_token,
    hash_of,
    load_tokens,
    new_token,
    read_tokens,
    remove_token,
)
from dibs.server.verifiers.watched import LOOK_EVERY_S
from tests.server.issuer import NOW_S, Clock, hs256

TOKEN = "dibs_0Y1vYf3pC8yO0mQm5yqk8t0wHc1rQbq0k3mZy2h9b7E"


def entry(name: str = "importer", token: str = TOKEN, **others: Any) -> StaticToken:
    """An entry of the file."""
    return StaticToken(**{"name": name, "sha256": hash_of(token), "tenant": "acme", "scopes": [Scope.CLAIM]} | others)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with one token."""
    add_token(tmp_path / "tokens.toml", entry())
    return tmp_path / "tokens.toml"


class TestVerifying:
    """Who brings a token."""

    async def test_a_known_token(self, path: Path) -> None:
        """A token of the file says who brings it."""
        assert await TokenVerifier(path).verify(TOKEN) == Principal("acme", "importer", frozenset({Scope.CLAIM}))

    async def test_everything_that_an_entry_has(self, tmp_path: Path) -> None:
        """Subject, commands and expiry are the principal's."""
        path = tmp_path / "tokens.toml"
        at = datetime.fromtimestamp(NOW_S, UTC)
        add_token(path, entry("a", scopes=[*Scope], commands=["x", "y"], subject="ann", expires=at))
        clock = Clock(NOW_S - 1)
        verifier = TokenVerifier(path, now_s=clock)
        expected = Principal("acme", "ann", frozenset(Scope), frozenset({"x", "y"}), NOW_S)
        assert await verifier.verify(TOKEN) == expected
        clock.now_s = NOW_S
        with pytest.raises(Unauthenticated, match="expired"):
            await verifier.verify(TOKEN)

    async def test_an_unknown_token(self, path: Path) -> None:
        """A token that begins like ours and is not in the file is refused; nothing of it is repeated."""
        for token in (new_token(), TOKEN[:-1], TOKEN + "A", TOKEN.swapcase().replace("DIBS", "dibs", 1), "dibs_ "):
            with pytest.raises(Unauthenticated, match="not known here") as raised:
                await TokenVerifier(path).verify(token)
            assert token[5:] == " " or token[5:] not in str(raised.value)

    async def test_the_hash_is_no_token(self, path: Path) -> None:
        """Who has read the file has no token."""
        assert await TokenVerifier(path).verify(hash_of(TOKEN)) is None
        with pytest.raises(Unauthenticated, match="not known here"):
            await TokenVerifier(path).verify(f"dibs_{hash_of(TOKEN)}")

    async def test_other_tokens_are_not_its_business(self, path: Path) -> None:
        """What does not begin like ours may be somebody else's."""
        for token in ("", "x", hs256(), "DIBS_x"):
            assert await TokenVerifier(path).verify(token) is None

    async def test_two_files(self, path: Path, tmp_path: Path) -> None:
        """A token of the second file is known, though the first refuses it."""
        other = new_token()
        add_token(tmp_path / "others.toml", entry("other", other, tenant="other"))
        both = Authenticator([TokenVerifier(path), TokenVerifier(tmp_path / "others.toml")])
        assert (await both.principal_of(f"Bearer {TOKEN}")).tenant == "acme"
        assert (await both.principal_of(f"Bearer {other}")).tenant == "other"

    def test_tokens_differ(self) -> None:
        """Tokens are random, of one length, and begin so that they are recognised."""
        made = {new_token() for _ in range(1000)}
        assert len(made) == 1000
        assert {len(token) for token in made} == {5 + 43}
        assert all(token.startswith("dibs_") for token in made)

    @given(st.text())
    async def test_garbage(self, garbage: str) -> None:
        """Whatever text comes is nobody's, or refused."""
        verifier = TokenVerifier(_SHARED)
        for token in (garbage, f"dibs_{garbage}"):
            try:
                assert await verifier.verify(token) is None
            except Unauthenticated:
                continue


@pytest.fixture(autouse=True, scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _SHARED  # noqa: PLW0603 hypothesis asks for a file that outlives its examples
    _SHARED = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    add_token(_SHARED, entry())


_SHARED = Path()


def _broken(path: Path) -> None:
    path.write_text("[[tokens]")


class TestWatching:
    """A file that changes under a server."""

    async def test_a_revoked_token(self, path: Path) -> None:
        """A token that is taken out is refused from the next look on, one that is put in is known."""
        look = Clock()
        verifier = TokenVerifier(path, look_s=look)
        other = new_token()
        add_token(path, entry("other", other))
        remove_token(path, "importer")
        look.now_s += LOOK_EVERY_S
        assert await verifier.verify(other)
        with pytest.raises(Unauthenticated, match="revoked"):
            await verifier.verify(TOKEN)

    async def test_a_revoked_token_is_remembered_for_a_minute_at_most(self, path: Path) -> None:
        """An authenticator that has verified a token does so again after a minute."""
        clock = Clock()
        authenticator = Authenticator([TokenVerifier(path, now_s=clock, look_s=clock)], now_s=clock)
        assert (await authenticator.principal_of(f"Bearer {TOKEN}")).subject == "importer"
        remove_token(path, "importer")
        clock.now_s += 59.9
        assert (await authenticator.principal_of(f"Bearer {TOKEN}")).subject == "importer"
        clock.now_s += 0.1
        with pytest.raises(Unauthenticated, match="revoked"):
            await authenticator.principal_of(f"Bearer {TOKEN}")

    async def test_a_revoked_token_stays_revoked(self, path: Path) -> None:
        """Also if nobody brought a token between the change and a later one that cannot be read: the server looks."""
        look = Clock()
        verifier = TokenVerifier(path, look_s=look)
        remove_token(path, "importer")
        look.now_s += LOOK_EVERY_S
        verifier.look()
        _broken(path)
        for _ in range(2):
            look.now_s += LOOK_EVERY_S
            with pytest.raises(Unauthenticated, match="revoked"):
                await verifier.verify(TOKEN)

    @pytest.mark.parametrize("spoil", [_broken, lambda path: path.unlink()])
    async def test_a_broken_file(
        self, path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A file that cannot be read any more changes nothing, and the log is loud."""
        look = Clock()
        verifier = TokenVerifier(path, look_s=look)
        spoil(path)
        look.now_s += LOOK_EVERY_S
        assert await verifier.verify(TOKEN)
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert str(path) in caplog.text

    def test_a_file_that_is_missing_from_the_start(self, tmp_path: Path) -> None:
        """A server does not start without the file that it is told to read."""
        with pytest.raises(SettingsError, match="No such file"):
            TokenVerifier(tmp_path / "tokens.toml")


class TestReading:
    """What a file may say."""

    GOOD = f'[[tokens]]\nname = "a"\nsha256 = "{hash_of(TOKEN)}"\ntenant = "acme"\nscopes = ["claim"]\n'

    def test_the_smallest(self) -> None:
        """Name, hash, tenant and scopes are enough; an empty file has no tokens."""
        [found] = read_tokens(self.GOOD.encode())
        assert found.principal == Principal("acme", "a", frozenset({Scope.CLAIM}))
        assert read_tokens(b"") == []

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"claim"', '"clam"'),
            ('["claim"]', "[]"),
            ('["claim"]', '"claim"'),
            ('"acme"', '"Acme"'),
            ('"acme"', '"*"'),
            ('"acme"', "5"),
            ('tenant = "acme"\n', ""),
            ('"a"', '""'),
            ('"a"', '"a\\n"'),
            ("scopes", "scope"),
            ("[[tokens]]", "[[token]]"),
            ('["claim"]', '["claim"]\ncommands = []'),
            ('["claim"]', '["claim"]\ncommands = ["*"]'),
            ('["claim"]', '["claim"]\nexpires = 2030-01-01T00:00:00'),
            ('["claim"]', '["claim"]\nexpires = "soon"'),
            ('["claim"]', '["claim"]\nsubject = ""'),
            (hash_of(TOKEN), TOKEN),
            (hash_of(TOKEN), hash_of(TOKEN).upper()),
            (hash_of(TOKEN), hash_of(TOKEN)[1:]),
        ],
    )
    def test_what_is_wrong(self, old: str, new: str) -> None:
        """A slip makes the whole file wrong, so that it is noticed: no token means something else than it says."""
        assert old in self.GOOD
        with pytest.raises(ValueError, match=r".") as raised:
            read_tokens(self.GOOD.replace(old, new).encode())
        assert TOKEN not in str(raised.value)

    def test_twice(self) -> None:
        """Two entries with one name, or with one hash, are refused."""
        with pytest.raises(ValueError, match="same name"):
            read_tokens((self.GOOD + self.GOOD).encode())
        with pytest.raises(ValueError, match="same sha256"):
            read_tokens((self.GOOD + self.GOOD.replace('"a"', '"b"')).encode())

    @given(st.binary() | st.text().map(str.encode))
    def test_any_bytes(self, data: bytes) -> None:
        """Whatever a file holds, it is read or refused."""
        try:
            read_tokens(data)
        except ValueError:
            return


class TestWriting:
    """Changes to the file."""

    def test_a_new_file_is_private(self, path: Path) -> None:
        """The file that is made belongs to its owner alone, and has no token in it."""
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert TOKEN not in path.read_text()
        assert [found.name for found in path.parent.iterdir()] == ["tokens.toml"]

    def test_modes_and_links_are_kept(self, path: Path) -> None:
        """A file that a group may read stays so, and a link stays a link."""
        path.chmod(0o640)
        link = path.with_name("link.toml")
        link.symlink_to(path)
        add_token(link, entry("other", new_token()))
        assert link.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert len(load_tokens(path)) == 2

    def test_comments_stay(self, path: Path) -> None:
        """What people wrote into the file stays when tokens come and go."""
        path.write_text(f"# ours\n{path.read_text()}# until the move\n")
        add_token(path, entry("b", new_token()))
        add_token(path, entry("c", new_token(), subject='quo"te\\ é', expires=datetime.now(UTC) + timedelta(days=1)))
        remove_token(path, "b")
        assert [found.name for found in load_tokens(path)] == ["importer", "c"]
        assert load_tokens(path)[1].subject == 'quo"te\\ é'
        assert path.read_text().startswith("# ours\n")
        assert "# until the move\n" in path.read_text()

    def test_names(self, path: Path) -> None:
        """A name is taken once, and only one that is there can be removed; otherwise nothing changes."""
        before = path.read_bytes()
        with pytest.raises(InvalidInput, match="--name"):
            add_token(path, entry(token=new_token()))
        with pytest.raises(InvalidInput, match="no token"):
            remove_token(path, "importe")
        assert path.read_bytes() == before

    def test_a_file_that_only_people_can_edit(self, path: Path) -> None:
        """Tokens written as one list are valid, and left alone rather than spoilt."""
        text = f'tokens = [{{name = "a", sha256 = "{hash_of(TOKEN)}", tenant = "acme", scopes = ["claim"]}}]\n'
        path.write_text(text)
        with pytest.raises(SettingsError, match="by hand"):
            add_token(path, entry("b", new_token()))
        with pytest.raises(SettingsError, match="by hand"):
            remove_token(path, "a")
        assert path.read_text() == text

    def test_a_broken_file_is_not_written_to(self, path: Path) -> None:
        """Nothing is added to a file that cannot be read."""
        path.write_text("[[tokens]")
        with pytest.raises(SettingsError, match="cannot be used"):
            add_token(path, entry())
        assert path.read_text() == "[[tokens]"

    def test_a_directory_that_is_missing(self, tmp_path: Path) -> None:
        """A file in no directory is refused with a reason."""
        with pytest.raises(SettingsError, match="No such file"):
            add_token(tmp_path / "none" / "tokens.toml", entry())

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_directory_that_cannot_be_written(self, path: Path) -> None:
        """A change that cannot be written is refused with a reason."""
        path.parent.chmod(0o500)
        try:
            with pytest.raises(SettingsError, match="cannot be written"):
                add_token(path, entry("b", new_token()))
        finally:
            path.parent.chmod(0o700)

    async def test_several_at_once(self, path: Path) -> None:
        """Processes that add tokens at the same time all have theirs in the file."""
        program = """if True:
            import sys
            from pathlib import Path
            from dibs.server.auth import Scope
            from dibs.server.verifiers.tokens import StaticToken, add_token, hash_of, new_token
            for number in range(10):
                token = StaticToken(f"{sys.argv[2]}-{number}", hash_of(new_token()), "acme", [Scope.CLAIM])
                add_token(Path(sys.argv[1]), token)
        """
        args = [[sys.executable, "-c", program, str(path), str(number)] for number in range(3)]
        done = await asyncio.gather(*(asyncio.to_thread(subprocess.run, each, check=True, timeout=50) for each in args))
        assert [each.returncode for each in done] == [0, 0, 0]
        assert len(load_tokens(path)) == 31
