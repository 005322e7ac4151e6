"""Calibration errors: how far confidence is from accuracy, bin by bin or as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.fft import dct, idct
from scipy.optimize import brentq

from tcil.foundation.arrays import ArrayLike, Floats, whole_number
from tcil.metrics.sample import Sample, Score, score

MOST_BINS = MOST_DRAWS = 1 << 20
_CELLS = 1 << 12  # of the grid on which residuals are smoothed
_NARROWEST = 1e-3  # kernel, four of these cells


def check_bins(n_bins: int) -> None:
    """Raise if `n_bins` is not a valid number of bins."""
    whole_number(n_bins, "n_bins", 1, MOST_BINS)


def bin_of(confidence: Floats, n_bins: int) -> npt.NDArray[np.intp]:
    """Right-closed bins ((i-1)/B, i/B], compared in float64; 0 falls into the first."""
    return np.searchsorted(np.arange(1, n_bins) / n_bins, confidence, side="left")


def binned_gap(confidence: Floats, hits: Floats, weight: Floats, n_bins: int) -> float:
    """The mean absolute gap between confidence and accuracy over bins, weighted by each bin's share of the weight."""
    gap = np.bincount(bin_of(confidence, n_bins), weights=weight * (confidence - hits), minlength=n_bins)
    return float(np.abs(gap).sum() / weight.sum())


def expected_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """ECE: the mean distance between confidence and accuracy over equal-width bins ((i-1)/B, i/B].

    A perfectly calibrated model does not score 0 on a finite set: see `noise_floor` and `calibration_estimate`.

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
    Score
        The value over all samples, as a float; `by_group` holds the value of each group.

    Examples
    --------
    >>> from tcil import metrics
    >>> metrics.expected_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    0.45
    """
    check_bins(n_bins)
    return score(
        lambda s: binned_gap(s.confidence, s.correct, s.weight, n_bins), probs, labels, sample_weight, groups, classes
    )


