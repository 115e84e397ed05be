"""Queues, dead letters, workers and tenants over HTTP: what `/v1/admin` does, for the caller's tenant.

An operator's token may name another tenant with `?tenant=`.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dibs.server.gate import Gate
from dibs.server.http import answers, wire, wire_queues
from dibs.server.http.web import Answer, Request, Route, json_answer
from dibs.server.turns import Turns
from dibs.task import ALL_COMMANDS, BATCH_MAX, Filter, QueueStats

TAG = "Administration"
CLEAN_UP_PAGES = 20
"""So many pages of a listing one clean-up looks at, at most."""
QUEUE_BYTES, WORKER_BYTES = 256, 8 << 10
"""What showing a queue, or a worker with its tasks, is taken for, as work."""


def admin_routes(gate: Gate) -> list[Route]:
    """Everything about queues."""
    return [*Admin(gate).routes(), *CodeqAdmin(gate).routes()]


class Admin:
    """The handlers."""

    prefix = "/v1/admin"
    tag = TAG
    of_tenant_type: type[wire_queues.OfTenant] = wire_queues.OfTenant
    config_type: type[wire_queues.QueueConfigBody] = wire_queues.QueueConfigBody
    which_type: type[wire_queues.Which] = wire_queues.Which
    clean_up_type: Any = wire_queues.CleanUp
    queues_given: Any = wire_queues.Queues
    queue_given: Any = wire_queues.Queue

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def routes(self) -> list[Route]:
        """The table."""
        queue, dead = f"{self.prefix}/queues/{{command}}", f"{self.prefix}/dead"
        of_tenant: dict[str, Any] = {"query": self.of_tenant_type, "tag": self.tag}
        return [
            Route(method="GET", path=f"{self.prefix}/queues", handle=self.queues, summary="Count what is in the queues",
                  verb="configure", gives={200: self.queues_given}, **of_tenant),
            Route(method="GET", path=queue, handle=self.queue, summary="Look at a queue", verb="configure",
                  gives={200: self.queue_given}, **of_tenant),
            Route(method="PUT", path=f"{queue}/config", handle=self.configure, summary="Configure a queue",
                  verb="configure", takes=self.config_type, gives={200: wire_queues.QueueConfigBody},
                  example={"maxAttempts": 3, "backoff": {"kind": "fixed", "baseSeconds": 10}}, **of_tenant),
            Route(method="PUT", path=f"{queue}/pause", handle=self.pause, summary="Let nothing be claimed from a queue",
                  verb="configure", gives={200: wire_queues.QueueConfigBody}, **of_tenant),
            Route(method="PUT", path=f"{queue}/resume", handle=self.resume, summary="End a pause", verb="configure",
                  gives={200: wire_queues.QueueConfigBody}, **of_tenant),
            Route(method="GET", path=dead, handle=self.dead, summary="List dead letters", verb="replay",
                  query=wire_queues.DeadListing, gives={200: wire_queues.DeadLetters}, tag=self.tag),
            Route(method="POST", path=f"{dead}/replay", handle=self.replay, summary="Revive dead letters",
                  verb="replay", takes=self.which_type, gives={200: wire_queues.Acted},
                  example={"command": "thumbnail"}, **of_tenant),
            Route(method="POST", path=f"{dead}/purge", handle=self.purge, summary="Remove dead letters for good",
                  verb="purge", takes=self.which_type, gives={200: wire_queues.Acted},
                  example={"command": "thumbnail"}, **of_tenant),
            Route(method="GET", path=f"{self.prefix}/workers", handle=self.workers, summary="List live workers",
                  verb="workers", gives={200: wire_queues.Workers}, **of_tenant),
            Route(method="POST", path=f"{self.prefix}/tasks/cleanup", handle=self.clean_up,
                  summary="Remove what is kept no longer", verb="purge", takes=self.clean_up_type, body_optional=True,
                  gives={200: wire_queues.CleanedUp}, example={"limit": 1000}, **of_tenant),
            Route(method="GET", path=f"{self.prefix}/tenants", handle=self.tenants, summary="List tenants",
                  verb="tenants", query=wire_queues.TenantListing, gives={200: wire_queues.Tenants}, tag=self.tag),
        ]  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- queues

    async def queues(self, request: Request) -> Answer:
        """The counts of every queue."""
        stats = await self._gate.stats(request.principal, self._tenant(request))
        views, turns = [], Turns()
        for one in stats.queues:
            views.append(self.counts_view(one))
            await turns.after(QUEUE_BYTES)
        return json_answer(self.queues_view(views, stats.total))

    async def queue(self, request: Request) -> Answer:
        """The counts of a queue, and its configuration. One that nobody used has zeros; `*` is the whole tenant."""
        who, tenant, command = request.principal, self._tenant(request), request.params["command"]
        config = await self._gate.configure(who, tenant, command)
        if command == ALL_COMMANDS:
            stats = (await self._gate.stats(who, tenant)).total
        else:
            found = (await self._gate.stats(who, tenant, [command])).queues
            stats = found[0] if found else QueueStats(command=command)
        return json_answer(self.queue_view(command, stats, wire_queues.config_body(config)))

    async def configure(self, request: Request) -> Answer:
        """Replaces a queue's configuration."""
        config = wire_queues.queue_config(request.data)
        held = await self._gate.configure(request.principal, self._tenant(request), request.params["command"], config)
        return json_answer(wire_queues.config_body(held))

    async def pause(self, request: Request) -> Answer:
        """Nothing is claimed any more; what is in progress goes on."""
        return await self._set_paused(request, paused=True)

    async def resume(self, request: Request) -> Answer:
        """Claims go on."""
        return await self._set_paused(request, paused=False)

    async def _set_paused(self, request: Request, *, paused: bool) -> Answer:
        who, tenant, command = request.principal, self._tenant(request), request.params["command"]
        config = await self._gate.configure(who, tenant, command)
        if config.paused != paused:
            config = await self._gate.configure(who, tenant, command, replace(config, paused=paused))
        return json_answer(wire_queues.config_body(config))

    # ------------------------------------------------------------------------------------------------- dead letters

    async def dead(self, request: Request) -> Answer:
        """A page of dead letters."""
        asked = request.query(wire_queues.DeadListing)
        who, tenant = request.principal, asked.tenant or request.principal.tenant
        which = wire_queues.dead_filter(asked)
        page = await self._gate.list(who, tenant, which, cursor=asked.cursor, limit=asked.limit)
        tasks = await answers.each(page.tasks, answers.task_view)
        return json_answer(wire_queues.DeadLetters(tasks=tasks, cursor=page.cursor))

    async def replay(self, request: Request) -> Answer:
        """Puts dead letters back at the end of their queues, with no attempts used. Those that are not dead are left
        alone."""
        asked, which = request.data, wire_queues.which_dead(request.data)
        done = await self._gate.replay(
            request.principal, self._tenant(request), which, limit=asked.limit, cursor=asked.cursor
        )
        return json_answer(wire_queues.acted(done))

    async def purge(self, request: Request) -> Answer:
        """Removes dead letters. Ids of tasks that are not dead are left alone."""
        who, tenant, asked = request.principal, self._tenant(request), request.data
        which = wire_queues.which_dead(asked)
        if not isinstance(which, Filter):
            found = await self._gate.get(who, tenant, which)
            which = [task.id for task in found if task is not None and task.place == "dead"]
        done = await self._gate.purge(who, tenant, which, limit=asked.limit, cursor=asked.cursor)
        return json_answer(wire_queues.acted(done))

    # ------------------------------------------------------------------------------------- clean-up, workers, tenants

    async def clean_up(self, request: Request) -> Answer:
        """Removes ended tasks whose time is over by `before`. The server does this by itself, when their time comes."""
        who, tenant, asked = request.principal, self._tenant(request), request.data or wire_queues.CleanUp()
        limit = min(asked.limit, BATCH_MAX) if asked.limit > 0 else BATCH_MAX
        before = asked.before or datetime.now(UTC)
        before_ms, cursor, deleted = wire.to_ms(before), asked.cursor, 0
        # Nothing can be over that has not ended by then.
        which = Filter(command=asked.command, ended_until_ms=before_ms)
        for _ in range(CLEAN_UP_PAGES):
            page = await self._gate.list(who, tenant, which, cursor=cursor, limit=limit - deleted)
            await asyncio.sleep(0)  # A page in which nothing is over is followed by the next at once.
            over = [task.id for task in page.tasks if (task.kept_until_ms or before_ms + 1) <= before_ms]
            if over:
                deleted += len((await self._gate.purge(who, tenant, over)).ids)
            cursor = page.cursor
            if cursor is None or deleted >= limit:
                break
        return json_answer(wire_queues.CleanedUp(deleted=deleted, before=before, limit=limit, cursor=cursor))

    async def workers(self, request: Request) -> Answer:
        """The workers that told of themselves not long ago."""
        found = await self._gate.workers(request.principal, self._tenant(request))
        views, turns = [], Turns()
        for one in found:
            views.append(wire_queues.worker_view(one))
            await turns.after(WORKER_BYTES)
        return json_answer(wire_queues.Workers(workers=views))

    async def tenants(self, request: Request) -> Answer:
        """All tenants that have anything here. The operator's."""
        asked = request.query(wire_queues.TenantListing)
        page = await self._gate.tenants(request.principal, cursor=asked.cursor, limit=asked.limit)
        return json_answer(wire_queues.Tenants(tenants=page.tenants, cursor=page.cursor))

    def _tenant(self, request: Request) -> str:
        """Whose queues are meant. That it may be another's, the gate decides."""
        tenant: str = request.query(self.of_tenant_type).tenant or request.principal.tenant
        return tenant

    def counts_view(self, stats: QueueStats) -> Any:
        return wire_queues.counts(stats)

    def queues_view(self, queues: list[Any], total: QueueStats) -> Any:
        return wire_queues.Queues(queues=queues, total=wire_queues.counts(total))

    def queue_view(self, command: str, stats: QueueStats, config: wire_queues.QueueConfigBody) -> Any:
        return wire_queues.Queue(command=command, counts=wire_queues.counts(stats), config=config)


