"""How honest confidences are: pure functions of probabilities and labels.

Labels are columns of `probs` unless `classes` names the columns in label space. Every metric takes `sample_weight` and
`groups`. With `groups` (one value per sample, for instance
`predicted_groups(probs, new_classes)`), the result still is the pooled figure and carries the figure of each group in
`by_group`: pooled calibration hides that one temperature leaves predicted-new classes over-confident and predicted-old
classes under-confident. All figures are fractions, not percentages. Groups are numbers or text, not NaN. A class
that has probability 0 throughout and no sample of its own (a masked one) takes no part.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from tcil.calibration.arrays import (
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
    whole_number,
)
from tcil.calibration.errors import invalid

__all__ = [
    "BrierParts",
    "CalibrationEstimate",
    "ReliabilityBins",
    "Score",
    "accuracy",
    "adaptive_calibration_error",
    "area_under_risk_coverage",
    "brier_parts",
    "brier_score",
    "calibration_estimate",
    "classwise_calibration_error",
    "confidence_gap",
    "expected_calibration_error",
    "negative_log_likelihood",
    "noise_floor",
    "predicted_groups",
    "reliability_bins",
    "risk_at_coverage",
]

_Result = TypeVar("_Result")
_MOST_BINS = _MOST_DRAWS = 1 << 20


class Score(float):
    """A float that also knows its figure in each group.

    >>> from tcil import metrics
    >>> probs, labels = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1]
    >>> score = metrics.accuracy(probs, labels, groups=["old", "old", "new"])
    >>> round(score, 4), dict(score.by_group)
    (0.6667, {'new': 1.0, 'old': 0.5})
    """

    by_group: Mapping[Any, float]

    def __new__(cls, value: float, by_group: Mapping[Any, float] | None = None) -> Self:
        """The pooled figure, and that of each group."""
        score = super().__new__(cls, value)
        score.by_group = by_group or {}
        return score

    def __reduce__(self) -> Any:
        return type(self), (float(self), dict(self.by_group))


class _Sample:
    """Probabilities, label columns and weights of one set, with what several metrics share."""

    def __init__(self, probs: Floats, labels: Ints, weight: Floats) -> None:
        self.probs, self.labels, self.weight = probs, labels, weight
        self.kept = np.ones(len(labels), dtype=bool)

    @classmethod
    def checked(
        cls, probs: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None, classes: Iterable[Any] | None
    ) -> Self:
        rows = as_probabilities(probs)
        names = None if classes is None else as_classes(classes, "classes")
        if names is not None and len(names) != rows.shape[1]:
            raise invalid("classes", f"{len(names)} labels", f"{rows.shape[1]}, one for each column")
        own = label_columns(as_labels(labels, length=len(rows)), names, "labels", rows.shape[1])
        return cls(rows, own.numpy(), as_weights(sample_weight, len(rows)))._weighty()

    def _weighty(self) -> Self:
        """Without the rows of weight 0, which count for nothing; `kept` remembers which those were."""
        self.kept = self.weight > 0
        if not self.kept.all():
            self.probs, self.labels = self.probs[self.kept], self.labels[self.kept]
            self.weight = self.weight[self.kept]
        return self

    def take(self, rows: npt.NDArray[np.bool_]) -> _Sample:
        return _Sample(self.probs[rows], self.labels[rows], self.weight[rows])

    @cached_property
    def confidence(self) -> Floats:
        top: Floats = self.probs.max(axis=1)
        return top

    @cached_property
    def correct(self) -> Floats:
        hits: Floats = (self.probs.argmax(axis=1) == self.labels).astype(np.float64)
        return hits

    @cached_property
    def own_probability(self) -> Floats:
        own: Floats = self.probs[np.arange(len(self.labels)), self.labels]
        return own

    def mean(self, values: Floats) -> float:
        return float(values @ self.weight / self.weight.sum())


def _by_group(metric: Callable[[_Sample], _Result], sample: _Sample, groups: ArrayLike | None) -> dict[Any, _Result]:
    if groups is None:
        return {}
    keys = _as_groups(groups)
    if keys.shape != sample.kept.shape:
        raise invalid("groups", f"shape {keys.shape}", f"({len(sample.kept)},), one group for each sample")
    keys = keys[sample.kept]
    if missing := int((keys != keys).sum()):  # NaN and NaT, which equal nothing
        raise invalid("groups", f"NaN for {missing} of {len(keys)} samples", "a group for each sample")
    try:
        found = np.unique(keys)
    except TypeError:
        raise invalid("groups", "values that cannot be ordered", "numbers or text, not both") from None
    return {key.item() if hasattr(key, "item") else key: metric(sample.take(keys == key)) for key in found}


def _as_groups(groups: ArrayLike) -> npt.NDArray[Any]:
    if isinstance(groups, Tensor):
        own = as_tensor(groups, "groups").cpu()
        return (own.float() if own.dtype == torch.bfloat16 else own).numpy()
    refuse_hidden(groups, "groups")
    if isinstance(groups, (list, tuple)) and len({isinstance(group, str) for group in groups}) > 1:
        raise invalid("groups", "text and other values", "numbers or text, not both")  # numpy would make all text
    try:
        return np.asarray(groups)
    except (ValueError, TypeError, RuntimeError) as error:
        raise invalid("groups", f"{type(groups).__name__} ({error})", "one group for each sample") from None


def _score(
    metric: Callable[[_Sample], float],
    probs: ArrayLike,
    labels: ArrayLike,
    sample_weight: ArrayLike | None,
    groups: ArrayLike | None,
    classes: Iterable[Any] | None,
) -> Score:
    sample = _Sample.checked(probs, labels, sample_weight, classes)
    return Score(metric(sample), _by_group(metric, sample, groups))


# --- groups -----------------------------------------------------------------------------------------------------


def predicted_groups(
    probs: ArrayLike, new_classes: Iterable[Any], *, classes: Iterable[Any] | None = None
) -> npt.NDArray[np.str_]:
    """Whether each sample is predicted as an "old" or a "new" class: what a user sees, unlike the true group.

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
        raise invalid("new_classes", f"the labels {unknown[:5]}", f"labels among the {len(names)} columns")
    is_new = np.isin(np.asarray(names), np.asarray(new))
    return np.where(is_new[scores.cpu().argmax(dim=1).numpy()], "new", "old")


