"""Accuracy and proper scores: likelihood, Brier score and its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from tcil.foundation.arrays import ArrayLike
from tcil.foundation.records import Record
from tcil.metrics.sample import Sample, Score, by_group_of, score


def accuracy(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The share of samples whose most probable class is the label.

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
    >>> metrics.accuracy([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    0.5
    """
    return score(lambda s: s.mean(s.correct), probs, labels, sample_weight, groups, classes)


def negative_log_likelihood(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The mean of -log p(label); infinite where a label has probability 0.

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
    >>> round(metrics.negative_log_likelihood([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.8574
    """

    def mean_loss(s: Sample) -> float:
        with np.errstate(divide="ignore"):
            return s.mean(-np.log(s.own_probability))

    return score(mean_loss, probs, labels, sample_weight, groups, classes)


def brier_score(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The mean squared distance of the probability row to the one-hot label (summed over classes, 0 to 2).

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
    >>> round(metrics.brier_score([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.65
    """
    return score(_brier, probs, labels, sample_weight, groups, classes)


@dataclass(frozen=True)
class BrierParts(Record):
    """The Brier score and its two parts: brier = calibration + refinement.

    Attributes
    ----------
    brier : float
        The Brier score, from 0 to 2.
    calibration : float
        The part that the best monotone recalibration of each class's probability removes; not negative.
    refinement : float
        The Brier score after that recalibration; not negative.
    by_group : mapping
        The parts of each group; empty if no groups were given.

    Examples
    --------
    >>> from tcil import metrics
    >>> metrics.BrierParts(brier=0.3, calibration=0.1, refinement=0.2).calibration
    0.1
    """

    brier: float
    calibration: float
    refinement: float
    by_group: Mapping[Any, BrierParts] = field(default_factory=dict)


def brier_parts(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> BrierParts:
    """The Brier score split into calibration and refinement, class by class, by isotonic regression.

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
    BrierParts
        The score and its parts; `by_group` holds those of each group.

    Examples
    --------
    >>> from tcil import metrics
    >>> parts = metrics.brier_parts([[0.9, 0.1]] * 10, [0] * 6 + [1] * 4)    # confidence 0.9, accuracy 0.6
    >>> round(parts.brier, 4), round(parts.calibration, 4), round(parts.refinement, 4)
    (0.66, 0.18, 0.48)
    """

    def parts(s: Sample) -> BrierParts:
        brier, refinement = _brier(s), _refinement(s)
        return BrierParts(brier, brier - refinement, refinement)

    sample = Sample.checked(probs, labels, sample_weight, classes)
    return replace(parts(sample), by_group=by_group_of(parts, sample, groups))


def _brier(s: Sample) -> float:
    return s.mean(np.einsum("nk,nk->n", s.probs, s.probs) - 2 * s.own_probability + 1)


def _refinement(s: Sample) -> float:
    """The Brier score after the best monotone recalibration of each class."""
    loss = 0.0
    for k in range(s.probs.shape[1]):
        points, level_index = np.unique(s.probs[:, k], return_inverse=True)
        hits = (s.labels == k).astype(np.float64)
        mass = np.bincount(level_index, weights=s.weight)
        rate = np.bincount(level_index, weights=s.weight * hits) / mass
        level = isotonic_regression(rate, weights=mass).x[level_index] if len(points) > 1 else rate[level_index]
        loss += float(s.weight @ (level - hits) ** 2)
    return loss / float(s.weight.sum())
