"""Selective prediction: the risk of what is accepted, by how much is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tcil.foundation.arrays import ArrayLike, Floats
from tcil.metrics.sample import Sample, Score, check_share, score


def _risk_curve(s: Sample) -> tuple[Floats, Floats]:
    """Weight and expected error in order of falling confidence; ties share their mean error, in any order."""
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
    """AURC: the error among the most confident samples, averaged over how many are kept. Lower is better.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Probabilities, a row for each sample.
    labels : tensor or array (N,)
        The class of each sample.
    classes : iterable of int, optional
        The label of each column. Default: 0 to K - 1.
    sample_weight : tensor or array (N,), optional
        Non-negative weights. Default: all samples count equally.
    groups : array (N,), optional
        A number or text for each sample, such as that of `predicted_groups`.

    Returns
    -------
    Score
        The figure as a float; `by_group` has that of each group.

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
        Probabilities, a row for each sample.
    labels : tensor or array (N,)
        The class of each sample.
    coverage : float
        The share of samples that is kept, above 0 and at most 1.
    classes : iterable of int, optional
        The label of each column. Default: 0 to K - 1.
    sample_weight : tensor or array (N,), optional
        Non-negative weights. Default: all samples count equally.
    groups : array (N,), optional
        A number or text for each sample, such as that of `predicted_groups`.

    Returns
    -------
    Score
        The figure as a float; `by_group` has that of each group.

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
