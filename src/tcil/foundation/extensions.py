"""User extensions, named by `package.module:name` or by an entry point of an installed package.

A package registers a dataset, network, learner or calibrator in its pyproject.toml, and `tcil` finds it by name:

    [project.entry-points."tcil.learners"]
    mine = "my_package.my_file:MyLearner"

The groups are tcil.datasets, tcil.networks, tcil.learners and tcil.calibrators.

`package.module:name` is imported and called. It may come from a flag, the user's study file or the user's program.
Names that are read from a folder (settings.json, tasks.json) pass through `consent` first: without `--trust`, only
built-in names and entry points are accepted.
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


def extension(kind: str, name: str, builtin: Iterable[str]) -> Any:
    """The object named by `package.module:name` or by an entry point; `builtin` lists tcil's own names for errors."""
    if names_code(name):
        return resolve(name, kind)
    registered = installed(kind)
    if name not in registered:
        names = [*builtin, *registered]
        raise unknown_name(kind, name, names, "Or pass your own as package.module:name.")
    try:
        return registered[name].load()
    except Exception as error:
        home = registered[name].value
        raise invalid(
            kind, f"{name!r}, registered as {home!r} ({error})", "an entry point that can be loaded"
        ) from error


def installed(kind: str) -> dict[str, EntryPoint]:
    """The entry points of installed packages, by name."""
    return {point.name: point for point in entry_points(group=f"tcil.{kind}s")}


PRETRAINED = "pretrained:"  # prefix of networks on pre-trained backbones


def names_code(name: object) -> bool:
    """Whether a name is `package.module:name`, which is imported, and not a registered name.

    The part after `pretrained:` is the name of a backbone, which may also be either.

    >>> names_code("cifar10"), names_code("shutil:rmtree")
    (False, True)
    >>> names_code("pretrained:efficientnet_lite0"), names_code("pretrained:shutil:rmtree")
    (False, True)
    """
    return isinstance(name, str) and ":" in name.removeprefix(PRETRAINED)


def code_named(values: Mapping[str, Any]) -> list[str]:
    """The code that these settings would import, each with its kind."""
    return [f"{kind} {values[kind]}" for kind in ("dataset", "network", "learner") if names_code(values.get(kind))]


def consent(names: Mapping[str, Any], file: Path, *, trust: bool, tell: Callable[[str], None]) -> None:
    """Raise if a file names code to import, and list that code; with `trust`, report the imports to `tell` instead."""
    imports = code_named(names)
    if imports and not trust:
        raise invalid(
            "trust",
            f"{file}, which names code to be imported and called: {', '.join(imports)}",
            "built-in names, or entry points of installed packages",
            "Pass --trust to import and run this code, if you trust whoever made the folder.",
        )
    if imports:
        tell(f"trusting {file}, which imports {', '.join(imports)}")


def resolve(home: str, kind: str) -> Any:
    """The object named by `package.module:name`, in an installed package or else in a module of the user's folder."""
    module, _, name = home.partition(":")
    try:
        with _own_modules(module):
            return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing a module can raise anything
        advice = "Installed packages and the current folder are searched."
        raise invalid(kind, f"{home!r} ({said(error)})", "an importable package.module:name", advice) from error


_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def modules_in(folder: Path) -> Iterator[None]:
    """Context in which the user's modules are searched in this folder, such as the one where a sweep was started."""
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
        """The spec of a top-level module of the folder; submodules are found through their packages."""
        return PathFinder.find_spec(name, self._path, target) if path is None else None


@contextmanager
def _own_modules(module: str) -> Iterator[None]:
    """Let a module that is not installed, and the modules that it imports, be found in the user's folder.

    The folder is searched last, and only during this import. Its modules cannot shadow installed packages, and
    installed packages cannot import modules from it.
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
    """Call the user's factory; errors name it, except for the types in `passing`, which are raised unchanged."""
    try:
        return make(argument)
    except passing:
        raise
    except (Exception, SystemExit) as error:
        raise invalid(kind, f"{name!r}, {found(make)}, which failed ({said(error)})", expected) from error


def found(thing: object) -> str:
    """A short description of an object that was found by name, for error messages."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if inspect.isroutine(thing):
        return f"the function {thing.__name__}"
    return "None" if thing is None else f"an object of the type {type(thing).__name__}"


def said(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
