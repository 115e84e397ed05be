"""The HTTP API for producers and workers: the routes of `/v1/tasks`, and again as codeQ's clients know them."""

from __future__ import annotations

from msgspec import Struct

from dibs.server.gate import Gate
from dibs.server.http.codeq import CodeqTasks
from dibs.server.http.tasks import Tasks
from dibs.server.http.web import Route


class HttpOptions(Struct, frozen=True, kw_only=True):
    """What a server's owner decides about the HTTP API."""

    leases_by_subject: bool = False
    """On `/v1/codeq`: a heartbeat or settle without a token means the lease that the caller's subject holds. All who
    share a subject can then settle each other's tasks, which a token prevents."""


def task_routes(gate: Gate, options: HttpOptions) -> list[Route]:
    """The life of a task."""
    codeq = CodeqTasks(gate, leases_by_subject=options.leases_by_subject)
    return [*Tasks(gate).routes(), *codeq.routes()]
