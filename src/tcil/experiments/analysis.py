"""What the paper's figures and claims need beyond the tables, from finished runs and their networks.

Stored as RUN/analysis.json, so that figures can be drawn again without the networks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tcil
from tcil.calibration.classifier import Classifier
from tcil.calibration.perturbation import ClassMeans, DirectionPolicy, TargetChooser, search_magnitude
from tcil.calibration.temperature import TemperatureFit, solve_temperature
from tcil.experiments import stopping
from tcil.experiments.calibration import FinishedTask
from tcil.experiments.run import Listener, Progress, Run

BATCH = 200
CURVE_POINTS = 25
FORMAT = 2  # of what is stored; one more whenever it changes, so that it is computed anew
SHARES, REPEATS = (0.25, 0.5, 0.75, 1.0), 3  # of the memory, and how often a fit with each is timed
STEPS, FITS = 1 + len(DirectionPolicy), len(SHARES) * REPEATS  # what progress counts: of every task, and at the end


def analyse(run: Run, listener: Listener) -> dict[str, Any]:
    """All of it, task by task; found again where it is stored, and stopped at any moment, it goes on with that task."""
    with run.store.held():
        results = [_results(run, task.index) for task in run.stream]
        record: dict[str, Any] | None = run.store.read_json("analysis.json")
        if record is None or not is_current(record, results):
            with run.threads():
                record = _analysed(run, results, listener)
            run.store.write_json("analysis.json", record)
        for task in run.stream:
            run.store.remove(_part(run, task.index))
    return record


def is_current(analysis: dict[str, Any] | None, results: Sequence[dict[str, Any]]) -> bool:
    """Whether an analysis is as this version makes it, and of these results of the tasks."""
    return (
        analysis is not None
        and analysis.get("format") == FORMAT
        and [part["magnitude"] for part in analysis["tasks"]] == [_magnitude(task) for task in results]
    )


def _analysed(run: Run, results: Sequence[dict[str, Any]], listener: Listener) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for task, memory, learner in run.walk():
        last = task.index == len(run.stream) - 1
        total = STEPS + (FITS if last else 0)

        def tell(done: int, index: int = task.index, total: int = total) -> None:
            listener(Progress(index, len(run.stream), "analyse", done, total))
            stopping.check()

        finished = run.finished(task, memory, learner, {})
        part = run.store.read_json(_part(run, task.index))
        if part is None or not is_current({"format": part.get("format"), "tasks": [part]}, [results[task.index]]):
            part = {"format": FORMAT, **analyse_task(finished, _magnitude(results[task.index]), tell)}
            run.store.write_json(_part(run, task.index), part)
        parts.append(part)
        if last:
            cost = memory_cost(finished, lambda fits: tell(STEPS + fits))
            shown = projection(finished, part["magnitude"])
        tell(total)
    tasks = [{key: value for key, value in part.items() if key != "format"} for part in parts]
    return {"format": FORMAT, "tasks": tasks, "cost": cost, "projection": shown}


def _part(run: Run, task: int) -> str:
    """Where a task's part is until all are done."""
    return f"{run.store.task(task).name}/analysis.json"


def _results(run: Run, task: int) -> dict[str, Any]:
    return run.store.read_json(f"{run.store.task(task).name}/results.json") or {"calibrators": {}}


def _magnitude(results: dict[str, Any]) -> float | None:
    """What T-CIL found after a task; None where it was not fitted."""
    found: float | None = (results["calibrators"].get("t-cil", {}).get("result") or {}).get("magnitude")
    return found


def analyse_task(
    task: FinishedTask, magnitude: float | None, tell: Callable[[int], None] = lambda _done: None
) -> dict[str, Any]:
    """Accuracy of old and new classes, errors of perturbed exemplars, optimal magnitudes by policy, T by magnitude.

    `magnitude` is what T-CIL found; `tell` is called before each step with the number of those done.
    """
    right = (task.test_logits.argmax(1) == task.test_columns).double()
    new_test = task.test_columns >= task.new_columns.start
    record: dict[str, Any] = {
        "task": task.index,
        "magnitude": magnitude,
        "accuracy": {"old": _mean(right[~new_test]), "new": _mean(right[new_test])},
    }
    tell(0)
    exemplars = Exemplars(task)
    paper = Perturbed(exemplars, DirectionPolicy.PAPER)
    if magnitude is not None:
        wrong = (paper.logits(magnitude).argmax(1) != exemplars.columns).double()
        record["misprediction"] = {"old": _mean(wrong[~exemplars.is_new]), "new": _mean(wrong[exemplars.is_new])}
        points = [4 * magnitude * i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)] if magnitude else [0.0]
        temperatures = [paper.temperature(point, new_only=True).limit for point in points]
        record["curve"] = {"magnitudes": points, "temperatures": [_finite(t) for t in temperatures]}
    record["epsilon"] = {}
    for done, policy in enumerate(DirectionPolicy, start=1):
        tell(done)
        perturbed = paper if policy is DirectionPolicy.PAPER else Perturbed(exemplars, policy)
        record["epsilon"][str(policy)] = epsilon_gap(task, perturbed, new_test)
    return record


