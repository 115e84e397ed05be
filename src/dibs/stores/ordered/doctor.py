"""The doctor: does every record agree with every other? The state is the truth; everything else can be rebuilt from it.

Checked: every task has a body (unless it was completed with `keep=False`), its index entry and a legal place; every
index entry names a state that names it; keys point to tasks; counters equal a recount, those of limits too; nothing can
be due without the due index knowing, nor ready without the ready index; nothing is parked without a way home; what has
ended will expire; journal positions increase. A row of a load that has not left its block has no records of its own;
its block stands where its chunk says, and it is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from msgspec import Struct

from dibs.ids import CHUNK_BYTES, ID_BYTES, id_to_text, key_digest, slot_of
from dibs.stores.ordered.chunks import Chunk, ChunkRows, block_entry, due_ms, read_chunk, read_head, stands
from dibs.stores.ordered.engine import ReadTxn, Txn
from dibs.stores.ordered.keys import (
    BYTES,
    COUNTER_FIELDS,
    DUE,
    EXPIRE_CHUNK,
    EXPIRE_TASK,
    EXPIRIES,
    JOURNAL,
    KIND_LIMIT,
    KIND_REVIEW,
    META_JOURNAL_BYTES,
    SEPARATOR,
    QueueKeys,
    TenantKeys,
    due_key,
    end_of,
    expiry_key,
    from8,
    from_count,
    id_of,
    is_block,
    kind_of,
    ms8,
    names_block,
    parse_block_name,
    parse_due_key,
    parse_expiry_key,
    queue_keys,
    ready_ranks,
    split_ids,
    tenant_keys,
)
from dibs.stores.ordered.records import (
    COMPLETED,
    DEAD,
    DELAYED,
    IN_PROGRESS,
    LEASED,
    NO_WAIT,
    NOWHERE,
    PARKED,
    PENDING,
    PLACES,
    READY,
    STATUSES,
    TAIL_BYTES,
    Body,
    Head,
    State,
    StoredRows,
    UnreadableRecord,
    decode_body,
    decode_head,
    decode_result,
    decode_rows,
    decode_runs,
    decode_state,
    encode_body,
    encode_state,
)
from dibs.stores.ordered.recount import Recount, timer_named
from dibs.stores.ordered.views import tenants
from dibs.task import MAX_ATTEMPTS_DEFAULT, PRIORITY_MIN, RESULT_TTL_DEFAULT_S
from dibs.task import PLACES as LEGAL_PLACES

STEP = 1_000
PROBLEMS_MAX = 1_000
_PLACE_LETTERS = {b"P": READY, b"D": DELAYED, b"L": LEASED, b"X": DEAD, b"G": PARKED}


class Problem(Struct, frozen=True):
    """One thing that does not agree, and the record it is about."""

    what: str
    where: str


class Report(Struct):
    """What the doctor saw. Clean means no problems; at most 1,000 are listed."""

    tasks: int = 0
    events: int = 0
    problems: list[Problem] = []

    @property
    def clean(self) -> bool:
        return not self.problems

    def add(self, what: str, where: bytes | str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(what, where if isinstance(where, str) else repr(where)))


def examine(txn: ReadTxn, slots: bytes | None = None) -> Report:
    """Reads everything on one consistent view. With `slots`, tasks of others do not belong here."""
    report = Report()
    for name in _tenants(txn):
        _examine_tenant(txn, tenant_keys(name), report, slots)
    for key, _ in _items(txn, DUE):
        at_ms, queue = parse_due_key(key)
        if txn.get(queue.due) != ms8(at_ms):
            report.add("due entry that its queue does not name", key)
    _examine_journal(txn, report)
    return report


def _examine_tenant(txn: ReadTxn, tenant: TenantKeys, report: Report, slots: bytes | None) -> None:
    counts: Counter[bytes] = Counter()
    uses = Recount(tenant)
    earliest: dict[QueueKeys, int] = {}
    ended = 0
    for key, value in _items(txn, tenant.state):
        task_id = id_of(key)
        try:
            state = decode_state(value)
        except UnreadableRecord:
            report.add("state cannot be read", key)
            continue
        report.tasks += 1
        ended += state.ended()
        queue = queue_keys(tenant.name, state.command)
        _count(counts, queue, state)
        uses.add(state)
        for what in _task_problems(txn, queue, task_id, state):
            report.add(what, f"{tenant.name} {id_to_text(task_id)}")
        _examine_slot(tenant, task_id, slots, report)
        if state.place in (LEASED, DELAYED):
            earliest[queue] = min(earliest.get(queue, from8(state.rank[:8])), from8(state.rank[:8]))
    for queue, task_id, state in _examine_chunks(txn, tenant, report):
        report.tasks += 1
        _examine_slot(tenant, task_id, slots, report)
        _count(counts, queue, state)
        if state.place == DELAYED:
            earliest[queue] = min(earliest.get(queue, state.due_ms), state.due_ms)
    _examine_indexes(txn, tenant, report)
    for what, key in uses.problems(txn):
        report.add(what, key)
    expiring = len(set(_expiring(txn, tenant)))
    if expiring != ended:
        report.add(f"{ended} tasks have ended and {expiring} will expire", tenant.name)
    for queue, at_ms in earliest.items():
        due = txn.get(queue.due)
        if due is None or from8(due) > at_ms or txn.get(due_key(due, queue)) is None:
            report.add("something is due and the due index does not know", queue.name)
    stored = {key: from_count(value) for key, value in _items(txn, tenant.counters)}
    for key in stored.keys() | counts.keys():
        if stored.get(key, 0) != counts[key]:
            report.add(f"counter is {stored.get(key, 0)} and a recount gives {counts[key]}", key)


def _task_problems(txn: ReadTxn, queue: QueueKeys, task_id: bytes, state: State) -> Iterator[str]:
    if PLACES[state.place] not in LEGAL_PLACES[STATUSES[state.status]]:
        yield f"status {STATUSES[state.status]} in place {PLACES[state.place]}"
    if state.place != NOWHERE and txn.get(_entry(queue, task_id, state)) is None:
        yield f"no entry in its place, {PLACES[state.place]}"
    if state.place == READY and txn.get(queue.ready_mark) is None:
        yield "ready, and the ready index does not know"
    forgotten = not state.keep and state.status == COMPLETED
    if txn.get(queue.tenant.body + task_id) is None and not forgotten:
        yield "no body"
    if state.digest and not state.gone(txn.now_ms) and txn.get(queue.key + state.digest) != task_id:
        yield "does not hold its deduplication key"
    if (state.status == IN_PROGRESS) != bool(state.token):
        yield "a token without a lease, or a lease without a token"


def _examine_slot(tenant: TenantKeys, task_id: bytes, slots: bytes | None, report: Report) -> None:
    if slots is not None and slot_of(task_id) not in slots:
        where = f"{tenant.name} {id_to_text(task_id)}"
        report.add("in a shard that its id does not belong to: it is run, but not found by its id", where)


def _examine_chunks(txn: ReadTxn, tenant: TenantKeys, report: Report) -> Iterator[tuple[QueueKeys, bytes, State]]:
    """Yields the rows of loads that have no records of their own."""
    expiring = set(_expiring_chunks(txn, tenant))
    for key, value in _items(txn, tenant.head):
        try:
            head = decode_head(value)
            chunk = read_chunk(txn, tenant, head)
        except UnreadableRecord:
            report.add("chunk cannot be read, its head or its rows", key)
            continue
        if not head.version and head.chunk_id not in expiring:
            report.add("staged chunk that will not expire", key)
        if head.version and head.done():
            report.add("chunk without a row left", key)
        for number, block in enumerate(head.blocks if head.version else ()):
            queue = queue_keys(tenant.name, block.command)
            if block.taken < block.count and txn.get(block_entry(tenant, head, number)) is None:
                report.add("block without an entry in its place", key)
            for row in chunk.left(number):
                state = chunk.state(number, row)
                if state.place == READY and txn.get(queue.ready_mark) is None:
                    report.add("a block is ready, and the ready index does not know", key)
                if txn.get(tenant.state + chunk.id(row)) is not None:
                    report.add("row of a block with a state of its own", f"{tenant.name} {id_to_text(chunk.id(row))}")
                yield queue, chunk.id(row), state
    for key, _ in _items(txn, tenant.chunk):
        if txn.get(tenant.head + key[len(tenant.chunk) :]) is None:
            report.add("rows of a chunk without a head", key)


def _examine_indexes(txn: ReadTxn, tenant: TenantKeys, report: Report) -> None:
    for letter, place in _PLACE_LETTERS.items():
        for key, _ in _items(txn, tenant.first + letter):
            if not _named(txn, tenant, key):
                report.add(f"{'parked' if place == PARKED else PLACES[place]} entry that no task names", key)
    for prefix, what in ((tenant.body, "body"), (tenant.result, "result")):
        for key, value in _items(txn, prefix):
            if txn.get(tenant.state + id_of(key)) is None:
                report.add(f"{what} without a task", key)
            if not _readable(decode_body if prefix == tenant.body else decode_result, value):
                report.add(f"{what} cannot be read", key)
    for key, value in _items(txn, tenant.first + b"K"):
        if not _held(txn, tenant, key, value):
            report.add("deduplication key that its task does not have", key)


def _examine_journal(txn: ReadTxn, report: Report) -> None:
    size = 0
    for key, value in _items(txn, JOURNAL):
        size += len(key) + len(value)
        try:
            report.events += sum(run.count() for run in decode_runs(value))
        except UnreadableRecord:
            report.add("journal entry cannot be read", key)
    counted = from_count(txn.get(META_JOURNAL_BYTES))
    if counted != size:
        report.add(f"the journal's size is counted as {counted} and is {size}", META_JOURNAL_BYTES)


# --------------------------------------------------------------------------------------------------------------- repair


def repair(txn: Txn) -> None:
    """Rebuilds every index, counter and mark from the states, and drops what belongs to no task.

    A state that cannot be read is made anew from the body, as that of a new task: at worst it runs once more. A task
    whose body is lost cannot be delivered and goes, as does a journal entry that cannot be read.
    """
    for key, value in list(_items(txn, JOURNAL)):
        if not _readable(decode_runs, value):
            txn.delete(key)
    for name in list(_tenants(txn)):
        _rebuild_states(txn, tenant_keys(name))
    for name in list(_tenants(txn)):
        _rebuild_chunks(txn, tenant_keys(name))
    for name in _tenants(txn):
        _repair_tenant(txn, tenant_keys(name))
    for key, _ in list(_items(txn, DUE)):
        at_ms, queue = parse_due_key(key)
        if txn.get(queue.due) != ms8(at_ms):
            txn.delete(key)
    size = sum(len(key) + len(value) for key, value in _items(txn, JOURNAL))
    txn.add(META_JOURNAL_BYTES, size - from_count(txn.get(META_JOURNAL_BYTES)))


def _rebuild_states(txn: Txn, tenant: TenantKeys) -> None:
    for n, (key, value) in enumerate(list(_items(txn, tenant.state))):
        task_id = id_of(key)
        body = txn.get(tenant.body + task_id)
        body_lost = body is None or not _readable(decode_body, body)
        if not _readable(decode_state, value):
            if body is None or body_lost:
                txn.delete(key)
            else:
                txn.put(key, encode_state(_new_state(txn, tenant, task_id, decode_body(body), n)))
        elif body_lost and not decode_state(value).ended():
            txn.delete(key)


def _rebuild_chunks(txn: Txn, tenant: TenantKeys) -> None:
    """Drops chunks that belong to nothing. Rows whose head cannot be read, but which a block in a place names, were
    committed: each that has no state becomes a task of its own; at worst it runs once more."""
    for key, value in list(_items(txn, tenant.head)):
        name = key[len(tenant.head) :]
        rows = txn.get(tenant.chunk + name)
        if rows is None or not _readable(decode_rows, rows):
            txn.delete(key)
        elif not _readable(decode_head, value):
            if _stands_somewhere(txn, tenant, name):
                _make_tasks(txn, tenant, name, decode_rows(rows))
            txn.delete(key)
        elif decode_head(value).version and decode_head(value).done():
            txn.delete(key)
    for key, _ in list(_items(txn, tenant.chunk)):
        if txn.get(tenant.head + key[len(tenant.chunk) :]) is None:
            txn.delete(key)


def _stands_somewhere(txn: ReadTxn, tenant: TenantKeys, chunk: bytes) -> bool:
    return any(
        is_block(key) and parse_block_name(id_of(key))[0] == chunk
        for letter in (b"P", b"D")
        for key, _ in _items(txn, tenant.first + letter)
    )


def _make_tasks(txn: Txn, tenant: TenantKeys, name: bytes, rows: StoredRows) -> None:
    chunk = Chunk(tenant, Head(name + bytes(TAIL_BYTES), b"", 0, [], []), ChunkRows(rows))
    for row in range(len(rows.payloads)):
        task_id = chunk.id(row)
        if txn.get(tenant.state + task_id) is None:
            body = chunk.body(row)
            txn.put(tenant.body + task_id, encode_body(body))
            txn.put(tenant.state + task_id, encode_state(_new_state(txn, tenant, task_id, body, row)))


def _new_state(txn: Txn, tenant: TenantKeys, task_id: bytes, body: Body, n: int) -> State:
    digest = b"" if body.key is None else key_digest(tenant.name, body.command, body.key)
    held = digest and txn.get(queue_keys(tenant.name, body.command).key + digest) == task_id
    ttl_ms = int(RESULT_TTL_DEFAULT_S * 1000)
    return State(
        command=body.command,
        status=PENDING,
        place=READY,
        rank=ready_ranks(PRIORITY_MIN, txn.version, [n])[0],
        priority=PRIORITY_MIN,
        attempts=0,
        max_attempts=MAX_ATTEMPTS_DEFAULT,
        size=len(body.payload),
        enqueued_ms=txn.now_ms,
        due_ms=txn.now_ms,
        expires_ms=0,
        result_ttl_ms=ttl_ms,
        retention_ms=ttl_ms,
        keep=True,
        digest=digest if held else b"",
    )


def _repair_tenant(txn: Txn, tenant: TenantKeys) -> None:
    counts: Counter[bytes] = Counter()
    uses = Recount(tenant)
    _drop_orphans(txn, tenant)
    expiring = set(_expiring(txn, tenant))
    for key, value in list(_items(txn, tenant.state)):
        task_id = id_of(key)
        state = decode_state(value)
        queue = queue_keys(tenant.name, state.command)
        _count(counts, queue, state)
        uses.add(state)
        if state.place != NOWHERE:
            txn.put(_entry(queue, task_id, state), state.reason.encode() if state.place == DEAD else b"")
        if state.place == READY:
            txn.put(queue.ready_mark, b"")
        if state.place in (LEASED, DELAYED):
            _know_due(txn, queue, from8(state.rank[:8]))
        if state.digest and txn.get(queue.key + state.digest) is None:
            txn.put(queue.key + state.digest, task_id)
        if state.ended() and task_id not in expiring:
            txn.put(expiry_key(state.kept_until_ms, EXPIRE_TASK, tenant.name, task_id), task_id)
    _repair_chunks(txn, tenant, counts)
    for queue, at_ms in uses.repair(txn):
        _know_due(txn, queue, at_ms)
    stored = {key: from_count(value) for key, value in _items(txn, tenant.counters)}
    for key in stored.keys() | counts.keys():
        txn.add(key, counts[key] - stored.get(key, 0))


def _repair_chunks(txn: Txn, tenant: TenantKeys, counts: Counter[bytes]) -> None:
    """Puts every block where its chunk says, and counts its rows."""
    expiring = set(_expiring_chunks(txn, tenant))
    for _, value in list(_items(txn, tenant.head)):
        head = decode_head(value)
        chunk = read_chunk(txn, tenant, head)
        if not head.version and head.chunk_id not in expiring:
            txn.put(expiry_key(head.expires_ms, EXPIRE_CHUNK, tenant.name, head.chunk_id), head.chunk_id)
        for number, block in enumerate(head.blocks if head.version else ()):
            queue = queue_keys(tenant.name, block.command)
            if block.taken == block.count:
                continue
            txn.put(block_entry(tenant, head, number), b"")
            if block.wait == NO_WAIT:
                txn.put(queue.ready_mark, b"")
            else:
                _know_due(txn, queue, due_ms(head, block, block.due))
            for row in chunk.left(number):
                _count(counts, queue, chunk.state(number, row))


def _drop_orphans(txn: Txn, tenant: TenantKeys) -> None:
    for letter in _PLACE_LETTERS:
        for key, _ in list(_items(txn, tenant.first + letter)):
            if not _named(txn, tenant, key):
                txn.delete(key)
    for prefix in (tenant.body, tenant.result):
        for key, _ in list(_items(txn, prefix)):
            if txn.get(tenant.state + id_of(key)) is None:
                txn.delete(key)
    for key, value in list(_items(txn, tenant.first + b"K")):
        if not _held(txn, tenant, key, value):
            txn.delete(key)


def _know_due(txn: Txn, queue: QueueKeys, at_ms: int) -> None:
    due = txn.get(queue.due)
    at_ms = at_ms if due is None else min(at_ms, from8(due))
    if due is not None:
        txn.delete(due_key(due, queue))
    txn.put(queue.due, ms8(at_ms))
    txn.put(due_key(ms8(at_ms), queue), b"")


# -------------------------------------------------------------------------------------------------------------- helpers


def _tenants(txn: ReadTxn) -> Iterator[str]:
    cursor: str | None = None
    while True:
        page = tenants(txn, cursor, STEP)
        yield from page.tenants
        cursor = page.cursor
        if cursor is None:
            return


def _items(txn: ReadTxn, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    start = prefix
    while step := txn.scan(start, end_of(prefix), STEP):
        yield from step
        start = step[-1][0] + SEPARATOR


def _agrees(txn: ReadTxn, tenant: TenantKeys, task_id: bytes, test: Callable[[State], bool]) -> bool:
    """Whether a task's state is there and passes the test; one that cannot be read has the benefit of the doubt."""
    stored = txn.get(tenant.state + task_id)
    if stored is None:
        return False
    try:
        return test(decode_state(stored))
    except UnreadableRecord:
        return True


