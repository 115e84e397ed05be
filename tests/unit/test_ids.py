"""Ids: unique, ordered by time, in the slot of their key, and the same as bytes and as text."""

from __future__ import annotations

import os
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dibs.errors import InvalidName
from dibs.ids import (
    CHUNK_BYTES,
    chunk_id_of,
    id_from_text,
    id_to_text,
    key_digest,
    new_id,
    new_ids,
    row_id,
    slot_of,
)
from dibs.stores.batches import row_ids
from dibs.task import NewTask


def test_an_id_is_a_uuid_of_version_7() -> None:
    """People and other programs can read an id as what it is."""
    for minted in (new_id(), new_id("t", "c", "key"), *new_ids(3)):
        assert (uuid.UUID(bytes=minted).version, uuid.UUID(bytes=minted).variant) == (7, uuid.RFC_4122)


def test_ids_are_unique() -> None:
    """One by one or many at once, no id comes twice."""
    ids = [new_id() for _ in range(20_000)] + new_ids(20_000)
    assert len(set(ids)) == len(ids)


def test_a_child_process_mints_others() -> None:
    """A fork does not make parent and child mint the same ids."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"".join(new_ids(50)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    theirs = {told[start + 8 : start + 16] for start in range(0, len(told), 16)}
    assert len(theirs) == 50
    assert theirs.isdisjoint(minted[8:] for minted in new_ids(50))


def test_slots_of_ids_without_a_key_are_spread() -> None:
    """Every one of the 256 slots is used, by single ids and by batches; those of one batch share theirs."""
    assert {slot_of(new_id()) for _ in range(10_000)} == set(range(256))
    batches = [{slot_of(minted) for minted in new_ids(5)} for _ in range(10_000)]
    assert {len(slots) for slots in batches} == {1}
    assert set.union(*batches) == set(range(256))


@given(tenant=st.text(max_size=20), command=st.text(max_size=20), key=st.text(max_size=40))
def test_a_keyed_id_is_in_the_slot_of_its_key(tenant: str, command: str, key: str) -> None:
    """Every enqueue with a key meets the first one in the same shard."""
    assert slot_of(new_id(tenant, command, key)) == slot_of(key_digest(tenant, command, key))


def test_digests_do_not_run_together() -> None:
    """What belongs to the tenant, the command and the key is told apart, wherever the border is."""
    parts = [("a", "b", "c"), ("ab", "", "c"), ("", "ab", "c"), ("a", "bc", ""), ("abc", "", ""), ("", "", "abc")]
    assert len({key_digest(*part) for part in parts}) == len(parts)


def test_an_id_of_a_row_is_that_of_its_chunk_with_a_number() -> None:
    """It begins as its chunk's id does, and says which row it is and in which slot."""
    chunk = new_id()
    ids = [row_id(chunk, number, slot) for number in (0, 1, 255, 256, 999) for slot in (0, 7, 255)]
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)
    assert {minted[:CHUNK_BYTES] for minted in ids} == {chunk[:CHUNK_BYTES]}
    assert {len(minted) for minted in ids} == {16}
    assert [slot_of(minted) for minted in ids[:3]] == [0, 7, 255]
    assert int.from_bytes(ids[-1][CHUNK_BYTES:-1], "big") == 999


def test_ids_of_rows_are_uuids_too() -> None:
    """People and other programs read them as they do any id."""
    for number in (0, 999):
        minted = row_id(new_id(), number, 255)
        assert (uuid.UUID(bytes=minted).version, uuid.UUID(bytes=minted).variant) == (7, uuid.RFC_4122)


@given(
    chunk=st.binary(min_size=16, max_size=16),
    keys=st.lists(st.none() | st.text(min_size=1, max_size=20), min_size=1, max_size=30),
)
def test_rows_are_in_the_slot_of_their_key_or_of_their_chunk(chunk: bytes, keys: list[str | None]) -> None:
    """Rows without a key are all in the slot of the chunk; the ids are the same whenever they are asked for."""
    rows = [NewTask(command="work", key=key) for key in keys]
    ids = row_ids("acme", chunk, rows)
    assert len(set(ids)) == len(rows)
    assert ids == row_ids("acme", chunk, rows)
    for key, minted in zip(keys, ids, strict=True):
        assert slot_of(minted) == slot_of(chunk if key is None else key_digest("acme", "work", key))


def test_no_two_chunks_share_a_row() -> None:
    """Chunk ids that `new_id` minted have rows of their own, also when they are minted together."""
    names = [minted[:CHUNK_BYTES] for minted in (*new_ids(20_000), *(new_id() for _ in range(20_000)))]
    assert len(set(names)) == len(names)


@given(data=st.binary(min_size=16, max_size=16))
def test_text_and_bytes_are_the_same_id(data: bytes) -> None:
    """An id survives being written down."""
    assert id_from_text(id_to_text(data)) == data


@pytest.mark.parametrize("text", ["", "x", "0" * 31, "../../etc/passwd", None, 5])
def test_what_is_no_id_is_refused(text: object) -> None:
    """Anything but a UUID is refused with an example of one."""
    with pytest.raises(InvalidName, match="expected a UUID such as"):
        id_from_text(text)  # type: ignore[arg-type]


def test_the_chunks_of_a_named_load() -> None:
    """Their ids look like ids, are the same every time, follow their numbers, and share nothing with other loads."""
    numbers = [0, 1, 2, 4095, 4096, 4097, 99_999]
    ids = [chunk_id_of("acme", "import", number) for number in numbers]
    assert ids == [chunk_id_of("acme", "import", number) for number in numbers]
    assert ids == sorted(ids)
    assert {uuid.UUID(bytes=one).version for one in ids} == {7}
    assert {uuid.UUID(bytes=one).variant for one in ids} == {uuid.RFC_4122}
    others = [chunk_id_of("acme", "imports", 0), chunk_id_of("acm", "import", 0), chunk_id_of("acme", "import", 3)]
    assert len({one[:CHUNK_BYTES] for one in [*ids, *others]}) == len(ids) + len(others)
