"""What the paper's figures and claims need beyond the tables, from finished runs and their networks.

Stored as RUN/analysis.json, so that figures can be drawn again without the networks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

import tcil
from tcil.calibration.exemplars import Exemplars, open_exemplars
from tcil.calibration.perturbation import DirectionPolicy, search_magnitude
from tcil.calibration.perturbed_exemplars import PerturbedExemplars
from tcil.calibration.temperature import TemperatureFit, solve_temperature
from tcil.experiments.process import stopping
from tcil.experiments.process.progress import Listener, Progress
from tcil.experiments.runs.analysed import AnalysedTask, Analysis, Cost, Curve, MagnitudeGap, OldAndNew, Projection
from tcil.experiments.runs.entries import FinishedTask
from tcil.experiments.runs.results import TaskResult
from tcil.experiments.runs.run import Run

CURVE_POINTS = 25
FORMAT = 2  # of what is stored; one more whenever it changes, so that it is computed anew
SHARES, REPEATS = (0.25, 0.5, 0.75, 1.0), 3  # of the memory, and how often a fit with each is timed
STEPS, FITS = 1 + len(DirectionPolicy), len(SHARES) * REPEATS  # what progress counts: of every task, and at the end


def analyse(run: Run, listener: Listener) -> Analysis:
    """The analysis of all tasks. Finished tasks are read from their files, so an interrupted analysis resumes there."""
    with run.store.held():
        results = [run.store.read_task_result(task.index) for task in run.stream]
        analysis = run.store.read_analysis()
        if analysis is None or not is_current(analysis, results):
            with run.threads():
                analysis = _analysed(run, results, listener)
            run.store.write_analysis(analysis)
        for task in run.stream:
            run.store.remove_analysed_task(task.index)
    return analysis


def is_current(analysis: Analysis | None, results: Sequence[TaskResult | None]) -> bool:
    """Whether an analysis is as this version makes it, and of these results of the tasks."""
    return (
        analysis is not None
        and analysis.format == FORMAT
        and [part.magnitude for part in analysis.tasks] == [_magnitude(task) for task in results]
    )


def _analysed(run: Run, results: Sequence[TaskResult | None], listener: Listener) -> Analysis:
    parts: list[AnalysedTask] = []
    for task, memory, learner in run.walk():
        last = task.index == len(run.stream) - 1
        total = STEPS + (FITS if last else 0)

        def tell(done: int, index: int = task.index, total: int = total) -> None:
            listener(Progress(index, len(run.stream), "analyse", done, total))
            stopping.check()

        finished = run.finished(task, memory, learner, {})
        magnitude, part = _magnitude(results[task.index]), run.store.read_analysed_task(task.index)
        if part is None or part.format != FORMAT or part.magnitude != magnitude:
            part = analyse_task(finished, magnitude, tell)
            run.store.write_analysed_task(part)
        parts.append(part)
        if last:
            cost = memory_cost(finished, lambda fits: tell(STEPS + fits))
            shown = projection(finished, magnitude)
        tell(total)
    tasks = tuple(part.without_format() for part in parts)
    return Analysis(format=FORMAT, tasks=tasks, cost=cost, projection=shown)


def _magnitude(result: TaskResult | None) -> float | None:
    """What T-CIL found after a task; None where it was not fitted."""
    row = result.calibrators.get("t-cil") if result is not None else None
    return row.result.magnitude if row is not None and row.result is not None else None


def analyse_task(
    task: FinishedTask, magnitude: float | None, tell: Callable[[int], None] = lambda _done: None
) -> AnalysedTask:
    """Accuracy of old and new classes, errors of perturbed exemplars, optimal magnitudes by policy, T by magnitude.

    `magnitude` is what T-CIL found; `tell` is called before each step with the number of those done.
    """
    right = (task.test_logits.argmax(1) == task.test_columns).double()
    new_test = task.is_new(task.test_columns)
    tell(0)
    gaps = {}
    with exemplars_of(task) as exemplars:
        paper = PerturbedExemplars(exemplars, DirectionPolicy.PAPER, keep=True)
        pushed_far = None if magnitude is None else _pushed(paper, magnitude)
        for done, policy in enumerate(DirectionPolicy, start=1):
            tell(done)
            is_paper = policy is DirectionPolicy.PAPER
            perturbed = paper if is_paper else PerturbedExemplars(exemplars, policy, keep=True)
            gaps[str(policy)] = epsilon_gap(task, perturbed, new_test)
    analysed = AnalysedTask(
        format=FORMAT, task=task.index, magnitude=magnitude, accuracy=_old_and_new(right, new_test), epsilon=gaps
    )
    return analysed if pushed_far is None else analysed.model_copy(update=pushed_far)


def _pushed(paper: PerturbedExemplars, magnitude: float) -> dict[str, OldAndNew | Curve]:
    """How exemplars fare at the magnitude that T-CIL found, and the temperature of the new ones around it."""
    wrong = (paper.logits(magnitude).argmax(1) != paper.columns).double()
    points = [4 * magnitude * i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)] if magnitude else [0.0]
    temperatures = [temperature(paper, point, new_only=True).limit for point in points]
    curve = Curve(magnitudes=tuple(points), temperatures=tuple(map(_finite, temperatures)))
    return {"misprediction": _old_and_new(wrong, torch.arange(len(wrong)) < paper.n_new), "curve": curve}


def exemplars_of(task: FinishedTask) -> AbstractContextManager[Exemplars]:
    """A finished task's exemplars as T-CIL sees them, with its batches and its folded batch norms."""
    assert task.model is not None
    return open_exemplars(task.model, task.memory, task.current, classes=task.seen)