def _named(txn: ReadTxn, tenant: TenantKeys, entry: bytes) -> bool:
    """Whether the task, or the block, that an index entry is about stands there; what limits have among the delayed is
    theirs."""
    if names_block(tenant, entry):
        return _block_named(txn, tenant, entry)
    task_id = id_of(entry)
    if entry.startswith(tenant.first + b"D") and kind_of(entry) in (KIND_LIMIT, KIND_REVIEW):
        return timer_named(txn, tenant, entry)
    return _agrees(
        txn, tenant, task_id, lambda state: _entry(queue_keys(tenant.name, state.command), task_id, state) == entry
    )


def _block_named(txn: ReadTxn, tenant: TenantKeys, entry: bytes) -> bool:
    name, number = parse_block_name(id_of(entry))
    try:
        head = read_head(txn, tenant, name)
    except UnreadableRecord:
        return True
    return head is not None and stands(tenant, head, number, entry)


def _held(txn: ReadTxn, tenant: TenantKeys, key: bytes, owner: bytes) -> bool:
    """Whether the task that a deduplication key points to has that key."""
    return _agrees(txn, tenant, owner, lambda state: state.digest == key[-ID_BYTES:])


def _readable(decode: Callable[[bytes], object], value: bytes) -> bool:
    try:
        decode(value)
    except UnreadableRecord:
        return False
    return True


