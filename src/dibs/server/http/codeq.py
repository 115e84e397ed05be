"""The same routes as codeQ's clients know them, under `/v1/codeq`: they work by changing a host name.

What differs from `/v1`: fields that nobody knows are ignored; a payload goes back as the text of its JSON; errors are
text; a cancelled task shows as FAILED, for lack of a word; zero, less and empty mean that nothing was said, and what is
over a limit means the limit. A lease may be named by the subject of the caller's token alone, if the server allows it:
codeQ's clients know no lease token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from dibs import task
from dibs.checks import COMMANDS_MAX
from dibs.server.auth import Principal
from dibs.server.gate import Gate
from dibs.server.http import answers, wire
from dibs.server.http.problems import Problem
from dibs.server.http.tasks import SHOWN_MAX_BYTES, Listing, Tasks, Waiting, lost, unknown
from dibs.server.http.web import Request
from dibs.server.turns import Turns
from dibs.task import (
    LEASE_MAX_S,
    MAX_ATTEMPTS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    Already,
    Cause,
    Place,
    Settled,
    Settlement,
    Status,
)

TAG = "codeQ"
LEASE_S = 300.0
"""How long codeQ leases a task to somebody who does not say."""

CodeqStatus = Literal["PENDING", "IN_PROGRESS", "COMPLETED", "FAILED"]
Became = Literal["requeued", "dlq", "cancelled"]
WAIT_MAX_S = 29.0
"""So long a claim waits at most: codeQ's clients hang up after 30 seconds."""


