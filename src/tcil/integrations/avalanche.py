"""Avalanche: calibrate after each experience with one entry in `plugins=[...]`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tcil.calibration.calibrators import PACT, CalibratedModel, Calibrator
from tcil.calibration.calibrators.arguments import positive
from tcil.calibration.inputs.examples import Examples
from tcil.foundation.errors import NotFittedError, invalid
from tcil.integrations.extras import missing_extra
from tcil.integrations.fitting import (
    checked_calibrator,
    fit_after_task,
    needs_imbalance,
    needs_memory,
    presented_ratio,
)
from tcil.metrics import expected_calibration_error, predicted_groups

try:
    from avalanche.evaluation import Metric
    from avalanche.evaluation.metric_results import MetricValue
    from avalanche.evaluation.metric_utils import get_metric_name
    from avalanche.models import MultiTaskModule
    from avalanche.training.plugins import SupervisedPlugin
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not belong to this torch
    raise missing_extra("avalanche", error) from error

__all__ = ["CalibrationPlugin"]


class CalibrationPlugin(SupervisedPlugin, Metric):
    """Fits a calibrator after each experience, and reports how well confidence is calibrated in Avalanche's loggers.

    During training it counts how often images of each class are presented in minibatches, exemplars included. Dataset
    sizes are not enough, because loaders oversample the memory. After each experience it calls `partial_fit` with the
    exemplars, the held-out images of this experience, and its classes as new classes. As in Avalanche, labels are
    columns of the head, which may have a column for every class from the beginning or grow. At evaluation it replaces
    the outputs of the model by calibrated log-probabilities, in float64, for experiences whose classes have all been
    learned. Other metrics then use these: the loss is that of calibrated probabilities, and predictions are unchanged.
    Other experiences keep their outputs and are left out of the metrics. Evaluations during training, before the fit,
    are not changed.

    For each evaluated experience and stream it publishes `ECE_Exp` and `ECE_Stream`, `ECE_PredictedOld_*` and
    `ECE_PredictedNew_*` for samples predicted as old and as new classes (NaN without such samples), and
    `ECE_Uncalibrated_*`.

    The plugin must come after the one that fills the memory: `plugins=[ReplayPlugin(...), CalibrationPlugin(...)]`.
    Strategies such as `Replay` append theirs behind yours: write `Naive(plugins=[ReplayPlugin(...), ...])` instead.

    Parameters
    ----------
    valid : stream or callable
        Held-out experiences, one for each training experience: `valid_stream` of
        `benchmark_with_validation_stream(..., shuffle=True)`. Without `shuffle`, whole classes are missing in it if
        images are sorted by class.
        Or a function of a training experience that returns its held-out data.
    calibrator : Calibrator, optional
        Default: `tcil.PACT()`. One that learns from task to task, as PACT does, keeps its history.
    imbalance : float or callable, optional
        For PACT: images of a new class that training presented for each one of an old class, or a function of the
        strategy that returns it, called after each experience that has old classes. Default: as counted in
        minibatches. Required if a strategy keeps its memory outside the minibatch, as ER_ACE does.
    memory : callable, optional
        A function of the strategy that returns the exemplars. Default: the buffer of the first plugin that has a
        `storage_policy`, or that of the strategy, with evaluation transforms.
    replace_outputs : bool
        Whether outputs are replaced at evaluation.

    Attributes
    ----------
    calibrator : Calibrator
        Fitted after the first experience; `plugin.wrap(strategy)` gives the calibrated model.
    presented : Counter
        How often images of each class were presented in the last experience.
    new_classes, classes : list of int
        The classes of the last experience, and all classes so far in order of arrival. Columns of the calibrated model
        are in the order of `classes`.

    Examples
    --------
    >>> import tcil
    >>> from tcil.integrations.avalanche import CalibrationPlugin
    >>> plugin = CalibrationPlugin(valid=lambda experience: ..., calibrator=tcil.PACT(), imbalance=12.5)
    >>> plugin
    CalibrationPlugin(PACT())
    """

    def __init__(
        self,
        valid: Sequence[Any] | Callable[[Any], Examples],
        calibrator: Calibrator | None = None,
        *,
        imbalance: float | Callable[[Any], float] | None = None,
        memory: Callable[[Any], Examples] | None = None,
        replace_outputs: bool = True,
    ) -> None:
        super().__init__()
        if not callable(valid) and not hasattr(valid, "__getitem__"):
            split = "benchmark_with_validation_stream(benchmark, validation_size=0.1, shuffle=True)"
            advice = f"{split}.valid_stream is one."
            raise invalid("valid", type(valid).__name__, "a stream of held-out experiences, or a function", advice)
        if memory is not None and not callable(memory):
            raise invalid("memory", type(memory).__name__, "a function of the strategy that returns the exemplars")
        self.calibrator = checked_calibrator(PACT() if calibrator is None else calibrator)
        self.imbalance = imbalance if imbalance is None or callable(imbalance) else positive(imbalance, "imbalance")
        self.presented: Counter[int] = Counter()
        self.new_classes: list[int] = []
        self.classes: list[int] = []
        self._valid, self._memory, self._replace = valid, memory, replace_outputs
        self._current = False  # whether the calibrator was fitted on the weights as they are
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.calibrator!r})"

    # training ------------------------------------------------------------------------------------------------

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Check before training that a fit will be possible."""
        if isinstance(strategy.model, MultiTaskModule):
            given = f"{type(strategy.model).__name__}, which needs task labels"
            raise invalid("strategy.model", given, "a model of one head for all classes (class-incremental learning)")
        self._check_order(strategy)
        self.presented, self._current = Counter(), False

    def after_training_iteration(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Count the labels of the minibatch, exemplars included."""
        self.presented.update(strategy.mb_y.tolist())

    def after_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Raise an error as early as possible if minibatches hold no exemplars."""
        if self._must_count() and self.classes and not set(self.presented) - _classes_of(strategy.experience):
            raise self._not_presented(strategy)

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Fit the calibrator."""
        experience = strategy.experience
        new = sorted(_classes_of(experience))
        seen = self.classes + [label for label in new if label not in self.classes]
        fit_after_task(
            self.calibrator,
            strategy.model,
            memory=self._exemplars(strategy) if needs_memory(self.calibrator) else None,
            valid=self._held_out(experience),
            new_classes=new,
            columns=seen,
            imbalance=self._ratio(strategy, seen, new) if needs_imbalance(self.calibrator) else None,
            unpack=(0, 1),
            task=f"experience {experience.current_experience}",
        )
        self.new_classes, self.classes, self._current = new, seen, True

    # evaluation ----------------------------------------------------------------------------------------------

    def before_eval(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Reset the metrics of the stream."""
        self._rows = {"Exp": [], "Stream": []}

    def before_eval_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Reset the metrics of the experience."""
        self._rows["Exp"] = []

    def after_eval_forward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Calibrate the outputs of a minibatch. The head may have columns for classes that are not learned yet."""
        if not self._current or not _classes_of(strategy.experience) <= set(self.classes):
            return
        outputs = strategy.mb_output.detach()
        picked = outputs[:, self.classes]
        for rows in self._rows.values():
            rows.append((picked.cpu(), strategy.mb_y.cpu()))
        if self._replace:
            calibrated = outputs.new_full(outputs.shape, -torch.inf, dtype=torch.float64)
            calibrated[:, self.classes] = self.calibrator.transform(picked).to(calibrated.device)
            strategy.mb_output = calibrated

    def after_eval_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Publish the metrics of the experience."""
        self._publish(strategy, "Exp", self._rows["Exp"])

    def after_eval(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Publish the metrics of the stream."""
        self._publish(strategy, "Stream", self._rows["Stream"])
        self._rows = {}

    def wrap(self, strategy: Any, **options: Any) -> CalibratedModel:
        """The strategy's model with calibrated log-probabilities over `classes`.

        Column i belongs to the label `plugin.classes[i]`, in order of arrival, so a column is in general not the label.
        Classes by which an evaluation has widened the head are left out. Avalanche's growing heads have buffers that
        grow too, so `calibrator.wrap(model)` would refuse the model; this method accepts it.

        Parameters
        ----------
        strategy : SupervisedTemplate
            The strategy that this plugin belongs to.
        **options
            `prior` and `dtype` of `Calibrator.wrap`.

        Returns
        -------
        tcil.results.CalibratedModel
            The network is shared, not copied: further training changes it. Wrap it again after the next experience.
        """
        if not self.classes:
            raise NotFittedError("CalibrationPlugin is not fitted yet: train the strategy on an experience first")
        if not self._current:
            message = "the weights have changed since the last fit, and the experience has not been trained to its end"
            raise NotFittedError(f"CalibrationPlugin: {message}")
        return self.calibrator.wrap(strategy.model, force=True, **options)

    def result(self) -> None:
        """Nothing: values are published as they come (Avalanche asks its metrics for this method)."""

    def reset(self) -> None:
        """Nothing: values are published as they come (Avalanche asks its metrics for this method)."""

    def _publish(self, strategy: Any, scope: str, rows: list[tuple[Tensor, Tensor]]) -> None:
        if not rows:
            return
        logits, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
        for name, value in self.scores(logits, labels).items():
            full = get_metric_name(f"{name}_{scope}", strategy, add_experience=scope == "Exp", add_task=True)
            strategy.evaluator.publish_metric_value(MetricValue(self, full, value, strategy.clock.train_iterations))

    def scores(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Calibration errors of logits over `classes`, by name.

        Parameters
        ----------
        logits : Tensor (N, K)
            One column for each class in `classes`.
        labels : Tensor (N,)
            The class of each row.

        Returns
        -------
        dict
            "ECE", "ECE_Uncalibrated", "ECE_PredictedNew" and "ECE_PredictedOld". The last two are NaN if no sample is
            predicted as such a class: Avalanche would repeat the value of an earlier evaluation if there were none.
        """
        probs = self.calibrator.predict_proba(logits)
        groups = predicted_groups(probs, self.new_classes, classes=self.classes)
        ece = expected_calibration_error(probs, labels, classes=self.classes, groups=groups)
        plain = torch.softmax(logits.double(), dim=1)
        found = {"new": math.nan, "old": math.nan, **ece.by_group}
        named = {f"ECE_Predicted{group.capitalize()}": float(value) for group, value in found.items()}
        before = expected_calibration_error(plain, labels, classes=self.classes)
        return {"ECE": float(ece), "ECE_Uncalibrated": float(before), **named}

    # what a fit takes ----------------------------------------------------------------------------------------

    def _check_order(self, strategy: Any) -> None:
        """Refuse a place before the plugin that fills the memory: at the fit, its new exemplars would be missing."""
        if not needs_memory(self.calibrator) or self._memory is not None:
            return
        keeper = _keeper(strategy)
        if keeper is None:
            expected = f"a plugin that keeps exemplars, such as ReplayPlugin, for {type(self.calibrator).__name__}"
            advice = "Add one, pass memory=function, or calibrate with tcil.TemperatureScaling()."
            raise invalid("plugins", "none with a storage_policy", expected, advice)
        if keeper is strategy:
            if self._must_count():
                raise self._not_presented(strategy)
            return
        places = [next(i for i, plugin in enumerate(strategy.plugins) if plugin is one) for one in (keeper, self)]
        if places[1] < places[0]:
            name = type(keeper).__name__
            advice = "Strategies that add it by themselves put it last: use Naive(plugins=[...]) with both."
            expected = f"[{name}(...), CalibrationPlugin(...)]: the memory is filled first"
            raise invalid("plugins", f"CalibrationPlugin before {name}", expected, advice)

    def _exemplars(self, strategy: Any) -> Examples:
        if self._memory is not None:
            return self._memory(strategy)
        keeper: Any = _keeper(strategy)  # there is one: it was asked for before training
        return _evaluated(keeper.storage_policy.buffer)

    def _held_out(self, experience: Any) -> Examples:
        if callable(self._valid):
            return _evaluated(self._valid(experience))
        number = experience.current_experience
        try:
            return _evaluated(self._valid[number].dataset)
        except IndexError:
            raise invalid("valid", f"a stream without experience {number}", "one for each experience") from None

    def _must_count(self) -> bool:
        return self.imbalance is None and needs_imbalance(self.calibrator)

    def _ratio(self, strategy: Any, seen: list[int], new: list[int]) -> float | None:
        if callable(self.imbalance) and set(seen) <= set(new):
            return None  # no old classes: the user's formula may divide by their number
        if self.imbalance is not None:
            given = self.imbalance(strategy) if callable(self.imbalance) else self.imbalance
            return positive(given, "imbalance")
        ratio = presented_ratio(self.presented, seen, new)
        if ratio == float("inf"):
            raise self._not_presented(strategy)
        return ratio

    def _not_presented(self, strategy: Any) -> ValueError:
        name = type(strategy).__name__
        return invalid(
            "imbalance",
            f"None, and {name} keeps its memory outside the minibatch",
            "a number, or a function of the strategy: images of a new class that training draws in an epoch for each"
            " one of an old class",
            "Pass imbalance=..., or calibrate with calibrator=tcil.TCIL(), which does not need it.",
        )


def _keeper(strategy: Any) -> Any | None:
    """The plugin that keeps the exemplars, or the strategy itself; None where nothing does."""
    for keeper in (*strategy.plugins, strategy):
        if hasattr(getattr(keeper, "storage_policy", None), "buffer"):
            return keeper
    return None


def _classes_of(experience: Any) -> set[int]:
    return {int(label) for label in experience.classes_in_this_experience}


def _evaluated(data: Any) -> Any:
    """Avalanche's datasets with their evaluation transforms; other data unchanged."""
    return data.eval() if hasattr(data, "eval") and hasattr(data, "__getitem__") else data
