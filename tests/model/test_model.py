"""The ordered store, on its engines, against the model in `dibs.testing.simulation`."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dibs.clock import Clock
from dibs.settings import Settings
from dibs.stores import open_local
from dibs.stores.local import LocalStore
from dibs.testing.simulation import StoreMachine

#: A failure is made small, for up to five minutes, before it is told.
TIMEOUT_S = 600


class OrderedMachine(StoreMachine):
    """A store that has a doctor."""

    async def check_at_the_end(self) -> None:
        """No record disagrees with another."""
        assert isinstance(self.store, LocalStore)
        report = await self.store.doctor()
        assert report.clean, report.problems
        assert report.tasks == len(self.model.tasks)


def check_memory(profile: settings) -> None:
    """Runs the machine on the sorted map. (hypothesis takes anything that makes machines, and declares less.)"""
    run_state_machine_as_test(
        lambda: OrderedMachine(lambda clock: open_local("memory:", clock=clock), in_turn=True),  # type: ignore[arg-type]
        settings=profile,
    )


def check_lmdb(directory: Path, profile: settings) -> None:
    """Runs the machine on LMDB, each time in a new directory, closed and opened again now and then."""
    numbers = itertools.count()

    def opener() -> Callable[[Clock], Awaitable[LocalStore]]:
        url = f"lmdb:{directory / str(next(numbers))}"
        return lambda clock: open_local(url, clock=clock, settings=Settings(durability="relaxed"))

    run_state_machine_as_test(
        lambda: OrderedMachine(opener(), reopens=True, in_turn=True),  # type: ignore[arg-type]
        settings=profile,
    )


def check_shards(where: str, profile: settings) -> None:
    """Runs the machine on two and on four shards; `where` says of what, and has room for a number of its own."""
    numbers = itertools.count()

    def machine() -> OrderedMachine:
        number = next(numbers)
        count = 2 + 2 * (number % 2)
        url = f"shards:{where.format(number)}?n={count}"
        return OrderedMachine(
            lambda clock: open_local(url, clock=clock, settings=Settings(durability="relaxed")),
            reopens=not where.startswith("memory:"),
            shard_of=lambda task_id: task_id[-1] % count,
        )

    run_state_machine_as_test(machine, settings=profile)  # type: ignore[arg-type]


def histories(examples: int, steps: int, *, anew: bool = False) -> settings:
    """So many histories of so many steps: the same in every run, or others each time, where a failure prints the blob
    that repeats it. No deadline: how long a step takes is not what is tested."""
    return settings(
        derandomize=not anew,
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_memory_is_as_the_model() -> None:
    """Whatever is done to it in whatever order, the store on the memory engine answers and stands as the rules say."""
    check_memory(histories(250, steps=40))


@pytest.mark.timeout(TIMEOUT_S)
def test_lmdb_is_as_the_model(tmp_path: Path) -> None:
    """The same on LMDB, where nothing is forgotten or invented by closing and opening."""
    check_lmdb(tmp_path, histories(100, steps=40))


@pytest.mark.timeout(TIMEOUT_S)
def test_shards_in_memory_are_as_the_model() -> None:
    """Several stores as one answer and stand as the rules say, with the order of each shard."""
    check_shards("memory:", histories(100, steps=40))


@pytest.mark.timeout(TIMEOUT_S)
def test_shards_of_lmdb_are_as_the_model(tmp_path: Path) -> None:
    """The same on LMDB, closed and opened again now and then."""
    check_shards(f"{tmp_path}/{{}}", histories(40, steps=40))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_shards_are_as_the_model_for_long(tmp_path: Path) -> None:
    """Far more and far longer histories on shards, new ones in every run."""
    check_shards("memory:", histories(2_000, steps=120, anew=True))
    check_shards(f"{tmp_path}/{{}}", histories(300, steps=120, anew=True))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_is_as_the_model_for_long() -> None:
    """Far more and far longer histories on the memory engine, new ones in every run."""
    check_memory(histories(5_000, steps=120, anew=True))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_lmdb_is_as_the_model_for_long(tmp_path: Path) -> None:
    """Far more and far longer histories on LMDB, new ones in every run."""
    check_lmdb(tmp_path, histories(1_000, steps=120, anew=True))
