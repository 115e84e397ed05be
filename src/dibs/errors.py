"""Every error that dibs raises, and what the caller should do about it.

::

    DibsError
    ├── InvalidInput           fix the call; nothing was written
    │   ├── InvalidName        a tenant, command, key, worker or reader name is not allowed
    │   ├── InvalidOption      an option is unknown or out of range
    │   ├── PayloadTooLarge    shrink it, or keep the data elsewhere and send a reference
    │   ├── InvalidCursor      start the listing again without a cursor
    │   ├── UnknownChunk       stage the chunk again, and commit then
    │   ├── CodecError         the value cannot be encoded or the bytes cannot be decoded
    │   ├── ArgumentsError     the arguments do not fit the handler's signature
    │   ├── AppNotFound        no app can be imported by this name
    │   └── SettingsError      a setting cannot be read; the message names where it came from
    ├── LeaseLostError         stop working on the task, do not repeat the call
    ├── TaskError              what became of a task that somebody asked for
    │   ├── TaskFailed         it is a dead letter; the error of the handler is attached
    │   ├── TaskCancelled      it was cancelled, or not started in time
    │   ├── TaskUnfinished     it has not ended yet; ask again, or wait longer
    │   └── TaskUnknown        there is no such task, or its result is no longer kept
    ├── AccessError            what a server says to a token
    │   ├── Unauthenticated    bring a valid token: it is missing, expired, or not for this server
    │   └── Forbidden          the token does not allow this: use another one
    ├── LimitExceeded          wait as long as ``retry_after_s`` says, then repeat the call
    ├── JournalError
    │   ├── JournalReset       the cursor belongs to another store; start from the oldest event
    │   └── JournalTrimmed     events were trimmed before they were read; decide whether to go on
    ├── LakeError              the directory cannot be used as a lake like this; the message says what to do
    └── StoreError
        ├── StoreUnavailable   repeat the call later; ids, claim ids and tokens make that safe
        ├── StoreClosed        open the store again
        ├── StoreFull          let retention or a purge free space, or raise ``max_bytes``
        ├── StoreCorrupt       stop writing and run ``doctor``
        └── StoreRefused       the store cannot be opened like this; the message says why
            ├── UnknownScheme      no store is known for this URL
            ├── MissingDriver      install the named extra
            ├── StoreMissing       there is no store yet; check the name, or let it be made
            ├── ForeignDirectory   the directory holds something else; name another
            ├── NewerFormat        upgrade dibs; an older one must not touch these files
            ├── ModeMismatch       open it with the durability it was made with
            ├── NetworkFileSystem  put the directory on a local disk
            └── ShardMismatch      name the shards of one set, all of them, in their order

Each class has a ``code``: what travels in a :class:`~dibs.task.Rejected` and on the wire. :func:`error_from_code` is
the way back, so that one table serves every boundary.
"""

from __future__ import annotations

from collections.abc import Iterator


class DibsError(Exception):
    """The root: catching it catches everything that dibs raises on purpose."""

    code = "error"


class InvalidInput(DibsError, ValueError):
    """The call itself is wrong. Repeating it unchanged gives the same answer; nothing was written."""

    code = "invalid_input"


class InvalidName(InvalidInput):
    """A tenant, command, key, worker or reader name has characters or a length that is not allowed."""

    code = "invalid_name"


class InvalidOption(InvalidInput):
    """An option is unknown, of the wrong type or out of its range."""

    code = "invalid_option"


class PayloadTooLarge(InvalidInput):
    """A payload or result is over the limit. Keep the data elsewhere and send a reference to it."""

    code = "payload_too_large"


class InvalidCursor(InvalidInput):
    """The cursor was not made by this listing. Start again without one."""

    code = "invalid_cursor"


class UnknownChunk(InvalidInput):
    """A commit names a chunk that is not staged: never, dropped, expired, or committed before. Nothing was committed;
    stage it again."""

    code = "unknown_chunk"


class CodecError(InvalidInput):
    """A value cannot be encoded, bytes cannot be decoded, or no codec of that name is registered."""

    code = "codec"


class ArgumentsError(InvalidInput):
    """The arguments do not fit the handler's signature. Call it as it is declared."""

    code = "arguments"


class AppNotFound(InvalidInput):
    """No app can be imported by this name. Name it as ``module:attribute``, as seen from the working directory."""

    code = "app_not_found"


class SettingsError(InvalidInput):
    """A setting is unknown or cannot be read. The message names the place it came from."""

    code = "settings"


class LeaseLostError(DibsError):
    """The token is not the task's current one: somebody else may hold it. Stop; do not repeat the call."""

    code = "lease_lost"


