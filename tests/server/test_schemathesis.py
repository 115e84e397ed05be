"""The server keeps to its document: requests made from it, good and bad, get answers that it foresees."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dibs.server.admin import admin_routes
from dibs.server.gate import Gate
from dibs.server.http import HttpOptions, task_routes
from dibs.server.openapi import document
from dibs.stores import open_local
from tests.server.serving import served

# The document is of the table alone: nothing is called while it is made.
_NO_GATE = cast("Gate", None)
_ROUTES = [*task_routes(_NO_GATE, HttpOptions()), *admin_routes(_NO_GATE)]
SCHEMA = schemathesis.openapi.from_dict(document(_ROUTES))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with a few tasks in it, in a thread of its own."""
    ready, found, stop = threading.Event(), [], asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with await open_local("memory:") as store, served(store) as address:
            found.append(address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def hurried(part: Any) -> None:
    """Nobody waits here."""
    if isinstance(part, dict) and isinstance(part.get("waitSeconds"), int | float) and part["waitSeconds"] > 0:
        part["waitSeconds"] = 0.001


@SCHEMA.parametrize()
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_answers_are_those_of_the_document(case: schemathesis.Case, url: str) -> None:
    """No status, type or shape that it does not name, and no failure of the server."""
    hurried(case.body)
    hurried(case.query)
    case.call_and_validate(base_url=url, checks=CHECKS)
