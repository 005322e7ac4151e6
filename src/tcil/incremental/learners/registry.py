"""Learners by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tcil.calibration.errors import invalid
from tcil.incremental.datasets import resolve
from tcil.incremental.learners.base import Learner
from tcil.incremental.learners.der import DER
from tcil.incremental.learners.eeil import EEIL
from tcil.incremental.learners.er import ER
from tcil.incremental.learners.wa import WA
from tcil.incremental.networks import ResNet

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
    """A learner by name (er, eeil, wa, der) or as `package.module:Learner`, with its named options.

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
            near = difflib.get_close_matches(key, known, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else ""
            raise invalid(f"learner option {key}", repr((options or {})[key]), f"one of {', '.join(known)}", advice)
    return kind(kind.options_type(**(options or {})), network, n_classes, seed=seed, device=torch.device(device))


def learner_type(name: str) -> type[Learner]:
    """The class behind a learner's name."""
    if ":" in name:
        kind = resolve(name)
        if not (isinstance(kind, type) and issubclass(kind, Learner)):
            raise invalid("learner", repr(name), "a subclass of tcil's Learner")
        return kind
    if name not in LEARNERS:
        near = difflib.get_close_matches(name, LEARNERS, n=1)
        advice = f"Did you mean {near[0]!r}?" if near else "Or name one of your own: package.module:Learner."
        raise invalid("learner", repr(name), "one of " + ", ".join(LEARNERS), advice)
    return LEARNERS[name]
