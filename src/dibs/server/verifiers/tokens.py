"""Static tokens: for set-ups without an issuer of JWTs. A file has their hashes, the bearers have the tokens.

::

    [[tokens]]
    name = "importer"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "acme"
    scopes = ["enqueue", "claim"]
    commands = ["thumbnail"]            # left out: all
    subject = "importer"                # left out: the name
    expires = 2030-01-31T08:00:00Z      # left out: never

A fast hash is enough, unlike for passwords: a token is 256 random bits, which nobody guesses, however fast.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from dibs.checks import check_command, check_label, check_tenant
from dibs.errors import InvalidInput, InvalidName, SettingsError, Unauthenticated
from dibs.server.auth import Principal, Scope
from dibs.server.verifiers.watched import WatchedFile

TOKEN_PREFIX = "dibs_"
"""Makes a token that leaked findable: by people, and by scanners of repositories."""
TOKEN_RANDOM_BYTES = 32
TOKENS_MAX_BYTES = 4 << 20

_TABLE = "[[tokens]]"
_HEAD = """\
# Tokens of a dibs server: their hashes, so that nobody can use what stands here. `dibs token new` adds one, and
# `dibs token revoke` removes it; a server that runs sees a change within a second or so.
"""


class StaticToken(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the file."""

    name: str
    """What an operator calls it, once in a file."""
    sha256: str
    tenant: str
    scopes: list[Scope]
    commands: list[str] | None = None
    subject: str | None = None
    """Who bears it, which is the name unless it says otherwise: two tokens of one bearer, while one replaces the
    other."""
    expires: datetime | None = None

    @property
    def principal(self) -> Principal:
        """Who brings it."""
        return Principal(
            tenant=self.tenant,
            subject=self.subject or self.name,
            scopes=frozenset(self.scopes),
            commands=None if self.commands is None else frozenset(self.commands),
            expires_s=None if self.expires is None else self.expires.timestamp(),
        )


class _File(Struct, forbid_unknown_fields=True):
    tokens: list[StaticToken] = []


