"""Checks that several calibrators share."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcil.foundation.arrays import as_classes
from tcil.foundation.errors import invalid, shortened, warn
from tcil.foundation.options import Verdict


def new_class_mask(new_classes: Iterable[Any], classes: tuple[int, ...]) -> Tensor:
    """Which columns are new; every new class must be one of `classes`."""
    new = as_classes(new_classes, "new_classes", ordered=False)
    unknown = sorted(set(new) - set(classes))
    if unknown:
        raise invalid(
            "new_classes",
            f"the labels {shortened(unknown)}",
            f"labels among the {len(classes)} classes of the logits",
            "If the logit columns have other labels, pass them as classes=[...].",
        )
    wanted = set(new)
    return torch.tensor([label in wanted for label in classes])


BOUNDS = (0.05, 5.0)  # the range of T in the original ETS and PerturbTS


def positive(value: Any, argument: str, expected: str = "a positive number") -> float:
    """A positive number as a float; a tensor or array without dimensions is accepted."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    real = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    if not real or not 0 < value < float("inf"):
        raise invalid(argument, repr(value), expected)
    try:
        return float(value)
    except OverflowError:
        raise invalid(argument, "a number beyond float64", expected) from None


def positive_or_zero(value: Any, argument: str) -> float:
    """The same for a number that may be 0."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and value == 0:
        return 0.0
    return positive(value, argument, "0 or a positive number")


def warn_unless_ok(verdict: Verdict, who: str, n_samples: int) -> None:
    """Warn unless the verdict is "ok"."""
    if verdict is not Verdict.OK:
        samples = f"{n_samples} sample{'' if n_samples == 1 else 's'}"
        warn(f"{who}: {verdict.meaning} ({samples})")


def missing_valid() -> ValueError:
    """The error for a missing validation set of the new task."""
    return invalid(
        "valid",
        "None",
        "the new task's validation set",
        "Without one, use FirstTaskTemperatureScaling with history= of the first task."
        " TemperatureScaling on the exemplars' logits runs, but its temperature is far too small.",
    )
