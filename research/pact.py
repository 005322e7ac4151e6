"""PACT and PACT-R on development and final worlds: docs/pact-protocol.md, docs/pact.md.

    python -m research.pact train RUNS [WORLD...] # the final worlds, in order, or those named; resumable
    python -m research.pact develop RUN...        # development runs, into docs/results/pact/development-two/
    python -m research.pact final RUNS            # once: final worlds not measured yet, into docs/results/pact/final/
    python -m research.pact sizes RUNS            # other sizes and controls: train and measure, into .../sizes/
    python -m research.pact cifar RUN...          # once, with TCIL_DATA=DIR: runs without a reserve, into .../cifar100/
    python -m research.pact cost RUNS             # what the reserve costs in accuracy: F1 with and without it
    python -m research.pact constants             # PACT's constants, from the development runs of round one
    python -m research.pact tables NAME [WORLD...]  # every table of what is kept in docs/results/pact/NAME
    python -m research.pact candidates            # the test of round three: F3 and F4
    python -m research.pact page                  # the tables of docs/pact.md, from what is kept

Every method turns what is known after a task into probabilities of the test images. Where a development run has no
reserve, two images of each old class are taken out of its test set and serve as one. Tasks without old classes are left
out: nothing is to be balanced there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from scipy.optimize import minimize
from torch import Tensor

import tcil
from research import ROOT
from research.beyond import Known, adjusted, fit_on, full_imbalance, optimal_groups, oracle, scaled
from tcil.calibration.calibrators.pact import PACTConstants, PACTEvidence, PACTFilter
from tcil.calibration.calibrators.pact import evidence as pieces
from tcil.calibration.calibrators.pact.filter import BiasBelief
from tcil.calibration.calibrators.tcil import TCILEvidence
from tcil.experiments.config.settings import RunSettings, build
from tcil.experiments.runs.entries import FinishedTask
from tcil.experiments.runs.run import Run
from tcil.experiments.runs.store import RunFolder
from tcil.foundation.arrays import without_masked
from tcil.foundation.files import replace_file

LEARNERS = ("er", "eeil", "wa", "der", "bic", "la")
WORLDS: dict[str, dict[str, Any]] = {
    "F1": {"preset": "letters", "seed": 101, "memory": 400, "validation": 80},
    "F2": {"preset": "letters", "seed": 102, "memory": 200, "validation": 160},
    "F3": {"preset": "letters", "seed": 103, "memory": 800, "validation": 80},
    "F5": {"preset": "letters", "seed": 105, "memory": 300, "validation": 200, "tasks": 4},
    "F4": {"preset": "letters-large", "seed": 104, "memory": 560, "validation": 80, "classes": 28, "tasks": 7},
}
FINAL = ("F5", "F3", "F4")  # of round two, in the order of training; F1 and F2, of round one, are development now
STORED = ROOT / "docs/results/pact"
RESERVED = 2
HARM_FROM = 5000  # test images
Labelled = tuple[Tensor, Tensor]


# worlds -----------------------------------------------------------------------------------------------------------


def final_settings(world: str, learner: str, reserve: int = RESERVED) -> RunSettings:
    """The settings of a final run, by the protocol's rule."""
    own = WORLDS[world]
    return build(
        {
            "learner": learner, **own, "validation_pool": own["validation"],
            "class_order_seed": own["seed"], "data_seed": own["seed"], "test_per_class": 320, "reserve": reserve,
        }
    )  # fmt: skip


def train(out: Path, worlds: Sequence[str] = FINAL, reserve: int = RESERVED) -> None:
    """Train worlds, one run after another; nothing but the vanilla row is computed."""
    for world in worlds:
        for learner in LEARNERS:
            settings = final_settings(world, learner, reserve)
            Run(settings, out / settings.name).execute(["vanilla"])
            print(f"{world} {learner} reserve {reserve}: trained", flush=True)


# methods ----------------------------------------------------------------------------------------------------------


class Filter02(PACTFilter):
    """PACT as version 0.2 had it: no offset, and label shift left out where it is three errors away."""

    def label_shift(self, evidence: TCILEvidence) -> PACTEvidence | None:
        if self.bias is None or not self.informed:
            return None
        before = self.bias.mean, self.bias.variance
        piece = super().label_shift(evidence)
        if piece is None or piece.bias is None or piece.bias_error is None:
            return piece
        if abs(piece.bias - before[0]) >= 2.999 * math.hypot(math.sqrt(before[1]), piece.bias_error):
            self.bias = BiasBelief(*before, 0.0, self.constants.surrogate_offset**2)
            return None
        return piece


CONSTANTS_02 = PACTConstants(
    surrogate_temperature_error=0.12, surrogate_bias_error=0.58, surrogate_offset=1e-3, offset_drift=1e-4,
    new_class_error=0.07, label_shift_error=0.30, temperature_drift=0.10, bias_drift=0.28, first_drift=0.40,
    bias_spread=0.38,
)  # fmt: skip
NOW = PACTConstants()
NO_OFFSET = PACTConstants(surrogate_offset=1e-3, offset_drift=1e-4, surrogate_bias_error=0.7)
Method = Callable[[Known], Tensor]


def balanced(known: Known) -> Labelled:
    """Reserve and validation set, with every class repeated until all are (nearly) equally frequent."""
    (z_old, y_old), (z_new, y_new) = reserve_of(known), known.valid
    old, new = len(y_old) / known.old, len(y_new) / len(known.task.new_columns)
    times = max(1, round(new / old))
    return torch.cat([z_new, *[z_old] * times]), torch.cat([y_new, *[y_old] * times])


def reserve_of(known: Known) -> Labelled:
    """At most two images of each old class."""
    logits, columns = known.task.reserve_logits, known.task.reserve_columns
    rows = [(columns == column).nonzero().squeeze(1)[:RESERVED] for column in range(known.old)]
    chosen = torch.cat(rows)
    return logits[chosen], columns[chosen]


