"""Claims on T-CIL against baselines and the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tcil.experiments.reproduction import paper
from tcil.experiments.reproduction.checks.answers import Answer, Ask, check
from tcil.experiments.reproduction.checks.studies import (
    BOTH,
    EVERY,
    Pair,
    analyses_of,
    expected,
    mean_of,
    n_seeds,
    studies_run,
    values_by_task,
    where,
)
from tcil.experiments.reproduction.finished import FinishedRuns
from tcil.experiments.reproduction.schedules import LEARNERS, MAIN, Edition, Variation
from tcil.experiments.runs.analysed import POLICIES
from tcil.experiments.runs.catalogue import ALL_DATA, learner_title
from tcil.experiments.runs.results import RANKED


@check("baselines_help", "on every dataset one of TS, ETS, IRM and PerturbTS below vanilla")
def _baselines_help(finished: FinishedRuns, edition: Edition) -> Answer | None:
    shown, holds, studies = [], True, studies_run(finished, edition, EVERY, ("er",))
    for (dataset, _), study in studies.items():
        plain = expected(study, study.vanilla)
        errors = {name: value for name in paper.BASELINES if (value := mean_of(study, name)) is not None}
        baselines = ", ".join(f"{study.titles()[name].title} {value:.1f}" for name, value in errors.items())
        shown.append(f"{paper.DATASETS[dataset]}: vanilla {plain:.1f}, {baselines}")
        holds = holds and min(errors.values()) < plain
    return Answer("; ".join(shown), holds, n_seeds(list(studies.values())), len(studies) == 3) if studies else None


def _reduction(claim: str, learner: str, dataset: str, against_vanilla: bool) -> Ask:
    def ask(finished: FinishedRuns, edition: Edition) -> Answer | None:
        printed = paper.claims()[claim].reduction
        names = [ALL_DATA] if against_vanilla else list(paper.BASELINES)
        study = finished.study(edition, dataset, learner)
        study = study.having(names[0]) if study is not None else None
        if study is None:
            return None
        errors = {name: error for name in names if (error := mean_of(study, name)) is not None}
        ours, titles = expected(study, "t-cil"), study.titles()
        first = min(errors, key=lambda name: errors[name])
        reduction = 100 * (1 - ours / errors[first])
        silent = [titles[name].title for name in names if name in titles and name not in errors]
        shown = f"{reduction:.1f} % ({titles[first].title} {errors[first]:.2f}, T-CIL {ours:.2f}"
        shown += f"; {', '.join(silent)} has no answer)" if silent else ")"
        return Answer(shown, reduction >= printed, len(study.runs))

    return ask


for _claim, _of, _on, _against in (
    ("reduction_cifar100", "er", "cifar100", False),
    ("reduction_cifar10", "er", "cifar10", False),
    ("reduction_tiny", "er", "tiny-imagenet", False),
    ("reduction_der_cifar100", "der", "cifar100", True),
    ("reduction_der_tiny", "der", "tiny-imagenet", True),
):
    check(_claim, "at least as many percent")(_reduction(_claim, _of, _on, _against))


def _most(metric: str) -> Ask:
    def ask(finished: FinishedRuns, edition: Edition) -> Answer | None:
        shown, holds, used = [], True, []
        for dataset in BOTH:
            studies = studies_run(finished, edition, (dataset,))
            if len(studies) < len(LEARNERS):
                continue
            used += list(studies.values())
            name = ALL_DATA if {s.vanilla for s in used} == {ALL_DATA} else "vanilla"
            values = {learner: expected(study, name, metric) for (_, learner), study in studies.items()}
            by_learner = ", ".join(f"{learner_title(learner)} {value:.2f}" for learner, value in values.items())
            shown.append(f"{paper.DATASETS[dataset]}: {by_learner}")
            holds = holds and max(values, key=lambda learner: values[learner]) == "der"
        return Answer("; ".join(shown), holds, n_seeds(used), len(shown) == len(BOTH)) if used else None

    return ask


check("der_is_most_accurate", "the highest on both datasets")(_most("accuracy"))
check("der_is_worst_calibrated", "the highest vanilla ECE on both datasets")(_most("ece"))


def _improves(datasets: Sequence[str], exceptions: Sequence[Pair], variation: Variation = MAIN) -> Ask:
    """Whether T-CIL improves on vanilla for every learner and dataset except the exceptions, and not for those."""

    def ask(finished: FinishedRuns, edition: Edition) -> Answer | None:
        studies = studies_run(finished, edition, datasets, variation=variation)
        shown, holds = [], True
        for pair, study in studies.items():
            plain, ours = expected(study, study.vanilla), expected(study, "t-cil")
            shown.append(f"{where(*pair)} {plain:.1f} to {ours:.1f}")
            holds = holds and (ours < plain) == (pair not in exceptions)
        all_run = len(studies) == len(datasets) * len(LEARNERS)
        return Answer(f"ECE: {', '.join(shown)}", holds, n_seeds(list(studies.values())), all_run) if studies else None

    return ask


check("wa_on_tiny_is_the_exception", "lower than vanilla with all but WA on Tiny-ImageNet, and higher there")(
    _improves(EVERY, [("tiny-imagenet", "wa")])
)
check("tasks20_wa_is_the_exception", "lower than vanilla with all but WA, and higher there")(
    _improves(BOTH, [(dataset, "wa") for dataset in BOTH], Variation(many_tasks=True))
)


@check("t_cil_wins_the_grid", "the lowest with every learner and dataset but EEIL and WA on Tiny-ImageNet")
def _grid_wins(finished: FinishedRuns, edition: Edition) -> Answer | None:
    studies = studies_run(finished, edition, EVERY)
    lost, silent = [], 0
    for pair, study in studies.items():
        names = (study.vanilla, *paper.BASELINES, "t-cil")
        errors = {name: error for name in names if (error := mean_of(study, name)) is not None}
        silent += "perturb-ts" not in errors
        if min(errors, key=lambda name: errors[name]) != "t-cil":
            lost.append(pair)
    if not studies:
        return None
    shown = f"T-CIL has the lowest ECE in {len(studies) - len(lost)} of {len(studies)} settings"
    shown += f" ({', '.join(where(*pair) for pair in lost)} excepted)" if lost else ""
    shown += f"; PerturbTS has no answer in {silent}" if silent else ""
    holds = set(lost) <= {("tiny-imagenet", "eeil"), ("tiny-imagenet", "wa")}
    return Answer(shown, holds, n_seeds(list(studies.values())), len(studies) == len(EVERY) * len(LEARNERS))


@check(
    "perturb_ts_is_inconsistent",
    "the highest of the baselines with some learner on CIFAR-100, the lowest with EEIL and WA on Tiny-ImageNet",
)
def _perturb_ts_is_inconsistent(finished: FinishedRuns, edition: Edition) -> Answer | None:
    ranges: dict[Pair, tuple[float, float, float]] = {}  # PerturbTS's ECE, the least and the most of the others
    studies = studies_run(finished, edition, BOTH)
    for pair, study in studies.items():
        others = [expected(study, name) for name in (study.vanilla, *paper.BASELINES) if name != "perturb-ts"]
        error = mean_of(study, "perturb-ts")
        if error is not None:
            ranges[pair] = error, min(others), max(others)
    if not studies:
        return None
    silent = [where(*pair) for pair in studies if pair not in ranges]
    shown = [
        f"{where(*pair)} {error:.1f} (others {least:.1f} to {most:.1f})"
        for pair, (error, least, most) in ranges.items()
    ]
    shown += [f"no answer with {', '.join(silent)}"] if silent else []
    high = any(error > most for (dataset, _), (error, _, most) in ranges.items() if dataset == "cifar100")
    exceptions = [ranges[pair] for pair in (("tiny-imagenet", "eeil"), ("tiny-imagenet", "wa")) if pair in ranges]
    low = all(error < least for error, least, _ in exceptions)
    every = all(("cifar100", learner) in ranges for learner in LEARNERS)  # else a missing one could be the highest
    all_run = len(ranges) == len(BOTH) * len(LEARNERS)
    return Answer("; ".join(shown), high and low, n_seeds(list(studies.values())), all_run, high or every or not low)


@check("perturb_ts_fails_on_cifar10", "no answer after at least half of the tasks")
def _perturb_ts_fails(finished: FinishedRuns, edition: Edition) -> Answer | None:
    study = finished.study(edition, "cifar10", "er")
    if study is None:
        return None
    rows = [run.row(task, "perturb-ts") for run in study.runs for task in range(study.n_tasks)]
    absent = sum(row is None for row in rows)
    return Answer(f"no answer after {absent} of {len(rows)} tasks", 2 * absent >= len(rows), len(study.runs))


@check("near_optimal_ts", "below twice the oracle's after every task with every learner")
def _near_optimal(finished: FinishedRuns, edition: Edition) -> Answer | None:
    shown, worst, studies = [], list[float](), studies_run(finished, edition, BOTH)
    for pair, study in studies.items():
        ours, oracle = (values_by_task(study, name, "ece") for name in ("t-cil", "optimal-ts"))
        ratios = ours / oracle
        worst.append(float(ratios.max()))  # NaN where an answer is missing, which is not below anything
        means = f"{100 * ours.mean():.1f} against {100 * oracle.mean():.1f}"
        shown.append(f"{where(*pair)} {means}, at worst {ratios.max():.1f} times (task {ratios.argmax()})")
    all_run = len(studies) == len(BOTH) * len(LEARNERS)
    holds = all(ratio < 2 for ratio in worst)
    return Answer("; ".join(shown), holds, n_seeds(list(studies.values())), all_run) if studies else None


@check("optimal_ts_is_best", "no calibrator without test labels has a lower mean ECE with any learner or dataset")
def _optimal_is_best(finished: FinishedRuns, edition: Edition) -> Answer | None:
    studies = studies_run(finished, edition, BOTH)
    below, decided = [], True
    for pair, study in studies.items():
        oracle = expected(study, "optimal-ts")
        decided &= not np.isnan(oracle)
        for name, (title, block) in study.titles().items():
            error = mean_of(study, name) if block == RANKED else None
            if error is not None and error < oracle:
                below.append(f"{where(*pair)}: {title} {error:.2f} below {oracle:.2f}")
    if not studies:
        return None
    all_run = len(studies) == len(BOTH) * len(LEARNERS)
    shown = "; ".join(below) or ("none is below it" if decided else "the oracle has no answer after some task")
    return Answer(shown, not below, n_seeds(list(studies.values())), all_run, decided or bool(below))


@check("only_the_papers_policy_works", "T-CIL's is the lowest, the others within a quarter of the best baseline's")
def _policies(finished: FinishedRuns, edition: Edition) -> Answer | None:
    study = finished.study(edition, "cifar100", "er")
    if study is None:
        return None
    names = {"t-cil" if policy == "paper" else f"t-cil[policy={policy}]": t for policy, t in POLICIES.items()}
    errors = {title: value for name, title in names.items() if (value := mean_of(study, name)) is not None}
    if len(errors) < len(names):
        return None
    baselines = {name: value for name in paper.BASELINES if (value := mean_of(study, name)) is not None}
    first = min(baselines, key=lambda name: baselines[name])
    shown = ", ".join(f"{title} {value:.2f}" for title, value in errors.items())
    ours = errors.pop("T-CIL")
    alike = all(abs(value / baselines[first] - 1) <= 0.25 for value in errors.values())
    return Answer(
        f"ECE: {shown}; {study.titles()[first].title} {baselines[first]:.2f}",
        all(ours < value for value in errors.values()) and alike,
        len(study.runs),
    )


@check("magnitude_differences", "the others grow with every task, and T-CIL's is below theirs from the second task on")
def _magnitude_gaps(finished: FinishedRuns, edition: Edition) -> Answer | None:
    analyses = analyses_of(finished, edition)
    gaps = {}
    for policy, title in POLICIES.items():
        by_seed = [[task.epsilon[policy].gap for task in one.tasks] for one in analyses]
        if not analyses or any(gap is None for by_task in by_seed for gap in by_task):
            return None
        gaps[title] = np.mean(np.array(by_seed, dtype=float), axis=0)
    shown = "; ".join(f"{title} {', '.join(f'{v:.4f}' for v in gap)}" for title, gap in gaps.items())
    ours = gaps.pop("T-CIL")
    holds = all(bool((np.diff(gap) > 0).all()) and bool((ours[1:] < gap[1:]).all()) for gap in gaps.values())
    return Answer(shown, holds, len(analyses))
