"""The page about the server is as it says, and its settings are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

from dibs.server.config import ServerConfig
from dibs.server.limits import read_limits
from tests.docs.pages import ROOT, blocks
from tests.docs.ports import at_a_free_port
from tests.docs.transcript import Transcript

PAGE = ROOT / "docs" / "server.md"


def test_the_page_is_as_it_says(tmp_path: Path) -> None:
    """A server starts, and the command line uses it."""
    shown = [block for block in blocks(PAGE) if "not run here" not in block.code and block.language == "console"]
    with Transcript(tmp_path) as transcript:
        transcript.do(at_a_free_port(shown))


def test_every_setting_is_in_the_table() -> None:
    """With the default that it has, in the order of the code."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (?:`(.*?)`)? *\|", PAGE.read_text(), re.MULTILINE)
    told = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert told.keys() == {*ServerConfig.__struct_fields__}
    for field in msgspec.structs.fields(ServerConfig):
        if isinstance(field.default, str | int | float):
            text = str(field.default).lower().removesuffix(".0")
            assert told[field.name] == text, field.name


def test_the_file_is_one_that_a_server_takes() -> None:
    """The TOML of the page reads as settings, keys and limits."""
    [block] = [block for block in blocks(PAGE) if block.language == "toml"]
    config = msgspec.convert(tomllib.loads(block.code), ServerConfig)
    config.check()
    assert read_limits(config.limits).default.enqueue_per_s == 2_000
