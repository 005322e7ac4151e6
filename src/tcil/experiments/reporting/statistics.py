"""Means over seeds, and paired differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Spread:
    """Mean and population standard deviation, as the paper reports them.

    Attributes
    ----------
    mean, std : float
        Over the values.
    n : int
        How many values; 0 for a lone number, which is no mean.

    Examples
    --------
    >>> from tcil.experiments.reporting.statistics import Spread
    >>> Spread.of([4.0, 6.0])
    Spread(mean=5.0, std=1.0, n=2)
    """

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Mean and deviation of values, one per seed."""
        return cls(float(np.mean(values)), float(np.std(values)), len(values))

    @classmethod
    def lone(cls, value: float) -> Spread:
        """A number that is not a mean over seeds, such as a difference of means."""
        return cls(value, 0.0, 0)


@dataclass(frozen=True)
class PairedDifference:
    """The mean of b - a over pairs, with its 95 % interval by Student's t.

    Attributes
    ----------
    mean : float
        Over the pairs.
    low, high : float or None
        The ends of the interval; None for a single pair.
    n : int
        How many pairs.
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """Both ends."""
        return self.low, self.high

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval says that b and a differ."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> PairedDifference:
    """How much b exceeds a, pair by pair.

    >>> from tcil.experiments.reporting.statistics import paired_difference
    >>> d = paired_difference([10.0, 11.0, 12.0], [8.0, 9.1, 9.9])
    >>> round(d.mean, 2), d.excludes_zero
    (-2.0, True)
    """
    differences = np.asarray(b, dtype=float) - np.asarray(a, dtype=float)
    mean, n = float(differences.mean()), len(differences)
    if n < 2:
        return PairedDifference(mean, None, None, n)
    # The interval of stats.ttest_rel, which the tests compare; that one warns where all differences are equal.
    half = float(stats.t.ppf(0.975, n - 1) * stats.sem(differences))
    return PairedDifference(mean, mean - half, mean + half, n)
