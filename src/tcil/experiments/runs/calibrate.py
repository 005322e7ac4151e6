"""All calibrators on one finished task: the same network for each, one forward pass for every metric."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

import tcil
from tcil.calibration.calibrators import Calibrator
from tcil.calibration.calibrators.noise_levels import MAX_NOISE
from tcil.calibration.inputs.borrowing import borrowed
from tcil.calibration.storage import encode
from tcil.experiments.process import stopping
from tcil.experiments.process.exits import RunFailed, last_line
from tcil.experiments.runs.decide import WatchedTask, decision_figures
from tcil.experiments.runs.entries import CALIBRATORS, Entry, FinishedTask, NotApplicable, entry_of, is_own
from tcil.experiments.runs.reasons import NoAnswer, NotApplicableReason
from tcil.experiments.runs.records import JsonObject, parse, rounded
from tcil.experiments.runs.results import (
    VERSION,
    Bins,
    ByClass,
    ByTask,
    CalibratorRow,
    MemorySummary,
    TaskResult,
)
from tcil.foundation.errors import CalibrationWarning, NotReachableError, invalid
from tcil.metrics.reliability import ReliabilityBins
from tcil.metrics.sample import Score

_PLAIN = ("index", "new_columns", "task_columns", "imbalance", "returned")  # of a task: what nobody can change
_LENT = [field.name for field in fields(FinishedTask) if field.name not in ("model", *_PLAIN)]


def calibrate(
    task: FinishedTask, names: Sequence[str] | None = None, check: Callable[[], None] = lambda: None
) -> TaskResult:
    """Every calibrator's row on this task, and the history that the next task takes.

    `check` is called before each; what it raises ends the calibration.
    """
    rows, history = {}, dict(task.history)
    for name in names or list(CALIBRATORS):
        check()
        rows[name], remembered = _calibrated_by_own(name, task) if is_own(name) else _calibrated(name, task, task)
        if remembered is not None:
            history[name] = remembered
    return TaskResult(
        version=VERSION,
        task=task.index,
        seen=task.new_columns.stop,
        memory=_memory(task),
        calibrators=rows,
        history=history,
    )


def _calibrated(name: str, task: FinishedTask, lent: FinishedTask) -> tuple[CalibratorRow, JsonObject | None]:
    """The row of one calibrator, fitted on what it is lent, and what it remembers."""
    entry, fitted = entry_of(name), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)  # the verdicts are in the row
            watched = WatchedTask.of(replace(lent, remembered=copy.deepcopy(task.history.get(name))))
            fitted = entry.fit(watched)
        if fitted is not None and not isinstance(fitted, Calibrator):
            raise invalid("fit", type(fitted).__name__, "a fitted Calibrator, or None for the network as it is")
        row = _row(task, lent, entry, fitted, backed=not watched.used_reserve)
        return row, None if fitted is None else copy.deepcopy(fitted.history_)
    except NotApplicable as error:
        answer = error.answer
    except NotReachableError as error:
        answer = _missed(fitted, str(error))
    return CalibratorRow(title=entry.title, block=entry.block, not_applicable=answer), None


def _calibrated_by_own(name: str, task: FinishedTask) -> tuple[CalibratorRow, JsonObject | None]:
    """The same for a calibrator of the user's own: it gets copies, and what it raises is told with its name."""
    with _lent(task) as lent:
        try:
            return _calibrated(name, task, lent)
        except stopping.Stopped:
            raise
        except Exception as error:
            raise RunFailed(f"calibrator {name}: {last_line(error)}") from error


@contextmanager
def _lent(task: FinishedTask) -> Iterator[FinishedTask]:
    """The task with tensors and a network of its own; a network that cannot be copied is restored instead."""
    values = {name: getattr(task, name) for name in _LENT}
    own = replace(task, **{name: copy.deepcopy(value) for name, value in values.items()})
    try:
        network = copy.deepcopy(task.model)
    except Exception:  # such as one with a lock, or with tensors that were computed
        assert task.model is not None
        with borrowed(task.model):
            yield own
        return
    yield replace(own, model=network)


def _missed(fitted: object, words: str) -> NoAnswer:
    """Why a calibrator that was fitted has no temperature."""
    result = fitted.result_ if isinstance(fitted, tcil.PerturbedTemperatureScaling) else None
    missed = next((level for level in result.levels if not level.reachable), None) if result is not None else None
    if missed is None:
        return NoAnswer(reason=NotApplicableReason.OTHER, words=words)
    return NoAnswer(
        reason=NotApplicableReason.NOT_REACHABLE,
        max_noise=MAX_NOISE,
        target_accuracy=missed.target_accuracy,
        accuracy=missed.accuracy,
        noise=missed.noise,
    )


