"""The page about the HTTP API shows every route, and what it shows works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from dibs.server.gate import Gate
from dibs.server.http.admin import admin_routes
from dibs.server.http.routes import HttpOptions, task_routes
from dibs.server.http.wire import ClaimTasks, CreateTask
from tests.docs.pages import ROOT, blocks
from tests.docs.ports import PORT, at_a_free_port
from tests.docs.transcript import ID, Transcript, commands

PAGE = ROOT / "docs" / "http-api.md"


def test_the_page_is_as_it_says(tmp_path: Path) -> None:
    """Every call, against a server that the page starts, prints what is shown; only the port is another."""
    with Transcript(tmp_path) as transcript:
        transcript.do(at_a_free_port(blocks(PAGE)))


def test_every_route_has_an_example() -> None:
    """A call by curl with its method and its path."""
    no_gate = cast("Gate", None)  # only asked for what there is
    routes = [*task_routes(no_gate, HttpOptions()), *admin_routes(no_gate)]
    called = set()
    for block in blocks(PAGE):
        for command in commands(block.code) if block.language == "console" else ():
            if not command.line.startswith("curl"):
                continue
            method = re.search(r"-X (\w+)", command.line)
            path = re.search(rf"localhost:{PORT}([^\s'?]*)", command.line)
            assert path, command.line
            called.add((method[1] if method else "POST" if "--json" in command.line else "GET", path[1]))
    for route in routes:
        if route.tag != "codeQ":
            pattern = re.sub(r"\{id\}", f"(?:{ID})", route.path).replace("{command}", r"\w+")
            assert any(method == route.method and re.fullmatch(pattern, path) for method, path in called), route.path


def test_every_field_of_a_create_and_a_claim_is_told() -> None:
    """In the table below it, and no other."""
    text = PAGE.read_text()
    for heading, kind in (("## Enqueue", CreateTask), ("## Claim", ClaimTasks)):
        section = text.partition(heading)[2].partition("\n## ")[0]
        table = " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
        assert set(re.findall(r"`(\w+)`", table)) == set(kind.__struct_encode_fields__)
