from __future__ import annotations

import os

import pytest

from dibs.ids import new_id
from dibs.stores.ordered import records
from dibs.stores.ordered.records import (
    IN_PROGRESS,
    LEASED,
    PENDING,
    READY,
    Head,
    RunRows,
    State,
    decode_head,
    decode_state,
    encode_head,
    encode_new_state,
    encode_state,
    recall_state,
    remember_leased,
)


def new_state() -> State:
    """A task that waits."""
    return State(
        rank=os.urandom(14),
        size=150,
        command="mail",
        status=PENDING,
        place=READY,
        priority=3,
        attempts=0,
        max_attempts=5,
        enqueued_ms=1_800_000_000_000,
        due_ms=1_800_000_000_000,
        expires_ms=0,
        result_ttl_ms=1,
        retention_ms=2,
        keep=True,
        digest=b"d",
    )


def leased_state() -> State:
    """A task that somebody holds."""
    state = new_state()
    state.status, state.place, state.token = IN_PROGRESS, LEASED, os.urandom(16)
    return state


def test_a_new_state_is_short_and_reads_the_same() -> None:
    """What a new task leaves at its default is not written, and is there again when it is read."""
    state = new_state()
    data = encode_new_state(state)
    assert len(data) < len(encode_state(state))
    assert decode_state(data) == state


def test_what_a_claim_wrote_is_recalled_once() -> None:
    """The state that was written comes back for its bytes; the next reader gets one of its own."""
    state = leased_state()
    data = encode_state(state)
    remember_leased(data, state)
    first = recall_state(bytes(bytearray(data)))
    assert first is state
    first.attempts = 9
    assert recall_state(data).attempts == 0


def test_other_bytes_are_read() -> None:
    """Nothing but the very bytes recalls a state: whatever changed since is seen."""
    state = leased_state()
    remember_leased(encode_state(state), state)
    other = leased_state()
    assert recall_state(encode_state(other)) == other


def test_what_is_never_settled_here_does_not_pile_up() -> None:
    """Claims whose settlements never come are forgotten."""
    state = leased_state()
    for _ in range(2 * records._LEASED_MAX + 10):
        remember_leased(os.urandom(16), state)
    assert len(records._leased) <= records._LEASED_MAX


def test_rows_that_are_out_of_their_turn() -> None:
    """A head knows just the rows that were put out, in whatever order, also when it was read again."""
    head = Head(os.urandom(16), b"", 0, [], [])
    assert not any(head.is_out(row) for row in range(1_000))
    for put_out in (7, 999, 0, 8, 7):
        head.put_out(put_out)
    assert [row for row in range(1_100) if decode_head(encode_head(head)).is_out(row)] == [0, 7, 8, 999]
    assert len(head.out) == 125


@pytest.mark.parametrize("tails", [b"", bytes(range(30))])
def test_ids_of_rows_made_at_once(tails: bytes) -> None:
    """The ids of some rows of a chunk are those of each, one after the other."""
    rows = RunRows(new_id(), 10, tails)
    for first, end in ((0, 10), (0, 1), (3, 8), (9, 10)):
        assert rows.ids(first, end) == b"".join(rows.id(index) for index in range(first, end))
    many = RunRows(new_id(), 1_000)
    assert many.ids(200, 900) == b"".join(many.id(index) for index in range(200, 900))