def tracked(
    kind: type[PACTFilter] = PACTFilter,
    constants: PACTConstants = NOW,
    *,
    reserve: bool = False,
    history: bool = True,
    without: str = "",
    keep: bool = True,
    average: bool = False,
    spread: str = "",
) -> Method:
    """PACT or PACT-R, or one without some part; the belief is left in `known.memory`.

    With `spread` log T moves with the log spread of the exemplars' logits from task to task: by the "whole" change
    (round two), or by something "between" 0 and the change (round three).
    """

    def method(known: Known) -> Tensor:
        memo = known.memory.get("pact") if history else None
        log_imbalance = known.log_imbalance if known.old else None
        state = kind.of(memo, log_imbalance, known.evidence.result.target, constants)
        if spread:
            before, now_spread = known.memory.get("spread"), log_spread(known.task.memory_logits)
            if memo is not None and before is not None and now_spread is not None:
                if spread == "whole":
                    state.log_t.move(now_spread - before, 0.0)
                else:
                    between(state, now_spread - before)
            known.memory["spread"] = now_spread
        for name in ("surrogate", "new_classes", "label_shift"):
            if name != without or not known.old:
                getattr(state, name)(known.evidence)
        known.memory["pact"] = state.memo() if state.informed else None
        now = state.as_evidence("all")
        if reserve and known.old and (found := state.with_reserve(known.evidence, reserve_of(known))):
            now = found[1]
        known.memory["belief"], known.memory["surprises"] = now, list(state.surprises)
        assert now.log_temperature is not None
        if average:
            return averaged(known, now)
        return adjusted(known, now.log_temperature, now.bias or 0.0, keep)

    return method


def log_spread(logits: Tensor) -> float | None:
    """The logarithm of the root mean square of logits about the mean of their row; None where they do not differ."""
    z = logits.double()
    alive = z != -torch.inf
    z = without_masked(z)
    z = (z - z.sum(dim=1, keepdim=True) / alive.sum(dim=1, keepdim=True)) * alive
    square = float(z.square().sum() / alive.sum())
    return 0.5 * math.log(square) if math.isfinite(square) and square > 0 else None


def begun(known: Known) -> PACTFilter:
    """What is believed before the evidence of a task."""
    log_imbalance = known.log_imbalance if known.old else None
    return PACTFilter.of(known.memory.get("pact"), log_imbalance, known.evidence.result.target, NOW)


def believed(known: Known, now: PACTEvidence, surprises: Sequence[float]) -> Tensor:
    """The answer of a belief, which is left in `known.memory`."""
    known.memory["belief"], known.memory["surprises"] = now, list(surprises)
    assert now.log_temperature is not None
    return adjusted(known, now.log_temperature, now.bias or 0.0)


def between(state: PACTFilter, step: float) -> None:
    """Log T moves by something between 0 and this step, anything equally likely; as b does with the imbalance."""
    state.log_t.move(step / 2, abs(step) / math.sqrt(12))


def bennett(known: Known) -> Tensor:
    """PACT-R in which both sides tell b, and nothing is counted twice.

    The odds of old against new classes, on all validation images and all reserved ones: the likelihood of an image's
    group where groups are as frequent as in this sample, which is Bennett's equation for b (Shirts et al. 2003). It
    takes the place of label shift, its one-sided form. Of T the reserve tells within old classes.
    """
    state = begun(known)
    for name in ("surrogate", "new_classes"):
        getattr(state, name)(known.evidence)
    before = state.as_evidence("all")
    surprises = list(state.surprises)
    state.label_shift(known.evidence)
    known.memory["pact"] = state.memo() if state.informed else None
    if not known.old:
        return believed(known, state.as_evidence("all"), surprises)
    return believed(known, PACTEvidence("all", *both_sides(known, before)), surprises)


def both_sides(known: Known, before: PACTEvidence) -> tuple[float, float, float, float]:
    """The mode of log T and b, and their errors, by what is believed and the likelihood of both sides."""
    (z_old, y_old), (z_new, y_new) = reserve_of(known), known.valid
    is_old = (~known.evidence.is_new).double()
    z, side = torch.cat([z_old, z_new]).double(), torch.cat([torch.ones(len(y_old)), torch.zeros(len(y_new))]).double()
    n_old, n_new = int(is_old.sum()), int((1 - is_old).sum())
    offset = math.log(len(y_old) / n_old) - math.log(len(y_new) / n_new)  # of images a class in this sample
    assert before.log_temperature is not None
    assert before.bias is not None
    mean = torch.tensor([before.log_temperature, before.bias], dtype=torch.float64)
    error = torch.tensor([before.log_temperature_error, before.bias_error], dtype=torch.float64)
    masked = torch.where(is_old.bool(), 0.0, -torch.inf), torch.where(is_old.bool(), -torch.inf, 0.0)

    def loss(point: Tensor) -> Tensor:
        scaled = z * torch.exp(-point[0])
        odds = torch.logsumexp(scaled + masked[0], 1) - torch.logsumexp(scaled + masked[1], 1) + point[1] + offset
        group = torch.nn.functional.binary_cross_entropy_with_logits(odds, side, reduction="sum")
        rows = z_old.double() * torch.exp(-point[0])
        inside = torch.nn.functional.cross_entropy(rows + masked[0], y_old, reduction="sum")
        return group + inside + 0.5 * ((point - mean) / error).square().sum()

    point = mean.clone()
    for _ in range(50):
        gradient = torch.autograd.functional.jacobian(loss, point)
        curvature = torch.autograd.functional.hessian(loss, point)
        values, vectors = torch.linalg.eigh(curvature)
        step = vectors @ ((vectors.T @ gradient) / values.abs().clamp(min=1e-3))
        size = min(1.0, 1.0 / float(step.norm().clamp(min=1e-9)))
        while size > 1e-6 and float(loss(point - size * step)) > float(loss(point)):
            size /= 2
        point = point - size * step
        if float(step.norm()) < 1e-6 or size <= 1e-6:
            break
    errors = torch.linalg.inv(torch.autograd.functional.hessian(loss, point)).diagonal().clamp(min=1e-8).sqrt()
    return float(point[0]), float(errors[0]), float(point[1]), float(errors[1])


