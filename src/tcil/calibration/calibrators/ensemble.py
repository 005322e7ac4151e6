"""ETS (Zhang et al. 2020): a mixture of scaled, unscaled and uniform probabilities, fitted by squared error."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from tcil.calibration.calibrators.arguments import BOUNDS, warn_unless_ok
from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.calibrators.maps import CalibrationMap, EnsembleMap
from tcil.foundation.arrays import ArrayLike, Floats, logits_and_columns
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record


@dataclass(frozen=True)
class EnsembleResult(Record):
    """The result of ETS. Near T = 1 the first two weights are not identified: compare probabilities, not weights.

    Attributes
    ----------
    temperature : float
        T in softmax(z/T).
    weights : tuple of three floats
        Weights of softmax(z/T), softmax(z) and 1/K; they sum to 1.
    mse_before, mse_after : float
        The mean squared error of the probabilities without and with ETS.
    verdict : tcil.options.Verdict
        "ok", or "uniform" if all weight is on 1/K.
    verdicts : tuple of tcil.options.Verdict
        The same verdict as a tuple, as in all results.
    n_samples : int
        Number of rows of logits.

    Examples
    --------
    >>> import tcil
    >>> fit = tcil.EnsembleTemperatureScaling().fit([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [0, 1, 1]).result_
    >>> round(sum(fit.weights), 6), fit.mse_after <= fit.mse_before
    (1.0, True)
    """

    temperature: float
    weights: tuple[float, float, float]
    mse_before: float
    mse_after: float
    verdict: Verdict
    n_samples: int

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdict as a tuple, as in all results."""
        return (self.verdict,)


@dataclass(eq=False, kw_only=True)
class EnsembleTemperatureScaling(Calibrator[EnsembleResult]):
    """ETS: p = w0 softmax(z/T) + w1 softmax(z) + w2/K, T in [0.05, 5] and then w on the simplex, by squared error.

    Both steps are solved to their global optimum: T by a grid and a bounded search, w by enumerating the faces of
    the simplex. K is the number of unmasked classes. If the logits carry no information, the published method puts all
    weight on the uniform part. The fit then warns; in float64 the predicted class still leads, by a rounding error.

    Attributes
    ----------
    result_ : tcil.results.EnsembleResult
        The temperature, the weights and the squared errors.
    classes_ : tuple of int
        The label of each logit column.

    Examples
    --------
    >>> import torch, tcil
    >>> logits = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    >>> ensemble = tcil.EnsembleTemperatureScaling().fit(logits, torch.tensor([0, 1, 2, 2]))
    >>> ensemble.predict_proba(logits).max(dim=1).values
    tensor([0.7500, 0.7500, 0.7500, 0.7500], dtype=torch.float64)
    """

    map_type: ClassVar[type[CalibrationMap]] = EnsembleMap
    result_type: ClassVar[type[Any]] = EnsembleResult

    def fit(self, logits: ArrayLike, labels: ArrayLike, *, classes: Iterable[Any] | None = None) -> Self:
        """Fit on logits and labels.

        Parameters
        ----------
        logits : tensor or array (N, K)
            The network's outputs before softmax.
        labels : tensor or array (N,)
            The class of each row.
        classes : iterable of int, optional
            The label of each logit column. Default: 0 to K - 1.

        Returns
        -------
        Self
            This calibrator, fitted.
        """
        self._check_options()
        z, y, names = logits_and_columns(logits, labels, classes)
        z = z.double()
        onehot = torch.nn.functional.one_hot(y, z.shape[1]).double()
        temperature = _best_temperature(z, onehot)
        alive = z != -torch.inf
        uniform = (1.0 / alive.double().sum(dim=1, keepdim=True)).expand_as(z)
        plain, scaled = torch.softmax(z, dim=1)[alive], torch.softmax(z / temperature, dim=1)[alive]
        onehot = onehot[alive]
        parts = torch.stack([scaled, plain, uniform[alive]], dim=1)
        weights = _simplex_least_squares(parts.numpy(), onehot.numpy())
        mixed = parts @ torch.from_numpy(weights)
        result = EnsembleResult(
            temperature,
            (float(weights[0]), float(weights[1]), float(weights[2])),
            float((plain - onehot).square().mean()),
            float((mixed - onehot).square().mean()),
            Verdict.UNIFORM if weights[2] == 1.0 else Verdict.OK,
            len(z),
        )
        mapping = EnsembleMap(torch.tensor(temperature, dtype=torch.float64), torch.from_numpy(weights))
        self._fitted(mapping, names, result)
        warn_unless_ok(result.verdict, "EnsembleTemperatureScaling", result.n_samples)
        return self


def _best_temperature(z: Tensor, onehot: Tensor) -> float:
    """argmin over [0.05, 5] of the mean squared error, which is not convex: a grid search, then a bounded search."""

    def error(log_t: float) -> float:
        return float((torch.softmax(z / float(np.exp(log_t)), dim=1) - onehot).square().mean())

    grid = np.linspace(np.log(BOUNDS[0]), np.log(BOUNDS[1]), 47)
    best = int(np.argmin([error(point) for point in grid]))
    around = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    optimum = minimize_scalar(error, bounds=around, method="bounded", options={"xatol": 1e-12})
    log_t = min((optimum.x, *around), key=error)
    return float(np.exp(log_t))


def _simplex_least_squares(parts: Floats, wanted: Floats) -> Floats:
    """argmin |parts w - wanted|^2 over the simplex: the best among the minima of its faces that lie inside the face."""
    gram, cross = parts.T @ parts, parts.T @ wanted
    best: tuple[float, Floats] | None = None
    n = parts.shape[1]
    for size in range(1, n + 1):
        for face in map(list, itertools.combinations(range(n), size)):
            kkt = np.ones((size + 1, size + 1))
            kkt[:size, :size] = gram[np.ix_(face, face)]
            kkt[size, size] = 0.0
            solution = np.linalg.lstsq(kkt, np.append(cross[face], 1.0), rcond=None)[0][:size]
            if (solution < 0).any():
                continue
            weights = np.zeros(n)
            weights[face] = solution / solution.sum()
            value = float(weights @ gram @ weights - 2 * weights @ cross)
            # A larger face must be better by more than rounding.
            if best is None or value < best[0] - 1e-14 * (1.0 + abs(best[0])):
                best = value, weights
    assert best is not None
    return best[1]
