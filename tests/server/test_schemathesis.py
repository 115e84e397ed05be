"""The server keeps to its document: requests made from it, good and bad, get answers that it foresees."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import aiohttp
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dibs.server.gate import Gate
from dibs.server.http.admin import admin_routes
from dibs.server.http.openapi import document
from dibs.server.http.routes import HttpOptions, task_routes
from dibs.stores import open_local
from tests.server.http import Api
from tests.server.serving import served

# The document is of the table alone: nothing is called while it is made.
_NO_GATE = cast("Gate", None)
_ROUTES = [*task_routes(_NO_GATE, HttpOptions()), *admin_routes(_NO_GATE)]
SCHEMA = schemathesis.openapi.from_dict(document(_ROUTES))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


SETTINGS: Any = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


class Server(NamedTuple):
    """Where it is, and tasks that it has: ready, delayed, held, ended and dead."""

    url: str
    ids: list[str]
    tokens: dict[str, str]


async def filled(url: str) -> Server:
    """Puts some of everything into a server."""
    async with aiohttp.ClientSession() as session:
        api = Api(session, url)
        for _ in range(4):
            await api.create()
        held = [await api.claim() for _ in range(4)]
        for task, status in zip(held, ("COMPLETED", "FAILED"), strict=False):
            error = {"error": "no"} if status == "FAILED" else {}
            done = {"leaseToken": task["leaseToken"], "status": status, **error}
            assert (await api.post(f"/v1/tasks/{task['id']}/result", done)).status == 200
        waiting = [await api.create(), await api.create(delaySeconds=3600)]
        tokens = {task["id"]: task["leaseToken"] for task in held}
        return Server(url, [task["id"] for task in (*held, *waiting)], tokens)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One in a thread of its own: who calls it here waits for its answers."""
    ready, found, stop = threading.Event(), [], asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with await open_local("memory:") as store, served(store) as url:
            found.append(await filled(url))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def at_home(case: schemathesis.Case[Any], server: Server) -> None:
    """Nobody waits here, and every other id, token and command is a real one, so that not all is unknown."""
    body: Any = case.body
    if isinstance(body, dict) and isinstance(body.get("waitSeconds"), int | float):
        body["waitSeconds"] = min(0.001, body["waitSeconds"])
    if str(case.query.get("waitSeconds", "")).replace(".", "").isdigit():
        case.query["waitSeconds"] = "0.001"
    if "id" in case.path_parameters and case.path_parameters["id"][-1:] in "02468ace":
        case.path_parameters["id"] = server.ids[ord(case.path_parameters["id"][0]) % len(server.ids)]
        if isinstance(body, dict) and "leaseToken" in body:
            body["leaseToken"] = server.tokens.get(case.path_parameters["id"], "00" * 16)
    if "command" in case.path_parameters and len(case.path_parameters["command"]) % 2:
        case.path_parameters["command"] = "job"


def check(case: schemathesis.Case[Any], server: Server) -> None:
    """Calls the server, and compares with the document."""
    at_home(case, server)
    case.call_and_validate(base_url=server.url, checks=CHECKS)


@SCHEMA.include(path_regex="^/v1/(?!codeq)").parametrize()
@settings(max_examples=10, **SETTINGS)
def test_the_answers_are_those_of_the_document(case: schemathesis.Case[Any], server: Server) -> None:
    """No status, type or shape that it does not name, and no failure of the server."""
    check(case, server)


@SCHEMA.include(path_regex="^/v1/codeq").parametrize()
@settings(max_examples=4, **SETTINGS)
def test_so_are_those_for_codeqs_clients(case: schemathesis.Case[Any], server: Server) -> None:
    """The handlers are the same: a few for each."""
    check(case, server)
