"""The sampling uncertainty of ECE: its noise floor, an estimate with an interval, and a comparison of two models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tcil.foundation.arrays import (
    ArrayLike,
    Floats,
    Ints,
    as_classes,
    as_labels,
    as_probabilities,
    as_weights,
    whole_number,
)
from tcil.foundation.errors import invalid
from tcil.foundation.records import Record
from tcil.metrics.calibration_error import MOST_DRAWS, bin_of, binned_gap, check_bins
from tcil.metrics.sample import Sample, Score, by_group_of, check_share

_DRAW_ELEMENTS = 1 << 22
_FEWEST = 20  # images from which a bootstrap interval can be trusted at all


def _resampled_gaps(
    draw: Callable[[np.random.Generator, int], tuple[Ints | None, Floats]],
    bin_index: npt.NDArray[np.intp],
    weight: Floats,
    n_bins: int,
    n_draws: int,
    seed: int,
) -> Floats:
    """ECE of `n_draws` resampled sets; `draw` returns a chunk of row indices (None: the set itself) and gaps."""
    # Not scipy.stats.bootstrap: stored intervals depend on these draws, and rows carry bins and weights.
    rng = np.random.default_rng(seed)
    scores = []
    chunk = max(1, _DRAW_ELEMENTS // max(len(bin_index), n_bins))
    for start in range(0, n_draws, chunk):
        size = min(chunk, n_draws - start)
        rows, gaps = draw(rng, size)
        cells = bin_index if rows is None else bin_index[rows]
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
    """The ECE that a perfectly calibrated model with these confidences would have on a set of this size.

    It is the mean over `n_draws` sets of labels drawn from the confidences. An ECE near it cannot be distinguished from
    zero. Labels are drawn row by row, so other orders of the rows are other draws.

    Parameters
    ----------
    probs : tensor or array (N, K)
        Predicted probabilities, one row per sample.
    n_bins : int
        Number of bins.
    n_draws : int
        Number of label sets to draw.
    seed : int
        Seed for drawing the labels.
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
    >>> import numpy as np
    >>> from tcil import metrics
    >>> few, many = np.full((50, 2), 0.5), np.full((5000, 2), 0.5)
    >>> metrics.noise_floor(few) > 5 * metrics.noise_floor(many) > 0
    True
    """
    check_bins(n_bins)
    n_draws, seed = whole_number(n_draws, "n_draws", 1, MOST_DRAWS), whole_number(seed, "seed", 0)
    rows = as_probabilities(probs)
    sample = Sample(rows, np.zeros(len(rows), dtype=np.int64), as_weights(sample_weight, len(rows)))
    sample = sample.without_zero_weights()

    def floor(s: Sample) -> float:
        return float(_noise_draws(s, n_bins, n_draws, seed).mean())

    return Score(floor(sample), by_group_of(floor, sample, groups))


def _noise_draws(s: Sample, n_bins: int, n_draws: int, seed: int) -> Floats:
    """ECEs of sets of labels drawn from the confidences."""

    def draw(rng: np.random.Generator, size: int) -> tuple[None, Floats]:
        return None, s.confidence - (rng.random((size, len(s.confidence))) < s.confidence)

    return _resampled_gaps(draw, bin_of(s.confidence, n_bins), s.weight, n_bins, n_draws, seed)


@dataclass(frozen=True)
class CalibrationEstimate(Record):
    """ECE with its noise floor and a bootstrap interval for the true calibration error.

    Attributes
    ----------
    ece : float
        The ECE of this set.
    noise_floor : float
        The mean ECE of a perfectly calibrated model on such a set.
    noise_ceiling : float
        The 95th percentile of the ECE of such a model.
    low, high : float
        The interval for the model's true error. Near 0 it is too narrow: use `above_noise` there.
    by_group : mapping
        The estimate of each group; empty if no groups were given.
    above_noise : bool
        Whether `ece` is above `noise_ceiling`.

    Examples
    --------
    >>> from tcil import metrics
    >>> estimate = metrics.CalibrationEstimate(ece=0.05, noise_floor=0.01, noise_ceiling=0.02, low=0.03, high=0.06)
    >>> estimate.above_noise
    True
    >>> print(estimate)
    CalibrationEstimate
      ece            0.05
      noise floor    0.01
      noise ceiling  0.02
      low            0.03
      high           0.06
    """

    ece: float
    noise_floor: float
    noise_ceiling: float
    low: float
    high: float
    by_group: Mapping[Any, CalibrationEstimate] = field(default_factory=dict)

    @property
    def above_noise(self) -> bool:
        """Whether a perfectly calibrated model would have an ECE this large in fewer than 5 % of sets."""
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

    ECE is biased upward: sampling noise alone makes it positive, and resampling adds the same bias again. The interval
    is therefore the reflected one, [2 ece - q_high, 2 ece - q_low] clipped at 0, which removes that bias. It estimates
    the error of the model and may lie below the ECE of this set. Rows are drawn by their position, so other orders of
    the rows are other draws.

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
    level : float
        Confidence level of the interval, between 0 and 1.
    n_resamples : int
        Number of bootstrap samples.
    seed : int
        Seed for the bootstrap samples and the labels of the noise floor.
    sample_weight : tensor or array (N,), optional
        Non-negative weights. Default: all samples count equally.
    groups : array (N,), optional
        Group of each sample (numbers or strings), for instance from `predicted_groups`.

    Returns
    -------
    CalibrationEstimate
        ECE, noise floor and interval; `by_group` holds those of each group.

    Examples
    --------
    >>> import numpy as np
    >>> from tcil import metrics
    >>> probs = np.tile([0.9, 0.1], (1000, 1))
    >>> estimate = metrics.calibration_estimate(probs, np.arange(1000) % 2)      # confidence 0.9, accuracy 0.5
    >>> round(estimate.ece, 3), estimate.noise_floor < 0.01, estimate.low < 0.4 < estimate.high
    (0.4, True, True)
    """
    n_resamples, seed, level = _checked(n_bins, n_resamples, seed, level)
    sample = Sample.checked(probs, labels, sample_weight, classes)

    def estimate(s: Sample) -> CalibrationEstimate:
        ece, resampled = _bootstrap(s, n_bins, n_resamples, seed)
        bottom, top = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
        low, high = max(0.0, 2 * ece - float(top)), max(0.0, 2 * ece - float(bottom))
        noise = _noise_draws(s, n_bins, 400, seed)
        return CalibrationEstimate(ece, float(noise.mean()), float(np.quantile(noise, 0.95)), low, high)

    whole, by_group = estimate(sample), by_group_of(estimate, sample, groups)
    return replace(whole, by_group=by_group)


