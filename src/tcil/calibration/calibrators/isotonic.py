"""IRM (Zhang et al. 2020): one isotonic regression for all classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.calibrators.maps import CalibrationMap, IsotonicMap
from tcil.foundation.arrays import ArrayLike, logits_and_columns
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record


@dataclass(frozen=True)
class IsotonicResult(Record):
    """The result of IRM: the sizes of its data and of its fitted function.

    Attributes
    ----------
    n_samples : int
        Number of rows of logits.
    n_knots : int
        Number of points between which the regression is linear.
    verdicts : tuple of tcil.options.Verdict
        Always "ok".

    Examples
    --------
    >>> import tcil
    >>> tcil.MulticlassIsotonic().fit([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [0, 1, 1]).result_
    IsotonicResult(n_samples=3, n_knots=4)
    """

    n_samples: int
    n_knots: int

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Always "ok", as a tuple, as in all results."""
        return (Verdict.OK,)


@dataclass(eq=False, kw_only=True)
class MulticlassIsotonic(Calibrator[IsotonicResult]):
    """IRM: isotonic regression of all N*K one-hot entries on all N*K probabilities, followed by row normalisation.

    A slope of 1e-9 is added to keep the argmax where the regression is flat. If that is not enough, the class of the
    largest logit leads by a rounding error. Both need float64, which `transform` returns. Masked entries are ignored.

    Attributes
    ----------
    result_ : tcil.results.IsotonicResult
        Numbers of samples and knots.
    classes_ : tuple of int
        The label of each logit column.

    Examples
    --------
    >>> import torch, tcil
    >>> logits = 5 * torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    >>> isotonic = tcil.MulticlassIsotonic().fit(logits, torch.tensor([0, 1, 2, 2]))
    >>> isotonic.predict_proba(logits).max(dim=1).values
    tensor([0.7500, 0.7500, 0.7500, 0.7500], dtype=torch.float64)
    """

    map_type: ClassVar[type[CalibrationMap]] = IsotonicMap
    result_type: ClassVar[type[Any]] = IsotonicResult

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
        alive = z != -torch.inf
        probs = torch.softmax(z.double(), dim=1)[alive].numpy()
        hits = torch.nn.functional.one_hot(y, z.shape[1])[alive].double().numpy()
        # Probabilities that are equal up to rounding form one point of the regression, with the mean of their hits.
        points, place = np.unique(probs, return_inverse=True)
        first = np.append(True, np.diff(points) > 1e-15 * points[1:])
        points, place = points[first], (np.cumsum(first) - 1)[place]
        counts = np.bincount(place)
        means = np.bincount(place, weights=hits) / counts
        levels = isotonic_regression(means, weights=counts.astype(float)).x
        # Only the ends of a flat segment are needed.
        ends = np.ones(len(points), dtype=bool)
        ends[1:-1] = (levels[1:-1] != levels[:-2]) | (levels[1:-1] != levels[2:])
        knots, values = points[ends], levels[ends]
        if len(knots) == 1:  # all probabilities are equal: a constant function, with two knots
            knots, values = np.array([knots[0], np.nextafter(knots[0], 2.0)]), np.repeat(values, 2)
        mapping = IsotonicMap(torch.from_numpy(knots), torch.from_numpy(values))
        return self._fitted(mapping, names, IsotonicResult(len(z), len(knots)))
