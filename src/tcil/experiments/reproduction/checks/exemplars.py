"""Claims about exemplars and the new task's data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy import stats

from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.checks.answers import Answer, check
from tcil.experiments.reproduction.checks.studies import (
    BOTH,
    analyses_of,
    average,
    n_seeds,
    studies_run,
    values_by_task,
)
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import Edition
from tcil.experiments.runs.analysed import Analysis, OldAndNew
from tcil.experiments.runs.catalogue import learner_title
from tcil.experiments.runs.results import CalibratorRow
from tcil.experiments.runs.store import task_name
from tcil.foundation.options import Verdict


@check("temperature_gap_grows", "rank correlation of gap and task at least 0.9 on every dataset")
def _temperature_gap(finished: FinishedRuns, edition: Edition) -> Answer | None:
    studies = studies_run(finished, edition, BOTH, ("er",))
    if not studies:
        return None
    shown, holds = [], True
    for (dataset, _), study in studies.items():
        gaps = values_by_task(study, "optimal-ts", "temperature") - values_by_task(study, "ts", "temperature")
        rank = float(stats.spearmanr(np.arange(len(gaps)), gaps).statistic)
        shown.append(f"{paper.DATASETS[dataset]}: {', '.join(f'{gap:.2f}' for gap in gaps)} (rank {rank:.2f})")
        holds = holds and rank >= 0.9
    return Answer(
        f"optimal T less TS's T by task; {'; '.join(shown)}", holds, n_seeds(list(studies.values())), len(studies) == 2
    )


@check("exemplars_are_memorised", "above 95 % with both")
def _memorised_exemplars(finished: FinishedRuns, edition: Edition) -> Answer | None:
    studies = studies_run(finished, edition, ("cifar100",), ("er", "der"))
    accuracies = {
        learner: 100 * float(np.mean([m.accuracy for run in study.runs if (m := run.tasks[-1].memory) and m.count]))
        for (_, learner), study in studies.items()
    }
    if not accuracies:
        return None
    shown = ", ".join(f"{learner_title(learner)} {value:.1f} %" for learner, value in accuracies.items())
    return Answer(
        f"after the last task: {shown}",
        min(accuracies.values()) > 95,
        n_seeds(list(studies.values())),
        len(accuracies) == 2,
    )


@check("exemplars_make_temperature_low", "below half of the optimal one with every seed")
def _exemplar_temperature(finished: FinishedRuns, edition: Edition) -> Answer | None:
    study = finished.study(edition, "cifar100", "er")
    if study is None:
        return None
    limits = [_limit(run.row(-1, "exemplar-ts")) for run in study.runs]
    reached = [limit for limit in limits if limit is not None]
    optimal = average(run.values("optimal-ts", "temperature")[-1] for run in study.runs)
    if not reached or optimal is None:
        return None
    zero = sum(limit == 0 for limit in reached)
    shown = (
        f"T = {np.mean(reached):.2f} (0 where all are right: {zero} of {len(reached)} seeds), the optimal {optimal:.2f}"
    )
    return Answer(shown, max(reached) < 0.5 * optimal, len(reached))


def _limit(row: CalibratorRow | None) -> float | None:
    """The limit of the temperature: 0 if all exemplars are correct, although 1 is then used."""
    if row is None:
        return None
    return 0.0 if Verdict.ALL_CORRECT in row.verdicts else row.temperature


@check("new_task_is_more_accurate", "the new task above the mean of the old ones with both")
def _new_is_better(finished: FinishedRuns, edition: Edition) -> Answer | None:
    studies = studies_run(finished, edition, ("cifar100",), ("er", "der"))
    accuracies = []
    for (_, learner), study in studies.items():
        rows = [run.row(-1, "vanilla") for run in study.runs]
        by_seed = [row.by_task.accuracy for row in rows if row is not None and row.by_task is not None]
        by_task = np.mean(np.array(by_seed, dtype=float), axis=0)
        accuracies.append((learner, 100 * by_task[:-1].mean(), 100 * by_task[-1]))
    shown = "; ".join(f"{learner_title(learner)} old {old:.1f} %, new {new:.1f} %" for learner, old, new in accuracies)
    holds = all(new > old for _, old, new in accuracies)
    return Answer(shown, holds, n_seeds(list(studies.values())), len(accuracies) == 2) if accuracies else None


def _gaps(by_seed: Sequence[Sequence[OldAndNew | None]]) -> tuple[float, float] | None:
    """The difference between new and old classes in points, averaged over seeds, after the middle and the last task."""
    if not by_seed:
        return None
    n = len(by_seed[0])
    middle, last = (average(_gap(tasks[index]) for tasks in by_seed) for index in ((n - 1) // 2, n - 1))
    return (middle, last) if middle is not None and last is not None else None


def _gap(shares: OldAndNew | None) -> float | None:
    return None if shares is None or shares.old is None else 100 * (shares.new - shares.old)


def _accuracy_gaps(analyses: Sequence[Analysis]) -> tuple[float, float] | None:
    return _gaps([[task.accuracy for task in one.tasks] for one in analyses])


@check("old_new_accuracy_gap", "it grows from the middle task to the last")
def _accuracy_gap(finished: FinishedRuns, edition: Edition) -> Answer | None:
    analyses = analyses_of(finished, edition)
    gaps = _accuracy_gaps(analyses)
    if gaps is None:
        return None
    shown = f"{gaps[0]:.1f} points after the middle task, {gaps[1]:.1f} after the last"
    return Answer(shown, gaps[1] > gaps[0], len(analyses))


@check("misprediction_gap", "it grows, and by a factor within twice or half of the accuracy gap's")
def _misprediction_gap(finished: FinishedRuns, edition: Edition) -> Answer | None:
    analyses = analyses_of(finished, edition)
    new_above_old, accuracy = _gaps([[t.misprediction for t in a.tasks] for a in analyses]), _accuracy_gaps(analyses)
    if new_above_old is None or accuracy is None:
        return None
    middle, last = (-gap for gap in new_above_old)  # old classes are mispredicted more often
    ours, theirs = last / middle, accuracy[1] / accuracy[0]
    shown = f"{middle:.1f} points after the middle task, {last:.1f} after the last: times {ours:.2f}"
    holds = last > middle and 0.5 <= ours / theirs <= 2
    return Answer(f"{shown} (accuracy gap times {theirs:.2f})", holds, len(analyses))


@check("magnitude_raises_temperature", "T rises throughout, after every task, up to four times T-CIL's magnitude")
def _monotone(finished: FinishedRuns, edition: Edition) -> Answer | None:
    analyses = analyses_of(finished, edition)
    curves = [
        [np.inf if temperature is None else temperature for temperature in task.curve.temperatures]
        for one in analyses
        for task in one.tasks
        if task.curve is not None
    ]
    if not curves:
        return None
    rising = sum(all(after >= before - 1e-9 for before, after in pairwise(curve)) for curve in curves)
    return Answer(f"T rises throughout in {rising} of {len(curves)} cases", rising == len(curves), len(analyses))


@check("complexity", "time grows as the memory to a power of at most 1.2, and is below 5 % of training")
def _cost(finished: FinishedRuns, edition: Edition) -> Answer | None:
    study = finished.study(edition, "cifar100", "er")
    if study is None:
        return None
    last = task_name(study.n_tasks - 1)
    analysed = [(run.analysis.cost, run.environment) for run in study.runs if run.analysis is not None]
    training = [environment.seconds.get(last, {}).get("training") for _, environment in analysed]
    costs = [cost for cost, _ in analysed]
    if not costs or None in training:
        return None
    seconds = np.mean([cost.seconds for cost in costs], axis=0)
    power = float(np.polyfit(np.log(costs[0].memory), np.log(seconds), 1)[0])
    share = 100 * float(seconds[-1] / np.mean([one for one in training if one is not None]))
    shown = f"T-CIL's time grows as the memory to the power {power:.2f}; {share:.2f} % of training"
    return Answer(shown, power <= 1.2 and share < 5, len(costs))
