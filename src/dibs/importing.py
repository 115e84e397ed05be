"""How a module is named, so that a script and the worker that imports it agree, and how an app is found by name."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dibs.errors import AppNotFound, InvalidName, InvalidOption

if TYPE_CHECKING:
    from dibs.app import Dibs


def command_of(handler: Callable[..., Any]) -> str:
    """Returns ``module.function``; a script counts under the name by which it can be imported."""
    name = getattr(handler, "__qualname__", repr(handler))
    if "<" in name:
        raise InvalidName(f"{name} has no name that a worker could find: define it in a module, or give name=")
    return f"{module_of(handler)}.{name}"


def module_of(handler: Callable[..., Any]) -> str:
    """Returns the name under which a function's module can be imported, also if it is the script that is running."""
    name = handler.__module__
    if name == "__main__":
        module = vars(sys.modules["__main__"])
    elif name == "__mp_main__":
        # The script in a process that multiprocessing started: it is not the main module there, or not yet.
        module = getattr(inspect.unwrap(handler), "__globals__", {})
    else:
        return name
    spec = module.get("__spec__")
    if spec is not None:
        return str(spec.name)
    file = module.get("__file__")
    return name if file is None else locate(Path(file))[1]


def locate(file: Path) -> tuple[Path, str]:
    """Returns the directory to import a file from, and its name there: packages above it are part of the name."""
    file = file.resolve()
    parts = [] if file.stem == "__init__" else [file.stem]
    directory = file.parent
    while (directory / "__init__.py").exists():
        parts.insert(0, directory.name)
        directory = directory.parent
    return directory, ".".join(parts)


def import_app(name: str) -> Dibs:
    """Returns the app that ``module:attribute`` names (``path/to/file.py:attribute`` too). Without an attribute, the
    only app of the module. The working directory is looked in first."""
    from dibs.app import Dibs

    where, _, attribute = name.partition(":")
    module = _import(where, name)
    if not attribute:
        apps = {id(value): key for key, value in vars(module).items() if isinstance(value, Dibs)}
        if len(apps) != 1:
            found = f"it has {len(apps)}: {', '.join(apps.values())}" if apps else "it has none"
            raise AppNotFound(f"{where} does not tell which app is meant, {found}. Write {where}:app")
        attribute = next(iter(apps.values()))
    value = _attribute(module, attribute)
    if not isinstance(value, Dibs):
        what = "there is no such name" if value is None else f"that is a {type(value).__name__}"
        raise AppNotFound(f"{name} is not an app: {what} in {getattr(module, '__file__', where)}")
    return value


def import_function(name: str) -> Callable[..., Any]:
    """Returns the function that ``module:attribute`` names, found as an app is."""
    where, _, attribute = name.partition(":")
    module = _import(where, name)
    value = _attribute(module, attribute) if attribute else None
    if not callable(value):
        what = "there is no such name" if value is None else f"that is a {type(value).__name__}"
        raise AppNotFound(f"{name} is not a function: {what} in {getattr(module, '__file__', where)}")
    return value  # type: ignore[no-any-return]


def _attribute(module: Any, attribute: str) -> Any:
    value = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    return value


def _import(where: str, name: str) -> Any:
    if not where:
        raise AppNotFound(f"{name!r} names no module: write module:name, such as shop.tasks:app")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise AppNotFound(f"there is no file {where}")
        directory, where = locate(Path(where))
    else:
        directory = Path.cwd()
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise AppNotFound(f"there is no module {where}, looking from {directory}") from error
        raise AppNotFound(f"{where} cannot be imported: it needs {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise AppNotFound(
            f"{where} cannot be imported: {type(error).__name__}: {error}{_where_it_was_raised(error)}"
        ) from error


def _where_it_was_raised(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith("<frozen")), None)
    # A syntax error says it itself, and was raised by the import.
    return "" if last is None or isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"


class Here:
    """What kind of process this is. A module that enqueues, or starts a worker, when it is imported would do so again
    in every process that imports it to run a handler."""

    in_child = False
    """This process runs handlers for a worker."""
    importing = False
    """It is importing the module of one."""

    @classmethod
    def refuse(cls, what: str) -> None:
        """Raises where `what` must not happen."""
        if cls.importing or (cls.in_child and what == "starts a worker"):
            raise InvalidOption(f'this module {what} when it is imported: guard that by if __name__ == "__main__":')
