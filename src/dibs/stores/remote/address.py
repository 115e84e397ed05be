"""A server's URL: where it is, and the token to bring."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from msgspec import Struct

from dibs.errors import StoreRefused, UnknownScheme
from dibs.settings import mask

GIVE_UP_S = 15.0
"""How long a question is repeated that gets no answer."""
TOKEN_FILE_MAX_BYTES = 64 * 1024

_TOKEN = re.compile(r"[\x21-\x7e]+")


class Address(Struct, frozen=True):
    """Where a server is, and the token to bring."""

    base: str
    token: str | None
    token_file: str | None = None
    give_up_s: float = GIVE_UP_S
    ca_file: str | None = None

    @classmethod
    def of(cls, url: str) -> Address:
        """Reads ``http(s)://[TOKEN@]HOST[:PORT][/PREFIX][?token_file=FILE&give_up_s=15&ca_file=FILE]``."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UnknownScheme(f"{mask(url)!r} names no server: {error}") from None
        if not parts.hostname:
            raise UnknownScheme(f"{mask(url)!r} names no server: write http://TOKEN@HOST:PORT")
        if parts.password is not None:
            raise UnknownScheme("a server's URL has a token in front of the host, no user and password")
        token = unquote(parts.username) if parts.username else None
        if token is not None and not _TOKEN.fullmatch(token):
            raise UnknownScheme("the token in front of the host has characters that no token has")
        said = parse_qs(parts.query, keep_blank_values=True)
        token_file = said.pop("token_file", [None])[-1]
        if token is not None and token_file is not None:
            raise UnknownScheme("a token in front of the host, and a token_file: give one of them")
        give_up_s = _seconds(said.pop("give_up_s", [str(GIVE_UP_S)])[-1])
        ca_file = said.pop("ca_file", [None])[-1]
        if said or parts.fragment:
            raise UnknownScheme(
                f"{mask(url)!r}: a server's URL takes ?token_file=, give_up_s= and ca_file=, nothing else"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        base = f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"
        return cls(base, token, token_file, give_up_s, ca_file)

    def bearer(self) -> str | None:
        """Returns the token to bring: that of the file as it is now, if there is one."""
        if self.token_file is None:
            return self.token
        try:
            with Path(self.token_file).open("rb") as file:
                token = file.read(TOKEN_FILE_MAX_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StoreRefused(f"the token in {self.token_file} cannot be read: {error}") from None
        if not _TOKEN.fullmatch(token):
            raise StoreRefused(f"{self.token_file} holds no token, or more than one")
        return token

    def __repr__(self) -> str:
        return f"Address({self.base!r})"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise UnknownScheme(f"give_up_s={text!r}: give seconds, from 0 to 3600")
    return value
