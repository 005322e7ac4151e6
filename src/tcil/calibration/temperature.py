"""TempOpt: the temperature that minimises the cross-entropy of `logits / T`, exactly.

In `b = 1/T` the mean cross-entropy `L(b) = mean(logsumexp(b z) - b z_y)` is convex, with
`L'(b) = mean(E_softmax(bz)[z] - z_y)` and `L''(b) = mean(Var_softmax(bz)[z])`. The optimum is therefore the root of one
increasing function, and whether it has a root follows from its two limits, in closed form. Masked classes (-inf) are
left out of every row's softmax and mean; a row with a single unmasked class carries no information about T.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcil.foundation.arrays import ArrayLike, logits_and_columns, whole_number, without_masked
from tcil.foundation.options import Option, Verdict
from tcil.foundation.records import Record

# Rows are converted to float64 this many elements at a time, so that the solver needs little extra memory.
_CHUNK_ELEMENTS = 1 << 21
FEWEST = 5  # images below which a mean or an error means nothing


class Solver(Option):
    """How a temperature is found.

    Examples
    --------
    >>> from tcil.options import Solver
    >>> print(*(f"{s}: {s.meaning}" for s in Solver), sep="\\n")
    exact: the root of the gradient, by safeguarded Newton in float64
    sgd: the authors' schedule on T: lr 0.1, divided by 10 at epoch 50, 100 epochs, batch 128, T0 = 1
    """

    EXACT = "exact", "the root of the gradient, by safeguarded Newton in float64"
    SGD = (
        "sgd",
        "the authors' schedule on T: lr 0.1, divided by 10 at epoch 50, 100 epochs, batch 128, T0 = 1",
    )


@dataclass(frozen=True)
class TemperatureFit(Record):
    """A fitted temperature with its verdict.

    Attributes
    ----------
    temperature : float
        The temperature: logits are divided by it. 1 unless `verdict` is "ok".
    verdict : tcil.options.Verdict
        Whether the data identify a temperature.
    nll_before, nll_after : float
        The mean cross-entropy at T = 1 and at `temperature`.
    gradient : float
        The derivative of the mean cross-entropy with respect to 1/T at `temperature`; at most 1e-10 times the spread
        of the logits if the exact solver found a root.
    n_samples : int
        Number of rows of logits.
    solver : tcil.options.Solver
        How it was found.
    limit : float
        Where the optimum lies: 0 or infinity for a degenerate set.
    verdicts : tuple of tcil.options.Verdict
        The same verdict as a tuple, as in all results.

    Examples
    --------
    >>> import tcil
    >>> fit = tcil.fit_temperature([[2.0, 0.0], [0.0, 3.0]], [0, 1])
    >>> fit.temperature, str(fit.verdict), fit.limit
    (1.0, 'all_correct', 0.0)
    """

    temperature: float
    verdict: Verdict
    nll_before: float
    nll_after: float
    gradient: float
    n_samples: int
    solver: Solver = Solver.EXACT

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdict as a tuple, as in all results."""
        return (self.verdict,)

    @property
    def limit(self) -> float:
        """The optimum as used by the magnitude search: 0 for all-correct, infinity for anti-informative."""
        if self.verdict in (Verdict.ALL_CORRECT, Verdict.DIVERGED):
            return 0.0
        return math.inf if self.verdict is Verdict.ANTI_INFORMATIVE else self.temperature


def fit_temperature(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    classes: Iterable[Any] | None = None,
    solver: Solver | str = Solver.EXACT,
    seed: int = 0,
) -> TemperatureFit:
    """Fit the temperature that minimises the cross-entropy of `logits / T` against `labels` (TempOpt).

    Parameters
    ----------
    logits : tensor or array (N, K)
        The network's outputs before softmax.
    labels : tensor or array (N,)
        The class of each row.
    classes : iterable of int, optional
        The label of each logit column. Default: 0 to K - 1.
    solver : {"exact", "sgd"}
        How the temperature is found (`tcil.options.Solver`).
    seed : int
        Seed for the order of the SGD solver's batches; the exact solver is deterministic.

    Returns
    -------
    tcil.results.TemperatureFit
        The temperature with its verdict.

    Examples
    --------
    >>> import tcil
    >>> logits = [[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0], [4.0, 0.0, 0.0]]
    >>> fit = tcil.fit_temperature(logits, [0, 1, 2, 1])     # accuracy 0.75, confidence 0.96
    >>> round(fit.temperature, 4), str(fit.verdict), fit.nll_after < fit.nll_before
    (2.2324, 'ok', True)
    """
    solver, seed = Solver.parse(solver, "solver"), whole_number(seed, "seed", 0)
    z, y, _ = logits_and_columns(logits, labels, classes)
    return solve_temperature(z, y, solver, seed)