class Exemplars:
    """A finished task's exemplars with their logits, features and class means, from one pass for all policies."""

    def __init__(self, task: FinishedTask) -> None:
        assert task.model is not None
        assert task.memory is not None
        self.model, (self.images, self.columns) = task.model, task.memory
        self.seen, self.new_from = len(task.seen), task.new_columns.start
        self.is_new = self.columns >= self.new_from
        means, all_logits, all_features = ClassMeans(), [], []
        with Classifier(self.model) as classifier, torch.no_grad():
            for images, columns in self.batches():
                logits, features = classifier.logits_and_features(classifier.place(images))
                all_logits.append(self.pick(logits).cpu())
                all_features.append(features.cpu())
                means.add(features, columns)
        self.logits, self.features, self.means = torch.cat(all_logits), torch.cat(all_features), means.means()

    def pick(self, logits: Tensor) -> Tensor:
        """The columns of the classes seen so far."""
        return logits[:, : self.seen]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Images and columns, as many at once as a pass takes."""
        return list(zip(self.images.split(BATCH), self.columns.split(BATCH), strict=True))


class Perturbed:
    """Exemplars pushed any distance in the directions of a policy, which are found once; so are logits of all of them.

    Both searches of `epsilon_gap` halve the same bracket: what the first has tried of all exemplars serves the second,
    of the new ones among them.
    """

    def __init__(self, exemplars: Exemplars, policy: DirectionPolicy) -> None:
        self.exemplars = exemplars
        self._known = {0.0: exemplars.logits}
        choose = TargetChooser(policy, exemplars.means, torch.arange(exemplars.seen) >= exemplars.new_from, seed=0)
        with Classifier(exemplars.model) as classifier:
            self.steps = torch.cat(
                [
                    -classifier.input_gradient(images, lambda f, m, c=columns: choose(f, c, m), exemplars.pick).sign()  # type: ignore[misc]
                    for images, columns in exemplars.batches()
                ]
            )

    def logits(self, magnitude: float, *, new_only: bool = False) -> Tensor:
        """Logits of the exemplars (or of the new ones) pushed so far."""
        exemplars = self.exemplars
        rows = exemplars.is_new.nonzero().squeeze(1) if new_only else torch.arange(len(exemplars.images))
        if magnitude in self._known:
            return self._known[magnitude][rows]
        with Classifier(exemplars.model) as classifier, torch.no_grad():
            parts = [
                exemplars.pick(
                    classifier.logits(classifier.place(exemplars.images[some] + magnitude * self.steps[some]))
                ).cpu()
                for some in rows.split(BATCH)
            ]
        logits = torch.cat(parts)
        if len(rows) == len(exemplars.images):
            self._known[magnitude] = logits
        return logits

    def moved_features(self, magnitude: float) -> Tensor:
        """Features of the exemplars pushed so far."""
        moved = (self.exemplars.images + magnitude * self.steps).split(BATCH)
        with Classifier(self.exemplars.model) as classifier, torch.no_grad():
            return torch.cat([classifier.logits_and_features(classifier.place(images))[1].cpu() for images in moved])

    def temperature(self, magnitude: float, *, new_only: bool) -> TemperatureFit:
        """The temperature of the exemplars (or the new ones) pushed so far: 0 and infinity are possible."""
        columns = self.exemplars.columns
        return solve_temperature(
            self.logits(magnitude, new_only=new_only), columns[self.exemplars.is_new] if new_only else columns
        )

    def matching(self, target: float, *, new_only: bool) -> float | None:
        """The magnitude at which the temperature meets the target; None where none does."""
        found = search_magnitude(
            lambda magnitude: self.temperature(magnitude, new_only=new_only),
            self.temperature(0.0, new_only=new_only),
            target,
            tolerance=1e-3,
            input_scale=1.0,
        )
        return found.magnitude if found.reachable else None


def epsilon_gap(task: FinishedTask, perturbed: Perturbed, new_test: Tensor) -> dict[str, float | None]:
    """The paper's Delta-eps*: how far apart the magnitudes for all classes and for the new ones are.

    All exemplars are matched to the temperature of the whole test set, the new ones to that of its new classes.
    """
    whole = solve_temperature(task.test_logits, task.test_columns).limit
    new = solve_temperature(task.test_logits[new_test], task.test_columns[new_test]).limit
    for_all, for_new = perturbed.matching(whole, new_only=False), perturbed.matching(new, new_only=True)
    gap = None if for_all is None or for_new is None else abs(for_all - for_new)
    return {"all": for_all, "new": for_new, "gap": gap}


def memory_cost(task: FinishedTask, tell: Callable[[int], None] = lambda _done: None) -> dict[str, list[float]]:
    """Seconds of a T-CIL fit with a quarter, half, three quarters and all of the memory (each the best of three).

    `tell` is called before each fit with the number of those done.
    """
    assert task.memory is not None
    assert task.model is not None
    images, columns = task.memory
    sizes, seconds = [], []
    for place, share in enumerate(SHARES):
        count = max(1, round(share * int((columns == columns[0]).sum())))
        rows = torch.cat([(columns == c).nonzero().squeeze(1)[:count] for c in task.seen])
        times = []
        for again in range(REPEATS):
            tell(place * REPEATS + again)
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
    exemplars = Exemplars(task)
    perturbed = Perturbed(exemplars, DirectionPolicy.PAPER)
    clean = exemplars.features.double()
    centre = clean.mean(0)
    axes = torch.linalg.svd(clean - centre, full_matrices=False)[2][:2].T
    axes = axes * torch.where(axes.sum(0) < 0, -1.0, 1.0)  # of both directions of an axis, always the same
    before = (clean - centre) @ axes
    after = (perturbed.moved_features(magnitude).double() - centre) @ axes
    return {
        "columns": exemplars.columns.tolist(),
        "new_from": exemplars.new_from,
        "before": [[round(v, 4) for v in row] for row in before.tolist()],
        "after": [[round(v, 4) for v in row] for row in after.tolist()],
    }


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
