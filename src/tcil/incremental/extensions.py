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
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from tcil.calibration.errors import invalid, unknown_name


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


def names_code(name: object) -> bool:
    """Whether a name is `package.module:name`, which is imported, and not one that a registry knows.

    >>> names_code("cifar10"), names_code("shutil:rmtree")
    (False, True)
    """
    return isinstance(name, str) and ":" in name


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
    """The object that `package.module:name` names: of an installed package, else of a module in the current folder."""
    module, _, name = home.partition(":")
    try:
        with _current_folder(module):
            return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # what a module does when it is imported is its own affair
        advice = "It is looked for among installed packages and in the current folder."
        raise invalid(kind, f"{home!r} ({said(error)})", "an importable package.module:name", advice) from error


@contextmanager
def _current_folder(module: str) -> Iterator[None]:
    """Puts the current folder at the end of the path, but only while a module is imported that is not installed.

    So its modules cannot shadow installed packages, and installed packages cannot pick up modules from it.
    """
    top = module.partition(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None or (here := os.getcwd()) in sys.path:
        yield
        return
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if here in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]  # the last one is ours


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
