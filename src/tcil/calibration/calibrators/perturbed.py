"""PerturbTS (Tomani et al. 2021): temperature scaling on a validation set under several levels of Gaussian noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from tcil.calibration.calibrators.arguments import BOUNDS, missing_valid, positive, warn_unless_ok
from tcil.calibration.calibrators.maps import CalibrationMap
from tcil.calibration.calibrators.noise_levels import (
    MAX_NOISE,
    NoiseLevel,
    NoiseSearch,
    monotone_levels,
    nelder_mead_levels,
)
from tcil.calibration.calibrators.single_temperature import SingleTemperature
from tcil.calibration.calibrators.wrapped import tell_of_calibrated
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
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record

_MOST_LEVELS = 1000  # each is a pass over the data, and a copy of its logits


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
        tell_of_calibrated(model)
        names, places = classes_and_columns(classes, columns)
        with random_state.preserved(valid):
            stream = ExampleStream(valid, "valid", batch_size=self.batch_size, unpack=unpack, max_batches=max_batches)
            with Classifier(model, device=self.device) as classifier:
                noisy = _NoisySet(classifier, stream, names, places, self.seed, frozen=self._frozen)
                levels = self._levels(noisy)
                temperature, verdict = self._temperature(noisy, levels)
        reachable = all(level.reachable for level in levels)
        result = PerturbedResult(temperature, reachable, levels, (verdict,), len(noisy.columns))
        mapping = self._map(float("nan") if temperature is None else temperature)
        names, width = noisy.names, noisy.head_width
        used = UsedWeights.of(model, classifier.head, places or range(len(names)))
        self._fitted(mapping, names, result, head_width=width, columns=places, source=classifier.head, model_hash=used)
        warn_unless_ok(verdict, "PerturbedTemperatureScaling", len(noisy.columns))
        return self

    @property
    def _frozen(self) -> bool:
        return self.search is NoiseSearch.MONOTONE

    def _levels(self, noisy: _NoisySet) -> tuple[NoiseLevel, ...]:
        targets = np.linspace(noisy.clean_accuracy, noisy.chance, self.n_levels).tolist()
        if self._frozen:
            return monotone_levels(noisy.accuracy, targets)
        return nelder_mead_levels(noisy.accuracy, targets, self.start)

    def _temperature(self, noisy: _NoisySet, levels: tuple[NoiseLevel, ...]) -> tuple[float | None, Verdict]:
        """The temperature of all levels together; None if the default search missed one (the original's has one)."""
        if self._frozen and not all(level.reachable for level in levels):
            return None, Verdict.NOT_REACHABLE
        union = torch.cat([noisy.clean, *(noisy.logits(level.noise) for level in levels[1:])])
        return union_temperature(union, noisy.columns.repeat(len(levels)), bounded=self.bounded)

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


class _NoisySet:
    """The validation set under noise: its logits and accuracy at any standard deviation.

    With `frozen`, every noise is the same draw, scaled; otherwise each evaluation draws anew.
    """

    def __init__(
        self,
        classifier: Classifier,
        stream: ExampleStream,
        names: tuple[int, ...] | None,
        places: tuple[int, ...] | None,
        seed: int,
        *,
        frozen: bool,
    ) -> None:
        self._classifier, self._stream, self._places = classifier, stream, places
        self._seed, self._frozen, self._generator = seed, frozen, torch.Generator().manual_seed(seed)
        clean, labels = stream_logits(classifier, stream)
        self.head_width = width = clean.shape[1]
        label_columns(labels, names, "valid labels", width, stream.doubt)
        self.names = names or tuple(range(int(labels.max()) + 1))
        if not 2 <= len(self.names) <= width:
            raise invalid("classes", f"{len(self.names)} labels", f"2 to {width}, the model's logit columns")
        self.columns = label_columns(labels, self.names, "valid labels", width, stream.doubt)
        self.clean = pick_columns(clean, len(self.names), places)
        check_own_unmasked(self.clean, self.columns, self.names, "valid labels")
        warn_of_other_masks(self.clean, "model", self.names)

    @property
    def clean_accuracy(self) -> float:
        return self._accuracy(self.clean)

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the columns that are not masked."""
        alive = self.clean != -torch.inf
        return 1 / len(self.names) if bool(alive.all()) else float((1 / alive.double().sum(dim=1)).mean())

    def accuracy(self, noise: float) -> float:
        return self._accuracy(self.logits(noise))

    def logits(self, noise: float) -> Tensor:
        if self._frozen:
            self._generator.manual_seed(self._seed)
        noisy, _ = stream_logits(
            self._classifier, self._stream, lambda inputs: inputs + noise * _drawn(inputs, self._generator)
        )
        return pick_columns(noisy, len(self.names), self._places)

    def _accuracy(self, logits: Tensor) -> float:
        return float((logits.argmax(dim=1) == self.columns).double().mean())


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise in the shape of a batch; every example gets the same in batches of any size.

    torch draws normal numbers in blocks of 16, so each example takes whole blocks.
    """
    size = x[0].numel()
    rows = torch.randn(len(x), -(-size // 16) * 16, generator=generator, dtype=torch.float32)
    return rows[:, :size].reshape(x.shape).to(x)