def averaged(known: Known, belief: PACTEvidence) -> Tensor:
    """The mean of q over what is believed, by nine points of Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()
    total = torch.zeros_like(known.task.test_logits, dtype=torch.float64)
    assert belief.log_temperature is not None
    for x, wx in zip(nodes, weights, strict=True):
        for y, wy in zip(nodes, weights, strict=True):
            log_t = belief.log_temperature + x * (belief.log_temperature_error or 0.0)
            bias = (belief.bias or 0.0) + y * (belief.bias_error or 0.0)
            total += wx * wy * adjusted(known, log_t, bias).exp()
    return total.log()


def reserve_bias(known: Known) -> Tensor:
    """The same map as PACT-R, by reserve and validation set alone."""
    found = pieces.joint_fit(known.valid, reserve_of(known), known.evidence.is_new)
    return adjusted(known, found[0], found[1]) if found else scaled(known, 1.0)


def fitted_map(build_map: Callable[[Tensor, Tensor, Tensor], Tensor], size: Callable[[Known], int]) -> Method:
    """A parametric map of the logits, fitted on the balanced set by cross-entropy (L-BFGS, from the identity)."""

    def method(known: Known) -> Tensor:
        z, y = balanced(known)
        z, is_old = z.double(), (~known.evidence.is_new).double()

        def loss(x: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
            point = torch.tensor(x, requires_grad=True)
            value = torch.nn.functional.cross_entropy(build_map(point, z, is_old), y)
            (gradient,) = torch.autograd.grad(value, point)
            return float(value.detach()), gradient.numpy()

        found = minimize(loss, np.zeros(size(known)), jac=True, method="L-BFGS-B", options={"maxiter": 200}).x
        return torch.log_softmax(build_map(torch.tensor(found), known.task.test_logits.double(), is_old), dim=1)

    return method


def bcts(x: Tensor, z: Tensor, is_old: Tensor) -> Tensor:
    """Alexandari et al. 2020: a temperature, and a bias for each class."""
    return z * torch.exp(-x[0]) + x[1:]


def vector_scaling(x: Tensor, z: Tensor, is_old: Tensor) -> Tensor:
    """Guo et al. 2017: a factor and a bias for each class."""
    k = z.shape[1]
    return z * torch.exp(-x[:k]) + x[k:]


def bic_layer(x: Tensor, z: Tensor, is_old: Tensor) -> Tensor:
    """Wu et al. 2019: alpha and beta on the new columns; with a temperature for all."""
    return (z * torch.exp(x[1] * (1 - is_old)) + x[2] * (1 - is_old)) * torch.exp(-x[0])


def balanced_groups(known: Known) -> Tensor:
    scaling = tcil.GroupTemperatureScaling().fit(*balanced(known), new_classes=known.task.new_columns)
    found: Tensor = scaling.transform(known.task.test_logits)
    return found


def classes_of(known: Known) -> int:
    return len(known.task.seen)


METHODS: dict[str, tuple[str, Method]] = {
    "Vanilla": ("no old data", lambda known: scaled(known, 1.0)),
    "TS": ("no old data", lambda known: scaled(known, fit_on(known.valid))),
    "T-CIL": ("no old data", lambda known: scaled(known, known.evidence.result.temperature)),
    "whole imbalance": ("no old data", full_imbalance),
    "PACT 0.2": ("no old data", tracked(Filter02, CONSTANTS_02)),
    "PACT": ("no old data", tracked()),
    "PACT, T by the spread": ("no old data", tracked(spread="whole")),
    "PACT, T partly by the spread": ("no old data", tracked(spread="between")),
    "balanced TS": ("reserve", lambda known: scaled(known, fit_on(balanced(known)))),
    "balanced group TS": ("reserve", balanced_groups),
    "BiC layer and T": ("reserve", fitted_map(bic_layer, lambda known: 3)),
    "BCTS": ("reserve", fitted_map(bcts, lambda known: classes_of(known) + 1)),
    "vector scaling": ("reserve", fitted_map(vector_scaling, lambda known: 2 * classes_of(known))),
    "T and bias by the reserve alone": ("reserve", reserve_bias),
    "PACT-R": ("reserve", tracked(reserve=True)),
    "PACT-R, T by the spread": ("reserve", tracked(reserve=True, spread="whole")),
    "PACT-R, T partly by the spread": ("reserve", tracked(reserve=True, spread="between")),
    "PACT-R, Bennett": ("reserve", bennett),
    "Optimal TS": ("oracle", lambda known: scaled(known, fit_on((known.task.test_logits, known.task.test_columns)))),
    "Optimal group TS": ("oracle", optimal_groups),
    "Optimal T and bias": ("oracle", lambda known: adjusted(known, *oracle(known))),
}
# Parts left out, with log T as it is shipped and by the spread.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "PACT without history": ("ablation", {"history": False}),
    "PACT without surrogate": ("ablation", {"without": "surrogate"}),
    "PACT without new classes": ("ablation", {"without": "new_classes"}),
    "PACT without label shift": ("ablation", {"without": "label_shift"}),
    "PACT without the offset": ("ablation", {"constants": NO_OFFSET}),
    "PACT, posterior average": ("ablation", {"average": True}),
    "PACT-R without history": ("ablation", {"reserve": True, "history": False}),
    "PACT, predictions too": ("predictions too", {"keep": False}),
    "PACT-R, predictions too": ("predictions too", {"reserve": True, "keep": False}),
}
for _name, (_family, _own) in PARTS.items():
    METHODS[_name] = _family, tracked(**_own)
    METHODS[f"{_name} (T by the spread)"] = f"{_family} of round two", tracked(**_own, spread="whole")
FAMILIES = ("no old data", "reserve", "oracle", "ablation", "predictions too")  # not those of round two
BASES = ("Vanilla", "TS", "T-CIL")
OURS = (
    "PACT 0.2", "PACT", "PACT, T by the spread", "PACT, T partly by the spread",
    "PACT-R", "PACT-R, T by the spread", "PACT-R, T partly by the spread", "PACT-R, Bennett",
)  # fmt: skip


# measuring --------------------------------------------------------------------------------------------------------


def scores(log_probs: Tensor, known: Known) -> dict[str, float]:
    """All metrics of a task; ECE, accuracy and AURC in percent."""
    probs, labels, metrics = log_probs.exp(), known.task.test_columns, tcil.metrics
    groups = metrics.predicted_groups(probs, known.task.new_columns)
    ece = metrics.expected_calibration_error(probs, labels, groups=groups)
    by_group = [value for name in ("old", "new") if (value := ece.by_group.get(name)) is not None]
    values = {
        "pooled": 100 * float(ece),
        "group": 100 * float(np.mean(by_group)),
        "smooth": 100 * float(metrics.smooth_calibration_error(probs, labels)),
        "debiased": 100 * float(metrics.debiased_calibration_error(probs, labels)),
        "nll": float(-log_probs.gather(1, labels[:, None]).mean()),
        "brier": float(metrics.brier_score(probs, labels)),
        "aurc": 100 * float(metrics.area_under_risk_coverage(probs, labels)),
        "accuracy": 100 * float(metrics.accuracy(probs, labels)),
    }
    return {name: round(value, 5) for name, value in values.items()}


def harm_interval(ours: Tensor, other: Tensor, labels: Tensor) -> tuple[float, float]:
    """The 95 % bootstrap interval, over test images, of the difference in pooled ECE, in percent."""
    rng, n = np.random.default_rng(0), len(labels)
    sides = []
    for log_probs in (ours, other):
        confidence, predicted = log_probs.exp().max(dim=1)
        place = np.clip(np.ceil(10 * confidence.numpy()).astype(int) - 1, 0, 9)
        sides.append((place, confidence.numpy() - (predicted == labels).double().numpy()))
    draws = []
    for _ in range(200):
        weight = rng.multinomial(n, np.full(n, 1 / n))
        eces = [np.abs(np.bincount(place, weight * gap, minlength=10)).sum() / n for place, gap in sides]
        draws.append(100 * (eces[0] - eces[1]))
    return float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


def with_reserve(task: FinishedTask, drawn: dict[int, Tensor], seed: int) -> FinishedTask:
    """The task, with images of old classes out of its test set for a reserve, the same ones after every task."""
    columns = task.test_columns
    for column in range(task.new_columns.stop):
        if column not in drawn:
            own, generator = int((columns == column).sum()), torch.Generator().manual_seed(1000 * seed + column)
            drawn[column] = torch.randperm(own, generator=generator)[:RESERVED]
    taken = torch.cat([(columns == c).nonzero().squeeze(1)[drawn[c]] for c in range(task.new_columns.stop)])
    rest = torch.ones(len(columns), dtype=torch.bool)
    rest[taken] = False
    return replace(
        task, test_logits=task.test_logits[rest], test_columns=columns[rest],
        reserve_logits=task.test_logits[taken], reserve_columns=columns[taken],
    )  # fmt: skip


def data_folder() -> Path | None:
    """Where CIFAR-100 is: the folder that TCIL_DATA names."""
    named = os.environ.get("TCIL_DATA")
    return Path(named) if named else None


Walked = tuple[FinishedTask, TCILEvidence]


def walk(folder: Path) -> tuple[dict[str, Any], Iterable[Walked]]:
    """What a run is, and each task of it with T-CIL's evidence; of a run that went no further, its first tasks."""
    results, stored = RunFolder(folder).read_results(), RunFolder(folder).read_settings()
    n_tasks = None if results is None else len(results.tasks)
    settings = RunSettings.model_validate(stored.record() if stored is not None else {})
    run = Run(settings, folder, data=data_folder())
    about = {key: getattr(settings, key) for key in ("dataset", "learner", "seed", "memory", "validation", "reserve")}

    def tasks() -> Iterable[Walked]:
        drawn = dict[int, Tensor]()
        with run.threads():
            for task, memory, learner in islice(run.walk(), n_tasks):
                finished = run.finished(task, memory, learner, {})
                assert finished.model is not None
                evidence = tcil.TCIL().evidence(
                    finished.model, finished.memory, finished.valid, finished.new_columns, classes=finished.seen
                )
                if not len(finished.reserve_columns):
                    finished = with_reserve(finished, drawn, settings.seed)
                yield finished, evidence

    return {**about, "tasks": len(run.stream), "classes": run.n_classes, "run": folder.name}, tasks()