def _memory(task: FinishedTask) -> MemorySummary:
    if not len(task.memory_columns):
        return MemorySummary(count=0, accuracy=None, accuracy_by_task=None)
    right = (task.memory_logits.argmax(1) == task.memory_columns).double()
    spans = [(task.memory_columns >= span.start) & (task.memory_columns < span.stop) for span in task.task_columns]
    return MemorySummary(
        count=len(right),
        accuracy=float(right.mean()),
        accuracy_by_task=tuple(float(right[span].mean()) if span.any() else None for span in spans),
    )


def _row(
    task: FinishedTask, lent: FinishedTask, entry: Entry, fitted: Calibrator | None, *, backed: bool
) -> CalibratorRow:
    """All metrics of one row: pooled, by predicted group, and by the task that a sample comes from.

    `backed`: the calibrator has not seen the reserve, which can then back what decision rules promise.
    """
    logits, labels, metrics = task.test_logits, task.test_columns, tcil.metrics

    if getattr(getattr(fitted, "map_type", None), "needs_features", False):
        raise invalid("fit", f"{type(fitted).__name__}, which needs features", "a calibrator that maps logits alone")

    def probabilities(logits: Tensor) -> Tensor:
        return torch.softmax(logits.double(), dim=1) if fitted is None else fitted.predict_proba(logits.clone())

    probs = probabilities(logits)
    groups = metrics.predicted_groups(probs, task.current)
    starts = np.array([columns.start for columns in task.task_columns])
    origin = np.searchsorted(starts, labels.numpy(), side="right") - 1
    ece = metrics.expected_calibration_error(probs, labels, groups=groups)
    accuracy, gap = metrics.accuracy(probs, labels, groups=origin), metrics.confidence_gap(probs, labels, groups=origin)
    ece_by_task = metrics.expected_calibration_error(probs, labels, groups=origin)
    class_accuracy = metrics.accuracy(probs, labels, groups=labels)
    class_gap = metrics.confidence_gap(probs, labels, groups=labels)
    tasks = range(len(task.task_columns))
    estimate = metrics.calibration_estimate(probs, labels, n_resamples=200)
    bins = metrics.reliability_bins(probs, labels, groups=groups)
    row = CalibratorRow(
        title=entry.title,
        block=entry.block,
        accuracy=float(accuracy),
        ece=float(ece),
        aece=float(metrics.adaptive_calibration_error(probs, labels)),
        gap=float(gap),
        classwise_ece=float(metrics.classwise_calibration_error(probs, labels)),
        nll=_finite(metrics.negative_log_likelihood(probs, labels)),
        brier=float(metrics.brier_score(probs, labels)),
        aurc=float(metrics.area_under_risk_coverage(probs, labels)),
        noise_floor=estimate.noise_floor,
        noise_ceiling=estimate.noise_ceiling,
        ece_interval=(estimate.low, estimate.high),
        ece_predicted_old=ece.by_group.get("old"),
        ece_predicted_new=ece.by_group.get("new"),
        by_task=ByTask(accuracy=_each(accuracy, tasks), ece=_each(ece_by_task, tasks), gap=_each(gap, tasks)),
        by_class=ByClass(accuracy=_each(class_accuracy, task.seen, rounded), gap=_each(class_gap, task.seen, rounded)),
        bins=_bins(bins),
        bins_predicted_old=_bins(bins.by_group.get("old")),
        bins_predicted_new=_bins(bins.by_group.get("new")),
        decisions=decision_figures(task, probabilities, backed=backed),
    )
    if fitted is None:
        return row
    told: dict[str, object] = {"temperature": getattr(fitted, "temperature_", None)}
    if entry.interval is not None:
        told["temperature_interval"] = entry.interval(lent, fitted)
    return parse(CalibratorRow, {**row.given(), **told, "result": encode(fitted.result_)})


def _bins(bins: ReliabilityBins | None) -> Bins | None:
    if bins is None:
        return None
    return Bins(
        count=tuple(bins.count.tolist()),
        confidence=tuple(map(rounded, bins.confidence)),
        accuracy=tuple(map(rounded, bins.accuracy)),
    )


def _each(
    score: Score, groups: Iterable[int], form: Callable[[float], float | None] = float
) -> tuple[float | None, ...]:
    """A score of each group; None where a group has no sample."""
    return tuple(form(score.by_group[group]) if group in score.by_group else None for group in groups)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
