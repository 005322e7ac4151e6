"""Learners by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tcil.foundation.errors import invalid, unknown_name
from tcil.foundation.extensions import extension, found
from tcil.foundation.options import Option
from tcil.incremental.learners.base import Learner, LearnerOptions
from tcil.incremental.learners.bic import BiC
from tcil.incremental.learners.der import DER
from tcil.incremental.learners.eeil import EEIL
from tcil.incremental.learners.er import ER
from tcil.incremental.learners.la import LA
from tcil.incremental.learners.ncm import NCM
from tcil.incremental.learners.ranpac import RanPAC
from tcil.incremental.learners.wa import WA
from tcil.incremental.networks import ResNet

LARGEST = 2**31 - 1  # of an option that is a number
LEARNERS: dict[str, type[Learner]] = {
    "er": ER, "eeil": EEIL, "wa": WA, "der": DER, "bic": BiC, "la": LA, "ncm": NCM, "ranpac": RanPAC,
}  # fmt: skip


def make_learner(
    name: str,
    network: Callable[[int], ResNet],
    n_classes: int,
    *,
    seed: int,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
) -> Learner:
    """Create a learner by name (er, eeil, wa, der, bic, la, ncm, ranpac, or a user learner), with its options.

    >>> from functools import partial
    >>> from tcil.incremental.learners import make_learner
    >>> from tcil.incremental.networks import small_cnn
    >>> learner = make_learner("wa", small_cnn, 10, seed=1, options={"distillation_temperature": 3})
    >>> learner.options.distillation_temperature
    3
    """
    chosen = learner_options(name, options or {})
    return learner_type(name)(chosen, network, n_classes, seed=seed, device=torch.device(device))


def learner_options(name: str, given: Mapping[str, Any]) -> LearnerOptions:
    """The options of a learner: those given, checked, and the defaults of the others.

    >>> from tcil.incremental.learners.registry import learner_options
    >>> learner_options("wa", {"restrict_head": True}).distillation_temperature
    2.0
    """
    kind = learner_type(name)
    fields = {field.name: field for field in dataclasses.fields(kind.options_type)}
    for key, value in given.items():
        if key not in fields:
            raise unknown_name(f"option of learner {name}", key, fields)
        _check_option(name, fields[key], value)
    return kind.options_type(**given)


def _check_option(learner: str, option: dataclasses.Field[Any], value: Any) -> None:
    """Raise unless a given option has the type of its default; the learner checks its value."""
    made = option.default_factory
    default = option.default if made is dataclasses.MISSING else made()
    if isinstance(default, Option):
        type(default).parse(value, option.name)
        return
    if isinstance(default, (list, tuple)):
        kinds = {type(member) for member in default} or {float}
        kind = float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else object
        valid = isinstance(value, (list, tuple)) and all(_is(kind, member) for member in value)
        wanted = f"a list, each {_WANTED[kind]}" if kind in _WANTED else "a list"
    else:
        valid, wanted = _is(type(default), value), _WANTED.get(type(default), "")
    if not valid:
        raise invalid(f"option {option.name} of learner {learner}", repr(value), wanted)


_WANTED = {
    bool: "true or false",
    int: f"a whole number of at most {LARGEST}",
    float: f"a number of at most {LARGEST}",
    str: "text",
}


def _is(kind: type, value: Any) -> bool:
    """Whether a value is of a plain type; other types are checked by the learner."""
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) <= LARGEST
    return type(value) is kind if kind in _WANTED else True


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
