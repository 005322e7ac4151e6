"""RanPAC (McDonnell et al. 2023): ridge regression on random projections of frozen features; keeps no exemplars."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from tcil.foundation.errors import invalid
from tcil.incremental.learners.base import LearnerOptions
from tcil.incremental.learners.ncm import NCM, ClassMeans

_RIDGES = tuple(10.0**power for power in range(-4, 9))  # for second moments that are sums over images


@dataclass(frozen=True)
class RanPACOptions(LearnerOptions):
    """RanPAC's options.

    `projections`: number of random features (10,000 in the original; with 2,000, fitting and storing take seconds).
    `ridge`: the penalty; 0 means that it is chosen after each task on every fifth image of each class.
    """

    projections: int = 2000
    ridge: float = 0.0

    def __post_init__(self) -> None:
        self._check_least(projections=1, ridge=0)


class RandomProjection(ClassMeans):
    """Random features max(0, W f) of frozen features f, with a head fitted by ridge regression.

    The second moments of the random features and their sums by class are kept in two parts: for four fifths of the
    images, and for the rest. The penalty with the smallest squared error on the rest is used to fit the head to both.
    """

    def __init__(self, network: nn.Module, n_classes: int, options: RanPACOptions) -> None:
        super().__init__(network, n_classes)
        width, n = self.fc.in_features, options.projections
        self.options = options
        self.fc = nn.Linear(n, n_classes)
        self.register_buffer("projection", torch.randn(width, n))
        self.register_buffer("sums", torch.zeros(2, n_classes, n))
        self.register_buffer("moments", torch.zeros(2, n, n))
        self.projection: Tensor
        self.moments: Tensor

    def features(self, x: Tensor) -> Tensor:
        """The input of `fc`: the random features, of unit size on average."""
        below = cast(Tensor, self.network(x))
        return torch.relu(below @ self.projection) / math.sqrt(len(self.projection))

    def observe(self, x: Tensor, columns: Tensor) -> None:
        """Add a batch to the moments."""
        features = self.features(x)
        # The index of each image within its class, over all batches.
        order = columns.argsort(stable=True)
        sizes = torch.bincount(columns, minlength=len(self.counts))
        first = sizes.cumsum(0) - sizes
        place = torch.empty_like(columns)
        place[order] = torch.arange(len(columns), device=columns.device) - first[columns[order]]
        held = (place + self.counts[columns].long()) % 5 == 4
        for part, rows in enumerate((~held, held)):
            self.moments[part].addmm_(features[rows].T, features[rows])
            self.sums[part].index_add_(0, columns[rows], features[rows])
        self.counts += sizes.to(self.counts.dtype)

    def set_head(self) -> None:
        """Fit the head to the moments."""
        if not bool(self.counts.sum()):
            return
        if not self.moments.isfinite().all():
            given = "features that are not finite, or whose squares are not"
            raise invalid("network", given, "finite features", "Check its weights and the scale of the images.")
        weights = _ridge_regression(self.moments.double().sum(0), self.sums.double().sum(0))
        with torch.no_grad():
            self.fc.weight.copy_(weights(self._ridge()))
            self.fc.bias.zero_()

    def _ridge(self) -> float:
        """The given penalty, or the best one on the held-out images."""
        if self.options.ridge:
            return float(self.options.ridge)
        fit, held = self.moments.double()
        sums, held_sums = self.sums.double()
        weights = _ridge_regression(fit, sums)

        def error(ridge: float) -> float:
            weight = weights(ridge)
            return float(((weight @ held) * weight).sum() - 2 * (weight * held_sums).sum())

        return min(_RIDGES, key=error)


def _ridge_regression(moments: Tensor, sums: Tensor) -> Callable[[float], Tensor]:
    """Maps a penalty to the weights (classes, features) that minimise the squared error to the one-hot labels plus it.

    One decomposition serves all penalties. Moments are sums in float32: eigenvalues that rounding made negative are 0.
    """
    values, vectors = torch.linalg.eigh(moments)
    along, values = sums @ vectors, values.clamp(min=0)
    return lambda ridge: along / (values + ridge) @ vectors.T


class RanPAC(NCM):
    """Ridge regression on random projections of frozen features, from moments that are accumulated over tasks.

    The logits are estimates of one-hot labels, mostly between 0 and 1: before calibration, their softmax is far too
    flat.

    Examples
    --------
    >>> import torch, tcil
    >>> from tcil.incremental.learners import make_learner
    >>> make_learner("ranpac", tcil.networks.small_cnn, 10, seed=1, options={"projections": 100}).options.ridge
    0.0
    """

    meaning = "ridge regression on random projections of frozen features: no exemplars, no gradients"
    options_type = RanPACOptions
    options: RanPACOptions

    def _network(self) -> ClassMeans:
        return RandomProjection(self.network(self.n_classes), self.n_classes, self.options)
