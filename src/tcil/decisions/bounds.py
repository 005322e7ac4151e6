"""Bounds on a share, or on the mean of a bounded loss, that hold for every number of samples.

`errors` may be an array: bounds are computed elementwise. All are one-sided: each fails with a probability of at most
`error`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, betainc, betainccinv, betaincinv, xlogy

from tcil.foundation.arrays import Floats

Numbers = npt.ArrayLike
_STEPS = 50  # of a bisection: to the last bits of a float64


def binomial_upper(errors: Numbers, n: Numbers, error: float) -> Floats:
    """The upper Clopper-Pearson bound on a share, from `errors` successes in `n` trials; 1 where there are none.

    >>> round(float(binomial_upper(0, 29, 0.05)), 3)
    0.098
    """
    k, n = np.asarray(errors, np.float64), np.asarray(n, np.float64)
    some = k < n
    return np.where(some, betainccinv(k + 1.0, np.where(some, n - k, 1.0), error), 1.0)


def binomial_lower(successes: Numbers, n: Numbers, error: float) -> Floats:
    """The lower Clopper-Pearson bound on a share; 0 where there are no successes.

    >>> round(float(binomial_lower(29, 29, 0.05)), 3)
    0.902
    """
    k, n = np.asarray(successes, np.float64), np.asarray(n, np.float64)
    safe = np.where(k > 0, k, 1.0)
    return np.where(k > 0, betaincinv(safe, np.maximum(n - safe, 0.0) + 1.0, error), 0.0)


def mean_upper(total: Numbers, n: Numbers, error: float, *, identical: bool = True) -> Floats:
    """The Hoeffding-Bentkus bound on the mean of losses within [0, 1], from their sum (Bates et al. 2021).

    For losses with different distributions, not `identical`, Hoeffding's inequality alone (1963, theorem 1).

    >>> round(float(mean_upper(2.5, 100, 0.05)), 3)
    0.083
    """
    total, n = np.broadcast_arrays(np.asarray(total, np.float64), np.asarray(n, np.float64))
    some = np.maximum(n, 1.0)
    mean = np.clip(total / some, 0.0, 1.0)
    low, high = mean.copy(), np.ones_like(mean)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = _hoeffding_bentkus(mean, some, middle, identical) > error  # the mean may still be as high as this
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.where(n > 0, high, 1.0)


def mean_lower(total: Numbers, n: Numbers, error: float, *, identical: bool = True) -> Floats:
    """The same from below: the bound on one less the loss."""
    total, n = np.broadcast_arrays(np.asarray(total, np.float64), np.asarray(n, np.float64))
    return np.asarray(1.0 - mean_upper(n - total, n, error, identical=identical))


def _hoeffding_bentkus(mean: Floats, n: Floats, risk: Floats, identical: bool) -> Floats:
    """A valid p-value of "the true mean is `risk` or more"."""
    a = np.minimum(mean, risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = xlogy(a, a / risk) + xlogy(1 - a, (1 - a) / (1 - risk))
    hoeffding = np.exp(-n * np.nan_to_num(divergence, nan=0.0, posinf=np.inf))
    if not identical:
        return np.asarray(np.minimum(hoeffding, 1.0))
    bentkus = np.e * bdtr(np.ceil(n * mean - 1e-9), np.rint(n).astype(np.int64), np.clip(risk, 0.0, 1.0))
    return np.asarray(np.minimum(np.minimum(hoeffding, bentkus), 1.0))


def stratified_upper(errors: Numbers, n: Numbers, error: float) -> Floats:
    """`binomial_upper` for trials with different chances, such as a few images of every class: bounds their mean.

    Hoeffding (1956, theorem 4): the number of successes is then less spread out than a binomial one. It holds for
    `error` up to 1/4 where the bound is kept at 1 for fewer than two failures (Greenberg and Mohri 2014).
    """
    k, n = np.broadcast_arrays(np.asarray(errors, np.float64), np.asarray(n, np.float64))
    return np.where(n - k > 1, binomial_upper(k, n, min(error, 0.25)), 1.0)


def stratified_lower(successes: Numbers, n: Numbers, error: float) -> Floats:
    """`binomial_lower` for trials with different chances."""
    k, n = np.broadcast_arrays(np.asarray(successes, np.float64), np.asarray(n, np.float64))
    return np.asarray(1.0 - stratified_upper(n - k, n, error))


def conformal_rank(n: int, alpha: float, n_classes: int | None = None) -> int:
    """Which of `n` sorted scores is the threshold at coverage 1 - alpha; n + 1 where none is.

    For independent images, the smallest k with k / (n + 1) >= 1 - alpha. For the same number of images of each of
    `n_classes` classes, the smallest that one of two theorems allows (docs/decisions-theory.md has the proofs):
    k >= (n + n_classes)(1 - alpha), or `stratified_coverage(n, k)` >= 1 - alpha.

    >>> conformal_rank(19, 0.05), conformal_rank(18, 0.05), conformal_rank(80, 0.1), conformal_rank(80, 0.1, 8)
    (19, 19, 73, 74)
    """
    spare = 1 if n_classes is None else n_classes
    rank = min(_plain_rank(n + spare, alpha), n + 1)
    if n_classes is not None and n > 1:
        ranks = np.arange(1, n + 1)
        enough = np.flatnonzero(stratified_coverage(n, ranks) >= 1.0 - alpha)
        rank = min(rank, int(ranks[enough[0]]) if len(enough) else n + 1)
    return rank


def stratified_coverage(n: int, rank: Numbers) -> Floats:
    """The least expected coverage of the `rank`-th of `n` scores, of which every class has the same number.

    The integral of P(Bin(n, u) < rank) over u from 0 to (rank - 1) / n: there the number of scores below a quantile is
    less spread out than a binomial one (Hoeffding 1956).

    >>> [round(float(stratified_coverage(80, rank)), 3) for rank in (73, 75, 80)]
    [0.887, 0.914, 0.983]
    """
    k = np.asarray(rank, np.float64)
    x = (k - 1) / n
    tail = x * betainc(k, n - k + 1, x) - k / (n + 1) * betainc(k + 1, n - k + 1, x)
    return np.asarray(x - tail)


def conformal_begins_at(alpha: float, n_classes: int | None = None) -> int:
    """The smallest number of scores with a threshold; with `n_classes`, a multiple of it.

    >>> conformal_begins_at(0.05), conformal_begins_at(0.1), conformal_begins_at(0.1, 10), conformal_begins_at(1e-6)
    (19, 9, 20, 999999)
    """
    step = 1 if n_classes is None else n_classes

    def enough(steps: int) -> bool:  # whether the largest score is a threshold
        n = steps * step
        stratified = n_classes is not None and n > 1 and float(stratified_coverage(n, n)) >= 1.0 - alpha
        return stratified or _plain_rank(n + step, alpha) <= n

    return step * smallest(enough)


def _plain_rank(n: int, alpha: float) -> int:
    """The smallest k with k / n >= 1 - alpha; the product may be rounded down."""
    return n - math.floor(n * alpha * (1 + 4e-16))


def smallest(enough: Callable[[int], bool], most: int = 1 << 53, start: int = 1) -> int:
    """The smallest number from `start` on that is enough, if all larger ones are; `most` where none is.

    >>> smallest(lambda n: n * n > 50)
    8
    """
    low, high = start - 1, start
    while not enough(high):
        low, high = high, 2 * high
        if high >= most:
            return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