def solve_temperature(z: Tensor, y: Tensor, solver: Solver = Solver.EXACT, seed: int = 0) -> TemperatureFit:
    """TempOpt on checked logits (-inf where masked) and label columns."""
    loss = _Loss(z, y)
    temperature, verdict = 1.0, loss.verdict
    if verdict is Verdict.OK and solver is Solver.EXACT:
        c = _root(loss)
        if c is None:
            loss = loss.unscaled()
            c = _bisected(loss)
        temperature = loss.spread / c
    elif verdict is Verdict.OK:
        raw = _sgd(z, y, seed)
        if math.isfinite(raw) and raw > 0:
            temperature = raw
        else:
            verdict = Verdict.DIVERGED
    nll_before, gradient = loss.nll(1.0)
    nll_after, gradient = loss.nll(temperature) if temperature != 1.0 else (nll_before, gradient)
    return TemperatureFit(temperature, verdict, nll_before, nll_after, gradient, len(z), solver)


def temperature_error(z: Tensor, y: Tensor, temperature: float) -> float | None:
    """The standard error of log T by the draw of these images (sandwich); None where it has none."""
    if len(z) < FEWEST:
        return None
    scaled = z.double() / temperature
    p, scaled = torch.softmax(scaled, dim=1), without_masked(scaled)
    mean = (p * scaled).sum(dim=1)
    score = scaled.gather(1, y[:, None]).squeeze(1) - mean  # d NLL / d log T, a row each
    curvature = float(((p * scaled.square()).sum(dim=1) - mean.square() - score).mean())
    spread = float(score.square().sum() / (len(z) - 1)) ** 0.5
    return None if curvature <= 0 or spread <= 1e-6 else spread / curvature / math.sqrt(len(z))


Interval = tuple[float, float]
_RESAMPLES = 50


def temperature_interval(*sets: tuple[Tensor, Tensor]) -> Interval | None:
    """A 95 % bootstrap interval for the temperature of a set of logits and label columns.

    If more sets are given, each is resampled, and the temperature of the first set is assumed to change in proportion
    to theirs. None if a resample has no temperature.
    """
    generator = torch.Generator().manual_seed(0)
    whole = [solve_temperature(*part).temperature for part in sets]
    resampled = []
    for _ in range(_RESAMPLES):
        temperature = whole[0]
        for (z, y), original in zip(sets, whole, strict=True):
            rows = torch.randint(len(y), (len(y),), generator=generator)
            fit = solve_temperature(z[rows], y[rows])
            if fit.verdict is not Verdict.OK:
                return None
            temperature *= fit.temperature / original
        resampled.append(temperature)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


