"""What a user adds without touching this package: by `package.module:name`, or by an entry point of their own package.

A package announces a dataset, network, learner or calibrator in its pyproject.toml, and `tcil` knows it by name:

    [project.entry-points."tcil.learners"]
    mine = "my_package.my_file:MyLearner"

The groups are tcil.datasets, tcil.networks, tcil.learners and tcil.calibrators.

`package.module:name` is code that is imported and called. It may come from a flag, the user's own study file or their
program. Names in a folder (settings.json, tasks.json) pass through `consent` first: without the user's `--trust` they
are limited to built-in names and entry points.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from tcil.foundation.errors import invalid, unknown_name


def extension(kind: str, name: str, known: Iterable[str]) -> Any:
    """The object behind `package.module:name`, or behind an entry point; `known` are tcil's own names."""
    if names_code(name):
        return resolve(name, kind)
    announced = installed(kind)
    if name not in announced:
        names = [*known, *announced]
        raise unknown_name(kind, name, names, "Or name one of your own: package.module:name.")
    try:
        return announced[name].load()
    except Exception as error:
        home = announced[name].value
        raise invalid(
            kind, f"{name!r}, announced as {home!r} ({error})", "an entry point that can be loaded"
        ) from error


def installed(kind: str) -> dict[str, EntryPoint]:
    """What installed packages announce, by name."""
    return {point.name: point for point in entry_points(group=f"tcil.{kind}s")}


PRETRAINED = "pretrained:"  # begins the names of networks on pre-trained backbones


def names_code(name: object) -> bool:
    """Whether a name is `package.module:name`, which is imported, and not one that a registry knows.

    What follows `pretrained:` is the name of a backbone, which may again be one or the other.

    >>> names_code("cifar10"), names_code("shutil:rmtree")
    (False, True)
    >>> names_code("pretrained:efficientnet_lite0"), names_code("pretrained:shutil:rmtree")
    (False, True)
    """
    return isinstance(name, str) and ":" in name.removeprefix(PRETRAINED)


def code_named(values: Mapping[str, Any]) -> list[str]:
    """What these settings would import, each with its kind."""
    return [f"{kind} {values[kind]}" for kind in ("dataset", "network", "learner") if names_code(values.get(kind))]


def consent(names: Mapping[str, Any], file: Path, *, trust: bool, tell: Callable[[str], None]) -> None:
    """Refuse a file that names code, and list that code; if the user trusts it, `tell` what is imported instead."""
    found = code_named(names)
    if found and not trust:
        raise invalid(
            "trust",
            f"{file}, which names code to be imported and called: {', '.join(found)}",
            "built-in names, or entry points of installed packages",
            "Pass --trust to import and run this code, if you trust whoever made the folder.",
        )
    if found:
        tell(f"trusting {file}, which imports {', '.join(found)}")


def resolve(home: str, kind: str) -> Any:
    """The object that `package.module:name` names: of an installed package, else of a module in the user's folder."""
    module, _, name = home.partition(":")
    try:
        with _own_modules(module):
            return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # what a module does when it is imported is its own affair
        advice = "It is looked for among installed packages and in the current folder."
        raise invalid(kind, f"{home!r} ({said(error)})", "an importable package.module:name", advice) from error


_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def modules_in(folder: Path) -> Iterator[None]:
    """Inside, the user's own modules are looked for in this folder: the one in which their sweep was started, say."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


class _UserFolder(MetaPathFinder):
    """Finds modules in one folder."""

    def __init__(self, folder: Path) -> None:
        self._path = [str(folder)]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module of the folder is; those inside its packages are found through their packages."""
        return PathFinder.find_spec(name, self._path, target) if path is None else None


@contextmanager
def _own_modules(module: str) -> Iterator[None]:
    """While a module is imported that is not installed, it and its neighbours are found in the user's folder.

    That folder is asked last and only then. So its modules cannot shadow installed packages, and installed packages
    cannot pick up modules from it.
    """
    top = module.partition(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None:
        yield
        return
    finder = _UserFolder((_folder.get() or Path()).absolute())
    sys.meta_path.append(finder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def called(
    kind: str,
    name: str,
    make: Callable[..., Any],
    argument: object,
    expected: str,
    passing: tuple[type[Exception], ...],
) -> Any:
    """What the user's own factory returns; whatever goes wrong in it names it, but for errors that are `passing`."""
    try:
        return make(argument)
    except passing:
        raise
    except (Exception, SystemExit) as error:
        raise invalid(kind, f"{name!r}, {found(make)}, which failed ({said(error)})", expected) from error


def found(thing: object) -> str:
    """In few words, what a name turned out to name."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if inspect.isroutine(thing):
        return f"the function {thing.__name__}"
    return "None" if thing is None else f"an object of the type {type(thing).__name__}"


def said(error: BaseException) -> str:
    """An error of foreign code: its kind, and the first line of its text."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
