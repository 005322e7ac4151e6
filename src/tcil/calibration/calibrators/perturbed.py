"""PerturbTS (Tomani et al. 2021): temperature scaling on a validation set under several levels of Gaussian noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from tcil.calibration.calibrators.arguments import BOUNDS, missing_valid, positive, warn_unless_ok
from tcil.calibration.calibrators.maps import CalibrationMap
from tcil.calibration.calibrators.single_temperature import SingleTemperature
from tcil.calibration.inputs.classifier import Classifier
from tcil.calibration.inputs.examples import MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.inputs.weights import UsedWeights
from tcil.calibration.prediction import stream_logits
from tcil.calibration.temperature import solve_temperature
from tcil.foundation import random_state
from tcil.foundation.arrays import (
    check_own_unmasked,
    classes_and_columns,
    label_columns,
    pick_columns,
    warn_of_other_masks,
    whole_number,
)
from tcil.foundation.errors import NotReachableError, invalid
from tcil.foundation.options import Option, Verdict
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


_MOST_LEVELS = 1000  # each is a pass over the data, and a copy of its logits


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


@dataclass(frozen=True)
class PerturbedResult(Record):
    """The result of PerturbTS.

    Attributes
    ----------
    temperature : float or None
        The fitted temperature; None if some level is not reachable.
    reachable : bool
        Whether every level is reachable.
    levels : tuple of tcil.results.NoiseLevel
        The levels, from the clean accuracy down to chance.
    verdicts : tuple of tcil.options.Verdict
        "ok", or what was unusual.
    n_samples : int
        Number of validation images.

    Examples
    --------
    >>> from tcil.options import Verdict
    >>> from tcil.results import PerturbedResult
    >>> print(PerturbedResult(None, reachable=False, levels=(), verdicts=(Verdict.NOT_REACHABLE,), n_samples=10))
    PerturbedResult
      temperature  none
      reachable    no
      levels
      verdicts     not_reachable
      n samples    10
    """

    temperature: float | None
    reachable: bool
    levels: tuple[NoiseLevel, ...]
    verdicts: tuple[Verdict, ...]
    n_samples: int


@dataclass(eq=False, kw_only=True)
class PerturbedTemperatureScaling(SingleTemperature[PerturbedResult]):
    """PerturbTS: temperature scaling on inputs with several levels of noise.

    The noise levels are chosen so that the accuracy falls evenly from its clean value to 1/K. The temperature is fitted
    on all levels together. Noise is Gaussian and added to the network's inputs without clipping.

    The default search uses one fixed draw of noise for the whole fit. The noise of a level is the smallest at which the
    accuracy falls to the level's target or, if it never does, the smallest at which it is within the tolerance. The
    tolerance is 0.03 times the clean accuracy, and 0.05 times at the last level, as in the original. The smallest noise
    is found by a scan in steps of half an octave and a bisection to 0.1 % of the noise. If no noise up to 100 reaches
    some level, the result is "not reachable" instead of a number, and `temperature_` and `transform` raise
    `NotReachableError`.

    ``search="nelder-mead"`` is the search of the original implementation. It draws fresh noise at every evaluation and
    once more for the final fit, starts each level at the noise of the previous one, and stops a level when the
    accuracy is within the tolerance, when both noise and accuracy have converged to 1e-4, or after 200 evaluations. It
    returns a temperature even if it missed levels; `result_.reachable` is then False.

    Parameters
    ----------
    n_levels : int
        Number of accuracy levels, including the clean one.
    search : {"monotone", "nelder-mead"}
        How the noise of a level is found (`tcil.options.NoiseSearch`).
    start : float
        Initial noise of the Nelder-Mead search.
    bounded : bool
        Keep T in [0.05, 5], as the original does. If False, T maximises the likelihood without bounds.
    seed : int
        Seed of the noise.
    batch_size : int
        Images per forward pass.
    device : str or torch.device, optional
        Where the model runs. Default: where its parameters are.

    Attributes
    ----------
    temperature_ : float
        The fitted temperature; raises `NotReachableError` if there is none.
    result_ : tcil.results.PerturbedResult
        The temperature and all levels.
    classes_ : tuple of int
        The label of each logit column.

    Examples
    --------
    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> network = torch.nn.Linear(2, 4)
    >>> network.weight.data = torch.tensor([[3.0, 0], [0, 3], [-3, 0], [0, -3]])
    >>> labels = torch.arange(400) % 4
    >>> inputs = network.weight.data[labels] / 3 + 0.5 * torch.randn(400, 2)
    >>> perturbed = tcil.PerturbedTemperatureScaling().fit(network, (inputs, labels))
    >>> [round(level.target_accuracy, 2) for level in perturbed.result_.levels]
    [0.87, 0.75, 0.62, 0.5, 0.37, 0.25]
    >>> perturbed.result_.reachable, 0 < perturbed.temperature_ <= 5
    (True, True)
    """

    n_levels: int = 6
    search: NoiseSearch | str = NoiseSearch.MONOTONE
    start: float = 0.1
    bounded: bool = True
    seed: int = 0
    batch_size: int = 256
    device: str | torch.device | None = None
    result_type: ClassVar[type[Any]] = PerturbedResult

    def __post_init__(self) -> None:
        super().__post_init__()
        self.search = NoiseSearch.parse(self.search, "search")
        self.n_levels = whole_number(self.n_levels, "n_levels", 2, _MOST_LEVELS)
        self.start = positive(self.start, "start")
        if not isinstance(self.bounded, bool):
            raise invalid("bounded", repr(self.bounded), "True or False")
        self.seed = whole_number(self.seed, "seed", 0)
        self.batch_size = whole_number(self.batch_size, "batch_size", 1)

    def fit(
        self,
        model: nn.Module,
        valid: Examples,
        *,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> Self:
        """Fit on the new task's validation set.

        Parameters
        ----------
        model : torch.nn.Module
            The trained network, which returns logits. It is left unchanged.
        valid : pair of tensors or arrays, Dataset or DataLoader
            Inputs and labels of the new task's validation set, as the network takes them.
        classes : iterable of int, optional
            The label of each logit column. Default: 0 to the largest label.
        columns : iterable of int, optional
            The logit columns of the classes, for a wider head. Default: the first ones.
        unpack : two keys, two positions or a function, optional
            How to get inputs and labels from a batch.
        max_batches : int
            Maximum number of batches of a loader without a length; more raise an error.

        Returns
        -------
        Self
            This calibrator, fitted.
        """
        self._check_options()
        if valid is None:
            raise missing_valid()
        names, places = classes_and_columns(classes, columns)
        with random_state.preserved(valid):
            stream = ExampleStream(valid, "valid", batch_size=self.batch_size, unpack=unpack, max_batches=max_batches)
            with Classifier(model, device=self.device) as classifier:
                clean, labels = stream_logits(classifier, stream)
                width = clean.shape[1]
                label_columns(labels, names, "valid labels", width, stream.doubt)
                names = names or tuple(range(int(labels.max()) + 1))
                if not 2 <= len(names) <= width:
                    raise invalid("classes", f"{len(names)} labels", f"2 to {width}, the model's logit columns")
                true_columns = label_columns(labels, names, "valid labels", width, stream.doubt)
                frozen = self.search is NoiseSearch.MONOTONE
                generator = torch.Generator().manual_seed(self.seed)

                def logits_at(noise: float) -> Tensor:
                    if frozen:
                        generator.manual_seed(self.seed)
                    noisy = stream_logits(classifier, stream, lambda x: x + noise * _drawn(x, generator))
                    return pick_columns(noisy[0], len(names), places)

                def accuracy_at(noise: float) -> float:
                    return float((logits_at(noise).argmax(dim=1) == true_columns).double().mean())

                clean = pick_columns(clean, len(names), places)
                check_own_unmasked(clean, true_columns, names, "valid labels")
                warn_of_other_masks(clean, "model", names)
                clean_accuracy = float((clean.argmax(dim=1) == true_columns).double().mean())
                alive = clean != -torch.inf
                chance = 1 / len(names) if bool(alive.all()) else float((1 / alive.double().sum(dim=1)).mean())
                targets = np.linspace(clean_accuracy, chance, self.n_levels).tolist()
                if frozen:
                    levels = monotone_levels(accuracy_at, targets)
                else:
                    levels = nelder_mead_levels(accuracy_at, targets, self.start)
                temperature: float | None = None
                verdicts: tuple[Verdict, ...] = (Verdict.NOT_REACHABLE,)
                reachable = all(level.reachable for level in levels)
                if reachable or not frozen:  # the original returns a number even if it missed levels
                    union = torch.cat([clean, *(logits_at(level.noise) for level in levels[1:])])
                    targets_of_union = true_columns.repeat(self.n_levels)
                    temperature, verdict = union_temperature(union, targets_of_union, bounded=self.bounded)
                    verdicts = (verdict,)
        result = PerturbedResult(temperature, reachable, levels, verdicts, len(true_columns))
        mapping = self._map(float("nan") if temperature is None else temperature)
        used = UsedWeights.of(model, classifier.head, places or range(len(names)))
        self._fitted(mapping, names, result, head_width=width, columns=places, source=classifier.head, model_hash=used)
        for verdict in verdicts:
            warn_unless_ok(verdict, "PerturbedTemperatureScaling", len(true_columns))
        return self

    def _mapping(self) -> CalibrationMap:
        result = self.result_
        if result.temperature is None:
            missed = next(level for level in result.levels if not level.reachable)
            raise NotReachableError(
                f"PerturbedTemperatureScaling has no temperature (n/a): no noise up to {MAX_NOISE:g} brings accuracy "
                f"to {missed.target_accuracy:.3f}; the nearest was {missed.accuracy:.3f} at noise {missed.noise:.3g}"
            )
        return super()._mapping()


def union_temperature(z: Tensor, y: Tensor, *, bounded: bool) -> tuple[float, Verdict]:
    """argmin over T > 0, or over T in [0.05, 5]: there the nearest bound, since the loss is convex in 1/T."""
    fit = solve_temperature(z, y)
    if not bounded or fit.verdict is Verdict.CONSTANT_LOGITS:
        return fit.temperature, fit.verdict
    if BOUNDS[0] <= fit.limit <= BOUNDS[1]:
        return fit.limit, Verdict.OK
    return float(np.clip(fit.limit, *BOUNDS)), Verdict.AT_BOUND


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
        low = max(noise for noise in seen if noise < high)
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


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise in the shape of a batch; every example gets the same in batches of any size.

    torch draws normal numbers in blocks of 16, so each example takes whole blocks.
    """
    size = x[0].numel()
    rows = torch.randn(len(x), -(-size // 16) * 16, generator=generator, dtype=torch.float32)
    return rows[:, :size].reshape(x.shape).to(x)
