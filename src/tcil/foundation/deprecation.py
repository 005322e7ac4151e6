"""Deprecated names: each works for one more version, with a warning that gives the new name."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

UNTIL = "0.3"  # the version without the old names of 0.1


def moved(old: str, home: str, public: str, *, stacklevel: int = 3) -> Any:
    """The object at `home` (`package.module.name`), with a warning that `old` is now `public`.

    If this is called from a module's `__getattr__`, the warning points to the line that uses the old name.
    """
    message = f"{old} has moved: use {public}. The old name will be removed in tcil {UNTIL}."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
    module, _, name = home.rpartition(".")
    return getattr(importlib.import_module(module), name)


def all_moved(module: str, names: tuple[str, ...], to: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module whose names have all moved to the module `to`."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return moved(f"{module}.{name}", home=f"{to}.{name}", public=f"{to}.{name}")

    return find
