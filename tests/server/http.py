"""A client of the HTTP API, for tests: every call gives the status and the decoded body."""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

import aiohttp


class Said(NamedTuple):
    """An answer."""

    status: int
    body: Any
    headers: dict[str, str]


class Api:
    """Calls one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str | None = None) -> None:
        self.session = session
        self.url = url
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def get(self, path: str, **options: Any) -> Said:
        """GETs a path."""
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Said:
        """POSTs JSON, or nothing at all."""
        return await self.call("POST", path, **({} if body is None else {"json": body}), **options)

    async def put(self, path: str, body: Any = None, **options: Any) -> Said:
        """PUTs JSON, or nothing at all."""
        return await self.call("PUT", path, **({} if body is None else {"json": body}), **options)

    async def delete(self, path: str, **options: Any) -> Said:
        """DELETEs a path."""
        return await self.call("DELETE", path, **options)

    async def call(self, method: str, path: str, **options: Any) -> Said:
        """Does any call."""
        headers = {**self.headers, **options.pop("headers", {})}
        if "json" in options:
            # A file, in name: of a large body of bytes aiohttp warns.
            options["data"] = io.BytesIO(json.dumps(options.pop("json")).encode())
            headers.setdefault("Content-Type", "application/json")
        async with self.session.request(method, self.url + path, headers=headers, **options) as answer:
            body = await answer.read()
            is_json = answer.content_type == "application/json" and body
            names = {name.lower(): value for name, value in answer.headers.items()}
            return Said(answer.status, await answer.json() if is_json else body, names)

    async def create(self, command: str = "job", **options: Any) -> dict[str, Any]:
        """Enqueues a task and returns it."""
        said = await self.post("/v1/tasks", {"command": command, **options})
        assert said.status == 202, said
        task: dict[str, Any] = said.body
        return task

    async def claim(self, command: str = "job", **options: Any) -> dict[str, Any]:
        """Claims a task that is there and returns it."""
        said = await self.post("/v1/tasks/claim", {"commands": [command], **options})
        assert said.status == 200, said
        task: dict[str, Any] = said.body
        return task
