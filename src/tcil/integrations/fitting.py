"""Fit any calibrator after a task, from a network, its memory and held-out data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from tcil.calibration.calibrators import Calibrator, GroupTemperatureScaling
from tcil.calibration.inputs.examples import Examples, Unpack
from tcil.calibration.prediction import predict_logits
from tcil.foundation.errors import invalid, warnings_of


def checked_calibrator(calibrator: Any) -> Calibrator:
    """The calibrator, if it can be fitted on the data of one task."""
    if not isinstance(calibrator, Calibrator):
        expected = "a calibrator, such as tcil.TCIL() or tcil.PACT()"
        raise invalid("calibrator", type(calibrator).__name__, expected)
    if isinstance(calibrator, GroupTemperatureScaling):
        expected = "one that needs held-out data of the new task only"
        raise invalid("calibrator", "GroupTemperatureScaling, which needs held-out data of all classes", expected)
    return calibrator


def takes_logits(calibrator: Calibrator) -> bool:
    """Whether `fit` takes logits instead of a network and its inputs."""
    return "logits" in inspect.signature(calibrator.fit).parameters


def needs_memory(calibrator: Calibrator) -> bool:
    """Whether `fit` asks for exemplars."""
    return "memory" in inspect.signature(calibrator.fit).parameters


def require_memory(calibrator: Calibrator, memory: object) -> None:
    """Raise if `fit` asks for exemplars and there are none."""
    if memory is None and needs_memory(calibrator):
        raise invalid("memory", "None", f"the exemplars that {type(calibrator).__name__} perturbs")


def needs_imbalance(calibrator: Calibrator) -> bool:
    """Whether `fit` asks how unbalanced training was."""
    return "imbalance" in inspect.signature(calibrator.fit).parameters


def fit_after_task(
    calibrator: Calibrator,
    model: nn.Module,
    *,
    memory: Examples | None,
    valid: Examples,
    new_classes: Sequence[int],
    columns: Sequence[int],
    classes: Sequence[int] | None = None,
    imbalance: float | None = None,
    unpack: Unpack | None = None,
    task: str = "",
    **more: Any,
) -> Calibrator:
    """`partial_fit` with those arguments that the calibrator takes.

    Calibrators of logits get those of the validation set; `more` goes to those that take a model. Warnings name the
    task, by its new classes if it has no name.
    """
    wanted = inspect.signature(calibrator.fit).parameters
    names = columns if classes is None else classes
    with warnings_of(task or named_by(new_classes)):
        if takes_logits(calibrator):
            logits, labels = predict_logits(model, valid, classes=names, columns=columns, unpack=unpack)
            return calibrator.partial_fit(logits, labels, classes=names)
        given: dict[str, Any] = {"valid": valid, "classes": names, "columns": columns, "unpack": unpack, **more}
        if "memory" in wanted:
            require_memory(calibrator, memory)
            given["memory"] = memory
        if "new_classes" in wanted:
            given["new_classes"] = new_classes
        if "imbalance" in wanted:
            given["imbalance"] = imbalance
        return calibrator.partial_fit(model, **given)


def named_by(new_classes: Sequence[int]) -> str:
    """The name of a task in warnings.

    >>> named_by(range(10, 20))
    'new classes 10, 11, 12 and 7 more'
    """
    first, more = ", ".join(map(str, new_classes[:3])), len(new_classes) - 3
    return f"new classes {first}" + (f" and {more} more" if more > 0 else "")


def presented_ratio(presented: Mapping[int, int], classes: Iterable[int], new_classes: Iterable[int]) -> float | None:
    """Images of a new class that training presented for each one of an old class; None without old classes.

    The ratio is infinite if no old images were presented.

    >>> presented_ratio({0: 30, 1: 10, 2: 100}, classes=[0, 1, 2], new_classes=[2])
    5.0
    """
    new = set(new_classes)
    old = [label for label in classes if label not in new]
    if not old:
        return None
    of_old = sum(presented.get(label, 0) for label in old) / len(old)
    of_new = sum(presented.get(label, 0) for label in new) / len(new)
    return of_new / of_old if of_old else float("inf")
