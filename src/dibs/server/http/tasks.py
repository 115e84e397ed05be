"""The life of a task over HTTP: what `/v1/tasks` does. Every call goes through the gate, for the caller's tenant."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import msgspec
from msgspec import Meta, Raw, Struct

from dibs.errors import DibsError, TaskUnfinished, TaskUnknown
from dibs.retry import Backoff
from dibs.server.auth import Principal
from dibs.server.gate import Gate
from dibs.server.http import answers, wire
from dibs.server.http.problems import Problem, problem_of, unreadable
from dibs.server.http.web import Answer, Request, Route, json_answer
from dibs.server.turns import Turns
from dibs.task import (
    Already,
    Cause,
    Duplicate,
    Enqueued,
    ErrorInfo,
    Extended,
    Filter,
    Heartbeat,
    Kind,
    Lease,
    LeaseLost,
    NewTask,
    Place,
    Progress,
    Rejected,
    Result,
    Settled,
    Settlement,
    Status,
    Task,
)

TAG = "Tasks"
LEASE_TOKEN = b"x-lease-token"
TRACEPARENT = b"traceparent"
SHOWN_STEP = 10
SHOWN_MAX_BYTES = 16 << 20
"""So much of the payloads of earlier tasks a batch of duplicates is answered with; the rest without them."""

Item = TypeVar("Item")
_LEASE_TOKEN = re.compile(r"[0-9a-f]{32}")
_MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeError)


class Listing(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Which tasks are listed; every one that is given must match."""

    command: wire.Command | None = None
    status: Status | None = None
    place: Place | None = None
    worker: wire.Name | None = None
    reason: wire.Name | None = None
    enqueued_from: wire.Time | None = None
    enqueued_until: wire.Time | None = None
    ended_from: wire.Time | None = None
    ended_until: wire.Time | None = None
    limit: wire.Count = 100
    cursor: str | None = None


