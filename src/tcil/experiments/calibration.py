"""All calibrators on one finished task: the very same model, one forward pass for every metric."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tcil
from tcil.calibration.calibrators.base import Calibrator
from tcil.calibration.errors import CalibrationWarning, NotReachableError, invalid, unknown_name
from tcil.calibration.options import Verdict
from tcil.calibration.storage import encode
from tcil.calibration.temperature import solve_temperature
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
    imbalance: float | None = None  # training images of a new class for each one of an old class
    history: dict[str, Any] = field(default_factory=dict)
    remembered: dict[str, Any] | None = None  # history of the calibrator that is being fitted

    @property
    def seen(self) -> range:
        """All columns seen so far."""
        return range(self.new_columns.stop)


class NotApplicable(Exception):
    """A calibrator lacks what it needs on this task (no images, no reserve); its row says why."""


Fit = Callable[..., Any]  # of a fitted Calibrator, or None for the network as it is


@dataclass(frozen=True)
class Entry:
    """A calibrator in the tables: its title, what it is, how it is fitted, in which block it stands.

    `fit` gets the finished task, and the options that the user named as `name[option=value]`; these are checked
    beforehand against `kind`, the calibrator's class. `interval` gives the 95 % interval of the temperature, from the
    task and the fitted calibrator.
    """

    title: str
    meaning: str
    fit: Fit
    block: str = "ranked"
    kind: type[Calibrator] | None = None
    interval: Callable[[FinishedTask, Any], list[float] | None] | None = None


def _needs_images(task: FinishedTask) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if task.model is None or task.memory is None or task.valid is None:
        raise NotApplicable("needs the network and its images")
    return task.model, task.memory, task.valid


def _perturb_ts(task: FinishedTask, **options: Any) -> Calibrator:
    model, _, valid = _needs_images(task)
    return tcil.PerturbedTemperatureScaling(**options).fit(model, valid=valid, classes=task.seen)


def _t_cil(task: FinishedTask, **options: Any) -> Calibrator:
    model, memory, valid = _needs_images(task)
    return tcil.TCIL(**options).fit(model, memory, valid, task.new_columns, classes=task.seen)


def _pact(task: FinishedTask, **options: Any) -> Calibrator:
    model, memory, valid = _needs_images(task)
    if task.imbalance is None and task.index > 0:
        raise NotApplicable("needs the numbers of training images")
    return tcil.PACT(**options).fit(
        model, memory, valid, task.new_columns, classes=task.seen, imbalance=task.imbalance, history=task.remembered
    )


def _first_task(task: FinishedTask, **options: Any) -> Calibrator:
    history = task.remembered
    if history is None and task.index > 0:
        raise NotApplicable("needs the first task")
    calibrator = tcil.FirstTaskTemperatureScaling(**options)
    if history is None:
        return calibrator.fit(*_valid(task))
    return calibrator.fit(classes=task.seen, history=history)


def _reserve(task: FinishedTask) -> tuple[Tensor, Tensor]:
    if not len(task.reserve_columns):
        raise NotApplicable("needs --reserve")
    old = task.reserve_columns < task.new_columns.start
    if not bool(old.any()):
        raise NotApplicable("there is no old task yet")
    # Old classes from the reserve, new ones from the validation set.
    logits, columns = _valid(task)
    return torch.cat([task.reserve_logits[old], logits]), torch.cat([task.reserve_columns[old], columns])


def _valid(task: FinishedTask) -> tuple[Tensor, Tensor]:
    if not len(task.valid_columns):
        raise NotApplicable("needs a validation set")
    return task.valid_logits, task.valid_columns


def _exemplars(task: FinishedTask) -> tuple[Tensor, Tensor]:
    if not len(task.memory_columns):
        raise NotApplicable("needs the memory's logits")
    return task.memory_logits, task.memory_columns


_ORACLE, _OLD_DATA = "oracle", "with old-task validation data"
CALIBRATORS: dict[str, Entry] = {
    "vanilla": Entry("Vanilla", "the network as trained", lambda task: None),
    "ts": Entry(
        "TS",
        "temperature scaling on the new task's validation set",
        lambda task, **options: tcil.TemperatureScaling(**options).fit(*_valid(task)),
        kind=tcil.TemperatureScaling,
        interval=lambda task, _: temperature_interval((task.valid_logits, task.valid_columns)),
    ),
    "ets": Entry(
        "ETS",
        "ensemble temperature scaling",
        lambda task, **options: tcil.EnsembleTemperatureScaling(**options).fit(*_valid(task)),
        kind=tcil.EnsembleTemperatureScaling,
    ),
    "irm": Entry(
        "IRM",
        "multi-class isotonic regression",
        lambda task, **options: tcil.MulticlassIsotonic(**options).fit(*_valid(task)),
        kind=tcil.MulticlassIsotonic,
    ),
    "perturb-ts": Entry(
        "PerturbTS", "temperature scaling under input noise", _perturb_ts, kind=tcil.PerturbedTemperatureScaling
    ),
    "t-cil": Entry(
        "T-CIL",
        "temperature scaling on adversarially perturbed exemplars",
        _t_cil,
        kind=tcil.TCIL,
        interval=lambda _, fitted: _t_cil_interval(fitted.evidence_),
    ),
    "pact": Entry(
        "PACT",
        "T-CIL with confidences that know how unbalanced training was (ours)",
        _pact,
        kind=tcil.PACT,
        interval=lambda _, fitted: _pact_interval(fitted.result_),
    ),
    "first-task-ts": Entry(
        "First-task TS",
        "the first task's temperature, kept for ever",
        _first_task,
        kind=tcil.FirstTaskTemperatureScaling,
    ),
    "exemplar-ts": Entry(
        "Exemplar TS",
        "temperature scaling on unperturbed exemplars (T near 0: why T-CIL perturbs them)",
        lambda task, **options: tcil.TemperatureScaling(**options).fit(*_exemplars(task)),
        kind=tcil.TemperatureScaling,
    ),
    "optimal-ts": Entry(
        "Optimal TS",
        "temperature scaling on the test set: the oracle",
        lambda task, **options: tcil.TemperatureScaling(**options).fit(task.test_logits, task.test_columns),
        _ORACLE,
        tcil.TemperatureScaling,
        lambda task, _: temperature_interval((task.test_logits, task.test_columns)),
    ),
    "optimal-group-ts": Entry(
        "Optimal group TS",
        "one temperature per predicted group, old or new, on the test set",
        lambda task: tcil.GroupTemperatureScaling().fit(
            task.test_logits, task.test_columns, new_classes=task.new_columns
        ),
        _ORACLE,
    ),
    "reserve-ts": Entry(
        "Reserve TS",
        "temperature scaling with a reserve of old-task data",
        lambda task: tcil.TemperatureScaling().fit(*_reserve(task)),
        _OLD_DATA,
    ),
    "reserve-group-ts": Entry(
        "Reserve group TS",
        "one temperature per predicted group, old or new, with a reserve of old-task data",
        lambda task: tcil.GroupTemperatureScaling().fit(*_reserve(task), new_classes=task.new_columns),
        _OLD_DATA,
    ),
}


def specs_of(text: str | None) -> list[str] | None:
    """Calibrators by comma, each a name or `name[option=value,...]`; None stays None, which means all."""
    if text is None:
        return None
    specs = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)
    if not specs or ",".join(specs) != text:
        raise invalid("calibrators", repr(text), "names by comma, such as ts,t-cil[policy=random]")
    return specs


def entry_of(name: str) -> Entry:
    """A calibrator by name or `name[option=value,...]`; one of the user's own is an Entry, or a function of one."""
    name, bracket, options = name.partition("[")
    if bracket:
        return _with_options(name, entry_of(name), options.removesuffix("]"))
    if name in CALIBRATORS:
        return CALIBRATORS[name]
    entry = extension("calibrator", name, CALIBRATORS)
    if not isinstance(entry, Entry) and callable(entry):
        try:
            entry = entry()
        except TypeError:  # it needs arguments: no factory
            entry = None
    if not isinstance(entry, Entry):
        raise invalid("calibrator", repr(name), "an Entry, or a factory of one")
    return entry


