from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from dibs import Dibs, Fail, Retry
from dibs.task import Status
from dibs.testing.kit import Kit, kit

app = Dibs("./never-made")
seen: list[str] = []


@app.task
async def greet(name: str, at: datetime.datetime | None = None) -> str:
    """Greets, and is polite to one more person."""
    seen.append(name)
    if name == "ada":
        await greet.aenqueue("charles")
    return f"hello {name}"


@app.task(max_attempts=2)
def stumble(how: str) -> None:
    """Fails in one of several ways."""
    if how == "retry":
        raise Retry(delay_s=60)
    raise Fail("CLUMSY", how)


@pytest.fixture
def dibs_app() -> Dibs:
    """The app that the tests below are about."""
    seen.clear()
    return app


def test_what_was_enqueued_can_be_asked_for(dibs_kit: Kit) -> None:
    """Calls that wait are found by the arguments that are named, in the form in which they were stored."""
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    greet.enqueue("ada", at=at)
    greet.enqueue("grace")
    dibs_kit.assert_enqueued(greet, name="ada", at=at)
    dibs_kit.assert_enqueued(greet, count=2)
    dibs_kit.assert_enqueued(greet, count=0, name="nobody")
    assert [call["name"] for call in dibs_kit.enqueued(greet)] == ["ada", "grace"]


def test_a_missing_call_is_told_with_what_is_there(dibs_kit: Kit) -> None:
    """A failed assertion shows the calls that do wait."""
    greet.enqueue("grace")
    with pytest.raises(AssertionError, match=r"0 calls of .*greet wait with .*ada.*\n.*grace"):
        dibs_kit.assert_enqueued(greet, name="ada")


def test_drain_runs_everything_that_is_due(dibs_kit: Kit) -> None:
    """Drain runs what waits and what that enqueues, through the real encoding, and says how it went."""
    handle = greet.enqueue("ada")
    assert dibs_kit.drain().completed == 2
    assert seen == ["ada", "charles"]
    assert handle.result() == "hello ada"
    assert [task.status for task in dibs_kit.tasks(greet)] == [Status.COMPLETED, Status.COMPLETED]


def test_time_is_moved_by_hand(dibs_kit: Kit) -> None:
    """What is delayed stays until the clock is moved; retries wait as long as they say."""
    greet.options(delay_s=3600).enqueue("later")
    handle = stumble.enqueue("retry")
    assert dibs_kit.drain().retried == 1
    assert seen == []
    dibs_kit.clock.advance(59)
    assert dibs_kit.drain().runs == 0
    dibs_kit.clock.advance(1)
    assert dibs_kit.drain().failed == 1
    assert handle.status() is Status.FAILED
    dibs_kit.clock.advance(3600)
    assert dibs_kit.drain().completed == 1
    assert seen == ["later"]


def test_each_kit_is_empty_and_the_apps_own_store_is_not_touched(tmp_path: Path) -> None:
    """Two kits share nothing; afterwards the app is on its own store again, with all that was there."""
    own = Dibs(tmp_path / "data")

    @own.task(name="note")
    def note(text: str) -> str:
        return text

    before = note.enqueue("kept")
    with kit(own) as first:
        note.enqueue("gone")
        first.assert_enqueued(note, count=1)
    with kit(own) as second:
        second.assert_enqueued(note, count=0)
    assert before.status() is Status.PENDING
    assert own.drain().completed == 1
    own.close()


async def test_a_kit_works_in_async_tests(dibs_kit: Kit) -> None:
    """Async tests enqueue in their own loop and drain with `adrain`."""
    handle = await greet.aenqueue("grace")
    assert (await app.adrain()).completed == 1
    assert await handle == "hello grace"


def test_dibs_kit_without_an_app_says_what_to_do(pytester: pytest.Pytester) -> None:
    """A project that uses the fixture without naming its app is told how."""
    pytester.makepyfile("def test_it(dibs_kit): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*define a fixture dibs_app that returns it*"])