# --- accuracy and likelihood ------------------------------------------------------------------------------------


def accuracy(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The share of samples whose most probable class is the label.

    >>> from tcil import metrics
    >>> metrics.accuracy([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    0.5
    """
    return _score(lambda s: s.mean(s.correct), probs, labels, sample_weight, groups, classes)


def negative_log_likelihood(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The mean of -log p(label); infinite where a label has probability 0.

    >>> from tcil import metrics
    >>> round(metrics.negative_log_likelihood([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.8574
    """

    def mean_loss(s: _Sample) -> float:
        with np.errstate(divide="ignore"):
            return s.mean(-np.log(s.own_probability))

    return _score(mean_loss, probs, labels, sample_weight, groups, classes)


def brier_score(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The mean squared distance of the probability row to the one-hot label (summed over classes, 0 to 2).

    >>> from tcil import metrics
    >>> round(metrics.brier_score([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.65
    """
    return _score(_brier, probs, labels, sample_weight, groups, classes)


@dataclass(frozen=True)
class BrierParts:
    """The Brier score and its two parts: brier = calibration + refinement.

    `refinement` is the Brier score that is left when every class's probability is replaced by the best monotone
    function of itself; `calibration` is what that repairs. Neither is negative.

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

    >>> from tcil import metrics
    >>> parts = metrics.brier_parts([[0.9, 0.1]] * 10, [0] * 6 + [1] * 4)    # right six times in ten, at 0.9
    >>> round(parts.brier, 4), round(parts.calibration, 4), round(parts.refinement, 4)
    (0.66, 0.18, 0.48)
    """

    def parts(s: _Sample) -> BrierParts:
        brier, refinement = _brier(s), _refinement(s)
        return BrierParts(brier, brier - refinement, refinement)

    sample = _Sample.checked(probs, labels, sample_weight, classes)
    return replace(parts(sample), by_group=_by_group(parts, sample, groups))


def _brier(s: _Sample) -> float:
    return s.mean(np.einsum("nk,nk->n", s.probs, s.probs) - 2 * s.own_probability + 1)


def _refinement(s: _Sample) -> float:
    """The Brier score after the best monotone recalibration of each class."""
    loss = 0.0
    for k in range(s.probs.shape[1]):
        points, place = np.unique(s.probs[:, k], return_inverse=True)
        hits = (s.labels == k).astype(np.float64)
        mass = np.bincount(place, weights=s.weight)
        rate = np.bincount(place, weights=s.weight * hits) / mass
        level = isotonic_regression(rate, weights=mass).x[place] if len(points) > 1 else rate[place]
        loss += float(s.weight @ (level - hits) ** 2)
    return loss / float(s.weight.sum())


# --- calibration error ------------------------------------------------------------------------------------------


def _check_bins(n_bins: int) -> None:
    whole_number(n_bins, "n_bins", 1, _MOST_BINS)


def _check_share(value: Any, argument: str, expected: str, *, whole: bool) -> None:
    """A number above 0 and below 1; where the `whole` is a share too, also 1."""
    real = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    if not real or not 0 < value <= 1 or (value == 1 and not whole):
        raise invalid(argument, repr(value), expected)


def _bin_of(confidence: Floats, n_bins: int) -> npt.NDArray[np.intp]:
    """Right-closed bins ((i-1)/B, i/B], compared in float64; 0 falls into the first."""
    return np.searchsorted(np.arange(1, n_bins) / n_bins, confidence, side="left")


def _binned_gap(confidence: Floats, hits: Floats, weight: Floats, n_bins: int) -> float:
    gap = np.bincount(_bin_of(confidence, n_bins), weights=weight * (confidence - hits), minlength=n_bins)
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

    >>> from tcil import metrics
    >>> metrics.expected_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    0.45
    """
    _check_bins(n_bins)
    return _score(
        lambda s: _binned_gap(s.confidence, s.correct, s.weight, n_bins), probs, labels, sample_weight, groups, classes
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

    With weights, a bin holds that share of the total weight, and a sample on an edge is split. Of samples with the
    same confidence those that are right come first, whatever the order of the rows.

    >>> from tcil import metrics
    >>> metrics.adaptive_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1], n_bins=2)
    0.45
    """
    _check_bins(n_bins)

    def error(s: _Sample) -> float:
        order = np.lexsort((-s.correct, s.confidence))
        gap = (s.confidence - s.correct)[order]
        weight = s.weight[order] * (len(order) / s.weight.sum())
        ends = np.concatenate([[0.0], np.cumsum(weight)])
        edges = np.append(np.arange(n_bins) * (len(order) // n_bins), len(order)).astype(np.float64)
        # The running sum of gaps, read off at the bins' edges (linear inside a sample).
        running = np.interp(edges, ends, np.concatenate([[0.0], np.cumsum(weight * gap)]))
        return float(np.abs(np.diff(running)).sum() / len(order))

    return _score(error, probs, labels, sample_weight, groups, classes)


def classwise_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The mean over classes (those that take part) of the binned calibration error of that class's probability.

    >>> from tcil import metrics
    >>> round(metrics.classwise_calibration_error([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.45
    """
    _check_bins(n_bins)

    def error(s: _Sample) -> float:
        n, k = s.probs.shape
        cell = _bin_of(s.probs.ravel(), n_bins).reshape(n, k) + n_bins * np.arange(k)
        gap = s.weight[:, None] * s.probs
        gap[np.arange(n), s.labels] -= s.weight
        sums = np.bincount(cell.ravel(), weights=gap.ravel(), minlength=n_bins * k)
        takes_part = np.asarray(s.probs.any(axis=0))
        takes_part[s.labels] = True
        return float(np.abs(sums).sum() / (int(takes_part.sum()) * s.weight.sum()))

    return _score(error, probs, labels, sample_weight, groups, classes)


def confidence_gap(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """Mean confidence less accuracy: positive for an over-confident model, negative for an under-confident one.

    >>> from tcil import metrics
    >>> round(metrics.confidence_gap([[0.9, 0.1], [0.8, 0.2]], [0, 1]), 4)
    0.35
    """
    return _score(lambda s: s.mean(s.confidence - s.correct), probs, labels, sample_weight, groups, classes)


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """What a reliability diagram shows: by bin of confidence, its weight, mean confidence and accuracy.

    Empty bins have weight 0 and NaN for the two means. Arrays have one entry per bin.

    >>> from tcil import metrics
    >>> bins = metrics.reliability_bins([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    >>> bins.count.tolist(), float(bins.accuracy[8]), float(bins.upper[8])
    ([0, 0, 0, 0, 0, 0, 0, 1, 1, 0], 1.0, 0.9)
    """

    lower: Floats
    upper: Floats
    count: Ints
    weight: Floats
    confidence: Floats
    accuracy: Floats
    by_group: Mapping[Any, ReliabilityBins] = field(default_factory=dict)


def reliability_bins(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> ReliabilityBins:
    """Confidence and accuracy by bin of confidence, as ECE bins them.

    >>> from tcil import metrics
    >>> metrics.reliability_bins([[0.9, 0.1], [0.8, 0.2]], [0, 1], n_bins=2).accuracy.tolist()
    [nan, 0.5]
    """
    _check_bins(n_bins)

    def bins(s: _Sample) -> ReliabilityBins:
        place = _bin_of(s.confidence, n_bins)
        weight, confidence, right = (
            np.bincount(place, weights=values * s.weight, minlength=n_bins)
            for values in (np.ones_like(s.confidence), s.confidence, s.correct)
        )
        edges = np.arange(n_bins + 1) / n_bins
        with np.errstate(invalid="ignore"):
            means = confidence / weight, right / weight
        count = np.bincount(place, minlength=n_bins).astype(np.int64)
        return ReliabilityBins(edges[:-1], edges[1:], count, weight / s.weight.sum(), *means)

    sample = _Sample.checked(probs, labels, sample_weight, classes)
    whole, by_group = bins(sample), _by_group(bins, sample, groups)
    return replace(whole, by_group=by_group)


# --- what chance does to ECE ------------------------------------------------------------------------------------

_DRAW_ELEMENTS = 1 << 22


def _resampled_gaps(
    draw: Callable[[np.random.Generator, int], tuple[Ints | None, Floats]],
    place: npt.NDArray[np.intp],
    weight: Floats,
    n_bins: int,
    n_draws: int,
    seed: int,
) -> Floats:
    """ECE of `n_draws` redrawn sets; `draw` gives a chunk of row indices (None: the set itself) and gaps."""
    rng = np.random.default_rng(seed)
    scores = []
    chunk = max(1, _DRAW_ELEMENTS // len(place))
    for start in range(0, n_draws, chunk):
        size = min(chunk, n_draws - start)
        rows, gaps = draw(rng, size)
        cells = place if rows is None else place[rows]
        mass = weight if rows is None else weight[rows]
        cells = cells + n_bins * np.arange(size)[:, None]
        sums = np.bincount(cells.ravel(), weights=(gaps * mass).ravel(), minlength=n_bins * size)
        total = np.broadcast_to(mass, gaps.shape).sum(axis=1)
        scores.append(np.abs(sums.reshape(size, n_bins)).sum(axis=1) / total)
    return np.concatenate(scores)


def noise_floor(
    probs: ArrayLike,
    n_bins: int = 10,
    *,
    n_draws: int = 200,
    seed: int = 0,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> Score:
    """The ECE that a perfectly calibrated model with these confidences would score on a set of this size.

    The mean over `n_draws` sets of labels drawn from the confidences themselves. An ECE near it is as good as zero.

    >>> import numpy as np
    >>> from tcil import metrics
    >>> few, many = np.full((50, 2), 0.5), np.full((5000, 2), 0.5)
    >>> metrics.noise_floor(few) > 5 * metrics.noise_floor(many) > 0
    True
    """
    _check_bins(n_bins)
    n_draws, seed = whole_number(n_draws, "n_draws", 1, _MOST_DRAWS), whole_number(seed, "seed", 0)
    rows = as_probabilities(probs)
    sample = _Sample(rows, np.zeros(len(rows), dtype=np.int64), as_weights(sample_weight, len(rows)))._weighty()

    def floor(s: _Sample) -> float:
        return float(_noise_draws(s, n_bins, n_draws, seed).mean())

    return Score(floor(sample), _by_group(floor, sample, groups))


def _noise_draws(s: _Sample, n_bins: int, n_draws: int, seed: int) -> Floats:
    """ECEs of sets of labels drawn from the confidences themselves."""

    def draw(rng: np.random.Generator, size: int) -> tuple[None, Floats]:
        return None, s.confidence - (rng.random((size, len(s.confidence))) < s.confidence)

    return _resampled_gaps(draw, _bin_of(s.confidence, n_bins), s.weight, n_bins, n_draws, seed)


@dataclass(frozen=True)
class CalibrationEstimate:
    """ECE with what chance does to it: noise floor, and a bootstrap interval for the true error.

    `noise_floor` is the mean ECE of a perfectly calibrated model on such a set, `noise_ceiling` the ECE that it stays
    below 95 times in 100. `low` and `high` bound the model's true error; near 0 they are too narrow, so that
    `above_noise` goes by the ceiling instead.

    >>> from tcil import metrics
    >>> metrics.CalibrationEstimate(ece=0.05, noise_floor=0.01, noise_ceiling=0.02, low=0.03, high=0.06).above_noise
    True
    """

    ece: float
    noise_floor: float
    noise_ceiling: float
    low: float
    high: float
    by_group: Mapping[Any, CalibrationEstimate] = field(default_factory=dict)

    @property
    def above_noise(self) -> bool:
        """Whether a perfectly calibrated model would score this badly less than 5 times in 100."""
        return self.ece > self.noise_ceiling


def calibration_estimate(
    probs: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> CalibrationEstimate:
    """ECE, its noise floor, and a bootstrap interval at `level`.

    ECE is biased upward: chance alone makes it positive, and resampling adds the same amount once more. So the
    interval is the reflected one, [2 ece - q_high, 2 ece - q_low] cut at 0, which takes that bias off; it estimates
    the error of the model, and may lie below the ECE of this set.

    >>> import numpy as np
    >>> from tcil import metrics
    >>> probs = np.tile([0.9, 0.1], (1000, 1))
    >>> estimate = metrics.calibration_estimate(probs, np.arange(1000) % 2)      # right half the time, at 0.9
    >>> round(estimate.ece, 3), estimate.noise_floor < 0.01, estimate.low < 0.4 < estimate.high
    (0.4, True, True)
    """
    _check_bins(n_bins)
    n_resamples = whole_number(n_resamples, "n_resamples", 1, _MOST_DRAWS)
    seed = whole_number(seed, "seed", 0)
    _check_share(level, "level", "a number between 0 and 1, such as 0.95", whole=False)
    sample = _Sample.checked(probs, labels, sample_weight, classes)

    def estimate(s: _Sample) -> CalibrationEstimate:
        gap = s.confidence - s.correct

        def draw(rng: np.random.Generator, size: int) -> tuple[Ints, Floats]:
            rows = rng.integers(len(gap), size=(size, len(gap)))
            return rows, gap[rows]

        ece = _binned_gap(s.confidence, s.correct, s.weight, n_bins)
        place = _bin_of(s.confidence, n_bins)
        resampled = _resampled_gaps(draw, place, s.weight, n_bins, n_resamples, seed)
        bottom, top = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
        noise = _noise_draws(s, n_bins, 400, seed)
        low, high = max(0.0, 2 * ece - float(top)), max(0.0, 2 * ece - float(bottom))
        return CalibrationEstimate(ece, float(noise.mean()), float(np.quantile(noise, 0.95)), low, high)

    whole, by_group = estimate(sample), _by_group(estimate, sample, groups)
    return replace(whole, by_group=by_group)


# --- selective prediction ---------------------------------------------------------------------------------------


def _risk_curve(s: _Sample) -> tuple[Floats, Floats]:
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

    >>> from tcil import metrics
    >>> metrics.area_under_risk_coverage([[0.9, 0.1], [0.8, 0.2]], [0, 1])       # risks 0 and 1/2
    0.25
    """

    def area(s: _Sample) -> float:
        weight, error = _risk_curve(s)
        covered = np.cumsum(weight)
        risk = np.cumsum(weight * error) / covered
        return float(weight @ risk / covered[-1])

    return _score(area, probs, labels, sample_weight, groups, classes)


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

    >>> from tcil import metrics
    >>> metrics.risk_at_coverage([[0.9, 0.1], [0.8, 0.2]], [0, 1], coverage=0.5)
    0.0
    """
    _check_share(coverage, "coverage", "a share of the samples, above 0 and at most 1", whole=True)

    def risk(s: _Sample) -> float:
        weight, error = _risk_curve(s)
        kept = coverage * weight.sum()
        errors = np.interp(kept, np.append(0.0, np.cumsum(weight)), np.append(0.0, np.cumsum(weight * error)))
        return float(errors / kept)

    return _score(risk, probs, labels, sample_weight, groups, classes)
