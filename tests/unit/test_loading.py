"""A load on its way into a store: what is staged, what is given up, what is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from dibs.errors import InvalidOption, PayloadTooLarge, StoreUnavailable
from dibs.ids import chunk_id_of
from dibs.stores import loading, open_store
from dibs.stores.loading import Load
from dibs.stores.protocol import Store
from dibs.task import Committed, NewTask, Rows

T = TypeVar("T")

ROWS = Rows([b"1"] * 10, [NewTask(command="work")])
TOO_LARGE = Rows([b"1", b"1" * (2 << 20)], ROWS.options)


class Asking:
    """A way to a store that may be cut."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.cut = False

    async def __call__(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """Asks, as an app does."""
        if self.cut:
            raise StoreUnavailable("cut")
        return await question(self.store)

    async def staged(self, name: str) -> int:
        """How many chunks of a named load wait for their commit; they are dropped."""
        return await self.store.drop("default", [chunk_id_of("default", name, number) for number in range(20)])

    async def ready(self) -> int:
        """How many tasks can be claimed."""
        return (await self.store.stats("default")).total.ready


@pytest.fixture
async def ask() -> AsyncIterator[Asking]:
    """A way to an empty store."""
    async with await open_store("memory:") as store:
        yield Asking(store)


async def test_a_load(ask: Asking) -> None:
    """Everything is visible after the commit, and nothing before."""
    load = Load(ask, "default", "import")
    ids = [await load.stage(ROWS) for _ in range(9)]
    assert ids == [chunk_id_of("default", "import", number) for number in range(9)]
    assert await ask.ready() == 0
    done = await load.commit()
    assert (done.rows, done.already, load.rows, await ask.ready()) == (90, False, 90, 90)


async def test_a_load_that_is_known(ask: Asking) -> None:
    """After the first chunk it knows; nothing of the rest is staged, and the commit says so."""
    for already in (False, True):
        load = Load(ask, "default", "import")
        for _ in range(9):
            await load.stage(ROWS)
            assert load.already is already
        assert (await load.commit()).already is already
    assert await ask.ready() == 90


async def test_a_load_that_is_known_and_done(ask: Asking) -> None:
    """Where no chunk is left that tells, the commit does; what was staged for it is dropped."""
    await _whole(ask, "import")
    assert len(await ask.store.claim("default", ["work"], limit=1000)) == 10
    assert (await _whole(ask, "import")).already
    assert await ask.staged("import") == 0


async def _whole(ask: Asking, name: str) -> Committed:
    load = Load(ask, "default", name)
    await load.stage(ROWS)
    return await load.commit()


async def test_a_load_without_a_name(ask: Asking) -> None:
    """Each is a load of its own."""
    loads = [Load(ask, "default") for _ in range(2)]
    for load in loads:
        await load.stage(ROWS)
        assert not (await load.commit()).already
    assert loads[0].name != loads[1].name
    assert await ask.ready() == 20


async def test_a_chunk_that_is_refused(ask: Asking) -> None:
    """It is raised by a later stage or by the commit, says which rows it means, and the rest can be dropped."""
    load = Load(ask, "default", "import")
    for rows in (ROWS, ROWS, TOO_LARGE, ROWS):
        await load.stage(rows)
    with pytest.raises(PayloadTooLarge, match="row 1: the payload") as caught:
        await load.commit()
    assert caught.value.__notes__ == ["Its rows are counted after the first 20 of the load."]
    await load.drop()
    assert (await ask.staged("import"), await ask.ready()) == (0, 0)


async def test_the_first_chunk_is_waited_for(ask: Asking) -> None:
    """What is wrong with all of them shows at the first."""
    load = Load(ask, "default", "import")
    with pytest.raises(PayloadTooLarge):
        await load.stage(TOO_LARGE)
    await load.drop()


async def test_a_store_that_goes_away(ask: Asking) -> None:
    """Then what was staged is left to be forgotten: dropping it raises nothing."""
    load = Load(ask, "default", "import")
    await load.stage(ROWS)
    ask.cut = True
    with pytest.raises(StoreUnavailable):
        await load.commit()
    await load.drop()
    assert (await ask.staged("import"), await ask.ready()) == (1, 0)


async def test_nothing(ask: Asking) -> None:
    """A load of nothing is committed without asking, and uses up no name."""
    ask.cut = True
    assert (await Load(ask, "default", "import").commit()).rows == 0


async def test_too_many_chunks(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no commit could name is refused before it is staged."""
    monkeypatch.setattr(loading, "CHUNKS_MAX", 3)
    load = Load(ask, "default", "import")
    for _ in range(3):
        await load.stage(ROWS)
    with pytest.raises(InvalidOption, match="at most 3 chunks, and this one 30 rows already: load it in parts"):
        await load.stage(ROWS)
    await load.drop()