def _with_options(name: str, entry: Entry, text: str) -> Entry:
    """The same calibrator with options, which are tried at once."""
    kind = entry.kind
    if kind is None:
        raise invalid("calibrators", f"{name}[{text}]", f"{name}, which has no options")
    known, options = [field.name for field in fields(kind) if field.init], {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise invalid("calibrators", f"{name}[{text}]", f"{name}[option=value]")
        if key not in known:
            raise unknown_name(f"option of calibrator {name}", key, known)
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    kind(**options)
    title = f"{entry.title} ({text.replace(',', ', ')})"
    return replace(entry, title=title, fit=partial(entry.fit, **options), block="with other options")


def calibrate(
    task: FinishedTask, names: Sequence[str] | None = None, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Every calibrator's figures on this task, as plain JSON; and the history that the next task takes.

    `check` is called before each; what it raises ends the calibration.
    """
    rows, history = {}, dict(task.history)
    for name in names or list(CALIBRATORS):
        check()
        entry = entry_of(name)
        row: dict[str, Any] = {"title": entry.title, "block": entry.block}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CalibrationWarning)  # the verdicts are in the row
                fitted = entry.fit(replace(task, remembered=task.history.get(name)))
            if fitted is not None and not isinstance(fitted, Calibrator):
                got = f"{name!r}, whose fit returned {type(fitted).__name__}"
                raise invalid("calibrator", got, "a fitted Calibrator, or None for the network as it is")
            probs = _probabilities(task, fitted)
            row |= figures(probs, task)
            if fitted is not None:
                row["temperature"] = getattr(fitted, "temperature_", None)
                if entry.interval is not None:
                    row["temperature_interval"] = entry.interval(task, fitted)
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


def temperature_interval(*sets: tuple[Tensor, Tensor], n_resamples: int = 50) -> list[float] | None:
    """A 95 % bootstrap interval of the temperature of a set; None where a resample has no temperature.

    With a second set, which the first one's temperature moves with, each is resampled: see `_t_cil_interval`.
    """
    generator = torch.Generator().manual_seed(0)
    fitted = [solve_temperature(*part).temperature for part in sets]
    found = []
    for _ in range(n_resamples):
        temperature = fitted[0]
        for (logits, columns), whole in zip(sets, fitted, strict=True):
            rows = torch.randint(len(columns), (len(columns),), generator=generator)
            fit = solve_temperature(logits[rows], columns[rows])
            if fit.verdict is not Verdict.OK:
                return None
            temperature *= fit.temperature / whole
        found.append(temperature)
    return [float(value) for value in np.quantile(found, [0.025, 0.975])]


def _t_cil_interval(evidence: tcil.TCILEvidence) -> list[float] | None:
    """Perturbed exemplars and validation images are resampled. The magnitude is not searched again: the temperature of
    the exemplars is taken to move with that of the validation set, its target, in proportion."""
    return None if evidence.pushed is None else temperature_interval(evidence.pushed, evidence.valid)


def _pact_interval(result: tcil.PACTResult) -> list[float] | None:
    """By the filter's own error."""
    if result.log_temperature_error is None:
        return None
    spread = math.exp(1.96 * result.log_temperature_error)
    return [result.temperature / spread, result.temperature * spread]


def merged(stored: dict[str, Any] | None, fresh: dict[str, Any]) -> dict[str, Any]:
    """Stored results of a task with rows computed anew, or added."""
    if stored is None:
        return fresh
    both = {key: {**stored[key], **fresh[key]} for key in ("calibrators", "history")}
    return {**stored, **fresh, **both}


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
    estimate = metrics.calibration_estimate(probs, labels, n_resamples=200)
    bins = metrics.reliability_bins(probs, labels)
    each = {
        "accuracy": metrics.accuracy(probs, labels, groups=labels),
        "gap": metrics.confidence_gap(probs, labels, groups=labels),
    }
    return {
        "accuracy": float(by_task["accuracy"]),
        "ece": float(ece),
        "aece": float(metrics.adaptive_calibration_error(probs, labels)),
        "gap": float(by_task["gap"]),
        "classwise_ece": float(metrics.classwise_calibration_error(probs, labels)),
        "nll": _finite(metrics.negative_log_likelihood(probs, labels)),
        "brier": float(metrics.brier_score(probs, labels)),
        "aurc": float(metrics.area_under_risk_coverage(probs, labels)),
        "noise_floor": estimate.noise_floor,
        "noise_ceiling": estimate.noise_ceiling,
        "ece_interval": [estimate.low, estimate.high],
        "ece_predicted_old": ece.by_group.get("old"),
        "ece_predicted_new": ece.by_group.get("new"),
        "by_task": {key: [score.by_group.get(i) for i in range(n_tasks)] for key, score in by_task.items()},
        "by_class": {key: [_short(score.by_group.get(c)) for c in task.seen] for key, score in each.items()},
        "bins": {
            "count": bins.count.tolist(),
            "confidence": [_short(value) for value in bins.confidence],
            "accuracy": [_short(value) for value in bins.accuracy],
        },
    }


def _short(value: float | None) -> float | None:
    return None if value is None or np.isnan(value) else round(float(value), 5)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