def _entry(queue: QueueKeys, task_id: bytes, state: State) -> bytes:
    return b"" if state.place == NOWHERE else queue.of_place[state.place] + state.rank + task_id


def _expiring(txn: ReadTxn, tenant: TenantKeys) -> Iterator[bytes]:
    """Yields the ended tasks that an expiry entry will remove."""
    for key, value in _items(txn, EXPIRIES):
        at_ms, kind, name = parse_expiry_key(key)
        if kind == EXPIRE_TASK and name == tenant.name:
            for task_id in split_ids(value):
                if _agrees(txn, tenant, task_id, lambda state, at_ms=at_ms: state.kept_until_ms == at_ms):  # type: ignore[misc]
                    yield task_id


def _expiring_chunks(txn: ReadTxn, tenant: TenantKeys) -> Iterator[bytes]:
    """Yields the staged chunks that an expiry entry will remove."""
    for key, value in _items(txn, EXPIRIES):
        at_ms, kind, name = parse_expiry_key(key)
        if kind == EXPIRE_CHUNK and name == tenant.name:
            for chunk_id in split_ids(value):
                stored = txn.get(tenant.head + chunk_id[:CHUNK_BYTES])
                if stored is not None and _readable(decode_head, stored) and decode_head(stored).expires_ms == at_ms:
                    yield chunk_id


def _count(counts: Counter[bytes], queue: QueueKeys, state: State) -> None:
    for number in range(len(COUNTER_FIELDS)):
        amount = state.size if number == BYTES else int(state.place == number)
        if number == READY and state.place == PARKED:
            amount = 1
        if amount:
            counts[queue.counters[number]] += amount
            counts[queue.tenant.totals[number]] += amount