def measure(
    folder: Path, methods: Mapping[str, Method], ours: Sequence[str] = OURS, walked: Callable[..., Any] = walk
) -> dict[str, Any]:
    """These methods on every task with old classes of a run; of `ours` also what they believe, and their harm."""
    about, tasks = walked(folder)
    memories: dict[str, dict[str, Any]] = {name: {} for name in methods}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    states = list[dict[str, Any]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tcil.CalibrationWarning)
        for finished, evidence in tasks:
            found = dict[str, Tensor]()
            for name, method in methods.items():
                known = Known(finished, evidence, {}, {}, memories[name])
                if known.old or "PACT" in name:
                    found[name] = method(known)
                if known.old:
                    rows[name].append(scores(found[name], known))
            known = Known(finished, evidence, {}, {})
            states.append(state_of(known, memories, rows, found, ours) if known.old else first_state(known))
    return {"about": about, "scores": rows, "states": states}


def first_state(known: Known) -> dict[str, Any]:
    """The first task's: only T."""
    logits, columns = known.valid
    truth = math.log(fit_on((known.task.test_logits, known.task.test_columns)))
    return {
        "oracle": [truth, None],
        "new_classes": pieces.temperature_with_error(logits, columns),
        "log_spread": log_spread(known.task.memory_logits),
    }