class TokenVerifier:
    """Knows the tokens of a file. A removed one is refused within a second, where nobody remembers it."""

    def __init__(
        self,
        path: Path,
        *,
        now_s: Callable[[], float] = time.time,
        look_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = WatchedFile(path, _by_hash, max_bytes=TOKENS_MAX_BYTES, now_s=look_s)
        self._now_s = now_s

    async def verify(self, token: str) -> Principal | None:
        """Returns who brings it; None: it does not begin as these tokens do."""
        if not token.startswith(TOKEN_PREFIX):
            return None
        # Looked up by its hash: the time that takes tells about the hash, and nobody can make tokens towards one.
        found = self._file.value.get(hash_of(token))
        if found is None:
            raise Unauthenticated("the token is not known here: it was revoked, or is not copied in full")
        if found.expires_s is not None and found.expires_s <= self._now_s():
            raise Unauthenticated("the token has expired: ask for a new one")
        return found

    def look(self) -> None:
        """Sees what has changed, though nobody brings a token: what is revoked stays so if the file is broken later."""
        _ = self._file.value

    async def close(self) -> None:
        """Nothing is open."""


def new_token() -> str:
    """Returns a token that nobody else has."""
    random = secrets.token_bytes(TOKEN_RANDOM_BYTES)
    return TOKEN_PREFIX + base64.urlsafe_b64encode(random).decode().rstrip("=")


def hash_of(token: str) -> str:
    """Returns what the file has of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# ------------------------------------------------------------------------------------------------- the file


def read_tokens(data: bytes) -> list[StaticToken]:
    """Returns the entries of a file, or raises `ValueError` for the first that is wrong."""
    try:
        document = tomllib.loads(data.decode())
        tokens = msgspec.convert(document, _File).tokens
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    for token in tokens:
        _check(token)
    for what, values in (("name", [token.name for token in tokens]), ("sha256", [token.sha256 for token in tokens])):
        if len(set(values)) != len(values):
            raise ValueError(f"two tokens have the same {what}")
    return tokens


def _by_hash(data: bytes) -> dict[str, Principal]:
    return {token.sha256: token.principal for token in read_tokens(data)}


def _check(token: StaticToken) -> None:
    try:
        check_label("token", token.name)
        check_tenant(token.tenant)
        if token.subject is not None:
            check_label("subject", token.subject)
        for command in token.commands or ():
            check_command(command)
    except InvalidName as error:
        raise ValueError(f"the token {token.name!r}: {error}") from None
    if len(token.sha256) != 64 or not set(token.sha256) <= set("0123456789abcdef"):
        raise ValueError(f"the token {token.name!r}: its sha256 is not 64 hexadecimal digits in lower case")
    if not token.scopes:
        raise ValueError(f"the token {token.name!r} has no scopes: give it some of {', '.join(Scope)}")
    if token.commands is not None and not token.commands:
        raise ValueError(f"the token {token.name!r} has an empty list of commands: name some, or leave it out")
    if token.expires is not None and token.expires.tzinfo is None:
        raise ValueError(f"the token {token.name!r} expires in no time zone: write Z for UTC after the time")


def load_tokens(path: Path) -> list[StaticToken]:
    """Returns the entries of a file; `SettingsError` says what is wrong with it."""
    try:
        return read_tokens(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{path} cannot be used: {error}") from error


def add_token(path: Path, token: StaticToken) -> None:
    """Adds an entry to the file, which is made if there is none; what stands in it stays as it is written. Raises
    `InvalidInput` if the name is taken."""
    path = path.resolve()  # the file itself, where a link was named
    with _locked(path.parent):
        tokens = load_tokens(path) if path.exists() else []
        if any(known.name == token.name for known in tokens):
            raise InvalidInput(f"{path} has a token {token.name!r}: revoke that one, or give --name")
        text = path.read_text(encoding="utf-8") if path.exists() else _HEAD
        _replace(path, f"{text.rstrip()}\n\n{_written(token)}", [*tokens, token])


def remove_token(path: Path, name: str) -> None:
    """Takes an entry out of the file. Raises `InvalidInput` if there is none of this name."""
    path = path.resolve()  # the file itself, where a link was named
    with _locked(path.parent):
        tokens = load_tokens(path)
        if all(token.name != name for token in tokens):
            raise InvalidInput(f"{path} has no token {name!r}: `dibs token list` shows what there is")
        kept = [token for token in tokens if token.name != name]
        _replace(path, _without(path.read_text(encoding="utf-8"), name), kept)


def _written(token: StaticToken) -> str:
    # TOML's basic strings and lists of them are JSON's, where no character has to be escaped as a pair.
    lines = [_TABLE]
    for field, value in msgspec.structs.asdict(token).items():
        if isinstance(value, datetime):
            lines.append(f"{field} = {value.astimezone(UTC).replace(tzinfo=None).isoformat()}Z")
        elif value is not None:
            lines.append(f"{field} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _without(text: str, name: str) -> str:
    """Returns the text without the table of that name; everything else stays, comments too."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.strip().startswith(_TABLE):
            parts.append([])
        parts[-1].append(line)
    return "".join("".join(part) for part in parts if not _is_named(part, name))


def _is_named(part: Sequence[str], name: str) -> bool:
    if not part or not part[0].strip().startswith(_TABLE):
        return False
    try:
        tables = tomllib.loads("".join(part)).get("tokens")
    except tomllib.TOMLDecodeError:
        return False
    return isinstance(tables, list) and len(tables) == 1 and tables[0].get("name") == name


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One writer at a time, in whichever process. The directory is locked, since the file is replaced."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SettingsError(f"{directory} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, text: str, expected: Sequence[StaticToken]) -> None:
    """Puts the new text in the place of the file at once: a server sees the old one or the new one."""
    data = text.encode()
    try:
        if read_tokens(data) != list(expected):
            raise ValueError("it is written in a way that only people can edit")
    except ValueError as error:
        raise SettingsError(f"{path} cannot be changed by this command, edit it by hand: {error}") from error
    try:
        _write(path, data)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    file, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # which is 0600
    try:
        with os.fdopen(file, "wb") as stream:
            with contextlib.suppress(FileNotFoundError):
                before = path.stat()
                os.fchmod(stream.fileno(), before.st_mode & 0o777)
                with contextlib.suppress(PermissionError):
                    os.fchown(stream.fileno(), before.st_uid, before.st_gid)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
