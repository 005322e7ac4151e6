"""The noise levels of PerturbTS: how much noise lowers the accuracy to each of several targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tcil.foundation.options import Option
from tcil.foundation.records import Record

MAX_NOISE = 100.0
TOLERANCE = 0.03  # relative to the clean accuracy
LAST_TOLERANCE = 0.05  # the original's wider tolerance for the last level
_SCAN = (0.0, *np.geomspace(MAX_NOISE / 2**14, MAX_NOISE, 29).tolist())  # half an octave apart
_PRECISION = 1e-3  # relative to the noise; finer than the validation images can resolve
_ROUNDING = 1e-9  # tolerance for accuracies, which are multiples of 1/N
_SIMPLEX_TOLERANCE = 1e-4  # the original's, for both noise and accuracy
_SIMPLEX_EVALUATIONS = 200  # the original's: no step starts after this many


class NoiseSearch(Option):
    """How PerturbTS searches for the noise that lowers the accuracy to a level.

    Examples
    --------
    >>> from tcil.options import NoiseSearch
    >>> print(*(f"{s}: {s.meaning}" for s in NoiseSearch), sep="\\n")
    monotone: scan noise up to 100 once, bisect to where the accuracy crosses each level; else "not reachable"
    nelder-mead: the original's simplex search with fresh noise at every evaluation; it may collapse (for parity only)
    """

    MONOTONE = (
        "monotone",
        'scan noise up to 100 once, bisect to where the accuracy crosses each level; else "not reachable"',
    )
    NELDER_MEAD = (
        "nelder-mead",
        "the original's simplex search with fresh noise at every evaluation; it may collapse (for parity only)",
    )


@dataclass(frozen=True)
class NoiseLevel(Record):
    """One level of PerturbTS.

    Attributes
    ----------
    target_accuracy : float
        The target accuracy.
    noise : float
        The standard deviation of the noise that the search found.
    accuracy : float
        The accuracy at this noise.
    reachable : bool
        Whether it is within the tolerance of the target.
    evaluations : int
        Number of passes over the data during the search.

    Examples
    --------
    >>> from tcil.results import NoiseLevel
    >>> print(NoiseLevel(target_accuracy=0.8, noise=0.25, accuracy=0.79, reachable=True, evaluations=5))
    NoiseLevel
      target accuracy  0.8
      noise            0.25
      accuracy         0.79
      reachable        yes
      evaluations      5
    """

    target_accuracy: float
    noise: float
    accuracy: float
    reachable: bool
    evaluations: int


def _tolerances(targets: list[float]) -> list[float]:
    """The tolerance of each level's accuracy, for all levels below the clean one."""
    return [targets[0] * TOLERANCE] * (len(targets) - 2) + [targets[0] * LAST_TOLERANCE]


def monotone_levels(accuracy_at: Callable[[float], float], targets: list[float]) -> tuple[NoiseLevel, ...]:
    """For each target, the smallest noise at which the accuracy falls to it, or else is within the tolerance.

    One scan of at most 29 evaluations serves all levels, and no noise is tried twice. A level adds at most 10
    evaluations, or 20 if the accuracy jumps over the tolerance. A level that is not reachable gets the noise whose
    accuracy is nearest.
    """
    clean = targets[0]
    seen = {0.0: clean}

    def accuracy(noise: float) -> float:
        if noise not in seen:
            seen[noise] = accuracy_at(noise)
        return seen[noise]

    def smallest(goal: float, target: float, tolerance: float) -> float | None:
        """The smallest noise found at which the accuracy is at most `goal` and within the tolerance of the target."""

        def near(noise: float) -> bool:
            return abs(accuracy(noise) - target) <= tolerance + _ROUNDING

        goal += _ROUNDING
        if all(accuracy(noise) > goal for noise in _SCAN):
            return None
        high = min(noise for noise in seen if accuracy(noise) <= goal)
        low = max((noise for noise in seen if noise < high), default=high)
        while high - low > _PRECISION * max(high, _SCAN[1]):
            middle = (low + high) / 2
            low, high = (low, middle) if accuracy(middle) <= goal else (middle, high)
        return next((noise for noise in (high, low) if near(noise)), None)

    levels = [NoiseLevel(clean, 0.0, clean, True, 0)]
    for target, tolerance in zip(targets[1:], _tolerances(targets), strict=True):
        before, noise = len(seen), None
        if target < clean:  # a network that is no better than chance has no lower level
            for goal in (target, target + tolerance):
                noise = smallest(goal, target, tolerance) if noise is None else noise
        reachable = noise is not None
        if noise is None:
            noise = min(seen, key=lambda n: (abs(seen[n] - target), n))
        levels.append(NoiseLevel(target, noise, seen[noise], reachable, len(seen) - before))
    return tuple(levels)


def nelder_mead_levels(
    accuracy_at: Callable[[float], float], targets: list[float], start: float
) -> tuple[NoiseLevel, ...]:
    """The original's search: each level starts a simplex {x, 1.5 x} at the noise of the previous level.

    `accuracy_at` may be random: no evaluation is repeated, and the accuracy seen during the search is reported.
    """
    clean = targets[0]
    levels = [NoiseLevel(clean, 0.0, clean, True, 0)]
    for target, tolerance in zip(targets[1:], _tolerances(targets), strict=True):
        best, evaluations = _simplex(accuracy_at, target, start, tolerance)
        start = best.noise
        # A negative standard deviation gives the same distribution as its absolute value.
        levels.append(NoiseLevel(target, abs(best.noise), best.accuracy, best.miss < tolerance, evaluations))
    return tuple(levels)


@dataclass(frozen=True)
class _Vertex:
    """A noise that was tried, the accuracy there and its distance from the target."""

    noise: float
    accuracy: float
    miss: float


def _simplex(
    accuracy_at: Callable[[float], float], target: float, start: float, tolerance: float
) -> tuple[_Vertex, int]:
    """Nelder-Mead in one dimension, where a simplex is two points; returns the best point and the evaluations.

    It ends when the better point is within the tolerance, or when the two agree to 1e-4 both in noise and in accuracy.
    """
    evaluations = 0

    def at(noise: float) -> _Vertex:
        nonlocal evaluations
        evaluations += 1
        accuracy = accuracy_at(noise)
        return _Vertex(noise, accuracy, abs(target - accuracy))

    best, worst = sorted((at(start), at(1.5 * start)), key=_by_miss)
    while evaluations < _SIMPLEX_EVALUATIONS and best.miss >= tolerance:
        step = best.noise - worst.noise
        if abs(step) <= _SIMPLEX_TOLERANCE and abs(best.miss - worst.miss) <= _SIMPLEX_TOLERANCE:
            break
        reflected = at(best.noise + step)
        if reflected.miss < best.miss:
            expanded = at(best.noise + 2 * step)
            new = min(reflected, expanded, key=_by_miss)
        else:
            outside = reflected.miss < worst.miss
            new = at(best.noise + (step / 2 if outside else -step / 2))
            if not (new.miss <= reflected.miss if outside else new.miss < worst.miss):
                new = at(best.noise - step / 2)  # shrink: fresh noise, so evaluated again
        best, worst = sorted((best, new), key=_by_miss)
    return best, evaluations


def _by_miss(vertex: _Vertex) -> float:
    return vertex.miss
