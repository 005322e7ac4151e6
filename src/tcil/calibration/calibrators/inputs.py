"""The opening lines of every `fit`: logits and labels checked and brought to columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tcil.calibration.arrays import ArrayLike, as_classes, as_labels, as_logits, label_columns
from tcil.calibration.errors import invalid


def logits_and_columns(
    logits: ArrayLike, labels: ArrayLike, classes: Iterable[Any] | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Checked logits on the CPU, the column of each label, and the label of each column."""
    z = as_logits(logits).cpu()
    names = tuple(range(z.shape[1])) if classes is None else as_classes(classes, "classes")
    if len(names) != z.shape[1]:
        raise invalid("classes", f"{len(names)} labels", f"{z.shape[1]}, one for each logit column")
    columns = label_columns(as_labels(labels, length=len(z)), None if classes is None else names, "labels", z.shape[1])
    return z, columns, names


def new_class_mask(new_classes: Iterable[Any], classes: tuple[int, ...]) -> Tensor:
    """Which columns are new; every new class must be one of `classes`."""
    new = as_classes(new_classes, "new_classes")
    unknown = sorted(set(new) - set(classes))
    if unknown:
        raise invalid(
            "new_classes",
            f"the labels {unknown[:5]}",
            f"labels among the {len(classes)} classes of the logits",
            "If the logit columns stand for other labels, name them with classes=[...].",
        )
    wanted = set(new)
    return torch.tensor([label in wanted for label in classes])


def check_positive(value: Any, argument: str, *, whole: bool = False) -> None:
    """Options that must be positive numbers."""
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
        raise invalid(argument, repr(value), f"a positive {'whole ' if whole else ''}number")
