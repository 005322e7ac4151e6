"""All calibrators on one finished task: the very same model, one forward pass for every metric."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tcil
from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.errors import CalibrationWarning, NotReachableError, invalid
from tcil.calibration.storage import encode
from tcil.incremental.extensions import extension


@dataclass(frozen=True, eq=False)
class FinishedTask:
    """What is known after a task, labels as logit columns. Only the oracle may use the test logits."""

    index: int
    new_columns: range
    task_columns: tuple[range, ...]
    test_logits: Tensor
    test_columns: Tensor
    valid_logits: Tensor
    valid_columns: Tensor
    memory_logits: Tensor
    memory_columns: Tensor
    reserve_logits: Tensor
    reserve_columns: Tensor
    model: nn.Module | None = None
    memory: tuple[Tensor, Tensor] | None = None
    valid: tuple[Tensor, Tensor] | None = None
    history: dict[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> range:
        """All columns seen so far."""
        return range(self.new_columns.stop)


class NotApplicable(Exception):
    """A calibrator lacks what it needs on this task (no images, no reserve); its row says why."""


Fit = Callable[[FinishedTask], Calibrator | None]


@dataclass(frozen=True)
class Entry:
    """A calibrator in the tables: its title, what it is, in which block it stands, and how it is fitted."""

    title: str
    meaning: str
    fit: Fit
    block: str = "ranked"


def _needs_images(task: FinishedTask) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if task.model is None or task.memory is None or task.valid is None:
        raise NotApplicable("needs the network and its images")
    return task.model, task.memory, task.valid


def _ts(task: FinishedTask) -> Calibrator:
    return tcil.TemperatureScaling().fit(task.valid_logits, task.valid_columns)


def _perturb_ts(task: FinishedTask) -> Calibrator:
    model, _, valid = _needs_images(task)
    return tcil.PerturbedTemperatureScaling().fit(model, valid=valid, classes=task.seen)


def _t_cil(policy: str) -> Fit:
    def fit(task: FinishedTask) -> Calibrator:
        model, memory, valid = _needs_images(task)
        return tcil.TCIL(policy=policy).fit(model, memory, valid, task.new_columns, classes=task.seen)

    return fit


def _first_task(task: FinishedTask) -> Calibrator:
    history = task.history.get("first-task-ts")
    if history is None and task.index > 0:
        raise NotApplicable("needs the first task")
    if history is None:
        return tcil.FirstTaskTemperatureScaling().fit(task.valid_logits, task.valid_columns)
    return tcil.FirstTaskTemperatureScaling().fit(classes=task.seen, history=history)


def _reserve(task: FinishedTask) -> tuple[Tensor, Tensor]:
    if not len(task.reserve_columns):
        raise NotApplicable("needs --reserve")
    # Old classes from the reserve, new ones from the validation set.
    return (
        torch.cat([task.reserve_logits, task.valid_logits]),
        torch.cat([task.reserve_columns, task.valid_columns]),
    )


CALIBRATORS: dict[str, Entry] = {
    "vanilla": Entry("Vanilla", "the network as trained", lambda task: None),
    "ts": Entry("TS", "temperature scaling on the new task's validation set", _ts),
    "ets": Entry(
        "ETS",
        "ensemble temperature scaling",
        lambda task: tcil.EnsembleTemperatureScaling().fit(task.valid_logits, task.valid_columns),
    ),
    "irm": Entry(
        "IRM",
        "multi-class isotonic regression",
        lambda task: tcil.MulticlassIsotonic().fit(task.valid_logits, task.valid_columns),
    ),
    "perturb-ts": Entry("PerturbTS", "temperature scaling under input noise", _perturb_ts),
    "t-cil": Entry("T-CIL", "temperature scaling on adversarially perturbed exemplars", _t_cil("paper")),
    "first-task-ts": Entry("First-task TS", "the first task's temperature, kept for ever", _first_task),
    "exemplar-ts": Entry(
        "Exemplar TS",
        "temperature scaling on unperturbed exemplars (T near 0: why T-CIL perturbs them)",
        lambda task: tcil.TemperatureScaling().fit(task.memory_logits, task.memory_columns),
    ),
    "optimal-ts": Entry(
        "Optimal TS",
        "temperature scaling on the test set: the oracle",
        lambda task: tcil.TemperatureScaling().fit(task.test_logits, task.test_columns),
        "oracle",
    ),
    "reserve-ts": Entry(
        "Reserve TS",
        "temperature scaling with a reserve of old-task data",
        lambda task: tcil.TemperatureScaling().fit(*_reserve(task)),
        "with old-task validation data",
    ),
    "reserve-group-ts": Entry(
        "Reserve group TS",
        "one temperature per predicted group, old or new, with a reserve of old-task data",
        lambda task: tcil.GroupTemperatureScaling().fit(*_reserve(task), new_classes=task.new_columns),
        "with old-task validation data",
    ),
}


def entry_of(name: str) -> Entry:
    """A calibrator by name; one of the user's own is an Entry, or a function that makes one."""
    if name in CALIBRATORS:
        return CALIBRATORS[name]
    entry = extension("calibrator", name, CALIBRATORS)
    entry = entry if isinstance(entry, Entry) or not callable(entry) else entry()
    if not isinstance(entry, Entry):
        raise invalid("calibrator", repr(name), "an Entry, or a factory of one")
    return entry