class TaskError(DibsError):
    """What became of a task that somebody asked for."""

    code = "task"


class TaskFailed(TaskError):
    """The task ended as a dead letter. What its handler raised is here as text: the class may not exist here."""

    code = "task_failed"

    reason = ""
    """Why it was given up: FAILED, MAX_ATTEMPTS, LEASE_EXPIRED, or what the handler said."""
    type = ""
    """The name of the class that the handler raised."""
    remote_traceback = ""


class TaskCancelled(TaskError):
    """The task was cancelled, or had not started by its deadline."""

    code = "task_cancelled"

    reason = ""
    """CANCELLED, EXPIRED or DUPLICATE."""


class TaskUnfinished(TaskError, TimeoutError):
    """The task has not ended, or not in the time given. It may still: ask again, or wait longer."""

    code = "task_unfinished"


class TaskUnknown(TaskError):
    """There is no such task in this tenant, or its result is no longer kept."""

    code = "task_unknown"


class AccessError(DibsError):
    """A server does not let this caller do this."""

    code = "access"


class Unauthenticated(AccessError):
    """The token is missing, expired, or not one that this server accepts. Bring a valid one."""

    code = "unauthenticated"


class Forbidden(AccessError):
    """The token is valid and does not allow this: another tenant, scope or command. Use one that does."""

    code = "forbidden"


class LimitExceeded(DibsError):
    """A limit of the tenant is reached, and nothing was changed. Wait for `retry_after_s`, then repeat the call."""

    code = "limit_exceeded"

    retry_after_s = 1.0

    @classmethod
    def until(cls, retry_after_s: float, message: str) -> LimitExceeded:
        """Returns the error with the time to wait."""
        error = cls(message)
        error.retry_after_s = retry_after_s
        return error


class JournalError(DibsError):
    """The journal cannot be read from the given cursor."""

    code = "journal"


class JournalReset(JournalError):
    """The cursor belongs to another store, or to the one a backup was taken of. Start from the oldest event."""

    code = "journal_reset"


class JournalTrimmed(JournalError):
    """Events after the cursor were trimmed before they were read. Decide whether to go on from the oldest kept."""

    code = "journal_trimmed"


class LakeError(DibsError):
    """A lake is missing, in use, of another version or of other settings, or the directory is something else. Nothing
    was changed."""

    code = "lake"


class StoreError(DibsError):
    """The store could not do what it was asked, for a reason that is not in the call."""

    code = "store"


class StoreUnavailable(StoreError):
    """The store does not answer. Repeat the call later: ids, claim ids and tokens make a repeat harmless."""

    code = "store_unavailable"


class StoreClosed(StoreError):
    """The store was closed. Open it again."""

    code = "store_closed"


class StoreFull(StoreError):
    """No room for new tasks (settles still work). Purge, wait for retention, or raise ``max_bytes``."""

    code = "store_full"


class StoreCorrupt(StoreError):
    """A record cannot be read. Stop writing, take a copy of the files and run ``doctor``."""

    code = "store_corrupt"


class StoreRefused(StoreError):
    """The store cannot be opened like this. Nothing was changed."""

    code = "store_refused"


class UnknownScheme(StoreRefused):
    """No store is known for this URL. ``open_store`` lists the schemes."""

    code = "unknown_scheme"


class MissingDriver(StoreRefused):
    """The store needs a driver that is not installed. The message names the extra to install."""

    code = "missing_driver"


class StoreMissing(StoreRefused):
    """There is no store there, and the caller asked not to make one. Check the name, or open it with `create`."""

    code = "store_missing"


class ForeignDirectory(StoreRefused):
    """The directory holds something that is not a dibs store. Name an empty or new one."""

    code = "foreign_directory"


class NewerFormat(StoreRefused):
    """The store was written by a newer dibs. Upgrade; an older one must not touch it."""

    code = "newer_format"


class ModeMismatch(StoreRefused):
    """The store was made with another durability. Open it with that one."""

    code = "mode_mismatch"


class NetworkFileSystem(StoreRefused):
    """Locks and memory maps do not hold over a network file system. Use a local disk."""

    code = "network_file_system"


class ShardMismatch(StoreRefused):
    """The stores that are named are not the shards of one set, all of them, in their order. Name those."""

    code = "shard_mismatch"


def all_errors(root: type[DibsError] = DibsError) -> Iterator[type[DibsError]]:
    """Yields `root` and every error below it, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)


def error_from_code(code: str, message: str) -> DibsError:
    """Returns the error that `code` names, or a plain :class:`DibsError` for a code from a newer dibs."""
    for error in all_errors():
        if error.code == code:
            return error(message)
    return DibsError(f"{code}: {message}")