def state_of(
    known: Known,
    memories: dict[str, dict[str, Any]],
    rows: dict[str, list[dict[str, float]]],
    found: dict[str, Tensor],
    ours: Sequence[str],
) -> dict[str, Any]:
    """What the pieces say, what is believed, what is true, and the harm."""
    truth = oracle(known)
    logits, columns = known.valid
    state: dict[str, Any] = {
        "oracle": truth,
        "log_imbalance": known.log_imbalance,
        "log_spread": log_spread(known.task.memory_logits),
        "surrogate": pieces.surrogate(known.evidence),
        "new_classes": pieces.temperature_with_error(logits[:, known.old :], columns - known.old),
        "label_shift": pieces.label_shift(logits, columns, known.evidence.is_new, truth[0]),
        "n_test": len(known.task.test_columns),
        "n_reserve": len(reserve_of(known)[1]),
        "belief": {},
        "harm": {},
    }
    best = min(BASES, key=lambda name: rows[name][-1]["pooled"])
    for name in ours:
        belief: PACTEvidence = memories[name]["belief"]
        state["belief"][name] = [
            belief.log_temperature, belief.log_temperature_error, belief.bias, belief.bias_error,
            max(memories[name]["surprises"]),
        ]  # fmt: skip
        interval = harm_interval(found[name], found[best], known.task.test_columns)
        state["harm"][name] = [rows[name][-1]["pooled"] - rows[best][-1]["pooled"], *interval]
    return state


def store(name: str, folders: Iterable[Path], families: Sequence[str] = FAMILIES) -> None:
    """Measure these runs once, keep what was found, and print the tables of all that are kept."""
    (STORED / name).mkdir(parents=True, exist_ok=True)
    methods = {method: apply for method, (family, apply) in METHODS.items() if family in families}
    for folder in track(list(folders), description=name):
        path = STORED / name / f"{folder.name}.json"
        if not path.exists():
            replace_file(path, (json.dumps(measure(folder, methods)) + "\n").encode())
    for line in summary(stored(name)):
        print(line)


def stored(name: str, complete: bool = False) -> list[dict[str, Any]]:
    """What was found; if only what is `complete` counts, of worlds that every learner was measured on."""
    records = [json.loads(path.read_text()) for path in sorted((STORED / name).glob("*.json"))]
    seeds = [record["about"]["seed"] for record in records]
    return [r for r in records if not complete or seeds.count(r["about"]["seed"]) == len(LEARNERS)]


# tables -----------------------------------------------------------------------------------------------------------


def of_learner(records: Sequence[dict[str, Any]], learner: str) -> list[dict[str, Any]]:
    return [record for record in records if record["about"]["learner"] == learner]


def mean(records: Sequence[dict[str, Any]], name: str, key: str) -> float:
    """Over tasks, then runs."""
    return float(np.mean([np.mean([row[key] for row in record["scores"][name]]) for record in records]))


def each_learner(records: Sequence[dict[str, Any]], value: Callable[[list[dict[str, Any]]], float]) -> list[float]:
    """A number for every learner that has runs, and the mean of these first."""
    own = [value(of_learner(records, learner)) for learner in learners(records)]
    return [float(np.mean(own)), *own]


def learners(records: Sequence[dict[str, Any]]) -> list[str]:
    return [learner for learner in LEARNERS if of_learner(records, learner)]


def ratio_errors(records: Sequence[dict[str, Any]], name: str, which: int) -> list[float]:
    """(estimate - oracle) / claimed error, of log T (0) or b (1)."""
    return [
        (state["belief"][name][2 * which] - state["oracle"][which]) / state["belief"][name][2 * which + 1]
        for record in records
        for state in record["states"]
        if "belief" in state
    ]