def temperature(perturbed: PerturbedExemplars, magnitude: float, *, new_only: bool) -> TemperatureFit:
    """The temperature of the exemplars (or the new ones) pushed so far: 0 and infinity are possible."""
    logits = perturbed.logits(magnitude, new_only=new_only)
    return solve_temperature(logits, perturbed.columns[: len(logits)])


def matching(perturbed: PerturbedExemplars, target: float, *, new_only: bool) -> float | None:
    """The magnitude at which the temperature meets the target; None where none does.

    Both searches of `epsilon_gap` halve the same bracket: logits of all exemplars that the first has asked for serve
    the second, of the new ones among them.
    """
    found = search_magnitude(
        lambda magnitude: temperature(perturbed, magnitude, new_only=new_only),
        temperature(perturbed, 0.0, new_only=new_only),
        target,
        tolerance=1e-3,
        input_scale=1.0,
    )
    return found.magnitude if found.reachable else None


def epsilon_gap(task: FinishedTask, perturbed: PerturbedExemplars, new_test: Tensor) -> MagnitudeGap:
    """The paper's Delta-eps*: how far apart the magnitudes for all classes and for the new ones are.

    All exemplars are matched to the temperature of the whole test set, the new ones to that of its new classes.
    """
    whole = solve_temperature(task.test_logits, task.test_columns).limit
    new = solve_temperature(task.test_logits[new_test], task.test_columns[new_test]).limit
    for_all, for_new = matching(perturbed, whole, new_only=False), matching(perturbed, new, new_only=True)
    gap = None if for_all is None or for_new is None else abs(for_all - for_new)
    return MagnitudeGap(all=for_all, new=for_new, gap=gap)


def memory_cost(task: FinishedTask, tell: Callable[[int], None] = lambda _done: None) -> Cost:
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
                tcil.TCIL().fit(task.model, (images[rows], columns[rows]), task.valid, task.current, classes=task.seen)
            times.append(time.perf_counter() - started)
        sizes.append(float(len(rows)))
        seconds.append(min(times))
    return Cost(memory=tuple(sizes), seconds=tuple(seconds))


def projection(task: FinishedTask, magnitude: float | None) -> Projection | None:
    """Features of the exemplars before and after the push, on the two main axes of the clean ones."""
    if magnitude is None:
        return None
    with exemplars_of(task) as exemplars:
        perturbed = PerturbedExemplars(exemplars, DirectionPolicy.PAPER, keep=True)
        in_memory = perturbed.rows.argsort()
        clean, moved = (perturbed.features(m).double()[in_memory] for m in (0.0, magnitude))
    centre = clean.mean(0)
    axes = torch.linalg.svd(clean - centre, full_matrices=False)[2][:2].T
    axes = axes * torch.where(axes.sum(0) < 0, -1.0, 1.0)  # of both directions of an axis, always the same
    before = (clean - centre) @ axes
    after = (moved - centre) @ axes
    return Projection(
        columns=tuple(exemplars.columns.tolist()),
        new_from=task.new_columns.start,
        before=_points(before),
        after=_points(after),
    )


def _points(values: Tensor) -> tuple[tuple[float, float], ...]:
    return tuple((round(x, 4), round(y, 4)) for x, y in values.tolist())


def _old_and_new(values: Tensor, is_new: Tensor) -> OldAndNew:
    old = values[~is_new]
    return OldAndNew(old=float(old.mean()) if len(old) else None, new=float(values[is_new].mean()))


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
