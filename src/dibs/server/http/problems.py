"""Errors as answers: one table from every error to its HTTP status, and what its body looks like."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec

from dibs.errors import (
    AccessError,
    DibsError,
    Forbidden,
    InvalidInput,
    JournalError,
    LeaseLostError,
    LimitExceeded,
    PayloadTooLarge,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreRefused,
    TaskError,
    TaskUnfinished,
    TaskUnknown,
    Unauthenticated,
    UnknownChunk,
)
from dibs.task import Rejected

#: Errors by the status they are answered with; what is not named is answered as its nearest parent.
STATUS_OF: Mapping[type[DibsError], int] = {
    DibsError: 500,
    InvalidInput: 422,
    PayloadTooLarge: 413,
    UnknownChunk: 409,
    LeaseLostError: 409,
    TaskError: 409,
    TaskUnfinished: 404,
    TaskUnknown: 404,
    AccessError: 403,
    Unauthenticated: 401,
    Forbidden: 403,
    LimitExceeded: 429,
    JournalError: 410,
    StoreError: 503,
    StoreRefused: 500,
    StoreFull: 507,
}

#: What callers are told of errors that are not theirs. The errors themselves name files and addresses of the server:
#: those are for its log.
TOLD: Mapping[type[DibsError], str] = {
    DibsError: "the server failed; its log, under this request id, says how",
    StoreError: "the server cannot answer this now: repeat the call later",
    StoreCorrupt: "a record of the store cannot be read: whoever runs the server has to look at it",
    StoreFull: "the store has no room for new tasks: repeat the call when some have ended, or ask for more room",
    StoreRefused: "the store cannot be used: whoever runs the server has to look at it",
}

RETRY_UNAVAILABLE_S = 1.0


class Problem(Exception):
    """An answer that is not a good one, where no error of the queue says it: it is about the request itself."""

    def __init__(self, status: int, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.more = more
        self.headers: list[tuple[bytes, bytes]] = []
        self.inside = ""
        """What happened, in words that are for the log only."""

    def with_header(self, name: bytes, value: bytes) -> Problem:
        """Adds a header to the answer."""
        self.headers.append((name, value))
        return self


def status_of(error: DibsError) -> int:
    """Returns the status that an error is answered with."""
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def message_of(error: DibsError) -> str:
    """Returns what the caller is told: the error's own words, if it is the caller's."""
    if status_of(error) < 500:
        return str(error)
    return next(TOLD[kind] for kind in type(error).__mro__ if kind in TOLD)


def told(answer: Any) -> Any:
    """Returns an answer item by item with what its caller may know of those that were rejected."""
    if not isinstance(answer, list) or Rejected not in {*map(type, answer)}:
        return answer
    return [Rejected(one.code, message_of(one.error())) if isinstance(one, Rejected) else one for one in answer]


def problem_of(error: Exception) -> Problem:
    """Returns the answer to an error. What nobody foresaw is a 500 that tells nothing of the inside."""
    if isinstance(error, Problem):
        return error
    if not isinstance(error, DibsError):
        return Problem(500, "internal", TOLD[DibsError])
    status = status_of(error)
    problem = Problem(status, error.code, message_of(error))
    if status >= 500:
        problem.inside = f"{type(error).__name__}: {error}"
    if isinstance(error, Unauthenticated):
        problem.with_header(b"www-authenticate", b"Bearer")
    retry_after_s = RETRY_UNAVAILABLE_S if status == 503 else getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        problem.more["retryAfterSeconds"] = round(retry_after_s, 3)
        problem.with_header(b"retry-after", str(max(1, ceil(retry_after_s))).encode())
    return problem


def body_of(problem: Problem, request_id: str) -> dict[str, Any]:
    """Returns the body of the answer."""
    return {"error": str(problem), "code": problem.code, "requestId": request_id, **problem.more}


def unreadable(error: msgspec.MsgspecError | RecursionError | UnicodeError) -> Problem:
    """Returns the answer to a body, or a query, that cannot be read: 422 names the field that is wrong."""
    if isinstance(error, RecursionError):
        return Problem(400, "malformed", "the body is nested too deeply: flatten it")
    if not isinstance(error, msgspec.ValidationError):
        why = "it ends too early, or with half a character" if "truncated" in str(error) else error
        return Problem(400, "malformed", f"the body cannot be read: {why}")
    message, _, where = str(error).partition(" - at `")
    field = where.rstrip("`").removeprefix("$").lstrip(".")
    return Problem(422, "invalid", f"{field}: {message}" if field else message, field=field)