def _checked(n_bins: int, n_resamples: int, seed: int, level: float) -> tuple[int, int, float]:
    """The options of a bootstrap as numbers, after a check of each."""
    check_bins(n_bins)
    n_resamples = whole_number(n_resamples, "n_resamples", 1, MOST_DRAWS)
    seed = whole_number(seed, "seed", 0)
    check_share(level, "level", "a number between 0 and 1, such as 0.95", whole=False)
    return n_resamples, seed, float(level)


def _bootstrap(s: Sample, n_bins: int, n_resamples: int, seed: int) -> tuple[float, Floats]:
    """ECE, and the ECEs of sets whose rows are drawn from this one; with the same seed, the same rows are drawn."""
    gap = s.confidence - s.correct

    def draw(rng: np.random.Generator, size: int) -> tuple[Ints, Floats]:
        rows = rng.integers(len(gap), size=(size, len(gap)))
        return rows, gap[rows]

    ece = binned_gap(s.confidence, s.correct, s.weight, n_bins)
    return ece, _resampled_gaps(draw, bin_of(s.confidence, n_bins), s.weight, n_bins, n_resamples, seed)


class _Resampled(NamedTuple):
    """A model on a set of images."""

    n: int
    ece: float
    draws: Floats  # of sets whose rows are drawn from this one
    floor: float  # the noise floor


@dataclass(frozen=True)
class CalibrationComparison(Record):
    """The ECE of two models on the same images, and a bootstrap interval for their difference.

    Attributes
    ----------
    before, after : float
        The ECE of each.
    difference : float
        `after - before`: negative where the second is better.
    low, high : float
        The interval for the difference.
    n : int
        Number of images.
    by_group : mapping
        The comparison of each group; empty if no groups were given.
    verdict : str
        "better", "worse" or "not told", of the second: on which side of 0 the interval is. With fewer than 20 images it
        is "not told".

    Examples
    --------
    >>> from tcil import metrics
    >>> found = metrics.CalibrationComparison(before=0.20, after=0.03, difference=-0.17, low=-0.19, high=-0.15, n=800)
    >>> found.verdict
    'better'
    """

    before: float
    after: float
    difference: float
    low: float
    high: float
    n: int
    by_group: Mapping[Any, CalibrationComparison] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """On which side of 0 the interval is: "better" or "worse"; "not told" where it holds 0, or of few images."""
        if self.low <= 0 <= self.high or self.n < _FEWEST:
            return "not told"
        return "better" if self.difference < 0 else "worse"

    def rows(self) -> list[tuple[str, str]]:
        """The names and values to show, as text; the verdict too."""
        shown = super().rows()
        return [*shown[:6], ("verdict", self.verdict), *shown[6:]]

    def in_short(self) -> str:
        """One line, for a group."""
        return f"{self.before:.4g} -> {self.after:.4g} ({self.verdict})"