def rms(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def summary(records: Sequence[dict[str, Any]], short: bool = False) -> list[str]:
    """The tables, in Markdown; methods and metrics that some record does not have are left out.

    Those of a page are `short`.
    """
    if not records:
        return ["(none yet)"]
    names, known = learners(records), set.intersection(*(set(record["scores"]) for record in records))
    measured = set.intersection(*(set(record["scores"]["Vanilla"][0]) for record in records))
    reserved = all(record["about"]["reserve"] for record in records)
    head = "| method | all | " + " | ".join(name.upper() for name in names) + " |"
    rule, lines = "|" + "---|" * (len(names) + 2), list[str]()

    def table(title: str, methods: Iterable[str], form: str, key: str) -> None:
        if key not in measured:
            return
        lines.extend([f"**{title}**", "", head, rule])
        for method in methods:
            if method in known:
                cells = each_learner(records, lambda r: mean(r, method, key))  # noqa: B023
                lines.append(f"| {method} | " + " | ".join(form.format(cell) for cell in cells) + " |")
        lines.append("")

    families = {name: family for name, (family, _) in METHODS.items()}
    if not reserved:
        families = {name: family for name, family in families.items() if "PACT-R" not in name and family != "reserve"}
    shown = [name for name, family in families.items() if "ablation" not in family]
    chosen = [name for name in shown if "too" not in name]
    moving = ["Vanilla", "BiC layer and T", "BCTS", "vector scaling", *(name for name in shown if "too" in name)]
    ablation = [name for name in families if name in OURS[1:] or "ablation" in families[name]]
    if short:
        lines.extend(["**Pooled ECE / ECE by predicted group, %**", "", head, rule])
        for method in (name for name in chosen if name in known):
            pooled = each_learner(records, lambda r: mean(r, method, "pooled"))  # noqa: B023
            group = each_learner(records, lambda r: mean(r, method, "group"))  # noqa: B023
            cells = " | ".join(f"{p:.2f} / {g:.2f}" for p, g in zip(pooled, group, strict=True))
            lines.append(f"| {method} | {cells} |")
        return lines
    table("Pooled ECE, %", shown, "{:.2f}", "pooled")
    table("ECE by predicted group, %", chosen, "{:.2f}", "group")
    table("Smooth ECE, %", chosen, "{:.2f}", "smooth")
    table("Debiased ECE, %", chosen, "{:.2f}", "debiased")
    table("NLL", shown, "{:.3f}", "nll")
    table("Brier score", chosen, "{:.4f}", "brier")
    table("AURC, %", chosen, "{:.2f}", "aurc")
    table("Accuracy, %", moving, "{:.2f}", "accuracy")
    table("Ablation: by group, %", ablation, "{:.2f}", "group")
    table("Ablation: pooled ECE, %", ablation, "{:.2f}", "pooled")
    ours = [name for name in OURS if name in known and name in families]
    lines += ["**Goals**", "", "| measure | method | all | " + " | ".join(name.upper() for name in names) + " |"]
    lines += ["|" + "---|" * (len(names) + 3)]

    def goal(title: str, form: str, value: Callable[[list[dict[str, Any]], str], float]) -> None:
        for m in ours:
            cells = each_learner(records, lambda r, m=m: value(r, m))  # type: ignore[misc]
            lines.append(f"| {title} | {m} | " + " | ".join(form.format(cell) for cell in cells) + " |")

    goal("pooled ECE less Optimal TS", "{:+.2f}", lambda r, m: mean(r, m, "pooled") - mean(r, "Optimal TS", "pooled"))
    goal(
        "by group / two oracle temperatures", "{:.2f}",
        lambda r, m: mean(r, m, "group") / mean(r, "Optimal group TS", "group"),
    )  # fmt: skip
    goal("NLL less Optimal TS", "{:+.4f}", lambda r, m: mean(r, m, "nll") - mean(r, "Optimal TS", "nll"))
    goal("RMS of error / claimed, log T", "{:.2f}", lambda r, m: rms(ratio_errors(r, m, 0)))
    goal("RMS of error / claimed, b", "{:.2f}", lambda r, m: rms(ratio_errors(r, m, 1)))
    return [
        *lines, "", *by_world(records, ours), "", *harms(records, ours), "",
        *intervals(records, known & set(families)),
    ]  # fmt: skip


def world_of(record: dict[str, Any]) -> tuple[int, str, int]:
    """What tells a world from others."""
    return record["about"]["seed"], record["about"]["dataset"], record["about"]["memory"]


def by_world(records: Sequence[dict[str, Any]], ours: Sequence[str]) -> list[str]:
    """The goals in each world, means over learners; and the range over worlds of each learner's RMS."""
    worlds = sorted({world_of(record) for record in records})
    names = {own["seed"]: world for world, own in WORLDS.items()}
    titles = [f"{names.get(seed, dataset)} (seed {seed})" for seed, dataset, _ in worlds]
    lines = ["| measure | method | " + " | ".join(titles) + " |", "|" + "---|" * (len(worlds) + 2)]
    parts = [[record for record in records if world_of(record) == world] for world in worlds]
    goals: dict[str, tuple[str, Callable[[list[dict[str, Any]], str], float]]] = {
        "pooled ECE less Optimal TS": ("{:+.2f}", lambda r, m: mean(r, m, "pooled") - mean(r, "Optimal TS", "pooled")),
        "by group / two oracle temperatures": (
            "{:.2f}", lambda r, m: mean(r, m, "group") / mean(r, "Optimal group TS", "group"),
        ),
        "NLL less Optimal TS": ("{:+.4f}", lambda r, m: mean(r, m, "nll") - mean(r, "Optimal TS", "nll")),
        "RMS of error / claimed, log T": ("{:.2f}", lambda r, m: rms(ratio_errors(r, m, 0))),
        "RMS of error / claimed, b": ("{:.2f}", lambda r, m: rms(ratio_errors(r, m, 1))),
    }  # fmt: skip
    for title, (form, value) in goals.items():
        for m in ours:
            cells = [form.format(each_learner(part, lambda r, m=m, v=value: v(r, m))[0]) for part in parts]  # type: ignore[misc]
            lines.append(f"| {title} | {m} | {' | '.join(cells)} |")
    if len(worlds) > 1:
        for m in ours:
            for which, name in enumerate(("log T", "b")):
                own = []
                for learner in learners(records):
                    each = [rms(ratio_errors(of_learner(part, learner), m, which)) for part in parts]
                    own.append(f"{learner.upper()} {min(each):.2f} to {max(each):.2f}")
                lines.append(f"- {m}, RMS of error / claimed in {name}, range over worlds: {', '.join(own)}")
    return ["**By world**", "", *lines]


def harms(records: Sequence[dict[str, Any]], ours: Sequence[str]) -> list[str]:
    """How often a method is worse than the best of vanilla, TS and T-CIL, and whether the verdict said so."""
    lines = []
    for m in ours:
        states = [s for record in records for s in record["states"] if "harm" in s]
        large = [s["harm"][m] for s in states if s["n_test"] >= HARM_FROM]
        sure = [value for value, low, _ in large if low > 0]
        over = {bound: sum(value > bound for value in sure) for bound in (1, 3)}
        fired = [s["belief"][m][4] > NOW.most_surprise for s in states]
        harmful = [s["harm"][m][0] > 1 and s["harm"][m][1] > 0 for s in states]
        told = sum(f and h for f, h in zip(fired, harmful, strict=True))
        false = sum(f and not h for f, h in zip(fired, harmful, strict=True))
        lines.append(
            f"- {m}: harm above 1 in {over[1]} and above 3 in {over[3]} of {len(large)} tasks with {HARM_FROM:,} test"
            f" images or more (largest {max((v for v, _, _ in large), default=0):+.1f}). Over all {len(states)} tasks"
            f" {sum(harmful)} are harmful: the verdict fires in {told} of them, and in {false} of the others."
        )
        worst = sorted(
            (
                (s["harm"][m], record["about"], number)
                for record in records
                for number, s in enumerate(record["states"], start=1)
                if "harm" in s and s["n_test"] >= HARM_FROM and s["harm"][m][0] > 1 and s["harm"][m][1] > 0
            ),
            key=lambda entry: -entry[0][0],
        )
        told_of = [
            f"{about['learner'].upper()} seed {about['seed']} task {number} {value:+.1f} ({low:+.1f} to {high:+.1f})"
            for (value, low, high), about, number in worst
        ]
        lines += [f"  - {'; '.join(told_of)}"] if told_of else []
    return lines


def intervals(records: Sequence[dict[str, Any]], known: set[str]) -> list[str]:
    """Paired differences, resampled over worlds; of fewer than six worlds their range."""
    lines, worlds = [], sorted({world_of(record) for record in records})
    pairs = (
        ("PACT", "Optimal TS"), ("PACT, T by the spread", "PACT"), ("PACT-R", "Optimal TS"), ("PACT-R", "PACT"),
        ("PACT-R, T by the spread", "PACT-R"), ("PACT-R", "balanced TS"), ("PACT-R", "BCTS"),
        ("PACT, T partly by the spread", "PACT"), ("PACT-R, T partly by the spread", "PACT-R"),
        ("PACT-R, Bennett", "PACT-R"),
    )  # fmt: skip
    for ours, other in pairs:
        if not {ours, other} <= known:
            continue
        own = []
        for world in worlds:
            here = [record for record in records if world_of(record) == world]
            own.append(float(np.mean([mean([r], ours, "pooled") - mean([r], other, "pooled") for r in here])))
        if len(own) < 6:
            spread = f"[{min(own):+.2f} to {max(own):+.2f} over {len(own)} worlds]"
        else:
            draws = np.random.default_rng(0).choice(own, size=(10000, len(own))).mean(axis=1)
            spread = "({:+.2f} to {:+.2f})".format(*np.quantile(draws, [0.025, 0.975]))
        lines.append(f"- {ours} less {other}, pooled ECE: {np.mean(own):+.2f} {spread}")
    return lines


CANDIDATES = {  # of round three, and what each is compared with
    "PACT, T by the spread": "PACT",
    "PACT, T partly by the spread": "PACT",
    "PACT-R, T by the spread": "PACT-R",
    "PACT-R, T partly by the spread": "PACT-R",
    "PACT-R, Bennett": "PACT-R",
}
WORST_LEARNER = 0.5


def candidates(records: Sequence[dict[str, Any]]) -> list[str]:
    """The protocol's test of each candidate, on the worlds of round three."""
    worlds = {"F3": 103, "F4": 104}
    parts = {name: [r for r in records if r["about"]["seed"] == seed] for name, seed in worlds.items()}
    both = [record for part in parts.values() for record in part]
    lines = [
        "| candidate | pooled, F3 | F4 | by group | harm above 1 (before) | worst learner | confirmed |",
        "|" + "---|" * 7,
    ]
    for ours, other in CANDIDATES.items():

        def less(part: Sequence[dict[str, Any]], key: str, ours: str = ours, other: str = other) -> list[float]:
            return each_learner(part, lambda r: mean(r, ours, key) - mean(r, other, key))

        pooled, group = [less(part, "pooled")[0] for part in parts.values()], less(both, "group")[0]
        harm = [harmful_large(both, name) for name in (ours, other)]
        named = zip(less(both, "pooled")[1:], learners(both), strict=True)
        worst, learner = max(named)
        passed = max(pooled) < 0 and group <= 0 and harm[0] <= harm[1] and worst <= WORST_LEARNER
        lines.append(
            f"| {ours} | {pooled[0]:+.2f} | {pooled[1]:+.2f} | {group:+.2f} | {harm[0]} ({harm[1]}) |"
            f" {learner.upper()} {worst:+.2f} | {'yes' if passed else 'no'} |"
        )
    return lines


def harmful_large(records: Sequence[dict[str, Any]], name: str) -> int:
    """Tasks with a large test set whose harm is above 1, with an interval above 0."""
    states = [s for record in records for s in record["states"] if "harm" in s and s["n_test"] >= HARM_FROM]
    return sum(s["harm"][name][0] > 1 and s["harm"][name][1] > 0 for s in states)


# constants --------------------------------------------------------------------------------------------------------

FITTED = (
    "surrogate_temperature_error", "new_class_error", "surrogate_bias_error", "surrogate_offset", "offset_drift",
    "label_shift_error", "temperature_drift", "bias_drift", "first_drift", "bias_spread",
)  # fmt: skip
_FEW_NEW = 0.3  # weight of runs with fewer than four new classes a task


def unlikelihood(records: Sequence[dict[str, Any]], constants: PACTConstants) -> float:
    """The mean negative log-density of the oracle under PACT's belief, learners and datasets counting equally."""
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for record in records:
        about = record["about"]
        few = about["classes"] / about["tasks"] < 4
        own = groups.setdefault((about["learner"], about["dataset"], few), [])
        own += list(_densities(record["states"], constants))
    weights = {key: (_FEW_NEW if key[2] else 1.0) * (2.0 if key[1] == "letters" else 1.0) for key in groups}
    return sum(weights[k] * float(np.mean(v)) for k, v in groups.items()) / sum(weights.values())


def _densities(states: Sequence[dict[str, Any]], c: PACTConstants) -> Iterable[float]:
    """Of a run's stored pieces. The new classes enter by their fit, label shift as it is at the oracle's T."""
    memo: dict[str, Any] | None = None
    none = tcil.fit_temperature([[1.0, 0.0], [0.0, 1.0], [0.4, 0.0]], [0, 1, 1])
    for state in states:
        beliefs = PACTFilter.of(memo, state.get("log_imbalance"), none, c)
        if beliefs.bias is not None and state["surrogate"]:
            t, t_error, b, b_error = state["surrogate"]
            beliefs.log_t.see(t, math.hypot(t_error, c.surrogate_temperature_error))
            beliefs.bias.see(b, math.hypot(b_error, c.surrogate_bias_error), with_offset=True)
        if state["new_classes"] and state["new_classes"][1] < 1:
            beliefs.log_t.see(state["new_classes"][0], math.hypot(state["new_classes"][1], c.new_class_error))
        if beliefs.bias is not None and state["label_shift"]:
            value, slope, error = state["label_shift"]
            wide = math.hypot(error, c.label_shift_error, slope * math.sqrt(beliefs.log_t.variance))
            beliefs.bias.see(value, wide)
        memo = beliefs.memo()
        if beliefs.bias is not None:
            believed = (beliefs.log_t.mean, beliefs.log_t.variance), (beliefs.bias.mean, beliefs.bias.variance)
            for (value, variance), truth in zip(believed, state["oracle"], strict=True):
                wide = variance + 1e-4  # the oracle's own
                yield 0.5 * (truth - value) ** 2 / wide + 0.5 * math.log(wide)


def constants() -> None:
    """The most likely constants on the development runs: those stored for docs/beyond.md, and those of this study."""
    records = [json.loads(path.read_text()) for path in sorted((ROOT / "docs/results/beyond").glob("*.json"))]
    records += stored("development")

    def at(x: np.ndarray[Any, Any]) -> PACTConstants:
        return PACTConstants(**dict(zip(FITTED, np.exp(np.clip(x, -3, 1)).tolist(), strict=True)))

    start = np.log([getattr(NOW, name) for name in FITTED])
    print(f"as they are: {unlikelihood(records, NOW):.3f}; as in 0.2: {unlikelihood(records, CONSTANTS_02):.3f}")
    found = minimize(
        lambda x: unlikelihood(records, at(x)),
        start,
        method="Powell",
        options={"maxfev": 250, "xtol": 0.05, "ftol": 1e-3},
    )
    print(f"the most likely, over {len(records)} runs: {found.fun:.3f}")
    for name in FITTED:
        print(f"{name} = {getattr(at(found.x), name):.3f}    (now {getattr(NOW, name)})")


# commands ---------------------------------------------------------------------------------------------------------


def final(out: Path) -> None:
    """The final worlds that have no record yet, as far as every learner is trained, by the protocol's order."""
    folders = list[Path]()
    for world in FINAL:
        own = [out / final_settings(world, learner).name for learner in LEARNERS]
        kept = [folder for folder in own if (STORED / "final" / f"{folder.name}.json").exists()]
        done = [folder for folder in own if RunFolder(folder).read_results() is not None]
        print(f"{world}: {len(done)} of {len(own)} runs are trained, {len(kept)} measured before")
        if len(done) == len(own):
            folders += done
    store("final", folders)


def cost(out: Path) -> None:
    """The accuracy of F1 with and without a reserve, of the learners for which both were trained."""
    lines = list[str]()
    for learner in LEARNERS:
        pair = [RunFolder(out / final_settings("F1", learner, r).name).read_results() for r in (0, RESERVED)]
        if all(result is not None for result in pair):
            values = [
                100 * float(np.mean([task.calibrators["vanilla"].accuracy for task in result.tasks]))  # type: ignore[union-attr, arg-type]
                for result in pair
            ]
            lines.append(
                f"- {learner.upper()}: accuracy {values[0]:.2f} % without a reserve, {values[1]:.2f} % with it"
            )
    print("\n".join(lines))


def sections() -> dict[str, list[str]]:
    """The tables of docs/pact.md, by name."""
    from research import pact_sizes

    found = {name: summary(stored(name, complete=name == "final"), short=True) for name in ("final", "cifar100")}
    return {**found, "sizes": pact_sizes.table(pact_sizes.stored())}


def page() -> None:
    """Write the tables of docs/pact.md from what is kept."""
    path = ROOT / "docs/pact.md"
    text = path.read_text()
    for name, lines in sections().items():
        start, end = f"<!-- tables: {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    replace_file(path, text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("final", "cost", "sizes"):
        commands.add_parser(name).add_argument("out", type=Path)
    trained = commands.add_parser("train")
    trained.add_argument("out", type=Path)
    trained.add_argument("worlds", nargs="*", choices=[*WORLDS, []], metavar="WORLD")
    for name in ("develop", "cifar"):
        commands.add_parser(name).add_argument("runs", type=Path, nargs="+")
    kept = sorted(path.name for path in STORED.iterdir() if path.is_dir())
    tables = commands.add_parser("tables")
    tables.add_argument("name", choices=kept)
    tables.add_argument("worlds", nargs="*", choices=[*WORLDS, []], metavar="WORLD")
    commands.add_parser("constants")
    commands.add_parser("candidates")
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "train":
        train(given.out, given.worlds or FINAL)
    elif given.command == "final":
        final(given.out)
    elif given.command == "cost":
        cost(given.out)
    elif given.command == "sizes":
        from research import pact_sizes

        pact_sizes.run(given.out)
    elif given.command == "develop":
        store("development-two", given.runs)
    elif given.command == "cifar":
        store("cifar100", given.runs)
    elif given.command == "tables":
        seeds = {WORLDS[world]["seed"] for world in given.worlds or WORLDS}
        records = stored(given.name)
        chosen = [record for record in records if not given.worlds or record["about"]["seed"] in seeds]
        print("\n".join(summary(chosen)))
    elif given.command == "candidates":
        print("\n".join(candidates(stored("final"))))
    elif given.command == "constants":
        constants()
    else:
        page()


if __name__ == "__main__":
    main()
