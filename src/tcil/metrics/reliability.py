"""The data of a reliability diagram."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from tcil.foundation.arrays import ArrayLike, Floats, Ints
from tcil.foundation.records import Table
from tcil.metrics.calibration_error import bin_of, check_bins
from tcil.metrics.sample import Sample, by_group_of


@dataclass(frozen=True, eq=False)
class ReliabilityBins(Table):
    """The data of a reliability diagram: weight, mean confidence and accuracy of each confidence bin.

    Attributes
    ----------
    lower, upper : array (B,)
        The edges of each bin.
    count : array (B,)
        Number of samples in each bin.
    weight : array (B,)
        Share of the total weight in each bin.
    confidence, accuracy : array (B,)
        Mean confidence and accuracy in each bin; NaN for an empty bin.
    by_group : mapping
        The bins of each group; empty if no groups were given.

    Examples
    --------
    >>> from tcil import metrics
    >>> bins = metrics.reliability_bins([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    >>> bins.count.tolist(), float(bins.accuracy[8]), float(bins.upper[8])
    ([0, 0, 0, 0, 0, 0, 0, 1, 1, 0], 1.0, 0.9)
    >>> print(metrics.reliability_bins([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]], [0, 1, 0], n_bins=2))
    ReliabilityBins
      lower  upper  count  weight  confidence  accuracy
          0    0.5      0       0         nan       nan
        0.5      1      3       1         0.8    0.6667
    """

    columns: ClassVar[tuple[str, ...]] = ("lower", "upper", "count", "weight", "confidence", "accuracy")
    lower: Floats
    upper: Floats
    count: Ints
    weight: Floats
    confidence: Floats
    accuracy: Floats
    by_group: Mapping[Any, ReliabilityBins] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table of all samples, and one of each group."""
        parts = [f"{group}: {bins}" for group, bins in self.by_group.items()]
        return "\n".join([super().__str__(), *parts])

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(str(group))}</p>{bins._repr_html_()}" for group, bins in self.by_group.items()]
        return "".join([super()._repr_html_(), *parts])


def reliability_bins(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> ReliabilityBins:
    """Confidence and accuracy of each confidence bin, with the bins of ECE.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Predicted probabilities, one row per sample.
    labels : tensor or array (N,)
        True class of each sample.
    n_bins : int
        Number of bins.
    classes : iterable of int, optional
        Label of each column. Default: 0 to K - 1.
    sample_weight : tensor or array (N,), optional
        Non-negative weights. Default: all samples count equally.
    groups : array (N,), optional
        Group of each sample (numbers or strings), for instance from `predicted_groups`.

    Returns
    -------
    ReliabilityBins
        Arrays with one entry per bin; `by_group` holds those of each group.

    Examples
    --------
    >>> from tcil import metrics
    >>> metrics.reliability_bins([[0.9, 0.1], [0.8, 0.2]], [0, 1], n_bins=2).accuracy.tolist()
    [nan, 0.5]
    """
    check_bins(n_bins)

    def bins(s: Sample) -> ReliabilityBins:
        bin_index = bin_of(s.confidence, n_bins)
        weight, confidence, correct = (
            np.bincount(bin_index, weights=values * s.weight, minlength=n_bins)
            for values in (np.ones_like(s.confidence), s.confidence, s.correct)
        )
        edges = np.arange(n_bins + 1) / n_bins
        with np.errstate(invalid="ignore"):
            means = confidence / weight, correct / weight
        count = np.bincount(bin_index, minlength=n_bins).astype(np.int64)
        return ReliabilityBins(edges[:-1], edges[1:], count, weight / s.weight.sum(), *means)

    sample = Sample.checked(probs, labels, sample_weight, classes)
    whole, by_group = bins(sample), by_group_of(bins, sample, groups)
    return replace(whole, by_group=by_group)
