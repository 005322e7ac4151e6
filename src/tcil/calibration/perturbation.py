"""Adversarial perturbation of exemplars: its direction (direction policy) and its magnitude (magnitude search)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tcil.calibration.temperature import TemperatureFit
from tcil.foundation.options import Option, Verdict
from tcil.foundation.ranks import Ranks
from tcil.foundation.records import Record

# Distances to class means are computed for this many pairs of a row and a class at a time.
_CHUNK_ELEMENTS = 1 << 21


class DirectionPolicy(Option):
    """The class toward which an exemplar is perturbed.

    Examples
    --------
    >>> from tcil.options import DirectionPolicy
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


class SearchMethod(Option):
    """How the magnitude is searched.

    Examples
    --------
    >>> from tcil.options import SearchMethod
    >>> print(*(f"{m}: {m.meaning}" for m in SearchMethod), sep="\\n")
    interpolation: the bracket that the bisection ends in, found by interpolating log T in about half as many passes
    bisection: the paper's: the bracket is halved until it is no wider than the tolerance
    """

    INTERPOLATION = (
        "interpolation",
        "the bracket that the bisection ends in, found by interpolating log T in about half as many passes",
    )
    BISECTION = "bisection", "the paper's: the bracket is halved until it is no wider than the tolerance"


class ClassMeans:
    """Feature means by class, accumulated over batches; grows when new labels occur."""

    def __init__(self) -> None:
        self._sums = torch.zeros(0, 0, dtype=torch.float64)
        self.counts = torch.zeros(0, dtype=torch.long)

    def add(self, features: Tensor, columns: Tensor) -> None:
        """Add a batch of features (B, D) of the classes `columns` (B,)."""
        missing = int(columns.max()) + 1 - len(self.counts)
        if missing > 0:
            empty = torch.zeros(missing, features.shape[1], dtype=torch.float64)
            self._sums = torch.cat([self._sums, empty]) if len(self.counts) else empty
            self.counts = torch.cat([self.counts, torch.zeros(missing, dtype=torch.long)])
        self._sums.index_add_(0, columns, features.cpu().double())
        self.counts.index_add_(0, columns, torch.ones_like(columns))

    def share(self, together: Ranks, n_classes: int, width: int) -> None:
        """Add the sums of the other ranks, for `n_classes` classes and `width` features."""
        sums, counts = torch.zeros(n_classes, width, dtype=torch.float64), torch.zeros(n_classes, dtype=torch.long)
        if len(self.counts):
            sums[: len(self.counts)], counts[: len(self.counts)] = self._sums, self.counts
        self._sums, self.counts = together.total(sums), together.total(counts)

    def means(self) -> Tensor:
        """The means (K, D) in float64, on the CPU."""
        return self._sums / self.counts[:, None]