def adaptive_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """AECE: as ECE, with bins of N // B samples in order of confidence, the remainder in the last.

    With weights, a bin holds that share of the total weight, and a sample on an edge is split. Among samples with equal
    confidence, correct ones come first, so the result does not depend on the order of the rows.

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
    Score
        The value over all samples, as a float; `by_group` holds the value of each group.

    Examples
    --------
    >>> from tcil import metrics
    >>> metrics.adaptive_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1], n_bins=2)
    0.45
    """
    check_bins(n_bins)

    def error(s: Sample) -> float:
        order = np.lexsort((-s.correct, s.confidence))
        gap = (s.confidence - s.correct)[order]
        weight = s.weight[order] * (len(order) / s.weight.sum())
        ends = np.concatenate([[0.0], np.cumsum(weight)])
        edges = np.append(np.arange(n_bins) * (len(order) // n_bins), len(order)).astype(np.float64)
        # The running sum of gaps, read off at the bins' edges (linear inside a sample).
        running = np.interp(edges, ends, np.concatenate([[0.0], np.cumsum(weight * gap)]))
        return float(np.abs(np.diff(running)).sum() / len(order))

    return score(error, probs, labels, sample_weight, groups, classes)


def debiased_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The root of the mean squared gap between confidence and accuracy over bins, less what chance adds to it.

    Chance adds about accuracy (1 - accuracy) / (n - 1) to the squared gap of a bin of n samples, which is taken off; 0
    where nothing is left (Kumar, Liang and Ma, Verified uncertainty calibration, NeurIPS 2019; Broecker 2012). Bins
    hold equally many samples in order of confidence, but equal confidences are never split; a bin of one sample adds
    nothing. It is the root of a mean square, so without chance it would not be below ECE on the same bins. With
    weights, n is (sum of w)^2 / (sum of w^2).

    Parameters
    ----------
    probs : tensor or array (N, K)
        Probabilities, a row for each sample.
    labels : tensor or array (N,)
        The class of each sample.
    n_bins : int
        Number of bins.
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
    >>> import numpy as np
    >>> from tcil import metrics
    >>> labels = np.random.default_rng(0).binomial(1, 0.2, 1000)
    >>> honest = np.tile([0.8, 0.2], (1000, 1))
    >>> metrics.debiased_calibration_error(honest, labels) < metrics.expected_calibration_error(honest, labels)
    True
    """
    check_bins(n_bins)

    def error(s: Sample) -> float:
        edges = np.unique(np.quantile(s.confidence, np.arange(1, n_bins) / n_bins, method="inverted_cdf"))
        place = np.searchsorted(edges, s.confidence, side="left")
        mass, squares, gap, hits = (
            np.bincount(place, weights=s.weight * values, minlength=len(edges) + 1)
            for values in (np.ones_like(s.weight), s.weight, s.confidence - s.correct, s.correct)
        )
        size = np.divide(mass**2, squares, out=np.zeros_like(mass), where=squares > 0)
        told = size > 1 + 1e-9
        mass, size, gap, hits = mass[told], size[told], gap[told], hits[told]
        share, rate = mass / s.weight.sum(), hits / mass
        square = float((share * ((gap / mass) ** 2 - rate * (1 - rate) / (size - 1))).sum())
        return float(max(square, 0.0) ** 0.5)

    return score(error, probs, labels, sample_weight, groups, classes)


def smooth_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """Smooth ECE: the mean distance between confidence and accuracy, smoothed by a kernel instead of bins.

    The gaps of all samples are smoothed over the confidence with a Gaussian kernel that is reflected at 0 and 1. The
    mean absolute value of that falls as the kernel gets wider, and the figure is the one at which both are equal
    (Blasiok and Nakkiran, Smooth ECE, ICLR 2024): no number of bins is to be chosen, and a confidence that moves a
    little changes it a little. Kernels narrower than 0.001 are not tried.

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
    >>> round(metrics.smooth_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 2)
    0.35
    """
    return score(_smooth, probs, labels, sample_weight, groups, classes)


def _smooth(s: Sample) -> float:
    """The width of the kernel that equals the error smoothed by it."""
    place = np.clip(s.confidence * _CELLS - 0.5, 0, _CELLS - 1)  # on the cells' midpoints
    below = np.minimum(place.astype(np.intp), _CELLS - 2)
    gap = s.weight / s.weight.sum() * (s.confidence - s.correct)
    share = place - below
    cells = np.bincount(below, weights=gap * (1 - share), minlength=_CELLS)
    cells += np.bincount(below + 1, weights=gap * share, minlength=_CELLS)
    # The kernel reflected at 0 and 1 is diagonal in cosines: exp(-(pi k width)^2 / 2) for the k-th.
    waves, order = dct(cells, type=2, norm="ortho"), np.pi * np.arange(_CELLS)

    def at(width: float) -> float:
        smoothed = idct(waves * np.exp(-0.5 * np.square(order * width)), type=2, norm="ortho")
        return float(np.abs(smoothed).sum())

    if at(_NARROWEST) <= _NARROWEST:
        return at(_NARROWEST)
    if at(1.0) >= 1:  # every sample incorrect with confidence 1; only rounding takes it above
        return 1.0
    return float(brentq(lambda width: at(width) - width, _NARROWEST, 1.0, xtol=1e-9))


def classwise_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """Classwise ECE: the binned calibration error of each class's probability, averaged over unmasked classes.

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
    Score
        The value over all samples, as a float; `by_group` holds the value of each group.

    Examples
    --------
    >>> from tcil import metrics
    >>> round(metrics.classwise_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.45
    """
    check_bins(n_bins)

    def error(s: Sample) -> float:
        n, k = s.probs.shape
        cell = bin_of(s.probs.ravel(), n_bins).reshape(n, k) + n_bins * np.arange(k)
        gap = s.weight[:, None] * s.probs
        gap[np.arange(n), s.labels] -= s.weight
        sums = np.bincount(cell.ravel(), weights=gap.ravel(), minlength=n_bins * k)
        takes_part = np.asarray(s.probs.any(axis=0))
        takes_part[s.labels] = True
        return float(np.abs(sums).sum() / (int(takes_part.sum()) * s.weight.sum()))

    return score(error, probs, labels, sample_weight, groups, classes)


def confidence_gap(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """Mean confidence minus accuracy: positive for an over-confident model, negative for an under-confident one.

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
    >>> round(metrics.confidence_gap([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.35
    """
    return score(lambda s: s.mean(s.confidence - s.correct), probs, labels, sample_weight, groups, classes)
