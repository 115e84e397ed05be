"""What a server is told, by its file and by flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from dibs.errors import SettingsError
from dibs.server.config import is_loopback, read_config


def test_files_are_named_from_where_the_configuration_lies(tmp_path: Path) -> None:
    """Relative paths in the file start there; those of flags where the command is run."""
    for name in ("cert.pem", "key.pem", "tokens.toml"):
        (tmp_path / name).write_text("")
    (tmp_path / "server.toml").write_text(
        'tls_cert = "cert.pem"\ntls_key = "key.pem"\nevents_to = "events.jsonl"\n'
        '[[keys]]\nkind = "tokens"\npath = "tokens.toml"\n'
    )
    config = read_config(tmp_path / "server.toml", tokens="others.toml")
    assert (config.tls_cert, config.tls_key) == (str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    assert config.events_to == str(tmp_path / "events.jsonl")
    assert [one.path for one in config.keys] == [str(tmp_path / "tokens.toml"), "others.toml"]
    assert read_config(tmp_path / "server.toml", events_to="here.jsonl").events_to == "here.jsonl"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.com"])
def test_without_keys_only_this_machine(host: str) -> None:
    """Any other address is refused with an explanation; with keys it is not."""
    with pytest.raises(SettingsError, match="without keys everybody would be allowed everything"):
        read_config(None, host=host)
    assert not read_config(None, host=host, tokens="tokens.toml").development


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_this_machine(host: str) -> None:
    """By number or by name."""
    assert is_loopback(host)
    assert read_config(None, host=host).development


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    """One without the other is refused."""
    with pytest.raises(SettingsError, match="go together"):
        read_config(None, tls_cert=str(tmp_path / "cert.pem"))