# ------------------------------------------------------------------------------------------------- as codeQ shows it


class CodeqOfTenant(wire_queues.OfTenant, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Whose queues are meant."""


class CodeqQueueConfig(wire_queues.QueueConfigBody, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How a queue behaves."""


class CodeqWhich(wire_queues.Which, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Which dead letters are meant."""


class CodeqCleanUp(wire_queues.CleanUp, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What may go."""

    limit: int = 0


class CodeqQueue(Struct, frozen=True, kw_only=True, rename="camel"):
    """The counts of a queue, as codeQ names them."""

    command: str
    ready: int
    delayed: int
    in_progress: int
    dlq: int


class CodeqAdmin(Admin):
    """The handlers, for codeQ's clients."""

    prefix = "/v1/codeq/admin"
    tag = "codeQ"
    of_tenant_type = CodeqOfTenant
    config_type = CodeqQueueConfig
    which_type = CodeqWhich
    # The Go client sends null for nothing.
    clean_up_type = CodeqCleanUp | None
    queues_given = list[CodeqQueue]
    queue_given = CodeqQueue

    def counts_view(self, stats: QueueStats) -> Any:
        return _codeq_queue(stats)

    def queues_view(self, queues: list[Any], total: QueueStats) -> Any:
        del total
        return queues

    def queue_view(self, command: str, stats: QueueStats, config: wire_queues.QueueConfigBody) -> Any:
        del config
        return _codeq_queue(replace(stats, command=command))


def _codeq_queue(stats: QueueStats) -> CodeqQueue:
    return CodeqQueue(
        command=stats.command, ready=stats.ready, delayed=stats.delayed, in_progress=stats.leased, dlq=stats.dead
    )