class TargetChooser:
    """Chooses the class toward which each exemplar is perturbed."""

    def __init__(self, policy: DirectionPolicy, means: Tensor, is_new: Tensor, seed: int) -> None:
        self._policy, self._means, self._is_new = policy, means, is_new
        self._square_norms = means.square().sum(dim=1)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, features: Tensor, columns: Tensor, masked: Tensor | None = None) -> Tensor:
        """Target columns (B,) for features (B, D) of exemplars of the classes `columns` (B,).

        A class that is `masked` (B, K) is never chosen. If a row has no other class, the target is its own class.
        """
        n_classes = len(self._means)
        barred = None
        if masked is not None and bool(masked.any()):
            barred = masked.cpu().clone()
            barred[torch.arange(len(columns)), columns] = True
        if self._policy is DirectionPolicy.RANDOM:
            draws = self._draw(columns)
            targets = (columns + draws) % n_classes if barred is None else _places_after(columns, draws, barred)
        else:
            rows = max(1, _CHUNK_ELEMENTS // n_classes)
            targets = torch.cat(
                [
                    self._by_distance(features[i : i + rows], columns[i : i + rows], barred, i)
                    for i in range(0, len(columns), rows)
                ]
            )
        return targets if barred is None else torch.where(barred.all(dim=1), columns, targets)

    def _by_distance(self, features: Tensor, columns: Tensor, barred: Tensor | None, start: int) -> Tensor:
        rows = features.detach().cpu().double()
        # Squared distance minus the row's |f|^2, which does not affect which mean is nearest or farthest.
        distance = self._square_norms - 2.0 * rows @ self._means.T
        never: Any = (torch.arange(len(rows)), columns) if barred is None else barred[start : start + len(rows)]
        distance[never] = math.inf
        nearest = distance.argmin(dim=1)
        if self._policy is DirectionPolicy.CLOSEST:
            return nearest
        distance[never] = -math.inf
        farthest = distance.argmax(dim=1)
        if self._policy is DirectionPolicy.FARTHEST:
            return farthest
        return torch.where(self._is_new[columns], farthest, nearest)

    def skip(self, columns: Tensor) -> None:
        """Advance the generator by the draws for exemplars that another rank perturbs."""
        if self._policy is DirectionPolicy.RANDOM:
            self._draw(columns)

    def mark(self) -> Tensor:
        """The state of the random policy's generator, for `back_to`."""
        return self._generator.get_state()

    def back_to(self, mark: Tensor) -> None:
        """Restore the generator, so that exemplars that are read again get the same targets."""
        self._generator.set_state(mark)

    def _draw(self, columns: Tensor) -> Tensor:
        return torch.randint(1, len(self._means), columns.shape, generator=self._generator)


def _places_after(columns: Tensor, draws: Tensor, barred: Tensor) -> Tensor:
    """The class `draws` positions after each one, cyclically, counting only classes that are not barred."""
    n_classes = barred.shape[1]
    going_round = (columns[:, None] + torch.arange(1, n_classes + 1)) % n_classes
    free = ~barred.gather(1, going_round)
    wanted = (draws - 1) % free.sum(dim=1).clamp(min=1) + 1
    first = (free.cumsum(dim=1) >= wanted[:, None]).int().argmax(dim=1)
    return going_round.gather(1, first[:, None]).squeeze(1)


@dataclass(frozen=True)
class SearchStep(Record):
    """One step of the magnitude search.

    Attributes
    ----------
    magnitude : float
        The magnitude of the perturbation of the new exemplars.
    temperature : float
        Their temperature: 0 if all are still correct, infinity if they are anti-informative.

    Examples
    --------
    >>> from tcil.results import SearchStep
    >>> SearchStep(magnitude=0.5, temperature=2.0)
    SearchStep(magnitude=0.5, temperature=2.0)
    """

    magnitude: float
    temperature: float


@dataclass(frozen=True)
class MagnitudeSearch:
    """The outcome of MagSearch: the magnitude, the bracket that was searched, and every step."""

    magnitude: float
    reachable: bool
    bracket: tuple[float, float]
    trace: tuple[SearchStep, ...]
    verdicts: tuple[Verdict, ...]


_START = 1 / 32  # of the bracket: typical magnitudes are a few hundredths of the inputs' scale
_GROWTH = 0.5  # slope of log T over log magnitude, until two temperatures are known


def search_magnitude(
    temperature_at: Callable[[float], TemperatureFit],
    clean: TemperatureFit,
    target: float,
    *,
    tolerance: float,
    input_scale: float,
    method: SearchMethod = SearchMethod.BISECTION,
    glance: Callable[[float], TemperatureFit] | None = None,
) -> MagnitudeSearch:
    """MagSearch (Algorithm 2): the magnitude in [0, 1] at which the temperature meets the target.

    `clean` is the temperature at magnitude 0, from the feature pass. The paper's bracket is in units of normalised
    inputs. If inputs are larger (`input_scale`, their standard deviation) and the target lies beyond magnitude 1, the
    search continues from 1 to that scale with the same relative tolerance, which takes as many passes again.

    Interpolation tries only magnitudes that the bisection could try, and ends between two neighbours of them. If the
    temperature grows with the magnitude, this is the bracket in which the bisection ends. To check this, midpoints that
    the bisection would have tried far from there are tested with `glance`, the temperature of a few samples. If one
    lies on the unexpected side of the target, also with all samples, the temperature does not grow, and the result of
    the bisection is used.
    """
    search = _Search(temperature_at, clean, target, glance)
    shrink = search.bisect if method is SearchMethod.BISECTION else search.interpolate
    if clean.limit >= target:
        return search.outcome(0.0, 1.0, Verdict.TARGET_BELOW_RANGE, reachable=False)
    top = 1.0
    low, high = shrink(search.trace[0], top, tolerance)
    widened: tuple[Verdict, ...] = ()
    if high.magnitude == top and input_scale > top:
        top, widened = input_scale, (Verdict.BRACKET_WIDENED,)
        low, high = shrink(low, top, tolerance * top)
    if high.magnitude == top:
        return search.outcome(top, top, *widened, Verdict.TARGET_ABOVE_RANGE, reachable=False)
    jumped = (Verdict.TARGET_JUMPED,) if low.temperature == 0.0 and high.temperature == math.inf else ()
    coarse = (Verdict.BELOW_TOLERANCE,) if low.magnitude == 0.0 else ()
    middle = (low.magnitude + high.magnitude) / 2
    return search.outcome(middle, top, *widened, *jumped, *coarse, reachable=not jumped)


_Bracket: TypeAlias = tuple[SearchStep, SearchStep]  # the upper temperature is NaN until it is evaluated


class _Search:
    """The steps of one search; every magnitude is evaluated once."""

    def __init__(
        self,
        temperature_at: Callable[[float], TemperatureFit],
        clean: TemperatureFit,
        target: float,
        glance: Callable[[float], TemperatureFit] | None,
    ) -> None:
        self._temperature_at, self._target, self._glance = temperature_at, target, glance
        self.trace = [SearchStep(0.0, clean.limit)]
        self._tried: dict[float, SearchStep] = {}

    def outcome(self, magnitude: float, high: float, *verdicts: Verdict, reachable: bool) -> MagnitudeSearch:
        """The outcome of the search in [0, high]."""
        return MagnitudeSearch(magnitude, reachable, (0.0, high), tuple(self.trace), verdicts)

    def bisect(self, low: SearchStep, top: float, width: float) -> _Bracket:
        """Both ends of the last bracket; if its upper end is `top`, that was never evaluated."""
        high = SearchStep(top, math.nan)
        while high.magnitude - low.magnitude > width:
            middle = (low.magnitude + high.magnitude) / 2
            if middle in (low.magnitude, high.magnitude):  # no number lies between them
                break
            step = self._step_at(middle)
            low, high = (step, high) if self._is_low(step) else (low, step)
        return low, high

    def interpolate(self, low: SearchStep, top: float, width: float) -> _Bracket:
        """The same bracket by steps to an interpolated root, if the temperature grows with the magnitude."""
        halvings = math.ceil(math.log2(max(1.0, (top - low.magnitude) / width)))
        cells = 2**halvings
        cell = (top - low.magnitude) / cells
        first, ends = self._step_to_the_root((low, SearchStep(top, math.nan)), cells, cell)
        for middle in _bisected(0, cells, first):
            if self._is_elsewhere(low.magnitude + middle * cell, ends, below=middle <= first):
                return self.bisect(low, top, width)
        return ends

    def _step_to_the_root(self, ends: _Bracket, cells: int, cell: float) -> tuple[int, _Bracket]:
        """The cell of the bracket that contains the root, and its ends.

        After two steps that do not halve the remaining interval, the next one does.
        """
        begin, top = ends[0].magnitude, ends[1].magnitude
        first, last, slow = 0, cells, 0
        while last - first > 1:
            guess = round((_guess(list(self._tried.values()), self._target, _START * top) - begin) / cell)
            if slow == 2 or not first <= guess <= last:
                guess = (first + last) // 2
            index = min(max(guess, first + 1), last - 1)
            step, before = self._step_at(begin + index * cell), last - first
            if self._is_low(step):
                first, ends = index, (step, ends[1])
            else:
                last, ends = index, (ends[0], step)
            slow = 0 if 2 * (last - first) <= before else slow + 1
        return first, ends

    def _is_elsewhere(self, magnitude: float, ends: _Bracket, *, below: bool) -> bool:
        """Whether a magnitude far `below` or above the root turns out to be on the other side of the target."""
        low, high = ends
        far = magnitude >= 2 * high.magnitude or magnitude <= low.magnitude / 2
        if self._glance is None or not far or magnitude in self._tried:
            return False
        if (self._glance(magnitude).limit < self._target) == below:
            return False
        return self._is_low(self._step_at(magnitude)) != below

    def _is_low(self, step: SearchStep) -> bool:
        return step.temperature < self._target

    def _step_at(self, magnitude: float) -> SearchStep:
        if magnitude not in self._tried:
            self._tried[magnitude] = SearchStep(magnitude, self._temperature_at(magnitude).limit)
            self.trace.append(self._tried[magnitude])
        return self._tried[magnitude]


def _guess(tried: Sequence[SearchStep], target: float, start: float) -> float:
    """The magnitude at which log T, interpolated in log magnitude between the two nearest steps, meets the target."""
    if not tried:
        return start
    finite = [step for step in tried if 0.0 < step.temperature < math.inf]
    if not finite:
        last = tried[-1]
        return last.magnitude * (4.0 if last.temperature == 0.0 else 0.25)
    finite.sort(key=lambda step: abs(math.log(step.temperature / target)))
    near, growth = finite[0], _GROWTH
    if len(finite) > 1:
        rise = math.log(finite[1].temperature / near.temperature)
        run = math.log(finite[1].magnitude / near.magnitude)
        growth = max(rise / run, 0.1)  # if T is flat or falling, take a long step
    return near.magnitude * math.exp(min(max(math.log(target / near.temperature) / growth, -2.0), 2.0))


def _bisected(low: int, high: int, cell: int) -> Iterator[int]:
    """The midpoints that lead a bisection of [low, high] to [cell, cell + 1]."""
    while high - low > 1:
        middle = (low + high) // 2
        yield middle
        low, high = (middle, high) if middle <= cell else (low, middle)
