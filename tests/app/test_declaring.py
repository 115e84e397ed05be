"""What can be declared as a task."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dibs import Dibs
from dibs.errors import InvalidOption


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backoff": 5}, "use a Backoff"),
        ({"fail_on": [KeyError]}, "use an exception class"),
        ({"fail_on": KeyError("x")}, "use an exception class"),
        ({"aliases": "old"}, "use a list of names"),
    ],
)
def test_what_a_declaration_cannot_mean_is_refused(url: str, options: dict[str, Any], says: str) -> None:
    """A worker that meets it would only fail later."""
    app = Dibs(url)
    with pytest.raises(InvalidOption, match=says):
        app.task(name="work", **options)(lambda: None)


def test_what_yields_is_not_a_handler(url: str) -> None:
    """Generators return no result; things that cannot be called are no functions at all."""
    app = Dibs(url)

    def numbers() -> Iterator[int]:
        yield 1

    async def more() -> AsyncIterator[int]:
        yield 1

    for handler in (numbers, more):
        with pytest.raises(InvalidOption, match="yields instead of returning"):
            app.task(name="work")(handler)
    with pytest.raises(InvalidOption, match="not for int"):
        app.task(5)  # type: ignore[call-overload]
