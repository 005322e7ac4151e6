"""Selective prediction: the error among accepted samples as a function of coverage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tcil.foundation.arrays import ArrayLike, Floats
from tcil.metrics.sample import Sample, Score, check_share, score


def _risk_curve(s: Sample) -> tuple[Floats, Floats]:
    """Weight and error in order of decreasing confidence; samples of equal confidence share their mean error."""
    order = np.lexsort((s.weight, -s.confidence))
    _, tie = np.unique(-s.confidence[order], return_inverse=True)
    weight = s.weight[order]
    mass = np.bincount(tie, weights=weight)
    error = np.bincount(tie, weights=weight * (1 - s.correct[order])) / mass
    return weight, error[tie]


def area_under_risk_coverage(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """AURC: the error among the most confident samples, averaged over all coverages. Lower is better.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Predicted probabilities, one row per sample.
    labels : tensor or array (N,)
        True class of each sample.
    classes : iterable of int, optional
        Label of each column. Default: 0 to K - 1.
    sample_weight : tensor or array (N,), optional
        Non-negative weights. Default: all samples count equally.
    groups : array (N,), optional
        Group of each sample (numbers or strings), for instance from `predicted_groups`.

    Returns
    -------
    Score
        The value over all samples, as a float; `by_group` holds the value of each group.

    Examples
    --------
    >>> from tcil import metrics
    >>> metrics.area_under_risk_coverage([[0.9, 0.1], [0.8, 0.2]], [0, 1])       # risks 0 and 1/2
    0.25
    """

    def area(s: Sample) -> float:
        weight, error = _risk_curve(s)
        covered = np.cumsum(weight)
        risk = np.cumsum(weight * error) / covered
        return float(weight @ risk / covered[-1])

    return score(area, probs, labels, sample_weight, groups, classes)


def risk_at_coverage(
    probs: ArrayLike,
    labels: ArrayLike,
    coverage: float = 0.8,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The error among the most confident `coverage` of the samples.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Predicted probabilities, one row per sample.
    labels : tensor or array (N,)
        True class of each sample.
    coverage : float
        Share of samples to keep, above 0 and at most 1.
    classes : iterable of int, optional
        Label of each column. Default: 0 to K - 1.
    sample_weight : tensor or array (N,), optional
        Non-negative weights. Default: all samples count equally.
    groups : array (N,), optional
        Group of each sample (numbers or strings), for instance from `predicted_groups`.

    Returns
    -------
    Score
        The value over all samples, as a float; `by_group` holds the value of each group.

    Examples
    --------
    >>> from tcil import metrics
    >>> metrics.risk_at_coverage([[0.9, 0.1], [0.8, 0.2]], [0, 1], coverage=0.5)
    0.0
    """
    check_share(coverage, "coverage", "a share of the samples, above 0 and at most 1", whole=True)

    def risk(s: Sample) -> float:
        weight, error = _risk_curve(s)
        kept = coverage * weight.sum()
        errors = np.interp(kept, np.append(0.0, np.cumsum(weight)), np.append(0.0, np.cumsum(weight * error)))
        return float(errors / kept)

    return score(risk, probs, labels, sample_weight, groups, classes)