class _Loss:
    """L and its derivatives, for logits rescaled to spread 1, so that the scale of the logits does not matter.

    Rows are shifted so that their maximum is 0, to avoid overflow. `spread` is the mean distance of a row's maximum to
    its mean; `at(c)` evaluates at b = c / spread.
    """

    def __init__(self, z: Tensor, y: Tensor) -> None:
        self._z, self._y, self._n = z, y, len(z)
        self._masked = bool(z.min() == -torch.inf)
        self._rows = max(1, _CHUNK_ELEMENTS // z.shape[1])
        self.spread = 1.0
        self._only_chunk: tuple[Tensor, Tensor, Tensor | None] | None = None
        above = below = spread = 0.0
        for rows, own, alive in self._chunks():
            means = rows.mean(dim=1) if alive is None else rows.sum(dim=1) / alive.sum(dim=1)
            above += float(-own.sum())
            below += float((own - means).sum())
            spread += float(-means.sum())
        self.verdict = _verdict(above, below, spread)
        self.spread = spread / self._n or 1.0
        if self._n <= self._rows:
            self._only_chunk = self._chunk(0)

    def unscaled(self) -> _Loss:
        """The same loss without rescaling: L and L' then stay within float64 even if rows have very different scales.

        The squares in L'' may overflow.
        """
        other = copy.copy(self)
        other.spread, other._only_chunk = 1.0, None
        if self._n <= self._rows:
            other._only_chunk = other._chunk(0)
        return other

    def _chunk(self, start: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Shifted rows (masked entries are 0), their entries at the true class, and the unmasked ones (None: all)."""
        rows = self._z[start : start + self._rows].double()
        rows = (rows - rows.amax(dim=1, keepdim=True)) / self.spread
        takes_part = (rows != -torch.inf).double() if self._masked else None
        rows = without_masked(rows) if self._masked else rows
        return rows, rows.gather(1, self._y[start : start + self._rows, None]).squeeze(1), takes_part

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        if self._only_chunk is not None:
            yield self._only_chunk
        else:
            yield from (self._chunk(start) for start in range(0, self._n, self._rows))

    def at(self, c: float) -> tuple[float, float, float]:
        """L, L' and L'' with respect to c."""
        value = slope = curvature = 0.0
        for rows, own, alive in self._chunks():
            weight = torch.exp(c * rows) if alive is None else torch.exp(c * rows) * alive
            total = weight.sum(dim=1)
            weight /= total[:, None]
            mean = (weight * rows).sum(dim=1)
            value += float((total.log() - c * own).sum())
            slope += float((mean - own).sum())
            curvature += float((weight * (rows - mean[:, None]).square()).sum())
        return value / self._n, slope / self._n, curvature / self._n

    def nll(self, temperature: float) -> tuple[float, float]:
        """The mean NLL at a temperature, and its derivative with respect to 1/T."""
        value, slope, _ = self.at(self.spread / temperature)
        return value, slope * self.spread


_NEWTON_STEPS = 100  # ordinary sets need about ten
_LARGEST_LOG = 690.0  # of 1/T, so that 1/T and T stay within float64
_LARGEST_SQUARED = 1e154  # its square is within float64
_NO_SPREAD = 1e-300  # below it, float64 loses digits, and the inverse of a temperature may overflow


def _verdict(above: float, below: float, spread: float) -> Verdict:
    """Whether L' has a root, by its limits: -below at b = 0 and +above at b = infinity."""
    if spread <= _NO_SPREAD:
        return Verdict.CONSTANT_LOGITS
    if above == 0.0:
        return Verdict.ALL_CORRECT
    if below <= 1e-15 * spread:  # zero up to rounding
        return Verdict.ANTI_INFORMATIVE
    return Verdict.OK


def _root(loss: _Loss) -> float | None:
    """The root of L' by Newton's method in log c, safeguarded by a bracket; None if it does not converge."""
    low, high, point = -math.inf, math.inf, 0.0
    for _ in range(_NEWTON_STEPS):
        c = math.exp(point)
        _, slope, curvature = loss.at(c)
        if slope == curvature == 0.0:  # both underflow in float64
            return None
        low, high = (point, high) if slope < 0 else (low, point)
        step = -slope / (c * curvature) if curvature > 0 else math.copysign(2.0, -slope)
        step = max(-2.0, min(2.0, step))
        resolution = 4e-16 * max(1.0, abs(point))
        if abs(step) <= resolution or high - low <= resolution:
            break
        point += step
        if not low < point < high:
            point = (low + high) / 2
    else:
        return None
    if abs(slope) > 1e-10:
        raise RuntimeError(
            f"fit_temperature: the gradient is still {slope:.3g} at T = {loss.spread / math.exp(point):.6g}"
        )
    return math.exp(point)


def _bisected(loss: _Loss) -> float:
    """The root of L' by bisection in log c.

    If the logits of some rows are larger by many powers of ten, Newton's steps become ever shorter, and the rescaled
    logits of the other rows may be too small for float64.
    """
    low, high = -_LARGEST_LOG, _LARGEST_LOG
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if loss.at(math.exp(middle))[1] < 0 else (low, middle)
    return math.exp(high)


def _sgd(z: Tensor, y: Tensor, seed: int) -> float:
    """The authors' TempOpt. Under-converges on small sets; may leave T > 0."""
    epochs, batch_size, milestone = 100, 128, 50
    generator = torch.Generator().manual_seed(seed)
    z = z.double()
    alive = without_masked(z)
    temperature = 1.0
    for epoch in range(epochs):
        rate = 0.1 if epoch < milestone else 0.01
        order = torch.randperm(len(z), generator=generator)
        for rows in order.split(batch_size):
            logits = alive[rows]
            mean = (torch.softmax(z[rows] / temperature, dim=1) * logits).sum(dim=1)
            slope = float((mean - logits.gather(1, y[rows, None]).squeeze(1)).mean())
            square = temperature**2 if abs(temperature) < _LARGEST_SQUARED else math.inf
            temperature += rate * slope / square  # dL/dT = -L'(b) / T^2
            if not math.isfinite(temperature) or temperature == 0.0:
                return math.nan
    return temperature
