"""Adversarial perturbation of exemplars: toward which class (direction policy) and how far (magnitude search)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tcil.calibration.options import Option, Verdict
from tcil.calibration.ranks import Ranks
from tcil.calibration.temperature import TemperatureFit


class DirectionPolicy(Option):
    """Toward which class an exemplar is pushed.

    >>> from tcil import DirectionPolicy
    >>> print(*(f"{p}: {p.meaning}" for p in DirectionPolicy), sep="\\n")
    paper: old classes toward the nearest class mean, new classes toward the farthest (T-CIL)
    random: every exemplar toward a class drawn at random
    closest: every exemplar toward the nearest class mean
    farthest: every exemplar toward the farthest class mean
    """

    PAPER = "paper", "old classes toward the nearest class mean, new classes toward the farthest (T-CIL)"
    RANDOM = "random", "every exemplar toward a class drawn at random"
    CLOSEST = "closest", "every exemplar toward the nearest class mean"
    FARTHEST = "farthest", "every exemplar toward the farthest class mean"


class ClassMeans:
    """Feature means by class, summed up a batch at a time; grows as new labels turn up."""

    def __init__(self) -> None:
        self._sums = torch.zeros(0, 0, dtype=torch.float64)
        self.counts = torch.zeros(0, dtype=torch.long)

    def add(self, features: Tensor, columns: Tensor) -> None:
        """Count a batch of features (B, D) into the classes `columns` (B,)."""
        missing = int(columns.max()) + 1 - len(self.counts)
        if missing > 0:
            empty = torch.zeros(missing, features.shape[1], dtype=torch.float64)
            self._sums = torch.cat([self._sums, empty]) if len(self.counts) else empty
            self.counts = torch.cat([self.counts, torch.zeros(missing, dtype=torch.long)])
        self._sums.index_add_(0, columns, features.cpu().double())
        self.counts.index_add_(0, columns, torch.ones_like(columns))

    def share(self, together: Ranks, n_classes: int, width: int) -> None:
        """Add what the other ranks counted: classes up to `n_classes`, features `width` wide."""
        sums, counts = torch.zeros(n_classes, width, dtype=torch.float64), torch.zeros(n_classes, dtype=torch.long)
        if len(self.counts):
            sums[: len(self.counts)], counts[: len(self.counts)] = self._sums, self.counts
        self._sums, self.counts = together.total(sums), together.total(counts)

    def means(self) -> Tensor:
        """The means (K, D) in float64, on the CPU."""
        return self._sums / self.counts[:, None]


class TargetChooser:
    """Picks the class each exemplar is pushed toward."""

    def __init__(self, policy: DirectionPolicy, means: Tensor, is_new: Tensor, seed: int) -> None:
        self._policy, self._means, self._is_new = policy, means, is_new
        self._square_norms = means.square().sum(dim=1)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, features: Tensor, columns: Tensor) -> Tensor:
        """Target columns (B,) for features (B, D) of exemplars of the classes `columns` (B,)."""
        n_classes = len(self._means)
        if self._policy is DirectionPolicy.RANDOM:
            return (columns + self._draw(columns)) % n_classes
        rows = features.detach().cpu().double()
        # Squared distance less the row's own |f|^2, which does not change which mean is nearest or farthest.
        distance = self._square_norms - 2.0 * rows @ self._means.T
        own = torch.arange(len(rows)), columns
        distance[own] = math.inf
        nearest = distance.argmin(dim=1)
        if self._policy is DirectionPolicy.CLOSEST:
            return nearest
        distance[own] = -math.inf
        farthest = distance.argmax(dim=1)
        if self._policy is DirectionPolicy.FARTHEST:
            return farthest
        return torch.where(self._is_new[columns], farthest, nearest)

    def skip(self, columns: Tensor) -> None:
        """Draw what exemplars that another rank perturbs would have drawn here."""
        if self._policy is DirectionPolicy.RANDOM:
            self._draw(columns)

    def _draw(self, columns: Tensor) -> Tensor:
        return torch.randint(1, len(self._means), columns.shape, generator=self._generator)


@dataclass(frozen=True)
class SearchStep:
    """One step of the magnitude search: a magnitude, and the temperature of the new exemplars pushed that far.

    `temperature` is 0 where all of them are still right and infinity where they are anti-informative.

    >>> import tcil
    >>> tcil.SearchStep(magnitude=0.5, temperature=2.0)
    SearchStep(magnitude=0.5, temperature=2.0)
    """

    magnitude: float
    temperature: float


@dataclass(frozen=True)
class MagnitudeSearch:
    """The outcome of MagSearch: the magnitude, the bracket it was searched in, and every step taken."""

    magnitude: float
    reachable: bool
    bracket: tuple[float, float]
    trace: tuple[SearchStep, ...]
    verdicts: tuple[Verdict, ...]


def search_magnitude(
    temperature_at: Callable[[float], TemperatureFit],
    clean: TemperatureFit,
    target: float,
    *,
    tolerance: float,
    input_scale: float,
) -> MagnitudeSearch:
    """MagSearch (Algorithm 2): bisect the magnitude in [0, 1] until the temperature meets the target.

    `clean` is the temperature at magnitude 0, known from the feature pass. The paper's bracket is in units of
    normalised inputs. Where inputs are larger (`input_scale`, their standard deviation) and the target is beyond
    magnitude 1, the search goes on from 1 to that scale, to the same relative tolerance: as many passes once more.
    """
    trace = [SearchStep(0.0, clean.limit)]

    def outcome(magnitude: float, reachable: bool, high: float, *verdicts: Verdict) -> MagnitudeSearch:
        return MagnitudeSearch(magnitude, reachable, (0.0, high), tuple(trace), verdicts)

    def bisect(low: SearchStep, high: float, width: float) -> tuple[SearchStep, float, float]:
        """Shrink [low, high]; return both ends and the temperature seen at the high one (nan if never tried)."""
        seen_high = math.nan
        while high - low.magnitude > width:
            step = SearchStep(middle := (low.magnitude + high) / 2, temperature_at(middle).limit)
            trace.append(step)
            if step.temperature < target:
                low = step
            else:
                high, seen_high = middle, step.temperature
        return low, high, seen_high

    if clean.limit >= target:
        return outcome(0.0, False, 1.0, Verdict.TARGET_BELOW_RANGE)
    top = 1.0
    low, high, seen_high = bisect(trace[0], top, tolerance)
    widened: tuple[Verdict, ...] = ()
    if high == top and input_scale > top:
        top, widened = input_scale, (Verdict.BRACKET_WIDENED,)
        low, high, seen_high = bisect(low, top, tolerance * top)
    if high == top:
        return outcome(top, False, top, *widened, Verdict.TARGET_ABOVE_RANGE)
    jumped = (Verdict.TARGET_JUMPED,) if low.temperature == 0.0 and seen_high == math.inf else ()
    coarse = (Verdict.BELOW_TOLERANCE,) if low.magnitude == 0.0 else ()
    return outcome((low.magnitude + high) / 2, not jumped, top, *widened, *jumped, *coarse)