def compare_calibration(
    before: ArrayLike,
    after: ArrayLike,
    labels: ArrayLike,
    n_bins: int = 10,
    *,
    classes: Iterable[Any] | None = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    sample_weight: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> CalibrationComparison:
    """Did calibration help? The difference in ECE of two models on the same images, with a bootstrap interval.

    Use images that neither the network nor the calibrator was fitted on, of old and new classes as they will be met.
    Both models are resampled together, so the interval is that of paired images. ECE is biased upward, the more the
    wider confidences are spread, and resampling adds this bias again. The interval therefore covers two: that of the
    resampled differences, and the same about the difference less that of the noise floors. It is made for the verdict,
    and cautious as an estimate. Rows are drawn by their position, so other orders of the rows are other draws.

    Parameters
    ----------
    before, after : tensor or array (N, K)
        Predicted probabilities of the two models, for instance without and with a calibrator.
    labels : tensor or array (N,)
        True class of each sample.
    n_bins : int
        Number of bins.
    classes : iterable of int, optional
        Label of each column. Default: 0 to K - 1.
    level : float
        Confidence level of the interval, between 0 and 1.
    n_resamples : int
        Number of bootstrap samples.
    seed : int
        Seed for the bootstrap samples.
    sample_weight : tensor or array (N,), optional
        Non-negative weights. Default: all samples count equally.
    groups : array (N,), optional
        Group of each sample (numbers or strings), for instance from `predicted_groups`.

    Returns
    -------
    CalibrationComparison
        Both ECEs, their difference and its interval; `by_group` holds those of each group.

    Examples
    --------
    >>> import numpy as np
    >>> from tcil import metrics
    >>> labels = np.arange(1000) % 10 // 6                                   # 0 in 60 % of the images
    >>> before, after = np.tile([0.9, 0.1], (1000, 1)), np.tile([0.65, 0.35], (1000, 1))
    >>> found = metrics.compare_calibration(before, after, labels)
    >>> round(found.before, 2), round(found.after, 2), found.high < -0.1, found.verdict
    (0.3, 0.05, True, 'better')
    """
    n_resamples, seed, level = _checked(n_bins, n_resamples, seed, level)
    names = None if classes is None else as_classes(classes, "classes")
    n_labels, shapes = len(as_labels(labels)), {}
    for argument, rows in (("before", before), ("after", after)):
        shapes[argument] = as_probabilities(rows, argument).shape
        if shapes[argument][0] != n_labels:
            raise invalid(argument, f"{shapes[argument][0]} rows", f"{n_labels}, one for each label")
    if shapes["before"] != shapes["after"]:
        raise invalid("after", f"{shapes['after'][1]} classes", f"{shapes['before'][1]}, as before")
    first, second = (Sample.checked(rows, labels, sample_weight, names) for rows in (before, after))

    def resampled(s: Sample) -> _Resampled:
        ece, draws = _bootstrap(s, n_bins, n_resamples, seed)
        return _Resampled(len(s.labels), ece, draws, float(_noise_draws(s, n_bins, 200, seed).mean()))

    def compared(one: _Resampled, other: _Resampled) -> CalibrationComparison:
        difference, draws = other.ece - one.ece, other.draws - one.draws
        bottom, top = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
        shift = difference - (other.floor - one.floor) - float(draws.mean())
        low, high = min(bottom, bottom + shift), max(top, top + shift)
        return CalibrationComparison(one.ece, other.ece, difference, float(low), float(high), one.n)

    of_second = by_group_of(resampled, second, groups)
    of_groups = {group: compared(own, of_second[group]) for group, own in by_group_of(resampled, first, groups).items()}
    return replace(compared(resampled(first), resampled(second)), by_group=of_groups)
