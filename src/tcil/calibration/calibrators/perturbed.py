"""PerturbTS (Tomani et al. 2021): temperature scaling on a validation set under several levels of Gaussian noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from tcil.calibration import random_state
from tcil.calibration.arrays import (
    check_own_unmasked,
    classes_and_columns,
    label_columns,
    pick_columns,
    whole_number,
)
from tcil.calibration.calibrators.base import SingleTemperature
from tcil.calibration.calibrators.inputs import BOUNDS, missing_valid, positive
from tcil.calibration.calibrators.maps import CalibrationMap
from tcil.calibration.classifier import Classifier, UsedWeights
from tcil.calibration.errors import NotReachableError, invalid
from tcil.calibration.examples import MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.options import Option, Verdict
from tcil.calibration.prediction import stream_logits
from tcil.calibration.temperature import solve_temperature

MAX_NOISE = 100.0
TOLERANCE = 0.03  # of the clean accuracy
LAST_TOLERANCE = 0.05  # the original's wider one for its last level


class NoiseSearch(Option):
    """How PerturbTS looks for the noise that brings the accuracy down to a level.

    >>> from tcil import NoiseSearch
    >>> print(*(f"{s}: {s.meaning}" for s in NoiseSearch), sep="\\n")
    monotone: scan noise up to 100 once, bisect where the accuracy crosses the level; a missed level is "not reachable"
    nelder-mead: the original's simplex search, which collapses on a flat accuracy curve (for parity only)
    """

    MONOTONE = (
        "monotone",
        'scan noise up to 100 once, bisect where the accuracy crosses the level; a missed level is "not reachable"',
    )
    NELDER_MEAD = (
        "nelder-mead",
        "the original's simplex search, which collapses on a flat accuracy curve (for parity only)",
    )


@dataclass(frozen=True)
class NoiseLevel:
    """One level of PerturbTS: the accuracy wanted, the noise found for it, the accuracy it gives, what it cost.

    >>> import tcil
    >>> tcil.NoiseLevel(target_accuracy=0.8, noise=0.0, accuracy=0.8, reachable=True, evaluations=0).reachable
    True
    """

    target_accuracy: float
    noise: float
    accuracy: float
    reachable: bool
    evaluations: int


@dataclass(frozen=True)
class PerturbedFit:
    """What PerturbTS found; `temperature` is None where some level is not reachable.

    >>> import tcil
    >>> tcil.PerturbedFit(temperature=None, reachable=False, levels=(), verdicts=(), n_samples=10).temperature is None
    True
    """

    temperature: float | None
    reachable: bool
    levels: tuple[NoiseLevel, ...]
    verdicts: tuple[Verdict, ...]
    n_samples: int


@dataclass(eq=False, kw_only=True)
class PerturbedTemperatureScaling(SingleTemperature):
    """PerturbTS: noise levels chosen so that accuracy falls evenly from its clean value to 1/K; TS on all together.

    Noise is Gaussian, added to the inputs as the network takes them, unclipped; one draw is frozen for the whole fit.
    Where no noise up to 100 brings the accuracy to within 0.03 times the clean accuracy of some level, the result says
    "not reachable" instead of a number, and `temperature_` and `transform` raise `NotReachableError`.
    T is kept in [0.05, 5].

    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> network = torch.nn.Linear(2, 4)
    >>> network.weight.data = torch.tensor([[3.0, 0], [0, 3], [-3, 0], [0, -3]])
    >>> labels = torch.arange(400) % 4
    >>> inputs = network.weight.data[labels] / 3 + 0.5 * torch.randn(400, 2)
    >>> perturbed = tcil.PerturbedTemperatureScaling().fit(network, valid=(inputs, labels))
    >>> [round(level.target_accuracy, 2) for level in perturbed.result_.levels]
    [0.87, 0.75, 0.62, 0.5, 0.37, 0.25]
    >>> perturbed.result_.reachable, 0 < perturbed.temperature_ <= 5
    (True, True)
    """

    n_levels: int = 6
    search: NoiseSearch | str = NoiseSearch.MONOTONE
    start: float = 0.1
    seed: int = 0
    batch_size: int = 256
    device: str | torch.device | None = None
    result_type: ClassVar[type[Any]] = PerturbedFit

    def __post_init__(self) -> None:
        super().__post_init__()
        self.search = NoiseSearch.parse(self.search, "search")
        self.n_levels = whole_number(self.n_levels, "n_levels", 2)
        self.start = positive(self.start, "start")
        self.seed = whole_number(self.seed, "seed", 0)
        self.batch_size = whole_number(self.batch_size, "batch_size", 1)

    def fit(
        self,
        model: nn.Module,
        *,
        valid: Examples | None = None,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> Self:
        """Fit on the new task's validation set.

        `classes` names the logit columns (default 0..K-1, K = 1 + largest label); `columns` says which columns of a
        wider head they are (default the first K). `unpack` and `max_batches` are those of `predict_logits`.
        """
        if valid is None:
            raise missing_valid()
        names, places = classes_and_columns(classes, columns)
        with random_state.preserved(valid):
            stream = ExampleStream(valid, "valid", batch_size=self.batch_size, unpack=unpack, max_batches=max_batches)
            with Classifier(model, device=self.device) as classifier:
                clean, labels = stream_logits(classifier, stream)
                width = clean.shape[1]
                label_columns(labels, names, "valid labels", width)
                names = names or tuple(range(int(labels.max()) + 1))
                if not 2 <= len(names) <= width:
                    raise invalid("classes", f"{len(names)} labels", f"2 to {width}, the model's logit columns")
                own = label_columns(labels, names, "valid labels", width)

                def logits_at(noise: float) -> Tensor:
                    generator = torch.Generator().manual_seed(self.seed)
                    noisy = stream_logits(
                        classifier, stream, lambda x: x + noise * torch.randn(x.shape, generator=generator).to(x)
                    )
                    return pick_columns(noisy[0], len(names), places)

                def accuracy_at(noise: float) -> float:
                    return float((logits_at(noise).argmax(dim=1) == own).double().mean())

                clean = pick_columns(clean, len(names), places)
                check_own_unmasked(clean, own, names, "valid labels")
                clean_accuracy = float((clean.argmax(dim=1) == own).double().mean())
                alive = clean != -torch.inf
                chance = 1 / len(names) if bool(alive.all()) else float((1 / alive.double().sum(dim=1)).mean())
                targets = np.linspace(clean_accuracy, chance, self.n_levels).tolist()
                if self.search is NoiseSearch.MONOTONE:
                    levels = monotone_levels(accuracy_at, targets)
                else:
                    levels = nelder_mead_levels(accuracy_at, targets, self.start)
                temperature: float | None = None
                verdicts: tuple[Verdict, ...] = (Verdict.NOT_REACHABLE,)
                reachable = all(level.reachable for level in levels)
                if reachable or self.search is NoiseSearch.NELDER_MEAD:  # the original gives a number whatever it found
                    union = torch.cat([clean, *(logits_at(level.noise) for level in levels[1:])])
                    temperature, verdicts = bounded_temperature(union, own.repeat(self.n_levels))
        result = PerturbedFit(temperature, reachable, levels, verdicts, len(own))
        mapping = self._map(float("nan") if temperature is None else temperature)
        used = UsedWeights.of(model, classifier.head, places or range(len(names)))
        return self._fitted(
            mapping, names, result, head_width=width, columns=places, source=classifier.head, model_hash=used
        )

    def _mapping(self) -> CalibrationMap:
        result = self.result_
        if result.temperature is None:
            missed = next(level for level in result.levels if not level.reachable)
            raise NotReachableError(
                f"PerturbedTemperatureScaling has no temperature (n/a): no noise up to {MAX_NOISE:g} brings accuracy "
                f"to {missed.target_accuracy:.3f}; the nearest was {missed.accuracy:.3f} at noise {missed.noise:.3g}"
            )
        return super()._mapping()


def bounded_temperature(z: Tensor, y: Tensor) -> tuple[float, tuple[Verdict, ...]]:
    """argmin over T in [0.05, 5]: the loss is convex in 1/T, so the nearest bound is the answer outside."""
    fit = solve_temperature(z, y)
    if fit.verdict is Verdict.CONSTANT_LOGITS:
        return 1.0, (fit.verdict,)
    if BOUNDS[0] <= fit.limit <= BOUNDS[1]:
        return fit.limit, (Verdict.OK,)
    return float(np.clip(fit.limit, *BOUNDS)), (Verdict.AT_BOUND,)


def monotone_levels(accuracy_at: Callable[[float], float], targets: list[float]) -> tuple[NoiseLevel, ...]:
    """For each target the smallest noise at which the accuracy crosses it: one scan for all, then bisection.

    Accuracies are kept, so that no noise is tried twice; the nearest seen serves a level.
    """
    clean = targets[0]
    seen = {0.0: clean}
    grid = [0.0, *np.geomspace(MAX_NOISE / 2**14, MAX_NOISE, 15).tolist()]

    def accuracy(noise: float) -> float:
        if noise not in seen:
            seen[noise] = accuracy_at(noise)
        return seen[noise]

    levels = [NoiseLevel(clean, 0.0, clean, True, 0)]
    for target in targets[1:]:
        before = len(seen)
        below = target < clean  # a network that is no better than chance has no lower level
        crossing = next((i for i in range(1, len(grid)) if accuracy(grid[i]) <= target), None) if below else None
        if crossing is not None:
            low, high = grid[crossing - 1], grid[crossing]
            while (
                high - low > 1e-4 * max(high, grid[1])
                and min(abs(accuracy(n) - target) for n in (low, high)) > TOLERANCE * clean
            ):
                middle = (low + high) / 2
                low, high = (low, middle) if accuracy(middle) <= target else (middle, high)
        noise = min(seen, key=lambda n: (abs(seen[n] - target), n))
        reachable = below and abs(seen[noise] - target) <= TOLERANCE * clean
        levels.append(NoiseLevel(target, noise, seen[noise], reachable, len(seen) - before))
    return tuple(levels)


def nelder_mead_levels(
    accuracy_at: Callable[[float], float], targets: list[float], start: float
) -> tuple[NoiseLevel, ...]:
    """The original's search: each level starts a simplex {x, 1.5 x} at the noise of the level before."""
    accuracy = functools.cache(accuracy_at)
    clean = targets[0]
    levels = [NoiseLevel(clean, 0.0, clean, True, 0)]
    for index, target in enumerate(targets[1:], start=1):
        close = (LAST_TOLERANCE if index == len(targets) - 1 else TOLERANCE) * clean
        noise, evaluations = _simplex(functools.partial(_miss, accuracy, target), start, close)
        reachable = abs(accuracy(noise) - target) <= close
        levels.append(NoiseLevel(target, noise, accuracy(noise), reachable, evaluations))
        start = noise
    return tuple(levels)


def _miss(accuracy: Callable[[float], float], target: float, noise: Any) -> float:
    return abs(target - accuracy(float(noise[0])))


def _simplex(miss: Callable[[Any], float], start: float, close: float) -> tuple[float, int]:
    """Nelder-Mead from {x, 1.5 x}, stopped as soon as the best point is close, or when the simplex has collapsed."""
    first = min([start], [1.5 * start], key=miss)
    if miss(first) < close:
        return first[0], 2

    def stop(intermediate_result: Any) -> None:
        if intermediate_result.fun < close:
            raise StopIteration

    options = {"initial_simplex": [[start], [1.5 * start]], "xatol": 1e-4, "fatol": np.inf, "maxfev": 200}
    found = minimize(miss, [start], method="Nelder-Mead", callback=stop, options=options)
    return float(found.x[0]), int(found.nfev)
