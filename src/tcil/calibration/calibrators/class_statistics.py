"""Temperature scaling without exemplars: old classes are stored as means and a covariance of frozen features."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from tcil.calibration.calibrators.arguments import new_class_mask, warn_unless_ok
from tcil.calibration.calibrators.fitted import History
from tcil.calibration.calibrators.single_temperature import SingleTemperature
from tcil.calibration.calibrators.wrapped import tell_of_calibrated
from tcil.calibration.inputs.classifier import Classifier
from tcil.calibration.inputs.examples import MAX_BATCHES, Examples, ExampleStream, Unpack
from tcil.calibration.inputs.weights import UsedWeights
from tcil.calibration.prediction import stream_logits
from tcil.calibration.temperature import TemperatureFit, solve_temperature
from tcil.foundation import random_state
from tcil.foundation.arrays import (
    check_own_unmasked,
    classes_and_columns,
    label_columns,
    pick_columns,
    warn_of_other_masks,
    whole_number,
)
from tcil.foundation.errors import invalid, shortened
from tcil.foundation.options import Verdict
from tcil.foundation.records import Record

Labelled: TypeAlias = tuple[Tensor, Tensor]  # logits and columns


@dataclass(frozen=True)
class StatisticsResult(Record):
    """The result of `StatisticsTemperatureScaling`.

    Attributes
    ----------
    temperature : float
        The fitted temperature.
    verdict : tcil.options.Verdict
        Whether the samples identify it, and whether `spread` could be matched.
    n_samples : int
        Number of validation samples of new classes.
    n_remembered : int
        Number of old classes with stored statistics.
    n_drawn : int
        Number of samples drawn for them.
    spread : float
        Factor on the standard deviations of these draws, at which those of new classes have the temperature of the
        validation set; 1 without old classes.

    Examples
    --------
    >>> import torch, tcil
    >>> x, y = 2 * torch.eye(2).repeat(20, 1), torch.arange(40) % 2
    >>> y[0] = 1
    >>> result = tcil.StatisticsTemperatureScaling().fit(torch.nn.Identity(), (x, y), [0, 1]).result_
    >>> result.n_samples, result.n_remembered, result.n_drawn
    (40, 0, 0)
    """

    temperature: float
    verdict: Verdict
    n_samples: int
    n_remembered: int
    n_drawn: int
    spread: float


@dataclass(eq=False, kw_only=True)
class StatisticsTemperatureScaling(SingleTemperature[StatisticsResult]):
    """Temperature scaling on samples of old classes drawn from stored statistics, for models on frozen features.

    It needs no exemplars. After each task, the mean of each new class and a covariance shared by all classes are
    computed on the validation set and kept in `history_`. After later tasks, samples of the old classes are drawn from
    normal distributions with these moments. The temperature minimises the cross-entropy of their logits together with
    those of the new validation set, with equal weight for each class.

    Drawn samples are easier to classify than real ones, whose distributions have longer tails. Their standard
    deviations are therefore multiplied by a factor (like T-CIL's magnitude): the one at which samples drawn for the new
    classes have the temperature of the new validation set.

    The inputs of `model` must mean the same in all tasks: they are features of a frozen backbone, and the model is the
    part trained on top of them. The method does not work on images or on features that are still trained.

    Parameters
    ----------
    rank : int
        Rank of the shared covariance; outside of these directions, only the variance of each feature is kept.
    per_class : int
        Number of samples drawn for each old class.
    seed : int
        Seed of the draws.
    batch_size : int
        Rows per forward pass.
    device : str or torch.device, optional
        Where the model runs. Default: where its parameters are.

    Attributes
    ----------
    temperature_ : float
        The fitted temperature: logits are divided by it.
    result_ : tcil.results.StatisticsResult
        The temperature with its verdict.
    classes_ : tuple of int
        The label of each logit column.
    history_ : dict
        The statistics, as JSON: 2 bytes per class and feature, and per direction and feature.

    Examples
    --------
    >>> import torch, tcil
    >>> _ = torch.manual_seed(0)
    >>> centres = torch.randn(4, 8)
    >>> def draw(labels):
    ...     return centres[labels] + torch.randn(len(labels), 8), labels
    >>> head = torch.nn.Linear(8, 4)
    >>> scaled = {"weight": 3 * centres, "bias": -1.5 * centres.square().sum(1)}         # logits three times too large
    >>> _ = head.load_state_dict(scaled)
    >>> calibrator = tcil.StatisticsTemperatureScaling()
    >>> _ = calibrator.partial_fit(head, draw(torch.arange(200) % 2), [0, 1], classes=[0, 1])
    >>> _ = calibrator.partial_fit(head, draw(2 + torch.arange(200) % 2), [2, 3])
    >>> calibrator.result_.n_remembered, 2 < calibrator.temperature_ < 4
    (2, True)
    """

    rank: int = 64
    per_class: int = 100
    seed: int = 0
    batch_size: int = 256
    device: str | torch.device | None = None
    result_type: ClassVar[type[Any]] = StatisticsResult

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rank", 0), ("per_class", 1), ("seed", 0), ("batch_size", 1)):
            setattr(self, name, whole_number(getattr(self, name), name, least))

    def fit(
        self,
        model: nn.Module,
        valid: Examples,
        new_classes: Iterable[Any],
        *,
        history: History | None = None,
        classes: Iterable[Any] | None = None,
        columns: Iterable[Any] | None = None,
        unpack: Unpack | None = None,
        max_batches: int = MAX_BATCHES,
    ) -> Self:
        """Fit after a task.

        Parameters
        ----------
        model : torch.nn.Module
            Maps frozen features to logits.
        valid : pair of tensors or arrays, Dataset or DataLoader
            Held-out features and labels of the new classes.
        new_classes : iterable of int
            The labels of the new task. The statistics of a class that occurs again are replaced.
        history : dict, optional
            `history_` of the previous task; without it there are no old classes.
        classes, columns : iterable of int, optional
            The label of each logit column, and the corresponding columns of the head.
        unpack : callable or pair, optional
            How to get inputs and labels from a batch.
        max_batches : int
            Maximum number of batches of a loader without a length; more raise an error.

        Returns
        -------
        Self
            This calibrator, fitted.
        """
        self._check_options()
        statistics = _Statistics.read(history)
        tell_of_calibrated(model)
        names, places = classes_and_columns(classes, columns)
        with random_state.preserved(valid), Classifier(model, device=self.device) as classifier:
            stream = ExampleStream(valid, "valid", batch_size=self.batch_size, unpack=unpack, max_batches=max_batches)
            kept = list[Tensor]()
            logits, labels = stream_logits(classifier, stream, lambda x: _noted(stream.keep(x), kept))
            inputs = torch.cat(kept)
            if names is not None:
                logits = pick_columns(logits, len(names), places)
            names = names or tuple(range(logits.shape[1]))
            true_columns = label_columns(labels, names, "valid labels", len(names), stream.doubt)
            check_own_unmasked(logits, true_columns, names, "valid labels")
            warn_of_other_masks(logits, "model", names)
            self._check_classes(true_columns, names, new_classes, statistics)
            before = statistics.without(set(labels.tolist()))
            old = [label for label in names if label in before.means]
            if before.means and inputs.flatten(1).shape[1] != before.width:
                given = f"statistics of {before.width} features for {inputs.flatten(1).shape[1]}"
                raise invalid("history", given, "history_ of fits on the same features")
            merged = before.merged(inputs.flatten(1), labels, self.rank)

            def drawn(some: list[int], spread: float) -> tuple[Tensor, Tensor]:
                """Logits and columns of samples drawn for these classes."""
                samples = merged.draw(some, self.per_class, self.seed, spread).reshape(-1, *inputs.shape[1:])
                with torch.no_grad():
                    parts = [classifier.logits(classifier.place(x)).cpu() for x in samples.split(self.batch_size)]
                target = torch.tensor([names.index(label) for label in some]).repeat_interleave(self.per_class)
                return pick_columns(torch.cat(parts), len(names), places), target

            matched, pairs = _Spread(1.0), [(logits, true_columns)]
            if old:
                new = sorted(set(labels.tolist()))
                matched = _matched_spread(solve_temperature(logits, true_columns), lambda spread: drawn(new, spread))
                pairs.append(drawn(old, matched.factor))
            source = classifier.head
        fit = solve_temperature(*_balanced(pairs))
        n_drawn = len(pairs[1][1]) if old else 0
        verdict = fit.verdict if fit.verdict is not Verdict.OK else matched.verdict
        result = StatisticsResult(fit.temperature, verdict, len(true_columns), len(old), n_drawn, matched.factor)
        memo = merged.record()
        used = UsedWeights.of(model, source, places or range(len(names)))
        self._fitted(
            self._map(fit.temperature), names, result, head_width=classifier.width, columns=places, model_hash=used,
            history=memo,
        )  # fmt: skip
        warn_unless_ok(verdict, "StatisticsTemperatureScaling", fit.n_samples)
        return self

    @staticmethod
    def _check_classes(
        columns: Tensor, names: tuple[int, ...], new_classes: Iterable[Any], statistics: _Statistics
    ) -> None:
        """Raise unless every new class has samples and every old class has statistics."""
        is_new = new_class_mask(new_classes, names)
        present = torch.zeros(len(names), dtype=torch.bool)
        present[columns] = True
        if not torch.equal(present, is_new):
            wrong = [names[i] for i in (present != is_new).nonzero().squeeze(1).tolist()]
            given = f"samples of other classes than the new ones (labels {shortened(wrong)})"
            raise invalid("valid", given, "samples of every new class, and of no other")
        old = [label for label, new in zip(names, is_new.tolist(), strict=True) if not new]
        unknown = [label for label in old if label not in statistics.means]
        if unknown:
            given = f"none for the old classes {shortened(unknown)}"
            raise invalid("history", given, "history_ of the previous task, with statistics of every old class")


def _noted(inputs: Tensor, kept: list[Tensor]) -> Tensor:
    """The inputs as they are; a copy of them is added to the list."""
    kept.append(inputs.detach().cpu().clone())
    return inputs


_SPREADS, _STEPS = (0.25, 4.0), 14  # the last bracket is 0.02 % wide


class _Spread(NamedTuple):
    """A factor on the spread of drawn samples, and whether it makes those of new classes as hard as real ones."""

    factor: float
    verdict: Verdict = Verdict.OK


def _matched_spread(real: TemperatureFit, draw: Callable[[float], Labelled]) -> _Spread:
    """The factor, between 1/4 and 4, at which samples drawn for the new classes have the temperature of real ones."""
    if real.verdict is not Verdict.OK:
        return _Spread(1.0, Verdict.SPREAD_NOT_MATCHED)
    low, high = _SPREADS
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        fit = solve_temperature(*draw(middle))
        # If all are correct, their temperature goes to 0.
        below = fit.verdict is Verdict.ALL_CORRECT or (fit.verdict is Verdict.OK and fit.temperature < real.temperature)
        low, high = (middle, high) if below else (low, middle)
    between = _SPREADS[0] < low and high < _SPREADS[1]
    return _Spread(math.sqrt(low * high), Verdict.OK if between else Verdict.SPREAD_NOT_MATCHED)


def _balanced(pairs: list[Labelled]) -> Labelled:
    """Real and drawn samples; the smaller set is repeated so that classes have about equal weight."""
    per_class = [len(columns) / len(columns.unique()) for _, columns in pairs]
    times = [max(1, round(max(per_class) / count)) for count in per_class]
    logits = torch.cat([logits.repeat(n, 1).float() for (logits, _), n in zip(pairs, times, strict=True)])
    return logits, torch.cat([columns.repeat(n) for (_, columns), n in zip(pairs, times, strict=True)])


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Class means by label, and the within-class scatter: factor^T factor plus a diagonal, `rest`."""

    means: dict[int, Tensor]
    factor: Tensor
    rest: Tensor
    freedom: float  # number of samples minus number of classes, over all tasks

    @property
    def width(self) -> int:
        return len(self.rest)

    def without(self, labels: set[int]) -> _Statistics:
        """The statistics without these classes."""
        means = {label: mean for label, mean in self.means.items() if label not in labels}
        return _Statistics(means, self.factor, self.rest, self.freedom)

    def draw(self, labels: list[int], per_class: int, seed: int, spread: float = 1.0) -> Tensor:
        """Samples of these classes, class by class."""
        generator = torch.Generator().manual_seed(seed)
        scale = spread / math.sqrt(max(self.freedom, 1.0))
        count = len(labels) * per_class
        along = torch.randn(count, len(self.factor), generator=generator) @ self.factor
        across = torch.randn(count, self.width, generator=generator) * self.rest.clamp(min=0).sqrt()
        centres = torch.stack([self.means[label] for label in labels]).repeat_interleave(per_class, dim=0)
        return centres + scale * (along + across)

    def merged(self, features: Tensor, labels: Tensor, rank: int) -> _Statistics:
        """The statistics with the classes of a task added; the `rank` largest directions of the scatter are kept."""
        fresh, residuals = dict(self.means), features.float().clone()
        for label in labels.unique().tolist():
            rows = labels == label
            fresh[label] = features[rows].float().mean(dim=0)
            residuals[rows] -= fresh[label]
        factor, rest, freedom = self.factor, self.rest, self.freedom
        if self.width != features.shape[1]:  # of another network: its scatter tells nothing, nor does its size
            (factor, rest), freedom = _nothing(features.shape[1]), 0.0
        _, sizes, directions = torch.linalg.svd(torch.cat([factor, residuals]).double(), full_matrices=False)
        rows = (sizes[:, None] * directions).float()
        freedom += len(labels) - len(labels.unique())
        return _Statistics(fresh, rows[:rank], rest + rows[rank:].square().sum(dim=0), freedom)

    def record(self) -> History:
        """The statistics as JSON, with arrays in half precision, relative to their largest entry."""
        labels = sorted(self.means)
        arrays = {
            "means": torch.stack([self.means[label] for label in labels]),
            "factor": self.factor,
            "rest": self.rest.clamp(min=0).sqrt(),
        }
        return {
            "calibrator": StatisticsTemperatureScaling.__name__,
            "labels": labels,
            "freedom": self.freedom,
            "width": self.width,
            **{name: _packed(array) for name, array in arrays.items()},
        }

    @classmethod
    def read(cls, history: History | None) -> _Statistics:
        """Read what `record` returned; None gives empty statistics."""
        if history is None:
            return cls({}, *_nothing(0), 0.0)
        try:
            if history["calibrator"] != StatisticsTemperatureScaling.__name__:
                raise ValueError("of another calibrator")
            labels, width, freedom = list(map(int, history["labels"])), int(history["width"]), float(history["freedom"])
            means, factor, rest = (_unpacked(history[name], width) for name in ("means", "factor", "rest"))
            if len(means) != len(labels) or len(rest) != 1 or not 0 <= freedom < math.inf:
                raise ValueError("of other shapes")
        except (KeyError, TypeError, ValueError, OverflowError, binascii.Error):
            expected = "history_ of an earlier StatisticsTemperatureScaling"
            raise invalid("history", repr(history)[:80], expected) from None
        return cls(dict(zip(labels, means, strict=True)), factor, rest[0].square(), freedom)


def _nothing(width: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(0, width), torch.zeros(width)


def _packed(array: Tensor) -> dict[str, object]:
    size = float(array.abs().max()) if array.numel() else 0.0
    halves = (array / (size or 1.0)).half()
    return {"size": size, "halves": base64.b64encode(halves.contiguous().numpy().tobytes()).decode("ascii")}


def _unpacked(record: Any, width: int) -> Tensor:
    size, data = float(record["size"]), base64.b64decode(record["halves"], validate=True)
    halves = torch.frombuffer(bytearray(data), dtype=torch.half) if data else torch.zeros(0, dtype=torch.half)
    array = halves.float() * size
    if width < 1 or len(array) % width or not bool(torch.isfinite(array).all()):
        raise ValueError("no whole rows of finite numbers")
    return array.reshape(-1, width)
