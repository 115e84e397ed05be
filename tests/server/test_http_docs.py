from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from dibs.server.app import open_service
from dibs.server.auth import NEEDS
from dibs.server.config import ServerConfig
from dibs.server.gate import Gate
from dibs.server.http.admin import admin_routes
from dibs.server.http.openapi import document
from dibs.server.http.routes import HttpOptions, task_routes
from dibs.server.http.web import JSON, Route
from dibs.settings import Settings
from dibs.stores import open_local
from tests.server.http import Api


@pytest.fixture
async def routes() -> list[Route]:
    """The table."""
    async with await open_local("memory:") as store:
        gate = Gate(store)
        return [*task_routes(gate, HttpOptions()), *admin_routes(gate)]


async def test_every_route_is_documented(routes: list[Route]) -> None:
    """With a summary, what it takes and gives, who may call it, and how it refuses."""
    known = document(routes)
    for route in routes:
        operation = known["paths"][route.path][route.method.lower()]
        assert operation["summary"]
        assert operation["description"]
        assert operation["security"] == [{"bearer": []}]
        assert set(operation["x-scopes"]) >= set(NEEDS[route.verb or ""])
        assert {int(status) for status in operation["responses"]} >= {*route.gives, *route.fails, 401, 403, 429, 503}
        assert ("requestBody" in operation) == (route.takes is not None)
    ids = [one["operationId"] for methods in known["paths"].values() for one in methods.values()]
    assert len(set(ids)) == len(ids) == len(routes)


async def test_the_whole_server_is_documented(tmp_path: Path) -> None:
    """Everything that speaks JSON; each with a good answer, and none twice."""
    service = await open_service(ServerConfig(), Settings(url=str(tmp_path / "store")))
    try:
        known = document(service.web.routes)
        spoken = [route for route in service.web.routes if route.content_type == JSON]
        operations = [one for methods in known["paths"].values() for one in methods.values()]
        assert len(operations) == len(spoken)
        assert all(any(status.startswith("2") for status in one["responses"]) for one in operations)
    finally:
        await service.stop()


async def test_every_reference_leads_somewhere(routes: list[Route]) -> None:
    """And no schema is there for nothing."""
    known = document(routes)
    text = msgspec.json.encode(known).decode()
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named == known["components"]["schemas"].keys()


async def test_every_example_is_one(routes: list[Route]) -> None:
    """It can be read as what the route takes."""
    for route in routes:
        if route.takes is not None:
            assert route.example is not None, route.path
            msgspec.json.decode(msgspec.json.encode(route.example), type=route.takes)


async def test_codeq_has_every_route(routes: list[Route]) -> None:
    """What there is under /v1, there is under /v1/codeq."""
    own = {(one.method, one.path.removeprefix("/v1")) for one in routes if not one.path.startswith("/v1/codeq")}
    codeq = {(one.method, one.path.removeprefix("/v1/codeq")) for one in routes if one.path.startswith("/v1/codeq")}
    assert own == codeq


async def test_limits_are_in_the_document(api: Api) -> None:
    """A client can know them beforehand."""
    known = (await api.get("/openapi.json")).body
    task = known["components"]["schemas"]["CreateTask"]
    assert task["required"] == ["command"]
    assert task["additionalProperties"] is False
    priority = task["properties"]["priority"]["anyOf"][0]
    assert (priority["minimum"], priority["maximum"]) == (0, 9)
    batch = known["components"]["schemas"]["CreateTasks"]["properties"]["tasks"]
    assert (batch["minItems"], batch["maxItems"]) == (1, 1000)
    assert batch["items"] == {"$ref": "#/components/schemas/CreateTask"}


class Links(HTMLParser):
    """What a page loads, links to and names."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects."""
        has = dict(attrs)
        self.scripts += tag == "script"
        if has.get("id"):
            self.names.append(str(has["id"]))
        if tag == "a":
            self.links.append(str(has["href"]))
        elif has.get("src") or has.get("href"):
            self.loads.append(tag)
        assert "style" not in has
        assert not any(name.startswith("on") for name in has)


async def test_the_page_needs_nothing_from_elsewhere(api: Api) -> None:
    """No script, nothing loaded, a policy that would not let it, and every link leads somewhere."""
    said = await api.get("/docs")
    text = said.body.decode()
    assert (said.status, said.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = Links()
    page.feed(text)
    assert (page.loads, page.scripts) == ([], 0)
    assert len(set(page.names)) == len(page.names)
    assert {link for link in page.links if link != "openapi.json"} <= {f"#{name}" for name in page.names}
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in said.headers["content-security-policy"]
    assert said.headers["content-security-policy"].startswith("default-src 'none';")


async def test_the_page_shows_every_route(api: Api) -> None:
    """With a line to try it."""
    known = (await api.get("/openapi.json")).body
    text = (await api.get("/docs")).body.decode()
    for path, methods in known["paths"].items():
        for method, operation in methods.items():
            assert f'id="{operation["operationId"]}"' in text
            assert f"{method.upper()}</code><code>{path}</code>" in text
    assert text.count("curl ") == sum(len(methods) for methods in known["paths"].values())
