"""Learners by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tcil.calibration.errors import invalid, unknown_name
from tcil.incremental.extensions import extension, found
from tcil.incremental.learners.base import Learner
from tcil.incremental.learners.der import DER
from tcil.incremental.learners.eeil import EEIL
from tcil.incremental.learners.er import ER
from tcil.incremental.learners.wa import WA
from tcil.incremental.networks import ResNet

LARGEST = 2**31 - 1  # of an option that is a number
LEARNERS: dict[str, type[Learner]] = {"er": ER, "eeil": EEIL, "wa": WA, "der": DER}


def make_learner(
    name: str,
    network: Callable[[int], ResNet],
    n_classes: int,
    *,
    seed: int,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
) -> Learner:
    """A learner by name (er, eeil, wa, der, or one of the user's own), with its named options.

    >>> from functools import partial
    >>> from tcil.incremental.learners import make_learner
    >>> from tcil.incremental.networks import small_cnn
    >>> learner = make_learner("wa", small_cnn, 10, seed=1, options={"distillation_temperature": 3})
    >>> learner.options.distillation_temperature
    3
    """
    kind = learner_type(name)
    known = [field.name for field in dataclasses.fields(kind.options_type)]
    for key in options or {}:
        if key not in known:
            raise unknown_name(f"option of learner {name}", key, known)
    chosen = kind.options_type(**(options or {}))
    for field in dataclasses.fields(chosen):
        _check_option(name, field.name, getattr(chosen, field.name), field.default)
    return kind(chosen, network, n_classes, seed=seed, device=torch.device(device))


def _check_option(learner: str, name: str, value: Any, default: Any) -> None:
    """An option has the kind of its default: a number, or numbers."""
    if isinstance(default, tuple):
        right = isinstance(value, (list, tuple)) and all(type(v) is int and abs(v) <= LARGEST for v in value)
        wanted = "a list of whole numbers"
    elif isinstance(default, float):
        right = type(value) in (int, float) and 0 <= value <= LARGEST
        wanted = f"a number from 0 to {LARGEST}"
    elif isinstance(default, int):
        right, wanted = type(value) is int and 0 < value <= LARGEST, f"a whole number from 1 to {LARGEST}"
    else:
        return  # a named choice, which the learner parses itself
    if not right:
        raise invalid(f"option {name} of learner {learner}", repr(value), wanted)


def learner_type(name: str) -> type[Learner]:
    """The class behind a learner's name."""
    if name in LEARNERS:
        return LEARNERS[name]
    kind = extension("learner", name, LEARNERS)
    if not (isinstance(kind, type) and issubclass(kind, Learner)):
        raise invalid("learner", repr(name), "a subclass of tcil's Learner", f"It is {found(kind)}.")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise invalid("learner", f"{name!r} without {missing}", "a learner that has these methods")
    return kind
