"""What a user adds without touching this package: by `package.module:name`, or by an entry point of their own package.

A package announces a dataset, network, learner or calibrator in its pyproject.toml, and `tcil` knows it by name:

    [project.entry-points."tcil.learners"]
    mine = "my_package.my_file:MyLearner"

The groups are tcil.datasets, tcil.networks, tcil.learners and tcil.calibrators.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tcil.calibration.errors import invalid, unknown_name


def extension(kind: str, name: str, known: Iterable[str]) -> Any:
    """The object behind `package.module:name`, or behind an entry point; `known` are tcil's own names."""
    if ":" in name:
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


def resolve(home: str, kind: str) -> Any:
    """The object that `package.module:name` names; modules in the current folder are found as well."""
    module, _, name = home.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        advice = "It is looked for among installed packages and in the current folder."
        raise invalid(kind, f"{home!r} ({error})", "an importable package.module:name", advice) from error
