"""How unbalanced training was: images of a new class for each one of an old class, as a number or by class."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from tcil.calibration.calibrators.arguments import positive
from tcil.calibration.calibrators.pact.filter import LARGEST
from tcil.foundation.arrays import as_classes
from tcil.foundation.errors import invalid, shortened

# The ratio itself; or how often training presented images of each class: by label, or in the order of the classes.
Imbalance: TypeAlias = float | Mapping[Any, float] | Sequence[float] | np.ndarray[Any, Any] | Tensor
_EXPECTED = "training images of a new class for each one of an old class, such as 490 / 25, or presentations by class"


def parse_imbalance(value: Any) -> float | dict[int, float] | tuple[float, ...] | None:
    """What can be checked before the classes are known: a ratio, presentations by label, or in order; None stays."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        labels = as_classes(list(value), "imbalance")
        return {label: positive(n, f"imbalance[{label}]") for label, n in zip(labels, value.values(), strict=True)}
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0:
        if value.ndim > 1:
            raise invalid("imbalance", f"an array of shape {tuple(value.shape)}", "a positive number, or one a class")
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(positive(count, f"imbalance[{place}]") for place, count in enumerate(value))
    return _bounded(positive(value, "imbalance"))


def imbalance_ratio(
    given: float | dict[int, float] | tuple[float, ...] | None, classes: Sequence[int], new: Collection[int]
) -> float:
    """Images of a new class for each one of an old class, on average; 1 where it is not given and there is none.

    >>> imbalance_ratio({0: 20, 1: 30, 2: 500}, classes=(0, 1, 2), new=[2])
    20.0
    >>> imbalance_ratio((20, 30, 500), classes=(0, 1, 2), new=[2])
    20.0
    """
    old = [label for label in classes if label not in set(new)]
    if given is None:
        if old:
            advice = "Only after the first task, where all classes are new, it is not needed."
            raise invalid("imbalance", "None", _EXPECTED, advice)
        return 1.0
    if isinstance(given, (int, float)):
        return float(given)
    presented = _by_label(given, classes)
    if not old:
        return 1.0
    mean_of_old = sum(presented[label] for label in old) / len(old)
    return _bounded(sum(presented[label] for label in new) / len(new) / mean_of_old)


def _by_label(given: dict[int, float] | tuple[float, ...], classes: Sequence[int]) -> Mapping[int, float]:
    """Presentations by label, which must be those of all classes."""
    if isinstance(given, tuple):
        if len(given) != len(classes):
            expected = f"{len(classes)}, one for each class, in the order of the logit columns"
            raise invalid("imbalance", f"{len(given)} numbers", expected)
        return dict(zip(classes, given, strict=True))
    missing, unknown = (sorted(a - b) for a, b in ((set(classes), set(given)), (set(given), set(classes))))
    if missing:
        raise invalid("imbalance", f"no presentations of the classes {shortened(missing)}", "those of every class")
    if unknown:
        raise invalid(
            "imbalance", f"presentations of the classes {shortened(unknown)}", f"those of the {len(classes)} in memory"
        )
    return given


def _bounded(ratio: float) -> float:
    if abs(math.log(ratio)) > LARGEST:
        raise invalid("imbalance", repr(ratio), f"between e^-{LARGEST:g} and e^{LARGEST:g}")
    return ratio