def calibrate(task: FinishedTask, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Every calibrator's figures on this task, as plain JSON; and the history that the next task takes."""
    rows, history = {}, dict(task.history)
    for name in names or list(CALIBRATORS):
        entry = entry_of(name)
        row: dict[str, Any] = {"title": entry.title, "block": entry.block}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CalibrationWarning)  # the verdicts are in the row
                fitted = entry.fit(task)
            probs = _probabilities(task, fitted)
            row |= figures(probs, task)
            if fitted is not None:
                row["temperature"] = getattr(fitted, "temperature_", None)
                row["result"] = encode(fitted.result_)
                if fitted.history_ is not None:
                    history[name] = fitted.history_
        except (NotApplicable, NotReachableError) as reason:
            row["not_applicable"] = str(reason)
        rows[name] = row
    return {
        "task": task.index,
        "seen": task.new_columns.stop,
        "memory": _memory(task),
        "calibrators": rows,
        "history": history,
    }


def _memory(task: FinishedTask) -> dict[str, Any]:
    """How much of its memory the network knows by heart, by the task that an exemplar comes from."""
    if not len(task.memory_columns):
        return {"count": 0, "accuracy": None, "accuracy_by_task": None}
    right = (task.memory_logits.argmax(1) == task.memory_columns).double()
    spans = [(task.memory_columns >= span.start) & (task.memory_columns < span.stop) for span in task.task_columns]
    return {
        "count": len(right),
        "accuracy": float(right.mean()),
        "accuracy_by_task": [float(right[span].mean()) if span.any() else None for span in spans],
    }


def _probabilities(task: FinishedTask, fitted: Calibrator | None) -> Tensor:
    if fitted is None:
        return torch.softmax(task.test_logits.double(), dim=1)
    probs: Tensor = fitted.predict_proba(task.test_logits)
    return probs


def figures(probs: Tensor, task: FinishedTask) -> dict[str, Any]:
    """All metrics of one row: pooled, by predicted group, and by the task that a sample comes from."""
    labels, metrics = task.test_columns, tcil.metrics
    groups = metrics.predicted_groups(probs, task.new_columns)
    starts = np.array([columns.start for columns in task.task_columns])
    origin = np.searchsorted(starts, labels.numpy(), side="right") - 1
    ece = metrics.expected_calibration_error(probs, labels, groups=groups)
    by_task = {
        "accuracy": metrics.accuracy(probs, labels, groups=origin),
        "ece": metrics.expected_calibration_error(probs, labels, groups=origin),
        "gap": metrics.confidence_gap(probs, labels, groups=origin),
    }
    n_tasks = len(task.task_columns)
    return {
        "accuracy": float(by_task["accuracy"]),
        "ece": float(ece),
        "aece": float(metrics.adaptive_calibration_error(probs, labels)),
        "gap": float(by_task["gap"]),
        "classwise_ece": float(metrics.classwise_calibration_error(probs, labels)),
        "nll": _finite(metrics.negative_log_likelihood(probs, labels)),
        "brier": float(metrics.brier_score(probs, labels)),
        "aurc": float(metrics.area_under_risk_coverage(probs, labels)),
        "noise_floor": float(metrics.noise_floor(probs)),
        "ece_predicted_old": ece.by_group.get("old"),
        "ece_predicted_new": ece.by_group.get("new"),
        "by_task": {key: [score.by_group.get(i) for i in range(n_tasks)] for key, score in by_task.items()},
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
