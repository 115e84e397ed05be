import re

import pytest

from dibs import errors
from dibs.errors import DibsError, all_errors, error_from_code

# Only dibs's own: another test may have derived an error from one of them.
TREE = [error for error in all_errors() if error.__module__ == errors.__name__]


def drawn_parents() -> dict[str, str | None]:
    """Reads the drawing in the module's docstring: each error's name and that of the one above it."""
    parents: dict[str, str | None] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ((?:│   |    )*)(├── |└── )?([A-Z]\w+)", line):
            depth = len(match[1]) // 4 + bool(match[2])
            del above[depth:]
            parents[match[3]] = above[-1] if above else None
            above.append(match[3])
    return parents


def test_drawing_is_the_tree() -> None:
    """The drawing shows every error under its parent, and nothing else."""
    real = {error.__name__: None if error is DibsError else error.__bases__[0].__name__ for error in TREE}
    assert drawn_parents() == real


def test_every_error_of_the_module_is_in_the_tree() -> None:
    """No exception is defined beside the tree, where `except DibsError` would miss it."""
    defined = {thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, BaseException)}
    assert defined == set(TREE)


def test_codes_are_unique() -> None:
    """No two errors share a code, and no error inherits its parent's."""
    assert len({error.code for error in TREE}) == len(TREE)


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
class TestEach:
    """What holds for every single error."""

    def test_says_what_to_do(self, error: type[DibsError]) -> None:
        """Every error has a docstring of its own that is a sentence."""
        assert re.fullmatch(r"[A-Z`].*\.", error.__dict__["__doc__"], re.DOTALL)

    def test_code_fits_the_wire(self, error: type[DibsError]) -> None:
        """A code is a short lower-case word that any protocol can carry."""
        assert re.fullmatch(r"[a-z][a-z_]{0,31}", error.__dict__["code"])

    def test_round_trip(self, error: type[DibsError]) -> None:
        """An error that travelled as code and message is the same class with the same message."""
        back = error_from_code(error.code, "what happened")
        assert type(back) is error
        assert str(back) == "what happened"


def test_unknown_code() -> None:
    """A code from a newer dibs is still a DibsError, and says which code it was."""
    back = error_from_code("not_yet_invented", "what happened")
    assert type(back) is DibsError
    assert str(back) == "not_yet_invented: what happened"


def test_parents_first() -> None:
    """Walking the tree meets every error once, after its parent."""
    for index, error in enumerate(TREE[1:], start=1):
        assert error.__bases__[0] in TREE[:index]
        assert error not in TREE[:index]