class CodeqCreateTask(wire.CreateTask, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A task to be enqueued, as codeQ's clients say it."""

    priority: int | None = None
    max_attempts: int | None = None
    idempotency_key: Annotated[str, Meta(max_length=512)] | None = None


class CodeqCreateTasks(wire.CreateTasks, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Several tasks; each is judged by itself."""


class CodeqClaimTask(wire.ClaimTask, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Which task to take. A wait of over 29 seconds is one of 29: codeQ's clients hang up at 30."""

    commands: Annotated[list[wire.Command], Meta(max_length=COMMANDS_MAX)] | None = None
    lease_seconds: float | None = None
    wait_seconds: float = 0


class CodeqClaimTasks(wire.ClaimTasks, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Which tasks to take, and how many."""

    commands: Annotated[list[wire.Command], Meta(max_length=COMMANDS_MAX)] | None = None
    lease_seconds: float | None = None
    wait_seconds: float = 0


class CodeqRenewLease(wire.RenewLease, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Extends a lease from now on."""

    extend_seconds: float | None = None


class CodeqRenewLeaseOf(wire.RenewLeaseOf, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Extends one of several leases."""

    extend_seconds: float | None = None


class CodeqRenewLeases(wire.RenewLeases, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Several leases; each is judged by itself."""


class CodeqSubmitResult(wire.SubmitResult, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How a task ended. Artifacts are not kept here: send them elsewhere, and where to in the result."""

    artifacts: Annotated[list[Any], Meta(max_length=0)] | None = None


class CodeqSubmitResultOf(wire.SubmitResultOf, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How one of several tasks ended."""

    artifacts: Annotated[list[Any], Meta(max_length=0)] | None = None


class CodeqSubmitResults(wire.SubmitResults, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Several results; each is judged by itself."""


class CodeqNack(wire.Nack, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Gives a task back because it could not be done now. Without a delay, or 0, the queue's backoff decides."""

    delay_seconds: float | None = None


class CodeqAbandon(wire.Abandon, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Gives a task back untouched."""


class CodeqListing(Listing, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Which tasks are listed; every one that is given must match."""


class CodeqWaiting(Waiting, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How long to wait for the end of the task."""


class CodeqTask(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A task as codeQ shows it."""

    id: UUID
    command: str
    payload: str
    """The text of its JSON."""
    status: CodeqStatus
    created_at: wire.Time
    updated_at: wire.Time
    priority: int = 0
    worker_id: str | None = None
    lease_until: wire.Time | None = None
    lease_token: str | None = None
    """This one codeQ does not have: it proves that a lease is yours."""
    attempts: int = 0
    max_attempts: int = 0
    error: str | None = None
    tenant_id: str | None = None
    payload_base64: str | None = None
    codec: str | None = None
    duplicate: bool = False


class CodeqTasksGiven(Struct, frozen=True):
    """Some tasks."""

    tasks: list[CodeqTask]


class CodeqPage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some of the tasks that match, and where to go on."""

    tasks: list[CodeqTask]
    cursor: str | None = None


class CodeqCreated(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of several: its task, or why there is none."""

    task: CodeqTask | None = None
    error: str | None = None


class CodeqCreatedItems(Struct, frozen=True):
    """One answer for each, in order."""

    results: list[CodeqCreated]


class CodeqResult(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The record of a result."""

    task_id: UUID
    status: CodeqStatus
    completed_at: wire.Time
    result: wire.AnyJson | UnsetType = UNSET
    error: str | None = None


class CodeqResultItem(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One of several: the record of its result, or why it was not accepted. The id is as it was sent."""

    task_id: str | None = None
    result: CodeqResult | None = None
    error: str | None = None


class CodeqResultItems(Struct, frozen=True):
    """One answer for each, in order."""

    results: list[CodeqResultItem]


class CodeqOutcome(Struct, frozen=True):
    """A task and the record of its result."""

    task: CodeqTask
    result: CodeqResult


class CodeqReturned(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What became of a task that was given back."""

    status: Became
    delay_seconds: int = 0


class CodeqNacked(Struct, frozen=True, kw_only=True, rename="camel"):
    """What became of a task that was given back, and when it is tried again."""

    status: Became
    delay_seconds: int


class CodeqTasks(Tasks):
    """The handlers, for codeQ's clients."""

    prefix = "/v1/codeq"
    tag = TAG

    create_type = CodeqCreateTask
    create_batch_type = CodeqCreateTasks
    claim_type = CodeqClaimTask
    claim_batch_type = CodeqClaimTasks
    renew_type = CodeqRenewLease
    renew_item_type = CodeqRenewLeaseOf
    renew_batch_type = CodeqRenewLeases
    result_type = CodeqSubmitResult
    result_item_type = CodeqSubmitResultOf
    result_batch_type = CodeqSubmitResults
    nack_type = CodeqNack
    abandon_type = CodeqAbandon
    listing_type = CodeqListing
    waiting_type = CodeqWaiting

    task_given = CodeqTask
    tasks_given = CodeqTasksGiven
    page_given = CodeqPage
    created_given = CodeqCreatedItems
    settled_given = CodeqResult
    nacked_given = CodeqNacked
    abandoned_given = CodeqReturned
    settled_items_given = CodeqResultItems
    outcome_given = CodeqOutcome

    def __init__(self, gate: Gate, *, leases_by_subject: bool) -> None:
        super().__init__(gate)
        self._leases_by_subject = leases_by_subject

    async def tokens_by_subject(self, who: Principal, ids: Sequence[bytes]) -> list[bytes | Problem]:
        """The leases that the caller's own subject holds, where the server allows that."""
        if not self._leases_by_subject:
            return await super().tokens_by_subject(who, ids)
        found: list[bytes | Problem] = []
        turns = Turns()
        for token, task_id in zip(await self._gate.held(who, ids), ids, strict=True):
            if token is None:
                [one] = await self.as_it_stands(who, [task_id])
                found.append(_not_held(one))
                await turns.after(0 if one is None else len(one.payload))
            else:
                found.append(token)
        return found

    # ------------------------------------------------------------------------------------------------- how it is taken

    def new_task(self, asked: wire.CreateTask) -> task.NewTask:
        return super().new_task(
            replace(
                asked,
                priority=None if asked.priority is None else min(max(asked.priority, PRIORITY_MIN), PRIORITY_MAX),
                max_attempts=min(max(asked.max_attempts or 0, 0), MAX_ATTEMPTS_MAX) or None,
                idempotency_key=asked.idempotency_key or None,
                delay_seconds=None if asked.run_at is not None else asked.delay_seconds,
            )
        )

    def settlement(self, tenant: str, task_id: bytes, token: bytes, asked: wire.SubmitResult) -> Settlement:
        # codeQ's clients send both whatever the status is, and mean the one that goes with it.
        if asked.status == "COMPLETED":
            return super().settlement(tenant, task_id, token, replace(asked, error=None, reason=None))
        return super().settlement(tenant, task_id, token, replace(asked, result=UNSET))

    def worker(self, request: Request) -> str:
        return request.principal.subject

    def lease_s(self, asked: float | None) -> float | None:
        return min(max(1.0, asked), LEASE_MAX_S) if asked and asked > 0 else LEASE_S

    def wait_s(self, asked: wire.ClaimTask) -> float:
        return min(max(0.0, asked.wait_seconds), WAIT_MAX_S)

    def delay_s(self, asked: wire.Nack) -> float | None:
        return self.whole_s(asked.delay_seconds) if asked.delay_seconds and asked.delay_seconds > 0 else None

    def whole_s(self, delay_s: float) -> float:
        return float(math.ceil(delay_s))

    # ------------------------------------------------------------------------------------------------- how it is shown

    def task_view(self, task: task.Task, **marks: Any) -> Any:
        return _codeq_task(answers.task_view(task, **marks), task.ended_ms or _seen_ms(task))

    def unread_view(self, tenant: str, task_id: bytes, new: task.NewTask, status: Status, **marks: bool) -> Any:
        return _codeq_task(answers.unread_view(tenant, task_id, new, status, **marks), None)

    def lease_view(self, lease: task.Lease, worker: str) -> Any:
        return _codeq_task(answers.lease_view(lease, worker), round(lease.lease_end_ms - lease.lease_s * 1000))

    def created_item(self, item: Any) -> Any:
        return CodeqCreated(error=str(item)) if isinstance(item, Problem) else CodeqCreated(task=item)

    async def settled_view(
        self, request: Request, task_id: bytes, done: Settled | Already, asked: wire.SubmitResult
    ) -> Any:
        """The record of the result that stands, which may be an earlier one."""
        [one] = await self.as_it_stands(request.principal, [task_id])
        return _record(task_id, one, done, asked)

    async def settled_items(
        self, request: Request, done: Iterable[tuple[Raw, wire.SubmitResultOf | None, Settled | Already | Problem]]
    ) -> list[Any]:
        items = []
        shown_bytes, turns = 0, Turns()
        for raw, asked, answer in done:
            task_id = _task_id_in(raw) if asked is None else str(asked.task_id)
            if asked is None or isinstance(answer, Problem):
                items.append(CodeqResultItem(task_id=task_id, error=str(answer)))
                continue
            one = None
            # What was just said is known; what was said before is read, as far as it is not too large together.
            if isinstance(answer, Already) and shown_bytes <= SHOWN_MAX_BYTES:
                [one] = await self.as_it_stands(request.principal, [asked.task_id.bytes])
                shown_bytes += 0 if one is None or one.result is None else len(one.result.data or b"")
            items.append(CodeqResultItem(task_id=task_id, result=_record(asked.task_id.bytes, one, answer, asked)))
            if one is not None and one.result is not None:
                await turns.after(answers.effort_of(one.result.data or b"", one.result.codec))
        return items

    def nacked_view(self, task_id: bytes, done: Settled | Already, delay_s: float) -> Any:
        del task_id
        became = _became(done.status)
        return CodeqNacked(status=became, delay_seconds=int(delay_s) if became == "requeued" else 0)

    def abandoned_view(self, task_id: bytes, done: Settled | Already) -> Any:
        del task_id
        return CodeqReturned(status=_became(done.status))

    def outcome_view(self, task: task.Task, result: task.Result) -> Any:
        return CodeqOutcome(self.task_view(task), _result(task.id, task.ended_ms, answers.outcome(task, result)))


def _not_held(one: task.Task | None) -> Problem:
    if one is None:
        return unknown()
    return lost(Cause.OTHER_TOKEN if one.status is Status.IN_PROGRESS else Cause.NOT_IN_PROGRESS)


def _codeq_task(view: answers.TaskView, updated_ms: int | None) -> CodeqTask:
    in_json = not isinstance(view.payload, UnsetType)
    return CodeqTask(
        id=view.id,
        command=view.command,
        payload=bytes(view.payload).decode() if not isinstance(view.payload, UnsetType) else "",
        status=_status(view.status),
        created_at=view.created_at,
        updated_at=view.created_at if updated_ms is None else wire.from_ms(updated_ms),
        priority=view.priority,
        worker_id=None if view.status is Status.PENDING else view.worker_id,
        lease_until=view.lease_until,
        lease_token=view.lease_token,
        attempts=view.attempts,
        max_attempts=view.max_attempts,
        error=_error_text(view.error, view.status, view.reason),
        tenant_id=view.tenant_id,
        payload_base64=view.payload_base64,
        codec=None if in_json else view.codec,
        duplicate=view.duplicate,
    )


def _seen_ms(one: task.Task) -> int:
    """When something last changed, as far as a task tells."""
    return one.enqueued_ms if one.place is Place.DELAYED else max(one.enqueued_ms, one.due_ms)


def _status(status: Status) -> CodeqStatus:
    if status is Status.PENDING:
        return "PENDING"
    if status is Status.IN_PROGRESS:
        return "IN_PROGRESS"
    return "COMPLETED" if status is Status.COMPLETED else "FAILED"


def _error_text(error: answers.ErrorView | None, status: Status, reason: str | None) -> str | None:
    if error is not None and error.message:
        return error.message
    if status is Status.CANCELLED or (status is Status.FAILED and error is None):
        return reason or status.value
    return None if error is None else error.type


def _record(task_id: bytes, one: task.Task | None, done: Settled | Already, asked: wire.SubmitResult) -> CodeqResult:
    """The record of the result that stands; without the task, of what was just said."""
    if one is not None and one.result is not None:
        return _result(task_id, one.ended_ms, answers.outcome(one, one.result))
    is_result = isinstance(done, Settled) and asked.status == "COMPLETED"
    error = None if asked.error is None else wire.error_info(asked.error).message
    return CodeqResult(
        task_id=UUID(bytes=task_id),
        status=_status(done.status),
        completed_at=datetime.now(UTC),
        result=asked.result if is_result else UNSET,
        error=error if asked.status == "FAILED" else None,
    )


class _Named(Struct, rename="camel"):
    task_id: str


def _task_id_in(raw: Raw) -> str | None:
    """The id in an item that cannot be read otherwise: codeQ's clients want it back."""
    try:
        return msgspec.json.decode(raw, type=_Named).task_id
    except msgspec.ValidationError:
        return None


def _result(task_id: bytes, ended_ms: int | None, outcome: answers.Outcome) -> CodeqResult:
    return CodeqResult(
        task_id=UUID(bytes=task_id),
        status=_status(outcome.status),
        completed_at=datetime.now(UTC) if ended_ms is None else wire.from_ms(ended_ms),
        result=outcome.result,
        error=_error_text(outcome.error, outcome.status, outcome.reason),
    )


def _became(status: Status) -> Became:
    if status is Status.FAILED:
        return "dlq"
    return "cancelled" if status is Status.CANCELLED else "requeued"
