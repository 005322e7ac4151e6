"""Shared by all metrics: validated probabilities, labels and groups, and the score that metrics return."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tcil.foundation.arrays import (
    ArrayLike,
    Floats,
    Ints,
    as_classes,
    as_labels,
    as_probabilities,
    as_tensor,
    as_weights,
    at_least_float32,
    check_finite,
    label_columns,
    refuse_hidden,
)
from tcil.foundation.errors import invalid, shortened


class Score(float):
    """A float that also holds the value of each group.

    Attributes
    ----------
    by_group : mapping
        The value of each group; empty if no groups were given.

    Examples
    --------
    >>> from tcil import metrics
    >>> probs, labels = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1]
    >>> score = metrics.accuracy(probs, labels, groups=["old", "old", "new"])
    >>> round(score, 4), dict(score.by_group)
    (0.6667, {'new': 1.0, 'old': 0.5})
    >>> score
    0.6667 (new 1, old 0.5)
    """

    by_group: Mapping[Any, float]

    def __new__(cls, value: float, by_group: Mapping[Any, float] | None = None) -> Self:
        """Create a score from the value over all samples and the value of each group."""
        score = super().__new__(cls, value)
        score.by_group = by_group or {}
        return score

    def __reduce__(self) -> Any:
        return type(self), (float(self), dict(self.by_group))

    def __repr__(self) -> str:
        """The number; with groups rounded, and the value of each."""
        if not self.by_group:
            return super().__repr__()
        told = ", ".join(f"{group} {value:.4g}" for group, value in self.by_group.items())
        return f"{float(self):.4g} ({told})"

    __str__ = float.__repr__  # as a number, in files for instance


Result = TypeVar("Result")


class Sample:
    """Probabilities, label columns and weights of one set, and quantities that several metrics use."""

    def __init__(self, probs: Floats, labels: Ints, weight: Floats) -> None:
        self.probs, self.labels, self.weight = probs, labels, weight
        self.kept = np.ones(len(labels), dtype=bool)

    @classmethod
    def checked(
        cls,
        probs: ArrayLike,
        labels: ArrayLike,
        sample_weight: ArrayLike | None,
        classes: Iterable[Any] | None,
        argument: str = "probs",
    ) -> Self:
        """A sample from validated user input, without the rows of weight 0."""
        rows = as_probabilities(probs, argument)
        names = None if classes is None else as_classes(classes, "classes")
        if names is not None and len(names) != rows.shape[1]:
            raise invalid("classes", f"{len(names)} labels", f"{rows.shape[1]}, one for each column")
        columns = label_columns(as_labels(labels, length=len(rows)), names, "labels", rows.shape[1])
        return cls(rows, columns.numpy(), as_weights(sample_weight, len(rows))).without_zero_weights()

    def without_zero_weights(self) -> Self:
        """Drop the rows of weight 0, in place; `kept` is a mask of the rows that remain."""
        self.kept = self.weight > 0
        if not self.kept.all():
            self.probs, self.labels = self.probs[self.kept], self.labels[self.kept]
            self.weight = self.weight[self.kept]
        return self

    def take(self, rows: npt.NDArray[np.bool_]) -> Sample:
        """The selected rows."""
        return Sample(self.probs[rows], self.labels[rows], self.weight[rows])

    @cached_property
    def confidence(self) -> Floats:
        """The largest probability of each row."""
        top: Floats = self.probs.max(axis=1)
        return top

    @cached_property
    def correct(self) -> Floats:
        """1 where the prediction is correct, else 0."""
        hits: Floats = (self.probs.argmax(axis=1) == self.labels).astype(np.float64)
        return hits

    @cached_property
    def own_probability(self) -> Floats:
        """The probability of the true class."""
        own: Floats = self.probs[np.arange(len(self.labels)), self.labels]
        return own

    def mean(self, values: Floats) -> float:
        """The weighted mean."""
        return float(values @ self.weight / self.weight.sum())


def by_group_of(metric: Callable[[Sample], Result], sample: Sample, groups: ArrayLike | None) -> dict[Any, Result]:
    """The metric of each group; empty without groups."""
    if groups is None:
        return {}
    keys = _as_groups(groups)
    if keys.shape != sample.kept.shape:
        raise invalid("groups", f"shape {keys.shape}", f"({len(sample.kept)},), one group for each sample")
    keys = keys[sample.kept]
    if missing := int((keys != keys).sum()):  # NaN and NaT are not equal to themselves
        raise invalid("groups", f"NaN for {missing} of {len(keys)} samples", "a group for each sample")
    try:
        distinct = np.unique(keys)
    except TypeError:
        raise invalid("groups", "values that cannot be ordered", "numbers or strings, not both") from None
    return {key.item() if hasattr(key, "item") else key: metric(sample.take(keys == key)) for key in distinct}


def _as_groups(groups: ArrayLike) -> npt.NDArray[Any]:
    if isinstance(groups, Tensor):
        keys = as_tensor(groups, "groups").cpu()
        return (keys.float() if keys.dtype == torch.bfloat16 else keys).numpy()
    refuse_hidden(groups, "groups")
    if isinstance(groups, (list, tuple)) and len({isinstance(group, str) for group in groups}) > 1:
        # numpy would convert all of them to strings.
        raise invalid("groups", "strings and other values", "numbers or strings, not both")
    try:
        return np.asarray(groups)
    except (ValueError, TypeError, RuntimeError) as error:
        raise invalid("groups", f"{type(groups).__name__} ({error})", "one group for each sample") from None


def score(
    metric: Callable[[Sample], float],
    probs: ArrayLike,
    labels: ArrayLike,
    sample_weight: ArrayLike | None,
    groups: ArrayLike | None,
    classes: Iterable[Any] | None,
) -> Score:
    """The metric over all samples, with the metric of each group."""
    sample = Sample.checked(probs, labels, sample_weight, classes)
    return Score(metric(sample), by_group_of(metric, sample, groups))


def predicted_groups(
    probs: ArrayLike, new_classes: Iterable[Any], *, classes: Iterable[Any] | None = None
) -> npt.NDArray[np.str_]:
    """Group each sample by whether an "old" or a "new" class is predicted for it.

    Unlike the group of the true class, the predicted group is known at test time.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Probabilities or logits, one row per sample.
    new_classes : iterable of int
        Labels of the newest task.
    classes : iterable of int, optional
        Label of each column. Default: 0 to K - 1.

    Returns
    -------
    array of str (N,)
        "old" or "new" for each sample.

    Examples
    --------
    >>> from tcil import metrics
    >>> metrics.predicted_groups([[0.9, 0.1, 0.0], [0.2, 0.2, 0.6]], new_classes=[2]).tolist()
    ['old', 'new']
    """
    scores = as_tensor(probs, "probs")
    if scores.ndim != 2 or scores.shape[1] == 0:
        raise invalid("probs", f"shape {tuple(scores.shape)}", "a matrix (samples, classes)")
    scores = at_least_float32(scores)
    check_finite(scores, "probs")
    names = tuple(range(scores.shape[1])) if classes is None else as_classes(classes, "classes")
    if len(names) != scores.shape[1]:
        raise invalid("classes", f"{len(names)} labels", f"{scores.shape[1]}, one for each column")
    new = as_classes(new_classes, "new_classes", ordered=False)
    if unknown := sorted(set(new) - set(names)):
        advice = "Pass classes= if the columns have other labels." if classes is None else ""
        raise invalid("new_classes", f"the labels {shortened(unknown)}", f"labels of the {len(names)} columns", advice)
    is_new = np.isin(np.asarray(names), np.asarray(new))
    return np.where(is_new[scores.cpu().argmax(dim=1).numpy()], "new", "old")


def check_share(value: Any, argument: str, expected: str, *, whole: bool) -> None:
    """Raise unless `value` is a number above 0 and below 1, or, with `whole`, equal to 1."""
    real = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    if not real or not 0 < value <= 1 or (value == 1 and not whole):
        raise invalid(argument, repr(value), expected)