class Waiting(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How long to wait for the end of the task."""

    wait_seconds: Annotated[float, Meta(ge=0, le=wire.RESULT_WAIT_MAX_S)] = 0


class Tasks:
    """The handlers. What others show otherwise, or take otherwise, is a method, or a type, of its own."""

    prefix = "/v1"
    tag = TAG

    create_type: type[wire.CreateTask] = wire.CreateTask
    create_batch_type: type[wire.CreateTasks] = wire.CreateTasks
    claim_type: type[wire.ClaimTask] = wire.ClaimTask
    claim_batch_type: type[wire.ClaimTasks] = wire.ClaimTasks
    renew_type: type[wire.RenewLease] = wire.RenewLease
    renew_item_type: type[wire.RenewLeaseOf] = wire.RenewLeaseOf
    renew_batch_type: type[wire.RenewLeases] = wire.RenewLeases
    result_type: type[wire.SubmitResult] = wire.SubmitResult
    result_item_type: type[wire.SubmitResultOf] = wire.SubmitResultOf
    result_batch_type: type[wire.SubmitResults] = wire.SubmitResults
    nack_type: type[wire.Nack] = wire.Nack
    abandon_type: type[wire.Abandon] = wire.Abandon
    listing_type: type[Listing] = Listing
    waiting_type: type[Waiting] = Waiting

    task_given: Any = answers.TaskView
    tasks_given: Any = answers.TaskViews
    page_given: Any = answers.TaskPage
    created_given: Any = answers.CreatedItems
    settled_given: Any = answers.Settled
    nacked_given: Any = answers.Settled
    abandoned_given: Any = answers.Settled
    settled_items_given: Any = answers.SettledItems
    outcome_given: Any = answers.Outcome

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._decode_create = msgspec.json.Decoder(self.create_type).decode
        self._decode_renew = msgspec.json.Decoder(self.renew_item_type).decode
        self._decode_result = msgspec.json.Decoder(self.result_item_type).decode

    def routes(self) -> list[Route]:
        """The table."""
        tasks = f"{self.prefix}/tasks"
        one = f"{tasks}/{{id}}"
        held: dict[str, Any] = {"verb": "settle", "body_optional": True, "fails": (403, 404, 409), "tag": self.tag}
        return [
            Route(method="POST", path=tasks, handle=self.create, summary="Enqueue a task", verb="enqueue",
                  takes=self.create_type, gives={202: self.task_given}, fails=(413, 507), tag=self.tag,
                  example={"command": "thumbnail", "payload": {"url": "cat.png"}, "priority": 5}),
            Route(method="POST", path=f"{tasks}/batch", handle=self.create_batch, summary="Enqueue up to 1,000 tasks",
                  verb="enqueue", takes=self.create_batch_type, gives={200: self.created_given}, fails=(507,),
                  tag=self.tag, example={"tasks": [{"command": "thumbnail", "payload": {"url": "cat.png"}}]}),
            Route(method="GET", path=tasks, handle=self.list_tasks, summary="List tasks", verb="list",
                  query=self.listing_type, gives={200: self.page_given}, tag=self.tag),
            Route(method="POST", path=f"{tasks}/claim", handle=self.claim, summary="Take a task", verb="claim",
                  takes=self.claim_type, gives={200: self.task_given, 204: None}, tag=self.tag,
                  example={"commands": ["thumbnail"], "leaseSeconds": 60, "waitSeconds": 20}),
            Route(method="POST", path=f"{tasks}/claim/batch", handle=self.claim_batch, summary="Take several tasks",
                  verb="claim", takes=self.claim_batch_type, gives={200: self.tasks_given, 204: None}, tag=self.tag,
                  example={"commands": ["thumbnail"], "count": 100}),
            Route(method="POST", path=f"{tasks}/batch/heartbeat", handle=self.heartbeat_batch,
                  summary="Renew several leases", verb="heartbeat", takes=self.renew_batch_type,
                  gives={200: answers.RenewedItems}, tag=self.tag,
                  example={"heartbeats": [{"taskId": EXAMPLE_ID, "leaseToken": EXAMPLE_TOKEN}]}),
            Route(method="POST", path=f"{tasks}/batch/results", handle=self.result_batch,
                  summary="Tell several results", verb="settle", takes=self.result_batch_type,
                  gives={200: self.settled_items_given}, tag=self.tag,
                  example={"results": [{"taskId": EXAMPLE_ID, "leaseToken": EXAMPLE_TOKEN, "status": "COMPLETED"}]}),
            Route(method="GET", path=one, handle=self.get, summary="Look at a task", verb="get",
                  gives={200: self.task_given}, fails=(404,), tag=self.tag),
            Route(method="DELETE", path=one, handle=self.cancel, summary="Cancel a task", verb="cancel",
                  gives={200: answers.CancelledView}, fails=(404, 409), tag=self.tag),
            Route(method="POST", path=f"{one}/heartbeat", handle=self.heartbeat, summary="Renew a lease",
                  verb="heartbeat", takes=self.renew_type, body_optional=True, gives={200: answers.Renewed},
                  fails=(403, 404, 409), tag=self.tag,
                  example={"leaseToken": EXAMPLE_TOKEN, "extendSeconds": 60, "progress": {"done": 3, "total": 10}}),
            Route(method="POST", path=f"{one}/result", handle=self.result, summary="Tell the result of a task",
                  verb="settle", takes=self.result_type, gives={200: self.settled_given}, fails=(403, 404, 409),
                  tag=self.tag, example={"leaseToken": EXAMPLE_TOKEN, "status": "COMPLETED", "result": {"width": 320}}),
            Route(method="GET", path=f"{one}/result", handle=self.outcome, summary="Read, or wait for, a result",
                  verb="wait", query=self.waiting_type, gives={200: self.outcome_given}, fails=(404,), tag=self.tag),
            Route(method="POST", path=f"{one}/nack", handle=self.nack, summary="Give a task back to be tried again",
                  takes=self.nack_type, gives={200: self.nacked_given},
                  example={"leaseToken": EXAMPLE_TOKEN, "delaySeconds": 30, "reason": "upstream is down"}, **held),
            Route(method="POST", path=f"{one}/abandon", handle=self.abandon, summary="Give a task back untouched",
                  takes=self.abandon_type, gives={200: self.abandoned_given},
                  example={"leaseToken": EXAMPLE_TOKEN}, **held),
        ]  # fmt: skip

    # ------------------------------------------------------------------------------------------------- life of a task

    async def create(self, request: Request) -> Answer:
        """202: the task as it stands. A key or an id that is known changes nothing and answers its task."""
        [created] = await self._create(request, [self.new_task(request.data)])
        if isinstance(created, Problem):
            raise created
        return json_answer(created, 202)

    async def create_batch(self, request: Request) -> Answer:
        """Each task is decoded, judged and answered by itself."""
        news, problems = await _sorted_out(request.data.tasks, lambda raw: self.new_task(self._decode_create(raw)))
        created = iter(await self._create(request, list(news.values()))) if news else iter(())
        items = [problems[index] if index in problems else next(created) for index in range(len(request.data.tasks))]
        return json_answer({"results": [self.created_item(item) for item in items]})

    async def _create(self, request: Request, news: Sequence[NewTask]) -> list[Any]:
        who = request.principal
        outcomes = await self._gate.enqueue(who, who.tenant, news, traceparent=request.header(TRACEPARENT))
        tasks = await self._read_created(who, outcomes)
        created: list[Any] = []
        shown_bytes, turns = 0, Turns()
        for new, made in zip(news, outcomes, strict=True):
            if isinstance(made, Rejected):
                created.append(problem_of(made.error()))
                continue
            task = tasks.get(made.id)
            if task is not None and not _is_new(made):
                shown_bytes += len(task.payload)
                task = task if shown_bytes <= SHOWN_MAX_BYTES else None
            created.append(self._created(who, new, made, task))
            await turns.after(answers.effort(new if task is None else task))
        return created

    async def _read_created(
        self, who: Principal, outcomes: Sequence[Enqueued | Duplicate | Rejected]
    ) -> dict[bytes, Task | None]:
        """The tasks that a create is answered with, as far as they are not too large together."""
        made = [one for one in outcomes if not isinstance(one, Rejected)]
        # What is new came with this request, and is no larger; what others sent before may be.
        new_ids = [one.id for one in made if _is_new(one)]
        old_ids = list(dict.fromkeys(one.id for one in made if not _is_new(one)))
        tasks = dict(zip(new_ids, await self.as_it_stands(who, new_ids), strict=True)) if new_ids else {}
        size, turns = 0, Turns()
        while old_ids and size <= SHOWN_MAX_BYTES:
            some, old_ids = old_ids[:SHOWN_STEP], old_ids[SHOWN_STEP:]
            found = await self.as_it_stands(who, some)
            read = sum(len(task.payload) for task in found if task is not None)
            size += read
            tasks.update(zip(some, found, strict=True))
            await turns.after(read)
        return tasks

    def _created(self, who: Principal, new: NewTask, made: Enqueued | Duplicate, task: Task | None) -> Any:
        marks: dict[str, bool] = (
            {"duplicate": True, "replayed": made.replayed} if isinstance(made, Duplicate) else {"already": made.already}
        )
        if task is not None:
            return self.task_view(task, **marks)
        status = made.status if isinstance(made, Duplicate) else Status.PENDING
        return self.unread_view(who.tenant, made.id, new, status, **marks)

    async def claim(self, request: Request) -> Answer:
        """200 with a task and its token, or 204 if there is none in time."""
        leases = await self._claim(request, 1)
        return json_answer(self.lease_view(leases[0], self.worker(request))) if leases else Answer(204)

    async def claim_batch(self, request: Request) -> Answer:
        """200 with tasks and their tokens, or 204 if there is none in time."""
        leases = await self._claim(request, request.data.count)
        worker, views, turns = self.worker(request), [], Turns()
        try:
            for lease in leases:
                views.append(self.lease_view(lease, worker))
                await turns.after(answers.effort(lease))
        except asyncio.CancelledError:
            await self._gate.give_back(leases)
            raise
        return json_answer({"tasks": views}) if views else Answer(204)

    async def _claim(self, request: Request, limit: int) -> list[Lease]:
        who, asked = request.principal, request.data
        commands = asked.commands or sorted(who.commands or ())
        if not commands:
            raise Problem(422, "invalid", "commands: name those you can do", field="commands")
        wait_s = self.wait_s(asked)
        claiming = self._gate.claim(
            who,
            who.tenant,
            commands,
            limit=limit,
            lease_s=self.lease_s(asked.lease_seconds),
            wait_s=wait_s,
            worker=self.worker(request),
            claim_id=None if asked.claim_id is None else asked.claim_id.bytes,
            traceparent=request.header(TRACEPARENT),
        )
        return await (request.while_there(claiming, self._gate.give_back) if wait_s else claiming)

    async def heartbeat(self, request: Request) -> Answer:
        """200 with the new end of the lease."""
        task_id, asked = _task_id(request), request.data
        token = await self._token(request, task_id, asked.lease_token)
        [answer] = await self._gate.heartbeat(request.principal, [self._beat(request, task_id, token, asked)])
        return json_answer(_renewed(task_id, answer))

    async def heartbeat_batch(self, request: Request) -> Answer:
        """Each lease is judged and answered by itself."""
        raws = request.data.heartbeats
        asked, problems = await _sorted_out(raws, self._decode_renew)
        tokens = await self._tokens(request, asked, problems)
        beats = [self._beat(request, asked[at].task_id.bytes, token, asked[at]) for at, token in tokens.items()]
        outcomes = iter(await self._gate.heartbeat(request.principal, beats) if beats else ())
        items = []
        for at in range(len(raws)):
            task_id = asked[at].task_id if at in asked else None
            try:
                if at in problems:
                    raise problems[at]
                assert task_id is not None
                done = _renewed(task_id.bytes, next(outcomes))
                items.append(
                    answers.RenewedItem(
                        task_id=task_id, lease_until=done.lease_until, cancel_requested=done.cancel_requested
                    )
                )
            except Problem as problem:
                items.append(answers.RenewedItem(task_id=task_id, **answers.item_error(problem)))
        return json_answer(answers.RenewedItems(results=items))

    def _beat(self, request: Request, task_id: bytes, token: bytes, asked: wire.RenewLease) -> Heartbeat:
        progress = asked.progress
        return Heartbeat(
            tenant=request.principal.tenant,
            id=task_id,
            token=token,
            extend_s=self.lease_s(asked.extend_seconds),
            progress=None if progress is None else Progress(progress.done, progress.total, progress.note),
        )

    async def result(self, request: Request) -> Answer:
        """200: the task has ended as it was said, now or when the same was said before."""
        task_id, asked = _task_id(request), request.data
        token = await self._token(request, task_id, asked.lease_token)
        item = self.settlement(request.principal.tenant, task_id, token, asked)
        done = await self._settle(request, item)
        return json_answer(await self.settled_view(request, task_id, done, asked))

    async def result_batch(self, request: Request) -> Answer:
        """Each result is judged and answered by itself."""
        raws, tenant = request.data.results, request.principal.tenant
        asked, problems = await _sorted_out(raws, self._decode_result)
        settlements, turns = {}, Turns()
        for at, token in (await self._tokens(request, asked, problems)).items():
            try:
                settlements[at] = self.settlement(tenant, asked[at].task_id.bytes, token, asked[at])
            except Problem as problem:
                problems[at] = problem
            await turns.after(memoryview(raws[at]).nbytes)
        outcomes = iter(await self._settle_all(request, list(settlements.values())) if settlements else ())
        done: list[tuple[Raw, wire.SubmitResultOf | None, Any]] = []
        for at, raw in enumerate(raws):
            answer = problems[at] if at in problems else _settled(next(outcomes))
            done.append((raw, asked.get(at), answer))
        return json_answer({"results": await self.settled_items(request, done)})

    async def nack(self, request: Request) -> Answer:
        """200: the task waits for its next attempt, or has none left and is a dead letter."""
        task_id, asked, who = _task_id(request), request.data, request.principal
        token = await self._token(request, task_id, asked.lease_token)
        delay_s = self.delay_s(asked)
        if delay_s is None:
            delay_s = self.whole_s(await self._backoff_s(who, task_id))
        done = await self._settle(
            request,
            Settlement(
                tenant=who.tenant, id=task_id, token=token, kind=Kind.RETRY, error=ErrorInfo("Nack", asked.reason),
                delay_s=delay_s,
            ),
        )  # fmt: skip
        return json_answer(self.nacked_view(task_id, done, delay_s))

    async def _backoff_s(self, who: Principal, task_id: bytes) -> float:
        """How long the queue's own policy has a task wait that failed now."""
        [task] = await self.as_it_stands(who, [task_id])
        if task is None:
            raise unknown()
        config = await self._gate.store.configure(who.tenant, task.command)
        return (config.backoff or Backoff()).delay_s(max(1, task.attempts))

    async def abandon(self, request: Request) -> Answer:
        """200: the task is back where it stood."""
        task_id = _task_id(request)
        token = await self._token(request, task_id, request.data.lease_token)
        item = Settlement(tenant=request.principal.tenant, id=task_id, token=token, kind=Kind.RELEASE)
        return json_answer(self.abandoned_view(task_id, await self._settle(request, item)))

    async def _settle(self, request: Request, item: Settlement) -> Settled | Already:
        [answer] = await self._settle_all(request, [item])
        done = _settled(answer)
        if isinstance(done, Problem):
            raise done
        return done

    async def _settle_all(
        self, request: Request, items: Sequence[Settlement]
    ) -> list[Settled | Already | LeaseLost | Rejected]:
        return await self._gate.settle(request.principal, items, traceparent=request.header(TRACEPARENT))

    # ------------------------------------------------------------------------------------------------ looking, acting

    async def get(self, request: Request) -> Answer:
        """200 with the task as it stands."""
        return json_answer(self.task_view(await self._task(request)))

    async def outcome(self, request: Request) -> Answer:
        """200 as soon as the task has ended, within the wait; 404 with its status otherwise."""
        who, task_id = request.principal, _task_id(request)
        wait_s = request.query(self.waiting_type).wait_seconds
        if wait_s:
            [task] = await request.while_there(self._gate.wait(who, who.tenant, [task_id], wait_s))
        else:
            task = await self._task(request)
        if task is None:
            raise unknown()
        if task.result is None:
            raise _no_result(task)
        return json_answer(self.outcome_view(task, task.result))

    async def cancel(self, request: Request) -> Answer:
        """200: it is cancelled, or its worker will be told. 409: too late, it has ended otherwise."""
        who, task_id = request.principal, _task_id(request)
        [done] = await self._gate.cancel(who, who.tenant, [task_id])
        if done.how == "unknown" or done.status is None:
            raise unknown()
        if done.how == "ended" and done.status is not Status.CANCELLED:
            problem = Problem(409, "task_ended", f"too late: the task is {done.status}")
            problem.more["status"] = done.status
            raise problem
        how: Literal["cancelled", "cancelling"] = "cancelling" if done.how == "cancelling" else "cancelled"
        return json_answer(answers.CancelledView(task_id=UUID(bytes=task_id), how=how, status=done.status))

    async def list_tasks(self, request: Request) -> Answer:
        """A page of what matches. It may be short, even empty, and have a cursor."""
        who, asked = request.principal, request.query(self.listing_type)
        page = await self._gate.list(who, who.tenant, filter_of(asked), cursor=asked.cursor, limit=asked.limit)
        views = await answers.each(page.tasks, self.task_view)
        return json_answer(self.page_given(tasks=views, cursor=page.cursor))

    async def _task(self, request: Request) -> Task:
        who = request.principal
        [task] = await self._gate.get(who, who.tenant, [_task_id(request)])
        if task is None:
            raise unknown()
        return task

    async def as_it_stands(self, who: Principal, ids: Sequence[bytes]) -> list[Task | None]:
        """What a call needs to be answered, or done, beside what it asks for. It is not the caller's to pay for, and
        must not refuse what was done: None also for a task that could not be read."""
        try:
            tasks = await self._gate.store.get(who.tenant, ids)
        except DibsError:
            return [None for _ in ids]
        return [task if task is not None and who.sees(task.command) else None for task in tasks]

    # ------------------------------------------------------------------------------------------------- whose lease

    async def _token(self, request: Request, task_id: bytes, in_body: str | None) -> bytes:
        header = request.header(LEASE_TOKEN)
        if header is not None and not _LEASE_TOKEN.fullmatch(header):
            raise Problem(422, "invalid", "X-Lease-Token: this is no lease token", field="X-Lease-Token")
        if header is not None and in_body is not None and header != in_body:
            raise Problem(422, "invalid", "leaseToken: the header X-Lease-Token has another one", field="leaseToken")
        token = header or in_body
        if token is not None:
            return bytes.fromhex(token)
        [found] = await self.tokens_by_subject(request.principal, [task_id])
        if isinstance(found, Problem):
            raise found
        return found

    async def _tokens(self, request: Request, asked: dict[int, Any], problems: dict[int, Problem]) -> dict[int, bytes]:
        """The token of each item that has one; of the others it is noted why they have none."""
        without = [at for at, item in asked.items() if item.lease_token is None]
        ids = [asked[at].task_id.bytes for at in without]
        found = dict(zip(without, await self.tokens_by_subject(request.principal, ids) if ids else (), strict=True))
        problems.update((at, token) for at, token in found.items() if isinstance(token, Problem))
        return {
            at: found[at] if at in found else bytes.fromhex(item.lease_token)  # type: ignore[misc]
            for at, item in asked.items()
            if at not in problems
        }

    async def tokens_by_subject(self, who: Principal, ids: Sequence[bytes]) -> list[bytes | Problem]:  # noqa: ARG002
        """What counts for a lease without its token: nothing."""
        message = "leaseToken: send it, here or in the header X-Lease-Token"
        return [Problem(422, "invalid", message, field="leaseToken") for _ in ids]

    # --------------------------------------------------------------------------------------- how it is taken and shown

    def new_task(self, asked: wire.CreateTask) -> NewTask:
        return wire.new_task(asked, self._gate.store.limits)

    def settlement(self, tenant: str, task_id: bytes, token: bytes, asked: wire.SubmitResult) -> Settlement:
        return wire.settlement(tenant, task_id, token, asked, self._gate.store.limits)

    def worker(self, request: Request) -> str:
        """Under which name a claim is made. It proves nothing."""
        return request.data.worker or request.principal.subject

    def lease_s(self, asked: float | None) -> float | None:
        return asked

    def wait_s(self, asked: wire.ClaimTask) -> float:
        return asked.wait_seconds

    def delay_s(self, asked: wire.Nack) -> float | None:
        return asked.delay_seconds

    def whole_s(self, delay_s: float) -> float:
        return round(delay_s, 3)

    def task_view(self, task: Task, **marks: Any) -> Any:
        return answers.task_view(task, **marks)

    def unread_view(self, tenant: str, task_id: bytes, new: NewTask, status: Status, **marks: bool) -> Any:
        return answers.unread_view(tenant, task_id, new, status, **marks)

    def lease_view(self, lease: Lease, worker: str) -> Any:
        return answers.lease_view(lease, worker)

    def created_item(self, item: Any) -> Any:
        if isinstance(item, Problem):
            return answers.CreatedItem(**answers.item_error(item))
        return answers.CreatedItem(task=item)

    async def settled_view(
        self, request: Request, task_id: bytes, done: Settled | Already, asked: wire.SubmitResult
    ) -> Any:
        """How an accepted result is answered."""
        del request, asked
        return answers.Settled(task_id=UUID(bytes=task_id), status=done.status, already=isinstance(done, Already))

    async def settled_items(
        self, request: Request, done: Iterable[tuple[Raw, wire.SubmitResultOf | None, Settled | Already | Problem]]
    ) -> list[Any]:
        """How results of a batch are answered, accepted or not."""
        del request
        items = []
        for _, asked, answer in done:
            task_id = None if asked is None else asked.task_id
            if isinstance(answer, Problem):
                items.append(answers.SettledItem(task_id=task_id, **answers.item_error(answer)))
            else:
                already = isinstance(answer, Already)
                items.append(answers.SettledItem(task_id=task_id, status=answer.status, already=already))
        return items

    def nacked_view(self, task_id: bytes, done: Settled | Already, delay_s: float) -> Any:
        return answers.Settled(
            task_id=UUID(bytes=task_id),
            status=done.status,
            already=isinstance(done, Already),
            delay_seconds=delay_s if done.status is Status.PENDING else None,
        )

    def abandoned_view(self, task_id: bytes, done: Settled | Already) -> Any:
        return answers.Settled(task_id=UUID(bytes=task_id), status=done.status, already=isinstance(done, Already))

    def outcome_view(self, task: Task, result: Result) -> Any:
        return answers.outcome(task, result)


# ------------------------------------------------------------------------------------------------------------ helpers

EXAMPLE_ID = "01890a5d-ac96-774b-bcce-b302099a8057"
EXAMPLE_TOKEN = "000000000000002a6f1c9e0b7d3a5482"


def unknown() -> Problem:
    """The answer to an id that this caller has no task of: one and the same, whoever has one."""
    return problem_of(TaskUnknown("there is no such task"))


def lost(cause: Cause) -> Problem:
    """The answer to a token that does not count."""
    if cause is Cause.UNKNOWN:
        return unknown()
    if cause is Cause.NOT_IN_PROGRESS:
        return Problem(409, "lease_lost", "the task is not in progress: stop working on it", cause=cause)
    return Problem(403, "lease_lost", "the task is held under another lease: stop working on it", cause=cause)


def filter_of(asked: Listing) -> Filter:
    """Returns what a listing is about."""
    return Filter(
        command=asked.command,
        status=asked.status,
        place=asked.place,
        reason=asked.reason,
        worker=asked.worker,
        enqueued_from_ms=_ms(asked.enqueued_from),
        enqueued_until_ms=_ms(asked.enqueued_until),
        ended_from_ms=_ms(asked.ended_from),
        ended_until_ms=_ms(asked.ended_until),
    )


def _is_new(made: Enqueued | Duplicate) -> bool:
    return isinstance(made, Enqueued) and not made.already


def _ms(time: Any) -> int | None:
    return None if time is None else wire.to_ms(time)


def _task_id(request: Request) -> bytes:
    try:
        return UUID(request.params["id"]).bytes
    except ValueError:
        raise unknown() from None


async def _sorted_out(raws: Sequence[Raw], read: Callable[[Raw], Item]) -> tuple[dict[int, Item], dict[int, Problem]]:
    """Those items of a batch that can be read, and what is wrong with the others, by where they stand."""
    good: dict[int, Item] = {}
    bad: dict[int, Problem] = {}
    turns = Turns()
    for at, raw in enumerate(raws):
        try:
            good[at] = read(raw)
        except Problem as problem:
            bad[at] = problem
        except _MALFORMED as error:
            bad[at] = unreadable(error)
        await turns.after(memoryview(raw).nbytes)
    return good, bad


def _renewed(task_id: bytes, answer: Extended | LeaseLost | Rejected) -> answers.Renewed:
    if isinstance(answer, LeaseLost):
        raise lost(answer.cause)
    if isinstance(answer, Rejected):
        raise problem_of(answer.error())
    return answers.Renewed(
        task_id=UUID(bytes=task_id),
        ok=True,
        lease_until=wire.from_ms(answer.lease_end_ms),
        cancel_requested=answer.cancel_requested,
    )


def _settled(answer: Settled | Already | LeaseLost | Rejected) -> Settled | Already | Problem:
    if isinstance(answer, LeaseLost):
        return lost(answer.cause)
    return problem_of(answer.error()) if isinstance(answer, Rejected) else answer


def _no_result(task: Task) -> Problem:
    if task.status.ended:
        problem = problem_of(TaskUnknown(f"the task is {task.status}, and its result is no longer kept"))
    else:
        problem = problem_of(TaskUnfinished(f"the task is {task.status}: ask again, or wait longer"))
    problem.more |= {"taskId": str(UUID(bytes=task.id)), "status": task.status}
    return problem
