"""What the paper's figures and claims need beyond the tables, from finished runs and their networks.

Stored as RUN/analysis.json, so that figures can be drawn again without the networks.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor

import tcil
from tcil.calibration.classifier import Classifier
from tcil.calibration.perturbation import ClassMeans, DirectionPolicy, TargetChooser, search_magnitude
from tcil.calibration.temperature import solve_temperature
from tcil.experiments.calibration import FinishedTask
from tcil.experiments.run import Run

BATCH = 200
CURVE_POINTS = 25


def analyse(run: Run) -> dict[str, Any]:
    """All of it, task by task; found again where it is stored."""
    stored: dict[str, Any] | None = run.store.read_json("analysis.json")
    if stored is not None:
        return stored
    with run.store.held():
        with run.threads():
            record = _analysed(run)
        run.store.write_json("analysis.json", record)
    return record


def _analysed(run: Run) -> dict[str, Any]:
    tasks = []
    for task, memory, learner in run.walk():
        results = run.store.read_json(f"{run.store.task(task.index).name}/results.json") or {"calibrators": {}}
        finished = run.finished(task, memory, learner, {})
        tasks.append(analyse_task(finished, results["calibrators"].get("t-cil", {})))
    return {"tasks": tasks, "cost": memory_cost(finished), "projection": projection(finished, tasks[-1]["magnitude"])}


def analyse_task(task: FinishedTask, row: dict[str, Any]) -> dict[str, Any]:
    """Accuracy of old and new classes, errors of perturbed exemplars, optimal magnitudes by policy, T by magnitude."""
    result = row.get("result") or {}
    magnitude = result.get("magnitude")
    right = (task.test_logits.argmax(1) == task.test_columns).double()
    new_test = task.test_columns >= task.new_columns.start
    record: dict[str, Any] = {
        "task": task.index,
        "magnitude": magnitude,
        "accuracy": {"old": _mean(right[~new_test]), "new": _mean(right[new_test])},
    }
    pushed = Perturbed(task, DirectionPolicy.PAPER)
    if magnitude is not None:
        wrong = (pushed.logits(magnitude).argmax(1) != pushed.columns).double()
        record["misprediction"] = {"old": _mean(wrong[~pushed.is_new]), "new": _mean(wrong[pushed.is_new])}
        points = [4 * magnitude * i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)] if magnitude else [0.0]
        temperatures = [pushed.temperature(point, new_only=True) for point in points]
        record["curve"] = {"magnitudes": points, "temperatures": [_finite(t) for t in temperatures]}
    record["epsilon"] = {str(policy): epsilon_gap(task, policy, new_test) for policy in DirectionPolicy}
    return record


class Perturbed:
    """Exemplars of a finished task, pushed any distance in the directions of a policy, which are found once."""

    def __init__(self, task: FinishedTask, policy: DirectionPolicy) -> None:
        assert task.model is not None
        assert task.memory is not None
        self.model, (self.images, self.columns) = task.model, task.memory
        self.seen = len(task.seen)
        self.is_new = self.columns >= task.new_columns.start
        with Classifier(self.model) as classifier:
            means, features = ClassMeans(), []
            with torch.no_grad():
                for images, columns in self._batches():
                    features.append(classifier.logits_and_features(classifier.place(images))[1])
                    means.add(features[-1], columns)
            self.features = torch.cat(features)
            is_new = torch.arange(self.seen) >= task.new_columns.start
            choose = TargetChooser(policy, means.means(), is_new, seed=0)
            self.steps = torch.cat(
                [
                    -classifier.input_gradient(images, lambda f, c=columns: choose(f, c), self._pick).sign()  # type: ignore[misc]
                    for images, columns in self._batches()
                ]
            )

    def _pick(self, logits: Tensor) -> Tensor:
        return logits[:, : self.seen]

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.images.split(BATCH), self.columns.split(BATCH), strict=True))

    def logits(self, magnitude: float, rows: Tensor | None = None) -> Tensor:
        """Logits of the exemplars (or of some rows) pushed so far."""
        rows = torch.arange(len(self.images)) if rows is None else rows
        with Classifier(self.model) as classifier, torch.no_grad():
            parts = [
                self._pick(classifier.logits(classifier.place(self.images[some] + magnitude * self.steps[some]))).cpu()
                for some in rows.split(BATCH)
            ]
        return torch.cat(parts)

    def moved_features(self, magnitude: float) -> Tensor:
        """Features of the exemplars pushed so far."""
        moved = (self.images + magnitude * self.steps).split(BATCH)
        with Classifier(self.model) as classifier, torch.no_grad():
            return torch.cat([classifier.logits_and_features(classifier.place(images))[1] for images in moved])

    def temperature(self, magnitude: float, *, new_only: bool) -> float:
        """The temperature of the exemplars (or the new ones) pushed so far: 0 and infinity are possible."""
        rows = self.is_new.nonzero().squeeze(1) if new_only else torch.arange(len(self.images))
        return solve_temperature(self.logits(magnitude, rows), self.columns[rows]).limit

    def matching(self, target: float, *, new_only: bool) -> float | None:
        """The magnitude at which the temperature meets the target; None where none does."""
        rows = self.is_new.nonzero().squeeze(1) if new_only else torch.arange(len(self.images))
        columns = self.columns[rows]
        found = search_magnitude(
            lambda magnitude: solve_temperature(self.logits(magnitude, rows), columns),
            solve_temperature(self.logits(0.0, rows), columns),
            target,
            tolerance=1e-3,
            input_scale=1.0,
        )
        return found.magnitude if found.reachable else None


def epsilon_gap(task: FinishedTask, policy: DirectionPolicy, new_test: Tensor) -> dict[str, float | None]:
    """The paper's Delta-eps*: how far apart the magnitudes for all classes and for the new ones are.

    All exemplars are matched to the temperature of the whole test set, the new ones to that of its new classes.
    """
    pushed = Perturbed(task, policy)
    whole = solve_temperature(task.test_logits, task.test_columns).limit
    new = solve_temperature(task.test_logits[new_test], task.test_columns[new_test]).limit
    both, own = pushed.matching(whole, new_only=False), pushed.matching(new, new_only=True)
    return {"all": both, "new": own, "gap": None if both is None or own is None else abs(both - own)}


def memory_cost(task: FinishedTask) -> dict[str, list[float]]:
    """Seconds of a T-CIL fit with a quarter, half, three quarters and all of the memory (each the best of three)."""
    assert task.memory is not None
    assert task.model is not None
    images, columns = task.memory
    sizes, seconds = [], []
    for share in (0.25, 0.5, 0.75, 1.0):
        count = max(1, round(share * int((columns == columns[0]).sum())))
        rows = torch.cat([(columns == c).nonzero().squeeze(1)[:count] for c in task.seen])
        times = []
        for _ in range(3):
            started = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", tcil.CalibrationWarning)
                tcil.TCIL().fit(
                    task.model, (images[rows], columns[rows]), task.valid, task.new_columns, classes=task.seen
                )
            times.append(time.perf_counter() - started)
        sizes.append(float(len(rows)))
        seconds.append(min(times))
    return {"memory": sizes, "seconds": seconds}


def projection(task: FinishedTask, magnitude: float | None) -> dict[str, Any] | None:
    """Features of the exemplars before and after the push, on the two main axes of the clean ones."""
    if magnitude is None:
        return None
    pushed = Perturbed(task, DirectionPolicy.PAPER)
    clean = pushed.features.double()
    centre = clean.mean(0)
    axes = torch.pca_lowrank(clean - centre, q=2, niter=8)[2]
    before = (clean - centre) @ axes
    after = (pushed.moved_features(magnitude).double() - centre) @ axes
    return {
        "columns": pushed.columns.tolist(),
        "new_from": task.new_columns.start,
        "before": [[round(v, 4) for v in row] for row in before.tolist()],
        "after": [[round(v, 4) for v in row] for row in after.tolist()],
    }


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
